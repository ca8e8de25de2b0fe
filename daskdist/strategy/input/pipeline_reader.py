"""`PipelineReader`: one input pipeline read in this process; and the steps in which others have rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from daskdist.core.array_pool import pooled_empty
from daskdist.core.finalizer import Finalizer
from daskdist.core.primitive import Epoch, Exhausted
from daskdist.devices import named
from daskdist.execute.callers.choose import local_caller
from daskdist.execute.callers.compute_key import Fetch
from daskdist.execute.stream.bundle_builder import BundleBuilder, Lane
from daskdist.execute.stream.gather import Empty
from daskdist.execute.stream.interpreter import Interpreter
from daskdist.execute.transfer.gather_on_device import device_gathers
from daskdist.ops.with_options import Options, WithOptions, merged_options
from daskdist.strategy.input.pipeline import Cuts, Pipeline


class PipelineReader:
    """The elements of one pipeline, read in this process, a few steps at a time.

    Parameters
    ----------
    pipeline
        The pipeline; its order is the one it has where the order of elements is fixed, for others may read it too.
    epoch
        Which pass.
    wanted
        The replicas, of those that the pipeline serves, whose elements are put together.
    is_alone
        Whether there is one replica in all.
    num_steps_ahead
        Steps that are built ahead of use whatever that takes.
    fetch
        Brings what the cluster has, on a worker.
    empty
        Makes the arrays into which elements are copied; NumPy's if None.
    devices
        The names of the devices of the replicas that the pipeline serves, where elements are put on them.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        epoch: Epoch,
        wanted: set[int],
        *,
        is_alone: bool,
        num_steps_ahead: int = 1,
        fetch: Fetch | None = None,
        empty: Empty | None = None,
        devices: Sequence[str] = (),
    ) -> None:
        options = merged_options(pipeline.node)
        if options.deterministic is False:
            pipeline = replace(pipeline, node=WithOptions(pipeline.node, Options(deterministic=True)))
        self.caller = local_caller(pipeline.node, options.num_threads, fetch)
        # The threads of a caller end with the pass, closed or dropped.
        self.close = Finalizer(self, self.caller.close)
        self.interpreter = Interpreter(self.caller, budget_bytes=pipeline.budget_bytes)
        self.wanted = wanted
        self._num_lanes = len(pipeline.consumers)
        primitive = pipeline.primitive
        # Devices of others may be none that there are here.
        here = [named(name) if lane in wanted else None for lane, name in enumerate(devices)]
        self._builder = BundleBuilder(
            self.interpreter,
            primitive,
            epoch,
            (None,) * self._num_lanes,
            asks_lengths=not is_alone and pipeline.varies and not primitive.grouped,
            num_steps_ahead=num_steps_ahead,
            active=wanted,
            empty=empty or pooled_empty,
            device_gathers=device_gathers(here, primitive) if options.shuffle_on_device else (),
            # Blocks of replicas that are ahead stay for the slowest.
            as_views=empty is None and self._num_lanes <= 2,
        )

    @property
    def limit_bytes(self) -> int:
        """Bytes that may wait for a replica."""
        return self.interpreter.bundles[None].limit_bytes

    def pull(self) -> tuple[list[Lane], Any] | None:
        """Return the lanes of the next steps, and whether each has rows, as ``(step, lane)``; None at the end."""
        try:
            bundle = self._builder.pull()
        except Exhausted:
            return None
        full = np.array([lane.places for lane in bundle.lanes]).T >= 0
        for number, lane in enumerate(bundle.lanes):
            if lane.lengths is not None:
                lengths = np.append(self.caller.result(lane.lengths), 0)
                full[:, number] &= lengths[np.asarray(lane.places)] > 0
        return bundle.lanes, full


class ComputedSteps:
    """The steps in which a pipeline of other replicas has rows, computed."""

    def __init__(self, cuts: Cuts) -> None:
        self._cuts = cuts

    def full(self, first: int, stop: int) -> Any:
        """Return whether each step has rows for each of its replicas, as ``(step, replica)``."""
        return self._cuts.full(first, stop)

    def is_over(self, step: int) -> bool:
        """Return whether there are no rows from a step on."""
        return self._cuts.num_steps is not None and step >= self._cuts.num_steps


class CountedSteps:
    """The steps in which a pipeline of other replicas has rows, found by reading it, as nothing else tells."""

    def __init__(self, pipeline: Pipeline, epoch: Epoch, fetch: Fetch | None = None) -> None:
        self._reader: PipelineReader | None = PipelineReader(pipeline, epoch, set(), is_alone=False, fetch=fetch)
        self._num_lanes = len(pipeline.consumers)
        self._full = np.zeros((0, self._num_lanes), bool)
        self._first = 0

    def full(self, first: int, stop: int) -> Any:
        """Return the same as `ComputedSteps.full`; steps before ``first`` cannot be asked for after that."""
        self._read_to(stop)
        self._full, self._first = self._full[max(first - self._first, 0) :], max(first, self._first)
        found = np.zeros((stop - first, self._num_lanes), bool)
        known = self._full[: stop - first]
        found[: len(known)] = known
        return found

    def is_over(self, step: int) -> bool:
        """Return whether there are no rows from a step on."""
        self._read_to(step + 1)
        return self._reader is None and step >= self._first + len(self._full)

    def _read_to(self, stop: int) -> None:
        while self._reader is not None and self._first + len(self._full) < stop:
            pulled = self._reader.pull()
            if pulled is None:
                self.close()
            else:
                self._full = np.concatenate([self._full, pulled[1]])

    def close(self) -> None:
        """Stop reading."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None
