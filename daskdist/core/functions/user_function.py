"""Users' functions, called so that errors name the place where they happened."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import CodeType, FunctionType, MethodType
from typing import Any, Final, Self

from daskdist.call_progress import under_way
from daskdist.core.functions.by_value import by_value
from daskdist.core.functions.code_fingerprint import Fingerprint, fingerprint_of
from daskdist.core.functions.fixed_values import FixedValues, with_values
from daskdist.core.functions.reach import references_from
from daskdist.core.node import Node, walk
from daskdist.core.structure import Structure
from daskdist.errors import ArgumentError, UserFunctionError
from daskdist.watched_calls import watched


def location(function: Callable[..., Any]) -> str:
    """Return the place where a function is defined, as ``name (file:line)``."""
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__qualname__", type(function).__name__)
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return str(name)
    path = code.co_filename
    if os.path.basename(os.path.dirname(path)).startswith("ipykernel_"):
        return f"{name} (notebook cell, line {code.co_firstlineno})"
    path = os.path.relpath(path) if path.startswith(os.getcwd() + os.sep) else path
    return f"{name} ({path}:{code.co_firstlineno})"


# Larger numbers are not tried, as a function may create arrays of such a length.
_LARGEST: Final = 1000


def numbers_in(function: Callable[..., Any]) -> list[float]:
    """Return the numbers that a Python function's code contains or refers to by name, ordered by absolute value.

    The behaviour of the function may change at these. Other callables have none.
    """
    numbers: set[float] = set()
    while isinstance(function, functools.partial):
        numbers.update(_numbers(function.args), _numbers(function.keywords.values()))
        function = function.func
    function = inspect.unwrap(function)
    function = function.__func__ if isinstance(function, MethodType) else function
    if isinstance(function, FunctionType):
        codes = [function.__code__]
        for code in codes:
            numbers.update(_numbers(code.co_consts))
            codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        numbers.update(_numbers(part.value for part in references_from(function, is_into_packages=True)))
    return sorted(numbers, key=lambda number: (abs(number), number))


def _numbers(values: Iterable[Any]) -> Iterator[float]:
    for value in values:
        if isinstance(value, tuple):
            yield from _numbers(value)
        elif type(value) in (int, float) and 0 < abs(value) <= _LARGEST:
            yield value


class UserFunction:
    """A user's function for an operation, with the plain values that it refers to fixed.

    Parameters
    ----------
    function
        Called with the items of an element that is a tuple, otherwise with the element.
    operation
        The name of the operation.
    narrow
        Whether Python numbers that it returns become int32 and float32, as in `as_array`.
    """

    # True if it is called only in the program's process, or returns the same in every process.
    stays_in_program = False

    def __init__(self, function: Callable[..., Any], operation: str, *, narrow: bool = False) -> None:
        if not callable(function):
            raise ArgumentError(f"{operation}: expected a function, got {type(function).__name__} {function!r}")
        # None after unpickling, when values are fixed already.
        self._values: FixedValues | None = FixedValues(function)
        self.function = self._values.function()
        self.operation = operation
        self.narrow = narrow
        # True if one call may replace many when the result is known to be the same.
        self.may_vectorize = True
        # Computed here, because the path of the source file may differ on a worker.
        self.location = location(function)
        # Computed before any call, as calls may change objects that it reaches.
        self._fingerprint: Fingerprint | None = fingerprint_of(self.function)

    def row_by_row(self) -> Self:
        """Return the function without vectorising: it is called for each element."""
        other = object.__new__(type(self))
        other.__dict__ = {**self.__dict__, "may_vectorize": False}
        return other

    def refresh(self) -> None:
        """Use the current definitions of functions that it reaches by name."""
        if self._values is not None:
            self.function = self._values.function()

    def check_generators(self) -> None:
        """Check that it does not use a random generator of which each process would have a copy.

        Raises
        ------
        ArgumentError
            The function uses such a generator.
        """
        generators = () if self._values is None else self.fingerprint().generators
        if generators and not self.stays_in_program:
            name = self.short_name
            raise ArgumentError(
                f"{self.operation}: {self.location} draws from {generators[0]}, of which each process has a copy, so "
                f"that rows would get the same numbers, or others in each run. Write map({name}, rng=seed): it calls "
                f"{name}(element, rng) with a separate generator for each element and pass"
            )

    def __getstate__(self) -> dict[str, Any]:
        self.check_generators()
        state = {**self.__dict__, "_fingerprint": None, "_values": None}
        if self._values is not None:
            function, state["values"] = self._values.portable()
            state["function"] = by_value(function)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = state
        self.function = with_values(self.function, state.get("values", {}))

    def __call__(self, element: Any, where: Callable[[], str]) -> Any:
        """Call the function with an element; ``where()`` names the element in messages."""
        return self.of(element if type(element) is tuple else (element,), where)

    def in_this_thread(self, element: Any, where: Callable[[], str]) -> Any:
        """Call the function in this thread, on which its device may depend, however long that takes."""
        return self._called(element if type(element) is tuple else (element,), where)

    def of_items(self) -> Callable[..., Any]:
        """Return the function, which takes the items of an element that is a tuple, otherwise the element."""
        return self.function

    def of(self, arguments: Sequence[Any], where: Callable[[], str]) -> Any:
        """Call the function with arguments; ``where()`` names the element in messages."""
        call = under_way.call
        if call is None:
            # Nobody waits for it, as when it is tried on made-up elements.
            return watched(self.operation, self.of, arguments, where)
        before, call.function = call.function, self
        call.num_begun += 1
        try:
            return self._called(arguments, where)
        finally:
            call.function = before

    def _called(self, arguments: Sequence[Any], where: Callable[[], str]) -> Any:
        try:
            return self.function(*arguments)
        except Exception as error:
            raise self.failed(error, where()) from error

    def failed(self, error: Exception, where: str) -> UserFunctionError:
        """Return an error with the function's error and the element that caused it."""
        return UserFunctionError(
            f"{self.operation}: {self.location} raised {type(error).__name__}: {error}, on {where}{self.advice(error)}"
        )

    def advice(self, error: Exception) -> str:
        """Return the end of a message about an error: what to write instead of a wrong call or a wrong use of dates."""
        text = str(error)
        if isinstance(error, AttributeError) and text.startswith("'numpy.datetime64' object"):
            return ". Dates are of NumPy: date.astype('datetime64[us]').item() is one of datetime"
        if not isinstance(error, TypeError):
            return ""
        if "DateTime64DType" in text and "Str" in text:
            return ". Dates are of NumPy: use numpy.datetime64('2024-02-29') instead of text"
        if "missing" in text and text.endswith("argument: 'rng'"):
            if self.operation == "map":
                return f". map({self.short_name}, rng=seed) gives it a random generator for each element"
            return f". Only map gives functions a random generator, as map(fn, rng=seed): draw before {self.operation}"
        # With more of a traceback, the function made the call that failed.
        if "positional argument" in text and (error.__traceback__ is None or error.__traceback__.tb_next is None):
            return ". It is called with the items of a tuple, and with any other element as a whole"
        return ""

    @property
    def short_name(self) -> str:
        """Its name, as code that uses it may have it."""
        name = getattr(self.function, "__name__", "fn")
        return "fn" if name == "<lambda>" else str(name)

    def leaves(self, element: Any, where: Callable[[], str]) -> tuple[tuple[Any, ...], Structure]:
        """Return its result as leaves and structure; a list at the top level counts as a tuple."""
        return self.flattened(self(element, where), where)

    def flattened(self, result: Any, where: Callable[[], str]) -> tuple[tuple[Any, ...], Structure]:
        """Flatten a result of the function to leaves and structure."""
        if type(result) is list:
            result = tuple(result)
        try:
            return Structure.flatten(result, narrow=self.narrow)
        except ArgumentError as error:
            advice = ". A function that changes a row has to return it" if result is None else ""
            raise UserFunctionError(
                f"{self.operation}: {self.location} returned no element: {error}, on {where()}{advice}"
            ) from None

    def __repr__(self) -> str:
        return self.location

    def fingerprint(self) -> Fingerprint:
        """Return the fingerprint of its current code, and of the objects it reaches as they were at first.

        If some of the code was changed since, the current objects count.
        """
        self.refresh()
        current = fingerprint_of(self.function)
        known = self._fingerprint
        if known is None or known.is_outdated_by(current):
            known = self._fingerprint = current
        return known

    def __dask_tokenize__(self) -> object:
        fingerprint = self.fingerprint()
        return "UserFunction", self.operation, self.narrow, fingerprint.code, fingerprint.state, fingerprint.contents


def functions_of(node: Node) -> Iterator[UserFunction]:
    """Yield the users' functions of all operations of a pipeline."""
    for upstream in walk(node):
        for field in dataclasses.fields(upstream):
            value = getattr(upstream, field.name)
            if isinstance(value, UserFunction):
                yield value


def code_of(node: Node) -> tuple[str, ...]:
    """Return tokens of the functions of a pipeline, which change with all code that they reach."""
    fingerprints = [function.fingerprint() for function in functions_of(node)]
    return tuple(part.code + ("" if part.changes_state else part.state) for part in fingerprints)
