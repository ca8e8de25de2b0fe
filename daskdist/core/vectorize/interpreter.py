"""An interpreter of Python's bytecode that runs a function on tracers and refuses anything not known to be pure.

The interpreter sees every name lookup, every call and every write to a container when it happens. Its decisions are
valid for the current run, and each block is a run: a redefined helper, a reloaded module or a changed table takes
effect with the next block.

A run takes one path through the function. Every row takes this path, because a tracer has no truth value.
"""

from __future__ import annotations

import collections
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from daskdist.core.vectorize import allowlist
from daskdist.core.vectorize.bytecode import unknown_version
from daskdist.core.vectorize.instructions import MISSING, Frame, Machine, program
from daskdist.core.vectorize.tracer import Method, Tracer, column_of, row_of

_MOST_STEPS: Final = 20_000
_DEEPEST: Final = 40


class FunctionInterpreter(Machine):
    """One run of a function.

    Parameters
    ----------
    trace
        The trace of the function's tracers.
    """

    def call_with(self, function: Callable[..., Any], element: Any) -> Any:
        """Call a function with an element: a tuple's items one by one, anything else whole.

        Raises
        ------
        NotVectorisable
            It does something that is not known to be pure.
        """
        unknown = unknown_version()
        if unknown is not None:
            raise self._refuse(unknown)
        # The loop creates the containers of an element again for each row.
        self._take(element)
        return self.call(function, list(element) if type(element) is tuple else [element], {}, "it")

    def _take(self, nest: Any) -> None:
        if type(nest) in allowlist.CONTAINERS or allowlist.is_named_tuple(type(nest)):
            self._own[id(nest)] = nest
            for value in nest.values() if type(nest) is dict else nest:
                self._take(value)

    # --- attributes ---

    def attribute(self, value: Any, name: str) -> Any:
        """Return an attribute of a value.

        Raises
        ------
        NotVectorisable
            The lookup or the attribute may have side effects.
        AttributeError
            There is no such attribute.
        """
        kind = type(value)
        if kind is Tracer:
            return getattr(value, name)
        if kind is types.ModuleType:
            attribute = vars(value).get(name, MISSING)
            if attribute is MISSING:
                raise self._refuse(f"it uses {value.__name__}.{name}, which the module makes when it is asked for")
            return self._load(attribute, f"{value.__name__}.{name}")
        if name in allowlist.ATTRIBUTES.get(kind, ()):
            if kind is np.ufunc and value not in allowlist.CALLABLES:
                raise self._refuse(f"it uses {value.__name__}, which is not known to be pure")
            return getattr(value, name)
        if name in allowlist.CHANGES.get(kind, ()):
            if id(value) not in self._own:
                raise self._refuse(f"it changes a {kind.__name__} that all rows share, by .{name}")
            return getattr(value, name)
        if kind in allowlist.OPERANDS or kind in allowlist.OPAQUE - {type}:
            raise self._refuse(f"it uses .{name} of a {kind.__name__}, which is not known to be pure")
        return self._attribute_of_type(value, name) if isinstance(value, type) else self._of_object(value, kind, name)

    def _attribute_of_type(self, value: type[Any], name: str) -> Any:
        attribute = _look_up(value, name) if type(value) is type else MISSING
        if attribute is MISSING or not value.__flags__ & (1 << 9) or type(attribute) in (property, classmethod):
            # Without that flag it is not a built-in class.
            raise self._refuse(f"it uses {value.__name__}.{name}, which is not known to be pure")
        member = attribute.__func__ if type(attribute) is staticmethod else attribute
        return self._load(member, f"{value.__name__}.{name}")

    def _of_object(self, value: Any, kind: type[Any], name: str) -> Any:
        label = f"{kind.__name__}.{name}"
        is_ordinary = type(kind) is type and _look_up(kind, "__getattribute__") in _GETTERS
        if not is_ordinary or _look_up(kind, "__getattr__") is not MISSING:
            raise self._refuse(f"it uses {label}, which an object of its own makes when it is asked for")
        attribute, mine = _look_up(kind, name), {}
        if kind.__dictoffset__:
            mine = object.__getattribute__(value, "__dict__")
        if type(attribute) is property:
            return self.call(attribute.fget, [value], {}, label)
        if type(attribute) in (types.MemberDescriptorType, _FIELD):
            return self._load(attribute.__get__(value), label)
        if type(mine) is not dict or hasattr(type(attribute), "__set__"):
            raise self._refuse(f"it uses {label}, which is not known to be pure")
        if name in mine:
            return self._load(mine[name], label)
        if attribute is MISSING:
            raise AttributeError(f"{kind.__name__!r} object has no attribute {name!r}")
        if type(attribute) is types.FunctionType:
            return types.MethodType(attribute, value)
        if type(attribute) is staticmethod:
            return self._load(attribute.__func__, label)
        if hasattr(type(attribute), "__get__"):
            raise self._refuse(f"it uses {label}, which is not known to be pure")
        return self._load(attribute, label)

    # --- calls ---

    def call(self, function: Any, args: list[Any], options: dict[str, Any], name: str = "") -> Any:
        """Make a call of the function.

        Raises
        ------
        NotVectorisable
            The callable is not known to be pure.
        """
        kind = type(function)
        if kind is types.FunctionType:
            return self._run(function, args, options)
        if kind is types.MethodType:
            return self.call(function.__func__, [function.__self__, *args], options, name)
        if kind is functools.partial:
            if vars(function):
                raise self._refuse("it uses a functools.partial with attributes of its own")
            before = [self._load(arg, "an argument") for arg in function.args]
            named = {key: self._load(arg, "an argument") for key, arg in function.keywords.items()}
            return self.call(function.func, [*before, *args], {**named, **options}, name)
        special = self._special(function)
        if special is not None:
            return special(args, options)
        if kind is Method:
            return self._native(function, args, options)
        if isinstance(function, type):
            return self._construct(function, args, options)
        if kind in _KINDS_OF_FUNCTIONS and _is_in(function, allowlist.CALLABLES):
            if kind is np.ufunc and len(args) > function.nin:
                raise self._refuse(f"it calls {function.__name__} with an array to write to")
            return self._native(function, args, options)
        if kind is types.BuiltinFunctionType:
            return self._method(function, args, options)
        call = _look_up(kind, "__call__") if type(kind) is type else MISSING
        if type(call) is types.FunctionType:
            return self._run(call, [function, *args], options)
        raise self._refuse(f"it calls {_name_of(function, name)}, which is not known to be pure")

    def _method(self, function: Any, args: list[Any], options: dict[str, Any]) -> Any:
        owner, name = function.__self__, function.__name__
        kind = type(owner)
        if name in allowlist.ATTRIBUTES.get(kind, ()) and (kind is not np.ufunc or owner in allowlist.CALLABLES):
            return self._native(function, args, options)
        if name in allowlist.CHANGES.get(kind, ()) and id(owner) in self._own:
            for arg in args:
                self._item(arg)
            return self._native(function, args, options, are_items=True)
        if function is tuple.__new__ and args and allowlist.is_named_tuple(args[0]) and not options:
            return tuple.__new__(args[0], [self._item(item) for item in self._operand(args[1])])
        raise self._refuse(f"it calls {_name_of(function, '')}, which is not known to be pure")

    def _construct(self, kind: type[Any], args: list[Any], options: dict[str, Any]) -> Any:
        if kind in allowlist.NUMBERS and len(args) == 1 and type(args[0]) is Tracer and not options:
            if np.dtype(kind).kind != "f" and not np.can_cast(args[0].dtype, kind, "safe"):
                raise self._refuse(f"it makes a {kind.__name__} of a value; .astype has a rule")
            return self.trace.apply("astype", kind, _conversion(np.dtype(kind)), (args[0],), {})
        if kind in allowlist.TYPES:
            return self._native(kind, args, options)
        if allowlist.is_named_tuple(kind):
            new = vars(kind)["__new__"]
            return self.call(new.__func__ if type(new) is staticmethod else new, [kind, *args], options)
        raise self._refuse(f"it makes a {kind.__name__}, which is not known to be pure")

    def _native(self, function: Any, args: list[Any], options: dict[str, Any], *, are_items: bool = False) -> Any:
        """Call a non-Python function; its arguments must not call back and must not be written to."""
        if "out" in options or "where" in options:
            raise self._refuse(f"it calls {_name_of(function, '')} with out= or where=")
        values = [arg if are_items else self._argument(arg) for arg in args]
        named = {key: self._argument(arg) for key, arg in options.items()}
        result = function(*values, **named)
        kind = type(result)
        if kind in (list, dict, set) or kind in allowlist.ITERATORS:
            is_new = function in (sorted, divmod) or isinstance(function, type) or _is_copy(function)
            if is_new or kind in allowlist.ITERATORS:
                self._made(result)
        return result

    def _argument(self, value: Any) -> Any:
        if isinstance(value, type):
            if value not in allowlist.TYPES:
                raise self._refuse(f"it hands {value.__name__} to a function, which may do more than compute")
            return value
        self._operand(value)
        if type(value) is np.ndarray and value.flags.writeable:
            value = value.view()
            value.flags.writeable = False
        return value

    def _special(self, function: Any) -> Callable[[list[Any], dict[str, Any]], Any] | None:
        """Return the replacement of a builtin that calls functions or looks up attributes; None for others."""
        name = _SPECIAL.get(function) if _is_hashable(function) else None
        return None if name is None else getattr(self, name)

    def _getattr(self, args: list[Any], options: dict[str, Any]) -> Any:
        value, name, *default = args
        if type(name) is not str or options:
            raise self._refuse("it looks up an attribute that depends on the values")
        try:
            return self.attribute(value, name)
        except AttributeError:
            if not default:
                raise
            return default[0]

    def _hasattr(self, args: list[Any], options: dict[str, Any]) -> bool:
        try:
            self._getattr(args, options)
        except AttributeError:
            return False
        return True

    def _type(self, args: list[Any], options: dict[str, Any]) -> Any:
        if len(args) != 1 or options:
            raise self._refuse("it makes a class")
        return type(row_of(args[0])) if type(args[0]) is Tracer else type(args[0])

    def _isinstance(self, args: list[Any], options: dict[str, Any]) -> bool:
        value, kinds = args
        for class_ in kinds if type(kinds) is tuple else (kinds,):
            if type(class_) is not type:
                raise self._refuse("it uses isinstance with a class that has a say in it")
        if type(type(value)) is not type:
            raise self._refuse("it uses isinstance on an object of a class with a metaclass")
        return isinstance(value, kinds)

    def _map(self, args: list[Any], options: dict[str, Any]) -> Any:
        function, *rest = args
        columns = [self._iterable(column) for column in rest]
        return self._made(iter([self.call(function, list(row), {}) for row in zip(*columns, strict=False)]))

    def _reduce(self, args: list[Any], options: dict[str, Any]) -> Any:
        function, values, *initial = args
        items = [*initial, *self._iterable(values)]
        return functools.reduce(lambda state, element: self.call(function, [state, element], {}), items)

    def _asarray(self, args: list[Any], options: dict[str, Any]) -> Any:
        if len(args) == 1 and type(args[0]) is Tracer and not options and isinstance(row_of(args[0]), np.ndarray):
            return args[0]
        return self._native(np.asarray, args, options)

    # --- Python functions ---

    def _run(self, function: types.FunctionType, args: list[Any], options: dict[str, Any]) -> Any:
        code = function.__code__
        steps = program(code)
        if isinstance(steps, str):
            raise self._refuse(steps)
        if self._depth >= _DEEPEST:
            raise self._refuse("it calls itself too often")
        self.codes.append(code)
        frame = Frame(function, self._bound(function, args, options))
        self._depth += 1
        place = 0
        while frame.result is MISSING:
            self._steps += 1
            if self._steps > _MOST_STEPS:
                raise self._refuse("it takes too many steps to look into")
            run, arg = steps[place]
            jump = run(self, frame, arg)
            place = place + 1 if jump is None else jump
        self._depth -= 1
        if code.co_flags & inspect.CO_GENERATOR:
            return self._made(iter(frame.yielded))
        return frame.result

    def _bound(self, function: types.FunctionType, args: list[Any], options: dict[str, Any]) -> dict[str, Any]:
        code = function.__code__
        names, number = code.co_varnames, code.co_argcount
        variables = dict(zip(names[:number], args, strict=False))
        extra = args[number:]
        rest = number + code.co_kwonlyargcount
        more: dict[str, Any] = {}
        for key, value in options.items():
            if key in variables or key not in names[code.co_posonlyargcount : rest]:
                if key in variables or not code.co_flags & inspect.CO_VARKEYWORDS:
                    raise TypeError(f"{function.__name__}() got an unexpected argument {key!r}")
                more[key] = value
            else:
                variables[key] = value
        defaults = function.__defaults__ or ()
        by_name = {**dict(zip(names[number - len(defaults) : number], defaults, strict=True))}
        by_name.update(function.__kwdefaults__ or {})
        for name in names[:rest]:
            if name not in variables:
                if name not in by_name:
                    raise TypeError(f"{function.__name__}() missing a required argument: {name!r}")
                variables[name] = self._load(by_name[name], f"the default of {name}")
        if code.co_flags & inspect.CO_VARARGS:
            variables[names[rest]] = tuple([self._item(arg) for arg in extra])
            rest += 1
        elif extra:
            raise TypeError(f"{function.__name__}() takes {number} arguments, and {len(args)} were given")
        if code.co_flags & inspect.CO_VARKEYWORDS:
            variables[names[rest]] = self._made({key: self._item(value) for key, value in more.items()})
        return variables


_GETTERS: Final = (vars(object)["__getattribute__"], vars(tuple)["__getattribute__"])
_FIELD: Final = type(inspect.getattr_static(collections.namedtuple("_Pair", ["left"]), "left"))
_KINDS_OF_FUNCTIONS: Final = frozenset({np.ufunc, types.BuiltinFunctionType, type(np.sum), types.FunctionType})
_SPECIAL: Final[dict[Any, str]] = {
    getattr: "_getattr",
    hasattr: "_hasattr",
    type: "_type",
    isinstance: "_isinstance",
    map: "_map",
    functools.reduce: "_reduce",
    np.asarray: "_asarray",
}


def _is_hashable(function: Any) -> bool:
    return type(function) in (types.BuiltinFunctionType, type, type(functools.reduce))


def _is_in(function: Any, table: frozenset[Any]) -> bool:
    # Functions compare by identity.
    return function in table


def _is_copy(function: Any) -> bool:
    return type(function) is types.BuiltinFunctionType and function.__name__ in ("copy", "split", "tolist")


def _look_up(kind: type[Any], name: str) -> Any:
    for base in kind.__mro__:
        if name in vars(base):
            return vars(base)[name]
    return MISSING


def _name_of(function: Any, name: str) -> str:
    text = getattr(function, "__qualname__", None) or getattr(function, "__name__", None)
    return text if isinstance(text, str) else f"{name or 'an object'}, a {type(function).__name__}"


@functools.cache
def _conversion(kind: Any) -> Any:
    return lambda trace, args, options: column_of(args[0]).astype(kind)
