"""Plain values on a cluster: each is sent once, however many calls it is given to."""

from __future__ import annotations

import contextlib
import hashlib
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from typing import Any, Final

import cloudpickle
import numpy as np

from daskdist.errors import ArgumentError
from daskdist.execute.callers import Handle
from daskdist.execute.capture import Capturing
from daskdist.execute.ordered import ByReference, Ordered, meeting
from daskdist.execute.pickling import ForDevices, culprit, kind_of, load_sent, sealed

# What is no larger goes with each call: to point to it would take as much.
_SMALL_BYTES: Final = 1024
# An array that is no larger goes with the first call that is given it: it takes less than a task on each worker.
_MIDDLING_BYTES: Final = 2**16
_MOST_SEEN: Final = 1024
# From here on data is sent to the workers straight, and not by way of the scheduler.
_LARGE_BYTES: Final = 2**20
# Values that are kept note of, and so stay on the cluster though nobody may have them any more.
_MOST_KEPT: Final = 64
_BY_VALUE: Final = frozenset({int, float, complex, bool, type(None), type(...)})


class Parcel:
    """A value that was sent, or will be when it is needed somewhere.

    Parameters
    ----------
    caller
        Who sends it.
    pickled
        The value; None where it is large, and so was placed on a worker.
    placed
        What was placed.
    ordered
        What it refers to on the workers.
    """

    def __init__(
        self,
        caller: Capturing,
        pickled: bytes | None,
        placed: Handle = None,
        ordered: frozenset[Ordered] = frozenset(),
    ) -> None:
        self._caller = caller
        self._pickled = pickled
        self._placed = placed
        self.ordered = ordered
        self._there: dict[str | None, Handle] = {}
        self._columns: dict[tuple[str | None, ...], tuple[Handle, ...]] = {}

    def on_each(self, workers: tuple[str | None, ...]) -> tuple[Handle, ...]:
        """The handle of the value on each of some workers; the same tuple for as long as they are there."""
        column = self._columns.get(workers)
        if column is None or not all(map(self._caller.is_to_be_had, column)):
            column = self._columns[workers] = tuple(map(self.on, workers))
        return column

    def on(self, worker: str | None) -> Handle:
        """The handle of the value on a worker.

        Each has a task of its own, for Dask lets go of what several workers have of one.
        """
        handle = self._there.get(worker)
        if handle is None or not self._caller.is_to_be_had(handle):
            # Apart, so that it goes when nobody needs it, whatever was sent with it.
            needs = [] if self._pickled is not None else [self._placed]
            handle = self._there[worker] = self._caller.call(
                unpacked, needs, self._pickled, on=worker, is_pinned=True, is_apart=True, name="value"
            )
        return handle


class Parcels:
    """Values that were sent to a cluster, each once to a worker, however many steps use it.

    A new array of middling size goes along with its first call, and is sent when another one is given it.

    What tells two values apart is what is in them: an array that was changed since is sent again, and a function that
    is defined anew in each step is one function. A large one stays there for as long as somebody has it here.

    Parameters
    ----------
    caller
        Who sends them.
    apart
        Makes a copy of what workers might otherwise share with this process.
    """

    def __init__(self, caller: Capturing, apart: Callable[[Any], Any]) -> None:
        self._caller = caller
        self._apart = apart
        self._lock = threading.RLock()
        self._parcels: OrderedDict[bytes, Parcel] = OrderedDict()
        # Digests of arrays that went along with a call.
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        # Of functions, by identity, what they were made of; until they are gone.
        self._functions: OrderedDict[int, tuple[MadeOf, Parcel]] = OrderedDict()
        # Of arrays that nobody can change, by identity.
        self._digests: dict[int, bytes] = {}

    def clear(self) -> None:
        """Let go of everything."""
        with self._lock:
            self._parcels.clear()
            self._functions.clear()

    def goes_along(self, value: Any) -> bool:
        """Whether a value had better go with the call: it is small, or an array that no call was given before."""
        kind = type(value)
        if kind in _BY_VALUE or isinstance(value, (ByReference, Ordered)):
            return True
        if kind is np.ndarray:
            if value.dtype.hasobject or value.nbytes > _MIDDLING_BYTES:
                return False
            return value.nbytes <= _SMALL_BYTES or self._is_new(value)
        if kind is str or kind is bytes:
            return len(value) <= _SMALL_BYTES
        return isinstance(value, np.generic)

    def _is_new(self, value: np.ndarray[Any, Any]) -> bool:
        # Most often it is what a program has just computed, and no other step will be given it.
        digest = _digest(value)
        with self._lock:
            if digest in self._parcels or digest in self._seen:
                return False
            self._seen[digest] = None
            if len(self._seen) > _MOST_SEEN:
                self._seen.popitem(last=False)
            return True

    def __call__(self, value: Any, name: Callable[[], str]) -> Parcel:
        """The parcel of a value.

        Parameters
        ----------
        value
            Anything that pickles. Arrays of devices in it go as NumPy's.
        name
            Gives what it is called in an error.

        Raises
        ------
        ArgumentError
            It does not pickle.
        """
        if type(value) is np.ndarray and not value.dtype.hasobject and value.dtype.kind != "T":
            return self._array(value)
        if type(value) is FunctionType:
            return self._function(value, name)
        return self._object(value, name)

    def last_of(self, function: Callable[..., Any]) -> Parcel | None:
        """The parcel of a function as it was when it was asked for last; None where that is not known."""
        known = self._functions.get(id(function))
        return None if known is None else known[1]

    def _function(self, value: FunctionType, name: Callable[[], str]) -> Parcel:
        # To pickle it takes longer than to see that it is what it was.
        with self._lock:
            known = self._functions.get(id(value))
            if known is not None and known[0].is_still_of(value):
                return known[1]
            made_of = MadeOf.of(value)
            parcel = self._object(value, name)
            if made_of is None:
                self._functions.pop(id(value), None)
            else:
                # What it is made of is kept, so that nothing else comes to be at its address.
                if id(value) not in self._functions:
                    weakref.finalize(value, self._functions.pop, id(value), None).atexit = False
                self._functions[id(value)] = made_of, parcel
                if len(self._functions) > _MOST_KEPT:
                    self._functions.popitem(last=False)
            return parcel

    def _object(self, value: Any, name: Callable[[], str]) -> Parcel:
        with meeting() as met:
            pickled, is_for_devices = _pickled(value, name)
        digest = hashlib.sha256(pickled).digest()
        with self._lock:
            parcel = self._known(digest)
            if parcel is not None:
                return parcel
            ordered = frozenset(met)
            if len(pickled) < _LARGE_BYTES:
                pickled = cloudpickle.dumps(ForDevices(pickled)) if is_for_devices else pickled
                return self._keep(digest, Parcel(self._caller, pickled, ordered=ordered))
            copy = ForDevices(pickled) if is_for_devices else cloudpickle.loads(pickled)
            return self._keep(digest, self._placed(copy, ordered), value)

    def _array(self, value: np.ndarray[Any, Any]) -> Parcel:
        with self._lock:
            digest = self._digests.get(id(value)) or _digest(value)
            if id(value) not in self._digests and _is_for_good(value):
                self._digests[id(value)] = digest
                weakref.finalize(value, self._digests.pop, id(value), None)
            parcel = self._known(digest)
            if parcel is not None:
                return parcel
            if value.nbytes < _LARGE_BYTES:
                return self._keep(digest, Parcel(self._caller, cloudpickle.dumps(value)))
            return self._keep(digest, self._placed(self._apart(value)), value)

    def _placed(self, value: Any, ordered: frozenset[Ordered] = frozenset()) -> Parcel:
        return Parcel(self._caller, None, self._caller.place(value, self._caller.workers[0]), ordered)

    def _known(self, digest: bytes) -> Parcel | None:
        parcel = self._parcels.get(digest)
        if parcel is not None:
            self._parcels.move_to_end(digest)
        return parcel

    def _keep(self, digest: bytes, parcel: Parcel, large: Any = None) -> Parcel:
        self._parcels[digest] = parcel
        if len(self._parcels) > _MOST_KEPT:
            self._parcels.popitem(last=False)
        if large is not None:
            # What cannot be told of its end goes when others have come.
            with contextlib.suppress(TypeError):
                weakref.finalize(large, self._parcels.pop, digest, None)
        return parcel


def unpacked(placed: Sequence[Any], pickled: bytes | None) -> Any:
    """A value, on the worker that asked for it; calls of many steps are given the very same one.

    Where arrays of devices were in it, it is `ForDevices`, of which each replica takes its own.
    """
    value = placed[0] if pickled is None else load_sent(pickled)
    if isinstance(value, np.ndarray):
        value = value.view()
        value.flags.writeable = False
    return value


def _digest(value: np.ndarray[Any, Any]) -> bytes:
    # With the order of its memory, on which the last bits of a sum depend.
    is_by_column = value.flags.f_contiguous and not value.flags.c_contiguous
    found = hashlib.sha256(f"{value.dtype!r} {value.shape} {is_by_column}".encode())
    found.update(np.ascontiguousarray(value).view(np.uint8).data if value.size else b"")
    return found.digest()


def _is_for_good(value: Any) -> bool:
    # Whether nobody can change an array. One that has its own memory can be made writeable again.
    while isinstance(value, np.ndarray):
        value = value.base
    return isinstance(value, bytes)


# What does not change, or is no part of a pickle.
_FOR_GOOD: Final = (
    *(int, float, complex, str, bytes, bool, type(None), ModuleType, BuiltinFunctionType, np.generic),
    ByReference,
)


_MISSING: Final = object()


@dataclass(frozen=True, slots=True)
class MadeOf:
    """All that a function is made of, where none of that changes without being another object.

    Parameters
    ----------
    code, defaults
        Its own.
    functions
        Those it refers to, and they refer to; with the code and the defaults of each.
    names
        Where they and it look a name up, the name, and what is there.
    cells
        Variables of functions around them, and what they hold.
    """

    code: CodeType
    defaults: Any
    functions: list[tuple[FunctionType, CodeType, Any]]
    names: list[tuple[dict[str, Any], str, Any]]
    cells: list[tuple[CellType, Any]]

    @classmethod
    def of(cls, function: FunctionType) -> MadeOf | None:
        """What a function is made of; None where some of that may change."""
        made = cls(function.__code__, function.__defaults__, [], [], [])
        seen: set[int] = set()
        waiting = [function]
        while waiting:
            each = waiting.pop()
            if id(each) in seen:
                continue
            seen.add(id(each))
            code, variables = each.__code__, each.__globals__
            # Of a function in it, the names are its own.
            if each.__kwdefaults__ or each.__dict__ or any(isinstance(part, CodeType) for part in code.co_consts):
                return None
            names = [(variables, name, variables.get(name, _MISSING)) for name in code.co_names]
            cells = [(cell, _held(cell)) for cell in each.__closure__ or ()]
            for part in (*[value for *_, value in (*names, *cells)], *(each.__defaults__ or ())):
                if type(part) is FunctionType:
                    waiting.append(part)
                elif part is not _MISSING and not _is_constant(part):
                    return None
            made.names.extend(names)
            made.cells.extend(cells)
            if each is not function:
                # It is not kept by what is kept of it.
                made.functions.append((each, code, each.__defaults__))
        return made

    def is_still_of(self, function: FunctionType) -> bool:
        """Whether the function is what it was."""
        for each, code, defaults in ((function, self.code, self.defaults), *self.functions):
            if each.__code__ is not code or each.__defaults__ is not defaults:
                return False
            if each.__kwdefaults__ or each.__dict__:
                return False
        for variables, name, value in self.names:
            if variables.get(name, _MISSING) is not value:
                return False
        # Spelled out: each step asks.
        for cell, held in self.cells:  # noqa: SIM110
            if _held(cell) is not held:
                return False
        return True


def _held(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        # Nothing yet.
        return _MISSING


def _is_constant(part: Any) -> bool:
    return isinstance(part, _FOR_GOOD) or (isinstance(part, type) and part.__module__ != "__main__")


def _pickled(value: Any, name: Callable[[], str]) -> tuple[bytes, bool]:
    try:
        return sealed(value)
    except Exception as error:
        raise ArgumentError(
            f"{name()} ({kind_of(value)}) does not pickle, and so cannot be sent to a worker{culprit(value)}: {error}"
        ) from error
