"""Errors and values in the form in which processes send them."""

from __future__ import annotations

import pickle
import traceback
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import cloudpickle

from daskdist.errors import DaskdistError
from daskdist.execute.messages.pickling import dumps_on_host

_ENDS_A_PROCESS: Final = (SystemExit, KeyboardInterrupt)


@dataclass(frozen=True)
class Failure:
    """The outcome of a call that raised, or whose arguments could not be computed.

    Parameters
    ----------
    pickled
        The error and what it was raised from, each with its traceback.
    """

    pickled: bytes

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Return the failure of a call that raised an error."""
        try:
            if isinstance(error, _ENDS_A_PROCESS):
                raise TypeError("unpickled and raised on a worker, this error would end its process")
            pickled = dumps_on_host(_chain_of(error), by_value=True)
            cloudpickle.loads(pickled)
        except Exception:
            # An error that does not pickle is sent as text.
            text = DaskdistError(f"{type(error).__name__}: {error}")
            for note in getattr(error, "__notes__", ()):
                text.add_note(note)
            text.add_note("".join(traceback.format_exception(error)).rstrip())
            pickled = cloudpickle.dumps([(text, None)])
        return cls(pickled)

    def error(self) -> BaseException:
        """Return the error, a new object each time."""
        chain = [error.with_traceback(trace) for error, trace in cloudpickle.loads(self.pickled)]
        for error, cause in pairwise(chain):
            error.__cause__ = cause
        raised: BaseException = chain[0]
        return raised


def release_frames(error: BaseException) -> None:
    """Drop the variables of the functions that an error ended, once it is a `Failure`.

    They may hold resources that others wait for, such as open connections.
    """
    for cause, _ in _chain_of(error):
        traceback.clear_frames(cause.__traceback__)


def _chain_of(error: BaseException | None) -> list[tuple[BaseException, Any]]:
    # The errors that a traceback would show, the last one first.
    chain: list[tuple[BaseException, Any]] = []
    while error is not None and all(error is not other for other, _ in chain):
        chain.append((error, error.__traceback__))
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return chain


def pickle_with_buffers(value: Any) -> tuple[bytes, list[pickle.PickleBuffer]]:
    """Pickle a value without its array buffers; functions and classes of the program are pickled by value.

    Returns
    -------
    tuple
        The pickle, and the buffers of the arrays, which are not copied.
    """
    for by_value in (False, True):
        buffers: list[pickle.PickleBuffer] = []
        try:
            pickled = dumps_on_host(value, by_value=by_value, buffer_callback=buffers.append)
        except Exception:
            if by_value:
                raise
            continue
        if b"__main__" not in pickled:
            break
    return pickled, buffers


def writable_like(frame: Any, is_writable: bool) -> Any:
    """Return a received buffer that is writable if and only if the sent one was."""
    view = memoryview(frame)
    if view.readonly and is_writable:
        return memoryview(bytearray(view))
    return view if is_writable else view.toreadonly()
