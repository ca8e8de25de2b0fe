"""Laws of the backends of strategies."""

from __future__ import annotations

import gc
import itertools
import threading
import time
import uuid
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import dask
import numpy as np

from daskdist.config import seconds
from daskdist.errors import ArgumentError, ClusterError
from daskdist.execute.caller import Handle
from daskdist.execute.messages.by_reference import VariableKey
from daskdist.strategy.backend import Backend
from daskdist.strategy.calls.returned_values import ReturnedValues
from daskdist.strategy.group import ReplicaGroup
from daskdist.strategy.replica.context import current_replica, store_of
from daskdist.strategy.values.async_value import AsyncValue
from daskdist.strategy.values.flat import LEAVES, flattened
from daskdist.strategy.values.per_replica import PerReplica
from daskdist.strategy.values.refs import FlatResult, results_of
from daskdist.strategy.values.variable_contract import variable_number
from daskdist.strategy.variables.aggregation import VariableSynchronization
from daskdist.strategy.variables.record import VariableRecord
from daskdist.testing.equality import check

_LEAVES: Final = LEAVES | {PerReplica, AsyncValue}
# Seconds after which dropped objects must be gone.
_SOON_S: Final = 20.0
_NUM_CALLS: Final = 40
_MOST_IN_FLIGHT: Final = 4


class BackendLaws:
    """Laws of a backend; a subclass defines `opened`."""

    def opened(self) -> AbstractContextManager[tuple[Backend, ReplicaGroup]]:
        """Return a context manager that opens and closes a backend, and provides it with its two or more replicas."""
        raise NotImplementedError

    # --- order ---

    def test_calls_are_made_in_order(self) -> None:
        with _Program(self) as program:
            key = _new_key()
            calls = [program.run(_note, key, number, 0.002 * (number % 3 == 0)) for number in range(_NUM_CALLS)]
            for number, call in enumerate(calls):
                for notes in program.results(call):
                    check(notes == list(range(number + 1)), f"call {number} found {notes} of the calls before it")

    def test_calls_of_each_thread_are_made_in_its_order(self) -> None:
        with _Program(self) as program:
            key = _new_key()
            errors: list[BaseException] = []

            def call(thread: int) -> None:
                try:
                    for number in range(_NUM_CALLS):
                        program.run(_note, key, (thread, number), 0.0)
                except BaseException as error:
                    errors.append(error)

            threads = [threading.Thread(target=call, args=(thread,)) for thread in range(2)]
            for caller in threads:
                caller.start()
            for caller in threads:
                caller.join(seconds("timeouts.step"))
            check(not errors, f"a call of a thread raised {errors}")
            for notes in program.results(program.run(_note, key, (2, 0), 0.0)):
                for thread in range(2):
                    numbers = [number for owner, number in notes if owner == thread]
                    check(
                        numbers == list(range(_NUM_CALLS)), f"calls of thread {thread} were made in the order {numbers}"
                    )

    def test_arguments_are_as_they_were_at_the_call(self) -> None:
        with _Program(self) as program:
            key, array = _new_key(), np.zeros(4)
            program.run(_note, key, 0, 0.05)
            call = program.run(_total, array)
            array[:] = 1
            check(program.results(call) == [0.0] * program.size, "a change after the call was seen by it")

    # --- references ---

    def test_results_are_given_to_later_calls(self) -> None:
        with _Program(self) as program:
            numbers = program.values(program.run(_number, 10))
            again = program.values(program.run(_sum, numbers, 5))
            check(program.here(again) == [15 + replica for replica in range(program.size)], "on the same replica")
            reversed_numbers = PerReplica(list(reversed(numbers.values)))
            results = program.here(program.values(program.run(_sum, reversed_numbers, 0)))
            check(
                results == [10 + replica for replica in reversed(range(program.size))], f"on another replica: {results}"
            )

    def test_arithmetic_on_results_is_given_to_later_calls(self) -> None:
        with _Program(self) as program:
            numbers = program.values(program.run(_number, 10)).values
            total = sum(numbers[1:], numbers[0] * 2)
            expected = 20 + sum(10 + replica for replica in range(1, program.size))
            results = program.here(program.values(program.run(_sum, total, 1)))
            check(results == [expected + 1] * program.size, f"{results} instead of {expected + 1}")
            check(int(total) == expected, f"{int(total)} instead of {expected} in the program")

    def test_calls_between_replicas(self) -> None:
        with _Program(self) as program:
            handles = program.run(_number, 10)
            workers = program.group.worker_of
            total = program.backend.call(_total_of, (list(handles), 100), worker=workers[-1], name="total")
            expected = 100 + sum(10 + replica for replica in range(program.size))
            check(program.results(total) == [expected], "of the results of all replicas")
            more = program.backend.call(_add, (total[0], 1), worker=workers[0], name="add")
            check(program.results([more[0], total[0]]) == [expected + 1, expected], "of the result of such a call")

    def test_structures(self) -> None:
        with _Program(self) as program:
            structures = program.backend.structures(program.run(_nest))
            check(len(structures) == program.size, f"{len(structures)} structures for {program.size} replicas")
            treespec = flattened({"a": 0, "b": (0, 0)})[1]
            check(all(result == (treespec, (False, True, False)) for result in structures), f"{structures}")

    # --- ends of calls ---

    def test_calls_that_are_waited_for_are_over(self) -> None:
        with _Program(self) as program:
            for wait in (program.backend.wait_for_step, lambda call: program.backend.finish()):
                call = program.run(_note, _new_key(), 0, 0.05)
                wait(call)
                check(all(map(program.backend.is_done, call)), "after waiting")

    def test_a_failure_is_raised_when_it_is_read(self) -> None:
        for look in ("results", "wait_for_step"):
            with _Program(self) as program:
                error = program.error_of(lambda program=program: program.run(_fail, "no such label"), look)  # type: ignore[misc]
                check(type(error) is ValueError, f"{look} raised {error!r}, not the function's error")
                check("no such label" in str(error), f"{look} raised {error!r}, without the message")

    def test_calls_after_a_failure_are_made(self) -> None:
        with _Program(self) as program:
            program.error_of(lambda: program.run(_fail, "no such label"))
            check(program.results(program.run(_total, np.ones(3))) == [3.0] * program.size, "after a failure")

    def test_calls_that_depend_on_a_failure_fail_with_it(self) -> None:
        with _Program(self) as program:
            key = _new_key()
            error = program.error_of(
                lambda: program.run(_note, key, program.values_of_one(program.run(_fail, "no such label")), 0.0)
            )
            check(type(error) is ValueError and "no such label" in str(error), f"the call on it raised {error!r}")
            error = program.error_of(
                lambda: program.backend.call(_total_of, (list(program.run(_fail, "no such label")), 0), name="total")
            )
            check(type(error) is ValueError and "no such label" in str(error), f"the call between raised {error!r}")
            (notes, *_) = program.results(program.run(_note, key, 1, 0.0))
            check(notes == [1], f"a function was called with what failed: {notes}")

    def test_an_unreadable_failure_is_raised_once(self) -> None:
        for ask in ("raise_unobserved", "finish"):
            with _Program(self) as program:

                def drop_and_ask(program: _Program = program, ask: str = ask) -> Sequence[Handle]:
                    # The call has ended, its results were not read, and its handles are dropped.
                    program.wait_until_over(program.run(_fail, "no such label"))
                    getattr(program.backend, ask)()
                    return ()

                error = program.error_of(drop_and_ask)
                check(type(error) is ValueError and "no such label" in str(error), f"{ask} raised {error!r}")
                # The failure was raised already.
                getattr(program.backend, ask)()
                program.error_of(lambda program=program: program.run(_fail, "no such label"))  # type: ignore[misc]
                # The failure was read already.
                getattr(program.backend, ask)()

    # --- back-pressure ---

    def test_the_number_of_steps_in_flight_is_limited(self) -> None:
        with dask.config.set({"daskdist.max-steps-in-flight": _MOST_IN_FLIGHT}), _Program(self) as program:
            key, calls = _new_key(), []
            for number in range(5 * _MOST_IN_FLIGHT):
                calls.append(program.run(_note, key, number, 0.005))
                is_done = program.backend.is_done
                under_way = sum(not all(map(is_done, call)) for call in calls)
                check(under_way <= _MOST_IN_FLIGHT, f"{under_way} steps are under way, of {_MOST_IN_FLIGHT} allowed")

    def test_waiting_ends_with_the_condition_or_with_the_calls(self) -> None:
        with _Program(self) as program:
            is_done = program.backend.is_done
            calls = [program.run(_note, _new_key(), 0, 0.05) for _ in range(5)]
            program.backend.wait_while(lambda: not all(map(is_done, calls[0])))
            check(all(map(is_done, calls[0])), "the condition holds after waiting, and calls are under way")
            program.backend.wait_while(lambda: True)
            under_way = sum(not all(map(is_done, call)) for call in calls)
            check(not under_way, f"{under_way} calls are under way after waiting for a condition that always holds")

    # --- status ---

    def test_status_covers_all_workers_and_counts_steps(self) -> None:
        with _Program(self) as program:
            for number in range(3):
                workers = program.backend.status(program.group)
                check([status.address for status in workers] == [*dict.fromkeys(program.group.worker_of)], f"{workers}")
                replicas = [replica for status in workers for replica in status.replicas]
                check(sorted(replicas) == list(range(program.size)), f"{replicas} of {program.size} replicas")
                devices = [device for status in workers for device in status.devices]
                check(devices == [program.group.replicas[replica].device for replica in replicas], f"{devices}")
                check({status.state for status in workers} == {"idle"}, f"nothing is under way: {workers}")
                check({status.num_steps_sent for status in workers} == {number}, f"{number} steps were sent: {workers}")
                check({status.num_steps_in_flight for status in workers} == {0}, f"all are over: {workers}")
                program.results(program.run(_number, 10))
            program.backend.close()
            check({status.state for status in program.backend.status(program.group)} == {"closed"}, "after close")

    # --- drop and close ---

    def test_dropped_results_are_dropped_on_their_workers(self) -> None:
        for num_bytes in (0, 2**20):
            with _Program(self) as program:
                key = _new_key()
                first, second = program.run(_make, key, num_bytes), program.run(_make, key, num_bytes)
                # Count twice: of two replicas in a process, one may count before the other has made its results.
                program.results(program.run(_num_alive, key))
                alive = program.results(program.run(_num_alive, key))
                check(all(alive), f"results of {num_bytes} bytes are gone while the program has their handles")
                num_before = alive[0]
                del first
                self._eventually(program, key, lambda number, most=num_before: 0 < number < most)  # type: ignore[misc]
                del second
                self._eventually(program, key, lambda number: not number)

    def test_variables_are_dropped_after_earlier_calls(self) -> None:
        with _Program(self) as program:
            variable = _FakeVariable(next(_numbers))
            program.results(program.run(_keep, variable))
            before = program.run(_is_kept, variable, 0.05)
            program.backend.forget(variable_number(variable))
            check(all(program.results(before)), "a call that was made before found nothing")
            until = time.monotonic() + _SOON_S
            while any(program.results(program.run(_is_kept, variable, 0.0))):
                check(time.monotonic() < until, "it is still there")

    # --- lost workers ---

    def test_replicas_stay_without_a_loss(self) -> None:
        with _Program(self) as program:
            check(not program.backend.recovery.in_doubt, "nothing failed, and workers are in doubt")
            check(
                program.backend.recovery.recover(program.group) is program.group,
                "no worker is lost, and the replicas changed",
            )
            program.error_of(lambda: program.run(_fail, "no such label"))
            check(
                program.backend.recovery.recover(program.group) is program.group,
                "no worker is lost, and the replicas changed",
            )
            check(not program.backend.recovery.in_doubt, "all workers are there, and they are in doubt")
            check(program.results(program.run(_total, np.ones(3))) == [3.0] * program.size, "afterwards")

    def _eventually(self, program: Any, key: str, is_so: Callable[[int], bool]) -> None:
        until = time.monotonic() + _SOON_S
        while True:
            gc.collect()
            results = program.results(program.run(_num_alive, key))
            if all(map(is_so, results)):
                return
            check(time.monotonic() < until, f"{results} results are there, some of which the program dropped")
            time.sleep(0.05)

    def test_calls_after_close_are_refused(self) -> None:
        with _Program(self) as program:
            call = program.run(_number, 10)
            program.backend.close()
            calls: list[Callable[[], Sequence[Handle]]] = [
                lambda: program.run(_number, 10),
                lambda: program.backend.call(_total_of, ([], 0), worker=program.group.worker_of[0], name="total"),
                lambda: program.backend.call(_add, (call[0], 1), worker=program.group.worker_of[0], name="add"),
            ]
            for number, make in enumerate(calls):
                error = program.error_of(make)
                check(isinstance(error, ClusterError), f"call {number} after close raised {error!r}")


class _Program:
    # A program that calls functions on replicas through a backend.
    def __init__(self, laws: BackendLaws) -> None:
        self._opened = laws.opened()

    def __enter__(self) -> _Program:
        self.backend, self.group = self._opened.__enter__()
        self.size = len(self.group.replicas)
        return self

    def __exit__(self, *error: Any) -> None:
        self._opened.__exit__(*error)

    def run(self, fn: Callable[..., Any], *args: Any) -> Sequence[Handle]:
        leaves, treespec = flattened((args, {}), _LEAVES)
        return self.backend.call_replicas("run", fn, leaves, treespec, self.group)

    def wait_until_over(self, handles: Sequence[Handle]) -> None:
        until = time.monotonic() + _SOON_S
        while not all(map(self.backend.is_done, handles)):
            check(time.monotonic() < until, "a call does not end")
            time.sleep(0.005)

    def results(self, handles: Sequence[Handle]) -> list[Any]:
        results = self.backend.results(list(handles))
        return [
            result.treespec.unflatten(result.leaves) if type(result) is FlatResult else result for result in results
        ]

    def values(self, handles: Sequence[Handle]) -> Any:
        return ReturnedValues(self.backend).of_all(handles)

    def values_of_one(self, handles: Sequence[Handle]) -> PerReplica:
        # The structure of the result is fixed here, because a failed call reports none.
        return ReturnedValues(self.backend).columns(handles, 1)[0]

    def here(self, value: PerReplica) -> list[Any]:
        return results_of(value.values)

    def error_of(self, make: Callable[[], Sequence[Handle]], look: str = "results") -> Exception | None:
        try:
            handles = list(make())
            getattr(self.backend, look)(handles)
        except Exception as error:
            return error
        return None


def _new_key() -> str:
    return uuid.uuid4().hex


# --- what replicas call ---

_notes: Final[defaultdict[Any, list[Any]]] = defaultdict(list)


class _Result:
    # A result that is tracked, to check whether it still exists.
    def __init__(self, key: str, num_bytes: int) -> None:
        self.content = bytes(num_bytes)
        _alive[key].add(self)


_alive: Final[defaultdict[str, weakref.WeakSet[_Result]]] = defaultdict(weakref.WeakSet)


class _FakeVariable(VariableRecord):
    # The part of a variable that the replicas' store uses.
    synchronization = VariableSynchronization.AUTO

    def __init__(self, number: int) -> None:
        self._key = VariableKey(number)
        self.name = f"variable {number}"


# Numbers that no variable of a program has.
_numbers: Final = itertools.count(2**40)


def _keep(variable: Any) -> None:
    context: Any = current_replica()
    store_of(context).put(variable, _replica(), "state")


def _is_kept(variable: Any, takes_s: float) -> bool:
    time.sleep(takes_s)
    context: Any = current_replica()
    try:
        return bool(store_of(context).get(variable, _replica()) == "state")
    except ArgumentError:
        return False


def _replica() -> int:
    replica = current_replica()
    return -1 if replica is None else replica.replica_id_in_sync_group


def _note(key: str, value: Any, takes_s: float) -> list[Any]:
    notes = _notes[key, _replica()]
    if takes_s:
        time.sleep(takes_s)
    notes.append(value)
    return list(notes)


def _total(array: Any) -> float:
    return float(array.sum())


def _number(start: int) -> int:
    return start + _replica()


def _sum(first: Any, other: Any) -> Any:
    return first + other


def _nest() -> dict[str, Any]:
    return {"b": (None, 2), "a": 1}


def _fail(message: str) -> None:
    raise ValueError(message)


def _make(key: str, num_bytes: int) -> _Result:
    return _Result(key, num_bytes)


def _num_alive(key: str) -> int:
    gc.collect()
    return len(_alive[key])


def _plain(result: Any) -> Any:
    return result.leaves[0] if type(result) is FlatResult else result


def _total_of(results: Sequence[Any], start: int) -> Any:
    return start + sum(map(_plain, results))


def _add(result: Any, number: int) -> Any:
    return _plain(result) + number
