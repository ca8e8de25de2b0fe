"""The page ``/daskdist`` of Dask's dashboard in a browser, and the metrics, of a cluster at work."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import threading
import urllib.request

import browser
import pytest
from conftest import eventually, new_cluster
from distributed import Scheduler
from tornado.httpclient import AsyncHTTPClient

import daskdist
from daskdist import Dataset, errors

pytest.importorskip("bokeh")
pytest.importorskip("prometheus_client")

pytestmark = [pytest.mark.cluster, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
TEXT = "Bokeh.documents[0].get_model_by_name({!r}).text"


def get(client, path):
    """Return a page of the dashboard."""
    with urllib.request.urlopen(f"{client.dashboard_link.removesuffix('/status')}/{path}", timeout=30) as answer:
        return answer.read().decode()


def metrics(client, name):
    """Return the values of a metric, by its labels."""
    lines = re.findall(rf"^{name}(\{{.*\}})? (\S+)$", get(client, "metrics"), re.MULTILINE)
    return {labels: float(value) for labels, value in lines}


@pytest.fixture(scope="module")
def busy_client():
    """Return a client of a cluster on which a loop runs, and of which the metrics were asked for before."""
    with new_cluster(3) as client:
        assert "dask_scheduler_workers" in get(client, "metrics")
        assert not metrics(client, "daskdist_lost_workers_total")
        strategy = daskdist.MultiWorkerMirroredStrategy(client)
        dataset = Dataset.range(10**9).map(lambda x: x * 2.0).batch(96)
        served = iter(Dataset.counter().serve(client, job_name="features"))
        ended = threading.Event()

        def steps():
            while not ended.is_set():
                # This fails when the test kills a worker; then start again.
                with contextlib.suppress(errors.ClusterError):
                    for batch in strategy.distribute_dataset(dataset):
                        strategy.run(lambda x: x.sum(), args=(batch,))
                        # The service counts elements as used once the next ones are asked for.
                        next(served)
                        # Without a pause, the loop would keep the machine busy.
                        if ended.wait(0.01):
                            return

        looping = threading.Thread(target=steps)
        looping.start()
        try:
            yield client
        finally:
            ended.set()
            looping.join(60)
            served.close()
            strategy.close()


def test_metrics_are_those_of_the_loop(busy_client):
    # Each worker reports with its own heartbeats.
    eventually(lambda: len(metrics(busy_client, "daskdist_replica_steps_total")) == 3)
    steps = metrics(busy_client, "daskdist_replica_steps_total")
    assert all('worker="tcp://127.0.0.1' in labels and 'device="CPU:0"' in labels for labels in steps)
    eventually(lambda: min(metrics(busy_client, "daskdist_replica_steps_total").values()) > max(steps.values()))
    later = metrics(busy_client, "daskdist_replica_rows_total")
    # A replica has 32 rows of each step.
    assert all(number % 32 == 0 and number > 0 for number in later.values())
    eventually(lambda: metrics(busy_client, "daskdist_service_elements_total").get('{job="features"}', 0) >= 90)
    assert metrics(busy_client, "daskdist_service_consumers") == {'{job="features"}': 1.0}
    for name in ("daskdist_replica_step_seconds_total", "daskdist_steps_in_flight", "daskdist_task_seconds_total"):
        eventually(lambda name=name: sum(metrics(busy_client, name).values()) > 0)
    # Each metric has one help text and one type.
    text = get(busy_client, "metrics")
    names = re.findall(r"^# TYPE (daskdist_\S+) (counter|gauge)$", text, re.MULTILINE)
    assert len(names) == len(dict(names)) == len(re.findall(r"^# HELP daskdist_", text, re.MULTILINE))
    assert all(name.endswith("_total") == (kind == "counter") for name, kind in names)


def test_other_pages_link_to_the_page(busy_client):
    assert 'href="daskdist"' in get(busy_client, "status")
    assert "prefers-color-scheme" in get(busy_client, "daskdist")


async def pages_of_a_new_scheduler():
    """Return the page and the metrics of a scheduler that was started with the preload module."""
    async with Scheduler(
        host="127.0.0.1", dashboard_address="127.0.0.1:0", preload=["daskdist.preload"], validate=True
    ) as scheduler:
        asked = [f"http://127.0.0.1:{scheduler.http_server.port}/{path}" for path in ("daskdist", "metrics")]
        answers = await asyncio.gather(*map(AsyncHTTPClient().fetch, asked))
        return [answer.body.decode() for answer in answers]


def test_the_preload_module_adds_the_page_and_the_metrics():
    page, text = asyncio.run(pages_of_a_new_scheduler())
    assert "prefers-color-scheme" in page
    assert "daskdist_lost_workers_total 0.0" in text


@pytest.mark.skipif(browser.find_browser() is None, reason="no Chromium")
def test_a_browser_shows_figures_while_a_loop_runs(busy_client, tmp_path):
    url = busy_client.dashboard_link.replace("/status", "/daskdist")
    with browser.opened(browser.find_browser(), tmp_path) as page:
        page.show(url, width=800, scheme="dark")
        page.wait_for(f"{TEXT.format('summary')}.includes('3 replicas')")
        assert page.evaluate("document.title") == "Dask: daskdist"
        assert page.evaluate("document.body.scrollWidth") <= 800
        first = page.wait_for("Number(/([\\d,.]+) steps/.exec(" + TEXT.format("summary") + ")[1].replace(/,/g, ''))")
        assert first > 0
        page.wait_for(f"{TEXT.format('details')}.includes('Work of tasks for input')")
        before = page.evaluate(TEXT.format("details"))
        page.wait_for(f"{TEXT.format('details')} !== {before!r}")
        assert all(name in before for name in ("tcp://127.0.0.1", "features #0", "steps/s"))
        # The page shows that a worker was killed, and the loop continues with two.
        process = next(iter(busy_client.run(os.getpid).values()))
        os.kill(process, signal.SIGKILL)
        page.wait_for(f"{TEXT.format('summary')}.includes('2 replicas')")
        page.wait_for(f"{TEXT.format('summary')}.includes('1 worker lost')")
        page.wait_for(f"{TEXT.format('details')}.includes('Lost workers')")
        page.picture(tmp_path / "page.png")
        assert (tmp_path / "page.png").stat().st_size > 10_000
    assert metrics(busy_client, "daskdist_lost_workers_total") == {"": 1.0}
