"""`ReplicaFeed`: the input pipelines that feed the replicas of a distributed dataset."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from daskdist.cached_property import cached_property
from daskdist.core.primitive import Epoch
from daskdist.core.spec import ElementSpec
from daskdist.execute.caller import Caller
from daskdist.passes.numbering import begin_pass, skip_passes_of_call
from daskdist.sharding import Decision
from daskdist.strategy.input.device_maps import DeviceMaps, MapsOnReplicas
from daskdist.strategy.input.pass_position import PassSource
from daskdist.strategy.input.pipeline import Pipeline


@dataclass(frozen=True)
class ReplicaFeed:
    """The input pipelines, spec and callers that feed the replicas of a distributed dataset.

    Parameters
    ----------
    pipelines
        The input pipelines; the first feeds the first replicas, and so on.
    spec
        The spec of a replica's element, ignoring its length along the first axis.
    length
        Maps the length of a dataset element to the length of a replica's part; None if that varies.
    cardinality
        Returns the number of steps.
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
        The parts of the dataset that positions of iterators depend on.
    """

    pipelines: Sequence[Pipeline]
    spec: ElementSpec
    length: Callable[[int | None], int | None]
    cardinality: Callable[[], int]
    reader: Callable[[], Caller]
    drops_uneven: bool
    sharding: Decision
    sharding_title: str
    maps: Sequence[DeviceMaps]
    source: PassSource

    def begin_pass(self) -> list[Epoch]:
        """Begin a pass: return each pipeline's pass numbers, equal for operations that the pipelines share."""
        return begin_pass(*[pipeline.node for pipeline in self.pipelines])

    def begin_passes_of_call(self) -> list[Epoch]:
        """Return the numbers of the first pass that replicas make in a call, and reserve those of its other passes."""
        epochs = self.begin_pass()
        for pipeline, epoch in zip(self.pipelines, epochs, strict=True):
            skip_passes_of_call(pipeline.node, epoch)
        return epochs

    @cached_property
    def maps_on_replicas(self) -> MapsOnReplicas | None:
        """The functions that replicas call with their elements, as one function; None if there are none."""
        if not any(self.maps):
            return None
        pairs = zip(self.maps, self.pipelines, strict=True)
        return MapsOnReplicas([maps for maps, pipeline in pairs for _ in pipeline.consumers])
