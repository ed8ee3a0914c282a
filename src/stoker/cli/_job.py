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
from stoker.jobs.survey import JobInfo, Watch

_MEANS = {
    "start-up": "waits for the first batch of an epoch",
    "storage": "waits while workers read, or wait for reads",
    "decode": "waits while workers decode and transform",
    "compute": "does not wait",
}
_PATIENCE = 60.0  # seconds for a probe
_Jobs = dict[tuple[str, int], tuple[str, Mapping[str, Any]]]


def tell_of(
    name: str, socket: Path | None, seconds: float, *, has_probe: bool, as_json: bool
) -> None:
    """Watch the jobs of that name for so many seconds, and print what limits them.

    ``socket``: where a service tells of them; None: they are this user's. ``has_probe``: what they
    would gain if data were free is measured too. Raises ClickException if no such job runs, or it
    ends meanwhile.
    """
    watch = Watch()
    before = _jobs(name, socket, watch)
    time.sleep(seconds)
    after = _jobs(name, socket, watch)
    try:
        views = [
            view_of(data, job, before[key][1] if key in before else None)
            for key, (data, job) in after.items()
        ]
        measured = [
            _measured(watch, job, before[key][1]) if has_probe and key in before else None
            for key, (_, job) in after.items()
        ]
    except NO_JOB as error:
        raise click.ClickException(f"what answers at {socket} is no service: {error!r}") from error
    if as_json:
        told = [
            asdict(view) | {"headspace_measured": headspace}
            for view, headspace in zip(views, measured, strict=True)
        ]
        click.echo(json.dumps(told, indent=1))
        return
    console = Console(markup=False, emoji=False)
    for view, headspace in zip(views, measured, strict=True):
        _show(view, seconds, console, _free(view, headspace, has_probe=has_probe))


def _jobs(name: str, socket: Path | None, watch: Watch) -> _Jobs:
    """Return the jobs of that name, with their data, by cache and process."""
    try:
        every = [(cache, job) for cache in shared_caches(socket, watch) for job in cache["jobs"]]
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


def _measured(watch: Watch, job: Mapping[str, Any], earlier: Mapping[str, Any]) -> float | None:
    """Return how many times as fast a job runs if data is free, by a probe; None: not known."""
    batches: int = sum(job["waits"]) - sum(earlier["waits"])
    seconds: float = job["counts"]["epoch_seconds"] - earlier["counts"]["epoch_seconds"]
    if not batches or seconds <= 0:
        return None
    found = watch.probe(JobInfo(**job), _PATIENCE)
    if found is None or not found.seconds:
        return None
    return max(1.0, seconds / batches / found.seconds)


def _free(view: JobView, measured: float | None, *, has_probe: bool) -> str:
    """Return what is known of the job's headspace, in words."""
    if measured is not None:
        return f"if data were free: {measured:.2f} times as fast (measured by a probe)"
    told = f"if data were free: {view.headspace:.2f} times as fast (an estimate, from the time that"
    why = "; the probe found nothing: too few batches came in its time" if has_probe else ""
    return f"{told} training waits{why})"


def _show(view: JobView, seconds: float, console: Console, free: str) -> None:
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
    console.print(Text(free))
    if view.verdict:
        console.print(Text(view.verdict))
