"""Nodes: the arguments of operations, and the facts about them that are known before they run.

A pipeline is an immutable tree of nodes. A node knows the spec and number of its elements, states facts that passes
rely on instead of its class, and lowers itself to primitives.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from daskdist.cached_property import cached_property
from daskdist.context_variables import changed
from daskdist.core.cardinality import INFINITE, UNKNOWN
from daskdist.core.primitive import Primitive, Split
from daskdist.core.randomness.pass_numbers import PassNumber
from daskdist.core.spec import ElementSpec, SpecUnknown
from daskdist.errors import ArgumentError
from daskdist.url_secrets import without_secrets

logger: Final = logging.getLogger("daskdist")

# Whether pipelines that are planned now are computed as a whole before the first element is used.
_are_wanted_together: Final[ContextVar[bool]] = ContextVar("daskdist elements", default=False)


@dataclass(frozen=True)
class Facts:
    """Properties of an operation, independent of its arguments. A test of the law suite proves each.

    Parameters
    ----------
    compute
        It uses values and never order: its result for an element does not depend on the position.
    keeps_count
        It returns one element for each input element.
    keeps_rows
        It returns the input elements unchanged, each once, possibly in another order.
    keeps_order
        It returns the input elements unchanged and in order.
    keeps_spec
        Its elements have the spec of its input.
    per_worker
        Applied to each worker's share of the files, it has the same effect as applied to the whole.
    by_count
        It keeps or drops the first ``count`` elements; the node has a field ``count``.
    pairs
        It combines the elements of its inputs at the same position. On a worker's share of the files it has the same
        effect only if the shares of its inputs correspond.
    regroups
        It combines several input elements to one, so its elements differ on another division into shares; endlessly
        many stay so.
    levels
        The change of the depth of batching: 1 for batches, -1 for their rows.
    leaves_out_failed
        Failing elements upstream are left out where they fail, so computations cannot be exchanged with operations that
        count or reorder.
    on_device
        It is computed on the device of the element's replica.
    """

    compute: bool = False
    keeps_count: bool = False
    keeps_rows: bool = False
    keeps_order: bool = False
    keeps_spec: bool = False
    per_worker: bool = False
    by_count: bool = False
    pairs: bool = False
    regroups: bool = False
    levels: int = 0
    leaves_out_failed: bool = False
    on_device: bool = False


@dataclass(frozen=True)
class Pieces:
    """A dataset as consecutive units, any range of which can be produced without the others.

    Parameters
    ----------
    num_units
        The number of units, or `INFINITE`.
    cut
        ``cut(first, stop)`` returns the pipeline of units ``first`` to ``stop - 1``.
    grain
        The smallest useful number of units in a piece: smaller pieces read some data twice.
    is_exact
        Whether each unit is one element; otherwise it has any number of elements.
    """

    num_units: int
    cut: Callable[[int, int], Node]
    grain: int = 1
    is_exact: bool = True


@dataclass(frozen=True, eq=False)
class Node:
    """An operation of a pipeline. Subclasses are frozen dataclasses whose fields are the arguments.

    Parameters
    ----------
    label
        The user's name for it in plans.
    """

    label: str | None = dataclasses.field(default=None, kw_only=True, repr=False)

    facts: ClassVar[Facts] = Facts()
    # The name of the method that creates it.
    name: ClassVar[str]

    @property
    def background(self) -> bool:
        """True if reading ahead in threads can speed up a pipeline with this node."""
        return False

    @property
    def draws(self) -> bool:
        """Return whether it draws random numbers without a seed from the user, itself or in nested datasets."""
        return any(node.draws for pipeline in self.contents for node in walk(pipeline))

    @property
    def in_order(self) -> bool:
        """Return whether its elements come in order, if no later operation or option says otherwise."""
        return True

    @property
    def why_in_no_order(self) -> str:
        """The reason why its elements have no fixed order, even if a later operation needs one; "" if they have one."""
        return ""

    # True if its data is in memory, small, and may be sent anywhere.
    is_cheap: ClassVar[bool] = True
    # True if reading it again returns the same elements at little cost.
    is_repeatable: ClassVar[bool] = True
    # True if later passes replay what the first complete one stored.
    replays_first_pass: ClassVar[bool] = False
    # True if every pass over it is over the first pass of its input, so that elements are the same in all.
    reads_first_pass: ClassVar[bool] = False
    # An explanation of a result without elements, if that may be by chance.
    why_empty: ClassVar[str] = ""
    # Whether it divides the rows into parts, which a division of the files would not do as well.
    splits_rows: ClassVar[bool] = False

    @property
    def reads_files(self) -> bool | None:
        """True if it reads files, its own or those that elements name; None if that depends on the elements."""
        return False

    @property
    def group_size(self) -> int | None:
        """The number of input elements in each element, except the last; None if that varies."""
        return None

    @property
    def rows_per_element(self) -> int | None:
        """The number of input rows in each element, except the last; None if it does not regroup rows, or varies."""
        return None

    @property
    def rows_at(self) -> Callable[[Any], Any] | None:
        """A function that returns a block of the elements with some numbers; None without random access."""
        return None

    @property
    def code(self) -> tuple[str, ...] | None:
        """The hashes of the functions whose results it stores; None if it stores nothing."""
        return None

    def of_code(self, code: tuple[str, ...], fingerprint: str) -> Node:
        """Return the same operation for redefined functions, with new stored elements."""
        return self

    @property
    def first_taken(self) -> int | None:
        """Return the index of its first element in its input; None if its elements are not consecutive there."""
        return None

    @property
    def drops_remainder(self) -> bool:
        """Return whether it drops a remainder of elements at the end."""
        return False

    @property
    def is_shard_hint(self) -> bool:
        """Return whether it is a placeholder that `on_share` replaces by a worker's shard."""
        return False

    @property
    def is_worker_share(self) -> bool:
        """Return whether its elements are one worker's share of elements that all workers count."""
        return False

    @property
    def may_have_ragged_rows(self) -> bool:
        """Return whether its spec may have a `RaggedRowSpec`; if not, functions need not be tried to find out."""
        return any(source.may_have_ragged_rows for source in self.inputs)

    @property
    def inputs(self) -> tuple[Node, ...]:
        """The nodes whose elements are its input."""
        raise NotImplementedError

    @property
    def contents(self) -> tuple[Node, ...]:
        """The pipelines that others run for it: not its input, but its passes are passes over them."""
        return ()

    def with_inputs(self, inputs: tuple[Node, ...]) -> Node:
        """Return the same operation on other inputs."""
        raise NotImplementedError

    def with_contents(self, contents: tuple[Node, ...]) -> Node:
        """Return the same operation with other contents."""
        return self

    def with_own_arrays(self) -> Node:
        """Return the pipeline with copies of the arrays that it is made of and that something else could change."""
        return with_each_input(self, lambda source: source.with_own_arrays())

    @property
    def spec(self) -> ElementSpec:
        """The spec of its elements.

        Raises
        ------
        SpecUnknown
            It depends on a function that cannot be tried.
        """
        raise NotImplementedError

    @property
    def cardinality(self) -> int:
        """The number of its elements, or `UNKNOWN`, or `INFINITE`."""
        raise NotImplementedError

    def on_share(self, index: int, num_shards: int) -> Node:
        """Return the operation for one worker's share; it differs if shares must not have a common state."""
        return self

    def reading(self, regroup: Callable[[Any], Any]) -> Node | None:
        """Return a source that reads elements in the nest that ``regroup`` returns for theirs; None if it cannot.

        The leaves of the nests that ``regroup`` takes and returns may be anything, such as names of columns.
        """
        return None

    def with_nulls(self) -> Node:
        """Return the operation with nulls of files kept, as `NullsKept` says; unchanged if it looks at values."""
        return self

    def for_looks(self) -> Node:
        """Return an operation with the same elements that takes none of them from other readers."""
        return with_each_upstream(self, lambda node: node.for_looks())

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        """Return the primitive of this operation on lowered inputs."""
        raise NotImplementedError

    @property
    def note(self) -> str:
        """A note for plans on how it runs; may be empty."""
        return ""

    def __str__(self) -> str:
        """Return one line: the operation and its arguments."""
        arguments = [f"{key}={_brief(value)}" for key, value in self._arguments()]
        if self.label is not None:
            arguments.append(f"name={self.label!r}")
        return without_secrets(f"{self.name}({', '.join(arguments)})")

    def _arguments(self) -> Iterator[tuple[str, Any]]:
        for attribute in dataclasses.fields(self):
            value = getattr(self, attribute.name)
            if attribute.repr and value != attribute.default:
                yield attribute.name, value


@dataclass(frozen=True, eq=False)
class Source(Node):
    """A node without inputs."""

    # True if all its splits can be listed; False if they are endless, or known only when they are read.
    is_listed: ClassVar[bool] = True

    @property
    def is_cheap_to_list(self) -> bool:
        """Return whether `splits` costs little enough for a display: it computes nothing and reads few indexes."""
        return True

    def splits(self) -> Sequence[Split]:
        """Return the splits, in order; listed on first use."""
        raise NotImplementedError

    def pieces(self) -> Pieces | None:
        """Return how it can be cut into consecutive pieces; None if it cannot."""
        return None

    def state(self) -> Any:
        """Return a value that changes with the external data that it reads; None if there is none."""
        return None

    @property
    def cardinality(self) -> int:
        # A slice has all files listed together, in threads if that is faster.
        counts = [split.num_rows for split in self.splits()[:]]
        known = [count for count in counts if count is not None]
        return sum(known) if len(known) == len(counts) else UNKNOWN

    @property
    def inputs(self) -> tuple[Node, ...]:
        return ()

    def with_inputs(self, inputs: tuple[Node, ...]) -> Node:
        return self


@dataclass(frozen=True, eq=False)
class Transformation(Node):
    """A node with one input."""

    source: Node = dataclasses.field(repr=False)

    @property
    def has_large_results(self) -> bool:
        """True if a function may return, or load for itself, far more than the elements of the source have."""
        return False

    @property
    def may_be_large(self) -> bool:
        """True if `has_large_results` matters: not while all elements are computed before the first is used."""
        return not _are_wanted_together.get() and self.has_large_results

    @property
    def inputs(self) -> tuple[Node, ...]:
        return (self.source,)

    def with_inputs(self, inputs: tuple[Node, ...]) -> Node:
        (source,) = inputs
        return dataclasses.replace(self, source=source)

    def with_nulls(self) -> Node:
        keeps_values = self.facts.keeps_rows or self.facts.by_count
        return self.with_inputs((self.source.with_nulls(),)) if keeps_values else self

    @property
    def spec(self) -> ElementSpec:
        if not self.facts.keeps_spec:
            raise NotImplementedError
        return self.source.spec

    @property
    def cardinality(self) -> int:
        number, facts = self.source.cardinality, self.facts
        is_kept = facts.keeps_count or facts.keeps_rows or (facts.regroups and number == INFINITE)
        return number if is_kept or number == 0 else UNKNOWN


@dataclass(frozen=True, eq=False)
class SpecFromCalls(Transformation):
    """A transformation whose spec is that of the results of its function for made-up elements."""

    def learn_spec(self) -> ElementSpec:
        """Call the function, and return the spec of its results; called once.

        Raises
        ------
        SpecUnknown
            The spec depends on real elements.
        """
        raise NotImplementedError

    @cached_property
    def _learned_spec(self) -> ElementSpec | SpecUnknown:
        try:
            return self.learn_spec()
        except SpecUnknown as unknown:
            # Without the traceback, whose frames would be kept as long as this.
            return SpecUnknown(str(unknown))

    @property
    def spec(self) -> ElementSpec:
        if isinstance(self._learned_spec, SpecUnknown):
            raise SpecUnknown(str(self._learned_spec))
        return self._learned_spec


@dataclass(frozen=True, eq=False)
class ExpandingNode(Transformation):
    """A node with the elements of the datasets that a function returns for elements."""

    def nested_pipeline(self, element: Any) -> Node | None:
        """Return the pipeline of an element; None if a file that it would read is missing.

        Raises
        ------
        UserFunctionError
            The function fails for another reason.
        """
        raise NotImplementedError


def walk(node: Node) -> Iterator[Node]:
    """Yield the node and everything upstream of it, sinks first."""
    yield node
    for source in node.inputs:
        yield from walk(source)


def check_numbered(operation: str, node: Node) -> None:
    """Check that the elements of a pipeline have the same numbers in every pass, for an operation that takes some.

    Raises
    ------
    ArgumentError
        They come in no fixed order.
    """
    for part in walk(node):
        if part.why_in_no_order:
            raise ArgumentError(
                f"{operation}: elements after {part.name} have no fixed order, as {part.why_in_no_order}, so that an "
                f"element could be in several parts or in none; call {operation} before {part.name}"
            )


def warn_if_empty(nodes: Iterable[Node]) -> None:
    """Log a warning for each operation that may be the reason why pipelines returned no elements."""
    operations = {id(node): node for last in nodes for node in walk(last) if node.why_empty}
    for node in [operation for operation in operations.values() if operation.cardinality == UNKNOWN]:
        logger.warning("this pass had no elements. Perhaps %s has none: %s", node, node.why_empty)


def upstream(node: Node) -> Node:
    """Return the nearest node that changes the elements: this one, or the one whose elements it passes on."""
    while node.facts.keeps_order:
        (node,) = node.inputs
    return node


@dataclass(frozen=True, eq=False)
class CountingNode(Node):
    """An operation that counts its passes, such as one that draws at random in each.

    Parameters
    ----------
    is_seeded
        Whether the user gave the seed; otherwise it was drawn when the operation was created.
    passes
        Tells which pass it is in.
    """

    is_seeded: bool = dataclasses.field(default=True, kw_only=True, repr=False)
    passes: PassNumber = dataclasses.field(default_factory=PassNumber, kw_only=True, repr=False)

    @property
    def draws(self) -> bool:
        return not self.is_seeded


def counting(node: Node) -> Iterator[CountingNode]:
    """Yield the operations that count their passes, the most upstream first."""
    for source in (*node.inputs, *node.contents):
        yield from counting(source)
    if isinstance(node, CountingNode):
        yield node


def with_each_input(node: Node, change: Callable[[Node], Node]) -> Node:
    """Return the operation with its inputs changed by a function; itself if that changes none."""
    inputs = tuple(map(change, node.inputs))
    is_same = all(new is old for new, old in zip(inputs, node.inputs, strict=True))
    return node if is_same else node.with_inputs(inputs)


def with_each_upstream(node: Node, change: Callable[[Node], Node]) -> Node:
    """Return the operation with its inputs and contents changed by a function."""
    node = with_each_input(node, change)
    contents = tuple(map(change, node.contents))
    if any(new is not old for new, old in zip(contents, node.contents, strict=True)):
        node = node.with_contents(contents)
    return node


def elements_wanted(*, together: bool) -> AbstractContextManager[None]:
    """Plan pipelines inside a block for elements that are all computed before one is used, or used as they come."""
    return changed(_are_wanted_together, together)


def lower(node: Node) -> Primitive:
    """Lower the whole tree to primitives."""
    return node.lower(tuple(map(lower, node.inputs)))


def _brief(value: Any) -> str:
    if callable(value) and hasattr(value, "__qualname__"):
        return str(value.__qualname__)
    text = without_secrets(repr(value))
    return text if len(text) <= 60 else text[:57] + "..."
