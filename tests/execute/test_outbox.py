"""Messages that are sent together over a comm of Dask's, framed by us or by Dask."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from distributed.comm import Comm, connect, listen

from daskdist.execute.messages.outbox import BatchStream, Outbox

WITHIN_S = 30


async def exchanged(protocol: str, exchange: Callable[[Comm, Comm], Awaitable[Any]]) -> Any:
    """Return the messages that arrive in an exchange between the two ends of a comm."""
    other: asyncio.Future[Comm] = asyncio.get_running_loop().create_future()
    closed = asyncio.Event()

    async def hold(comm: Comm) -> None:
        other.set_result(comm)
        await closed.wait()

    listener = await listen("tcp://127.0.0.1" if protocol == "tcp" else f"{protocol}://", hold)
    comm = await connect(listener.contact_address)
    there = await other
    try:
        return await asyncio.wait_for(exchange(comm, there), WITHIN_S)
    finally:
        comm.abort()
        there.abort()
        closed.set()
        listener.stop()


async def received(stream: BatchStream, num_messages: int) -> list[Any]:
    actual: list[Any] = []
    while len(actual) < num_messages:
        actual += await stream.read()
    return actual


@pytest.mark.parametrize(("protocol", "is_direct"), [("tcp", True), ("tcp", False), ("inproc", True)])
def test_messages_of_all_sizes_come_in_order(protocol, is_direct):
    sizes = [0, 1, 2**13, 2**16, 3, 2**20, 2**22 + 1, 5, 2**15]
    messages = [(number, np.arange(size, dtype=np.uint8), b"x" * size) for number, size in enumerate(sizes)]

    async def exchange(comm, there):
        outbox, reader = Outbox(BatchStream(comm, is_direct=is_direct)), BatchStream(there, is_direct=is_direct)
        writer = asyncio.ensure_future(outbox.write_all())
        actual = []
        for message in messages:
            outbox.messages.append(message)
            outbox.flush()
            if message[0] % 2:
                actual += await received(reader, message[0] + 1 - len(actual))
        actual += await received(reader, len(messages) - len(actual))
        writer.cancel()
        return actual

    for (number, array, text), sent in zip(asyncio.run(exchanged(protocol, exchange)), messages, strict=True):
        assert (number, text) == (sent[0], sent[2])
        np.testing.assert_array_equal(array, sent[1])


def test_several_threads_send_at_once_to_one_that_does_not_read_yet():
    num_threads, num_messages = 4, 300

    async def exchange(comm, there):
        outbox = Outbox(BatchStream(comm))
        writer = asyncio.ensure_future(outbox.write_all())
        await asyncio.sleep(0)

        def send(thread):
            for number in range(num_messages):
                # All messages together are larger than the buffers of sockets.
                outbox.messages.append((thread, number, bytes(50_000)))
                outbox.flush()

        threads = [threading.Thread(target=send, args=(item,)) for item in range(num_threads)]
        for part in threads:
            part.start()
        while any(value.is_alive() for value in threads):
            await asyncio.sleep(0.01)
        actual = await received(BatchStream(there), num_threads * num_messages)
        writer.cancel()
        return actual

    actual = asyncio.run(exchanged("tcp", exchange))
    for thread in range(num_threads):
        assert [number for other, number, _ in actual if other == thread] == list(range(num_messages))


@pytest.mark.parametrize("is_this_end", [True, False])
def test_a_closed_comm_raises_in_the_writer_or_the_reader(is_this_end):
    async def exchange(comm, there):
        stream = BatchStream(comm)
        outbox = Outbox(stream)
        ends = [asyncio.ensure_future(outbox.write_all()), asyncio.ensure_future(stream.read())]
        await asyncio.sleep(0)
        (comm if is_this_end else there).abort()
        outbox.messages.append("too late")
        outbox.flush()
        done, others = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for other in others:
            other.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        raise next(iter([end.exception() for end in done]))

    with pytest.raises(OSError, match=r".*"):
        asyncio.run(exchanged("tcp", exchange))


def test_errors_of_pickling_are_raised_by_the_writer():
    async def exchange(comm, there):
        outbox = Outbox(BatchStream(comm))
        writer = asyncio.ensure_future(outbox.write_all())
        await asyncio.sleep(0)
        outbox.messages.append(threading.Lock())
        outbox.flush()
        await writer

    with pytest.raises(TypeError, match="pickle"):
        asyncio.run(exchanged("tcp", exchange))
