"""Training with frameworks: models that replicas keep, and replicas as processes of torch.distributed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conftest import mirrored

import daskdist
from daskdist import Dataset, PerReplica
from daskdist.errors import ArgumentError

# Keras itself causes this warning for tensors of PyTorch.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")
ROWS = 240
WEIGHTS = np.array([1.0, -2.0, 0.5], np.float32)


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch", reason="PyTorch is not installed")


@pytest.fixture
def jax() -> Any:
    return pytest.importorskip("jax", reason="JAX is not installed")


def line(dtype: Any = np.float32) -> Dataset:
    """Return points of a line, in batches of 60."""
    x = np.random.default_rng(3).normal(size=(ROWS, 3)).astype(dtype)
    return Dataset.from_tensor_slices((x, (x @ WEIGHTS)[:, None])).shuffle(ROWS, seed=5).batch(60)


# --- replicas as the processes of torch.distributed ---


def trained_alone(torch: Any, x: Any, y: Any, batch_size: int, num_epochs: int) -> Any:
    """Return the weights of a line that are trained in this process with whole batches."""
    line = torch.nn.Linear(3, 1, dtype=torch.float64)
    torch.nn.init.zeros_(line.weight), torch.nn.init.zeros_(line.bias)
    optimizer = torch.optim.SGD(line.parameters(), lr=0.2)
    for _ in range(num_epochs):
        for start in range(0, len(x), batch_size):
            rows = slice(start, start + batch_size)
            optimizer.zero_grad()
            actual = line(torch.from_numpy(x[rows]))[:, 0]
            torch.nn.functional.mse_loss(actual, torch.from_numpy(y[rows])).backward()
            optimizer.step()
    return line.weight.detach().numpy()


@pytest.mark.cluster
def test_replicas_train_as_one(torch, on_cluster):
    x = np.random.default_rng(0).normal(size=(ROWS, 3))
    y = x @ WEIGHTS.astype(float)

    def train(steps, num_epochs):
        import torch

        with daskdist.torch_process_group() as group:
            line = torch.nn.Linear(3, 1, dtype=torch.float64)
            torch.nn.init.zeros_(line.weight), torch.nn.init.zeros_(line.bias)
            line = torch.nn.parallel.DistributedDataParallel(line)
            optimizer = torch.optim.SGD(line.parameters(), lr=0.2)
            num_batches = 0
            for _ in range(num_epochs):
                for batch in steps:
                    tensors = daskdist.to_torch(batch)
                    num_batches += 1
                    optimizer.zero_grad()
                    torch.nn.functional.mse_loss(line(tensors["x"])[:, 0], tensors["y"]).backward()
                    optimizer.step()
            return {
                "weights": line.module.weight.detach().numpy(),
                "rank": group.get_rank(),
                "size": group.get_world_size(),
                "num_batches": num_batches,
            }

    batches = on_cluster.distribute_dataset(Dataset.from_tensor_slices({"x": x, "y": y}).batch(40))
    results = on_cluster.local_results(on_cluster.run(train, args=(batches, 3)))
    expected = trained_alone(torch, x, y, 40, 3)
    for number, actual in enumerate(results):
        assert (actual["rank"], actual["size"]) == (number, 2)
        assert actual["num_batches"] == 18
        # Both replicas have equally many rows, so the mean of their gradients is the gradient of the whole batch.
        np.testing.assert_allclose(actual["weights"], expected, rtol=1e-12)
    # The process group ends with its block, so that another one can be made.
    again = on_cluster.local_results(on_cluster.run(train, args=(batches, 1)))
    assert [actual["rank"] for actual in again] == [0, 1]


@pytest.mark.cluster
def test_a_model_is_freed_with_its_function_without_waiting(torch, on_cluster):
    def train():
        import torch

        with daskdist.torch_process_group():
            line = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
            for _ in range(20):
                line(torch.ones(4, 3)).sum().backward()
        return 1

    # If freeing the model can hang, it does so within a few calls.
    for _ in range(15):
        assert on_cluster.local_results(on_cluster.run(train)) == (1, 1)


@pytest.mark.cluster
def test_groups_in_flight_are_made_in_the_order_of_the_program(torch, on_cluster, client):
    def total(number):
        import torch

        with daskdist.torch_process_group(timeout_s=20) as group:
            numbers = torch.full((3,), float(number))
            group.all_reduce(numbers)
            return float(numbers[0])

    totals = [on_cluster.run(total, args=(number,)) for number in range(3)]
    assert on_cluster.local_results(totals[::-1]) == ([4.0, 2.0, 0.0], [4.0, 2.0, 0.0])
    # A strategy waits for processes that are in a group of another strategy.
    with daskdist.MultiWorkerMirroredStrategy(client) as other:
        both = [(on_cluster.run(total, args=(number,)), other.run(total, args=(10 + number,))) for number in range(3)]
        for number, (here, there) in enumerate(both):
            assert on_cluster.local_results(here) == (2.0 * number,) * 2
            assert other.local_results(there) == (20.0 + 2 * number,) * 2


@pytest.mark.cluster
def test_what_a_replica_raises_while_others_wait_for_its_gradients_is_raised(torch, on_cluster):
    def train(wraps):
        import torch

        with daskdist.torch_process_group(timeout_s=3) as group:
            line = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
            for step in range(5):
                if step == 2 and group.get_rank() == 1:
                    raise KeyError("the root cause")
                try:
                    line(torch.ones(4, 3)).sum().backward()
                except RuntimeError as error:
                    if wraps:
                        raise ValueError("of the function") from error
                    raise

    for wraps in (False, True):
        with pytest.raises(KeyError, match="the root cause"):
            on_cluster.local_results(on_cluster.run(train, args=(wraps,)))


def test_a_group_is_of_replicas(torch):
    with (
        pytest.raises(ArgumentError, match="torch_process_group: called outside a replica"),
        daskdist.torch_process_group(),
    ):
        pass

    def step():
        with daskdist.torch_process_group():
            pass

    with pytest.raises(ArgumentError, match="several of 2 replicas share a process"):
        mirrored(2).run(step)


# --- what replicas keep, and train ---


def points() -> tuple[Any, Any]:
    x = np.random.default_rng(0).normal(size=(ROWS, 3)).astype(np.float32)
    return x, x @ WEIGHTS


def test_a_torch_module_is_kept_trained_and_restored(torch, two, tmp_path):
    def make():
        import torch

        module = torch.nn.Linear(3, 1)
        torch.nn.init.zeros_(module.weight), torch.nn.init.zeros_(module.bias)
        return module

    with two.scope():
        model = daskdist.Variable(make, name="model")

    def step(batch):
        import torch

        module = model.read_value()
        x, y = daskdist.to_torch(batch)
        module.zero_grad()
        torch.nn.functional.mse_loss(module(x)[:, 0], y).backward()
        gradients = [value.grad.numpy() for value in module.parameters()]
        gradients = daskdist.get_replica_context().all_reduce("MEAN", gradients)
        with torch.no_grad():
            for parameter, gradient in zip(module.parameters(), gradients, strict=True):
                parameter -= 0.2 * torch.from_numpy(gradient)

    def weights():
        return model.read_value().weight.detach().numpy().copy()

    def train():
        for batch in batches:
            two.run(step, args=(batch,))
        return [value.tolist() for value in two.local_results(two.run(weights))]

    x, y = points()
    batches = two.distribute_dataset(Dataset.from_tensor_slices((x, y)).batch(40))
    first, second = train()
    assert first == second
    checkpoint = daskdist.Checkpoint(model=model)
    checkpoint.save(tmp_path / "model.npz")
    later = train()
    assert later[0] != first
    assert np.abs(np.array(later[0][0]) - WEIGHTS).max() < 0.2
    checkpoint.restore(tmp_path / "model.npz")
    assert [value.tolist() for value in two.local_results(two.run(weights))] == [first, first]
    # Training from the checkpoint gives the same values again.
    assert train() == later


def test_a_torch_module_that_is_assigned_is_each_replicas_own(torch, two):
    def make():
        import torch

        return torch.nn.Linear(3, 1)

    with two.scope():
        model = daskdist.Variable(make, aggregation="ONLY_FIRST_REPLICA")

    def add():
        import torch

        context = daskdist.get_replica_context()
        with torch.no_grad():
            model.read_value().weight += context.replica_id_in_sync_group + 1
        context.all_reduce("SUM", 1)
        return model.read_value().weight.tolist()

    given = torch.nn.Linear(3, 1)
    torch.nn.init.zeros_(given.weight)
    model.assign(given)
    assert two.local_results(two.run(add)) == ([[1, 1, 1]], [[2, 2, 2]])
    assert given.weight.tolist() == [[0, 0, 0]]

    def assign():
        import torch

        made = torch.nn.Linear(3, 1)
        torch.nn.init.constant_(made.weight, 10.0 * (daskdist.get_replica_context().replica_id_in_sync_group + 1))
        model.assign(made)

    two.run(assign)
    assert two.local_results(two.run(add)) == ([[11, 11, 11]], [[12, 12, 12]])


def test_sums_of_tensors_keep_no_gradient_graph(torch):
    strategy = mirrored(2)
    with strategy.scope():
        var = daskdist.Variable(lambda: {"w": torch.zeros(2, requires_grad=True)}, aggregation="SUM")
    for _ in range(2):
        strategy.run(lambda: var.assign_add({"w": torch.ones(2)}))
    actual = strategy.local_results(var)
    assert [(result["w"].grad_fn, result["w"].tolist()) for result in actual] == [(None, [4, 4])] * 2


def jax_step(weights: Any, batch: Any) -> Any:
    """Return the gradient of the mean squared error of a line, by JAX."""
    import jax

    def loss(weights, x, y):
        return ((x @ weights["w"] + weights["b"] - y) ** 2).mean()

    return jax.grad(loss)(weights, *daskdist.to_jax(batch))


def jax_zeros() -> Any:
    import jax

    return {"w": jax.numpy.zeros(3), "b": jax.numpy.zeros(())}


def jax_trained_alone(num_epochs: int, batch_size: int) -> Any:
    """Return the weights of a line that are trained in this process with whole batches."""
    import jax

    (x, y), weights = points(), jax_zeros()
    for _ in range(num_epochs):
        for start in range(0, ROWS, batch_size):
            rows = slice(start, start + batch_size)
            gradient = jax_step(weights, (x[rows], y[rows]))
            weights = jax.tree.map(lambda weight, value: weight - 0.2 * value, weights, gradient)
    return weights


@pytest.mark.parametrize("how", ["assign", "assign_sub"])
def test_a_nest_of_jax_arrays_is_kept_trained_and_restored(jax, two, tmp_path, how):
    with two.scope():
        weights = daskdist.Variable(jax_zeros, aggregation="MEAN", name="weights")

    def step(batch):
        import jax

        here = weights.read_value()
        change = jax.tree.map(lambda item: 0.2 * item, jax_step(here, batch))
        if how == "assign":
            weights.assign(jax.tree.map(lambda value, by: value - by, here, change))
        else:
            weights.assign_sub(change)

    def kept():
        import jax

        here = weights.read_value()
        assert all(isinstance(leave, jax.Array) for leave in jax.tree.leaves(here))
        return {name: np.asarray(value) for name, value in here.items()}

    def train():
        for batch in batches:
            two.run(step, args=(batch,))
        first, second = two.local_results(two.run(kept))
        assert first["w"].tolist() == second["w"].tolist()
        assert first["b"] == second["b"]
        return first

    batches = two.distribute_dataset(Dataset.from_tensor_slices(points()).batch(40))
    once = train()
    # Both replicas have equally many rows, so the mean of their gradients is the gradient of the whole batch.
    np.testing.assert_allclose(once["w"], jax_trained_alone(1, 40)["w"], rtol=1e-5)
    checkpoint = daskdist.Checkpoint(weights=weights)
    checkpoint.save(tmp_path / "weights.npz")
    twice = train()
    np.testing.assert_allclose(twice["w"], WEIGHTS, atol=0.1)
    checkpoint.restore(tmp_path / "weights.npz")
    assert [part["w"].tolist() for part in two.local_results(two.run(kept))] == [once["w"].tolist()] * 2
    assert train()["w"].tolist() == twice["w"].tolist()


def test_a_nest_of_jax_arrays_without_aggregation_is_the_same_on_all(jax, two):
    with two.scope():
        weights = daskdist.Variable(jax_zeros, name="weights")

    def moved(by):
        import jax

        weights.assign(jax.tree.map(lambda value: value + by, weights.read_value()))
        return weights.read_value()["w"].tolist()

    assert two.local_results(two.run(moved, args=(1.0,))) == ([1, 1, 1], [1, 1, 1])
    with pytest.raises(daskdist.errors.CollectiveError, match=r"weights.assign: replica 1 gives another value than"):
        two.local_results(two.run(moved, args=(PerReplica([1.0, 2.0]),)))
    assert weights.state_dict()["value"]["w"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_arrays_of_a_framework_are_a_variable_of_arrays(request, two, library):
    request.getfixturevalue(library)

    def ones():
        if library == "torch":
            import torch as xp
        else:
            import jax.numpy as xp
        return xp.ones(2)

    with two.scope():
        var = daskdist.Variable({"w": ones(), "b": 0.0}, aggregation="SUM")
    assert var.numpy()["w"].dtype == np.float32
    var.assign({"w": ones() * 3, "b": ones().sum()})

    def step():
        var.assign_add({"w": ones(), "b": np.float64(1)})
        return var.read_value()["w"]

    assert [value.tolist() for value in two.local_results(two.run(step))] == [[5, 5]] * 2
    assert float(var.numpy()["b"]) == 4


def test_jax_trains_in_a_loop_on_the_replicas(jax, two):
    def loop(steps, num_epochs):
        import jax

        context = daskdist.get_replica_context()
        weights, num_batches = jax_zeros(), 0
        for _ in range(num_epochs):
            for batch in steps:
                num_batches += 1
                gradient = context.all_reduce("MEAN", jax_step(weights, batch))
                weights = jax.tree.map(lambda weight, value: weight - 0.2 * value, weights, gradient)
        return {"w": np.asarray(weights["w"]), "b": float(weights["b"]), "batches": num_batches}

    batches = two.distribute_dataset(Dataset.from_tensor_slices(points()).batch(40))
    first, second = two.local_results(two.run(loop, args=(batches, 3)))
    assert first["batches"] == second["batches"] == 18
    assert first["w"].tolist() == second["w"].tolist()
    np.testing.assert_allclose(first["w"], jax_trained_alone(3, 40)["w"], rtol=1e-5)
    np.testing.assert_allclose(first["w"], WEIGHTS, atol=0.05)
