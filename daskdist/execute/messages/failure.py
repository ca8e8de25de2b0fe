"""Errors and values in the form in which processes send them."""

from __future__ import annotations

import pickle
import traceback
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from daskdist.core.failing.packed_error import as_text, pack_error, unpacked_error
from daskdist.execute.messages.pickling import dumps_on_host, on_host

# Smaller buffers are copied into a pickle: the header of a separate frame takes longer than the copy.
LARGE_BYTES: Final = 2**16
_ENDS_A_PROCESS: Final = (SystemExit, KeyboardInterrupt)


@dataclass(frozen=True)
class Failure:
    """The outcome of a call that raised, or whose arguments could not be computed.

    Parameters
    ----------
    pickled
        The error, as `pack_error` returns it.
    """

    pickled: bytes

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Return the failure of a call that raised an error."""
        # Unpickled and raised on a worker, some errors would end its process.
        return cls(pack_error(as_text(error) if isinstance(error, _ENDS_A_PROCESS) else error, on_host))

    def error(self) -> BaseException:
        """Return the error, a new object each time."""
        return unpacked_error(self.pickled)


def release_frames(error: BaseException) -> None:
    """Drop the variables of the functions that an error ended, once it is a `Failure`.

    They may hold resources that others wait for, such as open connections.
    """
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)


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


class Packed(NamedTuple):
    """A value in the form in which it is sent.

    Parameters
    ----------
    pickled
        The pickle.
    buffers
        Its buffers, which are not in the pickle.
    are_writable
        For each buffer whether its array may be written into.
    """

    pickled: bytes
    buffers: list[Any]
    are_writable: list[bool]

    @classmethod
    def of(cls, value: Any) -> Packed:
        """Return a packed value, whose arrays are not copied; raise what pickling raises."""
        pickled, buffers = pickle_with_buffers(value)
        views = [buffer.raw() for buffer in buffers]
        return cls(pickled, list(map(_Buffer, views)), [not view.readonly for view in views])

    def copied(self) -> Packed:
        """Return the same with copies of the buffers."""
        copies = [bytes(buffer.raw) for buffer in self.buffers]
        buffers = [_Buffer(memoryview(copy)) if len(copy) >= LARGE_BYTES else copy for copy in copies]
        return self._replace(buffers=buffers)

    def value(self) -> Any:
        """Return the value."""
        buffers = map(writable_like, self.buffers, self.are_writable)
        return pickle.loads(self.pickled, buffers=list(buffers))


class _Buffer:
    # Bytes-like memory, pickled as a buffer of its own without a copy.
    def __init__(self, raw: memoryview) -> None:
        self.raw = raw

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _same, (pickle.PickleBuffer(self.raw),)


def _same(buffer: Any) -> Any:
    return buffer


def writable_like(frame: Any, is_writable: bool) -> Any:
    """Return a received buffer that is writable if and only if the sent one was."""
    view = memoryview(frame)
    if view.readonly and is_writable:
        return memoryview(bytearray(view))
    return view if is_writable else view.toreadonly()
