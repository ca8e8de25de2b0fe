"""One semantics: a pipeline comes to the same elements wherever it runs, and to those of a plain list."""

from __future__ import annotations

import contextlib

import dask
import numpy as np
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from pipelines import batched, pipelines, uneven

import daskdist
from daskdist.core.spec import SpecUnknown
from daskdist.core.structure import Structure
from daskdist.errors import StackError
from daskdist.execute.callers import Now, Threads, using
from daskdist.ops.deal import piece_bounds
from daskdist.testing import same_elements

# Threads of a cluster that other tests started draw random numbers of their own, also while hypothesis does.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module")

many = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
some = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
few = settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))


@given(pipelines())
@many
def test_in_this_thread(pipeline):
    outcome = pipeline.reference()
    event("fails" if outcome.must_fail else "empty" if not outcome.elements else "gives elements")
    with pipeline.settings(), using(Now):
        outcome.check(lambda: pipeline.dataset(), "Now")


@given(uneven())
@some
def test_elements_of_different_shapes(pipeline):
    # Where they are in blocks is nobody's business: only elements of one batch must stack.
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
        spec = ds.node.spec
    except SpecUnknown:
        # Told from the first element, it need not be that of others.
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
    """That each step is a batch of the reference, cut by the rule."""
    outcome = pipeline.reference()
    num_replicas = strategy.num_replicas_in_sync
    options = daskdist.Options()
    options.auto_shard_policy = daskdist.AutoShardPolicy.DATA
    with pipeline.settings():
        dataset = pipeline.dataset().with_options(options)
        if not outcome.elements and not outcome.met_unmade:
            # The spec of a mapped one may be unknown, for want of an element.
            with contextlib.suppress(daskdist.errors.UnknownLengthError):
                assert list(strategy.distribute_dataset(dataset)) == []
            return
        try:
            steps = [strategy.local_results(step) for step in strategy.distribute_dataset(dataset)]
        except StackError:
            assert outcome.met_unmade, "everything stacks, and it raised"
            return
    if outcome.must_fail and num_replicas > 1:
        # Each replica's part is stacked by itself, where it is wanted. It may stack where the whole does not.
        return
    assert not outcome.must_fail
    expected = [pieces(batch, num_replicas) for batch in outcome.elements]
    assert len(steps) == len(expected)
    for step, batch in zip(steps, expected, strict=True):
        assert len(step) == num_replicas
        for part, piece in zip(step, batch, strict=True):
            check_piece(part, piece)


def check_piece(part, piece):
    """That a replica's part is this; of no rows, that it is of this structure, rank and dtype."""
    (leaves, structure), (expected, of) = Structure.flatten(part), Structure.flatten(piece)
    if len(expected[0]):
        same_elements([part], [piece], "a replica's part")
        return
    assert structure == of
    for leaf, other in zip(leaves, expected, strict=True):
        assert (len(leaf), leaf.dtype, leaf.ndim) == (0, other.dtype, other.ndim)


def pieces(batch, num_pieces):
    """The pieces of a batch."""
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


def test_pieces_are_of_the_rule():
    # n rows over N: ceil(n / N) each until they run out.
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
