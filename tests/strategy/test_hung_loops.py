"""Loops on replicas that make no progress: the log says so, and they are not waited for without end."""

from __future__ import annotations

import threading

import dask
import pytest
from distributed import Event

from daskdist import Dataset, errors, get_replica_context
from daskdist.strategy.replica.call_end import CallEnd

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

_LIMIT_S = 3


def steps_of(strategy):
    return strategy.distribute_dataset(Dataset.range(40).batch(4))


@pytest.mark.parametrize("begins", [True, False])
def test_a_loop_that_makes_no_progress_is_named(on_cluster, client, caplog, begins):
    def loop(batches):
        context = get_replica_context()
        is_hanging = context.replica_id_in_sync_group == 1
        if not begins:
            Event("hung").wait(60)
        for number, _ in enumerate(batches):
            if is_hanging and number == 3:
                # The other replica waits in a collective operation, which has a limit of its own.
                Event("hung").wait(60)
            context.all_reduce("SUM", 1)
        return number

    gate = Event("hung", client=client)
    gate.clear()
    where = rf"loop of replica 1 on {on_cluster.workers[1]}" if begins else r"loop of replica \d on .*"
    last = "its last one was batch 3" if begins else "it has made none"
    try:
        with (
            dask.config.set({"daskdist.timeouts.loop": _LIMIT_S}),
            pytest.raises(errors.ClusterError, match=rf"{where} has taken no batch .*daskdist\.timeouts\.loop; {last}"),
        ):
            on_cluster.local_results(on_cluster.run(loop, args=(steps_of(on_cluster),)))
    finally:
        gate.set()
    messages = [record.message for record in caplog.records if "daskdist.timeouts.loop" in record.message]
    assert 1 <= len(messages) <= 4
    assert all(last in message for message in messages)
    # The loop ends now, and others follow it.
    assert on_cluster.local_results(on_cluster.run(loop, args=(steps_of(on_cluster),))) == (9, 9)


def test_a_loop_may_take_any_time_in_all(on_cluster):
    def loop(batches):
        total = 0
        for number, _ in enumerate(batches):
            # Each step takes much less than the limit, and all together longer.
            threading.Event().wait(0.5)
            total += get_replica_context().all_reduce("SUM", number)
        return total

    with dask.config.set({"daskdist.timeouts.loop": _LIMIT_S}):
        assert on_cluster.local_results(on_cluster.run(loop, args=(steps_of(on_cluster),))) == (90, 90)


def test_a_call_notes_what_its_replicas_did_last():
    end = CallEnd()
    assert end.last(0) is None
    end.note(0, "batch", 2)
    end.note(1, "all_reduce(SUM)", begins=True)
    assert [end.last(number)[0] for number in (0, 1)] == ["batch 2", "all_reduce(SUM)"]
    assert end.last(0)[1] > end.last(1)[1] == 0
    assert end.last(2) is None
