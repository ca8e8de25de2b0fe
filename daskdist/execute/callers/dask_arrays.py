"""A recorded pipeline as Dask arrays, dataframes and delayed values."""

from __future__ import annotations

import contextlib
import importlib.util
import operator
from collections.abc import Sequence
from functools import partial
from typing import Any

import dask

from daskdist.core.block import Block
from daskdist.core.cardinality import UNKNOWN
from daskdist.core.node import Node, walk
from daskdist.core.spec import ElementSpec, TensorSpec
from daskdist.errors import ArgumentError, DaskdistError, MissingPackageError, UnknownLengthError
from daskdist.execute.callers.graph import Recorded
from daskdist.tables.to_arrow import frame_of, no_rows


def to_dask_array(node: Node, recorded: Recorded, spec: ElementSpec, num_elements: int) -> Any:
    """Return one array for each leaf, in the structure of an element; each element becomes a chunk.

    Chunk lengths are known if the sizes of batches are; otherwise they are NaN, as is Dask's convention.
    """
    import dask.array as da

    parts = to_delayed("to_dask_array", node, recorded, num_elements)
    for path, leaf in zip(spec.structure.paths, spec.leaves, strict=True):
        if not leaf.shape or None in leaf.shape[1:]:
            raise ArgumentError(
                f"to_dask_array: leaf {path or '(the element)'} is {leaf}, but elements become chunks along axis 0: "
                "call batch(n) first, with rows of one shape"
            )
    lengths = batch_lengths(node, len(parts))
    structure = spec.structure

    def array(number: int, leaf: TensorSpec) -> Any:
        blocks = [
            da.from_delayed(_leaf(part, structure, number), (length, *leaf.shape[1:]), leaf.dtype)
            for part, length in zip(parts, lengths, strict=True)
        ]
        return da.concatenate(blocks) if blocks else da.zeros((0, *leaf.shape[1:]), leaf.dtype)

    return structure.pack([array(number, leaf) for number, leaf in enumerate(spec.leaves)])


def to_dask_dataframe(parts: Sequence[Any], spec: ElementSpec) -> Any:
    """Return a Dask dataframe with a partition for each delayed batch of elements of a spec."""
    if importlib.util.find_spec("pandas") is None:
        raise MissingPackageError("to_dask_dataframe needs pandas: pip install 'dask[dataframe]'")
    import dask.dataframe as dd
    from dask.delayed import delayed

    meta = frame_of([no_rows(spec)], spec)
    to_frame = delayed(partial(_frame_of_batch, spec=spec))
    # Dask would convert all columns of objects to text, even lists.
    with dask.config.set({"dataframe.convert-string": False}):
        return dd.from_delayed([to_frame(part) for part in parts] or [delayed(meta)], meta=meta, verify_meta=False)


def _frame_of_batch(batch: Any, spec: ElementSpec) -> Any:
    return frame_of([Block(spec.structure, spec.structure.leaves_of(batch))], spec)


def to_delayed(operation: str, node: Node, recorded: Recorded, num_elements: int) -> list[Any]:
    """Return a delayed value for each element.

    Raises
    ------
    UnknownLengthError
        Their number is unknown.
    """
    from dask.delayed import Delayed

    if not recorded.is_split:
        if num_elements < 0:
            raise UnknownLengthError(f"{operation}: the number of elements is unknown; {how_to_count(node)}")
        recorded = recorded.split(num_elements)
    return [Delayed(key, recorded.graph) for key in recorded.keys]


def how_to_count(node: Node) -> str:
    """Return advice for a pipeline whose number of elements is not known."""
    cause = node.name
    # Counting may read a damaged file, which the pipeline itself may be set to skip.
    with contextlib.suppress(DaskdistError):
        for operation in walk(node):
            if operation.cardinality == UNKNOWN and all(source.cardinality != UNKNOWN for source in operation.inputs):
                cause = operation.name
    return (
        f"{cause} determines it only when the data is read: count() it and state it with assert_cardinality(n), or "
        "cache() the dataset and iterate over it once"
    )


def _leaf(part: Any, structure: Any, number: int) -> Any:
    from dask.delayed import delayed

    if structure.num_leaves == 1 and structure.treespec.is_leaf():
        return part
    return delayed(operator.itemgetter(number))(delayed(structure.leaves_of)(part))


def batch_lengths(node: Node, num_batches: int) -> list[float]:
    """Return the number of rows of each batch; NaN where the last operation does not determine it."""
    size = node.group_size
    if size is None or node.inputs[0].cardinality < 0:
        return [float("nan")] * num_batches
    total = node.inputs[0].cardinality
    return [min(size, total - k * size) for k in range(num_batches)]
