"""Functions whose results have another structure for other numbers of rows or steps."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest

import daskdist
from daskdist import AutoShardPolicy, Dataset, Options, errors

DATA = Options(auto_shard_policy=AutoShardPolicy.DATA)


def items(batch):
    return [int(x) for x in batch]


def doubled(batch):
    return batch * 2


def by_size(batch):
    return {"rows": items(batch)} if len(batch) > 1 else int(batch[0])


def sizes(iterator):
    return [len(batch) for batch in iterator]


def of_replicas(strategy, results):
    return [[int(np.asarray(x)) for x in part] for part in strategy.local_results(results)]


def test_a_list_has_an_item_per_row_also_in_the_short_last_batch(any_strategy):
    num_replicas = any_strategy.num_replicas_in_sync
    dataset = Dataset.range(10 * num_replicas).batch(4 * num_replicas).with_options(DATA)
    for _ in range(2):
        rows = []
        for batch in any_strategy.distribute_dataset(dataset):
            rows += of_replicas(any_strategy, any_strategy.run(items, args=(batch,)))
        assert sorted(map(len, rows)) == [2] * num_replicas + [4] * 2 * num_replicas
        assert sorted(chain(*rows)) == list(range(10 * num_replicas))


def test_results_know_the_numbers_of_rows_of_their_step(any_strategy):
    num_replicas = any_strategy.num_replicas_in_sync
    dataset = Dataset.range(6 * num_replicas).batch(4 * num_replicas).with_options(DATA)
    rows = []
    for batch in any_strategy.distribute_dataset(dataset):
        results = any_strategy.run(items, args=(any_strategy.run(doubled, args=(batch,)),))
        rows += chain(*of_replicas(any_strategy, results))
    assert sorted(rows) == list(range(0, 12 * num_replicas, 2))


def test_steps_that_differ_in_a_variable_of_a_helper(any_strategy):
    def step_of(number):
        def helper():
            return [1.0] * number

        return lambda: helper()

    # The number is a variable of the helper, and not of the step itself.
    for number in (1, 2):
        assert len(any_strategy.run(step_of(number))) == number


def test_batches_of_datasets_of_a_function(any_strategy):
    batches = any_strategy.distribute_datasets_from_function(
        lambda context: Dataset.range(5 * any_strategy.num_replicas_in_sync).batch(2)
    )
    rows = []
    for batch in batches:
        parts = any_strategy.local_results(batch)
        if {len(part) for part in parts} != {2}:
            # Structures differ over replicas that have different numbers of rows.
            continue
        rows += of_replicas(any_strategy, any_strategy.run(items, args=(batch,)))
    assert all(len(part) == 2 for part in rows)
    assert rows


@pytest.mark.cluster
def test_one_replica_reads_short_batches_of_a_function(client):
    first, *_ = client.nthreads()
    with daskdist.MultiWorkerMirroredStrategy(client, num_replicas_per_worker={first: 1}) as strategy:
        assert strategy.num_replicas_in_sync == 1
        batches = strategy.distribute_datasets_from_function(lambda context: Dataset.range(5).batch(2))
        assert [[int(x) for x in strategy.run(items, args=(batch,))] for batch in batches] == [[0, 1], [2, 3], [4]]


def test_structures_of_any_kind_may_depend_on_the_number_of_rows(strategy):
    dataset = Dataset.range(10).batch(4).with_options(DATA)
    first, second, last = (strategy.run(by_size, args=(batch,)) for batch in strategy.distribute_dataset(dataset))
    assert [len(nest["rows"]) for nest in (first, second)] == [2, 2]
    assert sorted(map(int, strategy.local_results(last))) == [8, 9]


def test_loops_of_other_numbers_of_steps_return_longer_lists(strategy):
    for number in (10, 18, 2, 10):
        batches = strategy.distribute_dataset(Dataset.range(number).batch(4).with_options(DATA))
        assert sum(map(sum, of_replicas(strategy, strategy.run(sizes, args=(batches,))))) == number


@pytest.mark.cluster
def test_another_structure_for_the_same_number_of_rows_is_an_error_with_advice(on_cluster):
    def up_to_first(batch):
        return [int(x) for x in batch if x < 6]

    results = [
        on_cluster.run(up_to_first, args=(batch,))
        for batch in on_cluster.distribute_dataset(Dataset.range(12).batch(4).with_options(DATA))
    ]
    on_cluster.local_results(results[0])
    with pytest.raises(errors.DaskdistError, match=r"in its first call .*Return an array in place of a nest"):
        on_cluster.local_results(results[2])


def test_steps_of_different_sizes_are_not_uneven(strategy, caplog):
    rows = Dataset.range(8).with_options(DATA)
    four, two = (next(iter(strategy.distribute_dataset(rows.batch(size)))) for size in (4, 2))
    for _ in range(2):
        nest = strategy.run(lambda x, y: [x.sum(), y.sum()], args=(four, two))
        assert [float(strategy.reduce("MEAN", value, axis=None)) for value in nest] == [3.0, 0.5]
    assert "different numbers of rows" not in caplog.text
