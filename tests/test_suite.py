"""The suite itself: a failing test does not end the whole run."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from conftest import send_less


def test_a_report_with_text_that_cannot_be_encoded_is_sent(pytestconfig):
    report = pytest.TestReport(
        "tests/test_x.py::test_x", ("tests/test_x.py", 1, "test_x"), {}, "failed", "half a pair: \udcff", "call"
    )
    report.sections.append(("Captured log", "\ud800"))
    data = pytestconfig.hook.pytest_report_to_serializable(config=pytestconfig, report=report)
    sent = json.dumps(data, ensure_ascii=False).encode()
    assert b"half a pair: \\\\udcff" in sent


def test_a_report_is_sent_as_it_is(pytestconfig):
    reason = ("tests/test_x.py", 1, "Skipped: no such library")
    report = pytest.TestReport(
        "tests/test_x.py::test_x", ("tests/test_x.py", 1, "test_x"), {}, "skipped", reason, "call"
    )
    data = pytestconfig.hook.pytest_report_to_serializable(config=pytestconfig, report=report)
    assert data["longrepr"] == reason


@pytest.mark.parametrize(
    ("when", "outcome", "sections", "is_sent"),
    [
        ("setup", "passed", [], False),
        ("teardown", "passed", [], False),
        ("call", "passed", [], True),
        ("setup", "failed", [], True),
        ("setup", "skipped", [], True),
        ("teardown", "failed", [], True),
        ("teardown", "passed", [["Captured stdout teardown", "x"]], True),
    ],
)
def test_reports_that_say_something_are_sent(when, outcome, sections, is_sent):
    sent = []
    interactor = SimpleNamespace(sendevent=lambda name, **content: sent.append(name))
    send_less(interactor)
    interactor.sendevent("testreport", data={"when": when, "outcome": outcome, "sections": sections})
    interactor.sendevent("workerfinished")
    assert sent == ["testreport"] * is_sent + ["workerfinished"]
