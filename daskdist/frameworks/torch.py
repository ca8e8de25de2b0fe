"""PyTorch: tensors of arrays, and datasets as what a training loop or a ``DataLoader`` iterates over."""

from __future__ import annotations

import contextlib
import datetime
import functools
import gc
import os
import random
import re
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

import numpy as np

from daskdist.devices import Device, device_of, name_of
from daskdist.devices.cuda_streams import torch_stream
from daskdist.display.missing_arguments import advises
from daskdist.errors import ArgumentError, CollectiveError
from daskdist.execute.callers.cluster_requests import is_encrypted
from daskdist.execute.stream.local_iterator import ConvertedIterator
from daskdist.execute.transfer.copier import channel_of
from daskdist.frameworks.convert import (
    OF_ML_DTYPES,
    as_numbers,
    check_spec,
    checked_source,
    converted,
    handed_over,
    length_of,
    needs,
)
from daskdist.strategy.current import get_replica_context, has_strategy

# The interfaces on which gloo and NCCL listen.
_INTERFACE_VARIABLES: Final = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
# Held while this process has a group.
_in_use: Final = threading.Lock()
_TRY_AGAIN_S: Final = 0.2
_COLLECT_AFTER_S: Final = (0.1, 0.4, 1.5)
# Parts of the messages of Gloo and NCCL if the other end is gone or does not connect.
_OF_CONNECTIONS: Final = re.compile(r"gloo/|Gloo|NCCL|[Cc]onnection (closed|reset)|[Bb]roken pipe")
# The time to wait for the threads of a process group at its end, which need microseconds.
_SETTLE_S: Final = 0.1


def to_torch(x: Any) -> Any:
    """Convert a nest of arrays to PyTorch tensors, which share the memory of writable arrays.

    Parameters
    ----------
    x
        A nest (tuples, named tuples, lists, dicts) of arrays of NumPy, CuPy or anything else that has DLPack, numbers,
        `PerReplica` and asynchronous values. Asynchronous values are waited for; None stays.

    Returns
    -------
    nest
        The same structure, with a tensor for each leaf, and a `PerReplica` of tensors for a `PerReplica`. Python's
        numbers become float32, or int32 if they fit.

    Raises
    ------
    ArgumentError
        A leaf is not an array of numbers (text, Python objects, dates, rows of different lengths, datasets).
    MissingPackageError
        PyTorch is not installed: ``pip install 'daskdist[torch]'``.

    Notes
    -----
    Writable arrays are passed by DLPack without a copy: the tensor and the array share their memory. Read-only arrays
    are copied, since PyTorch has no read-only tensors. Batches of a dataset that were assembled in this pass (after
    ``shuffle``, or from rows of several blocks) are shared; views of a source or of a cached or persisted block, and
    results of a mapped function, are read-only and copied. Arrays with negative strides, of the other byte order, or
    whose strides are not multiples of the item size, such as a field of a structured array, are copied as well, since
    there are no such tensors. Arrays on a device stay there, also if they must be copied. Their memory is reused for
    later elements only after the stream that was PyTorch's current one at the conversion.
    """
    torch = _torch("to_torch")

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf
        if not isinstance(leaf, (np.ndarray, np.generic)) and hasattr(leaf, "__dlpack__"):
            tensor = handed_over(leaf, "PyTorch", torch.from_dlpack)
            if tensor.is_cuda and (device := device_of(leaf)) is not None:
                _mind_torch_on(device)
            return tensor
        array = as_numbers(leaf)
        itemsize = array.itemsize
        # PyTorch would write into read-only arrays, which others may share, and negative strides end the whole process.
        if not array.flags.writeable or any(stride < 0 or stride % itemsize for stride in array.strides):
            array = array.copy()
        # A dtype that is not NumPy's own; its name is slow to compute.
        if array.dtype.isbuiltin != 1 and array.dtype.name in OF_ML_DTYPES:
            return torch.from_dlpack(array.view(f"u{itemsize}")).view(getattr(torch, array.dtype.name))
        return torch.from_dlpack(array)

    return converted("to_torch", x, convert)


def _mind_torch_on(device: Device) -> None:
    # Memory is reused for other steps once nothing refers to it, but not before PyTorch has finished with it.
    stream = torch_stream(device.index)
    if stream is not None and stream != device.current_stream():
        channel_of(name_of(device)).add_consumer(stream)


@advises("torch_loader")
def torch_loader(dataset: Any) -> Any:
    """Load a dataset as PyTorch tensors: iterate over it like over a ``torch.utils.data.DataLoader``.

    Parameters
    ----------
    dataset
        A `Dataset`, or a `DistributedDataset`, whose steps have a `PerReplica` of tensors for each leaf.

    Returns
    -------
    torch.utils.data.IterableDataset
        An iterable whose passes are passes over the dataset, reshuffled if the dataset shuffles, with elements
        converted by `to_torch`; ``len`` is their number, or raises a `TypeError` if it is unknown. ``iter(loader)``
        has the methods of iterators over the dataset: `state_dict`, `load_state_dict`, `stats` and `close`.

    Raises
    ------
    ArgumentError
        The elements are not arrays of numbers.
    MissingPackageError
        PyTorch is not installed: ``pip install 'daskdist[torch]'``.

    Notes
    -----
    If an interface requires a ``DataLoader``, use ``DataLoader(loader, batch_size=None)``. Its worker processes
    (``num_workers``) are refused, since each would read everything; daskdist reads ahead by threads, by processes
    (`Options.num_processes`) or by a cluster.
    """
    _torch("torch_loader")
    check_spec("torch_loader", checked_source("torch_loader", dataset).element_spec)
    return _loader()(dataset)


@contextlib.contextmanager
def torch_process_group(*, backend: str = "gloo", timeout_s: float = 300.0, insecure: bool = False) -> Iterator[Any]:
    """Join the replicas in a ``torch.distributed`` process group, in a ``with`` block of a replica function.

    Parameters
    ----------
    backend
        The backend of the group: ``"gloo"``, ``"nccl"`` or another that PyTorch has.
    timeout_s
        Seconds after which an operation of the group fails if not all replicas take part.
    insecure
        Allow a group on a cluster with encrypted connections: those of PyTorch are neither encrypted nor authenticated.

    Yields
    ------
    module
        ``torch.distributed``, whose default group is the new one, so that ``DistributedDataParallel`` uses it. The rank
        is the number of the replica.

    Raises
    ------
    ArgumentError
        The function is called outside a replica, two replicas are in one process, or the cluster encrypts its
        connections and ``insecure`` is not set.
    MissingPackageError
        PyTorch is not installed: ``pip install 'daskdist[torch]'``.
    CollectiveError
        Another replica does not call the function, or fails while this one waits for it in the block; or another group
        has been in the same processes for ``timeout_s``.

    Notes
    -----
    All replicas must call the function. The replicas connect through the first one, at a free port and the host name or
    address under which the cluster knows its worker. Each replica listens only at its worker's address.

    An error that a replica raises in the block is what the program sees, rather than what PyTorch says of connections
    on the others, which may wait for that replica until ``timeout_s``. If another program or strategy has a group in
    the same processes, this one begins when that one ends, within ``timeout_s``.
    """
    torch = _torch("torch_process_group")
    context = get_replica_context()
    strategy = None if context is None else context.strategy
    if context is None or strategy is None or not has_strategy():
        raise ArgumentError(
            "torch_process_group: called outside a replica; call it in a function that strategy.run runs"
        )
    workers = [replica.worker or "" for replica in strategy.replicas]
    if not insecure and any(map(is_encrypted, workers)):
        raise ArgumentError(
            "torch_process_group: this cluster encrypts its connections, and those of PyTorch are neither encrypted "
            "nor authenticated: anyone who reaches its ports can take part. If the network between the workers is "
            "trusted, give insecure=True"
        )
    num_replicas = context.num_replicas_in_sync
    hosts = [_host_of(replica.worker) for replica in strategy.replicas]
    processes = list(zip(hosts, context.all_gather(np.array([os.getpid()]), axis=0).tolist(), strict=True))
    if len(set(processes)) < num_replicas:
        raise ArgumentError(
            f"torch_process_group: several of {num_replicas} replicas share a process, and PyTorch has one group per "
            "process; use one replica on each worker"
        )
    within = datetime.timedelta(seconds=timeout_s)
    with _only_group_of_processes(context, timeout_s), _failures_distinguished():
        group = _group_of(torch, context, hosts, backend, within)
        try:
            yield group
        finally:
            # The group's threads need the GIL to release finished work, while dropping a model of the group waits for
            # these threads with the GIL held, which would be a deadlock.
            time.sleep(_SETTLE_S)
            torch.distributed.destroy_process_group()


def _group_of(torch: Any, context: Any, hosts: Sequence[str], backend: str, within: datetime.timedelta) -> Any:
    number, num_replicas = context.replica_id_in_sync_group, context.num_replicas_in_sync
    port, store = 0, None
    if number == 0:
        # Pass a socket, so that the store listens only at the address that the cluster uses.
        listening = socket.create_server((hosts[0], 0))
        port = listening.getsockname()[1]
        store = torch.distributed.TCPStore(
            hosts[0], port, num_replicas, True, within, wait_for_workers=False, master_listen_fd=listening.detach()
        )
    port = int(context.all_reduce("MAX", port))
    if store is None:
        store = torch.distributed.TCPStore(hosts[0], port, num_replicas, False, within)
    options = {"store": store, "rank": number, "world_size": num_replicas, "timeout": within}
    if backend == "nccl":
        # Otherwise PyTorch guesses the device from the rank.
        options["device_id"] = torch.device("cuda", torch.cuda.current_device())
    with _on_the_interface_of(hosts[number]):
        torch.distributed.init_process_group(backend, **options)
    return torch.distributed


@contextlib.contextmanager
def _only_group_of_processes(context: Any, timeout_s: float) -> Iterator[None]:
    # Other programs and strategies may use the same processes. Two groups whose replicas wait for one another's
    # processes would wait for ever, so each takes all of its processes or none.
    until = time.monotonic() + timeout_s
    while True:
        has_own = _in_use.acquire(blocking=False)
        try:
            has_all, is_in_time = context.all_reduce("MIN", np.array([has_own, time.monotonic() < until], int))
            if has_all:
                yield
                return
        finally:
            if has_own:
                _in_use.release()
        if not is_in_time:
            raise CollectiveError(
                f"torch_process_group: a process of a replica has had another group for {timeout_s:g} s, and PyTorch "
                "has one per process; wait until the other program or strategy has finished with it"
            )
        # Wait a random time, so that two groups that tried together do not try together again.
        time.sleep(random.uniform(0, _TRY_AGAIN_S))


@contextlib.contextmanager
def _failures_distinguished() -> Iterator[None]:
    # A broken connection says that another replica has failed, whose own error the program is to see.
    try:
        yield
    except Exception as error:
        _collect_soon()
        if (cause := _broken_connection(error)) is None or isinstance(error, CollectiveError):
            raise
        raise CollectiveError(
            f"torch_process_group: a connection of PyTorch to another replica failed, which has raised an error, is "
            f"lost or is late ({cause!s:.300})"
        ) from error


def _broken_connection(error: BaseException | None) -> BaseException | None:
    # Return the error of Gloo or NCCL among an error and its causes.
    while error is not None:
        if isinstance(error, RuntimeError) and _OF_CONNECTIONS.search(str(error)):
            return error
        error = error.__cause__ or error.__context__
    return None


def _collect_soon() -> None:
    # A model of the group keeps its connections open, and so the other replicas waiting, until it is collected: the
    # function that failed has it, and modules refer to themselves.
    def collect() -> None:
        for after_s in _COLLECT_AFTER_S:
            time.sleep(after_s)
            gc.collect()

    threading.Thread(target=collect, name="daskdist collecting", daemon=True).start()


def _host_of(worker: str | None) -> str:
    # The host in an address such as tcp://10.0.0.1:40000; None is a replica in this process.
    return "127.0.0.1" if worker is None else urlsplit(worker).hostname or "127.0.0.1"


@contextlib.contextmanager
def _on_the_interface_of(host: str) -> Iterator[None]:
    # Gloo and NCCL listen where the machine's name resolves to, which may be another interface than the worker's.
    import psutil

    addresses = {info[4][0] for info in socket.getaddrinfo(host, None)}
    interfaces = psutil.net_if_addrs().items()
    interface = next((name for name, entries in interfaces if addresses & {entry.address for entry in entries}), None)
    unset = [] if interface is None else [name for name in _INTERFACE_VARIABLES if name not in os.environ]
    os.environ.update(dict.fromkeys(unset, interface or ""))
    try:
        yield
    finally:
        for name in unset:
            del os.environ[name]


def _torch(operation: str) -> Any:
    try:
        import torch
    except ImportError as error:
        raise needs(operation, "PyTorch", "torch", error) from None
    return torch


@functools.cache
def _loader() -> Any:
    from torch.utils.data import IterableDataset, get_worker_info

    class TorchLoader(IterableDataset):  # type: ignore[misc]
        """The elements of a dataset as tensors."""

        def __init__(self, dataset: Any) -> None:
            self._dataset = dataset

        def __iter__(self) -> Iterator[Any]:
            if get_worker_info() is not None:
                raise ArgumentError(
                    "torch_loader: used in worker processes of a DataLoader, each of which would read everything; give "
                    "num_workers=0: daskdist reads ahead by itself, in processes with Options(num_processes=2)"
                )
            return ConvertedIterator(to_torch, iter(self._dataset))

        def __len__(self) -> int:
            return length_of(self._dataset)

        def __bool__(self) -> bool:
            return True

        def __reduce__(self) -> tuple[Any, ...]:
            return torch_loader, (self._dataset,)

        def __repr__(self) -> str:
            return f"torch_loader({self._dataset!r})"

    return TorchLoader
