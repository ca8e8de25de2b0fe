"""Replicas that miss a collective, come late, call another one or are lost: the errors that the others get."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time

import dask
import numpy as np
import pytest
from conftest import frequent_heartbeats, new_cluster
from distributed import Client, LocalCluster, get_worker
from programs import Program

import daskdist
from daskdist import errors
from daskdist.config import seconds
from daskdist.strategy.collectives.mailbox import mailbox_of
from daskdist.strategy.collectives.messages import Answer, Contribution
from daskdist.strategy.collectives.rendezvous import HAS_ENDED, left_error

pytestmark = [pytest.mark.timeout(120), pytest.mark.cluster]


def context():
    return daskdist.get_replica_context()


def until(is_so, most_s=30):
    end = time.monotonic() + most_s
    while not is_so() and time.monotonic() < end:
        time.sleep(0.02)


def told(call):
    """Return the results or the error of a call as text."""
    begin = time.monotonic()
    try:
        return f"gave {call()}"
    except errors.CollectiveError as error:
        return f"{time.monotonic() - begin:.1f} {error}"


def hold_messages(links, is_held):
    """Hold messages back that are sent from now on; return a function that sends them, and ends this."""
    send, lock, held = links.send, threading.Lock(), []

    def send_later(*message):
        with lock:
            if held is not None and is_held(message[1]):
                held.append(message)
            else:
                send(*message)

    def release():
        nonlocal held
        with lock:
            for message in held:
                send(*message)
            held = None
            del links.send

    links.send = send_later
    return release


@pytest.fixture(scope="module")
def nine():
    """Return a client of so many workers that collectives use a tree."""
    with new_cluster(9) as client:
        yield client


@pytest.fixture(scope="module")
def breakable():
    """Return a client of three workers, which start again when a test kills them."""
    with new_cluster(3, 2) as client:
        yield client


# --- other calls ---


@pytest.mark.parametrize("merges", [[0], [1], [0, 2]])
def test_merge_call_and_another_call_show_both_orders_at_once(start_cluster, merges):
    def step(merges):
        number = context().replica_id_in_sync_group
        context().all_reduce("MAX", 1)
        if number in merges:
            return told(lambda: context().merge_call(len))
        return told(lambda: context().all_reduce("SUM", 1))

    with daskdist.MultiWorkerMirroredStrategy(start_cluster(3, 1)) as strategy:
        actual = strategy.local_results(strategy.run(step, args=(daskdist.PerReplica([merges] * 3),)))
    for result in actual:
        seconds, words = result.split(" ", 1)
        assert float(seconds) < 10
        assert "replicas make different calls" in words
        assert "calls all_reduce(MAX), all_reduce(SUM)" in words
        assert "calls all_reduce(MAX), merge_call(len)" in words


# --- some fail ---


@pytest.mark.parametrize(
    ("kind", "fail", "words"),
    [
        ("value", [2, 3], r"all_reduce\(SUM\): a value is <U3"),
        ("given", [2, 3], r"merge_call\(len\): a replica's value cannot be pickled"),
        ("result", [0, 1], r"merge_call\(.*lock\): the function's result cannot be pickled"),
    ],
)
def test_a_failure_on_one_worker_is_reported_to_others_at_once(start_cluster, kind, fail, words):
    def lock(strategy):
        return threading.Lock()

    def step(fail):
        failed = context().replica_id_in_sync_group in fail
        call = {
            "value": lambda: context().all_reduce("SUM", "abc" if failed else 1),
            "given": lambda: context().merge_call(len, args=(threading.Lock() if failed else 1,)),
            "result": lambda: context().merge_call(lock),
        }[kind]
        with pytest.raises(errors.ArgumentError if failed else errors.CollectiveError) as raised:
            call()
        return [str(raised.value), context().all_reduce("SUM", 1)]

    with daskdist.MultiWorkerMirroredStrategy(start_cluster(2, 2), num_replicas_per_worker=2) as strategy:
        strategy.local_results(strategy.run(lambda: context().all_reduce("SUM", 1)))
        begin = time.monotonic()
        actual = strategy.local_results(strategy.run(step, args=(daskdist.PerReplica([fail] * 4),)))
        assert time.monotonic() - begin < 25
    for number, (report, total) in enumerate(actual):
        assert total == 4
        assert re.match(words if number in fail else rf".*: replicas {fail[0]}, {fail[1]} raised .*{words}", report), (
            report
        )


# --- some do not come ---


def with_some_missing(folder, missing, late, kind):
    number = context().replica_id_in_sync_group
    size = context().num_replicas_in_sync

    def until_there_are(num_replicas, what):
        until(lambda: sum(name.startswith(what) for name in os.listdir(folder)) == num_replicas)

    open(f"{folder}/begun {number}", "w").close()
    # Each replica's wait for the others begins with its own call, so let them call at about the same time.
    until_there_are(size, "begun")
    if number in missing:
        until_there_are(size - len(missing), "told")
        return "missing"
    if number == late:
        time.sleep(0.5)
    call = {
        "all_reduce": lambda: context().all_reduce("SUM", 1),
        "large": lambda: context().all_reduce("SUM", np.ones(100_000)),
        "merge_call": lambda: context().merge_call(len),
    }[kind]
    try:
        return told(call)
    finally:
        open(f"{folder}/told {number}", "w").close()


def assert_told(found, missing, within):
    who = f"replica{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} did not call it within {within:g} s"
    for number, words in enumerate(found):
        if number in missing:
            assert words == "missing"
        else:
            assert who in words


@pytest.mark.parametrize(
    ("kind", "missing"),
    [("all_reduce", [3]), ("all_reduce", [1, 2]), ("large", [0]), ("merge_call", [0]), ("merge_call", [3])],
)
def test_exactly_the_missing_replicas_are_named(start_cluster, tmp_path, kind, missing):
    client = start_cluster(2, 2)
    with daskdist.MultiWorkerMirroredStrategy(client, num_replicas_per_worker=2) as strategy:
        args = (str(tmp_path), daskdist.PerReplica([missing] * 4), None, kind)
        # Set this in the program: two functions in one process that set it may not restore the value from before.
        with dask.config.set({"daskdist.timeouts.collective": 0.5}):
            values = strategy.run(with_some_missing, args=args)
        assert_told(strategy.local_results(values), missing, 0.5)
    # The workers have the default again, for other tests.
    assert set(client.run(seconds, "timeouts.collective").values()) == {300}


@pytest.mark.parametrize("kind", ["large", "merge_call"])
def test_workers_use_the_time_limit_of_the_program(start_cluster, tmp_path, kind):
    with daskdist.MultiWorkerMirroredStrategy(start_cluster(2, 2), num_replicas_per_worker=2) as strategy:
        missing = daskdist.PerReplica([[3]] * 4)
        for within in (0.5, 0.75):
            folder = tmp_path / str(within)
            folder.mkdir()
            with dask.config.set({"daskdist.timeouts.collective": within}):
                values = strategy.run(with_some_missing, args=(str(folder), missing, None, kind))
            assert_told(strategy.local_results(values), [3], within)


def test_replicas_that_called_and_ended_are_not_missing_while_messages_are_under_way(start_cluster, tmp_path):
    def step(folder, missing):
        if context().replica_id_in_sync_group:
            return with_some_missing(folder, missing, 2, "merge_call")
        release = hold_messages(mailbox_of(get_worker()).links, lambda message: True)
        threading.Thread(target=lambda: (until(lambda: os.path.exists(f"{folder}/told 2"), 20), release())).start()
        return with_some_missing(folder, missing, 2, "merge_call")

    with daskdist.MultiWorkerMirroredStrategy(start_cluster(2, 2), num_replicas_per_worker=2) as strategy:
        with dask.config.set({"daskdist.timeouts.collective": 1}):
            values = strategy.run(step, args=(str(tmp_path), daskdist.PerReplica([[3]] * 4)))
        assert_told(strategy.local_results(values), [3], 1)


def test_one_that_has_ended_is_waited_for_while_it_sends(on_cluster):
    def step():
        if context().replica_id_in_sync_group == 0:
            release = hold_messages(mailbox_of(get_worker()).links, lambda message: True)
            threading.Timer(1, release).start()
        return context().merge_call(lambda strategy: 7)

    assert on_cluster.local_results(on_cluster.run(step)) == (7, 7)


def test_settings_made_by_a_function_take_precedence(on_cluster, tmp_path):
    def step(*args):
        with dask.config.set({"daskdist.timeouts.collective": 0.5}):
            return with_some_missing(*args)

    with dask.config.set({"daskdist.timeouts.collective": 200}):
        values = on_cluster.run(step, args=(str(tmp_path), daskdist.PerReplica([[1]] * 2), None, "all_reduce"))
    assert_told(on_cluster.local_results(values), [1], 0.5)


@pytest.mark.parametrize(
    ("kind", "missing"), [("all_reduce", [8]), ("all_reduce", [0]), ("merge_call", [0]), ("merge_call", [1, 8])]
)
def test_in_a_tree_missing_replicas_are_named(nine, tmp_path, kind, missing):
    def step(*args):
        with dask.config.set({"daskdist.timeouts.collective": 1}):
            return with_some_missing(*args)

    with daskdist.MultiWorkerMirroredStrategy(nine) as strategy:
        # Replica 0 is the root of the tree, and calls later than the others.
        args = (str(tmp_path), daskdist.PerReplica([missing] * 9), 0, kind)
        assert_told(strategy.local_results(strategy.run(step, args=args)), missing, 1)


def test_a_replica_that_arrives_during_a_question_has_arrived(on_cluster):
    def step():
        if not context().replica_id_in_sync_group:
            with dask.config.set({"daskdist.timeouts.collective": 0.2}):
                return context().all_reduce("SUM", 1)
        # Delay the worker's answer, so that it is outdated when it arrives.
        asked = threading.Event()
        release = hold_messages(
            mailbox_of(get_worker()).links, lambda message: type(message) is Answer and not asked.set()
        )
        try:
            asked.wait(20)
            return context().all_reduce("SUM", 1)
        finally:
            release()

    assert on_cluster.local_results(on_cluster.run(step)) == (2, 2)


def test_a_replica_waiting_beside_a_slow_one_learns_of_another_workers_loss(start_cluster, tmp_path):
    def step(folder):
        number = context().replica_id_in_sync_group
        if number == 0:
            raise KeyError("no such thing")
        if number == 3:
            until((folder / "told").exists)
            return None
        try:
            return context().all_reduce("SUM", 1)
        except errors.CollectiveError as error:
            if number == 2:
                (folder / "part").write_text(str(error))
                (folder / "part").rename(folder / "told")
            raise

    begin = time.monotonic()
    with (
        daskdist.MultiWorkerMirroredStrategy(start_cluster(2, 2), num_replicas_per_worker=2) as strategy,
        pytest.raises((KeyError, errors.CollectiveError), match="no such thing"),
    ):
        strategy.local_results(strategy.run(step, args=(tmp_path,)))
    assert "replica 0 raised KeyError: 'no such thing'" in (tmp_path / "told").read_text()
    assert time.monotonic() - begin < 25


def test_the_replica_that_raised_is_named_and_not_those_affected():
    failed = "raised CollectiveError: all_reduce(SUM) is called by some replicas only: replica 1 raised KeyError: 'own'"
    assert str(left_error("all_reduce(SUM)", {1: KeyError("own"), 2: failed})) == failed.removeprefix(
        "raised CollectiveError: "
    )
    assert str(left_error("all_gather(axis=0)", {0: HAS_ENDED, 2: failed})) == failed.removeprefix(
        "raised CollectiveError: "
    )
    assert str(left_error("all_reduce(SUM)", {0: HAS_ENDED, 1: "raised KeyError: 'own'", 2: failed})) == (
        "all_reduce(SUM) is called by some replicas only: replica 0 has ended; replica 1 raised KeyError: 'own'"
    )


@pytest.mark.parametrize(
    ("look", "per_worker"), [("local_results", 1), ("one", 2), ("another", 1), ("another", 2), ("first call", 2)]
)
def test_results_raise_as_soon_as_one_replica_has(start_cluster, tmp_path, look, per_worker):
    def step(folder, last):
        number = context().replica_id_in_sync_group
        if number == last:
            until((folder / "raised").exists)
            (folder / "over").touch()
            return 0.0
        return 0.0 if last is None else context().all_reduce("SUM", 1.0)

    with daskdist.MultiWorkerMirroredStrategy(start_cluster(2, 2), num_replicas_per_worker=per_worker) as strategy:
        size = strategy.num_replicas_in_sync
        if look != "first call":
            strategy.local_results(strategy.run(step, args=(tmp_path, None)))
        last = 0 if look == "another" else size - 1

        def looked_at():
            values = strategy.run(step, args=(tmp_path, last))
            return strategy.local_results(values) if look == "local_results" else values.values[0].result()

        with (
            dask.config.set({"daskdist.timeouts.collective": 0.5}),
            pytest.raises(errors.CollectiveError, match=f"replica {last} did not call it within 0.5 s"),
        ):
            looked_at()
        assert not (tmp_path / "over").exists()
        (tmp_path / "raised").touch()
        # The strategy can be used again when the replicas are back.
        assert strategy.local_results(strategy.run(lambda: context().all_reduce("SUM", 1))) == (size,) * size


def test_results_of_several_steps_raise_as_soon_as_one_replica_has(on_cluster, tmp_path):
    def step(folder, is_last):
        if not is_last:
            return 0.0
        if not context().replica_id_in_sync_group:
            raise KeyError("no such thing")
        until((folder / "raised").exists)
        (folder / "over").touch()
        return 1.0

    on_cluster.local_results(on_cluster.run(step, args=(tmp_path, False)))
    values = [on_cluster.run(step, args=(tmp_path, is_last)) for is_last in (False, True)]
    with pytest.raises(KeyError, match="no such thing"):
        on_cluster.local_results(values)
    assert not (tmp_path / "over").exists()
    (tmp_path / "raised").touch()


# --- a tree ---


def test_more_workers_than_send_to_all_others(nine):
    def step(number):
        total = context().all_reduce("SUM", np.full(100_000, number))
        rows = context().all_gather(np.array([number]), 0)
        merged = context().merge_call(lambda strategy, x: strategy.reduce("MAX", x, axis=None), args=(number,))
        return float(total.min()), float(total.max()), rows.tolist(), merged

    with daskdist.MultiWorkerMirroredStrategy(nine) as strategy:
        numbers = daskdist.PerReplica(list(range(9)))
        actual = strategy.local_results(strategy.run(step, args=(numbers,)))
    assert actual == ((36.0, 36.0, list(range(9)), 8),) * 9


def test_in_a_tree_calls_in_different_orders_are_an_error(nine):
    def step():
        if context().replica_id_in_sync_group == 8:
            return told(lambda: context().all_reduce("MAX", 1))
        return told(lambda: context().all_reduce("SUM", 1))

    with daskdist.MultiWorkerMirroredStrategy(nine) as strategy:
        for words in strategy.local_results(strategy.run(step)):
            assert "replica 0 calls all_reduce(SUM); replica 8 calls all_reduce(MAX)" in words


# --- busy, or lost ---


def test_a_worker_that_holds_the_lock_of_python_is_not_lost(on_cluster):
    def step():
        if context().replica_id_in_sync_group:
            ctypes.PyDLL(None).sleep(3)
        return context().all_reduce("SUM", 1)

    with dask.config.set({"daskdist.timeouts.silence": 8}):
        assert on_cluster.local_results(on_cluster.run(step)) == (2, 2)


@pytest.fixture(scope="module")
def unwatched():
    """Return a client of two workers without nannies, and the workers' processes."""
    with (
        frequent_heartbeats(),
        LocalCluster(n_workers=0, host="127.0.0.1", dashboard_address="127.0.0.1:0", silence_logs=50) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        command = ["-m", "distributed.cli.dask_worker", cluster.scheduler_address]
        options = ["--no-nanny", "--nthreads", "1", "--host", "127.0.0.1", "--no-dashboard"]
        within = {"PYTHONPATH": os.pathsep.join(sys.path)}
        processes = [
            Program(*command, *options, "--name", name, stderr=subprocess.DEVNULL, env=within) for name in ("0", "1")
        ]
        try:
            client.wait_for_workers(2, timeout=60)
            yield client, processes
        finally:
            for process in processes:
                process.send_signal(signal.SIGCONT)
                process.kill()
                process.wait()


# With two replicas a worker, replica 0 first waits for the other replica in its process, then for the silent worker.
@pytest.mark.slow
@pytest.mark.parametrize(("num_each", "comes_after_s"), [(1, None), (2, None), (2, 0.75)])
def test_a_silent_worker_counts_as_lost(unwatched, tmp_path, num_each, comes_after_s):
    client, processes = unwatched

    def step(folder, is_last):
        # A message that allows a longer silence, but was received, does not count.
        if not is_last:
            return context().all_reduce("SUM", 1)
        number = context().replica_id_in_sync_group
        if number == 0:
            (folder / "told").write_text(told(lambda: context().all_reduce("SUM", 1)))
            (folder / "over").touch()
        elif number == num_each:
            (folder / "part").write_text(str(os.getpid()))
            (folder / "part").rename(folder / "begun")
        elif number < num_each and comes_after_s:
            time.sleep(comes_after_s)
            told(lambda: context().all_reduce("SUM", 1))
        until((folder / "over").exists)
        return 0

    with daskdist.MultiWorkerMirroredStrategy(client, num_replicas_per_worker=num_each) as strategy:
        strategy.local_results(strategy.run(step, args=(tmp_path, False)))
        with dask.config.set({"daskdist.timeouts.silence": 1.5}):
            values = strategy.run(step, args=(tmp_path, True))
        until((tmp_path / "begun").exists)
        (stopped,) = (process for process in processes if process.pid == int((tmp_path / "begun").read_text()))
        stopped.send_signal(signal.SIGSTOP)
        until((tmp_path / "over").exists)
        stopped.send_signal(signal.SIGCONT)
        strategy.local_results(values)
    seconds, words = (tmp_path / "told").read_text().split(" ", 1)
    assert (comes_after_s or 1.25) < float(seconds) < 4.5
    whose = {1: "replica 1", 2: "replicas 2, 3"}[num_each]
    assert f"lost {strategy.workers[1]}, and with it {whose} (no answer for" in words


# --- kills ---


def dies(number, killed, kind):
    """Make a call in which one replica's process is killed."""
    own = get_worker()
    # Do one collective first; even its message from the lost replica may not have been sent.
    context().all_reduce("SUM", 1)

    if kind == "merge_call":
        # The function runs in the process of the first replica.
        return context().merge_call(lambda strategy: os.kill(os.getpid(), signal.SIGKILL))
    if number in killed:
        links = mailbox_of(own).links
        send = links.send

        def send_most(address, message, *over):
            # For large values, the others then have its value, and wait for its part of the result.
            if type(message) is Contribution and (message.part == "part" or kind == "small"):
                os.kill(os.getpid(), signal.SIGKILL)
            send(address, message, *over)

        links.send = send_most
    return context().all_reduce("SUM", np.ones(100_000 if kind == "large" else 1))


@pytest.mark.parametrize("per_worker", [1, 2])
@pytest.mark.parametrize("kind", ["small", "large", "merge_call"])
def test_a_worker_that_is_killed_in_a_call_releases_the_others(breakable, tmp_path, kind, per_worker):
    breakable.wait_for_workers(3, timeout=60)
    strategy = daskdist.MultiWorkerMirroredStrategy(breakable, num_replicas_per_worker=per_worker)
    lost = strategy.workers[0 if kind == "merge_call" else 1]
    killed = [number for number, value in enumerate(strategy.replicas) if value.worker == lost]
    numbers = range(len(strategy.replicas))

    def step(folder, killed, kind):
        number = context().replica_id_in_sync_group
        words = told(lambda: dies(number, killed, kind))
        (folder / f"part {number}").write_text(words)
        (folder / f"part {number}").rename(folder / f"told {number}")

    args = (tmp_path, daskdist.PerReplica([killed] * len(strategy.replicas)), kind)
    with pytest.raises(errors.ClusterError, match="lost"):
        strategy.local_results(strategy.run(step, args=args))
    for number in set(numbers) - set(killed):
        until((path := tmp_path / f"told {number}").exists, 20)
        seconds, words = path.read_text().split(" ", 1)
        assert float(seconds) < 10
        who = f"replica{'s' * (per_worker > 1)} {', '.join(map(str, killed))}"
        assert f"lost {lost}, and with it {who} (" in words
    strategy.close()
    # The remaining and the restarted workers can be used.
    with daskdist.MultiWorkerMirroredStrategy(breakable) as left:
        actual = left.local_results(left.run(lambda: context().all_reduce("SUM", 1)))
        assert actual == (len(left.workers),) * len(left.workers)
