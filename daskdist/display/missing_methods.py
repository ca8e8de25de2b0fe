"""Names that datasets and tables of other libraries have, and what to use instead."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NoReturn

_FRAME: Final = "ds.to_pandas() or ds.to_dask_dataframe(), which have it"
_STATISTICS: Final = "ds.describe(), which has it for each column"
_TENSORS: Final = "daskdist.torch_loader(ds.batch(64)), or daskdist.to_torch(batch) and daskdist.to_jax(batch)"
_PICK: Final = 'ds.select(["x", "y"])'
_ADD: Final = 'ds.map(lambda row: {**row, "new": row["x"] + 1})'

# Names of methods and attributes.
OF_DATASETS: Final = {
    "add_column": _ADD,
    "agg": _FRAME,
    "assign": _ADD,
    "astype": 'ds.map(lambda row: {**row, "x": row["x"].astype("float32")})',
    "cast_column": 'ds.map(lambda row: {**row, "x": row["x"].astype("float32")})',
    "collect": "list(ds)",
    "column_names": "ds.columns",
    "corr": _FRAME,
    "drop": f"{_PICK} with the columns to keep",
    "drop_columns": f"{_PICK} with the columns to keep",
    "drop_duplicates": "ds.unique()",
    "dropna": 'ds.filter(lambda row: not numpy.isnan(row["x"]))',
    "dtypes": "ds.element_spec",
    "features": "ds.element_spec",
    "fillna": "missing={column: value} of the reader, or ds.map",
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
    "map_batches": "ds.batch(64).map(function)",
    "max": _STATISTICS,
    "mean": _STATISTICS,
    "median": _STATISTICS,
    "merge": _FRAME,
    "min": _STATISTICS,
    "num_rows": "ds.count()",
    "nunique": _STATISTICS,
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
    **{
        f"{verb}_{form}": f"daskdist.read_{form}(files)"
        for verb in ("from", "read")
        for form in ("csv", "images", "json", "parquet", "sql", "text", "tfrecord", "webdataset", "zarr")
    },
}


def missing_attribute(owner: Any, called: str, name: str, advice: str | None) -> AttributeError:
    """Return the error for a name that an object lacks; Python adds a similar name that it has, if there is one."""
    text = f"{called} has no attribute {name!r}"
    return AttributeError(f"{text}; use {advice}" if advice else text, name=name, obj=owner)


class DatasetType(type):
    """The type of dataset classes, whose errors for names that they lack say what to use instead."""

    # Hidden from type checkers, for which `__getattr__` would make all names valid.
    if not TYPE_CHECKING:

        def __getattr__(cls, name: str) -> NoReturn:
            advice = OF_CONSTRUCTORS.get(name) or OF_DATASETS.get(name)
            raise missing_attribute(cls, f"type object {cls.__name__!r}", name, advice)
