"""Names that datasets and tables of other libraries have, and what to use instead."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NoReturn

_FRAME: Final = "ds.to_pandas() or ds.to_dask_dataframe(), which have it"
_STATISTICS: Final = "ds.describe(), which has it for each column"
_TENSORS: Final = "daskdist.torch_loader(ds.batch(64)), or daskdist.to_torch(batch) and daskdist.to_jax(batch)"
_TRAINING: Final = "a loop over ds.batch(64), or model.fit(daskdist.keras_data(ds.batch(64))) of Keras"
_PICK: Final = 'ds.select(["x", "y"])'
_ADD: Final = 'ds.map(lambda row: {**row, "new": row["x"] + 1})'

# Names of methods and attributes.
OF_DATASETS: Final = {
    "add_column": _ADD,
    "agg": _FRAME,
    "assign": _ADD,
    "astype": 'ds.map(lambda row: {**row, "x": row["x"].astype("float32")})',
    "cast_column": 'ds.map(lambda row: {**row, "x": row["x"].astype("float32")})',
    "class_names": "daskdist.class_names_of(directory)",
    "collect": "list(ds)",
    "column_names": "ds.columns",
    "corr": _FRAME,
    "drop": f"{_PICK} with the columns to keep",
    "drop_columns": f"{_PICK} with the columns to keep",
    "drop_duplicates": "ds.unique()",
    "dropna": 'ds.filter(lambda row: not numpy.isnan(row["x"]))',
    "dtypes": "ds.element_spec",
    "features": "ds.element_spec",
    "evaluate": _TRAINING,
    "fillna": "missing={column: value} of the reader, or ds.map",
    "filter_with_legacy_function": "ds.filter(function)",
    "fit": _TRAINING,
    "groupby": f"{_FRAME}, or ds.group_by_window for batches of one key",
    "iloc": "ds.skip(10).take(5), or iterate over ds",
    "info": "ds.element_spec, ds.count() and ds.describe()",
    "iter_batches": "iteration over ds.batch(64)",
    "iter_rows": "iteration over ds",
    "iterrows": "iteration over ds",
    "itertuples": "iteration over ds",
    "join": _FRAME,
    "limit": "ds.take(10)",
    "loc": "ds.filter(lambda row: ...) for rows, and ds.select for columns",
    "make_initializable_iterator": "iter(ds)",
    "make_one_shot_iterator": "iter(ds)",
    "map_batches": "ds.batch(64).map(function)",
    "map_with_legacy_function": "ds.map(function)",
    "max": _STATISTICS,
    "mean": _STATISTICS,
    "median": _STATISTICS,
    "merge": _FRAME,
    "min": _STATISTICS,
    "num_rows": "ds.count()",
    "nunique": _STATISTICS,
    "output_classes": "ds.element_spec",
    "output_shapes": "ds.element_spec",
    "output_types": "ds.element_spec",
    "quantile": _STATISTICS,
    "query": 'ds.filter(lambda row: row["x"] > 0)',
    "random_split": "ds.split(0.8, seed=0)",
    "remove_columns": f"{_PICK} with the columns to keep",
    "rename_column": 'ds.rename({"old": "new"})',
    "rename_columns": 'ds.rename({"old": "new"})',
    "sample": "ds.shuffle(10_000).take(5)",
    "select_columns": _PICK,
    "set_format": _TENSORS,
    "set_transform": "ds.map(function)",
    "shape": "ds.count() and ds.element_spec",
    "sort": _FRAME,
    "sort_values": _FRAME,
    "sparse_batch": "ds.ragged_batch(64)",
    "std": _STATISTICS,
    "sum": "ds.reduce(0, lambda total, x: total + x)",
    "tail": "ds.skip(ds.count() - 5).head()",
    "to_csv": "ds.to_parquet(path), or ds.to_dask_dataframe().to_csv(path)",
    "to_jax": _TENSORS,
    "to_json": "ds.to_dask_dataframe().to_json(path)",
    "to_list": "list(ds)",
    "to_numpy": "ds.to_pandas(), or next(iter(ds.batch(ds.count())))",
    "to_torch": _TENSORS,
    "train_test_split": "ds.split(0.8, seed=0)",
    "union": "ds.concatenate(other)",
    "value_counts": 'collections.Counter(ds["x"])',
    "values": "ds.to_pandas(), or next(iter(ds.batch(ds.count())))",
    "where": 'ds.filter(lambda row: row["x"] > 0)',
    "with_column": _ADD,
    "with_format": _TENSORS,
    "with_transform": "ds.map(function)",
}
# Names of constructors, as methods of classes or as functions.
OF_CONSTRUCTORS: Final = {
    "DataLoader": "daskdist.torch_loader(dataset.batch(64))",
    "from_arrow": "Dataset.from_tensor_slices(dict(table.to_pandas()))",
    "from_dict": "Dataset.from_tensor_slices(columns)",
    "from_items": "Dataset.from_list(items)",
    "from_numpy": "Dataset.from_tensor_slices(array)",
    "from_pandas": "Dataset.from_tensor_slices(dict(frame))",
    "from_torch": "Dataset.from_tensor_slices(tensor.numpy()), or Dataset.from_generator",
    "load_dataset": "daskdist.read_files(files), or another reader such as daskdist.read_parquet",
    **{f"read_{form}": "daskdist.read_arrow(files)" for form in ("feather", "ipc")},
    **{
        f"{verb}_{form}": f"daskdist.read_{form}(files)"
        for verb in ("from", "read")
        for form in ("csv", "images", "json", "parquet", "sql", "text", "tfrecord", "webdataset", "zarr")
    },
}
# Names of attributes of other objects, by the name of the class.
_ONE_DEVICE: Final = "nothing in its place: each replica has one device, and whole variables"
_NO_SETUP: Final = "nothing in its place: a strategy is ready when it is created"
_IN_THE_FUNCTION: Final = "daskdist.get_replica_context() in the function that run calls"
_LOCAL: Final = "strategy.local_results(value) for the value of each replica, or strategy.reduce for one of all"
_NOT_NEEDED: Final = "nothing in its place: pipelines are always optimized, and functions are plain Python"
OF_OBJECTS: Final = {
    "DistributedDataset": {
        "make_initializable_iterator": "iter(dataset)",
        "make_one_shot_iterator": "iter(dataset)",
        **dict.fromkeys(("output_classes", "output_shapes", "output_types"), "dataset.element_spec"),
    },
    "DistributedIterator": {
        "initialize": "iter(dataset) again",
        "initializer": "iter(dataset) again",
        "next": "next(iterator)",
        **dict.fromkeys(("output_classes", "output_shapes", "output_types"), "iterator.element_spec"),
    },
    "ElementIterator": {
        "element_spec": "dataset.element_spec",
        "get_next": "next(iterator)",
        "get_next_as_optional": "next(iterator, None)",
        "next": "next(iterator)",
    },
    "Function": {
        "experimental_get_tracing_count": "the function as it is: nothing is traced",
        "get_concrete_function": "the function as it is: nothing is traced",
        "python_function": "function.__wrapped__",
    },
    "Options": {
        "autotune_algorithm": "options.memory_budget_bytes",
        "cpu_budget": "options.num_threads",
        "dataset_name": "nothing in its place: operations take a name, such as ds.batch(64, name='pairs')",
        "enabled": "options.memory_budget_bytes, which bounds what is read ahead",
        "experimental_deterministic": "options.deterministic",
        "experimental_external_state_policy": _NOT_NEEDED,
        "experimental_optimization": _NOT_NEEDED,
        "experimental_slack": _NOT_NEEDED,
        "experimental_stats": "the iterator's stats()",
        "experimental_symbolic_checkpoint": "the iterator's state_dict()",
        "experimental_threading": "options.threading",
        "experimental_warm_start": _NOT_NEEDED,
        "max_intra_op_parallelism": "options.num_threads",
        "num_workers": "options.num_processes",
    },
    "PerReplica": dict.fromkeys(("dtype", "item", "mean", "numpy", "shape", "sum", "tolist"), _LOCAL),
    "Strategy": {
        "all_gather": _IN_THE_FUNCTION,
        "all_reduce": _IN_THE_FUNCTION,
        "cluster_resolver": "strategy.workers; one program drives them all, and none of them is the chief",
        "configure": _NO_SETUP,
        "experimental_assign_to_logical_device": _ONE_DEVICE,
        "experimental_replicate_to_logical_devices": _ONE_DEVICE,
        "experimental_split_to_logical_devices": _ONE_DEVICE,
        "initialize": _NO_SETUP,
        "make_dataset_iterator": "iter(strategy.distribute_dataset(dataset))",
        "make_input_fn_iterator": "iter(strategy.distribute_datasets_from_function(dataset_fn))",
        "merge_call": _IN_THE_FUNCTION,
        "unwrap": "strategy.local_results(value)",
        "update_config_proto": _NO_SETUP,
        **{
            name: f"strategy.extended.{name}"
            for name in (
                "batch_reduce_to",
                "broadcast_to",
                "call_for_each_replica",
                "colocate_vars_with",
                "parameter_devices",
                "read_var",
                "reduce_to",
                "update",
                "value_container",
                "worker_devices",
            )
        },
    },
}
# Constructors of `Dataset`, as functions of the package.
AS_FUNCTIONS: Final = {
    name: f"daskdist.Dataset.{name}"
    for name in ("from_dask", "from_generator", "from_list", "from_tensor_slices", "from_tensors", "list_files")
}


def missing_attribute(owner: Any, called: str, name: str, advice: str | None) -> AttributeError:
    """Return the error for a name that an object lacks; Python adds a similar name that it has, if there is one."""
    text = f"{called} has no attribute {name!r}"
    return AttributeError(f"{text}; use {advice}" if advice else text, name=name, obj=owner)


class Advised:
    """A base of objects whose errors for names that they lack say what to use instead, as `OF_OBJECTS` does."""

    __slots__ = ()

    # Hidden from type checkers, for which `__getattr__` would make all names valid.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if hasattr(type(self), name):
                # A property raised an AttributeError, which is raised again.
                return object.__getattribute__(self, name)
            raise missing_attribute(self, f"{type(self).__name__!r} object", name, self._advice_for(name))

    def _advice_for(self, name: str) -> str | None:
        """Return what to use instead of a name that the object lacks, or None."""
        return advice_for(type(self), name)


def advice_for(cls: type, name: str) -> str | None:
    """Return what to use instead of a name that a class lacks, if `OF_OBJECTS` says so for it or one of its bases."""
    tables = (OF_OBJECTS.get(base.__name__, {}) for base in cls.__mro__)
    return next((table[name] for table in tables if name in table), None)


class DatasetType(type):
    """The type of dataset classes, whose errors for names that they lack say what to use instead."""

    # Hidden from type checkers, for which `__getattr__` would make all names valid.
    if not TYPE_CHECKING:

        def __getattr__(cls, name: str) -> NoReturn:
            advice = OF_CONSTRUCTORS.get(name) or OF_DATASETS.get(name)
            raise missing_attribute(cls, f"type object {cls.__name__!r}", name, advice)
