"""Generated pipelines: sources, functions that operations call, and rules for the order of operations.

`plain_lists` computes the expected elements of each.
"""

from __future__ import annotations

import atexit
import functools
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import dask
import functions as f
import numpy as np
import plain_lists
import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st

import daskdist
from daskdist import Dataset, TensorSpec
from daskdist.core.randomness.seed import generator
from daskdist.core.structure import Structure


@dataclass(frozen=True)
class Kind:
    """The known facts about the elements while a pipeline is generated.

    Parameters
    ----------
    name
        The name of the arguments that functions of the elements take.
    num_axes
        The number of leading axes whose lengths are equal in all leaves.
    """

    name: str
    num_axes: int = 0


# Kind of the argument -> functions, each with the kind of its results, and their number of axes if it changes.
MAPS: dict[str, list[tuple[Any, ...]]] = {
    "lone": [
        (f.triple, "lone"),
        (f.halve, "lone"),
        (f.pair, "tuple"),
        (f.listed, "tuple"),
        (f.named, "dict"),
        (f.constant, "constants", 0),
        (f.count_up, "uneven", 1),
    ],
    "tuple": [(f.first, "lone"), (f.swap, "tuple")],
    # The result is one number, so a batch is no batch any more afterwards.
    "constants": [(f.first, "any", 0)],
    "dict": [(f.by_name, "lone"), (f.renamed, "renamed")],
    "renamed": [(f.by_name, "lone")],
}
# Functions of elements of any kind.
MAPS_OF_ANY = [
    (f.total, "lone", 0),
    (f.word, "any", 0),
    (f.some_bytes, "any", 0),
    (f.day, "any", 0),
    (f.turned, "any", 0),
]
# Kinds with one spec, which is known without values.
_FIXED = ("lone", "tuple", "constants", "dict", "renamed", "any")
_OF_NUMBERS = ("lone", "tuple", "constants", "dict", "renamed")


# --- files ---

# The number of rows of each file and of its row groups; labels are numbered through all files.
_FILES = ((7, 3), (5, 5), (0, 1), (4, 1))


@functools.cache
def parquet_files() -> tuple[str, ...]:
    """Return the paths of small files, which are written once."""
    directory = tempfile.TemporaryDirectory()
    atexit.register(directory.cleanup)
    paths = []
    first = 0
    for number, (num_rows, group) in enumerate(_FILES):
        path = Path(directory.name, f"part-{number}.parquet")
        pq.write_table(_table(first, num_rows), path, row_group_size=group)
        first += num_rows
        paths.append(str(path))
    return tuple(paths)


def _table(first: int, num_rows: int) -> pa.Table:
    label = np.arange(first, first + num_rows)
    return pa.table({"a": label, "f": label.astype("float32") / 4, "g": (label + 1).astype("float32")})


def _file_rows(number: int) -> list[tuple[Any, Any, Any]]:
    first = sum(rows for rows, _ in _FILES[:number])
    columns = _table(first, _FILES[number][0]).to_pydict()
    return [
        (np.int64(a), np.float32(f), np.float32(g))
        for a, f, g in zip(columns["a"], columns["f"], columns["g"], strict=True)
    ]


# --- sources ---


@dataclass(frozen=True)
class Source:
    """A source of elements: a name, its arguments, and the arguments of functions of its elements."""

    name: str
    args: tuple[Any, ...]
    kind: str

    def dataset(self) -> Dataset:
        return getattr(self, f"_{self.name}")(*self.args)

    def elements(self, epoch: tuple[int, ...] = (0,)) -> list[Any]:
        return getattr(self, f"_{self.name}_elements")(*self.args, *((epoch,) if self.name == "random" else ()))

    def _range(self, start, stop, step, dtype):
        return Dataset.range(start, stop, step, output_type=dtype)

    def _range_elements(self, start, stop, step, dtype):
        return [np.dtype(dtype).type(number) for number in range(start, stop, step)]

    def _counter(self, start, step, number):
        return Dataset.counter(start, step).take(number)

    def _counter_elements(self, start, step, number):
        return [np.int64(start + step * k) for k in range(number)]

    def _random(self, seed, rerandomize, number):
        return Dataset.random(seed, rerandomize).take(number)

    def _random_elements(self, seed, rerandomize, number, epoch):
        rng = generator(seed, 0, (*(epoch if rerandomize else ()), 0))
        return list(rng.integers(2**32, size=number))

    def _generator(self, number):
        return Dataset.from_generator(_generated, TensorSpec((), np.int64), (number,))

    def _generator_elements(self, number):
        return [np.int64(value) for value in _generated(number)]

    def _slices(self, num_rows):
        return Dataset.from_tensor_slices(self._arrays(num_rows))

    def _slices_elements(self, num_rows):
        leaves, structure = Structure.flatten(self._arrays(num_rows))
        return [structure.pack(row) for row in zip(*leaves, strict=True)]

    def _parquet(self, numbers, columns):
        return daskdist.read_parquet([parquet_files()[number] for number in numbers], columns=_COLUMNS[columns])

    def _parquet_elements(self, numbers, columns):
        rows = [row for number in numbers for row in _file_rows(number)]
        if columns == "dict":
            return [{"a": a, "f": f, "g": g} for a, f, g in rows]
        return [(np.array([f, g]), a) for a, f, g in rows]

    def _arrays(self, num_rows: int) -> Any:
        a = np.arange(num_rows)
        b = np.arange(2.0 * num_rows, dtype=np.float32).reshape(num_rows, 2)
        if self.kind == "uneven":
            lengths = a % 4
            return daskdist.Ragged(np.arange(lengths.sum()), np.concatenate([[0], np.cumsum(lengths)]))
        return {"a": a, "n": (b, a % 2 == 0)} if self.kind == "dict" else (b, a)

    def __repr__(self) -> str:
        return f"{self.name}{self.args}"


_COLUMNS: dict[str, Any] = {"dict": None, "tuple": (["f", "g"], "a")}


def _generated(number):
    for value in range(number):
        yield value * 2


# --- pipelines ---


@dataclass(frozen=True)
class Pipeline:
    """A source and the operations on it, each the name of a method and its arguments.

    Operations of several datasets have the other pipelines as their first argument.
    """

    source: Source
    operations: tuple[tuple[str, tuple[Any, ...]], ...] = ()
    split_bytes: int = 2**24
    window_bytes: int = 2**28

    def dataset(self) -> Dataset:
        ds = self.source.dataset()
        for name, args in self.operations:
            ds = _COMBINED[name](ds, *args) if name in _COMBINED else getattr(ds, name)(*args)
        return ds

    def settings(self) -> Any:
        """Set the block sizes and the window in a ``with`` block."""
        return dask.config.set({"daskdist.split-bytes": self.split_bytes, "daskdist.window-bytes": self.window_bytes})

    def reference(self, iteration: int = 0) -> plain_lists.Outcome:
        """Return the expected elements."""
        return plain_lists.outcome(self, iteration)

    def then(self, name: str, *args: Any) -> Pipeline:
        return replace(self, operations=(*self.operations, (name, args)))

    def names(self) -> set[str]:
        """Return the names of the source and the operations, also those of other pipelines among its inputs."""
        others = [other for name, args in self.operations if name in _COMBINED for other in args[0]]
        return {self.source.name, *(name for name, _ in self.operations)}.union(*(other.names() for other in others))

    def __repr__(self) -> str:
        calls = [
            f"{name}({', '.join(getattr(arg, '__name__', repr(arg)) for arg in args)})"
            for name, args in self.operations
        ]
        sizes = f"  # split-bytes {self.split_bytes}, window-bytes {self.window_bytes}"
        return ".".join([repr(self.source), *calls]) + sizes


def _zip(ds, others, form):
    (other,) = (value.dataset() for value in others)
    return Dataset.zip({"b": ds, "a": other}) if form == "dict" else Dataset.zip(ds, other)


def _concatenate(ds, others):
    (other,) = others
    return ds.concatenate(other.dataset())


def _choose(ds, others, choices, stop):
    numbers = Dataset.from_tensor_slices(np.array(choices, np.int64))
    return Dataset.choose_from_datasets([ds, *(other.dataset() for other in others)], numbers, stop)


def _sample(ds, others, weights, seed, stop, rerandomize):
    datasets = [ds, *(other.dataset() for other in others)]
    return Dataset.sample_from_datasets(datasets, weights, seed, stop, rerandomize)


_COMBINED = {"zip": _zip, "concatenate": _concatenate, "choose": _choose, "sample": _sample}


# --- functions that return datasets for elements, and their expected elements ---


@dataclass(frozen=True)
class Inner:
    """A function that returns a pipeline for each element, chosen by the element's number."""

    make: Any

    def __call__(self, *element):
        return self.make(f.number(*element)).dataset()

    def elements(self, reference, element):
        return reference.of(self.make(f.number(element)), (0,))

    def __repr__(self) -> str:
        return self.make.__name__


def _few(number):
    return Pipeline(Source("range", (0, number % 4, 1, "int64"), "lone"))


def _few_shuffled(number):
    return _few(number).then("shuffle", 3, 1, True).then("repeat", 2)


def _few_batched(number):
    return _few(number).then("batch", 2, False)


def _of_a_file(number):
    return Pipeline(Source("parquet", ((number % len(_FILES),), "dict"), "dict"))


def _of_a_generator(number):
    return Pipeline(Source("generator", (number % 4,), "lone"))


def _of_a_generator_batched(number):
    return _of_a_generator(number).then("batch", 2, True)


# Functions that return datasets, and the kind of the datasets' elements. Some datasets are in memory and are read where
# the outer elements are; others are not.
_INNERS = [
    (Inner(_few), Kind("lone")),
    (Inner(_few_shuffled), Kind("lone")),
    (Inner(_few_batched), Kind("lone", 1)),
    (Inner(_of_a_file), Kind("dict")),
    (Inner(_of_a_generator), Kind("lone")),
    (Inner(_of_a_generator_batched), Kind("lone", 1)),
]


class Whole:
    """One batch of all elements of a window, for windows with a dataset per leaf."""

    def __call__(self, *windows):
        return Dataset.zip(windows if len(windows) > 1 else windows[0]).batch(100)

    def elements(self, reference, windows):
        leaves, structure = Structure.flatten(windows)
        return reference._batch([structure.pack(row) for row in zip(*leaves, strict=True)], 100)

    def __repr__(self) -> str:
        return "whole"


@dataclass(frozen=True)
class Reduced:
    """The result of an operation on a group."""

    name: str
    argument: int

    def __call__(self, key, window):
        return getattr(window, self.name)(self.argument)

    def elements(self, reference, key, group):
        return getattr(reference, f"_{self.name}")(group, self.argument)


# --- strategies ---


@st.composite
def sources(draw: Any, fixed: bool = False) -> Source:
    name = draw(st.sampled_from(["range", "slices", "parquet", "parquet", "other"]))
    if name == "range":
        start, stop = draw(st.integers(-3, 5)), draw(st.integers(0, 45))
        step = draw(st.sampled_from([1, 1, 2, 5]))
        return Source(name, (start, stop, step, draw(st.sampled_from(["int64", "int64", "int32", "float32"]))), "lone")
    if name == "other":
        name = draw(st.sampled_from(["counter", "random", "generator"]))
        first = {"counter": (draw(st.integers(-5, 5)), 3), "random": (draw(st.integers(0, 3)), draw(st.booleans()))}
        return Source(name, (*first.get(name, ()), draw(st.integers(0, 20))), "lone")
    kind = draw(st.sampled_from(["tuple", "dict"]))
    if name == "slices":
        kind = kind if fixed else draw(st.sampled_from([kind, "uneven"]))
        return Source(name, (draw(st.integers(0, 25)),), kind)
    numbers = draw(st.lists(st.integers(0, len(_FILES) - 1), min_size=1, max_size=4, unique=True))
    return Source(name, (tuple(numbers), kind), kind)


_counts = st.integers(-1, 12)
# Operations that do not look at elements: they may follow any operation and keep the kind of elements.
_ARRANGING = {
    "shuffle": st.tuples(st.integers(1, 30), st.integers(0, 3), st.booleans()),
    "repeat": st.tuples(st.integers(0, 3)),
    "take": st.tuples(_counts),
    "skip": st.tuples(_counts),
    "prefetch": st.tuples(st.integers(-1, 2)),
    "shard": st.integers(1, 4).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n - 1))),
}
_batch = st.tuples(st.integers(1, 6), st.booleans())
_plain = st.one_of(
    st.tuples(st.just("batch"), _batch),
    st.tuples(st.just("filter"), st.tuples(st.sampled_from([f.is_not_third, f.is_small, f.is_nothing]))),
    *(st.tuples(st.just(name), args) for name, args in _ARRANGING.items()),
)
# The number of elements may differ between passes of these operations, so it cannot be asserted after them.
_DRAWN = {"random", "shuffle", "sample", "rejection_resample"}


@dataclass(frozen=True)
class Growing:
    """An unfinished pipeline and the kind of its elements."""

    pipeline: Pipeline
    kind: Kind

    def then(self, name: str, *args: Any, kind: str | None = None, num_axes: int | None = None) -> Growing:
        num_axes = self.kind.num_axes if num_axes is None else num_axes
        return Growing(self.pipeline.then(name, *args), Kind(kind or self.kind.name, num_axes))


def _grow_map(draw, made, fixed):
    maps = [value for value in MAPS.get(made.kind.name, []) if not fixed or value[1] in _FIXED]
    function, kind, *num_axes = draw(st.sampled_from([*maps * 2, *MAPS_OF_ANY]))
    return made.then("map", function, kind=kind, num_axes=num_axes[0] if num_axes else None)


def _grow_arranging(draw, made, fixed):
    name = draw(st.sampled_from(sorted(_ARRANGING)))
    return made.then(name, *draw(_ARRANGING[name]))


def _grow_filter(draw, made, fixed):
    predicates = [f.is_odd, f.is_below]
    if made.kind.name in _OF_NUMBERS:
        predicates += [f.is_not_third, f.is_small, f.is_nothing]
    return made.then(draw(st.sampled_from(["filter", "filter", "take_while"])), draw(st.sampled_from(predicates)))


def _grow_unique(draw, made, fixed):
    return None if made.kind.name == "windows" else made.then("unique")


def _grow_enumerate(draw, made, fixed):
    return made.then("enumerate", draw(st.integers(-2, 5)), kind=_nest_of(made), num_axes=0)


def _grow_scan(draw, made, fixed):
    return made.then("scan", (np.int64(0), np.int64(5)), f.running, kind="lone", num_axes=0)


def _grow_resample(draw, made, fixed):
    target = draw(st.sampled_from([(0.5, 0.5), (1.0, 0.0), (0.2, 0.8)]))
    initial = draw(st.sampled_from([None, (0.5, 0.5), (0.3, 0.7)]))
    seed = draw(st.integers(0, 3))
    return made.then("rejection_resample", f.class_of, target, initial, seed, kind=_nest_of(made), num_axes=0)


def _nest_of(made):
    if made.kind.name == "windows":
        return "windows"
    return "nest" if made.kind.name in (*_FIXED, "nest") else "uneven nest"


def _grow_fragile(draw, made, fixed):
    return made.then("map", f.fragile).then("ignore_errors")


def _grow_cardinality(draw, made, fixed):
    if made.pipeline.names() & _DRAWN:
        return None
    return made.then("assert_cardinality", len(made.pipeline.reference().elements))


def _grow_batch(draw, made, fixed):
    if made.kind.name in ("windows", "ragged", "uneven nest") and draw(st.integers(0, 3)):
        # These elements do not stack: generate only a few batches of them.
        return None
    return made.then("batch", *draw(_batch), num_axes=made.kind.num_axes + 1)


def _grow_padded_batch(draw, made, fixed):
    if made.kind.name not in (*_FIXED, "nest", "uneven"):
        return None
    size, drop = draw(_batch)
    kind = "lone" if made.kind.name == "uneven" else None
    return made.then("padded_batch", size, None, None, drop, kind=kind, num_axes=made.kind.num_axes + 1)


def _grow_ragged_batch(draw, made, fixed):
    if made.kind != Kind("uneven", 1):
        return None
    return made.then("ragged_batch", *draw(_batch), kind="ragged", num_axes=2)


def _grow_bucket(draw, made, fixed):
    if made.kind != Kind("uneven", 1):
        return None
    # If batches are padded to a boundary, no element may be longer than the last boundary.
    to_boundary = draw(st.booleans())
    drop = draw(st.booleans())
    boundaries = draw(st.sampled_from([[1, 5], [4]] if to_boundary else [[2], [1, 3], []]))
    sizes = draw(st.lists(st.integers(1, 4), min_size=len(boundaries) + 1, max_size=len(boundaries) + 1))
    value = draw(st.sampled_from([None, -1]))
    arguments = (f.length_of, boundaries, sizes, None, value, to_boundary, False, drop)
    return made.then("bucket_by_sequence_length", *arguments, kind="lone", num_axes=2)


def _grow_batch_by_size(draw, made, fixed):
    if made.kind != Kind("uneven", 1):
        return None
    buffer_size = draw(st.sampled_from([None, 1, 4, 9]))
    round_size = 1 if buffer_size is None else draw(st.sampled_from([1, 2, 3]))
    ragged, budget = draw(st.booleans()), draw(st.integers(9, 30))
    value = None if ragged else draw(st.sampled_from([None, -1]))
    arguments = (budget, f.length_of, buffer_size, value, ragged, round_size)
    return made.then("batch_by_size", *arguments, kind="ragged" if ragged else "lone", num_axes=2)


def _grow_unbatch(draw, made, fixed):
    if made.kind.num_axes < 1:
        return None
    kind = {"ragged": "uneven", "uneven": "lone" if made.kind.num_axes == 1 else "uneven"}.get(made.kind.name)
    return made.then("unbatch", kind=kind, num_axes=made.kind.num_axes - 1)


def _grow_rebatch(draw, made, fixed):
    if made.kind.num_axes < 1 or made.kind.name == "ragged":
        return None
    # The shape of a batch without rows is undefined if rows have different shapes, as they may after these operations.
    others = {"batch_by_size", "bucket_by_sequence_length", "concatenate", "padded_batch"}
    is_one_shape = made.kind.name in _FIXED and all(name not in others for name, _ in made.pipeline.operations)
    sizes = draw(st.sampled_from([1, 2, 3, 5, [2, 1], *([[3, 0, 1], [0, 2]] if is_one_shape else [])]))
    kind = "lone" if made.kind == Kind("uneven", 1) else None
    return made.then("rebatch", sizes, draw(st.booleans()), kind=kind)


def _grow_nested(draw, made, fixed):
    inner, kind = draw(st.sampled_from(_INNERS))
    name, args = "flat_map", ()
    if draw(st.booleans()):
        name, args = "interleave", (draw(st.sampled_from([None, 1, 2, 3, 7])), draw(st.integers(1, 4)))
    return made.then(name, inner, *args, kind=kind.name, num_axes=kind.num_axes)


def _grow_window(draw, made, fixed):
    if made.kind.name in ("windows", "ragged", "uneven nest"):
        return None
    size, shift, stride = draw(st.integers(1, 4)), draw(st.sampled_from([None, 1, 2, 5])), draw(st.integers(1, 3))
    if made.kind.name != "uneven" and draw(st.booleans()):
        arguments = (size, shift or 1, stride, draw(st.booleans()))
        return made.then("sliding_window", *arguments, num_axes=made.kind.num_axes + 1)
    windows = made.then("window", size, shift, stride, draw(st.booleans()), kind="windows", num_axes=0)
    what = draw(st.sampled_from(["whole", "number"] if fixed else ["whole", "number", "windows"]))
    if what == "whole" and made.kind.name != "uneven":
        return windows.then("flat_map", Whole(), kind=made.kind.name, num_axes=made.kind.num_axes + 1)
    return windows if what == "windows" else windows.then("map", f.total, kind="lone")


def _grow_groups(draw, made, fixed):
    if made.kind.name in ("windows", "ragged", "uneven nest"):
        return None
    size = draw(st.sampled_from([(1,), (3,), (4,), (None, f.size_of)]))
    if made.kind.name != "uneven" and draw(st.booleans()):
        reduced, num_axes = Reduced("batch", 3), made.kind.num_axes + 1
    else:
        reduced, num_axes = Reduced("take", 2), made.kind.num_axes
    return made.then("group_by_window", f.key_of, reduced, *size, num_axes=num_axes)


def _grow_zip(draw, made, fixed):
    other = Growing(Pipeline(draw(sources(fixed))), Kind("any"))
    for _ in range(draw(st.integers(0, 1))):
        other = _grow_arranging(draw, other, fixed)
    other = other.pipeline if draw(st.booleans()) else _grow_arranging(draw, made, fixed).pipeline
    form = draw(st.sampled_from(["tuple", "dict"]))
    kind = "uneven nest" if other.source.kind == "uneven" and _nest_of(made) == "nest" else _nest_of(made)
    return made.then("zip", (other,), form, kind=kind, num_axes=0)


def _grow_mixed(draw, made, fixed):
    # Other datasets of the same kind: variants of the pipeline itself.
    name = draw(st.sampled_from(["concatenate", "choose", "sample"]))
    num_others = 1 if name == "concatenate" else draw(st.integers(1, 2))
    others = tuple(_grow_arranging(draw, made, fixed).pipeline for _ in range(num_others))
    numbers = st.integers(0, num_others)
    arguments = {
        "concatenate": st.just(()),
        "choose": st.tuples(st.lists(numbers, max_size=30).map(tuple), st.booleans()),
        "sample": st.tuples(
            st.sampled_from([(1, 3, 2), (5, 1, 0.5), (0, 2, 1)]).map(lambda w: w[: num_others + 1]),
            st.integers(0, 3),
            st.booleans(),
            st.booleans(),
        ),
    }
    return made.then(name, others, *draw(arguments[name]))


def _grow_unlike(draw, made, fixed):
    # Concatenated batches of different lengths; one of them may be the result of a function.
    if made.kind.name not in (*_FIXED, "nest"):
        return None
    second = made.then(draw(st.sampled_from(["batch", "padded_batch"])), draw(st.integers(1, 5))).pipeline
    first = made.then("batch", *draw(_batch), num_axes=made.kind.num_axes + 1)
    return first.then("concatenate", (second,))


_GROW = [
    *[_grow_map] * 3,
    *[_grow_arranging] * 4,
    *[_grow_batch] * 2,
    *[_grow_nested] * 2,
    _grow_filter,
    _grow_unique,
    _grow_enumerate,
    _grow_scan,
    _grow_resample,
    _grow_fragile,
    _grow_cardinality,
    _grow_padded_batch,
    _grow_window,
    _grow_groups,
    _grow_zip,
    _grow_mixed,
    _grow_unlike,
]
# Operations for few kinds of elements.
_OF_UNEVEN = [_grow_ragged_batch, _grow_bucket, _grow_batch_by_size, _grow_padded_batch]
_OF_ROWS = [_grow_unbatch, _grow_rebatch]


def _extended(draw, made, fixed):
    rules = [
        *_GROW,
        *(_OF_UNEVEN * 4 if made.kind == Kind("uneven", 1) else ()),
        *(_OF_ROWS * 2 if made.kind.num_axes else ()),
    ]
    return draw(st.sampled_from(rules))(draw, made, fixed) or made


@st.composite
def pipelines(draw: Any, max_operations: int = 6, fixed: bool = False) -> Pipeline:
    """Draw pipelines of any operations; with ``fixed``, all elements have the same shapes and dtypes."""
    source = draw(sources(fixed))
    sizes = draw(st.sampled_from([8, 40, 2**24])), draw(st.sampled_from([1, 200, 2**28]))
    made = Growing(Pipeline(source, (), *sizes), Kind(source.kind, 1 if source.kind == "uneven" else 0))
    for _ in range(draw(st.integers(0, max_operations))):
        made = _extended(draw, made, fixed)
    return made.pipeline


@st.composite
def uneven(draw: Any) -> Pipeline:
    """Draw pipelines of elements with different shapes or dtypes, in blocks of a few rows."""
    source = Source("range", (0, draw(st.integers(0, 30)), 1, "int64"), "lone")
    first = ("map", (draw(st.sampled_from([f.count_up, f.grow, f.retype])),))
    rest = draw(st.lists(_plain, max_size=4))
    return Pipeline(source, (first, *rest), draw(st.sampled_from([8, 24, 64])), 2**28)


@st.composite
def batched(draw: Any, max_operations: int = 4) -> Pipeline:
    """Draw pipelines whose elements have rows, as distributed datasets need."""
    pipeline = draw(pipelines(max_operations, fixed=True)).then("batch", draw(st.integers(1, 7)), draw(st.booleans()))
    for _ in range(draw(st.integers(0, 2))):
        name = draw(st.sampled_from([*sorted(_ARRANGING), "batch"]))
        pipeline = pipeline.then(name, *draw(_batch if name == "batch" else _ARRANGING[name]))
    return pipeline
