"""Functions with the plain values that they refer to fixed, whatever the variables are set to later.

A function that refers to such values is copied: its closure gets new cells, and reads of global names become constants.
The same applies to the functions that it reaches through its closure, global names and partials. Left unchanged are:

* the objects that names refer to (lists, dicts, arrays, models): they are shared;
* names of functions, classes and modules, and values that are read through a module (``config.x``);
* names that one of the functions assigns itself (``global``, ``nonlocal``), such as counters;
* recursive functions, methods, and callable objects.
"""

from __future__ import annotations

import datetime
import decimal
import dis
import enum
import functools
import pathlib
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from daskdist.core.functions.code_references import references_of
from daskdist.core.functions.installed_packages import package_of

_PLAIN: Final = (
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    range,
    np.generic,
    np.dtype,
    enum.Enum,
    datetime.date,
    datetime.time,
    datetime.timedelta,
    decimal.Decimal,
    pathlib.PurePath,
)
# (Name of an imported module, global name) -> value.
Values = dict[tuple[str, str], Any]


def is_plain(value: Any) -> bool:
    """Return whether a value is immutable, such as a number, text, None, or a tuple of those."""
    if isinstance(value, (tuple, frozenset)):
        return all(map(is_plain, value))
    return isinstance(value, _PLAIN) and not isinstance(value, np.void)


@dataclass
class FixedValues:
    """The values that a function referred to when it was passed to a dataset."""

    original: Callable[..., Any]
    # The values of global names, by namespace and name; those of cells, by identity, with the cell to keep it alive.
    _names: dict[tuple[int, str], Any] = field(default_factory=dict)
    _cells: dict[int, tuple[types.CellType, Any]] = field(default_factory=dict)
    # Global names of functions, and of undefined values, with their values at the time.
    _watched: list[tuple[dict[str, Any], str, Any]] = field(default_factory=list)
    _local: Callable[..., Any] | None = None
    _portable: tuple[Callable[..., Any], Values] | None = None

    def function(self) -> Callable[..., Any]:
        """Return the function with its values fixed, for calls in this process."""
        self._forget_outdated()
        if self._local is None:
            self._local = self._fixed(with_imported=True)
        return self._local

    def portable(self) -> tuple[Callable[..., Any], Values]:
        """Return the function to pickle, and the values of global names of imported modules, which pickle by reference.

        In the other process, `with_values` combines the two.
        """
        # Cached, as functions are pickled with each of many tasks.
        self._forget_outdated()
        if self._portable is None:
            self._portable = self._made_portable()
        return self._portable

    def _made_portable(self) -> tuple[Callable[..., Any], Values]:
        values: Values = {}
        for function in _Reach(self.original).functions:
            if _is_imported(function):
                module = function.__globals__["__name__"]
                for name in references_of(function.__code__).global_names:
                    key = id(function.__globals__), name
                    if key in self._names:
                        values[module, name] = self._names[key]
        return self._fixed(with_imported=False), values

    def _forget_outdated(self) -> None:
        # Forget the fixed functions if a function that is reached by name was defined or redefined since.
        if any(variables.get(name, _MISSING) is not value for variables, name, value in self._watched):
            self._local = self._portable = None

    def _fixed(self, with_imported: bool) -> Callable[..., Any]:
        reach = _Reach(self.original)
        self._watched = reach.watched

        def value_of(function: types.FunctionType, name: str, value: Any) -> Any:
            key = id(function.__globals__), name
            if key not in self._names and (not is_plain(value) or key in reach.assigned_names):
                return _MISSING
            return self._names.setdefault(key, value)

        def content_of(cell: types.CellType, value: Any) -> Any:
            if id(cell) in reach.assigned_cells:
                return _MISSING
            return self._cells.setdefault(id(cell), (cell, value))[1]

        skipped = set(reach.recursive)
        if not with_imported:
            skipped |= {id(function) for function in reach.functions if _is_imported(function)}
        replace = _as_it_is if with_imported else _elsewhere
        fixed: Callable[..., Any] = _Fixer(value_of, content_of, skipped, replace).fix(self.original)
        return fixed


def with_values(function: Callable[..., Any], values: Values) -> Callable[..., Any]:
    """Return a function in which global names of imported modules have the values of another process."""
    if not values:
        return function
    reach = _Reach(function)

    def value_of(function: types.FunctionType, name: str, value: Any) -> Any:
        if (id(function.__globals__), name) in reach.assigned_names:
            return _MISSING
        return values.get((function.__globals__.get("__name__", ""), name), _MISSING)

    fixed: Callable[..., Any] = _Fixer(value_of, lambda cell, value: _MISSING, set(reach.recursive)).fix(function)
    return fixed


def with_views(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function in which objects that stay in their process are replaced by their views for other processes.

    These are objects with a method ``_view_elsewhere``, such as strategies.
    """
    reach = _Reach(function)
    skipped = reach.recursive | {id(function) for function in reach.functions if _is_imported(function)}
    fixer = _Fixer(lambda function, name, value: _MISSING, lambda cell, value: _MISSING, skipped, _elsewhere)
    fixed: Callable[..., Any] = fixer.fix(function)
    return fixed


def _as_it_is(value: Any) -> Any:
    return value


def _elsewhere(value: Any) -> Any:
    view = getattr(type(value), "_view_elsewhere", None)
    return value if view is None else view(value)


class _Missing:
    """The absence of a value, as None may be one."""


_MISSING: Final = _Missing()


def _is_imported(function: types.FunctionType) -> bool:
    # Return whether it is pickled by reference.
    name = function.__globals__.get("__name__")
    module = sys.modules.get(name) if name not in (None, "__main__") else None
    if module is None or vars(module) is not function.__globals__ or function.__module__ != name:
        return False
    attribute: Any = module
    for part in function.__qualname__.split("."):
        attribute = getattr(attribute, part, None)
    return attribute is function


class _Reach:
    """The functions outside of installed packages that a function reaches, and the names that they assign."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.functions: list[types.FunctionType] = []
        self.assigned_names: set[tuple[int, str]] = set()
        self.assigned_cells: set[int] = set()
        self.watched: list[tuple[dict[str, Any], str, Any]] = []
        # The recursive functions, by identity.
        self.recursive: set[int] = set()
        self._path: list[int] = []
        self._done: set[int] = set()
        self._visit(function)

    def _visit(self, value: Any) -> None:
        if type(value) is functools.partial:
            for part in (value.func, *value.args, *value.keywords.values()):
                self._visit(part)
        elif type(value) is types.FunctionType and package_of(value.__globals__.get("__name__")) is None:
            self._visit_function(value)

    def _visit_function(self, function: types.FunctionType) -> None:
        if id(function) in self._path:
            self.recursive.update(self._path[self._path.index(id(function)) :])
            return
        if id(function) in self._done:
            return
        self.functions.append(function)
        self._path.append(id(function))
        references, variables = references_of(function.__code__), function.__globals__
        self.assigned_names.update((id(variables), name) for name in references.assigned_globals)
        if _is_imported(function):
            self.assigned_names.update((id(variables), name) for name in _assigned_in(variables))
        for name, cell in _cells(function):
            if name in references.assigned_free:
                self.assigned_cells.add(id(cell))
            elif not _is_empty(cell):
                self._visit(cell.cell_contents)
        for name in references.global_names:
            value = variables.get(name, _MISSING)
            if value is _MISSING or isinstance(value, (types.FunctionType, functools.partial)):
                self.watched.append((variables, name, value))
                self._visit(value)
        for value in references.functions:
            self._visit(value)
        self._path.pop()
        self._done.add(id(function))


def _assigned_in(variables: Mapping[str, Any]) -> Iterator[str]:
    # Yield the names of a module that its functions assign, as each process may initialise them itself.
    for value in list(variables.values()):
        if type(value) is types.FunctionType and value.__globals__ is variables:
            yield from references_of(value.__code__).assigned_globals


def _cells(function: types.FunctionType) -> list[tuple[str, types.CellType]]:
    return list(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))


def _is_empty(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return True
    return False


class _Fixer:
    """A copier of functions.

    Parameters
    ----------
    value_of
        Returns the value to fix for a function's global name, given its current value, or `_MISSING`.
    content_of
        Returns the value to fix for a cell.
    skipped
        The functions to leave unchanged, by identity.
    replace
        Returns the replacement of a value that is not a function.
    """

    def __init__(
        self,
        value_of: Callable[[types.FunctionType, str, Any], Any],
        content_of: Callable[[types.CellType, Any], Any],
        skipped: set[int],
        replace: Callable[[Any], Any] = _as_it_is,
    ) -> None:
        self._value_of = value_of
        self._content_of = content_of
        self._skipped = skipped
        self._replace = replace
        self._fixed: dict[int, tuple[Any, Any]] = {}

    def fix(self, value: Any) -> Any:
        """Return a function, or a copy with fixed values; other values unchanged."""
        if type(value) is functools.partial:
            return self._fix_partial(value)
        if type(value) is not types.FunctionType:
            return self._replace(value)
        if id(value) in self._skipped:
            return value
        if package_of(value.__globals__.get("__name__")) is not None:
            return value
        if id(value) not in self._fixed:
            self._fixed[id(value)] = value, self._fix_function(value)
        return self._fixed[id(value)][1]

    def _fix_partial(self, partial: functools.partial[Any]) -> Any:
        function, arguments = self.fix(partial.func), tuple(map(self.fix, partial.args))
        keywords = {name: self.fix(value) for name, value in partial.keywords.items()}
        before = (partial.func, *partial.args, *partial.keywords.values())
        after = (function, *arguments, *keywords.values())
        if all(old is other for old, other in zip(before, after, strict=True)):
            return partial
        partial_copy = functools.partial(function, *arguments, **keywords)
        vars(partial_copy).update(vars(partial))
        return partial_copy

    def _fix_function(self, function: types.FunctionType) -> types.FunctionType:
        cells = tuple(self._fix_cell(cell) for _, cell in _cells(function))
        references, variables, constants = references_of(function.__code__), function.__globals__, {}
        for name in references.global_names:
            value = variables.get(name, _MISSING)
            fixed = self._value_of(function, name, value)
            if fixed is _MISSING:
                fixed = self.fix(value)
                if fixed is value:
                    continue
            constants[name] = fixed
        replaced = {id(constant): self.fix(constant) for constant in references.functions}
        code = function.__code__
        if constants or any(id(value) != key for key, value in replaced.items()):
            code = _with_constants(code, constants, replaced)
        if code is function.__code__ and all(
            before is other for before, other in zip(cells, function.__closure__ or (), strict=True)
        ):
            return function
        copied = types.FunctionType(code, variables, function.__name__, function.__defaults__, cells or None)
        copied.__kwdefaults__ = function.__kwdefaults__
        copied.__qualname__, copied.__module__, copied.__doc__ = (
            function.__qualname__,
            function.__module__,
            function.__doc__,
        )
        copied.__annotations__ = function.__annotations__
        vars(copied).update(vars(function))
        return copied

    def _fix_cell(self, cell: types.CellType) -> types.CellType:
        if _is_empty(cell):
            return cell
        value = self._content_of(cell, cell.cell_contents)
        if value is _MISSING:
            value = self.fix(cell.cell_contents)
            return cell if value is cell.cell_contents else types.CellType(value)
        return types.CellType(self.fix(value))


# --- bytecode ---

_NULL_COMES_FIRST: Final = sys.version_info < (3, 13)


def _with_constants(code: types.CodeType, values: Mapping[str, Any], replaced: Mapping[int, Any]) -> types.CodeType:
    """Return code in which reads of global names are constants, including the code nested in it.

    Parameters
    ----------
    values
        The values of the names.
    replaced
        The replacements of constants, by identity.
    """
    constants = [
        _with_constants(value, values, replaced)
        if isinstance(value, types.CodeType)
        else replaced.get(id(value), value)
        for value in code.co_consts
    ]
    instructions = bytearray(code.co_code)
    places: dict[str, int] = {}
    steps = list(dis.get_instructions(code))
    start = 0
    for number, step in enumerate(steps):
        if step.opname == "EXTENDED_ARG":
            continue
        stop = steps[number + 1].offset if number + 1 < len(steps) else len(instructions)
        if step.opname == "LOAD_GLOBAL" and step.argval in values:
            if step.argval not in places:
                places[step.argval] = len(constants)
                constants.append(values[step.argval])
            instructions[start:stop] = _load(places[step.argval], bool(step.arg and step.arg & 1), stop - start)
        start = stop
    return code.replace(co_code=bytes(instructions), co_consts=tuple(constants))


def _load(place: int, is_called: bool, num_bytes: int) -> bytes:
    # Loading a global takes more bytes than loading a constant: fill the rest with NOPs.
    load = b""
    for shift in (24, 16, 8):
        if place >> shift:
            load += bytes((dis.opmap["EXTENDED_ARG"], place >> shift & 255))
    load += bytes((dis.opmap["LOAD_CONST"], place & 255))
    if is_called:
        null = bytes((dis.opmap["PUSH_NULL"], 0))
        load = null + load if _NULL_COMES_FIRST else load + null
    return load + bytes((dis.opmap["NOP"], 0)) * ((num_bytes - len(load)) // 2)
