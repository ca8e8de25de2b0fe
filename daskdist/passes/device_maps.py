"""Functions at the end of a pipeline that are called on the devices of replicas."""

from __future__ import annotations

from typing import cast

from daskdist.core.node import Node, upstream, walk
from daskdist.errors import ArgumentError
from daskdist.ops.map import MapOnDevice


def check_device_maps(node: Node) -> None:
    """Check that only `map` on devices, prefetch and options follow a `map` on devices.

    Raises
    ------
    ArgumentError
        Another operation follows.
    """
    for later in walk(node):
        if later.facts.keeps_order or later.facts.on_device:
            continue
        for source in later.inputs:
            mapped = upstream(source)
            if mapped.facts.on_device:
                function = cast(MapOnDevice, mapped).function
                raise ArgumentError(
                    f"{later.name}: it comes after map({function}, device=True), which is called when a replica "
                    f"gets its element; only prefetch, with_options and map with device=True can follow. Put "
                    f"{later.name} before it, or leave device=True out"
                )


def without_device_maps(node: Node) -> tuple[Node, tuple[MapOnDevice, ...]]:
    """Return the pipeline without its device functions, and those functions in the order of calls.

    Raises
    ------
    ArgumentError
        A device function is not at the end.
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
