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
from daskdist.strategy.collectives.messages import Contribution, Turn
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

    def __call__(self, number: int, collective: Collective, signature: CallSignature, partial: Any) -> Any:
        """Return the result of the operation from the partial results of all workers."""
        if isinstance(collective, AllReduce) and (nccl := setting("nccl")) and collective.is_large(partial):
            self._check_links(signature, nccl)
            if len(self._group.workers) <= _MOST_LINKED:
                # The error for a worker without the setting shows the name.
                name = f"{signature.name} with daskdist.nccl"
                signature = replace(signature, name=name, order=(*signature.order[:-1], name))
                reduced = self._by_links(Turn(self._key, number, signature), collective, partial)
                if reduced is not None:
                    return collective.final(reduced)
        # Other processes receive NumPy arrays.
        turn, partial = Turn(self._key, number, signature), host_nest(partial)
        if isinstance(collective, Merge) or len(self._group.workers) > _MOST_WITHOUT_TREE:
            return self._in_tree(turn, collective, partial)
        return collective.final(self._between_all(turn, collective, partial))

    def _by_links(self, turn: Turn, collective: AllReduce, partial: Any) -> Any:
        # Return the result on this worker's device; None if it is to be exchanged between the hosts.
        everyone = range(len(self._group.workers))
        links = self._mailbox.device_links.setdefault(self._group, DeviceLinks(len(everyone), self._own))

        def exchange(part: str, value: Any) -> list[Any]:
            self._post(turn, part, everyone, value)
            return self._values(turn, part, everyone, value)

        return links.reduced(collective.name, collective.op, partial, exchange)

    def _check_links(self, signature: CallSignature, nccl: Any) -> None:
        if nccl != "insecure" and any(map(is_encrypted, self._group.workers)):
            raise ArgumentError(
                f"{signature.name}: this cluster encrypts its connections, and those of NCCL are neither encrypted nor "
                "authenticated. Set daskdist.nccl to false on all workers, or, if the network between them is trusted, "
                "to 'insecure'"
            )

    def inquiry(self, turn: int, name: str, end: float) -> Inquiry:
        """Return the question for the replicas of other workers that have not made a call by a time."""
        return Inquiry(self._mailbox.questions, self._mailbox.address, self._key, turn, name, self._group, end)

    def _between_all(self, turn: Turn, collective: Collective, partial: Any) -> Any:
        # Each worker computes the result, in the same order; of large values, each of more than two workers computes a
        # part.
        everyone = range(len(self._group.workers))
        large = collective if isinstance(collective, AllReduce) and collective.is_large(partial) else None
        if large is not None and len(everyone) > _MOST_WHOLE:
            parts = large.cut(partial, len(everyone))
            for number in everyone:
                # No copy is needed: the replica has no result, and changes nothing, before these parts have arrived.
                self._post(turn, "values", [number], parts[number], is_kept=True)
            result = self._combined(turn, "values", large, parts[self._own], everyone)
            self._post(turn, "part", everyone, result, is_kept=True)
            return large.joined(self._values(turn, "part", everyone, result), partial)
        sent = self._post(turn, "values", everyone, partial, is_kept=large is not None)
        result = self._combined(turn, "values", collective, partial, everyone)
        if large is not None:
            # The replica may change its contribution as soon as it has a result.
            self._await_sent(sent[0], 1 - self._own, collective.name)
        return result

    def _await_sent(self, sent: ThreadFuture[None], number: int, name: str) -> None:
        most = seconds("timeouts.collective")
        try:
            # The timeout may be infinite.
            sent.result(min(most, threading.TIMEOUT_MAX))
        except TimeoutError:
            address = self._group.workers[number]
            raise CollectiveError(
                f"{name}: {address} did not receive a message within {most:g} s, which is daskdist.timeouts.collective"
            ) from None

    def _combined(self, turn: Turn, part: str, collective: Collective, partial: Any, numbers: Sequence[int]) -> Any:
        values = self._values(turn, part, numbers, partial)
        for value in values:
            if isinstance(value, Failure):
                raise value.error()
        if len(values) == 2 and isinstance(collective, AllReduce) and collective.is_large(partial):
            # Nothing else references received arrays.
            return collective.combined_in_place(values, 1 - numbers.index(self._own))
        return collective.combined(values)

    def _in_tree(self, turn: Turn, collective: Collective, partial: Any) -> Any:
        result = partial
        numbers: Sequence[int] = range(len(self._group.workers))
        led: list[Sequence[int]] = []
        above = 0
        while len(numbers) > 1:
            groups = [numbers[k : k + _MOST_WITHOUT_TREE] for k in range(0, len(numbers), _MOST_WITHOUT_TREE)]
            group = next(group for group in groups if self._own in group)
            above = group[0]
            if above != self._own:
                self._post(turn, f"up {len(led)}", [above], result)
                break
            result = _outcome(self._combined, turn, f"up {len(led)}", collective, result, group, before=result)
            led.append(group)
            numbers = [group[0] for group in groups]
        if above == self._own:
            result = _outcome(collective.final, result, before=result)
        else:
            (result,) = self._values(turn, f"down {len(led)}", [above])
        for level, group in reversed(list(enumerate(led))):
            self._post(turn, f"down {level}", group, result)
        if isinstance(result, Failure):
            raise result.error()
        return result

    def _post(
        self, turn: Turn, part: str, numbers: Sequence[int], value: Any, *, is_kept: bool = False
    ) -> list[ThreadFuture[None]]:
        # Pickle now, as sending takes a while and the replica may change its value as soon as it has a result.
        try:
            packed = Packed.of(value)
        except Exception as error:
            value_name = "the function's result" if part.startswith("down") else "a replica's value"
            raise ArgumentError(
                f"{turn.signature.name}: {value_name} cannot be pickled, so it cannot be sent to other workers: {error}"
            ) from error
        # Nothing else refers to what the receivers get, so they may write into it.
        packed = (packed if is_kept else packed.copied())._replace(are_writable=[True] * len(packed.buffers))
        workers = [self._group.workers[number] for number in numbers if number != self._own]
        return [self._mailbox.send(address, Contribution(turn, part, packed)) for address in workers]

    def _values(self, turn: Turn, part: str, numbers: Sequence[int], own_value: Any = None) -> list[Any]:
        # Wait for the values of some workers, with this one's if it is among them.
        others = [number for number in numbers if number != self._own]
        senders = [self._group.workers[number] for number in others]
        taken = self._mailbox.take(turn, part, senders, self._group)
        values = dict(zip(others, [data.value() for data in taken], strict=True))
        return [own_value if number == self._own else values[number] for number in numbers]


def _outcome(function: Callable[..., Any], *args: Any, before: Any) -> Any:
    # Return the exception as a value: peers are waiting for a message.
    if isinstance(before, Failure):
        return before
    try:
        return function(*args)
    except BaseException as error:
        return Failure.of(error)
