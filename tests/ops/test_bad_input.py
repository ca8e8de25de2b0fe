"""Bad input is a clear error; it does not hang, and other elements are not lost."""

from __future__ import annotations

import inspect
import re
import socket
import time
from pathlib import Path

import dask
import numpy as np
import programs
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import mirrored

import daskdist
from daskdist import AutoShardPolicy, Dataset, Options, PerReplica, errors, read_parquet
from daskdist.config import DEFAULTS

pytestmark = pytest.mark.timeout(60)


def policy(name: str) -> Options:
    return Options(auto_shard_policy=name)


# --- arguments ---


@pytest.mark.parametrize(
    ("build", "error", "builtin", "says"),
    [
        (lambda: Dataset.range(4).batch(0), errors.ArgumentError, ValueError, ["batch_size is 0", "1 or more"]),
        (lambda: Dataset.range(4).batch(-3), errors.ArgumentError, ValueError, ["batch_size is -3"]),
        (lambda: Dataset.range(4).batch(2.5), errors.ArgumentError, ValueError, ["batch", "2.5"]),
        (lambda: Dataset.range(4).batch("2"), errors.ArgumentError, ValueError, ["batch", "'2'"]),
        (lambda: Dataset.range(4).shuffle(0), errors.ArgumentError, ValueError, ["shuffle", "0"]),
        (lambda: Dataset.range(4).map(3), errors.ArgumentError, ValueError, ["map", "int"]),
        (lambda: Dataset.range(), errors.ArgumentError, ValueError, ["range(stop)"]),
        (
            lambda: Dataset.from_tensor_slices({"a": [1, 2], "b": [1]}),
            errors.ArgumentError,
            ValueError,
            ["'a'", "2", "'b'", "1"],
        ),
        (lambda: Dataset.from_tensor_slices(np.float32(1)), errors.ArgumentError, ValueError, ["from_tensors"]),
        (lambda: Options(auto_shard_policy="ring"), errors.ArgumentError, ValueError, ["'ring'", "OFF", "DATA"]),
        (lambda: mirrored(2).distribute_dataset([1, 2]), errors.ArgumentError, ValueError, ["list"]),
        (lambda: mirrored(2).run(len, args=np.ones(2)), errors.ArgumentError, ValueError, ["args=(batch,)"]),
        (
            lambda: mirrored(1).reduce("MEDIAN", 1, axis=None),
            errors.ArgumentError,
            ValueError,
            ["'MEDIAN'", "SUM", "PROD"],
        ),
        (lambda: daskdist.MirroredStrategy(["CPU"]), errors.UnknownDeviceError, ValueError, ["'CPU'", "'CPU:0'"]),
        (lambda: daskdist.MirroredStrategy(["TPU:0"]), errors.UnknownDeviceError, ValueError, ["TPU", "CPU"]),
        (
            lambda: daskdist.MirroredStrategy(["CPU:0", "/cpu:0"]),
            errors.UnknownDeviceError,
            ValueError,
            ["'CPU:0'", "'/cpu:0'", "one device"],
        ),
        (lambda: daskdist.MultiWorkerMirroredStrategy(3.5), errors.ArgumentError, ValueError, ["float"]),
        (
            lambda: daskdist.MultiWorkerMirroredStrategy(num_replicas_per_worker=0),
            errors.ArgumentError,
            ValueError,
            ["num_replicas_per_worker is 0"],
        ),
        (
            lambda: mirrored(2).distribute_dataset(Dataset.range(8)),
            errors.ShardingError,
            ValueError,
            ["2 replicas", "batch(", "distribute_datasets_from_function"],
        ),
        (
            lambda: mirrored(2).distribute_dataset(
                Dataset.range(8).batch(4).map(lambda x: {"rows": x, "total": x.sum()})
            ),
            errors.ShardingError,
            ValueError,
            ["'total'", "scalar"],
        ),
    ],
)
def test_argument_is_refused_when_the_pipeline_is_built(build, error, builtin, says):
    with pytest.raises(error) as caught:
        build()
    assert isinstance(caught.value, builtin)
    for phrase in says:
        assert phrase in str(caught.value)


def test_elements_that_do_not_stack():
    ds = Dataset.range(4).map(lambda x: {"v": np.zeros(int(x))}).batch(2)
    with pytest.raises(errors.StackError, match=r"\['v'\].*float64\[0\].*float64\[1\]") as caught:
        list(ds)
    assert "batch" in str(caught.value)


def test_elements_of_different_dtypes_do_not_stack():
    ds = Dataset.range(4).map(lambda x: np.float32(x) if x < 3 else np.float64(x)).batch(4)
    with pytest.raises(errors.StackError, match=r"float32.*float64"):
        list(ds)


@pytest.mark.parametrize("is_ignored", [True, False])
@pytest.mark.parametrize(("sizes", "shapes"), [([2], [(2, 3)] * 5), ([2, 2], [(2, 2, 3), (2, 2, 3), (1, 2, 3)])])
def test_a_batch_that_does_not_stack_is_left_out_by_itself(sizes, shapes, is_ignored):
    ds = Dataset.range(12).map(lambda x: np.zeros(2 if x == 3 else 3), vectorized=False)
    for size in sizes:
        ds = ds.batch(size)
    ds = ds.ignore_errors() if is_ignored else ds.with_options(Options(on_error="skip"))
    iterator = iter(ds)
    assert ([batch.shape for batch in iterator], iterator.stats()["num_skipped"]) == (shapes, 1)


@pytest.mark.parametrize("is_ignored", [True, False])
@pytest.mark.parametrize("sizes", [[2, 2], [2, 1, 3]])
def test_batches_of_batches_come_apart_where_elements_that_fail_are_left_out(sizes, is_ignored):
    rows = Dataset.range(12).map(lambda x: np.full(2 if x == 3 else 3, x), vectorized=False)
    ds = rows.batch(2)
    for size in sizes[1:]:
        ds = ds.batch(size)
    for _ in sizes:
        ds = ds.unbatch()
    ds = ds.ignore_errors() if is_ignored else ds.with_options(Options(on_error="skip"))
    iterator = iter(ds)
    assert ([int(row[0]) for row in iterator], iterator.stats()["num_skipped"]) == ([0, 1, *range(4, 12)], 1)


def test_batches_of_other_depths_follow_one_another_where_elements_that_fail_are_left_out():
    deep = Dataset.range(8).batch(2).batch(2).batch(2).unbatch()
    flat = Dataset.range(8).batch(2).batch(2)
    chosen = Dataset.choose_from_datasets([deep, flat], Dataset.from_tensor_slices([0, 0, 1, 1]))
    for ds in (deep.concatenate(flat), chosen):
        rows = ds.unbatch().unbatch().with_options(Options(on_error="skip"))
        assert [int(x) for x in rows] == [*range(8)] * 2


# --- files ---


@pytest.mark.parametrize("name", ["none-*.parquet", "missing.parquet", "empty", "foo://bucket/a.parquet"])
def test_no_file_matches(tmp_path, name):
    (tmp_path / "empty").mkdir()
    path = name if "://" in name else str(tmp_path / name)
    with pytest.raises(errors.FileError) as caught:
        read_parquet(path)
    assert isinstance(caught.value, OSError)
    assert name in str(caught.value)


def test_one_pattern_of_several_matches_nothing(tmp_path, parquet_files):
    with pytest.raises(errors.FileError, match="none-"):
        read_parquet([*parquet_files(), str(tmp_path / "none-*")])


@pytest.mark.parametrize("content", [b"", b"PAR1", b"id,x\n1,2\n" * 50, b"PAR1" + bytes(100) + b"PAR1"])
def test_a_file_that_is_not_parquet(tmp_path, content):
    path = tmp_path / "table.parquet"
    path.write_bytes(content)
    with pytest.raises(errors.FileError, match=rf"table\.parquet: not a Parquet file.*{len(content)} bytes"):
        read_parquet(str(path))


def test_a_later_file_that_is_not_parquet_is_named(parquet_files):
    paths = parquet_files(files=3)
    Path(paths[1]).write_text("not a table")
    with pytest.raises(errors.FileError, match=re.escape(paths[1])):
        list(read_parquet(paths).batch(4))


def test_a_file_cut_short_anywhere_is_named(parquet_files):
    (path,) = parquet_files(20, row_group=10)
    whole = Path(path).read_bytes()
    for length in range(0, len(whole), 11):
        Path(path).write_bytes(whole[:length])
        with pytest.raises(errors.FileError, match=re.escape(path)):
            list(read_parquet(path).batch(5))


def test_a_damaged_index_raises_only_errors_of_daskdist(parquet_files):
    (path,) = parquet_files(20, row_group=10)
    whole = Path(path).read_bytes()
    rng = np.random.default_rng(0)
    start = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    num_failed = 0
    for at in rng.integers(start, len(whole), 150):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << int(rng.integers(8))
        Path(path).write_bytes(bytes(damaged))
        try:
            list(read_parquet(path).batch(5))
        except errors.FileError as error:
            assert path in str(error)  # noqa: PT017 - not every damage shows
            num_failed += 1
    assert num_failed > 20


def damage(path: str, row_group: int) -> None:
    """Overwrite the pages of one row group."""
    column = pq.read_metadata(path).row_group(row_group).column(0)
    start = min(column.data_page_offset, column.dictionary_page_offset or column.data_page_offset)
    with open(path, "r+b") as file:
        file.seek(start)
        file.write(b"\xff" * column.total_compressed_size)


def test_a_damaged_page_names_file_and_row_group_and_spares_the_first_batch(parquet_files):
    paths = parquet_files(20, files=2, row_group=5)
    damage(paths[1], 2)
    elements = iter(read_parquet(paths, columns="id").batch(5))
    # Batches in one bundle with the damaged rows fail with them; the first batches are in another bundle.
    np.testing.assert_array_equal(next(elements), np.arange(5))
    with pytest.raises(errors.FileError, match=re.escape(f"{paths[1]} row group 2")):
        list(elements)


def test_a_changed_byte_is_found_where_the_file_has_checksums(parquet_files):
    (path,) = parquet_files(2000, compression="none", use_dictionary=False, write_page_checksum=True)
    column = pq.read_metadata(path).row_group(0).column(0)
    with open(path, "r+b") as file:
        file.seek(column.data_page_offset + column.total_compressed_size // 2)
        file.write(b"\x77")
    with pytest.raises(errors.FileError, match=re.escape(f"{path} row group 0")):
        list(read_parquet(path, columns="id").batch(100))


@pytest.mark.cluster
@pytest.mark.parametrize("name", ["data", "file"])
def test_a_damaged_page_on_a_cluster(on_cluster, parquet_files, name):
    paths = parquet_files(10, files=2, row_group=5)
    damage(paths[1], 1)
    ds = read_parquet(paths, columns="id").batch(10).with_options(policy(name))
    with pytest.raises(errors.FileError, match=re.escape(f"{paths[1]} row group 1")):
        [on_cluster.local_results(batch) for batch in on_cluster.distribute_dataset(ds)]


@pytest.mark.parametrize(
    "other",
    [
        {"id": np.arange(3), "x": np.ones(3)},  # another dtype
        {"id": np.arange(3)},  # a missing column
        {"id": np.arange(3), "x": np.ones(3, "float32"), "y": np.ones(3)},  # an additional column
    ],
)
@pytest.mark.parametrize("columns", [None, ["id", "x"]])
def test_files_of_different_schemas_are_both_named(parquet_files, other, columns):
    paths = parquet_files(files=2)
    pq.write_table(pa.table(other), paths[1])
    ds = read_parquet(paths, columns)
    if columns and "y" in other:
        assert len(list(ds)) == 9  # Columns that are not read may be missing.
        return
    with pytest.raises(errors.FileError) as caught:
        list(ds)
    assert paths[0] in str(caught.value)
    assert paths[1] in str(caught.value)


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        (["id", "z"], ["'z'", "'id'", "'x'"]),
        ({"f": ["x", "y"]}, ["'y'"]),
        ([], ["no columns", "'id'"]),
        ({"f": []}, ["no columns"]),
        ({"f": 3}, ["3"]),
        ({"f": ["id", "s"]}, ["'id'", "'s'", "dtype"]),
        ({"f": ["id", "v"]}, ["'v'", "arrays"]),
    ],
)
def test_columns_that_make_no_element(tmp_path, columns, says):
    path = str(tmp_path / "a.parquet")
    vector = pa.FixedSizeListArray.from_arrays(pa.array([1.0, 2.0]), 2)
    pq.write_table(pa.table({"id": [1], "x": [1.0], "s": ["text"], "v": vector}), path)
    with pytest.raises(errors.ArgumentError) as caught:
        read_parquet(path, columns)
    for phrase in says:
        assert phrase in str(caught.value)


# --- functions that raise ---


def reciprocal(x):
    return x + 1 // int(not np.any(x == 7))


def is_fine(x):
    return x < 1 // int(x != 7) * 99


def line_of(function) -> str:
    return f"{Path(__file__).name}:{inspect.getsourcelines(function)[1]}"


def calls_another(*items):
    return line_of()


@pytest.mark.parametrize(
    ("function", "is_told"),
    [(lambda pair: pair, True), (lambda a, b, c: a, True), (lambda a, b: a + b["c"], False), (calls_another, False)],
)
def test_a_wrong_number_of_parameters_says_what_a_function_is_called_with(function, is_told):
    ds = Dataset.from_tensor_slices(([1, 2], [3, 4])).map(function)
    with pytest.raises(errors.UserFunctionError) as caught:
        list(ds)
    advice = ". It is called with the items of a tuple, and with any other element as a whole"
    assert str(caught.value).endswith(advice) == is_told


@pytest.mark.parametrize(
    ("pipeline", "function", "row"),
    [
        (lambda ds: ds.map(reciprocal), reciprocal, "row 1 of {1} row group 0"),
        (lambda ds: ds.map(reciprocal).batch(4), reciprocal, "row 1 of {1} row group 0"),
        (lambda ds: ds.skip(2).map(reciprocal), reciprocal, "row 1 of {1} row group 0"),
        (lambda ds: ds.filter(lambda x: x % 2 == 1).map(reciprocal), reciprocal, "row 1 of {1} row group 0"),
        (lambda ds: ds.map(lambda x: x + 0).map(reciprocal), reciprocal, "row 1 of {1} row group 0"),
        (lambda ds: ds.shuffle(6, seed=1).map(reciprocal), reciprocal, "row 1 of {1} row group 0"),
        (lambda ds: ds.filter(is_fine), is_fine, "row 1 of {1} row group 0"),
        (lambda ds: ds.shuffle(12, seed=1).filter(is_fine), is_fine, "row 1 of {1} row group 0"),
        (lambda ds: ds.repeat(2).filter(is_fine), is_fine, "row 1 of {1} row group 0"),
        (lambda ds: ds.batch(3).map(reciprocal), reciprocal, "a batch of 3 rows of {1} row group 0"),
    ],
)
def test_a_function_that_raises_is_told_with_its_place(parquet_files, pipeline, function, row):
    paths = parquet_files(6, files=2)
    with pytest.raises(errors.UserFunctionError) as caught:
        list(pipeline(read_parquet(paths, "id")))
    message = str(caught.value)
    operation = "filter" if function is is_fine else "map"
    assert message.startswith(f"{operation}: {function.__name__} (")
    assert line_of(function) in message
    assert "ZeroDivisionError" in message
    assert message.endswith(row.format(*paths))
    assert isinstance(caught.value, RuntimeError)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.cluster
@pytest.mark.parametrize("name", ["data", "file", "off"])
def test_a_function_that_raises_on_a_cluster(on_cluster, parquet_files, name):
    paths = parquet_files(6, files=2)
    ds = read_parquet(paths, "id").map(reciprocal).batch(4).with_options(policy(name))
    steps = on_cluster.distribute_dataset(ds)
    with pytest.raises(errors.UserFunctionError) as caught:
        [float(on_cluster.reduce("SUM", on_cluster.run(np.sum, args=(batch,)), axis=None)) for batch in steps]
    message = str(caught.value)
    assert message.startswith("map: reciprocal (")
    assert line_of(reciprocal) in message
    assert f"row 1 of {paths[1]} row group 0" in message


def test_an_iterator_continues_after_a_failed_element(parquet_files):
    ds = read_parquet(parquet_files(6, files=2), "id").map(reciprocal).batch(4)
    iterator = iter(mirrored(2).distribute_dataset(ds))
    iterator.get_next()
    with pytest.raises(errors.UserFunctionError):
        iterator.get_next()
    assert len(list(iterator)) == 1


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda x: None, ["returned no element: None", "on row 0 of range. A function that changes a row has to"]),
        (lambda x: {"a": x} if x < 2 else x, ["structure"]),
        (lambda x: object(), ["object"]),
        (lambda x, y: x, ["TypeError"]),
    ],
)
def test_a_function_that_returns_no_element(function, says):
    with pytest.raises(errors.UserFunctionError) as caught:
        list(Dataset.range(4).map(function))
    assert line_of(function) in str(caught.value)
    for phrase in says:
        assert phrase in str(caught.value)


def test_a_predicate_that_returns_no_bool():
    with pytest.raises(errors.UserFunctionError, match=r"filter: .*returned.*one bool"):
        list(Dataset.range(4).filter(lambda x: x))


def reciprocal_of_piece(x):
    return 1 / int(x[0])


@pytest.mark.parametrize("strategy_name", ["mirrored", pytest.param("on_cluster", marks=pytest.mark.cluster)])
def test_a_replica_function_that_raises_names_its_replica(request, strategy_name):
    strategy = mirrored(2) if strategy_name == "mirrored" else request.getfixturevalue(strategy_name)
    pieces = PerReplica((np.array([1]), np.array([0])))
    with pytest.raises(ZeroDivisionError) as caught:
        repr(strategy.run(reciprocal_of_piece, args=(pieces,)))
    report = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    assert "replica 1" in report
    assert "reciprocal_of_piece" in report
    # The strategy can be used afterwards.
    pieces = PerReplica((np.array([1]), np.array([2])))
    assert float(strategy.reduce("SUM", strategy.run(reciprocal_of_piece, args=(pieces,)), axis=None)) == 1.5


def one_or_two(x):
    return x if int(x) < 5 else (x, x)


@pytest.mark.cluster
def test_another_structure_in_a_later_call_is_an_error_when_looked_at(on_cluster):
    assert repr(on_cluster.run(one_or_two, args=(1,)))
    later = on_cluster.run(one_or_two, args=(9,))
    with pytest.raises(errors.DaskdistError, match=r"returned .* here and .* in its first call"):
        repr(later)


def test_structures_that_differ_over_replicas():
    with pytest.raises(errors.DaskdistError, match=r"returned .* on replica 0 and .* on replica 1"):
        mirrored(2).run(one_or_two, args=(PerReplica((np.int64(1), np.int64(9))),))


@pytest.mark.cluster
def test_structures_that_differ_over_replicas_on_a_cluster(on_cluster):
    with pytest.raises(errors.DaskdistError, match=r"returned .* on replica 0 and .* on replica 1"):
        repr(on_cluster.run(one_or_two, args=(PerReplica((np.int64(1), np.int64(9))),)))


# --- reduce ---

UNEVEN = PerReplica((np.array([1, 2, 3]), np.array([5])))


@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_shapes_that_differ_need_an_axis(op):
    with pytest.raises(errors.ArgumentError, match=r"\(3,\).*\(1,\).*axis=0"):
        mirrored(2).reduce(op, UNEVEN, axis=None)


@pytest.mark.cluster
@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_shapes_that_differ_on_a_cluster_show_when_looked_at(on_cluster, op):
    result = on_cluster.reduce(op, UNEVEN, axis=None)
    with pytest.raises(errors.ArgumentError, match=r"\(3,\).*\(1,\).*axis=0"):
        np.asarray(result)


@pytest.mark.parametrize("axis", [0, -1, (0,)])
def test_an_axis_a_value_does_not_have(axis):
    with pytest.raises(errors.ArgumentError, match=r"axis.*shape \(\)"):
        mirrored(2).reduce("SUM", PerReplica((np.float64(1), np.float64(2))), axis=axis)


def test_an_axis_named_twice():
    with pytest.raises(errors.ArgumentError, match="axis"):
        mirrored(2).reduce("SUM", PerReplica((np.ones(2), np.ones(2))), axis=(0, -1))


@pytest.mark.parametrize("value", [3.0, np.ones(2), {"a": 1}, None])
@pytest.mark.parametrize("axis", [None, 0])
def test_a_plain_value_is_not_summed_over_several_replicas(value, axis):
    with pytest.raises(errors.ArgumentError, match=r"SUM over 2 replicas.*MEAN"):
        mirrored(2).reduce("SUM", value, axis=axis)


def test_text_is_not_reduced():
    with pytest.raises(errors.ArgumentError, match="only numbers"):
        mirrored(2).reduce("SUM", PerReplica((np.array(["a"]), np.array(["b"]))), axis=0)


def test_a_value_of_another_strategy():
    batch = next(iter(mirrored(3).distribute_dataset(Dataset.range(6).batch(6))))
    for use in (lambda s: s.run(len, args=(batch,)), lambda s: s.reduce("SUM", batch, axis=0)):
        with pytest.raises(errors.ArgumentError, match=r"3 values.*2 replicas"):
            use(mirrored(2))


# --- sharding ---


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("pipeline", "says"),
    [
        (lambda paths: read_parquet(paths, "id").batch(4), ["1 file with 1 split in all", "2 workers", "DATA"]),
        (lambda paths: Dataset.range(8).batch(4), ["range", "no files", "DATA"]),
        (lambda paths: Dataset.from_tensor_slices(np.ones(8)).batch(4), ["from_tensor_slices", "DATA"]),
        (lambda paths: read_parquet(paths * 2, "id").take(5).batch(4), ["take", "DATA"]),
        (lambda paths: read_parquet(paths * 2, "id").batch(4).skip(1), ["skip", "DATA"]),
    ],
)
def test_file_sharding_refuses_unsuitable_datasets(on_cluster, parquet_files, pipeline, says):
    ds = pipeline(parquet_files(8)).with_options(policy("file"))
    with pytest.raises(errors.ShardingError) as caught:
        on_cluster.distribute_dataset(ds)
    for phrase in ["FILE", *says]:
        assert phrase in str(caught.value)


def test_a_policy_that_does_not_exist():
    options = Options()
    with pytest.raises(errors.ArgumentError, match=r"'files'.*FILE"):
        options.experimental_distribute.auto_shard_policy = "files"
    with pytest.raises(AttributeError, match=r"auto_shard_polcy.*auto_shard_policy"):
        options.auto_shard_polcy = AutoShardPolicy.FILE


# --- clusters ---


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.cluster
@pytest.mark.timeout(30)
def test_an_address_without_a_server_is_an_error_within_the_time_limit():
    assert DEFAULTS["timeouts"]["connect"] == 8
    address = f"tcp://127.0.0.1:{free_port()}"
    start = time.monotonic()
    with (
        dask.config.set({"daskdist.timeouts.connect": 1}),
        pytest.raises(errors.ClusterError, match=re.escape(address)) as caught,
    ):
        daskdist.MultiWorkerMirroredStrategy(address)
    assert 1 <= time.monotonic() - start < 8
    assert isinstance(caught.value, ConnectionError)


CONNECT = """
import sys, time, warnings, daskdist
warnings.simplefilter("ignore", ResourceWarning)
# Import this first, so that the import is not timed.
connect = daskdist.MultiWorkerMirroredStrategy
for address in sys.argv[1:]:
    start = time.monotonic()
    try:
        connect(address)
    except daskdist.errors.ClusterError as error:
        print(f"ClusterError: {error} [{time.monotonic() - start:.0f} s]", file=sys.stderr)
"""


def connect_apart(*addresses: str, **env: str) -> str:
    """Return the output of a separate process that connects and exits, so that a hang cannot affect other tests."""
    return programs.run("-c", CONNECT, *addresses, env=env, timeout=40).stderr


@pytest.mark.cluster
def test_another_server_at_the_address_or_an_invalid_one():
    addresses = ["nonsense", "tcp://127.0.0.1", "gopher://127.0.0.1:1"]
    with socket.create_server(("127.0.0.1", 0)) as server:
        # This server accepts connections and sends nothing, as a server of another protocol may.
        silent = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        said = connect_apart(*addresses, silent, DASK_DASKDIST__TIMEOUTS__CONNECT="1")
    for address in addresses:
        assert re.search(f"ClusterError: .*{re.escape(address)}", said)
    report = re.search(rf"ClusterError: .*{re.escape(silent)}.* within 1 s[\s\S]*\[(\d+) s\]", said)
    assert report is not None, said
    assert int(report[1]) < 6
    assert said.count("ClusterError: ") == len(addresses) + 1
    assert "Exception ignored" not in said


# --- the end ---


@pytest.mark.parametrize("strategy_name", ["mirrored", pytest.param("on_cluster", marks=pytest.mark.cluster)])
def test_get_next_past_the_end_raises_again_and_again(request, strategy_name):
    strategy = mirrored(2) if strategy_name == "mirrored" else request.getfixturevalue(strategy_name)
    iterator = iter(strategy.distribute_dataset(Dataset.range(4).batch(4)))
    iterator.get_next()
    for _ in range(3):
        with pytest.raises(errors.OutOfRangeError):
            iterator.get_next()
    assert next(iterator, "nothing") == "nothing"
    missing = iterator.get_next_as_optional()
    assert not missing.has_value()
    with pytest.raises(errors.ArgumentError, match="no value"):
        missing.get_value()


def test_lists_of_several_lengths_are_refused_with_the_way_to_return_arrays():
    words = Dataset.from_tensor_slices(["a b", "", "c"])
    with pytest.raises(
        errors.UserFunctionError, match=r"list is a tuple of its items.*numpy\.asarray\(items, dtype\)$"
    ):
        list(words.map(lambda line: [ord(word) for word in line.split()]))
    with pytest.raises(errors.UserFunctionError, match=r"every element needs the same$"):
        list(words.map(lambda line: tuple(ord(word) for word in line.split())))
    arrays = words.map(lambda line: np.asarray([ord(word) for word in line.split()], np.int64))
    assert [row.tolist() for row in arrays] == [[97, 98], [], [99]]
