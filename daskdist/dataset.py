"""`Dataset`: elements in order, however many, wherever they lie.

A dataset is built by a constructor or a reader and then by methods, each of which gives a new one; nothing is
read before elements are asked for.

>>> ds = Dataset.range(10).filter(lambda x: x % 2 == 0).batch(3)
>>> list(ds.as_numpy_iterator())
[array([0, 2, 4]), array([6, 8])]
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

from dask.base import DaskMethodsMixin, tokenize

from daskdist.core import cardinality
from daskdist.core.function import UserFunction
from daskdist.core.node import Node, depth, lower
from daskdist.core.primitive import Primitive
from daskdist.core.seed import fresh_seed
from daskdist.core.spec import ElementSpec, SpecUnknown, TensorSpec
from daskdist.display import plan as display
from daskdist.errors import ArgumentError, UnknownLengthError
from daskdist.execute.arrays import to_dask_array
from daskdist.execute.callers import Caller, embedded
from daskdist.execute.embedded import iterate
from daskdist.execute.graph import FromGraph, Recorded, record
from daskdist.formats.parquet import Parquet
from daskdist.formats.paths import expand
from daskdist.ops.batch import Batch
from daskdist.ops.filter import Filter
from daskdist.ops.from_dask import FromDask
from daskdist.ops.from_tensor_slices import FromTensorSlices
from daskdist.ops.map import Map
from daskdist.ops.prefetch import Prefetch
from daskdist.ops.range import Range
from daskdist.ops.read_files import ReadFiles
from daskdist.ops.repeat import Repeat
from daskdist.ops.shuffle import Shuffle
from daskdist.ops.skip import Skip
from daskdist.ops.take import Take
from daskdist.ops.with_options import Options, WithOptions, merged_options
from daskdist.passes.fuse import fuse
from daskdist.passes.simplify import simplify

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


class Dataset(DaskMethodsMixin):  # type: ignore[misc]
    """Elements in order; each a nest (tuple, named tuple, dict) of arrays.

    Use a constructor (`range`, `from_tensors`, `from_tensor_slices`, `from_dask`) or a reader
    (`daskdist.read_parquet`). A finite dataset is a Dask collection too: ``dask.compute(ds)`` gives the list
    of its elements, and each is a key of its graph where row counts are known.

    Notes
    -----
    Iterating twice gives the same elements, in the same order unless ``shuffle`` reshuffles. Arrays handed
    out are read-only views wherever that saves a copy.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._iterations = itertools.count()

    # --- constructors ---

    @staticmethod
    def range(*args: int) -> Dataset:
        """Integers, as the builtin ``range`` gives them: ``(stop)``, ``(start, stop)`` or ``(start, stop, step)``.

        Elements are int64 scalars.

        Raises
        ------
        ArgumentError
            No argument, more than three, or a step of 0.

        >>> list(Dataset.range(5, 1, -2))
        [np.int64(5), np.int64(3)]
        """
        if not 1 <= len(args) <= 3:
            raise ArgumentError(f"range: takes 1 to 3 numbers, got {len(args)}; write range(stop)")
        start, stop, step = (0, *args, 1) if len(args) == 1 else (*args, 1)[:3]
        return Dataset(Range(start, stop, step))

    @staticmethod
    def from_tensors(tensors: Any) -> Dataset:
        """One element: the nest given. A list is one array.

        >>> Dataset.from_tensors(([1.0, 2.0], 3)).element_spec
        (TensorSpec(shape=(2,), dtype=float32, name=None), TensorSpec(shape=(), dtype=int32, name=None))
        """
        return Dataset(FromTensorSlices.of_one(tensors))

    @staticmethod
    def from_tensor_slices(tensors: Any) -> Dataset:
        """One element for each row of the arrays of a nest; a list is one array.

        Parameters
        ----------
        tensors
            A nest of arrays of shape ``(num_rows, ...)``, the same ``num_rows`` in all.

        Raises
        ------
        ArgumentError
            A leaf is a scalar, or leaves differ in their number of rows.

        >>> list(Dataset.from_tensor_slices({"x": [1, 2], "y": [3.0, 4.0]}))
        [{'x': np.int32(1), 'y': np.float32(3.0)}, {'x': np.int32(2), 'y': np.float32(4.0)}]
        """
        return Dataset(FromTensorSlices.of(tensors))

    @staticmethod
    def from_dask(collection: Any, columns: Any = None) -> Dataset:
        """One element for each row of a Dask array or dataframe, whose graph becomes part of this one's.

        Parameters
        ----------
        collection
            A Dask array, shape ``(num_rows, ...)``, or a Dask dataframe.
        columns
            For a dataframe, as in `read_parquet`; all columns, as a dict by name, if None.

        Notes
        -----
        Without a cluster each partition is computed when it is wanted, by itself: what several partitions
        have in common is computed for each.

        >>> import dask.array as da
        >>> next(iter(Dataset.from_dask(da.ones((6, 2), chunks=(3, 2))).batch(4))).shape
        (4, 2)
        """
        return Dataset(FromDask.of(collection, columns))

    # --- elements ---

    def map(self, function: Callable[..., Any]) -> Dataset:
        """Each element, or after ``batch`` each batch, replaced by what a function makes of it.

        Parameters
        ----------
        function
            Called with the items of an element that is a tuple, else with the element. What it returns is the
            new element; a list counts as a tuple.

        Raises
        ------
        UserFunctionError
            While iterating: the function raised. The message says on what row of what.

        Notes
        -----
        The function must be pure: it may run in another order, in another process, and again. To learn the
        spec of what it returns it is tried on two made-up elements, of ones and of twos.

        >>> list(Dataset.range(3).map(lambda x: (x, x * x)))[2]
        (np.int64(2), np.int64(4))
        """
        return self._with(Map(self._node, UserFunction(function, "map")))

    def filter(self, predicate: Callable[..., Any]) -> Dataset:
        """The elements for which a predicate, called as in `map`, gives True.

        >>> list(Dataset.range(6).filter(lambda x: x > 3))
        [np.int64(4), np.int64(5)]
        """
        return self._with(Filter(self._node, UserFunction(predicate, "filter")))

    def shuffle(
        self, buffer_size: int, seed: int | None = None, reshuffle_each_iteration: bool | None = None
    ) -> Dataset:
        """Elements drawn uniformly at random from a buffer that is refilled from the input.

        Parameters
        ----------
        buffer_size
            Elements to draw from; with as many as there are, every order is equally likely.
        seed
            Fixes the order, everywhere: embedded, in a graph, on any number of workers.
        reshuffle_each_iteration
            Whether each pass has an order of its own; True if None.

        Raises
        ------
        ArgumentError
            ``buffer_size`` is below 1.

        >>> [int(x) for x in Dataset.range(5).shuffle(5, seed=1)]
        [1, 4, 0, 3, 2]
        """
        reshuffle = True if reshuffle_each_iteration is None else reshuffle_each_iteration
        seed = fresh_seed() if seed is None else seed
        return self._with(Shuffle(self._node, buffer_size, seed, reshuffle, depth(self._node)))

    def take(self, count: int) -> Dataset:
        """The first ``count`` elements; all if it is negative.

        >>> len(Dataset.range(5).take(3))
        3
        """
        return self._with(Take(self._node, count))

    def skip(self, count: int) -> Dataset:
        """What follows the first ``count`` elements; nothing if it is negative.

        >>> list(Dataset.range(5).skip(3))
        [np.int64(3), np.int64(4)]
        """
        return self._with(Skip(self._node, count))

    def repeat(self, count: int | None = None) -> Dataset:
        """``count`` passes, one after the other; endless if None or negative.

        >>> [int(x) for x in Dataset.range(2).repeat(2)]
        [0, 1, 0, 1]
        """
        return self._with(Repeat(self._node, count))

    def prefetch(self, buffer_size: int) -> Dataset:
        """The same elements, made ready by threads while earlier ones are in use.

        How far ahead they run is set in bytes by ``daskdist.window-bytes``; ``buffer_size`` is taken for
        compatibility and checked to be -1 or more.

        >>> len(Dataset.range(5).prefetch(2))
        5
        """
        return self._with(Prefetch(self._node, buffer_size))

    # --- options ---

    def with_options(self, options: Options) -> Dataset:
        """The same elements, with options that later parts of a pipeline and strategies go by.

        Parameters
        ----------
        options
            Fields left None keep what was set before; others win over it.
        """
        return self._with(WithOptions(self._node, options.copy()))

    def options(self) -> Options:
        """The options in force."""
        return merged_options(self._node)

    # --- batches ---

    def batch(self, batch_size: int, drop_remainder: bool = False) -> Dataset:
        """Consecutive elements stacked along a new first axis.

        Parameters
        ----------
        batch_size
            Elements a batch.
        drop_remainder
            Whether a last batch that would be shorter is left out.

        Raises
        ------
        ArgumentError
            ``batch_size`` is below 1.
        StackError
            While iterating: elements of a batch differ in shape or dtype.

        >>> list(Dataset.range(5).batch(2))
        [array([0, 1]), array([2, 3]), array([4])]
        """
        return self._with(Batch(self._node, batch_size, drop_remainder))

    # --- looking ---

    def __iter__(self) -> Iterator[Any]:
        return iterate(embedded(self._node), self._plan, next(self._iterations))

    def as_numpy_iterator(self) -> Iterator[Any]:
        """The elements, as nests of NumPy arrays and scalars.

        >>> list(Dataset.range(2).as_numpy_iterator())
        [np.int64(0), np.int64(1)]
        """
        return iter(self)

    @property
    def element_spec(self) -> Any:
        """The shape and dtype of each leaf of an element, in the structure of an element.

        Notes
        -----
        Nothing is computed for it but what a schema needs, unless a function given to `map` could not be
        tried on made-up elements: then the first element is.

        >>> Dataset.range(5).batch(2).element_spec
        TensorSpec(shape=(None,), dtype=int64, name=None)
        """
        return self._spec.packed

    def cardinality(self) -> int:
        """The number of elements; ``INFINITE_CARDINALITY`` (-1) or ``UNKNOWN_CARDINALITY`` (-2) otherwise.

        >>> Dataset.range(5).batch(2).cardinality(), Dataset.range(5).repeat().cardinality()
        (3, -1)
        """
        return self._node.cardinality

    def __len__(self) -> int:
        number = self.cardinality()
        if number < 0:
            raise UnknownLengthError(f"the number of elements is {display.cardinality(number)}; use cardinality()")
        return number

    def __bool__(self) -> bool:
        return True

    def explain(self, stage: str | None = None) -> str:
        """What runs when this dataset is iterated, as text.

        Parameters
        ----------
        stage
            ``"pipeline"`` as it was built, ``"simplified"`` after rewrites, ``"primitives"`` what it comes
            down to; all three if None.

        >>> print(Dataset.range(9).batch(2).take(2).explain("simplified"))
          range(start=0, stop=9)
          take(count=4)
          batch(batch_size=2)
        """
        stages: dict[str, Callable[[], str]] = {
            "pipeline": lambda: display.tree(self._node),
            "simplified": lambda: display.tree(simplify(self._node)),
            "primitives": lambda: display.primitives(self._plan),
        }
        if stage is None:
            return "\n".join(f"{name}:\n{show()}" for name, show in stages.items())
        if stage not in stages:
            raise ArgumentError(f"explain: no stage {stage!r}; there are {', '.join(stages)}")
        return stages[stage]()

    def __repr__(self) -> str:
        number = display.cardinality(self.cardinality())
        return f"<Dataset of {number} elements: {self.element_spec}\n{display.tree(self._node)}>"

    # --- as a Dask collection ---

    def __dask_graph__(self) -> Any:
        return self._recorded.graph

    def __dask_keys__(self) -> list[Any]:
        return list(self._recorded.keys)

    def __dask_tokenize__(self) -> Any:
        return self._name

    def __dask_postcompute__(self) -> tuple[Any, tuple[Any, ...]]:
        return _as_list, (self._recorded.is_split,)

    def __dask_postpersist__(self) -> tuple[Any, tuple[Any, ...]]:
        recorded = self._recorded
        return _rebuilt, (self._name, len(recorded.keys), recorded.is_split, self._spec, self.cardinality())

    @staticmethod
    def __dask_optimize__(graph: Any, keys: Any, **kwargs: Any) -> Any:
        from dask.optimization import cull

        return cull(dict(graph), keys)[0]

    @property
    def __dask_scheduler__(self) -> Any:
        from dask.threaded import get

        return get

    def to_dask_array(self) -> Any:
        """The batches as Dask arrays, one for each leaf, a chunk a batch.

        Raises
        ------
        UnknownLengthError
            The number of batches is not known before the data is read, or endless.

        >>> Dataset.range(5).batch(2).to_dask_array().chunks
        ((2, 2, 1),)
        """
        return to_dask_array(self._node, self._recorded, self._spec)

    # --- for other parts of daskdist ---

    @property
    def node(self) -> Node:
        """The pipeline."""
        return self._node

    @property
    def spec(self) -> ElementSpec:
        """`element_spec` as structure and leaves."""
        return self._spec

    def spec_by(self, make_caller: Callable[[], Caller]) -> ElementSpec:
        """`spec`, where a caller may have to make the first element."""
        try:
            return self._node.spec
        except SpecUnknown:
            pass
        for element in iterate(make_caller(), self._plan, 0):
            spec = ElementSpec.of(element)
            # A batch may be shorter or longer than the first.
            return spec.with_leaves([TensorSpec((None, *s.shape[1:]), s.dtype) if s.shape else s for s in spec.leaves])
        raise UnknownLengthError("the dataset has no elements, and without one the spec of a mapped one is not known")

    # --- within ---

    def _with(self, node: Node) -> Dataset:
        return Dataset(node)

    @cached_property
    def _plan(self) -> Primitive:
        return fuse(lower(simplify(self._node)))

    @cached_property
    def _spec(self) -> ElementSpec:
        return self.spec_by(lambda: embedded(self._node))

    @cached_property
    def _name(self) -> str:
        return f"dataset-{tokenize(self._node)}"

    @cached_property
    def _recorded(self) -> Recorded:
        if self.cardinality() == cardinality.INFINITE:
            raise UnknownLengthError("an endless dataset has no finite graph; use take(n) first")
        return record(self._plan, self._name, 0)


def read_parquet(paths: Paths, columns: Any = None) -> Dataset:
    """The rows of Parquet files, in the order of the files.

    Parameters
    ----------
    paths
        A path, glob, directory or fsspec URL, or a list of them. What one pattern matches is sorted.
    columns
        Which columns, and how they make up an element: None for all and a list of names for some, as a dict
        by name; or any structure of names, in which a list stands for one array of its columns side by side:
        ``{"x": ["f0", "f1"], "y": "label"}``.

    Returns
    -------
    Dataset
        An element a row. A row group is the unit of reading.

    Raises
    ------
    FileError
        No file matches, or the first is not Parquet. While iterating: a file is damaged, or has another schema.
    ArgumentError
        There is no such column.
    """
    node = ReadFiles(Parquet(columns), expand(paths, ".parquet"))
    node.spec  # noqa: B018 - a file that is not Parquet, or a column that is not there, shows now
    return Dataset(node)


def _as_list(parts: Sequence[Any], is_split: bool) -> list[Any]:
    return list(parts) if is_split else list(parts[0])


def _rebuilt(
    graph: Any,
    name: str,
    num_keys: int,
    is_split: bool,
    spec: ElementSpec,
    number: int,
    *,
    rename: dict[str, str] | None = None,
) -> Dataset:
    # Dask gives the graph after `persist`, or, with names that changed, after `clone` and their like.
    keys = [((rename or {}).get(name, name), place) for place in range(num_keys)]
    return Dataset(FromGraph(Recorded(dict(graph), keys, is_split), spec, number))
