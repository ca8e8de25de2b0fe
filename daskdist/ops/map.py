"""``map``: a function of each element, called on the worker that has it or, with ``device=True``, on its replica."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice
from typing import Any, Final

import numpy as np

from daskdist.cached_property import cached_property
from daskdist.call_progress import calling
from daskdist.core.array_pool import NUMBERS
from daskdist.core.block import Batches, Block, Bundle, Rows, from_items, merge
from daskdist.core.cardinality import counted
from daskdist.core.columns import PLAIN, column_of, plain_leaves_of
from daskdist.core.failing.origin import Origin
from daskdist.core.functions.kept_values import keep_as_they_are, owners_of
from daskdist.core.functions.user_function import UserFunction, numbers_in
from daskdist.core.node import Facts, Node, SpecFromCalls, walk
from daskdist.core.primitive import Compute, Primitive
from daskdist.core.randomness.seed import SeedsInCall
from daskdist.core.spec import ElementSpec, learned_spec
from daskdist.core.structure import LONE, Structure
from daskdist.core.vectorize.apply import Vectorised, blocks_of, call_at_once
from daskdist.errors import ArgumentError, UserFunctionError

# Results become arrays after so many rows: more of Python's own objects do not fit in a processor's cache.
_PART_ROWS: Final = 512
# The kinds of dtypes of results that are compared with what they were when they were returned.
_COMPARED: Final = f"{NUMBERS}mM"
# Results of at most so many bytes, or so many times the bytes of the arguments, are not large.
_FEW_BYTES: Final = 1024
_FEW_TIMES: Final = 4
# Lists, such as the numbers of the words of a line, are often meant as arrays.
_LISTS: Final = ". A returned list is a tuple of its items; for one array, return numpy.asarray(items, dtype)"


@dataclass(frozen=True, eq=False)
class Map(SpecFromCalls):
    """The result of a function for each element; after ``batch``, for each batch.

    Parameters
    ----------
    function
        Returns an element for an element.
    vectorized
        True if it takes and returns many elements, with rows along axis 0; False if it is called for each; None if it
        is written for one, and may be called for many if the result is the same.
    in_order
        Whether elements keep the order of the input; otherwise blocks come as they finish.
    """

    function: UserFunction
    vectorized: bool | None = None
    in_order: bool = True

    name = "map"
    facts = Facts(compute=True, keeps_count=True, per_worker=True)
    may_have_ragged_rows = False

    def learn_spec(self) -> ElementSpec:
        return spec_after(self.function, self.source.spec, is_of_rows=bool(self.vectorized))

    @cached_property
    def has_large_results(self) -> bool:
        if self.vectorized:
            return False
        result_bytes = result_bytes_at_once(self.function, self.source)
        argument_bytes = self.source.spec.num_bytes if result_bytes is not None else 0
        return result_bytes is None or result_bytes > max(_FEW_BYTES, _FEW_TIMES * (argument_bytes or 0))

    @property
    def note(self) -> str:
        """Describe whether the function is called for many rows at once, and if not, why; nothing is read."""
        if self.vectorized is None:
            return Vectorised(self.function).note(self.source)
        return "vectorised: given whole blocks" if self.vectorized else "row by row: vectorized=False"

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        function: Callable[[Rows], Rows] = MapRows(self.function)
        if self.vectorized is None:
            function = MapColumns(MapRows(self.function), Vectorised(self.function))
        elif self.vectorized:
            function = MapBlocks(self.function)
        return Compute(
            inputs[0],
            function,
            "map",
            factor=1,
            in_order=self.in_order,
            costly=self.function,
            may_be_large=self.may_be_large,
        )


def result_bytes_at_once(function: UserFunction, source: Node) -> int | None:
    """Return the bytes of a function's result for an element of a node; None if a call for all rows does not show it.

    It is None for functions that are called row by row; no such function is called here.
    """
    return Vectorised(function).result_bytes(source) if _has_known_spec(source) else None


def _has_known_spec(source: Node) -> bool:
    # Return whether the spec is known without calls of functions of users, other than those of arithmetic.
    return not any(
        node.has_large_results
        if isinstance(node, Map)
        else node.inputs and not (node.facts.keeps_spec or node.facts.levels)
        for node in walk(source)
    )


@dataclass(frozen=True, eq=False)
class MapOnDevice(Map):
    """The result of a function for each element, computed on the device of the element's replica.

    If the pipeline is not distributed, it is computed in this process, one whole element after the other.
    """

    # Strategies apply the function after all other operations.
    facts = Facts(keeps_count=True, per_worker=True, on_device=True)

    @property
    def note(self) -> str:
        return "on the device of the element's replica"

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        return Compute(inputs[0], MapRows(self.function), "map", factor=1)

    def _arguments(self) -> Iterator[tuple[str, Any]]:
        yield from super()._arguments()
        yield "device", True


def check_alone(
    *, num_parallel_calls: int | None = None, deterministic: bool | None = None, vectorized: bool | None = None
) -> None:
    """Check that ``map`` has no option besides ``device=True`` that decides how a function is called.

    Raises
    ------
    ArgumentError
        Another option is given.
    """
    options = {"num_parallel_calls": num_parallel_calls, "deterministic": deterministic, "vectorized": vectorized}
    for argument, value in options.items():
        if value is not None:
            raise ArgumentError(
                f"map: {argument} is {value!r}, but device=True maps the elements of a replica whole and in order. "
                f"Leave {argument} out"
            )


def spec_after(function: UserFunction, spec: ElementSpec, *, is_of_rows: bool = False) -> ElementSpec:
    """Return the spec of a function's results for elements of a spec; ``is_of_rows`` if it is written for many rows.

    Raises
    ------
    SpecUnknown
        The spec depends on real elements.
    """

    def try_one(unknown: int, value: float | None) -> ElementSpec:
        if is_of_rows:
            columns = [leaf.grouped(2).example(unknown, value) for leaf in spec.leaves]
            leaves, structure = call_at_once(function, spec.structure, columns, 2, "two made-up rows")
            return ElementSpec.of_rows(structure, leaves)
        results, structure = function.leaves(spec.example(unknown, value), lambda: "a made-up element")
        return ElementSpec.of(structure.pack(results))

    return learned_spec(try_one, numbers_in(function.function), spec)


@dataclass(frozen=True)
class MapRows:
    """A function that maps the elements of a block or bundle one by one."""

    function: UserFunction

    def __call__(self, rows: Rows) -> Rows:
        elements = iter(rows.elements())
        parts: list[Rows] = []
        structure: Structure | None = None
        part_rows = _PART_ROWS if isinstance(rows, Block) else max(len(rows), 1)
        with SeedsInCall() as seeds:
            for start in range(0, len(rows), part_rows):
                stop = min(start + part_rows, len(rows))
                part = rows if stop - start == len(rows) else rows.slice(start, stop)
                values: list[Any] = []
                # The last part takes the rest, so that the iterator sees its end.
                part_elements = elements if stop == len(rows) else islice(elements, stop - start)
                shared: list[tuple[Any, Any]] = []
                with calling(self.function, values):
                    structure = self._call_each(part, part_elements, values, seeds, structure, shared)
                self._check_unchanged(shared, part)
                parts.append(self._rows_of(part, values, structure))
        result = merge(parts, rows) if len(parts) > 1 else parts[0] if parts else Bundle(rows.structure, [], rows.label)
        if isinstance(result, Block) and isinstance(rows, Block):
            return Block(result.structure, result.leaves, rows.label, rows.origin)
        return result

    def _call_each(
        self,
        rows: Rows,
        elements: Iterable[Any],
        values: list[Any],
        seeds: SeedsInCall,
        structure: Structure | None,
        shared: list[tuple[Any, Any]],
    ) -> Structure:
        # Add the leaves of each result to ``values``, unconverted if they are plain. One list for all rows: a tuple for
        # each row would make the garbage collector scan all of them repeatedly. Arrays that something else could change
        # are copied; those of the first row are added to ``shared``, each with its copy.
        user = self.function
        function = user.of_items()
        leaves_of: Callable[[Any], Sequence[Any] | None] | None = (
            None if structure is None else plain_leaves_of(structure)
        )
        is_lone = structure == LONE
        index, argument_owners = 0, lru_cache(partial(_owners_in, rows))
        is_tuple = rows.structure.treespec.type is tuple

        def where() -> str:
            return rows.where(len(values) if is_lone else index)

        for element in elements:
            seeds.argument, seeds.number = element, 0
            try:
                result = function(*element) if is_tuple else function(element)
            except Exception as error:
                raise user.failed(error, where()) from error
            if is_lone and values and type(result) in PLAIN:
                values.append(result)
                if type(result) is np.ndarray:
                    result = None
                    keep_as_they_are(values, len(values) - 1, argument_owners)
                continue
            leaves = None if leaves_of is None else leaves_of(result)
            if leaves is None:
                leaves, nesting = user.flattened(result, where)
                if structure is None:
                    structure, leaves_of, is_lone = nesting, plain_leaves_of(nesting), nesting == LONE
                    # Use the type that later rows have.
                    leaves = leaves_of(result) or leaves
                elif nesting != structure:
                    raise UserFunctionError(
                        f"map: {user} returned the structure {nesting} on {where()}, "
                        f"but {structure} before; every element needs the same"
                        + (_LISTS if type(result) is list else "")
                    )
            place, originals = len(values), [] if values else list(leaves)
            values.extend(leaves)
            result = leaves = None
            keep_as_they_are(values, place, argument_owners, num_others=1 if originals else 0)
            pairs = zip(originals, values, strict=False)
            shared += [pair for pair in pairs if pair[0] is not pair[1] and isinstance(pair[0], np.ndarray)]
            index += 1
        return structure  # type: ignore[return-value]

    def _check_unchanged(self, shared: Sequence[tuple[Any, Any]], rows: Rows) -> None:
        # Calls in several threads would overwrite an array that all of them fill before it is copied.
        for array, copy in shared:
            if array.dtype.kind in _COMPARED and not np.array_equal(array, copy, equal_nan=True):
                raise UserFunctionError(
                    f"map: {self.function} changed the array that it had returned on {rows.where(0)} in a later call, "
                    "so that several rows could be the last one; return a copy, such as array.copy()"
                )

    def _rows_of(self, rows: Rows, values: list[Any], structure: Structure) -> Rows:
        number = structure.num_leaves
        # Arrays that are results of batches are not copied.
        if isinstance(rows, Block) or np.ndarray not in set(map(type, values)):
            columns = [column_of(values[leaf::number], narrow=self.function.narrow) for leaf in range(number)]
            if columns and all(column is not None for column in columns):
                origin = rows.origin if isinstance(rows, Block) else Origin(rows.label, is_exact=False)
                return Block(structure, columns, rows.label, origin)
        items = [
            self.function.flattened(
                structure.pack(values[index * number : (index + 1) * number]),
                lambda index=index: rows.where(index),  # type: ignore[misc]
            )[0]
            for index in range(len(rows))
        ]
        if isinstance(rows, Block):
            return from_items(structure, items, rows.label, rows.origin)
        return Bundle(structure, items, rows.label)


def _owners_in(rows: Rows) -> frozenset[int]:
    if isinstance(rows, Batches):
        return _owners_in(rows.rows)
    items = [rows.leaves] if isinstance(rows, Block) else [rows.item(index) for index in range(len(rows))]
    return owners_of([leaf for item in items for leaf in item])


@dataclass(frozen=True)
class MapColumns:
    """A function that maps a block with one call if that gives the same, otherwise row by row."""

    by_row: MapRows
    vectorised: Vectorised

    def __call__(self, rows: Rows) -> Rows:
        return self.vectorised(rows, self.by_row) if isinstance(rows, Block) else self.by_row(rows)


@dataclass(frozen=True)
class MapBlocks:
    """A function that maps the rows of a block by a user's function of many rows.

    Batches are rows with an additional axis: those of one shape are passed together, others one by one.
    """

    function: UserFunction

    def __call__(self, rows: Rows) -> Rows:
        if not len(rows):
            return Bundle(rows.structure, [], rows.label)
        if isinstance(rows, Block):
            return self._on(rows)
        blocks = [self._on(block) for block in blocks_of(rows, "map")]
        structure = blocks[0].structure
        for block in blocks:
            if block.structure != structure:
                raise UserFunctionError(
                    f"map: {self.function} returned the structure {block.structure} on rows of "
                    f"{rows.label or 'this data'}, but {structure} before; every element needs the same"
                )
        items = [block.item(index) for block in blocks for index in range(len(block))]
        return Bundle(structure, items, rows.label)

    def _on(self, block: Block) -> Block:
        where = f"{counted(len(block), 'row')} of {block.label or 'a block'}"
        leaves, structure = call_at_once(self.function, block.structure, block.leaves, len(block), where)
        return Block(structure, leaves, block.label, block.origin)
