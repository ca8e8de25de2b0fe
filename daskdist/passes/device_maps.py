"""Functions at the end of a pipeline that replicas call on their devices."""

from __future__ import annotations

from typing import cast

from daskdist.core.node import Node, upstream, walk
from daskdist.errors import ArgumentError
from daskdist.ops.map import MapOnDevice


def check_device_maps(node: Node) -> None:
    """Check that nothing is done with what such functions make.

    Raises
    ------
    ArgumentError
        Something is.
    """
    for each in walk(node):
        if each.facts.keeps_order or each.facts.on_device:
            continue
        for source in each.inputs:
            mapped = upstream(source)
            if mapped.facts.on_device:
                function = cast(MapOnDevice, mapped).function
                raise ArgumentError(
                    f"{each.name}: it comes after map({function}, device=True), which is called when a replica "
                    f"is given its element; only more of such, prefetch and with_options can follow. Put {each.name} "
                    "before it, or leave device=True out"
                )


def without_device_maps(node: Node) -> tuple[Node, tuple[MapOnDevice, ...]]:
    """Return the pipeline without its device functions, and those functions, the first one first.

    Raises
    ------
    ArgumentError
        One is not at the end.
    """
    check_device_maps(node)
    return _taken_off(node)


def _taken_off(node: Node) -> tuple[Node, tuple[MapOnDevice, ...]]:
    if node.facts.on_device:
        source, maps = _taken_off(node.inputs[0])
        return source, (*maps, cast(MapOnDevice, node))
    if not node.facts.keeps_order or not upstream(node).facts.on_device:
        return node, ()
    source, maps = _taken_off(node.inputs[0])
    return node.with_inputs((source,)), maps
