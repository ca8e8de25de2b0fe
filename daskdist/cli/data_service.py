"""``daskdist serve`` and ``daskdist preload``: start a data service, or add it to a scheduler that runs already."""

from __future__ import annotations

import signal
import threading
from typing import Any

import click

from daskdist.cli.reports import short_errors, write
from daskdist.core.cardinality import counted
from daskdist.service.current_status import current_status


@click.command("serve", short_help="Start a data service on this machine.")
@click.option("--workers", metavar="N", type=click.IntRange(1), default=2, show_default=True, help="Worker processes.")
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8786, show_default=True, help="The port; 0 for any.")
@click.option("--dashboard-address", metavar="ADDRESS", default=":8787", show_default=True, help="Dask's dashboard.")
@click.option("--work-dir", metavar="DIR", help="Keep jobs in this directory, so that another service can continue.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, and nothing else.")
def serve(workers: int, host: str, port: int, dashboard_address: str, work_dir: str | None, as_json: bool) -> None:
    """Start a scheduler with the data service and worker processes, and run until interrupted.

    Programs read from it by its address: dataset.serve("tcp://127.0.0.1:8786").
    """
    import dask
    from distributed import LocalCluster

    is_over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: is_over.set())
    # Ctrl-C reaches the worker processes too: they inherit that they ignore it, and end with the cluster.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with (
        short_errors(),
        dask.config.set({"daskdist.service.work-dir": work_dir}),
        LocalCluster(
            n_workers=workers,
            threads_per_worker=1,
            host=host,
            scheduler_port=port,
            dashboard_address=dashboard_address,
            scheduler_kwargs={"preload": ["daskdist.preload"]},
        ) as cluster,
    ):
        signal.signal(signal.SIGINT, lambda *_: is_over.set())
        address = cluster.scheduler_address
        text = f"data service at {address}, {counted(workers, 'worker')}; end it with Ctrl-C"
        write({"address": address, "workers": workers, "dashboard": cluster.dashboard_link}, text, as_json=as_json)
        is_over.wait()


@click.command("preload", short_help="Add the data service to a running scheduler.")
@click.argument("address")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, and nothing else.")
def preload(address: str, as_json: bool) -> None:
    """Add the data service to the scheduler at ADDRESS, if it lacks it, and print the service's status.

    A scheduler has it from its start with: dask scheduler --preload daskdist.preload
    """
    with short_errors():
        status = current_status(address)
    report: dict[str, Any] = status.to_dict()
    write(report, repr(status), as_json=as_json)
