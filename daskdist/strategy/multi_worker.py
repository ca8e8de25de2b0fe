"""`MultiWorkerMirroredStrategy`: replicas on the workers of a Dask cluster."""

from __future__ import annotations

import copy
import itertools
import json
import os
import socket
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import optree
from dask.base import tokenize
from distributed import Client, LocalCluster
from distributed.comm import parse_address, parse_host_port
from distributed.comm.registry import get_backend

from daskdist.config import setting
from daskdist.core.block import Block
from daskdist.core.node import Node, walk
from daskdist.dataset import Dataset
from daskdist.errors import ArgumentError, ClusterError
from daskdist.execute.callers import Caller, Handle
from daskdist.execute.submit import Submit, workers_of
from daskdist.files.locations import Addresses
from daskdist.ops.from_tensor_slices import FromTensorSlices
from daskdist.ops.make_numpy_dataset import MakeNumpyDataset, Placed, Placing
from daskdist.ops.read_files import ReadFiles
from daskdist.strategy.from_function import Made
from daskdist.strategy.held import OnWorker, Outlook, hold, outlook_there
from daskdist.strategy.inputs import InputContext
from daskdist.strategy.replicas import ReplicasPerWorker, Worker, as_counts, most_replicas, num_replicas_on
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
        A ``distributed.Client``, a cluster object such as ``LocalCluster``, the address of a scheduler, or the path of
        the file that ``dask scheduler --scheduler-file`` writes. If None, a ``LocalCluster`` with a process a core that
        belongs to the strategy: `close` closes it, and so does the end of a ``with`` block.
    replicas_per_worker
        Replicas on each worker, at most as many as it has threads: one number for all, a sequence of one for each
        worker in order, or a mapping of names or addresses of workers to numbers. A worker that has none takes no
        part: it reads nothing either.

    Raises
    ------
    ClusterError
        Nobody answers at the address, or the cluster has no workers.
    ArgumentError
        A worker has fewer threads than it is to have replicas, one that is named is not there, or there is not a number
        for each.

    Notes
    -----
    What `run` and `reduce` return is asynchronous: it is waited for when it is looked at. The workers are
    those there are when the strategy is made, ordered by name.
    """

    def __init__(self, cluster: Any = None, *, replicas_per_worker: ReplicasPerWorker = 1) -> None:
        counts = as_counts(replicas_per_worker)
        self._owned: list[Any] = []
        # Also when nobody closes it: worker processes must not outlive the program.
        self._finalizer = weakref.finalize(self, _close_all, self._owned)
        try:
            self.client = self._connect(cluster, *most_replicas(counts))
            workers = _workers(self.client)
            numbers = num_replicas_on(workers, counts)
        except BaseException:
            self._finalizer()
            raise
        taking_part = [(worker.address, number) for worker, number in zip(workers, numbers, strict=True) if number]
        replicas = [Replica(address, f"CPU:{k}") for address, number in taking_part for k in range(number)]
        self._submit = Submit(self.client, [address for address, _ in taking_part])
        super().__init__(replicas, self._submit)
        # What each function gave when it was first called, and so gives; and what its key is the identity of.
        self._layouts: dict[Any, tuple[Layout, Any]] = {}
        # The calls of each step that are under way, the oldest step first.
        self._in_flight: deque[set[Handle]] = deque()

    def _connect(self, cluster: Any, num_workers: int | None, threads: int) -> Client:
        if isinstance(cluster, Client):
            return cluster
        if cluster is None:
            # Loopback only, the dashboard too: a cluster for this program is nobody else's business.
            cluster = LocalCluster(
                n_workers=num_workers,
                threads_per_worker=threads,
                host="127.0.0.1",
                dashboard_address="127.0.0.1:0",
            )
            self._owned.append(cluster)
        if isinstance(cluster, os.PathLike) or (isinstance(cluster, str) and _is_file(cluster)):
            client = _client_of(_address_in(os.fspath(cluster)))
        elif isinstance(cluster, str):
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

    def _made_where_fed(
        self, dataset_fn: Callable[[InputContext], Any], contexts: Sequence[tuple[str | None, InputContext]]
    ) -> tuple[list[Made], Callable[[], Caller]]:
        call = self._submit.call
        held = [
            call(hold, [], dataset_fn, context, worker, on=worker, is_pinned=True, name="dataset_fn")
            for worker, context in contexts
        ]
        asked = [
            call(outlook_there, [handle], on=worker, is_pinned=True, name="outlook")
            for handle, (worker, _) in zip(held, contexts, strict=True)
        ]
        outlooks: list[Outlook] = self._submit.results(asked)
        made = [
            Made(OnWorker(handle, str(worker), outlook), outlook)
            for handle, outlook, (worker, _) in zip(held, outlooks, contexts, strict=True)
        ]
        return made, self._reader

    def reader(self, dataset: Dataset) -> Caller:
        locations = dataset.options().locations
        return self._reader(None if locations is None else Addresses(locations, workers_of(self.client)))

    def _reader(self, located: Addresses | None = None) -> Submit:
        own = self._submit
        return Submit(self.client, own.workers, own.futures, located, own.home)

    def _placed(self, node: FromTensorSlices) -> Node:
        blocks = []
        start = 0
        for split, worker in zip(node.splits(), itertools.cycle(self.workers)):
            rows = split.payload
            block = Block(rows.structure, rows.leaves, f"make_numpy_dataset rows {start} on")
            start += len(block)
            future = self._submit.place(self._apart(block), worker)
            blocks.append(Placed(future.key, future, len(block), block.nbytes))
        # Of the contents, for they are not at hand later.
        token = tokenize(node.structure, node.leaves)
        return MakeNumpyDataset(start, node.spec, Placing(tuple(blocks), token))

    def _apart(self, data: Any) -> Any:
        # Workers that are threads of this process would be given the very arrays.
        return copy.deepcopy(data) if self.client.scheduler.address.startswith("inproc://") else data

    def _check_locations(self, dataset: Dataset) -> None:
        locations = dataset.options().locations
        if locations is None:
            return
        addresses = Addresses(locations, workers_of(self.client))
        for path, names in locations.named():
            addresses.of(path, names)
        for node in walk(dataset.node):
            # What a function says is heard now, not in the middle of a pass.
            for path in node.paths if isinstance(node, ReadFiles) else ():
                addresses(path)

    def _sent(self, nest: Any) -> Any:
        def send(leaf: Any) -> Any:
            if not isinstance(leaf, np.ndarray) or leaf.dtype.hasobject:
                return leaf
            if leaf.nbytes < _LARGE_BYTES:
                return as_it_is_now(leaf)
            # Once to each worker, and not with every task by way of the scheduler.
            return AsyncValue(self._submit, Remote(self._submit.place(self._apart(leaf)), PickAll()))

        return optree.tree_map(send, nest, none_is_leaf=True)

    def _returned(self, fn: Callable[..., Any], handles: list[Handle]) -> Any:
        self._keep_until_done(handles)
        layout = self._layout(fn, handles)
        leaves = []
        for number, is_none in enumerate(layout.are_none):
            pick = PickFromReturned(number, layout.treespec)
            values = self._picked(handles, pick)
            leaves.append(None if is_none else values[0] if len(values) == 1 else PerReplica(values))
        return optree.tree_unflatten(layout.treespec, leaves)

    def _values(self, handles: list[Handle]) -> Any:
        layout = self._learned(handles)
        picks = [PickFromReturned(number, layout.treespec) for number in range(len(layout.are_none))]
        return optree.tree_unflatten(layout.treespec, [PerReplica(self._picked(handles, pick)) for pick in picks])

    def _picked(self, handles: list[Handle], pick: PickFromReturned) -> list[AsyncValue]:
        return [
            AsyncValue(self._submit, Remote(handle, pick, worker=replica.worker))
            for handle, replica in zip(handles, self.replicas, strict=True)
        ]

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
        layout = self._learned(handles)
        if not any(layout.are_none):
            if len(self._layouts) == _MOST_LAYOUTS:
                self._layouts.pop(next(iter(self._layouts)))
            self._layouts[key] = layout, (fn, closure)
        return layout

    def _learned(self, handles: list[Handle]) -> Layout:
        # Waits for the calls.
        asked = [
            self._submit.call(layout_of, [handle], on=replica.worker, name="layout")
            for handle, replica in zip(handles, self.replicas, strict=True)
        ]
        layouts = self._submit.results(asked)
        # Refuses structures that differ.
        regroup([optree.tree_unflatten(each.treespec, each.are_none) for each in layouts])
        are_none = tuple(map(all, zip(*[each.are_none for each in layouts], strict=True)))
        return Layout(layouts[0].treespec, are_none)

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


def _is_file(text: str) -> bool:
    return "://" not in text and (text.endswith(".json") or os.path.isfile(text))


def _address_in(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return str(json.load(file)["address"])
    except OSError as error:
        raise ClusterError(
            f"the scheduler file {path!r} cannot be read: {error}; start 'dask scheduler --scheduler-file {path}' first"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise ClusterError(
            f"{path!r} is not a file that 'dask scheduler --scheduler-file' wrote: it names no address"
        ) from error


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


def _workers(client: Client) -> list[Worker]:
    # Ordered by name; names that are numbers, as a LocalCluster's are, come first, in their own order.
    timeout = setting("timeouts.workers")
    try:
        client.wait_for_workers(1, timeout=timeout)
    except (OSError, TimeoutError) as error:
        raise ClusterError(f"the cluster at {client.scheduler.address} has no workers after {timeout} s") from error
    found = workers_of(client)

    workers = [Worker(address, str(info["name"]), info["nthreads"]) for address, info in found.items()]

    def place(worker: Worker) -> tuple[bool, int, str, str]:
        is_number = worker.name.isdecimal()
        return not is_number, int(worker.name) if is_number else 0, worker.name, worker.address

    return sorted(workers, key=place)


def _close_all(owned: list[Any]) -> None:
    while owned:
        owned.pop(0).close()
