"""The garbage collector may find an owner while a thread holds a lock: closing it must not wait for that thread."""

import gc
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from daskdist import Dataset, Options, TensorSpec
from daskdist.core.finalizer import Finalizer


class Owner:
    """The watched object, in a reference cycle, so that only the garbage collector frees it."""

    def __init__(self):
        self.itself = self


def test_a_finalizer_is_called_once_in_the_calling_thread():
    owner, called = Owner(), []
    finalizer = Finalizer(owner, lambda: called.append(threading.current_thread()))
    assert finalizer.alive
    finalizer()
    finalizer()
    assert called == [threading.current_thread()]
    assert not finalizer.alive


def test_a_detached_finalizer_is_never_called():
    owner, called, after = Owner(), [], threading.Event()
    finalizer = Finalizer(owner, called.append, None)
    assert finalizer.detach()
    assert not finalizer.detach()
    finalizer()
    other = Owner()
    Finalizer(other, after.set)
    del owner, other
    gc.collect()
    assert after.wait(10)
    assert not called


def test_a_failure_is_logged_and_the_next_is_called(caplog):
    owner, after = Owner(), threading.Event()
    Finalizer(owner, lambda: 1 / 0)
    del owner
    gc.collect()
    other = Owner()
    Finalizer(other, after.set)
    del other
    gc.collect()
    assert after.wait(10)
    assert "could not be closed" in caplog.text


def iterator_of_threads():
    """Return an iterator whose pool has threads."""
    iterator = iter(Dataset.range(1000).batch(10).with_options(Options(num_threads=2)))
    next(iterator)
    return iterator


def iterator_of_a_generator():
    """Return an iterator whose generator runs in a thread."""
    iterator = iter(Dataset.from_generator(lambda: range(1000), TensorSpec((), np.int64)).batch(10).prefetch(1))
    next(iterator)
    return iterator


@pytest.mark.timeout(30)
@pytest.mark.parametrize("make", [iterator_of_threads, iterator_of_a_generator])
def test_iterators_collected_while_a_thread_starts(make):
    # The module `threading` holds this lock while it builds a list, where the garbage collector may run.
    owner = Owner()
    owner.iterator = make()
    del owner
    lock = getattr(threading, "_shutdown_locks_lock", None) or threading._active_limbo_lock
    with lock:
        gc.collect()
    # Threads can be started and joined after that.
    after = threading.Thread(target=len, args=("",))
    after.start()
    after.join(10)
    assert not after.is_alive()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_process_runs_its_own_finalizers():
    program = """
import gc, os, threading, warnings
from daskdist.core.finalizer import Finalizer

class Owner:
    pass

first = Owner()
Finalizer(first, print, "parent")
warnings.simplefilter("ignore")
child = os.fork()
if child == 0:
    second, closed = Owner(), threading.Event()
    Finalizer(second, closed.set)
    del second
    os._exit(0 if closed.wait(10) else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
    report = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert report.stdout.split() == ["0", "parent"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_process_has_threads_of_its_own():
    program = """
import os, warnings
import daskdist

def elements():
    ds = daskdist.Dataset.range(200).map(lambda x: x * 2, num_parallel_calls=2).batch(10).prefetch(2)
    strategy = daskdist.MirroredStrategy(["CPU:0", "CPU:1"])
    steps = strategy.distribute_dataset(ds)
    loops = strategy.run(lambda steps: sum(int(batch.sum()) for batch in steps), args=(steps,))
    return sum(int(batch.sum()) for batch in ds), sum(strategy.local_results(loops))

expected = elements()
warnings.simplefilter("ignore")
child = os.fork()
if child == 0:
    os._exit(0 if elements() == expected else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), expected)
"""
    report = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert report.stdout.split() == ["0", "(39800,", "39800)"]
