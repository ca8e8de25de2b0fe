"""`MultiWorkerMirroredStrategy`: replicas on the workers of a Dask cluster."""

from __future__ import annotations

import contextlib
from typing import Any

from daskdist.execute.callers.live_workers import LiveWorkers
from daskdist.execute.callers.submit import Submit
from daskdist.strategy.cross_replica import CrossReplicaStrategy
from daskdist.strategy.group import Replica, ReplicaGroup, new_token
from daskdist.strategy.input.cluster_input import ClusterInput
from daskdist.strategy.placement.cluster_resolver import ClusterResolver, connect
from daskdist.strategy.placement.device_assignment import DeviceAssignment, checked_share, placing
from daskdist.strategy.placement.replica_counts import ReplicasPerWorker
from daskdist.strategy.steps.cluster_backend import ClusterBackend
from daskdist.strategy.strategy import Strategy


class MultiWorkerMirroredStrategy(Strategy):
    """Replicas on the workers of a Dask cluster, in step.

    Parameters
    ----------
    cluster
        A ``distributed.Client``, a cluster object such as ``LocalCluster``, the address of a scheduler, the path of the
        file that ``dask scheduler --scheduler-file`` writes, or a `ClusterResolver`, which can also wait for workers
        and has security. If None, the scheduler that Dask's setting ``scheduler-address`` names, which
        ``DASK_SCHEDULER_ADDRESS`` sets; or else a ``LocalCluster`` with a process a GPU, or a core where there is none,
        that belongs to the strategy: `close` closes it, and so do the end of a ``with`` block and that of the program.
    device_assignment
        Which worker and device each replica sits on. If None, all workers have replicas, in order: each on the GPUs
        that it sees, or on a processor where it sees none.
    num_replicas_per_worker
        Instead of that, the replicas on each worker: one number for all, a sequence of one for each worker in order, or
        a mapping of names or addresses of workers to numbers. They are on its first GPUs, or on processors where it
        sees no GPU. A worker that has none takes no part: it reads nothing either. One that has more than threads has
        them take turns, but where they wait for each other. If None, as many as GPUs, or 1.
    share_devices
        Whether workers that see the same GPUs, by their UUIDs, may have one GPU where there are not enough for all of
        them, or where ``device_assignment`` gives them one. If False, that is an error; where there are enough, each
        has its own in either case.

    Raises
    ------
    ClusterError
        Nobody answers at the address, or the cluster has no workers, or not as many as were to be waited for.
    ArgumentError
        A worker that is named is not there, there is not a number for each, or both ways of saying where replicas are
        were used; or there are not as many GPUs as replicas to be on them.
    UnknownDeviceError
        A worker cannot use a device that it is to have; the message says which, and why.

    Notes
    -----
    A worker that dask-cuda started has the GPU that is its own, though it sees all. Other workers that see the same
    GPUs are dealt them in turn, and where it is not said how many each has, until none is left.

    What `run` and `reduce` return is asynchronous: it is waited for when it is looked at. The workers are
    those there are when the strategy is made, ordered by name.

    A worker is lost when the scheduler knows it no more, or it was started anew. What needs it then fails, of what is
    under way and of what was made before, with an error that names it. The next use of the strategy after such an error
    first waits for what is under way on the workers that are left, and goes on with the replicas there, numbered anew
    in their order: they are fewer, which a warning says. Variables have the copies that are left, and those that are
    the same on all have the first one's value. A distributed dataset that is iterated over again is shared out anew; a
    `PerReplica` of as many values as there were replicas is refused, but for `local_results`.

    `status` shows what workers are doing. Dask shows it too: its dashboard's page of workers has the columns
    ``daskdist_replicas`` and ``daskdist_running``, and ``client.scheduler_info()`` has them among a worker's metrics.
    Adaptive scaling does not close workers in use, if the scheduler can import daskdist; a warning says if it cannot.

    What replicas keep, their copies of variables, is there until `close`, or until nobody has the strategy any more or
    anything that came of it, or the program ends; of one that was killed until another strategy is made there.
    """

    def __init__(
        self,
        cluster: Any = None,
        device_assignment: DeviceAssignment | None = None,
        *,
        num_replicas_per_worker: ReplicasPerWorker | None = None,
        share_devices: bool = False,
    ) -> None:
        resolver = cluster if isinstance(cluster, ClusterResolver) else ClusterResolver(cluster)
        where, share = placing(device_assignment, num_replicas_per_worker), checked_share(share_devices)
        with contextlib.ExitStack() as opened:
            self.client, workers = connect(
                resolver, opened, num_workers=lambda: where.num_workers, num_threads=where.most_replicas
            )
            slots = where.slots(self.client, workers, share)
            group = ReplicaGroup(
                new_token(), tuple([Replica(address, device) for address, device in slots]), self.client.id
            )
            live_workers = LiveWorkers(group.workers)
            submit = Submit(self.client, live_workers)
            # Which ones they are, in case others come to be at their addresses.
            submit.missing()
            backend = ClusterBackend(self.client, live_workers, submit, CrossReplicaStrategy)
            backend.open(group, opened.pop_all())
        super().__init__(group, backend, ClusterInput(submit, backend))
