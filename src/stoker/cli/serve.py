"""``stoker serve``: the service of a node, in the foreground."""

from __future__ import annotations

import logging
import signal
from pathlib import Path

import click

from stoker.jobs.service import Service, ServiceSettings
from stoker.types import format_bytes, parse_bytes


@click.command()
@click.option("--memory", help="Maximum memory of all caches together, like 64GiB.")
@click.option("--disk", help="Maximum disk space of all disk caches together.")
@click.option(
    "--keep", type=float, help="Seconds to keep a cache without a job; by default for ever."
)
@click.option("--metrics-port", type=int, help="Serve Prometheus at this port of 127.0.0.1.")
@click.option(
    "--socket", type=click.Path(path_type=Path), help="A second socket, for members of --group."
)
@click.option("--group", help="Group whose members may use `stoker ls --socket`.")
def serve(
    memory: str | None,
    disk: str | None,
    keep: float | None,
    metrics_port: int | None,
    socket: Path | None,
    group: str | None,
) -> None:
    """Keep caches alive between jobs, and list them.

    Jobs of this user find it by themselves, and continue when it ends. It runs until Ctrl-C or
    SIGTERM. `stoker ls` shows what it holds.
    """
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    settings = ServiceSettings(
        memory=None if memory is None else parse_bytes(memory, name="--memory"),
        disk=None if disk is None else parse_bytes(disk, name="--disk"),
        keep=keep,
        socket=socket,
        group=group,
        metrics_port=metrics_port,
    )
    with Service(settings) as service:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: service.stop())
        bound = (
            "no bound" if settings.memory is None else f"at most {format_bytes(settings.memory)}"
        )
        click.echo(f"serving this user's caches, {bound} of memory; Ctrl-C ends it")
        if service.metrics_port is not None:
            click.echo(f"metrics: http://127.0.0.1:{service.metrics_port}/metrics")
        service.run()
