"""The tasks that were submitted to a cluster, which several threads add and list."""

from __future__ import annotations

import sys
import threading

import pytest

from daskdist.execute.submitted_tasks import SubmittedTasks


class Held:
    """An object in place of a future, which the tasks only refer to."""


@pytest.fixture
def _switches_often():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("_switches_often")
def test_tasks_are_listed_while_another_thread_adds_some():
    tasks, futures, is_over = SubmittedTasks(), [Held() for _ in range(2000)], threading.Event()
    for future in futures:
        tasks.add(future)

    def add_more():
        while not is_over.is_set():
            futures.append(Held())
            tasks.add(futures[-1])

    adding = threading.Thread(target=add_more)
    adding.start()
    try:
        sizes = [len(list(tasks))]
        while len(sizes) < 50 or sizes[-1] == sizes[0]:
            sizes.append(len(list(tasks)))
    finally:
        is_over.set()
        adding.join()
    assert sizes == sorted(sizes)
