"""Balance of the files of workers."""

from __future__ import annotations

import itertools
from collections import Counter

import dask
import numpy as np
import pytest
from sharded_files import ROWS, first, policy, read, rows_of

import daskdist
from daskdist import AutoShardPolicy, Dataset, Options, read_parquet, read_text
from daskdist.core.dataset_base import node_of
from daskdist.core.node import walk
from daskdist.errors import ArgumentError
from daskdist.ops.read_files import ReadFiles
from daskdist.passes.autoshard import autoshard
from daskdist.sharding.balance import excess, largest_first
from daskdist.storage.filesystem import Storage


@pytest.fixture
def files(parquet_files):
    return parquet_files(ROWS, row_group=2)


# --- balance ---


def texts(folder, sizes):
    """Write files with the given numbers of lines of 8 bytes; the lines are numbered through all files."""
    paths, start = [], 0
    for number, size in enumerate(sizes):
        paths.append(str(folder / f"{number:04}.txt"))
        with open(paths[-1], "w") as file:
            file.writelines(f"{line:07}\n" for line in range(start, start + size))
        start += size
    return paths


def power_law(number, seed):
    """Return the numbers of lines of files whose sizes follow Zipf's law, in random order."""
    sizes = 4000 / np.arange(1, number + 1)
    return np.random.default_rng(seed).permutation(sizes.astype(int) + 1).tolist()


def splits_of(num_bytes):
    return dask.config.set({"daskdist.split-bytes": num_bytes})


def balanced(ds, num_workers):
    return autoshard(node_of(ds.with_options(Options(balance="bytes"))), AutoShardPolicy.FILE, num_workers, first)


@pytest.mark.parametrize("num_workers", [2, 3, 8])
@pytest.mark.parametrize(("number", "seed"), [(60, 0), (60, 1), (12, 2)])
def test_bytes_are_balanced_and_no_row_is_lost(tmp_path, number, seed, num_workers):
    sizes = power_law(number, seed)
    paths = texts(tmp_path, sizes)
    with splits_of(1024):
        decision, nodes = balanced(read_text(paths), num_workers)
        shares = [[int(line) for line in Dataset(node)] for node in nodes]
    loads = [len(share) for share in shares]
    assert max(loads) <= 1.1 * np.mean(loads)
    assert sorted(itertools.chain(*shares)) == list(range(sum(sizes)))
    # Each worker has its files in the listed order.
    assert all(share == sorted(share) for share in shares)
    assert "assigned largest first, no worker has more than 1.0" in decision.reason


@pytest.mark.parametrize("num_workers", [2, 3])
def test_files_in_turn_are_not_balanced(tmp_path, num_workers):
    paths = texts(tmp_path, [900, 1, 1, 1, 1, 1])
    _, nodes = autoshard(node_of(read_text(paths)), AutoShardPolicy.FILE, num_workers)
    assert max(len(list(Dataset(node))) for node in nodes) > 899


def test_files_stay_whole_where_that_is_balanced(tmp_path):
    paths = texts(tmp_path, [30, 10, 20, 10, 10, 10])
    with splits_of(16):
        decision, nodes = balanced(read_text(paths), 3)
    owned = [[split.file for split in node.splits()] for node in sources(nodes)]
    assert [sorted(set(value)) for value in owned] == [[0], [2, 4], [1, 3, 5]]
    assert "1.00 times the mean" in decision.reason


def sources(nodes):
    return [next(value for value in walk(node) if isinstance(value, ReadFiles)) for node in nodes]


@pytest.mark.parametrize("num_workers", [2, 3, 5])
def test_few_files_are_dealt_in_parts(tmp_path, num_workers):
    paths = texts(tmp_path, [2000, 900])
    with splits_of(512):
        decision, nodes = balanced(read_text(paths), num_workers)
        shares = [[int(line) for line in Dataset(node)] for node in nodes]
    loads = [len(share) for share in shares]
    assert max(loads) <= 1.1 * np.mean(loads)
    assert sorted(itertools.chain(*shares)) == list(range(2900))
    assert decision.by_split == (num_workers > 2)


def test_indivisible_files_stay_whole(parquet_files):
    paths = parquet_files([5000, 1, 1, 1])
    _, nodes = balanced(read_parquet(paths, "id"), 2)
    assert sorted(len(list(Dataset(node))) for node in nodes) == [3, 5000]


@pytest.mark.parametrize("build", ["zip", "twice", "concatenate"])
@pytest.mark.parametrize("num_workers", [2, 3])
def test_sources_that_go_together_are_dealt_together(parquet_files, build, num_workers):
    one = read_parquet(parquet_files([9, 2, 7, 1, 3], row_group=2), "id")
    # The files have the same rows, but other sizes.
    other = read_parquet(parquet_files([9, 2, 7, 1, 3], row_group=3, folder="other", compression="none"), "id")
    ds = {
        "zip": Dataset.zip(one, other),
        "twice": Dataset.zip(one, other).map(lambda a, b: a).concatenate(one),
        "concatenate": one.concatenate(other),
    }[build]
    _, nodes = balanced(ds, num_workers)
    assert rows_of(itertools.chain(*map(Dataset, nodes))) == rows_of(ds)


@pytest.mark.cluster
@pytest.mark.parametrize("num_workers", [2, 3])
def test_balance_on_a_cluster(start_cluster, tmp_path, num_workers):
    ds = read_text(texts(tmp_path, [400, 30, 3, 1, 60, 200])).map(int).batch(300)
    ds = ds.with_options(policy("file", balance="bytes"))
    with daskdist.MultiWorkerMirroredStrategy(start_cluster(num_workers, 1)) as strategy, splits_of(512):
        dist = strategy.distribute_dataset(ds)
        assert "assigned largest first" in dist.explain()
        actual = rows_of(itertools.chain(*[strategy.local_results(step) for step in dist]))
    assert actual == Counter(range(694))


def test_files_a_function_reads_are_dealt_in_turn_all_the_same(files):
    ds = Dataset.from_list(files).flat_map(read)
    decision, nodes = balanced(ds, 2)
    assert "files that a function reads are assigned in turn" in decision.reason
    assert rows_of(itertools.chain(*map(Dataset, nodes))) == rows_of(ds)


def test_a_missing_file_is_reported_when_it_is_read(tmp_path):
    paths = texts(tmp_path, [5, 6, 7])
    ds = read_text(paths)
    (tmp_path / "0001.txt").unlink()
    _, nodes = balanced(ds, 2)
    with pytest.raises(daskdist.errors.FileError, match=r"0001\.txt: not found"):
        list(itertools.chain(*map(Dataset, nodes)))


def test_sizes_of_remote_files(tmp_path):
    import fsspec

    fs = fsspec.filesystem("memory")
    for number, size in enumerate([5, 0, 77]):
        fs.pipe(f"/sizes/{number}.txt", b"x" * size)
    fs.pipe("/sizes/deep/other.txt", b"x" * 9)
    paths = [f"memory://sizes/{name}.txt" for name in ("2", "0", "1", "gone", "deep/other")]
    assert Storage().sizes(paths) == [77, 5, 0, 0, 9]
    fs.rm("/sizes", recursive=True)


def test_balance_is_by_files_or_by_bytes():
    with pytest.raises(ArgumentError, match="balance is 'rows'; give 'files' or 'bytes'"):
        Options(balance="rows")
    assert Options(balance="files").balance == "files"


@pytest.mark.parametrize("num_workers", [7, 100])
def test_largest_first_is_within_a_tenth_of_the_mean(num_workers):
    rng = np.random.default_rng(3)
    sizes = (rng.pareto(1.5, 20_000) * 1000).astype(np.int64)
    sizes = np.minimum(sizes, int(sizes.sum() / num_workers))
    owners = largest_first(sizes, num_workers)
    assert excess(sizes, owners, num_workers) <= 1.1
    assert excess(sizes, np.arange(len(sizes)) % num_workers, num_workers) > excess(sizes, owners, num_workers)


def test_empty_files_do_not_all_go_to_one_worker():
    assert np.bincount(largest_first(np.zeros(12, np.int64), 4)).tolist() == [3] * 4


@pytest.mark.parametrize("balance", ["files", "bytes"])
def test_workers_share_one_list_of_files(tmp_path, balance):
    # All workers' nodes share one list of 20,003 files, which are not opened.
    paths = texts(tmp_path, [1] * 3)
    ds = Dataset(ReadFiles((*paths, *[paths[0]] * 20_000), node_of(read_text(paths)).format))
    _, nodes = autoshard(node_of(ds.with_options(Options(balance=balance))), AutoShardPolicy.FILE, 1000)
    actual = sources(nodes)
    assert all(node.paths is actual[0].paths for node in actual)
    assert sorted(itertools.chain(*[node.files for node in actual])) == list(range(20_003))
    assert all(node.whole is actual[0].whole and not node.whole.__dict__.get("_splits") for node in actual)


def test_a_damaged_file_is_left_out_where_errors_are(tmp_path, parquet_files):
    paths = parquet_files([8, 8, 8, 8], row_group=2)
    with open(paths[1], "wb") as file:
        file.write(b"garbage" * 100)
    for balance in ("files", "bytes"):
        ds = read_parquet(paths, "id").with_options(Options(balance=balance, on_error="skip"))
        _, nodes = autoshard(node_of(ds), AutoShardPolicy.FILE, 2)
        assert rows_of(itertools.chain(*map(Dataset, nodes))) == Counter([*range(8), *range(16, 32)])
