"""Messages of errors of any kind name the place at which they were raised."""

import pickle

import pytest

from daskdist.strategy.values.error_context import add_context


class WordedError(Exception):
    """An error that makes its message itself."""

    def __str__(self):
        return f"worded {self.args[0]}"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("bad"), "bad (on replica 1)"),
        (AssertionError(), "on replica 1"),
        (RuntimeError("a", "b"), "('a', 'b')"),
        (KeyError("x"), "'x'"),
        (OSError(2, "missing"), "[Errno 2] missing"),
        (WordedError("x"), "worded x"),
        (StopIteration(), ""),
    ],
)
def test_what_is_told(error, message):
    arguments = error.args
    add_context(error, "on replica 1")
    assert str(error) == message
    if "on replica 1" not in message:
        assert (error.args, error.__notes__) == (arguments, ["on replica 1"])
    assert str(pickle.loads(pickle.dumps(error))) == message
