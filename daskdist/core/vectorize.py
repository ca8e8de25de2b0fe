"""A function of one element, applied to all rows of a block at once where that gives the same to the last bit.

Three things have to hold before it is trusted. Its code, and that of all it calls, changes nothing but what it
made itself, so that one call may stand for many. Called with stand-ins (`daskdist.core.tracer`) it does only what
has a rule. And on the first block of each shape and dtype, the results are compared with those row by row. What
fails one of them is called row by row, in this process for good.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np

from daskdist.core.block import Batches, Block, Bundle, Rows, from_items
from daskdist.core.function import UserFunction
from daskdist.core.node import Node, lower
from daskdist.core.purity import objection
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
        function = self.function
        leaves, structure, _ = traced(
            function.function, block.structure, block.leaves, len(block), narrow=function.narrow
        )
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


def traced(
    function: Any, structure: Structure, leaves: Any, num_rows: int, *, narrow: bool = False
) -> tuple[list[Any], Structure, list[str]]:
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
    narrow
        Whether Python numbers that it returns become int32 and float32.

    Returns
    -------
    leaves, structure, names
        The columns of the results and how they nest, and what was done.

    Raises
    ------
    NotVectorisable
        It does what has no rule, or it caught the exception that said so.
    """
    trace = Trace(num_rows, narrow=narrow)
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
