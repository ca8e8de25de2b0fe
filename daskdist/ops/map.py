"""``map``: a function of each element, called where that is made; or, with ``device=True``, where it is used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, Final

from daskdist.core.block import Block, Bundle, Rows, from_items, merge
from daskdist.core.columns import PLAIN, column_of, plain_leaves_of
from daskdist.core.functions.user_function import UserFunction, numbers_in
from daskdist.core.node import Facts, Transformation
from daskdist.core.primitive import Compute, Primitive
from daskdist.core.randomness.seed import SeedsInCall
from daskdist.core.spec import ElementSpec, SpecUnknown, learned_spec
from daskdist.core.structure import LONE, Structure
from daskdist.core.vectorize.apply import Vectorised, blocks_of, call_at_once
from daskdist.errors import ArgumentError, UserFunctionError

# Results become arrays after so many rows: more of Python's own objects do not fit in a processor's cache.
_PART_ROWS: Final = 4096


@dataclass(frozen=True, eq=False)
class Map(Transformation):
    """Each element replaced by what the function makes of it; after ``batch``, each batch.

    Parameters
    ----------
    function
        Makes an element of an element.
    vectorized
        True where it makes many elements of many, with rows along axis 0; False where it is called for each; None
        where it is written for one, and may be called for many if that makes no difference.
    in_order
        Whether elements come in the order of the input's; else block by block as they are done.
    """

    function: UserFunction
    vectorized: bool | None = None
    in_order: bool = True

    name = "map"
    facts = Facts(compute=True, keeps_count=True, per_worker=True)
    may_have_ragged_rows = False

    @cached_property
    def _spec(self) -> ElementSpec | SpecUnknown:
        spec = self.source.spec
        try:
            numbers = numbers_in(self.function.function)
            return learned_spec(lambda unknown, value: self._tried(spec, unknown, value), numbers, spec)
        except SpecUnknown as unknown:
            return unknown

    def _tried(self, spec: ElementSpec, unknown: int, value: float | None) -> ElementSpec:
        if not self.vectorized:
            return _tried(self.function, spec, unknown, value)
        columns = [leaf.grouped(2).example(unknown, value) for leaf in spec.leaves]
        leaves, structure = call_at_once(self.function, spec.structure, columns, 2, "two made-up rows")
        return ElementSpec.of_rows(structure, leaves)

    @property
    def spec(self) -> ElementSpec:
        if isinstance(self._spec, SpecUnknown):
            raise self._spec
        return self._spec

    @property
    def note(self) -> str:
        """Tells if the function is called for many rows at once, and if not, why; found without reading anything."""
        if self.vectorized is None:
            return Vectorised(self.function).note(self.source)
        return "vectorised: given whole blocks" if self.vectorized else "row by row: vectorized=False"

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        function: Callable[[Rows], Rows] = MapRows(self.function)
        if self.vectorized is None:
            function = MapColumns(MapRows(self.function), Vectorised(self.function))
        elif self.vectorized:
            function = MapBlocks(self.function)
        return Compute(inputs[0], function, "map", factor=1, in_order=self.in_order)


@dataclass(frozen=True, eq=False)
class MapOnDevice(Map):
    """Each element replaced by what the function makes of it, on the device of the replica that is given the element.

    Where a pipeline is not distributed, that is here; the function is given whole elements, one after the other.
    """

    # Nothing changes places with it: it is taken off at the end.
    facts = Facts(keeps_count=True, per_worker=True, on_device=True)

    @property
    def note(self) -> str:
        return "on the device of the replica that is given the element"

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        return Compute(inputs[0], MapRows(self.function), "map", factor=1)

    def _arguments(self) -> Iterator[tuple[str, Any]]:
        yield from super()._arguments()
        yield "device", True


def check_alone(
    *, num_parallel_calls: int | None = None, deterministic: bool | None = None, vectorized: bool | None = None
) -> None:
    """Check that ``map`` is given nothing else with ``device=True`` that says how a function is called.

    Raises
    ------
    ArgumentError
        It is.
    """
    given = {"num_parallel_calls": num_parallel_calls, "deterministic": deterministic, "vectorized": vectorized}
    for argument, value in given.items():
        if value is not None:
            raise ArgumentError(
                f"map: {argument} is {value!r}, and device=True: what a replica is given is mapped as it comes, whole "
                f"and in order. Leave {argument} out"
            )


def spec_after(function: UserFunction, spec: ElementSpec) -> ElementSpec:
    """Return the spec of a function's results for whole elements.

    Raises
    ------
    SpecUnknown
        It cannot be told without real ones.
    """
    numbers = numbers_in(function.function)
    return learned_spec(lambda unknown, value: _tried(function, spec, unknown, value), numbers, spec)


def _tried(function: UserFunction, spec: ElementSpec, unknown: int, value: float | None) -> ElementSpec:
    leaves, structure = function.leaves(spec.example(unknown, value), lambda: "a made-up element")
    return ElementSpec.of(structure.pack(leaves))


@dataclass(frozen=True)
class MapRows:
    """The function over the elements of a block or bundle."""

    function: UserFunction

    def __call__(self, rows: Rows) -> Rows:
        elements = iter(self.function.loop_limit.loop(rows.elements(), len(rows)))
        parts: list[Rows] = []
        structure: Structure | None = None
        part_rows = _PART_ROWS if isinstance(rows, Block) else max(len(rows), 1)
        with SeedsInCall() as seeds:
            for start in range(0, len(rows), part_rows):
                stop = min(start + part_rows, len(rows))
                part = rows if stop - start == len(rows) else rows.slice(start, stop)
                values: list[Any] = []
                # The last part takes all that is left, so that the iterator sees its end.
                part_elements = elements if stop == len(rows) else islice(elements, stop - start)
                structure = self._call_each(part, part_elements, values, seeds, structure)
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
    ) -> Structure:
        # Add the leaves of each result to ``values``, as they were returned where they are plain. One list for all
        # rows: the garbage collector would look through a tuple for each over and over.
        user = self.function
        function = user.of_items()
        leaves_of: Callable[[Any], Sequence[Any] | None] | None = (
            None if structure is None else plain_leaves_of(structure)
        )
        is_lone = structure == LONE
        is_tuple = rows.structure.treespec.type is tuple
        index = 0

        def where() -> str:
            return rows.where(len(values) if is_lone else index)

        for element in elements:
            seeds.argument, seeds.number = element, 0
            try:
                result = function(*element) if is_tuple else function(element)
            except Exception as error:
                raise user.failed(error, where()) from error
            if is_lone and type(result) in PLAIN:
                values.append(result)
                continue
            leaves = None if leaves_of is None else leaves_of(result)
            if leaves is None:
                leaves, nesting = user.flattened(result, where)
                if structure is None:
                    structure, leaves_of, is_lone = nesting, plain_leaves_of(nesting), nesting == LONE
                    # The type that the leaves of later rows have.
                    leaves = leaves_of(result) or leaves
                elif nesting != structure:
                    raise UserFunctionError(
                        f"map: {user} returned the structure {nesting} on {where()}, "
                        f"and {structure} before; every element needs the same"
                    )
            values.extend(leaves)
            index += 1
        return structure  # type: ignore[return-value]

    def _rows_of(self, rows: Rows, values: list[Any], structure: Structure) -> Rows:
        number = structure.num_leaves
        if isinstance(rows, Block):
            columns = [column_of(values[leaf::number], narrow=self.function.narrow) for leaf in range(number)]
            if columns and all(column is not None for column in columns):
                return Block(structure, columns, rows.label, rows.origin)
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


@dataclass(frozen=True)
class MapColumns:
    """The function over the elements of a block at once where that is the same, else over each."""

    by_row: MapRows
    vectorised: Vectorised

    def __call__(self, rows: Rows) -> Rows:
        return self.vectorised(rows, self.by_row) if isinstance(rows, Block) else self.by_row(rows)


@dataclass(frozen=True)
class MapBlocks:
    """A function of many rows over the rows of a block.

    Batches are rows too, of one row more axis: those of one shape are given together, others each alone.
    """

    function: UserFunction

    def __call__(self, rows: Rows) -> Rows:
        if not len(rows):
            return Bundle(rows.structure, [], rows.label)
        if isinstance(rows, Block):
            return self._on(rows)
        made = [self._on(block) for block in blocks_of(rows, "map")]
        structure = made[0].structure
        for block in made:
            if block.structure != structure:
                raise UserFunctionError(
                    f"map: {self.function} returned the structure {block.structure} on rows of "
                    f"{rows.label or 'this data'}, and {structure} before; every element needs the same"
                )
        items = [block.item(index) for block in made for index in range(len(block))]
        return Bundle(structure, items, rows.label)

    def _on(self, block: Block) -> Block:
        where = f"{len(block)} rows of {block.label or 'a block'}"
        leaves, structure = call_at_once(self.function, block.structure, block.leaves, len(block), where)
        return Block(structure, leaves, block.label, block.origin)
