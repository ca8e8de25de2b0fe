"""Functions and large values, which the program sends to each worker once for all calls that use them."""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Final
from weakref import WeakKeyDictionary

import cloudpickle
import numpy as np

from daskdist.config import setting
from daskdist.core.functions.by_value import modules_by_value
from daskdist.core.functions.reach import ModuleUse, NoValue, Reach, is_imported, is_own, references_from
from daskdist.errors import ArgumentError
from daskdist.execute.messages.by_reference import ByReference
from daskdist.execute.messages.pickling import ForDevices, describe_unpicklable, pickle_for_devices, type_name
from daskdist.strategy.values.variable_contract import key_of
from daskdist.strategy.variables.variable import Variable

# Smaller arrays are sent with each call.
_SMALL_ARRAY_BYTES: Final = 2**16
_SMALL_TEXT_BYTES: Final = 1024
# The number of recent objects that stay on the workers even if no call uses them.
_MOST_KEPT: Final = 64
_MOST_BYTES: Final = 2**27
_BY_VALUE: Final = frozenset({int, float, complex, bool, type(None), type(...)})
# Types of values that do not change, or of which a pickle has only the name.
_CONSTANTS: Final = (
    *(int, float, complex, str, bytes, bool, type(None), np.generic, NoValue),
    *(ModuleType, BuiltinFunctionType, FunctionType, ByReference),
)
_numbers: Final = itertools.count()


class SentObject:
    """An object that workers have, or will have once a call needs it; they drop it with this handle.

    Parameters
    ----------
    value
        The pickle to send, or a NumPy array without other references.
    dropped
        A list to which the number of the object is added when its handle is gone.
    """

    __slots__ = ("__weakref__", "_dropped", "number", "value")

    def __init__(self, value: Any, dropped: deque[int]) -> None:
        self.number = next(_numbers)
        self.value = value
        self._dropped = dropped

    @property
    def num_bytes(self) -> int:
        """The number of bytes to send."""
        return len(self.value) if type(self.value) is bytes else int(self.value.nbytes)

    def __del__(self) -> None:
        try:
            self._dropped.append(self.number)
        except AttributeError:
            # An interrupt ended `__init__`.
            return


class SentObjects:
    """The recently sent objects, found by their contents.

    An array that has changed is a new object; a function that is defined again in each step is the same object.

    Parameters
    ----------
    dropped
        A list to which the numbers of objects are added when their handles are gone.
    """

    def __init__(self, dropped: deque[int]) -> None:
        self._dropped = dropped
        self._lock = threading.RLock()
        self._objects: OrderedDict[bytes, SentObject] = OrderedDict()
        self._num_bytes = 0
        # Function -> what it refers to, its handle, and what identifies it.
        self._functions: WeakKeyDictionary[FunctionType, tuple[Reach, SentObject, list[Any]]] = WeakKeyDictionary()

    def clear(self) -> None:
        """Forget all objects."""
        with self._lock:
            self._objects.clear()
            self._functions.clear()
            self._num_bytes = 0

    @staticmethod
    def goes_along(value: Any) -> bool:
        """Return whether a value is sent with each call, since it is small or a reference."""
        kind = type(value)
        if kind in _BY_VALUE or isinstance(value, ByReference):
            return True
        if kind is np.ndarray:
            return not value.dtype.hasobject and value.nbytes <= _SMALL_ARRAY_BYTES
        if kind is str or kind is bytes:
            return len(value) <= _SMALL_TEXT_BYTES
        return isinstance(value, np.generic)

    def __call__(self, value: Any, name: Callable[[], str]) -> SentObject:
        """Return the handle of an object.

        Parameters
        ----------
        value
            Any object that pickles. Device arrays in it are sent as NumPy arrays.
        name
            Returns the name of the value for an error.

        Raises
        ------
        ArgumentError
            The object does not pickle.
        """
        if type(value) is np.ndarray and not value.dtype.hasobject and value.dtype.kind != "T":
            with self._lock:
                return self._kept(_digest(value), lambda: value.copy("K"))
        return self._pickled(value, name)

    def of_function(self, value: Any, name: Callable[[], str]) -> SentObject:
        """Return the handle of a function, as calling this object does."""
        if type(value) is not FunctionType:
            return self(value, name)
        # Pickling takes longer than checking that the function is unchanged.
        known = self._functions.get(value)
        if known is not None and known[0].is_current(value):
            return known[1]
        with self._lock:
            sends_modules = setting("send-modules") is not None or bool(cloudpickle.list_registry_pickle_by_value())
            reach = Reach(value, partial(_is_in_pickle, sends_modules), is_into_packages=True)
            sent_object = self._pickled(value, name)
            if not all(map(_is_constant, reach.leaves)):
                self._functions.pop(value, None)
            else:
                self._functions[value] = reach, sent_object, _made_of(value)
                if len(self._functions) > _MOST_KEPT:
                    self._functions.pop(next(iter(self._functions)), None)
            return sent_object

    def parts_of(self, function: Any) -> list[Any]:
        """Return the parts that identify a function that was just sent."""
        known = self._functions.get(function) if type(function) is FunctionType else None
        return _made_of(function) if known is None else known[2]

    def _pickled(self, value: Any, name: Callable[[], str]) -> SentObject:
        try:
            with modules_by_value():
                pickled, is_for_devices = pickle_for_devices(value)
        except Exception as error:
            raise ArgumentError(
                f"{name()} ({type_name(value)}) does not pickle, and so cannot be sent to a worker"
                f"{describe_unpicklable(value)}: {error}"
            ) from error
        with self._lock:
            return self._kept(
                hashlib.sha256(pickled).digest(),
                lambda: cloudpickle.dumps(ForDevices(pickled)) if is_for_devices else pickled,
            )

    def _kept(self, digest: bytes, value: Callable[[], Any]) -> SentObject:
        sent_object = self._objects.get(digest)
        if sent_object is not None:
            self._objects.move_to_end(digest)
            return sent_object
        sent_object = self._objects[digest] = SentObject(value(), self._dropped)
        self._num_bytes += sent_object.num_bytes
        while len(self._objects) > _MOST_KEPT or (self._num_bytes > _MOST_BYTES and len(self._objects) > 1):
            _, oldest = self._objects.popitem(last=False)
            self._num_bytes -= oldest.num_bytes
        return sent_object


def _made_of(fn: Any) -> list[Any]:
    # Return the parts that identify a function. One that is defined again in each step, with the same variables in its
    # closure, has the same parts. Methods of different objects differ, and so do functions with other defaults or other
    # callees.
    if type(fn) is MethodType:
        return [fn.__self__, *_made_of(fn.__func__)]
    if type(fn) is not FunctionType:
        within = getattr(fn, "__wrapped__", None)
        return [fn] if within is None else [type(fn), *_made_of(within)]
    parts: list[Any] = [fn.__code__]
    for reference in references_from(fn):
        value = reference.value
        if reference.how == "name":
            parts.append(value.__code__ if type(value) is FunctionType else None)
        elif isinstance(value, Variable):
            # A kept part must not keep alive the copies that a variable has on workers.
            parts.append(key_of(value))
        elif reference.how == "default":
            parts.append(value)
        elif reference.how in ("variable", "assigned"):
            parts.append(reference.holder)
    return parts


def _is_in_pickle(sends_modules: bool, value: Any) -> bool:
    # Functions of imported modules are pickled by their names, unless the code of modules is sent along.
    if type(value) is FunctionType:
        return not is_imported(value) or (sends_modules and is_own(value))
    return sends_modules and type(value) is ModuleUse


def _is_constant(value: Any) -> bool:
    return isinstance(value, _CONSTANTS) or (isinstance(value, type) and value.__module__ != "__main__")


def _digest(value: np.ndarray[Any, Any]) -> bytes:
    # Include the memory order, which affects the last bits of a sum.
    is_by_column = value.flags.f_contiguous and not value.flags.c_contiguous
    digest = hashlib.sha256(f"{value.dtype!r} {value.shape} {is_by_column}".encode())
    digest.update(np.ascontiguousarray(value).view(np.uint8).data if value.size else b"")
    return digest.digest()
