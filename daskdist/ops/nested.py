"""Functions that return a dataset for each element, as for ``flat_map`` and ``interleave``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from daskdist.core.block import Rows, merge
from daskdist.core.cardinality import INFINITE
from daskdist.core.dataset_base import DatasetBase, computed_rows, element_spec_of, node_of
from daskdist.core.functions.user_function import UserFunction, numbers_in
from daskdist.core.node import CountingNode, ExpandingNode, Facts, Node, walk, with_each_upstream
from daskdist.core.primitive import Primitive
from daskdist.core.randomness.seed import SeedsInCall
from daskdist.core.spec import DatasetSpec, ElementSpec, MakeDataset, SpecUnknown, learned_spec
from daskdist.core.structure import with_own_arrays
from daskdist.errors import UserFunctionError
from daskdist.ops.cache import Cache
from daskdist.ops.element_random import DrawsForFunction, words_of
from daskdist.ops.snapshot import Snapshot
from daskdist.ops.with_options import Options


@dataclass(frozen=True)
class NestedSpec:
    """The facts about the datasets of elements that are known before any element.

    Parameters
    ----------
    spec
        The spec of their elements, or the reason why it is unknown.
    is_cheap
        Whether they are finite and of data in memory.
    reads_files
        Whether they read files; None if that depends on the element.
    draws
        Whether they may draw random numbers without a seed from the user.
    """

    spec: ElementSpec | SpecUnknown
    is_cheap: bool
    reads_files: bool | None = None
    draws: bool = True

    def spec_or_raise(self) -> ElementSpec:
        """Return the spec.

        Raises
        ------
        SpecUnknown
            The spec is unknown.
        """
        if isinstance(self.spec, SpecUnknown):
            raise SpecUnknown(str(self.spec))
        return self.spec


class NestedFunction(UserFunction):
    """A user's function that returns a dataset for an element."""

    def __init__(self, function: Callable[..., Any], operation: str, *, narrow: bool = False) -> None:
        super().__init__(function, operation, narrow=narrow)
        self._outlooks: dict[int, tuple[Node, NestedSpec]] = {}
        self.has_words = False

    def with_words(self) -> NestedFunction:
        """Return the same function, to be called with pairs of an element and its words, as from `paired`."""
        other = object.__new__(type(self))
        other.__dict__ = {**self.__dict__, "has_words": True}
        return other

    def dataset(self, *elements: Any, where: Callable[[], str]) -> DatasetBase:
        """Return the dataset for an element, or for several arguments.

        The last one may be a pair with words, which determine the seeds and passes of random operations in the dataset.
        """
        words = None
        if self.has_words:
            last, words = words_of(elements[-1])
            elements = (*elements[:-1], last)
        with SeedsInCall(elements, words):
            result: Any = self.of(elements, where) if len(elements) > 1 else self(elements[0], where)
        if not isinstance(result, DatasetBase):
            raise UserFunctionError(
                f"{self.operation}: {self.location} returned {type(result).__name__} {result!r:.80}, on {where()}; "
                "it must return a Dataset"
            )
        dataset: Any = with_own_arrays(result)
        if words is not None:
            dataset = dataset.__replace__(node=in_pass(node_of(dataset), words[0] >> 1))
        return dataset if self.may_vectorize else dataset.with_options(Options(vectorize=False))  # type: ignore[no-any-return]

    def nested_spec(self, source: Node, make: MakeDataset | None = None) -> NestedSpec:
        """Return the spec of the datasets, by a trial with a made-up element or with a key and a window."""
        known = self._outlooks.get(id(source))
        if known is None or known[0] is not source:
            known = self._outlooks[id(source)] = source, self._look(source, make)
        return known[1]

    def _look(self, source: Node, make: MakeDataset | None) -> NestedSpec:
        tried: list[DatasetBase] = []

        def try_one(unknown: int, value: float | None) -> ElementSpec:
            example = [source.spec.example(unknown, value)]
            if make is not None:
                key = np.int64(1 if value is None else value)
                example = [key, DatasetSpec(element=source.spec, make=make).example(unknown, value)]
            try:
                dataset = self.dataset(*example, where=lambda: "a made-up element")
                tried.append(dataset)
                return element_spec_of(dataset)
            except SpecUnknown:
                raise
            except Exception as error:
                if not tried or isinstance(error, UserFunctionError):
                    raise
                raise UserFunctionError(str(error)) from error

        spec: ElementSpec | SpecUnknown
        try:
            # A single trial first: its failure shows whether files are read.
            try_one(2, 1)
            spec = learned_spec(try_one, numbers_in(self.function), source.spec)
        except SpecUnknown as unknown:
            # Without the traceback, whose frames would be kept as long as this.
            spec = SpecUnknown(str(unknown))
        except Exception as error:
            # An OSError means that the made-up name of a file was opened.
            return NestedSpec(SpecUnknown(str(error)), False, True if isinstance(error.__cause__, OSError) else None)
        if not tried:
            return NestedSpec(spec, False)
        nodes = [node for dataset in tried for node in walk(node_of(dataset))]
        is_finite = all(node_of(dataset).cardinality != INFINITE for dataset in tried)
        is_cheap = is_finite and all(node.is_cheap for node in nodes)
        # A nested dataset is made up too, so whether it reads files is unknown.
        is_told = not any(isinstance(leaf, DatasetSpec) for leaf in source.spec.leaves)
        handed_on = any(isinstance(leaf, DatasetSpec) and leaf.draws for leaf in source.spec.leaves)
        draws = handed_on or any(node.draws for node in nodes)
        return NestedSpec(spec, is_cheap, reads_files(tried[0]) if is_told else None, draws)

    def of_one_structure(self, before: list[Rows], parts: Iterable[Rows], where: Callable[[], str]) -> list[Rows]:
        """Return the elements of a dataset, checked to have the structure of the elements before, if any.

        Raises
        ------
        UserFunctionError
            The structure differs.
        """
        parts = [rows for rows in parts if len(rows)]
        known = next((rows.structure for rows in reversed(before) if not rows.is_all_failed), None)
        for rows in parts:
            if known is not None and not rows.is_all_failed and rows.structure != known:
                raise UserFunctionError(
                    f"{self.operation}: {self.location} returned a dataset of {rows.structure} for {where()}, but of "
                    f"{known} before; all need the same structure"
                )
        return parts

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_outlooks": {}}


@dataclass(frozen=True, eq=False)
class Expansion(DrawsForFunction, ExpandingNode):
    """A node with the elements of the datasets that a function returns for elements."""

    function: NestedFunction

    name = "nested"
    facts = Facts(per_worker=True, regroups=True)
    may_have_ragged_rows = True

    @property
    def draws(self) -> bool:
        return self.function.nested_spec(self.source).draws

    @property
    def background(self) -> bool:
        return not self.function.nested_spec(self.source).is_cheap

    @property
    def spec(self) -> ElementSpec:
        return self.function.nested_spec(self.source).spec_or_raise()

    @property
    def reads_files(self) -> bool | None:
        return self.function.nested_spec(self.source).reads_files

    def _calls(self, elements: Primitive) -> tuple[Primitive, NestedFunction]:
        # Return the arguments and the function. Drawing words takes time, so only functions that use them get some.
        if self.draws:
            return self._paired(elements), self.function.with_words()
        return elements, self.function

    def nested_pipeline(self, element: Any) -> Node | None:
        """Return the pipeline of an element; None if a file that it would read is missing.

        Raises
        ------
        UserFunctionError
            The function fails for another reason.
        """
        try:
            return node_of(self.function.dataset(element, where=lambda: "the first element"))
        except UserFunctionError as error:
            if isinstance(error.__cause__, OSError):
                return None
            raise


def in_pass(node: Node, number: int) -> Node:
    """Return the pipeline in pass ``number``, for operations without a seed from the user.

    The contents of a cache or snapshot are the same in all passes.
    """
    if not any(source.draws for source in walk(node)) or isinstance(node, (Cache, Snapshot)):
        return node
    node = with_each_upstream(node, lambda source: in_pass(source, number))
    if not isinstance(node, CountingNode) or node.is_seeded:
        return node
    return replace(node, passes=replace(node.passes, start=number + node.passes.start))


def reads_files(dataset: DatasetBase) -> bool | None:
    """Return whether a dataset reads files; None if that is unknown."""
    answers = [node.reads_files for node in walk(node_of(dataset))]
    return True if True in answers else None if None in answers else False


@dataclass(frozen=True)
class ExpandRows:
    """A function that returns the elements of the datasets for the elements of a block or bundle."""

    function: NestedFunction

    def __call__(self, rows: Rows) -> Rows:
        return self.with_lengths(rows)[0]

    def with_lengths(self, rows: Rows) -> tuple[Rows, np.ndarray[Any, Any]]:
        """Return the elements, and the number of elements of each dataset."""
        parts: list[Rows] = []
        lengths = []
        for index, element in enumerate(rows.elements()):
            where = partial(rows.where, index)
            dataset = self.function.dataset(element, where=where)
            elements = self.function.of_one_structure(parts, rows_of(dataset, self.function), where)
            lengths.append(sum(map(len, elements)))
            parts += elements
        return merge(parts, rows), np.array(lengths, np.intp)


def rows_of(dataset: DatasetBase, function: UserFunction) -> Iterator[Rows]:
    """Compute the elements of a dataset that a function returned."""
    if node_of(dataset).cardinality == INFINITE:
        raise UserFunctionError(
            f"{function.operation}: {function.location} returned an endless dataset for one element, but a finite one "
            "for a made-up element; use take(n) in it"
        )
    return computed_rows(dataset)


def elements_of(rows: Rows) -> list[Any]:
    """Return the elements, each with its place."""
    return [(element, rows.where(index)) for index, element in enumerate(rows.elements())]
