"""``stoker bench``: what this machine does, in a few seconds each."""

from __future__ import annotations

import click

from stoker.cli.bench_hits import hits
from stoker.cli.bench_loader import loader


@click.group()
def bench() -> None:
    """Measure this machine."""


bench.add_command(hits)
bench.add_command(loader)
