"""Data is read on the workers that have it, if they are known; the elements are the same wherever it is read."""

from __future__ import annotations

import dask
import dask.array as da
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from conftest import mirrored
from distributed import get_worker

import daskdist
from daskdist import Dataset, Options, errors, read_parquet, read_text
from daskdist.execute.callers.submit import workers_of

pytestmark = pytest.mark.cluster


@pytest.fixture(autouse=True, scope="module")
def unbalanced(client):
    """Stop work stealing, by which Dask may move tasks to other workers before it knows how short they are."""

    async def stop(dask_scheduler):
        await dask_scheduler.extensions["stealing"].stop()

    async def start(dask_scheduler):
        await dask_scheduler.extensions["stealing"].start()

    client.run_on_scheduler(stop)
    yield
    client.run_on_scheduler(start)


def here(*rows):
    """Return the port of the worker that this is called on, or 0 outside of workers."""
    try:
        return np.int64(int(get_worker().address.rpartition(":")[2]))
    except ValueError:
        return np.int64(0)


def port(worker):
    return int(worker.rpartition(":")[2])


def elements_of(strategy, dataset):
    """Return the concatenated leaves of all replicas' rows, in order."""
    steps = [strategy.local_results(step) for step in strategy.distribute_dataset(dataset)]
    parts = [part for step in steps for part in step]
    return [np.concatenate(column) for column in zip(*parts, strict=True)]


def done(client, collection):
    """Wait until a persisted collection is computed."""
    for future in client.futures_of(collection):
        future.result()


def moved_keys(client):
    """Return the keys of all data that workers got from other workers so far, once for each transfer."""
    logs = client.run(lambda dask_worker: [list(value["keys"]) for value in dask_worker.transfer_incoming_log])
    return [str(key) for log in logs.values() for keys in log for key in keys]


def on_workers(client, workers, make):
    """Create a chunk on each of the given workers, and return the futures."""
    futures = [client.submit(make, k, workers=[worker], pure=False) for k, worker in enumerate(workers)]
    done(client, futures)
    return futures


def chunk_of(number):
    return np.arange(number * 10, number * 10 + 10)


# --- persisted collections ---


@pytest.fixture
def lopsided(on_cluster, client):
    """Persist an array of six chunks, the first four on the second worker; return it and the workers' ports."""
    one, other = on_cluster.workers
    where = [other, other, other, other, one, one]
    futures = on_workers(client, where, chunk_of)
    array = da.concatenate([da.from_delayed(future, (10,), np.int64) for future in futures])
    array = client.persist(array)
    done(client, array)
    return array, [port(worker) for worker in where]


def test_a_persisted_array_is_read_where_it_is(on_cluster, client, lopsided):
    array, ports = lopsided
    ds = Dataset.from_dask(array).map(lambda x: (x, here())).batch(20)
    elements_of(on_cluster, ds)
    before = len(moved_keys(client))
    values, where = elements_of(on_cluster, ds)
    assert values.tolist() == list(range(60))
    assert where.reshape(6, 10).tolist() == [[value] * 10 for value in ports]
    moved = moved_keys(client)[before:]
    names = {str(key) for key in array.__dask_keys__()}
    assert not [key for key in moved if key in names or key.startswith("from_dask")], moved


def test_datasets_of_persisted_values_are_read_where_these_are(on_cluster, lopsided):
    array, ports = lopsided
    ds = Dataset.from_dask(array * 2).map(lambda x: (x, here())).batch(20)
    # The first calls of a function have few rows, and go to all workers.
    elements_of(on_cluster, ds)
    values, where = elements_of(on_cluster, ds)
    assert values.tolist() == list(range(0, 120, 2))
    assert where.reshape(6, 10).tolist() == [[value] * 10 for value in ports]


def test_a_persisted_dataframe_is_read_where_it_is(on_cluster, client):
    frame = client.persist(dd.from_pandas(pd.DataFrame({"a": np.arange(40)}), npartitions=4))
    done(client, frame)
    holders = client.who_has(client.futures_of(frame))
    ds = Dataset.from_dask(frame, columns="a").map(lambda x: (x, here())).batch(40)
    values, where = elements_of(on_cluster, ds)
    assert values.tolist() == list(range(40))
    assert where[::10].tolist() == [port(holders[key][0]) for key in sorted(holders)]


def test_a_persisted_dataset_is_read_where_it_is(on_cluster, client):
    kept = client.persist(Dataset.range(40).batch(10))
    done(client, kept)
    holders = client.who_has(client.futures_of(kept))
    expected = [port(holders[key][0]) for key in sorted(holders)]
    values, where = elements_of(on_cluster, kept.unbatch().map(lambda x: (x, here())).batch(40))
    assert values.tolist() == list(range(40))
    assert where[::10].tolist() == expected


def test_placement_is_asked_for_once_a_pass(on_cluster, client, lopsided):
    array, _ = lopsided
    scheduler = client.cluster.scheduler
    answer, asked = scheduler.handlers["who_has"], []

    def counted(*args, **kwargs):
        asked.append(len(kwargs["keys"]))
        return answer(*args, **kwargs)

    dist = on_cluster.distribute_dataset(Dataset.from_dask(array).batch(60))
    scheduler.handlers["who_has"] = counted
    try:
        (step,) = dist
    finally:
        scheduler.handlers["who_has"] = answer
    # Fetching a few results also asks, but for fewer keys.
    assert asked.count(6) == 1
    assert np.concatenate(on_cluster.local_results(step)).tolist() == list(range(60))


def test_splits_without_a_location_go_to_workers_in_turn(on_cluster):
    ds = Dataset.from_dask(da.arange(40, chunks=10)).map(lambda x: (x, here())).batch(20)
    values, where = elements_of(on_cluster, ds)
    assert values.tolist() == list(range(40))
    assert set(where.tolist()) == {port(worker) for worker in on_cluster.workers}


def test_data_of_a_worker_that_takes_no_part(start_cluster):
    client = start_cluster(2, 1)
    actual = sorted(workers_of(client).items(), key=lambda item: str(item[1]["name"]))
    (one, _), (other, info) = actual
    futures = on_workers(client, [one, other], chunk_of)
    array = client.persist(da.concatenate([da.from_delayed(future, (10,), np.int64) for future in futures]))
    done(client, array)
    with daskdist.MultiWorkerMirroredStrategy(client, num_replicas_per_worker={info["name"]: 1}) as strategy:
        assert strategy.workers == (other,)
        steps = list(strategy.distribute_dataset(Dataset.from_dask(array).map(lambda x: (x, here())).batch(20)))
        values, where = (np.asarray(leaf) for leaf in steps[0])
    assert values.tolist() == list(range(20))
    assert set(where.tolist()) == {port(other)}


def test_results_of_a_user_outlive_the_strategy(client, lopsided):
    array, _ = lopsided
    with daskdist.MultiWorkerMirroredStrategy(client) as strategy:
        assert len(list(strategy.distribute_dataset(Dataset.from_dask(array).batch(20)))) == 3
    assert client.compute(array.sum(), sync=True) == sum(range(60))


def test_a_collection_that_is_gone_is_an_error(on_cluster, client):
    array = client.persist(da.arange(40, chunks=10))
    done(client, array)
    ds = Dataset.from_dask(array).batch(20)
    client.cancel(array)
    with pytest.raises(errors.ClusterError, match=r"no longer on the cluster: .*create the data again"):
        list(on_cluster.distribute_dataset(ds))
    with pytest.raises(errors.ClusterError, match=r"no longer on the cluster: .*create the data again"):
        list(ds)


# --- kept blocks ---


def test_kept_blocks_stay_where_they_were_made(on_cluster, client):
    made = Dataset.range(4000).map(lambda x: (x, here()))
    elements_of(on_cluster, made.batch(400))
    ds = made.cache().batch(400)
    first = elements_of(on_cluster, ds)
    again = elements_of(on_cluster, ds)
    for one, other in zip(first, again, strict=True):
        assert one.tolist() == other.tolist()
    dist = on_cluster.distribute_dataset(ds.map(lambda batch, made: (batch, made)))
    before = len(moved_keys(client))
    steps = [on_cluster.local_results(step) for step in dist]
    assert np.concatenate([part[1] for step in steps for part in step]).tolist() == first[1].tolist()
    assert not [key for key in moved_keys(client)[before:] if key.startswith("range")]


def test_kept_blocks_go_with_their_strategy(client):
    ds = Dataset.range(40).map(lambda x: x + 1).cache().batch(20)
    for _ in range(2):
        with daskdist.MultiWorkerMirroredStrategy(client) as strategy:
            steps = [strategy.local_results(step) for step in strategy.distribute_dataset(ds)]
        assert np.concatenate([part for step in steps for part in step]).tolist() == list(range(1, 41))


# --- files ---


def located(ds, locations, **fields):
    return ds.with_options(Options(locations=locations, **fields))


@pytest.fixture
def texts(tmp_path):
    """Write six files of four lines."""
    paths = []
    for number in range(6):
        paths.append(str(tmp_path / f"{number}.txt"))
        (tmp_path / f"{number}.txt").write_text("".join(f"{number * 4 + k}\n" for k in range(4)))
    return paths


def read(strategy, dataset):
    ds = dataset.map(lambda line: (np.int64(int(str(line))), here())).batch(6)
    values, where = elements_of(strategy, ds)
    order = np.argsort(values, kind="stable")
    assert values[order].tolist() == list(range(24))
    return values.tolist(), where[order].reshape(6, 4).tolist()


def as_mapping(names, paths):
    return dict(zip(paths, [names[letter] for letter in "BBBABA"], strict=True))


def as_lists(names, paths):
    return {path: [name] for path, name in as_mapping(names, paths).items()}


def as_function(names, paths):
    return as_mapping(names, paths).get


@pytest.mark.parametrize(
    ("say", "policy"), [(as_mapping, "DATA"), (as_lists, "FILE"), (as_function, "DATA"), (as_function, "OFF")]
)
def test_files_are_read_at_their_given_locations(on_cluster, client, texts, say, policy):
    one, other = on_cluster.workers
    workers = workers_of(client)
    ports = {"A": port(one), "B": port(other)}
    # Name one worker by its address and the other by its name.
    names = {"A": one, "B": workers[other]["name"]}
    ds = located(read_text(texts), say(names, texts), auto_shard_policy=policy)
    if policy == "OFF":
        steps = [on_cluster.local_results(step) for step in on_cluster.distribute_dataset(ds.map(here).batch(24))]
        seen = np.concatenate([part for step in steps for part in step])
        assert sorted(seen.tolist()) == sorted(2 * 4 * [ports[letter] for letter in "BBBABA"])
        return
    values, where = read(on_cluster, ds)
    assert where == [[ports[value]] * 4 for value in "BBBABA"]
    plain, _ = read(on_cluster, read_text(texts).with_options(Options(auto_shard_policy=policy)))
    assert values == plain


def test_files_without_a_place_are_read_in_turn(on_cluster, texts):
    one, other = on_cluster.workers
    _, where = read(on_cluster, located(read_text(texts), {texts[0]: other, texts[1]: other}, auto_shard_policy="DATA"))
    assert where[:2] == [[port(other)] * 4] * 2
    assert [row[0] for row in where[2:]] == [port(one), port(other), port(one), port(other)]


def test_folders_of_files(on_cluster, parquet_files):
    one, other = on_cluster.workers
    paths = parquet_files(4, 2, folder="a") + parquet_files(4, 2, folder="b")
    places = {paths[0].rpartition("/")[0]: other, paths[2].rpartition("/")[0]: [one, other], paths[3]: one}
    ds = located(read_parquet(paths, columns=["id"]), places, auto_shard_policy="DATA")
    _, where = elements_of(on_cluster, ds.map(lambda row: (row["id"], here())).batch(16))
    assert set(where[:8].tolist()) == {port(other)}
    assert set(where[12:].tolist()) == {port(one)}
    assert set(where[8:12].tolist()) <= {port(one), port(other)}


def test_a_file_on_several_workers_is_read_by_them_in_turn(on_cluster, texts):
    ds = located(read_text(texts), lambda path: list(on_cluster.workers), auto_shard_policy="DATA")
    _, where = read(on_cluster, ds)
    assert [row[0] for row in where] == 3 * [port(worker) for worker in on_cluster.workers]


def test_small_files_of_different_places_are_not_read_together(on_cluster, tmp_path):
    image = pytest.importorskip("PIL.Image")
    one, other = on_cluster.workers
    places = {}
    for number in range(4):
        path = tmp_path / "x" / "kind" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.fromarray(np.full((2, 2, 3), number, np.uint8)).save(path)
        places[str(path)] = one if number < 2 else other
    images = daskdist.read_images(tmp_path / "x")
    ds = located(images, places, auto_shard_policy="DATA").map(lambda *each: (each[0], here()))
    _, where = elements_of(on_cluster, ds.batch(4))
    assert where.tolist() == [port(one)] * 2 + [port(other)] * 2


@pytest.mark.parametrize("say", [dict, lambda mapping: mapping.get], ids=["mapping", "function"])
def test_an_unknown_worker(on_cluster, texts, say):
    ds = located(read_text(texts), say({texts[3]: "worker-9"})).batch(4)
    with pytest.raises(
        errors.ArgumentError, match=rf"{texts[3]} on worker 'worker-9', .*it has '.*{on_cluster.workers[1]}"
    ):
        on_cluster.distribute_dataset(ds)


def test_locations_have_no_effect_in_one_process(texts):
    ds = located(read_text(texts), {texts[0]: "anywhere"}).batch(24)
    (step,) = mirrored(2).distribute_dataset(ds)
    assert [len(value) for value in step.values] == [12, 12]
    assert len(list(ds)) == 1


def test_locations_do_not_change_a_fingerprint(texts):
    plain, said = read_text(texts), located(read_text(texts), {texts[0]: "a", texts[1]: ["b", 0]})
    other = located(read_text(texts), len)
    assert said.fingerprint() == other.fingerprint()
    assert dask.base.tokenize(said) == dask.base.tokenize(other) != dask.base.tokenize(plain)
    assert "locations=those of 2 paths" in said.explain()


@pytest.mark.parametrize(
    ("locations", "message"),
    [
        (3, "locations is int; give a mapping of paths to workers, or a function"),
        ({3: "a"}, "has the path 3; a path is a string"),
        ({"a": 1.5}, "has 1.5 for .*a; give the name or address of a worker, or several"),
        ({"a": [None]}, r"has \[None\] for"),
    ],
)
def test_invalid_locations_are_refused(locations, message):
    with pytest.raises(errors.ArgumentError, match=message):
        Options(locations=locations)
