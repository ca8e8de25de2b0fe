"""`MultiWorkerMirroredStrategy`: replicas on the workers of a Dask cluster."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

from daskdist.core.arguments import yes_or_no
from daskdist.display.missing_arguments import advises
from daskdist.execute.callers.live_workers import LiveWorkers
from daskdist.execute.callers.submit import Submit, workers_of
from daskdist.execute.paused_workers import note_ended
from daskdist.strategy.calls.cluster_backend import ClusterBackend
from daskdist.strategy.cross_replica import CrossReplicaStrategy
from daskdist.strategy.group import Replica, ReplicaGroup, new_token
from daskdist.strategy.input.cluster_input import ClusterInput
from daskdist.strategy.placement.cluster_resolver import ClusterResolver, connect
from daskdist.strategy.placement.device_assignment import DeviceAssignment, placing
from daskdist.strategy.placement.replacements import Replacements, checked_elastic
from daskdist.strategy.placement.replicas_per_worker import ReplicasPerWorker
from daskdist.strategy.strategy import Strategy


class MultiWorkerMirroredStrategy(Strategy):
    """Synchronous replicas on the workers of a Dask cluster.

    Parameters
    ----------
    cluster
        A ``distributed.Client``, a cluster object such as ``LocalCluster``, the address of a scheduler, the path of a
        file written by ``dask scheduler --scheduler-file``, or a `ClusterResolver`, which can also wait for workers and
        has security options. If None, the scheduler in Dask's setting ``scheduler-address``
        (``DASK_SCHEDULER_ADDRESS``), or else a new ``LocalCluster`` with one process per GPU, or per core without GPUs.
        It belongs to the strategy and is closed by `close`, by the end of a ``with`` block, and at the program's end.
    device_assignment
        The worker and device of each replica. If None, all workers have replicas, in order: each on the GPUs that it
        sees, or on a CPU if it sees none.
    num_replicas_per_worker
        Instead, the number of replicas on each worker: one number for all, a sequence with a number for each worker in
        order, or a mapping from names or addresses of workers to numbers. They are on the worker's first GPUs, or on
        CPUs if it sees no GPU. Workers without replicas are not used, not even to read data. If a worker has more
        replicas than threads, they take turns, except while they wait for each other. If None, one per GPU, or 1.
    elastic
        Whether workers that connect later have replicas, too, from the next pass over a distributed dataset on, or when
        a call of `run` with ``restart`` begins again. Then `num_replicas_in_sync` grows: batches of a distributed
        dataset keep their global size, and are cut for more replicas. New replicas get the values of variables as those
        do that replace lost ones, see `Strategy.distribute_dataset`. Not possible if workers or a number for each of
        them are given.
    share_devices
        Whether workers that see the same GPUs, by their UUIDs, may share a GPU if there are not enough for all of them,
        or if ``device_assignment`` says so. If False, that is an error. If there are enough, no GPU is shared.

    Raises
    ------
    ClusterError
        Nothing answers at the address, or the cluster has no workers or fewer than it should wait for.
    ArgumentError
        A named worker does not exist, there is not one number for each worker, both ways of placing replicas were used,
        or there are fewer GPUs than replicas on them.
    UnknownDeviceError
        A worker cannot use a device of its replicas; the message says which one and why.

    Notes
    -----
    A worker started by dask-cuda uses its own GPU although it sees all. The GPUs that other workers share are assigned
    in turn; if the numbers of replicas are not given, until none is left.

    The results of `run` and `reduce` are asynchronous: reading them waits. The workers are those that exist when the
    strategy is created, sorted by name.

    A worker is lost if the scheduler no longer knows it or it was restarted. Then unfinished calls and earlier results
    that need it fail with an error that names it. The next use of the strategy after such an error first waits for
    unfinished calls on the remaining workers, and continues with fewer replicas, renumbered in order; a warning says
    so. Variables keep the remaining copies, and those that are the same on all replicas get the value of the first. A
    `PerReplica` with the former number of values is an error, except for `local_results`. A pass over a distributed
    dataset continues without an error, and at the next one restarted workers take part again, see
    `Strategy.distribute_dataset`.

    If the scheduler is lost, and with it all workers, a strategy waits as long as ``daskdist.timeouts.scheduler`` says
    for another one at the same address, and then as long as ``daskdist.timeouts.workers`` says for as many workers as
    there were; with fewer it continues, too. Passes continue, and steps that failed are made again, as after the loss
    of a worker; over datasets of a function only if they are the same again, see `DistributedDataset`. Variables have
    no values until they are assigned, for example by `Checkpoint.restore`; variables of objects have to be created
    again. Other values that only the old workers had raise `ClusterError`.

    `status` shows what workers are doing. Dask shows it too: the workers page of its dashboard has the columns
    ``daskdist_replicas`` and ``daskdist_running``, and ``client.scheduler_info()`` lists them in a worker's metrics.
    Adaptive scaling does not close workers in use if the scheduler can import daskdist; otherwise there is a warning.

    The replicas' copies of variables are kept until `close`, until the strategy and all its results are garbage, or
    until the program ends; those of a killed program until another strategy is created on the workers.
    """

    @advises("MultiWorkerMirroredStrategy")
    def __init__(
        self,
        cluster: Any = None,
        device_assignment: DeviceAssignment | None = None,
        *,
        num_replicas_per_worker: ReplicasPerWorker | None = None,
        elastic: bool = False,
        share_devices: bool = False,
    ) -> None:
        is_elastic = checked_elastic(elastic, device_assignment, num_replicas_per_worker)
        resolver = cluster if isinstance(cluster, ClusterResolver) else ClusterResolver(cluster)
        where = placing(device_assignment, num_replicas_per_worker)
        yes_or_no("MultiWorkerMirroredStrategy", "share_devices", share_devices)
        with contextlib.ExitStack() as opened:
            self.client, workers = connect(resolver, opened, where)
            slots = where.slots(self.client, workers, share_devices)
            group = ReplicaGroup(new_token(), tuple([Replica(address, device) for address, device in slots]))
            live_workers = LiveWorkers(group.workers)
            note_ended(self.client)
            submit = Submit(self.client, live_workers)
            connected = workers_of(self.client)
            # Store the identities of the workers, as other workers may later get the same addresses.
            live_workers.missing(connected)
            takes_any = device_assignment is None and num_replicas_per_worker is None
            assign = partial(where.slots, self.client, share_devices=share_devices)
            replacements = Replacements(group, connected, assign, takes_any=takes_any, is_elastic=is_elastic)
            backend = ClusterBackend(self.client, live_workers, submit, CrossReplicaStrategy, replacements)
            backend.open(group, opened.pop_all())
        super().__init__(group, backend, ClusterInput(submit, group.token))
