"""The job of the demo: digits in files, a network of one hidden layer, and the loop that trains it.

What runs on workers are functions of this module, so a worker needs daskdist and NumPy and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from daskdist.dataset import Dataset
from daskdist.ops.with_options import Options
from daskdist.readers.parquet import read_parquet
from daskdist.sharding import policy_of
from daskdist.strategy.distributed import DistributedDataset
from daskdist.strategy.strategy import Strategy

Array = np.ndarray[Any, np.dtype[Any]]
Weights = dict[str, Array]

NUM_FILES: Final = 8
NUM_CLASSES: Final = 10
NUM_HIDDEN: Final = 64
PIXELS: Final = [f"pixel_{row}_{column}" for row in range(8) for column in range(8)]
_MOST_INK: Final = 16.0
_HOLD_OUT_EVERY: Final = 5
# More than there are: every order is equally likely.
_SHUFFLE_ROWS: Final = 2048
_LEARNING_RATE: Final = 0.2
_MOMENTUM: Final = 0.9


@dataclass(frozen=True)
class Digits:
    """Handwritten digits of 8 by 8 pixels.

    Parameters
    ----------
    x
        Ink of each pixel, shape ``(num_rows, 64)``, float64 from 0 to 1.
    y
        Which digit it is, shape ``(num_rows,)``, int64.
    """

    x: Array
    y: Array

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True)
class Step:
    """What one step of training came to.

    Parameters
    ----------
    epoch
        Which pass over the data it belongs to, from 0.
    loss
        The mean cross-entropy of its rows.
    num_rows
        The rows of all replicas.
    weights
        The network after it.
    """

    epoch: int
    loss: float
    num_rows: int
    weights: Weights


def load() -> tuple[Digits, Digits]:
    """The digits to train on, and every fifth, which is held out."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    is_held_out = np.arange(len(y)) % _HOLD_OUT_EVERY == 0
    x, y = x / _MOST_INK, y.astype(np.int64)
    return Digits(x[~is_held_out], y[~is_held_out]), Digits(x[is_held_out], y[is_held_out])


def write_files(digits: Digits, directory: Path) -> list[Path]:
    """Write digits as Parquet files, a column a pixel and one for the label, and give their paths."""
    import pyarrow
    import pyarrow.parquet

    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for number, rows in enumerate(np.array_split(np.arange(len(digits)), NUM_FILES)):
        columns = {name: digits.x[rows, place] for place, name in enumerate(PIXELS)}
        paths.append(directory / f"digits-{number}.parquet")
        pyarrow.parquet.write_table(pyarrow.table({**columns, "label": digits.y[rows]}), paths[-1])
    return paths


def read_batches(paths: Sequence[Path], batch_size: int, seed: int, policy: str) -> Dataset:
    """Shuffled batches ``{"x": (batch, 64), "y": (batch,)}`` of the rows of files."""
    rows = read_parquet(paths, columns={"x": PIXELS, "y": "label"})
    options = Options(auto_shard_policy=policy_of(policy))
    return rows.shuffle(_SHUFFLE_ROWS, seed=seed).batch(batch_size).with_options(options)


def fresh_weights(seed: int) -> Weights:
    """A network that has learned nothing."""
    draw = np.random.default_rng(seed)
    num_pixels = len(PIXELS)
    return {
        "hidden": draw.normal(0, num_pixels**-0.5, (num_pixels, NUM_HIDDEN)),
        "hidden_bias": np.zeros(NUM_HIDDEN),
        "output": draw.normal(0, NUM_HIDDEN**-0.5, (NUM_HIDDEN, NUM_CLASSES)),
        "output_bias": np.zeros(NUM_CLASSES),
    }


def forward(weights: Weights, x: Array) -> tuple[Array, Array]:
    """The hidden layer's values ``(rows, hidden)`` and each digit's log-probability ``(rows, classes)``."""
    hidden = np.tanh(x @ weights["hidden"] + weights["hidden_bias"])
    scores = hidden @ weights["output"] + weights["output_bias"]
    scores -= scores.max(axis=1, keepdims=True)
    return hidden, scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))


def gradients(weights: Weights, batch: dict[str, Array]) -> tuple[Any, Any, Weights]:
    """One replica's part of a step: sums over its rows, so that replicas' sums add up.

    Returns
    -------
    loss, num_rows, gradients
        Zeros where the replica has no rows.
    """
    x, y = batch["x"], batch["y"]
    rows = np.arange(len(y))
    hidden, log_chances = forward(weights, x)
    loss = -log_chances[rows, y].sum()
    at_output = np.exp(log_chances)
    at_output[rows, y] -= 1
    at_hidden = at_output @ weights["output"].T * (1 - hidden**2)
    sums = {
        "hidden": x.T @ at_hidden,
        "hidden_bias": at_hidden.sum(axis=0),
        "output": hidden.T @ at_output,
        "output_bias": at_output.sum(axis=0),
    }
    return loss, len(y), sums


def train(strategy: Strategy, batches: DistributedDataset, num_epochs: int, seed: int) -> Iterator[Step]:
    """Train by gradient descent with momentum, all replicas in step, the weights kept here."""
    weights = fresh_weights(seed)
    speeds = {name: np.zeros_like(weight) for name, weight in weights.items()}
    for epoch in range(num_epochs):
        for batch in batches:
            sums = strategy.reduce("SUM", strategy.run(gradients, args=(weights, batch)), axis=None)
            # Together: one by one they would be fetched one by one.
            loss, num_rows, slopes = strategy.local_results(sums)[0]
            for name, slope in slopes.items():
                speeds[name] = _MOMENTUM * speeds[name] - _LEARNING_RATE * slope / num_rows
            weights = {name: weight + speeds[name] for name, weight in weights.items()}
            yield Step(epoch, float(loss / num_rows), int(num_rows), weights)


def predict(weights: Weights, digits: Digits) -> Array:
    """Which digit each is taken for, shape ``(num_rows,)``."""
    likeliest: Array = forward(weights, digits.x)[1].argmax(axis=1)
    return likeliest
