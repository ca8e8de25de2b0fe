"""Pieces of a pipeline that is cut anywhere have the same elements in order as the whole."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines import pipelines

import daskdist
from daskdist import Dataset, Options
from daskdist.core.dataset_base import node_of
from daskdist.core.node import lower
from daskdist.errors import StackError
from daskdist.execute.callers.choose import local_caller, using
from daskdist.execute.callers.synchronous import Synchronous
from daskdist.execute.stream.local_iterator import iterate
from daskdist.passes.fuse import fuse
from daskdist.passes.independent_pieces import pieces_of
from daskdist.passes.simplify import simplify
from daskdist.testing import same_elements


def elements(node):
    """Return the elements of a pipeline."""
    return list(iterate(local_caller(node), fuse(lower(simplify(node))), 0))


def cut_in(pieces, num_pieces):
    """Return the elements of so many pieces of about the same size, in order."""
    bounds = [pieces.num_units * place // num_pieces for place in range(num_pieces + 1)]
    return [element for first, stop in itertools.pairwise(bounds) for element in elements(pieces.cut(first, stop))]


@given(pipelines(), st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_pieces_of_generated_pipelines(pipeline, num_pieces):
    with pipeline.settings(), using(Synchronous):
        node = node_of(pipeline.dataset())
        pieces = pieces_of(node)
        if pieces is None or pieces.num_units < 0:
            return
        try:
            whole = elements(node)
        except StackError:
            return
        same_elements(cut_in(pieces, num_pieces), whole)
        if pieces.is_exact:
            assert pieces.num_units == len(whole)


@pytest.mark.parametrize(
    ("build", "num_units", "grain", "is_exact"),
    [
        (lambda ds: ds, 160, 5, True),
        (lambda ds: ds.map(lambda x: x["id"]).batch(7), 23, 1, True),
        (lambda ds: ds.batch(2, drop_remainder=True).prefetch(3), 80, 3, True),
        (lambda ds: ds.skip(11).take(100).batch(3), 34, 2, True),
        (lambda ds: ds.filter(lambda x: x["id"] % 3 == 0), 160, 5, False),
        (lambda ds: ds.batch(5).unbatch(), 32, 1, False),
    ],
)
def test_pieces_of_files(parquet_files, build, num_units, grain, is_exact):
    node = node_of(build(daskdist.read_parquet(parquet_files(40, 4, row_group=5))))
    pieces = pieces_of(node)
    assert (pieces.num_units, pieces.grain, pieces.is_exact) == (num_units, grain, is_exact)
    same_elements(cut_in(pieces, 6), elements(node))


def test_lines_are_cut_by_splits(tmp_path):
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text("".join(f"{number} {line}\n" for line in range(10)))
    node = node_of(daskdist.read_text(str(tmp_path / "*.txt")).map(str.upper))
    pieces = pieces_of(node)
    assert (pieces.num_units, pieces.is_exact) == (3, False)
    assert elements(pieces.cut(1, 2)) == [f"1 {line}" for line in range(10)]


def test_endless_pieces():
    pieces = pieces_of(node_of(Dataset.counter(5, 2).batch(3)))
    assert pieces.num_units == -1
    assert [element.tolist() for element in elements(pieces.cut(10, 12))] == [[65, 67, 69], [71, 73, 75]]


@pytest.mark.parametrize(
    "build",
    [
        lambda ds: ds.shuffle(10),
        lambda ds: ds.filter(lambda x: x > 3).batch(2),
        lambda ds: ds.batch(2).unbatch().take(3),
        lambda ds: ds.repeat(2),
        lambda ds: ds.cache(),
        lambda ds: ds.scan(0, lambda state, x: (state + x, state)),
        lambda ds: Dataset.zip((ds, ds)),
        lambda ds: ds.with_options(Options(on_error="skip")),
        lambda ds: Dataset.random(1),
    ],
)
def test_operations_that_depend_on_earlier_elements_are_not_cut(build):
    assert pieces_of(node_of(build(Dataset.range(20)))) is None
