"""Reductions of large device arrays between workers by a library, such as NCCL, that goes from device to device."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from daskdist.call_threads import CALL_THREADS, CallInThread
from daskdist.config import seconds
from daskdist.devices import Device, Event, dtype_of, is_on_device
from daskdist.errors import CollectiveError
from daskdist.strategy.collectives.operations import array_of
from daskdist.strategy.reduce.reductions import NAMED, ReduceOp
from daskdist.strategy.values.device_arrays import Placed, in_stream_of

logger: Final = logging.getLogger("daskdist")

# The most seconds to wait for all workers to connect.
_CONNECT_S: Final = 60.0


@dataclass(frozen=True)
class Offer:
    """One worker's part of a reduction, without the arrays.

    Parameters
    ----------
    uuid
        The identifier of its device.
    kinds
        The reduction, dtype and result dtype of each array, which must be the same on all workers.
    counts
        The number of values in the total of each mean; None for other reductions.
    new_id
        The id of a new connection, if there is none yet; the first worker's is used.
    """

    uuid: str
    kinds: tuple[tuple[str, str, str], ...]
    counts: tuple[Any, ...]
    new_id: bytes | None


# Sends a value to all workers as one part of a call, and returns those of all workers in order.
Exchange = Callable[[str, Any], Sequence[Any]]


class DeviceLinks:
    """The connection of one worker's device to those of the other workers, made at the first reduction."""

    def __init__(self, num_workers: int, number: int) -> None:
        self._num_workers = num_workers
        self._number = number
        self._connection: Any = None
        self._has_failed = False

    def reduced(self, name: str, op: Any, partial: Any, exchange: Exchange) -> Any:
        """Return the combination of the partial results of all workers, on this worker's device.

        It is None, on all workers alike, if the values have to be exchanged between the hosts: some arrays are on the
        host, or of a dtype that the library lacks, workers share a device, or the library does not connect them.

        Raises
        ------
        CollectiveError
            Another worker does not take part in time.
        """
        offers = exchange("offer", self._offer(op, partial))
        first = offers[0]
        if any(offer is None or offer.kinds != first.kinds for offer in offers):
            return None
        if len({offer.uuid for offer in offers}) < len(offers):
            return None
        device = partial[0][1].device
        if self._connection is None:
            self._connect(device, first.new_id, exchange)
        if self._connection is None:
            return None
        counts = [
            None if column[0] is None else sum(column) for column in zip(*[o.counts for o in offers], strict=True)
        ]
        with in_stream_of(device):
            totals = [
                self._connection.all_reduce(reduction, array_of(placed.partial))
                for (reduction, _, _), (_, placed) in zip(first.kinds, partial, strict=True)
            ]
            self._await(name, device.current_stream().record())
        return [
            (shape, Placed(device, total if count is None else (total, count, placed.partial[2])))
            for (shape, placed), total, count in zip(partial, totals, counts, strict=True)
        ]

    def _offer(self, op: Any, partial: Any) -> Offer | None:
        named = NAMED[op].on_device if isinstance(op, ReduceOp) else None
        devices = {placed.device if isinstance(placed, Placed) else None for _, placed in partial}
        (device, *others) = devices
        links = None if device is None else device.links()
        if named is None or self._has_failed or others or device is None or links is None:
            return None
        reduction = "SUM" if named == "mean" else named.upper()
        kinds, counts = [], []
        for _, placed in partial:
            array = array_of(placed.partial)
            is_mean = isinstance(placed.partial, tuple)
            if not is_on_device(array) or not links.suits(reduction, dtype_of(array)):
                return None
            kinds.append((reduction, str(dtype_of(array)), str(np.dtype(placed.partial[2])) if is_mean else ""))
            counts.append(placed.partial[1] if is_mean else None)
        new_id = links.new_id() if self._connection is None and self._number == 0 else None
        return Offer(device.uuid, tuple(kinds), tuple(counts), new_id)

    def _connect(self, device: Device, new_id: bytes, exchange: Exchange) -> None:
        connections: list[Any] = []
        # The device had the library when this worker offered the connection.
        links: Any = device.links()

        def connect() -> None:
            try:
                with device.using():
                    connections.append(links.connect(device.index, new_id, self._num_workers, self._number))
            except Exception as error:
                logger.warning("devices of workers are not connected directly: %s", error)

        call = CallInThread(connect)
        CALL_THREADS.start(call)
        call.join(min(_CONNECT_S, seconds("timeouts.collective")))
        connected = list(connections)
        if all(exchange("ready", bool(connected))):
            (self._connection,) = connected
            return
        self._has_failed = True
        for connection in connected:
            connection.abort()

    def _await(self, name: str, end: Event) -> None:
        failures: list[BaseException] = []

        def wait() -> None:
            try:
                end.synchronize()
            except BaseException as error:
                failures.append(error)

        call, most = CallInThread(wait), seconds("timeouts.collective")
        CALL_THREADS.start(call)
        call.join(min(most, threading.TIMEOUT_MAX))
        if not call.is_alive() and not failures:
            return
        self._has_failed, connection = True, self._connection
        self._connection = None
        # Closing the connection ends kernels that wait for other devices.
        connection.abort()
        if failures:
            raise CollectiveError(f"{name}: devices of workers did not complete it: {failures[0]}") from failures[0]
        raise CollectiveError(
            f"{name}: devices of other workers did not take part within {most:g} s, which is "
            "daskdist.timeouts.collective"
        )
