"""The training of the demo: digits in files, a network of one hidden layer, and two loops that train it.

Only functions of this module run on workers, so a worker needs nothing but daskdist and NumPy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from daskdist.dataset import Dataset
from daskdist.ops.with_options import Options
from daskdist.readers.parquet import read_parquet
from daskdist.sharding import policy_of
from daskdist.storage.libraries import pa, pq
from daskdist.strategy.current import get_replica_context
from daskdist.strategy.input.dataset import DistributedDataset
from daskdist.strategy.strategy import Strategy

Array = np.ndarray[Any, np.dtype[Any]]
Weights = dict[str, Array]
# The darkness ``x`` of each pixel from 0 to 1, shape (num_rows, 64), and the digits ``y``, shape (num_rows,).
Digits = dict[str, Array]

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


class TrainingStep(NamedTuple):
    """The number of the pass over the data, the mean cross-entropy of the rows of a step, and their number."""

    epoch: int
    loss: float
    num_rows: int


def load() -> tuple[Digits, Digits]:
    """Return the digits to train on, and every fifth, which is held out."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    is_held_out = np.arange(len(y)) % _HOLD_OUT_EVERY == 0
    x, y = x / _MOST_INK, y.astype(np.int64)
    return {"x": x[~is_held_out], "y": y[~is_held_out]}, {"x": x[is_held_out], "y": y[is_held_out]}


def write_files(digits: Digits, directory: Path) -> list[Path]:
    """Write digits as Parquet files, with a column for each pixel and one for the label, and return their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for number, rows in enumerate(np.array_split(np.arange(len(digits["y"])), NUM_FILES)):
        columns = {name: digits["x"][rows, place] for place, name in enumerate(PIXELS)}
        paths.append(directory / f"digits-{number}.parquet")
        pq.write_table(pa.table({**columns, "label": digits["y"][rows]}), paths[-1])
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


def gradients(weights: Weights, batch: Digits) -> tuple[Any, Any, Weights]:
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


def train(
    batches: Iterable[Any], num_epochs: int, seed: int, sums_of: Callable[[Weights, Any], Any]
) -> tuple[list[TrainingStep], Weights]:
    """Train by gradient descent with momentum.

    Parameters
    ----------
    batches
        The batches of each pass.
    num_epochs, seed
        The number of passes over the batches, and the seed of the initial weights.
    sums_of
        Returns the results of `gradients` for a batch, summed over the replicas.

    Returns
    -------
    steps, weights
        The steps, and the trained network.
    """
    weights = fresh_weights(seed)
    speeds = {name: np.zeros_like(weight) for name, weight in weights.items()}
    steps = []
    for epoch in range(num_epochs):
        for batch in batches:
            loss, num_rows, slopes = sums_of(weights, batch)
            speeds = {
                name: _MOMENTUM * speed - _LEARNING_RATE * slopes[name] / num_rows for name, speed in speeds.items()
            }
            weights = {name: weight + speeds[name] for name, weight in weights.items()}
            steps.append(TrainingStep(epoch, float(loss / num_rows), int(num_rows)))
    return steps, weights


def train_on_driver(
    strategy: Strategy, batches: DistributedDataset, num_epochs: int, seed: int
) -> tuple[list[TrainingStep], Weights]:
    """Train by a loop in this program, which keeps the weights and sends each step to all replicas."""

    def sums_of(weights: Weights, batch: Any) -> Any:
        sums = strategy.reduce("SUM", strategy.run(gradients, args=(weights, batch)), axis=None)
        # Fetch the losses together; one by one, each would be a request.
        return strategy.local_results(sums)[0]

    return train(batches, num_epochs, seed, sums_of)


def train_on_replicas(
    strategy: Strategy, batches: DistributedDataset, num_epochs: int, seed: int
) -> tuple[list[TrainingStep], Weights]:
    """Train like `train_on_driver`, but by a loop on each replica, whose weights stay equal."""
    columns, weights = strategy.local_results(strategy.run(replica_loop, args=(batches, num_epochs, seed)))[0]
    return [TrainingStep(*step) for step in zip(*(column.tolist() for column in columns), strict=True)], weights


def replica_loop(batches: Iterable[Digits], num_epochs: int, seed: int) -> tuple[list[Array], Weights]:
    """Train on one replica; return the columns of `TrainingStep` of all steps, shape ``(num_steps,)``, and the network.

    They are the same on all replicas.
    """
    context: Any = get_replica_context()
    # Reduce loss and gradients in one call, since each call is a message to the other workers.
    steps, weights = train(
        batches, num_epochs, seed, lambda weights, batch: context.all_reduce("SUM", gradients(weights, batch))
    )
    return [np.array(column) for column in zip(*steps, strict=True)], weights


# The place of the loop -> the function that trains.
LOOPS: Final = {"driver": train_on_driver, "replicas": train_on_replicas}


def means_of_epochs(steps: Sequence[TrainingStep]) -> list[float]:
    """Return the mean loss per row of each pass over the data."""
    epochs, losses, num_rows = map(np.array, zip(*steps, strict=True))
    sums = np.bincount(epochs, weights=losses * num_rows) / np.bincount(epochs, weights=num_rows)
    means: list[float] = sums.tolist()
    return means


def predict(weights: Weights, digits: Digits) -> Array:
    """Return the most likely digit of each image, shape ``(num_rows,)``."""
    likeliest: Array = forward(weights, digits["x"])[1].argmax(axis=1)
    return likeliest
