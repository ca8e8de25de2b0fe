"""Parity: a pipeline gives the same elements wherever it runs, which are those of the reference with plain lists."""

from __future__ import annotations

import itertools
from dataclasses import replace

import dask
import numpy as np
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from pipelines import batched, pipelines, uneven

import daskdist
from daskdist import Dataset
from daskdist.core.dataset_base import node_of
from daskdist.core.spec import SpecUnknown
from daskdist.core.structure import Structure
from daskdist.errors import StackError
from daskdist.execute.callers.choose import using
from daskdist.execute.callers.synchronous import Synchronous
from daskdist.execute.callers.threads import Threads
from daskdist.ops.split_batches import piece_bounds
from daskdist.testing import same_elements

# Hypothesis warns if other threads draw random numbers meanwhile, as those of other tests' clusters do.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module")

many = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
some = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
few = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))


@given(pipelines())
@many
def test_in_this_thread(pipeline):
    outcome = pipeline.reference()
    event("fails" if outcome.must_fail else "empty" if not outcome.elements else "gives elements")
    with pipeline.settings(), using(Synchronous):
        outcome.check(lambda: pipeline.dataset(), "Synchronous")


@given(uneven())
@some
def test_elements_of_different_shapes(pipeline):
    # Only elements of one batch must stack; it does not matter which elements are in one block.
    with pipeline.settings():
        pipeline.reference().check(lambda: pipeline.dataset(), "embedded")
        pipeline.reference().check(lambda: dask.compute(pipeline.dataset(), scheduler="sync")[0], "as a graph")


@given(pipelines())
@some
def test_in_threads(pipeline):
    with pipeline.settings(), using(Threads):
        pipeline.reference().check(lambda: pipeline.dataset(), "Threads")


@given(pipelines())
@some
def test_second_pass(pipeline):
    with pipeline.settings():
        ds = pipeline.dataset()
        pipeline.reference(0).check(lambda: ds, "first pass")
        pipeline.reference(1).check(lambda: ds, "second pass")


@given(pipelines())
@some
def test_as_a_graph(pipeline):
    with pipeline.settings(), dask.config.set(scheduler="sync"):
        pipeline.reference().check(lambda: dask.compute(pipeline.dataset())[0], "dask.compute")


@given(pipelines(fixed=True))
@some
def test_spec_and_cardinality(pipeline):
    outcome = pipeline.reference()
    ds = pipeline.dataset()
    if outcome.met_unmade:
        return
    if ds.cardinality() >= 0:
        assert ds.cardinality() == len(outcome.elements)
    try:
        spec = node_of(ds).spec
    except SpecUnknown:
        # The spec could only be guessed from the first element, and need not hold for others.
        return
    for element in outcome.elements:
        leaves, structure = Structure.flatten(element)
        assert structure == spec.structure
        for leaf, expected in zip(leaves, spec.leaves, strict=True):
            assert expected.is_compatible_with(leaf), (leaf, expected)


@given(batched(), st.integers(1, 4))
@some
def test_dealt_to_replicas_in_this_process(pipeline, num_replicas):
    strategy = daskdist.MirroredStrategy([f"CPU:{k}" for k in range(num_replicas)])
    check_dealt(pipeline, strategy)


@pytest.mark.cluster
def test_dealt_to_replicas_on_a_cluster(client):
    strategy = daskdist.MultiWorkerMirroredStrategy(client)
    assert strategy.num_replicas_in_sync == 2

    @given(batched())
    @few
    def check(pipeline):
        check_dealt(pipeline, strategy)

    check()


@pytest.mark.cluster
def test_computed_on_a_cluster(client):
    @given(pipelines())
    @few
    def check(pipeline):
        with pipeline.settings():
            pipeline.reference().check(
                lambda: client.compute(pipeline.dataset(), sync=True), "on a cluster's scheduler"
            )

    check()


def check_dealt(pipeline, strategy):
    """Check that each step is a batch of the reference, cut by the rule."""
    outcome = pipeline.reference()
    num_replicas = strategy.num_replicas_in_sync
    options = daskdist.Options()
    options.auto_shard_policy = daskdist.AutoShardPolicy.DATA
    with pipeline.settings():
        dataset = pipeline.dataset().with_options(options)
        try:
            steps = [strategy.local_results(step) for step in strategy.distribute_dataset(dataset)]
        except StackError:
            assert outcome.met_unmade, "raised, but all elements stack"
            return
        except daskdist.errors.UnknownLengthError:
            # Without an element, the spec of a mapped dataset may be unknown.
            assert not outcome.elements, "raised, but there are elements"
            return
    if outcome.must_fail and num_replicas > 1:
        # Each replica's part is stacked by itself, which may succeed where the whole batch does not stack.
        return
    assert not outcome.must_fail
    expected = [pieces(batch, num_replicas) for batch in outcome.elements]
    assert len(steps) == len(expected)
    for step, batch in zip(steps, expected, strict=True):
        assert len(step) == num_replicas
        for part, piece in zip(step, batch, strict=True):
            check_piece(part, piece)


def check_piece(part, piece):
    """Check a replica's part; without rows, its structure, rank and dtype."""
    (leaves, structure), (expected, of) = Structure.flatten(part), Structure.flatten(piece)
    if len(expected[0]):
        same_elements([part], [piece], "a replica's part")
        return
    assert structure == of
    for leaf, other in zip(leaves, expected, strict=True):
        assert (len(leaf), leaf.dtype, leaf.ndim) == (0, other.dtype, other.ndim)


def pieces(batch, num_pieces):
    """Return the pieces of a batch for a number of replicas."""
    leaves, structure = Structure.flatten(batch)
    cuts = [piece_bounds(len(leaf), num_pieces) for leaf in leaves]
    return [
        structure.pack([leaf[cut[k] : cut[k + 1]] for leaf, cut in zip(leaves, cuts, strict=True)])
        for k in range(num_pieces)
    ]


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_batch_that_does_not_stack_is_an_error_for_replicas(num_replicas):
    strategy = daskdist.MirroredStrategy([f"CPU:{k}" for k in range(num_replicas)])
    ds = daskdist.Dataset.range(8).map(lambda x: np.zeros(x % 2)).batch(4)
    with pytest.raises(StackError, match="do not stack"):
        list(strategy.distribute_dataset(ds))


@pytest.mark.cluster
def test_a_batch_that_does_not_stack_is_an_error_on_a_cluster(client):
    strategy = daskdist.MultiWorkerMirroredStrategy(client)
    ds = daskdist.Dataset.range(8).map(lambda x: np.zeros(x % 2)).batch(4)
    with pytest.raises(StackError, match="do not stack"):
        list(map(strategy.local_results, strategy.distribute_dataset(ds)))


def test_pieces_have_the_documented_sizes():
    # Of n rows, each of N replicas gets ceil(n / N), until no rows are left.
    table = {
        (8, 2): [4, 4],
        (2, 2): [1, 1],
        (8, 3): [3, 3, 2],
        (2, 3): [1, 1, 0],
        (4, 3): [2, 2, 0],
        (2, 4): [1, 1, 0, 0],
    }
    for (num_rows, num_pieces), sizes in table.items():
        assert [len(piece) for piece in pieces(np.arange(num_rows), num_pieces)] == sizes


# --- what draws seldom meet ---


def _generated(number):
    signature = daskdist.TensorSpec((), np.int64)
    return Dataset.from_generator(range, signature, (int(number) % 3,))


ENDLESS = {
    "zip": lambda: Dataset.zip(Dataset.range(2).repeat(), Dataset.counter()),
    "flat_map": lambda: Dataset.counter().flat_map(Dataset.range),
    "flat_map of streams": lambda: Dataset.counter().flat_map(_generated),
    "flat_map into an endless one": lambda: Dataset.range(3).flat_map(Dataset.counter),
    "interleave": lambda: Dataset.counter().interleave(Dataset.counter, 3),
    "choose": lambda: Dataset.choose_from_datasets(
        [Dataset.counter(), Dataset.range(5).repeat()], Dataset.range(2).repeat()
    ),
    "sample": lambda: Dataset.sample_from_datasets([Dataset.counter(), _generated(2)], seed=1),
    "concatenate": lambda: Dataset.range(2).concatenate(Dataset.random(seed=1)),
    "window": lambda: Dataset.counter().window(3, shift=1).flat_map(lambda window: window.batch(3)),
    "group_by_window": lambda: Dataset.counter().group_by_window(
        lambda x: x % 2, lambda key, window: window.batch(9), 4
    ),
    "unique": lambda: Dataset.counter().map(lambda x: x // 2).unique(),
    "scan": lambda: Dataset.counter().scan(np.int64(0), lambda total, x: (total + x, total)),
    "rebatch": lambda: Dataset.counter().batch(3).rebatch([2, 0]),
    "rejection_resample": lambda: Dataset.counter().rejection_resample(lambda x: x % 2, [0.5, 0.5], seed=1),
    "ignore_errors": lambda: Dataset.counter().map(lambda x: 1 // int(x % 2)).ignore_errors(),
}


@pytest.mark.parametrize("caller", [Synchronous, Threads])
@pytest.mark.parametrize("name", ENDLESS)
def test_parts_of_endless_datasets_equal_those_of_longer_parts(name, caller):
    # For any window, exactly the requested elements are returned, and a longer request begins with the same ones.
    few, more = ENDLESS[name]().take(5), ENDLESS[name]().take(40)
    with using(caller):
        expected = list(more)[:5]
        assert len(expected) == 5
        with dask.config.set({"daskdist.split-bytes": 8, "daskdist.window-bytes": 1}):
            same_elements(list(few), expected, name)


@given(pipelines(), st.integers(0, 7))
@some
def test_while_another_iterator_is_half_way(pipeline, number):
    outcomes = [pipeline.reference(iteration) for iteration in range(2)]
    if any(outcome.met_unmade for outcome in outcomes):
        return
    with pipeline.settings():
        ds = pipeline.dataset()
        first, second = iter(ds), iter(ds)
        begun = list(itertools.islice(first, number))
        same_elements(list(second), outcomes[1].elements, "the second, meanwhile")
        same_elements([*begun, *first], outcomes[0].elements, "the first")


@given(pipelines(max_operations=5))
@some
def test_operations_on_an_empty_dataset_give_nothing(pipeline):
    """Every operation accepts an empty dataset, also one of blocks without rows."""
    names = {name for name, _ in pipeline.operations}
    if "assert_cardinality" in pipeline.names() or names & {"zip", "concatenate", "choose", "sample"}:
        return
    operations = (("filter", (nothing,)), *pipeline.operations)
    pipeline = replace(pipeline, operations=operations)
    with pipeline.settings():
        assert list(pipeline.dataset()) == []
        assert dask.compute(pipeline.dataset(), scheduler="sync")[0] == []


def nothing(*args):
    return False


BATCHED = {
    "batches of batches of batches": (lambda: Dataset.range(28).batch(3).batch(1).batch(2), True),
    "of streams": (lambda: Dataset.range(3).flat_map(lambda x: _generated(2).batch(2)), False),
    "bytes": (lambda: Dataset.range(4).batch(2).map(lambda x: b"a\0").padded_batch(1).batch(1), False),
    "ranks": (lambda: Dataset.range(4).map(lambda x: np.zeros([1] * int(x))).padded_batch(2), True),
    "dtypes": (lambda: Dataset.range(4).map(_of_a_dtype).padded_batch(4), True),
}


def _of_a_dtype(x):
    return np.zeros(int(x), [np.float32, np.float64][int(x) // 2])


@pytest.mark.parametrize("name", BATCHED)
def test_batches(name):
    make, must_fail = BATCHED[name]
    if must_fail:
        with pytest.raises(StackError):
            list(make())
        return
    assert all(leaf.dtype in (np.int64, object) for leaf in make())
    assert not any(isinstance(value, np.ndarray) for leaf in make() for value in leaf.ravel())


def test_unique_of_blocks_and_bundles():
    # Elements of persisted datasets are in bundles, those of the others in blocks.
    numbers = Dataset.range(3)
    assert [int(x) for x in numbers.persist().concatenate(numbers).unique()] == [0, 1, 2]
    words = numbers.map(lambda x: "ab"[int(x) % 2])
    assert [str(x) for x in words.persist().concatenate(words).unique()] == ["a", "b"]
    assert len(list(numbers.map(lambda x: np.nan).persist().concatenate(numbers.map(lambda x: np.nan)).unique())) == 1


@pytest.mark.parametrize("sizes", [[1, 0], [0, 2], [3, 0, 0]])
def test_batches_without_rows_are_elements(sizes):
    ds = Dataset.range(4).batch(2).rebatch(sizes)
    actual = [batch.tolist() for batch in ds]
    assert [] in actual
    assert [x for batch in actual for x in batch] == [0, 1, 2, 3]
    again = Dataset.range(1).flat_map(lambda x: ds)
    first = ds.take(1).map(lambda x: x + 1)
    assert [batch.tolist() for batch in again] == actual
    assert [batch.tolist() for batch in dask.compute(ds, scheduler="sync")[0]] == actual
    assert [batch.tolist() for batch in first] == [[x + 1 for x in actual[0]]]
