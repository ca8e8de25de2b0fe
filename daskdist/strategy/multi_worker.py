"""`MultiWorkerMirroredStrategy`: replicas on the workers of a Dask cluster."""

from __future__ import annotations

import socket
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import optree
from distributed import Client, LocalCluster
from distributed.comm import parse_address, parse_host_port
from distributed.comm.registry import get_backend

from daskdist.config import setting
from daskdist.dataset import Dataset
from daskdist.errors import ArgumentError, ClusterError
from daskdist.execute.callers import Caller, Handle
from daskdist.execute.submit import Submit, workers_of
from daskdist.strategy.strategy import Replica, Strategy
from daskdist.strategy.values import (
    AsyncValue,
    PerReplica,
    PickAll,
    PickFromReturned,
    Remote,
    Returned,
    as_it_is_now,
    regroup,
)

# Arrays of this size and more are sent to the workers themselves.
_LARGE_BYTES = 2**20
# Functions whose layouts are kept.
_MOST_LAYOUTS = 256


class MultiWorkerMirroredStrategy(Strategy):
    """Replicas on the workers of a Dask cluster, in step.

    Parameters
    ----------
    cluster
        A ``distributed.Client``, a cluster object such as ``LocalCluster``, or the address of a scheduler. If
        None, a ``LocalCluster`` with a process a core that belongs to the strategy: `close` closes it, and so
        does the end of a ``with`` block.
    replicas_per_worker
        Replicas on each worker; at most as many as it has threads.

    Raises
    ------
    ClusterError
        Nobody answers at the address, or the cluster has no workers.
    ArgumentError
        A worker has fewer threads than it is to have replicas.

    Notes
    -----
    What `run` and `reduce` return is asynchronous: it is waited for when it is looked at. The workers are
    those there are when the strategy is made, ordered by name.
    """

    def __init__(self, cluster: Any = None, *, replicas_per_worker: int = 1) -> None:
        if replicas_per_worker < 1:
            raise ArgumentError(f"replicas_per_worker is {replicas_per_worker}; give 1 or more")
        self._owned: list[Any] = []
        # Also when nobody closes it: worker processes must not outlive the program.
        self._finalizer = weakref.finalize(self, _close_all, self._owned)
        try:
            self.client = self._connect(cluster, replicas_per_worker)
            workers = _workers(self.client)
            for address, num_threads in workers:
                if replicas_per_worker > num_threads:
                    raise ArgumentError(
                        f"replicas_per_worker is {replicas_per_worker}, and worker {address} has {num_threads} "
                        f"threads; start workers with --nthreads {replicas_per_worker}, or use fewer replicas"
                    )
        except BaseException:
            self._finalizer()
            raise
        replicas = [Replica(address, f"CPU:{k}") for address, _ in workers for k in range(replicas_per_worker)]
        self._submit = Submit(self.client, [address for address, _ in workers])
        super().__init__(replicas, self._submit)
        # What each function gave when it was first called, and so gives; and what its key is the identity of.
        self._layouts: dict[Any, tuple[Layout, Any]] = {}
        # The calls of each step that are under way, the oldest step first.
        self._in_flight: deque[set[Handle]] = deque()

    def _connect(self, cluster: Any, threads: int) -> Client:
        if isinstance(cluster, Client):
            return cluster
        if cluster is None:
            # Loopback only, the dashboard too: a cluster for this program is nobody else's business.
            cluster = LocalCluster(host="127.0.0.1", threads_per_worker=threads, dashboard_address="127.0.0.1:0")
            self._owned.append(cluster)
        if isinstance(cluster, str):
            client = _client_of(cluster)
        elif hasattr(cluster, "scheduler_address"):
            client = Client(cluster, set_as_default=False)
        else:
            raise ArgumentError(
                f"MultiWorkerMirroredStrategy: {type(cluster).__name__} is not a Dask client, a cluster or an address"
            )
        self._owned.insert(0, client)
        return client

    def close(self) -> None:
        """Close the connection, and the cluster if the strategy made it. What it computed is gone after it."""
        self._in_flight.clear()
        if self._finalizer.alive:
            self._submit.release()
        self._finalizer()

    def __enter__(self) -> MultiWorkerMirroredStrategy:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def reader(self, dataset: Dataset) -> Caller:
        return Submit(self.client, self._submit.workers, self._submit.futures)

    def _sent(self, nest: Any) -> Any:
        def send(leaf: Any) -> Any:
            if not isinstance(leaf, np.ndarray) or leaf.dtype.hasobject:
                return leaf
            if leaf.nbytes < _LARGE_BYTES:
                return as_it_is_now(leaf)
            # Once to each worker, and not with every task by way of the scheduler.
            return AsyncValue(self._submit, Remote(self._submit.place(leaf), PickAll()))

        return optree.tree_map(send, nest, none_is_leaf=True)

    def _returned(self, fn: Callable[..., Any], handles: list[Handle]) -> Any:
        self._keep_until_done(handles)
        layout = self._layout(fn, handles)
        leaves = []
        for number, is_none in enumerate(layout.are_none):
            pick = PickFromReturned(number, layout.treespec)
            values = [AsyncValue(self._submit, Remote(handle, pick)) for handle in handles]
            leaves.append(None if is_none else values[0] if len(values) == 1 else PerReplica(values))
        return optree.tree_unflatten(layout.treespec, leaves)

    def _keep_until_done(self, handles: list[Handle]) -> None:
        # A call whose result nobody keeps is to be made all the same; once it is, Dask may forget it.
        step = set(handles)
        for handle in handles:
            handle.add_done_callback(step.discard)
        self._in_flight.append(step)
        while self._in_flight and not self._in_flight[0]:
            self._in_flight.popleft()
        if len(self._in_flight) > setting("max-steps-in-flight"):
            self._submit.wait(list(self._in_flight.popleft()))

    def _layout(self, fn: Callable[..., Any], handles: list[Handle]) -> Layout:
        # A function defined anew in each step, over the same variables, is still one function.
        closure = getattr(fn, "__closure__", None) or ()
        key = (getattr(fn, "__code__", id(fn)), *map(id, closure))
        if key in self._layouts:
            return self._layouts[key][0]
        asked = [
            self._submit.call(layout_of, [handle], on=replica.worker, name="layout")
            for handle, replica in zip(handles, self.replicas, strict=True)
        ]
        layouts = self._submit.results(asked)
        # Refuses structures that differ.
        regroup([optree.tree_unflatten(each.treespec, each.are_none) for each in layouts])
        are_none = tuple(map(all, zip(*[each.are_none for each in layouts], strict=True)))
        layout = Layout(layouts[0].treespec, are_none)
        if not any(are_none):
            if len(self._layouts) == _MOST_LAYOUTS:
                self._layouts.pop(next(iter(self._layouts)))
            self._layouts[key] = layout, (fn, closure)
        return layout

    def _leaves_of(self, handle: Handle, num_leaves: int) -> list[Any]:
        treespec = Returned.of([0] * num_leaves).treespec
        picks = [PickFromReturned(number, treespec) for number in range(num_leaves)]
        return [AsyncValue(self._submit, Remote(handle, pick)) for pick in picks]


@dataclass(frozen=True)
class Layout:
    """What a function gives, but for the values: the structure, and which of its leaves are None."""

    treespec: Any
    are_none: tuple[bool, ...]


def layout_of(results: Sequence[Returned]) -> Layout:
    """The layout of the one result there is."""
    (returned,) = results
    return Layout(returned.treespec, tuple(leaf is None for leaf in returned.leaves))


def _client_of(address: str) -> Client:
    timeout = setting("timeouts.connect")
    try:
        _check_it_speaks(address, timeout)
        return Client(address, timeout=timeout, set_as_default=False)
    except (OSError, TimeoutError) as error:
        raise ClusterError(f"no Dask scheduler answers at {address!r} within {timeout} s: {error}") from error
    except ValueError as error:
        raise ClusterError(
            f"{address!r} is not the address of a scheduler: {error}; write it like 'tcp://127.0.0.1:8786'"
        ) from error


def _check_it_speaks(address: str, timeout: float) -> None:
    # A scheduler greets whoever connects. A client waits for the greeting without end.
    # What it is given is checked here too: an address it cannot read leaves half a client behind.
    scheme, location = parse_address(address)
    get_backend(scheme)
    host_and_port = parse_host_port(location)
    if scheme != "tcp":
        return
    try:
        connection = socket.create_connection(host_and_port, timeout)
    except ConnectionError:
        # Perhaps it is about to start: the client tries again until its time is up.
        return
    with connection:
        connection.recv(1)


def _workers(client: Client) -> list[tuple[str, int]]:
    # The address and number of threads of each, ordered by name where names are numbers, as a LocalCluster's are.
    timeout = setting("timeouts.workers")
    try:
        client.wait_for_workers(1, timeout=timeout)
    except (OSError, TimeoutError) as error:
        raise ClusterError(f"the cluster at {client.scheduler.address} has no workers after {timeout} s") from error
    found = workers_of(client)

    def place(item: tuple[str, dict[str, Any]]) -> tuple[bool, int, str]:
        name = str(item[1]["name"])
        return not name.isdecimal(), int(name) if name.isdecimal() else 0, item[0]

    return [(address, info["nthreads"]) for address, info in sorted(found.items(), key=place)]


def _close_all(owned: list[Any]) -> None:
    while owned:
        owned.pop(0).close()
