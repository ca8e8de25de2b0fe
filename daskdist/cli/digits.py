"""The training of the demo: digits in files, a network of one hidden layer, and two loops that train it.

Only functions of this module run on workers, so a worker needs nothing but daskdist and NumPy.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from daskdist.dataset import Dataset
from daskdist.ops.with_options import Options
from daskdist.readers.parquet import read_parquet
from daskdist.sharding import policy_of
from daskdist.strategy.current import get_replica_context
from daskdist.strategy.input.dataset import DistributedDataset
from daskdist.strategy.strategy import Strategy

Array = np.ndarray[Any, np.dtype[Any]]
Weights = dict[str, Array]

NUM_FILES: Final = 8
NUM_CLASSES: Final = 10
NUM_HIDDEN: Final = 64
PIXELS: Final = [f"pixel_{row}_{column}" for row in range(8) for column in range(8)]
_MOST_INK: Final = 16.0
_HOLD_OUT_EVERY: Final = 5
# More than the number of rows, so that every order is equally likely.
_SHUFFLE_ROWS: Final = 2048
_LEARNING_RATE: Final = 0.2
_MOMENTUM: Final = 0.9


@dataclass(frozen=True)
class Digits:
    """Handwritten digits of 8 by 8 pixels.

    Parameters
    ----------
    x
        The darkness of each pixel, shape ``(num_rows, 64)``, float64 from 0 to 1.
    y
        The digits, shape ``(num_rows,)``, int64.
    """

    x: Array
    y: Array

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True)
class TrainingStep:
    """The outcome of one step of training.

    Parameters
    ----------
    epoch
        The number of the pass over the data, from 0 on.
    loss
        The mean cross-entropy of its rows.
    num_rows
        The number of rows of all replicas.
    """

    epoch: int
    loss: float
    num_rows: int


# Called with steps as they become known.
Tell = Callable[[Sequence[TrainingStep]], object]


def load() -> tuple[Digits, Digits]:
    """Return the digits to train on, and every fifth, which is held out."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    is_held_out = np.arange(len(y)) % _HOLD_OUT_EVERY == 0
    x, y = x / _MOST_INK, y.astype(np.int64)
    return Digits(x[~is_held_out], y[~is_held_out]), Digits(x[is_held_out], y[is_held_out])


def write_files(digits: Digits, directory: Path) -> list[Path]:
    """Write digits as Parquet files, with a column for each pixel and one for the label, and return their paths."""
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
    """Return shuffled batches ``{"x": (batch, 64), "y": (batch,)}`` of the rows of files."""
    rows = read_parquet(paths, columns={"x": PIXELS, "y": "label"})
    options = Options(auto_shard_policy=policy_of(policy))
    return rows.shuffle(_SHUFFLE_ROWS, seed=seed).batch(batch_size).with_options(options)


def fresh_weights(seed: int) -> Weights:
    """Return an untrained network."""
    draw = np.random.default_rng(seed)
    num_pixels = len(PIXELS)
    return {
        "hidden": draw.normal(0, num_pixels**-0.5, (num_pixels, NUM_HIDDEN)),
        "hidden_bias": np.zeros(NUM_HIDDEN),
        "output": draw.normal(0, NUM_HIDDEN**-0.5, (NUM_HIDDEN, NUM_CLASSES)),
        "output_bias": np.zeros(NUM_CLASSES),
    }


def forward(weights: Weights, x: Array) -> tuple[Array, Array]:
    """Return the hidden layer's values ``(rows, hidden)`` and each digit's log-probability ``(rows, classes)``."""
    hidden = np.tanh(x @ weights["hidden"] + weights["hidden_bias"])
    scores = hidden @ weights["output"] + weights["output_bias"]
    scores -= scores.max(axis=1, keepdims=True)
    return hidden, scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))


def gradients(weights: Weights, batch: dict[str, Array]) -> tuple[Any, Any, Weights]:
    """Compute one replica's part of a step: sums over its rows, so that replicas' sums add up.

    Returns
    -------
    loss, num_rows, gradients
        Sums over the rows of the replica; zeros if it has none.
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


def descended(weights: Weights, speeds: Weights, num_rows: Any, slopes: Weights) -> tuple[Weights, Weights]:
    """Return the network and its velocity after a step of gradient descent with momentum.

    Parameters
    ----------
    weights, speeds
        The weights and the velocity before the step.
    num_rows, slopes
        The results of `gradients`, summed over the replicas.
    """
    speeds = {name: _MOMENTUM * speed - _LEARNING_RATE * slopes[name] / num_rows for name, speed in speeds.items()}
    return {name: weight + speeds[name] for name, weight in weights.items()}, speeds


def train_on_driver(strategy: Strategy, batches: DistributedDataset, num_epochs: int, seed: int, tell: Tell) -> Weights:
    """Train by a loop in this program, which keeps the weights and sends each step to all replicas.

    Parameters
    ----------
    strategy, batches
        The strategy of the replicas, and the batches they train on.
    num_epochs, seed
        The number of passes over the batches, and the seed of the initial weights.
    tell
        Called with the steps whose results have become known.

    Returns
    -------
    weights
        The trained network.
    """
    weights = fresh_weights(seed)
    speeds = {name: np.zeros_like(weight) for name, weight in weights.items()}
    for epoch in range(num_epochs):
        for batch in batches:
            sums = strategy.reduce("SUM", strategy.run(gradients, args=(weights, batch)), axis=None)
            # Fetch the losses together; one by one, each would be a request.
            loss, num_rows, slopes = strategy.local_results(sums)[0]
            weights, speeds = descended(weights, speeds, num_rows, slopes)
            tell([TrainingStep(epoch, float(loss / num_rows), int(num_rows))])
    return weights


def train_on_replicas(
    strategy: Strategy, batches: DistributedDataset, num_epochs: int, seed: int, tell: Tell
) -> Weights:
    """Train like `train_on_driver`, but by a loop on each replica, whose weights stay equal."""
    weights: Weights
    result = strategy.run(replica_loop, args=(batches, num_epochs, seed))
    epochs, losses, num_rows, weights = strategy.local_results(result)[0]
    tell(
        [
            TrainingStep(int(epoch), float(loss), int(rows))
            for epoch, loss, rows in zip(epochs, losses, num_rows, strict=True)
        ]
    )
    return weights


def replica_loop(
    batches: Iterable[dict[str, Array]], num_epochs: int, seed: int
) -> tuple[Array, Array, Array, Weights]:
    """Run the training loop of one replica.

    Returns
    -------
    epochs, losses, num_rows, weights
        For each step the pass, the mean loss and the number of rows of all replicas, shape ``(num_steps,)``; and the
        trained network. They are the same on all replicas.
    """
    context: Any = get_replica_context()
    weights = fresh_weights(seed)
    speeds = {name: np.zeros_like(weight) for name, weight in weights.items()}
    steps = []
    for epoch in range(num_epochs):
        for batch in batches:
            # Reduce loss and gradients in one call, since each call is a message to the other workers.
            loss, num_rows, slopes = context.all_reduce("SUM", gradients(weights, batch))
            weights, speeds = descended(weights, speeds, num_rows, slopes)
            steps.append((epoch, loss / num_rows, num_rows))
    epochs, losses, rows = (np.array(column) for column in zip(*steps, strict=True))
    return epochs, losses, rows, weights


# The place of the loop -> the function that trains.
LOOPS: Final = {"driver": train_on_driver, "replicas": train_on_replicas}


def means_of_epochs(steps: Sequence[TrainingStep]) -> list[float]:
    """Return the mean loss per row of each pass over the data."""
    means = []
    for _, group in itertools.groupby(steps, lambda step: step.epoch):
        epoch = list(group)
        means.append(float(np.average([step.loss for step in epoch], weights=[step.num_rows for step in epoch])))
    return means


def predict(weights: Weights, digits: Digits) -> Array:
    """Return the most likely digit of each image, shape ``(num_rows,)``."""
    likeliest: Array = forward(weights, digits.x)[1].argmax(axis=1)
    return likeliest
