"""Functions of datasets that are sent to workers: which objects they can refer to, and which they cannot."""

from __future__ import annotations

import importlib
import random
import sys
import threading
from random import random as draw

import cloudpickle
import dask
import numpy as np
import pytest
from conftest import mirrored

import daskdist
from daskdist import Dataset, errors
from daskdist.core.functions.by_value import _is_local_file, modules_by_value
from daskdist.core.functions.code_fingerprint import fingerprint_of
from daskdist.errors import ArgumentError
from daskdist.execute.callers.submit import workers_of

RNG = np.random.default_rng(0)


def helper(x):
    return x + RNG.random()


class Augment:
    def __init__(self):
        self.rng = np.random.default_rng(0)

    def train(self, x):
        return x + self.rng.random()

    def evaluate(self, x):
        return x


def imported_within(x):
    import random

    return random.random() + x


def of_numpy_within(x):
    import numpy

    return numpy.random.normal() + x


def seeded_by_the_element(x):
    return np.random.default_rng(int(x)).normal()


DRAWS = {
    "global": (lambda x: x + RNG.random(), "RNG, a numpy Generator"),
    "further": (lambda x: helper(x), "RNG, a numpy Generator"),
    "closure": ((lambda rng: lambda x: x + rng.random())(random.Random(0)), "rng, a random Random"),
    "default": (lambda x, rng=RNG: x + rng.random(), "a default, a numpy Generator"),
    "list": ((lambda rngs: lambda x: x + rngs[0].random())([RNG]), "rngs, a numpy Generator"),
    "method": (Augment().train, "the attribute rng, a numpy Generator"),
    "call of a method": ((lambda augment: lambda x: augment.train(x))(Augment()), "the attribute rng"),
    "np.random.rand": (lambda x: x + np.random.rand(), "numpy.random.rand"),
    "random.random": (lambda x: x + random.random(), "random.random"),
    "random": (lambda x: x + draw(), "draw, a method of a random Random"),
    "imported within": (imported_within, "random.random"),
    "of numpy within": (of_numpy_within, "numpy.random.normal"),
}
NONE = {
    "seeded by the element": seeded_by_the_element,
    "another method": Augment().evaluate,
    "call of another method": (lambda augment: lambda x: augment.evaluate(x))(Augment()),
    "given": lambda x, rng: rng.random() + x,
    "seeded Random": lambda x: random.Random(int(x)).random(),
}


@pytest.mark.parametrize("name", DRAWS)
def test_generators_are_found(name):
    function, words = DRAWS[name]
    assert words in fingerprint_of(function).generators[0]


@pytest.mark.parametrize("name", NONE)
def test_functions_without_a_generator_are_recognised(name):
    assert fingerprint_of(NONE[name]).generators == []


def test_generators_are_refused_on_workers(on_cluster):
    ds = Dataset.range(8).map(lambda x: x + RNG.random()).batch(4)
    with pytest.raises(
        ValueError, match=r"map: .*<lambda> \(.*test_send_functions.py:\d+\) draws from RNG.*map\(fn, rng=s"
    ):
        on_cluster.distribute_dataset(ds)
    with pytest.raises(ValueError, match=r"Write map\(helper, rng=seed\)"):
        on_cluster.distribute_dataset(Dataset.range(8).map(helper).batch(4))
    # In one process, functions may draw from the generator.
    for strategy in (daskdist.MirroredStrategy(["CPU:0"]), daskdist.MirroredStrategy(["CPU:0", "CPU:1"])):
        assert sum(1 for _ in strategy.distribute_dataset(ds)) == 2
    assert len(set(map(float, Dataset.range(50).map(helper)))) == 50


def test_generators_are_refused_in_a_graph_that_is_sent(client):
    ds = Dataset.range(8).map(lambda x: x + RNG.random()).batch(4)
    with client.as_current(), pytest.raises(ArgumentError, match="rng=seed"):
        ds.compute()
    assert len(ds.compute(scheduler="threads")) == 2


def test_generators_are_refused_in_a_dataset_fn(on_cluster):
    with pytest.raises(ValueError, match=r"draws from RNG.*default_rng\(\[seed, context.input_pipeline_id\]\)"):
        on_cluster.distribute_datasets_from_function(lambda context: Dataset.range(8).map(helper).batch(2))

    def dataset_fn(context):
        rng = np.random.default_rng([0, context.input_pipeline_id])
        return Dataset.range(8).map(lambda x: x + rng.random()).batch(2)

    on_cluster.distribute_datasets_from_function(dataset_fn)


def test_functions_of_from_generator_may_draw(on_cluster):
    def rows():
        rng = random.Random(0)
        for _ in range(4):
            yield rng.random() + RNG.random()

    ds = Dataset.from_generator(rows, daskdist.TensorSpec((), "float64")).batch(2)
    assert sum(1 for _ in on_cluster.distribute_dataset(ds)) == 2


@pytest.mark.parametrize("operation", ["map", "filter", "flat_map", "scan", "take_while"])
def test_objects_that_do_not_pickle_are_named(on_cluster, operation):
    lock = threading.Lock()

    def locked(*args):
        with lock:
            return {"flat_map": Dataset.range(2), "scan": args}.get(operation, args[0] >= 0)

    args = (np.int64(0),) if operation == "scan" else ()
    ds = getattr(Dataset.range(8), operation)(*args, locked)
    with pytest.raises(ArgumentError) as caught:
        on_cluster.distribute_dataset(ds.batch(4))
    text = str(caught.value)
    assert text.startswith(f"{operation}: the function test_objects_that_do_not_pickle_are_named.<locals>.locked (")
    assert "test_send_functions.py:" in text
    assert "because of lock (_thread.lock)" in text
    assert "\n" not in text
    assert caught.value.__cause__ is None


def test_a_dataset_fn_that_does_not_pickle_is_named(on_cluster):
    lock = threading.Lock()

    def dataset_fn(context):
        with lock:
            return Dataset.range(8).batch(2)

    with pytest.raises(
        ArgumentError, match=r"dataset_fn \(.*test_send_functions.py:\d+\).*because of lock \(_thread.lock\)"
    ):
        on_cluster.distribute_datasets_from_function(dataset_fn)


def test_functions_can_use_the_number_of_replicas(on_cluster):
    strategy = on_cluster
    number = strategy.num_replicas_in_sync
    ds = Dataset.range(8).map(lambda x: x * strategy.num_replicas_in_sync).batch(4)
    steps = [
        np.concatenate([np.asarray(value) for value in strategy.local_results(x)])
        for x in strategy.distribute_dataset(ds)
    ]
    assert np.concatenate(steps).tolist() == [x * number for x in range(8)]
    assert [int(x) for x in ds.unbatch()] == [x * number for x in range(8)]

    def dataset_fn(context):
        return Dataset.range(8).batch(8 // strategy.num_replicas_in_sync)

    first = next(iter(strategy.distribute_datasets_from_function(dataset_fn)))
    assert [len(np.asarray(item)) for item in strategy.local_results(first)] == [8 // number] * number


def test_functions_cannot_use_anything_else_of_a_strategy(on_cluster):
    strategy = on_cluster
    ds = Dataset.range(8).map(lambda x: x * len(strategy.workers)).batch(4)
    with pytest.raises(Exception, match=r"strategy\.workers is not available in a dataset's function"):
        list(map(strategy.local_results, strategy.distribute_dataset(ds)))


# --- modules that workers lack ---

_USES = {
    "map": lambda strategy, batches, module: list(
        map(strategy.local_results, strategy.distribute_dataset(batches.map(module.double)))
    ),
    "run": lambda strategy, batches, module: [
        strategy.local_results(strategy.run(module.double, args=(batch,)))
        for batch in strategy.distribute_dataset(batches)
    ],
    "loop": lambda strategy, batches, module: strategy.local_results(
        strategy.run(lambda steps: sum(module.double(batch).sum() for batch in steps), (dist_of(strategy, batches),))
    ),
    "dataset_fn": lambda strategy, batches, module: [
        strategy.local_results(values) for values in strategy.distribute_datasets_from_function(module.dataset)
    ],
}


def dist_of(strategy, dataset):
    return strategy.distribute_dataset(dataset)


def imported_here(name, folder, monkeypatch):
    """Return a module that only this process can import, and its file."""
    path = folder / f"{name}.py"
    path.write_text(
        "import daskdist\n\nFACTOR = 2\n\n\ndef double(x):\n    return FACTOR * x\n\n\n"
        "def dataset(context):\n    return daskdist.Dataset.range(4).batch(2)\n"
    )
    monkeypatch.syspath_prepend(str(folder))
    return importlib.import_module(name), path


@pytest.mark.cluster
@pytest.mark.parametrize("use", _USES)
@pytest.mark.parametrize("names", ["named", "local"])
def test_modules_that_travel_with_their_code(client, on_cluster, tmp_path, monkeypatch, use, names):
    name = f"module_with_code_{use}_{names}"
    module, _ = imported_here(name, tmp_path, monkeypatch)
    # Pretend that this program is a script in that folder.
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(tmp_path / "script.py"), raising=False)
    with dask.config.set({"daskdist.send-modules": [name] if names == "named" else "local"}):
        actual = _USES[use](on_cluster, Dataset.range(8).batch(4), module)
    expected = _USES[use](mirrored(2), Dataset.range(8).batch(4), module)
    # A dataset function makes one dataset for each worker.
    assert actual if use == "dataset_fn" else str(actual) == str(expected)
    assert name not in cloudpickle.list_registry_pickle_by_value()
    assert not any(client.run(lambda: name in sys.modules).values())


@pytest.mark.parametrize(
    ("names", "message"),
    [("all", "send-modules is 'all'; give 'local', a list"), (["no_such"], "names 'no_such', which is not imported")],
)
def test_modules_to_send_that_are_refused(names, message):
    with (
        dask.config.set({"daskdist.send-modules": names}),
        pytest.raises(errors.ArgumentError, match=message),
        modules_by_value(),
    ):
        pass


def test_the_files_of_modules_are_looked_up_once():
    with dask.config.set({"daskdist.send-modules": "local"}):
        before = _is_local_file.cache_info()
        for _ in range(2):
            with modules_by_value():
                between, before = before, _is_local_file.cache_info()
    assert (before.misses, before.hits > between.hits) == (between.misses, True)


@pytest.mark.cluster
@pytest.mark.parametrize("use", _USES)
def test_a_module_that_workers_lack(client, on_cluster, tmp_path, monkeypatch, use):
    name = f"module_of_the_program_{use}"
    module, path = imported_here(name, tmp_path, monkeypatch)
    before = set(workers_of(client))
    with pytest.raises(
        errors.ClusterError,
        match=rf"No module named '{name}'.*send-modules': 'local'.*client.upload_file\('{name}.py'\)",
    ):
        _USES[use](on_cluster, Dataset.range(8).batch(4), module)
    # The error ends no worker. Once the workers have the module, another strategy can use it.
    client.upload_file(str(path))
    with daskdist.MultiWorkerMirroredStrategy(client) as strategy:
        assert _USES[use](strategy, Dataset.range(8).batch(4), module)
    assert set(workers_of(client)) == before


@pytest.mark.cluster
def test_workers_do_not_log_errors_that_the_program_raises(client, on_cluster):
    def fails_here(x):
        return 1 // int(x - x)

    with pytest.raises(errors.UserFunctionError, match="ZeroDivisionError"):
        list(map(on_cluster.local_results, on_cluster.distribute_dataset(Dataset.range(4).map(fails_here).batch(4))))
    logs = [text for log in client.get_worker_logs().values() for _, text in log]
    assert logs
    assert not [text for text in logs if "Compute Failed" in text and "fails_here" in text]
