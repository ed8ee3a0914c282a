"""What `stoker doctor --job` says: where a running job's time goes, and which setting to change."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from stoker.cli.caches import shared_caches
from stoker.cli.view import NO_JOB, JobView, view_of
from stoker.jobs.survey import Watch

_MEANS = {
    "start-up": "waits for the first batch of an epoch",
    "storage": "waits while workers read, or wait for reads",
    "decode": "waits while workers decode and transform",
    "compute": "does not wait",
}
_Jobs = dict[tuple[str, int], tuple[str, Mapping[str, Any]]]


def tell_of(name: str, socket: Path | None, seconds: float, *, as_json: bool) -> None:
    """Watch the jobs of that name for so many seconds, and print what limits them.

    ``socket``: where a service tells of them; None: they are this user's. Raises ClickException
    if no such job runs, or it ends meanwhile.
    """
    before = _jobs(name, socket)
    time.sleep(seconds)
    after = _jobs(name, socket)
    try:
        views = [
            view_of(data, job, before[key][1] if key in before else None)
            for key, (data, job) in after.items()
        ]
    except NO_JOB as error:
        raise click.ClickException(f"what answers at {socket} is no service: {error!r}") from error
    if as_json:
        click.echo(json.dumps([asdict(view) for view in views], indent=1))
        return
    console = Console(markup=False, emoji=False)
    for view in views:
        _show(view, seconds, console)


def _jobs(name: str, socket: Path | None) -> _Jobs:
    """Return the jobs of that name, with their data, by cache and process."""
    try:
        every = [(cache, job) for cache in shared_caches(socket, Watch()) for job in cache["jobs"]]
        found: _Jobs = {
            (cache["key"], job["pid"]): (cache["description"] or cache["key"], job)
            for cache, job in every
            if job["name"] == name
        }
        others = ", ".join(sorted({repr(job["name"]) for _, job in every}))
    except NO_JOB as error:
        raise click.ClickException(f"what answers at {socket} is no service: {error!r}") from error
    if not found:
        running = f"these share a cache: {others}" if others else "no running job shares a cache"
        raise click.ClickException(f"no job is named {name!r}; {running}")
    return found


def _show(view: JobView, seconds: float, console: Console) -> None:
    console.print(
        Text(f"{view.name} (process {view.pid})", style="bold"),
        Text(f"over {seconds:g} s: {view.rate:,.0f} samples/s, hits {view.hits:.1%}"),
    )
    if view.bound == "idle":
        console.print(Text("no batch came in this time: it is idle, or a batch takes longer"))
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("stage")
    table.add_column("time", justify="right")
    table.add_column("training")
    for stage, share in sorted(view.stages.items(), key=lambda item: -item[1]):
        mark = "  <- the limit" if stage == view.bound else ""
        table.add_row(stage, f"{share:.0%}", Text(_MEANS[stage] + mark))
    console.print(table)
    console.print(
        Text(
            f"if data were free: {view.headspace:.2f} times as fast (an estimate, from the time "
            "that training waits)"
        )
    )
    if view.verdict:
        console.print(Text(view.verdict))
