"""Functions with the plain values that they refer to fixed, whatever the variables are set to later.

A function that refers to such values is copied: the copy has the same code, new cells, and other global names, in which
the values are those of the time when the function was passed to a dataset. The same applies to the functions that it
reaches through its closure, defaults, global names and partials. Left unchanged are:

* the objects that names refer to (lists, dicts, arrays, models): they are shared;
* values that are read through a module (``config.x``), methods, and callable objects;
* variables of enclosing functions that one of the functions assigns (``nonlocal``), such as counters;
* all global names of a function that uses one which a function assigns (``global``), or uses ``globals``, ``eval`` or
  ``exec``: it sees its module as it is. If a plain value there is set to another one, a later pass raises an error.

The names of functions, classes and modules are looked up again at the beginning of each pass, see `FixedValues`. As a
copy is another object, a function that refers to itself or to another copied one, refers to the copy.
"""

from __future__ import annotations

import builtins
import datetime
import decimal
import enum
import pathlib
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np

from daskdist.core.functions.code_references import references_of
from daskdist.core.functions.reach import (
    NO_VALUE,
    NoValue,
    Reach,
    Reference,
    cells_of,
    is_imported,
    is_own,
    references_from,
)
from daskdist.errors import ArgumentError, ClusterError

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
_WHY_SEEN: Final = "{} assigns global names or looks them up by itself, and so uses those of its module as they are"
# Functions that look names up themselves.
_LOOK_UP: Final = frozenset({"globals", "eval", "exec"})
_BUILTINS: Final = vars(builtins)
# Types of values whose names are looked up when a pass begins.
_LOOKED_UP_HERE: Final = (types.FunctionType, types.BuiltinFunctionType, partial, type, types.ModuleType)


def is_plain(value: Any) -> bool:
    """Return whether a value is immutable, such as a number, text, None, or a tuple of those."""
    if isinstance(value, (tuple, frozenset)):
        return all(map(is_plain, value))
    return isinstance(value, _PLAIN) and not isinstance(value, np.void)


@dataclass
class FixedValues:
    """The values that a function referred to when it was passed to a dataset."""

    original: Callable[..., Any]
    # The values of global names, by the id of their variables and the name; those of cells, by id, with the cell to
    # keep it alive. None is changed once it is here.
    _names: dict[tuple[int, str], Any] = field(default_factory=dict)
    _cells: dict[int, tuple[types.CellType, Any]] = field(default_factory=dict)
    # What the function referred to when the two functions below were created.
    _reach: Reach | None = None
    _local: Callable[..., Any] | None = None
    _portable: tuple[Callable[..., Any], Values] | None = None

    def function(self) -> Callable[..., Any]:
        """Return the function with its values fixed, for calls in this process.

        It is another one if a name that it uses was set to another value since, such as a helper that was defined
        again.
        """
        reach = self._current_reach()
        if self._local is None:
            self._local = _Copier(reach, partial(self._value, reach)).copy_of(self.original)
        return self._local

    def portable(self) -> tuple[Callable[..., Any], Values]:
        """Return the function to pickle, and the values of global names of imported modules, which pickle by reference.

        In the other process, `with_values` combines the two.
        """
        # Cached, as functions are pickled with each of many tasks.
        reach = self._current_reach()
        if self._portable is None:
            copier = _Copier(
                reach, lambda reference: _elsewhere(reference, self._value(reach, reference)), is_elsewhere=True
            )
            self._portable = copier.copy_of(self.original), self._of_imported(reach)
        return self._portable

    def _current_reach(self) -> Reach:
        before = self._reach
        if before is None or not before.is_current(self.original):
            after = Reach(self.original)
            # Other objects are looked up when they are used, and not kept.
            after.watch_only((*_LOOKED_UP_HERE, *_PLAIN, NoValue))
            if before is not None:
                # Fixed cells may still have a function of before.
                after.assigned_names |= before.assigned_names
                after.assigned_cells |= before.assigned_cells
            self._fix_seen(after)
            self._reach, self._local, self._portable = after, None, None
            return after
        return before

    def _fix_seen(self, reach: Reach) -> None:
        # Functions that see their module have no copies in which another value would be without effect.
        for user, reference in _seen_in_modules(self.original, reach):
            before = self._names.setdefault((id(reference.holder), reference.name), reference.value)
            if not _is_same(before, reference.value):
                raise ArgumentError(
                    f"{reference.name} was {before!r:.80} when the dataset was built, and is {reference.value!r:.80} "
                    f"now. {_WHY_SEEN.format(user.__qualname__)}: build another dataset, or give the value to the "
                    "function as an argument"
                )

    def _value(self, reach: Reach, reference: Reference) -> Any:
        holder = reference.holder
        if reference.how == "variable" and id(holder) not in reach.assigned_cells and reference.value is not NO_VALUE:
            return self._cells.setdefault(id(holder), (holder, reference.value))[1]
        key = id(holder), reference.name
        if reference.how == "name" and (key in self._names or is_plain(reference.value)):
            return self._names.setdefault(key, reference.value)
        return NO_VALUE

    def _of_imported(self, reach: Reach) -> Values:
        values: Values = {}
        for function in (self.original, *reach.functions):
            if type(function) is types.FunctionType and is_imported(function):
                for reference in references_from(function):
                    place = id(reference.holder), reference.name
                    if reference.how == "name" and place in self._names:
                        values[function.__globals__["__name__"], reference.name] = self._names[place]
        return values


def with_values(function: Callable[..., Any], values: Values) -> Callable[..., Any]:
    """Return a function in which global names of imported modules have the values of another process.

    If a function that sees its module as it is would use another value here than there, a call raises ClusterError.
    """
    if not values:
        return function
    reach = Reach(function)
    for user, seen in _seen_in_modules(function, reach):
        module = user.__globals__.get("__name__", "")
        sent = values.get((module, seen.name), NO_VALUE)
        if sent is not NO_VALUE and not _is_same(sent, seen.value):
            return _Refusal(
                f"{module}.{seen.name} is {sent!r:.80} in the program and {seen.value!r:.80} in this worker. "
                f"{_WHY_SEEN.format(user.__qualname__)}: set this one on the workers, too, or give it to the function "
                "as an argument"
            )

    def value_of(reference: Reference) -> Any:
        if reference.how != "name":
            return NO_VALUE
        return values.get((reference.holder.get("__name__", ""), reference.name), NO_VALUE)

    copied: Callable[..., Any] = _Copier(reach, value_of).copy_of(function)
    return copied


@dataclass(frozen=True)
class _Refusal:
    """In place of a function that cannot be called here; loading it must not fail, as that would end a worker."""

    text: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise ClusterError(self.text)


def with_views(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function in which objects that stay in their process are replaced by their views for other processes.

    These are objects with a method ``_view_elsewhere``, such as strategies.
    """
    copied: Callable[..., Any] = _Copier(Reach(function), _elsewhere, is_elsewhere=True).copy_of(function)
    return copied


def _elsewhere(reference: Reference, value: Any = NO_VALUE) -> Any:
    current = reference.value if value is NO_VALUE else value
    view = getattr(type(current), "_view_elsewhere", None)
    return value if view is None else view(current)


def _sees_module(function: types.FunctionType, reach: Reach) -> bool:
    # Return whether a function keeps the global names of its module.
    names, place = references_of(function.__code__).global_names.keys(), id(function.__globals__)
    return bool(_LOOK_UP & names) or any((place, name) in reach.assigned_names for name in names)


def _seen_in_modules(function: Callable[..., Any], reach: Reach) -> Iterator[tuple[types.FunctionType, Reference]]:
    # Yield the functions that see their modules, each with the global names of plain values that no function assigns.
    for user in (function, *reach.functions):
        if type(user) is types.FunctionType and _sees_module(user, reach):
            for reference in references_from(user):
                is_assigned = (id(reference.holder), reference.name) in reach.assigned_names
                if reference.how == "name" and is_plain(reference.value) and not is_assigned:
                    yield user, reference


def _is_same(value: Any, other: Any) -> bool:
    # NaN differs from itself, and the order of a set from process to process.
    return bool(value == other) or repr(value) == repr(other)


class _Copier:
    """A copier of functions, with other values in place of some that they refer to.

    Parameters
    ----------
    reach
        What the functions refer to.
    value_of
        Returns the value to put in the place of a reference; `NO_VALUE` to leave it.
    is_elsewhere
        Whether copies are for another process, where modules are imported: their functions are left unchanged.
    """

    def __init__(
        self,
        reach: Reach,
        value_of: Callable[[Reference], Any],
        *,
        is_elsewhere: bool = False,
    ) -> None:
        self._reach = reach
        self._value_of = value_of
        self._is_elsewhere = is_elsewhere
        # By id, each function or partial that was looked at, its references that may be replaced, with the new values.
        self._parts: dict[int, tuple[Any, list[tuple[Reference, Any]]]] = {}
        # The ids of those that are copied, as a value changes in them or in one that they refer to.
        self._changing: set[int] = set()
        # By id, copies of functions and cells; and for the variables of each module, the names that copies see.
        self._copies: dict[int, Any] = {}
        self._names: dict[int, FixedNames] = {}
        # Functions, their copies that refer to nothing yet, and what they refer to.
        self._waiting: list[tuple[types.FunctionType, types.FunctionType, list[tuple[Reference, Any]]]] = []

    def copy_of(self, value: Any) -> Any:
        """Return a copy of a function or partial with the new values; itself if nothing changes, and other values."""
        self._look_at(value)
        copied = self._copy_of(value)
        while self._waiting:
            self._finish(*self._waiting.pop())
        return copied

    def _look_at(self, value: Any) -> None:
        waiting = [value]
        users: dict[int, list[int]] = {}
        while waiting:
            value = waiting.pop()
            if self._is_copied(value) and id(value) not in self._parts:
                sees = self._sees_module(value)
                parts = [
                    (one, _elsewhere(one) if sees and one.how == "name" else self._value_of(one))
                    for one in self._replaceable(value)
                ]
                self._parts[id(value)] = value, parts
                for reference, new in parts:
                    waiting.append(reference.value if new is NO_VALUE else new)
                    users.setdefault(id(waiting[-1]), []).append(id(value))
        changing = [key for key, (_, parts) in self._parts.items() if any(new is not NO_VALUE for _, new in parts)]
        if self._is_elsewhere and changing:
            # Copies elsewhere see no module, so that all that share assigned names are copied.
            changing += [key for key, (function, _) in self._parts.items() if self._sees_module(function)]
        while changing:
            key = changing.pop()
            if key not in self._changing:
                self._changing.add(key)
                changing += users.get(key, ())

    def _is_copied(self, value: Any) -> bool:
        if type(value) is types.FunctionType:
            return is_own(value) and not (self._is_elsewhere and is_imported(value))
        return type(value) is partial

    def _replaceable(self, value: Any) -> Iterator[Reference]:
        if type(value) is partial:
            return references_from(value)
        sees_module = self._sees_module(value) and not self._is_elsewhere
        replaced = ("default", "variable") if sees_module else ("default", "variable", "name")
        return (reference for reference in references_from(value) if reference.how in replaced)

    def _sees_module(self, function: Any) -> bool:
        return type(function) is types.FunctionType and _sees_module(function, self._reach)

    def _copy_of(self, value: Any) -> Any:
        if id(value) not in self._changing:
            return value
        if id(value) not in self._copies:
            # Known before what it refers to, as it may refer to itself.
            copy = self._begun if type(value) is types.FunctionType else self._copy_of_partial
            self._copies[id(value)] = copy(*self._parts[id(value)])
        return self._copies[id(value)]

    def _copy_of_partial(self, original: partial[Any], parts: list[tuple[Reference, Any]]) -> partial[Any]:
        values = [(reference, self._copy_of(reference.value if new is NO_VALUE else new)) for reference, new in parts]
        keywords = {one.name: value for one, value in values if one.holder is original.keywords}
        function, *arguments = [value for one, value in values if one.how == "part"]
        copied = partial(function, *arguments, **keywords)
        vars(copied).update(vars(original))
        return copied

    def _begun(self, function: types.FunctionType, parts: list[tuple[Reference, Any]]) -> types.FunctionType:
        # Return a copy that refers to nothing yet.
        changed = self._changed(parts)
        closure = [
            self._copies.setdefault(id(cell), types.CellType()) if ("variable", name) in changed else cell
            for name, cell in cells_of(function)
        ]
        variables = function.__globals__
        if any(how == "name" for how, _ in changed):
            if id(variables) not in self._names:
                self._names[id(variables)] = FixedNames(variables)
            variables = self._names[id(variables)]
        copied = types.FunctionType(function.__code__, variables, function.__name__, None, tuple(closure))
        self._waiting.append((function, copied, parts))
        return copied

    def _changed(self, parts: list[tuple[Reference, Any]]) -> set[tuple[str, str]]:
        # The references that have another value in the copy.
        return {(one.how, one.name) for one, new in parts if new is not NO_VALUE or id(one.value) in self._changing}

    def _finish(self, function: types.FunctionType, copied: Any, parts: list[tuple[Reference, Any]]) -> None:
        changed = self._changed(parts)
        # The code of a class in a function looks names up without `__missing__`.
        stays = references_of(function.__code__).defines_classes
        defaults: list[Any] = []
        keyword_defaults: dict[str, Any] = {}
        for reference, new in parts:
            value = self._copy_of(reference.value if new is NO_VALUE else new)
            if reference.how == "default":
                if reference.holder is None:
                    defaults.append(value)
                else:
                    keyword_defaults[reference.name] = value
            elif reference.how == "variable" and ("variable", reference.name) in changed:
                self._copies[id(reference.holder)].cell_contents = value
            elif reference.how == "name" and isinstance(copied.__globals__, FixedNames):
                is_fixed = stays or ("name", reference.name) in changed
                copied.__globals__.fix(reference.name, value, is_fixed=is_fixed)
        copied.__defaults__, copied.__kwdefaults__ = tuple(defaults) or None, keyword_defaults or None
        for name in ("__qualname__", "__module__", "__doc__", "__annotations__"):
            setattr(copied, name, getattr(function, name))
        # Shared, as a function may keep a counter there.
        copied.__dict__ = function.__dict__


class FixedNames(dict[str, Any]):
    """The global names that copies of a module's functions see: some fixed, and the others as the module has them.

    Functions, classes, modules and builtins that copies use are here too, since looking them up here is faster. They
    are those of the time when the copies were made.
    """

    def __init__(self, variables: dict[str, Any]) -> None:
        # A warning is shown once for a module.
        variables.setdefault("__warningregistry__", {})
        # Python itself looks up the names of a module that begin with two underscores without `__missing__`.
        super().__init__({name: value for name, value in variables.items() if name.startswith("__")})
        self._variables = variables

    def fix(self, name: str, value: Any, *, is_fixed: bool) -> None:
        """Fix a name if it is to be, or if its value is of a type that is looked up here."""
        if value is NO_VALUE:
            value = _BUILTINS.get(name, NO_VALUE)
        if value is not NO_VALUE and (is_fixed or isinstance(value, _LOOKED_UP_HERE)):
            self[name] = value

    def __missing__(self, name: str) -> Any:
        return self._variables[name]

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in self._variables

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a name."""
        try:
            return self[name]
        except KeyError:
            return default

    def copy(self) -> dict[str, Any]:
        """Return all names, as libraries ask for that evaluate expressions with the variables of their caller."""
        return {**self._variables, **self}
