"""`Dataset`: a sequence of elements, built by constructors, readers and operations.

A constructor or a reader makes a dataset, and each method returns a new one. Data is read only when elements are
requested.

>>> ds = Dataset.range(10).filter(lambda x: x % 2 == 0).batch(3)
>>> list(ds.as_numpy_iterator())
[array([0, 2, 4]), array([6, 8])]
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
from dask.base import DaskMethodsMixin, tokenize

from daskdist.cached_property import cached_property
from daskdist.config import in_bytes, num_threads
from daskdist.core import cardinality
from daskdist.core.arguments import numbers, whole_number, whole_numbers, yes_or_no
from daskdist.core.block import Rows, writable_element
from daskdist.core.cardinality import counted
from daskdist.core.dataset_base import DatasetBase, node_of
from daskdist.core.functions.kept_values import kept
from daskdist.core.functions.user_function import UserFunction, code_of
from daskdist.core.node import Node, elements_wanted, upstream, walk, warn_if_empty
from daskdist.core.primitive import Primitive
from daskdist.core.randomness.seed import SeedsInCall, fresh_seed
from daskdist.core.spec import (
    DatasetSpec,
    ElementSpec,
    SpecUnknown,
    common_or_raise,
    known_spec,
    of_any_rank,
    without_empty_axes,
)
from daskdist.core.structure import Leaves, Structure
from daskdist.display import plan as display
from daskdist.display.description import Description, Head, columns_table
from daskdist.display.drawing import known_cardinality
from daskdist.display.missing_arguments import advises
from daskdist.display.missing_methods import OF_DATASETS, Advised, DatasetType
from daskdist.display.pages import dataset_page
from daskdist.display.plain_text import PlainText
from daskdist.display.preview import Preview, show
from daskdist.errors import ArgumentError, UnknownLengthError
from daskdist.execute.caller import Caller, WritingStrategy
from daskdist.execute.callers.choose import client_caller, local_caller
from daskdist.execute.callers.dask_arrays import how_to_count, to_dask_array, to_dask_dataframe, to_delayed
from daskdist.execute.callers.graph import FromGraph, Recorded, record, scheduler_of
from daskdist.execute.messages.send_functions import check_recorded
from daskdist.execute.resume.position import PipelineIdentity, StreamPosition
from daskdist.execute.stream.local_iterator import (
    ElementIterator,
    Identity,
    first_elements,
    good_elements,
    iterate,
    rows_of,
)
from daskdist.execute.stream.side_outputs import PortionSize, run_to_end, side_outputs_of
from daskdist.formats import WritableFormat
from daskdist.formats.parquet import Parquet
from daskdist.formats.saved.manifest import codec
from daskdist.formats.saved.saved_format import Saved
from daskdist.formats.tfrecord.tfrecord_format import TFRecord
from daskdist.formats.webdataset.webdataset_format import WebDataset
from daskdist.formats.write import DirectoryWriter, ZarrWriter, compression_to_write, npy_to_write, rows_of_chunk
from daskdist.long_work import LongWork, shown
from daskdist.ops.assert_cardinality import AssertCardinality
from daskdist.ops.batch_by_size import BatchBySize
from daskdist.ops.bucket_by_sequence_length import BucketBySequenceLength
from daskdist.ops.cache import Cache
from daskdist.ops.choose_from_datasets import ChooseFromDatasets
from daskdist.ops.concatenate import Concatenate
from daskdist.ops.counter import Counter
from daskdist.ops.enumerate import Enumerate
from daskdist.ops.filter import Filter
from daskdist.ops.flat_map import FlatMap
from daskdist.ops.from_dask import FromDask
from daskdist.ops.from_generator import FromGenerator
from daskdist.ops.from_rows import FromRows, rows_of_elements
from daskdist.ops.from_tensor_slices import FromTensorSlices
from daskdist.ops.global_shuffle import GlobalShuffle
from daskdist.ops.group_by_window import GroupByWindow
from daskdist.ops.ignore_errors import IgnoreErrors
from daskdist.ops.interleave import Interleave
from daskdist.ops.map import Map, MapOnDevice, check_alone
from daskdist.ops.map_with_rng import MapWithRng, SeededFunction, check_by_row
from daskdist.ops.nested import NestedFunction
from daskdist.ops.padded_batch import PaddedBatch, Padding
from daskdist.ops.prefetch import Prefetch
from daskdist.ops.ragged_batch import RaggedBatch, batch
from daskdist.ops.random import Random
from daskdist.ops.range import Range
from daskdist.ops.read_files import ReadFiles
from daskdist.ops.rebatch import Rebatch
from daskdist.ops.rejection_resample import RejectionResample
from daskdist.ops.rename import Rename
from daskdist.ops.repeat import Repeat
from daskdist.ops.sample_from_datasets import SampleFromDatasets
from daskdist.ops.scan import Scan, first_state, next_state
from daskdist.ops.select import Select, column_function, columns_of_nest
from daskdist.ops.shard import Shard
from daskdist.ops.shuffle import Shuffle
from daskdist.ops.skip import Skip
from daskdist.ops.sliding_window import SlidingWindow
from daskdist.ops.snapshot import Snapshot
from daskdist.ops.split import shares_of, splitter
from daskdist.ops.take import Take
from daskdist.ops.take_while import TakeWhile
from daskdist.ops.unbatch import Unbatch
from daskdist.ops.unique import Unique
from daskdist.ops.window import Window
from daskdist.ops.with_options import Options, WithOptions, conflicts, merged_options, options_set
from daskdist.ops.zip import Zip
from daskdist.passes.count import counted_by, number_of_batches
from daskdist.passes.fingerprint import fingerprint, with_new_fingerprints
from daskdist.passes.numbering import at_pass, begin_pass, note_pass
from daskdist.passes.plan import plan
from daskdist.passes.remainders import looks_like_batches
from daskdist.passes.row_by_row import row_by_row
from daskdist.passes.seed import drawn_seeds, with_drawn
from daskdist.passes.simplify import simplify
from daskdist.service.request import ServiceRequest
from daskdist.storage.filesystem import Paths, Storage, is_remote, local
from daskdist.storage.listing import as_text
from daskdist.tables.describe import PartStatistics, count_rows, describe_nothing, describe_rows
from daskdist.tables.to_arrow import check_columns, frame_of
from daskdist.watched_calls import watched

if TYPE_CHECKING:
    from daskdist.service.sharding_policy import CrossTrainerCache

logger: Final = logging.getLogger("daskdist")


def _of_current_code(compute: Callable[[Dataset], Any]) -> Any:
    # A property that is computed once for the current code of the functions.
    def value(self: Dataset) -> Any:
        """Return the value, computed if a function was redefined since."""
        self._follow_code()
        known = self._of_code
        if compute.__name__ not in known:
            known[compute.__name__] = compute(self)
        return known[compute.__name__]

    return property(value)


class Dataset(DatasetBase, DaskMethodsMixin, Advised, metaclass=DatasetType):  # type: ignore[misc]
    """A sequence of elements, each of which is a nest (tuple, named tuple, dict) of arrays.

    Use a constructor (`range`, `from_tensor_slices`, `from_generator`, `from_dask`, ...) or a reader
    (`daskdist.read_parquet`). A finite dataset is also a Dask collection: ``dask.compute(ds)`` returns the list
    of its elements; if row counts are known, each element is a key of its graph.

    Most methods take a ``name``, which is shown in plans.

    ============  ======================================================================================================
    to            methods
    ============  ======================================================================================================
    create        `range` `counter` `random` `from_tensors` `from_tensor_slices` `from_list` `from_generator`
                  `from_dask` `list_files` `load`
    explore       `head` `show` `columns` `count` `describe` `cardinality` `element_spec` `explain` `visualize`
                  `fingerprint`
    select        ``ds["column"]`` `select` `rename` `take` `skip` `take_while` `filter` `shard` `unique` `split`
                  `kfold`
    transform     `map` `flat_map` `interleave` `enumerate` `scan` `ignore_errors` `apply` `pipe` `with_options`
                  `options`
    combine       `zip` `concatenate` `choose_from_datasets` `sample_from_datasets`
    order         `shuffle` `global_shuffle` `repeat` `rejection_resample` `at_epoch`
    batch         `batch` `padded_batch` `ragged_batch` `unbatch` `rebatch` `window` `sliding_window` `group_by_window`
                  `bucket_by_sequence_length` `batch_by_size`
    keep          `cache` `snapshot` `save` `prefetch` `persist` `assert_cardinality`
    get back      ``iter(ds)`` `as_numpy_iterator` `get_single_element` `reduce` `compute` `to_pandas`
                  `to_dask_dataframe` `to_dask_array` `to_delayed`
    write         `to_parquet` `to_tfrecord` `to_npy` `to_zarr` `to_webdataset`
    share         `serve`
    ============  ======================================================================================================

    Notes
    -----
    Two iterations give the same elements, and in the same order unless ``shuffle`` reshuffles: then each iteration over
    a dataset derived from the shuffled one, distributed or not, has the next order, and so has each write of it. Within
    one iteration the order is the same even if the dataset is used twice, as in ``zip(ds.map(f), ds.map(g))``. With a
    seed, the orders are the same in every program. A Dask graph is a value: it always has the first order.

    Arrays may be read-only views, which saves copies; ``Options(writable=True)`` copies them.
    """

    # Whether Python numbers become int32 and float32, unless `Options` say otherwise.
    _is_narrow: ClassVar[bool] = False

    def __init__(self, node: Node) -> None:
        if not isinstance(node, Node):
            raise ArgumentError(
                f"Dataset: {type(node).__name__} is not a pipeline; use Dataset.from_tensor_slices(arrays), "
                "Dataset.from_list(elements), or readers such as daskdist.read_parquet"
            )
        self._node = node
        # The code of the functions, and what was computed for it, by the names of properties.
        self._code: tuple[str, ...] | None = None
        self._of_code: dict[str, Any] = {}
        # The spec that was returned by `element_spec`.
        self._reported_spec: ElementSpec | None = None

    # --- constructors: numbers ---

    @classmethod
    def range(cls, *args: int, output_type: Any = np.int64, name: str | None = None) -> Dataset:
        """Return the integers of the builtin ``range``: ``(stop)``, ``(start, stop)`` or ``(start, stop, step)``.

        Parameters
        ----------
        args
            One to three integers.
        output_type
            The dtype of the elements, which are scalars.

        Raises
        ------
        ArgumentError
            There is no argument, there are more than three, or the step is 0.

        >>> list(Dataset.range(5, 1, -2))
        [np.int64(5), np.int64(3)]
        """
        if not 1 <= len(args) <= 3:
            raise ArgumentError(f"range: takes 1 to 3 numbers, got {len(args)}; write range(stop)")
        start, stop, step = (0, *args, 1) if len(args) == 1 else (*args, 1)[:3]
        return cls._of(Range(start, stop, step, output_type, label=name))

    @classmethod
    def counter(cls, start: int = 0, step: int = 1, dtype: Any = np.int64, name: str | None = None) -> Dataset:
        """Return the endless dataset ``start``, ``start + step``, ``start + 2 * step``, ...

        >>> [int(x) for x in Dataset.counter(start=2, step=5).take(3)]
        [2, 7, 12]
        """
        return cls._of(Counter(start, step, dtype, label=name))

    @classmethod
    def random(
        cls, seed: int | None = None, rerandomize_each_iteration: bool | None = None, name: str | None = None
    ) -> Dataset:
        """Return an endless dataset of uniform random int64 scalars from 0 to 2**32 - 1.

        Parameters
        ----------
        seed
            Fixes the numbers.
        rerandomize_each_iteration
            Whether each iteration has different numbers; if None, only without a seed.

        >>> list(Dataset.random(seed=4).take(2)) == list(Dataset.random(seed=4).take(2))
        True
        """
        rerandomize = seed is None if rerandomize_each_iteration is None else rerandomize_each_iteration
        return cls._of(Random(_seed(seed), rerandomize, is_seeded=seed is not None, label=name))

    # --- constructors: data ---

    @classmethod
    def from_tensors(cls, tensors: Any, name: str | None = None) -> Dataset:
        """Return a dataset of one element, ``tensors``, referenced as by `from_tensor_slices`. A list is one array.

        >>> Dataset.from_tensors(([1.0, 2.0], 3)).element_spec
        (TensorSpec(shape=(2,), dtype=float64, name=None), TensorSpec(shape=(), dtype=int64, name=None))
        """
        return cls._of(FromTensorSlices.of_one(tensors, name, narrow=cls._is_narrow))

    @classmethod
    def from_tensor_slices(cls, tensors: Any, name: str | None = None) -> Dataset:
        """Return a dataset of the rows of a nest of arrays; a list is one array.

        Parameters
        ----------
        tensors
            A nest of arrays of shape ``(num_rows, ...)`` with one ``num_rows``, such as ``dict(frame)`` of a
            dataframe. A `Ragged` has rows of different lengths. Arrays on devices, such as CuPy's, are copied to the
            host once. The dataset references NumPy's arrays without a copy, so do not change them while it is in use;
            within functions of ``map``, ``flat_map``, ``interleave`` and ``group_by_window`` an array that anything
            else refers to is copied.

        Raises
        ------
        ArgumentError
            A leaf is a scalar or has masked or missing values, or leaves differ in their number of rows.

        >>> list(Dataset.from_tensor_slices({"x": [1, 2], "y": [3.0, 4.0]}))
        [{'x': np.int64(1), 'y': np.float64(3.0)}, {'x': np.int64(2), 'y': np.float64(4.0)}]
        """
        return cls._of(FromTensorSlices.of(tensors, name, narrow=cls._is_narrow))

    @classmethod
    def from_list(cls, elements: Sequence[Any], name: str | None = None) -> Dataset:
        """Return a dataset of the items of a list.

        Parameters
        ----------
        elements
            One or more nests of the same structure.

        Raises
        ------
        ArgumentError
            The list is empty, or structures or dtypes of its items differ.

        >>> list(Dataset.from_list([(1, "a"), (2, "b")]))
        [(np.int64(1), 'a'), (np.int64(2), 'b')]
        """
        rows = rows_of_elements("from_list", elements, narrow=cls._is_narrow)
        return cls._of(FromRows(rows, None, label=name))

    @classmethod
    @advises("Dataset.from_generator")
    def from_generator(
        cls,
        generator: Callable[..., Any],
        output_signature: Any = None,
        args: Sequence[Any] = (),
        name: str | None = None,
    ) -> Dataset:
        """Return a dataset of the values that a generator function yields.

        Parameters
        ----------
        generator
            A function of ``args`` that returns an iterable; it is called for each pass.
        output_signature
            The spec of every element, a nest of `TensorSpec`; ``TensorSpec(None, dtype)`` has any number of axes.
            Numbers are converted to its dtypes if no integer changes, and text to text of any length. If it is missing,
            the message of the error has that of the first element.

        Raises
        ------
        ArgumentError
            ``generator`` is not a function, or the signature is not a nest of specs.
        UserFunctionError
            While iterating: the generator raised, or yielded a value that does not match the signature.

        Notes
        -----
        The generator runs in this process, also with a cluster, and is read ahead as far as the memory budget allows.
        In a Dask graph it is one task.

        >>> def squares(n):
        ...     for x in range(n):
        ...         yield {"x": x, "y": x * x}
        >>> from daskdist import TensorSpec
        >>> signature = {"x": TensorSpec((), "int64"), "y": TensorSpec((), "float32")}
        >>> list(Dataset.from_generator(squares, output_signature=signature, args=(3,)).batch(2))[0]
        {'x': array([0, 1]), 'y': array([0., 1.], dtype=float32)}
        """
        return cls._of(FromGenerator.of(generator, args, output_signature, name))

    @classmethod
    def from_dask(
        cls,
        collection: Any,
        columns: Any = None,
        name: str | None = None,
        *,
        missing: Mapping[str, Any] | None = None,
        dim: str | None = None,
    ) -> Dataset:
        """Return a dataset of the rows or items of a Dask collection, whose graph becomes part of the dataset's graph.

        Parameters
        ----------
        collection
            A Dask array of shape ``(num_rows, ...)``; a dataframe; a series, whose values are the elements; a bag,
            whose items are the elements; a list of delayed values, each a nest of arrays of shape ``(num_rows, ...)``;
            or a ``DataArray`` or ``Dataset`` of xarray whose arrays are Dask arrays.
        columns
            For a dataframe, as in `read_parquet`; if None, all columns, as a dict by name. For an xarray ``Dataset``,
            likewise its variables and coordinates; if None, all variables.
        missing
            For a dataframe, the values that replace nulls, by column. Without one, nulls are NaN in floats, NaT in
            times and an error in other columns. With one, NaN is also replaced.
        dim
            For xarray, the dimension of the elements; if None, the first dimension of the first variable.

        Raises
        ------
        ArgumentError
            ``collection`` has another type or is a masked array, or a variable lacks the dimension.

        Notes
        -----
        Columns of dataframes have the same dtypes as Arrow columns in `read_parquet`. The contents of object columns
        are known only when they are computed. Persisted partitions are used where they are.

        Columns of CuPy arrays and cuDF dataframes stay on their GPU for replicas on GPUs, without a cluster and in
        loops on replicas: shuffles and batches are gathered there, as with ``Options(shuffle_on_device=True)``, which
        copies each partition once on its GPU. Partitions of other workers come to a loop through the host; in a
        ``dataset_fn`` of ``distribute_datasets_from_function``, each worker can read its own. Where functions, other
        operations or replicas on the host follow, and with ``shuffle_on_device=False``, partitions are copied to the
        host when they are read.

        Without a cluster, each partition is computed separately when it is needed: tasks that several partitions
        share run once for each of them.

        >>> import dask.array as da
        >>> next(iter(Dataset.from_dask(da.ones((6, 2), chunks=(3, 2))).batch(4))).shape
        (4, 2)
        """
        return cls._of(FromDask.of(collection, columns, name, missing, dim, narrow=cls._is_narrow))

    @classmethod
    def list_files(
        cls, file_pattern: Paths, shuffle: bool | None = None, seed: int | None = None, name: str | None = None
    ) -> Dataset:
        """Return a dataset of the names of the files that match patterns, as text.

        Parameters
        ----------
        file_pattern
            A path, glob, directory or fsspec URL, or a list of them. Names that begin with ``_`` or ``.`` are left out
            unless the pattern spells out the prefix, as in readers.
        shuffle
            True or None for another random order in each pass; False for sorted names.
        seed
            Fixes the order.

        Raises
        ------
        FileError
            No file matches, or a name is not UTF-8.

        >>> from pathlib import Path
        >>> names = Dataset.list_files(str(Path(__file__).parent / "*.py"), shuffle=False)
        >>> [Path(str(path)).name for path in names.take(2)]
        ['cached_property.py', 'call_progress.py']
        """
        if shuffle is not None:
            yes_or_no("list_files", "shuffle", shuffle)
        names = sorted(Storage().expand(file_pattern, ("",)))
        listed = cls.from_tensor_slices(as_text(names), name=name)
        return listed if shuffle is False else listed.shuffle(len(names), seed=seed)

    # --- constructors: of datasets ---

    @classmethod
    def zip(cls, *datasets: Any, name: str | None = None, strict: bool = False) -> Dataset:
        """Combine the corresponding elements of datasets; the shortest dataset determines the length.

        Parameters
        ----------
        datasets
            Datasets, or one nest (tuple, named tuple, dict) of them, which is the structure of the elements.
        strict
            Whether datasets of different lengths are an error.

        Raises
        ------
        ArgumentError
            An argument is not a dataset; or ``strict`` is True and the known lengths differ.
        CardinalityError
            While iterating with ``strict=True``: a dataset ended before another.

        >>> a, b = Dataset.range(3), Dataset.range(10, 14)
        >>> list(Dataset.zip(a, b))[2], list(Dataset.zip({"a": a, "b": b}))[0]
        ((np.int64(2), np.int64(12)), {'a': np.int64(0), 'b': np.int64(10)})
        """
        nest = datasets[0] if len(datasets) == 1 else datasets
        leaves, structure = Structure.of(nest)
        for path, leaf in zip(structure.paths, leaves, strict=True):
            if not isinstance(leaf, Dataset):
                hint = "; give datasets as arguments, or a tuple or dict of them" if isinstance(leaf, list) else ""
                raise ArgumentError(f"zip: {path or 'the argument'} is {type(leaf).__name__}, not a Dataset{hint}")
        if not leaves:
            raise ArgumentError("zip: there are no datasets")
        return cls._of_several(Zip(structure, tuple(leaf._node for leaf in leaves), strict, label=name))

    @classmethod
    def choose_from_datasets(
        cls,
        datasets: Sequence[Dataset],
        choice_dataset: Dataset,
        stop_on_empty_dataset: bool = True,
        name: str | None = None,
    ) -> Dataset:
        """Take each element from the dataset whose number is the next element of ``choice_dataset``.

        Parameters
        ----------
        datasets
            Datasets whose elements have the same structure and dtypes.
        choice_dataset
            Integer scalars: indices into ``datasets``.
        stop_on_empty_dataset
            Whether the result ends when a chosen dataset is exhausted; otherwise that choice is skipped.

        Raises
        ------
        ArgumentError
            There are no datasets, they differ in structure or dtype, or choices are not integers. While iterating:
            a choice is out of range.

        >>> a, b = Dataset.range(3), Dataset.range(10, 13)
        >>> [int(x) for x in Dataset.choose_from_datasets([a, b], Dataset.range(2).repeat())]
        [0, 10, 1, 11, 2, 12]
        """
        nodes = _nodes("choose_from_datasets", datasets)
        (choices,) = _nodes("choose_from_datasets", [choice_dataset], "choice_dataset")
        return cls._of_several(ChooseFromDatasets(nodes, choices, stop_on_empty_dataset, label=name))

    @classmethod
    def sample_from_datasets(
        cls,
        datasets: Sequence[Dataset],
        weights: Sequence[float] | None = None,
        seed: int | None = None,
        stop_on_empty_dataset: bool = False,
        rerandomize_each_iteration: bool | None = None,
        name: str | None = None,
    ) -> Dataset:
        """Take each element from a randomly drawn dataset.

        Parameters
        ----------
        datasets
            Datasets whose elements have the same structure and dtypes.
        weights
            The relative probability of each dataset; equal if None. A dataset of weight 0 is left out.
        seed
            Fixes the draws, independently of the datasets.
        stop_on_empty_dataset
            Whether the result ends when a drawn dataset is exhausted; otherwise the other datasets continue.
        rerandomize_each_iteration
            Whether each iteration has different draws; True if None.

        Raises
        ------
        ArgumentError
            There are no datasets, or not one weight for each, or a weight is negative, or none is above 0.

        >>> mixed = Dataset.sample_from_datasets([Dataset.range(3), Dataset.range(10, 13)], seed=1)
        >>> sorted(int(x) for x in mixed)
        [0, 1, 2, 10, 11, 12]
        """
        nodes = _nodes("sample_from_datasets", datasets)
        shares = (
            np.ones(len(nodes)) if weights is None else np.array(numbers("sample_from_datasets", "weights", weights))
        )
        if shares.shape != (len(nodes),) or not (shares >= 0).all() or not shares.sum() > 0:
            raise ArgumentError(
                f"sample_from_datasets: weights is {weights!r} for {len(nodes)} datasets; "
                "give a number of 0 or more for each, not all 0"
            )
        kept = [(node, float(share)) for node, share in zip(nodes, shares / shares.sum(), strict=True) if share]
        sources, shares_kept = zip(*kept, strict=True)
        rerandomize = True if rerandomize_each_iteration is None else rerandomize_each_iteration
        return cls._of_several(
            SampleFromDatasets(
                sources,
                shares_kept,
                _seed(seed),
                stop_on_empty_dataset,
                rerandomize,
                is_seeded=seed is not None,
                label=name,
            )
        )

    # --- elements: one by one ---

    @advises("Dataset.map")
    def map(
        self,
        map_func: Callable[..., Any],
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        vectorized: bool | None = None,
        name: str | None = None,
        *,
        device: bool = False,
        rng: int | None = None,
    ) -> Dataset:
        """Replace each element (after ``batch``, each batch) by the result of a function.

        Parameters
        ----------
        map_func
            Called with the items of a tuple element, or with any other element. The return value is the new element; a
            list becomes a tuple, and arrays on devices are copied to the host.
        num_parallel_calls
            If given, threads call the function ahead of use; `Options` set the number of threads.
        deterministic
            If False, results come in the order of completion.
        vectorized
            True for a function of many rows at once, whose arguments and results are arrays with rows along axis 0.
            None for a function of one element, which is called with many at once if this is proven to make no
            difference (`explain` shows it). False to call it separately for each element; ``Options(vectorize=False)``
            does so for all functions of a pipeline.
        device
            True for a function that the replicas of a strategy call with the whole elements that they receive: on their
            device, in its stream. Only further such maps, ``prefetch`` and ``with_options`` can follow. Without a
            distributed dataset, or if the replicas are CPUs, the function gets the NumPy arrays of one element at a
            time.
        rng
            The seed of a function that draws at random: after the items of the element, or as a keyword-only parameter
            ``rng``, it gets a `numpy.random.Generator`, a new one for each element and pass. The seed, the pass and the
            number of the element alone determine the draws: not the number of workers, nor a resumed position. Two maps
            with one seed draw the same.

        Raises
        ------
        ArgumentError
            ``device=True`` or ``rng`` does not go with the other arguments. When iterating or distributing: another
            operation follows ``device=True``; or a function without ``rng`` draws from a generator that it refers to,
            and runs in other processes, which would all draw the same.
        UserFunctionError
            While iterating: the function raised. The message names the row and its source.

        Notes
        -----
        A dataset is a value: plain values (numbers, text, None, tuples of them) that the function and its callees
        refer to are fixed when the dataset is built; later assignments have no effect. Objects such as lists, dicts,
        arrays and models are shared, and their names, like those of functions, are looked up when a pass begins.
        Attributes of modules (``config.x``) and variables that the functions assign themselves are read when the
        function is called; so are all global names of a function if it uses one that a function assigns (``global``),
        and a pass raises an ArgumentError if a plain value of them was assigned elsewhere since the dataset was built.

        The function must be pure: it may run in another order, in another process, and repeatedly. To learn the spec of
        its results, it is tried on synthetic elements, whose values and lengths are small numbers and numbers from its
        code.

        It is called for many rows at once only in CPython 3.11, 3.12 and 3.13, if every function that it calls is known
        to be pure and to give the same bits, and if it handles no exceptions. Blocks with a row that may warn or raise,
        for example by an integer overflow, are computed row by row.

        >>> list(Dataset.range(3).map(lambda x: (x, x * x)))[2]
        (np.int64(2), np.int64(4))

        >>> ds = Dataset.range(2).map(lambda x, rng: x + rng.integers(100), rng=7)
        >>> [int(x) for x in ds]
        [51, 2]
        """
        for argument, value in (("deterministic", deterministic), ("vectorized", vectorized)):
            if value is not None:
                yes_or_no("map", argument, value)
        yes_or_no("map", "device", device)
        if rng is not None:
            check_by_row(vectorized=vectorized, device=device)
            seeded = SeededFunction(map_func, "map", narrow=self._makes_narrow)
            of_each = MapWithRng(self._node, seeded, rng, deterministic is not False, label=name)
            return self._with(of_each)._parallel("map", num_parallel_calls)
        if device:
            check_alone(num_parallel_calls=num_parallel_calls, deterministic=deterministic, vectorized=vectorized)
            return self._with(MapOnDevice(self._node, self._function(map_func, "map"), label=name))
        node = Map(self._node, self._function(map_func, "map"), vectorized, deterministic is not False, label=name)
        return self._with(node)._parallel("map", num_parallel_calls)

    def filter(self, predicate: Callable[..., Any], vectorized: bool | None = None, name: str | None = None) -> Dataset:
        """Keep the elements for which a predicate, called like the function of `map`, returns True.

        Parameters
        ----------
        predicate
            A function that returns one bool.
        vectorized
            As in `map`; True for a predicate that returns the bools of many rows, shape ``(num_rows,)``.

        >>> list(Dataset.range(6).filter(lambda x: x > 3))
        [np.int64(4), np.int64(5)]
        """
        return self._with(Filter(self._node, self._function(predicate, "filter"), vectorized, label=name))

    def flat_map(self, map_func: Callable[..., Dataset], name: str | None = None) -> Dataset:
        """Concatenate the datasets that a function, called as in `map`, returns for the elements.

        Raises
        ------
        UserFunctionError
            While iterating: the function raised, or did not return a dataset.

        Notes
        -----
        Random operations without a seed in these datasets, such as ``shuffle(10)``, draw differently for each element
        and iteration, even if the function returns the same dataset for every element. The numbers of the element and
        of the iteration determine the draws, so that all workers make the same. Operations with a seed draw the same
        each time. This also holds for `interleave` and `group_by_window`.

        >>> [int(x) for x in Dataset.range(4).flat_map(Dataset.range)]
        [0, 0, 1, 0, 1, 2]
        """
        return self._with(FlatMap(self._node, self._nested(map_func, "flat_map"), label=name))

    def interleave(
        self,
        map_func: Callable[..., Dataset],
        cycle_length: int | None = None,
        block_length: int | None = None,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        name: str | None = None,
    ) -> Dataset:
        """Take elements by turns from several of the datasets that a function returns for the elements.

        Parameters
        ----------
        map_func
            As in `flat_map`.
        cycle_length
            The number of datasets that are read by turns; 2 if None.
        block_length
            The number of consecutive elements of one dataset in each turn; 1 if None.
        num_parallel_calls
            If given, threads read the datasets ahead of use.
        deterministic
            Accepted for compatibility: the order is always deterministic.

        >>> ds = Dataset.range(1, 4).interleave(lambda x: Dataset.from_tensors(x).repeat(3), 2, block_length=2)
        >>> [int(x) for x in ds]
        [1, 1, 2, 2, 1, 2, 3, 3, 3]
        """
        cycle = 2 if cycle_length in (None, cardinality.INFINITE) else cycle_length
        function = self._nested(map_func, "interleave")
        node = Interleave(self._node, function, cycle, 1 if block_length is None else block_length, label=name)
        return self._with(node)._parallel("interleave", num_parallel_calls)

    def enumerate(self, start: int = 0, name: str | None = None) -> Dataset:
        """Pair each element with its number, ``(number, element)``, counted from ``start`` as int64 scalars.

        >>> list(Dataset.from_tensor_slices(["a", "b"]).enumerate(start=5))
        [(np.int64(5), 'a'), (np.int64(6), 'b')]
        """
        return self._with(Enumerate(self._node, start, label=name))

    def scan(
        self, initial_state: Any, scan_func: Callable[[Any, Any], tuple[Any, Any]], name: str | None = None
    ) -> Dataset:
        """Map elements by a function that passes a state from element to element.

        Parameters
        ----------
        initial_state
            A nest of arrays, Python numbers and strings.
        scan_func
            ``scan_func(state, element) -> (state, output)``; the state keeps its structure, dtypes and Python types:
            an int stays an int of any size.

        Raises
        ------
        UserFunctionError
            While iterating: the function raised, did not return a pair, or returned a state of another structure or
            dtype.

        >>> [int(x) for x in Dataset.range(5).scan(np.int64(0), lambda total, x: (total + x, total + x))]
        [0, 1, 3, 6, 10]
        """
        function = self._function(scan_func, "scan")
        leaves, structure = first_state(function, initial_state)
        return self._with(Scan(self._node, structure, leaves, function, label=name))

    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any], name: str | None = None) -> Any:
        """Return the final state of a function that passes a state through all elements.

        Parameters
        ----------
        initial_state
            A nest of arrays, Python numbers and strings.
        reduce_func
            ``reduce_func(state, element) -> state``, of the same structure, dtypes and Python types: an int stays an
            int of any size.

        Raises
        ------
        UnknownLengthError
            The dataset is endless.
        UserFunctionError
            The function raised, or returned a state of another structure, dtype or Python type.

        >>> Dataset.range(5).reduce(np.int64(0), lambda total, x: total + x)
        np.int64(10)
        """
        if self.cardinality() == cardinality.INFINITE:
            raise UnknownLengthError("reduce: the dataset is endless; use take(n) first")
        function = self._function(reduce_func, "reduce")
        return watched("reduce", self._reduced, function, *first_state(function, initial_state))

    def _reduced(self, function: UserFunction, state: Leaves, structure: Structure) -> Any:
        for number, element in enumerate(self):
            where = f"element {number}"
            arguments = structure.pack(state), element
            with SeedsInCall(arguments):
                result = function.of(arguments, lambda where=where: where)  # type: ignore[misc]
            state = next_state(function, structure, state, result, lambda where=where: where)  # type: ignore[misc]
        # The function may have arrays of the state, which it changes in the next reduction.
        return structure.pack([kept(leaf) for leaf in state])

    # --- columns ---

    @property
    def columns(self) -> list[str | int]:
        """The names of the columns: keys of dicts, fields of named tuples, indices of tuples; empty for single values.

        >>> Dataset.from_tensor_slices({"a": [1, 2], "b": [3, 4]}).columns
        ['a', 'b']
        """
        return columns_of_nest(self._spec.packed)

    def select(self, columns: str | int | list[str] | list[int], name: str | None = None) -> Dataset:
        """Keep some columns of the elements; readers of Parquet, Arrow, CSV and JSON then read only these.

        Parameters
        ----------
        columns
            A list of the names of columns (indices for tuples), in the desired order: elements stay dicts or tuples.
            Or one name, whose values become the elements, as in ``ds["name"]``.

        Raises
        ------
        ArgumentError
            There is no such column. Raised while iterating if the columns are not known earlier.

        >>> ds = Dataset.from_tensor_slices({"a": [1, 2], "b": [3, 4], "c": [5, 6]})
        >>> list(ds.select(["c", "a"]))[0], list(ds.select("b"))
        ({'c': np.int64(5), 'a': np.int64(1)}, [np.int64(3), np.int64(4)])
        """
        names: Any = tuple(columns) if isinstance(columns, list) else columns
        return self._with(Select(self._node, names, label=name).of_reader())

    def __getitem__(self, columns: str | list[str]) -> Dataset:
        if not isinstance(columns, (str, list)):
            raise ArgumentError(
                f"a dataset is indexed by the name of a column or a list of names, not by {columns!r:.80}; use take "
                "and skip for elements by number, select for columns of tuples, daskdist.torch_loader as a DataLoader"
            )
        return self.select(columns)

    def rename(self, columns: Mapping[Any, str], name: str | None = None) -> Dataset:
        """Rename columns; the others keep their names.

        Parameters
        ----------
        columns
            old name -> new name. For tuples, index -> name; elements become dicts.

        Raises
        ------
        ArgumentError
            There is no such column, or two columns would have the same name.

        >>> list(Dataset.from_tensor_slices({"a": [1, 2], "b": [3, 4]}).rename({"a": "x"}))[0]
        {'x': np.int64(1), 'b': np.int64(3)}
        """
        if not isinstance(columns, Mapping):
            raise ArgumentError(f"rename: columns is {columns!r:.80}; give a dict of old names to new ones")
        return self._with(Rename(self._node, tuple(columns.items()), label=name).of_reader())

    # --- elements: selection, repetition, order ---

    def take(self, count: int, name: str | None = None) -> Dataset:
        """Keep the first ``count`` elements; all if it is negative.

        >>> len(Dataset.range(5).take(3))
        3
        """
        return self._with(Take(self._node, count, label=name))

    def skip(self, count: int, name: str | None = None) -> Dataset:
        """Drop the first ``count`` elements; all if it is negative.

        >>> list(Dataset.range(5).skip(3))
        [np.int64(3), np.int64(4)]
        """
        return self._with(Skip(self._node, count, label=name))

    def take_while(self, predicate: Callable[..., Any], name: str | None = None) -> Dataset:
        """Keep the elements before the first for which a predicate, called like the function of `map`, returns False.

        >>> [int(x) for x in Dataset.range(10).take_while(lambda x: x * x < 10)]
        [0, 1, 2, 3]
        """
        return self._with(TakeWhile(self._node, self._function(predicate, "take_while"), label=name))

    def shard(self, num_shards: int, index: int, name: str | None = None) -> Dataset:
        """Keep every ``num_shards``-th element, beginning with element ``index``.

        Raises
        ------
        ArgumentError
            ``num_shards`` is below 1, or ``index`` is not from 0 to ``num_shards - 1``.

        >>> [int(x) for x in Dataset.range(7).shard(3, 1)]
        [1, 4]
        """
        return self._with(Shard(self._node, num_shards, index, label=name))

    def repeat(self, count: int | None = None, name: str | None = None) -> Dataset:
        """Repeat the dataset ``count`` times; endlessly if None or negative.

        >>> [int(x) for x in Dataset.range(2).repeat(2)]
        [0, 1, 0, 1]
        """
        return self._with(Repeat(self._node, count, label=name))

    def concatenate(self, dataset: Dataset, name: str | None = None) -> Dataset:
        """Append another dataset, of the same structure, dtypes and ranks.

        Raises
        ------
        ArgumentError
            Structures, dtypes or ranks differ; the message names the leaf.

        >>> [int(x) for x in Dataset.range(2).concatenate(Dataset.range(10, 12))]
        [0, 1, 10, 11]
        """
        (second,) = _nodes("concatenate", [dataset], "dataset")
        return self._of_several(Concatenate(self._node, second, label=name))

    def unique(self, name: str | None = None) -> Dataset:
        """Keep the first occurrence of each element.

        Raises
        ------
        ArgumentError
            ``name`` is a column. The distinct values of a column are ``ds["column"].unique()``.

        Notes
        -----
        Memory holds each distinct element if it is one number or text, and otherwise 16 bytes for it.

        >>> [int(x) for x in Dataset.from_tensor_slices([3, 1, 3, 2, 1]).unique()]
        [3, 1, 2]
        """
        return self._with(Unique(self._node, label=name))

    def shuffle(
        self,
        buffer_size: int,
        seed: int | None = None,
        reshuffle_each_iteration: bool | None = None,
        name: str | None = None,
    ) -> Dataset:
        """Draw elements uniformly at random from a buffer that is refilled from the input.

        Parameters
        ----------
        buffer_size
            The number of elements to draw from; if it is that of the dataset, every order is equally likely, as in
            `global_shuffle`. -2 (``UNKNOWN_CARDINALITY``) for the number of elements of the dataset.
        seed
            Together with ``buffer_size`` and the number of elements, fixes the orders, independently of the preceding
            operations and of where the shuffle runs. Shuffles with the same seed draw alike.
        reshuffle_each_iteration
            Whether each iteration has another order; True if None. With False, all datasets that are derived from this
            one have the same order, such as the two parts of a split by ``take`` and ``skip``.

        Raises
        ------
        ArgumentError
            ``buffer_size`` is below 1 and not -2.

        >>> [int(x) for x in Dataset.range(5).shuffle(5, seed=1)]
        [1, 4, 0, 3, 2]
        """
        if buffer_size == cardinality.UNKNOWN:
            if self.cardinality() == cardinality.INFINITE:
                raise UnknownLengthError("shuffle: buffer_size -2 is for all elements, and the dataset is endless")
            buffer_size = max(self.cardinality(), 1) if self.cardinality() >= 0 else _ALL
        reshuffle = True if reshuffle_each_iteration is None else reshuffle_each_iteration
        is_seeded = seed is not None
        return self._with(Shuffle(self._node, buffer_size, _seed(seed), reshuffle, is_seeded=is_seeded, label=name))

    def global_shuffle(
        self, seed: int | None = None, reshuffle_each_iteration: bool | None = None, name: str | None = None
    ) -> Dataset:
        """Put all elements in a random order; all orders are equally likely.

        Parameters
        ----------
        seed
            Together with the number of elements, fixes the orders, as in `shuffle`.
        reshuffle_each_iteration
            Whether each iteration has another order; True if None.

        Raises
        ------
        UnknownLengthError
            The dataset is endless.

        Notes
        -----
        The order takes no memory for any number of elements: it is a pseudorandom permutation (a small one is drawn
        from all permutations). Random access to the elements is needed: those of `range` are computed, arrays in memory
        and uncompressed saved datasets are read in place, and everything else is read once and kept in memory.

        >>> [int(x) for x in Dataset.range(5).global_shuffle(seed=3)]
        [1, 4, 0, 2, 3]
        """
        reshuffle = True if reshuffle_each_iteration is None else reshuffle_each_iteration
        return self._with(GlobalShuffle(self._node, _seed(seed), reshuffle, is_seeded=seed is not None, label=name))

    def rejection_resample(
        self,
        class_func: Callable[..., Any] | str | int,
        target_dist: Sequence[float],
        initial_dist: Sequence[float] | None = None,
        seed: int | None = None,
        name: str | None = None,
    ) -> Dataset:
        """Drop elements at random so that classes have the target shares; elements become ``(class, element)``.

        Parameters
        ----------
        class_func
            Called as in `map`; returns the class of an element, an integer from 0 to ``len(target_dist) - 1``. Or the
            name of a column.
        target_dist
            The share of each class in the result; the sum is 1.
        initial_dist
            The share of each class in this dataset; None to estimate it from the preceding elements. If these are
            unlike the others, a warning at the end says which shares to give.
        seed
            Fixes which elements are kept.

        Raises
        ------
        ArgumentError
            Shares do not sum to 1 or differ in their number; or a class with a target share has an initial share of 0.

        Notes
        -----
        Shares vary by chance: those of 600 elements by about 0.02. Without ``initial_dist``, all elements before the
        first of a rare class are kept, which counts in short datasets: of 600 elements, a class with a share of 0.05
        got 0.40 instead of 0.50 on average, and of 10,000 elements 0.49.

        >>> ones = Dataset.range(400).rejection_resample(lambda x: int(x % 4 == 0), [0.5, 0.5], [0.75, 0.25], seed=0)
        >>> 0.4 < sum(int(number) for number, _ in ones) / sum(1 for _ in ones) < 0.6
        True
        """
        node = RejectionResample(
            self._node,
            self._value_of(class_func, "rejection_resample"),
            numbers("rejection_resample", "target_dist", target_dist),
            None if initial_dist is None else numbers("rejection_resample", "initial_dist", initial_dist),
            _seed(seed),
            is_seeded=seed is not None,
            label=name,
        )
        return self._with(node)

    def prefetch(self, buffer_size: int, name: str | None = None) -> Dataset:
        """Prepare elements in threads while earlier ones are in use.

        `Options` or ``daskdist.window-bytes`` limit the prepared bytes; ``buffer_size`` is accepted for compatibility
        and must be -1 or more.

        >>> len(Dataset.range(5).prefetch(2))
        5
        """
        return self._with(Prefetch(self._node, buffer_size, label=name))

    def ignore_errors(self, log_warning: bool = True, name: str | None = None) -> Dataset:
        """Leave out the elements for which an upstream operation failed.

        The logger ``daskdist`` warns of each, with its split and row, and of their number at the end.

        Parameters
        ----------
        log_warning
            Accepted for compatibility: warnings are always logged.

        Notes
        -----
        Of a damaged file, the smallest broken unit is left out, such as a line or a record. Damage is what the file
        itself proves: a wrong checksum or framing, or a value that cannot be parsed (`errors.DamagedFileError`). Other
        reasons why a file cannot be read are errors all the same: a server that refuses, a missing permission, a file
        that is gone or was changed, another schema, or ``dtypes`` that do not fit: a column whose values all have
        another type. Text in another encoding is an error, too: if none of the lines with characters beyond ASCII, in a
        range of a file, can be decoded. A single such value or line may be damaged, so there must be two. A generator
        that raises ends.

        Elements that fail are left out here, and before upstream operations that group elements, such as `batch`, so
        that batches are full; TensorFlow leaves out the whole batch. Everywhere else a failed element holds its place:
        `zip` leaves out the whole pair, and `enumerate`, `skip`, `take`, `shard`, `split` and `shuffle` count it, so
        that no count depends on whether a function raised. If nobody can tell how many elements a damaged file lacks,
        `zip` with it is an error.

        >>> [float(x) for x in Dataset.range(4).map(lambda x: 1 // int(x)).ignore_errors()]
        [1.0, 0.0, 0.0]
        """
        return self._with(IgnoreErrors(self._node, label=name))

    # --- parts ---

    def split(
        self,
        fractions: float | Sequence[float],
        seed: int = 0,
        by: Any = None,
        stratify: Any = None,
        name: str | None = None,
    ) -> tuple[Dataset, ...]:
        """Divide the elements at random into parts, such as training and validation data.

        Parameters
        ----------
        fractions
            The fraction of the first of two parts, or a list with the fractions of all parts, which sum to 1.
        seed
            Determines the part of each element.
        by
            A column, a list of columns, or a function of an element: elements with equal values, such as the rows of
            one patient, are in the same part. Fractions are then those of distinct values on average: if there are few
            values, parts may be far from their fractions. A part without elements is logged where it is read. Then use
            another seed, or `filter` to choose the values of each part.
        stratify
            A column, a list of columns, or a function of an element: each part has the same proportion of each value,
            such as of each label.

        Returns
        -------
        tuple of Dataset
            The parts, each in the order of this dataset: shuffle a part afterwards.

        Raises
        ------
        ArgumentError
            Fractions do not sum to 1; a part would be empty; or this dataset is endless or repeated, and ``by`` is not
            given.

        Notes
        -----
        Each element is in exactly one part, the same in every iteration, in every program and on any number of workers:
        the seed and the number of the element in this dataset, or its value of ``by``, determine its part. Random
        operations before a split draw the same in every iteration, since another order would move elements to other
        parts. So a generator has to yield the same elements in the same order each time.

        If the number of elements is known, parts have exactly their fractions. Otherwise, such as after ``filter``,
        each element is in a part with the probability of the part's fraction. With ``stratify``, consecutive elements
        of each value are divided in groups that divide evenly, such as 5 elements for 0.8, so that each part has its
        exact fraction of each value except for an incomplete last group.

        >>> train, valid = Dataset.range(10).split(0.8, seed=0)
        >>> [int(x) for x in train], [int(x) for x in valid]
        ([1, 2, 4, 5, 6, 7, 8, 9], [0, 3])
        """
        shares = shares_of(fractions)
        part = splitter(self._node, "split", shares, seed, by, stratify, self._function, name)
        return tuple(self._with(part([number])) for number in range(len(shares)))

    def kfold(
        self, num_folds: int, seed: int = 0, by: Any = None, stratify: Any = None, name: str | None = None
    ) -> list[tuple[Dataset, Dataset]]:
        """Return a pair of training and validation data for each fold of a cross-validation.

        Parameters
        ----------
        num_folds
            The number of folds, 2 or more. Each element is in the validation data of one.
        seed, by, stratify
            As in `split`.

        Raises
        ------
        ArgumentError
            As in `split`.

        >>> [[int(x) for x in valid] for train, valid in Dataset.range(6).kfold(3, seed=0)]
        [[0, 3], [2, 4], [1, 5]]
        """
        whole_number("kfold", "num_folds", num_folds, at_least=2)
        shares = (1 / num_folds,) * num_folds
        part = splitter(self._node, "kfold", shares, seed, by, stratify, self._function, name)
        folds = range(num_folds)
        return [
            (self._with(part([fold for fold in folds if fold != number])), self._with(part([number])))
            for number in folds
        ]

    # --- batches ---

    @advises("Dataset.batch")
    def batch(
        self,
        batch_size: int,
        drop_remainder: bool = False,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        name: str | None = None,
    ) -> Dataset:
        """Stack consecutive elements along a new first axis.

        Parameters
        ----------
        batch_size
            The number of elements in a batch.
        drop_remainder
            Whether to leave out a shorter last batch.
        num_parallel_calls
            If given, threads prepare batches ahead of use.
        deterministic
            Accepted for compatibility: batches are always in order.

        Raises
        ------
        ArgumentError
            ``batch_size`` is below 1.
        StackError
            While iterating: the elements of a batch differ in shape or dtype.

        >>> list(Dataset.range(5).batch(2))
        [array([0, 1]), array([2, 3]), array([4])]
        """
        return self._with(batch(self._node, batch_size, drop_remainder, name))._parallel("batch", num_parallel_calls)

    def padded_batch(
        self,
        batch_size: int,
        padded_shapes: Any = None,
        padding_values: Any = None,
        drop_remainder: bool = False,
        name: str | None = None,
    ) -> Dataset:
        """Stack consecutive elements of different shapes, padded at the end of each axis.

        Parameters
        ----------
        batch_size
            The number of elements in a batch.
        padded_shapes
            A nest of the shapes to pad to; an axis of None or -1 is padded to the longest element of the batch. None
            for this in all axes.
        padding_values
            A nest of values to pad with, or one value for all leaves; if None, 0, the empty text or False.
        drop_remainder
            Whether to leave out a shorter last batch.

        Raises
        ------
        ArgumentError
            A shape or a value does not fit its leaf.
        StackError
            While iterating: an element is longer than its padded shape; the message names it.

        >>> list(Dataset.range(4).map(lambda x: np.full(int(x), x)).padded_batch(2, padding_values=-1))[1]
        array([[ 2,  2, -1],
               [ 3,  3,  3]])
        """
        padding = Padding.of("padded_batch", self._known_spec(), padded_shapes, padding_values)
        return self._with(PaddedBatch(self._node, batch_size, drop_remainder, padding=padding, label=name))

    def ragged_batch(
        self,
        batch_size: int,
        drop_remainder: bool = False,
        row_splits_dtype: Any = np.int64,
        name: str | None = None,
    ) -> Dataset:
        """Batch consecutive elements of different lengths as their concatenated values and their offsets.

        Leaves of known shape are stacked; leaves of variable length become `Ragged`.

        Parameters
        ----------
        batch_size
            The number of elements in a batch.
        drop_remainder
            Whether to leave out a shorter last batch.
        row_splits_dtype
            The dtype of offsets: int32 or int64.

        >>> next(iter(Dataset.range(1, 3).map(lambda x: np.full(int(x), x)).ragged_batch(2)))
        Ragged(values=array([1, 2, 2]), row_splits=array([0, 1, 3]))
        """
        return self._with(
            RaggedBatch(
                self._node,
                batch_size,
                drop_remainder,
                row_splits_dtype,
                element_spec=known_spec(self._node),
                label=name,
            )
        )

    def unbatch(self, name: str | None = None) -> Dataset:
        """Split each element into its rows.

        Raises
        ------
        ArgumentError
            A leaf is a scalar, or leaves differ in their number of rows.

        >>> list(Dataset.from_tensors(([1, 2], ["a", "b"])).unbatch())
        [(np.int64(1), 'a'), (np.int64(2), 'b')]
        """
        return self._with(Unbatch(self._node, label=name))

    def rebatch(
        self, batch_size: int | Sequence[int], drop_remainder: bool = False, name: str | None = None
    ) -> Dataset:
        """Regroup the rows of all elements into batches of other sizes, across the boundaries of the elements.

        Parameters
        ----------
        batch_size
            The number of rows in a batch; or several sizes, which are used cyclically. One of several may be 0.
        drop_remainder
            Whether to leave out a shorter last batch.

        >>> [batch.tolist() for batch in Dataset.range(7).batch(3).rebatch([2, 1])]
        [[0, 1], [2], [3, 4], [5], [6]]
        """
        sizes: tuple[Any, ...] = (
            (batch_size,) if np.ndim(batch_size) == 0 else whole_numbers("rebatch", "batch_size", batch_size)
        )
        return self._with(Rebatch(self._node, sizes, drop_remainder, label=name))

    def window(
        self,
        size: int,
        shift: int | None = None,
        stride: int = 1,
        drop_remainder: bool = False,
        name: str | None = None,
    ) -> Dataset:
        """Group consecutive elements into datasets, one for each leaf of the structure.

        Parameters
        ----------
        size
            The number of elements in a window.
        shift
            The number of elements between the starts of successive windows; ``size`` if None.
        stride
            The distance between successive elements of a window.
        drop_remainder
            Whether to leave out windows with fewer elements at the end.

        Raises
        ------
        ArgumentError
            ``size``, ``shift`` or ``stride`` is below 1.

        >>> [[int(x) for x in window] for window in Dataset.range(5).window(3, shift=2)]
        [[0, 1, 2], [2, 3, 4], [4]]
        """
        shift = size if shift is None else shift
        node = Window(self._node, size, shift, stride, drop_remainder, self._of_rows, label=name)
        return self._with(node.warned())

    def sliding_window(
        self, size: int, shift: int = 1, stride: int = 1, drop_remainder: bool = True, name: str | None = None
    ) -> Dataset:
        """Stack the elements of overlapping windows along a new first axis, like NumPy's ``sliding_window_view``.

        ``window(size, shift, stride).flat_map(lambda window: window.batch(size))`` gives the same, and runs the same
        way.

        Parameters
        ----------
        size
            The number of elements in a window.
        shift
            The number of elements between the starts of successive windows.
        stride
            The distance between successive elements of a window.
        drop_remainder
            Whether to leave out windows with fewer elements at the end.

        Raises
        ------
        ArgumentError
            ``size``, ``shift`` or ``stride`` is below 1.

        >>> [window.tolist() for window in Dataset.range(5).sliding_window(3)]
        [[0, 1, 2], [1, 2, 3], [2, 3, 4]]
        """
        return self._with(SlidingWindow(self._node, size, shift, stride, drop_remainder, label=name).warned())

    def group_by_window(
        self,
        key_func: Callable[..., Any] | str | int,
        reduce_func: Callable[[Any, Dataset], Dataset],
        window_size: int | None = None,
        window_size_func: Callable[[Any], int] | None = None,
        name: str | None = None,
    ) -> Dataset:
        """Group elements by key into windows, and replace each window by the dataset that a function returns for it.

        Parameters
        ----------
        key_func
            Called as in `map`; returns the key of an element, an integer. Or the name of a column.
        reduce_func
            ``reduce_func(key, window) -> dataset``.
        window_size
            The number of elements in a window.
        window_size_func
            A function that returns the window size for a key, instead of ``window_size``.

        Raises
        ------
        ArgumentError
            Neither or both of ``window_size`` and ``window_size_func`` are set, or a size is below 1.

        Notes
        -----
        A window follows its last element; incomplete windows come at the end in the order of their keys.

        >>> odd_and_even = Dataset.range(5).group_by_window(lambda x: x % 2, lambda key, ds: ds.batch(2), 2)
        >>> [batch.tolist() for batch in odd_and_even]
        [[0, 2], [1, 3], [4]]
        """
        if (window_size is None) == (window_size_func is None):
            raise ArgumentError("group_by_window: give either window_size or window_size_func")
        size = window_size if window_size_func is None else self._function(window_size_func, "group_by_window")
        key, reduce_windows = self._value_of(key_func, "group_by_window"), self._nested(reduce_func, "group_by_window")
        return self._with(GroupByWindow(self._node, key, reduce_windows, size, self._of_rows, label=name))  # type: ignore[arg-type]

    def bucket_by_sequence_length(
        self,
        element_length_func: Callable[..., Any] | str | int,
        bucket_boundaries: Sequence[int],
        bucket_batch_sizes: Sequence[int],
        padded_shapes: Any = None,
        padding_values: Any = None,
        pad_to_bucket_boundary: bool = False,
        no_padding: bool = False,
        drop_remainder: bool = False,
        name: str | None = None,
    ) -> Dataset:
        """Batch elements of similar length, with padding.

        Parameters
        ----------
        element_length_func
            Called as in `map`; returns the length of an element. Or the name of a column: of lengths, or of arrays
            whose lengths count.
        bucket_boundaries
            The increasing upper boundaries of buckets; a boundary is the smallest length of the next bucket.
        bucket_batch_sizes
            The number of elements in a batch for each bucket; there is one more bucket than boundaries.
        padded_shapes, padding_values
            As in `padded_batch`.
        pad_to_bucket_boundary
            Whether to pad batches to one less than the upper boundary of their bucket instead of to their longest
            element.
        no_padding
            Whether to stack the elements of a bucket without padding.
        drop_remainder
            Whether to leave out shorter batches at the end.

        Raises
        ------
        ArgumentError
            The number of batch sizes is not one more than that of boundaries, or boundaries do not increase.

        >>> from daskdist import Ragged
        >>> words = Dataset.from_tensor_slices(Ragged([1, 2, 2, 3, 3, 3, 4], [0, 1, 3, 6, 7]))
        >>> [batch.tolist() for batch in words.bucket_by_sequence_length(len, [2], [2, 2])]
        [[[2, 2, 0], [3, 3, 3]], [[1], [4]]]
        """
        operation = "bucket_by_sequence_length"
        yes_or_no(operation, "no_padding", no_padding)
        padding = None if no_padding else Padding.of(operation, self._known_spec(), padded_shapes, padding_values)
        node = BucketBySequenceLength(
            self._node,
            self._value_of(element_length_func, operation, is_length=True),
            whole_numbers(operation, "bucket_boundaries", bucket_boundaries),
            whole_numbers(operation, "bucket_batch_sizes", bucket_batch_sizes),
            padding,
            pad_to_bucket_boundary,
            drop_remainder,
            label=name,
        )
        return self._with(node)

    def batch_by_size(
        self,
        budget: int,
        length_fn: Callable[..., Any] | str | int,
        buffer_size: int | None = None,
        padding_values: Any = None,
        ragged: bool = False,
        round_size: int = 1,
        name: str | None = None,
    ) -> Dataset:
        """Make batches of as many elements as a budget allows, for example a number of tokens.

        Parameters
        ----------
        budget
            The largest size of a batch: its number of elements times its longest length, which is its size after
            padding; or the sum of its lengths if ``ragged``.
        length_fn
            Called as in `map`; returns the length of an element, an integer; 0 counts as 1. Or the name of a column: of
            lengths, or of arrays whose lengths count.
        buffer_size
            The number of consecutive elements to sort by length, so that the elements of a batch have similar lengths;
            None to keep the order. The batches of a buffer come from short to long: shuffle them afterwards.
        padding_values
            As in `padded_batch`.
        ragged
            Whether leaves of variable length become `Ragged`; otherwise they are padded to the longest.
        round_size
            Divide each buffer into a multiple of this number of batches, so that consumers that take turns get batches
            of similar lengths; some batches are then smaller than the budget allows.

        Raises
        ------
        ArgumentError
            A number is less than 1, or ``round_size`` is given without a ``buffer_size``.
        UserFunctionError
            While iterating: an element is longer than the budget, or its length is not an integer.

        >>> from daskdist import Ragged
        >>> words = Dataset.from_tensor_slices(Ragged([1, 2, 2, 3, 3, 3, 4], [0, 1, 3, 6, 7]))
        >>> [batch.tolist() for batch in words.batch_by_size(4, len)]
        [[[1, 0], [2, 2]], [[3, 3, 3]], [[4]]]
        >>> [batch.tolist() for batch in words.batch_by_size(4, len, buffer_size=4)]
        [[[1], [4]], [[2, 2]], [[3, 3, 3]]]
        """
        operation = "batch_by_size"
        yes_or_no(operation, "ragged", ragged)
        if ragged and padding_values is not None:
            raise ArgumentError("batch_by_size: give padding_values, or ragged=True, which pads nothing")
        padding = None if ragged else Padding.of(operation, self._known_spec(), None, padding_values)
        length_function = self._value_of(length_fn, operation, is_length=True)
        return self._with(
            BatchBySize(self._node, length_function, budget, buffer_size, round_size, padding, label=name)
        )

    # --- caching and saving ---

    def cache(self, filename: str | os.PathLike[str] = "", name: str | None = None) -> Dataset:
        """Keep the elements of the first complete pass for later passes.

        Parameters
        ----------
        filename
            A directory for the elements, as in `snapshot`; if empty, memory (on a cluster, that of the workers).

        Notes
        -----
        A pass that ends early keeps nothing; the files of a killed pass are removed by a pass over the directory more
        than a day later. The order is kept too: shuffle afterwards for another order in each pass. Memory keeps an
        element that failed as any other. A pass with one leaves no files, even if it is left out further down: call
        `ignore_errors` before.

        >>> ds = Dataset.range(3).shuffle(3).cache()
        >>> list(ds) == list(ds)
        True
        """
        if not os.fspath(filename):
            return self._with(Cache(self._node, label=name))
        return self._snapshot(filename, None, "cache", name)

    def snapshot(
        self, path: str | os.PathLike[str], compression: str | None = None, name: str | None = None
    ) -> Dataset:
        """Write the elements of the first complete pass to files for later passes of this and other programs.

        Parameters
        ----------
        path
            A directory or fsspec URL. Each pipeline has a subdirectory, named by its fingerprint: a changed pipeline,
            or one whose local files changed, does not read the files of another.
        compression
            ``"lz4"``, ``"zstd"`` or None; without compression, elements are used in place on disk.

        Notes
        -----
        A pass with an element that failed leaves no files, even if it is left out further down: call `ignore_errors`
        before.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     ds = Dataset.range(3).map(lambda x: x * x).snapshot(directory)
        ...     [int(x) for _ in "two passes" for x in ds][:6]
        [0, 1, 4, 0, 1, 4]
        """
        return self._snapshot(path, compression, "snapshot", name)

    def save(
        self, path: str | os.PathLike[str], compression: str | None = None, *, strategy: WritingStrategy | None = None
    ) -> None:
        """Write the elements to a directory, from which `load` reads them.

        Parameters
        ----------
        path
            A directory or fsspec URL. A dataset that was saved there is replaced when this one is complete.
        compression
            ``"lz4"``, ``"zstd"`` or None; without compression, elements are used in place on disk.
        strategy
            The strategy whose workers write; threads of this process if None.

        Raises
        ------
        UnknownLengthError
            The dataset is endless.
        FileError
            The dataset cannot be written.

        Notes
        -----
        The directory holds Arrow files and a manifest, which is written last: without it `load` fails. If workers
        write, all of them and this process must share the directory.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     Dataset.range(5).batch(2).save(directory)
        ...     list(Dataset.load(directory))
        [array([0, 1]), array([2, 3]), array([4])]
        """
        spec = self._spec_to_write("save", strategy)
        node = Snapshot(self._node, _absolute(path), self._fingerprint, spec, _codec(compression), is_reused=False)
        work = LongWork("save", self.cardinality)
        run_to_end(plan(node), *self._writers(strategy), epoch=begin_pass(node)[0], work=work)

    @classmethod
    @advises("Dataset.load")
    def load(cls, path: str | os.PathLike[str], element_spec: Any = None, name: str | None = None) -> Dataset:
        """Return the dataset that `save` wrote.

        Parameters
        ----------
        path
            The directory.
        element_spec
            The expected spec of the elements, if it is to be checked.

        Raises
        ------
        FileError
            There is no saved dataset in the directory, or it is damaged.
        ArgumentError
            Its elements do not match ``element_spec``.
        """
        loaded = cls._of(ReadFiles((_absolute(path),), Saved(), label=name))
        saved = loaded._spec
        if element_spec is not None:
            leaves, structure = Structure.of(element_spec)
            expected = ElementSpec(structure, leaves)
            if saved.most_general_common_spec(expected) is None:
                raise ArgumentError(
                    f"load: element_spec is {element_spec}, but the saved elements are {loaded.element_spec}"
                )
        return loaded

    # --- writing files ---

    @advises("Dataset.to_parquet")
    def to_parquet(
        self,
        path: str | os.PathLike[str],
        *,
        rows_per_file: int | None = None,
        compression: str | None = "snappy",
        unbatch: bool | None = None,
        overwrite: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        strategy: WritingStrategy | None = None,
    ) -> list[str]:
        """Write the elements to Parquet files, as one row for each.

        Parameters
        ----------
        path
            A directory or fsspec URL, for files ``part-00000.parquet``, ... in the order of the elements.
        rows_per_file
            The number of elements of each file but the last. If None, the size of a file in memory is about the setting
            ``daskdist.bundle-bytes``.
        compression
            None, ``"snappy"``, ``"zstd"``, ``"lz4"``, ``"gzip"`` or ``"brotli"``.
        unbatch
            Whether elements are batches, whose rows become rows of the files. None means False, but raises for
            elements that look like batches: made after `batch`, and all leaves have a first axis of variable length or
            of its size.
        overwrite
            Whether to remove existing Parquet files when the new ones are complete.
        storage_options
            Options of the fsspec file system, such as credentials and an endpoint.
        strategy
            The strategy whose workers write, such as a `MultiWorkerMirroredStrategy`; threads of this process if None.

        Returns
        -------
        list of str
            The paths of the files, in order. Without elements, one file has the columns.

        Raises
        ------
        UnknownLengthError
            The dataset is endless.
        ArgumentError
            A leaf cannot become a column, elements look like batches, or the directory already has Parquet files.
        FileError
            The files cannot be written.

        Notes
        -----
        A dict has a column for each name and a tuple one for each index, ``"0"``, ``"1"``, ...; nested ones are
        structs. A single leaf is a column ``"value"``. `daskdist.read_parquet` returns dicts, or the structure of its
        ``columns``: ``"value"`` for the leaf, ``("0", "1")`` for the tuple. Arrays of fixed shape are fixed-size lists,
        arrays of variable length are lists; times in seconds are read as milliseconds, as Parquet has no seconds.

        A write is atomic, even if a process is killed. Files are written to a hidden directory inside ``path`` and
        renamed when all are complete; then ``_daskdist_parquet.json`` lists them with their sizes. The readers of this
        package follow that list: they read the old files or the new ones, and raise an error if a first write did not
        finish or a listed file is missing. Files that other programs add are read too. New files that replace old ones
        have other names (``part-00000-1.parquet``), and the old ones are deleted after the list is written. The next
        write removes the files of a killed one. One process at a time may write to a directory; if workers write, all
        of them and this process must share it.

        >>> import tempfile, daskdist
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     paths = Dataset.range(5).map(lambda x: {"x": x, "y": x * 0.5}).to_parquet(directory, rows_per_file=3)
        ...     print([os.path.basename(path) for path in paths])
        ...     list(daskdist.read_parquet(directory, columns="y"))[-1]
        ['part-00000.parquet', 'part-00001.parquet']
        np.float64(2.0)
        """
        rows, spec = self._rows_to_write("to_parquet", unbatch, strategy)
        form = Parquet(compression=compression, element_spec=spec)
        return rows._written("to_parquet", form, spec, path, rows_per_file, overwrite, storage_options, strategy)

    def to_tfrecord(
        self,
        path: str | os.PathLike[str],
        *,
        rows_per_file: int | None = None,
        compression: str | None = None,
        unbatch: bool | None = None,
        overwrite: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        strategy: WritingStrategy | None = None,
    ) -> list[str]:
        """Write the elements to TFRecord files, as one record for each.

        Parameters
        ----------
        path
            A directory or fsspec URL, for files ``part-00000.tfrecord``, ... in the order of the elements.
        rows_per_file, unbatch, overwrite, storage_options, strategy
            As in `to_parquet`.
        compression
            None, ``"gzip"`` or ``"zlib"``, which TensorFlow reads, or ``"bz2"``, ``"xz"`` or ``"zstd"``; file names
            have its suffix.

        Returns
        -------
        list of str
            The paths of the files, in order. Without elements, one file has no records.

        Raises
        ------
        UnknownLengthError
            The dataset is endless.
        ArgumentError
            Elements are neither bytes nor dicts of arrays, the directory already has TFRecord files, or a number is too
            large for float32 or int64.
        FileError
            The files cannot be written.

        Notes
        -----
        Bytes are the record itself; a dict becomes a ``tf.train.Example``, with floats as float32 (about seven digits
        of a float64), integers as int64, text as UTF-8 and flattened arrays. File names and workers are as in
        `to_parquet`.

        >>> import tempfile, daskdist
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     _ = Dataset.from_list([b"one", b"two"]).to_tfrecord(directory)
        ...     list(daskdist.read_tfrecord(directory))
        [b'one', b'two']
        """
        rows, spec = self._rows_to_write("to_tfrecord", unbatch, strategy)
        form = TFRecord(compression=compression_to_write("to_tfrecord", compression))
        return rows._written("to_tfrecord", form, spec, path, rows_per_file, overwrite, storage_options, strategy)

    def to_npy(
        self,
        path: str | os.PathLike[str],
        *,
        rows_per_file: int | None = None,
        unbatch: bool | None = None,
        overwrite: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        strategy: WritingStrategy | None = None,
    ) -> list[str]:
        """Write the elements to NumPy files: single arrays to ``.npy``, dicts of arrays to ``.npz``.

        Parameters
        ----------
        path
            A directory or fsspec URL, for files ``part-00000.npy``, ... in the order of the elements.
        rows_per_file, unbatch, overwrite, storage_options, strategy
            As in `to_parquet`.

        Returns
        -------
        list of str
            The paths of the files, in order. Without elements, one file has arrays without rows.

        Raises
        ------
        UnknownLengthError
            The dataset is endless.
        ArgumentError
            Elements are not arrays of one shape, or the directory already has NumPy files.
        FileError
            The files cannot be written.

        Notes
        -----
        File names and workers are as in `to_parquet`.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     [np.load(path) for path in Dataset.range(5).to_npy(directory, rows_per_file=3)]
        [array([0, 1, 2]), array([3, 4])]
        """
        rows, spec = self._rows_to_write("to_npy", unbatch, strategy)
        form = npy_to_write("to_npy", spec)
        return rows._written("to_npy", form, spec, path, rows_per_file, overwrite, storage_options, strategy)

    def to_zarr(
        self,
        path: str | os.PathLike[str],
        *,
        chunk_rows: int | None = None,
        unbatch: bool | None = None,
        overwrite: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        strategy: WritingStrategy | None = None,
    ) -> list[str]:
        """Write the elements to a Zarr v3 store: single arrays to an array, dicts of arrays to a group.

        Parameters
        ----------
        path
            The local path or fsspec URL of the store, such as ``"data.zarr"``.
        chunk_rows
            The number of elements in a chunk. If None, the size of a chunk is about the setting
            ``daskdist.bundle-bytes``.
        unbatch
            As in `to_parquet`.
        overwrite
            Whether to remove an existing store when the new one is complete.
        storage_options, strategy
            As in `to_parquet`.

        Returns
        -------
        list of str
            The path of the store.

        Raises
        ------
        UnknownLengthError
            The dataset is endless.
        ArgumentError
            Elements are not arrays of one shape, or ``path`` already exists.
        FileError
            The dataset cannot be written.

        Notes
        -----
        Until it is complete, the store is hidden beside ``path``. Killed processes and workers are as in `to_parquet`.
        During a replacement, a file beside ``path`` says where the store is, which only the readers of this package
        read; other readers find no store.

        >>> import tempfile, daskdist
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     paths = Dataset.range(5).to_zarr(f"{directory}/numbers.zarr", chunk_rows=2)
        ...     [int(x) for x in daskdist.read_zarr(paths)]
        [0, 1, 2, 3, 4]
        """
        rows, spec = self._rows_to_write("to_zarr", unbatch, strategy)
        if chunk_rows is None:
            chunk_rows = rows_of_chunk(spec, rows.cardinality())
        chunk_rows = whole_number("to_zarr", "chunk_rows", chunk_rows, at_least=1)
        yes_or_no("to_zarr", "overwrite", overwrite)
        store = ZarrWriter("to_zarr", _absolute(path), chunk_rows, Storage(storage_options), overwrite)
        return rows._by_calls(store, spec, chunk_rows, strategy)

    def to_webdataset(
        self,
        path: str | os.PathLike[str],
        *,
        rows_per_file: int | None = None,
        unbatch: bool | None = None,
        overwrite: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        strategy: WritingStrategy | None = None,
    ) -> list[str]:
        """Write the elements, dicts by file extension, to tar archives of WebDataset, as one sample for each.

        Parameters
        ----------
        path
            A directory or fsspec URL, for files ``part-00000.tar``, ... in the order of the elements.
        rows_per_file, unbatch, overwrite, storage_options, strategy
            As in `to_parquet`.

        Returns
        -------
        list of str
            The paths of the files, in order. Without elements, one file has no samples.

        Raises
        ------
        UnknownLengthError
            The dataset is endless.
        ArgumentError
            An element is not a dict, a field does not match its extension, or the directory already has archives.
        FileError
            The files cannot be written.

        Notes
        -----
        ``"__key__"`` is the name of a sample; without it, one is generated. The extension of other fields determines
        their content: ``"png"`` an image, ``"cls"`` a number, ``"txt"`` text, ``"npy"`` an array, ``"json"`` anything.
        File names and workers are as in `to_parquet`.

        >>> import tempfile, daskdist
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     _ = Dataset.range(3).map(lambda x: {"cls": x}).to_webdataset(directory)
        ...     [int(x) for x in daskdist.read_webdataset(directory, columns="cls")]
        [0, 1, 2]
        """
        rows, spec = self._rows_to_write("to_webdataset", unbatch, strategy)
        form = WebDataset()
        return rows._written("to_webdataset", form, spec, path, rows_per_file, overwrite, storage_options, strategy)

    # --- functions of datasets ---

    def apply(self, transformation_func: Callable[[Dataset], Dataset]) -> Dataset:
        """Return the dataset that a function makes of this one.

        >>> len(Dataset.range(6).apply(lambda ds: ds.batch(2)))
        3
        """
        if not callable(transformation_func):
            raise ArgumentError(f"apply: expected a function, got {type(transformation_func).__name__}")
        result = transformation_func(self)
        if not isinstance(result, Dataset):
            raise ArgumentError(f"apply: the function returned {type(result).__name__}; it must return a Dataset")
        return result

    def pipe(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Return ``function(self, *args, **options)``.

        >>> Dataset.range(6).pipe(lambda ds, size: len(ds.batch(size)), 4)
        2
        """
        return function(self, *args, **options)

    def serve(
        self,
        service: Any = None,
        processing_mode: Any = "distributed_epoch",
        job_name: str | None = None,
        *,
        consumer_index: int | None = None,
        num_consumers: int | None = None,
        max_outstanding_requests: int | None = None,
        compression: str | None = "AUTO",
        cross_trainer_cache: CrossTrainerCache | None = None,
        target_workers: str = "AUTO",
        on_consumer_loss: str = "redeliver",
        tokens_per_consumer: int | None = None,
        length_fn: Callable[..., Any] | None = None,
    ) -> Dataset:
        """Produce the elements on a cluster's workers; later operations run in this process.

        Each iteration starts a job of the data service, or joins the job with the given name. It is the next pass of
        what is served: shuffles and random numbers differ from those of earlier passes, here or on workers, and
        `at_epoch` before or after this sets its number. Consumers that share an iteration share its pass.

        Parameters
        ----------
        service
            A Dask client or cluster, the address of a scheduler, or a scheduler file; this program's client if None.
            An address ``"tls://..."`` needs certificates in Dask's configuration, ``distributed.comm.tls``; otherwise
            give a client that has them.
        processing_mode
            ``"distributed_epoch"``: each element once, in any order; in the dataset's order, but more slowly, if its
            options say ``deterministic=True``. ``"parallel_epochs"``: all elements from each worker, each in its own
            shuffle order. Or a `daskdist.data.service.ShardingPolicy`.
        job_name
            Iterations with the same job name share its elements: each goes to the first consumer that asks. Later
            iterations and repetitions with this name are separate jobs, by their number. None for a separate job for
            each iteration.
        consumer_index, num_consumers
            For reading in rounds: in each round, consumers get one element each, all from the same worker.
        max_outstanding_requests
            The most elements that are on their way to this consumer, or here and unused; if None, as many as its
            program uses in 0.2 s, but 8 and one of each worker's task at least, and no more bytes than the setting
            ``daskdist.service.window-bytes`` says.
        compression
            ``"AUTO"`` compresses data that is sent to another host.
        cross_trainer_cache
            Lets several trainers, each with its id, read the same elements, which are produced once.
        target_workers
            ``"LOCAL"`` to read from workers of this host only.
        on_consumer_loss
            How to treat elements that a lost consumer had received: ``"redeliver"`` gives them to other consumers,
            ``"drop"`` does not.
        tokens_per_consumer, length_fn
            For reading in rounds: `batch_by_size` puts the elements into padded batches within this budget of lengths;
            the batches of a round have similar lengths. If ``length_fn`` is None, elements are single arrays, and their
            length is that of the array. For other options of `batch_by_size`, call it before this with
            ``round_size=num_consumers``.

        Raises
        ------
        ArgumentError
            An argument is not allowed, or contradicts others or the dataset.

        Notes
        -----
        The modes ``DYNAMIC``, ``DATA``, ``FILE`` and ``HINT`` guarantee how often each element is delivered:

        * Exactly once, to one of the consumers, as long as no consumer's process is lost; even if workers are lost,
          join or retire, and if connections break.
        * If a consumer's process is lost, at most once to the other consumers together. Elements that the lost consumer
          received and did not acknowledge go to others, even if its program had used them
          (``on_consumer_loss="redeliver"``), or are dropped (``"drop"``). A consumer acknowledges elements when its
          program asks for the next ones. If later operations still hold acknowledged elements, such as for a batch or a
          shuffle, these are lost with the consumer. Likewise, closing an iterator early loses what its pipeline had
          taken ahead: a few elements, or as many as the program uses in 10 ms.
        * A consumer at the end does not wait for elements that another consumer has, which are few: each asks for as
          many as it uses in 0.2 s, and is sent fewer towards the end. If the other is lost later, they go to consumers
          that are still reading or join the job later, if there are any.

        With ``OFF``, each worker's copy of the dataset is delivered like a job of its own, and ends with its worker.
        Each element comes at least once: if a worker and a consumer are lost together, elements acknowledged in the
        last quarter of a second may be delivered again.

        ``max_outstanding_requests`` does not count elements that are redelivered after a worker's last own element. In
        rounds, at least one element of each worker is under way. Trainers that share a cache get each element at most
        once, and skip elements that have left its window.

        In ``"distributed_epoch"``, workers lease ranges of elements and produce these. If the dataset shuffles, or
        batches an unknown number of elements (after ``filter``, or from text), the workers still compute the parts, but
        one worker assembles the elements.
        """
        from daskdist.service.address import service_address
        from daskdist.service.service_dataset import rounds_by_size, served

        request = ServiceRequest.of(
            processing_mode,
            job_name=job_name,
            consumer_index=consumer_index,
            num_consumers=num_consumers,
            max_outstanding_requests=max_outstanding_requests,
            compression=compression,
            cross_trainer_cache=cross_trainer_cache,
            target_workers=target_workers,
            on_consumer_loss=on_consumer_loss,
        )
        ds = self
        if tokens_per_consumer is not None:
            ds = self.batch_by_size(**rounds_by_size(self._spec, tokens_per_consumer, length_fn, request))
        elif length_fn is not None:
            raise ArgumentError("length_fn is for tokens_per_consumer; give that, too")
        return self._with(served(ds._node, ds._spec, ds._fingerprint, request, service_address(service)))

    # --- options ---

    @advises("Dataset.with_options")
    def with_options(self, options: Options, name: str | None = None) -> Dataset:
        """Set options for later parts of the pipeline and for strategies.

        Parameters
        ----------
        options
            Fields of None keep the earlier setting; others replace it.
        """
        if not isinstance(options, Options):
            raise ArgumentError(f"with_options: expected Options, got {type(options).__name__}")
        return self._with(WithOptions(self._node, options.copy(), label=name))

    def options(self) -> Options:
        """Return the effective options."""
        return merged_options(self._node)

    # --- iteration and inspection ---

    def __iter__(self) -> ElementIterator:
        primitive, options = self._current_primitive(), self.options()
        return ElementIterator(
            self._caller,
            primitive,
            StreamPosition(begin_pass(self._node)[0], drawn_seeds(self._node)),
            self._empty,
            options.memory_budget_bytes,
            Identity(
                lambda: PipelineIdentity.of(self._current_node(), self._fingerprint, primitive),
                lambda seeds: plan(with_drawn(self._node, seeds)),
                lambda epoch: note_pass(self._node, epoch),
            ),
            is_writable=bool(options.writable),
            reported_spec=lambda: self._reported_spec,
            work=LongWork(self._node.name, self.cardinality),
            node=self._node,
        )

    def at_epoch(self, epoch: int) -> Dataset:
        """Return the dataset with its passes counted from a number: the first one is pass ``epoch``, from 0.

        Each pass of a shuffled or randomly augmented dataset has an order and random numbers of its own. After a
        restart, this gives those of a later pass, also where the dataset is distributed, served, computed or written.

        Parameters
        ----------
        epoch
            The number of passes before it.

        Raises
        ------
        ArgumentError
            It is not a whole number, or negative.

        Notes
        -----
        Another process has the same passes only if operations have seeds; see `Options.seed`. What `cache` and
        `snapshot` store is that of pass 0. Parts of `split` are the same in all passes. `head`, `show`, and the graphs
        that Dask computes (``dask.compute``, ``persist``, `to_delayed`, `to_dask_array`, `to_dask_dataframe`) are of
        the first pass and do not count as passes; every other use counts as one. To continue in the middle of a pass,
        save the position of its iterator.

        >>> ds = Dataset.range(5).shuffle(5, seed=1)
        >>> passes = [[int(x) for x in ds] for _ in range(3)]
        >>> [int(x) for x in ds.at_epoch(2)] == passes[2] != passes[0]
        True
        """
        return self._with(at_pass(self._node, whole_number("at_epoch", "epoch", epoch, at_least=0)))

    def as_numpy_iterator(self) -> Iterator[Any]:
        """Iterate over the elements as nests of NumPy arrays and scalars.

        >>> list(Dataset.range(2).as_numpy_iterator())
        [np.int64(0), np.int64(1)]
        """
        return iter(self)

    def head(self, n: int = 5) -> list[Any]:
        """Return the first elements as a list that prints like `show`. It does not count as an iteration.

        >>> Dataset.from_tensor_slices({"a": [1, 2, 3], "b": [0.5, 1.5, 2.5]}).head(2)
          element  a  b
                0  1  0.5
                1  2  1.5
        the first 2 elements
        """
        whole_number("head", "n", n, at_least=0)
        return Head(first_elements(self._primitive_of_looks(), n))

    def count(self, *, strategy: WritingStrategy | None = None) -> int:
        """Return the number of elements, computing elements only if necessary.

        Functions of `map` are not called, and only one column of files is read.

        Parameters
        ----------
        strategy
            The strategy whose workers count, such as a `MultiWorkerMirroredStrategy`. If None, the workers of this
            program's Dask client, or threads of this process without one.

        Raises
        ------
        UnknownLengthError
            The dataset is endless.

        >>> Dataset.range(10).filter(lambda x: x % 3 == 0).batch(3).count()
        2
        """
        number = self._counted()
        if number == cardinality.INFINITE:
            raise UnknownLengthError("count: the dataset is endless; use take(n) first")
        if number >= 0:
            return number
        node, batches = counted_by(self._current_node().for_looks())
        number = (
            node.cardinality if node.cardinality >= 0 else self._statistics(node, count_rows, strategy).num_elements
        )
        return number_of_batches(number, batches)

    def describe(self, *, strategy: WritingStrategy | None = None) -> Description:
        """Return statistics of each column, computed in one pass, as a table; ``to_dict()`` returns numbers.

        Parameters
        ----------
        strategy
            As in `count`.

        Returns
        -------
        Description
            For each leaf the ``count`` of values, ``nulls`` (NaN, NaT and missing values of files, which the others
            ignore), ``mean``, ``std`` (of a sample, as in pandas), ``min``, ``25%``, ``50%``, ``75%``, ``max`` and
            ``distinct``. The values of an array are its items, and a missing list has none. Text, bytes and times have
            no mean and no quantiles. Without elements, all columns have the count 0.

        Raises
        ------
        UnknownLengthError
            The dataset is endless.

        Notes
        -----
        Missing values of files that have no replacement are counted while no function is between the files and this
        call; `map` and `filter` raise the error of an iteration.

        Quantiles are exact for up to 16,384 values; for more, their rank is off by about 1 in 10,000. The number of
        distinct values is exact up to 4,095, and beyond that an estimate within about 2 %, shown with a ``~``.

        >>> Dataset.from_tensor_slices({"x": [1.0, 2.0, 3.0, np.nan], "y": ["a", "b", "a", "a"]}).describe()
        4 elements
             count  nulls  mean  std  min  25%  50%  75%  max  distinct
          x      3      1     2    1    1  1.5    2  2.5    3         3
          y      4      0     -    -    a    -    -    -    b         2
        """
        if self.cardinality() == cardinality.INFINITE:
            raise UnknownLengthError("describe: the dataset is endless; use take(n) first")
        node = self._current_node().for_looks()
        if merged_options(node).on_error != "skip":
            node = node.with_nulls()
        statistics = self._statistics(node, describe_rows, strategy)
        if not statistics.columns and isinstance(spec := self._known_spec(), ElementSpec):
            statistics = statistics.with_other(describe_nothing(spec))
        return Description(statistics.num_elements, statistics.columns)

    def get_single_element(self, name: str | None = None) -> Any:
        """Return the only element.

        Raises
        ------
        ArgumentError
            There is no element, or more than one.

        >>> Dataset.range(5).batch(5).get_single_element()
        array([0, 1, 2, 3, 4])
        """
        elements = list(itertools.islice(iter(self), 2))
        if len(elements) != 1:
            contents = "more than one element; take(1) leaves one" if elements else "no elements"
            raise ArgumentError(f"get_single_element: the dataset has {contents}")
        return elements[0]

    @property
    def element_spec(self) -> Any:
        """The shape and dtype of each leaf of an element, in the structure of an element.

        Notes
        -----
        Only schemas are read, unless a function given to `map` could not be tried on synthetic elements: then the first
        few elements are computed, and lengths are unknown, as other elements may differ. A length that may
        differ between elements is None, and so is the shape if the number of axes may differ.

        Trying a function on some elements does not prove its results for all. So after a use of this property, an
        iteration that comes to an element of another spec raises an ArgumentError.

        Raises
        ------
        ArgumentError
            The first few elements differ in structure or dtype, so that no spec holds for all.

        >>> Dataset.range(5).batch(2).element_spec
        TensorSpec(shape=(None,), dtype=int64, name=None)
        """
        self._reported_spec = self._spec
        return self._reported_spec.packed

    def cardinality(self) -> int:
        """Return the number of elements, ``INFINITE_CARDINALITY`` (-1) or ``UNKNOWN_CARDINALITY`` (-2).

        >>> Dataset.range(5).batch(2).cardinality(), Dataset.range(5).repeat().cardinality()
        (3, -1)
        """
        return self._node.cardinality

    def assert_cardinality(self, expected_cardinality: int, name: str | None = None) -> Dataset:
        """State the number of elements, which is checked while iterating.

        Parameters
        ----------
        expected_cardinality
            The number of elements, or -1, ``INFINITE_CARDINALITY``.

        Raises
        ------
        CardinalityError
            While iterating: there are fewer or more.

        >>> len(Dataset.range(6).filter(lambda x: x % 2 == 0).assert_cardinality(3))
        3
        """
        return self._with(AssertCardinality(self._node, expected_cardinality, label=name))

    def fingerprint(self) -> np.uint64:
        """Return a number that is equal for equal pipelines in all processes.

        >>> Dataset.range(3).fingerprint() == Dataset.range(3).fingerprint() != Dataset.range(4).fingerprint()
        np.True_
        """
        return np.uint64(int(self._fingerprint[:16], 16))

    def __len__(self) -> int:
        number = self._counted()
        if number == cardinality.INFINITE:
            raise UnknownLengthError("the number of elements is endless; use take(n) first, or cardinality()")
        if number < 0:
            raise UnknownLengthError(
                f"the number of elements is unknown; {how_to_count(self._node)}, or use cardinality()"
            )
        return number

    def __bool__(self) -> bool:
        return True

    def show(self, n: int = 8) -> None:
        """Show the first elements as a table: printed, or in a notebook with images as pictures.

        Parameters
        ----------
        n
            The number of elements.

        Raises
        ------
        ArgumentError
            ``n`` is not a positive whole number.

        Notes
        -----
        Elements are computed in this process. It does not count as an iteration, so later orders stay the same.

        >>> Dataset.from_tensor_slices({"x": [[1, 2], [3, 4]], "label": ["cat", "dog"]}).show()
          element  x      label
                0  [1 2]  cat
                1  [3 4]  dog
        all 2 elements
        """
        whole_number("show", "n", n, at_least=1)
        elements = first_elements(self._primitive_of_looks(), n + 1)
        show(Preview(elements[:n], is_all=len(elements) <= n))

    def explain(self, stage: str | None = None) -> PlainText:
        """Return a description of the pipeline as text that prints itself.

        Parameters
        ----------
        stage
            ``"pipeline"`` as it was built, ``"simplified"`` after rewrites, ``"primitives"`` for the operations that
            run; all three if None.

        >>> Dataset.range(9).batch(2).take(2).explain("simplified")
          range(start=0, stop=9)
          take(count=4)
          batch(batch_size=2)
        """
        node = self._shown_node
        stages: dict[str, Callable[[], str]] = {
            "pipeline": lambda: display.tree(node, with_notes=True),
            "simplified": lambda: display.tree(simplify(node), with_notes=True),
            "primitives": lambda: display.primitives(self._current_primitive()),
        }
        if stage is None:
            return PlainText("\n".join(f"{name}:\n{show()}" for name, show in stages.items()))
        if stage not in stages:
            raise ArgumentError(f"explain: no stage {stage!r}; the stages are {', '.join(stages)}")
        return PlainText(stages[stage]())

    def __repr__(self) -> str:
        known = known_cardinality(self._node)
        number = cardinality.UNKNOWN if known is None else known
        elements = f"{display.cardinality(number)} elements" if number < 0 else counted(number, "element")
        spec = self._displayed_spec
        if spec is None:
            types: Any = "types are known once they are computed"
        elif spec.structure.num_leaves > _MOST_IN_A_LINE:
            return f"<Dataset of {elements}:\n{columns_table(spec)}\n{display.tree(self._node)}>"
        else:
            types = spec.packed
        return f"<Dataset of {elements}: {types}\n{display.tree(self._node)}>"

    def _repr_html_(self) -> str:
        node, what_runs = self._shown_node, partial(self.explain, "primitives")
        return dataset_page(type(self).__name__, node, self._displayed_spec, what_runs)

    # --- as a Dask collection ---

    def __dask_graph__(self) -> Any:
        check_recorded(self._node)
        return self._recorded.graph

    def __dask_keys__(self) -> list[Any]:
        return list(self._recorded.keys)

    def __dask_tokenize__(self) -> Any:
        return self._name

    def __dask_postcompute__(self) -> tuple[Any, tuple[Any, ...]]:
        return _as_list, (self._recorded.is_split, bool(self.options().writable))

    def __dask_postpersist__(self) -> tuple[Any, tuple[Any, ...]]:
        recorded = self._recorded
        # Computed elements have no failures left: they were raised or skipped.
        options = self.options()
        options.on_error = None
        rebuild = partial(_rebuilt, self._of, options)
        return rebuild, (self._name, len(recorded.keys), recorded.is_split, self._spec, self.cardinality())

    @staticmethod
    def __dask_optimize__(graph: Any, keys: Any, **kwargs: Any) -> Any:
        from dask.optimization import cull

        return cull(dict(graph), keys)[0]

    @property
    def __dask_scheduler__(self) -> Any:
        return scheduler_of(self._recorded.graph)

    def to_dask_array(self) -> Any:
        """Return a Dask array of each leaf, with one chunk for each batch.

        Raises
        ------
        UnknownLengthError
            The number of batches is unknown before the data is read, or infinite.

        >>> Dataset.range(5).batch(2).to_dask_array().chunks
        ((2, 2, 1),)
        """
        return to_dask_array(self._node, self._recorded, self._spec_by(self._caller), self._counted())

    @property
    def _displayed_spec(self) -> ElementSpec | None:
        # The spec for displays, which must not compute elements; None if it is not known yet.
        spec = self.__dict__.get("_spec") or self._known_spec()
        return None if isinstance(spec, SpecUnknown) else spec

    @property
    def _shown_node(self) -> Node:
        return row_by_row(self._node) if self.options().vectorize is False else self._node

    def to_delayed(self) -> list[Any]:
        """Return a Dask ``Delayed`` for each element, such as for each batch.

        Raises
        ------
        UnknownLengthError
            The number of elements is not known before the data is read, or endless.

        >>> [part.compute() for part in Dataset.range(5).batch(3).to_delayed()]
        [array([0, 1, 2]), array([3, 4])]
        """
        return to_delayed("to_delayed", self._node, self._recorded, self._counted())

    def to_pandas(self, *, unbatch: bool | None = None) -> Any:
        """Return the elements as a pandas ``DataFrame`` with one row each, computed in this process.

        Columns are those of `to_parquet`: a single leaf is a column ``"value"``.

        Parameters
        ----------
        unbatch
            Whether elements are batches, whose rows become rows of the result. None means False, but raises for
            elements that look like batches: made after `batch`, and all leaves have a first axis of variable length or
            of its size.

        Raises
        ------
        UnknownLengthError
            The dataset is endless.
        ArgumentError
            Elements look like batches, or a leaf cannot become a column.

        >>> ds = Dataset.from_tensor_slices({"a": [1, 2, 3], "b": [0.5, 1.5, 2.5]}).batch(2)
        >>> ds.map(lambda batch: {**batch, "c": batch["a"] * 10}).to_pandas(unbatch=True)
           a    b   c
        0  1  0.5  10
        1  2  1.5  20
        2  3  2.5  30
        """
        rows, spec = self._rows_to_write("to_pandas", unbatch, None)
        check_columns(spec)
        frame = frame_of(rows_of(rows._current_primitive(), rows._caller(), begin_pass(rows._node)[0]), spec)
        if not len(frame):
            warn_if_empty([self._node])
        return frame

    def to_dask_dataframe(self, *, unbatch: bool | None = None) -> Any:
        """Return the elements as a Dask ``DataFrame`` with one row for each, in order.

        Parameters
        ----------
        unbatch
            As in `to_pandas`; with True each batch is a partition.

        Returns
        -------
        dask.dataframe.DataFrame
            Columns are those of `to_pandas`. Partitions have about ``daskdist.bundle-bytes`` of rows, with an index
            of their own. Nothing is read before it is computed, but for what the columns need.

        Raises
        ------
        UnknownLengthError
            The number of elements is not known before the data is read, or endless.
        ArgumentError
            Elements look like batches, or have a leaf that makes no column.

        >>> ds = Dataset.range(5).map(lambda x: {"x": x, "y": x * 10})
        >>> ds.to_dask_dataframe().y.sum().compute()
        np.int64(100)
        """
        rows, spec = self._rows_to_write("to_dask_dataframe", unbatch, None)
        check_columns(spec)
        num_rows = rows_of_chunk(spec, rows.cardinality())
        is_ragged = any(None in leaf.shape for leaf in spec.leaves)
        batches = self if unbatch else rows.ragged_batch(num_rows) if is_ragged else rows.batch(num_rows)
        parts = to_delayed("to_dask_dataframe", batches._node, batches._recorded, batches._counted())
        return to_dask_dataframe(parts, spec)

    def _advice_for(self, name: str) -> str | None:
        # What to use instead of an attribute that there is not; not for names of protocols, which others look up.
        if name.startswith("_") or "_node" not in self.__dict__:
            return None
        # Libraries look up names that datasets lack, for which no function is to be called.
        spec = self._reported_spec if code_of(self._node) else known_spec(self._node)
        if spec is not None and name in columns_of_nest(spec.packed):
            return f"ds[{name!r}]"
        return OF_DATASETS.get(name)

    # --- for the functions of `daskdist.core.dataset_base` and the one below ---

    def _current_node(self) -> Node:
        self._follow_code()
        return self._node

    def _current_primitive(self) -> Primitive:
        primitive: Primitive = self._primitive
        return primitive

    def _primitive_of_looks(self) -> Primitive:
        node = self._current_node()
        apart = node.for_looks()
        return self._primitive if apart is node else plan(apart)

    def _current_spec(self) -> ElementSpec:
        return self._spec

    def _computed_rows(self) -> Iterator[Rows]:
        return rows_of(self._primitive_of_all)

    def _spec_of_leaf(self) -> DatasetSpec:
        draws = any(node.draws for node in walk(self._current_node()))
        return DatasetSpec(element=self._spec, make=self._of_rows, draws=draws)

    def _spec_by(self, make_caller: Callable[[], Caller]) -> ElementSpec:
        known = self._known_spec()
        if not isinstance(known, SpecUnknown):
            return known
        common: ElementSpec | None = None
        elements = iterate(make_caller(), self._current_primitive(), 0)
        try:
            for number, element in enumerate(good_elements(elements, _NUM_LEARNED_FROM)):
                spec = ElementSpec.of(element)
                try:
                    common = of_any_rank(common, spec) or common_or_raise(common, spec)
                except SpecUnknown:
                    raise ArgumentError(
                        f"the dataset has no spec: element {number} is {spec.packed}, and earlier elements are "
                        f"{common and common.packed}; a spec needs elements of one structure and of the same dtypes. "
                        "Convert them with map"
                    ) from None
        finally:
            elements.close()
        if common is not None:
            # A batch may be shorter or longer than the first.
            return without_empty_axes(common.with_leaves([leaf.of_any_length() for leaf in common.leaves]))
        # Passes of predictions without rows learn it.
        known = self._known_spec()
        if isinstance(known, SpecUnknown):
            raise UnknownLengthError(
                f"the dataset has no elements, so that their columns, shapes and dtypes are not known ({known}); check "
                "count() first where that may be"
            )
        return known

    # --- within ---

    @classmethod
    def _of_rows(cls, rows: Any, spec: ElementSpec | None) -> Dataset:
        return cls._of(FromRows(rows, spec))

    @classmethod
    def _of(cls, node: Node) -> Dataset:
        # The class of derived datasets: subclasses may have other arguments.
        return Dataset(node)

    def _with(self, node: Node) -> Dataset:
        return self._of(node)

    def __replace__(self, *, node: Node) -> Dataset:
        return self._of(node)

    @classmethod
    def _of_several(cls, node: Node) -> Dataset:
        for conflict in conflicts(node):
            logger.warning(conflict)
        return cls._of(node)

    @property
    def _makes_narrow(self) -> bool:
        # Whether Python numbers that functions return become 32 bits wide.
        chosen = self.options().python_numbers
        return self._is_narrow if chosen is None else chosen == "tensorflow"

    def _function(self, function: Callable[..., Any], operation: str) -> UserFunction:
        return UserFunction(function, operation, narrow=self._makes_narrow)

    def _value_of(self, by: Any, operation: str, *, is_length: bool = False) -> UserFunction:
        # The function, or that of a column.
        if isinstance(by, (str, int)) and columns_of_nest(self._spec.packed):
            by = column_function(operation, by, self._spec, is_length=is_length)
        return self._function(by, operation)

    def _nested(self, function: Callable[..., Any], operation: str) -> NestedFunction:
        return NestedFunction(function, operation, narrow=self._makes_narrow)

    def _parallel(self, operation: str, num_parallel_calls: int | None) -> Dataset:
        # `num_parallel_calls` means computing ahead in threads.
        if num_parallel_calls is None:
            return self
        if num_parallel_calls != cardinality.INFINITE:
            whole_number(operation, "num_parallel_calls", num_parallel_calls, at_least=1)
        return self.prefetch(num_parallel_calls)

    def _snapshot(
        self, path: str | os.PathLike[str], compression: str | None, operation: str, name: str | None
    ) -> Dataset:
        if self.cardinality() == cardinality.INFINITE:
            raise UnknownLengthError(f"{operation}: the dataset is endless and cannot be written; use take(n) first")
        fingerprint = self._fingerprint
        directory = f"{_absolute(path)}/{fingerprint}"
        code = code_of(self._node)
        node = Snapshot(self._node, directory, fingerprint, self._spec, _codec(compression), code=code, label=name)
        return self._with(node)

    def _counted(self) -> int:
        # The `cardinality`; also known for persisted elements.
        number = self.cardinality()
        node = upstream(self._node)
        return node.count() if number == cardinality.UNKNOWN and isinstance(node, FromGraph) else number

    def _caller(self) -> Caller:
        options = self.options()
        return local_caller(self._node, options.num_threads, num_processes=options.num_processes)

    def _written(
        self,
        operation: str,
        form: WritableFormat,
        spec: ElementSpec,
        path: str | os.PathLike[str],
        num_rows: int | None,
        overwrite: bool,
        storage_options: Mapping[str, Any] | None,
        strategy: WritingStrategy | None,
    ) -> list[str]:
        yes_or_no(operation, "overwrite", overwrite)
        if num_rows is not None:
            whole_number(operation, "rows_per_file", num_rows, at_least=1)
        files = DirectoryWriter(operation, form, _absolute(path), Storage(storage_options), overwrite)
        return self._by_calls(files, spec, num_rows, strategy)

    def _by_calls(
        self,
        target: DirectoryWriter | ZarrWriter,
        spec: ElementSpec,
        num_rows: int | None,
        strategy: WritingStrategy | None,
    ) -> list[str]:
        portions = PortionSize(in_bytes("bundle-bytes"), num_rows)
        (epoch,) = begin_pass(self._node)
        return target.write(
            spec,
            lambda write: shown(
                side_outputs_of(
                    self._current_primitive(),
                    write,
                    portions,
                    *self._writers(strategy),
                    epoch=epoch,
                    name=target.operation,
                ),
                target.operation,
                self.cardinality,
                attrgetter("num_rows"),
            ),
        )

    def _writers(self, strategy: WritingStrategy | None) -> tuple[Caller, tuple[str | None, ...], int | None]:
        # The caller, its workers, and the bytes that may be outstanding on each.
        options = self.options()
        if strategy is not None:
            return strategy._reader(self), strategy.workers, options.memory_budget_bytes
        # Use threads, from which writing benefits even if reading does not.
        caller = local_caller(self._node, options.num_threads or num_threads(), num_processes=options.num_processes)
        return caller, (None,), options.memory_budget_bytes

    def _statistics(
        self, node: Node, function: Callable[[int, Rows], PartStatistics], strategy: WritingStrategy | None
    ) -> PartStatistics:
        # Makes a pass that does not count as an iteration.
        callers = (strategy is None and client_caller()) or self._writers(strategy)
        parts = side_outputs_of(
            plan(node), function, PortionSize(in_bytes("bundle-bytes")), *callers, name="statistics"
        )
        shown_parts = shown(parts, "statistics", self.cardinality, attrgetter("num_elements"))
        statistics = functools.reduce(PartStatistics.with_other, shown_parts, PartStatistics(0, 0, {}))
        if not statistics.num_elements:
            warn_if_empty([node])
        return statistics

    def _spec_to_write(self, operation: str, strategy: WritingStrategy | None) -> ElementSpec:
        if self.cardinality() == cardinality.INFINITE:
            raise UnknownLengthError(f"{operation}: the dataset is endless; use take(n) first")
        # Writers check that each element matches.
        return self._spec_by(self._caller if strategy is None else lambda: strategy._reader(self))

    def _rows_to_write(
        self, operation: str, unbatch: bool | None, strategy: WritingStrategy | None
    ) -> tuple[Dataset, ElementSpec]:
        # A dataset with an element for each row, and its spec.
        if unbatch is not None:
            yes_or_no(operation, "unbatch", unbatch)
        rows = self.unbatch() if unbatch else self
        spec = rows._spec_to_write(operation, strategy)
        if unbatch is None and looks_like_batches(self._node, spec):
            raise ArgumentError(
                f"{operation}: elements look like batches; give unbatch=True for one row for each of their rows, or "
                "unbatch=False for one row for each batch"
            )
        return rows, spec

    def _known_spec(self) -> ElementSpec | SpecUnknown:
        try:
            spec: ElementSpec = self._node.spec
            return spec
        except SpecUnknown as unknown:
            return SpecUnknown(str(unknown))

    def _empty(self) -> Any:
        return self._spec.structure.pack([leaf.zeros() for leaf in self._spec.leaves])

    @cached_property
    def _spec(self) -> ElementSpec:
        spec = self._spec_by(self._caller)
        # Later elements may have other lengths than the first ones.
        return spec.of_any_shape() if isinstance(self._known_spec(), SpecUnknown) else spec

    def _follow_code(self) -> None:
        # Drop what was computed if a function was redefined since.
        code = code_of(self._node)
        if code != self._code:
            self._code, self._node, self._of_code = code, with_new_fingerprints(self._node), {}

    @_of_current_code
    def _primitive(self) -> Primitive:
        with elements_wanted(together=False):
            return plan(self._node)

    @_of_current_code
    def _primitive_of_all(self) -> Primitive:
        with elements_wanted(together=True):
            return plan(self._node)

    @_of_current_code
    def _fingerprint(self) -> str:
        return fingerprint(self._node)

    @_of_current_code
    def _name(self) -> str:
        return f"dataset-{tokenize(self._node)}"

    @_of_current_code
    def _recorded(self) -> Recorded:
        if self.cardinality() == cardinality.INFINITE:
            raise UnknownLengthError("an endless dataset has no finite graph; use take(n) first")
        return record(self._current_primitive(), self._name)


# The number of elements to compute for the spec if functions cannot be tried on synthetic ones.
_NUM_LEARNED_FROM: Final = 4
# The most leaves that `repr` shows in a line; more are shown in a table.
_MOST_IN_A_LINE: Final = 8
# The shuffle buffer for all elements of an unknown number.
_ALL = 2**62


def spec_by(dataset: Dataset, make_caller: Callable[[], Caller]) -> ElementSpec:
    """Return the spec; if a caller has to compute the first elements for it, with the lengths that these share."""
    return dataset._spec_by(make_caller)


def _seed(seed: int | None) -> int:
    return fresh_seed() if seed is None else seed


def _absolute(path: str | os.PathLike[str]) -> str:
    # Workers may have another working directory.
    text = os.fspath(path)
    return text if is_remote(text) else local(text)


def _codec(compression: str | None) -> str | None:
    codec(compression)
    return compression


def _nodes(operation: str, datasets: Sequence[Any], name: str | None = None) -> tuple[Node, ...]:
    if not isinstance(datasets, Sequence):
        raise ArgumentError(f"{operation}: datasets is {type(datasets).__name__}; give a list of datasets")
    for number, dataset in enumerate(datasets):
        if not isinstance(dataset, Dataset):
            raise ArgumentError(
                f"{operation}: {name or f'dataset {number}'} is {type(dataset).__name__}, not a Dataset"
            )
    if not datasets:
        raise ArgumentError(f"{operation}: there are no datasets")
    return tuple(node_of(dataset) for dataset in datasets)


def _as_list(parts: Sequence[Any], is_split: bool, is_writable: bool) -> list[Any]:
    elements = parts if is_split else parts[0]
    return list(map(writable_element, elements)) if is_writable else list(elements)


def _rebuilt(
    make: Callable[[Node], Dataset],
    options: Options,
    graph: Any,
    name: str,
    num_keys: int,
    is_split: bool,
    spec: ElementSpec,
    number: int,
    *,
    rename: dict[str, str] | None = None,
) -> Dataset:
    # Dask passes the graph after `persist`, or with renamed keys after `clone` and similar functions.
    keys = [((rename or {}).get(name, name), place) for place in range(num_keys)]
    node: Node = FromGraph(Recorded(dict(graph), keys, is_split), spec, number)
    return make(WithOptions(node, options) if any(options_set(options)) else node)
