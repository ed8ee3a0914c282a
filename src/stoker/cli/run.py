"""``stoker run``: a command with fast local copies of the files it reads from slow storage."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from stoker.cli._run_report import show
from stoker.errors import ConfigError
from stoker.tiering.command import NotStarted
from stoker.tiering.config import read_config
from stoker.tiering.launcher import explain as explanation
from stoker.tiering.launcher import run as run_on_tiers


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--config", type=click.Path(path_type=Path), help="TOML or YAML file; flags win.")
@click.option("--source", type=click.Path(path_type=Path), help="Directory with the files.")
@click.option(
    "--tier",
    "tiers",
    multiple=True,
    metavar="DIR:SIZE",
    help="Directory for copies and the most bytes in it; the first with room is taken.",
)
@click.option("--order", type=click.Path(path_type=Path), help="Warm list or scores: placed first.")
@click.option("--threads", type=int, help="Files copied at the same time. Default: 6.")
@click.option(
    "--revalidate",
    type=float,
    metavar="SECONDS",
    help="How soon a change of the source is noticed. Default: 60.",
)
@click.option(
    "--small",
    metavar="SIZE",
    help="Let the first open of files up to this size wait for the copy. Default: 0, no waiting.",
)
@click.option("--ahead", metavar="SIZE", help="For which a read of a copy waits. Default: 128MiB.")
@click.option("--fsync", is_flag=True, default=None, help="Have copies on disk before they count.")
@click.option("--checksum", is_flag=True, default=None, help="Check copies of earlier runs whole.")
@click.option(
    "--report", type=click.Path(path_type=Path), help="Write the report there every second, JSON."
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

    No line of the program changes. A file is copied to the first tier with room when it is first
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
            show(result, Console(stderr=True, highlight=False))

    def note(text: str) -> None:
        click.echo(f"stoker run: {text}", err=True)

    try:
        sys.exit(run_on_tiers(read_config(config, flags), command, report, done, note))
    except NotStarted as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(error.status)
