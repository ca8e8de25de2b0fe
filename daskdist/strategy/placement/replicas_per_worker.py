"""The number of replicas on each worker of a cluster: one number for all, or one for each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from daskdist.core.arguments import is_list, whole_number, whole_numbers
from daskdist.errors import ArgumentError

# One number for all workers, one for each in order, or numbers of workers by name or address.
ReplicasPerWorker = int | Sequence[int] | Mapping[str, int] | Mapping[int, int]
# The checked form.
Counts = int | tuple[int, ...] | dict[str, int]

_OPERATION = "MultiWorkerMirroredStrategy"
_ARGUMENT = "num_replicas_per_worker"


@dataclass(frozen=True)
class Worker:
    """The address and name of a worker."""

    address: str
    name: str


def as_counts(wanted: ReplicasPerWorker) -> Counts:
    """Return ``num_replicas_per_worker`` after the checks that are possible without the workers.

    Raises
    ------
    ArgumentError
        A value is not a whole number, or no worker would have a replica.

    >>> as_counts(2), as_counts([2, 0]), as_counts({0: 2})
    (2, (2, 0), {'0': 2})
    """
    counts: tuple[int, ...] | dict[str, int]
    if isinstance(wanted, Mapping):
        counts = {
            str(name): whole_number(_OPERATION, f"{_ARGUMENT}[{name!r}]", number, at_least=0)
            for name, number in wanted.items()
        }
        if len(counts) < len(wanted):
            raise ArgumentError(f"{_OPERATION}: {_ARGUMENT} names one worker twice: {list(wanted)}; name it once")
    elif is_list(wanted):
        counts = whole_numbers(_OPERATION, _ARGUMENT, wanted, at_least=0)
    else:
        return whole_number(_OPERATION, _ARGUMENT, wanted, at_least=1)
    if not any(counts.values() if isinstance(counts, dict) else counts):
        raise ArgumentError(f"{_OPERATION}: {_ARGUMENT} is {wanted!r:.80}; give at least one worker a replica")
    return counts


def num_replicas_on(workers: Sequence[Worker], counts: Counts | None) -> Sequence[int | None]:
    """Return the number of replicas of each worker; None if it is not given.

    Raises
    ------
    ArgumentError
        A named worker does not exist, or there is not one number for each worker.

    >>> workers = [Worker("tcp://a:1", "alice"), Worker("tcp://b:1", "bob")]
    >>> num_replicas_on(workers, 1), num_replicas_on(workers, (2, 0)), num_replicas_on(workers, {"bob": 1})
    ([1, 1], [2, 0], [0, 1])
    """
    if counts is None or isinstance(counts, int):
        return [counts] * len(workers)
    if isinstance(counts, dict):
        return _by_name(workers, counts)
    if len(counts) != len(workers):
        raise ArgumentError(
            f"{_OPERATION}: {_ARGUMENT} has {len(counts)} numbers, but there are {len(workers)} workers, in order "
            f"{names_of(workers)}. Give one for each, 0 for none, or name workers: {{{workers[0].name!r}: 1}}"
        )
    return list(counts)


def _by_name(workers: Sequence[Worker], counts: dict[str, int]) -> list[int]:
    numbers = [0] * len(workers)
    names: dict[int, str] = {}
    said = f"{_OPERATION}: {_ARGUMENT} names"
    for (name, number), place in zip(
        counts.items(), places_of(workers, [(name, said) for name in counts]), strict=True
    ):
        if place in names:
            raise ArgumentError(
                f"{_OPERATION}: {_ARGUMENT} names one worker twice, as {names[place]!r} and {name!r}; name it once"
            )
        names[place] = name
        numbers[place] = number
    return numbers


def places_of(workers: Sequence[Worker], names: Iterable[tuple[str, str]]) -> Iterator[int]:
    """Yield the positions of workers in a sequence, each by its name or address and the start of a message about it.

    Raises
    ------
    ArgumentError
        There is no such worker.

    >>> list(places_of([Worker("tcp://a:1", "alice")], [("alice", "one"), ("tcp://a:1", "another")]))
    [0, 0]
    """
    places = {worker.name: place for place, worker in enumerate(workers)}
    places |= {worker.address: place for place, worker in enumerate(workers)}
    for name, said in names:
        if name not in places:
            raise ArgumentError(
                f"{said} worker {name!r}, but there is none of that name or address; there are {names_of(workers)}"
            )
        yield places[name]


def names_of(workers: Sequence[Worker]) -> str:
    """Return the names of workers as listed in messages.

    >>> names_of([Worker("tcp://a:1", "alice"), Worker("tcp://b:1", "tcp://b:1")])
    'alice (tcp://a:1), tcp://b:1'
    """
    return ", ".join(
        worker.name if worker.name == worker.address else f"{worker.name} ({worker.address})" for worker in workers
    )
