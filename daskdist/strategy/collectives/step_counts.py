"""The steps of input pipelines, which only the worker that reads a pipeline knows; those that have finished ask it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

# The number of pipelines that are remembered.
_MOST_KNOWN: Final = 1024

# The token of a call's distributed dataset, and the number of the input pipeline.
PipelineKey: TypeAlias = tuple[str, int]


@dataclass(frozen=True)
class RemotePipeline:
    """An input pipeline whose steps only the worker that reads it knows."""

    worker: str
    number: int
    replicas: tuple[int, ...]


class KnownSteps(NamedTuple):
    """The known steps of a pass over a pipeline.

    Parameters
    ----------
    num_steps
        The number of known steps.
    uneven
        Of the requested steps, those in which some replica has no rows: whether each replica has rows.
    is_over
        Whether there are no further steps.
    """

    num_steps: int
    uneven: dict[int, list[bool]]
    is_over: bool

    def is_known(self, step: int) -> bool:
        """Return whether it is known if a step exists."""
        return self.is_over or step < self.num_steps


@dataclass
class _PipelineSteps:
    passes: dict[int, KnownSteps] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)
    is_left: bool = False


class StepCounts:
    """The steps that the pipelines of one worker have taken."""

    def __init__(self) -> None:
        self._pipelines: OrderedDict[PipelineKey, _PipelineSteps] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, key: PipelineKey, iteration: int, first: int, full: Any, *, is_over: bool = False) -> None:
        """Add whether replicas have rows in steps from one on, as ``(step, replica)``; known steps may be repeated."""
        with self._lock:
            passes = self._of(key).passes
            num_steps, uneven, was_over = passes.get(iteration, KnownSteps(0, {}, False))
            for number in np.flatnonzero(~full.all(axis=1)).tolist():
                uneven[first + number] = full[number].tolist()
            passes[iteration] = KnownSteps(max(num_steps, first + len(full)), uneven, was_over or is_over)

    def leave(self, key: PipelineKey, lane: int, num_lanes: int) -> None:
        """Note that one of ``num_lanes`` replicas has stopped reading; after the last one the pipeline has ended."""
        with self._lock:
            known = self._of(key)
            known.left.add(lane)
            known.is_left = len(known.left) >= num_lanes

    def known_from(self, key: PipelineKey, iteration: int, first: int) -> KnownSteps:
        """Return the known steps from a first step on."""
        with self._lock:
            pipeline = self._pipelines.get(key, _PipelineSteps())
            known = pipeline.passes.get(iteration, KnownSteps(0, {}, False))
            uneven = {step: full for step, full in known.uneven.items() if step >= first}
            return KnownSteps(known.num_steps, uneven, known.is_over or pipeline.is_left)

    def _of(self, key: PipelineKey) -> _PipelineSteps:
        known = self._pipelines.get(key)
        if known is None:
            known = self._pipelines[key] = _PipelineSteps()
            if len(self._pipelines) > _MOST_KNOWN:
                self._pipelines.popitem(last=False)
        return known


# A function that waits until it is known if a pipeline has a step, and returns the known steps from that one on.
AskSteps: TypeAlias = Callable[[RemotePipeline, PipelineKey, int, int], KnownSteps]


@dataclass(frozen=True)
class PeerPipelines:
    """The exchange of step counts between the workers of one loop.

    Parameters
    ----------
    key
        The pipeline that is read here.
    step_counts
        The steps that others ask for.
    ask
        Asks others for theirs.
    """

    key: PipelineKey
    step_counts: StepCounts
    ask: AskSteps


class RemoteSteps:
    """The steps in which a pipeline of another worker has rows, as reported by that worker."""

    def __init__(self, remote: RemotePipeline, iteration: int, peers: PeerPipelines) -> None:
        self._remote = remote
        self._iteration = iteration
        self._peers = peers
        self._known = KnownSteps(0, {}, False)

    def is_known(self, step: int) -> bool:
        """Return whether it is known if a step exists."""
        return self._known.is_known(step)

    def num_known(self, first: int, most: int) -> int:
        """Return the number of known steps from a first step on, at most ``most``."""
        return most if self._known.is_over else min(self._known.num_steps - first, most)

    def ask(self, step: int) -> None:
        """Ask for a step; wait until the other worker reaches it or its end."""
        token, _ = self._peers.key
        key = token, self._remote.number
        self._known = self._peers.ask(self._remote, key, self._iteration, step)

    def full(self, first: int, stop: int) -> Any:
        """Return whether each replica has rows in known steps, as ``(step, replica)``."""
        known = np.zeros((stop - first, len(self._remote.replicas)), bool)
        known[: max(self._known.num_steps - first, 0)] = True
        for step, full in self._known.uneven.items():
            if first <= step < stop:
                known[step - first] = full
        return known

    def is_over(self, step: int) -> bool:
        """Return whether the rows end before a known step."""
        return self._known.is_over and step >= self._known.num_steps
