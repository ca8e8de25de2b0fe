"""Our own operations, devices and policies in the public law suites."""

from __future__ import annotations

import pickle
from pathlib import Path

import dask.array as da
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import daskdist
from daskdist import Dataset, Ragged, TensorSpec
from daskdist.core.block import Block, Bundle
from daskdist.core.dataset_base import element_spec_of, node_of
from daskdist.core.structure import LONE
from daskdist.devices import KINDS, device
from daskdist.ops.from_rows import FromRows
from daskdist.passes.rebatch import rebatch
from daskdist.sharding import POLICIES, AutoShardPolicy, decide
from daskdist.testing import DeviceLaws, NodeLaws, PolicyLaws


def nodes_of(*datasets):
    return [node_of(dataset) for dataset in datasets]


def rows(number=10):
    return Dataset.from_tensor_slices({"a": np.arange(number), "b": np.arange(2.0 * number).reshape(number, 2)})


class TestSources(NodeLaws):
    def nodes(self):
        return nodes_of(
            Dataset.range(7),
            Dataset.range(9, 2, -2),
            Dataset.range(0),
            rows(),
            rows(0),
            Dataset.from_tensor_slices((np.arange(3), np.array(["a", "b", "a"]))),
            Dataset.from_tensors(([1.0, 2.0], 3)),
            Dataset.from_dask(da.arange(12, chunks=5).reshape(12, 1)),
        )


class TestReadFiles(NodeLaws):
    @pytest.fixture(autouse=True)
    def _files(self, tmp_path):
        self.paths = [str(tmp_path / f"{number}.parquet") for number in range(3)]
        for number, path in enumerate(self.paths):
            pq.write_table(pa.table({"a": np.arange(5) + 5 * number}), path, row_group_size=2)

    def nodes(self):
        whole = node_of(daskdist.read_parquet(self.paths))
        return [
            whole,
            node_of(daskdist.read_parquet(self.paths[:1])),
            node_of(daskdist.read_parquet(self.paths, columns=("a", ["a", "a"]))),
            whole.shard_of_files(0, 2, by_split=False),
            whole.shard_of_files(1, 2, by_split=False),
            whole.shard_of_files(1, 2, by_split=True),
        ]

    @pytest.mark.parametrize("by_split", [False, True])
    @pytest.mark.parametrize("is_listed", [False, True])
    def test_shards_are_the_whole(self, by_split, is_listed):
        whole = node_of(daskdist.read_parquet(self.paths))
        if is_listed:
            whole.splits()
        shares = [whole.shard_of_files(index, 3, by_split=by_split) for index in range(3)]
        labels = [split.label for share in shares for split in share.splits()]
        assert sorted(labels) == sorted(split.label for split in whole.splits())
        assert len(set(labels)) == 9


class TestMap(NodeLaws):
    def nodes(self):
        return nodes_of(
            rows().map(lambda d: d["a"] + 1),
            rows().map(lambda d: (d["b"], {"n": 1.0})),
            rows().batch(4).map(lambda d: d["b"].sum(axis=1)),
            Dataset.range(6).map(lambda x: [x, x]),
            Dataset.range(7).batch(2, drop_remainder=True).batch(2).map(np.negative),
            Dataset.range(0).map(lambda x: x / 2),
            Dataset.range(7).batch(2).map(np.negative, device=True),
        )


class TestSelect(NodeLaws):
    def nodes(self):
        return nodes_of(
            rows().select("b"),
            rows().select(["b"]),
            rows().select(["b", "a"]),
            rows().map(lambda d: (d["a"], d)).select([1]),
            rows().map(lambda d: (d["a"], d)).select(1),
            rows().batch(4)["a"],
            words().map(lambda w: {"w": w, "n": 1.0})["w"],
            rows().rename({"a": "x"}),
            rows().rename({"a": "b", "b": "a"}),
            rows().map(lambda d: (d["a"], d)).rename({0: "n"}),
        )


class TestSlidingWindow(NodeLaws):
    def nodes(self):
        numbers = Dataset.range(11)
        return nodes_of(
            numbers.sliding_window(3),
            numbers.sliding_window(3, 2),
            numbers.sliding_window(3, 5),
            numbers.sliding_window(3, 2, 2),
            numbers.sliding_window(3, 2, drop_remainder=False),
            numbers.sliding_window(20),
            rows().sliding_window(9, 2),
            rows().batch(2).sliding_window(2),
            numbers.filter(lambda x: x % 2 == 0).sliding_window(2, drop_remainder=False),
            numbers.window(3, 1).flat_map(lambda window: window.batch(3)),
            numbers.window(3, 1).flat_map(lambda window: window.batch(3, drop_remainder=True)),
        )


class TestSplit(NodeLaws):
    def nodes(self):
        numbers = Dataset.range(20)
        some = numbers.filter(lambda x: x % 5 > 0)
        marked = numbers.map(lambda x: {"x": x, "even": x % 2 == 0, "name": str(x // 4)})
        return nodes_of(
            *numbers.split(0.75),
            numbers.split(0.75, seed=1)[0],
            *some.split([0.5, 0.25, 0.25]),
            *numbers.batch(3).split(0.5),
            *marked.split(0.5, by="name"),
            marked.split(0.5, by=["name", "even"])[0],
            marked.split(0.5, by=lambda item: item["x"] % 7)[1],
            *marked.split(0.5, stratify="even"),
            marked.split(0.55, stratify=lambda value: value["x"] % 3)[1],
            *numbers.kfold(3)[1],
            words().split(0.5, by=len)[0],
        )


class TestMapWithRng(NodeLaws):
    def nodes(self):
        return nodes_of(
            rows().map(lambda d, rng: d["a"] + rng.integers(9), rng=1),
            rows().map(lambda d, rng: d["a"] + rng.integers(9), rng=2),
            rows().batch(4).map(lambda d, rng: rng.permutation(d["b"]), rng=1),
            rows().filter(lambda d: d["a"] > 2).map(lambda d, rng: (d, rng.normal(size=2)), rng=1),
            Dataset.range(5).repeat().map(lambda x, rng: rng.random(), rng=1),
        )


class TestFilter(NodeLaws):
    def nodes(self):
        return nodes_of(
            rows().filter(lambda d: d["a"] % 3 == 0),
            rows().filter(lambda d: bool(d["b"][0] < 0)),
            rows().batch(4).filter(lambda d: len(d["a"]) == 4),
            Dataset.from_tensor_slices((np.arange(5), np.arange(5.0))).filter(lambda x, y: x > y - 1),
        )


class TestBatch(NodeLaws):
    def nodes(self):
        return nodes_of(
            rows().batch(4),
            rows().batch(4, drop_remainder=True),
            rows().batch(1),
            rows().batch(99),
            rows().batch(99, drop_remainder=True),
            Dataset.range(12).batch(2).batch(3),
            Dataset.range(9).repeat().batch(4),
            Dataset.range(9).map(lambda x: np.zeros(2)).batch(4),
        )


class TestShuffle(NodeLaws):
    def nodes(self):
        return nodes_of(
            rows().shuffle(1, seed=3),
            rows().shuffle(4, seed=3),
            rows().shuffle(100, seed=3),
            rows().shuffle(4, seed=4, reshuffle_each_iteration=False),
            rows().batch(2).shuffle(3, seed=3),
            rows().repeat().shuffle(4, seed=3),
        )


class TestGlobalShuffle(NodeLaws):
    def nodes(self):
        return nodes_of(
            Dataset.range(9).global_shuffle(seed=3),
            Dataset.range(9).global_shuffle(seed=4, reshuffle_each_iteration=False),
            rows().batch(2).global_shuffle(seed=3),
            rows().filter(lambda d: d["a"] % 2 == 0).global_shuffle(seed=3),
            rows(0).global_shuffle(seed=3),
        )


class TestCounting(NodeLaws):
    def nodes(self):
        chains = [Dataset.range(9), rows().batch(4), Dataset.range(9).map(lambda x: x / 2), Dataset.range(5).repeat()]
        counted = [[ds.take(3), ds.take(0), ds.take(-1), ds.skip(2), ds.skip(0), ds.skip(-1)] for ds in chains]
        return [node_of(ds) for value in counted for ds in value]


class TestOthers(NodeLaws):
    def nodes(self):
        return nodes_of(
            Dataset.range(4).repeat(3),
            Dataset.range(4).repeat(0),
            Dataset.range(4).repeat(),
            Dataset.range(0).repeat(3),
            rows().batch(4).repeat(2),
            rows().prefetch(2),
            rows().prefetch(-1),
            rows().with_options(daskdist.Options(auto_shard_policy="data")),
            rows().with_options(daskdist.Options(auto_shard_policy="file")),
        )


class TestDeal(NodeLaws):
    def nodes(self):
        # All batches here can be cut into four pieces with rows; the tests of replicas have pieces without rows.
        chains = [rows(8).batch(4), rows(8).batch(4).map(lambda d: d["b"]), rows(8).batch(4, drop_remainder=True)]
        whole = rows(8).batch(4).with_options(daskdist.Options(on_error="skip"))
        return [rebatch(node_of(ds), element_spec_of(ds), pieces) for ds in [*chains, whole] for pieces in (2, 4)]


def words():
    """Return single rows of different lengths."""
    return Dataset.from_tensor_slices(Ragged(np.arange(16), [0, 1, 3, 3, 7, 8, 11, 16]))


def squares(number):
    return ({"x": x, "y": x * x} for x in range(number))


class TestGenerated(NodeLaws):
    def nodes(self):
        spec = {"x": TensorSpec((), "int64"), "y": TensorSpec((), "float32")}
        return nodes_of(
            Dataset.counter(),
            Dataset.counter(5, -2, np.float32),
            Dataset.random(seed=3),
            Dataset.random(seed=4, rerandomize_each_iteration=True),
            Dataset.from_generator(squares, spec, (7,)),
            Dataset.from_generator(squares, spec, (0,)),
            Dataset.range(5, output_type=np.float32),
            words(),
        )


class TestFromRows(NodeLaws):
    def nodes(self):
        # Windows are datasets of rows in memory, of one shape or of several.
        items = [(np.zeros([2] * (number % 2)),) for number in range(5)]
        numbers = Block(LONE, [np.arange(4)])
        return nodes_of(
            Dataset(FromRows(numbers, element_spec_of(Dataset.range(1)))),
            Dataset(FromRows(numbers, None)),
            Dataset(FromRows(Bundle(LONE, items), None)),
            Dataset(FromRows(Bundle(LONE, items[::2]), None)),
        )


class TestZip(NodeLaws):
    def nodes(self):
        return nodes_of(
            Dataset.zip(rows(), Dataset.range(3, 20)),
            Dataset.zip({"a": rows(3), "b": (rows().batch(2), Dataset.counter())}),
            Dataset.zip(rows()),
            Dataset.zip(words(), rows()),
            Dataset.zip(rows(), rows(0)),
            rows().enumerate(),
            rows().batch(3).enumerate(start=-2),
            words().enumerate(),
            Dataset.counter().enumerate(),
        )


class TestConcatenate(NodeLaws):
    def nodes(self):
        return nodes_of(
            rows().concatenate(rows(3)),
            rows().batch(4).concatenate(rows().batch(3)),
            rows().batch(4).concatenate(rows().padded_batch(3)),
            rows(0).concatenate(rows(2)),
            words().concatenate(words().take(2)),
            Dataset.range(3).concatenate(Dataset.counter(7)),
        )


class TestMixing(NodeLaws):
    def nodes(self):
        sources = [Dataset.range(5), Dataset.range(10, 13), Dataset.range(20, 30)]
        batches = [Dataset.range(9).batch(2), Dataset.range(9).padded_batch(2)]
        choices = Dataset.from_tensor_slices(np.array([0, 1, 1, 2, 1, 1, 0, 2]))
        choose, sample = Dataset.choose_from_datasets, Dataset.sample_from_datasets
        return nodes_of(
            choose(sources, choices),
            choose(sources, choices, stop_on_empty_dataset=False),
            choose(sources, Dataset.range(3).repeat(), stop_on_empty_dataset=False),
            choose(batches, choices.take(3)),
            sample(sources, seed=1),
            sample(sources, seed=1, weights=[1, 0, 3]),
            sample(sources, seed=1, stop_on_empty_dataset=True),
            sample(sources, seed=1, rerandomize_each_iteration=False),
            sample([*sources, Dataset.counter()], seed=1),
            sample(batches, seed=1),
        )


def _range(x):
    return Dataset.range(x)


def _few_squares(x):
    signature = {"x": TensorSpec((), "int64"), "y": TensorSpec((), "int64")}
    return Dataset.from_generator(squares, signature, (int(x) % 3,))


def _batches(x):
    return _few_squares(x).batch(2)


class TestNested(NodeLaws):
    def nodes(self):
        # Inner datasets in memory and other ones are handled by different code.
        return [
            node_of(item)
            for function in (_range, _few_squares, _batches)
            for item in [
                Dataset.range(6).flat_map(function),
                Dataset.range(0).flat_map(function),
                Dataset.counter().flat_map(function),
                Dataset.range(6).interleave(function),
                Dataset.range(6).interleave(function, cycle_length=4, block_length=2),
                Dataset.range(6).interleave(function, cycle_length=9),
                Dataset.counter().interleave(function, 3),
            ]
        ]


class TestWindow(NodeLaws):
    def nodes(self):
        return nodes_of(
            rows().window(3),
            rows().window(3, drop_remainder=True),
            rows().window(2, shift=1),
            rows().window(3, shift=2, stride=2),
            rows().window(2, shift=5, drop_remainder=True),
            Dataset.range(7).batch(2).window(2),
            Dataset.range(7).repeat().window(2),
            words().window(3),
            rows(0).window(2),
        )


def _first_two(key, window):
    return window.take(2)


def _pairs(key, window):
    return window.batch(2)


class TestGroups(NodeLaws):
    def nodes(self):
        lone = Dataset.range(11)
        return nodes_of(
            lone.group_by_window(lambda x: x % 3, _pairs, 3),
            lone.group_by_window(lambda x: x % 2, _first_two, window_size_func=lambda key: key + 1),
            rows().group_by_window(lambda d: d["a"] // 4, _pairs, 2),
            lone.batch(2).group_by_window(len, _first_two, 2),
            words().group_by_window(len, _first_two, 2),
            words().bucket_by_sequence_length(len, [2, 4], [2, 2, 1]),
            words().bucket_by_sequence_length(len, [2, 4], [2, 2, 2], drop_remainder=True),
            words().bucket_by_sequence_length(len, [2, 9], [2, 2, 2], pad_to_bucket_boundary=True),
            words().bucket_by_sequence_length(len, [], [3], padding_values=-1),
            rows().bucket_by_sequence_length(lambda d: d["a"], [5], [2, 4], no_padding=True),
        )


class TestBatchBySize(NodeLaws):
    def nodes(self):
        return nodes_of(
            words().batch_by_size(9, len),
            words().batch_by_size(9, len, ragged=True),
            words().batch_by_size(9, len, 4, padding_values=-1),
            words().batch_by_size(9, len, 3, round_size=2),
            words().batch_by_size(12, len, 100, ragged=True, round_size=3),
            rows().batch_by_size(20, lambda d: d["a"]),
            rows(0).batch_by_size(20, lambda d: d["a"], 5),
        )


class TestPadded(NodeLaws):
    def nodes(self):
        return nodes_of(
            words().padded_batch(3),
            words().padded_batch(3, drop_remainder=True),
            words().padded_batch(3, padded_shapes=[7], padding_values=-1),
            rows().padded_batch(4),
            Dataset.range(7).map(lambda x: str(int(x))).padded_batch(3),
            words().map(lambda x: (x, x[:1])).padded_batch(2, padding_values=(0, 1)),
            words().ragged_batch(3),
            words().ragged_batch(3, drop_remainder=True, row_splits_dtype=np.int32),
            words().ragged_batch(2).unbatch(),
            Dataset.range(5).ragged_batch(2),
        )


class TestRebatch(NodeLaws):
    def nodes(self):
        return nodes_of(
            rows().batch(4).unbatch(),
            rows(9).batch(3).batch(2, drop_remainder=True).unbatch(),
            rows().batch(4).map(lambda d: d["b"]).unbatch(),
            rows().batch(4).rebatch(3),
            rows().batch(4).rebatch(3, drop_remainder=True),
            rows().batch(4).rebatch([2, 1]),
            rows().batch(4).rebatch([0, 3]),
            rows().batch(4).map(lambda d: d["b"]).rebatch(4),
            rows(0).batch(4).rebatch(4),
            Dataset.range(4).repeat().batch(3).rebatch(2),
        )


def _parity(x):
    return int(x) % 2


class TestResample(NodeLaws):
    def nodes(self):
        return nodes_of(
            Dataset.range(40).rejection_resample(_parity, [0.3, 0.7], seed=1),
            Dataset.range(40).rejection_resample(_parity, [0.3, 0.7], seed=2),
            Dataset.range(40).rejection_resample(_parity, [0.0, 1.0], [0.5, 0.5], seed=1),
            Dataset.range(0).rejection_resample(_parity, [0.3, 0.7], seed=1),
            rows().batch(2).rejection_resample(lambda d: int(d["a"][0] % 4 // 2), [0.5, 0.5], seed=1),
        )


class TestOneByOne(NodeLaws):
    def nodes(self):
        repeated = Dataset.from_tensor_slices(np.array([3, 1, 3, 2, 1]))
        return nodes_of(
            rows().shard(3, 0),
            rows().shard(3, 2),
            rows(2).shard(5, 4),
            rows().batch(3).shard(2, 1),
            Dataset.counter().shard(2, 1),
            Dataset.range(9).take_while(lambda x: x < 5),
            Dataset.counter().take_while(lambda x: x < 7),
            rows().batch(4).take_while(lambda d: len(d["a"]) == 4),
            repeated.unique(),
            repeated.map(lambda x: {"a": x, "b": x * 1.0}).unique(),
            repeated.map(lambda x: "ab"[int(x) % 2]).unique(),
            repeated.batch(2).unique(),
            words().unique(),
            Dataset.range(9).scan(np.int64(0), lambda total, x: (total + x, total)),
            rows().scan((np.int64(0), 1.5), lambda state, d: (state, {"n": state[0], "d": d})),
            Dataset.counter().scan(np.int64(0), lambda total, x: (total + x, total)),
            Dataset.range(9).batch(4).scan(np.int64(0), lambda total, x: (total + len(x), x)),
            rows().assert_cardinality(10),
            Dataset.range(9).filter(lambda x: x > 6).assert_cardinality(2),
            Dataset.range(9).repeat().assert_cardinality(-1),
        )


def _fragile(x):
    return 12 // int(x % 4)


class TestIgnoreErrors(NodeLaws):
    def nodes(self):
        return nodes_of(
            rows().ignore_errors(),
            rows().batch(4).ignore_errors(),
            rows().shuffle(5, seed=1).map(lambda d: d["a"]).take(4).ignore_errors(),
            words().padded_batch(2).ignore_errors(),
            rows(0).ignore_errors(),
        )

    def test_failing_elements_count_for_take(self):
        assert [int(x) for x in Dataset.range(12).map(_fragile).take(5).ignore_errors()] == [12, 6, 4]
        assert [int(x) for x in Dataset.range(12).map(_fragile).ignore_errors().take(5)] == [12, 6, 4, 12, 6]

    def test_ignored_errors_keep_the_order_of_an_earlier_shuffle(self):
        ds = Dataset.range(12).shuffle(5, seed=1)
        expected = [12 // int(x % 4) for x in ds if x % 4]
        assert [int(x) for x in ds.map(_fragile).ignore_errors()] != sorted(expected)
        again = Dataset.range(12).shuffle(5, seed=1)
        assert [int(x) for x in again.map(_fragile).ignore_errors()] == expected
        options = daskdist.Options(on_error="skip")
        third = Dataset.range(12).shuffle(5, seed=1).map(_fragile).with_options(options)
        assert [int(x) for x in third] == expected

    @pytest.mark.parametrize("size", [1, 2, 5])
    def test_batches_that_do_not_stack_are_left_out(self, size):
        ds = Dataset.range(9).map(lambda x: np.zeros(int(x) // 3)).batch(size).ignore_errors()
        whole = [k for k in range(0, 9, size) if k // 3 == min(k + size - 1, 8) // 3]
        assert [batch.shape for batch in ds] == [(min(size, 9 - k), k // 3) for k in whole]


class TestPersisted(NodeLaws):
    @pytest.fixture(autouse=True)
    def _persisted(self):
        self.kept = nodes_of(rows().batch(4).persist(), rows().filter(lambda d: d["a"] > 2).persist())

    def nodes(self):
        return self.kept


class TestCpu(DeviceLaws):
    def make_device(self):
        return device("CPU:1")


class TestAuto(PolicyLaws):
    def decide(self, sharding_input):
        return decide(AutoShardPolicy.AUTO, sharding_input)


class TestFile(PolicyLaws):
    def decide(self, sharding_input):
        return decide(AutoShardPolicy.FILE, sharding_input)


class TestData(PolicyLaws):
    def decide(self, sharding_input):
        return decide(AutoShardPolicy.DATA, sharding_input)


class TestOff(PolicyLaws):
    def decide(self, sharding_input):
        return decide(AutoShardPolicy.OFF, sharding_input)


class TestHint(PolicyLaws):
    def decide(self, sharding_input):
        return decide(AutoShardPolicy.HINT, sharding_input)


def is_small(x):
    return x < 9


@pytest.mark.parametrize(
    "used",
    [
        Dataset.range(12).batch(5).unbatch(),
        Dataset.range(12).batch(5).rebatch(4),
        Dataset.range(12).padded_batch(5),
        Dataset.range(12).ragged_batch(5),
        Dataset.range(12).take(5).skip(2),
        Dataset.range(12).skip(-1),
        Dataset.range(12).shard(3, 1).repeat(2),
        Dataset.range(12).take_while(is_small).filter(is_small).unique(),
        Dataset.range(12).assert_cardinality(12).shuffle(5, seed=1, reshuffle_each_iteration=False),
        Dataset.range(12).sliding_window(3).enumerate(),
        Dataset.range(12).global_shuffle(seed=1).cache().prefetch(2),
    ],
)
def test_datasets_that_were_used_pickle_without_cloudpickle(used):
    # Processes of other libraries, as of a DataLoader, get them that way.
    before = repr(list(used))
    assert repr(list(pickle.loads(pickle.dumps(used)))) == before


def test_every_device_and_policy_is_tested():
    assert set(KINDS) >= {"CPU"}
    assert set(POLICIES) == set(AutoShardPolicy)


def test_every_operation_is_tested():
    suites = [item for item in globals().values() if isinstance(item, type) and issubclass(item, NodeLaws)]
    suites.remove(NodeLaws)
    # These two get their nodes from a fixture; the second belongs to no file of `ops`.
    suites = [value for value in suites if value not in (TestReadFiles, TestPersisted)]
    tested = {type(node).__module__ for suite in suites for node in suite().nodes()}
    operations = {path.stem for path in Path(daskdist.__file__).parent.joinpath("ops").glob("*.py")} - {"__init__"}
    # `nested` and `element_random` are no operations. The others store elements or use a cluster: tested elsewhere.
    others = {
        "read_files",
        "nested",
        "window_rows",
        "element_random",
        "cache",
        "snapshot",
        "make_numpy_dataset",
    }
    assert operations - {name.rpartition(".")[2] for name in tested} == others
