"""Rewrites of pipelines: they give the same elements with less work, which is counted."""

from __future__ import annotations

import dask
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from pipelines import pipelines, uneven

import daskdist
from daskdist import Dataset
from daskdist.core.dataset_base import node_of
from daskdist.core.node import lower, walk
from daskdist.errors import StackError
from daskdist.execute.callers.choose import local_caller, using
from daskdist.execute.callers.graph import record
from daskdist.execute.callers.synchronous import Synchronous
from daskdist.execute.stream.local_iterator import iterate
from daskdist.passes.autoshard import autoshard
from daskdist.passes.fuse import fuse
from daskdist.passes.simplify import simplify
from daskdist.sharding import AutoShardPolicy
from daskdist.testing import elements_of, same_elements, same_multiset

# Hypothesis warns if other threads draw random numbers meanwhile, as those of other tests' clusters do.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module")

# The plans that the optimised plan is compared with: unchanged, and with one of its two rewrites.
STAGES = {
    "plain": lower,
    "fused": lambda node: fuse(lower(node)),
    "simplified": lambda node: lower(simplify(node)),
}


def run(node, primitive):
    with using(Synchronous):
        try:
            return list(iterate(local_caller(node), primitive, 0))
        except StackError:
            return StackError


@given(pipelines())
@settings(max_examples=50, deadline=None)
def test_optimising_does_not_change_elements(pipeline):
    check_stages(pipeline)


@given(uneven())
@settings(max_examples=30, deadline=None)
def test_optimising_does_not_change_uneven_elements(pipeline):
    check_stages(pipeline)


def check_stages(pipeline):
    with pipeline.settings():
        node = node_of(pipeline.dataset())
        optimised = run(node, fuse(lower(simplify(node))))
        for stage, plan in STAGES.items():
            actual = run(node, plan(node))
            # A rewritten pipeline may succeed where a batch does not stack, but not fail where the plain one succeeds.
            if actual is not StackError:
                assert optimised is not StackError, f"{stage} does not fail"
                same_elements(optimised, actual, f"optimised against {stage}")


@given(pipelines())
@settings(max_examples=40, deadline=None)
def test_simplifying_again_changes_nothing(pipeline):
    once = simplify(node_of(pipeline.dataset()))
    assert list(map(str, _chain(simplify(once)))) == list(map(str, _chain(once)))


def _chain(node):
    return [node, *(value for source in node.inputs for value in _chain(source))]


# --- the gain, as tasks ---


@pytest.fixture
def files(tmp_path):
    for number in range(4):
        path = tmp_path / f"{number}.parquet"
        pq.write_table(pa.table({"a": np.arange(10) + 10 * number}), path, row_group_size=5)
    return str(tmp_path / "*.parquet")


def tasks(ds, *, optimised=True):
    """Return the number of tasks of each name in a graph; tasks of elements count as ``"element"``."""
    node = node_of(ds)
    plan = fuse(lower(simplify(node))) if optimised else lower(node)
    recorded = record(plan, "element-0")
    counts: dict[str, int] = {}
    for key in recorded.graph:
        name = str(key[0]).rpartition("-")[0]
        counts[name] = counts.get(name, 0) + 1
    return counts


def total(ds, *, optimised=True):
    return sum(tasks(ds, optimised=optimised).values())


def test_neighbours_are_one_task_a_split(files):
    ds = daskdist.read_parquet(files).map(lambda d: d["a"]).filter(lambda x: x % 2 == 0).map(np.negative)
    assert tasks(ds) == {"read_parquet-map-filter-map": 8, "element": 1}


def test_neighbours_of_a_range_are_one_task():
    ds = Dataset.range(10).map(lambda x: x + 1).map(lambda x: x * 2).batch(5)
    assert tasks(ds) == {"range-map-map": 1, "gather": 2, "element": 2}
    assert sum(tasks(ds, optimised=False).values()) > 5


def test_batches_passed_over_are_not_read(files):
    ds = daskdist.read_parquet(files).batch(5)
    assert tasks(ds.take(2)) == {"read_parquet": 2, "gather": 2, "element": 2}
    plain = tasks(ds, optimised=False)
    assert plain["read_parquet"] == 8


def test_take_after_map_computes_what_it_takes(files):
    seen = []
    ds = daskdist.read_parquet(files).map(lambda d: seen.append(1) or d["a"]).batch(4).map(np.negative).take(1)
    assert [element.tolist() for element in ds] == [[0, -1, -2, -3]]
    assert len(seen) == 4


def test_a_function_after_arranging_is_a_task_for_many_rows():
    # A task for each element would overload the scheduler.
    for ds in (
        Dataset.range(1000).take(500).map(np.negative).batch(50),
        Dataset.range(1000).map(np.negative).take(500).batch(50),
        Dataset.range(250).repeat(2).map(np.negative).batch(50),
        Dataset.range(1000).shuffle(100, seed=1).take(500).map(np.negative).batch(50),
    ):
        assert total(ds) <= 40, ds.explain("simplified")
        assert sum(map(len, dask.compute(ds, scheduler="sync")[0])) == 500


def test_skip_builds_no_batch_it_passes_over(files):
    seen = []
    ds = daskdist.read_parquet(files).batch(5).map(lambda d: seen.append(len(d["a"])) or d["a"])
    kept = list(ds.skip(6))
    assert [value.tolist() for value in kept] == [[30, 31, 32, 33, 34], [35, 36, 37, 38, 39]]
    assert len(seen) == 2


def test_map_after_shuffle_is_fused_with_the_read(files):
    ds = daskdist.read_parquet(files).shuffle(40, seed=0).map(lambda d: d["a"]).batch(10)
    assert tasks(ds) == {"read_parquet-map": 8, "gather": 4, "element": 4}
    assert tasks(ds, optimised=False)["map"] >= 1


def load(name):
    return np.zeros((100, 100), np.float32) if name.endswith("0") else np.ones((100, 100), np.float32)


@pytest.mark.parametrize(
    ("rows", "function", "is_moved"),
    [
        (range(40), lambda x: 2 * x + 1, True),
        (range(40), lambda x: np.broadcast_to(x, 10_000), False),
        ([f"{number}" for number in range(40)], load, False),
        ([f"{number}" for number in range(40)], lambda name: name.encode(), False),
    ],
)
def test_map_after_shuffle_stays_there_if_its_results_may_be_far_larger(rows, function, is_moved):
    # The buffer of the shuffle would be full of images instead of names.
    ds = Dataset.from_tensor_slices(list(rows)).shuffle(40, seed=0).map(function)
    plan = str(ds.explain("simplified"))
    assert (plan.index("map(") < plan.index("shuffle(")) == is_moved
    same_elements(elements_of(node_of(ds), optimised=True), elements_of(node_of(ds)), "map after shuffle")


def test_map_is_not_moved_before_operations_that_may_drop_rows(files):
    # Before a take, a function would run on rows that are not wanted.
    seen = []
    ds = daskdist.read_parquet(files).shuffle(40, seed=0).take(3).map(lambda d: seen.append(1) or d["a"])
    assert len(list(ds)) == 3
    assert len(seen) == 3


def test_map_after_batch_is_in_the_gather_task(files):
    ds = daskdist.read_parquet(files).batch(10).map(lambda d: d["a"])
    assert tasks(ds) == {"read_parquet": 8, "map": 4, "element": 4}


def test_filter_after_shuffle_keeps_its_place():
    # A filter before the shuffle would change the contents of the buffer, and so the order.
    ds = Dataset.range(50).shuffle(10, seed=1).filter(lambda x: x % 2 == 0)
    same_elements(elements_of(node_of(ds), optimised=True), elements_of(node_of(ds)), "filter after shuffle")


def test_map_under_repeat_and_shuffle_of_batches():
    chains = [
        Dataset.range(9).batch(2).shuffle(3, seed=1).map(np.negative),
        Dataset.range(9).repeat(2).shuffle(3, seed=1).map(np.negative),
        Dataset.range(9).shuffle(3, seed=1).prefetch(1).map(np.negative),
        Dataset.range(9).shuffle(3, seed=1).shuffle(3, seed=1).map(np.negative).map(lambda x: x + 1),
        Dataset.range(9).map(np.negative).batch(2).take(3).skip(1).take(1),
    ]
    for ds in chains:
        same_elements(elements_of(node_of(ds), optimised=True), elements_of(node_of(ds)), ds.explain("pipeline"))


def test_a_seed_does_not_depend_on_rewriting():
    plain = Dataset.range(20).shuffle(20, seed=7)
    mapped = Dataset.range(20).shuffle(20, seed=7).map(lambda x: x * 1)
    same_elements(list(mapped), list(plain), "mapped after a shuffle")


def test_explain_shows_every_stage(files):
    ds = daskdist.read_parquet(files).shuffle(8, seed=0).map(lambda d: d["a"]).batch(5).take(2)
    text = ds.explain()
    assert [line for line in text.splitlines() if line.endswith(":")] == ["pipeline:", "simplified:", "primitives:"]
    assert "take(count=10)" in ds.explain("simplified")
    assert "read_parquet-map" in ds.explain("primitives")
    with pytest.raises(ValueError, match="no stage 'end'"):
        ds.explain("end")


# --- sharding as a rewrite ---


@pytest.mark.parametrize("num_workers", [2, 3, 4, 8])
def test_file_shards_are_the_rows(files, num_workers):
    ds = daskdist.read_parquet(files).filter(lambda d: d["a"] % 3 != 0).shuffle(7, seed=1)
    decision, nodes = autoshard(node_of(ds), AutoShardPolicy.FILE, num_workers)
    assert decision.policy is AutoShardPolicy.FILE
    assert decision.by_split == (num_workers > 4)
    assert len(nodes) == num_workers
    same_multiset([element for node in nodes for element in elements_of(node)], elements_of(node_of(ds)), "all shards")


def test_files_go_to_workers_in_turn(files):
    _, nodes = autoshard(node_of(daskdist.read_parquet(files)), AutoShardPolicy.FILE, 2)
    actual = [sorted({int(d["a"]) // 10 for d in elements_of(node)}) for node in nodes]
    assert actual == [[0, 2], [1, 3]]


@given(pipelines(max_operations=4))
@settings(max_examples=40, deadline=None)
def test_operations_that_may_be_sharded_lose_no_row(pipeline):
    """If AUTO chooses FILE, the workers' rows together are the dataset's."""
    if pipeline.source.name != "parquet" or pipeline.reference().met_unmade:
        return
    with dask.config.set({"daskdist.split-bytes": pipeline.split_bytes}):
        node = node_of(pipeline.dataset())
        if any(item.facts.regroups or len(item.inputs) > 1 for item in walk(node)):
            # Each worker forms its own batches and pairs, so their rows cannot be compared.
            return
        decision, nodes = autoshard(node, AutoShardPolicy.AUTO, 2)
        if decision.policy is AutoShardPolicy.FILE:
            rows = [value for share in nodes for value in run(share, lower(share))]
            same_multiset(rows, run(node, lower(node)), "all shards")


@pytest.mark.parametrize("dtype", [">f4", ">i8", "<u2"])
def test_batches_of_two_blocks_have_the_byte_order_of_this_machine(dtype):
    native = np.dtype(dtype).newbyteorder("=")
    rows = Dataset.from_tensor_slices(np.arange(6, dtype=dtype))
    joined = rows.take(4).concatenate(rows)
    seen = []
    for batch in joined.batch(3).map(lambda x: (seen.append(x.dtype.str), x)[1]):
        assert batch.dtype == native
    assert set(seen) == {native.str}
    whole = list(joined.batch(3, drop_remainder=True).batch(3))
    np.testing.assert_array_equal(np.concatenate(whole).ravel(), [0, 1, 2, 3, 0, 1, 2, 3, 4])
