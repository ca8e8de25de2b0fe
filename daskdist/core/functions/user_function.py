"""Functions that users give, called so that their failures say where they happened."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import CodeType
from typing import Any, Final, Self

from daskdist.core.functions.code_fingerprint import Fingerprint, fingerprint_of
from daskdist.core.functions.fixed_values import FixedValues, with_values
from daskdist.core.functions.loop_limit import LoopLimit
from daskdist.core.node import Node, walk
from daskdist.core.structure import Structure
from daskdist.errors import ArgumentError, UserFunctionError


def location(function: Callable[..., Any]) -> str:
    """Return where a function is defined, as ``name (file:line)``."""
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__qualname__", type(function).__name__)
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return str(name)
    path = code.co_filename
    path = os.path.relpath(path) if path.startswith(os.getcwd() + os.sep) else path
    return f"{name} ({path}:{code.co_firstlineno})"


# Larger numbers are not tried: a function may make arrays of such a length.
_LARGEST: Final = 1000


def numbers_in(function: Callable[..., Any]) -> list[float]:
    """Return the numbers that a Python function's code has or refers to by name, from the smallest on.

    They are those at which what it does may change. Of other callables there are none.
    """
    found: set[float] = set()
    while isinstance(function, functools.partial):
        found.update(_numbers(function.args), _numbers(function.keywords.values()))
        function = function.func
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None)
    if code is None:
        return sorted(found, key=abs)
    codes = [code]
    for each in codes:
        found.update(_numbers(each.co_consts))
        codes += [const for const in each.co_consts if isinstance(const, CodeType)]
        names = getattr(function, "__globals__", {})
        found.update(_numbers(names.get(name) for name in each.co_names))
    with contextlib.suppress(ValueError):
        # A variable of an outer function may not be set yet.
        found.update(_numbers(cell.cell_contents for cell in getattr(function, "__closure__", None) or ()))
    found.update(_numbers(getattr(function, "__defaults__", None) or ()))
    return sorted(found, key=lambda number: (abs(number), number))


def _numbers(values: Iterable[Any]) -> Iterator[float]:
    for value in values:
        if isinstance(value, tuple):
            yield from _numbers(value)
        elif type(value) in (int, float) and 0 < abs(value) <= _LARGEST:
            yield value


class UserFunction:
    """A function a user gave to an operation, with the plain values fixed that it refers to.

    Parameters
    ----------
    function
        Called with the items of an element that is a tuple, else with the element.
    operation
        The name of the operation it was given to.
    narrow
        Whether Python numbers that it returns become int32 and float32, as in `as_array`.
    """

    # True if it is called only in the program's process, or gives the same in every process.
    stays_in_program = False

    def __init__(self, function: Callable[..., Any], operation: str, *, narrow: bool = False) -> None:
        if not callable(function):
            raise ArgumentError(f"{operation}: expected a function, got {type(function).__name__} {function!r}")
        # None where it was unpickled: then they are fixed already.
        self._values: FixedValues | None = FixedValues(function)
        self.function = self._values.function()
        self.operation = operation
        self.narrow = narrow
        # True if one call may replace many, where the result is known to be the same.
        self.may_vectorize = True
        # The number of threads that may call it row by row at the same time.
        self.loop_limit = LoopLimit()
        # Taken here, where the source file is; on a worker the path would be another.
        self.location = location(function)
        # Taken before it is called: afterwards, objects that it changes hold other values.
        self._fingerprint: Fingerprint | None = fingerprint_of(self.function)

    def row_by_row(self) -> Self:
        """Return the same function, to be called for each element."""
        other = object.__new__(type(self))
        other.__dict__ = {**self.__dict__, "may_vectorize": False}
        return other

    def refresh(self) -> None:
        """Take functions that it reaches by their names as they are defined now."""
        if self._values is not None:
            self.function = self._values.function()

    def check_generators(self) -> None:
        """Check that it draws from no random generator that each process would have a copy of.

        Raises
        ------
        ArgumentError
            It does.
        """
        generators = () if self._values is None else self.fingerprint().generators
        if generators and not self.stays_in_program:
            name = getattr(self._values.original, "__name__", "fn") if self._values else "fn"
            name = "fn" if name == "<lambda>" else name
            raise ArgumentError(
                f"{self.operation}: {self.location} draws from {generators[0]}, which each process has for itself, so "
                f"that rows would get the same numbers, or others in each run. Write map({name}, rng=seed): it calls "
                f"{name}(element, rng) with a generator of its own for each element and pass"
            )

    def __getstate__(self) -> dict[str, Any]:
        self.check_generators()
        state = {**self.__dict__, "_fingerprint": None, "_values": None}
        if self._values is not None:
            state["function"], state["values"] = self._values.portable()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = state
        self.function = with_values(self.function, state.get("values", {}))

    def __call__(self, element: Any, where: Callable[[], str]) -> Any:
        """Call it with an element; ``where()`` says which for a message."""
        return self.of(element if type(element) is tuple else (element,), where)

    def of_items(self) -> Callable[..., Any]:
        """Return what is called with the items of an element that is a tuple, else with the element."""
        return self.function

    def of(self, arguments: Sequence[Any], where: Callable[[], str]) -> Any:
        """Call it with arguments; ``where()`` says on what, for a message."""
        try:
            return self.function(*arguments)
        except Exception as error:
            raise self.failed(error, where()) from error

    def failed(self, error: Exception, where: str) -> UserFunctionError:
        """Return the error that tells that the function raised one, and on what."""
        return UserFunctionError(
            f"{self.operation}: {self.location} raised {type(error).__name__}: {error}, on {where}"
        )

    def leaves(self, element: Any, where: Callable[[], str]) -> tuple[tuple[Any, ...], Structure]:
        """Its result as leaves and structure; a list at the top counts as a tuple."""
        return self.flattened(self(element, where), where)

    def flattened(self, result: Any, where: Callable[[], str]) -> tuple[tuple[Any, ...], Structure]:
        """Flatten a result of the function to leaves and structure."""
        if type(result) is list:
            result = tuple(result)
        try:
            return Structure.flatten(result, narrow=self.narrow)
        except ArgumentError as error:
            raise UserFunctionError(f"{self.operation}: {self.location} returned {error}, on {where()}") from None

    def __repr__(self) -> str:
        return self.location

    def fingerprint(self) -> Fingerprint:
        """Return the fingerprint of its code as it is now, and of the objects it reaches as they were at first.

        Where some of the code was changed since, the objects are taken as they are now, too.
        """
        self.refresh()
        current = fingerprint_of(self.function)
        known = self._fingerprint
        if known is None or known.is_outdated_by(current):
            known = self._fingerprint = current
        return known

    def __dask_tokenize__(self) -> object:
        found = self.fingerprint()
        return "UserFunction", self.operation, self.narrow, found.code, found.state, found.contents


def functions_of(node: Node) -> Iterator[UserFunction]:
    """Yield the functions that users gave, of all operations of a pipeline."""
    for each in walk(node):
        for field in dataclasses.fields(each):
            value = getattr(each, field.name)
            if isinstance(value, UserFunction):
                yield value


def code_of(node: Node) -> tuple[str, ...]:
    """Return tokens of the functions of a pipeline, which differ once one, or what it reaches, was changed."""
    found = [function.fingerprint() for function in functions_of(node)]
    return tuple(each.code + ("" if each.changes_state else each.state) for each in found)
