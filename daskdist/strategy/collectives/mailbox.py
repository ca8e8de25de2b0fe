"""A worker's state of collectives: its replicas, those that have left, and messages of other workers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future as ThreadFuture
from functools import partial
from typing import Any, Final

from distributed import Worker

from daskdist.config import seconds
from daskdist.errors import CollectiveError
from daskdist.execute.messages.failure import Packed
from daskdist.execute.messages.link import WorkerLinks
from daskdist.strategy.collectives.device_links import DeviceLinks
from daskdist.strategy.collectives.messages import Answer, Contribution, StatusAsked, StepsAsked, StepStatus, Turn
from daskdist.strategy.collectives.questions import Inquiry, LostWorker, Questions
from daskdist.strategy.collectives.rendezvous import (
    HAS_ENDED,
    LOOK_EVERY_S,
    Rendezvous,
    closed_error,
    late_error,
    look_after_s,
)
from daskdist.strategy.collectives.step_counts import KnownSteps, PipelineKey, RemotePipeline, StepCounts
from daskdist.strategy.collectives.transport import Transport
from daskdist.strategy.group import ReplicaGroup, Step, describe_error, lost_worker_error, named_replicas

# The number of calls whose exit reasons are remembered.
_MOST_OVER: Final = 1024
_LOOK_AGAIN_S: Final = 0.02
# The name of the mailbox among the extensions of its worker, which keep it for as long as the worker exists.
_EXTENSION: Final = "daskdist-mailbox"


class Mailbox:
    """A worker's state of collectives."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.address = worker.address
        self.groups: dict[str, ReplicaGroup] = {}
        self.device_links: dict[ReplicaGroup, DeviceLinks] = {}
        # The `VariableStore` of each strategy.
        self.stores: dict[str, Any] = {}
        self._rendezvous: dict[Step, Rendezvous] = {}
        # step -> replica -> exit reason; kept for calls that raised or made collective calls.
        self._over: OrderedDict[Step, dict[int, str]] = OrderedDict()
        # (strategy, replica) -> its last finished call, as the calls of a replica run in order.
        self._ended: dict[tuple[str, int], int] = {}
        # Received messages: step -> (turn of the operation, part of it, sender) -> message.
        self._mail: dict[Step, dict[tuple[int, str, str], Contribution]] = {}
        # step -> worker -> the reason why a message to it could not be sent.
        self._unsent: dict[Step, dict[str, str]] = {}
        self.changed = threading.Condition()
        self.step_counts = StepCounts()
        self.links = WorkerLinks(worker)
        self.questions = Questions(self.links, self.changed)
        self.links.handlers[Contribution] = self._receive
        self.links.handlers[StatusAsked] = self._answer_status
        self.links.handlers[StepsAsked] = self._answer_steps

    def _receive(self, sender: str, mail: Contribution) -> None:
        with self.changed:
            key, number, _ = mail.turn
            if key not in self._rendezvous and self._are_over(key):
                # No replica is left here to read it.
                return
            self._mail.setdefault(key, {})[number, mail.part, sender] = mail
            self.changed.notify_all()

    def _answer_status(self, sender: str, asked: StatusAsked) -> None:
        key = asked.key
        with self.changed:
            rendezvous, over = self._rendezvous.get(key), self._how_over(key)
            absent, failed = self._members(key[0]), None
            if rendezvous is not None:
                absent, failed = rendezvous.state(asked.turn)
            # A finished replica will not make the call, even if its end was not reported yet.
            status = StepStatus(over, [number for number in absent if number not in over], failed)
        self.links.send(sender, Answer(asked.request, status))

    def _members(self, token: str) -> Sequence[int]:
        # The replicas of a strategy here.
        group = self.groups.get(token)
        return () if group is None else group.members(self.address)

    def _how_over(self, key: Step) -> dict[int, str]:
        # replica -> exit reason.
        token, step = key
        ended = [number for number in self._members(token) if step <= self._ended.get((token, number), -1)]
        return dict.fromkeys(ended, HAS_ENDED) | self._over.get(key, {})

    def _are_over(self, key: Step) -> bool:
        # True if no replica here is still in the call.
        return self._how_over(key).keys() >= set(self._members(key[0]))

    def group(self, token: str) -> ReplicaGroup:
        """Return the replicas of a strategy; raise an error if it is unknown."""
        group = self.groups.get(token)
        if group is None:
            raise CollectiveError(f"{self.address} does not know the strategy of this replica; create a new strategy")
        return group

    def rendezvous(self, token: str, step: int) -> Rendezvous:
        """Return the rendezvous of a call."""
        with self.changed:
            rendezvous = self._rendezvous.get((token, step))
            if rendezvous is None:
                group = self.group(token)
                exchange = Transport(self, group, step) if len(group.workers) > 1 else None
                members = group.members(self.address)
                rendezvous = self._rendezvous[token, step] = Rendezvous(members, exchange)
                for number, exit_reason in self._how_over((token, step)).items():
                    # The replica had left before any other waited.
                    rendezvous.leave(number, exit_reason)
            return rendezvous

    def store(self, token: str) -> Any:
        """Return the store of the replicas of a strategy on this worker; None if the strategy is unknown."""
        return self.stores.get(token)

    def leave(self, token: str, step: int, number: int, error: BaseException | str | None) -> None:
        """Note that a replica's call has finished, and the error that ended it."""
        key = (token, step)
        if isinstance(error, BaseException):
            error = describe_error(error)
        with self.changed:
            rendezvous = self._rendezvous.get(key)
            if error is None and rendezvous is not None:
                # The replica handled the failure, but the others must still be notified.
                error = rendezvous.failure_of(number)
            if token in self.groups:
                self._ended[token, number] = step
            if error is not None or rendezvous is not None:
                self._over.setdefault(key, {})[number] = error or HAS_ENDED
                if len(self._over) > _MOST_OVER:
                    self._over.popitem(last=False)
            if rendezvous is not None and rendezvous.leave(number, error):
                del self._rendezvous[key]
                self._forget(key)
            elif rendezvous is None and key in self._mail and self._are_over(key):
                # Drop messages sent before all replicas here had left.
                self._forget(key)

    def register(self, group: ReplicaGroup, new_store: Callable[[str], Any]) -> None:
        """Register the replicas of a strategy; if some are lost, the remaining ones keep their variables."""
        with self.changed:
            before, store = self.groups.get(group.token), self.stores.get(group.token)
            self.groups[group.token] = group
            self._drop_links(group.token, group)
            if before is None or store is None:
                self.stores[group.token] = new_store(group.token)
                return
            address, token = self.address, group.token
            numbers = dict(zip(before.members(address), group.members(address), strict=True))
            store.renumber(numbers)
            store.lost = ()
            ended = {(token, new): self._ended.pop((token, old), -1) for old, new in numbers.items()}
            self._ended.update(ended)

    def _drop_links(self, token: str, current: ReplicaGroup | None = None) -> None:
        for group in [group for group in self.device_links if group.token == token and group != current]:
            del self.device_links[group]

    def end_waiting_for(self, token: str, lost: Sequence[str], why: str) -> None:
        """End all waiting for workers that are lost for a reason, and refuse further calls until `register`."""
        with self.changed:
            store = self.store(token)
            if store is not None:
                store.lost = tuple(lost)
            for key in [known_key for known_key in self._rendezvous if known_key[0] == token]:
                self._unsent.setdefault(key, {}).update(dict.fromkeys(lost, why))
            self.changed.notify_all()

    def forget(self, token: str) -> None:
        """Drop all state of a strategy."""
        with self.changed:
            for number in self._members(token):
                self._ended.pop((token, number), None)
            self.groups.pop(token, None)
            self._drop_links(token)
            self.stores.pop(token, None)
            for key in [known_key for known_key in (*self._mail, *self._unsent) if known_key[0] == token]:
                self._forget(key)
            for key, rendezvous in self._rendezvous.items():
                if key[0] == token:
                    rendezvous.close()
            # Wake the waiting replicas, which would not notice who has left.
            self.changed.notify_all()

    def _forget(self, key: Step) -> None:
        self._mail.pop(key, None)
        self._unsent.pop(key, None)

    def send(self, address: str, mail: Contribution) -> ThreadFuture[None]:
        """Send a message to another worker; the future is done once it has arrived or the worker is lost."""
        key = mail.turn.key
        sent: ThreadFuture[None] = ThreadFuture()

        def over(why: str | None) -> None:
            sent.set_result(None)
            with self.changed:
                if why is not None and key in self._rendezvous:
                    self._unsent.setdefault(key, {})[address] = why
                    self.changed.notify_all()

        self.links.send(address, mail, over)
        return sent

    def take(self, turn: Turn, part: str, senders: Sequence[str], group: ReplicaGroup) -> list[Packed]:
        """Wait for the messages of other workers; return their data in the order of the senders.

        Raises
        ------
        CollectiveError
            A worker is lost, a replica on it has left or made another call, or messages do not arrive in time.
        """
        key, number, signature = turn
        name = signature.name
        most = seconds("timeouts.collective")
        now = time.monotonic()
        end, look = now + most, now + min(most, LOOK_EVERY_S)
        inquiry: Inquiry | None = None
        # Under the lock, as what a worker sent before its answer counts.
        with self.changed:
            while True:
                if key[0] not in self.groups:
                    raise closed_error(name)
                mail = self._mail.setdefault(key, {})
                for message in mail.values():
                    if message.turn.number == number:
                        signature.check(message.turn.signature)
                missing = [sender for sender in senders if (number, part, sender) not in mail]
                if not missing:
                    return [mail.pop((number, part, sender)).data for sender in senders]
                if unsent := self._unsent.get(key):
                    raise lost_worker_error(name, group, *next(iter(unsent.items())))
                now = time.monotonic()
                if inquiry is None and now >= look:
                    inquiry = Inquiry(self.questions, self.address, key, number, name, group, end)
                if inquiry is not None and (absent := inquiry.absent(missing)):
                    raise late_error(name, absent, most)
                self.changed.wait(look_after_s(end))

    def _answer_steps(self, sender: str, asked: StepsAsked, waited_s: float = 0.0) -> None:
        known = self._known_steps(asked)
        if known.is_known(asked.first) or waited_s > LOOK_EVERY_S:
            self.links.send(sender, Answer(asked.request, known))
            return
        # Wait a while if the step is not known yet.
        wait_s = min(max(waited_s, 0.001), _LOOK_AGAIN_S)
        asyncio.get_running_loop().call_later(wait_s, self._answer_steps, sender, asked, waited_s + wait_s)

    def _known_steps(self, asked: StepsAsked) -> KnownSteps:
        known = self.step_counts.known_from(asked.pipeline, asked.iteration, asked.first)
        are_over = self._how_over(asked.key).keys() >= set(asked.replicas)
        return known._replace(is_over=True) if are_over else known

    def ask_steps(
        self, key: Step, remote: RemotePipeline, pipeline: PipelineKey, iteration: int, first: int
    ) -> KnownSteps:
        """Ask another worker for the steps of a pipeline, starting at one; wait until it knows that one.

        Raises
        ------
        CollectiveError
            The worker is lost, or does not reach the step in time.
        """
        most = seconds("timeouts.collective")
        end = time.monotonic() + most
        question = partial(
            StepsAsked, key=key, pipeline=pipeline, iteration=iteration, first=first, replicas=remote.replicas
        )
        known = KnownSteps(0, {}, False)
        while not known.is_known(first):
            if time.monotonic() > end:
                raise CollectiveError(
                    f"run: {named_replicas(remote.replicas)} did not reach step {first} of pass "
                    f"{iteration} of a distributed dataset within {most:g} s, which is daskdist.timeouts.collective; "
                    "all replicas must make the same passes"
                )
            answer: LostWorker | KnownSteps = self._answer_of(remote.worker, question)
            group = self.groups.get(key[0])
            if group is None:
                raise closed_error("run")
            if isinstance(answer, LostWorker):
                raise lost_worker_error("run", group, remote.worker, answer.why)
            known = answer
        return known

    def _answer_of(self, address: str, question: Callable[[int], Any]) -> Any:
        asked = self.questions.ask([address], question)
        with self.changed:
            while not (answers := self.questions.answers(asked)):
                self.changed.wait(LOOK_EVERY_S)
        return answers[address]


def mailbox_of(worker: Worker) -> Mailbox:
    """Return the mailbox of a worker, created in the worker's event loop at the first use."""
    mailbox: Mailbox | None = worker.extensions.get(_EXTENSION)
    if mailbox is None:
        mailbox = worker.extensions[_EXTENSION] = Mailbox(worker)
    return mailbox
