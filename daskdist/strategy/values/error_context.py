"""Context that is added to the message of an error of a user's function."""

from __future__ import annotations


def add_context(error: BaseException, context: str) -> None:
    """Append to an error's message where it was raised.

    Parameters
    ----------
    error
        The error; its type stays, so that who handles it goes on doing so.
    context
        The clause to append.

    Notes
    -----
    Of an error whose message is not its one argument (``KeyError``, ``OSError``), or which has a message of its own
    making, the context is a note: tracebacks show it below the message.

    >>> error = ValueError("no such label")
    >>> add_context(error, "raised by replica 1")
    >>> str(error)
    'no such label (raised by replica 1)'
    """
    arguments = error.args
    text = str(error)
    if len(arguments) == 1 and type(arguments[0]) is str and arguments[0] == text:
        error.args = (f"{text} ({context})",)
    elif not arguments and not text and isinstance(error, (ArithmeticError, AssertionError, RuntimeError, ValueError)):
        error.args = (context,)
    if context not in str(error):
        error.args = arguments
        error.add_note(context)
