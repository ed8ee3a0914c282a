"""``stoker ls``: the caches that this user's processes share now."""

from __future__ import annotations

import json
from dataclasses import asdict

import click
from rich.console import Console
from rich.table import Table

from stoker.store.registry import ArenaInfo, list_arenas
from stoker.types import format_bytes


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of the table.")
def ls(as_json: bool) -> None:
    """List the caches that processes of this user share now.

    A cache exists as long as a process holds it. Caches that a job keeps to itself, and those of
    other users, are not listed.
    """
    found = list_arenas()
    if as_json:
        click.echo(json.dumps([asdict(info) for info in found], indent=1))
    elif not found:
        click.echo("no running process shares a cache")
    else:
        Console().print(_table(found))


def _table(found: list[ArenaInfo]) -> Table:
    table = Table()
    table.add_column("data", overflow="fold")
    for name in ("samples", "used", "capacity", "hit ratio", "evictions", "process"):
        table.add_column(name, justify="right")
    for info in found:
        stats = info.stats
        hits, misses = stats.get("hits", 0), stats.get("misses", 0)
        table.add_row(
            info.description or info.key,
            f"{stats['entries']:,}" if stats else "?",
            format_bytes(stats["payload_bytes"]) if stats else "?",
            format_bytes(info.capacity_bytes),
            f"{hits / (hits + misses):.1%}" if hits + misses else "",
            f"{stats['evictions']:,}" if stats else "?",
            str(info.pid) if info.pid else "other namespace",
        )
    return table
