"""Messages between replicas: large values, messages under way when a replica ends, and values that stay on workers."""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import Future

import dask
import numpy as np
import optree
import pytest
from conftest import mirrored
from distributed import Client, get_worker

import daskdist
from daskdist import PerReplica, errors
from daskdist.strategy.collectives.mailbox import mailbox_of
from daskdist.strategy.collectives.transport import Transport
from daskdist.strategy.replica.contract import internals_of

pytestmark = pytest.mark.timeout(120)


def reduced(x):
    return daskdist.get_replica_context().all_reduce("SUM", x)


# --- large values ---


def of_large(case):
    context = daskdist.get_replica_context()
    number = context.replica_id_in_sync_group
    large = np.full(100_000, number + 1.0)
    if case == "twice the same":
        given = {"one": large, "other": large}
    elif case == "of several dtypes":
        given = np.full(40_000, number + 1, np.float32 if number else np.float64)
    else:
        given = {"large": large, "small": number + 1}
    return context.all_reduce("SUM", given)


@pytest.mark.cluster
@pytest.mark.parametrize("per_worker", [1, [1, 2, 1]], ids=["one each", "two on one"])
@pytest.mark.parametrize("num_workers", [2, 3])
@pytest.mark.parametrize("case", ["twice the same", "of several dtypes", "with a number"])
def test_large_values_equal_those_in_one_process(start_cluster, case, num_workers, per_worker):
    per_worker = per_worker if per_worker == 1 else per_worker[:num_workers]
    with daskdist.MultiWorkerMirroredStrategy(
        start_cluster(num_workers, 1), num_replicas_per_worker=per_worker
    ) as strategy:
        actual = strategy.local_results(strategy.run(of_large, args=(case,)))
        embedded = mirrored(strategy.num_replicas_in_sync)
        expected = embedded.local_results(embedded.run(of_large, args=(case,)))
    for one, other in zip(actual, expected, strict=True):
        leaves, like = (optree.tree_leaves(strategy.local_results(item)[0]) for item in (one, other))
        assert [np.asarray(leaf).dtype for leaf in leaves] == [np.asarray(leaf).dtype for leaf in like]
        assert [np.asarray(leaf).tolist() for leaf in leaves] == [np.asarray(leaf).tolist() for leaf in like]


@pytest.mark.cluster
@pytest.mark.parametrize("num_workers", [2, 3])
def test_workers_of_one_process(num_workers):
    with (
        Client(
            processes=False,
            n_workers=num_workers,
            threads_per_worker=1,
            dashboard_address="127.0.0.1:0",
            set_as_default=False,
        ) as client,
        daskdist.MultiWorkerMirroredStrategy(client) as strategy,
    ):

        def step(number):
            context = daskdist.get_replica_context()
            own = np.full(100_000, number + 1.0)
            total = context.all_reduce("SUM", own)
            alike = bool((own == number + 1).all())
            own[...] = 0
            (every,) = {len(context.all_gather(total, axis=0))}
            return float(total.min()), float(total.max()), every, alike

        actual = strategy.local_results(strategy.run(step, args=(PerReplica([float(k) for k in range(num_workers)]),)))
    total = sum(range(num_workers + 1))
    assert actual == ((total, total, 100_000 * num_workers, True),) * num_workers


# --- kept values ---


def sizes_of_mailbox(token, dask_worker):
    mailbox = mailbox_of(dask_worker)
    return len(mailbox._mail), sum(own == token for own, _ in mailbox._ended)


@pytest.mark.cluster
def test_messages_to_a_replica_that_raised_are_dropped(on_cluster):
    def step(number):
        if number:
            mailbox = mailbox_of(get_worker())
            with mailbox.changed:
                mailbox.changed.wait_for(lambda: mailbox._mail, 20)
            raise KeyError("no such thing")
        return daskdist.get_replica_context().all_reduce("SUM", np.ones(1000))

    token = internals_of(on_cluster).group.now.token
    for _ in range(2):
        with pytest.raises((KeyError, errors.CollectiveError), match="no such thing"):
            on_cluster.local_results(on_cluster.run(step, args=(PerReplica([0, 1]),)))
    sizes = on_cluster.client.run(sizes_of_mailbox, token, workers=[on_cluster.workers[1]])
    assert list(sizes.values()) == [(0, 1)]


@pytest.mark.cluster
def test_nothing_is_kept_of_finished_steps(on_cluster):
    for _ in range(5):
        on_cluster.local_results(on_cluster.run(reduced, args=(1.0,)))
        on_cluster.local_results(on_cluster.run(abs, args=(1.0,)))
    sizes = on_cluster.client.run(sizes_of_mailbox, internals_of(on_cluster).group.now.token)
    # Only the record of the last step of each replica is kept.
    assert list(sizes.values()) == [(0, 1)] * 2


def num_rendezvous(token, dask_worker):
    return sum(own == token for own, _ in mailbox_of(dask_worker)._rendezvous)


@pytest.mark.cluster
def test_nothing_is_kept_of_the_collectives_of_a_lone_replica(client):
    (worker, *_) = client.scheduler_info()["workers"]
    with daskdist.MultiWorkerMirroredStrategy(client, daskdist.DeviceAssignment([(worker, "CPU:0")])) as strategy:
        for _ in range(3):
            strategy.local_results(strategy.run(reduced, args=(1.0,)))
        token = internals_of(strategy).group.now.token
        assert client.run(num_rendezvous, token, workers=[worker]) == {worker: 0}


@pytest.mark.cluster
@pytest.mark.parametrize("size", [(2, 1), (1, 2), (2, 2)], ids=["elsewhere", "here", "here and elsewhere"])
def test_a_waiting_replica_learns_that_the_strategy_is_closed(start_cluster, tmp_path, size):
    num_workers, per_worker = size

    def step(number, folder, is_last):
        if number % 2 or not is_last:
            while is_last and not (folder / "over").exists():
                time.sleep(0.02)
            return 0
        (folder / f"begun {number}").touch()
        try:
            return daskdist.get_replica_context().all_reduce("SUM", 1)
        except errors.CollectiveError as error:
            (folder / f"part {number}").write_text(str(error))
            (folder / f"part {number}").rename(folder / f"told {number}")
            raise

    def until_there(*paths):
        end = time.monotonic() + 20
        while not all(path.exists() for path in paths) and time.monotonic() < end:
            time.sleep(0.02)

    waiting = range(0, num_workers * per_worker, 2)
    with (
        contextlib.suppress(KeyError),
        daskdist.MultiWorkerMirroredStrategy(
            start_cluster(num_workers, per_worker), num_replicas_per_worker=per_worker
        ) as strategy,
    ):
        numbers = PerReplica(list(range(num_workers * per_worker)))
        strategy.local_results(strategy.run(step, args=(numbers, tmp_path, False)))
        strategy.run(step, args=(numbers, tmp_path, True))
        until_there(*[tmp_path / f"begun {number}" for number in waiting])
        raise KeyError("no such thing")
    until_there(*[tmp_path / f"told {number}" for number in waiting])
    (tmp_path / "over").touch()
    for number in waiting:
        assert (tmp_path / f"told {number}").read_text() == (
            "all_reduce(SUM): the strategy was closed before all replicas had made this call"
        )


@pytest.mark.parametrize("kind", ["outside", "embedded", pytest.param("cluster", marks=pytest.mark.cluster)])
def test_a_single_replica_gets_a_copy(kind, request):
    def step():
        own = np.ones(3)
        actual = daskdist.get_replica_context().all_reduce("SUM", own)
        actual += 1
        return own.tolist()

    if kind == "outside":
        assert step() == [1, 1, 1]
        return
    if kind == "embedded":
        strategy = mirrored(1)
        assert strategy.local_results(strategy.run(step)) == ([1, 1, 1],)
        return
    with daskdist.MultiWorkerMirroredStrategy(request.getfixturevalue("start_cluster")(1, 1)) as strategy:
        assert strategy.local_results(strategy.run(step)) == ([1, 1, 1],)


@pytest.mark.cluster
def test_waiting_for_sent_values_has_a_limit(on_cluster):
    def wait(token, dask_worker):
        mailbox = mailbox_of(dask_worker)
        exchange = Transport(mailbox, mailbox.groups[token], 0)
        with dask.config.set({"daskdist.timeouts.collective": 0.05}):
            try:
                exchange._await_sent(Future(), 1, "all_reduce(SUM)")
            except errors.CollectiveError as error:
                return str(error)
        return "waited for"

    first, second = on_cluster.workers
    report = on_cluster.client.run(wait, internals_of(on_cluster).token, workers=[first])[first]
    assert report.startswith(f"all_reduce(SUM): {second} did not receive a message within 0.05 s")


@pytest.mark.cluster
def test_waiting_for_sent_values_without_a_limit(on_cluster):
    def wait(token, dask_worker):
        mailbox = mailbox_of(dask_worker)
        sent = Future()
        over = threading.Timer(0.05, sent.set_result, (None,))
        over.start()
        with dask.config.set({"daskdist.timeouts.collective": float("inf")}):
            Transport(mailbox, mailbox.groups[token], 0)._await_sent(sent, 1, "all_reduce(SUM)")
        over.join()
        return sent.done()

    first, _ = on_cluster.workers
    assert on_cluster.client.run(wait, internals_of(on_cluster).token, workers=[first]) == {first: True}


@pytest.mark.cluster
def test_calls_with_a_subclass_of_variable_keep_their_order(on_cluster):
    class Total(daskdist.Variable):
        pass

    with on_cluster.scope():
        total = Total(0.0, aggregation="MEAN")
    for number in range(12):
        on_cluster.run(lambda own, x: own.assign(own * 2 + x), args=(total, np.float64(number)))
    expected = 0.0
    for number in range(12):
        expected = expected * 2 + number
    assert float(total) == expected
