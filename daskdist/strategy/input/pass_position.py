"""`PassPosition`: a position in a pass over a distributed dataset, and the pipelines that continue from it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from daskdist.cached_property import cached_property
from daskdist.config import in_bytes
from daskdist.core.node import Node, walk
from daskdist.core.primitive import Epoch
from daskdist.core.spec import ElementSpec
from daskdist.errors import ArgumentError, ClusterError
from daskdist.execute.resume.position import PipelineIdentity, StreamPosition, content_of, state_of
from daskdist.execute.resume.recorded_answers import Answers
from daskdist.ops.read_files import ReadFiles
from daskdist.passes.fingerprint import fingerprint
from daskdist.passes.plan import plan
from daskdist.passes.rest_of_pass import PassLayout, PassSection, final_batch, rest_of, with_batch_size
from daskdist.passes.seed import with_drawn
from daskdist.sharding import Decision
from daskdist.strategy.input.on_worker import CREATES_ANOTHER, OnWorker
from daskdist.strategy.input.pipeline import Pipeline


class PassPosition(NamedTuple):
    """A position in a pass over a distributed dataset, and the pipelines that continue from it.

    Parameters
    ----------
    sections
        The earlier sections of the pass, which were divided otherwise.
    pipelines, positions
        The pipelines, and the position in each of them.
    epochs
        The numbers of the pass, for each input pipeline of the dataset, which later passes follow.
    num_steps
        The number of steps that were handed out.
    is_over
        Whether the pass is over.
    done
        The replicas whose elements of the next step were handed out before one of that step failed, or have failed.
    """

    sections: list[PassSection]
    pipelines: list[Pipeline]
    positions: list[StreamPosition]
    epochs: list[Epoch]
    num_steps: int
    is_over: bool
    done: frozenset[int]


@dataclass(frozen=True)
class PassSource:
    """The dataset of a pass, and how the pass is divided among pipelines.

    Parameters
    ----------
    node
        The dataset, or the first pipeline of datasets from a function.
    spec
        The spec of a replica's element, ignoring its length along the first axis.
    pipelines
        The input pipelines; the first feeds the first replicas, and so on.
    num_workers, policy
        The number of workers, and the name of the sharding policy.
    share_out
        Returns the decision and the nodes of the pipelines for a dataset and numbers of workers and replicas; None if
        the division cannot change.
    known_identity
        The identity of the dataset; None to derive it from the nodes.
    obstacle
        Why a pass cannot continue over datasets that are created again; "" if it can.
    """

    node: Node
    spec: ElementSpec
    pipelines: Sequence[Pipeline]
    num_workers: int
    policy: str
    share_out: Callable[[Node, int, int], tuple[Decision, Sequence[Node]]] | None = None
    known_identity: PipelineIdentity | None = None
    obstacle: str = ""

    @cached_property
    def layout(self) -> PassLayout:
        """The division of the pass among pipelines."""
        batch = None if self.node is None else final_batch(self.node)
        num_replicas = tuple(len(pipeline.consumers) for pipeline in self.pipelines)
        size, drops = (None, False) if batch is None else (batch.group_size, batch.drops_remainder)
        split_bytes = _split_bytes([pipeline.node for pipeline in self.pipelines])
        return PassLayout(self.num_workers, num_replicas, self.policy, size, drops, split_bytes)

    @cached_property
    def identity(self) -> PipelineIdentity:
        """The identity of the dataset, independent of its global batch size."""
        if self.known_identity is not None:
            return self.known_identity
        node = with_batch_size(self.node, 1)
        return PipelineIdentity.of(node, fingerprint(node), plan(node))

    def follows(self, before: PassSource) -> bool:
        """Return whether a pass over an earlier division continues with this one, after replicas were lost.

        Pipelines of a function's datasets stay on their workers, unless others have taken the places of lost ones.

        Raises
        ------
        ClusterError
            The datasets are lost, and the pass cannot continue over those that were created again.
        """
        if self.share_out is not None:
            return True
        if not self.layout.is_like(before.layout):
            return False
        if before.obstacle:
            raise ClusterError(
                "datasets of a function were lost with their workers, and a pass over them cannot continue over "
                f"those that were created again: {before.obstacle}; begin another pass"
            )
        if not self.identity.is_like(before.identity):
            raise ClusterError(CREATES_ANOTHER)
        return True

    def state(
        self,
        positions: Sequence[Sequence[Any]],
        sections: Sequence[PassSection],
        num_steps: int,
        done: Collection[int] = (),
        *,
        is_over: bool,
    ) -> dict[str, Any]:
        """Return the state of an iterator from the positions of its streams, as plain data.

        Parameters
        ----------
        positions
            The positions of the streams of all pipelines, as plain data.
        sections
            The earlier sections of the pass, which were divided otherwise.
        num_steps
            The number of steps that were handed out.
        done
            As in `PassPosition`.
        is_over
            Whether the pass is over.
        """
        layout = self.layout.as_plain()
        return state_of(
            self.identity,
            num_steps,
            positions,
            layout=layout,
            legs=[section.as_plain() for section in sections],
            is_over=is_over,
            done=sorted(done),
        )

    def position_of(self, state: Any) -> PassPosition:
        """Return the position in a state of any iterator over the dataset.

        Raises
        ------
        ArgumentError
            The state is of another dataset or version, or damaged.
        """
        content = content_of(state, self.identity)
        try:
            layout, before = PassLayout.of_plain(content["layout"]), list(map(PassSection.of_plain, content["legs"]))
            positions = content["positions"]
            streams = [(position.epoch, position.seeds, position.num_elements) for position in positions]
            section = PassSection(layout, tuple(streams))
            progress = state["number"], content["is_over"], frozenset(content.get("done", ()))
        except (KeyError, TypeError, ValueError) as error:
            raise ArgumentError(
                f"load_state_dict: the position is of an iterator over a dataset that is not distributed, or is "
                f"damaged ({error})"
            ) from None
        epochs = [epoch for epoch, *_ in [*before, section][0].positions]
        if len(epochs) != len(self.pipelines):
            # The same operations have the same numbers in all pipelines.
            epochs = epochs[:1] * len(self.pipelines)
        return PassPosition(*self._pipelines_at(before, section, positions), epochs, *progress)

    def _pipelines_at(
        self, before: Sequence[PassSection], section: PassSection, positions: Sequence[StreamPosition]
    ) -> tuple[list[PassSection], list[Pipeline], list[StreamPosition]]:
        # Return the earlier sections for later positions, the pipelines that continue, and the position in each.
        sections = [*before, section]
        if section.layout.is_like(self.layout):
            if before:
                return list(before), [self._rest(sections[:-1], section.layout)[0]], list(positions)
            return [], list(map(_with_seeds, self.pipelines, positions)), list(positions)
        if before:
            # The rest was one stream for all replicas already.
            sections[-1] = replace(
                section, layout=replace(section.layout, num_replicas=(sum(section.layout.num_replicas),))
            )
        pipeline, path = self._rest(sections, self.layout)
        answers = Answers()
        for number, position in enumerate(positions):
            answers.add(position.answers or Answers(), (*path, number))
        return sections, [pipeline], [StreamPosition((0,), [], 0, answers)]

    def _rest(self, sections: Sequence[PassSection], layout: PassLayout) -> tuple[Pipeline, Any]:
        streams = [plan(node) for node in self._nodes_of(sections[0])]
        path: Any = ()
        for section, following in zip(sections, [*[later.layout for later in sections[1:]], layout], strict=True):
            primitive, path = rest_of(streams, section, following, self.spec)
            streams = [primitive]
        readers = tuple(dict.fromkeys(reader for pipeline in self.pipelines for reader in pipeline.readers))
        consumers = tuple(consumer for pipeline in self.pipelines for consumer in pipeline.consumers)
        node = next(pipeline.node for pipeline in self.pipelines if pipeline.node is not None)
        return Pipeline(node, readers, consumers, varies=True, rest=streams[0]), path

    def _nodes_of(self, section: PassSection) -> list[Node]:
        # The pipelines of a section.
        layout = section.layout
        if self.share_out is None:
            raise ArgumentError(
                f"load_state_dict: the position is of {len(layout.num_replicas)} input pipelines of "
                f"{sum(layout.num_replicas)} replicas, whose datasets a function made; here are {len(self.pipelines)} "
                f"of {sum(self.layout.num_replicas)}. Continue with as many, or distribute one dataset with "
                "distribute_dataset, which continues with any number"
            )
        node = with_batch_size(self.node, layout.batch_size)
        decision, nodes = self.share_out(node, layout.num_workers, sum(layout.num_replicas))
        policy = decision.policy.name
        if policy != layout.policy or len(nodes) != len(layout.num_replicas):
            raise ArgumentError(
                f"load_state_dict: the position is of a pass shared out by {layout.policy}, and for as many workers "
                f"the dataset is shared out by {policy} now; set the option auto_shard_policy as it was"
            )
        now = _split_bytes(nodes)
        if layout.split_bytes not in (None, now):
            as_it_was = f"to {layout.split_bytes}, as it was" if layout.split_bytes else "as it was"
            raise ArgumentError(
                "load_state_dict: workers share a file by its splits, whose size is the setting "
                f"daskdist.split-bytes, and it had another value when the position was taken; set it {as_it_was}"
            )
        return [
            with_drawn(pipeline_node, seeds)
            for pipeline_node, (_, seeds, _) in zip(nodes, section.positions, strict=True)
        ]


def _split_bytes(nodes: Sequence[Node | None]) -> int:
    # Return the setting if the rows of pipelines depend on it; otherwise 0.
    sources = [source for node in nodes if node is not None for source in walk(node) if isinstance(source, ReadFiles)]
    return in_bytes("split-bytes") if any(source.depends_on_splits for source in sources) else 0


def _with_seeds(pipeline: Pipeline, position: StreamPosition) -> Pipeline:
    # A replica does not have all pipelines of the others.
    if pipeline.node is None or position.seeds == pipeline.seeds:
        return pipeline
    if isinstance(pipeline.node, OnWorker):
        return replace(pipeline, node=replace(pipeline.node, seeds=tuple(position.seeds)))
    return replace(pipeline, node=with_drawn(pipeline.node, position.seeds))
