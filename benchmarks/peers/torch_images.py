"""Images in folders, flipped at random, by PyTorch's DataLoader with two worker processes: images a second."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset


class Flipped(Dataset):
    def __init__(self, folder: str) -> None:
        self.files = sorted(Path(folder).glob("*/*.jpg"))
        classes = sorted({file.parent.name for file in self.files})
        self.labels = [classes.index(file.parent.name) for file in self.files]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, number: int):
        image = torch.from_numpy(np.array(Image.open(self.files[number]).convert("RGB")))
        return image.flip(1) if torch.rand(()) < 0.5 else image, self.labels[number]


def main() -> None:
    folder, repeats = sys.argv[1], int(sys.argv[2])
    loader = DataLoader(Flipped(folder), 64, shuffle=True, num_workers=2, persistent_workers=True)
    rates = []
    # The first pass starts the processes, so it is not counted.
    for _ in range(repeats + 1):
        start = time.perf_counter()
        number = sum(len(images) for images, _ in loader)
        rates.append(number / (time.perf_counter() - start))
    print(json.dumps(rates[1:]))


if __name__ == "__main__":
    main()
