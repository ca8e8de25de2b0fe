"""`Checkpoint`: the states of objects, saved to a file and restored from it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np

from daskdist.checkpoint.nests import PLAIN, as_numpy, differences, items_of, like
from daskdist.checkpoint.state_file import read_states, write_states
from daskdist.core.cardinality import counted
from daskdist.core.functions.current_context import refuse_replicas
from daskdist.display.pages import state_page
from daskdist.display.values import abridged
from daskdist.errors import ArgumentError, DaskdistError
from daskdist.storage.filesystem import Storage

# The types of values that are saved unchanged, and have no methods for it.
_PLAIN: Final = (*PLAIN, np.generic, type(None))
_WHAT: Final = "give an object with state_dict() and load_state_dict(state), or values"

_IN_PROGRAM: Final = (
    "Save and restore in the program, between calls of Strategy.run, or with checkpoint and restore of the replica's "
    "context, which all replicas call"
)


@runtime_checkable
class HasState(Protocol):
    """An object whose state can be read."""

    def state_dict(self) -> Any:
        """Return the current state: dicts, lists and tuples of arrays, numbers, text, bytes and None."""


@runtime_checkable
class HasSteps(Protocol):
    """An object whose state counts steps that may still be under way."""

    _finish_steps: Callable[[], None]
    """Waits until all steps have ended, and raises the error of one whose results were not read."""


@runtime_checkable
class Stateful(HasState, Protocol):
    """An object whose state can be saved and restored."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Set the state to one that this object, or one like it, had."""


def _described(value: Any) -> str:
    # Other objects are not shown, as their repr may take long, or read data.
    return abridged(value) if isinstance(value, _PLAIN) else ""


class Checkpoint:
    """Objects and values that are saved to a file, and restored from it, together.

    Each of them is an attribute of its name: ``checkpoint.epoch += 1`` sets a value before the next save, and after
    `restore` the attribute is the restored value.

    Parameters
    ----------
    **objects
        By name, either objects with ``state_dict()`` and ``load_state_dict(state)``: a `Variable`, an iterator, a torch
        module or optimizer of the program, or an object of your own; or values, which are saved as they are. Values and
        states consist of arrays of any framework, numbers, text, bytes and None, in dicts, lists and tuples of any
        depth.

    Raises
    ------
    ArgumentError
        There are no objects, one has an unsupported type, or its name is that of a method of this class.

    Notes
    -----
    The program reads and writes the file, and replicas do not: workers need no access to it, and a state that was saved
    with some number of replicas can be restored with another. The file has NumPy's format ``.npz``, with the structure
    stored beside the arrays. Nothing in it is pickled, so that files from untrusted sources are safe to read.

    With an iterator over a distributed dataset, saving first waits for all calls of `Strategy.run`: its position counts
    complete steps only. It raises the error of a failed call whose results were not read.

    >>> import daskdist
    >>> strategy = daskdist.MirroredStrategy(["CPU:0", "CPU:1"])
    >>> with strategy.scope():
    ...     weights = daskdist.Variable([0.0, 1.0], name="weights")
    >>> checkpoint = Checkpoint(weights=weights, epoch=3)
    >>> checkpoint.save("memory://run/step-0.ckpt")
    >>> checkpoint.epoch = 0
    >>> checkpoint.restore("memory://run/step-0.ckpt")
    >>> checkpoint.epoch
    3
    """

    _objects: dict[str, Any]

    def __init__(self, /, **objects: Any) -> None:
        if not objects:
            raise ArgumentError("Checkpoint: give the objects to be saved, by name: Checkpoint(weights=variable)")
        for name, value in objects.items():
            if hasattr(type(self), name):
                raise ArgumentError(f"Checkpoint: {name!r} is the name of a method; choose another")
            _check(name, value)
        self.__dict__["_objects"] = dict(objects)

    def __repr__(self) -> str:
        return f"Checkpoint({', '.join(self._objects)})"

    def _repr_html_(self) -> str:
        rows = [(name, type(value).__name__, _described(value)) for name, value in self._objects.items()]
        return state_page("Checkpoint", [counted(len(rows), "object")], ("name", "type", "value"), rows)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._objects})

    def __getattr__(self, name: str) -> Any:
        objects = self.__dict__.get("_objects", {})
        if name not in objects:
            raise AttributeError(f"this checkpoint has no {name!r}; it is of {', '.join(objects)}")
        return objects[name]

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._objects:
            raise AttributeError(
                f"this checkpoint has no {name!r}; it is of {', '.join(self._objects)}. Give it when you create one"
            )
        _check(name, value)
        self._objects[name] = value

    def save(self, path: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> None:
        """Write the current states.

        Parameters
        ----------
        path
            The file, as local path or fsspec URL. Its directory is created if it does not exist. An existing file is
            replaced once the new one is complete.
        storage_options
            Options of the fsspec file system, by name.

        Raises
        ------
        ArgumentError
            A state contains something that cannot be saved, at the place in the message; or the path is a directory.
        FileError
            The file cannot be written.
        RuntimeError
            A replica calls it, in a function that `Strategy.run` calls.

        Notes
        -----
        A process that dies while saving leaves a hidden temporary file beside the path, which the next save removes.
        So only one process at a time may save to a path.
        """
        write(os.fspath(path), self._states(copied=False), Storage(storage_options))

    def _states(self, *, copied: bool = True) -> dict[str, Any]:
        """Return the current states by name, as nests of NumPy arrays and Python values.

        Parameters
        ----------
        copied
            Whether arrays are copies, which later changes of the objects do not reach.

        Raises
        ------
        ArgumentError
            A state contains something that cannot be saved, at the place in the message.
        RuntimeError
            A replica calls it, in a function that `Strategy.run` calls.
        """
        refuse_replicas("Checkpoint", _IN_PROGRAM)
        for value in self._objects.values():
            # Otherwise a program that was killed now would continue after steps that were never complete.
            if isinstance(value, HasSteps):
                value._finish_steps()
        states = {}
        for name, value in self._objects.items():
            state = value.state_dict() if isinstance(value, Stateful) else value
            try:
                states[name] = as_numpy(state, copied=copied)
            except ArgumentError as error:
                raise ArgumentError(f"save: {name!r}: {error}") from error
        return states

    def restore(self, path: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> None:
        """Restore the objects and values to the saved states.

        Parameters
        ----------
        path
            The path that was passed to `save`.
        storage_options
            Options of the fsspec file system, by name.

        Raises
        ------
        ArgumentError
            Names, structures or shapes differ from those of the objects, or an object rejects its state.
        FileError
            The file is missing, damaged, truncated, or not a checkpoint.

        Notes
        -----
        The whole file is read and compared with the current states before any object is changed. So no object changes
        if something is wrong, unless an object itself then rejects its state: the message says which objects were
        restored before. Arrays are restored as NumPy arrays, or if the current state has an array of a framework, as
        arrays of its type, dtype and device.
        """
        refuse_replicas("Checkpoint", _IN_PROGRAM)
        self._set_states(read_states(os.fspath(path), Storage(storage_options)), os.fspath(path))

    def _set_states(self, saved: dict[str, Any], path: str) -> None:
        """Restore the objects and values to states that were read from a file."""
        missing = [name for name in self._objects if name not in saved]
        superfluous = [name for name in saved if name not in self._objects]
        if missing or superfluous:
            raise ArgumentError(
                f"restore: {path} is of other objects: {differences(missing, superfluous)}; the checkpoint is of "
                f"{', '.join(self._objects)}"
            )
        states = {}
        for name, value in self._objects.items():
            state = saved.pop(name)
            if isinstance(value, _PLAIN) and value is not None and not isinstance(state, _PLAIN):
                raise ArgumentError(
                    f"restore: {name!r} is the state of an object in {path}, and {value!r:.80} here; nothing was "
                    "restored"
                )
            if isinstance(value, _PLAIN):
                states[name] = state
                continue
            present, owner = (_state_form(value), value) if isinstance(value, Stateful) else (value, None)
            try:
                states[name] = like(present, state, owner=owner, copied=False)
            except ArgumentError as error:
                raise ArgumentError(f"restore: {name!r}: {error}; nothing was restored") from error
        done: list[str] = []
        for name, value in self._objects.items():
            if not isinstance(value, Stateful):
                self._objects[name] = states.pop(name)
                continue
            try:
                value.load_state_dict(states.pop(name))
            # An object may raise any exception.
            except Exception as error:
                why = str(error) if isinstance(error, DaskdistError) else f"{type(error).__name__}: {error}"
                raise ArgumentError(
                    f"restore: {name!r} does not accept its state: {why}; restored before it: "
                    f"{', '.join(done) or 'nothing'}"
                ) from error
            done.append(name)


def write(path: str, states: Mapping[str, Any], storage: Storage, check: Callable[[], None] = lambda: None) -> None:
    """Write states to a file, with errors that name the operation ``save``."""
    try:
        write_states(path, states, storage, check)
    except ArgumentError as error:
        raise ArgumentError(f"save: {error}") from None


def _state_form(value: Any) -> Any:
    # A state with the structure, shapes and dtypes of the object's. The value of a variable may be lost.
    has_form = hasattr(type(value), "__daskdist_state_form__")
    return value.__daskdist_state_form__() if has_form else value.state_dict()


def _check(name: str, value: Any) -> None:
    if isinstance(value, type):
        raise ArgumentError(f"Checkpoint: {name!r} is the class {value.__name__}; {_WHAT}")
    if not isinstance(value, Stateful):
        try:
            as_numpy(value, copied=False)
            refuse_objects_inside(value)
        except ArgumentError as error:
            raise ArgumentError(f"Checkpoint: {name!r} is {type(value).__name__}; {_WHAT}: {error}") from None


def refuse_objects_inside(nest: Any) -> None:
    """Refuse a nest with objects that have a state, which would be saved as arrays and not restored.

    Raises
    ------
    ArgumentError
        There is such an object.
    """
    for _, part in items_of(nest) or ():
        if isinstance(part, Stateful):
            raise ArgumentError(f"{type(part).__name__} inside; give objects with a state by names of their own")
        refuse_objects_inside(part)
