"""Our own nodes, formats, devices and policies through the law suites that are shipped; and the suites themselves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import dask.array as da
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import daskdist
from daskdist import Dataset
from daskdist.core.function import UserFunction
from daskdist.core.node import Facts, Transformation
from daskdist.core.primitive import Compute
from daskdist.core.spec import ElementSpec
from daskdist.devices import KINDS, device
from daskdist.formats import FORMATS
from daskdist.formats.parquet import Parquet
from daskdist.ops.filter import Filter
from daskdist.ops.map import Map
from daskdist.passes.rebatch import rebatch
from daskdist.sharding import POLICIES, AutoShardPolicy, Decision, decide
from daskdist.testing import DeviceLaws, Elements, FormatLaws, NodeLaws, PolicyLaws, same_multiset


def rows(number=10):
    return Dataset.from_tensor_slices({"a": np.arange(number), "b": np.arange(2.0 * number).reshape(number, 2)})


class TestSources(NodeLaws):
    def nodes(self):
        return [
            Dataset.range(7).node,
            Dataset.range(9, 2, -2).node,
            Dataset.range(0).node,
            rows().node,
            rows(0).node,
            Dataset.from_tensor_slices((np.arange(3), np.array(["a", "b", "a"]))).node,
            Dataset.from_tensors(([1.0, 2.0], 3)).node,
            Dataset.from_dask(da.arange(12, chunks=5).reshape(12, 1)).node,
        ]


class TestReadFiles(NodeLaws):
    @pytest.fixture(autouse=True)
    def _files(self, tmp_path):
        self.paths = [str(tmp_path / f"{number}.parquet") for number in range(3)]
        for number, path in enumerate(self.paths):
            pq.write_table(pa.table({"a": np.arange(5) + 5 * number}), path, row_group_size=2)

    def nodes(self):
        whole = daskdist.read_parquet(self.paths).node
        return [
            whole,
            daskdist.read_parquet(self.paths[:1]).node,
            daskdist.read_parquet(self.paths, columns=("a", ["a", "a"])).node,
            whole.sharded(0, 2, by_split=False),
            whole.sharded(1, 2, by_split=False),
            whole.sharded(1, 2, by_split=True),
        ]

    @pytest.mark.parametrize("by_split", [False, True])
    @pytest.mark.parametrize("is_listed", [False, True])
    def test_shards_are_the_whole(self, by_split, is_listed):
        whole = daskdist.read_parquet(self.paths).node
        if is_listed:
            whole.splits()
        shares = [whole.sharded(index, 3, by_split=by_split) for index in range(3)]
        labels = [split.label for share in shares for split in share.splits()]
        assert sorted(labels) == sorted(split.label for split in whole.splits())
        assert len(set(labels)) == 9


class TestMap(NodeLaws):
    def nodes(self):
        return [
            rows().map(lambda d: d["a"] + 1).node,
            rows().map(lambda d: (d["b"], {"n": 1.0})).node,
            rows().batch(4).map(lambda d: d["b"].sum(axis=1)).node,
            Dataset.range(6).map(lambda x: [x, x]).node,
            Dataset.range(7).batch(2, drop_remainder=True).batch(2).map(np.negative).node,
            Dataset.range(0).map(lambda x: x / 2).node,
        ]


class TestFilter(NodeLaws):
    def nodes(self):
        return [
            rows().filter(lambda d: d["a"] % 3 == 0).node,
            rows().filter(lambda d: bool(d["b"][0] < 0)).node,
            rows().batch(4).filter(lambda d: len(d["a"]) == 4).node,
            Dataset.from_tensor_slices((np.arange(5), np.arange(5.0))).filter(lambda x, y: x > y - 1).node,
        ]


class TestBatch(NodeLaws):
    def nodes(self):
        return [
            rows().batch(4).node,
            rows().batch(4, drop_remainder=True).node,
            rows().batch(1).node,
            rows().batch(99).node,
            rows().batch(99, drop_remainder=True).node,
            Dataset.range(12).batch(2).batch(3).node,
            Dataset.range(9).repeat().batch(4).node,
            Dataset.range(9).map(lambda x: np.zeros(2)).batch(4).node,
        ]


class TestShuffle(NodeLaws):
    def nodes(self):
        return [
            rows().shuffle(1, seed=3).node,
            rows().shuffle(4, seed=3).node,
            rows().shuffle(100, seed=3).node,
            rows().shuffle(4, seed=4, reshuffle_each_iteration=False).node,
            rows().batch(2).shuffle(3, seed=3).node,
            rows().repeat().shuffle(4, seed=3).node,
        ]


class TestCounting(NodeLaws):
    def nodes(self):
        chains = [Dataset.range(9), rows().batch(4), Dataset.range(9).map(lambda x: x / 2), Dataset.range(5).repeat()]
        counted = [[ds.take(3), ds.take(0), ds.take(-1), ds.skip(2), ds.skip(0), ds.skip(-1)] for ds in chains]
        return [ds.node for each in counted for ds in each]


class TestOthers(NodeLaws):
    def nodes(self):
        return [
            Dataset.range(4).repeat(3).node,
            Dataset.range(4).repeat(0).node,
            Dataset.range(4).repeat().node,
            Dataset.range(0).repeat(3).node,
            rows().batch(4).repeat(2).node,
            rows().prefetch(2).node,
            rows().prefetch(-1).node,
            rows().with_options(daskdist.Options(auto_shard_policy="data")).node,
            rows().with_options(daskdist.Options(auto_shard_policy="file")).node,
        ]


class TestDeal(NodeLaws):
    def nodes(self):
        # Pieces without rows are nobody's element; replicas' tests have them.
        chains = [rows(8).batch(4), rows(8).batch(4).map(lambda d: d["b"]), rows(8).batch(4, drop_remainder=True)]
        return [rebatch(ds.node, ds.spec, pieces) for ds in chains for pieces in (2, 4)]


class TestPersisted(NodeLaws):
    @pytest.fixture(autouse=True)
    def _persisted(self):
        self.kept = [rows().batch(4).persist().node, rows().filter(lambda d: d["a"] > 2).persist().node]

    def nodes(self):
        return self.kept


class TestParquet(FormatLaws):
    def make_format(self):
        return Parquet({"x": ["f", "g"], "y": "n", "when": "t"})

    def write(self, directory):
        written = {}
        for number, (num_rows, group) in enumerate([(5, 2), (0, 1), (3, 8)]):
            path = directory / f"{number}.parquet"
            n = np.arange(num_rows) + 10 * number
            f, g, t = n.astype("float32"), n.astype("float32") / 2, n.astype("datetime64[ms]")
            pq.write_table(pa.table({"f": f, "n": n, "g": g, "t": t}), path, row_group_size=group)
            written[str(path)] = [{"x": np.stack([f[k], g[k]]), "y": n[k], "when": t[k]} for k in range(num_rows)]
        return written


class TestParquetWhole(FormatLaws):
    def make_format(self):
        return Parquet()

    def write(self, directory):
        written = {}
        for number, words in enumerate([["a", "", "ü"], [], ["b"]]):
            path = directory / f"{number}.parquet"
            lists = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(2.0 * len(words))), 2)
            columns = {"s": pa.array(words, pa.string()), "l": lists, "flag": pa.array([True] * len(words), pa.bool_())}
            pq.write_table(pa.table(columns), path, row_group_size=1)
            text = np.array(words, np.dtypes.StringDType())
            written[str(path)] = [
                {"s": np.asarray(text[k : k + 1])[0], "l": np.array([2.0 * k, 2.0 * k + 1]), "flag": np.bool_(True)}
                for k in range(len(words))
            ]
        return written


class TestCpu(DeviceLaws):
    def make_device(self):
        return device("CPU:1")


class TestAuto(PolicyLaws):
    def decide(self, outlook):
        return decide(AutoShardPolicy.AUTO, outlook)


class TestFile(PolicyLaws):
    def decide(self, outlook):
        return decide(AutoShardPolicy.FILE, outlook)


class TestData(PolicyLaws):
    def decide(self, outlook):
        return decide(AutoShardPolicy.DATA, outlook)


class TestOff(PolicyLaws):
    def decide(self, outlook):
        return decide(AutoShardPolicy.OFF, outlook)


def test_every_one_is_tested():
    assert set(FORMATS) == {"parquet"}
    assert set(KINDS) >= {"CPU"}
    assert set(POLICIES) == {AutoShardPolicy.AUTO, AutoShardPolicy.FILE, AutoShardPolicy.DATA, AutoShardPolicy.OFF}


def test_every_operation_is_tested():
    suites = [each for each in globals().values() if isinstance(each, type) and issubclass(each, NodeLaws)]
    suites.remove(NodeLaws)
    # Those two have their nodes of a fixture; one is of no operation.
    suites = [each for each in suites if each not in (TestReadFiles, TestPersisted)]
    tested = {type(node).__module__ for suite in suites for node in suite().nodes()}
    operations = {path.stem for path in Path(daskdist.__file__).parent.joinpath("ops").glob("*.py")} - {"__init__"}
    assert operations - {name.rpartition(".")[2] for name in tested} == {"read_files"}


# --- the suites find what is wrong ---


@dataclass(frozen=True, eq=False)
class Wrong(Transformation):
    """Claims what does not hold: it drops every element but the first of each block."""

    name = "wrong"
    facts = Facts(compute=True, keeps_count=True, keeps_rows=True, keeps_spec=True, per_worker=True)

    def lower(self, inputs):
        return Compute(inputs[0], lambda rows: rows.take(np.array([0])), "wrong", factor=None)


class _OfWrong(NodeLaws):
    def nodes(self):
        return [Wrong(Dataset.range(6).node)]


@pytest.mark.parametrize(
    "law",
    [
        "test_fact_compute",
        "test_fact_keeps_count",
        "test_fact_keeps_rows",
        "test_cardinality_is_the_number_that_comes",
        "test_comes_the_same_however_its_input_is_cut",
    ],
)
def test_a_wrong_node_breaks_laws(law):
    with pytest.raises(AssertionError, match="wrong"):
        getattr(_OfWrong(), law)()


@dataclass(frozen=True)
class Overlapping(Parquet):
    """Reads the first row group twice."""

    def list_splits(self, path, file, like):
        splits = super().list_splits(path, file, like)
        return [*splits[:1], *splits]


class _OfOverlapping(TestParquet):
    __test__ = False

    def make_format(self):
        return Overlapping({"x": ["f", "g"], "y": "n", "when": "t"})


def test_a_wrong_format_breaks_laws(tmp_path):
    with pytest.raises(AssertionError, match="splits in order"):
        _OfOverlapping().test_splits_are_the_file_once(tmp_path)


class _OfUndecided(PolicyLaws):
    def decide(self, outlook):
        return Decision(AutoShardPolicy.FILE, "always")


def test_a_wrong_policy_breaks_laws():
    with pytest.raises(AssertionError, match="FILE gives"):
        _OfUndecided().test_file_only_where_each_worker_gets_some()


class _Forgetful:
    kind, index = "CPU", 0

    def put(self, array):
        return np.asarray(array, np.float32)

    get = put


class _OfForgetful(DeviceLaws):
    def make_device(self):
        return _Forgetful()


def test_a_wrong_device_breaks_laws():
    with pytest.raises(AssertionError, match="came back"):
        _OfForgetful().test_arrays_come_back_as_they_went()


def test_multisets():
    same_multiset([1, 2, 2], [2, 1, 2])
    with pytest.raises(AssertionError, match="missing"):
        same_multiset([1, 2], [1, 2, 2])


def test_fact_of_one_is_no_fact_of_many():
    # A running sum looks at order; called a computation, it is found out.
    total = []

    def running(x):
        total.append(x)
        return np.sum(total)

    class _OfRunning(NodeLaws):
        def nodes(self):
            return [Map(Dataset.range(5).node, UserFunction(running, "map"))]

    with pytest.raises(AssertionError):
        _OfRunning().test_fact_compute()


def test_given_elements():
    spec = ElementSpec.of(np.int64(0))
    node = Filter(Elements(spec, tuple(np.arange(5)), 2), UserFunction(lambda x: x > 2, "filter"))
    assert [int(x) for x in Dataset(node)] == [3, 4]
