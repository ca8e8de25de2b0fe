"""Links: every message arrives once and in order, or goes back to its sender with a reason."""

from __future__ import annotations

import threading
import time

import dask
import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from daskdist.execute.messages.link import LinkState, RunClock
from daskdist.strategy.collectives.messages import Answer
from daskdist.strategy.collectives.questions import Questions


class TwoEnds(RuleBasedStateMachine):
    """Two ends of a link, and connections that lose what is under way when they break."""

    def __init__(self):
        super().__init__()
        self.sender, self.receiver = LinkState(), LinkState()
        self.sent, self.arrived, self.over = [], [], []
        # What is under way on the open connection, in each direction; None without a connection.
        self.there = self.back = None

    @rule()
    def send(self):
        message = len(self.sent)
        self.sent.append(message)
        numbered = self.sender.send(message, lambda why: self.over.append((message, why)))
        if self.there is not None:
            self.there.append(numbered)

    @precondition(lambda self: self.there is None)
    @rule()
    def connect(self):
        self.acknowledged(self.receiver.num_arrived)
        self.there, self.back = [sent[:2] for sent in self.sender.kept], []

    @rule()
    def break_connection(self):
        self.there = self.back = None

    @precondition(lambda self: self.there)
    @rule(most=st.integers(1, 4))
    def deliver(self, most):
        for number, message in self.there[:most]:
            if self.receiver.arrive(number):
                self.arrived.append(message)
        del self.there[:most]

    @precondition(lambda self: self.back is not None)
    @rule()
    def acknowledge(self):
        self.back.append(self.receiver.num_arrived)

    @precondition(lambda self: self.back)
    @rule()
    def deliver_acknowledgement(self):
        self.acknowledged(self.back.pop(0))

    def acknowledged(self, number):
        for sent in self.sender.acknowledge(number):
            sent.over(None)

    @invariant()
    def holds(self):
        self.sender.validate()
        self.receiver.validate()
        assert self.arrived == self.sent[: len(self.arrived)]
        # What is over has arrived, and only that; the rest is kept.
        assert self.over == [(message, None) for message in self.sent[: len(self.over)]]
        assert len(self.over) <= len(self.arrived)
        assert [sent.message for sent in self.sender.kept] == self.sent[len(self.over) :]

    def teardown(self):
        self.break_connection()
        self.connect()
        if self.there:
            self.deliver(len(self.there))
        self.acknowledged(self.receiver.num_arrived)
        assert self.arrived == self.sent
        assert not self.sender.kept


TestTwoEnds = TwoEnds.TestCase
TestTwoEnds.settings = settings(deadline=None)


def test_only_time_in_which_nothing_moves_is_silence():
    state = LinkState()
    state.beat(10, 0)
    state.beat(10, 0)
    # Nothing is kept.
    assert state.silent_s == 0
    state.send("first", print)
    state.send("second", print)
    silences = []
    for num_moved in (0, 0, 0, 1, 1):
        state.beat(10, num_moved)
        silences.append(state.silent_s)
    assert silences == [0, 10, 20, 0, 10]
    state.acknowledge(1)
    state.beat(10, 1)
    assert state.silent_s == 0
    state.beat(10, 1)
    assert state.silent_s == 10
    state.acknowledge(2)
    state.beat(10, 1)
    assert state.silent_s == 0


def test_time_in_which_a_process_was_stopped_is_no_silence():
    clock = RunClock(every_s=1)
    begun_at = time.monotonic()
    assert clock.beat(begun_at) < 2
    assert clock.beat(begun_at + 1.5) == pytest.approx(1.5)
    assert clock.beat(begun_at + 1000) == 2
    assert clock.beat(begun_at + 1001) == pytest.approx(1)
    assert clock.run_s < 7


def test_what_was_asked_is_forgotten_with_its_asker():
    class Links:
        handlers, clock = {}, RunClock(every_s=1)

        def __init__(self):
            self.sent = []

        def send(self, address, message, over):
            self.sent.append(message)

        def moved_s(self, address):
            return 0.0

    links = Links()
    questions = Questions(links, threading.Condition())
    asked = questions.ask(["first", "second"], lambda number: number)
    assert links.sent == [1, 1]
    links.handlers[Answer]("second", Answer(1, "content"))
    assert questions.answers(asked) == {"second": "content"}
    with dask.config.set({"daskdist.timeouts.silence": 5}):
        for now in range(1, 9):
            links.clock.beat(time.monotonic() + now)
        assert list(questions.answers(asked)) == ["second", "first"]
    assert len(questions._asked) == 1
    del asked
    assert not questions._asked
    links.handlers[Answer]("first", Answer(1, "late"))
