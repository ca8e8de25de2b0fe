"""A function of one element, applied to all rows of a block at once where that gives the same to the last bit.

Three things have to hold before it is trusted. Its code, and that of all it calls, changes nothing but what it
made itself, so that one call may stand for many. Called with stand-ins (`daskdist.core.tracer`) it does only what
has a rule. And on the first block of each shape and dtype, the results are compared with those row by row. What
fails one of them is called row by row, in this process for good.
"""

from __future__ import annotations

import builtins
import dis
import functools
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, TypeVar

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from daskdist.core.block import Batches, Block, Bundle, Rows, from_items
from daskdist.core.function import UserFunction
from daskdist.core.node import Node, lower
from daskdist.core.ragged import Ragged
from daskdist.core.spec import SpecUnknown, TensorSpec
from daskdist.core.structure import Leaves, Nested, Structure, call_with
from daskdist.core.tracer import KINDS, NotVectorisable, StandIn, Trace
from daskdist.errors import ArgumentError, UserFunctionError

Made = TypeVar("Made", Block, Rows)

# Rows of the first block that are computed both ways.
_COMPARED_ROWS: Final = 4096
# Functions of which it is remembered whether they are trusted.
_REMEMBERED: Final = 1024


@dataclass
class Verdict:
    """What is known of a function on columns of one shape and dtype.

    Parameters
    ----------
    reason
        Why it is called row by row, as a clause; None while it need not be.
    is_trusted
        Whether a first block came out the same both ways.
    """

    reason: str | None = None
    is_trusted: bool = False


# Of this process, by the function's key and the columns' structure, shapes and dtypes; the latest.
_VERDICTS: Final[dict[Any, Verdict]] = {}


@dataclass(frozen=True)
class Vectorised:
    """A function of one element, for blocks.

    Parameters
    ----------
    function
        The function.
    key
        The same for the same function in every process.
    """

    function: UserFunction
    key: str

    @classmethod
    def of(cls, function: UserFunction) -> Vectorised:
        """With a key made of the function's code and what it refers to."""
        from dask.tokenize import tokenize

        return cls(function, tokenize(function))

    def __call__(self, block: Block, by_row: Callable[[Block], Made]) -> Made | Block:
        """What the function makes of each row.

        Parameters
        ----------
        block
            The elements.
        by_row
            Does it row by row.
        """
        if len(block) < 2:
            # One row proves nothing.
            return by_row(block)
        verdict = _verdict(self._known(block.structure, [(leaf.dtype, leaf.shape[1:]) for leaf in block.leaves]))
        if verdict.reason is None and not verdict.is_trusted:
            verdict.reason = objection(self.function.function)
        if verdict.reason is not None:
            return by_row(block)
        if not verdict.is_trusted:
            return self._compared(block, by_row, verdict)
        try:
            return self._at_once(block)
        except Exception:
            # Row by row, the error says on which row, if it is one at all.
            return by_row(block)

    def _compared(self, block: Block, by_row: Callable[[Block], Made], verdict: Verdict) -> Made | Block:
        try:
            # What there is to warn of, the calls row by row do.
            with np.errstate(all="ignore"):
                at_once = self._at_once(block)
        except Exception as error:
            verdict.reason = _clause(error)
            return by_row(block)
        if len(block) <= _COMPARED_ROWS:
            expected = by_row(block)
            verdict.is_trusted = _are_same(at_once, expected)
            verdict.reason = None if verdict.is_trusted else _DIFFERED
            return expected
        sample = np.linspace(0, len(block) - 1, _COMPARED_ROWS).astype(np.intp)
        try:
            verdict.is_trusted = _are_same(at_once.take(sample), by_row(block.take(sample)))
        except Exception:
            # The first row that fails is another one, perhaps.
            return by_row(block)
        verdict.reason = None if verdict.is_trusted else _DIFFERED
        return at_once if verdict.is_trusted else by_row(block)

    def _at_once(self, block: Block) -> Block:
        leaves, structure, _ = traced(self.function.function, block.structure, block.leaves, len(block))
        return Block(structure, leaves, block.label, block.origin)

    def note(self, source: Node) -> str:
        """What `explain` says of the function on the elements of a node; nothing is read."""
        if _are_batches(source):
            return "row by row: its elements are batches"
        reason = objection(self.function.function)
        if reason is not None:
            return f"row by row: {reason}"
        try:
            spec = source.spec
        except SpecUnknown:
            return "decided at the first block"
        if any(None in leaf.shape for leaf in spec.leaves):
            return "decided at the first block: its rows may differ in length"
        known = _VERDICTS.get(self._known(spec.structure, [(leaf.dtype, leaf.shape) for leaf in spec.leaves]))
        if known is not None and known.reason is not None:
            return f"row by row: {known.reason}"
        leaves = [_made_up(leaf) for leaf in spec.leaves]
        try:
            with np.errstate(all="ignore"):
                names = traced(self.function.function, spec.structure, leaves, 2)[2]
        except Exception as error:
            return f"row by row: {_clause(error)}"
        return f"vectorised: {', '.join(dict.fromkeys(names))}" if names else "vectorised"

    def _known(self, structure: Structure, layout: list[Any]) -> Any:
        return self.key, structure, tuple(layout)


_DIFFERED: Final = "results differed on the first block"


def traced(function: Any, structure: Structure, leaves: Any, num_rows: int) -> tuple[list[Any], Structure, list[str]]:
    """Call a function once for all rows.

    Parameters
    ----------
    function
        Of one element.
    structure
        Of an element.
    leaves
        The columns, ``(num_rows, ...)`` each.
    num_rows
        The number of rows.

    Returns
    -------
    leaves, structure, names
        The columns of the results and how they nest, and what was done.

    Raises
    ------
    NotVectorisable
        It does what has no rule, or it caught the exception that said so.
    """
    trace = Trace(num_rows)
    for leaf in leaves:
        if isinstance(leaf, Ragged):
            raise NotVectorisable("its elements differ in length")
        if not isinstance(leaf, np.ndarray) or leaf.dtype.kind not in KINDS:
            raise NotVectorisable(f"its elements have a leaf of {getattr(leaf, 'dtype', type(leaf).__name__)}")
    element = structure.pack([StandIn(trace, np.ascontiguousarray(leaf)) for leaf in leaves])
    result = call_with(function, element)
    found, of_result = Structure.of(tuple(result) if type(result) is list else result)
    columns = [trace.leaf(leaf) for leaf in found]
    if trace.failure is not None:
        raise NotVectorisable(trace.failure)
    if not columns:
        raise NotVectorisable("it returns nothing")
    return columns, of_result, trace.names


def call_at_once(
    function: UserFunction, structure: Structure, columns: Sequence[Any], num_rows: int, where: str
) -> tuple[Leaves, Structure]:
    """Call a function that is written for many rows.

    Parameters
    ----------
    function
        Of elements whose leaves have rows along axis 0.
    structure
        Of an element.
    columns
        The rows, ``(num_rows, ...)`` each.
    num_rows
        The number of rows.
    where
        What a message calls them.

    Raises
    ------
    UserFunctionError
        It raised, or a leaf of what it returned has another number of rows.
    """
    leaves, found = function.leaves(structure.pack(columns), lambda: where)
    for path, leaf in zip(found.paths, leaves, strict=True):
        shape = getattr(leaf, "shape", None)
        if not shape or shape[0] != num_rows:
            what = f"{leaf.dtype}{list(shape)}" if shape is not None else f"a {type(leaf).__name__}"
            raise UserFunctionError(
                f"{function.operation}: {function} returned {what} for its leaf {path or '(the element)'}, on {where}; "
                f"with vectorized=True it is given {num_rows} rows along axis 0, and returns as many"
            )
    return leaves, found


def blocks_of(rows: Bundle | Batches, operation: str) -> list[Block]:
    """Batches, or elements of any shape, as rows: those of one shape together, else each alone.

    Raises
    ------
    ArgumentError
        A leaf is a dataset.
    """
    items = [rows.item(index) for index in range(len(rows))]
    together = from_items(rows.structure, items, rows.label)
    if isinstance(together, Block) and not any(isinstance(leaf, Ragged) for leaf in together.leaves):
        return [together]
    if any(isinstance(leaf, Nested) for item in items for leaf in item):
        raise ArgumentError(f"{operation}: vectorized=True gives rows of arrays, and the elements have datasets")
    alone = [[Ragged.of([leaf]) if isinstance(leaf, Ragged) else leaf[np.newaxis] for leaf in item] for item in items]
    return [Block(rows.structure, leaves, rows.label) for leaves in alone]


def _verdict(known: Any) -> Verdict:
    verdict = _VERDICTS.get(known)
    if verdict is None:
        verdict = _VERDICTS.setdefault(known, Verdict())
        for oldest in list(_VERDICTS)[:-_REMEMBERED]:
            _VERDICTS.pop(oldest, None)
    return verdict


def _clause(error: Exception) -> str:
    if isinstance(error, NotVectorisable):
        return str(error)
    text = str(error).partition("\n")[0]
    return f"on a stand-in for its element it raises {type(error).__name__}{': ' if text else ''}{text}"


def _are_batches(node: Node) -> bool:
    # What was grouped is batches, and stays so through what hands on elements, or makes one of each.
    facts = node.facts
    if facts.keeps_count or facts.keeps_spec or facts.keeps_rows or facts.keeps_order:
        return any(map(_are_batches, node.inputs))
    return bool(lower(node).grouped)


def _made_up(leaf: TensorSpec) -> Any:
    return leaf.grouped(2).example(0, 1)


def _are_same(given: Rows, expected: Rows) -> bool:
    """Whether two blocks are the same to the last bit; every NaN is the same."""
    return (
        isinstance(given, Block)
        and isinstance(expected, Block)
        and given.structure == expected.structure
        and all(map(_are_same_columns, given.leaves, expected.leaves))
    )


def _are_same_columns(given: Any, expected: Any) -> bool:
    if isinstance(expected, Ragged) or given.dtype != expected.dtype or given.shape != expected.shape:
        return False
    if given.dtype.kind in "mM":
        given, expected = given.view(np.int64), expected.view(np.int64)
    if given.dtype.kind != "f":
        return bool((given == expected).all())
    is_nan = np.isnan(given)
    alike = (given == expected) & (np.signbit(given) == np.signbit(expected))
    return bool((alike | (is_nan & np.isnan(expected))).all())


# --- what a function may do besides computing ---

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
