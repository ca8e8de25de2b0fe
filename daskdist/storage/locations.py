"""Workers that have a file on a local disk, as the user specifies."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from daskdist.errors import ArgumentError
from daskdist.storage.filesystem import is_remote, local

Name = str | int


@dataclass(frozen=True)
class Locations:
    """A map from paths to workers. It affects neither the elements of a pipeline nor its fingerprint.

    Parameters
    ----------
    workers_by_path
        The user's value: a mapping of files and folders to names or addresses of workers, or a function of a path.
    """

    workers_by_path: Mapping[str, tuple[Name, ...]] | Callable[[str], Any]

    @classmethod
    def of(cls, value: object) -> Locations:
        """Create the map from a mapping, whose paths are made absolute, or from a function."""
        if isinstance(value, Locations):
            return value
        if callable(value):
            return cls(value)
        if not isinstance(value, Mapping):
            raise ArgumentError(
                f"Options: locations is {type(value).__name__}; give a mapping of paths to workers, or a function from "
                "a path to workers"
            )
        return cls({_absolute(path): _names(path, names) for path, names in value.items()})

    def names_of(self, path: str) -> tuple[Name, ...]:
        """Return the names or addresses of the workers that have a file, or its closest listed folder."""
        if not isinstance(self.workers_by_path, Mapping):
            return _names(path, self.workers_by_path(path))
        for place in _upwards(path):
            if place in self.workers_by_path:
                return self.workers_by_path[place]
        return ()

    def named(self) -> Iterator[tuple[str, tuple[Name, ...]]]:
        """Return an iterator over paths and the names of their workers; empty if the map is a function."""
        return iter(self.workers_by_path.items() if isinstance(self.workers_by_path, Mapping) else ())

    def __str__(self) -> str:
        if isinstance(self.workers_by_path, Mapping):
            return f"those of {len(self.workers_by_path)} path{'s' * (len(self.workers_by_path) != 1)}"
        return str(getattr(self.workers_by_path, "__qualname__", self.workers_by_path))

    def __dask_tokenize__(self) -> object:
        return "Locations"


class Addresses:
    """The addresses of the workers that have a file, by its path.

    Parameters
    ----------
    locations
        The map from paths to names or addresses of workers.
    workers
        The workers of the cluster, by address.
    """

    def __init__(self, locations: Locations, workers: Mapping[str, Mapping[str, Any]]) -> None:
        self._locations = locations
        self._names = {address: str(info["name"]) for address, info in workers.items()}
        self._addresses = {name: address for address, name in self._names.items()} | {
            address: address for address in workers
        }

    def __call__(self, path: str) -> Sequence[str]:
        return self.of(path, self._locations.names_of(path))

    def of(self, path: str, names: Sequence[Any]) -> Sequence[str]:
        """Return the addresses of the workers named for a path.

        Raises
        ------
        ArgumentError
            No worker has such a name or address.
        """
        for name in names:
            if str(name) not in self._addresses:
                known = ", ".join(f"{name!r} ({address})" for address, name in self._names.items())
                raise ArgumentError(
                    f"Options: locations has {path} on worker {name!r}, but the cluster has no such worker; "
                    f"it has {known}"
                )
        return [self._addresses[str(name)] for name in names]


def _names(path: object, value: object) -> tuple[Name, ...]:
    if value is None:
        return ()
    names = value if isinstance(value, Sequence) and not isinstance(value, (str, bytes)) else [value]
    for name in names:
        if isinstance(name, bool) or not isinstance(name, (str, int)):
            raise ArgumentError(
                f"Options: locations has {value!r} for {path}; give the name or address of a worker, or several"
            )
    return tuple(names)


def _absolute(path: Any) -> str:
    try:
        text = os.fspath(path)
    except TypeError:
        raise ArgumentError(f"Options: locations has the path {path!r}; a path is a string") from None
    text = text if is_remote(text) else local(text)
    return str(text).rstrip("/") or "/"


def _upwards(path: str) -> Iterator[str]:
    # Yield the path, then each folder around it.
    yield path
    while "/" in path.rstrip("/"):
        path = path.rstrip("/").rpartition("/")[0]
        yield path or "/"
