"""Pickling: device arrays as host arrays, futures inside values, and descriptions of values that do not pickle."""

from __future__ import annotations

import contextlib
import io
import pickle
import threading
from collections.abc import Callable
from types import FunctionType
from typing import Any, Final

import cloudpickle

from daskdist.core.functions.reach import attributes_of, references_from
from daskdist.devices import Device, are_loaded, device_of, is_on_device, name_of, stream_of
from daskdist.errors import ClusterError
from daskdist.execute.callers.compute_key import is_future


def describe_unpicklable(value: Any) -> str:
    """Return the clause of a message that names the innermost part of a value that does not pickle; '' if unknown."""
    path, seen = "", {id(value)}
    while True:
        for name, part in _parts(value):
            if id(part) not in seen and not _pickles(part):
                path += name if name.startswith("[") else f".{name}"
                value = part
                seen.add(id(part))
                break
        else:
            return f"; it is because of {path.lstrip('.')} ({type_name(value)})" if path else ""


def _parts(value: Any) -> list[tuple[str, Any]]:
    parts = [*references_from(value, is_into_packages=True)]
    reduce: Any = type(value).__reduce__
    # Arrays, and objects that define their own pickling, have other parts than their attributes.
    if not parts and reduce is object.__reduce__ and not isinstance(value, type | FunctionType):
        parts += attributes_of(value)
    return [(part.name, part.value) for part in parts]


def _pickles(value: Any) -> bool:
    try:
        dumps_on_host(value, by_value=True)
    except Exception:
        return False
    return True


def type_name(value: Any) -> str:
    """Return the name of a value's type, with its module unless it is built in."""
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


class _FutureFinder(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self) -> None:
        # The contents of arrays are irrelevant and not copied.
        super().__init__(io.BytesIO(), protocol=5, buffer_callback=lambda _: False)
        self.futures: dict[Any, Any] = {}

    def reducer_override(self, obj: Any) -> Any:
        if is_future(obj):
            self.futures[obj.key] = obj
        if is_on_device(obj):
            return _put_on_target, (None,)
        return super().reducer_override(obj)


def dumps_on_host(
    value: Any, *, by_value: bool = False, buffer_callback: Callable[[pickle.PickleBuffer], Any] | None = None
) -> bytes:
    """Pickle a value with every device array in it, at any depth, as a NumPy array: the reader may have no device.

    Parameters
    ----------
    value
        Any value.
    by_value
        Whether functions and classes that the program defines are pickled by value.
    buffer_callback
        Takes the buffers to be sent outside the pickle, as in `pickle.Pickler`; None keeps all inside.
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
        return on_host(obj) or NotImplemented


class _ByValue(cloudpickle.Pickler):  # type: ignore[misc]
    # True once a device array was pickled.
    has_arrays = False

    def reducer_override(self, obj: Any) -> Any:
        reduced = on_host(obj)
        if reduced is None:
            return super().reducer_override(obj)
        self.has_arrays = True
        return reduced


def on_host(value: Any) -> tuple[Any, ...] | None:
    """Return how to pickle a device array, as a NumPy array; None for other values."""
    device = device_of(value)
    if device is None:
        return None
    stream = stream_of(device)
    with device.using():
        stream.wait(device.current_stream().record())
    with device.using(stream):
        return _put_on_target, (device.get(value),)


class _TargetDevice(threading.local):
    # The device that former device arrays are put on while this thread unpickles; None for the host.
    device: Device | None = None


_target: Final = _TargetDevice()


def _put_on_target(array: Any) -> Any:
    return array if _target.device is None else _target.device.put(array)


class ForDevices:
    """A pickled value with device arrays, which is unpickled once for each device that uses it."""

    def __init__(self, pickled: bytes) -> None:
        self._pickled = pickled
        self._by_device: dict[str, Any] = {}
        self._lock = threading.Lock()

    def on(self, device: Device) -> Any:
        """Return the value with its arrays on a device, or as NumPy arrays on the host; the same object each time."""
        name = name_of(device)
        with self._lock:
            if name not in self._by_device:
                self._by_device[name] = self._on(device)
            return self._by_device[name]

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
        """Return a new copy of the value, with NumPy arrays."""
        return cloudpickle.loads(self._pickled)

    def __sizeof__(self) -> int:
        # Dask reads this as the size of the result.
        return object.__sizeof__(self) + len(self._pickled)

    def __reduce__(self) -> tuple[Any, ...]:
        return ForDevices, (self._pickled,)


def pickle_for_devices(value: Any) -> tuple[bytes, bool]:
    """Pickle a value as `dumps_on_host` does; return also whether it has device arrays and so needs `ForDevices`."""
    if not are_loaded():
        return cloudpickle.dumps(value), False
    file = io.BytesIO()
    pickler = _ByValue(file, protocol=5)
    pickler.dump(value)
    return file.getvalue(), pickler.has_arrays


def load_sent(pickled: bytes) -> Any:
    """Unpickle a value of the program on a worker.

    Raises
    ------
    ClusterError
        The value needs a module that this process cannot import, or a different version of one.
    """
    try:
        return cloudpickle.loads(pickled)
    except (ImportError, AttributeError) as error:
        name = getattr(error, "name", None) if isinstance(error, ImportError) else None
        file = f"{name.partition('.')[0]}.py" if name else "module.py"
        raise ClusterError(
            f"a worker cannot load a function of the program: {error}. Send the code of modules beside the program "
            f"along by dask.config.set({{'daskdist.send-modules': 'local'}}), or the module with "
            f"client.upload_file({file!r}), a package as a zip file, or start workers where PYTHONPATH has it"
        ) from None


def futures_in(value: Any) -> dict[Any, Any]:
    """Return the futures that a value refers to, by key; only those pickled before a part that does not pickle."""
    finder = _FutureFinder()
    with contextlib.suppress(Exception):
        finder.dump(value)
    return finder.futures
