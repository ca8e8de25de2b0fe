"""`PipelineReader`, which reads an input pipeline in this process, and the steps in which others have rows."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from daskdist.core.array_pool import pooled_empty
from daskdist.core.finalizer import Finalizer
from daskdist.core.primitive import Exhausted
from daskdist.devices import named
from daskdist.execute.callers.choose import local_caller
from daskdist.execute.callers.compute_key import Fetch
from daskdist.execute.resume.position import StreamPosition
from daskdist.execute.stream.bundle_builder import BundleBuilder, Lane
from daskdist.execute.stream.gather import Empty
from daskdist.execute.stream.interpreter import Interpreter
from daskdist.execute.transfer.gather_on_device import with_device_gathers
from daskdist.ops.with_options import Options, WithOptions, comes_in_any_order, merged_options
from daskdist.strategy.input.pipeline import Pipeline


class PipelineReader:
    """A reader of one pipeline in this process, a few steps at a time.

    Parameters
    ----------
    pipeline
        The pipeline; always read in its deterministic order, since other processes may read it too.
    start
        The position at which it begins.
    wanted
        The replicas whose elements are gathered, given by their places among those that the pipeline feeds.
    is_alone
        Whether there is only one replica in all.
    num_steps_ahead
        The least number of steps computed ahead of use.
    fetch
        Gets data from the cluster, on a worker.
    empty
        Allocates the arrays into which elements are gathered; pooled NumPy arrays if None.
    devices
        The names of the devices of the pipeline's replicas, if elements are copied to them.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        start: StreamPosition,
        wanted: set[int],
        *,
        is_alone: bool,
        num_steps_ahead: int = 1,
        fetch: Fetch | None = None,
        empty: Empty | None = None,
        devices: Sequence[str] = (),
    ) -> None:
        options = merged_options(pipeline.node)
        # The number of elements before the pass begins here, and up to the end of the last bundle.
        self._num_before = self._num_elements = start.num_elements
        if comes_in_any_order(pipeline.node):
            pipeline = replace(pipeline, node=WithOptions(pipeline.node, Options(deterministic=True)))
        self.caller = local_caller(pipeline.node, options.num_threads, fetch, num_processes=options.num_processes)
        # Ends the caller's threads when the pass is closed or garbage collected.
        self.close = Finalizer(self, self.caller.close)
        self.interpreter = Interpreter(self.caller, budget_bytes=pipeline.budget_bytes)
        self.wanted = wanted
        self._num_lanes = len(pipeline.consumers)
        # Devices of other processes may not exist here.
        local_devices = [named(name) if lane in wanted else None for lane, name in enumerate(devices)]
        primitive, gathers = with_device_gathers(local_devices, pipeline.primitive, options.shuffle_on_device)
        self._builder = BundleBuilder(
            self.interpreter,
            primitive,
            # Copy the answers, as a process may open a position twice.
            replace(start, answers=copy.deepcopy(start.answers)),
            (None,) * self._num_lanes,
            asks_lengths=not is_alone and pipeline.varies and not primitive.grouped,
            num_steps_ahead=num_steps_ahead,
            active=wanted,
            empty=empty or pooled_empty,
            device_gathers=gathers,
            # With more replicas, views would keep whole blocks alive until the slowest replica has used them.
            as_views=empty is None and self._num_lanes <= 2,
        )

    def position(self, num_steps: int) -> list[Any]:
        """Return the position after some steps that were read, as data."""
        return self.interpreter.position_at(min(self._num_before + num_steps * self._num_lanes, self._num_elements))

    @property
    def limit_bytes(self) -> int:
        """The bytes that may be queued for a replica."""
        return self.interpreter.bundles[None].limit_bytes

    def pull(self) -> tuple[list[Lane], Any] | None:
        """Return the lanes of the next steps and whether they have rows, as ``(step, lane)``; None at the end."""
        try:
            bundle = self._builder.pull()
        except Exhausted:
            return None
        self._num_elements += bundle.num_elements
        full = np.array([lane.places for lane in bundle.lanes]).T >= 0
        for number, lane in enumerate(bundle.lanes):
            if lane.lengths is not None:
                lengths = np.append(self.caller.result(lane.lengths), 0)
                full[:, number] &= lengths[np.asarray(lane.places)] != 0
        return bundle.lanes, full


class CountedSteps:
    """The steps in which a pipeline of other replicas has rows, counted by reading it."""

    def __init__(self, pipeline: Pipeline, start: StreamPosition, fetch: Fetch | None, first_step: int) -> None:
        self._reader: PipelineReader | None = PipelineReader(pipeline, start, set(), is_alone=False, fetch=fetch)
        self._num_lanes = len(pipeline.consumers)
        self._full = np.zeros((0, self._num_lanes), bool)
        self._first = first_step

    def full(self, first: int, stop: int) -> Any:
        """Return the same as `Cuts.full`, and forget the steps before ``first``."""
        self._read_to(stop)
        self._full, self._first = self._full[max(first - self._first, 0) :], max(first, self._first)
        has_rows = np.zeros((stop - first, self._num_lanes), bool)
        known = self._full[: stop - first]
        has_rows[: len(known)] = known
        return has_rows

    def is_over(self, step: int) -> bool:
        """Return whether no step has rows from this one on."""
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
