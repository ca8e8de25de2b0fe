"""`MultiWorkerMirroredStrategy`: replicas on the workers of a Dask cluster."""

from __future__ import annotations

import atexit
import contextlib
import copy
import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from dask.base import tokenize
from distributed import Client

from daskdist.core.block import Block
from daskdist.core.finalizer import Finalizer
from daskdist.core.node import Node, walk
from daskdist.dataset import Dataset
from daskdist.devices import named
from daskdist.errors import ArgumentError, ClusterError, CollectiveError
from daskdist.execute.bringing import WithKept, holders_of
from daskdist.execute.by_reference import VariableKey
from daskdist.execute.callers import Caller
from daskdist.execute.figures import Figures
from daskdist.execute.roster import Roster
from daskdist.execute.send_functions import check_functions, sent_function
from daskdist.execute.submit import Submit, workers_of
from daskdist.files.locations import Addresses, Locations
from daskdist.ops.from_tensor_slices import FromTensorSlices
from daskdist.ops.make_numpy_dataset import MakeNumpyDataset, Placed, Placing
from daskdist.ops.read_files import ReadFiles
from daskdist.strategy.cluster_resolver import ClusterResolver, connect
from daskdist.strategy.context import between
from daskdist.strategy.copies import align_there, forget_there
from daskdist.strategy.device_assignment import DeviceAssignment, checked_share, placing
from daskdist.strategy.from_function import Made
from daskdist.strategy.held import OnWorker, Outlook, hold, outlook_there
from daskdist.strategy.inputs import InputContext
from daskdist.strategy.program_end import let_go_at_end, settle_before_close
from daskdist.strategy.replicas import ReplicasPerWorker
from daskdist.strategy.rows_there import figures_there
from daskdist.strategy.steps.cluster_backend import ClusterBackend
from daskdist.strategy.steps.on_worker import install
from daskdist.strategy.strategy import Replica, Strategy
from daskdist.strategy.team import Team, new_token

logger: Final = logging.getLogger("daskdist")


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
        opened = contextlib.ExitStack()
        # Also when nobody closes it: worker processes must not outlive the program.
        self._finalizer = Finalizer(self, opened.close)
        # At its end before Dask closes clusters on its own, which warns of each result that is still there.
        atexit.register(self._finalizer)
        opened.callback(atexit.unregister, self._finalizer)
        try:
            self.client, workers = connect(
                resolver, opened, num_workers=lambda: where.num_workers, num_threads=where.most_replicas
            )
            slots = where.slots(self.client, workers, share)
        except BaseException:
            self._finalizer()
            raise
        self._roster = Roster(list(dict.fromkeys(address for address, _ in slots)))
        self._submit = own = Submit(self.client, self._roster)
        # Which ones they are, in case others come to be at their addresses.
        own.missing()
        self._steps = ClusterBackend(self.client, self._roster, own)
        replicas = tuple([Replica(address, device) for address, device in slots])
        super().__init__(Team(new_token(), replicas, self.client.id), self._steps)
        try:
            self.client.run(install, workers=list(self._team.workers))
            self._steps.open(self._team)
        except BaseException:
            self._finalizer()
            raise
        let_go_at_end(self._steps)
        # Held by who sees which workers are lost; and whether that goes on, which calls some replicas too.
        self._mustering = threading.RLock()
        self._is_mustering = False
        # Variables that the program has no more, which workers have still to hear of.
        self._gone: deque[VariableKey] = deque()

    def _muster(self) -> None:
        if self._roster.in_doubt:
            with self._mustering:
                if self._roster.in_doubt and not self._is_mustering and self.client.status == "running":
                    self._is_mustering = True
                    try:
                        self._go_on_without_lost()
                        self._roster.in_doubt = False
                    finally:
                        self._is_mustering = False

    def _go_on_without_lost(self) -> None:
        roster = self._roster
        while len(lost := self._steps.missing()) < len(roster.present):
            roster.strike(lost)
            left = tuple([each for each in self._team.replicas if each.worker in roster.present])
            if left == self._team.replicas:
                return
            try:
                self._become(left)
            except (ClusterError, OSError):
                if not self._steps.missing():
                    raise
                # Another one is lost meanwhile.
        # Nobody is left, and calls say so.

    def _become(self, replicas: tuple[Replica, ...]) -> None:
        before, team = self._team, replace(self._team, replicas=replicas)
        workers = list(team.workers)
        self._steps.streams.part_from(self._roster.lost)
        # What is under way changes variables.
        self._steps.become(team)
        self._sizes_before += (len(before.replicas),)
        self._team = team
        lost = [
            f"lost {worker}, and with it replica {', '.join(map(str, before.members(worker)))}"
            for worker in before.workers
            if worker not in workers
        ]
        logger.warning("%s; %d of %d replicas are left", "; ".join(lost), len(replicas), len(before.replicas))
        self._align()

    def _align(self) -> None:
        # Of what all had alike, some may have been given the next value, and others not.
        with between(self):
            variables = [each for each in list(self._variables.values()) if each._is_mirrored]
            aligned = [self._each_of(1, "variable", align_there, each) for each in variables]
        for (done,) in aligned:
            # One that could not be made has no value to give to others.
            with between(self), contextlib.suppress(ArgumentError, CollectiveError):
                self.local_results(done)

    def _of_others(self, operation: str, number: int) -> Exception:
        size = len(self._team.replicas)
        if number not in self._sizes_before:
            return super()._of_others(operation, number)
        return ClusterError(
            f"{operation}: lost {', '.join(self._roster.lost)}, and a PerReplica of {number} values is for the "
            f"{number} replicas there were, of which {size} {'is' if size == 1 else 'are'} left; make it anew: a "
            "distributed dataset that is iterated over again gives each of them its part"
        )

    def close(self) -> None:
        """Close the connection, and the cluster if the strategy made it.

        Calls of `run` that are still to be made are waited for; what they gave is gone after it.
        """
        # With a worker lost or the connection closed there is nothing to wait for.
        with contextlib.suppress(ClusterError):
            self._steps.finish()
        self._close()

    def _close(self) -> None:
        self._steps.close()
        if self._finalizer.alive:
            if self.client.status == "running":
                settle_before_close(self.client, list(self._submit.futures))
            self._submit.release()
        self._finalizer()

    def __reduce__(self) -> Any:
        raise TypeError("a strategy stays in its program; give the function that is run what it needs by args")

    def __enter__(self) -> MultiWorkerMirroredStrategy:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        # After an error nothing is waited for.
        self.close() if kind is None else self._close()

    def _made_where_fed(
        self, dataset_fn: Callable[[InputContext], Any], contexts: Sequence[tuple[str | None, InputContext]]
    ) -> tuple[list[Made], Callable[[], Caller]]:
        call = self._submit.call
        dataset_fn = sent_function(dataset_fn, "distribute_datasets_from_function", len(contexts))
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
        return self._reader(None if locations is None else self._addresses(locations))

    def _addresses(self, locations: Locations) -> Addresses:
        return Addresses(locations, workers_of(self.client))

    def _reader(self, located: Addresses | None = None) -> Submit:
        own = self._submit
        return Submit(self.client, self._roster, own.futures, located, own.home, self._steps, own.kept_blocks)

    def _with_kept(self, plans: Sequence[Any], futures: Mapping[Any, Any], around: Mapping[Any, Any]) -> Sequence[Any]:
        needed = {**around, **futures}
        holders = holders_of(self._submit, needed)
        return [WithKept(plan, needed, {key: holders[key] for key in futures}) for plan in plans]

    def _placed(self, node: FromTensorSlices) -> Node:
        blocks = []
        start = 0
        for split, worker in zip(node.splits(), itertools.cycle(self.workers)):
            rows = split.payload
            block = Block(rows.structure, rows.leaves, f"make_numpy_dataset rows {start} on")
            start += len(block)
            future = self._submit.place(apart_from(self.client, block), worker)
            blocks.append(Placed(future.key, future, len(block), block.nbytes))
        # Of the contents, for they are not at hand later.
        token = tokenize(node.structure, node.leaves)
        return MakeNumpyDataset(start, node.spec, Placing(tuple(blocks), token))

    def _check_sent(self, dataset: Dataset) -> None:
        check_functions(dataset.node)
        locations = dataset.options().locations
        if locations is None:
            return
        addresses = self._addresses(locations)
        for path, names in locations.named():
            addresses.of(path, names)
        for node in walk(dataset.node):
            # What a function says is heard now, not in the middle of a pass.
            for path in node.paths if isinstance(node, ReadFiles) else ():
                addresses(path)

    def _forget_gone(self) -> None:
        gone: list[VariableKey] = []
        # Another thread may do the same.
        with contextlib.suppress(IndexError):
            while self._gone:
                gone.append(self._gone.popleft())
        if gone:
            self._each_of(0, "variable", forget_there, gone)

    def _let_go(self, key: VariableKey) -> None:
        # Not now: the garbage collector comes at any time, in any thread.
        self._gone.append(key)

    def _copied(self) -> Figures | None:
        names: dict[str, list[str]] = {}
        for replica in self.replicas:
            if replica.worker is not None and not named(replica.device).is_host:
                names.setdefault(replica.worker, []).append(replica.device)
        return Figures.of(self.client.run(figures_there, names, workers=list(names)).values()) if names else None


def apart_from(client: Client, data: Any) -> Any:
    """Data that nobody shares: workers that are threads of this process would be given the very arrays."""
    return copy.deepcopy(data) if client.scheduler.address.startswith("inproc://") else data
