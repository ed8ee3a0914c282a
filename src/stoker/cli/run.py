"""``stoker run``: any program, its files placed on fast tiers; nothing in it changes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table

from stoker.errors import ConfigError
from stoker.tiering.config import read_config
from stoker.tiering.launcher import NotStarted
from stoker.tiering.launcher import explain as explanation
from stoker.tiering.launcher import run as run_on_tiers
from stoker.types import format_bytes


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option(
    "--config", type=click.Path(path_type=Path), help="TOML or YAML file; flags override it."
)
@click.option("--source", type=click.Path(path_type=Path), help="Directory with the files.")
@click.option(
    "--tier",
    "tiers",
    multiple=True,
    metavar="DIR:SIZE",
    help="Directory for copies and its quota in bytes; the first tier with room is used.",
)
@click.option(
    "--order",
    type=click.Path(path_type=Path),
    help="Warm list or scores; these files are placed first.",
)
@click.option("--threads", type=int, help="Files copied at the same time. Default: 6.")
@click.option(
    "--revalidate",
    type=float,
    metavar="SECONDS",
    help="How often the source of each copy is checked for changes. Default: 60.",
)
@click.option(
    "--small",
    metavar="SIZE",
    help="Largest file whose first open waits for the copy. Default: 0, no waiting.",
)
@click.option(
    "--ahead", metavar="SIZE", help="How far ahead of the copy a read may wait. Default: 128MiB."
)
@click.option(
    "--fsync", is_flag=True, default=None, help="Flush copies to disk before they are used."
)
@click.option(
    "--checksum", is_flag=True, default=None, help="Verify whole copies of earlier runs by CRC-32."
)
@click.option(
    "--report",
    type=click.Path(path_type=Path),
    help="Write the report there every second, as JSON.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report at the end as JSON.")
@click.option("--quiet", is_flag=True, help="Print no report at the end.")
@click.option("--explain", is_flag=True, help="Say what is intercepted and what is not, and exit.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def run(
    config: Path | None,
    report: Path | None,
    as_json: bool,
    quiet: bool,
    explain: bool,
    command: tuple[str, ...],
    **flags: Any,
) -> None:
    """Run COMMAND with fast local copies of the files below --source.

    The program needs no change. A file is copied to the first tier with room when it is first
    read; from then on, and in later runs, opening it opens the copy. The source is never written.
    The exit status is the command's, 128 + n when signal n ended it; signals are passed on. The
    report goes to standard error.
    """
    if explain:
        click.echo(explanation(), nl=False)
        return
    if not command:
        raise ConfigError("no command given: write it after --, like stoker run ... -- python t.py")

    def done(result: dict[str, Any]) -> None:
        if as_json:
            click.echo(json.dumps(result, indent=1), err=True)
        elif not quiet:
            _show(result, Console(stderr=True, highlight=False))

    def note(text: str) -> None:
        click.echo(f"stoker run: {text}", err=True)

    try:
        sys.exit(run_on_tiers(read_config(config, flags), command, report, done, note))
    except NotStarted as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(error.status)


def _show(report: dict[str, Any], console: Console) -> None:
    """Print one row for the source and one for each tier, then remarks on anything unusual."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("stoker run", overflow="fold")
    for name in ("opens", "reads", "bytes", "files", "used", "quota", "copy s"):
        table.add_column(name, justify="right", no_wrap=True)
    source = report["source"]
    table.add_row(source["path"], *_counted(source))
    for tier in report["tiers"]:
        table.add_row(
            tier["path"],
            *_counted(tier),
            f"{tier['files']:,}",
            format_bytes(tier["used"]),
            format_bytes(tier["quota"]),
            f"{tier['copy_seconds']:.1f}",
        )
    console.print(table)
    for line in _remarks(report):
        console.print(line, soft_wrap=True)


def _counted(row: dict[str, Any]) -> list[str]:
    return [f"{row['opens']:,}", f"{row['reads']:,}", format_bytes(row["bytes"])]


def _remarks(report: dict[str, Any]) -> list[str]:
    source = report["source"]
    lines = [
        f"The source was read for {format_bytes(source['bytes'] + source['copied_bytes'])}, of "
        f"which {format_bytes(source['copied_bytes'])} to make copies; {report['reads_avoided']:,} "
        f"reads of {format_bytes(report['bytes_avoided'])} were served by copies."
    ]
    reused = sum(tier["reused"] for tier in report["tiers"])
    if reused:
        lines.append(f"{reused:,} copies of earlier runs were used.")
    if report["dropped"]:
        lines.append(f"{report['dropped']:,} copies were dropped: source changed, or copy gone.")
    if (order := report["order"]) is not None:
        lines.append(
            f"Of {order['listed']:,} files in the order {order['placed']:,} are placed; "
            f"{order['outside']:,} lie outside the source."
        )
    lines += [f"{count:,} times: {what}" for what, count in report["problems"].items() if count]
    if not report["daemon"]:
        lines.append("The placement daemon died; from then on the source was read.")
    return lines
