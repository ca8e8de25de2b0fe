"""How many threads call a function row by row at the same time."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable

import numpy as np
import pytest

from daskdist import Dataset, Options
from daskdist.core import loop_limit
from daskdist.core.loop_limit import LimitChooser, LoopLimit


def settle(chooser: LimitChooser, rate: Callable[[int], float], num_pieces: int = 20_000) -> set[int]:
    """Let loops run as fast as a rate for each number of threads says; the limits that were tried."""
    tried = set()
    for _ in range(num_pieces):
        limit = chooser.limit
        tried.add(limit)
        # A piece of 10 ms, of one of the threads that run.
        chooser.note(max(round(100 * rate(limit) / limit), 1), 0.01, limit)
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
        chooser.note(100 if chooser.limit == 1 else 35, 0.01, chooser.limit)
    assert np.mean(np.array(limits) == 1) > 0.95


def test_one_odd_phase_decides_nothing() -> None:
    chooser = LimitChooser(2)
    # As where the first rows import what the function needs.
    for _ in range(6):
        chooser.note(1, 10.0, chooser.limit)
    settle(chooser, lambda limit: 100 * limit, 300)
    assert chooser.chosen == 2


def _in_pool(work: Callable[[], None], num_threads: int) -> list[threading.Thread]:
    def run() -> None:
        loop_limit.enter_pool(num_threads)
        work()

    threads = [threading.Thread(target=run) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    return threads


def test_no_more_threads_run_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LimitChooser, "limit", 2)
    limit, lock, running, most, seen = LoopLimit(), threading.Lock(), [0], [0], []

    def work() -> None:
        for _ in range(20):
            with limit.loop(range(50), 50) as elements:
                for element in elements:
                    with lock:
                        running[0] += 1
                        most[0] = max(most[0], running[0])
                        seen.append(element)
                    with lock:
                        running[0] -= 1

    for thread in _in_pool(work, 5):
        thread.join()
    assert sorted(seen) == sorted(list(range(50)) * 100)
    assert 1 <= most[0] <= 2


def test_a_loop_that_raises_gives_its_turn_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LimitChooser, "limit", 1)
    # Nobody goes on but in turn.
    monkeypatch.setattr(loop_limit, "_PATIENCE_S", 1000.0)
    limit, failed = LoopLimit(), []

    def work() -> None:
        for _ in range(10):
            try:
                with limit.loop(range(10), 10) as elements:
                    for element in elements:
                        if element == 5:
                            raise ValueError(element)
            except ValueError as error:
                failed.append(error)

    for thread in _in_pool(work, 3):
        thread.join(60)
        assert not thread.is_alive()
    assert len(failed) == 30


def test_rows_that_wait_for_each_other_are_not_held_up_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LimitChooser, "limit", 1)
    monkeypatch.setattr(loop_limit, "_PATIENCE_S", 0.01)
    limit, both = LoopLimit(), threading.Barrier(2)

    def work() -> None:
        with limit.loop(range(3), 3) as elements:
            for _ in elements:
                both.wait(60)

    for thread in _in_pool(work, 2):
        thread.join(60)
        assert not thread.is_alive()
    assert not both.broken


def test_outside_of_pools_elements_are_given_as_they_are() -> None:
    elements = iter(range(3))
    with LoopLimit().loop(elements, 3) as given:
        assert given is elements


def test_a_limit_that_was_pickled_is_a_new_one() -> None:
    assert isinstance(pickle.loads(pickle.dumps(LoopLimit())), LoopLimit)


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_rows_are_the_same_and_in_order_under_each_limit(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LimitChooser, "limit", limit)
    numbers = Dataset.range(5000).with_options(Options(num_threads=3))
    rows = numbers.map(lambda x: (str(x), int(x)), vectorized=False).filter(lambda t, x: x % 3 > 0, vectorized=False)
    expected = [(str(x), x) for x in range(5000) if x % 3]
    assert [(str(text), int(number)) for text, number in rows] == expected
