"""Replicas of a step run at the same time, for any number of threads, unless the step is very short."""

from __future__ import annotations

import contextvars
import gc
import os
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from conftest import eventually, mirrored

import daskdist
from daskdist import PerReplica, get_replica_context
from daskdist.errors import CollectiveError

TIMEOUT_S = 20.0


def number_here() -> int:
    return get_replica_context().replica_id_in_sync_group


def meet(folder, num_replicas):
    """Return the number of replicas that are inside this function together, without a collective."""
    open(os.path.join(folder, str(number_here())), "w").close()
    deadline = time.monotonic() + TIMEOUT_S
    while (actual := len(os.listdir(folder))) < num_replicas and time.monotonic() < deadline:
        time.sleep(0.005)
    return actual


def test_replicas_of_one_process_run_at_the_same_time(tmp_path):
    assert mirrored(3).run(meet, args=(str(tmp_path), 3)).values == (3, 3, 3)


@pytest.mark.cluster
@pytest.mark.parametrize("per_worker", [1, 2, 4])
def test_replicas_of_workers_of_one_thread_run_at_the_same_time(client, tmp_path, per_worker):
    size = 2 * per_worker
    with daskdist.MultiWorkerMirroredStrategy(client, num_replicas_per_worker=per_worker) as strategy:
        for number in range(3):
            folder = tmp_path / str(number)
            folder.mkdir()
            assert strategy.local_results(strategy.run(meet, args=(str(folder), size))) == (size,) * size


def wait_for(path):
    deadline = time.monotonic() + TIMEOUT_S
    while not os.path.exists(path) and time.monotonic() < deadline:
        time.sleep(0.005)


@pytest.mark.cluster
def test_replicas_run_at_the_same_time_though_threads_are_busy(start_cluster, tmp_path):
    client = start_cluster(1, 2)
    (tmp_path / "replicas").mkdir()
    with daskdist.MultiWorkerMirroredStrategy(client, num_replicas_per_worker=2) as strategy:
        other = client.submit(wait_for, str(tmp_path / "over"), pure=False)
        try:
            actual = strategy.local_results(strategy.run(meet, args=(str(tmp_path / "replicas"), 2)))
        finally:
            (tmp_path / "over").touch()
            other.result()
    assert actual == (2, 2)


@pytest.mark.cluster
def test_steps_under_way_continue_while_replicas_wait_for_one_another(client, tmp_path):
    with daskdist.MultiWorkerMirroredStrategy(client, num_replicas_per_worker=2) as strategy:
        folders = [tmp_path / str(number) for number in range(8)]
        for folder in folders:
            folder.mkdir()
        actual = [strategy.run(meet, args=(str(folder), 4)) for folder in folders]
        assert [strategy.local_results(result) for result in actual] == [(4, 4, 4, 4)] * 8


def test_short_calls_take_turns_in_the_thread_of_the_caller():
    strategy = mirrored(2)
    for _ in range(20):
        actual = strategy.run(threading.get_ident)
        # On a busy machine a short call may take long, so try several times.
        if actual.values == (threading.get_ident(),) * 2:
            return
    pytest.fail("a thread for each of 20 calls that take no time")


def test_replicas_are_called_in_the_context_of_the_caller(tmp_path):
    name = contextvars.ContextVar("name", default="none")
    token = name.set("of the program")
    try:
        actual = mirrored(3).run(lambda: (meet(str(tmp_path), 3), name.get()))
    finally:
        name.reset(token)
    assert actual[1] == "of the program"


def test_replicas_that_began_separately_learn_who_raised(tmp_path):
    def step():
        meet(str(tmp_path), 3)
        if number_here() == 1:
            raise ValueError("of one")
        try:
            get_replica_context().all_reduce("SUM", 1.0)
        except CollectiveError as error:
            report.append(str(error))
            raise

    report: list[str] = []
    with pytest.raises(ValueError, match="of one"):
        mirrored(3).run(step)
    assert len(report) == 2
    assert all("replica 1 raised ValueError: of one" in value for value in report)


def test_replicas_under_way_learn_of_an_earlier_replicas_error(tmp_path):
    is_over = threading.Event()

    def step():
        meet(str(tmp_path), 2)
        if number_here() == 0:
            try:
                raise ValueError("of the first")
            finally:
                is_over.set()
        assert is_over.wait(TIMEOUT_S)
        return get_replica_context().all_reduce("SUM", 1.0)

    with pytest.raises(ValueError, match="of the first"):
        mirrored(2).run(step)


def test_the_first_that_raises_at_once_leaves_the_others_out():
    called = []

    def step():
        called.append(number_here())
        raise ValueError("at once")

    with pytest.raises(ValueError, match="at once"):
        mirrored(2).run(step)
    # On a busy machine the call on the first replica may take so long that the other gets a thread, and is first.
    assert sorted(called) in ([0], [0, 1])


def test_arguments_are_freed_without_the_garbage_collector():
    strategy = mirrored(2)
    x = np.ones(8)
    gone = weakref.ref(x)
    gc.collect()
    gc.disable()
    try:
        strategy.run(lambda x: get_replica_context().all_reduce("SUM", float(x.sum())), args=(PerReplica([x, x]),))
        del x
        # The thread that watches calls may refer to a call for a moment.
        deadline = time.monotonic() + TIMEOUT_S
        while gone() is not None and time.monotonic() < deadline:
            time.sleep(0.005)
        assert gone() is None
    finally:
        gc.enable()


def test_replicas_on_devices_begin_at_once_in_threads_that_are_kept(strict):
    strategy = daskdist.MirroredStrategy(["STRICT:0", "STRICT:1"])
    together = threading.Barrier(2, timeout=TIMEOUT_S)
    threads = []

    def step():
        # Replicas that were called one after the other would time out here.
        together.wait()
        threads.append(threading.current_thread())
        return number_here()

    for _ in range(5):
        assert strategy.run(step).values == (0, 1)
    assert len(set(threads)) == 2
    assert threading.current_thread() not in threads
    # Idle threads end; a later call starts others.
    eventually(lambda: not any(thread.is_alive() for thread in threads))
    assert strategy.run(step).values == (0, 1)


def test_no_checks_without_calls():
    mirrored(2).run(number_here)
    deadline = time.monotonic() + TIMEOUT_S
    while any(thread.name == "daskdist watch" for thread in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not [value for value in threading.enumerate() if value.name == "daskdist watch"]
    # A later call starts the checks again.
    assert mirrored(2).run(number_here).values == (0, 1)


def test_loops_on_the_replicas_continue_together(tmp_path):
    strategy = mirrored(2)
    batches = strategy.distribute_dataset(daskdist.Dataset.range(40).batch(4))

    def loop(batches):
        actual = 0
        for number, batch in enumerate(batches):
            if number == 3:
                assert meet(str(tmp_path), 2) == 2
            actual += int(batch.sum())
        return actual

    first, second = strategy.run(loop, args=(batches,)).values
    assert first + second == sum(range(40))


def in_threads(variable):
    """Use a replica in threads of its function, of which one has its context."""
    outcomes, replica = [], number_here()

    def use(operation):
        try:
            outcomes.append(operation())
        except RuntimeError as error:
            outcomes.append(f"replica {replica} started" in str(error) or str(error))

    def add_up():
        return float(get_replica_context().all_reduce("SUM", np.float64(1 + number_here())))

    def uses():
        use(add_up)
        use(daskdist.get_strategy)
        use(lambda: variable.assign_add(1.0))

    with ThreadPoolExecutor(1) as pool:
        pool.submit(uses).result(TIMEOUT_S)
        pool.submit(contextvars.copy_context().run, use, add_up).result(TIMEOUT_S)
    thread = threading.Thread(target=uses)
    thread.start()
    thread.join(TIMEOUT_S)
    return str(outcomes)


@pytest.mark.cluster
@pytest.mark.parametrize("is_cluster", [False, True])
def test_threads_of_a_replica_are_refused_unless_they_have_its_context(request, is_cluster):
    strategy = request.getfixturevalue("on_cluster") if is_cluster else mirrored(2)
    with strategy.scope():
        variable = daskdist.Variable(0.0, aggregation="SUM")
    outcome = str([True, True, True, 3.0, True, True, True])
    assert strategy.local_results(strategy.run(in_threads, args=(variable,))) == (outcome, outcome)
    assert float(variable) == 0.0
