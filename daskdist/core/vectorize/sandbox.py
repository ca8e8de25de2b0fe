"""Functions that run on tracers in a sandbox: copies that see only what is known to be pure.

The copy of a function has the code of the function, and other global names, cells and defaults. What they refer
to is one of these: plain data, with arrays read-only and containers copied; listed callables; copies of Python
functions; and a `StandIn` for everything else, such as a module, a class or an object, whose attributes are looked up
in the same way when they are used. A container that the function has changed afterwards is found. Code that could have
other effects is refused before it runs.

The sandbox is made for one run, so that a redefined helper, a reloaded module or a changed table takes effect with the
next block. A run takes one path through the function. Every row takes this path, because a tracer has no truth value.
"""

from __future__ import annotations

import builtins
import dis
import functools
import inspect
import logging
import sys
import types
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from daskdist.core.functions.code_references import references_of
from daskdist.core.functions.reach import NO_VALUE, cells_of, content_of
from daskdist.core.vectorize import allowlist
from daskdist.core.vectorize.tracer import REFUSED, Trace, TracedText, Tracer, column_of, row_of

logger: Final = logging.getLogger("daskdist")

# The versions of CPython whose instructions were compared with `_REASONS`.
VERSIONS: Final = ((3, 11), (3, 12), (3, 13))
# Instruction -> the reason why code with it is called row by row, even if it is not reached: exceptions may occur for
# some rows only.
_REASONS: Final = {
    **dict.fromkeys(("PUSH_EXC_INFO", "BEFORE_WITH"), "it handles exceptions, or has a with statement"),
    **dict.fromkeys(("STORE_GLOBAL", "DELETE_GLOBAL"), "it sets a global variable"),
    **dict.fromkeys(("STORE_ATTR", "DELETE_ATTR"), "it sets an attribute"),
    "LOAD_BUILD_CLASS": "it makes a class",
    # These patterns test the class of a value, which a tracer or a stand-in does not have.
    **dict.fromkeys(("MATCH_CLASS", "MATCH_MAPPING", "MATCH_SEQUENCE"), "it matches the class of a value"),
}
_ASKS_FOR_IDENTITY: Final = "it asks whether a value is another"
_NOTHING: Final = frozenset({"CACHE", "EXTENDED_ARG", "NOP", "PUSH_NULL"})
_MOST_ITEMS: Final = 10_000
_MISSING: Final = object()
_GETTERS: Final = (vars(object)["__getattribute__"], vars(tuple)["__getattribute__"])
_IS_HEAP_TYPE: Final = 1 << 9


def unknown_version() -> str | None:
    """Return the reason why functions cannot be analysed under this Python, as a clause; None if they can.

    The first call logs it as a warning.
    """
    if sys.version_info[:2] in VERSIONS and sys.implementation.name == "cpython":
        return None
    *names, last = [".".join(map(str, version)) for version in VERSIONS]
    known = f"{', '.join(names)} and {last}"
    this_python = f"{sys.implementation.name} {sys.version.split()[0]}"
    _warn(f"Functions are called row by row: the bytecode of {this_python} is not known, only that of CPython {known}")
    return f"functions are looked into under CPython {known} only, and this is {this_python}"


@functools.cache
def _warn(text: str) -> None:
    logger.warning(text)


@functools.lru_cache(1024)
def _refusal(code: types.CodeType) -> str | None:
    """Return the reason why code must not run in a sandbox, as a clause."""
    if code.co_flags & (inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR | inspect.CO_ITERABLE_COROUTINE):
        return "it is a coroutine"
    for step in dis.get_instructions(code):
        if step.opname in _REASONS:
            return _REASONS[step.opname]
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD") and _is_hidden(step.argval):
            return f"it uses .{step.argval}, which is not known to be pure"
    if None in _compared_by_identity(code):
        return _ASKS_FOR_IDENTITY
    nested = (_refusal(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return next((reason for reason in nested if reason is not None), None)


def _is_hidden(name: str) -> bool:
    return name.startswith("__") or name in allowlist.HIDDEN


@functools.lru_cache(1024)
def _compared_by_identity(code: types.CodeType) -> tuple[tuple[str, ...] | None, ...]:
    """Return the right operand of each ``is``, also in nested functions: its names, such as ``("np", "float32")``.

    A constant has no names. None stands for any other operand, which may differ between rows.
    """
    operands: list[tuple[str, ...] | None] = []
    names: tuple[str, ...] | None = None
    for step in dis.get_instructions(code):
        if step.opname == "IS_OP":
            operands.append(names)
        elif step.opname == "LOAD_CONST":
            # NumPy's two Booleans are the results of comparisons in some of the rows.
            names = None if type(step.argval) is np.bool_ else ()
        elif step.opname == "LOAD_GLOBAL":
            names = (step.argval,)
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            names = (*names, step.argval) if names else None
        elif step.opname not in _NOTHING:
            names = None
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            operands += _compared_by_identity(constant)
    return tuple(operands)


def _is_one_of_rows(names: tuple[str, ...], function: types.FunctionType) -> bool:
    """Return whether a value may be an object that a comparison in a row returns: one of NumPy's two Booleans."""
    if not names:
        return False
    first, *attributes = names
    value = function.__globals__.get(first, vars(builtins).get(first, _MISSING))
    for name in attributes:
        if isinstance(value, type):
            value = _look_up(value, name)
        else:
            value = vars(value).get(name, _MISSING) if type(value) is types.ModuleType else _MISSING
    return value is _MISSING or type(value) is np.bool_


class Sandbox:
    """The sandbox of one run of a function."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        # The code of the functions that were copied, in order.
        self.codes: list[types.CodeType] = []
        # Value, kept alive, and its replacement, by the identity of the value.
        self._replaced: dict[int, tuple[Any, Any]] = {}
        # Copied containers, each with its items.
        self._containers: list[tuple[Any, list[Any]]] = []
        self._num_items = 0
        self._is_named_tuple: Callable[[Any], bool] = functools.cache(allowlist.is_named_tuple)
        # Global names, by the identity of the variables.
        self._names: dict[int, _Names] = {}
        self._builtins = {"__import__": self._import}

    def call_with(self, function: Callable[..., Any], element: Any) -> Any:
        """Call a function with an element: a tuple's items one by one, anything else whole.

        Raises
        ------
        NotVectorisable
            It does something that is not known to be pure.
        """
        unknown = unknown_version()
        if unknown is not None:
            raise self.trace.fail(unknown)
        arguments = [self._argument(item) for item in (element if type(element) is tuple else (element,))]
        result = self.safe(function, "it")(*arguments)
        for container, items in self._containers:
            now = _items_of(container)
            if len(now) != len(items) or any(item is not before for item, before in zip(now, items, strict=True)):
                raise self.trace.fail(f"it changes a {type(container).__name__} that all rows share")
        return result

    def _argument(self, value: Any) -> Any:
        kind = type(value)
        if kind is dict:
            return {key: self._argument(item) for key, item in value.items()}
        if kind is tuple or self._is_named_tuple(kind):
            return tuple.__new__(kind, map(self._argument, value))
        return self.safe(value, "an element")

    # --- values ---

    def safe(self, value: Any, name: str) -> Any:
        """Return the replacement of a value from outside of the run.

        Raises
        ------
        NotVectorisable
            The value must not be used.
        """
        if type(value) in allowlist.IMMUTABLE or type(value) in (Tracer, TracedText):
            return value
        if id(value) not in self._replaced:
            self._replaced[id(value)] = value, self._replacement(value, name)
        return self._replaced[id(value)][1]

    def _replacement(self, value: Any, name: str) -> Any:
        kind = type(value)
        if kind is np.ndarray:
            if value.dtype.kind in "OV":
                raise self.trace.fail(f"it uses {name}, which is an array of objects")
            view = value.view()
            view.flags.writeable = False
            return view
        if kind in allowlist.CONTAINERS or self._is_named_tuple(kind):
            return self._container(value, name)
        if kind is types.FunctionType and value not in allowlist.CALLABLES:
            return self._function(value)
        if kind is types.MethodType:
            return types.MethodType(self.safe(value.__func__, name), self.safe(value.__self__, name))
        if kind is functools.partial and not vars(value):
            keywords = {key: self.safe(part, name) for key, part in value.keywords.items()}
            arguments = [self.safe(part, name) for part in value.args]
            copied = functools.partial(self.safe(value.func, name), *arguments, **keywords)
            self._containers.append((copied.keywords, _items_of(keywords)))
            return copied
        if kind is types.BuiltinFunctionType and type(value.__self__) in allowlist.CHANGES:
            return getattr(self.safe(value.__self__, name), value.__name__)
        if isinstance(value, type):
            if value in allowlist.NUMBERS and np.dtype(value).kind in "biufmM":
                return self._number_type(value)
            if value is type:
                return self._type_of
            is_known = value is np.dtype or (type(value) is type and value in allowlist.TYPES)
            return value if is_known or self._is_named_tuple(value) else StandIn(self, value)
        if kind in (types.BuiltinFunctionType, types.FunctionType, np.ufunc, type(np.sum)):
            special = {
                getattr: self._getattr,
                hasattr: self._hasattr,
                isinstance: self._isinstance,
                np.asarray: self._asarray,
            }
            if value in special:
                return special[value]
            if value in allowlist.CALLABLES:
                return value
        return StandIn(self, value)

    def _container(self, value: Any, name: str) -> Any:
        kind = type(value)
        self._num_items += len(value)
        if self._num_items > _MOST_ITEMS:
            raise self.trace.fail(f"it uses {name}, which has too many items to look at")
        if kind in (set, frozenset):
            # A copy may have another order.
            is_fixed = kind is frozenset and allowlist.IMMUTABLE.issuperset(map(type, value))
            return value if is_fixed else StandIn(self, value)
        if kind is list or kind is dict:
            copied: Any = kind()
            # Note it before its items, as it may contain itself.
            self._replaced[id(value)] = value, copied
            if kind is list:
                copied += [self.safe(item, name) for item in value]
            else:
                copied.update((self.safe(key, name), self.safe(item, name)) for key, item in list(value.items()))
            self._containers.append((copied, _items_of(copied)))
            return copied
        items = [self.safe(item, name) for item in value]
        is_same = all(item is before for item, before in zip(items, value, strict=True))
        return value if is_same else tuple.__new__(kind, items)

    def _number_type(self, kind: type[Any]) -> Any:
        trace, dtype = self.trace, np.dtype(kind)

        def new(cls: Any, *args: Any, **options: Any) -> Any:
            if len(args) != 1 or type(args[0]) is not Tracer or options:
                return kind(*args, **options)
            if dtype.kind != "f" and not np.can_cast(args[0].dtype, kind, "safe"):
                raise trace.fail(f"it makes a {kind.__name__} of a value; .astype has a rule")
            return trace.apply("astype", kind, _conversion(dtype), (args[0],), {})

        # NumPy takes a class with a dtype for that dtype.
        members = {"__new__": new, "dtype": dtype, "__module__": kind.__module__, "number_type": kind}
        return _NumberType(kind.__name__, (), members)

    # --- functions ---

    def _function(self, function: types.FunctionType) -> types.FunctionType:
        code = function.__code__
        references = references_of(code)
        reason = _refusal(code)
        for variable in sorted(references.assigned_free):
            reason = reason or f"it sets the variable {variable}"
        if reason is None and any(_is_one_of_rows(names or (), function) for names in _compared_by_identity(code)):
            reason = _ASKS_FOR_IDENTITY
        if reason is not None:
            raise self.trace.fail(reason)
        self.codes.append(code)
        cells = [types.CellType() for _ in code.co_freevars]
        copied = types.FunctionType(code, self._names_of(function), function.__name__, None, tuple(cells))
        # Known before what it refers to, as it may refer to itself.
        self._replaced[id(function)] = function, copied
        copied.__qualname__ = function.__qualname__
        for (name, cell), copied_cell in zip(cells_of(function), cells, strict=True):
            if content_of(cell) is not NO_VALUE:
                copied_cell.cell_contents = self.safe(content_of(cell), name)
        copied.__defaults__ = self.safe(function.__defaults__, "a default")
        copied.__kwdefaults__ = {
            name: self.safe(value, f"the default of {name}") for name, value in (function.__kwdefaults__ or {}).items()
        }
        # The others cannot be asked for.
        attributes = {name: value for name, value in vars(function).items() if not _is_hidden(name)}
        vars(copied).update({name: self.safe(value, name) for name, value in attributes.items()})
        return copied

    def _names_of(self, function: types.FunctionType) -> _Names:
        variables = function.__globals__
        if id(variables) not in self._names:
            names = _Names(self, variables, getattr(function, "__builtins__"))  # noqa: B009
            names["__builtins__"] = self._builtins
            self._names[id(variables)] = names
        return self._names[id(variables)]

    def _import(self, name: str, *args: Any) -> Any:
        level = args[3] if len(args) > 3 else 0
        if level or name not in allowlist.MODULES or name not in sys.modules:
            raise self.trace.fail(f"it imports {name}")
        return self.safe(sys.modules[name], name)

    # --- the values of stand-ins ---

    def attribute(self, value: Any, name: str) -> Any:
        """Return an attribute of a module, a class or an object.

        Raises
        ------
        NotVectorisable
            The lookup or the attribute may have side effects.
        AttributeError
            There is no such attribute.
        """
        kind = type(value)
        if _is_hidden(name):
            raise self.trace.fail(f"it uses .{name}, which is not known to be pure")
        if kind is types.ModuleType:
            attribute = vars(value).get(name, _MISSING)
            if attribute is _MISSING:
                raise self.trace.fail(f"it uses {value.__name__}.{name}, which the module makes when it is asked for")
            return self.safe(attribute, f"{value.__name__}.{name}")
        return self._of_type(value, name) if isinstance(value, type) else self._of_object(value, kind, name)

    def _of_type(self, value: type[Any], name: str) -> Any:
        attribute = _look_up(value, name) if type(value) is type else _MISSING
        is_plain = attribute is not _MISSING and value.__flags__ & _IS_HEAP_TYPE
        if not is_plain or type(attribute) in (property, classmethod) or _is_descriptor(attribute):
            raise self.trace.fail(f"it uses {value.__name__}.{name}, which is not known to be pure")
        member = attribute.__func__ if type(attribute) is staticmethod else attribute
        return self.safe(member, f"{value.__name__}.{name}")

    def _of_object(self, value: Any, kind: type[Any], name: str) -> Any:
        label = f"{kind.__name__}.{name}"
        is_ordinary = type(kind) is type and _look_up(kind, "__getattribute__") in _GETTERS
        if not is_ordinary or _look_up(kind, "__getattr__") is not _MISSING:
            raise self.trace.fail(f"it uses {label}, which an object of its own makes when it is asked for")
        attribute, mine = _look_up(kind, name), {}
        if kind.__dictoffset__:
            mine = object.__getattribute__(value, "__dict__")
        if type(attribute) is property:
            return self.safe(attribute.fget, label)(self.safe(value, label))
        if type(attribute) in (types.MemberDescriptorType, allowlist.FIELD):
            return self.safe(attribute.__get__(value), label)
        if type(mine) is not dict or any(hasattr(type(attribute), method) for method in ("__set__", "__delete__")):
            raise self.trace.fail(f"it uses {label}, which is not known to be pure")
        if name in mine:
            return self.safe(mine[name], label)
        if attribute is _MISSING:
            raise AttributeError(f"{kind.__name__!r} object has no attribute {name!r}")
        if type(attribute) is types.FunctionType:
            return types.MethodType(self.safe(attribute, label), self.safe(value, label))
        if _is_descriptor(attribute) and type(attribute) is not staticmethod:
            raise self.trace.fail(f"it uses {label}, which is not known to be pure")
        return self.safe(attribute.__func__ if type(attribute) is staticmethod else attribute, label)

    def call(self, value: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Call what a stand-in stands for.

        Raises
        ------
        NotVectorisable
            It is not an object of a class with the method ``__call__``.
        """
        kind = type(value)
        if isinstance(value, type):
            raise self.trace.fail(f"it makes a {value.__name__}, which is not known to be pure")
        call = _look_up(kind, "__call__") if type(kind) is type else _MISSING
        if type(call) is not types.FunctionType:
            name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
            name = name if isinstance(name, str) else f"an object, a {kind.__name__}"
            raise self.trace.fail(f"it calls {name}, which is not known to be pure")
        return self.safe(call, "__call__")(self.safe(value, "it"), *args, **options)

    # --- builtins that look into values ---

    def _getattr(self, value: Any, name: str, *default: Any) -> Any:
        if type(name) is not str or _is_hidden(name):
            raise self.trace.fail(f"it uses .{name}, which is not known to be pure")
        return getattr(value, name, *default)

    def _hasattr(self, value: Any, name: str) -> bool:
        return self._getattr(value, name, _MISSING) is not _MISSING

    def _type_of(self, value: Any) -> Any:
        kind = type(row_of(value)) if type(value) is Tracer else type(value)
        return self.safe(self._checked_kind(kind), kind.__name__)

    def _isinstance(self, value: Any, kinds: Any) -> bool:
        self._checked_kind(type(value))
        kinds = kinds if type(kinds) is tuple else (kinds,)
        classes = tuple([kind.number_type if type(kind) is _NumberType else target_of(kind) for kind in kinds])
        if not all(type(kind) is type for kind in classes):
            raise self.trace.fail("it uses isinstance with a class that has a say in it")
        return isinstance(value, classes)

    def _checked_kind(self, kind: type[Any]) -> type[Any]:
        if kind in (StandIn, TracedText) or type(kind) is not type:
            raise self.trace.fail("it asks for the class of a value that is not plain data")
        return kind

    def _asarray(self, *args: Any, **options: Any) -> Any:
        if len(args) == 1 and type(args[0]) is Tracer and not options and isinstance(row_of(args[0]), np.ndarray):
            return args[0]
        return np.asarray(*args, **options)


class _Names(dict[str, Any]):
    """The global names of functions in a sandbox, looked up when they are used."""

    def __init__(self, sandbox: Sandbox, variables: dict[str, Any], builtins: dict[str, Any]) -> None:
        super().__init__()
        self._sandbox = sandbox
        self._variables = variables
        self._builtins = builtins

    def __missing__(self, name: str) -> Any:
        value = self._variables.get(name, _MISSING)
        value = self._builtins[name] if value is _MISSING else value
        self[name] = safe = self._sandbox.safe(value, name)
        return safe


class _NumberType(type):
    """The class of replacements for NumPy's classes of numbers, which can be called on tracers."""

    number_type: type[Any]


class StandIn:
    """A replacement of a value that is not plain data: it has the attributes of the value and can be called."""

    __slots__ = ("__sandbox", "__target")

    def __init__(self, sandbox: Sandbox, target: Any) -> None:
        self.__sandbox = sandbox
        self.__target = target

    def __getattr__(self, name: str) -> Any:
        return self.__sandbox.attribute(self.__target, name)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.__sandbox.call(self.__target, args, options)

    def _refuse(self, *args: Any) -> Any:
        raise self.__sandbox.trace.fail(f"it uses a {type(self.__target).__name__}, which is not plain data")

    @staticmethod
    def of(value: Any) -> Any:
        """Return the value that a stand-in stands for; other values unchanged."""
        return value.__target if type(value) is StandIn else value


for _name in (
    *REFUSED,
    *("__len__", "__iter__", "__next__", "__getitem__", "__enter__", "__exit__"),
    *("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__"),
):
    setattr(StandIn, _name, StandIn._refuse)

target_of: Final = StandIn.of


def _items_of(container: Any) -> list[Any]:
    return [*container, *container.values()] if type(container) is dict else list(container)


def _is_descriptor(attribute: Any) -> bool:
    return hasattr(type(attribute), "__get__") and type(attribute) not in (types.FunctionType, staticmethod)


def _look_up(kind: type[Any], name: str) -> Any:
    for base in kind.__mro__:
        if name in vars(base):
            return vars(base)[name]
    return _MISSING


@functools.cache
def _conversion(dtype: Any) -> Any:
    return lambda trace, args, options: column_of(args[0]).astype(dtype)
