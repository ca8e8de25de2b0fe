"""A dataset as a Dask collection: its graph, its keys, and Dask's functions on it."""

from __future__ import annotations

import dask
import dask.array as da
import dask.bag
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dask.base import is_dask_collection, tokenize

import daskdist
from daskdist import Dataset
from daskdist.errors import ArgumentError, UnknownLengthError, UserFunctionError
from daskdist.testing import same_elements


def rows(number=10):
    return Dataset.from_tensor_slices({"a": np.arange(number), "b": np.arange(2.0 * number).reshape(number, 2)})


@pytest.fixture
def files(tmp_path):
    for number in range(3):
        table = pa.table({"a": np.arange(10) + 10 * number, "b": np.arange(10) / 2})
        pq.write_table(table, tmp_path / f"{number}.parquet", row_group_size=4)
    return str(tmp_path / "*.parquet")


# --- graph and keys ---


def test_a_dataset_is_a_dask_collection():
    assert is_dask_collection(rows())
    assert is_dask_collection(rows().batch(3))


@pytest.mark.parametrize("scheduler", ["sync", "threads"])
def test_each_element_is_a_key(files, scheduler):
    ds = daskdist.read_parquet(files).shuffle(12, seed=0).batch(4)
    keys = ds.__dask_keys__()
    graph = ds.__dask_graph__()
    names = {name for name, _ in keys}
    assert len(names) == 1
    assert [number for _, number in keys] == list(range(8))
    assert set(keys) <= set(graph)
    third, first = dask.get(graph, [keys[2], keys[0]])
    same_elements([first, third], [next(iter(ds)), list(rows_of(files))[2]])
    same_elements(dask.compute(ds, scheduler=scheduler)[0], list(rows_of(files)))


def rows_of(files):
    return daskdist.read_parquet(files).shuffle(12, seed=0).batch(4)


def test_one_element_computes_what_it_needs(files):
    seen = []
    ds = daskdist.read_parquet(files).map(lambda d: seen.append(int(d["a"])) or d["a"]).batch(4)
    keys = ds.__dask_keys__()
    seen.clear()
    from dask.optimization import cull

    graph = cull(dict(ds.__dask_graph__()), [keys[0]])[0]
    assert dask.get(graph, keys[0]).tolist() == [0, 1, 2, 3]
    assert seen == [0, 1, 2, 3]


def test_compute_gives_a_list():
    assert [value.tolist() for value in Dataset.range(5).batch(2).compute()] == [[0, 1], [2, 3], [4]]
    assert dask.compute(Dataset.range(0), Dataset.range(3).take(0)) == ([], [])
    assert dask.compute(Dataset.range(5).filter(lambda x: x > 9)) == ([],)


def test_several_datasets_are_computed_together():
    ds = Dataset.range(6)
    evens, squares = dask.compute(ds.filter(lambda x: x % 2 == 0), {"squares": ds.map(lambda x: x * x).batch(6)})
    assert [int(even) for even in evens] == [0, 2, 4]
    assert squares["squares"][0].tolist() == [0, 1, 4, 9, 16, 25]


def test_a_shared_input_is_one_task(files):
    seen = []
    ds = daskdist.read_parquet(files).map(lambda d: seen.append(1) or d["a"])
    dask.compute(ds.batch(4), ds.batch(4), scheduler="sync")
    # The function is tried on made-up elements for the spec, and then called once for each row: both datasets share it.
    assert len(seen) <= 32


def test_with_other_collections():
    ds = Dataset.range(6).batch(3)
    total, batches = dask.compute(da.arange(6, chunks=3).sum(), ds)
    assert total == 15
    assert len(batches) == 2


def test_a_dataset_is_an_argument_of_delayed():
    actual = dask.delayed(lambda batches: sum(map(np.sum, batches)))(Dataset.range(6).batch(4)).compute()
    assert actual == 15


def test_each_element_has_its_key_in_a_picture():
    keys = Dataset.range(5).batch(2).__dask_keys__()
    graph = Dataset.range(5).batch(2).__dask_graph__()
    assert [name for name, _ in keys] == [keys[0][0]] * 3
    assert all(key in graph for key in keys)


def test_visualize(tmp_path):
    pytest.importorskip("ipycytoscape")
    Dataset.range(5).batch(2).visualize(filename=str(tmp_path / "graph"), engine="ipycytoscape")


def test_dot_of_the_graph():
    graphviz = pytest.importorskip("graphviz")
    from dask.dot import to_graphviz

    ds = Dataset.range(5).batch(2)
    made = to_graphviz(dict(ds.__dask_graph__()))
    assert isinstance(made, graphviz.Digraph)
    assert made.source.count("gather") >= 3


def test_rows_counted_when_read_are_one_key(files):
    ds = daskdist.read_parquet(files).filter(lambda d: d["a"] % 2 == 0).map(lambda d: d["a"]).batch(4)
    assert len(ds.__dask_keys__()) == 1
    same_elements(dask.compute(ds)[0], list(ds))
    assert len(dask.compute(ds.repeat(2).take(5))[0]) == 5


def test_a_failing_function_says_where(files):
    ds = daskdist.read_parquet(files).map(lambda d: 1 // int(d["a"] - 15)).batch(4)
    with pytest.raises(UserFunctionError, match=r"1\.parquet row group 1"):
        dask.compute(ds)


# --- persist ---


@pytest.mark.parametrize(
    "build",
    [
        lambda ds: ds,
        lambda ds: ds.batch(4),
        lambda ds: ds.map(lambda d: (d["a"], d["b"])).batch(3),
        lambda ds: ds.map(lambda d: d["a"]),
        lambda ds: ds.filter(lambda d: d["a"] > 3),
        lambda ds: ds.filter(lambda d: d["a"] > 99),
        lambda ds: ds.take(0),
        lambda ds: ds.map(lambda d: np.zeros(d["a"] % 3)),
    ],
)
def test_a_persisted_dataset_has_the_same_elements(build):
    ds = build(rows())
    kept = ds.persist()
    same_elements(list(kept), list(ds), "persisted")
    same_elements(dask.compute(kept)[0], list(ds), "computed from persisted")
    assert kept.element_spec == ds.element_spec
    assert kept.cardinality() in (ds.cardinality(), len(list(ds)))


def test_operations_on_persisted_datasets():
    seen = []
    kept = rows().map(lambda d: seen.append(1) or d["a"]).persist()
    seen.clear()
    more = kept.shuffle(4, seed=0).batch(3).map(np.negative)
    assert sorted(-np.concatenate(list(more))) == list(range(10))
    assert sorted(-np.concatenate(dask.compute(more)[0])) == list(range(10))
    assert more.persist().cardinality() == 4
    assert seen == []


def test_persisted_knows_how_many_there_are():
    kept = rows().filter(lambda d: d["a"] % 2 == 0).persist()
    assert len(list(kept)) == 5
    # The dataset is in memory, so the number of elements may be known.
    assert kept.batch(2).persist().cardinality() in (3, -2)


@pytest.mark.cluster
def test_persisted_on_a_cluster(client):
    ds = rows().batch(4)
    kept = client.persist(ds)
    same_elements(client.compute(kept, sync=True), list(ds), "persisted on workers")
    same_elements(client.compute(kept.map(lambda d: d["a"]), sync=True), [d["a"] for d in ds], "mapped")


@pytest.mark.cluster
@pytest.mark.parametrize("is_counted", [True, False])
def test_computed_on_a_cluster(client, files, is_counted):
    ds = daskdist.read_parquet(files).shuffle(9, seed=1).batch(4)
    if not is_counted:
        ds = ds.filter(lambda d: d["a"][0] % 2 == 0)
    same_elements(client.compute(ds, sync=True), list(ds), "on a cluster's scheduler")


# --- arrays ---


def test_to_dask_array_gives_an_array_for_each_leaf():
    arrays = rows().batch(4).to_dask_array()
    assert set(arrays) == {"a", "b"}
    assert arrays["a"].chunks == ((4, 4, 2),)
    assert arrays["b"].chunks == ((4, 4, 2), (2,))
    assert arrays["b"].dtype == np.float64
    actual = dask.compute(arrays)[0]
    assert actual["a"].tolist() == list(range(10))
    assert actual["b"].tolist() == np.arange(20.0).reshape(10, 2).tolist()


def test_array_of_a_lone_leaf_and_of_tuples():
    assert Dataset.range(5).batch(2).to_dask_array().sum().compute() == 10
    pair = Dataset.from_tensor_slices((np.arange(4), np.ones((4, 3)))).batch(3, drop_remainder=True).to_dask_array()
    assert type(pair) is tuple
    assert [value.shape for value in pair] == [(3,), (3, 3)]
    assert pair[1].compute().sum() == 9


def test_array_of_batches_of_batches():
    array = Dataset.range(9).batch(2, drop_remainder=True).batch(3).to_dask_array()
    assert array.shape == (4, 2) or array.chunks[0] == (3, 1)


def test_array_of_mapped_batches_has_unknown_lengths():
    array = Dataset.range(5).batch(2).map(lambda x: x * 2).to_dask_array()
    assert np.isnan(array.chunks[0]).all()
    assert array.compute().tolist() == [0, 2, 4, 6, 8]


def test_array_of_batches_further_arranged():
    ds = Dataset.range(10).batch(3)
    assert ds.take(2).to_dask_array().compute().tolist() == [0, 1, 2, 3, 4, 5]
    assert ds.skip(2).prefetch(1).to_dask_array().compute().tolist() == [6, 7, 8, 9]
    shuffled = ds.shuffle(4, seed=0).to_dask_array()
    assert sorted(shuffled.compute()) == list(range(10))
    assert ds.repeat(2).to_dask_array().compute().tolist() == [*range(10)] * 2


def test_array_of_nothing():
    assert Dataset.range(0).batch(2).to_dask_array().compute().shape == (0,)
    array = rows(0).batch(2).to_dask_array()["b"]
    assert array.compute().shape == (0, 2)


def test_dask_arrays_round_trip():
    array = rows().batch(4).to_dask_array()["b"]
    same_elements(list(Dataset.from_dask(array)), list(np.arange(20.0).reshape(10, 2)))


def test_datasets_that_cannot_become_arrays():
    with pytest.raises(UnknownLengthError, match="only when the data is read"):
        Dataset.range(9).filter(lambda x: x > 2).batch(2).to_dask_array()
    with pytest.raises(ArgumentError, match=r"call batch\(n\) first"):
        Dataset.range(9).to_dask_array()
    with pytest.raises(UnknownLengthError, match="take"):
        Dataset.range(9).repeat().batch(2).to_dask_array()


# --- endless ---


@pytest.mark.parametrize(
    "use", [dask.compute, dask.persist, lambda ds: ds.__dask_graph__(), lambda ds: ds.__dask_keys__()]
)
@pytest.mark.parametrize("build", [lambda ds: ds.repeat(), lambda ds: ds.repeat().shuffle(3).batch(2)])
def test_endless_datasets_have_no_graph(use, build):
    with pytest.raises(UnknownLengthError, match=r"endless.*take\(n\)"):
        use(build(Dataset.range(3)))


def test_a_part_of_an_endless_dataset_has_a_graph():
    (actual,) = dask.compute(Dataset.range(3).repeat().batch(2).take(3))
    assert [result.tolist() for result in actual] == [[0, 1], [2, 0], [1, 2]]
    with pytest.raises(TypeError, match="endless"):
        len(Dataset.range(3).repeat())


# --- tokens ---


def _double(x):
    return x * 2


BUILDERS = {
    "range": lambda: Dataset.range(5),
    "range of others": lambda: Dataset.range(6),
    "slices": lambda: rows(),
    "other slices": lambda: rows(9),
    "map": lambda: Dataset.range(5).map(_double),
    "map of a lambda": lambda: Dataset.range(5).map(lambda x: x * 2),
    "another map": lambda: Dataset.range(5).map(lambda x: x * 3),
    "filter": lambda: Dataset.range(5).filter(_double),
    "batch": lambda: Dataset.range(5).batch(2),
    "batch without remainder": lambda: Dataset.range(5).batch(2, drop_remainder=True),
    "shuffle": lambda: Dataset.range(5).shuffle(3, seed=1),
    "shuffle of another seed": lambda: Dataset.range(5).shuffle(3, seed=2),
    "shuffle once": lambda: Dataset.range(5).shuffle(3, seed=1, reshuffle_each_iteration=False),
    "take": lambda: Dataset.range(5).take(2),
    "skip": lambda: Dataset.range(5).skip(2),
    "repeat": lambda: Dataset.range(5).repeat(2),
    "dask array": lambda: Dataset.from_dask(da.arange(6, chunks=2)),
    "dask dataframe": lambda: Dataset.from_dask(frame()),
}


def frame():
    return dd.from_pandas(pd.DataFrame({"a": range(6), "b": np.arange(6) / 2}), npartitions=3)


@pytest.mark.parametrize("name", BUILDERS)
def test_tokens_are_deterministic(name):
    with dask.config.set({"tokenize.ensure-deterministic": True}):
        assert tokenize(BUILDERS[name]()) == tokenize(BUILDERS[name]())
        assert BUILDERS[name]().__dask_keys__() == BUILDERS[name]().__dask_keys__()


def test_tokens_differ():
    tokens = {name: tokenize(build()) for name, build in BUILDERS.items()}
    assert len(set(tokens.values())) == len(tokens), tokens


def test_tokens_of_files_depend_on_paths_and_columns(files):
    a, b = daskdist.read_parquet(files), daskdist.read_parquet(files, columns=["a"])
    assert tokenize(a) == tokenize(daskdist.read_parquet(files))
    assert tokenize(a) != tokenize(b)


def test_a_closure_is_part_of_the_token():
    def times(factor):
        return Dataset.range(3).map(lambda x: x * factor)

    assert tokenize(times(2)) != tokenize(times(3))
    assert [int(x) for x in dask.compute(times(2), times(3))[1]] == [0, 3, 6]


# --- from_dask ---


def test_from_a_dask_array_merges_its_graph():
    seen = []
    array = da.arange(6, chunks=2).map_blocks(lambda block: seen.append(len(block)) or block + 1, dtype=int)
    seen.clear()
    ds = Dataset.from_dask(array).map(lambda x: x * 10).batch(4)
    assert ds.cardinality() == 2
    graph = ds.__dask_graph__()
    assert set(dict(array.__dask_graph__())) <= set(graph)
    assert seen == []
    assert [value.tolist() for value in dask.compute(ds, scheduler="sync")[0]] == [[10, 20, 30, 40], [50, 60]]
    assert seen == [2, 2, 2]
    assert [element.tolist() for element in ds] == [[10, 20, 30, 40], [50, 60]]


def test_from_a_dask_array_of_chunks_along_other_axes():
    array = da.arange(24, chunks=5).reshape(6, 4).rechunk((2, 3))
    same_elements(list(Dataset.from_dask(array)), list(np.arange(24).reshape(6, 4)))
    same_elements(dask.compute(Dataset.from_dask(array).batch(6))[0], [np.arange(24).reshape(6, 4)])


def test_from_a_dask_array_of_unknown_lengths():
    array = da.arange(10, chunks=4)
    ds = Dataset.from_dask(array[array % 2 == 0])
    assert ds.cardinality() == -2
    assert [int(element) for element in ds] == [0, 2, 4, 6, 8]
    assert [value.tolist() for value in dask.compute(ds.batch(3))[0]] == [[0, 2, 4], [6, 8]]
    assert ds.element_spec.shape == ()


def test_from_a_dask_dataframe():
    ds = Dataset.from_dask(frame()).batch(4)
    assert ds.element_spec["b"].dtype == np.float64
    batches = list(ds)
    assert [value["a"].tolist() for value in batches] == [[0, 1, 2, 3], [4, 5]]
    same_elements(dask.compute(ds)[0], batches, "as one graph")
    pair = Dataset.from_dask(frame(), columns=(["a", "b"], "a"))
    assert pair.element_spec[0].shape == (2,)
    assert next(iter(pair))[0].tolist() == [0.0, 0.0]


def test_from_a_dask_dataframe_of_other_types():
    frame = dd.from_pandas(
        pd.DataFrame(
            {
                "s": ["x", "y", "z"],
                "c": pd.Categorical(["u", "v", "u"]),
                "t": pd.to_datetime(["2020-01-01", "2020-01-02", "2020-01-03"]),
                "f": np.array([1, 2, 3], "float32"),
                "n": pd.array([1, 2, 3], dtype="Int64"),
                "o": [True, False, True],
            }
        ),
        npartitions=2,
    )
    ds = Dataset.from_dask(frame)
    elements = list(ds)
    assert [str(part["s"]) for part in elements] == ["x", "y", "z"]
    assert [str(item["c"]) for item in elements] == ["u", "v", "u"]
    assert [int(value["n"]) for value in elements] == [1, 2, 3]
    spec = ds.element_spec
    for element in elements:
        for name, leaf in element.items():
            assert spec[name].is_compatible_with(leaf), (name, spec[name], getattr(leaf, "dtype", type(leaf)))


def test_from_a_computed_frame_plans_once():
    # Dask would give other keys, which are not in the graph, if the frame were planned twice.
    result = frame()
    result = result[result.a > 1].assign(c=lambda f: f.a * 2)
    ds = Dataset.from_dask(result)
    assert [int(element["c"]) for element in ds] == [4, 6, 8, 10]
    assert [int(value["c"]) for value in dask.compute(ds)[0]] == [4, 6, 8, 10]


def test_from_dask_refuses_other_objects():
    with pytest.raises(ArgumentError, match="is neither a Dask collection"):
        Dataset.from_dask(np.arange(3))
    with pytest.raises(ArgumentError, match="a list must have delayed values only"):
        Dataset.from_dask([da.arange(3), da.arange(3)])
    with pytest.raises(ArgumentError, match="an empty list is neither a Dask collection"):
        Dataset.from_dask([])
    with pytest.raises(ArgumentError, match="no axis 0"):
        Dataset.from_dask(da.arange(3).sum())
    with pytest.raises(ArgumentError, match="columns= is for dataframes"):
        Dataset.from_dask(da.arange(3), columns=["a"])


def test_bag_of_elements():
    bag = dask.bag.from_sequence(range(7), npartitions=3).map(lambda n: {"n": n, "row": np.full(n, n)})
    ds = Dataset.from_dask(bag)
    assert [int(element["n"]) for element in ds] == list(range(7))
    assert [len(value["row"]) for value in dask.compute(ds)[0]] == list(range(7))
    batches = list(ds.padded_batch(4))
    assert batches[1]["row"].tolist() == [[4, 4, 4, 4, 0, 0], [5, 5, 5, 5, 5, 0], [6, 6, 6, 6, 6, 6]]


def test_bag_of_items_of_different_structures():
    bag = dask.bag.from_sequence([1, (2, 3)], npartitions=1)
    with pytest.raises(ArgumentError, match="item 1 of partition 0"):
        list(Dataset.from_dask(bag))


def test_list_of_delayed_values():
    parts = [dask.delayed(lambda n=n: {"x": np.arange(n), "y": np.ones((n, 2))})() for n in (3, 0, 2)]
    ds = Dataset.from_dask(parts)
    assert [int(element["x"]) for element in ds] == [0, 1, 2, 0, 1]
    assert [batch["y"].shape for batch in ds.batch(4)] == [(4, 2), (1, 2)]
    assert len(dask.compute(ds.batch(2))[0]) == 3
    assert len(list(Dataset.from_dask(parts[0]))) == 3


def test_delayed_values_need_rows():
    with pytest.raises(ArgumentError, match="they need equal lengths"):
        list(Dataset.from_dask([dask.delayed((np.arange(3), np.arange(2)))]))
    with pytest.raises(ArgumentError, match="they need equal lengths"):
        list(Dataset.from_dask([dask.delayed(1)]))


@pytest.mark.cluster
def test_collections_are_batched_on_a_cluster(on_cluster):
    bag = dask.bag.from_sequence(range(20), npartitions=4).map(lambda n: n * 2)
    steps = [on_cluster.local_results(s) for s in on_cluster.distribute_dataset(Dataset.from_dask(bag).batch(6))]
    assert [int(x) for step in steps for part in step for x in part] == list(range(0, 40, 2))


def test_the_graph_contains_upstream_tasks_once():
    # The graph has one copy of the array's tasks, whatever the number of partitions.
    array = da.ones(400, chunks=1)
    ds = Dataset.from_dask(array).batch(100)
    assert len(ds.__dask_graph__()) <= 400 + 400 + 2 * 4 + 10
    assert sum(dask.compute(ds)[0]).sum() == 400


def test_rebuilt_under_another_name_among_other_keys():
    # Dask rebuilds a collection like this when it renames keys; the graph also has keys that are not of elements.
    ds = Dataset.range(10).batch(4)
    rebuild, args = ds.__dask_postpersist__()
    (name,) = {key[0] for key in ds.__dask_keys__()}
    values = {("other", place): batch for place, batch in enumerate(ds)}
    again = rebuild({("between", 0): None, **values}, *args, rename={name: "other"})
    same_elements(list(again), list(ds), "rebuilt")
