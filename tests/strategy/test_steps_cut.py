"""Connections of steps that are cut while the processes at both ends continue."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import threading
import time

import dask
import numpy as np
import pytest
from conftest import eventually, new_cluster
from distributed import Event
from distributed.comm.tcp import TCP

import daskdist
from daskdist import errors
from daskdist.strategy.collectives.mailbox import mailbox_of

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def own_client():
    """Return a client of two workers that no other test uses."""
    with new_cluster() as client:
        yield client


def cut(operation):
    """Return a function that cuts a worker's connections of an operation, and gives their number."""

    async def cut_all(dask_worker):
        comms = [comm for comm, op in dask_worker._comms.items() if op == operation and not comm.closed()]
        for comm in comms:
            # The other end may have just closed it.
            with contextlib.suppress(OSError):
                comm.stream.socket.shutdown(socket.SHUT_RDWR)
        return len(comms)

    return cut_all


async def cut_to(address):
    """Cut the connections from this worker to another one, and give their number."""
    comms = [value for value in gc.get_objects() if isinstance(value, TCP) and value.peer_address == address]
    sockets = [comm.stream.socket for comm in comms if not comm.closed()]
    for item in sockets:
        with contextlib.suppress(OSError):
            item.shutdown(socket.SHUT_RDWR)
    return len(sockets)


@contextlib.contextmanager
def cut_all_the_time(client, num_cuts):
    """Cut the connections between workers again and again, and append the numbers of cut connections to a list."""
    is_over = threading.Event()

    def run():
        while not is_over.wait(0.03):
            num_cuts.append(sum(client.run(cut("daskdist_link")).values()))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(20)


def kept(dask_worker):
    return mailbox_of(dask_worker).links.num_kept()


def test_messages_between_workers_arrive_once_and_in_order(own_client):
    num_messages = 1500

    async def collect(dask_worker):
        dask_worker.came = []
        mailbox_of(dask_worker).links.handlers[tuple] = lambda sender, message: dask_worker.came.append(message)

    async def send(address, dask_worker):
        reasons = []
        for number in range(num_messages):
            # Every fiftieth message is larger than the buffers of a socket.
            size = 2**20 if number % 50 == 0 else 2**10
            mailbox_of(dask_worker).links.send(address, (number, np.full(size, number)), reasons.append)
            await asyncio.sleep(0.001)
        return [why for why in reasons if why is not None]

    async def came(dask_worker):
        return [number for number, array in dask_worker.came if (array == number).all()]

    with daskdist.MultiWorkerMirroredStrategy(own_client) as strategy:
        first, second = strategy.workers
        own_client.run(collect, workers=[second])
        num_cuts = []
        try:
            with cut_all_the_time(own_client, num_cuts):
                assert own_client.run(send, second, workers=[first]) == {first: []}
            eventually(lambda: own_client.run(kept) == {first: 0, second: 0})
        finally:
            arrived = own_client.run(came, workers=[second])[second]
        assert arrived == list(range(num_messages))
        assert sum(num_cuts) > 5


@pytest.mark.parametrize("is_connected", [False, True])
def test_a_message_that_was_being_written_is_sent_again(own_client, is_connected):
    def ones(size):
        return np.ones(size)

    with (
        dask.config.set({"daskdist.timeouts.step": "10 s"}),
        daskdist.MultiWorkerMirroredStrategy(own_client) as strategy,
    ):
        first, second = strategy.workers
        pids = own_client.run(os.getpid)
        values = strategy.run(ones, args=(2**22,))
        strategy.local_results(strategy.run(np.sum, args=(values,)))
        if is_connected:
            assert float(strategy.reduce("SUM", strategy.run(np.sum, args=(values,)), axis=None)) == 2**23
        os.kill(pids[first], signal.SIGSTOP)
        try:
            # The message is written into buffers that the stopped worker does not read to the end.
            total = strategy.reduce("SUM", values, axis=None)
            time.sleep(0.5)
            assert own_client.run(cut_to, first, workers=[second])[second]
        finally:
            os.kill(pids[first], signal.SIGCONT)
        assert strategy.local_results(strategy.run(np.sum, args=(total,))) == (2.0**23, 2.0**23)


def test_steps_do_not_notice_that_connections_between_workers_are_cut(own_client):
    def add(x, y):
        return x + y

    num_cuts = []
    with (
        dask.config.set({"daskdist.timeouts.step": "10 s"}),
        daskdist.MultiWorkerMirroredStrategy(own_client) as strategy,
        cut_all_the_time(own_client, num_cuts),
    ):
        small, large, num_steps = np.zeros(3), np.zeros(2**18), 0
        until = time.monotonic() + 3
        while time.monotonic() < until:
            for _ in range(10):
                num_steps += 1
                small = strategy.reduce("MEAN", strategy.run(add, args=(small, 1)), axis=None)
                large = strategy.reduce("MEAN", strategy.run(add, args=(large, 1)), axis=None)
            assert np.asarray(small).tolist() == [num_steps] * 3
        assert (np.asarray(large) == num_steps).all()
    assert sum(num_cuts) > 10


@pytest.mark.parametrize("relay", [False, True])
def test_a_worker_is_lost_at_once_when_its_stream_is_cut(relay):
    def wait():
        return float(Event("continue").wait(60))

    with (
        new_cluster() as client,
        dask.config.set({"daskdist.steps.relay": relay}),
        daskdist.MultiWorkerMirroredStrategy(client) as strategy,
    ):
        gate = Event("continue", client=client)
        gate.set()
        strategy.local_results(strategy.run(wait))
        gate.clear()
        waiting = strategy.reduce("SUM", strategy.run(wait), axis=None)
        worker = strategy.workers[1]
        since = time.monotonic()
        assert client.run(cut("daskdist_steps"), workers=[worker]) == {worker: 1}
        with pytest.raises(errors.ClusterError, match=f"lost {worker}, which had replicas"):
            float(waiting)
        assert time.monotonic() - since < 25
        gate.set()
        # The worker still exists, and another strategy can use it.
        assert strategy.local_results(strategy.run(float, args=(1,))) == (1.0,)
        with daskdist.MultiWorkerMirroredStrategy(client) as other:
            assert other.local_results(other.run(float, args=(1,))) == (1.0, 1.0)
