"""TensorFlow's names: those on the pages that daskdist follows work, and others say what to use."""

from __future__ import annotations

import importlib
import subprocess
import sys

import numpy as np
import pytest
from conftest import mirrored

import daskdist
import daskdist.distribute.cluster_resolver
import daskdist.distribute.experimental
import daskdist.experimental
import daskdist.tpu.experimental
from daskdist import AutoShardPolicy, Dataset, InputOptions, InputReplicationMode, Options, PerReplica, errors
from daskdist.core.spec import PerReplicaSpec, TensorSpec
from daskdist.tensorflow import missing_names

# Every name on the pages, as they write it after `tf.`.
ON_THE_PAGES = [
    "data.Dataset",
    "data.Dataset.from_tensor_slices",
    "data.Dataset.from_tensors",
    "data.Dataset.range",
    "data.experimental.AutoShardPolicy",
    "data.experimental.DistributeOptions",
    "data.experimental.service.distribute",
    "distribute",
    "distribute.DistributedDataset",
    "distribute.DistributedIterator",
    "distribute.DistributedValues",
    "distribute.InputContext",
    "distribute.MirroredStrategy",
    "distribute.ReduceOp.MEAN",
    "distribute.ReduceOp.SUM",
    "distribute.Strategy.distribute_datasets_from_function",
    "distribute.Strategy.experimental_distribute_dataset",
    "distribute.Strategy.experimental_distribute_datasets_from_function",
    "distribute.StrategyExtended",
    "distribute.cluster_resolver.TPUClusterResolver",
    "distribute.experimental.MultiWorkerMirroredStrategy",
    "distribute.experimental.TPUStrategy",
    "distribute.TPUStrategy",
    "errors.OutOfRangeError",
    "experimental.Optional",
    "function",
    "tpu.experimental.DeviceAssignment",
]
# Names for which Python and NumPy have an equivalent.
OF_OTHERS = ["Tensor", "TypeSpec", "constant", "float32", "int32", "print", "range", "square", "while_loop"]
# The methods and attributes of the page on strategies, and those of the page on what is under `extended`.
OF_STRATEGIES = [
    "experimental_distribute_dataset",
    "experimental_distribute_datasets_from_function",
    "experimental_local_results",
    "experimental_make_numpy_dataset",
    "experimental_run",
    "experimental_run_v2",
    "extended",
    "num_replicas_in_sync",
    "reduce",
    "run",
    "scope",
]
OF_EXTENDED = [
    "batch_reduce_to",
    "broadcast_to",
    "call_for_each_replica",
    "colocate_vars_with",
    "experimental_between_graph",
    "experimental_make_numpy_dataset",
    "experimental_require_static_shapes",
    "experimental_should_init",
    "non_slot_devices",
    "parameter_devices",
    "read_var",
    "reduce_to",
    "should_checkpoint",
    "should_save_summary",
    "update",
    "update_non_slot",
    "value_container",
    "variable_created_in_scope",
    "worker_devices",
]
TABLES = {
    "daskdist": missing_names.TOP,
    "daskdist.data": missing_names.DATA,
    "daskdist.data.experimental": missing_names.DATA_EXPERIMENTAL,
    "daskdist.data.experimental.service": missing_names.DATA_SERVICE,
    "daskdist.distribute": missing_names.DISTRIBUTE,
    "daskdist.distribute.cluster_resolver": missing_names.CLUSTER_RESOLVER,
    "daskdist.distribute.experimental": missing_names.DISTRIBUTE_EXPERIMENTAL,
    "daskdist.experimental": missing_names.EXPERIMENTAL,
    "daskdist.tpu": missing_names.TPU,
    "daskdist.tpu.experimental": missing_names.TPU_EXPERIMENTAL,
}


def resolve(name):
    """Return what a dotted name stands for, from the package on."""
    obj = daskdist
    for part in name.split("."):
        obj = getattr(obj, part)
    return obj


@pytest.mark.parametrize("name", ON_THE_PAGES)
def test_names_on_the_pages_resolve(name):
    assert resolve(name) is not None


@pytest.mark.parametrize("name", OF_OTHERS)
def test_names_without_meaning_here_say_what_to_use(name):
    with pytest.raises(AttributeError, match=rf"no attribute '{name}'; use "):
        resolve(name)


def test_methods_on_the_pages_are_there():
    strategy = mirrored(2)
    assert not [name for name in OF_STRATEGIES if not hasattr(strategy, name)]
    assert not [name for name in OF_EXTENDED if not hasattr(strategy.extended, name)]


@pytest.mark.parametrize("module", TABLES)
def test_a_name_either_exists_or_has_advice(module):
    imported = importlib.import_module(module)
    assert not [name for name in imported.__all__ if not hasattr(imported, name)]
    assert not set(TABLES[module]) & set(dir(imported))
    for name, advice in TABLES[module].items():
        with pytest.raises(AttributeError) as raised:
            getattr(imported, name)
        assert str(raised.value).endswith(f"; use {advice}")


def test_advice_names_what_exists():
    words = {word.strip("`;,()") for table in TABLES.values() for text in table.values() for word in text.split()}
    ours = {word.split("(")[0].removeprefix("daskdist.") for word in words if word.startswith("daskdist.")}
    assert "MirroredStrategy" in ours
    assert not [name for name in ours if resolve(name) is None]
    methods = {word.split("(")[0].removeprefix("Dataset.") for word in words if word.startswith("Dataset.")}
    assert not [name for name in methods if not hasattr(Dataset, name)]


def test_advice_of_numpy_names_what_numpy_has():
    words = {word.strip("`;,()") for table in TABLES.values() for text in table.values() for word in text.split()}
    functions = {word.split("(")[0].removeprefix("numpy.") for word in words if word.startswith("numpy.")}
    assert {"expand_dims", "matmul", "max", "take"} < functions
    assert not [name for name in functions if not hasattr(np, name.split(".")[0])]


@pytest.mark.parametrize("name", ["InvalidArgumentError", "NotFoundError", "OpError", "UnavailableError"])
def test_errors_of_tensorflow_say_which_to_catch(name):
    with pytest.raises(AttributeError, match=rf"no attribute '{name}'; use daskdist\.errors\.(\w+)$") as raised:
        getattr(errors, name)
    advised = str(raised.value).rpartition(".")[2]
    assert issubclass(getattr(errors, advised), errors.DaskdistError)
    assert not hasattr(errors, "NoSuchError")


@pytest.mark.parametrize("name", ["list_physical_devices", "experimental_connect_to_cluster", "set_visible_devices"])
def test_the_settings_say_what_to_use_for_names_of_tensorflow(name):
    program = f"import daskdist as tf; tf.config.{name}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert f"no attribute '{name}'; use " in done.stderr


def test_submodules_are_imported_by_their_names():
    lines = [f"import {module}" for module in TABLES]
    program = "; ".join([*lines, "import sys", "print('distributed' in sys.modules, 'pyarrow' in sys.modules)"])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    # Dataset operations, which data.experimental has, load pyarrow where they read files, and not before.
    assert done.stdout.split() == ["False", "False"]


# --- TPUStrategy ---


@pytest.mark.cluster
def test_a_strategy_for_tpus_has_the_devices_of_a_cluster(client):
    resolver = daskdist.distribute.cluster_resolver.TPUClusterResolver(client)
    with daskdist.distribute.experimental.TPUStrategy(tpu_cluster_resolver=resolver) as strategy:
        assert strategy.num_replicas_in_sync == 2
        dataset = strategy.experimental_make_numpy_dataset(np.ones([10], np.float32)).batch(4)
        totals = []
        for batch in strategy.experimental_distribute_dataset(dataset):
            parts = strategy.experimental_run_v2(lambda x: x * 2, args=(batch,))
            totals.append(float(strategy.reduce(daskdist.distribute.ReduceOp.SUM, parts, axis=0)))
        assert totals == [8.0, 8.0, 4.0]


@pytest.mark.cluster
def test_replicas_of_a_strategy_for_tpus_are_placed(client):
    first = next(iter(client.nthreads()))
    assignment = daskdist.tpu.experimental.DeviceAssignment([(first, "CPU:0")])
    for arguments in ({"experimental_device_assignment": assignment}, {"device_assignment": assignment}):
        with daskdist.distribute.TPUStrategy(client, **arguments) as strategy:
            assert strategy.extended.worker_devices == (f"{first}/CPU:0",)
    with pytest.raises(errors.ArgumentError, match="and experimental_device_assignment are both given"):
        daskdist.distribute.TPUStrategy(client, assignment, device_assignment=assignment)


def test_a_resolver_for_tpus_takes_tensorflows_spellings():
    resolver_type = daskdist.distribute.cluster_resolver.TPUClusterResolver
    assert isinstance(resolver_type("tcp://10.0.0.1:8786"), daskdist.ClusterResolver)
    assert [resolver_type(tpu).cluster for tpu in ("", "local", None)] == [None] * 3
    with pytest.raises(errors.ArgumentError, match="num_workers is 0"):
        resolver_type("tcp://10.0.0.1:8786", num_workers=0)


# --- what is under `extended` ---


def test_variables_and_their_scope():
    strategy, other = mirrored(2), mirrored(2)
    with strategy.scope():
        variable = daskdist.Variable(1.0)
    extended = strategy.extended
    assert extended.variable_created_in_scope(variable)
    assert not other.extended.variable_created_in_scope(variable)
    assert extended.value_container(variable) is variable
    assert float(extended.read_var(variable)) == 1.0
    with extended.colocate_vars_with(variable):
        assert extended.variable_created_in_scope(daskdist.Variable(2.0))
    with pytest.raises(errors.ArgumentError, match="of another strategy"), other.extended.colocate_vars_with(variable):
        pass
    with pytest.raises(errors.ArgumentError, match="float is not a Variable"):
        extended.read_var(1.0)


def test_updates_of_values_that_are_not_variables():
    extended = mirrored(2).extended
    value = PerReplica([np.array(1), np.array(2)])
    assert extended.update_non_slot(extended.non_slot_devices([]), lambda x: x + 1, (value,), group=False) == (2, 3)


# --- options ---


def test_options_of_sharding():
    distribute_options = daskdist.data.experimental.DistributeOptions
    assert distribute_options(auto_shard=False).auto_shard_policy is AutoShardPolicy.OFF
    assert distribute_options(auto_shard=True).auto_shard_policy is AutoShardPolicy.AUTO
    assert distribute_options(auto_shard_policy="data").auto_shard
    options = Options(num_threads=2)
    options.experimental_distribute = distribute_options(auto_shard=False)
    assert (options.auto_shard, options.auto_shard_policy, options.num_threads) == (False, AutoShardPolicy.OFF, 2)
    options.experimental_distribute.auto_shard = True
    assert options.auto_shard_policy is AutoShardPolicy.AUTO
    assert Dataset.range(3).with_options(distribute_options(auto_shard=False)).options().auto_shard is False


def test_bad_options_of_sharding():
    distribute_options = daskdist.data.experimental.DistributeOptions
    with pytest.raises(errors.ArgumentError, match="auto_shard is False, and auto_shard_policy 'file' shards"):
        distribute_options(auto_shard=False, auto_shard_policy="file")
    with pytest.raises(errors.ArgumentError, match="auto_shard is 'no'; give True or False"):
        Options().auto_shard = "no"
    with pytest.raises(errors.ArgumentError, match="expected options"):
        Options().experimental_distribute = False


def test_options_of_input_by_position_and_by_tensorflows_names():
    options = InputOptions(False, InputReplicationMode.PER_REPLICA, True, 3)
    assert options == InputOptions(
        experimental_fetch_to_device=False,
        experimental_replication_mode="PER_REPLICA",
        experimental_place_dataset_on_device=True,
        experimental_per_replica_buffer_size=3,
    )
    assert options.experimental_fetch_to_device is False
    assert options.experimental_replication_mode is InputReplicationMode.PER_REPLICA
    assert options.experimental_place_dataset_on_device is True
    assert options.experimental_per_replica_buffer_size == 3


# --- Optional ---


def test_an_optional_value():
    optional = daskdist.experimental.Optional.from_value({"x": np.zeros((2, 3), np.float32), "n": PerReplica([1, 2])})
    assert optional.has_value()
    assert optional.get_value()["x"].shape == (2, 3)
    assert optional.element_spec["x"] == TensorSpec((2, 3), np.float32)
    assert isinstance(optional.element_spec["n"], PerReplicaSpec)
    spec = TensorSpec((None,), np.int64)
    empty = daskdist.experimental.Optional.empty(spec)
    assert (empty.has_value(), empty.element_spec) == (False, spec)
    with pytest.raises(errors.ArgumentError, match="no value"):
        empty.get_value()


def test_the_optionals_of_iterators_are_of_this_class():
    iterator = iter(mirrored(2).experimental_distribute_dataset(Dataset.range(2).batch(2)))
    actual = [iterator.get_next_as_optional() for _ in range(2)]
    assert all(isinstance(optional, daskdist.experimental.Optional) for optional in actual)
    assert [optional.has_value() for optional in actual] == [True, False]
