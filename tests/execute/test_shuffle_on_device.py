"""Rows that are shuffled on a device have the host's order and bits; blocks are uploaded once, and memory is freed."""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import strict_device
from conftest import every_pair
from distributed import Client
from hypothesis import HealthCheck, Phase, given, settings
from pipelines import pipelines
from strict_device import LIMITS, TAKEN, StrictDevice

from daskdist import Dataset, DeviceAssignment, MirroredStrategy, MultiWorkerMirroredStrategy, Options
from daskdist.core.block import Block
from daskdist.core.dataset_base import node_of
from daskdist.core.selection import lazy_shuffle, permutation
from daskdist.core.selection.block_ref import BlockRef
from daskdist.core.selection.groups import Groups
from daskdist.core.selection.lazy_shuffle import shuffled
from daskdist.core.selection.numbered_rows import NumberedSelection
from daskdist.core.selection.rows import Selection
from daskdist.core.selection.runs import concat
from daskdist.core.structure import LONE
from daskdist.devices import device, is_on_device, on_host
from daskdist.errors import ArgumentError, DeviceMemoryError, StackError
from daskdist.execute.callers.choose import local_caller
from daskdist.execute.callers.submit import workers_of
from daskdist.execute.callers.synchronous import Synchronous
from daskdist.execute.callers.threads import Threads
from daskdist.execute.resume.position import StreamPosition
from daskdist.execute.stream.bundle_builder import BundleBuilder
from daskdist.execute.stream.gather import Picks, gather
from daskdist.execute.stream.interpreter import Interpreter
from daskdist.execute.transfer import gather_on_device
from daskdist.execute.transfer.copier import Channel
from daskdist.execute.transfer.gather_on_device import (
    DeviceGather,
    describe_row_order,
    device_gather_of,
    with_device_gathers,
)
from daskdist.ops import global_shuffle, shuffle
from daskdist.passes.plan import plan
from daskdist.testing import same_elements

pytestmark = [
    pytest.mark.filterwarnings("ignore:Do not use the `random` module"),
    pytest.mark.usefixtures("strict_and_late"),
]


def _by_steps(dataset: Dataset, epoch: int, names: Sequence[str], caller: Any = None) -> list[list[Any]]:
    """Return the leaves of each consumer, step by step; None for a step without rows."""
    primitive = plan(node_of(dataset))
    caller = caller or local_caller(node_of(dataset))
    hooks = with_device_gathers(list(map(device, names)), primitive, True)[1]
    start = StreamPosition((epoch,), [])
    builder = BundleBuilder(Interpreter(caller), primitive, start, (None,) * len(names), device_gathers=hooks)
    actual = []
    for bundle in builder:
        for step in range(len(bundle)):
            row = []
            for lane in bundle.lanes:
                place = lane.places[step]
                row.append(None if place < 0 else caller.result(lane.ref.handle).item(place))  # type: ignore[union-attr]
            actual.append(row)
    caller.close()
    return actual


def _assert_same(found: list[list[Any]], expected: list[list[Any]]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        for leaves, wanted in zip(one, other, strict=True):
            assert (leaves is None) == (wanted is None)
            for leaf, want in zip(leaves or (), wanted or (), strict=True):
                leaf = on_host(leaf)
                assert isinstance(leaf, (np.ndarray, np.generic))
                assert leaf.dtype == want.dtype
                assert np.array_equal(leaf, want)


def _table(num_rows: int) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    return {
        "id": np.arange(num_rows),
        "x": rng.normal(size=(num_rows, 3)).astype(np.float32),
        "small": rng.integers(0, 255, num_rows).astype(np.uint8),
        "yes": rng.integers(0, 2, num_rows).astype(bool),
        "wave": (rng.normal(size=num_rows) + 1j).astype(np.complex64),
    }


def _of_blocks(num_rows: int, rows_a_block: int) -> Dataset:
    """Return rows that are read in blocks of a number of rows."""
    starts = range(0, num_rows, rows_a_block)
    return functools.reduce(Dataset.concatenate, [Dataset.range(start, start + rows_a_block) for start in starts])


ROWS = _table(1000)

PIPELINES: dict[str, Callable[[], Dataset]] = {
    "batch": lambda: Dataset.from_tensor_slices(ROWS).batch(64),
    "shuffle": lambda: Dataset.from_tensor_slices(ROWS).shuffle(300, seed=1).batch(32),
    "take_skip": lambda: Dataset.from_tensor_slices(ROWS).shuffle(100, seed=2).skip(11).take(500).batch(7),
    "shard": lambda: Dataset.from_tensor_slices(ROWS).shard(3, 1).batch(10, drop_remainder=True),
    "repeat": lambda: Dataset.from_tensor_slices(ROWS).take(90).shuffle(50, seed=3).repeat(3).batch(16),
    "rebatch": lambda: Dataset.from_tensor_slices(ROWS).batch(50).rebatch([7, 3]),
    "zip": lambda: Dataset.zip((Dataset.from_tensor_slices(ROWS), Dataset.range(1000))).shuffle(200, seed=4).batch(9),
    "interleave": lambda: (
        Dataset.range(6).interleave(lambda k: Dataset.range(k * 40, k * 40 + 40), cycle_length=3).batch(8)
    ),
    "concatenate": lambda: Dataset.range(100).concatenate(Dataset.range(100, 250)).shuffle(64, seed=5).batch(12),
    "shuffled_batches": lambda: Dataset.from_tensor_slices(ROWS).batch(10).shuffle(20, seed=6),
    "batches_of_batches": lambda: Dataset.from_tensor_slices(ROWS).shuffle(99, seed=7).batch(5).batch(4),
    "rows": lambda: Dataset.from_tensor_slices(ROWS).shuffle(50, seed=8).take(80),
    "mapped": lambda: Dataset.range(300).map(lambda x: (x, x * 2.5)).shuffle(70, seed=9).batch(20),
    "small_blocks": lambda: _of_blocks(240, 4).shuffle(60, seed=10).batch(25),
    "all": lambda: Dataset.from_tensor_slices(ROWS).shuffle(1000, seed=12).batch(70),
    "all_of_blocks": lambda: _of_blocks(240, 24).shuffle(300, seed=13).batch(100),
    "all_of_other_blocks": lambda: Dataset.range(250).concatenate(Dataset.range(9)).shuffle(300, seed=14).batch(100),
    "all_twice": lambda: Dataset.from_tensor_slices(ROWS).cache().shuffle(1000, seed=15).repeat(2).batch(64),
    "all_of_what_is_left": lambda: Dataset.range(300).shuffle(200, seed=16).shuffle(300, seed=17).batch(90),
    "global": lambda: (
        _of_blocks(240, 24).map(lambda x: x + 0.5, vectorized=True).cache().global_shuffle(seed=18).batch(100)
    ),
    "global_of_batches": lambda: _of_blocks(240, 24).batch(7).global_shuffle(seed=19),
    "window": lambda: Dataset.range(60).window(4).flat_map(lambda w: w.batch(4)).shuffle(5, seed=11),
}


def _worked_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(permutation, "_SMALL", 2)
    monkeypatch.setattr(shuffle, "_MOST_DRAWN", 2)
    monkeypatch.setattr(global_shuffle, "_MOST_SENT", 2)
    monkeypatch.setattr(lazy_shuffle, "_FEW", 0)


@pytest.fixture(params=["drawn", "worked out"])
def orders(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Use orders of few rows as they are, which are drawn, or computed like those of many rows."""
    if request.param == "worked out":
        _worked_out(monkeypatch)
    return str(request.param)


@pytest.mark.parametrize(
    ("name", "num_threads", "orders"),
    every_pair(list(PIPELINES), [0, 2], ["drawn", "worked out"]),
    indirect=["orders"],
)
def test_the_order_and_the_bits_are_those_of_the_host(name: str, num_threads: int, orders: str) -> None:
    dataset = PIPELINES[name]()

    def caller() -> Any:
        return Threads(num_threads) if num_threads else Synchronous()

    for epoch in range(2):
        expected = _by_steps(dataset, epoch, ["CPU:0"], caller())
        _assert_same(_by_steps(dataset, epoch, ["STRICT:0"], caller()), expected)
    expected = _by_steps(dataset, 0, ["CPU:0", "CPU:1", "CPU:2"], caller())
    _assert_same(_by_steps(dataset, 0, ["STRICT:0", "STRICT:1", "CPU:0"], caller()), expected)


@given(pipelines())
@settings(
    max_examples=80, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), phases=[Phase.generate]
)
def test_any_pipeline_gives_the_same_elements(pipeline: Any) -> None:
    with pipeline.settings():
        try:
            dataset = pipeline.dataset().shuffle(6, seed=1)
            expected: Any = _by_steps(dataset, 0, ["CPU:0", "CPU:1"], Synchronous())
        except Exception as error:
            expected = error
        if isinstance(expected, Exception):
            with pytest.raises(type(expected)):
                _by_steps(pipeline.dataset().shuffle(6, seed=1), 0, ["STRICT:0", "STRICT:1"], Synchronous())
            return
        actual = _by_steps(dataset, 0, ["STRICT:0", "STRICT:1"], Synchronous())
    host = [tuple(map(on_host, leaves or ())) for row in actual for leaves in row]
    same_elements(host, [tuple(leaves or ()) for row in expected for leaves in row])


def test_leaves_are_on_the_device_if_possible() -> None:
    text = {"name": np.array([f"row {k}" for k in range(100)]), "id": np.arange(100), "half": np.zeros(100, np.float16)}
    dataset = Dataset.from_tensor_slices(text).shuffle(30, seed=1).batch(8)
    actual = _by_steps(dataset, 0, ["STRICT:0"])
    _assert_same(actual, _by_steps(dataset, 0, ["CPU:0"]))
    half, number, name = actual[0][0]
    assert is_on_device(number)
    assert isinstance(name, np.ndarray)
    # The device lacks float16.
    assert isinstance(half, np.ndarray)


def test_rows_of_different_lengths_stay_on_the_host() -> None:
    dataset = Dataset.range(40).map(lambda x: (x, np.arange(x % 3 + 1)), vectorized=False).shuffle(10, seed=1).batch(1)
    actual = _by_steps(dataset, 0, ["STRICT:0"])
    _assert_same(actual, _by_steps(dataset, 0, ["CPU:0"]))
    assert is_on_device(actual[0][0][0])
    assert isinstance(actual[0][0][1], np.ndarray)
    with pytest.raises(StackError, match=r"their leaf \[1\] occurs as"):
        _by_steps(dataset.unbatch().batch(5), 0, ["STRICT:0"])


def test_results_computed_at_the_end_stay_on_the_host() -> None:
    dataset = Dataset.range(100).shuffle(10, seed=1).batch(8).map(lambda x: x + 1)
    assert with_device_gathers([StrictDevice(0)], plan(node_of(dataset)), True)[1] == []
    assert with_device_gathers([device("CPU:0")], plan(node_of(dataset).source), True)[1] == []  # type: ignore[attr-defined]


class Counting(Synchronous):
    """A caller with small bundles, which counts the blocks that are read and those that are compacted from others."""

    bundle_bytes = 4096

    def __init__(self) -> None:
        super().__init__()
        self.num_read = self.num_compacted = 0

    def source(self, function: Any, *args: Any, name: str, **options: Any) -> Any:
        self.num_read += 1
        return super().source(function, *args, name=name, **options)

    def call(self, function: Any, handles: Any, *args: Any, name: str, **kwargs: Any) -> Any:
        self.num_compacted += name == "compact"
        return super().call(function, handles, *args, name=name, **kwargs)


def test_each_block_is_uploaded_once() -> None:
    dataset = _of_blocks(60_000, 2_000).shuffle(10_000, seed=1).batch(500)
    caller = Counting()
    actual = _by_steps(dataset, 0, ["STRICT:0"], caller)
    assert caller.num_compacted > 2
    assert caller.num_read >= 30
    # Blocks that were compacted before any of their rows was requested are uploaded too.
    assert caller.num_read <= device_gather_of(StrictDevice(0)).num_uploads <= caller.num_read + 2
    _assert_same(actual, _by_steps(dataset, 0, ["CPU:0"], Counting()))


def test_each_device_is_given_each_block_once() -> None:
    dataset = _of_blocks(8_000, 500).shuffle(1_000, seed=1).batch(20)
    caller = Counting()
    _by_steps(dataset, 0, ["STRICT:0", "STRICT:1"], caller)
    for index in (0, 1):
        num_uploads = device_gather_of(StrictDevice(index)).num_uploads
        assert caller.num_read <= num_uploads <= caller.num_read + caller.num_compacted


def test_memory_comes_back_while_blocks_go_and_at_the_end() -> None:
    gc.collect()
    before, most = TAKEN.get(0, 0), 0
    rows = np.arange(20_000).repeat(100).reshape(-1, 100)
    parts = [Dataset.from_tensor_slices(rows[start : start + 200]) for start in range(0, 20_000, 200)]
    dataset = functools.reduce(Dataset.concatenate, parts).shuffle(600, seed=1).batch(50)
    primitive = plan(node_of(dataset))
    hooks = with_device_gathers([StrictDevice(0)], primitive, True)[1]
    builder = BundleBuilder(Interpreter(Counting()), primitive, StreamPosition((0,), []), device_gathers=hooks)
    for _ in builder:
        most = max(most, TAKEN[0] - before)
    # The buffer holds half a megabyte of the 16 MB, in blocks of which some have only few rows left.
    assert 500_000 < most < 5_000_000
    del builder, _
    gc.collect()
    assert TAKEN[0] == before


@pytest.mark.usefixtures("orders")
@pytest.mark.parametrize("buffer_size", [100, 1000])
def test_kept_blocks_stay_on_the_device_for_the_next_pass(buffer_size: int) -> None:
    dataset = _of_blocks(1000, 125).cache().shuffle(buffer_size, seed=1).batch(50)
    made = device_gather_of(StrictDevice(0))
    _by_steps(dataset, 0, ["STRICT:0"], Synchronous())
    first = made.num_uploads
    _by_steps(dataset, 1, ["STRICT:0"], Synchronous())
    again, locate = made.num_uploads - first, TAKEN[0]
    _by_steps(dataset, 2, ["STRICT:0"], Synchronous())
    assert made.num_uploads - first == again == 0
    gc.collect()
    assert TAKEN[0] <= locate


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Record the parts of orders that a device computes."""
    actual: list[tuple[int, int]] = []
    permuted = StrictDevice.permuted

    def noted(self: StrictDevice, order: Any, start: int, stop: int) -> Any:
        actual.append((start, stop))
        return permuted(self, order, start, stop)

    monkeypatch.setattr(StrictDevice, "permuted", noted)
    return actual


@pytest.mark.parametrize("name", ["all", "all_of_blocks", "all_of_other_blocks", "global"])
def test_the_order_of_many_rows_is_computed_on_the_device(
    name: str, parts: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = PIPELINES[name]()
    # By default, the host draws orders of so few rows.
    _by_steps(dataset, 0, ["STRICT:0"], Synchronous())
    assert parts == []
    _worked_out(monkeypatch)
    _by_steps(dataset, 0, ["CPU:0"], Synchronous())
    assert parts == []
    sizes = [row[0][0].shape[0] for row in _by_steps(dataset, 0, ["STRICT:0"], Synchronous())]
    # The parts are consecutive and end where batches end.
    assert parts
    assert [start for start, _ in parts] == [0, *[stop for _, stop in parts[:-1]]]
    assert {stop for _, stop in parts} <= set(np.cumsum(sizes).tolist())


def test_each_device_computes_its_own_part(parts: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    _worked_out(monkeypatch)
    dataset = Dataset.from_tensor_slices(ROWS).shuffle(1000, seed=1).batch(10)
    expected = _by_steps(dataset, 0, ["CPU:0", "CPU:1"], Synchronous())
    _assert_same(_by_steps(dataset, 0, ["STRICT:0", "STRICT:1"], Synchronous()), expected)
    # Each batch is one part. The first and last batches may have none, since they are in bundles with fewer rows than
    # blocks.
    first, last = min(parts)[0], max(parts)[1]
    assert sorted(parts) == [(start, start + 10) for start in range(first, last, 10)]
    assert last - first >= 800


def test_many_small_parts_are_computed_on_the_host(
    parts: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _worked_out(monkeypatch)
    dataset = Dataset.from_tensor_slices(ROWS).shuffle(1000, seed=1)
    expected = _by_steps(dataset, 0, ["CPU:0", "CPU:1"], Synchronous())
    _assert_same(_by_steps(dataset, 0, ["STRICT:0", "STRICT:1"], Synchronous()), expected)
    # The replicas take rows in turns, so parts have one row. Devices are called for the first few of them only.
    assert len(parts) < 300


def test_rows_of_any_blocks_are_gathered_on_the_device(
    parts: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _worked_out(monkeypatch)
    made = DeviceGather(StrictDevice(0))
    blocks = [_block(100 * number, size) for number, size in enumerate([30, 8, 50, 50])]
    refs, rng = _refs(blocks), np.random.default_rng(0)
    whole = [Selection.whole(ref) for ref in refs]
    for rows in (
        whole[2],
        whole[2][7:],
        concat(whole),
        concat([whole[1], whole[3], whole[2][5:40], whole[0]]),
        concat(whole).take(rng.permutation(138)[:80]),
        Selection(refs[:1], rng.permutation(30)),
        NumberedSelection.of_places(tuple(refs), concat(whole).to_intervals(), rng.permutation(138)[:80]),
        concat([whole[2], whole[2]]),
    ):
        order = shuffled(rows, rng)
        for start, stop in [(0, 11), (3, 20), (0, len(order))]:
            run = Groups(order[start:stop], np.array([0, (stop - start) // 2, stop - start]))
            chosen = [block.handle for block in run.flat.blocks]
            actual, expected = made(chosen, Picks.of(run)), gather(chosen, Picks.of(run))
            _assert_same([[actual.item(k)] for k in range(2)], [[expected.item(k)] for k in range(2)])
    assert len(parts) == 8 * 3
    # Each of the four blocks is uploaded once.
    assert made.num_uploads == 4


def test_an_order_is_released_with_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    _worked_out(monkeypatch)
    made = device_gather_of(StrictDevice(0))
    gc.collect()
    before = TAKEN.get(0, 0)
    for name in ("all", "all_of_other_blocks", "all_of_what_is_left", "all_twice"):
        dataset = PIPELINES[name]()
        _by_steps(dataset, 0, ["STRICT:0"], Synchronous())
        del dataset
        gc.collect()
        assert len(made._orders) == len(made._residents) == 0
        assert TAKEN[0] == before


def test_blocks_of_an_order_are_uploaded_one_by_one_without_memory_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    _worked_out(monkeypatch)
    made = DeviceGather(StrictDevice(0))
    blocks = [_block(1000 * number, 100) for number in range(5)]
    whole = concat([Selection.whole(ref) for ref in _refs(blocks)])
    gc.collect()
    refused: list[int] = []
    new = StrictDevice._new

    def without_large(self: StrictDevice, shape: tuple[int, ...], dtype: Any) -> Any:
        if np.prod(shape) >= 500 * 8:
            refused.append(1)
            raise strict_device.StrictMemoryError("no piece as large as that")
        return new(self, shape, dtype)

    monkeypatch.setattr(StrictDevice, "_new", without_large)
    monkeypatch.setattr(gather_on_device, "_LEAST_BYTES", 100)
    for seed in range(2):
        run = shuffled(whole, np.random.default_rng(seed))[:60]
        actual, expected = made(blocks, Picks.of(run)), gather(blocks, Picks.of(run))
        _assert_same([[actual.item(k)] for k in range(60)], [[expected.item(k)] for k in range(60)])
    assert refused
    assert made.num_uploads == 5


def test_errors_of_exhausted_memory() -> None:
    dataset = Dataset.from_tensor_slices(np.zeros((1000, 100))).shuffle(100, seed=1).batch(10)
    LIMITS[0] = TAKEN.get(0, 0) + 10_000
    try:
        with pytest.raises(DeviceMemoryError, match="STRICT:0 has no room to put rows in order"):
            _by_steps(dataset, 0, ["STRICT:0"])
    finally:
        del LIMITS[0]
    assert len(_by_steps(dataset, 0, ["STRICT:0"])) == 100


def test_smaller_requests_after_an_allocation_failed() -> None:
    made = DeviceGather(StrictDevice(0))
    blocks = [Block.concat([_block(64 * k, 64)]) for k in range(5)]
    run = Groups(Selection(_refs(blocks), np.arange(64).repeat(5), np.tile(np.arange(5), 64)), np.arange(0, 321, 16))
    gc.collect()
    LIMITS[0] = TAKEN.get(0, 0) + 64 * 8 * 5 + 10_000
    try:
        actual = made(blocks, Picks.of(run))
    finally:
        del LIMITS[0]
    expected = gather(blocks, Picks.of(run))
    _assert_same([[actual.item(k)] for k in range(20)], [[expected.item(k)] for k in range(20)])


def _block(first: int, num_rows: int) -> Block:
    return Block(LONE, [np.arange(first, first + num_rows)])


def _refs(blocks: Sequence[Block]) -> tuple[BlockRef, ...]:
    return tuple(BlockRef(block, len(block), block.nbytes) for block in blocks)


def _read_late() -> list[bytes]:
    """Read rows by kernels that start only after the rows were released and others were picked."""
    here, made, actual, nobody = StrictDevice(0), DeviceGather(StrictDevice(0)), list[bytes](), threading.Event()
    block = _block(0, 4096)
    refs = _refs([block])
    for start in range(0, 4096, 512):
        picks = Picks.of(Groups(Selection(refs, np.arange(start, start + 512)), np.array([0, 512])))
        (leaf,) = made([block], picks).item(0)
        here.current_stream().give(lambda: nobody.wait(0.02))
        strict_device.reads_late(leaf, actual)
        del leaf
    here.current_stream().synchronize()
    return actual


def test_memory_is_reused_only_after_its_last_reader() -> None:
    assert [np.frombuffer(value, np.intp)[0] for value in _read_late()] == list(range(0, 4096, 512))


def test_early_reuse_of_memory_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Channel, "_reuse", lambda *args: None)
    assert [np.frombuffer(value, np.intp)[0] for value in _read_late()] != list(range(0, 4096, 512))


def test_rows_of_several_pieces_of_memory_come_in_order() -> None:
    made = DeviceGather(StrictDevice(0))
    rng = np.random.default_rng(0)
    blocks: list[Block] = []
    for sizes in ([10], [30, 5], [100, 1, 60]):
        blocks += [_block(1000 * len(blocks) + 1000 * k, size) for k, size in enumerate(sizes)]
        block_index = rng.integers(0, len(blocks), 200)
        rows = np.array([rng.integers(len(blocks[place])) for place in block_index])
        picks = Picks.of(Groups(Selection(_refs(blocks), rows, block_index), np.array([0, 50, 50, 200])))
        actual, expected = made(blocks, picks), gather(blocks, picks)
        assert len(actual) == 3
        _assert_same([[actual.item(k)] for k in range(3)], [[expected.item(k)] for k in range(3)])
    assert made.num_uploads == 6


def test_large_rows_go_up_in_pieces() -> None:
    rows = np.random.default_rng(0).integers(0, 255, (6, 3 * 2**20), np.uint8)
    dataset = Dataset.from_tensor_slices(rows).shuffle(4, seed=1).batch(2)
    _assert_same(_by_steps(dataset, 0, ["STRICT:0"]), _by_steps(dataset, 0, ["CPU:0"]))


def test_plans_list_leaves_that_stay_on_the_host() -> None:
    dataset = Dataset.from_tensor_slices({"a": np.arange(4), "b": np.array(["x"] * 4)}).batch(2)
    assert ", except ['b'], on the host" in describe_row_order(plan(node_of(dataset)), node_of(dataset).spec)
    numbers = Dataset.range(4).batch(2)
    assert describe_row_order(plan(node_of(numbers)), node_of(numbers).spec) == "rows are put in order on the devices"
    mapped = numbers.map(lambda x: x)
    assert "on the host, because map then computes" in describe_row_order(plan(node_of(mapped)), node_of(mapped).spec)


def _strategy_steps(distributed: Any) -> list[Any]:
    steps = []
    for step in distributed:
        leaves = step.values() if isinstance(step, dict) else [step]
        steps.append([on_host(value).tolist() for leaf in leaves for value in getattr(leaf, "values", [leaf])])
    return steps


def _shuffled(option: bool | None = None) -> Dataset:
    rows = {**_table(500), "name": np.array([f"row {k}" for k in range(500)])}
    dataset = Dataset.from_tensor_slices(rows).shuffle(150, seed=3).batch(24).prefetch(1)
    return dataset if option is None else dataset.with_options(Options(shuffle_on_device=option))


class TestStrategies:
    """The option with replicas of a strategy."""

    @pytest.mark.parametrize("num_replicas", [1, 3])
    def test_steps_equal_those_shuffled_on_the_host(self, num_replicas: int) -> None:
        names = [f"STRICT:{index}" for index in range(num_replicas)]
        strategy = MirroredStrategy(names)
        on, off = strategy.distribute_dataset(_shuffled(True)), strategy.distribute_dataset(_shuffled(False))
        for _ in range(2):
            assert _strategy_steps(on) == _strategy_steps(off)
        assert all(device_gather_of(StrictDevice(index)).num_uploads for index in range(num_replicas))

    def test_an_abandoned_pass_releases_device_memory(self) -> None:
        gc.collect()
        before = TAKEN.get(0, 0)
        strategy = MirroredStrategy(["STRICT:0"])
        iterator = iter(strategy.distribute_dataset(_shuffled(True)))
        for _ in range(3):
            next(iterator)
        iterator.close()
        del iterator
        gc.collect()
        assert TAKEN[0] == before

    def test_loops_give_the_elements_of_those_shuffled_on_the_host(self) -> None:
        strategy = MirroredStrategy(["STRICT:0", "STRICT:1"])
        actual = []
        for option in (True, False):
            distributed = strategy.distribute_dataset(_shuffled(option))
            loops = strategy.run(_two_passes, args=(distributed,))
            actual.append([str(value) for value in loops.values])
        assert actual[0] == actual[1]
        assert len(set(actual[0])) == 2
        assert device_gather_of(StrictDevice(1)).num_uploads

    def test_plans_state_where_rows_are_put_in_order(self) -> None:
        strategy = MirroredStrategy(["STRICT:0"])
        said = strategy.distribute_dataset(_shuffled(True)).explain()
        assert "shuffle_on_device=True" in said
        assert "rows are put in order on the devices, except ['name'], on the host" in said
        mapped = _shuffled(True).map(lambda row: row["id"])
        said = strategy.distribute_dataset(mapped).explain()
        assert (
            "shuffle_on_device: rows are put in order on the host, because map then computes elements from them" in said
        )
        on_cpus = MirroredStrategy(["CPU:0"]).distribute_dataset(_shuffled(True)).explain()
        assert "shuffle_on_device: of no effect, as all replicas are on the host" in on_cpus
        assert "\nshuffle_on_device" not in strategy.distribute_dataset(_shuffled()).explain()

    def test_the_option_is_checked_and_merged(self) -> None:
        with pytest.raises(ArgumentError, match="Options: shuffle_on_device is 1; give True or False"):
            Options(shuffle_on_device=1)  # type: ignore[arg-type]
        options = _shuffled(True).with_options(Options(seed=1)).options()
        assert options.shuffle_on_device is True
        assert _shuffled().options().shuffle_on_device is None

    def test_running_out_of_memory_names_the_device(self) -> None:
        dataset = Dataset.from_tensor_slices(np.zeros((1000, 100))).shuffle(100, seed=1).batch(10)
        distributed = MirroredStrategy(["STRICT:0"]).distribute_dataset(
            dataset.with_options(Options(shuffle_on_device=True))
        )
        LIMITS[0] = TAKEN.get(0, 0) + 20_000
        try:
            with pytest.raises(DeviceMemoryError, match=r"leave out Options\(shuffle_on_device=True\)"):
                list(distributed)
        finally:
            del LIMITS[0]


def _two_passes(iterator: Any) -> str:
    from daskdist.devices import is_on_device, on_host

    actual = []
    for _ in range(2):
        for batch in iterator:
            assert is_on_device(batch["id"])
            actual.append({key: on_host(value).tolist() for key, value in batch.items()})
    return str(actual)


def _num_uploads() -> int:
    from daskdist.devices import device
    from daskdist.execute.transfer.gather_on_device import device_gather_of

    return device_gather_of(device("STRICT:0")).num_uploads


@pytest.mark.cluster
def test_loops_on_workers_give_the_elements_of_those_shuffled_on_the_host(client: Client) -> None:
    client.run(strict_device.register, delay_s=0.0003)
    workers = list(workers_of(client))
    strategy = MultiWorkerMirroredStrategy(client, DeviceAssignment([(worker, "STRICT:0") for worker in workers]))
    actual = []
    for option in (True, False):
        distributed = strategy.distribute_dataset(_shuffled(option))
        actual.append([str(value) for value in strategy.run(_two_passes, args=(distributed,)).values])
    assert actual[0] == actual[1]
    assert len(set(actual[0])) == 2
    assert all(client.run(_num_uploads).values())
    strategy.close()
    client.run(strict_device.unregister)


class TestEmpty:
    """Elements that are copied into memory that the consumer allocates."""

    @pytest.mark.parametrize("name", PIPELINES)
    def test_equal_elements_in_requested_memory(self, name: str) -> None:
        dataset = PIPELINES[name]()
        primitive = plan(node_of(dataset))
        made: list[Any] = []

        def empty(shape: tuple[int, ...], dtype: Any) -> Any:
            array = np.full(shape, 7).astype(dtype)
            made.append(array)
            return array

        actual = []
        start = StreamPosition((0,), [])
        for bundle in BundleBuilder(Interpreter(Synchronous()), primitive, start, (None,) * 2, empty=empty):
            for step in range(len(bundle)):
                places = [(lane.ref, lane.places[step]) for lane in bundle.lanes]
                actual.append([None if place < 0 else ref.handle.item(place) for ref, place in places])  # type: ignore[union-attr]
        _assert_same(actual, _by_steps(dataset, 0, ["CPU:0", "CPU:1"], Synchronous()))
        # At least some leaves are in the requested memory. In the pipeline "window" none needs to be.
        shared = [leaf for row in actual for leaves in row if leaves for leaf in leaves]
        assert any(np.shares_memory(leaf, array) for leaf in shared for array in made) or name == "window"

    def test_no_memory_is_requested_for_text_and_objects(self) -> None:
        rows = {"a": np.arange(50), "b": np.array(["x"] * 50), "c": np.array([b"y"] * 50, object)}
        dataset = Dataset.from_tensor_slices(rows).shuffle(20, seed=1).batch(5)
        kinds = set()

        def empty(shape: tuple[int, ...], dtype: Any) -> Any:
            kinds.add(dtype.kind)
            return np.empty(shape, dtype)

        list(BundleBuilder(Interpreter(Synchronous()), plan(node_of(dataset)), StreamPosition((0,), []), empty=empty))
        assert kinds == {"i"}
