"""Names and arguments that other libraries have: the error says what to use."""

from __future__ import annotations

import inspect
import re

import pytest
from conftest import mirrored

import daskdist
from daskdist import Dataset, errors
from daskdist.core.dataset_base import node_of
from daskdist.display import missing_arguments, missing_methods

OF_OTHERS_DATASETS = {**missing_methods.OF_DATASETS, **missing_methods.OF_CONSTRUCTORS}


@pytest.mark.parametrize("name", OF_OTHERS_DATASETS)
def test_datasets_say_what_to_use_for_names_of_other_libraries(name):
    is_constructor = name in missing_methods.OF_CONSTRUCTORS
    advice = re.escape(OF_OTHERS_DATASETS[name])
    with pytest.raises(AttributeError, match=rf"^type object 'Dataset' has no attribute '{name}'; use {advice}$"):
        getattr(Dataset, name)
    if not is_constructor:
        with pytest.raises(AttributeError, match=rf"^'Dataset' object has no attribute '{name}'; use {advice}$"):
            getattr(Dataset.range(3), name)


def test_advice_for_names_of_other_libraries_is_of_names_that_exist():
    text = " ".join(OF_OTHERS_DATASETS.values())
    used = set(re.findall(r"(?:ds|Dataset)\.(\w+)", text)) | set(re.findall(r"\)\.(head|take|map)\(", text))
    assert len(used) > 15
    assert not [name for name in used if not hasattr(Dataset, name)]
    assert not [name for name in re.findall(r"daskdist\.(\w+)", text) if not hasattr(daskdist, name)]


FUNCTIONS = {
    "CheckpointManager": daskdist.CheckpointManager,
    "Dataset.batch": Dataset.batch,
    "Dataset.from_generator": Dataset.from_generator,
    "Dataset.load": Dataset.load,
    "Dataset.map": Dataset.map,
    "Dataset.to_parquet": Dataset.to_parquet,
    "Dataset.with_options": Dataset.with_options,
    "MirroredStrategy": daskdist.MirroredStrategy,
    "MultiWorkerMirroredStrategy": daskdist.MultiWorkerMirroredStrategy,
    "TPUClusterResolver": daskdist.distribute.cluster_resolver.TPUClusterResolver,
    "TPUStrategy": daskdist.distribute.TPUStrategy,
    "function": daskdist.function,
    "read_csv": daskdist.read_csv,
    "torch_loader": daskdist.torch_loader,
}


@pytest.mark.parametrize(
    ("function", "argument"),
    [(name, argument) for name, advice in missing_arguments.OF_FUNCTIONS.items() for argument in advice],
)
def test_functions_say_what_to_use_for_arguments_of_other_libraries(function, argument):
    # An argument that the function accepts would not reach it.
    assert argument not in inspect.signature(FUNCTIONS[function]).parameters
    advice = missing_arguments.OF_FUNCTIONS[function][argument]
    text = re.escape(f"{function}() got an unexpected keyword argument '{argument}'; use {advice}")
    with pytest.raises(TypeError, match=f"^{text}$"):
        FUNCTIONS[function](**{argument: 3})


def test_arguments_that_no_library_has_are_errors_of_python():
    with pytest.raises(TypeError, match=r"batch\(\) got an unexpected keyword argument 'drop_reminder'"):
        Dataset.range(3).batch(2, drop_reminder=True)


# Dask calls pandas so.
@pytest.mark.filterwarnings("ignore:The inplace keyword")
def test_partitioned_files_are_written_as_the_advice_says(tmp_path):
    ds = Dataset.from_tensor_slices({"x": [0, 1, 0], "y": [1.0, 2.0, 3.0]})
    ds.to_dask_dataframe().to_parquet(tmp_path / "rows", partition_on=["x"])
    assert sorted(path.name for path in (tmp_path / "rows").glob("x=*")) == ["x=0", "x=1"]
    assert sorted(row["y"] for row in daskdist.read_parquet(str(tmp_path / "rows"))) == [1.0, 2.0, 3.0]


def objects():
    """Return an object of each class in the table of attributes, by the name of the class."""
    strategy = mirrored(2)
    distributed = strategy.distribute_dataset(Dataset.range(4).batch(4))
    iterator = iter(distributed)
    return {
        "DistributedDataset": distributed,
        "DistributedIterator": iterator,
        "ElementIterator": iter(Dataset.range(4)),
        "Function": daskdist.function(abs),
        "Options": daskdist.Options(),
        "PerReplica": next(iterator),
        "Strategy": strategy,
    }


@pytest.mark.parametrize("name", missing_methods.OF_OBJECTS)
def test_objects_say_what_to_use_for_attributes_of_other_libraries(name):
    obj = objects()[name]
    for attribute, advice in missing_methods.OF_OBJECTS[name].items():
        text = re.escape(f"{type(obj).__name__!r} object has no attribute {attribute!r}; use {advice}")
        with pytest.raises(AttributeError, match=f"^{text}$"):
            getattr(obj, attribute)
    assert not hasattr(obj, "no_such_name")


def test_advice_for_attributes_is_of_names_that_exist():
    known = {**objects(), "strategy": mirrored(2), "extended": mirrored(2).extended}
    known |= {"dataset": known["DistributedDataset"], "iterator": known["DistributedIterator"]}
    known |= {"function": known["Function"], "options": known["Options"], "daskdist": daskdist}
    text = " ".join(advice for table in missing_methods.OF_OBJECTS.values() for advice in table.values())
    used = set(re.findall(r"\b(strategy|extended|dataset|iterator|function|options|daskdist)(?=\.(\w+))", text))
    assert len(used) > 15
    assert not [(obj, name) for obj, name in used if not hasattr(known[obj], name)]


def test_options_that_are_set_by_names_of_tensorflow_say_what_to_use():
    with pytest.raises(AttributeError, match=r"^Options has no 'experimental_deterministic'; use options\.determ"):
        daskdist.Options().experimental_deterministic = False
    with pytest.raises(AttributeError, match=r"^Options has no 'no_such_name'; there are auto_shard_policy, "):
        daskdist.Options().no_such_name = 1


@pytest.mark.parametrize("name", ["map", "shuffle", "take", "head"])
def test_distributed_datasets_say_where_methods_of_datasets_belong(name):
    distributed = mirrored(2).distribute_dataset(Dataset.range(8).batch(4))
    text = rf"^'DistributedDataset' object has no attribute '{name}'; use dataset\.{name} before distribute_dataset$"
    with pytest.raises(AttributeError, match=text):
        getattr(distributed, name)


@pytest.mark.parametrize("name", ["fit", "_repr_png_"])
def test_attributes_that_distributed_datasets_lack(name):
    distributed = mirrored(2).distribute_dataset(Dataset.range(8).batch(4))
    with pytest.raises(AttributeError, match=rf"^'DistributedDataset' object has no attribute '{name}'$"):
        getattr(distributed, name)


def test_attributes_that_datasets_lack():
    ds = Dataset.from_tensor_slices({"x": [1, 2], "shape": [3, 4]})
    for name in ds.columns:
        with pytest.raises(AttributeError, match=rf"no attribute '{name}'; use ds\['{name}'\]$"):
            getattr(ds, name)
    mapped = ds.map(lambda row: {"z": row["x"]})
    with pytest.raises(AttributeError, match=r"no attribute 'z'$"):
        _ = mapped.z
    assert list(mapped.element_spec) == ["z"]
    with pytest.raises(AttributeError, match=r"use ds\['z'\]$"):
        _ = mapped.z
    assert not hasattr(ds, "colums")
    with pytest.raises(AttributeError, match=r"^'Dataset' object has no attribute 'colums'$") as caught:
        _ = ds.colums
    assert (caught.value.name, caught.value.obj) == ("colums", ds)
    with pytest.raises(AttributeError, match=r"use Dataset\.from_tensor_slices"):
        _ = daskdist.from_pandas
    for name, advice in missing_methods.AS_FUNCTIONS.items():
        assert hasattr(Dataset, name)
        with pytest.raises(AttributeError, match=rf"^module 'daskdist' has no attribute '{name}'; use {advice}$"):
            getattr(daskdist, name)
    with pytest.raises(errors.ArgumentError, match=r"list is not a pipeline; .* Dataset\.from_list"):
        Dataset([1, 2])


def test_an_attribute_error_in_a_property_of_a_dataset_is_shown_as_it_is():
    class Own(Dataset):
        @property
        def broken(self):
            raise AttributeError("the cause")

    with pytest.raises(AttributeError, match=r"^the cause$"):
        _ = Own(node_of(Dataset.range(3))).broken
