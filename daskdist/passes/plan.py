"""All passes in order: from a pipeline to the primitives that run."""

from __future__ import annotations

from dataclasses import replace

from daskdist.core.node import Node, lower
from daskdist.core.primitive import Arrange, Chain, Compute, Fact, Primitive, Read
from daskdist.ops.ignore_errors import IgnoreErrors
from daskdist.ops.with_options import merged_options
from daskdist.passes.device_maps import check_device_maps
from daskdist.passes.fuse import fuse
from daskdist.passes.numbering import numbered
from daskdist.passes.row_by_row import row_by_row
from daskdist.passes.seed import with_seed
from daskdist.passes.simplify import simplify
from daskdist.storage.grouped_splits import GroupSplits
from daskdist.storage.locations import Locations


def plan(node: Node) -> Primitive:
    """Lower a pipeline to its primitives, under the options at its end.

    Raises
    ------
    ArgumentError
        A function with ``device=True`` is not at the end.
    """
    check_device_maps(node)
    node = numbered(node)
    options = merged_options(node)
    if options.seed is not None:
        node = with_seed(node, options.seed)
    if options.vectorize is False:
        node = row_by_row(node)
    primitive = lower(simplify(IgnoreErrors(node) if options.on_error == "skip" else node))
    if options.locations is not None:
        primitive = split_by_location(primitive, options.locations)
    return fuse(with_order(primitive, options.deterministic))


def with_order(primitive: Primitive, in_order: bool | None) -> Primitive:
    """Return the stream with blocks in order, or in the order in which they finish; None for what operations say.

    They come in order in any case where a later operation depends on the numbers of elements.
    """
    match primitive:
        case Arrange():
            in_order = True if primitive.is_counted else in_order
            return replace(primitive, inputs=tuple(with_order(source, in_order) for source in primitive.inputs))
        case Chain() | Fact():
            return replace(primitive, source=with_order(primitive.source, in_order))
        case Compute():
            primitive = replace(primitive, source=with_order(primitive.source, in_order))
    return primitive if in_order is None else replace(primitive, in_order=in_order)


def split_by_location(primitive: Primitive, locations: Locations) -> Primitive:
    """Return the stream with only those files grouped that are on disks of the same workers."""
    match primitive:
        case Read(splits=GroupSplits()):
            splits = replace(primitive.splits, place=locations.names_of)  # type: ignore[type-var]
            return replace(primitive, splits=splits)
        case Compute() | Chain() | Fact():
            return replace(primitive, source=split_by_location(primitive.source, locations))
        case Arrange():
            return replace(primitive, inputs=tuple(split_by_location(source, locations) for source in primitive.inputs))
        case _:
            return primitive
