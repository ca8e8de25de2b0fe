"""``daskdist inspect``: the format, columns, rows and damage of files."""

from __future__ import annotations

from typing import Any

import click

from daskdist.cli.reports import dataset_of, of_files, short_errors, write
from daskdist.core.cardinality import counted
from daskdist.core.dataset_base import node_of
from daskdist.core.node import Source, walk
from daskdist.core.primitive import Split
from daskdist.core.spec import TensorSpec
from daskdist.dataset import Dataset
from daskdist.display.plan import size, table
from daskdist.errors import FileError
from daskdist.ops.read_files import ReadFiles
from daskdist.ops.with_options import Options
from daskdist.tables.describe import column_name


@click.command("inspect", short_help="Show the format, columns, rows and damage of files.")
@of_files
@click.option("--check", is_flag=True, help="Read everything, to find damage inside files.")
def inspect_files(files: tuple[str, ...], format_name: str | None, as_json: bool, check: bool) -> None:
    """Show the format, columns, rows and damage of FILES: paths, globs, directories or URLs.

    Reads the indexes of all files, such as Parquet footers, but no data unless --check is given. Ends with exit code 1
    if a file is damaged.
    """
    with short_errors():
        dataset = dataset_of(files, format_name)
        report = _report(dataset, check=check)
    write(report, _text(report), as_json=as_json)
    if report["damage"]:
        raise SystemExit(1)


def _report(dataset: Dataset, *, check: bool) -> dict[str, Any]:
    (node,) = [node for node in walk(node_of(dataset)) if isinstance(node, Source)]
    spec = node.spec
    damage: dict[str, str] = {}
    splits: list[Split] = []
    if isinstance(node, ReadFiles):
        for number, path in enumerate(node.paths):
            try:
                splits += node.splits_of_file(number)
            except FileError as error:
                damage[path] = " ".join(str(error).split())
    num_rows = [split.num_rows for split in splits]
    num_bytes = [split.num_bytes for split in splits]
    report = {
        "format": node.name.removeprefix("read_"),
        "files": len(node.paths) if isinstance(node, ReadFiles) else None,
        "splits": len(splits),
        "rows": None if None in num_rows else sum(filter(None, num_rows)),
        "bytes": None if None in num_bytes else sum(filter(None, num_bytes)),
        "columns": [_column(path, leaf) for path, leaf in spec.structure.in_order(spec.leaves)],
        "damage": damage,
    }
    if check:
        report |= _checked(dataset, damage)
    return report


def _column(path: str, leaf: TensorSpec) -> dict[str, Any]:
    return {
        "path": path,
        "shape": None if leaf.shape is None else list(leaf.shape),
        "dtype": str(leaf.dtype),
    }


def _checked(dataset: Dataset, damage: dict[str, str]) -> dict[str, Any]:
    elements = iter(dataset.with_options(Options(on_error="skip")))
    num_rows = sum(1 for _ in elements)
    left_out = {
        path: f"{counted(number, 'unit')} cannot be read"
        for path, number in elements.stats()["skipped_by_file"].items()
    }
    return {"rows": num_rows, "damage": left_out | damage}


def _text(report: dict[str, Any]) -> str:
    facts = [
        report["format"],
        counted(report["files"], "file") if report["files"] is not None else "",
        counted(report["splits"], "split"),
        "rows not counted: use --check to read all" if report["rows"] is None else counted(report["rows"], "row"),
        "" if report["bytes"] is None else f"about {size(report['bytes'])} in memory",
    ]
    rows: list[tuple[str, ...]] = [("column", "shape", "dtype")]
    for column in report["columns"]:
        shape = "?" if column["shape"] is None else str(tuple(column["shape"])).replace("None", "?")
        name = column_name(column["path"]) if column["path"] else "(the element)"
        rows.append((name, shape, column["dtype"]))
    damaged = [f"damaged: {path}: {reason.removeprefix(f'{path}: ')}" for path, reason in report["damage"].items()]
    return "\n".join([", ".join(filter(None, facts)), table(rows), *damaged])
