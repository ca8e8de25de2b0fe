"""Functions that batch the rows of windows, as in ``window(3).flat_map(lambda window: window.batch(3))``.

Its results are row arithmetic, so no dataset has to be made for each window.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from daskdist.core.block import Bundle
from daskdist.core.cardinality import UNKNOWN
from daskdist.core.dataset_base import node_of
from daskdist.core.node import Node, Source
from daskdist.core.primitive import Arrange, Compute, Primitive
from daskdist.core.spec import ElementSpec, SpecUnknown, known_spec
from daskdist.core.structure import LONE, Structure
from daskdist.ops.batch import Batch
from daskdist.ops.nested import NestedFunction
from daskdist.ops.window import OpenWindows, Window, WindowRows
from daskdist.ops.zip import Zip


@dataclass(frozen=True, eq=False)
class UnknownWindow(Source):
    """The rows of a leaf of any window. It can be batched and zipped; access to its elements raises.

    Parameters
    ----------
    known_spec
        The spec of its elements.
    has_ragged_rows
        Whether they may be rows of a `Ragged`.
    asked
        Gets an item each time the number of elements is asked for, which differs from window to window.
    """

    known_spec: ElementSpec
    has_ragged_rows: bool
    asked: list[None] = field(default_factory=list)

    name = "window_rows"

    @property
    def spec(self) -> ElementSpec:
        return self.known_spec

    @property
    def may_have_ragged_rows(self) -> bool:
        return self.has_ragged_rows

    @property
    def cardinality(self) -> int:
        self.asked.append(None)
        return UNKNOWN

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        raise SpecUnknown("the elements of any window are not known")


def batches_of_windows(node: Node, function: NestedFunction) -> bool | None:
    """Return whether a function returns exactly one batch for each window, and leaves out windows that are not full.

    None if it does anything else, or if that depends on the elements of windows.
    """
    spec = known_spec(node.inputs[0]) if isinstance(node, Window) else None
    if not isinstance(node, Window) or spec is None:
        return None
    rows = [UnknownWindow(ElementSpec(LONE, (leaf,)), node.source.may_have_ragged_rows) for leaf in spec.leaves]
    try:
        datasets: list[Any] = [node.make(Bundle(LONE, [], ""), leaf.spec) for leaf in rows]
        window = spec.structure.pack(
            [dataset.__replace__(node=leaf) for dataset, leaf in zip(datasets, rows, strict=True)]
        )
        result = node_of(function.dataset(window, where=lambda: "any window"))
    except Exception:
        # If it fails with real windows too, the error is raised there.
        return None
    batch, structure, sources = _batched(result)
    if batch is None or batch.batch_size < node.size or structure != spec.structure:
        return None
    # A function that asks for the size of a window may treat shorter windows differently.
    if any(source is not leaf or leaf.asked for source, leaf in zip(sources, rows, strict=True)):
        return None
    if not batch.drop_remainder:
        return node.drop_remainder
    return True if batch.batch_size == node.size else None


def _batched(node: Node) -> tuple[Batch | None, Structure, tuple[Node, ...]]:
    # Return the batch of all leaves, their structure, and the batched sources.
    if type(node) is Batch:
        if type(node.source) is Zip:
            return node, node.source.structure, node.source.sources
        return node, LONE, (node.source,)
    if type(node) is Zip:
        batches = [source for source in node.sources if type(source) is Batch]
        if len(batches) == len(node.sources) and len({(b.batch_size, b.drop_remainder) for b in batches}) == 1:
            return batches[0], node.structure, tuple(b.source for b in batches)
    return None, LONE, ()


def stacked_windows(windows: Primitive, *, drop_remainder: bool) -> Primitive | None:
    """Return the stream of windows as batches instead of datasets; None if it is not a stream of `Window`."""
    if not isinstance(windows, Compute) or not isinstance(windows.function, OpenWindows):
        return None
    groups = windows.source
    if not isinstance(groups, Arrange) or not isinstance(groups.arrangement, WindowRows):
        return None
    return replace(groups, arrangement=replace(groups.arrangement, drop_remainder=drop_remainder))
