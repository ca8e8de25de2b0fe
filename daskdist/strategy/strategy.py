"""`Strategy`: replicas, their batches, the functions they run, and reductions of the results."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import optree

from daskdist.core.arguments import whole_number
from daskdist.core.failing.short_traceback import with_short_traceback
from daskdist.dataset import Dataset
from daskdist.errors import ArgumentError, ClusterError
from daskdist.execute.caller import Caller
from daskdist.ops.from_tensor_slices import FromTensorSlices
from daskdist.strategy.backend import Backend
from daskdist.strategy.extended import StrategyExtended
from daskdist.strategy.group import Replica, ReplicaGroup
from daskdist.strategy.input.dataset import DistributedDataset, of_dataset
from daskdist.strategy.input.from_function import of_function
from daskdist.strategy.input.input_backend import InputBackend
from daskdist.strategy.input.options import InputContext, InputOptions, checked_options
from daskdist.strategy.input.replica_plans import with_plans
from daskdist.strategy.internals import ARGUMENT_LEAVES, StrategyInternals
from daskdist.strategy.reduce.gather import Gather
from daskdist.strategy.reduce.reductions import Op, checked_axis, checked_op
from daskdist.strategy.replica.context import cross_replica_scope
from daskdist.strategy.replica.merge_calls import LocalMergeCalls, MergeCalls
from daskdist.strategy.replica.strategy_view import Viewed
from daskdist.strategy.status import StrategyStatus
from daskdist.strategy.values.flat import flattened_call
from daskdist.strategy.values.per_replica import PerReplica
from daskdist.strategy.values.regroup import component
from daskdist.strategy.values.value_context import ValueContext
from daskdist.strategy.values.wiring import Wiring, results_of
from daskdist.strategy.variables.read_copies import with_copies

_S = TypeVar("_S", bound="Strategy")


class Strategy(Viewed):
    """Replicas in sync: each step gives every one of them a part of a batch, and runs one function on all.

    Not made directly: see `MirroredStrategy` and `MultiWorkerMirroredStrategy`.
    """

    def __init__(
        self,
        group: ReplicaGroup,
        backend: Backend,
        input_backend: InputBackend,
        merge_calls: MergeCalls | None = None,
    ) -> None:
        self._internals = StrategyInternals(
            self, group, backend, input_backend, LocalMergeCalls() if merge_calls is None else merge_calls
        )

    @property
    def internals(self) -> StrategyInternals:
        """The parts that users do not call."""
        return self._internals

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas."""
        return len(self.replicas)

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """Each replica's worker and device, in order of their ids."""
        self._internals.recover()
        return self._internals.group.now.replicas

    @property
    def extended(self) -> StrategyExtended:
        """The operations that TensorFlow has under this name: devices, and values reduced or sent to a destination."""
        return StrategyExtended(self)

    @property
    def workers(self) -> tuple[str | None, ...]:
        """The address of each worker, in order; ``(None,)`` for this process."""
        return tuple(dict.fromkeys(replica.worker for replica in self.replicas))

    @contextlib.contextmanager
    def scope(self: _S) -> Iterator[_S]:
        """Make this the current strategy inside a ``with`` block.

        Raises
        ------
        RuntimeError
            Another strategy is current, or a replica calls it, in a function that is run.
        """
        self._internals.check_scope("scope")
        with cross_replica_scope(self):
            yield self

    def distribute_dataset(self, dataset: Dataset, options: InputOptions | None = None) -> DistributedDataset:
        """Distribute a dataset: each batch is cut into one piece a replica.

        Parameters
        ----------
        dataset
            Batched by the global batch size: n rows over N replicas are cut into contiguous pieces of
            ``ceil(n / N)`` rows until they run out. How it is sharded over workers is its
            ``Options.auto_shard_policy``.
        options
            How replicas are fed.

        Returns
        -------
        DistributedDataset
            An iterable of steps; each leaf of an element is a `PerReplica`, or with one replica the value.

        Raises
        ------
        ShardingError
            Elements have no batch dimension, or the policy cannot be followed.
        """
        if not isinstance(dataset, Dataset):
            raise ArgumentError(f"distribute_dataset: expected a daskdist Dataset, got {type(dataset).__name__}")
        self._internals.input.check(dataset)
        return of_dataset(self, dataset, checked_options(options))

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> DistributedDataset:
        """Distribute datasets that a function makes, one for each worker; its replicas take the elements in turn.

        Nothing is sharded or cut: that is for the function, which knows the worker's number.

        Parameters
        ----------
        dataset_fn
            Called with an `InputContext` once for each worker, on that worker, where its dataset is and runs; once for
            each replica with ``replication_mode="PER_REPLICA"``. It returns a `Dataset` whose elements are what one
            replica is given in a step, as a rule batches of the size of one replica's. Shuffled datasets that it names
            go on with their next order; those it reaches otherwise begin anew, on a cluster.
        options
            How replicas are fed.

        Returns
        -------
        DistributedDataset
            An iterable of steps; each leaf of an element is a `PerReplica`, or with one replica the value. In a step
            for which a worker has too few elements, replicas of its have zero rows.

        Raises
        ------
        ArgumentError
            It returns no dataset, or on different workers datasets of elements that differ in more than their first
            length.

        >>> from daskdist import Dataset, MirroredStrategy
        >>> def dataset_fn(context):
        ...     return Dataset.range(4).shard(context.num_input_pipelines, context.input_pipeline_id).batch(2)
        >>> next(iter(MirroredStrategy(["CPU:0", "CPU:1"]).distribute_datasets_from_function(dataset_fn)))
        PerReplica:{
          0: array([0, 1]),
          1: array([2, 3])
        }
        """
        return of_function(self, dataset_fn, checked_options(options))

    @with_short_traceback
    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        options: Any = None,
    ) -> Any:
        """Call a function on every replica.

        Parameters
        ----------
        fn
            Called once a replica.
        args, kwargs
            Nests in which each `PerReplica` stands for the replica's own value. A `DistributedDataset` stands for an
            iterator over the replica's own part, read where the replica is: see Notes. Anything else goes to all; on a
            cluster it is pickled, as it is now. Arrays of up to 64 KiB go with each step; functions, objects and larger
            arrays are sent to a worker once, for all steps that are given the same. Functions must not change it; nor
            what earlier calls returned, whose arrays are read-only there.
        options
            Taken for compatibility.

        Returns
        -------
        nest
            What the function returns, each leaf a `PerReplica`; on a cluster of asynchronous values. None from every
            replica is None, one object from all in this process comes bare, and so does the value of a lone replica.

        Raises
        ------
        ArgumentError
            The function or an argument does not pickle (which one, and because of what), or is of another strategy.
        RuntimeError
            It is called by a replica, in a function that is run.

        Notes
        -----
        The replicas of a call run at the same time, however few threads a worker has. In this process they take turns
        in the caller's thread until one waits for the others, or the call has taken some 20 ms; then each that has not
        begun has a thread of its own.

        On a cluster a replica makes the calls in the order of the program, those of several threads in the order of
        each. The first call of a function is waited for, to learn the structure of its result. Later calls wait for
        nothing until ``daskdist.max-steps-in-flight`` are under way. A call that gives None, or None in some place, is
        always waited for, in a `daskdist.function` at its end: nobody would look at it to see it fail.

        A function that is given a distributed dataset runs its whole loop on the replicas. Its `ReplicaIterator` has
        just what each step of the distributed dataset has for the replica, with no message to the scheduler. Where one
        input pipeline serves several workers (policy DATA), each reads all of it, and puts together only the rows of
        its own replicas; what is not deterministic is read in order there, and a generator is to give the same on each.
        Where only the data tells how many steps there are (policy FILE and a filter, say), a worker that has no more
        rows reads on in those of others to learn of their steps; of datasets of a function it asks their workers, from
        its own end on, and one whose replicas have left the loop is at its end. Data that lies on the cluster already
        is waited for by the call, and goes from worker to worker as it is read. Files on disks of some workers only
        (`Options.locations`) are to be on those that read them. The first pass of a call is the next one of the
        distributed dataset, whose number decides the order of a shuffle, and others follow on; but for the distributed
        dataset the call is one pass: what is iterated or run next has the number after that.

        A call is completed though nobody waits for it; see `close`.

        An error on a replica is raised at each look at a result of its step, or of one that depends on it; if nobody
        has any of them any more, by the next look at something else. It names the replica, its device and its worker,
        and has the traceback from there.
        """
        if not isinstance(args, (list, tuple)):
            raise ArgumentError(f"run: args is a {type(args).__name__}; give a tuple, such as args=(batch,)")
        if not callable(fn):
            raise ArgumentError(f"run: {type(fn).__name__} is no function")
        leaves, treespec = flattened_call(args, kwargs or {}, ARGUMENT_LEAVES)
        self._internals.check_values("run", leaves)
        leaves, treespec, _shared_readers = with_plans(self, leaves, treespec)
        handles, group = self._internals.call_replicas("run", fn, leaves, treespec)
        return self._internals.returned.of_run(fn, handles, group)

    def experimental_distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """Make a value for each replica, where the replica is.

        Parameters
        ----------
        value_fn
            Called once a replica with a `ValueContext`, on its worker. It returns a value or a nest of some, of one
            structure on all.

        Returns
        -------
        nest
            What the function returns, each leaf a `PerReplica`, also where all are the same or there is one replica;
            on a cluster of asynchronous values, which stay on the workers.

        Raises
        ------
        ArgumentError
            It is no function.
        DaskdistError
            It returns another structure on one replica than on another.

        >>> from daskdist import MirroredStrategy
        >>> strategy = MirroredStrategy(["CPU:0", "CPU:1"])
        >>> strategy.distribute_values_from_function(lambda context: context.replica_id_in_sync_group * 10)
        PerReplica:{
          0: 0,
          1: 10
        }
        """
        if not callable(value_fn):
            raise ArgumentError(
                f"distribute_values_from_function: {type(value_fn).__name__} is no function; give one that takes a "
                "ValueContext and returns a value"
            )
        num_replicas = self.num_replicas_in_sync
        contexts = PerReplica([ValueContext(k, num_replicas) for k in range(num_replicas)])
        leaves, treespec = flattened_call((contexts,), {}, ARGUMENT_LEAVES)
        return self._internals.returned.of_all(*self._internals.call_replicas("values", value_fn, leaves, treespec))

    def experimental_make_numpy_dataset(self, numpy_input: Any) -> Dataset:
        """Make a dataset of the slices of arrays, which are put where they will be read.

        Parameters
        ----------
        numpy_input
            A nest of arrays of one length along axis 0; a list of arrays is stacked into one.

        Returns
        -------
        Dataset
            An element for each row. In this process it has the arrays as they are. On a cluster they are sent to the
            workers now and once, in blocks of ``daskdist.split-bytes`` spread over them, and no part of them is in a
            graph or sent again; what is done to the arrays later makes no difference. They stay there for as long as
            the dataset, or one made of it, is in use and the strategy is not closed. Iterating over it without a
            strategy brings them back a block at a time.

        Raises
        ------
        ArgumentError
            There are no arrays, one is a scalar, or they differ in their number of rows.

        Notes
        -----
        Nobody but the workers has the blocks. A worker that is lost takes its own along: iterating over the dataset is
        an error from then on.

        >>> import numpy as np
        >>> from daskdist import MirroredStrategy
        >>> list(MirroredStrategy().experimental_make_numpy_dataset(np.ones(2, np.float32)))
        [np.float32(1.0), np.float32(1.0)]
        """
        node = FromTensorSlices.of(numpy_input, operation="experimental_make_numpy_dataset")
        self._internals.recover()
        return Dataset(self._internals.input.place(node))

    def gather(self, value: Any, axis: int) -> Any:
        """Put every replica's values together along an axis, in replica order.

        Parameters
        ----------
        value
            A `PerReplica` or a nest of them.
        axis
            The axis, 0 being the rows. Along it the values may differ in length, and have none.

        Returns
        -------
        nest
            An array for each `PerReplica`, on a cluster an asynchronous one, put together on a worker; what is not per
            replica as it is.

        Raises
        ------
        ArgumentError
            A value is a scalar or has no such axis, or shapes differ along another axis; on a cluster when the result
            is looked at. Or the axis is negative.

        >>> import numpy as np
        >>> from daskdist import MirroredStrategy, PerReplica
        >>> value = PerReplica([np.array([1, 2, 3]), np.array([5])])
        >>> MirroredStrategy(["CPU:0", "CPU:1"]).gather(value, axis=0)
        array([1, 2, 3, 5])
        """
        put_together = Gather(whole_number("gather", "axis", axis, at_least=0))
        leaves, treespec = with_copies("gather", self._internals.token, value)
        self._internals.check_values("gather", leaves)
        spread = [leaf for leaf in leaves if isinstance(leaf, PerReplica)]
        if not spread:
            return value
        wiring = Wiring()
        wired = wiring.wire([list(leaf.values) for leaf in spread])
        handle = self._internals.backend.call(
            put_together,
            wiring.handles,
            wiring.picks,
            wired,
            worker=self._internals.group.now.worker_of[0],
            name="gather-values",
        )
        found = iter(self._internals.returned.leaves(handle, len(spread)))
        gathered = [next(found) if isinstance(leaf, PerReplica) else leaf for leaf in leaves]
        return optree.tree_unflatten(treespec, gathered)

    def reduce(self, reduce_op: Op | str, value: Any, axis: int | Sequence[int] | None) -> Any:
        """Make one value of every replica's.

        Parameters
        ----------
        reduce_op
            ``"SUM"``, ``"MEAN"``, ``"MIN"``, ``"MAX"`` or ``"PROD"``; an associative function of two values, such as
            ``np.logaddexp``, which is called with the values of two replicas, or with two rows, in their order; or a
            `Reduction`.
        value
            A `PerReplica` or a nest of them, which are reduced in one tree.
        axis
            The axis, or axes, of each replica's value to reduce along as well, 0 being its rows; None to
            reduce over the replicas only.

        Returns
        -------
        nest
            An array or number for each `PerReplica`; on a cluster an asynchronous one. MEAN along an axis
            counts rows, so that a replica weighs as much as it holds; MEAN over replicas only counts
            replicas. MEAN of integers is float64; SUM and PROD of small integers and of bools are 64 bits wide, as
            NumPy's are. NaN makes everything NaN. A value that is not per replica is what MEAN, MIN and MAX of it are.
            Arrays of devices are reduced there, and those of one process combine on the first one's device, where the
            result is, a number as an array without axes; NumPy's if one of them is of the host. What leaves a worker of
            a cluster is NumPy's.

        Raises
        ------
        ArgumentError
            Shapes differ over replicas and no axis is given, a value has no such axis, no replica has a row and there
            is no value of none (SUM has 0, PROD 1, MEAN NaN), or a plain value is to be summed, multiplied or combined
            by a function over several replicas. On a cluster the first three raise when the result is looked at.

        Notes
        -----
        The tree is of fixed shape: inside each worker first, then across workers, ``daskdist.split-every`` at a time.
        The same values give the same bits. Rows are added in pairs, or nearly, whichever axis they are along, so that
        the error does not grow with their number.

        Tensors of PyTorch and arrays of JAX are reduced as NumPy's are, or, on GPUs of replicas, as CuPy's, without a
        copy; without what they were computed from.

        >>> import numpy as np
        >>> from daskdist import MirroredStrategy, PerReplica
        >>> value = PerReplica([np.array([1, 2, 3]), np.array([5])])
        >>> strategy = MirroredStrategy(["CPU:0", "CPU:1"])
        >>> strategy.reduce("MEAN", value, axis=0), strategy.reduce(np.gcd, value, axis=0)
        (np.float64(2.75), np.int64(1))
        """
        return self._internals.reduce(checked_op(reduce_op), value, checked_axis(axis))

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """Wait for the values of a `PerReplica`, or of a nest with some in it; return them in replica order.

        >>> from daskdist import MirroredStrategy
        >>> MirroredStrategy(["CPU:0", "CPU:1"]).local_results(3)
        (3,)
        """
        leaves, treespec = with_copies("local_results", self._internals.token, value)
        if not any(isinstance(leaf, PerReplica) for leaf in leaves):
            return (optree.tree_unflatten(treespec, results_of(leaves)),)
        # Also if it was made for replicas of which some are lost now.
        (size, *others) = {leaf.number(): None for leaf in leaves if isinstance(leaf, PerReplica)}
        self._internals.check_values("local_results", leaves, None if others else size)
        here = results_of([leaf for number in range(size) for leaf in component(leaves, number)])
        rows = [here[start : start + len(leaves)] for start in range(0, len(here), len(leaves))]
        return tuple(optree.tree_unflatten(treespec, row) for row in rows)

    def reader(self, dataset: Dataset) -> Caller:
        """Return a caller for one pass over a dataset, closed with the pass."""
        return self._internals.input.reader(dataset)

    def status(self) -> StrategyStatus:
        """Return the status of each worker: its replicas, the calls they are making and since when, what is under way.

        Returns
        -------
        StrategyStatus
            Plain data, which prints as a table. Workers are asked for it, for a second at most; it waits for no call.

        >>> from daskdist import MirroredStrategy
        >>> MirroredStrategy(["CPU:0", "CPU:1"]).status()
          worker        replicas       devices  state  steps sent  in flight  outstanding  heartbeat
          this process      0, 1  CPU:0, CPU:1   idle           0          0          0 B          -
        """
        return StrategyStatus(self._internals.backend.status(self._internals.group.now))

    def close(self) -> None:
        """Complete the calls that were made; close the strategy, and the connection and the cluster if it made those.

        Results that were not brought here before are gone after it. The end of a ``with`` block does the same, but for
        one that ends with an error: then calls that no replica has begun are dropped.

        Raises
        ------
        Exception
            Of a call that failed, if nobody has looked at its results; the strategy is closed all the same.

        Notes
        -----
        Where nobody closes a strategy its calls are completed all the same, and their side effects happen in the order
        of the program. They are when nobody refers to the strategy any more or to anything that came of it: it is
        closed when they are over. And they are at the end of the program, which waits for them, unless it ends with an
        error or an interrupt: then calls that no replica has begun are dropped. So they are where the connection to the
        cluster is closed before, and where the program is killed.
        """
        # With a worker lost or the connection closed there is nothing to wait for.
        try:
            with contextlib.suppress(ClusterError):
                self._internals.backend.finish()
        finally:
            self._internals.backend.close()

    def __enter__(self: _S) -> _S:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        # After an error nothing is waited for.
        self.close() if kind is None else self._internals.backend.close()

    def __reduce__(self) -> Any:
        raise TypeError("a strategy stays in its program; give the function that is run what it needs by args")

    experimental_distribute_dataset = distribute_dataset
    experimental_distribute_datasets_from_function = distribute_datasets_from_function
    distribute_values_from_function = experimental_distribute_values_from_function
    experimental_run_v2 = run
    experimental_run = run
    experimental_local_results = local_results

    def _repr_html_(self) -> str | None:
        # As far as the program knows it: workers are asked by `status` only.
        status = StrategyStatus(self._internals.backend.status(self._internals.group.now, asks=False))
        return status.page(type(self).__name__)

    def __repr__(self) -> str:
        workers = set(self._internals.group.now.worker_of)
        where = "this process" if workers == {None} else f"{len(workers)} workers"
        return f"<{type(self).__name__}: {len(self._internals.group.now.replicas)} replicas on {where}>"
