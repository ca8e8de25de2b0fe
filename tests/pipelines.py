"""Generated pipelines, and what they come to by a reference of plain lists.

The reference evaluates a pipeline one operation after another, each a few lines on a list of elements. A batch
whose elements do not stack is a `Ragged` element, which an operation that looks at values hands on, and which
is an error for whoever is handed one in the end.
"""

from __future__ import annotations

import atexit
import functools
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st

import daskdist
from daskdist import Dataset
from daskdist.core.seed import generator
from daskdist.core.structure import Structure, call_with
from daskdist.errors import StackError
from daskdist.testing import same_elements


class Ragged:
    """An element that could not be made."""


# --- functions that pipelines call; alike for elements and for batches of them ---


def _triple(x):
    return x * 3 + 1


def _halve(x):
    return x / 2


def _pair(x):
    return x, x + 1


def _listed(x):
    return [x, x * 2]


def _named(x):
    return {"a": x, "n": (x % 3, x)}


def _constant(x):
    return x, 7, 0.5


def _first(a, *rest):
    return a


def _swap(a, *rest):
    return (*rest, a)


def _by_name(d):
    return d["a"]


def _renamed(d):
    return {"z": d["a"], "a": d["a"] * 2}


def _count_up(x):
    # Elements of different shapes: they stack where batches happen to be of one.
    return np.arange(np.sum(x) % 3)


def _grow(x):
    # Elements of shapes that change now and then, as files written over time do.
    return np.zeros(int(np.sum(x)) // 3 % 4, np.float32)


def _retype(x):
    return np.float32(np.sum(x)) if np.sum(x) < 6 else np.float64(np.sum(x))


def _leaf(args):
    leaves, _ = Structure.flatten(args)
    return leaves[0]


def _is_not_third(*args):
    return np.sum(_leaf(args)) % 3 != 0


def _is_small(*args):
    return bool(np.sum(_leaf(args)) < 20)


def _is_nothing(*args):
    return False


# What a function takes -> the function and what it gives.
MAPS = {
    "lone": [
        (_triple, "lone"),
        (_halve, "lone"),
        (_pair, "tuple"),
        (_listed, "tuple"),
        (_named, "dict"),
        (_constant, "constants"),
        (_count_up, "lone"),
    ],
    "tuple": [(_first, "lone"), (_swap, "tuple")],
    # Of one number each: no batch any more once mapped after batching.
    "constants": [(_first, "lone")],
    "dict": [(_by_name, "lone"), (_renamed, "renamed")],
    "renamed": [(_by_name, "lone")],
}
# Of those, the ones whose result has one shape and dtype, so that a spec can be told before there are values.
FIXED = {kind: [each for each in maps if each[0] is not _count_up] for kind, maps in MAPS.items()}
FILTERS = [_is_not_third, _is_small, _is_nothing]


# --- files ---

# Rows of each file, and of its row groups; the labels count through.
_FILES = ((7, 3), (5, 5), (0, 1), (4, 1))


@functools.cache
def parquet_files() -> tuple[str, ...]:
    """Small real files, written once."""
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
    """Where elements come from: a name, arguments, and what functions take of them."""

    name: str
    args: tuple[Any, ...]
    kind: str

    def dataset(self) -> Dataset:
        if self.name == "range":
            return Dataset.range(*self.args)
        if self.name == "slices":
            return Dataset.from_tensor_slices(self._arrays())
        numbers, columns = self.args
        paths = [parquet_files()[number] for number in numbers]
        return daskdist.read_parquet(paths, columns=_COLUMNS[columns])

    def elements(self) -> list[Any]:
        if self.name == "range":
            return list(map(np.int64, range(*self.args)))
        if self.name == "slices":
            leaves, structure = Structure.flatten(self._arrays())
            return [structure.pack(row) for row in zip(*leaves, strict=True)]
        numbers, columns = self.args
        rows = [row for number in numbers for row in _file_rows(number)]
        if columns == "dict":
            return [{"a": a, "f": f, "g": g} for a, f, g in rows]
        return [(np.array([f, g]), a) for a, f, g in rows]

    def _arrays(self) -> Any:
        (num_rows,) = self.args
        a = np.arange(num_rows)
        b = np.arange(2.0 * num_rows, dtype=np.float32).reshape(num_rows, 2)
        return {"a": a, "n": (b, a % 2 == 0)} if self.kind == "dict" else (b, a)

    def __repr__(self) -> str:
        return f"{self.name}{self.args}"


_COLUMNS: dict[str, Any] = {"dict": None, "tuple": (["f", "g"], "a")}


# --- pipelines ---


@dataclass(frozen=True)
class Pipeline:
    """A source and the operations on it, each the name of a method and its arguments."""

    source: Source
    operations: tuple[tuple[str, tuple[Any, ...]], ...]
    split_bytes: int = 2**24
    window_bytes: int = 2**28

    def dataset(self) -> Dataset:
        ds = self.source.dataset()
        for name, args in self.operations:
            ds = getattr(ds, name)(*args)
        return ds

    def settings(self) -> Any:
        """The block sizes and the window to run it with."""
        return dask.config.set({"daskdist.split-bytes": self.split_bytes, "daskdist.window-bytes": self.window_bytes})

    def reference(self, iteration: int = 0) -> Outcome:
        """What it comes to."""
        found = _Reference(self.source.elements())
        return Outcome(found.after(self.operations, (iteration,)), found.met_ragged)

    def then(self, name: str, *args: Any) -> Pipeline:
        return Pipeline(self.source, (*self.operations, (name, args)), self.split_bytes, self.window_bytes)

    def __repr__(self) -> str:
        calls = [
            f"{name}({', '.join(getattr(arg, '__name__', repr(arg)) for arg in args)})"
            for name, args in self.operations
        ]
        sizes = f"  # split-bytes {self.split_bytes}, window-bytes {self.window_bytes}"
        return ".".join([repr(self.source), *calls]) + sizes


@dataclass(frozen=True)
class Outcome:
    """What a pipeline comes to; whether elements that do not stack met somewhere on the way."""

    elements: list[Any]
    met_ragged: bool

    @property
    def must_fail(self) -> bool:
        return any(isinstance(element, Ragged) for element in self.elements)

    def check(self, run: Any, what: str) -> None:
        """That ``run()`` gives these elements, or the same error."""
        try:
            given = list(run())
        except StackError:
            # A batch nobody asked for in the end may be an error all the same: it was on the way.
            assert self.met_ragged, f"{what}: everything stacks, and it raised"
            return
        assert not self.must_fail, f"{what}: there are elements that do not stack, and it gave {given}"
        same_elements(given, self.elements, what)


class _Reference:
    def __init__(self, elements: list[Any]) -> None:
        self.elements = elements
        self.met_ragged = False

    def after(self, operations: Any, epoch: tuple[int, ...]) -> list[Any]:
        if not operations:
            return self.elements
        *before, (name, args) = operations
        if name == "repeat":
            return [each for number in range(args[0]) for each in self.after(before, (*epoch, number))]
        elements = self.after(before, epoch)
        if name == "shuffle":
            return shuffled(elements, *args, node=len(operations), epoch=epoch)
        return getattr(self, f"_{name}")(elements, *args)

    def _map(self, elements, function):
        return [each if isinstance(each, Ragged) else _mapped(function, each) for each in elements]

    def _filter(self, elements, predicate):
        return [each for each in elements if isinstance(each, Ragged) or call_with(predicate, each)]

    def _batch(self, elements, size, drop_remainder=False):
        groups = [elements[start : start + size] for start in range(0, len(elements), size)]
        return [self._stacked(group) for group in groups if len(group) == size or not drop_remainder]

    def _stacked(self, group):
        if not any(isinstance(each, Ragged) for each in group):
            columns = list(zip(*[Structure.flatten(each)[0] for each in group], strict=True))
            if all(len({(leaf.shape, leaf.dtype) for leaf in column}) == 1 for column in columns):
                return Structure.flatten(group[0])[1].pack([np.stack(column) for column in columns])
        self.met_ragged = True
        return Ragged()

    def _take(self, elements, count):
        return elements if count < 0 else elements[:count]

    def _skip(self, elements, count):
        return [] if count < 0 else elements[count:]

    def _prefetch(self, elements, buffer_size):
        return elements


def _mapped(function, element):
    result = call_with(function, element)
    leaves, structure = Structure.flatten(tuple(result) if type(result) is list else result)
    return structure.pack(leaves)


def shuffled(elements, buffer_size, seed, reshuffle=True, *, node, epoch):
    """The order by drawing one slot at a time."""
    rng = generator(seed, node, epoch if reshuffle else ())
    buffer, rest = list(elements[:buffer_size]), elements[buffer_size:]
    output = []
    for element in rest:
        slot = rng.integers(len(buffer))
        output.append(buffer[slot])
        buffer[slot] = element
    return output + [buffer[place] for place in rng.permutation(len(buffer))]


# --- strategies ---


@st.composite
def sources(draw: Any) -> Source:
    name = draw(st.sampled_from(["range", "slices", "parquet"]))
    if name == "range":
        start, stop = draw(st.integers(-3, 5)), draw(st.integers(0, 45))
        step = draw(st.sampled_from([1, 1, 2, 5]))
        return Source(name, (start, stop, step), "lone")
    kind = draw(st.sampled_from(["tuple", "dict"]))
    if name == "slices":
        return Source(name, (draw(st.integers(0, 25)),), kind)
    numbers = draw(st.lists(st.integers(0, len(_FILES) - 1), min_size=1, max_size=4, unique=True))
    return Source(name, (tuple(numbers), kind), kind)


_counts = st.integers(-1, 12)
_plain = st.one_of(
    st.tuples(st.just("batch"), st.tuples(st.integers(1, 6), st.booleans())),
    st.tuples(st.just("shuffle"), st.tuples(st.integers(1, 30), st.integers(0, 3), st.booleans())),
    st.tuples(st.just("repeat"), st.tuples(st.integers(0, 3))),
    st.tuples(st.just("take"), st.tuples(_counts)),
    st.tuples(st.just("skip"), st.tuples(_counts)),
    st.tuples(st.just("prefetch"), st.tuples(st.integers(-1, 2))),
    st.tuples(st.just("filter"), st.tuples(st.sampled_from(FILTERS))),
)


@st.composite
def pipelines(draw: Any, max_operations: int = 6, maps: Any = MAPS) -> Pipeline:
    """Pipelines of any operations."""
    source = draw(sources())
    kind, operations = source.kind, []
    for _ in range(draw(st.integers(0, max_operations))):
        if draw(st.integers(0, 2)) == 0:
            function, kind = draw(st.sampled_from(maps[kind]))
            operations.append(("map", (function,)))
        else:
            operations.append(draw(_plain))
    return Pipeline(
        source,
        tuple(operations),
        draw(st.sampled_from([8, 40, 2**24])),
        draw(st.sampled_from([1, 200, 2**28])),
    )


@st.composite
def uneven(draw: Any) -> Pipeline:
    """Pipelines of elements whose shapes or dtypes differ, in blocks of a few rows."""
    source = Source("range", (0, draw(st.integers(0, 30)), 1), "lone")
    first = ("map", (draw(st.sampled_from([_count_up, _grow, _retype])),))
    rest = draw(st.lists(_plain, max_size=4))
    return Pipeline(source, (first, *rest), draw(st.sampled_from([8, 24, 64])), 2**28)


@st.composite
def batched(draw: Any, max_operations: int = 4) -> Pipeline:
    """Pipelines whose elements have rows, as replicas need them."""
    pipeline = draw(pipelines(max_operations, FIXED)).then("batch", draw(st.integers(1, 7)), draw(st.booleans()))
    for _ in range(draw(st.integers(0, 2))):
        name, args = draw(_plain)
        pipeline = pipeline.then(name, *args)
    return pipeline
