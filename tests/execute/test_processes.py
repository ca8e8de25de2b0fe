"""`Options.num_processes`: the same elements in the same order, computed in local processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path

import cloudpickle
import numpy as np
import pytest
from conftest import eventually, mirrored

import daskdist
from daskdist import Dataset, Options, errors
from daskdist.core.block import Block
from daskdist.core.primitive import Split
from daskdist.core.structure import LONE
from daskdist.execute.callers.process_pool import (
    ProcessPool,
    close_pools,
    process_pool,
    remove_abandoned_folders,
)
from daskdist.execute.callers.processes import Processes
from daskdist.execute.messages.shared_memory import PackedArrays, Segments
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
    function = pool.add(cloudpickle.dumps(lambda path: Path(path).read_text()))
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


def test_calls_go_to_the_process_that_has_the_fewest(tmp_path):
    pool, gates = ProcessPool(2), [tmp_path / f"gate {number}" for number in range(3)]
    for gate in gates:
        os.mkfifo(gate)
    function = pool.add(cloudpickle.dumps(lambda path: (Path(path).read_text(), os.getpid())[1]))
    with ThreadPoolExecutor(8) as threads:

        def begun(gate):
            # Opening the pipe waits until the call reads from it.
            call = threads.submit(pool.call, function, [str(gate)])
            return call, open(gate, "w")

        def ended(call, file):
            with file:
                file.write("open")
            return call.result(timeout=60)

        first = begun(gates[0])
        second = begun(gates[1])
        # Each process makes a call, and has the next one.
        more = [threads.submit(pool.call, os.getpid, []) for _ in range(2)]
        eventually(lambda: not any(process.free for process in pool._processes))
        # Calls that are not needed any more are not made.
        is_over = []
        late = threads.submit(pool.call, os.getpid, [], lambda: bool(is_over))
        eventually(lambda: pool._waiting)
        is_over.append(True)
        pool.wake()
        with pytest.raises(CancelledError):
            late.result(timeout=60)
        of_first, of_second = ended(*first), ended(*second)
        assert of_first != of_second
        assert {call.result(timeout=60) for call in more} == {of_first, of_second}
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


def test_arrays_are_sent_by_files_that_are_removed(tmp_path):
    value = {"large": np.arange(10_000.0), "text": ["a"], "fixed": np.zeros(9000)}
    value["fixed"].flags.writeable = False
    packed = PackedArrays.of(value, str(tmp_path))
    assert packed.buffers is None
    actual = packed.value()
    assert list(tmp_path.iterdir()) == []
    np.testing.assert_array_equal(actual["large"], value["large"])
    assert (actual["large"].flags.writeable, actual["fixed"].flags.writeable) == (True, False)
    small = PackedArrays.of({"x": np.arange(3)}, str(tmp_path))
    assert small.value()["x"].tolist() == [0, 1, 2]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="files are memory only on Linux")
def test_no_files_are_left():
    list(Dataset.range(100).map(lambda x: np.arange(5000.0) * x).batch(8).with_options(PROCESSES))
    pool = process_pool(2)
    # A thread of the pass may let go of the last block a moment after its end.
    eventually(lambda: pool._segments.clear() or not list(Path(pool.folder).iterdir()))
    close_pools()
    assert not Path(pool.folder).exists()
    # The folders of a program that was killed are removed by the next program.
    abandoned = Path("/dev/shm/daskdist-processes-999999999-test")
    abandoned.mkdir()
    remove_abandoned_folders()
    assert not abandoned.exists()


SHARED = pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="memory is used again only on Linux")


@pytest.fixture
def pool():
    pool = ProcessPool(1)
    yield pool
    pool.close()


def files_of(pool):
    return {file.name for file in Path(pool.folder).iterdir()}


@SHARED
def test_memory_is_used_again_once_nothing_refers_to_it(pool):
    call = pool.call
    first = call(np.full, [(300, 300), 1.0])
    (file,) = files_of(pool)
    row = first[5]
    assert call(np.full, [(300, 300), 2.0]).sum() == 180_000
    assert len(files_of(pool)) == 2
    assert (first == 1).all()
    del first
    held = [call(np.full, [(300, 300), float(number)]) for number in range(4)]
    assert (row == 1).all()
    assert [block[0, 0] for block in held] == [0, 1, 2, 3]
    del row, held
    before = files_of(pool)
    for number in range(8):
        assert (call(np.negative, [np.full((300, 300), number)]) == -number).all()
    assert files_of(pool) - before == set()
    assert file in before


class Keeping:
    def __init__(self):
        self.kept = []

    def __call__(self, array):
        self.kept.append(array)
        return [int(value[0]) for value in self.kept]


@SHARED
def test_memory_that_a_function_keeps_is_not_used_again(pool):
    function = pool.add(cloudpickle.dumps(Keeping()))
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


@SHARED
@pytest.mark.parametrize("how", ["thread", "fork"])
def test_memory_that_a_function_keeps_using_is_not_used_again(pool, tmp_path, how):
    watching = Watching(tmp_path, how)
    assert pool.call(pool.add(cloudpickle.dumps(watching)), [np.ones(100_000)]) == 100_000
    for number in range(2, 6):
        assert (pool.call(np.negative, [np.full(100_000, number)]) == -number).all()
    assert watching.is_same()


@SHARED
def test_memory_that_a_forked_process_has_is_not_used_again(pool):
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


@SHARED
def test_idle_memory_is_freed():
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="daskdist-processes-test-") as folder:
        segments = Segments(folder, idle_s=0.05)
        packed, segment = segments.pack(np.zeros(100_000))
        assert segments.value(packed, None).sum() == 0
        del segment
        eventually(lambda: not list(Path(folder).iterdir()))


@SHARED
def test_few_files_are_open_however_many_arrays_are_kept():
    def num_open():
        return len(os.listdir("/proc/self/fd"))

    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="daskdist-processes-test-") as folder:
        segments, num_before = Segments(folder), num_open()
        # Each is too large for the segments of those before it.
        sizes = [10_000 + number // 2 for number in range(600)]
        arrays = [segments.value(PackedArrays.of(np.full(size, size), folder), None) for size in sizes]
        assert num_open() - num_before < 200
        assert all((array == size).all() for array, size in zip(arrays, sizes, strict=True))
        arrays.clear()
        assert num_open() - num_before < 200
        for _ in range(3):
            kept = [segments.pack(np.full(size, 1.0))[1] for size in sizes[:300]]
            segments.end(*kept)
            kept.clear()
        assert num_open() - num_before < 200
        segments.close()


@SHARED
def test_processes_remove_the_files_of_a_killed_program(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal\n"
        "import numpy as np\n"
        "from daskdist.execute.callers.process_pool import ProcessPool\n"
        "pool = ProcessPool(1)\n"
        "pool.call(np.zeros, [100_000])\n"
        "print(pool.folder, len(os.listdir(pool.folder)), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=False)
    folder, number = done.stdout.split()
    assert number == "1"
    eventually(lambda: not Path(folder).exists())


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
