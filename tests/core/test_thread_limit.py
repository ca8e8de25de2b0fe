"""The number of threads that call a function row by row at the same time."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor

import numpy as np
import pytest

from daskdist import Dataset, Options
from daskdist.core.functions import thread_limit
from daskdist.core.functions.thread_limit import LimitChooser, LoopPool, ThreadLimit


def settle(chooser: LimitChooser, rate: Callable[[int], float], num_pieces: int = 20_000) -> set[int]:
    """Simulate loops whose speed depends on the number of threads by ``rate``; return the limits that were tried."""
    tried = set()
    for _ in range(num_pieces):
        limit = chooser.limit
        tried.add(limit)
        # Report calls of 10 ms.
        chooser.note(round(100 * rate(limit)), 1, 0.01, limit, 16 - limit)
    return tried


@pytest.mark.parametrize("num_threads", [2, 3, 4, 16])
def test_where_threads_hold_each_other_up_one_is_chosen(num_threads: int) -> None:
    chooser = LimitChooser(num_threads)
    settle(chooser, lambda limit: 100 if limit == 1 else 70)
    assert chooser.chosen == 1


@pytest.mark.parametrize("num_threads", [2, 3, 4, 16])
def test_where_threads_do_not_hold_each_other_up_all_are_chosen(num_threads: int) -> None:
    chooser = LimitChooser(num_threads)
    settle(chooser, lambda limit: 100 * limit)
    assert chooser.chosen == num_threads


def test_where_more_threads_make_no_difference_fewer_are_chosen() -> None:
    chooser = LimitChooser(8)
    settle(chooser, lambda limit: 100)
    assert chooser.chosen == 1


def test_the_number_between_that_is_the_best_is_found() -> None:
    chooser = LimitChooser(16)
    settle(chooser, lambda limit: {1: 100, 2: 190, 4: 300, 8: 220, 16: 150}[limit], 100_000)
    assert chooser.chosen == 4


def test_what_was_chosen_is_looked_at_again() -> None:
    chooser = LimitChooser(2)
    settle(chooser, lambda limit: 100 if limit == 1 else 70)
    assert chooser.chosen == 1
    settle(chooser, lambda limit: 100 * limit)
    assert chooser.chosen == 2


def test_once_chosen_a_limit_counts_nearly_all_of_the_time() -> None:
    chooser = LimitChooser(2)
    settle(chooser, lambda limit: 100 if limit == 1 else 70)
    limits = []
    for _ in range(20_000):
        limits.append(chooser.limit)
        chooser.note(100 if chooser.limit == 1 else 70, 1, 0.01, chooser.limit, 1)
    assert np.mean(np.array(limits) == 1) > 0.95


def test_noise_seldom_decides() -> None:
    rng = np.random.default_rng(0)
    chosen = []
    for _ in range(200):
        chooser = LimitChooser(2)
        # Each phase is up to a third faster or slower at random, as on a shared machine.
        settle(chooser, lambda limit: (100 if limit == 1 else 95) * float(rng.choice([2 / 3, 1, 4 / 3])), 300)
        chosen.append(chooser.chosen)
    assert np.mean(np.array(chosen) == 1) > 0.9


def test_rows_that_become_slower_favour_neither() -> None:
    chooser, number = LimitChooser(2), 0

    def rate(limit: int) -> float:
        nonlocal number
        number += 1
        return (100 if limit == 1 else 120) * 0.995**number

    settle(chooser, rate, 70)
    assert chooser.chosen == 2


def test_too_few_rows_lead_to_no_choice() -> None:
    chooser = LimitChooser(4)
    assert settle(chooser, lambda limit: 100, 10) == {1}


def test_times_in_which_threads_still_have_to_stop_or_begin_count_for_neither() -> None:
    chooser = LimitChooser(2)
    for _ in range(2_000):
        chooser.note(70 if chooser.limit == 2 else 100, 1, 0.01, chooser.limit, 2 - chooser.limit)
        # Calls are fast while the number of running threads is not yet the limit.
        chooser.note(10**6, 1, 0.01, 3 - chooser.limit, chooser.limit - 1)
    assert chooser.chosen == 1


def test_where_there_is_not_enough_to_do_for_more_threads_fewer_are_chosen() -> None:
    chooser = LimitChooser(8)
    for _ in range(2_000):
        # Two threads work, and none waits.
        chooser.note(100, 1, 0.01, min(chooser.limit, 2), 0)
    assert chooser.chosen <= 2


def in_pool(work: Callable[[], object], num_threads: int, num_calls: int) -> None:
    pool = LoopPool(num_threads)
    with ThreadPoolExecutor(num_threads) as threads:
        for future in [threads.submit(pool.run, work) for _ in range(num_calls)]:
            future.result(60)


class AtOnce:
    """A counter of the threads that are inside at the same time."""

    def __init__(self) -> None:
        self.lock, self.now, self.most = threading.Lock(), 0, 0

    def __enter__(self) -> None:
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.now -= 1


def test_no_more_threads_run_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LimitChooser, "limit", 2)
    limit, calls, seen = ThreadLimit(), AtOnce(), []

    def work() -> None:
        for element in limit.loop(range(50), 50):
            with calls:
                seen.append(element)

    in_pool(work, 5, 100)
    assert sorted(seen) == sorted(list(range(50)) * 100)
    assert 1 <= calls.most <= 2


def reading_beside_loops(read_s: float) -> int:
    """Return the number of threads that read at the same time, once the cost of calls is known."""
    limit, reading, number = ThreadLimit(), [AtOnce(), AtOnce()], iter(range(40))

    def work() -> None:
        with reading[next(number) >= 10]:
            time.sleep(read_s)
        for _ in limit.loop(range(10), 10):
            time.sleep(0.001)

    in_pool(work, 3, 40)
    return reading[1].most


def test_calls_that_are_mostly_loops_are_held_to_the_limit_from_their_beginning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LimitChooser, "limit", 1)
    assert reading_beside_loops(0.002) == 1


def test_calls_that_mostly_read_continue_beside_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LimitChooser, "limit", 1)
    assert reading_beside_loops(0.05) == 3


def test_a_loop_that_raises_gives_its_turn_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LimitChooser, "limit", 1)
    # With this patience, threads continue only when it is their turn.
    monkeypatch.setattr(thread_limit, "_PATIENCE_S", 1000.0)
    limit, failed = ThreadLimit(), []

    def work() -> None:
        try:
            for element in limit.loop(range(10), 10):
                if element == 5:
                    raise ValueError(element)
        except ValueError as error:
            failed.append(error)

    in_pool(work, 3, 30)
    assert len(failed) == 30


def test_rows_that_wait_for_each_other_are_not_held_up_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_limit, "_PATIENCE_S", 0.01)
    limit, both = ThreadLimit(), threading.Barrier(2)

    def work() -> None:
        for _ in limit.loop(range(3), 3):
            both.wait(60)

    in_pool(work, 2, 2)
    assert not both.broken


def test_calls_that_wait_when_the_pool_closes_do_not_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LimitChooser, "limit", 1)
    monkeypatch.setattr(thread_limit, "_PATIENCE_S", 1000.0)
    limit, pool, release, begun = ThreadLimit(), LoopPool(2), threading.Event(), []

    def work(number: int) -> None:
        begun.append(number)
        for _ in limit.loop(range(2), 2):
            release.wait(60 if number else 0.01)

    with ThreadPoolExecutor(2) as threads:
        threads.submit(pool.run, work, 0).result(60)
        assert pool.limit is limit
        first = threads.submit(pool.run, work, 1)
        while len(begun) < 2:
            time.sleep(0.001)
        second = threads.submit(pool.run, work, 2)
        pool.close()
        with pytest.raises(CancelledError):
            second.result(60)
        release.set()
        first.result(60)
    assert begun == [0, 1]


def test_a_function_that_waits_is_called_by_all_threads() -> None:
    calls = AtOnce()

    def slow(x: np.int64) -> str:
        with calls:
            time.sleep(0.001)
        return str(x)

    numbers = Dataset.range(4_000).with_options(Options(num_threads=4)).map(slow, vectorized=False)
    assert [str(text) for text in numbers] == list(map(str, range(4_000)))
    assert calls.most == 4


def test_pipelines_of_the_same_function_can_run_at_once() -> None:
    texts = Dataset.range(3_000).with_options(Options(num_threads=3)).map(str, vectorized=False)
    actual = [[str(first), str(second)] for first, second in zip(texts, texts, strict=True)]
    assert actual == [[str(number)] * 2 for number in range(3_000)]


def test_where_only_some_rows_are_looped_over_threads_work_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LimitChooser, "limit", 1)
    monkeypatch.setattr(thread_limit, "_PATIENCE_S", 1000.0)
    limit, pool, at_once = ThreadLimit(), LoopPool(3), AtOnce()

    def work(number: int) -> None:
        # A vectorised function is called for some rows to compare the results.
        for _ in limit.loop(range(10), 10 if number == 0 else 0):
            pass
        with at_once:
            time.sleep(0.01)

    with ThreadPoolExecutor(3) as threads:
        for future in [threads.submit(pool.run, work, number) for number in range(30)]:
            future.result(60)
    assert at_once.most == 3


def test_outside_of_pools_elements_are_given_as_they_are() -> None:
    elements = iter(range(3))
    assert ThreadLimit().loop(elements, 3) is elements
    assert LoopPool(1).run(ThreadLimit().loop, elements, 3) is elements


def test_a_limit_that_was_pickled_is_a_new_one() -> None:
    assert isinstance(pickle.loads(pickle.dumps(ThreadLimit())), ThreadLimit)


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_rows_are_the_same_and_in_order_under_each_limit(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LimitChooser, "limit", limit)
    numbers = Dataset.range(5000).with_options(Options(num_threads=3))
    rows = numbers.map(lambda x: (str(x), int(x)), vectorized=False).filter(lambda t, x: x % 3 > 0, vectorized=False)
    expected = [(str(x), x) for x in range(5000) if x % 3]
    assert [(str(text), int(number)) for text, number in rows] == expected


def test_a_pool_is_closed_while_a_call_that_ends_changes_the_limit():
    class Pool(LoopPool):
        limit = property(lambda self: self.limits.pop(), lambda self, limit: None)

    pool = Pool(2)
    pool.limits = [None, ThreadLimit()]
    pool.close()
    with pytest.raises(CancelledError):
        Pool.run(pool, list)
