"""Context for the message of an error of a user's function."""

from __future__ import annotations


def add_context(error: BaseException, context: str) -> None:
    """Append the place where an error was raised to its message.

    Parameters
    ----------
    error
        The error; its type does not change, so that handlers for it still match.
    context
        The clause to append.

    Notes
    -----
    If the message is not the only argument of the error (``KeyError``, ``OSError``), or the error builds its message
    itself, the context becomes a note, which tracebacks show below the message.

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
