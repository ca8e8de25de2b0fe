"""Questions to other workers about a call, which tell a lost worker from a busy one."""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from daskdist.config import seconds
from daskdist.errors import CollectiveError
from daskdist.execute.messages.link import WorkerLinks, silence_error
from daskdist.strategy.collectives.messages import Answer, StatusAsked
from daskdist.strategy.collectives.rendezvous import LOOK_EVERY_S, left_error
from daskdist.strategy.group import ReplicaGroup, Step, lost_worker_error


class LostWorker(NamedTuple):
    """Takes the place of the answer of a lost worker.

    Parameters
    ----------
    why
        The reason.
    """

    why: str


@dataclass(eq=False)
class Asked:
    """A question that was sent to workers, and their answers so far.

    Parameters
    ----------
    addresses
        The workers.
    asked_s
        The time of the links' clock when it was sent.
    answers
        The answers so far, by worker.
    """

    addresses: Sequence[str]
    asked_s: float
    answers: dict[str, Any] = field(default_factory=dict)


class Questions:
    """The questions of this worker that somebody still refers to.

    Parameters
    ----------
    links
        The links to other workers.
    changed
        Notified when answers arrive; answers change under its lock.
    """

    def __init__(self, links: WorkerLinks, changed: threading.Condition) -> None:
        self._links = links
        self._changed = changed
        self._numbers = itertools.count(1)
        self._asked: weakref.WeakValueDictionary[int, Asked] = weakref.WeakValueDictionary()
        links.handlers[Answer] = self._receive

    def ask(self, addresses: Sequence[str], question: Callable[[int], Any]) -> Asked:
        """Send a question to workers, as the message for a number."""
        request, asked = next(self._numbers), Asked(addresses, self._links.clock.run_s)
        self._asked[request] = asked
        for address in addresses:
            self._links.send(address, question(request), partial(self._note_lost, request, address))
        return asked

    def answers(self, asked: Asked) -> dict[str, Any]:
        """Return what workers have answered to a question; a `LostWorker` for a lost one."""
        most = seconds("timeouts.silence")
        with self._changed:
            answers = dict(asked.answers)
        for address in asked.addresses:
            since_s = max(asked.asked_s, self._links.moved_s(address))
            if self._links.clock.run_s - since_s > most:
                answers.setdefault(address, LostWorker(silence_error(most)))
        return answers

    def _note_lost(self, request: int, address: str, why: str | None) -> None:
        if why is not None:
            self._receive(address, Answer(request, LostWorker(why)))

    def _receive(self, sender: str, answer: Answer) -> None:
        with self._changed:
            asked = self._asked.get(answer.request)
            if asked is not None:
                asked.answers.setdefault(sender, answer.content)
                self._changed.notify_all()


class Inquiry:
    """The repeated question for the status of a call on the workers that this one waits for.

    Parameters
    ----------
    questions
        Sends the questions.
    address
        The address of this worker, which is not asked.
    key, turn
        The call, and the number of the collective operation in it.
    name
        The name of the operation in messages.
    group
        All replicas.
    end
        The time by which all replicas should have made the call.
    """

    def __init__(
        self, questions: Questions, address: str, key: Step, turn: int, name: str, group: ReplicaGroup, end: float
    ) -> None:
        self._questions = questions
        self._others = [worker for worker in group.workers if worker != address]
        self._question = partial(StatusAsked, key=key, turn=turn)
        self._name = name
        self._group = group
        self._end = end
        self._asked: Asked | None = None
        # True if the last question was sent after the end.
        self._is_late = False
        self._next_at = 0.0

    def absent(self, waited_for: Sequence[str] | None = None) -> list[int] | None:
        """Return the missing replicas of other workers, from answers to questions asked after the end; None before.

        Before the end only the workers that are waited for are asked, from then on all; None stands for all.

        Raises
        ------
        CollectiveError
            A worker that is waited for is lost, a replica on it has left, or the operation has failed on some worker.
        """
        missing, now = None, time.monotonic()
        waited_for = self._others if waited_for is None else waited_for
        if self._asked is not None:
            answers = self._questions.answers(self._asked)
            absent = self._judged(answers, waited_for)
            if answers.keys() >= set(self._asked.addresses):
                missing = absent if self._is_late else None
                self._asked = None
        if self._asked is None and now >= self._next_at:
            self._is_late = now >= self._end
            self._asked = self._questions.ask(self._others if self._is_late else waited_for, self._question)
            self._next_at = now + LOOK_EVERY_S if self._is_late else min(now + LOOK_EVERY_S, self._end)
        return missing

    def _judged(self, answers: Mapping[str, Any], waited_for: Sequence[str]) -> list[int]:
        absent: list[int] = []
        for address, answer in answers.items():
            if type(answer) is LostWorker:
                if address in waited_for:
                    raise lost_worker_error(self._name, self._group, address, answer.why)
                continue
            absent += answer.absent
            # What another worker needs may have been sent already.
            if address in waited_for:
                if answer.failed is not None:
                    raise CollectiveError(answer.failed)
                if answer.left:
                    raise left_error(self._name, answer.left)
        return sorted(absent)
