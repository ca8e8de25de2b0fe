"""Images in folders, flipped at random, by PyTorch's DataLoader with two worker processes.

Each line of the input starts a pass; at its end, the seconds before its first batch are printed.
"""

from __future__ import annotations

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
    loader = DataLoader(Flipped(sys.argv[1]), 64, shuffle=True, num_workers=2, persistent_workers=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        batches = iter(loader)
        next(batches)
        first = time.perf_counter() - start
        for _ in batches:
            pass
        print(first, flush=True)


if __name__ == "__main__":
    main()
