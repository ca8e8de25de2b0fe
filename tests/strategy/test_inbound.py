"""Connections between workers that threads read while they wait."""

from __future__ import annotations

import asyncio
import socket
import threading

import numpy as np
import pytest
from distributed.comm import connect, listen
from distributed.security import Security

from daskdist.execute.messages.outbox import BatchReader, Outbox
from daskdist.strategy.steps.remote.inbound import Inbound, can_be_read_by_threads
from daskdist.strategy.steps.remote.promises import Promise

WITHIN_S = 30
NUM_MESSAGES = 60


class Receiver:
    """Promises that messages with the same numbers set, and the threads that read these messages."""

    def __init__(self):
        self.promises = [Promise() for _ in range(NUM_MESSAGES + 1)]
        self.threads = []
        self.inbound = Inbound(self.take)

    def take(self, link, number, message):
        assert link == "link"
        self.threads.append(threading.get_ident())
        self.promises[number].set(message)

    def wait_for_all(self, numbers):
        for number in numbers:
            self.inbound.wait_for(self.promises[number])
            assert (self.promises[number].get() == number).all()
        return threading.get_ident()


async def connected(protocol, exchange):
    receiver, acknowledged, is_read = Receiver(), [], asyncio.Event()
    keys = Security.temporary() if protocol == "tls" else Security()

    async def serve(comm):
        assert can_be_read_by_threads(comm)
        await comm.write("ready")
        await receiver.inbound.read_all(comm, "link")
        comm.abort()
        is_read.set()

    listener = await listen(f"{protocol}://127.0.0.1", serve, **keys.get_listen_args("worker"))
    comm = await connect(listener.contact_address, **keys.get_connection_args("worker"))
    assert await comm.read() == "ready"

    async def read_acknowledged():
        reader = BatchReader(comm, is_framed=True)
        while True:
            acknowledged.extend(await reader.read())

    outbox = Outbox(comm, is_framed=True)
    tasks = [asyncio.ensure_future(outbox.write_all()), asyncio.ensure_future(read_acknowledged())]
    try:
        await asyncio.wait_for(exchange(receiver, outbox, acknowledged), WITHIN_S)
    finally:
        # Release threads that still wait if the test failed.
        for promise in receiver.promises:
            promise.set(None)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        comm.abort()
        listener.stop()
    await asyncio.wait_for(is_read.wait(), WITHIN_S)


def send(outbox, number):
    # Every seventh message is larger than the buffer of one read.
    outbox.append((number, np.full(2**18 if number % 7 == 0 else 10, number)))
    outbox.flush()


@pytest.mark.parametrize("protocol", ["tcp", "tls"])
def test_threads_read_what_they_wait_for_and_the_event_loop_what_nobody_waits_for(protocol):
    async def exchange(receiver, outbox, acknowledged):
        half = NUM_MESSAGES // 2
        numbers = [range(1, half, 2), range(2, half, 2)]
        waiting = [asyncio.ensure_future(asyncio.to_thread(receiver.wait_for_all, part)) for part in numbers]
        for number in range(1, half):
            send(outbox, number)
            await asyncio.sleep(0.001)
        threads = await asyncio.gather(*waiting)
        assert set(receiver.threads) & set(threads)
        for number in range(half, NUM_MESSAGES):
            send(outbox, number)
        while not receiver.promises[NUM_MESSAGES - 1].is_set or acknowledged[-1:] != [NUM_MESSAGES - 1]:
            await asyncio.sleep(0.001)
        assert receiver.threads[-1] == threading.get_ident()
        assert acknowledged == sorted(set(acknowledged))

    asyncio.run(connected(protocol, exchange))


def test_a_thread_that_reads_wakes_up_when_another_thread_sets_what_it_waits_for():
    async def exchange(receiver, outbox, acknowledged):
        send(outbox, 1)
        waiting = [asyncio.ensure_future(asyncio.to_thread(receiver.wait_for_all, [last])) for last in (1, 2, 3)]
        while not receiver.inbound.reading_thread or not receiver.promises[1].is_set:
            await asyncio.sleep(0.001)
        receiver.promises[2].set(np.full(1, 2))
        await asyncio.gather(*waiting[:2])
        # The thread that still waits takes over reading the connection.
        while not receiver.inbound.reading_thread:
            await asyncio.sleep(0.001)
        send(outbox, 3)
        assert await waiting[2] == receiver.threads[-1]

    asyncio.run(connected("tcp", exchange))


def test_a_thread_keeps_waiting_when_the_connection_ends():
    async def exchange(receiver, outbox, acknowledged):
        waiting = asyncio.ensure_future(asyncio.to_thread(receiver.wait_for_all, [5]))
        while not receiver.inbound.reading_thread:
            await asyncio.sleep(0.001)
        outbox._comm.stream.socket.shutdown(socket.SHUT_RDWR)
        while receiver.inbound._connections:
            await asyncio.sleep(0.001)
        assert not waiting.done()
        receiver.promises[5].set(np.full(1, 5))
        await waiting

    asyncio.run(connected("tcp", exchange))
