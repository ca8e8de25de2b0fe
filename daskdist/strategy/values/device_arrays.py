"""Arrays of devices among the values of replicas: how they come together, and in whose stream.

Each replica computes in the stream of its device, whoever asks for it; and what is made for a caller is there for what
that does next in its own stream.
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
    """A partial result whose arrays are on a device.

    Parameters
    ----------
    device
        The device.
    partial
        An array, or a nest with some in it.
    """

    device: Device
    partial: Any

    def here(self) -> Any:
        """Return the partial result in arrays of the host."""
        return host_nest(self.partial)

    def __reduce__(self) -> tuple[Any, ...]:
        # Data that leaves the process leaves the device.
        return _as_it_is, (self.here(),)


def _as_it_is(partial: Any) -> Any:
    return partial


def host_nest(nest: Any) -> Any:
    """Return a nest with its arrays of devices as NumPy arrays; the same object where it has none."""
    if not are_loaded():
        return nest
    leaves, treespec = optree.tree_flatten(nest, none_is_leaf=True)
    if not any(type(leaf) is Placed or is_on_device(leaf) for leaf in leaves):
        return nest
    return optree.tree_unflatten(
        treespec, [leaf.here() if type(leaf) is Placed else host_array(leaf) for leaf in leaves]
    )


def host_array(value: Any) -> Any:
    """Return an array of a device as a NumPy array, and any other value as it is."""
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
    """Compute on a device, in the stream of its replica.

    That goes on after what this thread's own stream has been given for the device, and that after what is done here.
    """
    own = stream_of(device)
    outer_streams = [stream for stream in device.outer_streams() if stream != own]
    with device.using():
        for outer in outer_streams:
            own.wait(outer.record())
        own.await_queued()
    try:
        with device.using(own):
            yield
    finally:
        if outer_streams:
            with device.using():
                end = own.record()
                for outer in outer_streams:
                    outer.wait(end)


def catch_up(device: Device) -> None:
    """Make the stream of a device's replica wait for this thread's own stream, whose results others read."""
    own = stream_of(device)
    with device.using():
        for outer in device.outer_streams():
            if outer != own:
                own.wait(outer.record())


def moved(array: Any, device: Device) -> Any:
    """Return an array on a device, whose stream is current; the same object if it is there."""
    source = device_of(array)
    if source == device:
        return array
    if source is None:
        return device.put(np.asarray(array))
    if source.kind != device.kind:
        return device.put(host_array(array))
    own = stream_of(device)
    # It may have been made in this thread's own stream of that device.
    catch_up(source)
    own.wait(_now(source))
    # What is done there before it goes is done after what made it.
    with source.using(stream_of(source)):
        found = device.put(array)
    # Its memory is not used for something else before.
    with source.using():
        stream_of(source).wait(_now(device))
    return found


def moved_nest(nest: Any, device: Device) -> Any:
    """Return a nest with its arrays on a device, whose stream is current, except arrays of dtypes that it lacks."""

    def leaf_there(leaf: Any) -> Any:
        if isinstance(leaf, (np.ndarray, np.generic)):
            return leaf if device.lacks(leaf.dtype) else moved(leaf, device)
        return moved(leaf, device) if is_on_device(leaf) else leaf

    return optree.tree_map(leaf_there, nest, none_is_leaf=True)


def home_of(devices: Sequence[Device | None]) -> Device | None:
    """Return the device on which values combine: that of the first; None if one of them is on the host."""
    first = devices[0]
    if first is None or any(each is None or each.kind != first.kind for each in devices):
        return None
    return first


def own_copy(value: Any, like: Any, *, is_own: bool) -> Any:
    """Return one replica's own copy of a shared result: on the device of its contribution, or on the host.

    Parameters
    ----------
    value
        What they are given.
    like
        What the replica gave.
    is_own
        Whether nobody else is given the very same.
    """
    device, source = device_of(like), device_of(value)
    if device is None:
        if source is None:
            return value.copy() if isinstance(value, np.ndarray) and not is_own else value
        found = host_array(value)
        return found if found.ndim else found[()]
    if source is None and (not isinstance(value, (np.ndarray, np.generic)) or device.lacks(value.dtype)):
        return value
    with in_stream_of(device):
        if source == device:
            return value if is_own else device.namespace.asarray(value, copy=True)
        return moved(value, device)


def called_on_device(function: np.ufunc, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call a NumPy function on arrays, some of them on a device, by the function of the device's namespace."""
    device = next(device for device in map(device_of, args) if device is not None)
    there = getattr(device.namespace, function.__name__, function)
    with in_stream_of(device):
        return there(*moved_nest(list(args), device), **kwargs)


def synchronize(nest: Any) -> None:
    """Wait until the arrays of devices in a nest are there, as this thread has computed them."""
    if not are_loaded():
        return
    for device in set(map(device_of, optree.tree_leaves(nest))):
        if device is not None:
            with device.using():
                device.current_stream().synchronize()


def put_on(device: Device, leaf: Any) -> Any:
    """Return a leaf with its array on a device.

    Numbers stay as they are, and so does what no device has: text, objects, times, rows of different lengths.
    """
    if isinstance(leaf, np.ndarray) and not device.lacks(leaf.dtype):
        return device.put(leaf)
    # An array of another replica, on the device of that.
    return moved(leaf, device) if is_on_device(leaf) else leaf
