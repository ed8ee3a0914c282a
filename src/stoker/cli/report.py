"""``stoker report``: what a recorded training did, as a page."""

from __future__ import annotations

from pathlib import Path

import click

from stoker.sim.trace import Trace
from stoker.sim.traced import write_trace_report


@click.command()
@click.argument("trace", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--output",
    "-o",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The page to write; by default TRACE.html.",
)
def report(trace: Path, output: Path | None) -> None:
    """Write what a training recorded with Loader(trace=FILE) did, as one HTML page.

    Epochs with hits beside the most that are possible, the share of waiting, the waits for batches
    and the sizes of samples. The page loads nothing.
    """
    path = trace.with_name(f"{trace.name}.html") if output is None else output
    with Trace(trace) as recorded:
        write_trace_report(path, recorded)
    click.echo(f"wrote {path}")
