"""``stoker ls``: the caches that this user's processes share now, and the jobs that use them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from stoker.jobs.metrics import exposition
from stoker.jobs.protocol import Refused, ask
from stoker.jobs.survey import survey
from stoker.types import format_bytes


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of the table.")
@click.option("--metrics", is_flag=True, help="Print the text that Prometheus reads.")
@click.option(
    "--socket", type=click.Path(path_type=Path), help="Ask another user's service, at its socket."
)
def ls(as_json: bool, metrics: bool, socket: Path | None) -> None:
    """List the caches that processes of this user share now, and the jobs that use them.

    A cache exists as long as a process holds it: a job, or `stoker serve`. Private caches of a job,
    and caches of other users, are not listed.
    """
    if socket is None:
        _show(_service(), [asdict(cache) for cache in survey()], as_json, metrics)
        return
    service = _printable(_service(socket))
    try:
        _show(service, service["caches"], as_json, metrics)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise click.ClickException(f"what answers at {socket} is no service: {error!r}") from error


def _show(
    service: dict[str, Any], caches: Sequence[dict[str, Any]], as_json: bool, metrics: bool
) -> None:
    if metrics:
        click.echo(exposition(caches, service), nl=False)
    elif as_json:
        click.echo(json.dumps(caches, indent=1))
    else:
        if service:
            click.echo(_said(service))
        if not caches:
            click.echo("no running process shares a cache")
            return
        console = Console(markup=False, emoji=False)
        console.print(_caches(caches, service.get("idle", [])))
        if any(cache["jobs"] for cache in caches):
            console.print(_jobs(caches))


def _printable(value: Any) -> Any:
    """Return another user's answer without control characters, which could steer a terminal."""
    if isinstance(value, str):
        return "".join(letter if letter.isprintable() else "?" for letter in value)
    if isinstance(value, list):
        return [_printable(item) for item in value]
    if isinstance(value, dict):
        return {_printable(key): _printable(item) for key, item in value.items()}
    return value


def _service(socket: Path | None = None) -> dict[str, Any]:
    """Return the service's answer; an empty dict if no service runs and no socket was given."""
    try:
        return ask("list", socket)
    except (OSError, Refused) as error:
        if socket is not None:
            raise click.ClickException(f"no service answers at {socket}: {error}") from error
        return {}


def _said(service: dict[str, Any]) -> str:
    parts = []
    for name in ("memory", "disk"):
        used, limit = service[f"{name}_bytes"], service[f"{name}_limit_bytes"]
        if used or limit is not None:
            of = "" if limit is None else f" of {format_bytes(limit)}"
            parts.append(f"{name} {format_bytes(used)}{of}")
    return f"service: process {service['pid']}" + "".join(f", {part}" for part in parts)


def _caches(caches: Sequence[dict[str, Any]], idle: Sequence[str]) -> Table:
    table = Table()
    table.add_column("data", overflow="fold")
    for name in ("samples", "used", "capacity", "hit ratio", "evictions", "process"):
        table.add_column(name, justify="right")
    for cache in caches:
        stats = cache["stats"]
        hits, misses = stats.get("hits", 0), stats.get("misses", 0)
        held = "kept by the service" if cache["key"] in idle and not cache["jobs"] else ""
        table.add_row(
            cache["description"] or cache["key"],
            f"{stats['entries']:,}" if stats else "?",
            format_bytes(stats["payload_bytes"]) if stats else "?",
            format_bytes(cache["capacity_bytes"]),
            f"{hits / (hits + misses):.1%}" if hits + misses else "",
            f"{stats['evictions']:,}" if stats else "?",
            held or (str(cache["pid"]) if cache["pid"] else "other namespace"),
        )
    return table


def _jobs(caches: Sequence[dict[str, Any]]) -> Table:
    table = Table()
    table.add_column("job", overflow="fold")
    table.add_column("data", overflow="fold")
    for name in ("samples/s", "share", "hit ratio", "from source", "benefit", "eligible"):
        table.add_column(name, justify="right")
    for cache in caches:
        for job in cache["jobs"]:
            accesses = job["accesses"]
            table.add_row(
                job["name"],
                cache["description"] or cache["key"],
                f"{job['rate']:,.0f}",
                f"{job['share']:.0%}",
                f"{job['hits'] / accesses:.1%}" if accesses else "",
                format_bytes(job["bytes_from_source"]),
                f"{job['benefit']:.2f}" + ("" if job["probed"] else " (estimated)"),
                ("yes" if job["eligible"] else "no") if job["kind"] == "score" else "",
            )
    return table
