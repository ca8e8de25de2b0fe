"""`ReplicaFeed`: the input pipelines that feed the replicas of a distributed dataset."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from daskdist.cached_property import cached_property
from daskdist.core.primitive import Epoch
from daskdist.core.spec import AnyRankSpec, PerReplicaSpec, SpecUnknown, TensorSpec
from daskdist.execute.caller import Caller
from daskdist.passes.numbering import begin_pass, skip_passes_of_call
from daskdist.sharding import Decision
from daskdist.strategy.input.device_maps import DeviceMaps, MapsOnReplicas
from daskdist.strategy.input.pass_position import PassSource
from daskdist.strategy.input.pipeline import num_steps


@dataclass(frozen=True)
class ReplicaFeed:
    """The input pipelines, spec and callers that feed the replicas of a distributed dataset.

    Parameters
    ----------
    num_pieces
        The number of pieces of equal length that an element of the dataset is cut into; None if lengths vary.
    reader
        Returns the caller for one pass.
    drops_uneven
        Whether the pass ends before the first step in which some replica has no rows.
    sharding
        The policy that assigns input to workers, and the reason for it.
    sharding_title
        The policy's name in `DistributedDataset.explain`.
    maps
        For each pipeline, the functions that its replicas call on their devices.
    source
        The dataset and its input pipelines, of which the first feeds the first replicas, and so on.
    """

    num_pieces: int | None
    reader: Callable[[], Caller]
    drops_uneven: bool
    sharding: Decision
    sharding_title: str
    maps: Sequence[DeviceMaps]
    source: PassSource

    @property
    def element_spec(self) -> Any:
        """The spec of each leaf of a step, see `DistributedDataset.element_spec`."""
        spec, num_replicas = self.source.spec, sum(len(pipeline.consumers) for pipeline in self.source.pipelines)
        if num_replicas > 1:
            spec = spec.with_leaves(list(map(self._piece, spec.leaves)))
        spec = self.maps[0].spec_after(spec)
        if num_replicas == 1:
            return spec.packed
        return spec.structure.pack([PerReplicaSpec(*[leaf] * num_replicas) for leaf in spec.leaves])

    @cached_property
    def known_element_spec(self) -> Any:
        """The `element_spec`; None if it is not known before there are elements."""
        # Cached: it may call the replicas' functions with samples.
        try:
            return self.element_spec
        except SpecUnknown:
            return None

    def _piece(self, leaf: TensorSpec) -> TensorSpec:
        # The spec of one replica's part. A replica without a scalar in a step gets an empty array.
        if not leaf.shape:
            return leaf if self.num_pieces == 1 else AnyRankSpec(dtype=leaf.dtype, name=leaf.name)
        num_rows, length = leaf.shape[0], None
        if num_rows is not None and self.num_pieces is not None and num_rows % self.num_pieces == 0:
            length = num_rows // self.num_pieces
        return replace(leaf, shape=(length, *leaf.shape[1:]))

    def cardinality(self) -> int:
        """Return the number of steps."""
        return num_steps(self.source.pipelines, drops_uneven=self.drops_uneven)

    def begin_pass(self) -> list[Epoch]:
        """Begin a pass: return each pipeline's pass numbers, equal for operations that the pipelines share."""
        return begin_pass(*[pipeline.node for pipeline in self.source.pipelines])

    def begin_passes_of_call(self) -> list[Epoch]:
        """Return the numbers of the first pass that replicas make in a call, and reserve those of its other passes."""
        epochs = self.begin_pass()
        for pipeline, epoch in zip(self.source.pipelines, epochs, strict=True):
            skip_passes_of_call(pipeline.node, epoch)
        return epochs

    @cached_property
    def maps_on_replicas(self) -> MapsOnReplicas | None:
        """The functions that replicas call with their elements, as one function; None if there are none."""
        if not any(self.maps):
            return None
        pairs = zip(self.maps, self.source.pipelines, strict=True)
        return MapsOnReplicas([maps for maps, pipeline in pairs for _ in pipeline.consumers])
