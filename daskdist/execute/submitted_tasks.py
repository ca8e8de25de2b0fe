"""The tasks that were submitted to a cluster, which are submitted again to another scheduler if theirs is lost."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from distributed import Future

from daskdist.execute.private_names import follow

# Tasks are submitted after those whose results they need.
_numbers: Final = itertools.count()


@dataclass(eq=False, slots=True)
class SubmittedTask:
    """A task that was submitted.

    Parameters
    ----------
    send
        Submits it with the futures of its inputs and the address of its worker (None for any), and returns the future;
        None if it cannot be submitted again, as the program no longer has the data.
    inputs
        The tasks whose results it takes as a list; None if it takes none.
    depth
        The number of tasks of which each needs the one before it, up to this one.
    worker
        The address of its worker.
    is_pinned
        Whether no other worker may run it.
    needs_disk
        Whether that is as it reads a file on its worker's disk, which one in its place may lack.
    """

    send: Callable[[list[Future] | None, str | None], Future | None] | None = None
    inputs: list[SubmittedTask] | None = None
    depth: int = 0
    worker: str | None = None
    is_pinned: bool = False
    needs_disk: bool = False
    number: int = field(default_factory=_numbers.__next__)


class SubmittedTasks:
    """The futures of a strategy's tasks, for as long as they are referenced."""

    def __init__(self) -> None:
        self._tasks: weakref.WeakKeyDictionary[Future, SubmittedTask] = weakref.WeakKeyDictionary()

    def __iter__(self) -> Iterator[Future]:
        # The references are listed at once: other threads may add tasks meanwhile.
        futures = [reference() for reference in self._tasks.keyrefs()]
        return iter([future for future in futures if future is not None])

    def add(self, future: Future, task: SubmittedTask | None = None) -> None:
        """Add the future of a task; None if it cannot be submitted again."""
        self._tasks[future] = SubmittedTask() if task is None else task

    def task_of(self, future: Future) -> SubmittedTask:
        """Return the task of a future; one that cannot be submitted again if the future was not added."""
        return self._tasks.get(future) or SubmittedTask()

    def submit_again(self, successors: Mapping[str, str]) -> None:
        """Submit all tasks again whose futures are cancelled, as their scheduler is lost; the futures remain the same.

        Futures of tasks that cannot be submitted again remain cancelled: those of data that only the cluster had, and
        those that only a worker without a successor may run.

        Parameters
        ----------
        successors
            worker -> the worker of the other scheduler in its place.
        """
        futures = [(future, self._tasks[future]) for future in self if future.cancelled()]
        tasks: dict[int, SubmittedTask] = {}
        unvisited = [task for _, task in futures]
        while unvisited:
            task = unvisited.pop()
            if task.number not in tasks:
                tasks[task.number] = task
                unvisited += task.inputs or ()
        keys: dict[int, list[Future]] = {}
        for future, task in futures:
            keys.setdefault(task.number, []).append(future)
        # The results of tasks that nothing else refers to are needed until the tasks that need them are submitted.
        again: dict[int, Future] = {}
        for number in sorted(tasks):
            task = tasks[number]
            worker = None if task.worker is None else successors.get(task.worker)
            is_lost = any(needed.number not in again for needed in task.inputs or ())
            is_elsewhere = worker is None or (task.needs_disk and worker != task.worker)
            if task.send is None or is_lost or (task.is_pinned and is_elsewhere):
                continue
            inputs = None if task.inputs is None else [again[needed.number] for needed in task.inputs]
            submitted = task.send(inputs, worker)
            if submitted is None:
                continue
            again[number], task.worker = submitted, worker
            for future in keys.get(number, ()):
                follow(future, again[number])
