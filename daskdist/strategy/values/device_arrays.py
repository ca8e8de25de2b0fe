"""Device arrays among the values of replicas, and the streams in which they are moved to one device.

Each replica computes in the stream of its device, in any thread. A caller can use a result in its own stream at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import optree

from daskdist.devices import Device, Event, are_loaded, device_of, is_on_device, on_host, stream_of


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """A partial result whose arrays are on a device."""

    device: Device
    partial: Any

    def here(self) -> Any:
        """Return the partial result with NumPy arrays."""
        return host_nest(self.partial)

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickles hold NumPy arrays, as the receiver may not have the device.
        return _as_it_is, (self.here(),)


def _as_it_is(partial: Any) -> Any:
    return partial


def host_nest(nest: Any) -> Any:
    """Return a nest with its device arrays as NumPy arrays; the same object if there are none."""
    if not are_loaded():
        return nest
    leaves, treespec = optree.tree_flatten(nest, none_is_leaf=True)
    if not any(type(leaf) is Placed or is_on_device(leaf) for leaf in leaves):
        return nest
    return optree.tree_unflatten(
        treespec, [leaf.here() if type(leaf) is Placed else host_array(leaf) for leaf in leaves]
    )


def host_array(value: Any) -> Any:
    """Return a device array as a NumPy array, and any other value unchanged."""
    device = device_of(value)
    if device is None:
        return value
    with in_stream_of(device):
        return on_host(value)


def _now(device: Device) -> Event:
    with device.using():
        return stream_of(device).record()


@contextlib.contextmanager
def in_stream_of(device: Device) -> Iterator[None]:
    """Make the stream of a device's replica current in a context.

    Work in the context runs after the work already queued in this thread's other streams of the device, and later work
    in those runs after it.
    """
    replica_stream = stream_of(device)
    outer_streams = [stream for stream in device.outer_streams() if stream != replica_stream]
    try:
        with device.using(replica_stream):
            for outer in outer_streams:
                replica_stream.wait(outer.record())
            replica_stream.await_queued()
            yield
    finally:
        if outer_streams:
            end = replica_stream.record()
            for outer in outer_streams:
                outer.wait(end)


def catch_up(device: Device) -> None:
    """Make the stream of a device's replica wait for this thread's current stream of the device."""
    replica_stream = stream_of(device)
    with device.using():
        for outer in device.outer_streams():
            if outer != replica_stream:
                replica_stream.wait(outer.record())


def moved(array: Any, device: Device) -> Any:
    """Return an array on a device, whose stream is current; the same object if it is already on the device."""
    source = device_of(array)
    if source == device:
        return array
    if source is None:
        return device.put(np.asarray(array))
    if source.kind != device.kind:
        return device.put(host_array(array))
    replica_stream = stream_of(device)
    # The array may have been computed in this thread's current stream of its device.
    catch_up(source)
    replica_stream.wait(_now(source))
    # Prepare the array for the copy after the work that computes it.
    with source.using(stream_of(source)):
        copy = device.put(array)
    # The memory of the array must not be reused before it is copied.
    with source.using():
        stream_of(source).wait(_now(device))
    return copy


def moved_nest(nest: Any, device: Device) -> Any:
    """Return a nest with its arrays on a device, whose stream is current, except arrays of unsupported dtypes."""

    def leaf_there(leaf: Any) -> Any:
        if isinstance(leaf, (np.ndarray, np.generic)):
            return leaf if device.lacks(leaf.dtype) else moved(leaf, device)
        return moved(leaf, device) if is_on_device(leaf) else leaf

    return optree.tree_map(leaf_there, nest, none_is_leaf=True)


def placed_nest(nest: Any, device: Device) -> Any:
    """Return a nest with its arrays on a device if that supports them, or on the host."""
    if device.is_host:
        return host_nest(nest)
    with in_stream_of(device):
        return moved_nest(nest, device)


def home_of(devices: Sequence[Device | None]) -> Device | None:
    """Return the device to combine values on: the first value's; None if any value is on the host."""
    first = devices[0]
    if first is None or any(other is None or other.kind != first.kind for other in devices):
        return None
    return first


def own_copy(value: Any, like: Any, *, is_own: bool) -> Any:
    """Return a copy of a shared result for one replica, on the device of its contribution or on the host.

    Parameters
    ----------
    value
        The shared result.
    like
        The contribution of the replica.
    is_own
        Whether no other replica receives the same object.
    """
    device, source = device_of(like), device_of(value)
    if device is None:
        if source is None:
            return value.copy() if isinstance(value, np.ndarray) and not is_own else value
        copy = host_array(value)
        return copy if copy.ndim else copy[()]
    if source is None and (not isinstance(value, (np.ndarray, np.generic)) or device.lacks(value.dtype)):
        return value
    with in_stream_of(device):
        if source == device:
            return value if is_own else device.namespace.asarray(value, copy=True)
        return moved(value, device)


def called_on_device(function: np.ufunc, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call the counterpart of a NumPy function in the device's namespace, as some of the arrays are on a device."""
    device = next(device for device in map(device_of, args) if device is not None)
    counterpart = getattr(device.namespace, function.__name__, function)
    with in_stream_of(device):
        return counterpart(*moved_nest(list(args), device), **kwargs)


def synchronize(nest: Any) -> None:
    """Wait until the device arrays in a nest, which this thread has queued, are computed."""
    if not are_loaded():
        return
    for device in set(map(device_of, optree.tree_leaves(nest))):
        if device is not None:
            with device.using():
                device.current_stream().synchronize()


def put_on(device: Device, leaf: Any) -> Any:
    """Return a leaf with its array on a device.

    Numbers stay as they are, and so do types that devices lack: text, objects, times, rows of different lengths.
    """
    if isinstance(leaf, np.ndarray) and not device.lacks(leaf.dtype):
        return device.put(leaf)
    # A device array may belong to another replica's device.
    return moved(leaf, device) if is_on_device(leaf) else leaf
