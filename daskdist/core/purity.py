"""Whether a function only computes: what it, and all it calls, may change besides what it made itself."""

from __future__ import annotations

import builtins
import dis
import functools
import types
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from daskdist.core.tracer import NotVectorisable

# Of the builtins, those that change nothing. Many of them fail on stand-ins, and that is as well.
_BUILTIN_NAMES: Final = """
    abs all any bool bytes callable complex dict divmod enumerate filter float format frozenset getattr hasattr int
    isinstance issubclass len list map max min pow range repr reversed round set slice sorted str sum tuple type zip
    ArithmeticError AttributeError BaseException Exception FloatingPointError IndexError KeyError LookupError
    OverflowError RuntimeError TypeError ValueError ZeroDivisionError
"""
_BUILTINS: Final = frozenset(_BUILTIN_NAMES.split())
# Libraries whose functions only compute, and what of them does not.
_LIBRARIES: Final = frozenset({"numpy", "math", "operator", "_operator", "itertools"})
_CHANGING_NAMES: Final = """
    setitem delitem iadd iconcat imul isub methodcaller random copyto fill_diagonal place put put_along_axis putmask
    save savetxt savez savez_compressed load fromfile memmap seterr seterrcall setbufsize set_printoptions
"""
_CHANGING: Final = frozenset(_CHANGING_NAMES.split())
# Methods that change a list, a dict, a set or an array.
_METHOD_NAMES: Final = """
    add append clear difference_update discard extend fill insert intersection_update itemset partition pop popitem
    put remove resize reverse setdefault setfield setflags sort symmetric_difference_update update
"""
_METHODS: Final = frozenset(_METHOD_NAMES.split())
# Methods that are called without their name: of operators, for instance.
_IMPLICIT: Final = {
    "__getitem__",
    "__getattr__",
    "__getattribute__",
    "__len__",
    "__iter__",
    "__bool__",
    "__array__",
} | {name for name in vars(NDArrayOperatorsMixin) if name.startswith("__") and not hasattr(object, name)} - {
    "__slots__",
    "__array_priority__",
}
_MOST_ITEMS: Final = 10_000
_PLAIN: Final = (int, float, complex, str, bytes, type(None), type(Ellipsis), slice, range, np.generic, np.dtype)


def objection(function: Callable[..., Any]) -> str | None:
    """Why one call of a function may not stand for many, as a clause; None where it may.

    Its code and what it refers to are looked at, and so is that of all it calls: whether it sets a variable or
    an attribute, changes a list it shares with others, or uses what is not known to leave all as it was.
    """
    reach = _Reach()
    try:
        reach.visit(function, "it")
        reach.finish()
    except NotVectorisable as error:
        return str(error)
    return None


class _Reach:
    """All that a function refers to, from one row to the next."""

    def __init__(self) -> None:
        # By identity, and so that none is freed and its identity given to another.
        self.seen: dict[int, Any] = {}
        self.methods: set[str] = set()
        self.changes: set[str] = set()
        self.containers: list[str] = []
        self.objects: list[tuple[str, Any]] = []
        self.depth = 0

    def visit(self, value: Any, name: str) -> None:
        if id(value) in self.seen or isinstance(value, _PLAIN):
            return
        self.seen[id(value)] = value
        if isinstance(value, (list, set, dict, tuple, frozenset, np.ndarray)):
            self._visit_container(value, name)
        elif isinstance(value, functools.partial):
            self.depth += 1
            for each in (value.func, value.args, value.keywords):
                self.visit(each, name)
        elif isinstance(value, types.MethodType):
            self.depth += 1
            self.visit(value.__self__, name)
            self.visit(value.__func__, name)
        elif _only_computes(value):
            return
        elif isinstance(value, types.FunctionType):
            self._visit_function(value)
        elif hasattr(value, "__dict__") and not isinstance(value, (type, types.ModuleType)):
            self._visit_object(value, name)
        else:
            kind = "" if hasattr(value, "__name__") else f", a {type(value).__name__}"
            raise NotVectorisable(f"it uses {name}{kind}, which may do more than compute")

    def _visit_container(self, value: Any, name: str) -> None:
        if isinstance(value, np.ndarray):
            if value.dtype == object:
                raise NotVectorisable(f"it uses {name}, an array of objects")
        else:
            if len(value) > _MOST_ITEMS:
                raise NotVectorisable(f"it uses {name}, which has too many items to look at")
            for each in value.values() if isinstance(value, dict) else value:
                self.visit(each, f"what is in {name}")
        if not isinstance(value, (tuple, frozenset)):
            self.containers.append(name)

    def _visit_object(self, value: Any, name: str) -> None:
        self.objects.append((name, value))
        self.methods |= _IMPLICIT
        for key, each in vars(value).items():
            self.visit(each, f"{name}.{key}")
        if callable(value):
            self.depth += 1
            self.visit(type(value).__call__, name)

    def _visit_function(self, function: types.FunctionType) -> None:
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self.visit(default, "a default")
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        self.depth += 1
        self._visit_code(function.__code__, function.__globals__, cells, is_top=self.depth == 1)

    def _visit_code(self, code: types.CodeType, variables: dict[str, Any], cells: dict[str, Any], is_top: bool) -> None:
        steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
        module: types.ModuleType | None = None
        for place, step in enumerate(steps):
            name, of, module = step.argval, module, None
            match step.opname:
                case "LOAD_GLOBAL" | "LOAD_NAME" | "LOAD_DEREF" | "LOAD_CLASSDEREF":
                    module = self._visit_value(_value_of(name, variables, cells), name)
                case "LOAD_ATTR" | "LOAD_METHOD" if of is not None:
                    module = self._visit_value(getattr(of, name, None), f"{of.__name__}.{name}")
                case "LOAD_ATTR" | "LOAD_METHOD" | "LOAD_SUPER_ATTR":
                    self.methods.add(name)
                case "STORE_GLOBAL" | "DELETE_GLOBAL":
                    raise NotVectorisable(f"it sets the variable {name}")
                case "STORE_DEREF" | "DELETE_DEREF" if name in cells:
                    raise NotVectorisable(f"it sets the variable {name}")
                case "STORE_ATTR" | "DELETE_ATTR":
                    raise NotVectorisable(f"it sets the attribute {name}")
                case "STORE_SUBSCR" | "DELETE_SUBSCR" | "STORE_SLICE":
                    if not (is_top and _is_own(steps, place, code)):
                        self.changes.add("items")
                case "IMPORT_NAME" if name.partition(".")[0] not in _LIBRARIES:
                    raise NotVectorisable(f"it imports {name}")
        inner = {name: cell for name, cell in cells.items() if name not in code.co_cellvars}
        for each in code.co_consts:
            if isinstance(each, types.CodeType):
                self._visit_code(each, variables, inner, is_top=False)

    def _visit_value(self, value: Any, name: str) -> types.ModuleType | None:
        # A module is only a step on the way to what is used of it.
        if isinstance(value, types.ModuleType) and value.__name__ not in ("random", "numpy.random"):
            return value
        self.visit(value, name)
        return None

    def finish(self) -> None:
        """Look at methods of objects, and for what changes containers."""
        done: set[tuple[int, str]] = set()
        while missing := {(place, name) for place in range(len(self.objects)) for name in self.methods} - done:
            done |= missing
            for place, name in missing:
                label, value = self.objects[place]
                for kind in type(value).__mro__[:-1]:
                    method = vars(kind).get(name)
                    self.visit(method.fget if isinstance(method, property) else method, f"{label}.{name}")
        if self.methods & _CHANGING:
            raise NotVectorisable(f"it uses {min(self.methods & _CHANGING)}, which may do more than compute")
        if self.containers and (self.changes or self.methods & _METHODS):
            raise NotVectorisable(f"it may change {self.containers[0]}, which all rows share")


def _only_computes(value: Any) -> bool:
    name, module = getattr(value, "__name__", ""), getattr(value, "__module__", None) or type(value).__module__
    if isinstance(value, type):
        # A named tuple is a structure.
        is_structure = issubclass(value, tuple) and hasattr(value, "_fields")
        if not is_structure and module == "builtins":
            return name in _BUILTINS
        return is_structure or (module.partition(".")[0] in _LIBRARIES and not module.startswith("numpy.random"))
    if isinstance(value, np.ufunc):
        return True
    if isinstance(value, types.BuiltinFunctionType) and not isinstance(value.__self__, (types.ModuleType, type(None))):
        return False
    if module == "builtins":
        return callable(value) and name in _BUILTINS and getattr(builtins, name, None) is value
    is_of_library = module.partition(".")[0] in _LIBRARIES and not module.startswith("numpy.random")
    return is_of_library and callable(value) and name not in _CHANGING


def _value_of(name: str, variables: dict[str, Any], cells: dict[str, Any]) -> Any:
    if name in cells:
        try:
            return cells[name].cell_contents
        except ValueError:
            return None
    return variables.get(name, getattr(builtins, name, None))


def _is_own(steps: list[dis.Instruction], place: int, code: types.CodeType) -> bool:
    # Whether what is stored into is the element, or was made in the function: `d["x"] = ...`.
    if place < 2 or steps[place - 1].opname not in ("LOAD_CONST", "LOAD_FAST"):
        return False
    if steps[place - 2].opname != "LOAD_FAST":
        return False
    name = steps[place - 2].argval
    made_by = [before.opname for before, step in pairwise(steps) if step.opname == "STORE_FAST" and step.argval == name]
    is_element = name in code.co_varnames[: code.co_argcount] and not made_by
    return is_element or (bool(made_by) and all(each.startswith("BUILD_") for each in made_by))
