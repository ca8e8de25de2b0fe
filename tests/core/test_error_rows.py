"""Errors of functions name the row that they were called with."""

from __future__ import annotations

import pickle

import dask
import h5py
import numpy as np
import pyarrow as pa
import pytest
import zarr

import daskdist
from daskdist import Dataset, TensorSpec, errors
from daskdist.core.block import Bundle
from daskdist.core.dataset_base import node_of
from daskdist.core.failing.origin import JoinedOrigin, Origin, SelectedOrigins
from daskdist.core.failing.try_each import TryEach
from daskdist.core.structure import Structure
from daskdist.execute.callers.choose import using
from daskdist.execute.callers.synchronous import Synchronous
from daskdist.execute.callers.threads import Threads
from daskdist.passes.independent_pieces import pieces_of


class _FailsOn:
    """A function that draws at random, and fails for one number only."""

    def __call__(self, x, *others):
        if str(x) == "4":
            raise ValueError("not this one")
        return Dataset.range(3).shuffle(3)


def _fails(*items):
    raise ValueError("never")


@pytest.mark.parametrize(
    ("build", "row"),
    [
        (lambda ds: ds.flat_map(_fails), "row 0"),
        (lambda ds: ds.interleave(_fails, 2), "row 0"),
        (lambda ds: ds.shuffle(6, seed=1).flat_map(_FailsOn()), "row 4"),
        (lambda ds: ds.flat_map(_FailsOn()), "row 4"),
        (lambda ds: ds.interleave(_FailsOn(), 2), "row 4"),
        (lambda ds: ds.group_by_window(lambda x: x, _FailsOn(), 1), "row 4"),
        (lambda ds: ds.map(lambda x, rng: 1 // (int(x) - 4), rng=3), "row 4"),
        (lambda ds: Dataset.zip(ds, ds.skip(1)).map(lambda x, y: 1 // (int(x) - 4)), "row 4"),
        (lambda ds: ds.enumerate().map(lambda n, x: 1 // (int(x) - 4)), "row 4"),
    ],
)
@pytest.mark.parametrize("caller", [Synchronous, Threads])
def test_the_row_is_named_also_where_elements_were_paired(build, row, caller):
    with using(caller), pytest.raises(errors.UserFunctionError) as raised:
        list(build(Dataset.range(6)))
    assert f"{row} of range" in str(raised.value)
    assert "generators" not in str(raised.value)


@pytest.mark.parametrize(
    "source",
    [
        Dataset.range(9000),
        Dataset.range(9000).global_shuffle(seed=1),
        Dataset.range(9000).shuffle(9000, seed=1),
        Dataset.from_tensor_slices(list(range(9000))),
        Dataset.counter().take(9000),
    ],
    ids=str,
)
@pytest.mark.parametrize("number", [7, 4103])
def test_rows_are_counted_from_the_beginning_of_the_source(source, number):
    def fails(x):
        if str(x) == str(number):
            raise ValueError("not this one")
        return x

    with pytest.raises(errors.UserFunctionError, match=rf"on row {number} of [a-z_]*$"):
        list(source.map(fails))


def _fails_on_4103(x):
    if x == 4103:
        raise ValueError("not this one")
    return x


def _numbers():
    yield from range(9000)


def _in_files(kind, directory):
    numbers = np.arange(9000)
    if kind == "npy":
        np.save(directory / "numbers.npy", numbers)
        return daskdist.read_npy(str(directory / "numbers.npy"))
    if kind == "hdf5":
        with h5py.File(directory / "numbers.h5", "w") as file:
            file.create_dataset("numbers", data=numbers, chunks=(100,))
        return daskdist.read_hdf5(str(directory / "numbers.h5"), ["numbers"]).map(lambda x: x["numbers"])
    if kind == "zarr":
        zarr.create_array(str(directory / "numbers.zarr"), data=numbers, chunks=(100,))
        return daskdist.read_zarr(str(directory / "numbers.zarr"))
    if kind == "arrow":
        table = pa.table({"numbers": numbers})
        with pa.ipc.new_file(directory / "numbers.arrow", table.schema) as file:
            file.write_table(table)
        return daskdist.read_arrow(str(directory / "numbers.arrow")).map(lambda x: x["numbers"])
    numbers.tofile(directory / "numbers.bin")
    return daskdist.read_fixed_length(str(directory / "numbers.bin"), 8, dtype="i8")


@pytest.mark.parametrize("kind", ["npy", "hdf5", "zarr", "arrow", "records"])
def test_rows_of_files_do_not_depend_on_the_size_of_reads(kind, tmp_path):
    with dask.config.set({"daskdist.split-bytes": 1000}):
        source = _in_files(kind, tmp_path)
        with pytest.raises(errors.UserFunctionError, match=r"on row 4103 of \S*numbers\.\w+( record batch 0)?$"):
            list(source.skip(4000).map(_fails_on_4103))


@pytest.mark.parametrize(
    ("source", "name"),
    [
        (lambda: Dataset.range(9000), "range"),
        (lambda: Dataset.counter().take(9000), "counter"),
        (lambda: Dataset.from_tensor_slices(np.arange(9000)), "from_tensor_slices"),
        (lambda: Dataset.from_list(list(range(9000))), "from_list"),
        (lambda: Dataset.from_generator(_numbers, output_signature=TensorSpec((), "int64")), "from_generator"),
    ],
)
@pytest.mark.parametrize("num_before", [0, 100, 4103])
def test_rows_are_counted_from_the_beginning_after_a_position(source, name, num_before):
    iterator = iter(source().map(_fails_on_4103))
    for _ in range(num_before):
        next(iterator)
    rest = iter(source().map(_fails_on_4103))
    rest.load_state_dict(iterator.state_dict())
    with pytest.raises(errors.UserFunctionError, match=rf"on row 4103 of {name}$"):
        list(rest)


@pytest.mark.parametrize(
    "source",
    [
        Dataset.range(1, 18001, 2),
        Dataset.counter(5).take(9000),
        Dataset.from_tensor_slices(np.arange(9000)),
        Dataset.range(9000).prefetch(2),
        Dataset.range(100, 9100).skip(0),
    ],
    ids=str,
)
def test_pieces_of_pieces_name_the_rows_of_the_source(source):
    def fails(number, x):
        if number == 3:
            raise ValueError("not this one")
        return x

    node = node_of(source)
    piece = pieces_of(pieces_of(node).cut(4000, 5000)).cut(100, 200)
    with pytest.raises(errors.UserFunctionError, match=r"row 4103 of (range|counter|from_tensor_slices)$"):
        list(Dataset(piece).enumerate().map(fails))


def test_rows_of_unbatched_arrays_are_named_by_their_element():
    even = Dataset.from_tensor_slices(np.arange(9000).reshape(900, 10))
    uneven = Dataset.range(900).map(lambda x: np.arange(x * 10, x * 10 + 8 + x % 3))
    for source in (even.map(lambda x: x + 0), uneven):
        with pytest.raises(errors.UserFunctionError, match=r"on row 410 of (range|from_tensor_slices)$"):
            list(source.unbatch().map(_fails_on_4103))


def test_rows_that_others_were_left_out_before_get_no_wrong_number(tmp_path):
    lines = [f'{{"x": {number}}}' if number % 1000 != 7 else "broken" for number in range(5000)]
    (tmp_path / "lines.json").write_text("\n".join(lines))
    lenient = daskdist.read_json(str(tmp_path / "lines.json")).ignore_errors()
    with pytest.raises(errors.UserFunctionError, match=r"on a row of \S*lines\.json bytes 0 to \d+$"):
        list(lenient.map(lambda row: _fails_on_4103(row["x"])))


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("source", "name"),
    [
        (lambda: Dataset.range(9000), "range"),
        (lambda: Dataset.range(9000).skip(50).take(8000), "range"),
        (lambda: Dataset.counter().take(9000), "counter"),
        (lambda: Dataset.from_tensor_slices(np.arange(9000)), "from_tensor_slices"),
        (lambda: Dataset.from_list(list(range(9000))), "from_list"),
        (lambda: Dataset.from_generator(_numbers, output_signature=TensorSpec((), "int64")), "from_generator"),
    ],
)
@pytest.mark.parametrize("mode", ["parallel_epochs", "distributed_epoch"])
def test_the_service_names_the_rows_of_the_source(client, source, name, mode):
    with pytest.raises(errors.DaskdistError, match=rf"on row 4103 of {name}\b"):
        list(source().map(_fails_on_4103).serve(client, mode))


@pytest.mark.cluster
def test_rows_of_arrays_on_workers_are_counted_from_the_first(on_cluster):
    with dask.config.set({"daskdist.split-bytes": 1000}):
        ds = on_cluster.experimental_make_numpy_dataset(np.arange(9000)).map(_fails_on_4103).batch(10)
        with pytest.raises(errors.UserFunctionError, match=r"on row 4103 of make_numpy_dataset$"):
            list(map(on_cluster.local_results, on_cluster.distribute_dataset(ds)))


@pytest.mark.cluster
def test_the_row_is_named_on_a_cluster(on_cluster):
    ds = Dataset.range(6).flat_map(_FailsOn()).batch(2)
    distributed = on_cluster.distribute_dataset(ds)
    with pytest.raises(errors.UserFunctionError, match=r"row 4 of range"):
        list(map(on_cluster.local_results, distributed))


def test_pickled_origins_have_no_rows_but_their_own():
    random = np.random.default_rng(0)

    def origin(depth, num_rows):
        kind = random.integers(4) if depth else 0
        if kind == 0:
            return Origin(f"file {random.integers(1000)}", bool(random.integers(2)))
        if kind == 1:
            return JoinedOrigin([origin(depth - 1, num_rows) for _ in range(random.integers(1, 3))])
        size, num_blocks = random.integers(1, 9), random.integers(1, 5)
        if kind == 2:
            rows = range(num_rows) if size >= num_rows else random.integers(0, size, num_rows)
            return SelectedOrigins([origin(depth - 1, size)], rows)
        blocks = [origin(depth - 1, size) for _ in range(num_blocks)]
        return SelectedOrigins(blocks, random.integers(0, size, num_rows), random.integers(0, num_blocks, num_rows))

    for _ in range(300):
        num_rows = int(random.integers(9))
        whole = origin(4, num_rows)
        part = pickle.loads(pickle.dumps(whole))
        assert [part.where(row) for row in range(num_rows)] == [whole.where(row) for row in range(num_rows)]
    files = [SelectedOrigins([Origin(f"file {k} {n}") for n in range(64)], range(64), range(64)) for k in range(64)]
    row = pickle.loads(pickle.dumps(SelectedOrigins(files, [7], [3])))
    assert row.origins == [Origin("file 3 7")]


@pytest.mark.parametrize(("num_blocks", "num_rows"), [(40, 100), (3, 1000)])
def test_pickled_origins_are_the_same_for_few_and_many_rows_of_a_block(num_blocks, num_rows):
    random = np.random.default_rng(0)
    files = [
        SelectedOrigins([Origin(f"file {k} {n}") for n in range(8)], range(8), range(8)) for k in range(num_blocks)
    ]
    origin = SelectedOrigins(files, random.integers(0, 8, num_rows), random.integers(0, num_blocks, num_rows))
    again = pickle.loads(pickle.dumps(origin))
    assert [again.where(k) for k in range(num_rows)] == [origin.where(k) for k in range(num_rows)]
    assert len(again.origins) <= num_blocks * 8


@pytest.mark.parametrize(
    ("function", "advice"),
    [
        (lambda date: date > "2024-02-29", r"instead of text$"),
        (lambda date: date.hour > 3, r"date\.astype\('datetime64\[us\]'\)\.item\(\) is one of datetime$"),
    ],
)
def test_functions_that_take_dates_for_others_are_advised(function, advice):
    dates = Dataset.from_tensor_slices(np.array(["2024-02-28T01", "2024-03-01T05"], "datetime64[s]"))
    with pytest.raises(errors.UserFunctionError, match=advice):
        list(dates.filter(function))
    assert len(list(dates.filter(lambda date: date > np.datetime64("2024-02-29")))) == 1
    assert len(list(dates.filter(lambda date: date.astype("datetime64[us]").item().hour > 3))) == 1


def test_many_failing_rows_keep_the_frames_of_few():
    rows = TryEach(lambda rows: [1 // 0])(Bundle(Structure.of(0)[1], [(k,) for k in range(1000)]))
    errors_of_rows = [rows.raw(k).error for k in range(1000)]
    assert 0 < sum(error.__traceback__ is not None for error in errors_of_rows) <= 100
    assert all(isinstance(error, ZeroDivisionError) for error in errors_of_rows)
