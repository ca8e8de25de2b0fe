"""Replicas that hardly do more than wait for one another wake up on one core, and are as free as before once awake."""

import os
import threading
import time

import numpy as np
import pytest

import daskdist
from daskdist.strategy import one_core
from daskdist.strategy.one_core import Turns

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system lets no thread choose its cores"),
]

needs_cores = pytest.mark.skipif(
    hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) < 2, reason="there is one core only"
)


@pytest.fixture
def quick(monkeypatch):
    # Every turn counts as quick, however busy the machine is.
    monkeypatch.setattr(one_core, "_AWAKE_S", 60.0)
    monkeypatch.setattr(one_core, "_WAIT_S", 60.0)


class Gate:
    """A lock that knows on which cores the threads that take it may run while they wait."""

    def __init__(self):
        self._lock = threading.Lock()
        self.cores = None

    def acquire(self, timeout):
        self.cores = os.sched_getaffinity(0)
        return self._lock.acquire(timeout=timeout)


def waited(turns, num_turns):
    """The cores that this thread may run on while it waits, in each of its turns; and those once it is awake."""
    asleep, awake = [], []
    for _ in range(num_turns):
        gate = Gate()
        turns.wait(gate, 30)
        asleep.append(gate.cores)
        awake.append(os.sched_getaffinity(0))
    return asleep, awake


@needs_cores
def test_who_waits_in_many_quick_turns_wakes_up_on_one_core(quick):
    cores = os.sched_getaffinity(0)
    asleep, awake = waited(Turns(), 120)
    num_before = round(one_core._SPREAD_S / one_core._GAIN_S)
    assert asleep[: num_before - 1] == [cores] * (num_before - 1)
    assert all(len(each) == 1 and each < cores for each in asleep[num_before + 1 :])
    assert len(set(map(frozenset, asleep[num_before + 1 :]))) == 1
    assert awake == [cores] * 120


@needs_cores
@pytest.mark.parametrize("limit", ["_AWAKE_S", "_WAIT_S"], ids=["long awake", "long asleep"])
def test_turns_that_are_not_quick_change_nothing(quick, monkeypatch, limit):
    monkeypatch.setattr(one_core, limit, -1.0)
    cores = os.sched_getaffinity(0)
    assert waited(Turns(), 120) == ([cores] * 120, [cores] * 120)


@needs_cores
def test_one_long_turn_is_enough_to_be_free_again(quick, monkeypatch):
    turns = Turns()
    assert len(waited(turns, 120)[0][-1]) == 1
    monkeypatch.setattr(one_core, "_AWAKE_S", 1e-3)
    turns._awake_since = time.perf_counter() - 0.02
    asleep, _ = waited(turns, 2)
    assert asleep[1] == os.sched_getaffinity(0)


@needs_cores
def test_cores_that_a_thread_chose_itself_stay(quick):
    chosen = set(sorted(os.sched_getaffinity(0))[:1])
    seen = []

    def run():
        os.sched_setaffinity(0, chosen)
        seen.extend(waited(Turns(), 120))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [[chosen] * 120] * 2


def test_a_turn_that_does_not_come_is_waited_for_so_long(quick):
    turns = Turns()
    cores = os.sched_getaffinity(0)
    waited(turns, 120)
    gate = threading.Lock()
    gate.acquire()
    start = time.monotonic()
    turns.wait(gate, 0.05)
    assert 0.05 <= time.monotonic() - start < 30
    assert os.sched_getaffinity(0) == cores


@pytest.mark.parametrize("error", [AttributeError, PermissionError], ids=["no such call", "not allowed"])
def test_where_no_thread_may_choose_they_wait_as_they_are(quick, monkeypatch, error):
    def refuse(*args):
        raise error

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    cores = os.sched_getaffinity(0)
    assert waited(Turns(), 120) == ([cores] * 120, [cores] * 120)


def many(value, num_calls):
    context = daskdist.get_replica_context()
    before = os.sched_getaffinity(0)
    found = [float(context.all_reduce("SUM", value)) for _ in range(num_calls)]
    return found, before, os.sched_getaffinity(0)


@pytest.mark.parametrize("num_replicas", [2, 5])
def test_replicas_reduce_and_are_as_free_as_before(quick, num_replicas):
    strategy = daskdist.MirroredStrategy([f"CPU:{number}" for number in range(num_replicas)])
    values = daskdist.PerReplica([np.float32(number) for number in range(num_replicas)])
    for found, before, after in strategy.local_results(strategy.run(many, args=(values, 500))):
        assert found == [sum(range(num_replicas))] * 500
        assert before == after


def leaves_early(num_calls):
    context = daskdist.get_replica_context()
    for turn in range(num_calls):
        if context.replica_id_in_sync_group == 1 and turn == num_calls - 1:
            raise RuntimeError("enough")
        context.all_reduce("SUM", 1.0)


def test_who_waits_on_one_core_hears_of_who_left(quick):
    with pytest.raises(RuntimeError, match="enough"):
        daskdist.MirroredStrategy(["CPU:0", "CPU:1"]).run(leaves_early, args=(400,))
