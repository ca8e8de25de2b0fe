"""Errors keep their types, messages, attributes, causes, notes and tracebacks on the way to another process."""

from __future__ import annotations

import threading
import traceback

import pytest

from daskdist import errors
from daskdist.core.failing.failed_element import FailedElement
from daskdist.core.failing.packed_error import pack_error, unpacked_error
from daskdist.execute.messages.failure import Failure


class TwoArgumentsError(Exception):
    def __init__(self, what, row):
        super().__init__(what)
        self.row = row


class WithDefaultError(ValueError):
    def __init__(self, code=5):
        super().__init__(f"code {code}")


class KeywordOnlyError(KeyError):
    def __init__(self, *, key):
        super().__init__(key)


class OfFileError(OSError):
    def __init__(self, path):
        super().__init__(2, "not there", path)
        self.path = path


class OfTextError(UnicodeDecodeError):
    def __init__(self, data):
        super().__init__("utf8", data, 0, 1, "not text")


class OwnPickleError(Exception):
    def __init__(self, first, second):
        super().__init__(first)
        self.both = first, second

    def __reduce__(self):
        return OwnPickleError, self.both


class OwnNewError(Exception):
    def __new__(cls, what, row):
        error = super().__new__(cls, what)
        error.row = row
        return error

    def __init__(self, what, row):
        super().__init__(what)


class WithSlotsError(Exception):
    __slots__ = ("number",)

    def __init__(self, number):
        self.number = number

    def __str__(self):
        return f"number {self.number}"


class BoundError(ValueError):
    lock = threading.Lock()


class LonelyError(Exception):
    lock = threading.Lock()


BoundError.__module__ = LonelyError.__module__ = "__main__"

WAYS = {
    "packed": lambda error: unpacked_error(pack_error(error)),
    "failure": lambda error: Failure.of(error).error(),
    "failed element": lambda error: _reduced(FailedElement(error)).again(),
}


def _reduced(element):
    function, arguments = element.__reduce__()
    return function(*arguments)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "error",
    [
        TwoArgumentsError("bad", 3),
        WithDefaultError(7),
        KeywordOnlyError(key="k"),
        OfFileError("here"),
        OfTextError(b"\xff"),
        OwnPickleError(1, 2),
        OwnNewError("bad", 3),
        WithSlotsError(4),
        ImportError("no module", name="this", path="there"),
        StopIteration(4),
        errors.FileError("this file is damaged"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_is_the_same_elsewhere(error, way):
    actual = WAYS[way](error)
    assert type(actual) is type(error)
    assert (str(actual), actual.args) == (str(error), error.args)
    assert {**vars(error), **vars(actual)} == vars(actual)
    for name in ("name", "path", "filename", "errno", "object", "reason", "value"):
        assert getattr(actual, name, None) == getattr(error, name, None)


def raised():
    try:
        try:
            raise TwoArgumentsError("bad", 3)
        except TwoArgumentsError:
            raise WithDefaultError(2)  # noqa: B904 - the context is the point
    except WithDefaultError as error:
        error.add_note("of the second row")
        problem = errors.UserFunctionError("map failed")
        problem.__cause__ = error
        return problem


@pytest.mark.parametrize("way", WAYS)
def test_causes_notes_and_tracebacks_travel_along(way):
    actual = WAYS[way](raised())
    cause = actual.__cause__
    assert (type(actual), type(cause), type(cause.__context__)) == (
        errors.UserFunctionError,
        WithDefaultError,
        TwoArgumentsError,
    )
    assert cause.__notes__ == ["of the second row"]
    assert "in raised" in "".join(traceback.format_exception(cause.__context__))


@pytest.mark.parametrize("way", WAYS)
def test_parts_that_do_not_pickle_become_text(way):
    error = TwoArgumentsError("bad", threading.Lock())
    error.args = ("bad", threading.Lock(), 3)
    cause = OSError("closed")
    cause.source = threading.Lock()
    error.__cause__ = cause
    actual = WAYS[way](error)
    assert type(actual) is TwoArgumentsError
    assert (actual.args[0], actual.args[2]) == ("bad", 3)
    assert "lock" in actual.args[1]
    assert "lock" in actual.row
    assert type(actual.__cause__) is OSError
    assert "lock" in actual.__cause__.source


@pytest.mark.parametrize("way", WAYS)
def test_a_class_that_does_not_pickle_becomes_a_base_class_or_text(way):
    problem = errors.UserFunctionError("map failed")
    problem.__cause__ = BoundError("too large")
    actual = WAYS[way](problem)
    assert type(actual) is errors.UserFunctionError
    assert (type(actual.__cause__), str(actual.__cause__)) == (ValueError, "too large")
    problem.__cause__ = LonelyError("too large")
    cause = WAYS[way](problem).__cause__
    assert (type(cause), str(cause)) == (errors.DaskdistError, "LonelyError: too large")


@pytest.mark.parametrize("way", WAYS)
def test_a_cause_that_cannot_be_made_again_becomes_text(way):
    problem, cause = errors.UserFunctionError("map failed"), OfTextError(b"\xff")
    cause.args = ("of a file",)
    problem.__cause__ = cause
    actual = WAYS[way](problem)
    assert (type(actual), type(actual.__cause__)) == (errors.UserFunctionError, errors.DaskdistError)
    assert str(actual.__cause__) == f"OfTextError: {cause}"


def test_groups_keep_their_errors():
    group = ExceptionGroup("several", [TwoArgumentsError("bad", 3), ExceptionGroup("more", [KeywordOnlyError(key=1)])])
    actual = unpacked_error(pack_error(group))
    first, second = actual.exceptions
    assert (type(actual), type(first), first.row) == (ExceptionGroup, TwoArgumentsError, 3)
    assert [type(error) for error in second.exceptions] == [KeywordOnlyError]


def test_errors_that_would_end_a_process_are_sent_as_text():
    actual = Failure.of(SystemExit(3)).error()
    assert (type(actual), str(actual)) == (errors.DaskdistError, "SystemExit: 3")


def test_causes_in_a_circle():
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    actual = unpacked_error(pack_error(first))
    assert actual.__cause__.__cause__ is actual
