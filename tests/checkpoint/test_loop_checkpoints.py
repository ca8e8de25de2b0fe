"""Checkpoints in loops on replicas: of all replicas at one step, restored by any number of them, and fenced."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from conftest import mirrored
from test_checkpoint_manager import GatedFileSystem, Thing, gated  # noqa: F401

import daskdist
from daskdist import Checkpoint, CheckpointManager, Dataset, Variable, get_replica_context
from daskdist.errors import ArgumentError, CollectiveError, FileError

pytestmark = pytest.mark.timeout(60)


def loop(iterator, manager, weights, num_steps):
    """Make two passes, or some steps; return the rows of all replicas, and the weights, which count the steps."""
    context = get_replica_context()
    saved = context.restore(manager, iterator=iterator, weights=weights, epoch=0, rows=np.zeros(0, int))
    rows = saved["rows"]
    for epoch in range(saved["epoch"], 2):
        for batch in iterator:
            rows = np.append(rows, context.all_gather(batch, 0))
            weights.assign_add(1.0)
            num_steps -= 1
            context.checkpoint(manager, iterator=iterator, weights=weights, epoch=epoch, rows=rows)
            if not num_steps:
                return rows, np.float64(weights.read_value())
    return rows, np.float64(weights.read_value())


def run_loop(strategy, manager, num_steps):
    """Run some steps of a loop with new weights; return the rows and the weights."""
    with strategy.scope():
        weights = Variable(0.0, aggregation="MEAN")
    args = (strategy.distribute_dataset(dataset()), manager, weights, num_steps)
    rows, count = strategy.run(loop, args=args)
    return np.asarray(strategy.local_results(rows)[0]).tolist(), float(strategy.local_results(count)[0])


def dataset():
    """Return a new dataset, whose first pass has the same order as in a new program."""
    return Dataset.range(20).shuffle(20, seed=3).batch(4)


@pytest.mark.parametrize("kind", ["local", "cluster"])
def test_a_loop_continues_from_its_last_checkpoint(request, tmp_path, kind):
    strategy = request.getfixturevalue("on_cluster") if kind == "cluster" else mirrored(2)
    manager = CheckpointManager(tmp_path, keep=2)
    whole, _ = run_loop(strategy, CheckpointManager(tmp_path / "whole"), -1)
    assert sorted(whole) == sorted(2 * list(range(20)))
    for num_steps, num_before in [(3, 0), (2, 3), (2, 5), (-1, 7)]:
        rows, count = run_loop(strategy, manager, num_steps)
        # All rows come in the same order as in a loop that was not interrupted.
        assert rows == whole[: len(rows)]
        assert count == (num_before + num_steps if num_steps > 0 else 10)
    assert len(rows) == len(whole)
    # The program's own saves continue the numbers of the loops' saves.
    assert manager.steps == [8, 9]
    manager.save(Checkpoint(epoch=1))
    manager.close()
    assert manager.steps == [9, 10]


def test_other_replicas_and_the_program_continue_from_it(tmp_path):
    manager = CheckpointManager(tmp_path)
    rows, _ = run_loop(mirrored(2), manager, 2)
    again, count = run_loop(mirrored(3), manager, -1)
    assert again[:8] == rows
    assert sorted(again[:20]) == sorted(again[20:]) == list(range(20))
    assert count == 10
    strategy = mirrored(1)
    with strategy.scope():
        weights = Variable(0.0)
    iterator = iter(strategy.distribute_dataset(dataset()))
    checkpoint = Checkpoint(iterator=iterator, weights=weights, epoch=0, rows=Thing(np.zeros(36, int)))
    CheckpointManager(tmp_path).restore(checkpoint, 1 + min(manager.steps))
    seen = checkpoint.rows.state.tolist()
    assert sorted(seen[20:] + [row for batch in iterator for row in batch.tolist()]) == list(range(20))
    assert (float(weights), checkpoint.epoch) == (9.0, 1)


def numbered(context):
    return np.float64(context.replica_id_in_sync_group + 1)


def keep_values(manager, variables, number):
    """Change variables by a number, and save them; or restore them if it is 0, and return their values."""
    context = get_replica_context()
    own = numbered(context) * number
    if not number:
        context.restore(manager, **variables)
        return [float(variables[name].read_value()) for name in ("total", "mean", "apart")], variables[
            "thing"
        ].read_value().state
    for name in ("total", "mean", "apart"):
        variables[name].assign(own)
    variables["thing"].read_value().state = {"x": np.full(2, number)}
    context.checkpoint(manager, **variables)
    return None


@pytest.mark.parametrize("kind", ["local", "cluster"])
def test_variables_of_every_kind(request, tmp_path, kind):
    strategy = request.getfixturevalue("on_cluster") if kind == "cluster" else mirrored(2)
    manager = CheckpointManager(tmp_path)
    on_read = {"synchronization": "ON_READ"}
    with strategy.scope():
        variables = {
            "total": Variable(0.0, aggregation="SUM", **on_read),
            "mean": Variable(0.0, aggregation="MEAN", **on_read),
            "apart": Variable(0.0, **on_read),
            "thing": Variable(lambda: Thing({"x": np.zeros(2)})),
        }
    strategy.run(keep_values, args=(manager, variables, 2))
    strategy.run(keep_values, args=(manager, variables, 7))
    CheckpointManager(tmp_path).restore(Checkpoint(**variables), 0)
    expected = [float(variables["total"]), float(variables["mean"]), variables["apart"].state_dict()["replicas"]]
    assert expected == [6.0, 3.0, [2.0, 4.0]]
    values, state = strategy.run(keep_values, args=(manager, variables, 0))
    by_replica = [list(map(float, replica)) for replica in strategy.local_results(values)]
    assert by_replica == [[10.5, 10.5, 7.0], [10.5, 10.5, 14.0]]
    assert [replica["x"].tolist() for replica in strategy.local_results(state)] == [[7, 7]] * 2


def saved_as(objects_of):
    """Return a function for replicas that saves the result of another function of the replica's number."""

    def save(manager):
        context = get_replica_context()
        context.checkpoint(manager, **objects_of(context.replica_id_in_sync_group))

    return save


def test_replicas_that_do_not_agree(tmp_path):
    strategy, manager = mirrored(2), CheckpointManager(tmp_path / "run")

    def refused(objects_of, error, message):
        with pytest.raises(error, match=message):
            strategy.run(saved_as(objects_of), args=(manager,))

    refused(lambda number: {"loss": number / 2}, ArgumentError, "'loss' is 0.0 on replica 0 and 0.5 on replica 1")
    refused(lambda number: {"ab"[number]: 1}, ArgumentError, "replica 0 saves a, and replica 1 b")
    refused(lambda number: {}, ArgumentError, "give the objects by name")
    refused(lambda number: {"a": {1}}, ArgumentError, "checkpoint: 'a': the state: set is no part of a state")
    assert manager.steps == []

    def alone(manager):
        context = get_replica_context()
        if context.replica_id_in_sync_group:
            context.checkpoint(manager, epoch=1)

    with pytest.raises(CollectiveError, match="checkpoint is called by some replicas only: replica 0 has ended"):
        strategy.run(alone, args=(manager,))
    with pytest.raises(ArgumentError, match="the first argument is str; give a CheckpointManager"):
        strategy.run(saved_as(lambda number: {"a": 1}), args=("directory",))
    strategy.run(saved_as(lambda number: {"a": 1}), args=(manager,))
    with pytest.raises(ArgumentError, match=r"is of other objects: 'b' missing; 'a' superfluous"):
        strategy.run(lambda: get_replica_context().restore(manager, b=1))


def test_a_step_waits_for_the_copy_only_and_the_call_for_the_file(gated):  # noqa: F811
    manager = CheckpointManager("gated://run")
    # Claiming the directory writes a file too, so open the gate first.
    gated.gate.set()
    went_on = []

    def train(weights):
        context = get_replica_context()
        context.restore(manager, weights=weights)
        gated.gate.clear()
        context.checkpoint(manager, weights=weights)
        weights += 1
        went_on.append(context.replica_id_in_sync_group)
        if len(went_on) == 2:
            assert manager.steps == []
            gated.gate.set()

    strategy = mirrored(2)
    strategy.run(train, args=(daskdist.PerReplica([np.zeros(3), np.ones(3)]),))
    assert sorted(went_on) == [0, 1]
    assert manager.steps == [0]
    (actual,) = strategy.local_results(strategy.run(lambda: get_replica_context().restore(manager, weights=0)))[:1]
    assert actual["weights"].tolist() == [0, 0, 0]


def test_all_replicas_learn_that_a_save_failed(gated):  # noqa: F811
    manager = CheckpointManager("gated://run")
    gated.gate.set()
    report = []

    def train():
        context = get_replica_context()
        context.restore(manager, epoch=0)
        GatedFileSystem.is_broken = True
        context.checkpoint(manager, epoch=1)
        with pytest.raises(FileError, match="the disk is full"):
            context.checkpoint(manager, epoch=2)
        report.append(context.replica_id_in_sync_group)

    mirrored(2).run(train)
    assert sorted(report) == [0, 1]
    GatedFileSystem.is_broken = False

    def save_last():
        context = get_replica_context()
        context.restore(manager, epoch=0)
        # Break it before the checkpoint: a thread writes that, maybe before the next line.
        GatedFileSystem.is_broken = True
        context.checkpoint(manager, epoch=1)

    strategy = mirrored(2)
    with pytest.raises(FileError, match="the disk is full"):
        strategy.run(save_last)


def test_one_run_at_a_time_saves_to_a_directory(tmp_path):
    first, second = CheckpointManager(tmp_path), CheckpointManager(tmp_path)
    first._claim_directory()
    first.save(Checkpoint(epoch=1))
    first.wait()
    copy = pickle.loads(pickle.dumps(second))
    copy._claim_directory()
    first.save(Checkpoint(epoch=2))
    with pytest.raises(FileError, match="another run has begun to save checkpoints here"):
        first.close()
    assert copy.steps == [0]
    copy.save(Checkpoint(epoch=3))
    copy.close()
    assert second.steps == [0, 1]
    assert sorted(path.name for path in tmp_path.iterdir())[0] == "claim-00000002"


def test_a_save_that_is_over_is_refused(tmp_path):
    manager = CheckpointManager(tmp_path)

    def refuse():
        raise FileError("its program is gone")

    manager._save_states({"epoch": 1}, check=refuse)
    with pytest.raises(FileError, match="its program is gone"):
        manager.close()
    assert list(tmp_path.iterdir()) == []


def test_a_variable_inside_of_a_nest_is_refused(tmp_path):
    strategy, manager = mirrored(2), CheckpointManager(tmp_path)
    with strategy.scope():
        weights = Variable([1.0, 2.0])
    with pytest.raises(ArgumentError, match=r"checkpoint: 'model' has .*Variable inside; give objects .* by names"):
        strategy.local_results(strategy.run(saved_as(lambda number: {"model": {"weights": weights}}), args=(manager,)))
    assert list(tmp_path.glob("*.ckpt")) == []
