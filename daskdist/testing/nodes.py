"""Laws of nodes: declared facts hold, and the elements are as stated before running."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import cloudpickle
from dask.base import tokenize

from daskdist.core.block import Block, Bundle, from_items
from daskdist.core.cardinality import INFINITE, UNKNOWN
from daskdist.core.node import Facts, Node, Source, lower
from daskdist.core.primitive import Primitive, Read, Split
from daskdist.core.spec import ElementSpec, SpecUnknown, TensorSpec
from daskdist.core.structure import Structure
from daskdist.execute.callers.choose import local_caller, using
from daskdist.execute.callers.synchronous import Synchronous
from daskdist.execute.stream.local_iterator import iterate
from daskdist.passes.fuse import fuse
from daskdist.passes.simplify import simplify
from daskdist.testing.equality import check, same_elements, same_multiset
from daskdist.testing.never_run import never_run

# The number of elements to compare, so that endless nodes can be tested too.
_MOST = 100


@dataclass(frozen=True, eq=False)
class Elements(Source):
    """A source of fixed elements of any shapes, in blocks of a fixed length."""

    known_spec: ElementSpec
    elements: tuple[Any, ...] = field(repr=False)
    num_rows: int = 4

    name = "elements"

    @property
    def spec(self) -> ElementSpec:
        return self.known_spec

    @property
    def cardinality(self) -> int:
        return len(self.elements)

    def splits(self) -> Sequence[Split]:
        splits = []
        for start in range(0, len(self.elements), self.num_rows):
            part = self.elements[start : start + self.num_rows]
            num_bytes = sum(getattr(leaf, "nbytes", 0) for element in part for leaf in Structure.flatten(element)[0])
            splits.append(Split(f"elements {start} on", part, len(part), num_bytes))
        return splits

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        return Read(self.splits, ReadElements(self.known_spec.structure), "elements")


@dataclass(frozen=True)
class ReadElements:
    """A reader of elements as a block, or as a bundle if their shapes differ."""

    structure: Structure

    def __call__(self, split: Split) -> Block | Bundle:
        items = [Structure.flatten(element)[0] for element in split.payload]
        return from_items(self.structure, items, split.label)


def elements_of(node: Node, *, optimised: bool = False, iteration: int = 0) -> list[Any]:
    """Return the first elements of a pipeline, at most 100, computed in this thread."""
    primitive = fuse(lower(simplify(node))) if optimised else lower(node)
    with using(Synchronous):
        return list(itertools.islice(iterate(local_caller(node), primitive, iteration), _MOST))


class NodeLaws:
    """Laws of nodes; a subclass defines `nodes`, which should differ in every argument that they can have."""

    def nodes(self) -> Sequence[Node]:
        """Return different pipelines, finite or endless, each with a node under test at its end."""
        raise NotImplementedError

    def test_is_frozen(self) -> None:
        for node in self.nodes():
            check(dataclasses.is_dataclass(node), f"{node}: not a dataclass")
            name = dataclasses.fields(node)[0].name
            try:
                setattr(node, name, getattr(node, name))
            except dataclasses.FrozenInstanceError:
                continue
            check(False, f"{node}: its field {name} can be set; make it frozen")

    def test_hashes_and_pickles(self) -> None:
        for node in self.nodes():
            hash(node)
            copy = cloudpickle.loads(cloudpickle.dumps(node))
            check(_token(copy) == _token(node), f"{node}: a pickled copy has another token")
            same_elements(elements_of(copy), elements_of(node), f"{node}: a pickled copy")

    def test_token_is_deterministic_and_unique(self) -> None:
        for node, again in zip(self.nodes(), self.nodes(), strict=True):
            check(_token(node) == _token(again), f"{node}: built again it has another token")
        tokens = [_token(node) for node in self.nodes()]
        check(len(set(tokens)) == len(tokens), "two different nodes have one token")

    def test_str_is_a_line(self) -> None:
        for node in self.nodes():
            text = str(node)
            check(text.startswith(node.name) and "\n" not in text, f"{text!r} is not a line that begins with its name")

    def test_building_runs_nothing(self) -> None:
        with never_run():
            for node in self.nodes():
                _spec(node)
                str(node)
                _ = node.cardinality
                fuse(lower(simplify(node)))

    def test_spec_fits_the_elements(self) -> None:
        for node in self.nodes():
            spec = _spec(node)
            if spec is None:
                continue
            for place, element in enumerate(elements_of(node)):
                leaves, structure = Structure.flatten(element)
                check(structure == spec.structure, f"{node}: element {place} is {structure}, its spec {spec.structure}")
                for leaf, expected in zip(leaves, spec.leaves, strict=True):
                    check(
                        expected.is_compatible_with(leaf),
                        f"{node}: element {place} has {TensorSpec.of(leaf)}, its spec is {expected}",
                    )

    def test_cardinality_is_the_number_of_elements(self) -> None:
        for node in self.nodes():
            number, stated = len(elements_of(node)), node.cardinality
            if stated == INFINITE:
                check(number == _MOST, f"{node}: said to be endless, and {number} elements came")
            elif stated != UNKNOWN:
                check(number == min(stated, _MOST), f"{node}: {stated} elements were said to come, and {number} came")

    def test_group_size_fits_the_elements(self) -> None:
        for node in self.nodes():
            if node.group_size is None:
                continue
            sizes = [len(Structure.flatten(element)[0][0]) for element in elements_of(node)]
            check(
                all(size == node.group_size for size in sizes[:-1]),
                f"{node}: says it groups by {node.group_size}, and made groups of {sizes}",
            )

    def test_elements_are_the_same_each_time(self) -> None:
        for node in self.nodes():
            same_elements(elements_of(node), elements_of(node), f"{node}: a second run")

    def test_elements_do_not_depend_on_the_blocks_of_the_input(self) -> None:
        for node in self.nodes():
            if not node.inputs:
                continue
            input_elements = [elements_of(source) for source in node.inputs]
            expected = elements_of(_on_all(node, input_elements, _MOST))
            for num_rows in (1, 3):
                same_elements(
                    elements_of(_on_all(node, input_elements, num_rows)), expected, f"{node} on blocks of {num_rows}"
                )

    def test_optimising_does_not_change_elements(self) -> None:
        for node in self.nodes():
            same_elements(elements_of(node, optimised=True), elements_of(node), f"{node}: optimised")

    def test_fact_compute(self) -> None:
        for node, elements in self._with_inputs(lambda facts: facts.compute):
            alone = [elements_of(_on(node, [element])) for element in elements]
            whole = list(itertools.chain(*alone))
            same_elements(elements_of(_on(node, elements)), whole, f"{node}: against one element at a time")
            same_elements(
                elements_of(_on(node, elements[::-1])),
                list(itertools.chain(*alone[::-1])),
                f"{node}: on its elements in reverse",
            )

    def test_fact_keeps_count(self) -> None:
        for node, elements in self._with_inputs(lambda facts: facts.keeps_count):
            for part in (elements, elements[:1], []):
                number = len(elements_of(_on(node, part)))
                check(number == len(part), f"{node}: made {number} elements of {len(part)}")

    def test_fact_keeps_rows(self) -> None:
        for node, elements in self._with_inputs(lambda facts: facts.keeps_rows):
            same_multiset(elements_of(_on(node, elements)), elements, f"{node}")

    def test_fact_keeps_order(self) -> None:
        for node, elements in self._with_inputs(lambda facts: facts.keeps_order):
            same_elements(elements_of(_on(node, elements)), elements, f"{node}")

    def test_fact_leaves_out_failed(self) -> None:
        for node in self.nodes():
            if node.facts.leaves_out_failed and len(node.inputs) == 1:
                check(simplify(node) is node, f"{node}: its inputs were rewritten")

    def test_fact_keeps_spec(self) -> None:
        for node in self.nodes():
            if node.facts.keeps_spec and len(node.inputs) == 1:
                check(_spec(node) == _spec(node.inputs[0]), f"{node}: its spec is not its input's")

    def test_fact_by_count(self) -> None:
        for node, elements in self._with_inputs(lambda facts: facts.by_count):
            check(isinstance(getattr(node, "count", None), int), f"{node}: has no number `count`")
            keeps = len(elements_of(_with_count(_on(node, elements), 0))) == 0
            number = len(elements)
            for count in sorted({*range(6), number // 2, number - 1, number, number + 1} - {-1}):
                results = elements_of(_with_count(_on(node, elements), count))
                same_elements(results, elements[:count] if keeps else elements[count:], f"{node} with count={count}")

    def test_fact_per_worker(self) -> None:
        # Grouping a share of the rows forms other groups, so groupings are left out.
        for node, elements in self._with_inputs(lambda facts: facts.per_worker and not facts.regroups):
            if not _spec(node):
                continue
            shares = [elements_of(_on(node, elements[worker::2])) for worker in range(2)]
            whole = elements_of(_on(node, elements))
            if len(whole) < _MOST:
                same_multiset([*shares[0], *shares[1]], whole, f"{node}: on two workers' shares")

    def _with_inputs(self, has_fact: Callable[[Facts], bool]) -> Iterator[tuple[Node, list[Any]]]:
        # Yield the nodes with one input that declare a fact, and the elements of the input.
        for node in self.nodes():
            if len(node.inputs) == 1 and has_fact(node.facts):
                yield node, elements_of(node.inputs[0])


def _on(node: Node, elements: Sequence[Any], num_rows: int = 4) -> Node:
    return _on_all(node, [elements], num_rows)


def _on_all(node: Node, elements: Sequence[Sequence[Any]], num_rows: int) -> Node:
    inputs = []
    for source, source_elements in zip(node.inputs, elements, strict=True):
        spec = _spec(source)
        if spec is None:
            check(source_elements, f"{node}: the spec of its input is not known, so give that elements")
            spec = ElementSpec.of(source_elements[0])
        inputs.append(Elements(spec, tuple(source_elements), num_rows))
    return node.with_inputs(tuple(inputs))


def _with_count(node: Any, count: int) -> Node:
    changed: Node = replace(node, count=count)
    return changed


def _spec(node: Node) -> ElementSpec | None:
    try:
        return node.spec
    except SpecUnknown:
        return None


def _token(node: Node) -> str:
    return str(tokenize(node, ensure_deterministic=True))
