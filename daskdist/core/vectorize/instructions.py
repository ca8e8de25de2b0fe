"""The instructions of Python's bytecode, checked as they run.

Values on the stack are tracers, plain data, and callables and objects whose uses are checked. Containers hold plain
data, tracers and callables only, so that Python's implicit operations on them run no user code.
"""

from __future__ import annotations

import functools
import operator
import sys
import types
from typing import Any, Final

import numpy as np

from daskdist.core.vectorize import allowlist
from daskdist.core.vectorize.bytecode import slots_of, steps_of
from daskdist.core.vectorize.tracer import NotVectorisable, Trace, Tracer, row_of

MISSING: Final = object()
_CELL: Final[Any] = types.CellType
_NULL: Final = object()

_BINARY: Final = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
    "**": operator.pow,
    "<<": operator.lshift,
    ">>": operator.rshift,
    "&": operator.and_,
    "|": operator.or_,
    "^": operator.xor,
    "@": operator.matmul,
}
_IN_PLACE: Final[dict[str, Any]] = {
    "+": operator.iadd,
    "|": operator.ior,
    "&": operator.iand,
    "-": operator.isub,
    "^": operator.ixor,
}
_COMPARE: Final = {
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    ">=": operator.ge,
}


class Frame:
    """One call of a Python function.

    Parameters
    ----------
    function
        The function.
    variables
        The values of its parameters by name.
    """

    __slots__ = ("builtins", "function", "globals", "keywords", "result", "slots", "stack", "yielded")

    def __init__(self, function: types.FunctionType, variables: dict[str, Any]) -> None:
        self.function = function
        self.globals = function.__globals__
        self.builtins: dict[str, Any] = getattr(function, "__builtins__")  # noqa: B009
        # Local variables and cells have separate slots, as one of each may have the same name.
        self.slots: list[Any] = [variables.get(name, MISSING) for name in slots_of(function.__code__)]
        cells = function.__closure__ or ()
        self.slots[len(self.slots) - len(cells) :] = cells
        self.stack: list[Any] = []
        self.keywords: tuple[str, ...] = ()
        self.yielded: list[Any] = []
        self.result: Any = MISSING


class Machine:
    """One run of a function: its values and the effects of instructions on them.

    Parameters
    ----------
    trace
        The trace of the function's tracers.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        # The code that was run, in order.
        self.codes: list[types.CodeType] = []
        # The containers, iterators and cells that this run created, by identity.
        self._own: dict[int, Any] = {}
        self._checked: dict[int, Any] = {}
        self._steps = 0
        self._depth = 0

    def attribute(self, value: Any, name: str) -> Any:
        """Return an attribute of a value, checked."""
        raise NotImplementedError

    def call(self, function: Any, args: list[Any], options: dict[str, Any], name: str = "") -> Any:
        """Call a function, checked."""
        raise NotImplementedError

    def _refuse(self, reason: str) -> NotVectorisable:
        return self.trace.fail(reason)

    def _made(self, value: Any) -> Any:
        self._own[id(value)] = value
        return value

    # --- values ---

    def _load(self, value: Any, name: str) -> Any:
        """Return a value from outside of the run."""
        kind = type(value)
        if kind not in allowlist.IMMUTABLE and id(value) not in self._checked and id(value) not in self._own:
            reason = allowlist.impurity(value)
            if reason is not None:
                raise self._refuse(f"it uses {name}, which {reason}")
            self._checked[id(value)] = value
        return value

    def _operand(self, value: Any) -> Any:
        """Check that Python and NumPy run no user code when they compute with a value."""
        kind = type(value)
        if kind is type and value in allowlist.TYPES:
            return value
        if kind not in allowlist.OPERANDS and not allowlist.is_named_tuple(kind):
            what = f"a {kind.__name__}" if not isinstance(value, type) else value.__name__
            raise self._refuse(f"it uses {what}, which is not plain data")
        return value

    def _item(self, value: Any) -> Any:
        """Check a value that goes into a container."""
        kind = type(value)
        if kind not in allowlist.OPERANDS and kind not in allowlist.OPAQUE and not allowlist.is_named_tuple(kind):
            raise self._refuse(f"it puts a {kind.__name__} into a container, which is not plain data")
        return value

    def _iterable(self, value: Any) -> Any:
        self._operand(value)
        if type(value) in allowlist.ITERATORS and id(value) not in self._own:
            raise self._refuse("it goes on with an iterator that all rows share")
        return value

    # --- instructions: each returns the index of the next instruction after a jump, else None ---

    def _pop_top(self, frame: Frame, arg: Any) -> None:
        frame.stack.pop()

    def _push_null(self, frame: Frame, arg: Any) -> None:
        frame.stack.append(_NULL)

    def _copy(self, frame: Frame, arg: Any) -> None:
        frame.stack.append(frame.stack[-arg])

    def _swap(self, frame: Frame, arg: Any) -> None:
        stack = frame.stack
        stack[-1], stack[-arg] = stack[-arg], stack[-1]

    def _load_const(self, frame: Frame, arg: Any) -> None:
        # Constants may be any objects, because values that a function refers to are fixed as constants.
        frame.stack.append(self._load(arg, "a constant"))

    def _load_fast(self, frame: Frame, arg: tuple[int, str]) -> None:
        slot, name = arg
        value = frame.slots[slot]
        if value is MISSING:
            raise UnboundLocalError(f"local variable {name!r} is not set")
        frame.stack.append(value)

    def _load_fast_and_clear(self, frame: Frame, arg: tuple[int, str]) -> None:
        # A comprehension saves an outer variable with the name of its own, even if it is unset.
        slot, _ = arg
        frame.stack.append(frame.slots[slot])
        frame.slots[slot] = MISSING

    def _store_fast(self, frame: Frame, arg: tuple[int, str]) -> None:
        slot, _ = arg
        frame.slots[slot] = frame.stack.pop()

    def _load_global(self, frame: Frame, arg: str) -> None:
        value = frame.globals.get(arg, MISSING)
        if value is MISSING:
            value = frame.builtins.get(arg, MISSING)
        if value is MISSING:
            raise NameError(f"name {arg!r} is not defined")
        frame.stack.append(self._load(value, arg))

    def _make_cell(self, frame: Frame, arg: tuple[int, str]) -> None:
        slot, _ = arg
        cell: Any = _CELL()
        if frame.slots[slot] is not MISSING:
            cell.cell_contents = frame.slots[slot]
        frame.slots[slot] = self._made(cell)

    def _load_deref(self, frame: Frame, arg: tuple[int, str]) -> None:
        slot, name = arg
        cell = frame.slots[slot]
        value = cell.cell_contents
        frame.stack.append(value if id(cell) in self._own else self._load(value, name))

    def _store_deref(self, frame: Frame, arg: tuple[int, str]) -> None:
        slot, name = arg
        cell = frame.slots[slot]
        if id(cell) not in self._own:
            raise self._refuse(f"it sets the variable {name}")
        cell.cell_contents = frame.stack.pop()

    def _load_attr(self, frame: Frame, arg: Any) -> None:
        frame.stack.append(self.attribute(frame.stack.pop(), arg))

    def _binary_subscr(self, frame: Frame, arg: Any) -> None:
        key = frame.stack.pop()
        value = frame.stack.pop()
        frame.stack.append(self._operand(value)[self._operand(key)])

    def _store_subscr(self, frame: Frame, arg: Any) -> None:
        key, container, value = frame.stack.pop(), frame.stack.pop(), frame.stack.pop()
        kind = type(container)
        if kind is Tracer or kind is np.ndarray:
            raise self._refuse("it writes to an array")
        if kind not in (list, dict) or id(container) not in self._own:
            raise self._refuse(f"it writes to a {kind.__name__} that all rows share")
        container[self._operand(key)] = self._item(value)

    def _binary_op(self, frame: Frame, arg: Any) -> None:
        symbol, in_place = arg
        other = self._operand(frame.stack.pop())
        value = self._operand(frame.stack.pop())
        function = _BINARY[symbol]
        kind = type(value)
        if in_place and kind is Tracer:
            # For numbers, `x += 1` creates a new object.
            if isinstance(row_of(value), np.ndarray):
                raise self._refuse("it changes an array in place")
        elif in_place and kind in (np.ndarray, list, dict, set):
            if kind is np.ndarray or id(value) not in self._own or symbol not in _IN_PLACE:
                raise self._refuse(f"it changes a {kind.__name__} in place")
            frame.stack.append(_IN_PLACE[symbol](value, self._iterable(other)))
            return
        result: Any = function(value, other)
        if type(result) in (list, dict, set):
            self._made(result)
        frame.stack.append(result)

    def _compare_op(self, frame: Frame, arg: Any) -> None:
        other = frame.stack.pop()
        value = frame.stack.pop()
        if not (type(value) in allowlist.OPAQUE and type(other) in allowlist.OPAQUE):
            self._operand(value), self._operand(other)
        frame.stack.append(_COMPARE[arg](value, other))

    def _is_op(self, frame: Frame, arg: Any) -> None:
        other, value = frame.stack.pop(), frame.stack.pop()
        kinds = {type(value), type(other)}
        if kinds & {Tracer, np.ndarray} and not kinds & {type(None), type, bool, type(Ellipsis)}:
            raise self._refuse("it asks whether a value is another")
        frame.stack.append((value is not other) if arg else (value is other))

    def _contains_op(self, frame: Frame, arg: Any) -> None:
        container = self._iterable(frame.stack.pop())
        value = self._operand(frame.stack.pop())
        frame.stack.append((value not in container) if arg else (value in container))

    def _unary(self, frame: Frame, arg: Any) -> None:
        frame.stack.append(arg(self._operand(frame.stack.pop())))

    def _build_tuple(self, frame: Frame, arg: Any) -> None:
        frame.stack.append(tuple(self._popped(frame, arg)))

    def _popped(self, frame: Frame, number: int) -> list[Any]:
        if not number:
            return []
        items = frame.stack[-number:]
        del frame.stack[-number:]
        for item in items:
            if type(item) is not types.CellType:
                self._item(item)
        return items

    def _build_list(self, frame: Frame, arg: Any) -> None:
        frame.stack.append(self._made(self._popped(frame, arg)))

    def _build_set(self, frame: Frame, arg: Any) -> None:
        frame.stack.append(self._made(set(self._popped(frame, arg))))

    def _build_map(self, frame: Frame, arg: Any) -> None:
        items = self._popped(frame, 2 * arg)
        frame.stack.append(self._made(dict(zip(items[::2], items[1::2], strict=True))))

    def _build_const_key_map(self, frame: Frame, arg: Any) -> None:
        keys = frame.stack.pop()
        frame.stack.append(self._made(dict(zip(keys, self._popped(frame, arg), strict=True))))

    def _build_string(self, frame: Frame, arg: Any) -> None:
        frame.stack.append("".join(self._popped(frame, arg)))

    def _build_slice(self, frame: Frame, arg: Any) -> None:
        frame.stack.append(slice(*self._popped(frame, arg)))

    def _format_value(self, frame: Frame, arg: Any) -> None:
        convert, has_spec = arg
        spec = frame.stack.pop() if has_spec else ""
        if convert:
            self._convert_value(frame, convert)
        frame.stack.append(format(self._with_text(frame.stack.pop()), spec))

    def _convert_value(self, frame: Frame, arg: Any) -> None:
        frame.stack.append(arg(self._with_text(frame.stack.pop())))

    def _with_text(self, value: Any) -> Any:
        self._operand(value)
        if type(value) in allowlist.CONTAINERS and any(type(item) not in allowlist.IMMUTABLE for item in value):
            raise self._refuse("it makes text of a value")
        return value

    def _list_extend(self, frame: Frame, arg: Any) -> None:
        values = self._iterable(frame.stack.pop())
        frame.stack[-arg].extend(map(self._item, values))

    def _set_update(self, frame: Frame, arg: Any) -> None:
        values = self._iterable(frame.stack.pop())
        frame.stack[-arg].update(map(self._item, values))

    def _dict_update(self, frame: Frame, arg: Any) -> None:
        values = self._operand(frame.stack.pop())
        if type(values) is not dict:
            raise self._refuse(f"it takes the items of a {type(values).__name__}")
        frame.stack[-arg].update(values)

    def _list_append(self, frame: Frame, arg: Any) -> None:
        value = self._item(frame.stack.pop())
        frame.stack[-arg].append(value)

    def _set_add(self, frame: Frame, arg: Any) -> None:
        value = self._item(frame.stack.pop())
        frame.stack[-arg].add(value)

    def _map_add(self, frame: Frame, arg: Any) -> None:
        value = self._item(frame.stack.pop())
        key = self._item(frame.stack.pop())
        frame.stack[-arg][key] = value

    def _list_to_tuple(self, frame: Frame, arg: Any) -> None:
        frame.stack.append(tuple(frame.stack.pop()))

    def _unpack_sequence(self, frame: Frame, arg: Any) -> None:
        items = list(self._iterable(frame.stack.pop()))
        if len(items) != arg:
            raise ValueError(f"expected {arg} values to unpack, got {len(items)}")
        frame.stack += reversed(items)

    def _unpack_ex(self, frame: Frame, arg: Any) -> None:
        before, after = arg & 255, arg >> 8
        items = list(self._iterable(frame.stack.pop()))
        if len(items) < before + after:
            raise ValueError(f"expected at least {before + after} values to unpack, got {len(items)}")
        end = len(items) - after
        frame.stack += reversed(items[end:])
        frame.stack.append(self._made(items[before:end]))
        frame.stack += reversed(items[:before])

    def _get_iter(self, frame: Frame, arg: Any) -> None:
        values = iter(self._iterable(frame.stack.pop()))
        # A tracer's iterator would be a generator; an iterator over a list can be recognised.
        frame.stack.append(self._made(values if type(values) in allowlist.ITERATORS else iter(list(values))))

    def _for_iter(self, frame: Frame, arg: int) -> int | None:
        value = next(frame.stack[-1], MISSING)
        if value is MISSING:
            frame.stack.pop()
            return arg
        frame.stack.append(value)
        return None

    def _jump(self, frame: Frame, arg: int) -> int:
        return arg

    def _truth(self, value: Any) -> bool:
        kind = type(value)
        if kind in allowlist.OPAQUE or kind is types.MethodType:
            return True
        return bool(self._operand(value))

    def _to_bool(self, frame: Frame, arg: Any) -> None:
        frame.stack.append(self._truth(frame.stack.pop()))

    def _pop_jump_if_true(self, frame: Frame, arg: int) -> int | None:
        return arg if self._truth(frame.stack.pop()) else None

    def _pop_jump_if_false(self, frame: Frame, arg: int) -> int | None:
        return None if self._truth(frame.stack.pop()) else arg

    def _pop_jump_if_none(self, frame: Frame, arg: int) -> int | None:
        return arg if frame.stack.pop() is None else None

    def _pop_jump_if_not_none(self, frame: Frame, arg: int) -> int | None:
        return None if frame.stack.pop() is None else arg

    def _jump_if_true_or_pop(self, frame: Frame, arg: int) -> int | None:
        if self._truth(frame.stack[-1]):
            return arg
        frame.stack.pop()
        return None

    def _jump_if_false_or_pop(self, frame: Frame, arg: int) -> int | None:
        if not self._truth(frame.stack[-1]):
            return arg
        frame.stack.pop()
        return None

    def _make_function(self, frame: Frame, arg: int) -> None:
        code = frame.stack.pop()
        # The closure may be set later.
        cells: Any = tuple([_CELL() for _ in code.co_freevars])
        function = types.FunctionType(code, frame.globals, code.co_name, None, cells)
        for attribute in (8, 4, 2, 1):
            if arg & attribute:
                function = self._with_attribute(function, attribute, frame.stack.pop())
        frame.stack.append(function)

    def _set_function_attribute(self, frame: Frame, arg: int) -> None:
        function = frame.stack.pop()
        frame.stack.append(self._with_attribute(function, arg, frame.stack.pop()))

    def _with_attribute(self, function: types.FunctionType, attribute: int, value: Any) -> types.FunctionType:
        if attribute == 8:
            function_copy = types.FunctionType(
                function.__code__, function.__globals__, function.__name__, function.__defaults__, value
            )
            function_copy.__kwdefaults__ = function.__kwdefaults__
            return function_copy
        if attribute == 2:
            function.__kwdefaults__ = value
        elif attribute == 1:
            function.__defaults__ = value
        elif attribute != 4:
            # 4 stands for annotations, which are unused; others are unknown.
            raise self._refuse("it makes a function in a way for which there is no rule")
        if attribute in (1, 2):
            for default in value.values() if attribute == 2 else value:
                self._checked[id(default)] = default
        return function

    def _kw_names(self, frame: Frame, arg: Any) -> None:
        frame.keywords = arg

    def _pop_kw_names(self, frame: Frame, arg: Any) -> None:
        frame.keywords = frame.stack.pop()

    def _call(self, frame: Frame, arg: int) -> None:
        stack, names = frame.stack, frame.keywords
        frame.keywords = ()
        args = stack[len(stack) - arg :]
        del stack[len(stack) - arg :]
        function, args = self._popped_callable(frame, args)
        options = dict(zip(names, args[len(args) - len(names) :], strict=True))
        stack.append(self.call(function, args[: len(args) - len(names)], options))

    def _popped_callable(self, frame: Frame, args: list[Any]) -> tuple[Any, list[Any]]:
        """Pop a callable and its self argument; one of the two is NULL if there is no self."""
        first = frame.stack.pop()
        function = frame.stack.pop()
        if function is _NULL:
            return first, args
        return function, args if first is _NULL else [first, *args]

    def _call_function_ex(self, frame: Frame, arg: int) -> None:
        options = frame.stack.pop() if arg & 1 else {}
        args = frame.stack.pop()
        function, before = self._popped_callable(frame, [])
        if type(options) is not dict or not all(type(key) is str for key in options):
            raise self._refuse("it calls a function with options that are not a dict")
        frame.stack.append(self.call(function, [*before, *self._iterable(args)], dict(options)))

    def _return_value(self, frame: Frame, arg: Any) -> None:
        frame.result = frame.stack.pop()

    def _yield_value(self, frame: Frame, arg: Any) -> None:
        frame.yielded.append(self._item(frame.stack.pop()))
        frame.stack.append(None)

    def _import_name(self, frame: Frame, arg: str) -> None:
        names = frame.stack.pop()
        level = frame.stack.pop()
        if level or arg not in allowlist.MODULES or arg not in sys.modules:
            raise self._refuse(f"it imports {arg}")
        frame.stack.append(sys.modules[arg])
        del names

    def _import_from(self, frame: Frame, arg: str) -> None:
        frame.stack.append(self.attribute(frame.stack[-1], arg))


_run = Machine
_INSTRUCTIONS: Final[dict[str, Any]] = {
    "POP_TOP": _run._pop_top,
    "PUSH_NULL": _run._push_null,
    "COPY": _run._copy,
    "SWAP": _run._swap,
    "LOAD_CONST": _run._load_const,
    "LOAD_FAST": _run._load_fast,
    "LOAD_FAST_AND_CLEAR": _run._load_fast_and_clear,
    "STORE_FAST": _run._store_fast,
    "LOAD_GLOBAL": _run._load_global,
    "MAKE_CELL": _run._make_cell,
    "LOAD_DEREF": _run._load_deref,
    "STORE_DEREF": _run._store_deref,
    "LOAD_ATTR": _run._load_attr,
    "BINARY_SUBSCR": _run._binary_subscr,
    "STORE_SUBSCR": _run._store_subscr,
    "BINARY_OP": _run._binary_op,
    "COMPARE_OP": _run._compare_op,
    "IS_OP": _run._is_op,
    "CONTAINS_OP": _run._contains_op,
    **dict.fromkeys(("UNARY_NEGATIVE", "UNARY_POSITIVE", "UNARY_INVERT"), _run._unary),
    "UNARY_NOT": _run._unary,
    "BUILD_TUPLE": _run._build_tuple,
    "BUILD_LIST": _run._build_list,
    "BUILD_SET": _run._build_set,
    "BUILD_MAP": _run._build_map,
    "BUILD_CONST_KEY_MAP": _run._build_const_key_map,
    "BUILD_STRING": _run._build_string,
    "BUILD_SLICE": _run._build_slice,
    "FORMAT_VALUE": _run._format_value,
    "CONVERT_VALUE": _run._convert_value,
    "LIST_EXTEND": _run._list_extend,
    "SET_UPDATE": _run._set_update,
    "DICT_UPDATE": _run._dict_update,
    "DICT_MERGE": _run._dict_update,
    "LIST_APPEND": _run._list_append,
    "SET_ADD": _run._set_add,
    "MAP_ADD": _run._map_add,
    "LIST_TO_TUPLE": _run._list_to_tuple,
    "UNPACK_SEQUENCE": _run._unpack_sequence,
    "UNPACK_EX": _run._unpack_ex,
    "GET_ITER": _run._get_iter,
    "FOR_ITER": _run._for_iter,
    "TO_BOOL": _run._to_bool,
    "JUMP": _run._jump,
    "POP_JUMP_IF_TRUE": _run._pop_jump_if_true,
    "POP_JUMP_IF_FALSE": _run._pop_jump_if_false,
    "POP_JUMP_IF_NONE": _run._pop_jump_if_none,
    "POP_JUMP_IF_NOT_NONE": _run._pop_jump_if_not_none,
    "JUMP_IF_TRUE_OR_POP": _run._jump_if_true_or_pop,
    "JUMP_IF_FALSE_OR_POP": _run._jump_if_false_or_pop,
    "MAKE_FUNCTION": _run._make_function,
    "SET_FUNCTION_ATTRIBUTE": _run._set_function_attribute,
    "KW_NAMES": _run._kw_names,
    "POP_KW_NAMES": _run._pop_kw_names,
    "CALL": _run._call,
    "CALL_FUNCTION_EX": _run._call_function_ex,
    "RETURN_VALUE": _run._return_value,
    "RETURN_GENERATOR": lambda self, frame, arg: frame.stack.append(None),
    "YIELD_VALUE": _run._yield_value,
    "IMPORT_NAME": _run._import_name,
    "IMPORT_FROM": _run._import_from,
}
_UNARY: Final = {
    "UNARY_NEGATIVE": operator.neg,
    "UNARY_POSITIVE": operator.pos,
    "UNARY_INVERT": operator.invert,
    "UNARY_NOT": operator.not_,
}
# The wording of messages for unsupported instructions.
_REFUSED: Final = {
    "RAISE_VARARGS": "raises an exception",
    "LOAD_ASSERTION_ERROR": "raises an exception",
    "LOAD_SUPER_ATTR": "makes a super",
}


@functools.lru_cache(1024)
def program(code: types.CodeType) -> list[tuple[Any, Any]] | str:
    """Return the instructions of code with their arguments, or the reason why it is called row by row."""
    steps = steps_of(code)
    if isinstance(steps, str):
        return steps
    return [(_INSTRUCTIONS.get(name, _refused(name)), _UNARY.get(name, arg)) for name, arg in steps]


@functools.cache
def _refused(name: str) -> Any:
    def refuse(self: Machine, frame: Frame, arg: Any) -> None:
        raise self._refuse(f"it {_REFUSED.get(name, f'does {name}')}, for which there is no rule")

    return refuse
