"""Errors as bytes, in which they travel between processes: with their types, causes, notes and tracebacks.

The usual pickle of an error calls its class with the arguments of the base class, which fails, or changes the message,
if ``__init__`` takes others. Here the object is created without ``__init__``, and gets the same arguments and
attributes.
"""

from __future__ import annotations

import functools
import io
import pickle
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import cloudpickle
from tblib.pickling_support import pickle_traceback  # type: ignore[import-untyped]

from daskdist.errors import DaskdistError

_P = ParamSpec("_P")
_T = TypeVar("_T")
# Returns how to pickle a value, as a reducer does; None for the usual way.
Reducer = Callable[[Any], "tuple[Any, ...] | None"]


def pack_error(error: BaseException, reduced: Reducer = lambda value: None) -> bytes:
    """Return an error as bytes, with what it was raised from, and the tracebacks.

    Arguments and attributes that do not pickle become text. An error whose class does not pickle gets the first base
    class that does, or becomes `as_text`.

    Parameters
    ----------
    error
        The error.
    reduced
        Says how to pickle its parts.
    """
    for is_careful in (False, True):
        try:
            pickled = _dumps(error, is_careful, reduced)
            # Some messages are made of attributes.
            str(unpacked_error(pickled))
            return pickled
        except Exception:
            # The error has parts that do not pickle.
            continue
    return cloudpickle.dumps(as_text(error))  # type: ignore[no-any-return]


def unpacked_error(packed: bytes) -> BaseException:
    """Return the error in bytes of `pack_error`, a new object each time."""
    error: BaseException = cloudpickle.loads(packed)
    return error


def raising_packed(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Return a task's function with errors that Dask can send, whatever parts they have."""

    @functools.wraps(function)
    def call(*args: _P.args, **options: _P.kwargs) -> _T:
        try:
            return function(*args, **options)
        except Exception as error:
            sent = unpacked_error(pack_error(error))
        # It is raised outside of the handler, since Dask would send the original as its context.
        raise sent

    return call


def as_text(error: BaseException) -> DaskdistError:
    """Return an error whose message has the type and the message of another one, and a note with its traceback."""
    text = DaskdistError(f"{type(error).__name__}: {error}")
    for note in getattr(error, "__notes__", ()):
        text.add_note(note)
    text.add_note("".join(traceback.format_exception(error)).rstrip())
    return text


def _dumps(value: Any, is_careful: bool, reduced: Reducer) -> bytes:
    file = io.BytesIO()
    _ErrorPickler(file, is_careful, reduced).dump(value)
    return file.getvalue()


class _ErrorPickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, file: io.BytesIO, is_careful: bool, reduced: Reducer) -> None:
        super().__init__(file, protocol=5)
        self._is_careful = is_careful
        self._reduced = reduced

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, BaseException):
            return self._of_error(obj)
        if isinstance(obj, TracebackType):
            return pickle_traceback(obj)
        return self._reduced(obj) or super().reducer_override(obj)

    def _of_error(self, error: BaseException) -> tuple[Any, ...]:
        kind = type(error)
        if self._kept(kind) is Exception is not kind:
            return self._of_error(as_text(error))
        make, arguments, state = parts_of(error, self._kept, is_careful=self._is_careful)
        if self._is_careful and not _can_be_made(make, arguments):
            return self._of_error(as_text(error))
        is_implicit = error.__cause__ is None and not error.__suppress_context__
        context = error.__context__ if is_implicit else None
        trace = self._kept(error.__traceback__)
        parts = state, error.__cause__, context, error.__suppress_context__, trace
        return make, arguments, parts, None, None, _set_parts

    def _kept(self, part: Any) -> Any:
        # The part of an error, or what replaces it if it does not pickle.
        if not self._is_careful or part is None or isinstance(part, BaseException):
            return part
        try:
            pickle.loads(_dumps(part, True, self._reduced))
        except Exception:
            if isinstance(part, type):
                return self._kept(part.__mro__[1])
            return None if isinstance(part, TracebackType) else _shown(part)
        return part


def parts_of(
    error: BaseException, keep: Callable[[Any], Any] = lambda part: part, *, is_careful: bool = False
) -> tuple[Callable[..., BaseException], tuple[Any, ...], dict[str, Any]]:
    """Return a function that creates an equal error, its arguments, and the attributes to set after that.

    Parameters
    ----------
    error
        The error.
    keep
        Returns what to use for an argument, an attribute or the class.
    is_careful
        Whether to use nothing that the class itself says about pickling.
    """
    kind = type(error)
    builtin = _builtin_base(kind)
    if is_careful or (kind.__reduce__, kind.__reduce_ex__) == (builtin.__reduce__, builtin.__reduce_ex__):
        reduced: Any = builtin.__reduce__(error)
        attributes = {**_slots_of(error), **(reduced[2] if len(reduced) > 2 else {})}
        arguments = keep(kind), tuple(map(keep, reduced[1]))
        return _made, arguments, {name: keep(value) for name, value in attributes.items()}
    reduced = error.__reduce_ex__(5)
    return *reduced[:2], (*reduced, None)[2] or {}


def _builtin_base(kind: type[BaseException]) -> type[BaseException]:
    return next(base for base in kind.__mro__ if base.__module__ == "builtins" and issubclass(base, BaseException))


def _slots_of(error: BaseException) -> dict[str, Any]:
    names = [name for base in type(error).__mro__ for name in vars(base).get("__slots__", ())]
    return {name: getattr(error, name) for name in names if hasattr(error, name)}


def _made(kind: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    # The methods of the class itself may take other arguments.
    base = _builtin_base(kind)
    error = base.__new__(kind, *args)
    base.__init__(error, *args)
    return error


def _can_be_made(make: Callable[..., BaseException], arguments: tuple[Any, ...]) -> bool:
    try:
        make(*arguments)
    except Exception:
        return False
    return True


def _set_parts(error: BaseException, parts: tuple[Any, ...]) -> None:
    state, cause, context, suppresses, trace = parts
    error.__setstate__(state)
    error.__cause__, error.__context__, error.__suppress_context__ = cause, context, suppresses
    error.__traceback__ = trace


def _shown(part: Any) -> str:
    try:
        return repr(part)
    except Exception:
        return f"<{type(part).__name__}>"
