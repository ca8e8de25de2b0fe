"""Checkpoints of a run in a directory: numbered, written in the background; the newest are kept."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
from typing import ClassVar

import fsspec
import numpy as np
import pytest
from conftest import mirrored
from fsspec.implementations.memory import MemoryFileSystem
from programs import Program

import daskdist
from daskdist import Checkpoint, CheckpointManager, Variable
from daskdist.errors import ArgumentError, FileError

pytestmark = pytest.mark.timeout(60)

# A program that saves until it is killed; the saved values tell the step.
PROGRAM = """
import sys
import numpy as np
import daskdist

class Weights:
    def state_dict(self):
        return {"w": np.full(200_000, self.step), "step": self.step}
    def load_state_dict(self, state):
        raise AssertionError

weights = Weights()
manager = daskdist.CheckpointManager(sys.argv[1], keep=2)
checkpoint = daskdist.Checkpoint(weights=weights, step=0)
for step in range(100_000):
    weights.step = checkpoint.step = step
    manager.save(checkpoint, step)
    print(step, flush=True)
"""


class Thing:
    def __init__(self, state=None):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


class GatedFileSystem(MemoryFileSystem):
    """A file system in memory in which opening a file for writing waits for a gate, or fails."""

    protocol = "gated"
    store: ClassVar[dict] = {}
    pseudo_dirs: ClassVar[list] = [""]
    gate = threading.Event()
    is_broken = False

    def _open(self, path, mode="rb", **kwargs):
        if "w" in mode:
            assert type(self).gate.wait(30)
            if type(self).is_broken:
                raise OSError("the disk is full")
        return super()._open(path, mode, **kwargs)


@pytest.fixture
def gated():
    fsspec.register_implementation("gated", GatedFileSystem, clobber=True)
    GatedFileSystem.gate.clear()
    GatedFileSystem.is_broken = False
    GatedFileSystem.store.clear()
    return GatedFileSystem


# --- values ---


def test_plain_values_are_saved_and_restored(tmp_path):
    values = {"epoch": 3, "rate": 0.5, "name": "run", "key": b"\0\1", "best": None, "big": np.float32(2.5), "on": True}
    Checkpoint(**values).save(tmp_path / "a")
    other = Checkpoint(**dict.fromkeys(values))
    other.restore(tmp_path / "a")
    for name, value in values.items():
        assert getattr(other, name) == value
        assert type(getattr(other, name)) is type(value)


def test_a_checkpoint_in_place_of_a_directory_is_refused():
    with pytest.raises(ArgumentError, match=r"directory is a Checkpoint; give a path .* save\(checkpoint, step"):
        CheckpointManager(Checkpoint(epoch=0), "run")


def test_values_are_attributes(tmp_path):
    thing = Thing(np.arange(3))
    checkpoint = Checkpoint(thing=thing, epoch=0)
    assert checkpoint.thing is thing
    checkpoint.epoch += 1
    checkpoint.save(tmp_path / "a")
    checkpoint.epoch, thing.state = 7, np.zeros(3, int)
    checkpoint.restore(tmp_path / "a")
    assert (checkpoint.epoch, thing.state.tolist()) == (1, [0, 1, 2])
    assert {"thing", "epoch", "save"} <= set(dir(checkpoint))


def test_other_values_are_refused(tmp_path):
    with pytest.raises(ArgumentError, match="'a' is ndarray; give an object with state_dict"):
        Checkpoint(a=np.array([object()]))
    with pytest.raises(ArgumentError, match="'save' is the name of a method"):
        Checkpoint(save=1)
    checkpoint = Checkpoint(epoch=1)
    with pytest.raises(ArgumentError, match="'epoch' is set"):
        checkpoint.epoch = {1}
    with pytest.raises(AttributeError, match="no 'epochs'; it is of epoch"):
        checkpoint.epochs = 2
    with pytest.raises(AttributeError, match="no 'epochs'; it is of epoch"):
        _ = checkpoint.epochs
    assert checkpoint.epoch == 1
    Checkpoint(epoch=Thing({"x": 1})).save(tmp_path / "a")
    with pytest.raises(ArgumentError, match=r"'epoch' is the state of an object.*nothing was restored"):
        checkpoint.restore(tmp_path / "a")


def test_replicas_are_refused(tmp_path):
    strategy = mirrored(2)
    checkpoint = Checkpoint(epoch=1)
    manager = CheckpointManager(tmp_path / "run")
    checkpoint.save(tmp_path / "a")
    for call in (
        lambda: checkpoint.save(tmp_path / "b"),
        lambda: checkpoint.restore(tmp_path / "a"),
        lambda: manager.save(checkpoint),
    ):
        with pytest.raises(RuntimeError, match=r"Checkpoint: replica \d calls it.*Save and restore in the program"):
            strategy.local_results(strategy.run(call))
    assert os.listdir(tmp_path) == ["a"]


# --- the directory ---


def test_the_newest_are_kept(tmp_path):
    manager = CheckpointManager(tmp_path / "deep" / "run", keep=2)
    checkpoint = Checkpoint(thing=Thing(np.zeros(2)), epoch=0)
    assert manager.restore(checkpoint) is None
    assert manager.steps == []
    assert [
        manager.save(checkpoint),
        manager.save(checkpoint),
        manager.save(checkpoint, 10),
        manager.save(checkpoint),
    ] == [
        0,
        1,
        10,
        11,
    ]
    manager.wait()
    assert manager.steps == [10, 11]
    assert sorted(os.listdir(tmp_path / "deep" / "run")) == ["step-00000010.ckpt", "step-00000011.ckpt"]
    # Another program continues the numbers.
    other = CheckpointManager(tmp_path / "deep" / "run", keep=2)
    assert other.save(checkpoint) == 12
    other.close()
    assert other.steps == [11, 12]


def test_objects_continue_from_the_newest(tmp_path):
    strategy = mirrored(2)
    with strategy.scope():
        weights = Variable(np.zeros(3))
    checkpoint = Checkpoint(weights=weights, epoch=0)
    with CheckpointManager(tmp_path) as manager:
        for epoch in range(4):
            weights.assign(np.full(3, float(epoch)))
            checkpoint.epoch = epoch
            manager.save(checkpoint, epoch)
            # The checkpoint holds the values at the time of the call, so that this change is not in it.
            weights.assign(np.full(3, -1.0))
    assert CheckpointManager(tmp_path).restore(checkpoint) == 3
    assert (weights.numpy().tolist(), checkpoint.epoch) == ([3.0] * 3, 3)


@pytest.mark.parametrize(
    "damage", [lambda data: data[:100], lambda data: b"", lambda data: data[:60] + b"?" + data[61:]]
)
def test_damaged_ones_are_passed_over(tmp_path, damage, caplog):
    checkpoint = Checkpoint(thing=Thing(np.arange(100)), epoch=0)
    with CheckpointManager(tmp_path) as manager:
        for epoch in range(3):
            checkpoint.epoch = epoch
            manager.save(checkpoint, epoch)
    newest = tmp_path / "step-00000002.ckpt"
    newest.write_bytes(damage(newest.read_bytes()))
    manager = CheckpointManager(tmp_path)
    with caplog.at_level(logging.WARNING, "daskdist"):
        assert manager.restore(checkpoint) == 1
    assert "passed over" in caplog.text
    assert "step-00000002" in caplog.text
    assert checkpoint.epoch == 1
    with pytest.raises(FileError, match="step-00000002"):
        manager.restore(checkpoint, 2)
    # The next save replaces the damaged checkpoint.
    manager.restore(checkpoint)
    assert manager.save(checkpoint) == 2
    manager.close()
    assert CheckpointManager(tmp_path).restore(checkpoint) == 2


def test_all_damaged_is_an_error(tmp_path):
    (tmp_path / "step-00000001.ckpt").write_bytes(b"nothing")
    with pytest.raises(FileError, match="no checkpoint"):
        CheckpointManager(tmp_path).restore(Checkpoint(epoch=0))


def test_going_back(tmp_path):
    checkpoint = Checkpoint(epoch=0)
    manager = CheckpointManager(tmp_path, keep=5)
    for epoch in range(4):
        manager.save(checkpoint, epoch)
    with pytest.raises(ArgumentError, match="step 2 is not after step 3"):
        manager.save(checkpoint, 2)
    manager.wait()
    with pytest.raises(ArgumentError, match="step 3 is not after step 3"):
        CheckpointManager(tmp_path).save(checkpoint, 3)
    with pytest.raises(FileError, match="step-00000009"):
        manager.restore(checkpoint, 9)
    assert manager.restore(checkpoint, 1) == 1
    assert manager.save(checkpoint) == 2
    manager.close()
    # Going back to step 1 has removed step 3, which came after it.
    assert manager.steps == [0, 1, 2]


def test_other_files_are_left_alone(tmp_path):
    for name in ("notes.txt", "step-x.ckpt", "step-00000001.ckpt.bak"):
        (tmp_path / name).write_text("mine")
    with CheckpointManager(tmp_path, keep=1) as manager:
        for _ in range(3):
            manager.save(Checkpoint(epoch=0))
    assert sorted(os.listdir(tmp_path)) == ["notes.txt", "step-00000001.ckpt.bak", "step-00000002.ckpt", "step-x.ckpt"]


# --- in the background ---


def test_saving_returns_before_the_file_is_written(gated):
    thing = Thing(np.zeros(3))
    checkpoint = Checkpoint(thing=thing)
    manager = CheckpointManager("gated://run")
    manager.save(checkpoint)
    thing.state[:] = 5
    assert manager.steps == []
    gated.gate.set()
    manager.wait()
    assert manager.steps == [0]
    manager.restore(checkpoint)
    assert thing.state.tolist() == [0, 0, 0]
    manager.close()


def test_a_failure_is_raised_by_the_next_call_and_logged(gated, caplog):
    gated.gate.set()
    manager = CheckpointManager("gated://run")
    checkpoint = Checkpoint(epoch=0)
    manager.save(checkpoint)
    manager.wait()
    gated.is_broken = True
    for call in (lambda: manager.save(checkpoint), manager.wait, manager.close, lambda: manager.restore(checkpoint)):
        manager.save(checkpoint)
        with pytest.raises(FileError, match="the disk is full"):
            call()
    assert "the checkpoint of step 1 was not saved" in caplog.text
    gated.is_broken = False
    assert manager.restore(checkpoint) == 0
    gated.is_broken = True
    with pytest.raises(ZeroDivisionError), manager:
        print(1 // (manager.save(checkpoint) - 1))


def test_a_killed_program_leaves_whole_ones(tmp_path):
    with Program("-c", PROGRAM, tmp_path, stdout=subprocess.PIPE) as program:
        printed = [program.stdout.readline() for _ in range(25)]
        os.kill(program.pid, signal.SIGKILL)
    assert printed[-1] == "24\n"
    thing = Thing({"w": np.zeros(200_000, int), "step": 0})
    checkpoint = Checkpoint(weights=thing, step=-1)
    step = CheckpointManager(tmp_path).restore(checkpoint)
    assert step >= 23
    assert checkpoint.step == step == thing.state["step"]
    assert set(thing.state["w"].tolist()) == {step}


@pytest.mark.parametrize("keep", [0, -1, 1.5, "3"])
def test_bad_input(keep):
    with pytest.raises(ArgumentError, match="CheckpointManager: keep"):
        CheckpointManager("memory://run", keep=keep)


def test_public():
    assert daskdist.CheckpointManager is CheckpointManager
