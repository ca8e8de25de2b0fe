"""A worker is lost: calls that need it fail, and the same strategy continues with the remaining replicas."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from conftest import eventually
from distributed import Client, LocalCluster

import daskdist
from daskdist import Dataset, errors
from daskdist.execute.callers.live_workers import cancel_lost_tasks
from daskdist.execute.callers.submit import workers_of
from daskdist.strategy.replica.context import let_update_alone
from daskdist.strategy.replica.contract import internals_of
from daskdist.strategy.values.flat import flattened_call

pytestmark = pytest.mark.cluster
LOST = (errors.ClusterError, errors.CollectiveError)
StrategyOf = Callable[..., daskdist.MultiWorkerMirroredStrategy]


@pytest.fixture
def strategy_of() -> Iterator[StrategyOf]:
    """Return a function that makes a strategy on new workers, which tests may kill."""
    made = []

    def make(
        num_workers: int, num_threads: int = 1, worker_port: str | None = None, **options: object
    ) -> daskdist.MultiWorkerMirroredStrategy:
        cluster = LocalCluster(
            n_workers=num_workers,
            threads_per_worker=num_threads,
            host="127.0.0.1",
            dashboard_address="127.0.0.1:0",
            silence_logs=50,
            worker_port=worker_port,
        )
        client = Client(cluster, set_as_default=False)
        strategy = daskdist.MultiWorkerMirroredStrategy(client, **options)
        made.extend((cluster, client, strategy))
        return strategy

    yield make
    for each in reversed(made):
        each.close()


@pytest.fixture
def at_their_addresses() -> str:
    """Return a range of ports, for workers that are started again at the same ports."""
    # The ports are outside of the range that the system uses for connections, one of which might take a port meanwhile.
    port = 20_000 + os.getpid() % 10_000
    return f"{port}:{port + 20}"


def kill(strategy: daskdist.MultiWorkerMirroredStrategy, worker: str) -> None:
    """Kill a worker, and see that the scheduler knows."""
    os.kill(strategy.client.run(os.getpid)[worker], signal.SIGKILL)
    end = time.monotonic() + 20
    while worker in workers_of(strategy.client) and time.monotonic() < end:
        time.sleep(0.02)


def lose(strategy: daskdist.MultiWorkerMirroredStrategy, number: int) -> str:
    """Kill the worker of a replica, and have a step fail of that; the worker."""
    worker = strategy.replicas[number].worker
    kill(strategy, worker)
    with pytest.raises(LOST, match=f"lost {worker}"):
        strategy.local_results(strategy.run(os.getpid))
    return worker


def own_number() -> int:
    return daskdist.get_replica_context().replica_id_in_sync_group


def place() -> tuple[int, int]:
    context = daskdist.get_replica_context()
    return context.replica_id_in_sync_group, context.num_replicas_in_sync


def total(x: float) -> float:
    return daskdist.get_replica_context().all_reduce("SUM", x)


def die_in_the_second(number: int) -> float:
    context = daskdist.get_replica_context()
    context.all_reduce("SUM", 1.0)
    if context.replica_id_in_sync_group == number:
        os.kill(os.getpid(), signal.SIGKILL)
    return context.all_reduce("SUM", 1.0)


@pytest.mark.parametrize("number", [0, 1])
def test_a_worker_lost_in_a_collective(strategy_of, caplog, number):
    strategy = strategy_of(3)
    before = strategy.replicas
    lost = before[number].worker
    begin = time.monotonic()
    with pytest.raises(LOST, match=f"lost {lost}"):
        strategy.local_results(strategy.run(die_in_the_second, args=(number,)))
    assert time.monotonic() - begin < 25
    with caplog.at_level(logging.WARNING, "daskdist"):
        assert strategy.num_replicas_in_sync == 2
        assert strategy.replicas == before[:number] + before[number + 1 :]
        assert lost not in strategy.workers
        assert len(strategy.extended.worker_devices) == 2
    told = [record.getMessage() for record in caplog.records if record.name == "daskdist"]
    assert told == [f"lost {lost}, and with it replica {number}; 2 of 3 replicas are left"]
    assert strategy.local_results(strategy.run(place)) == ((0, 2), (1, 2))
    assert strategy.local_results(strategy.run(total, args=(1.5,))) == (3.0, 3.0)
    assert float(strategy.reduce("SUM", strategy.run(own_number), axis=None)) == 1
    contexts = strategy.experimental_distribute_values_from_function(str)
    assert strategy.local_results(contexts) == tuple(
        f"ValueContext(replica id {k}, total replicas in sync: 2)" for k in range(2)
    )


def add_total(variable: daskdist.Variable, gate: str) -> float:
    context = daskdist.get_replica_context()
    if gate and context.replica_id_in_sync_group == 1:
        while not os.path.exists(gate):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    variable.assign_add(context.all_reduce("SUM", np.float64(1)))
    return 1.0


@pytest.mark.parametrize("then", ["a step", "a step before", "a call", "the end", "an assignment"])
def test_a_call_without_a_batch_that_is_lost_is_reported(strategy_of, tmp_path, then):
    strategy, gate = strategy_of(2), tmp_path / "gate"
    with strategy.scope():
        variable = daskdist.Variable(np.float64(0), aggregation="ONLY_FIRST_REPLICA")
    batches = iter(strategy.distribute_dataset(Dataset.range(8).batch(2)))
    strategy.local_results(strategy.run(add_total, args=(variable, "")))
    strategy.local_results(strategy.run(np.sum, args=(next(batches),)))
    # The structure of its result is known, so nothing waits for the second call.
    strategy.run(add_total, args=(variable, str(gate)))
    if then == "an assignment":
        variable.assign_add(5.0)
    # It is made again, and what was lost before it is not.
    before = strategy.run(np.sum, args=(next(batches),)) if then == "a step before" else ()
    gate.touch()
    eventually(lambda: internals_of(strategy).backend.streams.lost())
    if then == "a call":
        with pytest.raises(errors.ClusterError, match="the next call continues"):
            strategy.run(own_number)

    def go_on() -> None:
        if then == "a call":
            strategy.run(own_number)
        elif then == "the end":
            strategy.close()
        else:
            strategy.local_results(before)
            for batch in batches:
                strategy.local_results(strategy.run(np.sum, args=(batch,)))

    with pytest.raises(errors.NotMadeAgainError, match="run-add_total failed with a lost worker, and is not made"):
        go_on()


def test_a_call_for_the_replicas_before_a_change_is_not_sent(strategy_of):
    strategy = strategy_of(2)
    internals = internals_of(strategy)
    before = internals.group.now
    lose(strategy, 1)
    assert strategy.num_replicas_in_sync == 1
    leaves, treespec = flattened_call((1.0,), {})
    # Another thread may have read which replicas there are.
    with pytest.raises(errors.ClusterError, match="lost"):
        internals.backend.call_replicas("run", total, leaves, treespec, before)
    fewer = internals.group.now
    eventually(lambda: [internals.take_replacements(), strategy.num_replicas_in_sync == 2][1])
    with pytest.raises(errors.ClusterError, match="the replicas of the strategy have changed"):
        internals.backend.call_replicas("run", total, leaves, treespec, fewer)
    assert strategy.local_results(strategy.run(total, args=(1.0,))) == (2.0, 2.0)


def test_a_worker_lost_between_steps_and_then_another(strategy_of):
    strategy = strategy_of(4, num_replicas_per_worker=[1, 2, 0, 1])
    devices = [replica.device for replica in strategy.replicas]
    assert strategy.num_replicas_in_sync == 4
    strategy.local_results(strategy.run(total, args=(1.0,)))
    lose(strategy, 0)
    assert strategy.local_results(strategy.run(total, args=(1.0,))) == (3.0,) * 3
    assert [replica.device for replica in strategy.replicas] == devices[1:]
    lose(strategy, 0)
    # The value of a single replica is returned unchanged.
    assert strategy.num_replicas_in_sync == 1
    assert float(strategy.run(total, args=(1.0,))) == 1
    lost = strategy.workers[0]
    kill(strategy, lost)
    for _ in range(2):
        with pytest.raises(errors.ClusterError, match=f"lost .*{lost}.*no worker is left"):
            float(strategy.run(total, args=(1.0,)))


def test_variables_live_on(strategy_of):
    strategy = strategy_of(3)

    class Counted:
        def __init__(self):
            self.number = own_number()

    with strategy.scope():
        weights = daskdist.Variable(np.zeros(3, np.float32), aggregation="MEAN")
        seen = daskdist.Variable(0, synchronization="ON_READ", aggregation="SUM")
        made = daskdist.Variable(Counted)

    def step(factor):
        number = own_number()
        seen.assign_add(10**number)
        weights.assign_add(np.full(3, factor * (number + 1), np.float32))
        return made.read_value().number

    assert strategy.local_results(strategy.run(step, args=(1,))) == (0, 1, 2)
    assert int(seen) == 111
    lose(strategy, 0)
    assert weights.numpy().tolist() == [2.0] * 3
    assert len(weights.values.values) == 2
    # The values of replicas 1 and 2 are left.
    assert int(seen) == 110
    assert strategy.local_results(strategy.run(step, args=(1,))) == (1, 2)
    assert weights.numpy().tolist() == [3.5] * 3
    assert int(seen) == 110 + 11
    weights.assign(np.ones(3))
    seen.assign(5)
    assert strategy.local_results(strategy.run(lambda: int(seen.read_value()))) == (3, 2)
    with strategy.scope():
        new = daskdist.Variable(1.0)
    assert [float(each) for each in new.values.values] == [1.0, 1.0]
    lose(strategy, 1)
    assert (weights.numpy().tolist(), int(seen), float(new)) == ([1.0] * 3, 3, 1.0)


def test_mirrored_values_stay_equal_on_the_remaining_replicas(strategy_of, tmp_path):
    strategy = strategy_of(3)
    with strategy.scope():
        state = daskdist.Variable(np.zeros(2))

    def part_way(folder):
        number = own_number()
        if number == 2:
            # Wait until the others have assigned; calls that begin after the loss would be refused.
            for other in range(2):
                wait_for(folder / f"assigned {other}")
            os.kill(os.getpid(), signal.SIGKILL)
        # The worker is lost when some replicas have the new value and others do not.
        replica = daskdist.get_replica_context()
        let_update_alone(replica)
        state.assign(np.full(2, number + 5.0))
        (folder / f"assigned {number}").touch()
        replica.all_reduce("SUM", 1)

    with pytest.raises(LOST, match="lost"):
        strategy.run(part_way, args=(tmp_path,))
    assert [each.tolist() for each in strategy.local_results(state.values)] == [[5.0, 5.0]] * 2


def test_values_from_before_a_loss_raise_or_remain_usable(strategy_of):
    strategy = strategy_of(3)
    numbers = strategy.run(own_number)
    on_second = strategy.run(lambda: np.arange(4)).values[1] + 1
    whole = strategy.reduce("SUM", strategy.run(lambda: np.ones(2)), axis=None)
    here = whole.result()
    small = strategy.run(lambda: np.full(2, own_number()))
    unseen = strategy.run(lambda: np.full(2**15, own_number()))
    strategy.local_results(small)
    lost = lose(strategy, 0)
    two_are_left = f"lost {lost}, and a PerReplica of 3 values is for the 3 replicas there were, and now there are 2"
    for use in (
        lambda: strategy.run(len, args=(numbers,)),
        lambda: strategy.reduce("SUM", numbers, axis=None),
        lambda: strategy.gather(unseen, 0),
        lambda: strategy.run(len, args=(daskdist.PerReplica([1, 2, 3]),)),
    ):
        with pytest.raises(errors.ClusterError, match=two_are_left):
            use()
    with pytest.raises(errors.ArgumentError, match="a PerReplica of 4 values was given to a strategy of 2 replicas"):
        strategy.run(len, args=(daskdist.PerReplica([1, 2, 3, 4]),))
    for look in (
        lambda: strategy.local_results(unseen),
        lambda: strategy.local_results(strategy.run(np.add, args=(unseen.values[0], 1))),
        lambda: float((strategy.reduce("SUM", strategy.run(own_number), axis=None) + unseen.values[0]).sum()),
    ):
        begin = time.monotonic()
        with pytest.raises(LOST, match=f"lost {lost}"):
            look()
        assert time.monotonic() - begin < 25
    # Values in the program, and values of the remaining replicas, can still be used.
    assert [each.tolist() for each in strategy.local_results(small)] == [[0, 0], [1, 1], [2, 2]]
    assert strategy.local_results(strategy.run(np.add, args=(small.values[0], 1)))[1].tolist() == [1, 1]
    assert strategy.local_results(strategy.run(np.add, args=(here, 1)))[1].tolist() == [4, 4]
    assert strategy.local_results(strategy.run(np.add, args=(unseen.values[2], 1)))[1][:2].tolist() == [3, 3]
    assert strategy.local_results(strategy.run(own_number)) == (0, 1)
    del on_second


def test_a_distributed_dataset_is_divided_again(strategy_of):
    strategy = strategy_of(3)
    dataset = Dataset.range(48).map(lambda x: x + 0).batch(12)
    steps = strategy.distribute_dataset(dataset)
    iterator = iter(steps)
    first = strategy.local_results(next(iterator))
    assert [len(part) for part in first] == [4, 4, 4]
    lost = lose(strategy, 1)
    # The iterator continues to the end of its pass, with each row once.
    rest = [row for batch in iterator for part in strategy.local_results(batch) for row in part.tolist()]
    assert sorted([*np.concatenate(first).tolist(), *rest]) == list(range(48))
    batches = [strategy.local_results(batch) for batch in steps]
    # The lost worker may have been restarted by then.
    num_replicas = strategy.num_replicas_in_sync
    assert [[len(part) for part in batch] for batch in batches] == [[12 // num_replicas] * num_replicas] * 4
    assert sorted(np.concatenate([part for batch in batches for part in batch]).tolist()) == list(range(48))
    assert f"{num_replicas} replicas on {num_replicas} workers" in steps.explain()
    assert lost not in steps.explain()
    assert steps.cardinality() == 4
    sums = strategy.run(lambda it: sum(int(x.sum()) for x in it), args=(steps,))
    assert sum(strategy.local_results(sums)) == sum(range(48))
    assert strategy.local_results(strategy.run(np.sum, args=(next(iter(steps)),)))


def test_datasets_of_a_function_are_created_again(strategy_of):
    strategy = strategy_of(3)

    def dataset_fn(context):
        return Dataset.range(12).shard(context.num_input_pipelines, context.input_pipeline_id).batch(2)

    steps = strategy.distribute_datasets_from_function(dataset_fn)
    assert len(list(steps)) == 2
    lose(strategy, 2)
    rows = [row for batch in steps for part in strategy.local_results(batch) for row in part.tolist()]
    assert sorted(rows) == list(range(12))
    sums = strategy.run(lambda it: sum(int(x.sum()) for x in it), args=(steps,))
    assert sum(strategy.local_results(sums)) == sum(range(12))


def sum_together(it, victim):
    found = 0.0
    for number, x in enumerate(it):
        found = daskdist.get_replica_context().all_reduce("SUM", found / 2 + float(x.sum()))
        if number == 2 and own_number() == victim:
            os.kill(os.getpid(), signal.SIGKILL)
    return found


def test_a_worker_lost_in_a_loop(strategy_of):
    strategy = strategy_of(3)
    steps = strategy.distribute_dataset(Dataset.range(600).batch(12))
    lost = strategy.workers[1]
    begin = time.monotonic()
    with pytest.raises(LOST, match=f"lost {lost}"):
        strategy.local_results(strategy.run(sum_together, args=(steps, 1)))
    assert time.monotonic() - begin < 25
    found = strategy.local_results(strategy.run(sum_together, args=(steps, None)))
    assert len(found) == 2
    assert found[0] == found[1]


def test_steps_under_way_and_a_function_of_several(strategy_of):
    strategy = strategy_of(3)
    with strategy.scope():
        count = daskdist.Variable(0, synchronization="ON_READ", aggregation="SUM")

    def step(victim):
        count.assign_add(1)
        # This collective makes sure that the others have begun this call too. Otherwise the worker might die while they
        # still wait for its messages of the previous call.
        total(1.0)
        if own_number() == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        return total(1.0)

    @daskdist.function
    def steps(victim):
        return [strategy.run(step, args=(victim if number == 3 else None,)) for number in range(6)]

    steps(None)
    assert int(count) == 18
    lost = strategy.workers[0]
    with pytest.raises(LOST, match=f"lost {lost}"):
        strategy.local_results(steps(0))
    # The remaining replicas have made each call once, or not at all.
    made = strategy.local_results(count.values)
    assert all(6 + 4 <= each <= 12 for each in map(int, made))
    assert strategy.local_results(steps(None)[-1]) == (2.0, 2.0)
    assert int(count) == sum(map(int, made)) + 12


def test_data_that_was_on_the_lost_worker_only(strategy_of):
    strategy = strategy_of(2)
    dataset = strategy.experimental_make_numpy_dataset(np.arange(8))
    large = np.ones(2**18)
    assert strategy.local_results(strategy.run(np.sum, args=(large,))) == (2.0**18,) * 2
    lost = lose(strategy, 0)
    # The program sends the array again.
    assert float(strategy.run(np.sum, args=(large,))) == 2.0**18
    with pytest.raises(errors.ClusterError, match=f"lost {lost}|no longer on the cluster"):
        list(strategy.distribute_dataset(dataset.batch(2)))
    rows = strategy.distribute_dataset(Dataset.range(10).map(lambda x: x + 0).batch(2))
    # The lost worker may have been started again by now, and take part.
    assert np.concatenate([part for step in rows for part in strategy.local_results(step)]).tolist() == list(range(10))


def test_calls_are_not_made_again_for_a_result_that_is_lost(strategy_of):
    strategy = strategy_of(3)
    with strategy.scope():
        count = daskdist.Variable(0, synchronization="ON_READ", aggregation="SUM")

    def step():
        count.assign_add(1)
        return np.ones(3)

    strategy.local_results(strategy.run(step))
    # Nothing refers to the replicas' results that were summed, so they are gone.
    sums = [strategy.reduce("SUM", strategy.run(step), axis=None) for _ in range(4)]
    assert int(count) == 15
    lost = lose(strategy, 0)
    for each in sums:
        with contextlib.suppress(*LOST):
            assert each.result().tolist() == [3, 3, 3]
    assert strategy.local_results(count.values) == (5, 5)
    assert lost not in strategy.workers


def test_two_workers_lost_with_steps_under_way(strategy_of):
    strategy = strategy_of(4)
    with strategy.scope():
        count = daskdist.Variable(0, synchronization="ON_READ", aggregation="SUM")
        state = daskdist.Variable(0.0, aggregation="SUM")

    def step(x):
        state.assign_add(np.float64(x.sum()))
        count.assign_add(1)

    steps = strategy.distribute_dataset(Dataset.range(4000).map(lambda x: x + 0).batch(40))
    pids = strategy.client.run(os.getpid)
    first, _, third, _ = strategy.workers

    def run_all(victims):
        for number, batch in enumerate(steps):
            strategy.run(step, args=(batch,))
            if number == 20:
                for worker in victims:
                    os.kill(pids[worker], signal.SIGKILL)

    with pytest.raises(LOST, match=f"lost .*({first}|{third})"):
        run_all([first, third])
    assert strategy.num_replicas_in_sync == 2
    before = int(count), float(state)
    run_all([])
    # Lost workers that had restarted before the second pass took part in it.
    assert int(count) == before[0] + 100 * strategy.num_replicas_in_sync
    assert float(state) == before[1] + sum(range(4000))


def test_several_threads_continue(strategy_of):
    strategy = strategy_of(3, num_threads=2)
    strategy.local_results(strategy.run(total, args=(1.0,)))
    worker = strategy.workers[0]
    pid = strategy.client.run(os.getpid)[worker]
    are_under_way = threading.Event()
    found: list[list[str]] = []

    def steps():
        told = []
        num_less = 0
        while num_less < 5:
            try:
                given = strategy.local_results(strategy.run(total, args=(1.0,)))
                num_less += given == (2.0, 2.0)
                are_under_way.set()
            except LOST as error:
                told.append(str(error))
        found.append(told)

    threads = [threading.Thread(target=steps) for _ in range(3)]
    for each in threads:
        each.start()
    assert are_under_way.wait(20)
    os.kill(pid, signal.SIGKILL)
    for each in threads:
        each.join(60)
    assert len(found) == 3
    # Calls in flight fail; later ones do not.
    assert all(len(told) <= 2 and all(f"lost {worker}" in each for each in told) for told in found)


def wait_for(path):
    end = time.monotonic() + 20
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.01)


def start_anew(strategy, worker):
    """Kill a worker, and wait until another process is at its address."""
    pid = strategy.client.run(os.getpid)[worker]
    os.kill(pid, signal.SIGKILL)
    end = time.monotonic() + 20
    while time.monotonic() < end:
        with contextlib.suppress(OSError, ValueError):
            if strategy.client.run(os.getpid, workers=[worker])[worker] != pid:
                return
        time.sleep(0.02)


@pytest.mark.parametrize("number", [0, 1])
def test_a_restarted_worker_at_the_same_address_counts_as_lost(strategy_of, at_their_addresses, number):
    strategy = strategy_of(3, worker_port=at_their_addresses)
    with strategy.scope():
        count = daskdist.Variable(0, synchronization="ON_READ", aggregation="SUM")
        state = daskdist.Variable(0.0, aggregation="SUM")

    def step():
        count.assign_add(1)
        state.assign_add(np.float64(1))
        return total(1.0)

    strategy.local_results(strategy.run(step))
    ones = strategy.reduce("SUM", strategy.run(np.ones, args=(100_000,)), axis=None)
    assert strategy.local_results(strategy.run(np.max, args=(ones,))) == (3.0, 3.0, 3.0)
    worker = strategy.workers[number]
    start_anew(strategy, worker)
    # The restarted worker has no values of the replica.
    with pytest.raises((*LOST, errors.ArgumentError), match=f"lost {worker}|the worker was restarted"):
        strategy.local_results(strategy.run(step))
    assert worker not in strategy.workers
    assert strategy.local_results(strategy.run(step)) == (2.0, 2.0)
    assert strategy.local_results(state.values) == (5.0, 5.0)
    # It takes part again from the next pass on.
    rows = []
    for batch in strategy.distribute_dataset(Dataset.range(60).batch(6)):
        rows += np.concatenate(strategy.local_results(strategy.run(np.asarray, args=(batch,)))).tolist()
    assert rows == list(range(60))
    assert worker in strategy.workers
    assert strategy.local_results(strategy.run(step)) == (3.0, 3.0, 3.0)
    assert strategy.local_results(state.values) == (8.0, 8.0, 8.0)
    if number:
        # A value that was sent to the one before is sent again.
        assert strategy.local_results(strategy.run(np.max, args=(ones,))) == (3.0, 3.0, 3.0)


def test_calls_of_others_on_a_restarted_worker_are_kept(strategy_of, at_their_addresses, tmp_path):
    strategy = strategy_of(2, worker_port=at_their_addresses)
    worker = strategy.workers[0]
    start_anew(strategy, worker)
    with pytest.raises(LOST, match=f"lost {worker}|{worker} does not know the strategy"):
        strategy.local_results(strategy.run(total, args=(1.0,)))
    assert strategy.num_replicas_in_sync == 1

    def step(folder, awaited):
        (folder / f"{awaited}-{own_number()}").touch()
        wait_for(folder / awaited)
        return own_number()

    with daskdist.MultiWorkerMirroredStrategy(strategy.client) as other:
        assert worker in other.workers
        (tmp_path / "first").touch()
        other.local_results(other.run(step, args=(tmp_path, "first")))
        under_way = other.run(step, args=(tmp_path, "second"))
        for number in range(2):
            wait_for(tmp_path / f"second-{number}")
        # Cancel the lost tasks of the first strategy while the other one has a call under way.
        strategy.client.run_on_scheduler(cancel_lost_tasks, [worker], strategy.client.id)
        (tmp_path / "second").touch()
        assert other.local_results(under_way) == (0, 1)


def test_status_of_lost_workers_and_of_a_closed_strategy(strategy_of):
    strategy = strategy_of(2)
    strategy.run(float, args=(1,))
    lost = strategy.workers[0]
    kill(strategy, lost)
    eventually(lambda: [each.state for each in strategy.status().workers] == ["lost", "idle"])
    assert strategy.status().workers[0].replicas == (0,)
    with pytest.raises(LOST):
        strategy.local_results(strategy.run(float, args=(1,)))
    # The next call uses the remaining worker.
    assert strategy.local_results(strategy.run(float, args=(1,))) == (1.0,)
    gone, left = strategy.status().workers
    assert (gone.address, gone.state, gone.replicas) == (lost, "lost", ())
    assert (left.state, left.replicas) == ("idle", (0,))
    strategy.close()
    assert {each.state for each in strategy.status().workers} == {"closed"}
