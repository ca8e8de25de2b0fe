"""Files that change after a dataset was distributed."""

from __future__ import annotations

import os

import numpy as np
import pytest

import daskdist
from daskdist import Options, errors
from daskdist.core.dataset_base import node_of
from daskdist.passes.autoshard import autoshard
from daskdist.sharding import AutoShardPolicy

NUMBERS = range(200)


@pytest.fixture(params=["csv", "npy", "parquet"])
def written(request, tmp_path):
    """Write 200 numbers to ten files; return them, and a dataset of the numbers."""
    paths = [str(tmp_path / f"{k}.{request.param}") for k in range(10)]
    for k, path in enumerate(paths):
        values = np.arange(20 * k, 20 * k + 20)
        if request.param == "csv":
            with open(path, "w") as file:
                file.write("n\n" + "".join(f"{value}\n" for value in values))
        elif request.param == "npy":
            np.save(path, values)
        else:
            daskdist.Dataset.from_tensor_slices({"n": values}).to_parquet(tmp_path / "part")
            os.rename(next((tmp_path / "part").glob("*.parquet")), path)
    read = getattr(daskdist, f"read_{request.param}")
    return paths, read(paths, columns=None).map(lambda row: row["n"] if isinstance(row, dict) else row)


def change(path):
    with open(path, "rb") as file:
        content = file.read()
    with open(path, "wb") as file:
        file.write(content.replace(b"\n41\n", b"\n14\n") if path.endswith("csv") else content)
    # The same size, and another time.
    os.utime(path, ns=(0, 0))


def taken(shares):
    return sorted(int(x) for node in shares for x in daskdist.Dataset(node))


@pytest.mark.parametrize("balance", ["files", "bytes"])
def test_every_division_of_the_files_is_of_the_listed_ones(written, balance):
    paths, ds = written
    node = node_of(ds.with_options(Options(balance=balance)))
    for num_workers in (2, 3):
        _, shares = autoshard(node, AutoShardPolicy.FILE, num_workers)
        assert taken(shares) == list(NUMBERS)
    change(paths[2])
    _, shares = autoshard(node, AutoShardPolicy.FILE, 4)
    with pytest.raises(errors.FileError, match=r"2\..*was changed since it was listed"):
        taken(shares)
    with pytest.raises(errors.FileError, match=r"2\..*was changed since it was listed"):
        list(ds)


@pytest.mark.cluster
@pytest.mark.parametrize("policy", ["FILE", "DATA", "AUTO", "OFF"])
def test_a_dataset_that_is_distributed_again(written, on_cluster, policy):
    paths, ds = written
    ds = ds.batch(10).with_options(Options(auto_shard_policy=policy))
    first = on_cluster.distribute_dataset(ds)

    def numbers(distributed):
        return [int(x) for batch in distributed for part in on_cluster.local_results(batch) for x in np.asarray(part)]

    assert set(numbers(first)) == set(NUMBERS)
    change(paths[5])
    for again in (first, on_cluster.distribute_dataset(ds)):
        with pytest.raises(errors.FileError, match=r"5\..*was changed since it was listed"):
            numbers(again)
