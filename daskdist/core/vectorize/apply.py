"""A function of one element, called once for the rows of a block if that gives bitwise identical results.

For each block, the function is run on columns (`daskdist.core.vectorize.sandbox`). It is called row by row instead
if it does anything that is not known to be pure or has no rule, if the loop over these rows could warn, raise or give
other bits, or if the results for the first rows differ.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import numpy as np

from daskdist.call_progress import calling
from daskdist.core.block import Batches, Block, Bundle, Rows, from_items
from daskdist.core.functions.kept_values import keep_as_they_are, owners_of
from daskdist.core.functions.user_function import UserFunction
from daskdist.core.node import Node, lower
from daskdist.core.ragged import Ragged
from daskdist.core.spec import ElementSpec, SpecUnknown
from daskdist.core.structure import LONE, Nested, Structure
from daskdist.core.vectorize.proof import problem, same_bits
from daskdist.core.vectorize.rules import RULES
from daskdist.core.vectorize.sandbox import Sandbox
from daskdist.core.vectorize.tracer import Flagged, NotVectorisable, Trace
from daskdist.errors import ArgumentError, UserFunctionError

Made = TypeVar("Made", Block, Rows)

logger: Final = logging.getLogger("daskdist")

# Fewer rows are computed one by one: running a function on columns takes as long as 30 calls, or 300 calls of a trivial
# function.
_FEWEST_ROWS: Final = 24
# The number of rows that are computed both ways.
_COMPARED_ROWS: Final = 1024
# The number of functions whose comparison is remembered.
_REMEMBERED: Final = 1024
_DIFFERED: Final = "results differed on the first block"

# The results of the latest comparisons in this process, by the code that was run, the operations, and the columns'
# structure, shapes and dtypes: True if both ways gave the same.
_SAME: Final[dict[Any, bool]] = {}
# Function -> the reason why its latest row-by-row block was computed so, for `explain`.
_FELL_BACK: Final[weakref.WeakKeyDictionary[UserFunction, str]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Run:
    """The results of a function for all rows.

    Parameters
    ----------
    leaves, structure
        The columns of the results and their nesting.
    names
        The names of the operations, in order.
    key
        The key in `_SAME` of the comparison of the results with those row by row.
    """

    leaves: list[Any]
    structure: Structure
    names: tuple[str, ...]
    key: Any


@dataclass(frozen=True)
class Vectorised:
    """A function of one element, applied to blocks.

    It is created for each pass, so that its memory is valid for that pass only.
    """

    function: UserFunction
    # The structure, shapes and dtypes of columns -> the reason why it is called row by row.
    _refused: dict[Any, str] = field(default_factory=dict, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        # Functions that it calls may be redefined between two passes.
        self.function.refresh()

    def __reduce__(self) -> tuple[Any, ...]:
        return Vectorised, (self.function,)

    def __dask_tokenize__(self) -> object:
        return "Vectorised", self.function.__dask_tokenize__()

    def __call__(self, block: Block, by_row: Callable[[Block], Made]) -> Made | Block:
        """Return the results of the function for the rows of a block."""
        if len(block) < _FEWEST_ROWS or not self.function.may_vectorize:
            return by_row(block)
        layout = block.structure, *[(leaf.dtype, leaf.shape[1:]) for leaf in block.leaves]
        if layout in self._refused:
            return by_row(block)
        try:
            run = self.run(block)
        except (Flagged, FloatingPointError) as error:
            self._fall_back(str(error))
            return by_row(block)
        except Exception as error:
            self._refused[layout] = _clause(error)
            return by_row(block)
        is_same = _SAME.get(run.key)
        at_once = Block(run.structure, run.leaves, block.label, block.origin)
        if is_same is None:
            return self._compared(block, at_once, by_row, run.key)
        return at_once if is_same else by_row(block)

    def column(self, rows: Rows, by_row: Callable[[Rows], Any]) -> Any:
        """Return the results of the function, which are single values, as one array, shape ``(num_rows,)``."""
        if not isinstance(rows, Block):
            return by_row(rows)
        (column,) = self(rows, lambda block: Block(LONE, [by_row(block)], block.label)).leaves
        return column

    def run(self, block: Block) -> Run:
        """Call the function once for all rows.

        Raises
        ------
        NotVectorisable
            It does something that has no rule or is not known to be pure.
        Flagged, FloatingPointError
            The loop over these rows could warn, raise, or give other bits.
        """
        # The loop warns or raises according to np.seterr, so columns with any floating-point error are left to the
        # loop.
        states: Any = {kind: "ignore" if state == "ignore" else "raise" for kind, state in np.geterr().items()}
        with np.errstate(**states), calling(self.function):
            return traced(self.function, block.structure, block.leaves, len(block))

    def _fall_back(self, reason: str) -> None:
        if self.function not in _FELL_BACK:
            logger.info(
                "%s: %s is called row by row for some blocks: %s", self.function.operation, self.function, reason
            )
        _FELL_BACK[self.function] = reason

    def _compared(self, block: Block, at_once: Block, by_row: Callable[[Block], Made], key: Any) -> Made | Block:
        if len(block) <= _COMPARED_ROWS:
            expected = by_row(block)
            self._remember(key, block, _are_same(at_once, expected))
            return expected
        sample = np.linspace(0, len(block) - 1, _COMPARED_ROWS).astype(np.intp)
        try:
            is_same = _are_same(at_once.take(sample), by_row(block.take(sample)))
        except Exception:
            # Row by row, another row may fail first.
            return by_row(block)
        self._remember(key, block, is_same)
        return at_once if is_same else by_row(block)

    def _remember(self, key: Any, block: Block, is_same: bool) -> None:
        if is_same and not any(map(_is_varied, block.leaves)):
            # Identical rows prove nothing; a later block may.
            return
        _SAME[key] = is_same
        for oldest in list(_SAME)[:-_REMEMBERED]:
            _SAME.pop(oldest, None)

    def result_bytes(self, source: Node) -> int | None:
        """Return the bytes of the result for an element of a node; None if a call for all rows does not show it.

        It is None for functions that are called row by row; these are not called here.
        """
        if not self.function.may_vectorize or _are_batches(source):
            return None
        try:
            run = self._tried(source.spec)
        except Exception:
            return None
        return sum(int(leaf.nbytes) // len(leaf) for leaf in run.leaves)

    def _tried(self, spec: ElementSpec) -> Run:
        # Call the function for made-up rows.
        with np.errstate(all="ignore"):
            leaves = [leaf.grouped(_FEWEST_ROWS).example(0, 1) for leaf in spec.leaves]
            return traced(self.function, spec.structure, leaves, _FEWEST_ROWS)

    def note(self, source: Node) -> str:
        """Return the note of `explain` about the function on the elements of a node; nothing is read."""
        if not self.function.may_vectorize:
            return "row by row: Options(vectorize=False)"
        if _are_batches(source):
            return "row by row: its elements are batches"
        try:
            spec = source.spec
        except SpecUnknown:
            return "decided at the first block"
        if any(leaf.shape is None or None in leaf.shape for leaf in spec.leaves):
            return "decided at the first block: its rows may differ in length"
        try:
            run = self._tried(spec)
        except Exception as error:
            return f"row by row: {_clause(error)}"
        if _SAME.get(run.key) is False:
            return f"row by row: {_DIFFERED}"
        text = f"vectorised: {', '.join(dict.fromkeys(run.names))}" if run.names else "vectorised"
        fell_back = _FELL_BACK.get(self.function)
        return text if fell_back is None else f"{text}; some blocks row by row: {fell_back}"


def traced(function: UserFunction, structure: Structure, leaves: Sequence[Any], num_rows: int) -> Run:
    """Call a function once for all rows.

    Parameters
    ----------
    function
        The function of one element.
    structure
        The structure of an element.
    leaves
        The columns, shape ``(num_rows, ...)`` each.
    num_rows
        The number of rows.

    Raises
    ------
    NotVectorisable
        It does something that has no rule or is not known to be pure.
    Flagged
        These rows may need to be computed one by one.
    """
    trace = Trace(num_rows, RULES, problem, narrow=function.narrow)
    for leaf in leaves:
        if isinstance(leaf, Ragged):
            raise NotVectorisable("its elements differ in length")
    sandbox = Sandbox(trace)
    result = sandbox.call_with(function.function, structure.pack([trace.enter(leaf) for leaf in leaves]))
    result_leaves, of_result = Structure.of(tuple(result) if type(result) is list else result)
    columns = [trace.leaf(leaf) for leaf in result_leaves]
    if trace.failure is not None:
        raise NotVectorisable(trace.failure)
    if not columns:
        raise NotVectorisable("it returns nothing")
    layout = tuple([(leaf.dtype, leaf.shape[1:]) for leaf in leaves])
    results = of_result, *[(column.dtype, column.shape[1:]) for column in columns]
    key = function.operation, function.narrow, tuple(sandbox.codes), tuple(trace.names), structure, layout, results
    return Run(columns, of_result, tuple(trace.names), key)


def call_at_once(
    function: UserFunction, structure: Structure, columns: Sequence[Any], num_rows: int, where: str
) -> tuple[list[Any], Structure]:
    """Call a function that is written for many rows.

    Parameters
    ----------
    function
        The function, of elements whose leaves have rows along axis 0.
    structure
        The structure of an element.
    columns
        The rows, shape ``(num_rows, ...)`` each.
    num_rows
        The number of rows.
    where
        The name of the rows in messages.

    Raises
    ------
    UserFunctionError
        The function raised, or a leaf of its result has another number of rows.
    """
    result, result_structure = function.leaves(structure.pack(columns), lambda: where)
    leaves = list(result)
    del result
    keep_as_they_are(leaves, 0, lambda: owners_of(columns))
    for path, leaf in zip(result_structure.paths, leaves, strict=True):
        shape = getattr(leaf, "shape", None)
        if not shape or shape[0] != num_rows:
            kind = f"{leaf.dtype}{list(shape)}" if shape is not None else f"a {type(leaf).__name__}"
            raise UserFunctionError(
                f"{function.operation}: {function} returned {kind} for its leaf {path or '(the element)'}, on {where}; "
                f"with vectorized=True it gets {num_rows} rows along axis 0, and must return as many"
            )
    return leaves, result_structure


def blocks_of(rows: Bundle | Batches, operation: str) -> list[Block]:
    """Return batches, or elements of any shape, as blocks of rows: those of one shape together, others one by one.

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
        raise ArgumentError(f"{operation}: vectorized=True needs arrays, but the elements have datasets")
    alone = [[Ragged.of([leaf]) if isinstance(leaf, Ragged) else leaf[np.newaxis] for leaf in item] for item in items]
    return [Block(rows.structure, leaves, rows.label) for leaves in alone]


def _clause(error: Exception) -> str:
    if isinstance(error, NotVectorisable):
        return str(error)
    text = str(error).partition("\n")[0]
    return f"on a tracer of its element it raises {type(error).__name__}{': ' if text else ''}{text}"


def _are_batches(node: Node) -> bool:
    # Grouped elements are batches, and stay so through operations that pass elements on or return one for each.
    facts = node.facts
    if facts.keeps_count or facts.keeps_spec or facts.keeps_rows or facts.keeps_order:
        return any(map(_are_batches, node.inputs))
    return bool(lower(node).grouped)


def _are_same(rows: Rows, expected: Rows) -> bool:
    """Return whether two blocks are bitwise identical; all NaN count as identical."""
    return (
        isinstance(rows, Block)
        and isinstance(expected, Block)
        and rows.structure == expected.structure
        and not any(isinstance(leaf, Ragged) for leaf in expected.leaves)
        and all(map(same_bits, rows.leaves, expected.leaves))
    )


def _is_varied(column: Any) -> bool:
    return bool((column[1:] != column[:-1]).any())
