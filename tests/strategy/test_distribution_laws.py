"""Laws of distribution: for every policy, source and number of replicas, the dataset's rows, cut by the rule."""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path

import dask.array as da
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import mirrored
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

import daskdist
from daskdist import AutoShardPolicy, Dataset, Options, TensorSpec, read_parquet
from daskdist.errors import ShardingError
from daskdist.testing import DistributionLaws, SimulatedWorkers
from daskdist.testing.distribution import Outcome, check_cardinality, check_pieces, check_rows, check_spec

FILE_POLICIES = ["auto", "file", "data", "off"]
POLICIES = ["auto", "data", "off"]


def with_policy(ds: Dataset, policy: str) -> Dataset:
    return ds.with_options(Options(auto_shard_policy=policy))


def check_all(strategy, ds: Dataset) -> Outcome:
    outcome = Outcome.of(strategy, ds)
    check_rows(ds, strategy, outcome)
    check_pieces(outcome)
    check_cardinality(outcome)
    check_spec(outcome)
    return outcome


class Files:
    """Files with rows that are numbered through all files; each file is written once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.parquet = cache(self._parquet)
        self.text = cache(self._text)

    def _parquet(self, number: int, first: int, num_rows: int, row_group: int) -> str:
        path = self.folder / f"{number:03}-{first}-{num_rows}-{row_group}.parquet"
        ids = np.arange(first, first + num_rows)
        pq.write_table(pa.table({"id": ids, "x": (ids / 2).astype(np.float32)}), path, row_group_size=row_group)
        return str(path)

    def _text(self, number: int, first: int, num_rows: int) -> str:
        path = self.folder / f"{number:03}-{first}-{num_rows}.txt"
        path.write_text("".join(f"line {k}\n" for k in range(first, first + num_rows)))
        return str(path)

    def paths(self, kind: str, rows: list[int], row_group: int = 3) -> list[str]:
        starts = list(itertools.accumulate(rows, initial=0))
        make = self.text if kind == "text" else lambda *args: self.parquet(*args, row_group)
        return [make(number, starts[number], count) for number, count in enumerate(rows)]


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("laws"))


def counted(num_rows: int) -> Dataset:
    def generate():
        yield from range(num_rows)

    return Dataset.from_generator(generate, output_signature=TensorSpec((), np.int64))


def interleaved(paths: list[str]) -> Dataset:
    names = Dataset.from_tensor_slices(np.array(paths))
    return names.interleave(lambda name: read_parquet(str(name), "id"), cycle_length=2)


def sources(files: Files, rows: list[int]) -> dict[str, Dataset]:
    """Return a dataset of each kind of source, with the given numbers of rows in files."""
    total = sum(rows)
    return {
        "range": Dataset.range(total),
        "arrays": Dataset.from_tensor_slices({"x": np.arange(total), "y": np.ones((total, 2), np.float32)}),
        "parquet": read_parquet(files.paths("parquet", rows)),
        "text": daskdist.read_text(files.paths("text", rows)),
        "interleave": interleaved(files.paths("parquet", rows)),
        "generator": counted(total),
        "dask": Dataset.from_dask(da.arange(total, chunks=max(total // 3, 1))),
    }


FILE_SOURCES = {"parquet", "text"}
# 21 rows have an incomplete last batch for every batch size and number of replicas below.
ROWS = [7, 3, 6, 5]


class Laws(DistributionLaws):
    """The laws, for which each dataset is distributed once."""

    found: list | None = None

    @pytest.fixture(autouse=True)
    def _files(self, files):
        self.files = files

    def outcomes(self):
        if self.found is None:
            type(self).found = list(super().outcomes())
        return iter(self.found)


class TestEverySource(Laws):
    def datasets(self):
        return [
            with_policy(ds.batch(8), policy)
            for name, ds in sources(self.files, ROWS).items()
            for policy in (FILE_POLICIES if name in FILE_SOURCES else POLICIES)
        ]


class TestEveryTail(Laws):
    def datasets(self):
        rows = read_parquet(self.files.paths("parquet", ROWS), "id")
        tails = [
            rows.shuffle(9, seed=3).batch(4),
            rows.batch(5).shuffle(3, seed=0),
            rows.batch(4).map(lambda x: x * 2),
            rows.filter(lambda x: x % 3 != 0).batch(4),
            rows.repeat(2).batch(6),
            rows.batch(4).repeat(2),
            rows.batch(2).unbatch().batch(7),
            rows.batch(4).concatenate(rows.batch(6)),
            rows.map(lambda x: np.arange(x % 3)).ragged_batch(5),
            rows.batch(4).prefetch(2).rebatch(3),
        ]
        # These operations give other elements for a worker's share of the rows, so they cannot be sharded by file.
        batches = rows.batch(3).batch(2)
        windows = rows.group_by_window(lambda x: x % 2, lambda key, window: window.batch(3), window_size=4)
        return [
            *(with_policy(ds, policy) for ds in tails for policy in FILE_POLICIES),
            *(with_policy(ds, policy) for ds in (batches, windows) for policy in ("data", "off")),
        ]

    def strategies(self):
        return [mirrored(3), SimulatedWorkers([1, 1]), SimulatedWorkers([2, 1])]


class TestBadShares(Laws):
    """Shards without rows, files of very different size, fewer rows than replicas, and none at all."""

    def datasets(self):
        shares = [[0, 9], [9, 0], [0, 0, 0], [1, 0, 0], [40, 1, 1], [1, 1, 40], [0, 5, 0, 5], [1], [2, 1]]
        actual = []
        for rows in shares:
            ds = read_parquet(self.files.paths("parquet", rows), "id").batch(4)
            text = daskdist.read_text(self.files.paths("text", rows)).batch(4)
            actual += [*(with_policy(ds, policy) for policy in ("auto", "data", "off")), with_policy(text, "auto")]
        return [*actual, with_policy(Dataset.range(0).batch(4), "off"), with_policy(Dataset.range(1).batch(4), "data")]

    def strategies(self):
        return [mirrored(4), SimulatedWorkers([1, 1]), SimulatedWorkers([2, 1]), SimulatedWorkers([1, 1, 1])]


# Hypothesis warns if other threads draw random numbers meanwhile, as those of other tests' clusters do.
some = settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


@some
@given(
    rows=st.lists(st.integers(0, 12), min_size=1, max_size=6),
    batch=st.integers(1, 11),
    row_group=st.integers(1, 5),
    replicas=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    policy=st.sampled_from(FILE_POLICIES),
    tail=st.sampled_from(["batch", "map", "shuffle", "shuffle batches", "repeat", "text"]),
)
def test_files_of_any_number_and_size(files, rows, batch, row_group, replicas, policy, tail):
    if tail == "text":
        ds = daskdist.read_text(files.paths("text", rows)).batch(batch)
    else:
        ds = read_parquet(files.paths("parquet", rows, row_group), "id")
        ds = ds.shuffle(5, seed=1).batch(batch) if tail == "shuffle" else ds.batch(batch)
    if tail == "map":
        ds = ds.map(lambda x: x + 1)
    elif tail == "shuffle batches":
        ds = ds.shuffle(2, seed=1)
    elif tail == "repeat":
        ds = ds.repeat(2)
    strategy = mirrored(replicas[0]) if len(replicas) == 1 else SimulatedWorkers(replicas)
    try:
        outcome = check_all(strategy, with_policy(ds, policy))
    except ShardingError:
        # There are too few files and splits for the workers; this is an error only with FILE.
        assert policy == "file"
        event("refused")
        return
    event(f"{policy} is {outcome.distributed.sharding.policy.name}")
    if len(replicas) > 1 and policy != "auto":
        assert outcome.distributed.sharding.policy is AutoShardPolicy[policy.upper()]


@some
@given(
    num_rows=st.integers(0, 40),
    batch=st.integers(1, 17),
    drop_remainder=st.booleans(),
    replicas=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    policy=st.sampled_from(POLICIES),
    kind=st.sampled_from(["range", "arrays", "generator", "dask"]),
)
def test_rows_of_any_number(files, num_rows, batch, drop_remainder, replicas, policy, kind):
    ds = sources(files, [num_rows])[kind].batch(batch, drop_remainder=drop_remainder)
    strategy = mirrored(replicas[0]) if len(replicas) == 1 else SimulatedWorkers(replicas)
    check_all(strategy, with_policy(ds, policy))


# --- on clusters ---


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("num_workers", "replicas", "names"),
    [
        (2, [1, 1], ["range", "arrays", "parquet", "text", "interleave", "generator", "dask"]),
        (2, [2, 1], ["parquet"]),
    ],
    ids=["equal", "unequal"],
)
def test_every_source_on_a_cluster(start_cluster, files, num_workers, replicas, names):
    client = start_cluster(num_workers, max(replicas))
    with daskdist.MultiWorkerMirroredStrategy(client, num_replicas_per_worker=replicas) as strategy:
        for name in names:
            ds = sources(files, ROWS)[name].batch(8)
            for policy in FILE_POLICIES[1:] if name in FILE_SOURCES else POLICIES[1:]:
                check_all(strategy, with_policy(ds, policy))


@pytest.mark.cluster
@pytest.mark.parametrize("rows", [[0, 9], [0, 0], [40, 1], [1]], ids=str)
def test_bad_shares_on_a_cluster(on_cluster, files, rows):
    for policy in ("auto", "data"):
        check_all(on_cluster, with_policy(read_parquet(files.paths("parquet", rows), "id").batch(4), policy))


# --- without end ---


def first_steps(strategy, ds, number):
    steps = itertools.islice(strategy.distribute_dataset(ds), number)
    return [[piece.tolist() for piece in strategy.local_results(step)] for step in steps]


ENDLESS = {
    "data": [[[0, 1], [2, 3]], [[4, 5], [6]], [[0, 1], [2, 3]], [[4, 5], [6]], [[0, 1], [2, 3]]],
    # Each worker repeats its own file: rows 0 to 3, and rows 4 to 6.
    "file": [[[0, 1], [4, 5]], [[2, 3], [6]], [[0, 1], [4, 5]], [[2, 3], [6]], [[0, 1], [4, 5]]],
    "off": [[[0, 1], [0, 1]], [[2, 3], [2, 3]], [[4, 5], [4, 5]], [[6], [6]], [[0, 1], [0, 1]]],
}


@pytest.mark.parametrize("policy", ENDLESS)
def test_endless_datasets(files, policy):
    ds = with_policy(read_parquet(files.paths("parquet", [4, 3]), "id").batch(4).repeat(), policy)
    assert first_steps(SimulatedWorkers([1, 1]), ds, 5) == ENDLESS[policy]


@pytest.mark.cluster
@pytest.mark.parametrize("policy", ENDLESS)
def test_endless_datasets_on_a_cluster(on_cluster, files, policy):
    ds = read_parquet(files.paths("parquet", [4, 3]), "id").batch(4).repeat()
    # With so few rows, a default window would read thousands of epochs ahead.
    ds = ds.with_options(Options(auto_shard_policy=policy, memory_budget_bytes=64))
    assert first_steps(on_cluster, ds, 5) == ENDLESS[policy]


def test_an_endless_dataset_where_one_worker_has_no_rows(files):
    ds = with_policy(read_parquet(files.paths("parquet", [0, 3]), "id").batch(4).repeat(), "file")
    assert first_steps(SimulatedWorkers([1, 1]), ds, 4) == [[[], [0, 1]], [[], [2]]] * 2


# --- the suite itself ---


class Swapped(SimulatedWorkers):
    """A wrong strategy, which returns pieces in the wrong order."""

    def local_results(self, value):
        return super().local_results(value)[::-1]


class Lossy(SimulatedWorkers):
    """A wrong strategy, which loses rows of the first replica."""

    def local_results(self, value):
        first, *others = super().local_results(value)
        return (first[:0], *others)


@pytest.mark.parametrize(
    ("strategy", "law", "words"),
    [
        (
            Swapped([1, 1]),
            "test_pieces_have_the_documented_sizes",
            r"by DATA, replicas \[1, 1\]: in step 0 replica 0 has",
        ),
        (Lossy([1, 1]), "test_rows_are_those_of_the_dataset", "missing"),
        (Lossy([1, 1]), "test_each_step_has_a_row", "a step without rows"),
    ],
)
def test_laws_find_violations(strategy, law, words):
    class Laws(DistributionLaws):
        def datasets(self):
            return [Dataset.range(5).batch(4).concatenate(Dataset.range(1).batch(1))]

        def strategies(self):
            return [strategy]

    with pytest.raises(AssertionError, match=words):
        getattr(Laws(), law)()
