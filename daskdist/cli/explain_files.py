"""``daskdist explain``: show which worker would read which files."""

from __future__ import annotations

from dataclasses import asdict

import click

from daskdist.cli.reports import dataset_of, of_files, short_errors, write
from daskdist.core.cardinality import counted
from daskdist.core.dataset_base import element_spec_of, node_of
from daskdist.display.plan import shares_table, tree
from daskdist.execute.stream.local_iterator import first_elements
from daskdist.passes.autoshard import autoshard
from daskdist.passes.plan import plan
from daskdist.passes.rebatch import rebatch
from daskdist.sharding import AutoShardPolicy, policy_of
from daskdist.strategy.group import Replica
from daskdist.strategy.input.pipeline import pipelines_of, shares_of


@click.command("explain", short_help="Show which worker would read which files, and why.")
@of_files
@click.option("--workers", metavar="N", type=click.IntRange(1), default=2, show_default=True, help="Workers.")
@click.option(
    "--policy",
    type=click.Choice([name.lower() for name in AutoShardPolicy.__members__ if name != "HINT"]),
    default="auto",
    show_default=True,
    help="How the data is sharded over workers.",
)
@click.option(
    "--batch-size", metavar="N", type=click.IntRange(1), default=1024, show_default=True, help="Rows in a batch."
)
def explain_files(
    files: tuple[str, ...], format_name: str | None, as_json: bool, workers: int, policy: str, batch_size: int
) -> None:
    """Show which part of FILES each of N workers would read, and why. No cluster is needed.

    Reads the indexes of all files, such as Parquet footers, but no data.
    """
    with short_errors():
        dataset = dataset_of(files, format_name).batch(batch_size)
        rebatched = rebatch(node_of(dataset), element_spec_of(dataset), workers)
        sharding, nodes = autoshard(
            rebatched, policy_of(policy), workers, lambda node, number: first_elements(plan(node), number)
        )
        replicas = [Replica(f"worker {number}", "CPU:0") for number in range(workers)]
        names = tuple([replica.worker for replica in replicas])
        shares = shares_of(pipelines_of(nodes, names, names), replicas)
    lines = [
        counted(workers, "worker"),
        f"sharding: {sharding.policy.name if workers > 1 else 'none needed'} ({sharding})",
        shares_table(shares),
        "pipeline of the first worker:",
        tree(nodes[0]),
    ]
    report = {
        "policy": sharding.policy.name,
        "reason": sharding.reason,
        "advice": sharding.advice,
        "workers": [{key: value for key, value in asdict(share).items() if key != "devices"} for share in shares],
    }
    write(report, "\n".join(lines), as_json=as_json)
