"""The exchange between the workers of a collective operation, over Dask's connections."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future as ThreadFuture
from dataclasses import replace
from typing import Any, Final

from daskdist.config import seconds, setting
from daskdist.errors import ArgumentError, CollectiveError
from daskdist.execute.callers.cluster_requests import is_encrypted
from daskdist.execute.messages.failure import Failure, Packed
from daskdist.strategy.collectives.device_links import DeviceLinks
from daskdist.strategy.collectives.operations import AllReduce, Merge
from daskdist.strategy.collectives.questions import Inquiry
from daskdist.strategy.collectives.rendezvous import CallSignature, Collective
from daskdist.strategy.group import ReplicaGroup
from daskdist.strategy.values.device_arrays import host_nest

# Up to this many workers send to all others directly; more use a tree.
_MOST_WITHOUT_TREE: Final = 8
# Up to this many workers send each other a whole large value; with more, each reduces a part.
_MOST_WHOLE: Final = 2
# Up to this many workers are connected from device to device: each sends small messages to all others.
_MOST_LINKED: Final = 32
# Kind of message -> 0 for the direct exchange, 1 for the tree, 2 for the agreement on device links, which comes before
# one of the two.
_WAYS: Final = {"values": 0, "part": 0, "up": 1, "down": 1, "offer": 2, "ready": 2}
# Kinds of messages that carry the signature of their call.
_ABOUT: Final = frozenset({"values", "up", "offer", "ready"})
# Seconds between queries of other workers while waiting for a replica of this process.
_LOOK_EVERY_S: Final = 1.0


class Transport:
    """The exchange between the workers of a rendezvous.

    Parameters
    ----------
    mailbox
        The `Mailbox` of this worker, which sends and receives the messages.
    group
        The replicas.
    step
        The number of the call.
    """

    def __init__(self, mailbox: Any, group: ReplicaGroup, step: int) -> None:
        self._mailbox = mailbox
        self._group = group
        self._key = (group.token, step)
        self._own = group.workers.index(mailbox.address)

    def __call__(self, turn: int, collective: Collective, signature: CallSignature, partial: Any) -> Any:
        """Return the result of the operation from the partial results of all workers."""
        if isinstance(collective, AllReduce) and (nccl := setting("nccl")) and collective.is_large(partial):
            self._check_links(signature, nccl)
            reduced = self._by_links(turn, collective, signature, partial)
            if reduced is not None:
                return collective.final(reduced)
        # Other processes receive NumPy arrays.
        partial = host_nest(partial)
        if isinstance(collective, Merge) or len(self._group.workers) > _MOST_WITHOUT_TREE:
            return self._in_tree(turn, collective, signature, partial)
        return collective.final(self._between_all(turn, collective, signature, partial))

    def _by_links(self, turn: int, collective: AllReduce, signature: CallSignature, partial: Any) -> Any:
        # Return the result on this worker's device; None if it is to be exchanged between the hosts.
        num_workers = len(self._group.workers)
        if num_workers > _MOST_LINKED:
            return None
        links = self._mailbox.device_links.setdefault(self._group, DeviceLinks(num_workers, self._own))
        others = [number for number in range(num_workers) if number != self._own]
        # The error for a worker without the setting shows the name.
        name = f"{signature.name} with daskdist.nccl"
        named = replace(signature, name=name, order=(*signature.order[:-1], name))

        def exchange(part: str, value: Any) -> list[Any]:
            self._post(turn, part, others, named, value)
            values = {self._own: value}
            for number, (other, received) in zip(others, self._take(turn, part, others, named), strict=True):
                _check(named, other)
                values[number] = received
            return [values[number] for number in range(num_workers)]

        return links.reduced(signature.name, collective.op, partial, exchange)

    def _check_links(self, signature: CallSignature, nccl: Any) -> None:
        if nccl != "insecure" and any(map(is_encrypted, self._group.workers)):
            raise ArgumentError(
                f"{signature.name}: this cluster encrypts its connections, and those of NCCL are neither encrypted nor "
                "authenticated. Set daskdist.nccl to false on all workers, or, if the network between them is trusted, "
                "to 'insecure'"
            )

    def absent(self, turn: int, name: str) -> Callable[[float], list[int] | None]:
        """Return a getter of the missing replicas of other workers; see `Inquiry.absent`."""
        questions, address = self._mailbox.questions, self._mailbox.address
        inquiry = Inquiry(questions, address, self._key, turn, name, self._group, _LOOK_EVERY_S)
        others = [other for other in self._group.workers if other != address]
        return lambda end: inquiry.absent(others, end)

    def _between_all(self, turn: int, collective: Collective, signature: CallSignature, partial: Any) -> Any:
        # Each worker computes the result, in the same order; of large values, each of more than two workers computes a
        # part.
        num_workers = len(self._group.workers)
        others = [number for number in range(num_workers) if number != self._own]
        parts = None
        if isinstance(collective, AllReduce) and collective.is_large(partial):
            if num_workers <= _MOST_WHOLE:
                (sent,) = self._post(turn, "values", others, signature, partial, is_kept=True)
                result = self._combined(turn, "values", collective, signature, partial, range(num_workers))
                # The replica may change its contribution as soon as it has a result.
                self._await_sent(sent, others[0], signature)
                return result
            parts = collective.cut(partial, num_workers)
            for number in others:
                # No copy is needed: the replica has no result, and changes nothing, before these parts have arrived.
                self._post(turn, "values", [number], signature, parts[number], is_kept=True)
        else:
            self._post(turn, "values", others, signature, partial)
        local_part = partial if parts is None else parts[self._own]
        result = self._combined(turn, "values", collective, signature, local_part, range(num_workers))
        if parts is None or not isinstance(collective, AllReduce):
            return result
        self._post(turn, "part", others, signature, result, is_kept=True)
        parts_of = dict(zip(others, self._take(turn, "part", others, signature), strict=True))
        return collective.joined([result if k == self._own else parts_of[k] for k in range(num_workers)], partial)

    def _await_sent(self, sent: ThreadFuture[None], number: int, signature: CallSignature) -> None:
        most = seconds("timeouts.collective")
        try:
            # The timeout may be infinite.
            sent.result(min(most, threading.TIMEOUT_MAX))
        except TimeoutError:
            address = self._group.workers[number]
            raise CollectiveError(
                f"{signature.name}: {address} did not receive a message within {most:g} s, which is "
                "daskdist.timeouts.collective"
            ) from None

    def _combined(
        self,
        turn: int,
        part: str,
        collective: Collective,
        signature: CallSignature,
        partial: Any,
        numbers: Sequence[int],
    ) -> Any:
        others = [number for number in numbers if number != self._own]
        messages = dict(zip(others, self._take(turn, part, others, signature), strict=True))
        for number in others:
            other, value = messages[number]
            if isinstance(value, Failure):
                raise value.error()
            _check(signature, other)
        values = [partial if number == self._own else messages[number][1] for number in numbers]
        if len(values) == 2 and isinstance(collective, AllReduce) and collective.is_large(partial):
            # Nothing else references received arrays.
            return collective.combined_in_place(values, numbers.index(others[0]))
        return collective.combined(values)

    def _in_tree(self, turn: int, collective: Collective, signature: CallSignature, partial: Any) -> Any:
        result = partial
        numbers: Sequence[int] = range(len(self._group.workers))
        led: list[Sequence[int]] = []
        above = 0
        while len(numbers) > 1:
            groups = [numbers[k : k + _MOST_WITHOUT_TREE] for k in range(0, len(numbers), _MOST_WITHOUT_TREE)]
            group = next(group for group in groups if self._own in group)
            above = group[0]
            if above != self._own:
                self._post(turn, f"up {len(led)}", [above], signature, result)
                break
            result = _outcome(
                self._combined, turn, f"up {len(led)}", collective, signature, result, group, before=result
            )
            led.append(group)
            numbers = [group[0] for group in groups]
        if above == self._own:
            result = _outcome(collective.final, result, before=result)
        else:
            (result,) = self._take(turn, f"down {len(led)}", [above], signature)
        for level, group in reversed(list(enumerate(led))):
            self._post(turn, f"down {level}", group[1:], signature, result)
        if isinstance(result, Failure):
            raise result.error()
        return result

    def _post(
        self,
        turn: int,
        part: str,
        numbers: Sequence[int],
        signature: CallSignature,
        data: Any,
        *,
        is_kept: bool = False,
    ) -> list[ThreadFuture[None]]:
        kind = part.partition(" ")[0]
        # Pickle now, as sending takes a while and the replica may change its value as soon as it has a result.
        try:
            packed = Packed.of((signature, data) if kind in _ABOUT else data)
        except Exception as error:
            value_name = "the function's result" if kind == "down" else "a replica's value"
            raise ArgumentError(
                f"{signature.name}: {value_name} cannot be pickled, so it cannot be sent to other workers: {error}"
            ) from error
        # Nothing else refers to what the receivers get, so they may write into it.
        packed = (packed if is_kept else packed.copied())._replace(are_writable=[True] * len(packed.buffers))
        workers = [self._group.workers[number] for number in numbers]
        return [self._mailbox.send(address, self._key, turn, part, packed) for address in workers]

    def _take(self, turn: int, part: str, numbers: Sequence[int], signature: CallSignature) -> list[Any]:
        senders = [self._group.workers[number] for number in numbers]
        way = _WAYS[part.partition(" ")[0]]

        def refuse(other: str, data: Any) -> None:
            kind = other.partition(" ")[0]
            if _WAYS[kind] != way and kind in _ABOUT:
                _check(signature, data.value()[0])

        taken = self._mailbox.take(self._key, turn, part, senders, signature.name, self._group, refuse)
        return [data.value() for data in taken]


def _check(signature: CallSignature, other: CallSignature) -> None:
    first, second = sorted((signature, other), key=lambda signature: signature.number)
    first.check(second)


def _outcome(function: Callable[..., Any], *args: Any, before: Any) -> Any:
    # Return the exception as a value: peers are waiting for a message.
    if isinstance(before, Failure):
        return before
    try:
        return function(*args)
    except BaseException as error:
        return Failure.of(error)
