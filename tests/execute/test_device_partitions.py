"""Partitions of Dask collections that are on a device when they are read, and stay there."""

from __future__ import annotations

import ast
import gc
import pickle
import threading
from typing import Any

import dask.array as da
import numpy as np
import pandas as pd
import pytest
import strict_device
from distributed import Client, wait
from strict_device import StrictDevice, StrictEvent

from daskdist import Dataset, DeviceAssignment, MirroredStrategy, MultiWorkerMirroredStrategy, Options
from daskdist.core.block import Block, Bundle
from daskdist.core.structure import LONE
from daskdist.devices import device_of, is_on_device, on_host
from daskdist.execute.callers.submit import workers_of
from daskdist.execute.stream.gather import Picks, gather
from daskdist.execute.transfer import gather_on_device
from daskdist.execute.transfer.gather_on_device import CompactOnDevices, DeviceGather
from daskdist.ops import from_dask
from daskdist.tables.device_column import DeviceColumn
from daskdist.tables.from_pandas import FrameReader

pytestmark = pytest.mark.usefixtures("strict_and_late")

ON = Options(shuffle_on_device=True)


@pytest.fixture
def host_copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list of the sizes in bytes of columns that were copied to the host."""
    copies: list[int] = []
    host = DeviceColumn.host.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(DeviceColumn, "host", property(lambda self: copies.append(self.nbytes) or host(self)))
    return copies


def _put(block: Any) -> Any:
    return StrictDevice(0).put(block)


X = np.random.default_rng(0).random((400, 3))


def _there(x: Any = X, rows: int = 50) -> Any:
    """Return a Dask array of chunks on a device."""
    array = da.from_array(x, chunks=(rows, *x.shape[1:]))
    return array.map_blocks(_put, dtype=x.dtype, meta=np.empty((0,) * x.ndim, x.dtype))


PIPELINES = {
    "batch": lambda rows: rows.batch(7),
    "shuffle": lambda rows: rows.shuffle(120, seed=1).batch(16),
    "all": lambda rows: rows.shuffle(400, seed=2).batch(64, drop_remainder=True),
    "shard, take and repeat": lambda rows: rows.shard(2, 1).take(90).shuffle(30, seed=3).repeat(2).batch(8),
    "zip": lambda rows: Dataset.zip((rows, rows.skip(3))).batch(16),
    "rows": lambda rows: rows.take(20),
}


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("name", PIPELINES)
def test_batches_are_those_of_the_host(name: str, num_replicas: int, host_copies: list[int]) -> None:
    strategy = MirroredStrategy([f"STRICT:{number}" for number in range(num_replicas)])
    there, here = (PIPELINES[name](Dataset.from_dask(item)) for item in (_there(), da.from_array(X, chunks=(50, 3))))
    steps, expected = (
        [strategy.local_results(step) for step in strategy.distribute_dataset(dataset.with_options(ON))]
        for dataset in (there, here)
    )
    assert str([[_nested(part) for part in step] for step in steps]) == str(
        [[_nested(part) for part in step] for step in expected]
    )
    assert not host_copies


def _nested(part: Any) -> Any:
    return [on_host(leaf).tolist() for leaf in part] if isinstance(part, tuple) else on_host(part).tolist()


def test_few_rows_of_large_blocks_are_compacted_on_the_device(host_copies: list[int]) -> None:
    device = StrictDevice(0)
    by = DeviceGather(device)
    ready = device.current_stream().record()
    text = np.array([f"row {number}" for number in range(40)])
    blocks = [
        Block(LONE, [DeviceColumn(device.put(X[start : start + 40]), X.dtype, ready), text]) for start in (0, 40, 80)
    ]
    rows, block_index = np.array([3, 39, 0, 7]), np.array([0, 2, 1, 2])
    picks = Picks(rows, block_index, None, None)
    compacted = CompactOnDevices([DeviceGather(StrictDevice(1)), by])(blocks, picks)
    column, names = compacted.leaves
    assert device_of(column.array) == device
    assert names.tolist() == text[rows].tolist()
    assert by.num_uploads == 3
    del blocks
    gc.collect()
    # Compacted rows are on the device already, so gathering them uploads nothing.
    again = by([compacted], Picks(np.array([2, 0]), None, None, None))
    assert by.num_uploads == 3
    np.testing.assert_array_equal(on_host(again.item(0)[0]), X[40])
    assert not host_copies
    np.testing.assert_array_equal(column.host, X[rows + 40 * block_index])


def test_an_array_is_read_only_once_it_is_computed() -> None:
    device, ready = StrictDevice(0), StrictEvent()
    array = device.put(np.zeros((8, 3)))

    def compute() -> None:
        array[...] = device.put(X[:8])
        ready.set()

    timer = threading.Timer(0.05, compute)
    timer.start()
    by = DeviceGather(device)
    rows = by([Block(LONE, [DeviceColumn(array, X.dtype, ready)])], Picks(np.arange(8), None, None, None))
    np.testing.assert_array_equal(np.stack([on_host(rows.item(number)[0]) for number in range(8)]), X[:8])
    timer.join()


def test_partitions_are_copied_to_the_host_for_functions_on_the_host(host_copies: list[int]) -> None:
    mapped = Dataset.from_dask(_there()).map(lambda row: row * 2).batch(100).with_options(ON)
    (step, *_) = MirroredStrategy(["STRICT:0"]).distribute_dataset(mapped)
    np.testing.assert_array_equal(on_host(step), X[:100] * 2)
    (step, *_) = MirroredStrategy(["CPU:0"]).distribute_dataset(Dataset.from_dask(_there()).batch(100).with_options(ON))
    np.testing.assert_array_equal(step, X[:100])
    np.testing.assert_array_equal(next(iter(Dataset.from_dask(_there()).batch(60))), X[:60])
    assert not host_copies


def test_host_code_gets_numpy_arrays() -> None:
    block = Block(LONE, [DeviceColumn(_put(X), X.dtype, StrictDevice(0).current_stream().record())])
    assert block.nbytes == X.nbytes
    there_and_back = pickle.loads(pickle.dumps(block))
    for actual in (gather([block], Picks(np.array([5, 0, 5]), None, None, None)), block.take(np.array([5, 0, 5]))):
        np.testing.assert_array_equal(actual.leaves[0], X[[5, 0, 5]])
    for actual in (block, there_and_back):
        np.testing.assert_array_equal(actual.slice(2, 5).leaves[0], X[2:5])
        np.testing.assert_array_equal(actual.item(399)[0], X[399])
    assert type(there_and_back.leaves[0]) is np.ndarray
    joined = gather([block, there_and_back], Picks(np.arange(40) % 7, np.arange(40) % 2, None, None))
    np.testing.assert_array_equal(joined.leaves[0], X[np.arange(40) % 7])


@pytest.mark.parametrize(("option", "is_there"), [(None, True), (True, True), (False, False)])
def test_known_arrays_on_devices_need_no_option(
    option: bool | None, is_there: bool, host_copies: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Dask cannot use an empty array of this device as its sample, so tell that the array is on a device.
    monkeypatch.setattr(from_dask, "is_on_device", lambda array: True)
    strategy = MirroredStrategy(["STRICT:0"])
    dataset = Dataset.from_dask(_there()).shuffle(400, seed=1).batch(100)
    distributed = strategy.distribute_dataset(dataset.with_options(Options(shuffle_on_device=option)))
    assert ("\nshuffle_on_device: rows are put in order on the devices" in distributed.explain()) == is_there
    steps = [on_host(step) for step in distributed]
    np.testing.assert_array_equal(np.sort(np.concatenate(steps), axis=0), np.sort(X, axis=0))
    assert bool(gather_on_device.device_gather_of(StrictDevice(0)).num_uploads) == is_there
    assert not host_copies


class Column:
    """A column of a dataframe on a device, with the methods of cuDF's columns that are used."""

    def __init__(self, values: Any) -> None:
        self._values = values
        self.dtype = values.dtype
        self.has_nulls = bool(values.isna().any()) if values.dtype == "Int64" else False
        if self.has_nulls:
            self.dtype = np.dtype(np.int64)

    def to_cupy(self) -> Any:
        if self.has_nulls:
            raise ValueError("Column must have no nulls.")
        return _put(self._values.to_numpy())

    def to_numpy(self) -> Any:
        return self._values.to_numpy()

    def to_arrow(self) -> Any:
        import pyarrow as pa

        return pa.array(self._values, from_pandas=True)


class SimpleFrame(dict):  # type: ignore[type-arg]
    """A dataframe of such columns."""

    def __len__(self) -> int:
        return 400


def test_columns_of_dataframes_stay_on_the_device() -> None:
    frame = pd.DataFrame({"x": X[:, 0], "n": np.arange(400), "name": [f"row {number}" for number in range(400)]})
    frame["some"] = pd.array([None, *range(399)], "Int64")
    reader = FrameReader.of(frame, None, {"some": -1})
    columns = {name: Column(frame[name]) for name in frame.columns}
    there = reader.block(SimpleFrame(columns), "", from_dask._device_column)
    here = reader.block(frame, "")
    assert not isinstance(there, Bundle)
    assert [type(leaf) is DeviceColumn for leaf in there.leaves] == [True, False, False, True]
    for one, other in zip(there.leaves, here.leaves, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    # Without a replacement, nulls are an error as on the host.
    del columns["x"], columns["n"], columns["name"]
    with pytest.raises(Exception, match="some") as actual:
        FrameReader.of(frame[["some"]], None, None).block(SimpleFrame(columns), "", from_dask._device_column)
    assert "null" in str(actual.value)


def _sums(rows: Any) -> str:
    actual = []
    for batch in rows:
        assert is_on_device(batch)
        actual.append(on_host(batch).tolist())
    return str(actual)


@pytest.mark.cluster
def test_loops_on_workers_read_persisted_partitions_there(client: Client) -> None:
    client.run(strict_device.register)
    workers = list(workers_of(client))
    there = _there().persist()
    strategy = MultiWorkerMirroredStrategy(client, DeviceAssignment([(worker, "STRICT:0") for worker in workers]))
    actual = []
    for array in (there, da.from_array(X, chunks=(50, 3))):
        dataset = Dataset.from_dask(array).shuffle(100, seed=4).batch(16).with_options(ON)
        actual.append(list(strategy.run(_sums, args=(strategy.distribute_dataset(dataset),)).values))
    assert list(map(str, actual[0])) == list(map(str, actual[1]))
    strategy.close()


def _chunk(number: int) -> Any:
    return StrictDevice(0).put(X[number * 50 : number * 50 + 50])


def _refuse_host(is_refused: bool, dask_worker: Any) -> set[str]:
    """Make columns on devices refuse to come to the host; return the keys of what the worker got from others."""
    host = DeviceColumn.__dict__["host"]
    if is_refused:
        DeviceColumn.kept_host, DeviceColumn.host = host, property(lambda self: 1 // 0)  # type: ignore[attr-defined]
    else:
        DeviceColumn.host = DeviceColumn.kept_host  # type: ignore[attr-defined]
        del DeviceColumn.kept_host  # type: ignore[attr-defined]
    return {str(key) for value in dask_worker.transfer_incoming_log for key in value["keys"]}


@pytest.mark.cluster
def test_each_worker_reads_its_own_partitions(client: Client) -> None:
    client.run(strict_device.register)
    workers = list(workers_of(client))
    strategy = MultiWorkerMirroredStrategy(client, DeviceAssignment([(worker, "STRICT:0") for worker in workers]))
    num_workers = len(strategy.workers)
    futures = [
        client.submit(_chunk, number, workers=[strategy.workers[number % num_workers]], pure=False)
        for number in range(8)
    ]
    with client.as_current():
        wait(futures)

    def own_partitions(context: Any) -> Dataset:
        chunks = futures[context.input_pipeline_id :: num_workers]
        array = da.concatenate([da.from_delayed(chunk, (50, 3), X.dtype) for chunk in chunks])
        return Dataset.from_dask(array).shuffle(100, seed=4).batch(10).with_options(ON)

    client.run(_refuse_host, True)
    try:
        distributed = strategy.distribute_datasets_from_function(own_partitions)
        actual = [ast.literal_eval(str(rows)) for rows in strategy.run(_sums, args=(distributed,)).values]
    finally:
        moved = client.run(_refuse_host, False)
    for number, batches in enumerate(actual):
        own = np.concatenate([X[k * 50 : k * 50 + 50] for k in range(number, 8, num_workers)])
        np.testing.assert_array_equal(np.sort(np.concatenate(batches), axis=0), np.sort(own, axis=0))
    assert not {future.key for future in futures} & set().union(*moved.values())
    strategy.close()
