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
    """An object whose state can be taken and given back."""

    def state_dict(self) -> Any:
        """Return the current state: dicts, lists and tuples, of arrays, numbers, text, bytes and None."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Take a state that it, or another like it, had."""


class Checkpoint:
    """Objects whose states are saved to a file, and restored from it, together.

    Parameters
    ----------
    **objects
        By name, each with ``state_dict()`` and ``load_state_dict(state)``: a `Variable`, a torch module or optimizer
        of the program, or an object of your own. A state is arrays of any framework, numbers, text, bytes and None,
        in dicts, lists and tuples of any depth.

    Raises
    ------
    ArgumentError
        There are none, or one has no such methods.

    Notes
    -----
    The program writes and reads the file, and replicas do not: it need not be where workers see it, and what was saved
    on some replicas is restored on any number of them. A file is of NumPy's format ``.npz``, with the structure
    beside the arrays. Nothing in it is pickled, so that one from anywhere can be looked at without danger.

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
            raise ArgumentError("Checkpoint: give what is to be saved, by name: Checkpoint(weights=variable)")
        for name, each in objects.items():
            if isinstance(each, type) or not isinstance(each, Stateful):
                what = f"the class {each.__name__}" if isinstance(each, type) else type(each).__name__
                raise ArgumentError(
                    f"Checkpoint: {name!r} is {what}; give an object with state_dict() and load_state_dict(state)"
                )
        self._objects: Mapping[str, Stateful] = dict(objects)

    def __repr__(self) -> str:
        return f"Checkpoint({', '.join(self._objects)})"

    def save(self, path: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> None:
        """Write the states that the objects have now.

        Parameters
        ----------
        path
            A file, as local path or fsspec URL, in a directory that is made where there is none. One that is there
            already stays until the new one is whole, and is replaced then.
        storage_options
            What fsspec's file system takes, by name.

        Raises
        ------
        ArgumentError
            A state has something that cannot be saved, the message says where; or the path is that of a directory.
        FileError
            The file cannot be written.

        Notes
        -----
        A process that dies meanwhile leaves a hidden temporary file beside it, which the next save removes. So only one
        process at a time may save to a path.
        """
        states = {}
        for name, each in self._objects.items():
            state = each.state_dict()
            try:
                states[name] = as_numpy(state, copied=False)
            except ArgumentError as error:
                raise ArgumentError(f"save: {name!r}: {error}") from error
        try:
            write_states(os.fspath(path), states, Storage(storage_options))
        except ArgumentError as error:
            raise ArgumentError(f"save: {error}") from None

    def restore(self, path: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> None:
        """Give the objects the states that were saved.

        Parameters
        ----------
        path
            What was given to `save`.
        storage_options
            What fsspec's file system takes, by name.

        Raises
        ------
        ArgumentError
            Names, structures or shapes are others than those of the objects, or an object does not take its state.
        FileError
            The file is missing, damaged, cut short, or no checkpoint.

        Notes
        -----
        All of the file is read, and held against the state that each object has now, before any is given its own. So
        none is changed where something is wrong, unless an object itself then refuses: the message says which have
        their states already. Arrays come back as ones of NumPy, and where the present state has one of a framework as
        one of its kind, dtype and device.
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
        for name, each in self._objects.items():
            try:
                states[name] = like(each.state_dict(), saved.pop(name), owner=each, copied=False)
            except ArgumentError as error:
                raise ArgumentError(f"restore: {name!r}: {error}; nothing was restored") from error
        done: list[str] = []
        for name, each in self._objects.items():
            try:
                each.load_state_dict(states.pop(name))
            # An object may raise anything.
            except Exception as error:
                why = str(error) if isinstance(error, DaskdistError) else f"{type(error).__name__}: {error}"
                raise ArgumentError(
                    f"restore: {name!r} does not take its state: {why}; restored before it: "
                    f"{', '.join(done) or 'nothing'}"
                ) from error
            done.append(name)
