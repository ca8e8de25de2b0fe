"""Passes continue after Ctrl-C: each element comes once, and positions taken later are right."""

from __future__ import annotations

import contextlib
import gc
import itertools
import random
import signal
import time
import weakref

import dask
import numpy as np
import pytest
from conftest import mirrored

from daskdist import Dataset, PerReplica, TensorSpec, errors
from daskdist.call_threads import CallThreads
from daskdist.display.step_times import StepTimes

# Python ignores an interrupt, with a warning, where an object is being deleted.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
# An alarm interrupts the program this many seconds after an element is requested, at most.
SOON_S = 0.003


def slow(x):
    time.sleep(0.001)
    return x


PIPELINES = {
    "map": lambda: Dataset.range(300).batch(6).map(slow),
    "rows": lambda: Dataset.range(300).map(slow).batch(6),
    "shuffle": lambda: Dataset.range(300).map(slow).shuffle(40, seed=1).batch(6),
    "scan": lambda: Dataset.range(300).scan(0, lambda total, n: (total + slow(n), n)).batch(6),
    "interleave": lambda: (
        Dataset.range(30).interleave(lambda n: Dataset.range(10).map(lambda m: slow(n * 10 + m)), 2).batch(6)
    ),
    "unique": lambda: Dataset.range(300).map(slow).unique().batch(6),
}


@pytest.fixture
def interrupt_soon():
    """Return a context in which Ctrl-C is pressed at a random time soon."""

    def interrupted(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupted)
    randomly = random.Random(3)

    @contextlib.contextmanager
    def soon():
        signal.setitimer(signal.ITIMER_REAL, 1e-5 + SOON_S * randomly.random())
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    yield soon
    signal.signal(signal.SIGALRM, before)


def rows_of(iterator, values_of, interrupt_soon, most_interrupts):
    """Return the rows of a pass in which requests are interrupted, the rows at a position after that, and its state."""
    rows, num_interrupts, position = [], 0, None
    while True:
        interrupt = interrupt_soon() if num_interrupts < most_interrupts else contextlib.nullcontext()
        step = None
        try:
            with interrupt:
                step = next(iterator)
        except KeyboardInterrupt:
            num_interrupts += 1
        except StopIteration:
            break
        if step is not None:
            rows += values_of(step)
        if num_interrupts and position is None and len(rows) > 150:
            position = list(rows), iterator.state_dict()
    assert num_interrupts
    assert position is not None
    return rows, *position


@pytest.mark.parametrize("name", PIPELINES)
def test_a_local_pass_continues_after_interrupts(name, interrupt_soon):
    ds = PIPELINES[name]()
    expected = np.concatenate(list(ds)).tolist()
    for _ in range(2):
        rows, before, state = rows_of(iter(PIPELINES[name]()), np.ndarray.tolist, interrupt_soon, 8)
        assert rows == expected
        resumed = iter(PIPELINES[name]())
        resumed.load_state_dict(state)
        assert before + np.concatenate(list(resumed)).tolist() == expected


@pytest.mark.cluster
@pytest.mark.parametrize("name", ["map", "shuffle"])
def test_a_distributed_pass_continues_after_interrupts(on_cluster, name, interrupt_soon):
    def values_of(step):
        return np.concatenate(on_cluster.local_results(step)).tolist()

    distributed = on_cluster.distribute_dataset(PIPELINES[name]())
    for _ in range(2):
        rows, before, state = rows_of(iter(distributed), values_of, interrupt_soon, 3)
        assert sorted(rows) == list(range(300))
        resumed = iter(distributed)
        resumed.load_state_dict(state)
        rest = [row for step in resumed for row in values_of(step)]
        assert sorted(before + rest) == list(range(300))


def test_a_pass_over_a_generator_does_not_continue_without_the_elements_it_lost(interrupt_soon):
    numbers = iter(range(300))
    ds = Dataset.from_generator(lambda: map(slow, numbers), output_signature=TensorSpec((), "int64")).batch(6)
    iterator = iter(ds)
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - each request may be the interrupted one
        while True:
            with interrupt_soon():
                next(iterator)
    for _ in range(2):
        with pytest.raises(errors.ArgumentError, match="interrupted while it took an element from a generator"):
            next(iterator)


def interrupt_call(monkeypatch, owner, name, number):
    """Raise KeyboardInterrupt in a call of a method with this number, as a signal does that comes there."""
    called, numbers = getattr(owner, name), itertools.count(1)

    def call(*args):
        if next(numbers) == number:
            raise KeyboardInterrupt
        return called(*args)

    monkeypatch.setattr(owner, name, call)


def local_results(element):
    return element.values if isinstance(element, PerReplica) else [element]


def taken(iterator):
    found = []
    while True:
        try:
            found += np.concatenate([np.atleast_1d(part) for part in local_results(next(iterator))]).tolist()
        except StopIteration:
            return found
        except KeyboardInterrupt:
            pass


@pytest.mark.parametrize("is_distributed", [False, True])
def test_an_interrupt_behind_the_taking_of_an_element_loses_nothing(monkeypatch, is_distributed):
    ds = Dataset.range(6).batch(1)
    interrupt_call(monkeypatch, StepTimes, "note", 3)
    assert taken(iter(mirrored(2).distribute_dataset(ds) if is_distributed else ds)) == [*range(6)]


def test_a_closed_iterator_keeps_no_blocks_after_an_interrupt(monkeypatch):
    iterator = iter(mirrored(2).distribute_dataset(Dataset.range(600).map(np.sqrt).batch(4)))
    next(iterator)
    run, _ = iterator._cursor.mark
    blocks = [weakref.ref(lane.ref) for lane in run.lanes]
    del run
    interrupt_call(monkeypatch, StepTimes, "note", 1)
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    iterator.close()
    gc.collect()
    assert [block() for block in blocks] == [None, None]


@pytest.mark.parametrize("is_distributed", [False, True])
def test_a_position_loaded_after_an_interrupt_of_the_first_element_is_the_one_that_counts(monkeypatch, is_distributed):
    ds = Dataset.range(6).batch(1)
    passes = mirrored(2).distribute_dataset(ds) if is_distributed else ds
    iterator, interrupted = iter(passes), iter(passes)
    next(iterator)
    state = iterator.state_dict()
    interrupt_call(monkeypatch, StepTimes, "note", 1)
    with pytest.raises(KeyboardInterrupt):
        next(interrupted)
    interrupted.load_state_dict(state)
    assert taken(interrupted) == taken(iterator)


def test_a_pass_ends_after_an_interrupt_while_it_starts_a_thread(monkeypatch):
    interrupt_call(monkeypatch, CallThreads, "start", 1)
    with dask.config.set({"daskdist.timeouts.data": 20}):
        began_at = time.monotonic()
        iterator = iter(Dataset.range(400).map(lambda x: x + 1, num_parallel_calls=2).batch(4))
        assert taken(iterator) == [*range(1, 401)]
        # Its end does not wait for a thread that was not started.
        assert time.monotonic() - began_at < 10
