"""`Checkpoint`: the states of objects, saved to a file and restored from it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from daskdist.checkpoint.nests import as_numpy, differences, like
from daskdist.checkpoint.state_file import read_states, write_states
from daskdist.errors import ArgumentError, DaskdistError
from daskdist.storage.filesystem import Storage


@runtime_checkable
class Stateful(Protocol):
    """An object whose state can be saved and restored."""

    def state_dict(self) -> Any:
        """Return the current state: dicts, lists and tuples of arrays, numbers, text, bytes and None."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Set the state to one that this object, or one like it, had."""


class Checkpoint:
    """Objects whose states are saved to a file, and restored from it, together.

    Parameters
    ----------
    **objects
        Objects by name, each with ``state_dict()`` and ``load_state_dict(state)``: a `Variable`, a torch module or
        optimizer of the program, or an object of your own. A state consists of arrays of any framework, numbers, text,
        bytes and None, in dicts, lists and tuples of any depth.

    Raises
    ------
    ArgumentError
        No objects are given, or one lacks those methods.

    Notes
    -----
    The program reads and writes the file, and replicas do not: workers need no access to it, and a state that was saved
    with some number of replicas can be restored with another. The file has NumPy's format ``.npz``, with the structure
    stored beside the arrays. Nothing in it is pickled, so that files from untrusted sources are safe to read.

    >>> import daskdist
    >>> strategy = daskdist.MirroredStrategy(["CPU:0", "CPU:1"])
    >>> with strategy.scope():
    ...     weights = daskdist.Variable([0.0, 1.0], name="weights")
    >>> checkpoint = Checkpoint(weights=weights)
    >>> checkpoint.save("memory://run/step-0.ckpt")
    >>> checkpoint.restore("memory://run/step-0.ckpt")
    """

    def __init__(self, /, **objects: Stateful) -> None:
        if not objects:
            raise ArgumentError("Checkpoint: give the objects to be saved, by name: Checkpoint(weights=variable)")
        for name, stateful in objects.items():
            if isinstance(stateful, type) or not isinstance(stateful, Stateful):
                what = f"the class {stateful.__name__}" if isinstance(stateful, type) else type(stateful).__name__
                raise ArgumentError(
                    f"Checkpoint: {name!r} is {what}; give an object with state_dict() and load_state_dict(state)"
                )
        self._objects: Mapping[str, Stateful] = dict(objects)

    def __repr__(self) -> str:
        return f"Checkpoint({', '.join(self._objects)})"

    def save(self, path: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> None:
        """Write the current states of the objects.

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

        Notes
        -----
        A process that dies while saving leaves a hidden temporary file beside the path, which the next save removes.
        So only one process at a time may save to a path.
        """
        states = {}
        for name, stateful in self._objects.items():
            state = stateful.state_dict()
            try:
                states[name] = as_numpy(state, copied=False)
            except ArgumentError as error:
                raise ArgumentError(f"save: {name!r}: {error}") from error
        try:
            write_states(os.fspath(path), states, Storage(storage_options))
        except ArgumentError as error:
            raise ArgumentError(f"save: {error}") from None

    def restore(self, path: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> None:
        """Restore the objects to the saved states.

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
        saved = read_states(os.fspath(path), Storage(storage_options))
        missing = [name for name in self._objects if name not in saved]
        superfluous = [name for name in saved if name not in self._objects]
        if missing or superfluous:
            raise ArgumentError(
                f"restore: {os.fspath(path)} is of other objects: {differences(missing, superfluous)}; the checkpoint "
                f"is of {', '.join(self._objects)}"
            )
        states = {}
        for name, stateful in self._objects.items():
            try:
                states[name] = like(stateful.state_dict(), saved.pop(name), owner=stateful, copied=False)
            except ArgumentError as error:
                raise ArgumentError(f"restore: {name!r}: {error}; nothing was restored") from error
        done: list[str] = []
        for name, stateful in self._objects.items():
            try:
                stateful.load_state_dict(states.pop(name))
            # An object may raise any exception.
            except Exception as error:
                why = str(error) if isinstance(error, DaskdistError) else f"{type(error).__name__}: {error}"
                raise ArgumentError(
                    f"restore: {name!r} does not take its state: {why}; restored before it: "
                    f"{', '.join(done) or 'nothing'}"
                ) from error
            done.append(name)
