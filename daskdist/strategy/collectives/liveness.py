"""Queries of other workers about a call, which distinguish a lost worker from a busy one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future as ThreadFuture
from typing import Any, Final, NamedTuple

from distributed import Worker

from daskdist.config import seconds
from daskdist.errors import CollectiveError
from daskdist.strategy.collectives.rendezvous import left_error
from daskdist.strategy.group import ReplicaGroup, Step, lost_worker_error

LOOK_EVERY_S: Final = 0.3
# A worker that is not busy answers within this time.
_SOON_S: Final = 2.0
_SCHEDULER_WITHIN_S: Final = 1.0
_FORGOTTEN_AFTER_S: Final = 1.0
# Shorter delays of this process are ignored.
_LATE_S: Final = 1.0


class LostWorker(NamedTuple):
    """The answer for a worker that is lost, with the reason."""

    why: str


async def _within(most_s: float, request: Awaitable[Any]) -> tuple[bool, Any]:
    # Unlike `asyncio.wait_for`, do not wait for the cancelled task, which may continue to connect for half a minute.
    task = asyncio.ensure_future(request)
    # Retrieve its exception: the waiter may have gone.
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    done, _ = await asyncio.wait([task], timeout=most_s)
    if done:
        return True, task.result()
    task.cancel()
    return False, None


class _Silence(NamedTuple):
    # The time of the first query without an answer, and the deadline of the last one.
    since: float
    until: float


class PeerQueries:
    """Repeated queries of other workers, whose silence begins with the first query without an answer."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self._silent: dict[str, _Silence] = {}

    async def __call__(
        self, addresses: Sequence[str], operation: str, silence_s: float, **message: Any
    ) -> dict[str, Any]:
        """Return the answer of each worker; None for a busy worker, a `LostWorker` for a lost one.

        A worker is lost if it has not answered for ``silence_s`` seconds.
        """
        answers = await asyncio.gather(*[self._answer(address, operation, silence_s, message) for address in addresses])
        return dict(zip(addresses, answers, strict=True))

    def note_alive(self, address: str) -> None:
        """Note that a worker has sent something."""
        self._silent.pop(address, None)

    async def _answer(self, address: str, operation: str, silence_s: float, message: Mapping[str, Any]) -> Any:
        now = time.monotonic()
        before = self._silent.get(address)
        # A silence starts again if no query was sent for a while: the worker may have been responsive meanwhile.
        since = now if before is None or now > before.until + _FORGOTTEN_AFTER_S else before.since
        rest = since + silence_s - now
        # The last query gets all the remaining time, as a further one would only be answered later.
        is_last = rest <= 2 * _SOON_S
        most = max(rest, 0.1) if is_last else _SOON_S
        silence = self._silent[address] = _Silence(since, now + most + _SCHEDULER_WITHIN_S)
        try:
            is_there, answer = await _within(most, getattr(self.worker.rpc(address), operation)(**message))
            if not is_there:
                is_there, answer = await self._ask_scheduler(address)
        except asyncio.CancelledError:
            # A cancelled query says nothing about the worker.
            if self._silent.get(address) is silence:
                if before is None:
                    del self._silent[address]
                else:
                    self._silent[address] = before
            raise
        except Exception as error:
            is_there, answer = True, LostWorker(f"{type(error).__name__}: {error}")
        # If this process was stopped, the answer may be here and not read yet.
        is_late = time.monotonic() > silence.until + _LATE_S
        if is_there or is_last or is_late:
            self.note_alive(address)
        if is_there or is_late or not is_last:
            return answer
        return LostWorker(f"no answer for {silence_s:g} s, which is daskdist.timeouts.silence")

    async def _ask_scheduler(self, address: str) -> tuple[bool, LostWorker | None]:
        # The scheduler knows which workers have ended.
        try:
            is_there, known = await _within(_SCHEDULER_WITHIN_S, self.worker.scheduler.ncores(workers=[address]))
        except Exception:
            # The scheduler may be busy too.
            return False, None
        is_gone = is_there and address not in known
        return is_gone, LostWorker("it has left the cluster") if is_gone else None


class StepStatus(NamedTuple):
    """The status of a call on a worker.

    Parameters
    ----------
    left
        The replicas there that have left the call, with their exit reasons.
    absent
        The replicas there that have not yet made the collective call in question.
    failed
        The reason if that call failed there, or None.
    """

    left: Sequence[tuple[int, str]]
    absent: Sequence[int]
    failed: str | None


class StepStatusQuery:
    """The repeated query for the status of a call on the workers that this worker waits for.

    Parameters
    ----------
    queries
        Sends the queries.
    key, turn
        The call, and the number of the collective operation in it.
    name
        The name of the operation in messages.
    group
        All replicas.
    every_s
        Seconds between queries while nothing is suspicious.
    on_answer
        Called when answers have arrived.
    """

    def __init__(
        self,
        queries: PeerQueries,
        key: Step,
        turn: int,
        name: str,
        group: ReplicaGroup,
        every_s: float = LOOK_EVERY_S,
        on_answer: Callable[[], None] | None = None,
    ) -> None:
        self._queries = queries
        self._worker = queries.worker
        self._message = {"token": key[0], "step": key[1], "turn": turn, "asker": queries.worker.address}
        self._name = name
        self._group = group
        self._every_s = every_s
        self._silence_s = seconds("timeouts.silence")
        self._on_answer = on_answer
        self._asked: ThreadFuture[dict[str, Any]] | None = None
        self._begun = 0.0
        self.next_at = time.monotonic()
        self._suspects: dict[str, Any] = {}

    @property
    def is_answered(self) -> bool:
        """Return whether there are answers that have not been read."""
        return self._asked is not None and self._asked.done()

    def absent(self, waited_for: Sequence[str], end: float) -> list[int] | None:
        """Return the missing replicas of other workers, from answers to queries made after ``end``; None before those.

        Before ``end`` only the workers that are waited for are queried, from then on all.

        Raises
        ------
        CollectiveError
            A worker that is waited for is lost, a replica on it has left, or the operation has failed on some worker.
        """
        missing = None
        if self._asked is not None and self.is_answered:
            answers, self._asked = self._asked.result(), None
            absent = self._judged(answers, waited_for)
            is_odd = bool(self._suspects) or None in answers.values()
            self.next_at = time.monotonic() + LOOK_EVERY_S if is_odd else self._begun + self._every_s
            if self._begun < end:
                self.next_at = min(self.next_at, max(end, time.monotonic()))
            elif not self._suspects:
                missing = absent
        now = time.monotonic()
        if self._asked is None and now >= self.next_at:
            own_address = self._worker.address
            asked = waited_for if now < end else [address for address in self._group.workers if address != own_address]
            self._begun = now
            self.next_at = now + _SOON_S
            self._asked = asyncio.run_coroutine_threadsafe(
                self._queries(asked, "daskdist_step_status", self._silence_s, **self._message),
                self._worker.loop.asyncio_loop,
            )
            if self._on_answer is not None:
                on_answer = self._on_answer
                self._asked.add_done_callback(lambda _: on_answer())
        return missing

    def _judged(self, answers: Mapping[str, Any], waited_for: Sequence[str]) -> list[int]:
        absent: list[int] = []
        suspects: dict[str, Any] = {}
        for address, answer in answers.items():
            if address not in waited_for:
                # All messages of this worker have arrived.
                absent += () if answer is None or type(answer) is LostWorker else StepStatus(*answer).absent
                continue
            if type(answer) is LostWorker:
                raise lost_worker_error(self._name, self._group, address, answer.why)
            if answer is None:
                absent += self._group.members(address)
                continue
            gone, late, failed = answer
            if failed is not None:
                raise CollectiveError(failed)
            absent += late
            if gone:
                # Messages that it sent before may still be in flight, so accept this only from the second answer on.
                if self._suspects.get(address) == gone:
                    raise left_error(self._name, dict(gone))
                suspects[address] = gone
        self._suspects = suspects
        return sorted(absent)

    def close(self) -> None:
        """Stop querying."""
        if self._asked is not None:
            self._asked.cancel()
