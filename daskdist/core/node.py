"""Nodes: an operation's arguments, and what can be said of it before it runs.

A pipeline is an immutable tree of nodes. A node knows the spec and number of its elements, states facts that
passes rely on (they never look at what operation it is), and lowers itself to primitives.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from daskdist.core.cardinality import UNKNOWN
from daskdist.core.primitive import Primitive, Split
from daskdist.core.spec import ElementSpec


@dataclass(frozen=True)
class Facts:
    """Properties of an operation, whatever its arguments. Each is proved by a test of the law suite.

    Parameters
    ----------
    compute
        It looks at values and never at order: the same of any one element wherever that stands.
    keeps_count
        It gives an element for each it takes.
    keeps_rows
        It gives the elements it takes, each as often, unchanged: only their order is another.
    keeps_order
        It gives the elements it takes, unchanged and in order.
    keeps_spec
        Its elements have the spec of its input's.
    per_worker
        It means the same on each worker's share of the files as it does on the whole.
    by_count
        It keeps or drops the first ``count`` elements; ``count`` is a field of its.
    pairs
        It puts together what its inputs have at the same place: it means the same on each worker's share of the
        files only where its inputs are shared out alike.
    regroups
        Each of its elements is made of several of its input's: on other shares of them it makes others.
    levels
        By how many levels of groups its elements are deeper than its input's: 1 for batches, -1 for their rows.
    leaves_out_failed
        Elements upstream that fail are left out where they fail: what is computed before what counts or reorders
        cannot change places with it.
    on_device
        It is computed by a replica on its device, when the replica is given the element.
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
    """A dataset as consecutive units, each run of which can be produced without the others.

    Parameters
    ----------
    num_units
        How many there are, or `INFINITE`.
    cut
        Returns the pipeline of the units ``first`` to before ``stop``: ``cut(first, stop)``.
    grain
        The fewest units that are worth a piece: smaller ones read some data twice.
    is_exact
        Whether each unit is one element; else it gives any number of them.
    """

    num_units: int
    cut: Callable[[int, int], Node]
    grain: int = 1
    is_exact: bool = True


@dataclass(frozen=True, eq=False)
class Node:
    """One operation of a pipeline. Subclasses are frozen dataclasses whose fields are its arguments.

    Parameters
    ----------
    label
        What the user calls it, in plans.
    """

    label: str | None = dataclasses.field(default=None, kw_only=True, repr=False)

    facts: ClassVar[Facts] = Facts()
    # The name of the method that makes it.
    name: ClassVar[str]

    @property
    def background(self) -> bool:
        """True if reading ahead in threads can gain something where the node is part of a pipeline."""
        return False

    @property
    def draws(self) -> bool:
        """Return whether it draws at random by a seed that it was not given, or by a function that makes datasets."""
        return getattr(self, "passes", None) is not None and not getattr(self, "is_seeded", True)

    # True if its data is in memory, small, and can be sent anywhere.
    is_cheap: ClassVar[bool] = True
    # True if reading it again gives the same elements each time, at little cost.
    is_repeatable: ClassVar[bool] = True

    @property
    def reads_files(self) -> bool | None:
        """True if it reads files, its own or those that its elements name; None where only an element tells."""
        return False

    @property
    def group_size(self) -> int | None:
        """The number of input elements in each element, except the last; None where that differs."""
        return None

    @property
    def first_taken(self) -> int | None:
        """Return the place, in its input, of its first element; None where its elements are not consecutive there."""
        return None

    @property
    def drops_remainder(self) -> bool:
        """Return whether elements that are left over at its end are dropped."""
        return False

    @property
    def is_shard_hint(self) -> bool:
        """Return whether it is a place where `on_share` puts a worker's shard."""
        return False

    @property
    def is_worker_share(self) -> bool:
        """Return whether its elements are one worker's share, and other workers have the others."""
        return False

    @property
    def may_have_ragged_rows(self) -> bool:
        """Return whether its spec may have a `RaggedRowSpec`; where not, nobody has to try functions to learn it."""
        return any(each.may_have_ragged_rows for each in self.inputs)

    @property
    def inputs(self) -> tuple[Node, ...]:
        """The nodes whose elements it takes."""
        raise NotImplementedError

    def with_inputs(self, inputs: tuple[Node, ...]) -> Node:
        """Return the same operation on other inputs."""
        raise NotImplementedError

    @property
    def spec(self) -> ElementSpec:
        """The spec of its elements.

        Raises
        ------
        SpecUnknown
            It depends on a function that could not be tried out.
        """
        raise NotImplementedError

    @property
    def cardinality(self) -> int:
        """The number of its elements, or `UNKNOWN`, or `INFINITE`."""
        raise NotImplementedError

    def on_share(self, index: int, num_shards: int) -> Node:
        """Return the operation for one worker's share; it differs where shares must not have a state in common."""
        return self

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        """Return the primitive of this operation, on inputs already lowered."""
        raise NotImplementedError

    @property
    def note(self) -> str:
        """A note for plans on the way it runs; empty where there is nothing to say."""
        return ""

    def __str__(self) -> str:
        """Return one line: the operation and its arguments."""
        arguments = [f"{key}={_brief(value)}" for key, value in self._arguments()]
        if self.label is not None:
            arguments.append(f"name={self.label!r}")
        return f"{self.name}({', '.join(arguments)})"

    def _arguments(self) -> Iterator[tuple[str, Any]]:
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            if each.repr and value != each.default:
                yield each.name, value


@dataclass(frozen=True, eq=False)
class Source(Node):
    """A node without inputs."""

    # True if all its splits can be listed; False where they are endless, or known only as they are read.
    is_listed: ClassVar[bool] = True

    def splits(self) -> Sequence[Split]:
        """Return the units it is read in, in order; listed on first use."""
        raise NotImplementedError

    def pieces(self) -> Pieces | None:
        """Return how it can be cut into consecutive pieces; None where it cannot."""
        return None

    def state(self) -> Any:
        """Return a value that changes with the data it reads, besides the node itself; None where nothing does."""
        return None

    @property
    def cardinality(self) -> int:
        counts = [split.num_rows for split in self.splits()]
        known = [count for count in counts if count is not None]
        return sum(known) if len(known) == len(counts) else UNKNOWN

    @property
    def inputs(self) -> tuple[Node, ...]:
        return ()

    def with_inputs(self, inputs: tuple[Node, ...]) -> Node:
        return self


@dataclass(frozen=True, eq=False)
class Transformation(Node):
    """A node of one input."""

    source: Node = dataclasses.field(repr=False)

    @property
    def inputs(self) -> tuple[Node, ...]:
        return (self.source,)

    def with_inputs(self, inputs: tuple[Node, ...]) -> Node:
        (source,) = inputs
        return dataclasses.replace(self, source=source)

    @property
    def spec(self) -> ElementSpec:
        if not self.facts.keeps_spec:
            raise NotImplementedError
        return self.source.spec

    @property
    def cardinality(self) -> int:
        if not (self.facts.keeps_count or self.facts.keeps_rows):
            raise NotImplementedError
        return self.source.cardinality


@dataclass(frozen=True, eq=False)
class ExpandingNode(Transformation):
    """A node that makes a dataset of each element, and gives the elements of those."""

    def nested_pipeline(self, element: Any) -> Node | None:
        """Return the pipeline made of an element; None where a file that it is to read is not there.

        Raises
        ------
        UserFunctionError
            The function fails otherwise.
        """
        raise NotImplementedError


def walk(node: Node) -> Iterator[Node]:
    """Yield the node and everything upstream of it, sinks first."""
    yield node
    for source in node.inputs:
        yield from walk(source)


def upstream(node: Node) -> Node:
    """Return the nearest node that changes the elements: this one, or one whose elements it passes on."""
    while node.facts.keeps_order:
        (node,) = node.inputs
    return node


def counting(node: Node) -> Iterator[Any]:
    """Yield the operations that count their passes, which have a field ``passes``, the most upstream first."""
    for source in node.inputs:
        yield from counting(source)
    if getattr(node, "passes", None) is not None:
        yield node


def lower(node: Node) -> Primitive:
    """Lower the whole tree to primitives."""
    return node.lower(tuple(map(lower, node.inputs)))


def _brief(value: Any) -> str:
    if callable(value) and hasattr(value, "__qualname__"):
        return str(value.__qualname__)
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
