"""PyTorch: tensors of arrays, and datasets as what a training loop or a ``DataLoader`` iterates over."""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import socket
import time
from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import urlsplit

import numpy as np

from daskdist.devices import Device, device_of, name_of
from daskdist.devices.cupy import torch_stream
from daskdist.errors import ArgumentError
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

# Protocols of Dask's that encrypt.
_ENCRYPTED: Final = frozenset({"tls", "wss"})
# The interfaces on which gloo and NCCL listen.
_INTERFACE_VARIABLES: Final = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
# The time that the threads of a process group are given at its end; what they still have to do takes microseconds.
_SETTLE_S: Final = 0.1


def to_torch(x: Any) -> Any:
    """Return a nest of arrays as one of PyTorch tensors, which share their memory where nobody else has it.

    Parameters
    ----------
    x
        A nest (tuples, named tuples, lists, dicts) of arrays of NumPy, CuPy or anything else that has DLPack, numbers,
        `PerReplica` and asynchronous values. Asynchronous values are waited for; None stays.

    Returns
    -------
    nest
        The same structure, with a tensor for each leaf, and a `PerReplica` of tensors for a `PerReplica`. Python's
        numbers become float32, and int32 where that holds them.

    Raises
    ------
    ArgumentError
        A leaf is no array of numbers (text, Python objects, dates, rows of different lengths, datasets), or PyTorch
        is not installed: ``pip install 'daskdist[torch]'``.

    Notes
    -----
    Arrays that can be written into go over by DLPack and are not copied: the tensor and the array are the same memory.
    Read-only arrays are copied, as PyTorch knows no read-only tensors. Of what datasets hand out, batches that were put
    together for this pass (after ``shuffle``, or of rows of several blocks) are shared; views of a source, of a cached
    or persisted block, and what a mapped function returned are read-only, and copied. Copied are also arrays that run
    backwards along an axis, whose bytes are in the other order, or whose steps are no whole numbers of
    items, as in a field of a structured array: there are no such tensors. Arrays of a device stay there, and are copied
    there where they have to be; the stream in which PyTorch computes when it is given one is waited for before its
    memory is used for later elements.
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
        # PyTorch writes into what it is given, and whoever else has a read-only array would see that. Strides below 0
        # end the whole process in PyTorch.
        if not array.flags.writeable or any(stride < 0 or stride % itemsize for stride in array.strides):
            array = array.copy()
        # What NumPy has not of its own; the name is slow to ask for.
        if array.dtype.isbuiltin != 1 and array.dtype.name in OF_ML_DTYPES:
            return torch.from_dlpack(array.view(f"u{itemsize}")).view(getattr(torch, array.dtype.name))
        return torch.from_dlpack(array)

    return converted("to_torch", x, convert)


def _mind_torch_on(device: Device) -> None:
    # Memory that was copied to is used for other steps once nobody holds it: not before PyTorch is done with it too.
    stream = torch_stream(device.index)
    if stream is not None and stream != device.current_stream():
        channel_of(name_of(device)).add_consumer(stream)


def torch_loader(dataset: Any) -> Any:
    """Load a dataset as PyTorch tensors: iterate over it like over a ``torch.utils.data.DataLoader``.

    Parameters
    ----------
    dataset
        A `Dataset`, or a `DistributedDataset`, of which each step gives a `PerReplica` of tensors a leaf.

    Returns
    -------
    torch.utils.data.IterableDataset
        Each pass over it is a pass over the dataset, reshuffled if the dataset shuffles, whose elements `to_torch`
        converts; ``len`` is their number, or raises a `TypeError` if it is unknown.

    Raises
    ------
    ArgumentError
        The elements are no arrays of numbers, or PyTorch is not installed: ``pip install 'daskdist[torch]'``.

    Notes
    -----
    Where a ``DataLoader`` is asked for: ``DataLoader(loader, batch_size=None)``. Its own worker processes
    (``num_workers``) are refused: each would read everything. What reads ahead here are threads, or a cluster.
    """
    _torch("torch_loader")
    check_spec("torch_loader", checked_source("torch_loader", dataset).element_spec)
    return _loader()(dataset)


@contextlib.contextmanager
def torch_process_group(*, backend: str = "gloo", timeout_s: float = 300.0, insecure: bool = False) -> Iterator[Any]:
    """Make the replicas the processes of a ``torch.distributed`` group, in a ``with`` block of what they run.

    Parameters
    ----------
    backend
        What goes between them: ``"gloo"``, ``"nccl"`` or another one that PyTorch has.
    timeout_s
        Seconds after which an operation of the group fails that not all of them do.
    insecure
        Allow it on a cluster that encrypts its connections: PyTorch's are neither encrypted nor authenticated.

    Yields
    ------
    module
        ``torch.distributed``, with the default group made: ``DistributedDataParallel`` finds it. The rank is the
        replica's number.

    Raises
    ------
    ArgumentError
        It is called outside of a replica, two replicas are in one process, the cluster encrypts its connections and
        ``insecure`` is not set, or PyTorch is not installed: ``pip install 'daskdist[torch]'``.
    CollectiveError
        Another replica does not call it.

    Notes
    -----
    All replicas call it. They find each other by way of the first one, at a port that is free there, by the name or
    address by which its worker is known to the cluster. Each listens at its worker's address only.
    """
    torch = _torch("torch_process_group")
    context = get_replica_context()
    strategy = None if context is None else context.strategy
    if context is None or strategy is None or not has_strategy():
        raise ArgumentError("torch_process_group: called outside of a replica; call it in a function that run is given")
    workers = [replica.worker or "" for replica in strategy.replicas]
    if not insecure and any(urlsplit(worker).scheme in _ENCRYPTED for worker in workers):
        raise ArgumentError(
            "torch_process_group: this cluster encrypts its connections, and those of PyTorch are neither encrypted "
            "nor authenticated: anyone who reaches its ports can take part. If the network between the workers is "
            "trusted, give insecure=True"
        )
    number, num_replicas = context.replica_id_in_sync_group, context.num_replicas_in_sync
    hosts = [_host_of(replica.worker) for replica in strategy.replicas]
    processes = list(zip(hosts, context.all_gather(np.array([os.getpid()]), axis=0).tolist(), strict=True))
    if len(set(processes)) < num_replicas:
        raise ArgumentError(
            f"torch_process_group: of {num_replicas} replicas several are in one process, and PyTorch has one group a "
            "process; use one replica on each worker"
        )
    within = datetime.timedelta(seconds=timeout_s)
    port, store = 0, None
    if number == 0:
        # A socket of ours, so that it listens where the cluster does and nowhere else.
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
        # Otherwise PyTorch guesses the device by the rank.
        options["device_id"] = torch.device("cuda", torch.cuda.current_device())
    with _on_the_interface_of(hosts[number]):
        torch.distributed.init_process_group(backend, **options)
    try:
        yield torch.distributed
    finally:
        # What has just been done is let go of by threads of the group, which need the interpreter's lock for that. Who
        # drops a model that is on the group holds the lock, and waits for those threads to end.
        time.sleep(_SETTLE_S)
        torch.distributed.destroy_process_group()


def _host_of(worker: str | None) -> str:
    # Of an address such as tcp://10.0.0.1:40000; in this process there is none.
    return "127.0.0.1" if worker is None else urlsplit(worker).hostname or "127.0.0.1"


@contextlib.contextmanager
def _on_the_interface_of(host: str) -> Iterator[None]:
    # Gloo and NCCL listen where the name of the machine leads, which may be another interface than the worker's.
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
                    "torch_loader: in a worker process of a DataLoader, each of which would read everything; give "
                    "num_workers=0: daskdist reads ahead by itself"
                )
            return map(to_torch, self._dataset)

        def __len__(self) -> int:
            return length_of(self._dataset)

        def __bool__(self) -> bool:
            return True

        def __reduce__(self) -> tuple[Any, ...]:
            return torch_loader, (self._dataset,)

        def __repr__(self) -> str:
            return f"torch_loader({self._dataset!r})"

    return TorchLoader
