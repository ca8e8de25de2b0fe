"""``select``: some of the columns of each element, and what else gives leaves other names or another order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from daskdist.core.block import Block, Bundle, Rows
from daskdist.core.node import Facts, Node, Transformation
from daskdist.core.primitive import Compute, Primitive, same_nesting
from daskdist.core.spec import ElementSpec, known_spec
from daskdist.core.structure import Structure
from daskdist.errors import ArgumentError

# Returns another nest of the same values.
Regroup = Callable[[Any], Any]


@dataclass(frozen=True, eq=False)
class RegroupedLeaves(Transformation):
    """The leaves of each element, or some of them, in another nest."""

    name = "select"
    facts = Facts(compute=True, keeps_count=True, per_worker=True)

    @property
    def regroup(self) -> Regroup:
        """The function that builds the nest of a new element from that of an old one."""
        raise NotImplementedError

    @property
    def spec(self) -> ElementSpec:
        spec = self.source.spec
        places, structure = regrouped(spec.structure, self.regroup)
        return ElementSpec(structure, tuple(spec.leaves[place] for place in places))

    def with_nulls(self) -> Node:
        return self.with_inputs((self.source.with_nulls(),))

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        return Compute(inputs[0], RegroupRows(self.regroup), self.name, factor=1)

    def of_reader(self) -> Node:
        """Return the operation, or a source that reads the same columns itself.

        Raises
        ------
        ArgumentError
            There is no such column. This is not checked if columns are known only when data is read.
        """
        source, last = self.source, []
        while source.facts.by_count or source.facts.keeps_order:
            last.append(source)
            (source,) = source.inputs
        reader = source.reading(self.regroup)
        if reader is None:
            known_spec(self)
            return self
        for node in reversed(last):
            reader = node.with_inputs((reader,))
        return reader


@dataclass(frozen=True, eq=False)
class Select(RegroupedLeaves):
    """Some columns of each element.

    Parameters
    ----------
    columns
        The name of one column, whose value becomes the element; or the names of several. A name is a key of a dict, a
        field of a named tuple or the place in a tuple.
    """

    columns: str | int | tuple[str | int, ...]

    def __post_init__(self) -> None:
        names = self.columns if isinstance(self.columns, tuple) else (self.columns,)
        for name in names:
            if not isinstance(name, (str, int)) or isinstance(name, bool):
                raise ArgumentError(
                    f"select: {name!r:.80} is not the name of a column; give names, or places in tuples"
                )
        if not names:
            raise ArgumentError("select: there are no columns; give at least one name")

    @property
    def regroup(self) -> Regroup:
        return partial(picked, self.name, self.columns)


@dataclass(frozen=True)
class RegroupRows:
    """A function that gives the leaves of rows another nest."""

    regroup: Regroup

    def __call__(self, rows: Rows) -> Rows:
        if not len(rows):
            # Rows of an empty block may have the structure of a function's input, as the function was not called.
            return rows
        places, structure = regrouped(rows.structure, self.regroup)
        if isinstance(rows, Block):
            return Block(structure, [rows.leaves[place] for place in places], rows.label, rows.origin)
        items = [tuple([item[place] for place in places]) for item in map(rows.item, range(len(rows)))]
        return Bundle(structure, items, rows.label)


def regrouped(structure: Structure, regroup: Regroup) -> tuple[tuple[int, ...], Structure]:
    """Return the places of the leaves that a regrouped element has, and its structure.

    >>> structure = Structure.of({"a": 0, "b": (0, 0)})[1]
    >>> regrouped(structure, lambda nest: (nest["b"], nest["a"]))
    ((1, 2, 0), ((value, value), value))
    """
    return Structure.of(regroup(structure.pack(range(structure.num_leaves))))


def alike(nodes: Sequence[Node], primitives: Sequence[Primitive]) -> tuple[Primitive, ...]:
    """Return streams that can be concatenated, with the dicts of all elements in the order of the first dataset's."""
    structures = [None if (spec := known_spec(node)) is None else spec.structure for node in nodes]
    first = next((structure for structure in structures if structure is not None), None)
    streams = list(primitives)
    for number, structure in enumerate(structures):
        if first is not None and structure is not None and structure.places != first.places:
            regroup = partial(_in_order_of, first)
            streams[number] = Compute(streams[number], RegroupRows(regroup), "select", factor=1)
    return same_nesting(streams)


def _in_order_of(structure: Structure, nest: Any) -> Any:
    return structure.pack(Structure.of(nest)[0])


def columns_of_nest(nest: Any) -> list[str | int]:
    """Return the names of the columns of a nest: keys of a dict, fields of a named tuple, places in a tuple."""
    if isinstance(nest, dict):
        return list(nest)
    if isinstance(nest, tuple):
        return list(getattr(nest, "_fields", range(len(nest))))
    return []


def by_column(nest: Any) -> dict[str | int, Any]:
    """Return the values of the columns of a nest by name."""
    return dict(zip(columns_of_nest(nest), nest.values() if isinstance(nest, dict) else nest, strict=True))


def picked(operation: str, columns: Any, nest: Any) -> Any:
    """Return some columns of a nest.

    Raises
    ------
    ArgumentError
        There is no such column; the message begins with the operation.

    >>> picked("select", ("b", "a"), {"a": 1, "b": 2, "c": 3}), picked("select", "c", {"a": 1, "b": 2, "c": 3})
    ({'b': 2, 'a': 1}, 3)
    """
    names = columns if isinstance(columns, tuple) else (columns,)
    if not isinstance(nest, (dict, tuple)):
        raise ArgumentError(f"{operation}: there is no column {names[0]!r}; elements are lone values, without columns")
    values = by_column(nest)
    for name in names:
        if name not in values:
            known = ", ".join(map(repr, values))
            raise ArgumentError(f"{operation}: there is no column {name!r}; there are {known}")
    if not isinstance(columns, tuple):
        return values[columns]
    if isinstance(nest, tuple) and not hasattr(nest, "_fields"):
        return tuple(values[name] for name in columns)
    return {name: values[name] for name in columns}


def column_function(operation: str, column: str | int, spec: ElementSpec, *, is_length: bool) -> Callable[..., Any]:
    """Return a function of elements, called as one of users, that returns the value of a column.

    Parameters
    ----------
    operation
        The operation, for messages.
    column
        The name of the column.
    spec
        The spec of the elements.
    is_length
        Whether the lengths of arrays are returned in their place.

    Raises
    ------
    ArgumentError
        There is no such column.
    """
    nest = spec.packed
    leaf = picked(operation, column, nest)
    place = list(by_column(nest)).index(column)
    is_dict = isinstance(nest, dict)

    def value(*items: Any) -> Any:
        return items[0][column] if is_dict else items[place]

    if is_length and getattr(leaf, "shape", None):
        return lambda *items: len(value(*items))
    if getattr(leaf, "dtype", None) == np.bool_:
        # Classes and keys are integers.
        return lambda *items: 1 * value(*items)
    return value
