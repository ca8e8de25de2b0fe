"""The names that the code of a function refers to, read from its bytecode."""

from __future__ import annotations

import dis
import hashlib
import re
import types
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

# Attributes that follow a name directly: ("sub", "helper") for ``pkg.sub.helper``.
Chain = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Import:
    """An import statement inside a function.

    Parameters
    ----------
    module
        The name of the module.
    level
        The number of leading dots.
    names
        The names of ``from module import names``; none for ``import module``.
    chains
        The chains of attributes that are read from the module; for ``import package.module``, from the package.
    """

    module: str
    level: int
    names: tuple[str, ...]
    chains: frozenset[Chain]


@dataclass(frozen=True, slots=True)
class References:
    """The references of a code object, its nested functions included.

    Parameters
    ----------
    digest
        A hash of its instructions, constants and names, but not of line numbers or file names.
    global_names, free_names
        Each global name and each free variable that is read, with the chains of attributes that are read from it.
    assigned_globals, assigned_free
        The names that it assigns or deletes.
    imports
        Its import statements.
    names
        All names in it, including those of attributes and methods.
    defines_classes
        Whether it defines classes, whose code looks names up in another way.
    may_change_objects
        Whether it stores items or attributes, or calls a method with the name of one that changes its object.
    """

    digest: bytes
    global_names: dict[str, frozenset[Chain]]
    free_names: dict[str, frozenset[Chain]]
    assigned_globals: frozenset[str]
    assigned_free: frozenset[str]
    imports: tuple[Import, ...]
    names: frozenset[str]
    defines_classes: bool
    may_change_objects: bool


_CHANGING_NAMES: Final = """
    add append appendleft clear difference_update discard extend extendleft fill insert intersection_update
    move_to_end pop popitem popleft put remove reverse rotate setdefault setflags sort symmetric_difference_update
    update __setitem__
"""
_CHANGING_METHODS: Final = frozenset(_CHANGING_NAMES.split())
_CHANGING_STEPS: Final = frozenset({"STORE_SUBSCR", "DELETE_SUBSCR", "STORE_SLICE", "STORE_ATTR", "DELETE_ATTR"})
# Cached by the identity of a code object, for its lifetime.
_KNOWN: Final[dict[int, tuple[weakref.ref[types.CodeType], References]]] = {}


def references_of(code: types.CodeType) -> References:
    """Return the references of a code object, which is immutable; cached for its lifetime."""
    known = _KNOWN.get(id(code))
    if known is not None and known[0]() is code:
        return known[1]
    references = _BytecodeReader().read(code)
    place = id(code)
    forget = weakref.ref(code, lambda gone: _KNOWN.get(place, (None,))[0] is gone and _KNOWN.pop(place))
    _KNOWN[place] = forget, references
    return references


class _BytecodeReader:
    """A collector of the references of a code object and of those nested in it."""

    def __init__(self) -> None:
        self.globals: dict[str, set[Chain]] = {}
        self.free: dict[str, set[Chain]] = {}
        self.assigned_globals: set[str] = set()
        self.assigned_free: set[str] = set()
        # The module, level and names of each import, and the variables that it sets with what each is of the module.
        self.imports: list[tuple[str, int, tuple[str, ...], list[tuple[str, Chain]]]] = []
        # The chains of attributes that are read from each variable, whatever code it is a variable of.
        self.variables: dict[str, set[Chain]] = {}
        self.names: set[str] = set()
        self.defines_classes = False
        self.may_change_objects = False

    def read(self, code: types.CodeType) -> References:
        self._visit(code, frozenset(code.co_freevars))
        return References(
            digest_of(code),
            {name: frozenset(chains) for name, chains in sorted(self.globals.items())},
            {name: frozenset(self.free.get(name, ())) for name in code.co_freevars},
            frozenset(self.assigned_globals),
            frozenset(self.assigned_free),
            tuple(
                Import(module, level, names, self._read_from(variables))
                for module, level, names, variables in self.imports
            ),
            frozenset(self.names),
            self.defines_classes,
            self.may_change_objects,
        )

    def _visit(self, code: types.CodeType, free: frozenset[str]) -> None:
        # `free` are the names in this code that are free variables of the outermost one.
        self.names.update(code.co_names)
        if _CHANGING_METHODS.intersection(code.co_names):
            self.may_change_objects = True
        steps = [step for step in dis.get_instructions(code) if step.opname not in ("EXTENDED_ARG", "CACHE")]
        enclosed = frozenset((*code.co_cellvars, *code.co_freevars))
        for place, step in enumerate(steps):
            name = step.argval
            if "_FAST" in step.opname:
                accesses = _accesses(step)
                for number, (verb, variable) in enumerate(accesses, 1):
                    # Variables of nested functions are loaded to create these, too.
                    if verb == "LOAD" and variable not in enclosed:
                        chain = _chain(steps, place) if number == len(accesses) else ()
                        self.variables.setdefault(variable, set()).add(chain)
                continue
            match step.opname:
                case "LOAD_GLOBAL" | "LOAD_NAME" | "LOAD_FROM_DICT_OR_GLOBALS":
                    self.globals.setdefault(name, set()).add(_chain(steps, place))
                case "LOAD_DEREF" | "LOAD_CLASSDEREF" | "LOAD_FROM_DICT_OR_DEREF":
                    read = self.free if name in free else self.variables
                    read.setdefault(name, set()).add(_chain(steps, place))
                case "STORE_GLOBAL" | "DELETE_GLOBAL":
                    self.assigned_globals.add(name)
                case "STORE_DEREF" | "DELETE_DEREF" if name in free:
                    self.assigned_free.add(name)
                case "IMPORT_NAME":
                    level, names = (before.argval for before in steps[place - 2 : place])
                    variables = _imported(steps[place + 1 :], len(names) if names else 1)
                    self.imports.append((name, level, tuple(names or ()), variables))
                case "LOAD_BUILD_CLASS":
                    self.defines_classes = True
                case opname if opname in _CHANGING_STEPS:
                    self.may_change_objects = True
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._visit(constant, free.intersection(constant.co_freevars) - set(code.co_cellvars))

    def _read_from(self, variables: list[tuple[str, Chain]]) -> frozenset[Chain]:
        names = {name: self.variables.get(name, set()) | self.globals.get(name, set()) for name, _ in variables}
        return frozenset((*first, *chain) for name, first in variables for chain in names[name])


def _chain(steps: list[dis.Instruction], place: int) -> Chain:
    chain: list[str] = []
    for step in steps[place + 1 :]:
        if step.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
            break
        chain.append(step.argval)
    return tuple(chain)


def _accesses(step: dis.Instruction) -> list[tuple[str, str]]:
    # What an instruction does with which variables; some do something with two.
    names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
    return list(zip(re.findall("LOAD|STORE|DELETE", step.opname), names, strict=False))


def _imported(steps: list[dis.Instruction], num_variables: int) -> list[tuple[str, Chain]]:
    # The variables that an import sets, and the chain of attributes of the module or package that each is.
    variables: list[tuple[str, Chain]] = []
    chain: Chain = ()
    for step in steps:
        if step.opname == "IMPORT_FROM":
            # Several without a variable between them are of ``import package.module.further as variable``.
            chain = (*chain, step.argval)
        for verb, name in _accesses(step):
            if verb == "STORE":
                variables.append((name, chain))
                chain = ()
                break
        if len(variables) == num_variables:
            break
    return variables


def digest_of(code: types.CodeType) -> bytes:
    """Return a hash of a code object that does not depend on its place, comments or where it was compiled."""
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    parts = repr((counts, names)).encode(), code.co_code, code.co_exceptiontable, *_constants(code.co_consts)
    return digest_of_parts(parts)


def digest_of_parts(parts: Iterable[bytes]) -> bytes:
    """Return a hash of several parts, which also depends on the length of each."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def _constants(values: Iterable[Any]) -> Iterator[bytes]:
    for value in values:
        if isinstance(value, types.CodeType):
            yield digest_of(value)
        elif isinstance(value, tuple):
            yield f"tuple {len(value)}".encode()
            yield from _constants(value)
        elif isinstance(value, frozenset):
            # The order of its items differs between processes.
            yield b"set " + b" ".join(sorted(b"".join(_constants([constant])) for constant in value))
        else:
            yield f"{type(value).__name__} {value!r}".encode()
