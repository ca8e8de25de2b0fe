"""What pickles: what does not, and why; and what is found on the way."""

from __future__ import annotations

import contextlib
import io
import pickle
import threading
from collections.abc import Callable
from types import CellType
from typing import Any, Final

import cloudpickle
import numpy as np

from daskdist.devices import Device, are_loaded, device_of, is_on_device, name_of, stream_of
from daskdist.errors import ClusterError
from daskdist.execute.callers.compute_key import is_future


def describe_unpicklable(value: Any) -> str:
    """Words for what in a function or an object it is that does not pickle, as far down as it can be told."""
    path, seen = "", {id(value)}
    while True:
        for name, part in _parts(value):
            if id(part) not in seen and not _pickles(part):
                path += name
                value = part
                seen.add(id(part))
                break
        else:
            return f"; it is because of {path.lstrip('.')} ({type_name(value)})" if path else ""


def _parts(value: Any) -> list[tuple[str, Any]]:
    code = getattr(value, "__code__", None)
    if code is not None:
        cells = zip(code.co_freevars, value.__closure__ or (), strict=False)
        found = [(f".{name}", cell.cell_contents) for name, cell in cells if cell != CellType()]
        found += [(f".{name}", value.__globals__[name]) for name in code.co_names if name in value.__globals__]
        return found + [(f".default {number}", each) for number, each in enumerate(value.__defaults__ or ())]
    if getattr(value, "__self__", None) is not None and hasattr(value, "__func__"):
        return [(".self", value.__self__)]
    if isinstance(value, dict):
        return [(f"[{key!r}]", each) for key, each in value.items()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return [(f"[{number}]", each) for number, each in enumerate(value)]
    if isinstance(value, (np.ndarray, np.generic)):
        return []
    if isinstance(value, type):
        return [(f".{name}", each) for name, each in vars(value).items()]
    if getattr(type(value), "__reduce__", None) is not getattr(object, "__reduce__", None):
        # It says itself what is to become of it.
        return []
    names = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ()) if hasattr(value, name)]
    return [(f".{name}", getattr(value, name)) for name in names] + [
        (f".{name}", each) for name, each in getattr(value, "__dict__", {}).items()
    ]


def _pickles(value: Any) -> bool:
    try:
        dumps_on_host(value, by_value=True)
    except Exception:
        return False
    return True


def type_name(value: Any) -> str:
    """The name of a value's type."""
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


class _FutureFinder(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self) -> None:
        # What arrays hold is of no interest, and not copied.
        super().__init__(io.BytesIO(), protocol=5, buffer_callback=lambda _: False)
        self.found: dict[Any, Any] = {}

    def reducer_override(self, obj: Any) -> Any:
        if is_future(obj):
            self.found[obj.key] = obj
        if is_on_device(obj):
            return _put_on_target, (None,)
        return super().reducer_override(obj)


def dumps_on_host(
    value: Any, *, by_value: bool = False, buffer_callback: Callable[[pickle.PickleBuffer], Any] | None = None
) -> bytes:
    """A pickle in which arrays of devices are NumPy's, however deep they are in an object: who reads it may have none.

    Parameters
    ----------
    value
        Anything.
    by_value
        Whether what the program itself defines goes along, too.
    buffer_callback
        Takes what is to go apart from the pickle; nothing is if None.
    """
    if not are_loaded():
        dumps = cloudpickle.dumps if by_value else pickle.dumps
        return dumps(value, protocol=5, buffer_callback=buffer_callback)
    file = io.BytesIO()
    kind: Any = _ByValue if by_value else _ByReference
    kind(file, protocol=5, buffer_callback=buffer_callback).dump(value)
    return file.getvalue()


class _ByReference(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        return _on_host(obj) or NotImplemented


class _ByValue(cloudpickle.Pickler):  # type: ignore[misc]
    # Whether there was one of a device.
    has_arrays = False

    def reducer_override(self, obj: Any) -> Any:
        found = _on_host(obj)
        if found is None:
            return super().reducer_override(obj)
        self.has_arrays = True
        return found


def _on_host(value: Any) -> tuple[Any, ...] | None:
    device = device_of(value)
    if device is None:
        return None
    stream = stream_of(device)
    with device.using():
        stream.wait(device.current_stream().record())
    with device.using(stream):
        return _put_on_target, (device.get(value),)


class _TargetDevice(threading.local):
    # Where arrays come to that were on a device; None for the host.
    device: Device | None = None


_target: Final = _TargetDevice()


def _put_on_target(array: Any) -> Any:
    return array if _target.device is None else _target.device.put(array)


class ForDevices:
    """A value in which there are arrays of devices, on its way: each device that uses it has one of its own.

    Parameters
    ----------
    pickled
        As `pickle_for_devices` gives it.
    """

    def __init__(self, pickled: bytes) -> None:
        self._pickled = pickled
        self._made: dict[str, Any] = {}
        self._lock = threading.Lock()

    def on(self, device: Device) -> Any:
        """The value, the very same each time, with those arrays on a device; NumPy's where that is the host."""
        name = name_of(device)
        with self._lock:
            if name not in self._made:
                self._made[name] = self._on(device)
            return self._made[name]

    def _on(self, device: Device) -> Any:
        if device.is_host:
            return self.on_host()
        with device.using(stream_of(device)):
            _target.device = device
            try:
                return cloudpickle.loads(self._pickled)
            finally:
                _target.device = None

    def on_host(self) -> Any:
        """The value anew, with those arrays as NumPy's."""
        return cloudpickle.loads(self._pickled)

    def __sizeof__(self) -> int:
        # Dask asks for it.
        return object.__sizeof__(self) + len(self._pickled)

    def __reduce__(self) -> tuple[Any, ...]:
        return ForDevices, (self._pickled,)


def pickle_for_devices(value: Any) -> tuple[bytes, bool]:
    """A pickle as `dumps_on_host` makes it, with what the program defines, and whether it is for `ForDevices`."""
    if not are_loaded():
        return cloudpickle.dumps(value), False
    file = io.BytesIO()
    pickler = _ByValue(file, protocol=5)
    pickler.dump(value)
    return file.getvalue(), pickler.has_arrays


def load_sent(pickled: bytes) -> Any:
    """Return what a program pickled, on a worker.

    Raises
    ------
    ClusterError
        It needs a module that this process cannot import, or another version of one.
    """
    try:
        return cloudpickle.loads(pickled)
    except (ImportError, AttributeError) as error:
        name = getattr(error, "name", None) if isinstance(error, ImportError) else None
        file = f"{name.partition('.')[0]}.py" if name else "module.py"
        raise ClusterError(
            f"a worker cannot load a function of the program: {error}. Send its module to the workers with "
            f"client.upload_file({file!r}), or start them where PYTHONPATH has it"
        ) from None


def futures_in(value: Any) -> dict[Any, Any]:
    """The futures that something refers to, by key; as far as it pickles."""
    finder = _FutureFinder()
    with contextlib.suppress(Exception):
        finder.dump(value)
    return finder.found
