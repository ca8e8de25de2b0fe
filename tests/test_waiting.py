"""Waits for data and replicas in this process end with an error at a limit."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import dask
import numpy as np
import pytest
from conftest import eventually, mirrored
from distributed import Event

from daskdist import (
    CheckpointManager,
    Dataset,
    MultiWorkerMirroredStrategy,
    Options,
    TensorSpec,
    errors,
    get_replica_context,
    waiting,
    watched_calls,
)
from daskdist.cached_property import cached_property
from daskdist.execute.callers.threads import Threads
from daskdist.execute.transfer.deferred_release import DeferredRelease
from daskdist.waiting import wait_intervals


def test_a_wait_is_logged_and_ends(caplog, monkeypatch):
    clock = SimpleNamespace(now_s=0.0, monotonic=lambda: clock.now_s)
    monkeypatch.setattr(waiting, "time", clock)

    def wait():
        for within_s in wait_intervals("a thing", "timeouts.data"):
            clock.now_s += within_s

    with (
        dask.config.set({"daskdist.timeouts.data": 50}),
        pytest.raises(errors.WaitTimeoutError, match=r"waited 50 s for a thing, .* longer than daskdist.timeouts.data"),
    ):
        wait()
    assert caplog.messages == ["waiting for a thing for 25 s, up to 50 s (daskdist.timeouts.data)"]


def test_a_wait_without_limit_continues():
    with dask.config.set({"daskdist.timeouts.data": float("inf")}):
        assert all(0 < within_s <= 30 for within_s in itertools.islice(wait_intervals("it", "timeouts.data"), 3))


def test_data_that_does_not_come_is_an_error():
    gate = threading.Event()
    late = Dataset.from_generator(lambda: (gate.wait(5) for _ in range(2)), output_signature=TensorSpec((), "bool"))
    caller = Threads(1)
    handle = caller.call(lambda handles: gate.wait(5), [], name="late")
    try:
        with dask.config.set({"daskdist.timeouts.data": 0.2}):
            for wait in (lambda: list(late), lambda: caller.result(handle), lambda: caller.wait_for_one([handle])):
                with pytest.raises(errors.WaitTimeoutError, match=r"daskdist\.timeouts\.data"):
                    wait()
        caller.close()
        assert not handle.done()
    finally:
        gate.set()


def test_a_replica_that_does_not_end_is_an_error():
    gate = threading.Event()

    def step():
        return get_replica_context().replica_id_in_sync_group and gate.wait(5)

    try:
        with (
            dask.config.set({"daskdist.timeouts.step": 0.3}),
            pytest.raises(errors.WaitTimeoutError, match=r"replica 1 in .*daskdist\.timeouts\.step"),
        ):
            mirrored(2).run(lambda: (get_replica_context().all_reduce("SUM", 1), step()))
    finally:
        gate.set()


def test_a_wait_without_setting_is_logged(caplog, monkeypatch):
    monkeypatch.setattr(waiting, "_LOGGED_AFTER_S", 0.0)
    assert next(wait_intervals("a loop", None)) > 0
    assert "waiting for a loop for 0 s" in caplog.text


def test_memory_that_a_framework_does_not_release_is_an_error():
    gate = threading.Event()
    held = DeferredRelease(lambda: gate.wait(5) and None)
    held.hold(None)
    try:
        with (
            dask.config.set({"daskdist.timeouts.step": 0.1}),
            pytest.raises(errors.WaitTimeoutError, match=r"earlier steps.*daskdist\.timeouts\.step"),
        ):
            held.await_room(0)
    finally:
        gate.set()
    held.await_room(0)


def test_a_save_that_is_not_written_is_an_error(tmp_path):
    gate = threading.Event()
    manager = CheckpointManager(str(tmp_path))
    manager._save_states({}, 0, check=lambda: gate.wait(5) and None)
    try:
        with (
            dask.config.set({"daskdist.timeouts.data": 0.1}),
            pytest.raises(errors.WaitTimeoutError, match=r"save of a checkpoint to .*daskdist\.timeouts\.data"),
        ):
            manager.wait()
    finally:
        gate.set()
    # The save continues in the background.
    manager.wait()
    assert manager.steps == [0]


# --- functions that hang ---

HUNG_AT = 5


class Hanging:
    """A function that hangs at one element until the test is over; other elements take ``seconds``."""

    def __init__(self, seconds=0.0, hung_at=HUNG_AT):
        self.gate, self.seconds, self.hung_at = threading.Event(), seconds, hung_at

    def function(self):
        gate, seconds, hung_at = self.gate, self.seconds, self.hung_at

        def stuck(x):
            if int(x) == hung_at:
                gate.wait(60)
            elif seconds:
                gate.wait(seconds)
            return x

        return stuck


def numbers_of(stuck):
    for number in range(20):
        yield stuck(number)


NUMBERS = Dataset.range(20)
# operation -> a dataset with a function for it, and the operation that the error names.
OPERATIONS = {
    "map": lambda stuck: NUMBERS.map(stuck),
    "map of batches": lambda stuck: NUMBERS.batch(1).map(lambda batch: stuck(batch[0]) + batch),
    "map of blocks": lambda stuck: NUMBERS.batch(1).unbatch().map(lambda rows: stuck(rows[-1]) + rows, vectorized=True),
    "map in threads": lambda stuck: NUMBERS.map(stuck, num_parallel_calls=2),
    "map ahead": lambda stuck: NUMBERS.map(stuck).prefetch(2),
    "filter": lambda stuck: NUMBERS.filter(lambda x: stuck(x) >= 0),
    "flat_map": lambda stuck: NUMBERS.flat_map(lambda x: Dataset.from_tensors(stuck(x))),
    "interleave": lambda stuck: NUMBERS.interleave(lambda x: Dataset.from_tensors(stuck(x)), cycle_length=2),
    "scan": lambda stuck: NUMBERS.scan(0, lambda total, x: (total, stuck(x))),
    "group_by_window": lambda stuck: NUMBERS.group_by_window(
        lambda x: stuck(x) % 2, lambda key, rows: rows.batch(3), window_size=3
    ),
    "from_generator": lambda stuck: Dataset.from_generator(
        lambda: numbers_of(stuck), output_signature=TensorSpec((), "int64")
    ),
    "from_generator inside": lambda stuck: Dataset.range(1).flat_map(
        lambda _: Dataset.from_generator(lambda: numbers_of(stuck), output_signature=TensorSpec((), "int64"))
    ),
}
IN_ANOTHER_THREAD = "in another thread"


def outcome_in_thread(function):
    """Return the error of a call in a thread of its own; None without one."""
    outcome = []

    def call():
        try:
            function()
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    return outcome[0] if outcome else None


@pytest.mark.parametrize("where", ["here", IN_ANOTHER_THREAD])
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_function_that_hangs_is_ended_and_named(name, where):
    hanging = Hanging(hung_at=19 if name == "map of blocks" else HUNG_AT)
    ds = OPERATIONS[name](hanging.function())
    text = rf"waited .* s for {name.split()[0]}: .*\(.*test_waiting\.py:\d+\).* longer than daskdist\.timeouts\.data"
    try:
        with dask.config.set({"daskdist.timeouts.data": 1}):
            if where == IN_ANOTHER_THREAD:
                error = outcome_in_thread(lambda: list(ds))
                with pytest.raises(errors.WaitTimeoutError, match=text):
                    raise error
            else:
                with pytest.raises(errors.WaitTimeoutError, match=text):
                    list(ds)
    finally:
        hanging.gate.set()


# Functions are tried when a dataset is built or planned; nobody waits for an element yet.
TRIED = {
    "map": lambda stuck: NUMBERS.map(stuck).unbatch(),
    "map, padded": lambda stuck: NUMBERS.map(stuck).padded_batch(2),
    "map, spec": lambda stuck: NUMBERS.map(stuck).element_spec,
    "map, nested": lambda stuck: list(NUMBERS.flat_map(lambda _: NUMBERS.map(stuck).batch(2).unbatch())),
    "scan": lambda stuck: NUMBERS.scan(0, lambda total, x: (total, stuck(x))).element_spec,
    "flat_map": lambda stuck: list(NUMBERS.flat_map(stuck)),
    "interleave": lambda stuck: list(NUMBERS.interleave(stuck)),
    "group_by_window": lambda stuck: list(NUMBERS.group_by_window(lambda x: x, lambda key, rows: stuck(key), 2)),
}


@pytest.mark.parametrize("where", ["here", IN_ANOTHER_THREAD])
@pytest.mark.parametrize("name", TRIED)
def test_a_function_that_hangs_when_it_is_tried_is_ended_and_named(name, where):
    gate = threading.Event()

    def stuck(x):
        gate.wait(60)

    def use():
        TRIED[name](stuck)

    text = rf"waited .* s for {name.split(',')[0]}: .*\(.*test_waiting\.py:\d+\).* longer than daskdist\.timeouts\.data"
    try:
        with dask.config.set({"daskdist.timeouts.data": 1}):
            if where == IN_ANOTHER_THREAD:
                with pytest.raises(errors.WaitTimeoutError, match=text):
                    raise outcome_in_thread(use)
            else:
                with pytest.raises(errors.WaitTimeoutError, match=text):
                    use()
    finally:
        gate.set()


def test_a_call_is_watched_whenever_it_begins(monkeypatch):
    # The thread that looks at calls ends after a while without any, and begins again.
    monkeypatch.setattr(watched_calls, "_LOOK_EVERY_S", 0.05)
    monkeypatch.setattr(watched_calls, "_MOST_IDLE", 1)
    gate = threading.Event()
    with dask.config.set({"daskdist.timeouts.data": 0.1}):
        watched_calls.watched("a call", int)
        for number in range(24):
            # The time between two calls decides what the thread is doing.
            gate.wait(number * 0.007)
            with pytest.raises(errors.WaitTimeoutError):
                watched_calls.watched("a call", gate.wait, 20)


def test_a_property_that_is_being_computed_does_not_hold_up_that_of_another_object():
    class Pair:
        def __init__(self, other):
            self.other, self.num_computed = other, 0

        @cached_property
        def value(self):
            self.num_computed += 1
            if self.other is None:
                return [1]
            # A user's function may be called in another thread.
            with ThreadPoolExecutor(1) as threads:
                return [*threads.submit(lambda: self.other.value).result(30), 2]

    pair = Pair(Pair(None))
    assert pair.value == [1, 2]
    assert pair.value is pair.value
    assert (pair.num_computed, pair.other.num_computed) == (1, 1)
    # Threads that compute a value at the same time get one object.
    barrier = threading.Barrier(4)

    class Slow(Pair):
        @cached_property
        def value(self):
            barrier.wait(30)
            return object()

    late = Slow(None)
    with ThreadPoolExecutor(4) as threads:
        assert len(set(threads.map(lambda _: id(late.value), range(4)))) == 1


def on_replicas(stuck):
    """Return batches of which each replica calls a function with its rows."""

    def all_stuck(rows):
        return [stuck(x) for x in rows]

    return NUMBERS.batch(4).map(all_stuck, device=True)


@pytest.mark.parametrize(
    "use",
    [
        lambda ds, stuck: ds.compute(),
        lambda ds, stuck: ds.persist(),
        lambda ds, stuck: NUMBERS.reduce(0, lambda total, x: total + int(stuck(x))),
        lambda ds, stuck: list(mirrored(2).distribute_dataset(ds.batch(4))),
        lambda ds, stuck: looped(mirrored(2), ds.batch(4)),
        lambda ds, stuck: list(mirrored(2).distribute_datasets_from_function(lambda context: ds.batch(4))),
        lambda ds, stuck: list(mirrored(2).distribute_dataset(on_replicas(stuck))),
        lambda ds, stuck: looped(mirrored(2), on_replicas(stuck)),
    ],
    ids=["compute", "persist", "reduce", "steps", "loop", "from_function", "steps on replicas", "loop on replicas"],
)
def test_a_use_of_a_function_that_hangs_ends(use):
    hanging = Hanging()
    stuck = hanging.function()
    try:
        with (
            dask.config.set({"daskdist.timeouts.data": 0.5}),
            pytest.raises(errors.WaitTimeoutError, match=r"for (map|reduce): .*stuck|for reduce: .*lambda"),
        ):
            use(NUMBERS.map(stuck), stuck)
    finally:
        hanging.gate.set()


@pytest.mark.parametrize("name", ["map", "map in threads", "filter", "scan", "from_generator", "group_by_window"])
def test_many_slow_calls_take_longer_than_the_limit_of_one(name):
    stuck = Hanging(seconds=0.08, hung_at=-1).function()
    ds = OPERATIONS[name](stuck)
    with dask.config.set({"daskdist.timeouts.data": 0.8}):
        assert sum(np.size(element) for element in ds) == 20
        assert outcome_in_thread(lambda: list(ds)) is None


def test_a_function_that_hangs_is_interrupted_in_the_main_thread_only():
    threads, gate = [], threading.Event()

    def stuck(x):
        threads.append(threading.get_ident())
        try:
            gate.wait(60)
        finally:
            threads.append("ended")

    with dask.config.set({"daskdist.timeouts.data": 0.3}), pytest.raises(errors.WaitTimeoutError):
        list(Dataset.from_tensors(1).map(stuck))
    assert threads == [threading.get_ident(), "ended"]
    gate.set()


def lines_of_a_watched_call(act):
    """Make watched calls, one for each line that such a call runs in its module, with ``act()`` at that line.

    Yield for each the line, and its error or None.
    """
    for place in itertools.count():
        lines: list[str] = []

        def trace(frame, event, argument, lines=lines, place=place):
            if frame.f_globals.get("__name__") != watched_calls.__name__:
                return None
            if event == "line":
                lines.append(f"{frame.f_code.co_name} {frame.f_lineno}")
                if len(lines) == place + 1:
                    act()
            return trace

        before, error = sys.gettrace(), None
        sys.settrace(trace)
        try:
            watched_calls.watched("a call", int)
        except BaseException as raised:
            error = raised
        finally:
            sys.settrace(before)
        if len(lines) <= place:
            return
        yield lines[place], error


def test_the_signal_never_comes_out_of_a_call_as_it_is():
    watch = watched_calls._watch

    def signal_comes():
        # As the thread that looks does it after the limit.
        watch.hung = (watch.call, errors.WaitTimeoutError("too long")) if watch.call else None
        signal.raise_signal(watched_calls._SIGNAL)

    outcomes = list(lines_of_a_watched_call(signal_comes))
    assert {type(error) for _, error in outcomes} == {type(None), errors.WaitTimeoutError}
    assert watch.call is None
    assert watched_calls.under_way.call is None


def test_an_interrupt_leaves_nothing_of_a_call_that_is_watched():
    watch, calls = watched_calls._watch, []

    def interrupt():
        calls.append(watch.call)
        raise KeyboardInterrupt

    for line, error in lines_of_a_watched_call(interrupt):
        assert isinstance(error, KeyboardInterrupt), line
        assert watch.call is None, line
        assert watched_calls.under_way.call is None, line
        # A signal for that call, which is too late.
        watch.hung = calls[-1], errors.WaitTimeoutError("too long")
        signal.raise_signal(watched_calls._SIGNAL)
    assert any(calls)


def test_the_signal_of_a_call_does_not_end_the_next():
    watch, calls = watched_calls._watch, []
    watched_calls.watched("earlier", lambda: calls.append(watch.call))

    def later():
        watch.hung = calls[0], errors.WaitTimeoutError("too long")
        signal.raise_signal(watched_calls._SIGNAL)
        return 3

    assert watched_calls.watched("later", later) == 3


def test_a_function_that_hangs_in_a_local_process_is_ended_and_named():
    ds = NUMBERS.map(hangs_at_five).with_options(Options(num_processes=1))
    with dask.config.set({"daskdist.timeouts.data": 600}):
        # The process has started when the next pass begins.
        list(ds.take(2))
    with (
        dask.config.set({"daskdist.timeouts.data": 2}),
        pytest.raises(errors.WaitTimeoutError, match=r"for map: .*hangs_at_five \("),
    ):
        list(ds)


def hangs_at_five(x):
    if int(x) == HUNG_AT and dask.config.get("daskdist.timeouts.data") == 2:
        time.sleep(60)
    return x


def test_a_program_ends_after_a_function_hung_in_a_thread():
    program = """
import time, dask, daskdist
dask.config.set({"daskdist.timeouts.data": 0.3})
try:
    list(daskdist.Dataset.range(9).map(lambda x: time.sleep(100 * (x == 5)) or x, num_parallel_calls=2))
except daskdist.errors.WaitTimeoutError:
    print("over")
"""
    assert subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, timeout=60).stdout == b"over\n"


def values_of(strategy, steps):
    return [strategy.local_results(step) for step in steps]


def looped(strategy, ds):
    steps = strategy.distribute_dataset(ds)
    return sum(map(int, strategy.local_results(strategy.run(lambda steps: sum(map(len, steps)), args=(steps,)))))


@pytest.mark.cluster
@pytest.mark.parametrize("how", ["steps", "loop", "from_function"])
def test_a_function_that_hangs_on_a_worker_is_ended_and_named(on_cluster, how):
    def dataset(context=None):
        return Dataset.range(20).map(lambda x: time.sleep(60 * (int(x) == 5)) or x).batch(4)

    uses = {
        "steps": lambda: values_of(on_cluster, on_cluster.distribute_dataset(dataset())),
        "loop": lambda: looped(on_cluster, dataset()),
        "from_function": lambda: values_of(on_cluster, on_cluster.distribute_datasets_from_function(dataset)),
    }
    text = r"for map: .*lambda.* longer than daskdist\.timeouts\.data"
    with dask.config.set({"daskdist.timeouts.data": 2}), pytest.raises(errors.WaitTimeoutError, match=text):
        uses[how]()


@pytest.mark.cluster
def test_many_slow_calls_on_workers_take_longer_than_the_limit_of_one(on_cluster):
    steps = on_cluster.distribute_dataset(Dataset.range(16).map(lambda x: time.sleep(0.4) or x).batch(8))
    with dask.config.set({"daskdist.timeouts.data": 1.5}):
        assert sorted(np.concatenate(sum(values_of(on_cluster, steps), ())).tolist()) == list(range(16))


async def heartbeat(dask_worker):
    await dask_worker.heartbeat()


def num_executing(dask_scheduler):
    return sum(bool(worker.executing) for worker in dask_scheduler.workers.values())


@pytest.mark.cluster
def test_a_pass_waits_behind_long_calls_of_another_pass(client, on_cluster):
    slow = on_cluster.distribute_dataset(Dataset.range(16).map(lambda x: time.sleep(0.4) or x).batch(8))
    # Each worker has one thread, which a call of the first pass takes for 1.6 s or more.
    with (
        MultiWorkerMirroredStrategy(client) as another,
        dask.config.set({"daskdist.timeouts.data": 1}),
        ThreadPoolExecutor(1) as pool,
    ):
        quick = another.distribute_dataset(Dataset.range(4).map(lambda x: x + 1).batch(4))
        other = pool.submit(list, slow)
        # The scheduler knows from heartbeats what workers execute.
        eventually(lambda: client.run(heartbeat) and client.run_on_scheduler(num_executing) == 2)
        assert len(list(quick)) == 1
        assert len(other.result()) == 2


@pytest.mark.cluster
def test_a_pass_behind_other_tasks_of_the_cluster_names_them(client, on_cluster):
    gate = Event(client=client)
    steps = on_cluster.distribute_dataset(Dataset.range(4).filter(lambda x: x > 1).batch(2))
    others = [
        client.submit(gate.wait, 60, key=f"other-{number}", workers=[worker])
        for number, worker in enumerate(on_cluster.workers)
    ]
    try:
        eventually(lambda: client.run(heartbeat) and client.run_on_scheduler(num_executing) == 2)
        message = r"waited \d s for 1 tasks \(report.*workers execute other-\d on tcp://"
        with dask.config.set({"daskdist.timeouts.data": 0.5}), pytest.raises(errors.WaitTimeoutError, match=message):
            list(steps)
    finally:
        gate.set()
    client.gather(others)
