"""The dispatcher of the data service as a state machine: leases, losses, and a state for the next dispatcher."""

from __future__ import annotations

import itertools
import pickle

import pytest

from daskdist.service.dispatcher.commands import (
    DatasetEntry,
    GivenUp,
    IterationOver,
    JobOptions,
    Join,
    LoseConsumer,
    RecordedAsUsed,
    StartTask,
    StopTask,
    TasksToRead,
    WaitsFor,
)
from daskdist.service.dispatcher.dispatcher import Dispatcher, Refused
from daskdist.service.dispatcher.jobs import LEASES_A_WORKER
from daskdist.service.sharding_policy import ShardingPolicy


class Clock:
    """A clock that is set."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """A dispatcher, its clock, and the commands that it gave."""

    def __init__(
        self, pieces=(100, 1), mode=ShardingPolicy.DYNAMIC, workers=2, is_kept=False, most_losses=3, **options
    ):
        self.clock = Clock()
        self.dispatcher = Dispatcher(self.clock, 600, 60, is_kept=is_kept, most_losses=most_losses)
        self.entry = DatasetEntry("ds", "f", b"", b"", pieces)
        self.dispatcher.register(self.entry)
        self.options = JobOptions(mode, **options)
        for number in range(workers):
            self.dispatcher.worker_joined(f"w{number}", "host")

    def join(self, name="c", job="j", iteration=0, **fields):
        """Make a consumer join."""
        return self.dispatcher.joined(Join(name, "ds", job, iteration, self.options, **fields))

    def read_through(self, iteration, job="j"):
        """Make a consumer read an iteration to its end and leave."""
        name = f"c{iteration}"
        tasks = [spec for _, spec in started(self.join(name, job, iteration))]
        while tasks:
            task = tasks.pop(0)
            tasks += [spec for _, spec in started(self.dispatcher.task_done(task.id, task.attempt))]
        assert not self.dispatcher.left(name)


def started(commands):
    """Return the specs of the tasks that commands start, by worker."""
    return [(command.worker, command.spec) for command in commands if isinstance(command, StartTask)]


def of_kind(commands, kind):
    """Return the commands of a kind."""
    return [command for command in commands if isinstance(command, kind)]


@pytest.mark.parametrize("num_units", [1, 7, 100, 12_345])
@pytest.mark.parametrize("grain", [1, 10, 1000])
@pytest.mark.parametrize("workers", [1, 3])
def test_leases_cover_all_units_once(num_units, grain, workers):
    bench = Bench((num_units, grain), workers=workers)
    commands, leases = bench.join(), []
    while True:
        begun = started(commands)
        leases += [(worker, spec) for worker, spec in begun]
        if not leases or not (running := [spec for _, spec in leases if spec.id in bench.dispatcher._tasks]):
            break
        assert len(running) <= LEASES_A_WORKER * workers
        commands = bench.dispatcher.task_done(running[0].id, 0)
    bounds = [spec.lease for _, spec in leases]
    assert [first for first, _ in bounds] == [0, *(stop for _, stop in bounds[:-1])]
    assert bounds[-1][1] == num_units
    assert of_kind(commands, IterationOver) == [IterationOver("c")]
    if num_units >= 100:
        assert len({worker for worker, _ in leases}) == workers
        assert len(leases) <= 40 * workers
    if num_units == 12_345 and grain == 10:
        # Leases begin at multiples of a split, so two leases share no split.
        assert not [first for first, _ in bounds if first % grain]


def test_leases_without_end_grow():
    bench = Bench((-1, 1), workers=1)
    commands, sizes = bench.join(), []
    for _ in range(100):
        for _, spec in started(commands):
            sizes.append(spec.lease[1] - spec.lease[0])
            latest = spec
        commands = bench.dispatcher.task_done(latest.id, 0)
    assert sizes == sorted(sizes)
    assert 10_000 < sizes[-1] < 10_000_000


def test_a_worker_that_joins_has_leases_at_once():
    bench = Bench(workers=1)
    bench.join()
    assert {worker for worker, _ in started(bench.dispatcher.worker_joined("new", "host"))} == {"new"}


def test_leases_of_a_lost_worker_continue_after_acknowledged_elements():
    bench = Bench()
    spec = started(bench.join())[0][1]
    bench.dispatcher.progressed(spec.id, 0, [(0, 3)])
    again = started(bench.dispatcher.worker_left("w0"))
    assert {worker for worker, _ in again} == {"w1"}
    (actual,) = [value for _, value in again if value.id == spec.id]
    assert (actual.attempt, actual.lease, actual.done, actual.expected) == (1, spec.lease, ((0, 3),), ("c",))
    # Messages of the lost worker are ignored.
    assert not bench.dispatcher.task_done(spec.id, 0)


@pytest.mark.parametrize("mode", [ShardingPolicy.DYNAMIC, ShardingPolicy.OFF])
def test_elements_that_end_each_worker_are_given_up(mode):
    bench = Bench(mode=mode, workers=1)
    bench.join()
    for number in range(4):
        bench.clock.now += 1
        (task, *_) = [task for _, task in bench.dispatcher._tasks.values() if task.worker == "w0"]
        if number == 0:
            # No other element is acknowledged afterwards.
            bench.dispatcher.progressed(task.id, task.attempt, [(0, 3)])
        failures = of_kind(bench.dispatcher.worker_left("w0"), GivenUp)
        assert bool(failures) == (number == 3)
        bench.dispatcher.worker_joined("w0", "host")
    assert "workers were lost 4 times in a row, last w0" in failures[0].message
    assert not bench.dispatcher._tasks
    assert not bench.dispatcher.worker_joined("w2", "host")
    # A consumer that comes later hears of it, too.
    bench.dispatcher.left("c")
    bench.join("other", iteration=1)
    assert of_kind(bench.join("late"), GivenUp)


@pytest.mark.parametrize("mode", [ShardingPolicy.DYNAMIC, ShardingPolicy.OFF, ShardingPolicy.FILE])
@pytest.mark.parametrize("how", ["together", "as expected", "without consumers", "while others have copies"])
def test_workers_that_leave_do_not_end_a_job(mode, how):
    bench = Bench(mode=mode, workers=8)
    bench.join()
    if how == "without consumers":
        bench.dispatcher.left("c")
    for number in range(7):
        if how != "together":
            bench.clock.now += 1
        if how == "while others have copies" and mode is not ShardingPolicy.OFF:
            return
        commands = bench.dispatcher.worker_left(f"w{number}", is_expected=how == "as expected")
        assert not of_kind(commands, GivenUp)
    assert not of_kind(bench.join("late"), GivenUp)


def test_workers_that_are_lost_now_and_then_do_not_end_a_job():
    bench = Bench(workers=1)
    bench.join()
    for number in range(1, 20):
        bench.clock.now += 1
        task = next(iter(bench.dispatcher._tasks.values()))[1]
        bench.dispatcher.progressed(task.id, task.attempt, [(0, number)])
        (other,) = [other for _, other in bench.dispatcher._tasks.values() if other is not task]
        bench.dispatcher.progressed(other.id, other.attempt, [(0, number)])
        assert not of_kind(bench.dispatcher.worker_left("w0"), GivenUp)
        assert started(bench.dispatcher.worker_joined("w0", "host"))


def test_a_consumer_that_others_keep_waiting_has_another_lease():
    bench = Bench()
    commands = bench.join()
    report = of_kind(commands, TasksToRead)[-1].number
    more = started(bench.dispatcher.read_all("c", report))
    assert len(more) == 1
    # The consumer has not been told of the new lease yet, so it gets no further one.
    assert not bench.dispatcher.read_all("c", report)


def test_consumers_that_are_missing_in_rounds_are_named():
    bench = Bench(None, num_consumers=3)
    bench.join("a", consumer_index=0)
    assert not bench.dispatcher.tick()
    bench.clock.now = 29.0
    assert not bench.dispatcher.tick()
    bench.clock.now = 30.0
    assert bench.dispatcher.tick() == [WaitsFor("a", "the consumers of consumer_index 1, 2 are missing")]
    assert not bench.dispatcher.tick()
    bench.join("b", consumer_index=1)
    bench.join("c", consumer_index=2)
    bench.dispatcher.tick()
    # A consumer that leaves is reported as missing after 30 s too.
    bench.dispatcher.left("b")
    for now, warned in ((31.0, []), (60.0, []), (61.0, ["a", "c"])):
        bench.clock.now = now
        assert [value.consumer for value in bench.dispatcher.tick()] == warned


def test_consumers_without_a_worker_are_informed():
    bench = Bench(workers=0)
    bench.join()
    bench.dispatcher.tick()
    bench.clock.now = 31
    (report,) = bench.dispatcher.tick()
    assert "no worker" in report.message


def test_jobs_that_nobody_reads_are_removed():
    bench = Bench()
    bench.join()
    bench.dispatcher.left("c")
    bench.clock.now = 599
    assert not bench.dispatcher.tick()
    bench.clock.now = 600
    assert len(of_kind(bench.dispatcher.tick(), StopTask)) == 4
    # The name of the removed job can be used again.
    assert started(bench.join("d"))


@pytest.mark.parametrize("pieces", [(100, 1), None])
def test_only_the_number_of_an_iteration_that_is_over_is_kept(pieces):
    state = {}
    bench = Bench(pieces, is_kept=True)
    for iteration in range(200):
        bench.read_through(iteration)
        kept(bench, state)
        # The latest iteration is kept to be shown in the status.
        assert [value.number for value in bench.dispatcher.iterations()] == [iteration]
        assert len(bench.dispatcher._tasks) == len(bench.dispatcher.iterations()[0].tasks)
    assert len(state) == 3
    other = Bench(workers=0, is_kept=True)
    other.dispatcher.restore(state)
    for dispatcher in (bench, other):
        for iteration in (0, 7, 199):
            commands = dispatcher.join("late", iteration=iteration)
            assert commands == [IterationOver("late", was_over=True)]
            dispatcher.dispatcher.left("late")
    assert started(bench.join("next", iteration=200))


def test_iterations_that_all_have_continued_from_are_removed():
    bench = Bench()
    # Two consumers leave early; another, slow one then reads iteration 1.
    for iteration, name in enumerate("abc"):
        bench.join(name, iteration=iteration)
    bench.dispatcher.left("a")
    bench.dispatcher.left("b")
    bench.clock.now = 599
    assert not bench.dispatcher.tick()
    bench.join("slow", iteration=1)
    bench.clock.now = 600
    assert {value.task for value in of_kind(bench.dispatcher.tick(), StopTask)} == {f"name:j/0/{n}" for n in range(4)}
    with pytest.raises(Refused, match=r"iteration 0 of the job 'j' was removed.* 600 s .*job-gc-timeout"):
        bench.join("late")
    # Iterations that come after a consumer's current one are kept, since that consumer will read them.
    bench.dispatcher.left("c")
    bench.clock.now = 1200
    assert not bench.dispatcher.tick()
    bench.dispatcher.left("slow")
    bench.clock.now = 1800
    assert len(of_kind(bench.dispatcher.tick(), StopTask)) == 8
    assert not bench.dispatcher.iterations()


def test_consumers_are_told_each_second_what_is_recorded():
    bench = Bench(None)
    (_, spec), *_ = started(bench.join("a"))
    bench.join("b")
    assert not bench.dispatcher.tick()
    bench.dispatcher.progressed(spec.id, 0, [(0, 3), (5, 6)])
    recorded = ((spec.id, ((0, 3), (5, 6))),)
    assert bench.dispatcher.tick() == [RecordedAsUsed("a", recorded), RecordedAsUsed("b", recorded)]
    # Nothing new was recorded.
    assert not bench.dispatcher.tick()
    # The size of a message is limited: later intervals follow when the earlier ones are complete.
    bench.dispatcher.progressed(spec.id, 0, [(2 * number, 2 * number + 1) for number in range(100_000)])
    assert [len(value.tasks[0][1]) for value in bench.dispatcher.tick()] == [256, 256]


def kept(bench, state):
    """Add the dispatcher's changes to a state, as the journal does."""
    for key, value in pickle.loads(pickle.dumps(bench.dispatcher.changes())).items():
        if value is None:
            state.pop(key, None)
        else:
            state[key] = value


def test_another_dispatcher_continues():
    state = {}
    bench = Bench(is_kept=True)
    specs = [spec for _, spec in started(bench.join("a"))]
    bench.join("b")
    bench.dispatcher.progressed(specs[0].id, 0, [(0, 2)])
    for _, spec in started(bench.dispatcher.task_done(specs[1].id, 0)):
        specs.append(spec)
    kept(bench, state)
    other = Bench(workers=0, is_kept=True)
    other.dispatcher.restore(state)
    begun = [spec for _, spec in started(other.dispatcher.worker_joined("new", "host"))]
    assert {spec.id for spec in begun} == {specs[index].id for index in (0, 2, 3, 4)}
    (first,) = [spec for spec in begun if spec.id == specs[0].id]
    assert (first.lease, first.done, first.attempt, first.expected) == (specs[0].lease, ((0, 2),), 1, ("a", "b"))
    # Only one of the two consumers connects to the new dispatcher.
    other.join("a", is_again=True)
    with pytest.raises(Refused, match="work-dir"):
        other.join("nobody", is_again=True)
    other.clock.now = 59
    assert not other.dispatcher.tick()
    other.clock.now = 60
    lost = of_kind(other.dispatcher.tick(), LoseConsumer)
    assert {(value.task, value.consumer) for value in lost} == {(spec.id, "b") for spec in begun}
    # New leases begin after those of the old dispatcher.
    later = [spec.lease for _, spec in started(other.dispatcher.task_done(begun[0].id, 1))]
    assert not later or later[0][0] == max(spec.lease[1] for spec in specs)


def test_finished_iterations_stay_finished_for_another_dispatcher():
    state = {}
    bench = Bench(None, is_kept=True)
    (_, spec), *_ = started(bench.join())
    bench.dispatcher.task_done(spec.id, 0)
    bench.join("d", job=None)
    bench.dispatcher.left("d")
    kept(bench, state)
    assert [key[:2] for key in state if key[0] == "job"] == [("job", "name:j")]
    other = Bench(workers=1, is_kept=True)
    other.dispatcher.restore(state)
    assert other.join("late") == [IterationOver("late", was_over=True)]


def test_iterations_of_a_job_whose_removal_was_not_completed_are_dropped():
    state = {}
    bench = Bench(is_kept=True)
    bench.join()
    kept(bench, state)
    del state["job", "name:j"]
    other = Bench(workers=1, is_kept=True)
    other.dispatcher.restore(state)
    assert not other.dispatcher.jobs()


def test_unwritten_changes_are_reported_again():
    bench = Bench(is_kept=True)
    bench.join()
    changes = bench.dispatcher.changes()
    assert not bench.dispatcher.changes()
    bench.dispatcher.left("c")
    bench.dispatcher.note_unwritten(changes)
    again = bench.dispatcher.changes()
    assert again.keys() == changes.keys()
    assert not again["iteration", "name:j", 0]["consumers"]


def test_no_changes_are_recorded_without_a_journal():
    bench = Bench()
    bench.join()
    assert not bench.dispatcher.changes()


def test_ids_are_new_in_each_job():
    bench = Bench()
    ids = itertools.chain.from_iterable(
        [spec.id for _, spec in started(bench.join(name, job=None))] for name in ("a", "b")
    )
    assert len(set(ids)) == 8


def test_a_message_of_no_known_kind_is_an_error():
    with pytest.raises(TypeError, match="got 'hello'"):
        Bench().dispatcher.heard("hello")
