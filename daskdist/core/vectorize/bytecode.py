"""The bytecode of the supported versions of Python, translated to one set of instructions.

Versions encode the same operation differently: 3.12 has `RETURN_CONST` for `LOAD_CONST` and `RETURN_VALUE`, and 3.13
has one instruction for two loads in a row. `steps_of` splits these, so that there is one implementation of each. Other
instructions keep their names, and are supported only if an implementation exists.
"""

from __future__ import annotations

import dis
import functools
import importlib.util
import inspect
import logging
import sys
import types
from typing import Any, Final

logger: Final = logging.getLogger("daskdist")

# The supported versions of Python, by the magic number of compiled files, which also differs between pre-releases of a
# version and in other implementations of Python.
VERSIONS: Final = {3495: (3, 11), 3531: (3, 12), 3571: (3, 13)}
MAGIC_NUMBER: Final = int.from_bytes(importlib.util.MAGIC_NUMBER[:2], "little")

_VERSION: Final = VERSIONS.get(MAGIC_NUMBER, sys.version_info[:2])
# Up to 3.12, the NULL for "no self" is below the callable, later above it.
_IS_NULL_FIRST: Final = _VERSION < (3, 13)
# The names of the instructions at the end of a loop: `FOR_ITER` jumps to them, and past them.
_AFTER_LOOP: Final = {(3, 11): [], (3, 12): ["END_FOR"]}.get(_VERSION, ["END_FOR", "POP_TOP"])

# An instruction's name and its argument.
Step = tuple[str, Any]

_NOTHING: Final = frozenset({"CACHE", "COPY_FREE_VARS", "EXTENDED_ARG", "NOP", "PRECALL", "RESUME"})
# Instructions whose argument is the slot of a local variable or of a cell. 3.13 encodes LOAD_CLOSURE as LOAD_FAST.
_OF_SLOTS: Final = {
    "LOAD_FAST": "LOAD_FAST",
    "LOAD_FAST_CHECK": "LOAD_FAST",
    "LOAD_CLOSURE": "LOAD_FAST",
    "LOAD_FAST_AND_CLEAR": "LOAD_FAST_AND_CLEAR",
    "STORE_FAST": "STORE_FAST",
    "MAKE_CELL": "MAKE_CELL",
    "LOAD_DEREF": "LOAD_DEREF",
    "STORE_DEREF": "STORE_DEREF",
}
_OF_TWO_SLOTS: Final = {
    "LOAD_FAST_LOAD_FAST": ("LOAD_FAST", "LOAD_FAST"),
    "STORE_FAST_LOAD_FAST": ("STORE_FAST", "LOAD_FAST"),
    "STORE_FAST_STORE_FAST": ("STORE_FAST", "STORE_FAST"),
}
# Instructions that combine several others.
_IN_A_ROW: Final[dict[str, list[Step]]] = {
    "UNARY_NOT": [("TO_BOOL", None), ("UNARY_NOT", None)],
    "BINARY_SLICE": [("BUILD_SLICE", 2), ("BINARY_SUBSCR", None)],
    "STORE_SLICE": [("BUILD_SLICE", 2), ("STORE_SUBSCR", None)],
    "FORMAT_SIMPLE": [("FORMAT_VALUE", (None, False))],
    "FORMAT_WITH_SPEC": [("FORMAT_VALUE", (None, True))],
}
_INTRINSICS: Final = {
    "INTRINSIC_UNARY_POSITIVE": "UNARY_POSITIVE",
    "INTRINSIC_LIST_TO_TUPLE": "LIST_TO_TUPLE",
}
# Up to 3.11, the names of jumps include their direction.
_JUMPS: Final = {
    **dict.fromkeys(("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT"), "JUMP"),
    **{
        f"POP_JUMP_{direction}IF_{what}": f"POP_JUMP_IF_{what}"
        for direction in ("", "FORWARD_", "BACKWARD_")
        for what in ("TRUE", "FALSE", "NONE", "NOT_NONE")
    },
}
# Instruction -> the reason why code with it is called row by row.
_REASONS: Final = {
    "PUSH_EXC_INFO": "it handles exceptions, or has a with statement",
    "BEFORE_WITH": "it handles exceptions, or has a with statement",
    "STORE_GLOBAL": "it sets a global variable",
    "DELETE_GLOBAL": "it deletes a global variable",
    "STORE_ATTR": "it sets an attribute",
    "DELETE_ATTR": "it deletes an attribute",
}


def unknown_version() -> str | None:
    """Return the reason why functions cannot be analysed under this Python, as a clause; None if they can.

    The first call logs it as a warning.
    """
    if MAGIC_NUMBER in VERSIONS:
        return None
    *names, last = [".".join(map(str, version)) for version in VERSIONS.values()]
    known = f"{', '.join(names)} and {last}"
    here = f"{sys.implementation.name} {sys.version.split()[0]}"
    _warn(f"Functions are called row by row: the bytecode of {here} is not known, only that of CPython {known}")
    return f"functions are looked into under CPython {known} only, and this is {here}"


@functools.cache
def _warn(text: str) -> None:
    logger.warning(text)


def slots_of(code: types.CodeType) -> tuple[str, ...]:
    """Return the names of a code object's slots: its local variables, its other cells, and its free variables."""
    cells = [name for name in code.co_cellvars if name not in code.co_varnames]
    return *code.co_varnames, *cells, *code.co_freevars


def steps_of(code: types.CodeType) -> list[Step] | str:
    """Return the instructions of code, or the reason why it is called row by row, as a clause.

    The argument of a jump is an index into the list; that of an instruction with a slot is the slot and its name.
    """
    if code.co_flags & (inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR | inspect.CO_ITERABLE_COROUTINE):
        return "it is a coroutine"
    translated: list[Step] = []
    place_of: dict[int, int] = {}
    steps = list(dis.get_instructions(code))
    for step in steps:
        if step.opname in _REASONS:
            # Even if it is not reached: exceptions may occur for some rows only.
            return _REASONS[step.opname]
        place_of[step.offset] = len(translated)
        translated += _taken_apart(code, step)
    names = slots_of(code)
    for place, (name, arg) in enumerate(translated):
        if isinstance(arg, _Target):
            target = place_of[arg.offset]
            if name == "FOR_ITER":
                # The instructions that are jumped over are not run.
                if [opname for opname, _ in translated[target : target + len(_AFTER_LOOP)]] != _AFTER_LOOP:
                    return "it has a loop that ends in a way which is not known"
                target += len(_AFTER_LOOP)
            translated[place] = name, target
        elif isinstance(arg, _Slot):
            if names[arg.number] != arg.name:
                return "it has variables in an order which is not known"
            translated[place] = name, (arg.number, arg.name)
    return translated


class _Target:
    """The target of a jump, by its offset."""

    def __init__(self, offset: int) -> None:
        self.offset = offset


class _Slot:
    """A local variable, or a cell."""

    def __init__(self, number: int, name: str) -> None:
        self.number = number
        self.name = name


def _taken_apart(code: types.CodeType, step: dis.Instruction) -> list[Step]:
    name, value = step.opname, step.argval
    arg = step.arg or 0
    if name in _NOTHING:
        return []
    if name in _OF_SLOTS:
        return [(_OF_SLOTS[name], _Slot(arg, value))]
    if name in _OF_TWO_SLOTS:
        numbers = arg >> 4, arg & 15
        return [(single, _Slot(*slot)) for single, *slot in zip(_OF_TWO_SLOTS[name], numbers, value, strict=True)]
    if name in _IN_A_ROW:
        return _IN_A_ROW[name]
    if step.opcode in dis.hasjrel or step.opcode in dis.hasjabs:
        return [(_JUMPS.get(name, name), _Target(value))]
    match name:
        case "RETURN_CONST":
            return [("LOAD_CONST", value), ("RETURN_VALUE", None)]
        case "LOAD_GLOBAL":
            null: list[Step] = [("PUSH_NULL", None)] if arg & 1 else []
            load: Step = ("LOAD_GLOBAL", value)
            return [*null, load] if _IS_NULL_FIRST else [load, *null]
        case "LOAD_METHOD":
            return _method(value)
        case "LOAD_ATTR" if _VERSION >= (3, 12) and arg & 1:
            return _method(value)
        case "KW_NAMES":
            return [("KW_NAMES", code.co_consts[arg])]
        case "CALL_KW":
            return [("POP_KW_NAMES", None), ("CALL", arg)]
        case "COMPARE_OP" if _VERSION >= (3, 13) and arg & 16:
            return [("COMPARE_OP", value), ("TO_BOOL", None)]
        case "IS_OP" | "CONTAINS_OP" | "MAKE_FUNCTION" | "SET_FUNCTION_ATTRIBUTE":
            return [(name, arg)]
        case "BINARY_OP":
            return [(name, (step.argrepr.removesuffix("="), step.argrepr.endswith("=")))]
        case "CALL_INTRINSIC_1":
            return [(_INTRINSICS.get(step.argrepr, step.argrepr), None)]
    return [(name, value)]


def _method(name: str) -> list[Step]:
    load: list[Step] = [("LOAD_ATTR", name), ("PUSH_NULL", None)]
    return [*load, ("SWAP", 2)] if _IS_NULL_FIRST else load
