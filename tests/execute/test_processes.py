"""`Options.num_processes`: the same elements in the same order, computed in local processes."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path

import dask
import numpy as np
import psutil
import pytest
from conftest import eventually, mirrored

import daskdist
from daskdist import Dataset, Options, errors
from daskdist.core.block import Block
from daskdist.core.primitive import Split
from daskdist.core.structure import LONE
from daskdist.execute.callers import process_pool as process_pool_module
from daskdist.execute.callers.process_pool import LocalFunction, ProcessPool, close_pools, process_pool
from daskdist.execute.callers.processes import Processes
from daskdist.execute.messages.failure import Packed
from daskdist.execute.messages.shared_memory import MemoryConnection, unnamed_memory
from daskdist.execute.stream.gather import Picks, gather
from daskdist.testing import same_elements

PROCESSES = Options(num_processes=2)


@pytest.fixture(scope="module", autouse=True)
def _processes():
    yield
    close_pools()


def bad(x):
    if x == 7:
        raise ValueError("bad row")
    return x


PIPELINES = [
    lambda: Dataset.range(300).map(lambda x: {"x": x, "y": np.arange(1000.0) * x}).batch(7),
    lambda: Dataset.range(300).map(lambda x, rng: x + rng.integers(100), rng=1).shuffle(50, seed=1).batch(9),
    lambda: Dataset.range(30).map(lambda x: f"row {x}" * int(x)).batch(4),
    lambda: Dataset.range(50).map(lambda x: np.full(int(x) % 5, x)).filter(lambda x: len(x) > 1).ragged_batch(4),
    lambda: Dataset.from_tensor_slices(np.random.default_rng(0).random((200, 1200))).shuffle(30, seed=2).map(np.sort),
    lambda: Dataset.range(20).batch(4).map(lambda x: x.sum()).shuffle(3, seed=1).map(lambda x: x * 2),
    lambda: Dataset.zip(Dataset.range(40).map(abs), Dataset.range(40).map(lambda x: -x)).map(lambda x, y: x - y),
    lambda: Dataset.range(20).map(bad).ignore_errors().batch(3),
    lambda: Dataset.range(90).map(lambda x: np.arange(int(x) % 4)).ragged_batch(8),
    lambda: Dataset.range(90).map(lambda x: (np.full(3, x), np.zeros(int(x) % 3 + 1, "f4"))).ragged_batch(8),
    lambda: Dataset.range(90).map(lambda x: np.zeros((int(x) % 2, 1 + int(x) // 80))),
    lambda: Dataset.range(90).map(lambda x: np.zeros(2, "i4" if x < 60 else "i8")).map(lambda x: x.dtype.itemsize),
    lambda: Dataset.range(90).map(lambda x: np.zeros(0)).ragged_batch(8),
    lambda: Dataset.range(12).scan(0, lambda state, x: (state + x, state)).map(lambda x: x + 1),
    lambda: Dataset.range(12).scan(np.zeros(3), lambda state, x: (state + x, state)).filter(lambda x: x[0] % 2 == 0),
    lambda: Dataset.range(0).map(lambda x: x),
]


@pytest.mark.parametrize("build", PIPELINES)
def test_elements_are_the_same_in_the_same_order(build):
    expected = list(build())
    same_elements(list(build().with_options(PROCESSES)), expected, "in processes")


def test_functions_are_called_in_other_processes(tmp_path):
    own = os.getpid()
    ds = Dataset.range(100).map(lambda x: os.getpid()).with_options(PROCESSES)
    assert own not in {int(x) for x in ds}
    assert own not in {int(x) for x in Dataset.range(9).map(lambda x, rng: os.getpid(), rng=1).with_options(PROCESSES)}
    part, _ = Dataset.range(40).split(0.5, by=lambda x: int(own != os.getpid()))
    here = list(Dataset.range(40).split(0.5, by=lambda x: 1)[0])
    same_elements(list(part.with_options(PROCESSES)), here, "split by a function that processes call")
    files = [str(tmp_path / f"{number}.txt") for number in range(8)]
    for number, file in enumerate(files):
        Path(file).write_text(f"{number}\n" * 50)
    lines = daskdist.read_text(files).map(lambda line: (int(line), os.getpid()))
    numbers, processes = zip(*[(int(x), int(pid)) for x, pid in lines.with_options(PROCESSES)], strict=True)
    assert list(numbers) == sorted(numbers)
    assert own not in processes


def lengths(line):
    return np.full(len(line) % 5, len(line))


def test_parts_of_what_was_read_are_computed(tmp_path):
    file = tmp_path / "lines.txt"
    file.write_text("".join(f"{'x' * (number % 13)} {number}\n" for number in range(9000)))
    ds = daskdist.read_text(str(file)).map(lengths).ragged_batch(50)
    same_elements(list(ds.with_options(PROCESSES)), list(ds), "lines in processes")
    iterator = iter(ds.at_epoch(0).with_options(PROCESSES))
    next(iterator)
    again = iter(ds.at_epoch(0).with_options(PROCESSES))
    again.load_state_dict(iterator.state_dict())
    same_elements(list(again), list(ds)[1:], "the rest")
    caller = Processes(2)
    try:
        split = Split("numbers", 300, 300)
        read = caller.source(Numbers(), split, name="numbers")
        assert caller.report(read, wait=True).num_rows == 300
        # A process that has some of the rows is killed, and another gets them.
        for start, function in ((0, same_rows), (100, kill_once(tmp_path / "was here")), (200, same_rows)):
            picks = Picks(range(start, start + 100), None, None, None)
            rows = caller.call(gather, [read], picks, function, False, name="part").result(60)
            assert rows.leaves[0].tolist() == list(range(start, start + 100))
        assert (tmp_path / "was here").exists()
    finally:
        caller.close()


class Numbers:
    def __call__(self, split):
        return Block(LONE, [np.arange(split.payload)])


def same_rows(rows):
    return rows


def kill_once(marker):
    def function(rows):
        if not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return rows

    return function


def test_errors_are_those_of_this_process():
    messages = []
    for options in (PROCESSES, Options(num_threads=2)):
        with pytest.raises(errors.UserFunctionError, match="bad row") as raised:
            list(Dataset.range(20).map(bad).with_options(options))
        messages.append(str(raised.value))
    assert messages[0] == messages[1]


def test_a_killed_process_loses_nothing(tmp_path):
    marker = tmp_path / "was here"

    def kills_once(x):
        if x == 70 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return x * 2

    ds = Dataset.range(100).map(kills_once).batch(8).with_options(PROCESSES)
    assert [int(x) for batch in ds for x in batch] == [2 * k for k in range(100)]
    assert marker.exists()


def test_a_script_needs_no_guard_of_its_main_module(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "import numpy as np\n"
        "from daskdist import Dataset, Options\n"
        "class Item:\n"
        "    def __init__(self, x):\n"
        "        self.x = int(x)\n"
        "ds = Dataset.range(4).map(lambda x: np.array(Item(x), object)).with_options(Options(num_processes=1))\n"
        "print([item.x for item in ds if type(item) is Item], sys.argv[1:])\n"
    )
    done = subprocess.run([sys.executable, script, "given"], capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout, done.stderr) == ("[0, 1, 2, 3] ['given']\n", "")


def test_processes_end_after_their_current_calls(tmp_path):
    pool, gate = ProcessPool(1), tmp_path / "gate"
    os.mkfifo(gate)
    function = LocalFunction(lambda path: Path(path).read_text())
    with ThreadPoolExecutor(2) as threads:
        # Opening the pipe waits until the call reads from it.
        answer = threads.submit(pool.call, function, [str(gate)])
        with open(gate, "w") as file:
            closing = threads.submit(pool.close)
            assert not answer.done()
            file.write("open")
        assert answer.result(timeout=60) == "open"
        closing.result(timeout=60)
    with pytest.raises(errors.ClusterError, match="were ended"):
        pool.call(function, [str(gate)])


def test_each_process_makes_one_call_and_calls_that_are_over_are_not_made(tmp_path):
    pool, gates = ProcessPool(2), [tmp_path / f"gate {number}" for number in range(2)]
    for gate in gates:
        os.mkfifo(gate)
    function = LocalFunction(lambda path: (Path(path).read_text(), os.getpid())[1])
    with ThreadPoolExecutor(8) as threads, contextlib.ExitStack() as stack:
        # Opening a pipe waits until a call reads from it.
        calls = []
        for gate in gates:
            call = threads.submit(pool.call, function, [str(gate)])
            calls.append((call, stack.enter_context(open(gate, "w"))))
        more = [threads.submit(pool.call, os.getpid, []) for _ in range(2)]
        is_over, looks = [], []
        late = threads.submit(pool.call, os.getpid, [], (), lambda: looks.append(None) or bool(is_over))
        eventually(lambda: looks)
        is_over.append(True)
        pool.release()
        with pytest.raises(CancelledError):
            late.result(timeout=60)
        assert not any(call.done() for call in more)
        for _, file in calls:
            file.write("open")
        stack.close()
        processes = {call.result(timeout=60) for call, _ in calls}
        assert len(processes) == 2
        assert {call.result(timeout=60) for call in more} <= processes
    pool.close()


def test_a_call_that_is_over_lets_another_have_the_process(tmp_path):
    pool, gate = ProcessPool(1), tmp_path / "gate"
    os.mkfifo(gate)
    function, is_over, looks = LocalFunction(lambda path: Path(path).read_text()), [], []
    with ThreadPoolExecutor(8) as threads:
        first = threads.submit(pool.call, function, [str(gate)])
        with open(gate, "w") as file:
            late = threads.submit(pool.call, os.getpid, [], (), lambda: looks.append(None) or bool(is_over))
            eventually(lambda: looks)
            others = [threads.submit(pool.call, os.getpid, []) for _ in range(3)]
            is_over.append(True)
            file.write("open")
        assert first.result(timeout=60) == "open"
        with pytest.raises(CancelledError):
            late.result(timeout=60)
        assert len({call.result(timeout=20) for call in others}) == 1
    pool.close()


def test_distributed_passes_and_positions():
    ds = Dataset.range(60).map(lambda x, rng: x + rng.integers(9), rng=3).shuffle(20, seed=1).batch(6)
    strategy = mirrored(2)
    expected = [strategy.gather(batch, axis=0).tolist() for batch in strategy.distribute_dataset(ds.at_epoch(1))]
    distributed = strategy.distribute_dataset(ds.at_epoch(1).with_options(PROCESSES))
    assert [strategy.gather(batch, axis=0).tolist() for batch in distributed] == expected
    iterator = iter(ds.at_epoch(1).with_options(PROCESSES))
    next(iterator)
    state = iterator.state_dict()
    again = iter(ds.at_epoch(1).with_options(PROCESSES))
    again.load_state_dict(state)
    assert [batch.tolist() for batch in again] == expected[1:]


@pytest.fixture
def pool():
    pool = ProcessPool(1)
    yield pool
    pool.close()


@pytest.fixture
def ends():
    memory, sockets = unnamed_memory(), socket.socketpair()
    ends = [MemoryConnection(end.detach(), io.FileIO(os.dup(memory.fileno()), "r+")) for end in sockets]
    memory.close()
    yield ends
    for end in ends:
        end.close()


def bytes_in(connection):
    return os.fstat(connection._memory.fileno()).st_size


def test_large_messages_are_written_to_memory_and_copied_from_it(ends):
    first, second = ends
    value = {"large": np.arange(10_000.0), "text": ["a"], "fixed": np.zeros(9000)}
    value["fixed"].flags.writeable = False
    first.send(Packed.of(value))
    assert bytes_in(first) > 152_000
    received = second.recv().value()
    first.send(Packed.of(np.full(19_000, 7.0)))
    assert (second.recv().value() == 7).all()
    np.testing.assert_equal(received, value)
    assert (received["large"].flags.writeable, received["fixed"].flags.writeable) == (True, False)
    second.free()
    assert bytes_in(first) == 0
    second.send(Packed.of({"x": np.arange(3), "none": np.zeros((0, 4))}))
    assert first.recv().value()["x"].tolist() == [0, 1, 2]
    second.send("x" * 200_000)
    assert first.recv() == "x" * 200_000
    assert bytes_in(first) >= 200_000


def test_memory_of_very_large_messages_is_not_kept(ends):
    first, second = ends
    first.send(Packed.of(np.ones(2**26 + 1, np.uint8)))
    assert second.recv().value().sum() == 2**26 + 1
    assert bytes_in(first) == 0


def open_files():
    return sorted(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="open files are listed only on Linux")
def test_nothing_is_left():
    close_pools()
    before = open_files()
    blocks = list(Dataset.range(100).map(lambda x: np.arange(5000.0) * x).batch(8).with_options(PROCESSES))
    pool = process_pool(2)
    # The memory has no name, and nothing is kept in it between passes.
    files = [os.readlink(f"/proc/self/fd/{process.connection._memory.fileno()}") for process in pool._processes]
    assert all(file.endswith(" (deleted)") for file in files)
    assert [bytes_in(process.connection) for process in pool._processes] == [0, 0]
    with pytest.raises(errors.ClusterError, match="ended in 3 attempts"):
        pool.call(LocalFunction(lambda: os.kill(os.getpid(), signal.SIGKILL)), [])
    assert pool.call(np.full, [50_000, 2.0]).sum() == 100_000
    close_pools()
    assert len(open_files()) <= len(before)
    assert blocks[1][0, 2] == 16


def test_a_process_that_is_stopped_is_replaced(pool):
    stopped, stops = pool.call(os.getpid, []), LocalFunction(lambda: os.kill(os.getpid(), signal.SIGSTOP))
    with dask.config.set({"daskdist.timeouts.data": 1}), pytest.raises(errors.WaitTimeoutError, match="a call in a lo"):
        pool.call(stops, [])
    assert not psutil.pid_exists(stopped)
    assert pool.call(os.getpid, []) != stopped


def test_calls_that_make_progress_may_take_longer_than_the_limit_of_one():
    def slow(x):
        time.sleep(0.2)
        return x

    ds = Dataset.range(10).map(slow).batch(10).with_options(Options(num_processes=1))
    list(ds.take(0))
    pool = process_pool(1)
    pool.call(os.getpid, [])
    with dask.config.set({"daskdist.timeouts.data": 1}):
        assert [batch.tolist() for batch in ds] == [list(range(10))]


class CountingSends:
    """A pickled function that counts how often it is put into a message."""

    def __init__(self, function):
        self.function, self.number, self.num_sent = function, function.number, 0

    @property
    def pickled(self):
        self.num_sent += 1
        return self.function.pickled


def test_functions_are_sent_once_and_few_are_kept(pool):
    functions = [CountingSends(LocalFunction(lambda number=number: number)) for number in range(150)]
    for number, function in enumerate(functions):
        for _ in range(2):
            assert pool.call(called, [function.function], [function]) == number
    # One whose call makes the process forget the others is sent again, too.
    assert sum(function.num_sent for function in functions) <= 153
    assert pool.call(LocalFunction(num_kept), []) <= 66
    assert pool.call(called, [functions[0].function], functions[:1]) == 0


def called(function):
    return function()


def num_kept():
    return len(process_pool_module._functions)


def test_a_function_that_cannot_be_unpickled_there_raises_its_error(pool):
    function = LocalFunction(len)
    function.pickled = b"no pickle"
    for _ in range(2):
        with pytest.raises(pickle.UnpicklingError):
            pool.call(function, [])
    assert pool.call(len, ["ab"]) == 2


def test_results_stay_as_they_are_however_many_calls_follow(pool):
    call = pool.call
    first = call(np.full, [(300, 300), 1.0])
    row = first[5]
    held = [call(np.full, [(300, 300), float(number)]) for number in range(4)]
    assert (first == 1).all()
    del first
    assert (call(np.negative, [np.full((300, 300), 9)]) == -9).all()
    assert (row == 1).all()
    assert [block[0, 0] for block in held] == [0, 1, 2, 3]


class Keeping:
    def __init__(self):
        self.kept = []

    def __call__(self, array):
        self.kept.append(array)
        return [int(value[0]) for value in self.kept]


def test_arguments_that_a_function_keeps_stay_as_they_are(pool):
    function = LocalFunction(Keeping())
    for number in range(6):
        assert pool.call(function, [np.full(100_000, number)]) == list(range(number + 1))
    assert (pool.call(np.negative, [np.full(100_000, 9)]) == -9).all()
    assert pool.call(function, [np.full(100_000, 6)]) == list(range(7))


class Watching:
    """Looks at its argument in a thread, or in a process that it forks, once it is told to by a pipe."""

    def __init__(self, folder, how):
        self.pipes = [f"{folder}/{name}" for name in ("begin", "answer")]
        self.how = how
        for pipe in self.pipes:
            os.mkfifo(pipe)

    def __call__(self, array):
        if self.how == "thread":
            threading.Thread(target=self.answer, args=(array,)).start()
        elif not os.fork():
            self.answer(array)
            os._exit(0)
        return len(array)

    def answer(self, array):
        begin, answer = self.pipes
        Path(begin).read_bytes()
        Path(answer).write_bytes(b"same" if (array == 1).all() else b"other")

    def is_same(self):
        begin, answer = self.pipes
        Path(begin).write_bytes(b"")
        return Path(answer).read_bytes() == b"same"


@pytest.mark.parametrize("how", ["thread", "fork"])
def test_arguments_that_a_function_keeps_using_stay_as_they_are(pool, tmp_path, how):
    watching = Watching(tmp_path, how)
    assert pool.call(LocalFunction(watching), [np.ones(100_000)]) == 100_000
    for number in range(2, 6):
        assert (pool.call(np.negative, [np.full(100_000, number)]) == -number).all()
    assert watching.is_same()


def test_results_that_a_forked_process_has_stay_as_they_are(pool):
    block = pool.call(np.full, [(300, 300), 1.0])
    (to_child, child_reads), (child_writes, from_child) = os.pipe()[::-1], os.pipe()[::-1]
    child = os.fork()
    if not child:
        os.read(child_reads, 1)
        os.write(child_writes, b"y" if (block == 1).all() else b"n")
        os._exit(0)
    del block
    for number in range(4):
        assert (pool.call(np.full, [(300, 300), 2.0 + number]) == 2 + number).all()
    os.write(to_child, b"x")
    assert os.read(from_child, 1) == b"y"
    assert os.waitpid(child, 0)[1] == 0
    for end in (to_child, child_reads, child_writes, from_child):
        os.close(end)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="open files are listed only on Linux")
def test_few_files_are_open_however_many_arrays_are_kept(pool):
    before = len(open_files())
    sizes = [10_000 + number // 2 for number in range(300)]
    arrays = [pool.call(np.full, [size, float(size)]) for size in sizes]
    assert len(open_files()) <= before
    assert all((array == size).all() for array, size in zip(arrays, sizes, strict=True))


@pytest.mark.parametrize("hangs", [False, True])
def test_nothing_is_left_of_a_killed_program(tmp_path, hangs):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, threading, time\n"
        "import numpy as np\n"
        "from daskdist.execute.callers.process_pool import ProcessPool\n"
        "pool = ProcessPool(1)\n"
        "pool.call(np.zeros, [100_000])\n"
        "print(pool.call(os.getpid, []), flush=True)\n"
        f"if {hangs}:\n"
        "    threading.Thread(target=pool.call, args=(time.sleep, [600])).start()\n"
        "    while pool._free:\n"
        "        time.sleep(0.01)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    folder = tmp_path / "temporary"
    folder.mkdir()
    environment = {**os.environ, "TMPDIR": str(folder)}
    command = [sys.executable, script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    process = int(done.stdout)
    eventually(lambda: not psutil.pid_exists(process) or psutil.Process(process).status() == psutil.STATUS_ZOMBIE)
    assert os.listdir(folder) == []


@pytest.mark.parametrize("value", [0, -1, 1.5, "all"])
def test_invalid_num_processes_are_refused(value):
    with pytest.raises(errors.ArgumentError, match="num_processes is"):
        Options(num_processes=value)


def test_readers_with_lists_and_dicts_of_options(tmp_path):
    for number in range(3):
        (tmp_path / f"{number}.csv").write_text(f"a,b\n{number},\n,x\n")
    ds = daskdist.read_csv(tmp_path, ["b", "a"], dtypes={"a": "int64"}, missing={"a": -1, "b": "?"})
    for build in (lambda ds: ds, lambda ds: ds.map(lambda row: row["a"] * 2), lambda ds: ds.batch(2)):
        same_elements(list(build(ds).with_options(PROCESSES)), list(build(ds)), "in other processes")
