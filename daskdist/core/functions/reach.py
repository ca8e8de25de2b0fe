"""The walk over what a function refers to: its code, closure, defaults and names, and what these refer to.

`references_from` says what a value refers to directly, in a fixed order that does not depend on the process. `Reach`
follows the references from function to function. Everything that asks what a function uses asks these two:

===================================================================  ==============================================
question                                                             answered in
===================================================================  ==============================================
is it equal to a function of another program or day?                 `code_fingerprint.py`
does it draw from a random generator that outlives a call?           `random_generators.py`, for the fingerprint
what does it do when its names are set to other values?              `fixed_values.py`
is it still what was sent before, or what a result is known of?      `Reach.is_current`, `Reach.leaves`
at which numbers may it behave differently?                          `numbers_in` in `user_function.py`
which datasets does it use?                                          `all_from`
why can it not be pickled?                                           `describe_unpicklable`, in `execute/messages`
===================================================================  ==============================================
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Literal, NamedTuple

from daskdist.core.functions.code_references import Chain, Import, references_of
from daskdist.core.functions.installed_packages import package_of


class NoValue:
    """The absence of a value, as None may be one."""


NO_VALUE: Final = NoValue()

# The kinds of references: a default; a variable of an enclosing function, which the function may assign; a name of a
# module; an import inside the function; a member of a class; an attribute of an object; and any other part.
How = Literal["default", "variable", "assigned", "name", "import", "member", "attribute", "part"]


AS_A_WHOLE: Final[frozenset[Chain]] = frozenset({()})


class ModuleUse(NamedTuple):
    """A module, and the attributes that code uses of it: ``("sub", "helper")`` for ``module.sub.helper``."""

    module: types.ModuleType
    chains: frozenset[Chain]


class Reference(NamedTuple):
    """A reference of one value to another.

    Parameters
    ----------
    how
        The kind of reference.
    name
        The name in the code or in the object, or ``[key]``.
    value
        The value; `NO_VALUE` if the name is not set.
    holder
        The dict (such as the variables of a module) or the cell where it is looked up each time; otherwise None.
    chains
        The attributes that are used of the value, if it is a module; by default, it is used as a whole.
    """

    how: How
    name: str
    value: Any
    holder: Any = None
    chains: frozenset[Chain] = AS_A_WHOLE

    @property
    def target(self) -> Any:
        """The value; in place of a module, its attributes that are used."""
        return ModuleUse(self.value, self.chains) if isinstance(self.value, types.ModuleType) else self.value


def content_of(cell: types.CellType) -> Any:
    """Return the content of a cell; `NO_VALUE` if it is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return NO_VALUE


def cells_of(function: types.FunctionType) -> list[tuple[str, types.CellType]]:
    """Return the variables of enclosing functions that a function uses: their names and cells."""
    return list(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))


def is_own(function: types.FunctionType) -> bool:
    """Return whether a function is outside of installed packages."""
    return package_of(function.__globals__.get("__name__")) is None


def is_imported(function: types.FunctionType) -> bool:
    """Return whether a function is one that its module has under its name, so that it is pickled by reference."""
    name = function.__globals__.get("__name__")
    module = sys.modules.get(name) if name not in (None, "__main__") else None
    if module is None or vars(module) is not function.__globals__ or function.__module__ != name:
        return False
    attribute: Any = module
    for part in function.__qualname__.split("."):
        attribute = getattr(attribute, part, None)
    return attribute is function


def references_from(value: Any, *, is_into_packages: bool = False, may_import: bool = False) -> Iterator[Reference]:
    """Yield what a value refers to directly: a function or another callable, a class, a module, or a container.

    Parameters
    ----------
    value
        Any value. Objects of other types refer to nothing; see `attributes_of`.
    is_into_packages
        Whether to look into functions of installed packages. Otherwise only the variables of enclosing functions count,
        which may be functions of the program that they wrap.
    may_import
        Whether to import modules of the program that a function imports; otherwise only those that are loaded count.
    """
    kind = type(value)
    if kind is types.FunctionType:
        yield from _of_function(value, is_into_packages, may_import)
    elif kind is ModuleUse:
        yield from _of_module_use(value)
    elif kind is functools.partial:
        yield Reference("part", "func", value.func)
        for number, item in enumerate(value.args):
            yield Reference("part", f"[{number}]", item)
        for holder in (value.keywords, vars(value)):
            for name, item in holder.items():
                yield Reference("attribute", name, item, holder)
    elif kind is types.MethodType:
        yield Reference("part", "self", value.__self__)
        if not _is_of_class(value):
            yield Reference("part", "function", value.__func__)
    elif isinstance(value, (staticmethod, classmethod)):
        yield Reference("part", "function", value.__func__)
    elif kind is property:
        for name in ("fget", "fset", "fdel"):
            yield Reference("part", name, getattr(value, name))
    elif isinstance(value, type):
        yield from _of_class(value)
    elif isinstance(value, types.ModuleType):
        # It is used as a whole, so that any part of it may be used.
        for name in sorted(vars(value)) if package_of(value.__name__) is None else ():
            if not name.startswith("__"):
                yield Reference("name", name, vars(value)[name], vars(value))
    elif isinstance(value, (tuple, list, set, frozenset)):
        for number, item in enumerate(value):
            yield Reference("part", f"[{number}]", item)
    elif isinstance(value, (dict, types.MappingProxyType)):
        for key, item in value.items():
            yield Reference("part", f"[{key!r}]", item)


def _of_function(function: types.FunctionType, is_into_packages: bool, may_import: bool) -> Iterator[Reference]:
    if not is_into_packages and not is_own(function):
        for name, cell in cells_of(function):
            yield Reference("variable", name, content_of(cell), cell)
        return
    references, variables = references_of(function.__code__), function.__globals__
    for number, value in enumerate(function.__defaults__ or ()):
        yield Reference("default", f"default {number}", value)
    for name, value in (function.__kwdefaults__ or {}).items():
        yield Reference("default", name, value, function.__kwdefaults__)
    for name, cell in cells_of(function):
        how: How = "assigned" if name in references.assigned_free else "variable"
        yield Reference(how, name, content_of(cell), cell, references.free_names[name])
    for name, chains in references.global_names.items():
        yield Reference("name", name, variables.get(name, NO_VALUE), variables, chains)
    for statement in references.imports:
        yield _of_import(statement, variables, may_import)
    for name, value in vars(function).items():
        yield Reference("attribute", name, value, vars(function))


def _of_import(statement: Import, variables: Mapping[str, Any], may_import: bool) -> Reference:
    name = statement.module
    if statement.level:
        package = variables.get("__package__") or str(variables.get("__name__", "")).rpartition(".")[0]
        try:
            name = importlib.util.resolve_name("." * statement.level + name, package)
        except ImportError:
            return Reference("import", name, NO_VALUE)
    used = name if statement.names else name.partition(".")[0]
    if may_import and package_of(name) is None:
        try:
            module = importlib.import_module(name)
            for attribute in statement.names:
                if not hasattr(module, attribute):
                    importlib.import_module(f"{name}.{attribute}")
        except Exception:
            # The call of the function will raise the error.
            return Reference("import", name, NO_VALUE)
    # An installed package is never imported for this.
    return Reference("import", name, sys.modules.get(used, NO_VALUE), None, statement.chains)


def _of_module_use(use: ModuleUse) -> Iterator[Reference]:
    if package_of(use.module.__name__) is not None:
        return
    if () in use.chains:
        yield from references_from(use.module)
    following: dict[str, set[Chain]] = {}
    for chain in use.chains - AS_A_WHOLE:
        following.setdefault(chain[0], set()).add(chain[1:])
    variables = vars(use.module)
    for name, chains in sorted(following.items()):
        if name not in variables and hasattr(use.module, name):
            # The module has a `__getattr__`.
            yield Reference("part", name, getattr(use.module, name))
        else:
            yield Reference("name", name, variables.get(name, NO_VALUE), variables, frozenset(chains))


# Attributes of a class that Python and libraries add.
_NOT_OF_CLASS_NAMES: Final = """
    __dict__ __weakref__ __module__ __qualname__ __doc__ __annotations__ __annotate__ __annotate_func__ __slotnames__
    __abstractmethods__ _abc_impl __static_attributes__ __firstlineno__ __parameters__ __orig_bases__
    __annotations_cache__ __dataclass_params__
"""
_NOT_OF_CLASS: Final = frozenset(_NOT_OF_CLASS_NAMES.split())


def _of_class(kind: type) -> Iterator[Reference]:
    if package_of(kind.__module__) is not None:
        return
    for base in (*([type(kind)] if type(kind) is not type else []), *kind.__bases__):
        yield Reference("part", base.__name__, base)
    for name, value in sorted(vars(kind).items()):
        if name not in _NOT_OF_CLASS and not isinstance(value, types.MemberDescriptorType):
            yield Reference("member", name, value)


def _is_of_class(method: types.MethodType) -> bool:
    # An unpickled method may have another function than the class.
    of_class = inspect.getattr_static(method.__self__, getattr(method, "__name__", ""), None)
    code = getattr(method.__func__, "__code__", None)
    return code is not None and getattr(getattr(of_class, "__func__", of_class), "__code__", None) == code


def attributes_of(value: Any) -> Iterator[Reference]:
    """Yield the attributes of an object, those with slots first."""
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name) and name != "__dict__":
                yield Reference("attribute", name, getattr(value, name))
    for name, attribute in getattr(value, "__dict__", {}).items():
        yield Reference("attribute", name, attribute)


_FOLLOWED: Final = (types.FunctionType, functools.partial, types.MethodType, ModuleUse)


class Reach:
    """All that a function refers to, directly or through other functions and modules of the program.

    Parameters
    ----------
    function
        The function. Its reach does not keep it from being freed.
    is_entered
        Returns whether what a function, partial, method or module that it refers to refers to is part of it.
    is_into_packages
        As for `references_from`.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        is_entered: Callable[[Any], bool] = lambda _: True,
        *,
        is_into_packages: bool = False,
    ) -> None:
        # All references, in the order of the walk.
        self.references: list[Reference] = []
        # The functions that it refers to, which do not include itself.
        self.functions: list[types.FunctionType] = []
        # The other values that it refers to, and those that are not entered.
        self.leaves: list[Any] = []
        # The names that functions assign, as (id of the variables, name), and the ids of the cells.
        self.assigned_names: set[tuple[int, str]] = set()
        self.assigned_cells: set[int] = set()
        self._is_entered = is_entered
        self._is_into_packages = is_into_packages
        self._walk(function)
        # What may be replaced, with its value: for `is_current`. None stands for the function itself.
        others = [None, *self.functions] if type(function) is types.FunctionType else self.functions
        self._states = [(other, _state_of(function if other is None else other)) for other in others]
        self._held = [(one.holder, one.name, one.value) for one in self.references if one.holder is not None]

    def _walk(self, function: Callable[..., Any]) -> None:
        # Values are kept, so that their ids are not used again; not the function itself.
        seen: dict[int, Any] = {id(function): None}
        modules: set[int] = set()
        self._note_assigned(function, modules)
        walks = [references_from(function, is_into_packages=self._is_into_packages)]
        while walks:
            reference = next(walks[-1], None)
            if reference is None:
                walks.pop()
                continue
            self.references.append(reference)
            if reference.how == "assigned":
                self.assigned_cells.add(id(reference.holder))
            target = reference.target
            if type(target) not in _FOLLOWED or not self._is_entered(target):
                self.leaves.append(reference.value)
                self._note_assigned(_wrapped(target), modules)
            elif _key(target) not in seen:
                seen[_key(target)] = target
                if type(target) is types.FunctionType:
                    self.functions.append(target)
                self._note_assigned(target, modules)
                walks.append(references_from(target, is_into_packages=self._is_into_packages))

    def _note_assigned(self, function: Any, modules: set[int]) -> None:
        if type(function) is not types.FunctionType or not is_own(function):
            return
        variables, functions = function.__globals__, [function]
        if id(variables) not in modules and is_imported(function):
            # With the names that its other functions assign, as each process may set up its own copy of a module.
            modules.add(id(variables))
            functions += [
                other
                for other in list(variables.values())
                if type(other) is types.FunctionType and other.__globals__ is variables
            ]
        for one in functions:
            self.assigned_names |= {(id(variables), name) for name in references_of(one.__code__).assigned_globals}

    def watch_only(self, kinds: tuple[type, ...]) -> None:
        """Forget all references except those to values of some types, which alone count for `is_current`."""
        self.references = [one for one in self.references if isinstance(one.value, kinds)]
        self._held = [held for held in self._held if isinstance(held[2], kinds)]
        self.leaves = []

    def is_current(self, function: Callable[..., Any]) -> bool:
        """Return whether a function still refers to the same objects; these may have changed in place."""
        # Plain loops, since each step calls this.
        for other, (code, defaults, keyword_defaults, num_attributes) in self._states:
            now: Any = function if other is None else other
            if (
                now.__code__ is not code
                or now.__defaults__ is not defaults
                or now.__kwdefaults__ is not keyword_defaults
                or len(now.__dict__) != num_attributes
            ):
                return False
        for holder, name, value in self._held:
            if (content_of(holder) if type(holder) is types.CellType else holder.get(name, NO_VALUE)) is not value:
                return False
        return True


def _key(value: Any) -> int:
    # Modules that are used as a whole may refer to each other.
    return id(value.module) if type(value) is ModuleUse and () in value.chains else id(value)


_CACHED: Final = type(functools.cache(int))


def _wrapped(value: Any) -> Any:
    # Return the function in a cache or another wrapper of the standard library.
    return value.__wrapped__ if isinstance(value, _CACHED) else None


# The code, the defaults, those of keywords, and the number of attributes of a function.
def _state_of(function: Any) -> tuple[types.CodeType, Any, Any, int]:
    return function.__code__, function.__defaults__, function.__kwdefaults__, len(function.__dict__)


# Values that refer to nothing, and the number of items of containers that are not looked into, as they are data.
_PLAIN: Final = frozenset({int, float, complex, str, bytes, bool, type(None)})
_LARGE: Final = 10_000


def all_from(function: Callable[..., Any]) -> Iterator[Any]:
    """Yield all values that a function refers to, also those in containers and in objects of the program's classes."""
    seen: dict[int, Any] = {}
    waiting: list[Any] = [function]
    while waiting:
        value = waiting.pop()
        if type(value) in _PLAIN or _key(value) in seen:
            continue
        seen[_key(value)] = value
        yield value
        if isinstance(value, _CONTAINERS):
            items = value.values() if isinstance(value, (dict, types.MappingProxyType)) else value
            waiting += list(items)[::-1] if len(value) <= _LARGE else []
            continue
        parts = [*references_from(value)]
        if not isinstance(value, (type, *_FOLLOWED)) and package_of(type(value).__module__) is None:
            parts += attributes_of(value)
        waiting += [part.target for part in reversed(parts)]


_CONTAINERS: Final = (tuple, list, set, frozenset, dict, types.MappingProxyType)
