"""Lines of JSON against pyarrow."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.json as pj

import daskdist

from . import Case


def _numbers(path: Path, num_rows: int) -> None:
    draws = np.random.default_rng(0).standard_normal((num_rows, 8))
    with path.open("w") as file:
        for k, row in enumerate(draws.tolist()):
            file.write(json.dumps({**{f"f{c}": round(x, 4) for c, x in enumerate(row)}, "label": k % 10}) + "\n")


def _nested(path: Path, num_rows: int) -> None:
    with path.open("w") as file:
        for k in range(num_rows):
            point = {"x": k / 4, "y": k / 8}
            file.write(json.dumps({"id": k, "name": f"row {k}", "at": point, "tags": [k, k + 1]}) + "\n")


def bare(path: Path) -> int:
    return int(pj.read_json(path, pj.ReadOptions(use_threads=False)).num_rows)


CASES = [
    Case(
        "JSON lines, 9 numbers",
        _numbers,
        lambda path: daskdist.read_json(str(path)),
        bare,
        500_000,
        releases_gil=True,
    ),
    Case(
        "JSON lines, text, objects and lists",
        _nested,
        lambda path: daskdist.read_json(str(path)),
        bare,
        500_000,
        releases_gil=True,
    ),
]
