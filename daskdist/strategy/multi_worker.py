"""`MultiWorkerMirroredStrategy`: replicas on the workers of a Dask cluster."""

from __future__ import annotations

import atexit
import contextlib
import copy
import itertools
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np
import optree
from dask.base import tokenize
from distributed import Client

from daskdist.core.block import Block
from daskdist.core.node import Node, walk
from daskdist.dataset import Dataset
from daskdist.devices import is_on_device, named
from daskdist.errors import ArgumentError, ClusterError, CollectiveError
from daskdist.execute.bringing import WithKept, holders_of
from daskdist.execute.callers import Caller, Handle
from daskdist.execute.capture import Capturing
from daskdist.execute.deferred import Results
from daskdist.execute.figures import Figures
from daskdist.execute.noting import Lanes
from daskdist.execute.ordered import Ordered
from daskdist.execute.parcels import Parcel, Parcels
from daskdist.execute.roster import Roster
from daskdist.execute.send_functions import check_functions, sent_function
from daskdist.execute.session import current_session
from daskdist.execute.submit import Submit, workers_of
from daskdist.files.locations import Addresses, Locations
from daskdist.ops.from_tensor_slices import FromTensorSlices
from daskdist.ops.make_numpy_dataset import MakeNumpyDataset, Placed, Placing
from daskdist.ops.read_files import ReadFiles
from daskdist.strategy.cluster_resolver import ClusterResolver, connect
from daskdist.strategy.context import between
from daskdist.strategy.copies import align_there, forget_there
from daskdist.strategy.desk import dismiss, enrol
from daskdist.strategy.device_assignment import DeviceAssignment, checked_share, placing
from daskdist.strategy.device_values import host_array
from daskdist.strategy.from_function import Made
from daskdist.strategy.held import OnWorker, Outlook, hold, outlook_there
from daskdist.strategy.inputs import InputContext
from daskdist.strategy.layouts import LONE, Layout, layout_of, made_of, reference, see_none
from daskdist.strategy.left_behind import sweep, watch
from daskdist.strategy.membership import Membership, call_there, go_on_as, part_from, tell_not_made
from daskdist.strategy.picks import PickFromReturned, PickSent, Remote, Spread
from daskdist.strategy.program_end import let_go_at_end, settle_before_close
from daskdist.strategy.regroup import regroup
from daskdist.strategy.replicas import ReplicasPerWorker
from daskdist.strategy.rows_there import figures_there
from daskdist.strategy.strategy import Replica, Strategy
from daskdist.strategy.team import Team
from daskdist.strategy.tree import list_spec
from daskdist.strategy.values import AsyncValue, PerReplica, as_it_is_now
from daskdist.strategy.variables import Variable
from daskdist.strategy.wired import wire_all

logger: Final = logging.getLogger("daskdist")
# Functions whose layouts are kept.
_MOST_LAYOUTS = 256


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
        self._finalizer = weakref.finalize(self, opened.close)
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
        tell = partial(tell_not_made, self.client, self._roster)
        self._steps = Capturing(self.client, self._roster, own.futures, home=own.home, tell=tell)
        self._apart = partial(apart_from, self.client)
        self._parcels = Parcels(self._steps, self._apart)
        super().__init__([Replica(address, device) for address, device in slots], self._steps)
        self._step_numbers = itertools.count()
        self._team = replace(self._team, client=self.client.id)
        self._lanes = lanes_of(self._team)
        watch(self.client, self._roster, self._token, self._steps)
        let_go_at_end(self._steps)
        sweep(self.client, self.client.run(enrol, self._team, workers=list(self._team.workers)))
        # Held by who sees which workers are lost; and whether that goes on, which calls some replicas too.
        self._mustering = threading.RLock()
        self._is_mustering = False
        # The numbers of replicas there were.
        self._sizes_before: tuple[int, ...] = ()
        # Variables that the program has no more, which workers have still to hear of.
        self._gone: deque[Ordered] = deque()
        # What tells the order of two calls that use the same variable.
        self._in_order = threading.RLock()
        # What each function gave when it was first called, and so gives; and what its key is the identity of.
        self._layouts: dict[Any, tuple[Layout, list[Callable[[], Any]]]] = {}
        self._layout_of: weakref.WeakKeyDictionary[Any, Layout] = weakref.WeakKeyDictionary()

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
        self.client.run(part_from, self._token, self._roster.lost, workers=workers)
        # What is under way changes variables.
        self._steps.go_on()
        self._parcels.clear()
        self.client.run(go_on_as, team, workers=workers)
        self._sizes_before += (len(before.replicas),)
        self._team, self._lanes = team, lanes_of(team)
        lost = [
            f"lost {worker}, and with it replica {', '.join(map(str, before.members(worker)))}"
            for worker in before.workers
            if worker not in workers
        ]
        logger.warning("%s; %d of %d replicas are left", "; ".join(lost), len(replicas), len(before.replicas))
        self._align()

    def _align(self) -> None:
        # Of what all had alike, some may have been given the next value, and others not.
        with between(self), self._steps.together():
            variables = [each for each in list(self._variables.values()) if each._is_mirrored]
            aligned = [self._each_of(1, "variable", align_there, each) for each in variables]
        for (done,) in aligned:
            # One that could not be made has no value to give to others.
            with between(self), contextlib.suppress(ArgumentError, CollectiveError):
                self.local_results(done)

    @property
    def _sizes(self) -> frozenset[int]:
        return frozenset((len(self._team.replicas), *self._sizes_before))

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
        self._parcels.clear()
        self._steps.close()
        with contextlib.suppress(Exception):
            if self.client.status == "running":
                # What is lost has forgotten it.
                left = [worker for worker in self._team.workers if worker in workers_of(self.client)]
                self.client.run(dismiss, self._team.token, workers=left, on_error="ignore")
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

    def _fold(self, *args: Any) -> list[Any]:
        # In a session calls go together as it is.
        with contextlib.nullcontext() if current_session() else self._steps.together():
            return super()._fold(*args)

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
        return Submit(self.client, self._roster, own.futures, located, own.home)

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
            future = self._submit.place(self._apart(block), worker)
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

    def _sent(self, nest: Any) -> Any:
        if isinstance(nest, AsyncValue):
            return nest

        def send(leaf: Any) -> Any:
            packed = self._packed(leaf, lambda: "a value")
            if not isinstance(packed, Parcel):
                return packed
            return AsyncValue(self._steps, Remote(packed.on(self.workers[0]), PickSent()))

        return optree.tree_map(send, nest, none_is_leaf=True)

    def _packed(self, leaf: Any, name: Callable[[], str]) -> Any:
        # What goes to workers once as a parcel; what is small, or there already, as it is.
        if type(leaf) is AsyncValue:
            return leaf
        if type(leaf) is PerReplica:
            return leaf.spread or PerReplica([self._packed(part, name) for part in leaf.values])
        if not self._parcels.goes_along(leaf):
            if is_on_device(leaf):
                # What leaves the process leaves the device: each replica puts it on its own.
                return self._packed(host_array(leaf), name)
            return self._parcels(leaf, name)
        leaf = as_it_is_now(leaf)
        if isinstance(leaf, np.ndarray):
            # There too, as it is in what is sent once.
            leaf.flags.writeable = False
        return leaf

    def _on_replicas(self, operation: str, fn: Callable[..., Any], leaves: list[Any], treespec: Any) -> Results:
        name = f"{operation}-{getattr(fn, '__name__', type(fn).__name__)}"
        lanes = self._lanes
        for leaf in leaves:
            if type(leaf) is PerReplica and leaf.number() != len(lanes.workers):
                # A worker was lost since they were looked at.
                raise self._of_others(operation, leaf.number())
        with self._steps.together() as capture:
            capture.num_steps += operation == "run"
            function = self._parcels(fn, lambda: f"{operation}: the function {getattr(fn, '__qualname__', fn)}")
            # All before the call is noted: one that does not pickle leaves nothing behind.
            packed = [
                # What steps give is there already.
                (type(leaf) is PerReplica and leaf.spread)
                or self._packed(leaf, partial(_place_of, operation, treespec, number))
                for number, leaf in enumerate(leaves)
            ]
            columns, args, own = wire_all(function, packed, lanes.workers)  # type: ignore[arg-type]
            used = set(function.ordered)
            for leaf in packed:
                if isinstance(leaf, _MAY_REFER):
                    used |= _ordered_of(leaf)
            with self._in_order if used else contextlib.nullcontext():
                step = next(self._step_numbers)
                results = capture.add_to_all(
                    call_there,
                    columns,
                    treespec,
                    step,
                    *args,
                    own=own,
                    lanes=lanes,
                    name=name,
                    step=step if len(lanes.workers) > 1 else None,
                    after=[each.last for each in used if each.last is not None],
                    kept=[each for leaf in leaves if type(leaf) is PerReplica for each in _futures_in(leaf)],
                )
                for each in used:
                    each.last = results
            return results

    def _forget_gone(self) -> None:
        gone: list[Ordered] = []
        # Another thread may do the same.
        with contextlib.suppress(IndexError):
            while self._gone:
                gone.append(self._gone.popleft())
        if gone:
            self._each_of(0, "variable", forget_there, gone)

    def _let_go(self, ordered: Ordered) -> None:
        # Not now: the garbage collector comes at any time, in any thread.
        self._gone.append(ordered)

    def _returned(self, fn: Callable[..., Any], handles: Sequence[Handle]) -> Any:
        layout = self._layout(fn, handles)
        leaves = [
            None if is_none else self._picked(handles, pick)
            for pick, is_none in zip(layout.picks, layout.are_none, strict=True)
        ]
        if len(handles) == 1:
            leaves = [None if leaf is None else leaf.values[0] for leaf in leaves]
        return layout.treespec.unflatten(leaves)

    def _values(self, handles: Sequence[Handle]) -> Any:
        layout = self._learned(handles)
        return layout.treespec.unflatten([self._picked(handles, pick) for pick in layout.picks])

    def _picked(self, handles: Sequence[Handle], pick: PickFromReturned) -> PerReplica:
        return PerReplica.of(Spread(self._steps, handles, pick, self._workers_for(handles), is_step=True))

    def _workers_for(self, handles: Sequence[Handle]) -> tuple[str | None, ...]:
        workers = self._team.worker_of
        if len(handles) != len(workers):
            # Another thread has seen it meanwhile.
            raise self._steps.without_lost("a call for the replicas there were")
        return workers

    def _layout(self, fn: Callable[..., Any], handles: Sequence[Handle]) -> Layout:
        # What is the very same function gives the same; to find out whether one is as good as another takes longer.
        parcel = self._parcels.last_of(fn)
        layout = None if parcel is None else self._layout_of.get(parcel)
        if layout is None:
            layout = self._layout_of_like(fn, handles)
            if parcel is not None and not any(layout.are_none):
                self._layout_of[parcel] = layout
        return layout

    def _layout_of_like(self, fn: Callable[..., Any], handles: Sequence[Handle]) -> Layout:
        parts = made_of(fn)
        key = tuple(map(id, parts))
        known = self._layouts.get(key)
        if known is not None and any(each() is None for each in known[1]):
            # Something else has come to be at the address of what is gone.
            known = None
        current = current_session()
        if known is None or (current is None and any(known[0].are_none)):
            layout = self._learned(handles)
            if len(self._layouts) >= _MOST_LAYOUTS:
                self._layouts.pop(next(iter(self._layouts)))
            self._layouts[key] = layout, list(map(reference, parts))
            return layout
        layout = known[0]
        if current is not None and any(layout.are_none):
            # Nobody would look at it to see it fail.
            with self._steps.together() as capture:
                for seen in capture.add_to_all(see_none, [handles], layout, lanes=self._lanes, name="see"):
                    current.wait_for(self._steps, seen)
        return layout

    def _copied(self) -> Figures | None:
        names: dict[str, list[str]] = {}
        for replica in self.replicas:
            if replica.worker is not None and not named(replica.device).is_host:
                names.setdefault(replica.worker, []).append(replica.device)
        return Figures.of(self.client.run(figures_there, names, workers=list(names)).values()) if names else None

    def _learned(self, handles: Sequence[Handle]) -> Layout:
        # Waits for the calls.
        with self._steps.together():
            asked = [
                self._steps.call(layout_of, [handle], on=worker, name="layout")
                for handle, worker in zip(handles, self._workers_for(handles), strict=True)
            ]
        self._steps.sent(asked, "what a function returns had to be learned from its first call")
        layouts = self._steps.results(asked)
        # Refuses structures that differ.
        regroup([optree.tree_unflatten(each.treespec, each.are_none) for each in layouts])
        are_none = tuple(map(all, zip(*[each.are_none for each in layouts], strict=True)))
        return Layout(layouts[0].treespec, are_none)

    def _columns(self, handles: Sequence[Handle], num_leaves: int) -> list[PerReplica]:
        layout = Layout(list_spec(num_leaves), (False,) * num_leaves)
        return [self._picked(handles, pick) for pick in layout.picks]

    def _leaves_of(self, handle: Handle, num_leaves: int) -> list[Any]:
        layout = Layout(list_spec(num_leaves), (False,) * num_leaves) if num_leaves > 1 else LONE
        return [AsyncValue(self._steps, Remote(handle, pick)) for pick in layout.picks]


# What a packed leaf is where it may refer to what calls change.
_MAY_REFER = (Parcel, Variable, Ordered, PerReplica)


def _ordered_of(leaf: Any) -> frozenset[Ordered]:
    # What of the workers' a packed leaf refers to.
    kind = type(leaf)
    if kind is Parcel:
        return leaf.ordered  # type: ignore[no-any-return]
    if isinstance(leaf, Variable):
        return frozenset((leaf._ordered,))
    if kind is Ordered:
        return frozenset((leaf,))
    if kind is PerReplica:
        return frozenset().union(*map(_ordered_of, leaf.values))
    return frozenset()


def _futures_in(leaf: PerReplica) -> list[Any]:
    # What has to stay on the cluster until a call is over that is told of it by key.
    return [] if leaf.spread else [part.futures for part in leaf.values if type(part) is WithKept]


def lanes_of(team: Team) -> Lanes:
    """Where the calls of a team are made."""
    size = len(team.replicas)
    places = [Membership(team.token, each, number, size) for number, each in enumerate(team.replicas)]
    return Lanes(team.worker_of, tuple((each,) for each in places))


def apart_from(client: Client, data: Any) -> Any:
    """Data that nobody shares: workers that are threads of this process would be given the very arrays."""
    return copy.deepcopy(data) if client.scheduler.address.startswith("inproc://") else data


def _place_of(operation: str, treespec: Any, number: int) -> str:
    # Where among its arguments a leaf of a call is.
    (which, *path) = treespec.paths()[number]
    return f"{operation}: " + ("args" if which == 0 else "kwargs") + "".join(f"[{each!r}]" for each in path)
