"""`Strategy`: replicas, their batches, the functions that they run, and reductions of the results."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Self

import optree

from daskdist.core.arguments import whole_number
from daskdist.core.cardinality import counted
from daskdist.core.failing.short_traceback import with_short_traceback
from daskdist.dataset import Dataset
from daskdist.display.missing_methods import Advised
from daskdist.errors import ArgumentError
from daskdist.execute.caller import Caller, Handle
from daskdist.ops.from_tensor_slices import FromTensorSlices
from daskdist.strategy.backend import Backend
from daskdist.strategy.extended import StrategyExtended
from daskdist.strategy.group import Replica, ReplicaGroup
from daskdist.strategy.input.dataset import DistributedDataset, of_dataset
from daskdist.strategy.input.from_function import of_function
from daskdist.strategy.input.input_backend import InputBackend
from daskdist.strategy.input.options import InputContext, InputOptions, ValueContext, checked_options
from daskdist.strategy.input.replica_plans import with_plans
from daskdist.strategy.internals import ARGUMENT_LEAVES, StrategyInternals
from daskdist.strategy.predict import predictions_of
from daskdist.strategy.reduce.gather import gathered
from daskdist.strategy.reduce.reductions import Axis, Op, checked_axis, checked_op
from daskdist.strategy.replica.context import cross_replica_scope
from daskdist.strategy.replica.merge_calls import MergeCalls
from daskdist.strategy.replica.strategy_view import Viewed
from daskdist.strategy.restarts import call_with_restarts
from daskdist.strategy.status import StrategyStatus
from daskdist.strategy.values.absent import ABSENT
from daskdist.strategy.values.flat import flattened_call
from daskdist.strategy.values.per_replica import (
    UNKNOWN_ROWS,
    PerReplica,
    num_rows_of,
    num_values,
    results_by_replica,
    values_read_later,
)
from daskdist.strategy.values.refs import results_of
from daskdist.strategy.variables.read_copies import with_copies
from daskdist.tensorflow_dataset import TensorFlowDataset


class Strategy(Viewed, Advised):
    """Synchronous replicas: each step gives every replica a part of a batch, and runs one function on all.

    It is not created directly: see `MirroredStrategy` and `MultiWorkerMirroredStrategy`.
    """

    def __init__(
        self,
        group: ReplicaGroup,
        backend: Backend,
        input_backend: InputBackend,
        merge_calls: MergeCalls | None = None,
    ) -> None:
        self._internals = StrategyInternals(self, group, backend, input_backend, merge_calls or MergeCalls())

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas."""
        return len(self.replicas)

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """The worker and device of each replica, in replica order."""
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
    def scope(self) -> Iterator[Self]:
        """Make this the current strategy inside a ``with`` block.

        Raises
        ------
        RuntimeError
            Another strategy is current, or a function that runs on a replica calls this.
        """
        self._internals.check_scope("scope")
        with cross_replica_scope(self):
            yield self

    def distribute_dataset(self, dataset: Dataset, options: InputOptions | None = None) -> DistributedDataset:
        """Distribute a dataset: each batch is split into one piece per replica.

        Parameters
        ----------
        dataset
            A dataset batched by the global batch size: n rows over N replicas are split into contiguous pieces of
            ``ceil(n / N)`` rows until none are left. ``Options.auto_shard_policy`` says how it is sharded over workers.
        options
            Options for the input of replicas.

        Returns
        -------
        DistributedDataset
            An iterable of steps; each leaf of an element is a `PerReplica`, or the value itself with one replica.

        Raises
        ------
        ShardingError
            Elements have no batch dimension, or the policy cannot be applied.

        Notes
        -----
        If a worker is lost during a pass, also in a `daskdist.function`, the pass continues with the remaining
        replicas: the rest of the rows is shared out among them, and every row is in exactly one completed step. A step
        that failed because of the loss is made again on its rows, as are the steps after it, and values that the
        program has of them become those of the new calls. Mirrored variables are set back to their values before it.
        What else a failed step did, such as writing a file, it may do twice. Generators have to yield the same again.

        A step is not made again, and raises `ClusterError`, if it needs values that only a lost replica had (of an
        earlier `run`, or ``ON_READ`` variables of the strategy), if it used an object in a `Variable`, or if batches
        cannot be cut again; `RepeatedLossError` if it ends worker after worker. At the next pass, restarted workers
        take the places of lost ones, by name. If none were named, others may, without GPUs. New replicas come last, and
        get the others' values of variables (zero for ``ON_READ`` with SUM). With objects in a `Variable`, none come.
        """
        if not isinstance(dataset, Dataset):
            raise ArgumentError(f"distribute_dataset: expected a daskdist Dataset, got {type(dataset).__name__}")
        self._internals.input.check(dataset)
        return of_dataset(self, dataset, checked_options(options))

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> DistributedDataset:
        """Distribute datasets returned by a function, one per worker, whose replicas take the elements in turn.

        Nothing is sharded or split: the function does that, as it gets the worker's number.

        Parameters
        ----------
        dataset_fn
            Called with an `InputContext` once per worker, on the worker that runs its dataset; once per replica with
            ``replication_mode="PER_REPLICA"``. It returns a `Dataset` whose elements are the input of one replica in a
            step, usually batches of a replica's batch size. Shuffled datasets that it references by name continue with
            their next order; others begin again, on a cluster.
        options
            Options for the input of replicas.

        Returns
        -------
        DistributedDataset
            An iterable of steps; each leaf of an element is a `PerReplica`, or the value itself with one replica. If a
            worker has too few elements for a step, some of its replicas get zero rows.

        Raises
        ------
        ArgumentError
            The function does not return a dataset, or the elements on different workers differ in more than their
            first length.

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
        *,
        restart: int = 0,
    ) -> Any:
        """Call a function on every replica.

        Parameters
        ----------
        fn
            Called once per replica.
        args, kwargs
            Nests in which each `PerReplica` stands for the replica's value. A `DistributedDataset` stands for an
            iterator over the replica's part, read in the replica's process: see Notes. Anything else is passed to all
            replicas; on a cluster its current value is pickled. Arrays of up to 64 KiB are sent with each step;
            functions, objects and larger arrays are sent to a worker once for all steps with the same ones. Functions
            must not change arguments, nor results of earlier calls, whose arrays are read-only there.
        options
            Accepted for compatibility and ignored.
        restart
            The most times that the call is made again if a worker is lost. With it, `run` waits for the call. An error
            that the function raises while all workers are there is raised, and the call is not made again.

        Returns
        -------
        nest
            The results of the function, each leaf a `PerReplica`, of asynchronous values on a cluster. It is None if
            all replicas return None. An object shared by all replicas of this process is not wrapped, nor is the value
            of a single replica.

        Raises
        ------
        ArgumentError
            The function or an argument cannot be pickled (the message says which and why), or belongs to another
            strategy.
        RuntimeError
            A function that runs on a replica calls this.

        Notes
        -----
        The replicas of a call run concurrently, however few threads a worker has. In this process they run one after
        the other in the caller's thread until one waits for the others, or the call has taken some 20 ms; then each
        replica that has not begun gets a thread.

        On a cluster, a replica runs the calls in the order of the program, or of each of its threads. The first call of
        a function with a structure of arguments and with such numbers of rows is waited for, as later ones must return
        the same structure. Those do not wait until ``daskdist.max-steps-in-flight`` are in flight. A call that returns
        None, also in a nest, is always waited for (in a `daskdist.function` at its end), as its failure would not be
        seen otherwise.

        A function that gets a distributed dataset can run its whole loop on the replicas. Its `ReplicaIterator` yields
        the replica's part of each step, without messages to the scheduler:

        - If several workers share an input pipeline (policy DATA), each reads all of it in its deterministic order, and
          gathers the rows of its own replicas only. A generator has to yield the same elements on each worker.
        - If the number of steps depends on the data, as with policy FILE and a filter, a worker at the end of its rows
          reads the other workers' input to count their steps. With datasets from a function, it asks those workers;
          a worker whose replicas have left the loop counts as being at its end.
        - The call waits for data that the cluster is still computing, and for its end if it returns a nest. Files that
          only some workers have (`Options.locations`) have to be on the workers that read them.
        - The first pass of a call is the next pass of the distributed dataset, which decides the order of a shuffle.
          The dataset counts the whole call as one pass.

        With ``restart``, a loop that failed because a worker was lost begins again on the replicas that are left. The
        others end at their next batch, collective operation or checkpoint, so those that do none of these hold the
        restart up. The function continues where `ReplicaContext.restore` brings it: with the position, variables and
        values of its last `ReplicaContext.checkpoint`, and every row comes before or after that. Without it the loop
        begins with a new pass, with policy OFF of one copy of the rows for each worker left, and variables stay.

        Calls are completed even if nothing waits for them; see `close`.

        An error on a replica is raised whenever a result of its step, or of a step that depends on it, is read; if no
        such result exists any more, by the next read of another one. It names the replica, its device and its worker,
        and has the original traceback.
        """
        if not isinstance(args, (list, tuple)):
            raise ArgumentError(f"run: args is a {type(args).__name__}; give a tuple, such as args=(batch,)")
        if not callable(fn):
            raise ArgumentError(f"run: {type(fn).__name__} is not a function")
        if restart == 0:
            outcome = self._call(fn, args, kwargs)
        else:
            most = whole_number("run", "restart", restart, at_least=0)
            call = partial(self._call, fn, args, kwargs)
            outcome = call_with_restarts(self._internals, call, most)
        return self._internals.returned.of_run(fn, *outcome)

    def _call(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any] | None
    ) -> tuple[Sequence[Handle], Any, frozenset[int]]:
        # The handles of the results, and of the arguments the structure and the numbers of rows.
        leaves, structure = flattened_call(args, kwargs or {}, ARGUMENT_LEAVES)
        self._internals.check_values("run", leaves)
        are_plain = ARGUMENT_LEAVES.issuperset(map(type, leaves))
        leaves, treespec, _readers = (leaves, structure, ()) if are_plain else with_plans(self, leaves, structure)
        # The results of a function that gets a dataset may depend on the number of its steps.
        num_rows = num_rows_of(leaves) if treespec is structure else UNKNOWN_ROWS
        return self._internals.call_replicas("run", fn, leaves, treespec), treespec, num_rows

    def experimental_run(self, fn: Callable[..., Any], input_iterator: Any = None) -> Any:
        """Call a function on every replica, with the next step of an iterator if one is given."""
        return self.run(fn, () if input_iterator is None else (input_iterator.get_next(),))

    def predict(self, fn: Callable[..., Any], dataset: Dataset, args: Sequence[Any] = ()) -> Dataset:
        """Return the results of a function for all rows of a dataset, in their order, computed on the replicas.

        Parameters
        ----------
        fn
            Called on each replica with its part of a batch and ``args``, as `run` calls it. It returns an array or a
            nest of arrays with a row for each row of the batch. It is not called without rows.
        dataset
            A dataset of batches, as for `distribute_dataset`.
        args
            Further arguments, such as the weights.

        Returns
        -------
        Dataset
            A dataset with an element for each row. Each pass over it computes the predictions again, with ``args`` as
            they are then: write it, for example with `Dataset.to_parquet`, or call `Dataset.cache` to keep them.

        Raises
        ------
        ArgumentError
            Elements are not batches: a `ShardingError` if this is known only while iterating. While iterating: the
            results do not have a row for each row of the batch.

        Notes
        -----
        Some steps are called ahead; if there are no rows, one of no rows, to learn the columns. Results pass through
        this process; for more than it can take, write ``dataset.map(fn)``, which workers compute and write.

        >>> from daskdist import MirroredStrategy
        >>> strategy = MirroredStrategy(["CPU:0", "CPU:1"])
        >>> predictions = strategy.predict(lambda batch, weight: batch * weight, Dataset.range(5).batch(2), args=(10,))
        >>> [int(x) for x in predictions]
        [0, 10, 20, 30, 40]
        """
        if not callable(fn) or not isinstance(dataset, Dataset):
            raise ArgumentError(
                f"predict: expected a function and a Dataset, predict(fn, dataset), got {type(fn).__name__} and "
                f"{type(dataset).__name__}; predict itself distributes the dataset"
            )
        if not isinstance(args, (list, tuple)):
            raise ArgumentError(f"predict: args is {args!r:.80}; give a tuple of arguments, such as (weights,)")
        return predictions_of(self, fn, dataset, args)

    def experimental_distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """Compute a value for each replica in the replica's process.

        Parameters
        ----------
        value_fn
            Called once per replica with a `ValueContext`, on its worker. It returns a value or a nest of values, with
            the same structure on all replicas.

        Returns
        -------
        nest
            The results of the function, each leaf a `PerReplica`, even if all are equal or there is one replica; on a
            cluster, of asynchronous values that stay on the workers.

        Raises
        ------
        ArgumentError
            ``value_fn`` is not a function.
        DaskdistError
            Its results have different structures on different replicas.

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
                f"distribute_values_from_function: {type(value_fn).__name__} is not a function; give one that takes a "
                "ValueContext and returns a value"
            )
        num_replicas = self.num_replicas_in_sync
        contexts = PerReplica([ValueContext(k, num_replicas) for k in range(num_replicas)])
        leaves, treespec = flattened_call((contexts,), {}, ARGUMENT_LEAVES)
        return self._internals.returned.of_all(self._internals.call_replicas("values", value_fn, leaves, treespec))

    def experimental_make_numpy_dataset(self, numpy_input: Any) -> Dataset:
        """Create a dataset of the rows of arrays, which are placed on the workers that will read them.

        Parameters
        ----------
        numpy_input
            A nest of arrays of the same length along axis 0; a list of arrays is stacked into one.

        Returns
        -------
        Dataset
            A dataset with one element per row, as a ``daskdist.data.Dataset``. In this process it references the
            arrays. On a cluster they are sent to the workers once, now, in blocks of ``daskdist.split-bytes`` spread
            over the workers; later changes of the arrays have no effect. They stay there while the dataset, or one
            derived from it, is in use and the strategy is open. Without a strategy, iterating fetches block by block.

        Raises
        ------
        ArgumentError
            There are no arrays, one is a scalar, or their numbers of rows differ.
        ClusterError
            The strategy is closed.

        Notes
        -----
        Only the workers have the blocks. If a worker is lost, so are its blocks, and iterating over the dataset raises
        an error.

        >>> import numpy as np
        >>> from daskdist import MirroredStrategy
        >>> list(MirroredStrategy().experimental_make_numpy_dataset(np.ones(2, np.float32)))
        [np.float32(1.0), np.float32(1.0)]
        """
        node = FromTensorSlices.of(numpy_input, operation="experimental_make_numpy_dataset")
        self._internals.recover()
        self._internals.backend.check_open("experimental_make_numpy_dataset")
        return TensorFlowDataset(self._internals.input.place(node))

    def gather(self, value: Any, axis: int) -> Any:
        """Concatenate the values of all replicas along an axis, in replica order.

        Parameters
        ----------
        value
            A `PerReplica` or a nest of them.
        axis
            The axis; 0 for the rows. The values may differ in length along it, and may be empty.

        Returns
        -------
        nest
            An array for each `PerReplica`, on a cluster an asynchronous one computed on a worker; other values
            unchanged.

        Raises
        ------
        ArgumentError
            A value is a scalar or lacks the axis, or shapes differ along another axis; on a cluster this is raised when
            the result is read. Or the axis is negative.

        >>> import numpy as np
        >>> from daskdist import MirroredStrategy, PerReplica
        >>> value = PerReplica([np.array([1, 2, 3]), np.array([5])])
        >>> MirroredStrategy(["CPU:0", "CPU:1"]).gather(value, axis=0)
        array([1, 2, 3, 5])
        """
        along = whole_number("gather", "axis", axis, at_least=0)
        leaves, treespec = with_copies("gather", self._internals.token, value)
        self._internals.check_values("gather", leaves)
        per_replica = [leaf for leaf in leaves if isinstance(leaf, PerReplica)]
        if not per_replica:
            return value
        make = partial(_gather_values, self._internals.backend, along, per_replica)
        results = iter(self._internals.leaves_of(make, len(per_replica)))
        leaves = [next(results) if isinstance(leaf, PerReplica) else leaf for leaf in leaves]
        return optree.tree_unflatten(treespec, leaves)

    def reduce(self, reduce_op: Op | str, value: Any, axis: Axis | Sequence[int] = None, weights: Any = None) -> Any:
        """Reduce the values of all replicas to one.

        Parameters
        ----------
        reduce_op
            ``"SUM"``, ``"MEAN"``, ``"MIN"``, ``"MAX"`` or ``"PROD"``; an associative function of two values, such as
            ``np.logaddexp``, which is called with the values of two replicas, or with two rows, in their order; or a
            `Reduction`.
        value
            A `PerReplica` or a nest of them, which are reduced in one tree.
        axis
            The axis or axes of each replica's value to reduce along as well, 0 for its rows; by default, none.
        weights
            For MEAN and SUM: a `PerReplica` with a number for each replica, by which its value is multiplied, such as
            the number of its rows; with ``axis=0`` an array of each replica with a number for each row. MEAN is divided
            by the sum of the weights, and is NaN if that is 0. What has weight 0 is left out, even if it is NaN.

        Returns
        -------
        nest
            An array or number for each `PerReplica`; on a cluster an asynchronous one. MEAN along an axis weighs each
            replica by its number of rows; without an axis, all replicas weigh the same. MEAN of integers is float64;
            SUM and PROD of small integers and bools have 64 bits, as in NumPy. NaN values give NaN. MEAN, MIN and MAX
            of a plain value are the value.
            Device arrays are reduced on their device. Those of one process are combined on the first one's device,
            which has the result; a number is then an array without axes. The result is a NumPy array if a value is on
            the host, or if it leaves its worker.

        Raises
        ------
        ArgumentError
            Shapes differ between replicas and no axis is given; a value lacks the axis; no replica has rows and the
            operation has no result without rows (SUM has 0, PROD 1, MEAN NaN); or a plain value is reduced by SUM, PROD
            or a function over several replicas. A weight is negative or no number. On a cluster, all but a plain value
            are raised when the result is read. Or weights are given with another axis or for another operation.

        Notes
        -----
        Values are combined in a fixed tree, inside each worker first, then across workers, ``daskdist.split-every`` at
        a time: equal values give bitwise equal results. Rows are summed pairwise, which keeps rounding errors small.

        PyTorch tensors and JAX arrays are reduced as NumPy arrays, or on GPUs as CuPy arrays, without a copy and
        detached from the computation of gradients.

        >>> import numpy as np
        >>> from daskdist import MirroredStrategy, PerReplica
        >>> value = PerReplica([np.array([1, 2, 3]), np.array([5])])
        >>> strategy = MirroredStrategy(["CPU:0", "CPU:1"])
        >>> strategy.reduce("MEAN", value, axis=0), strategy.reduce(np.gcd, value, axis=0)
        (np.float64(2.75), np.int64(1))
        >>> means, num_rows = PerReplica([2.0, 5.0]), PerReplica([3, 1])
        >>> strategy.reduce("MEAN", means, axis=None, weights=num_rows)
        np.float64(2.75)
        """
        axis = None if axis is None else checked_axis(axis)
        return self._internals.reduce(checked_op(reduce_op), value, axis, weights=weights)

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """Wait for the values of a `PerReplica`, or of a nest that contains some, and return them in replica order.

        The value of a replica that was skipped, by the option ``last_batch="skip_empty"``, is None.

        >>> from daskdist import MirroredStrategy
        >>> MirroredStrategy(["CPU:0", "CPU:1"]).local_results(3)
        (3,)
        """
        leaves, treespec = with_copies("local_results", self._internals.token, value)
        if not any(isinstance(leaf, PerReplica) for leaf in leaves):
            return (optree.tree_unflatten(treespec, results_of(leaves)),)
        # Values may be of more replicas than are left.
        (size, *others) = {num_values(leaf): None for leaf in leaves if isinstance(leaf, PerReplica)}
        self._internals.check_values("local_results", leaves, None if others else size)
        rows = [[None if value is ABSENT else value for value in row] for row in results_by_replica(leaves)]
        return tuple(optree.tree_unflatten(treespec, row) for row in rows)

    def _reader(self, dataset: Dataset) -> Caller:
        return self._internals.input.reader(dataset)

    def status(self) -> StrategyStatus:
        """Return the status of each worker: its replicas, their running calls with durations, and the steps in flight.

        Returns
        -------
        StrategyStatus
            Plain data, which prints as a table. Workers are asked for at most a second; no call is waited for.

        >>> from daskdist import MirroredStrategy
        >>> MirroredStrategy(["CPU:0", "CPU:1"]).status()
          worker        replicas       devices  state  steps sent  in flight  outstanding  heartbeat
          this process      0, 1  CPU:0, CPU:1   idle           0          0          0 B          -
        """
        return StrategyStatus(self._internals.backend.status(self._internals.group.now))

    def close(self) -> None:
        """Complete the calls and close the strategy, with its connection and cluster if it created those.

        Results that were not fetched before are lost. The end of a ``with`` block does the same, but after an error it
        drops the calls that no replica has begun.

        Raises
        ------
        RuntimeError
            One of its replicas calls it.
        Exception
            The error of a failed call whose results have not been read; the strategy is closed anyway.

        Notes
        -----
        Calls are completed even if the strategy is never closed, and their side effects happen in the order of the
        program. A strategy that is no longer referenced closes itself after its calls. The end of the program waits for
        all calls. Calls that no replica has begun are dropped if the program ends with an error or an interrupt, if it
        is killed, or if its connection to the cluster is closed first.
        """
        self._internals.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        # After an error, do not wait for calls.
        self._internals.close(waits=kind is None)

    def __reduce__(self) -> Any:
        raise TypeError("a strategy stays in its program; pass the values that the function needs in args")

    experimental_distribute_dataset = distribute_dataset
    experimental_distribute_datasets_from_function = distribute_datasets_from_function
    distribute_values_from_function = experimental_distribute_values_from_function
    experimental_run_v2 = run
    experimental_local_results = local_results

    def _repr_html_(self) -> str:
        # Without asking the workers, as `status` does.
        status = StrategyStatus(self._internals.backend.status(self._internals.group.now, asks=False))
        return status.page(type(self).__name__)

    def __repr__(self) -> str:
        workers, num_replicas = set(self._internals.group.now.worker_of), len(self._internals.group.now.replicas)
        where = "in this process" if workers == {None} else f"on {counted(len(workers), 'worker')}"
        return f"<{type(self).__name__}: {counted(num_replicas, 'replica')} {where}>"


def _gather_values(backend: Backend, axis: int, values: Sequence[PerReplica], group: ReplicaGroup) -> Any:
    leaves = [list(values_read_later(value)) for value in values]
    return backend.call(partial(gathered, axis), (leaves,), worker=group.worker_of[0], name="gather-values")
