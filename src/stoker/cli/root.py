"""The top of the command line: finds a command's file by name, shows errors without a traceback."""

from __future__ import annotations

import importlib
from typing import Any

import click

import stoker
from stoker.errors import StokerError

_COMMANDS = {
    "bench": "Measure this machine: cache hits of every recipe, the loader against torch's.",
    "clean": "Remove what caches of ended processes left behind, or empty a disk cache.",
    "demo": "Train behind slow storage with torch's DataLoader and with each recipe.",
    "doctor": "Show what Stoker finds and would use; measure a storage and say what it needs.",
    "ls": "List the caches that processes of this user share now, and their jobs.",
    "pack": "Put many small files into a few tar shards.",
    "pool": "Run a server for the pool that all nodes share; show what its servers hold.",
    "report": "Write what a recorded training did, as an HTML page.",
    "run": "Run any program with fast local copies of the files it reads.",
    "serve": "Keep caches alive between jobs, within limits, and list them.",
    "simulate": "Replay recipes without model or storage; show hits and their limits.",
    "top": "Show running jobs: rate, waiting, hits, reads, what bounds them and what would help.",
    "warm": "Fill a disk cache before training begins.",
}


_WHERE = {
    **dict.fromkeys(("clean", "ls", "serve"), "caches"),
    **dict.fromkeys(("pack", "warm"), "prepare"),
    "report": "simulate",
}
"""The files of commands that are not in one of their name."""


class _Root(click.Group):
    """Imports a command only when it is called, so that ``stoker ls`` need not load torch."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(f"stoker.cli.{_WHERE.get(cmd_name, cmd_name)}")
        command: click.Command = getattr(module, cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands from the table above, without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(sorted(_COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; an error of Stoker's is a message and exit status 1."""
        try:
            return super().invoke(ctx)
        except StokerError as error:
            raise click.ClickException(str(error)) from error


def _show_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        from stoker.cli.doctor import describe_build, examine_build

        click.echo(f"stoker {stoker.__version__} ({describe_build(examine_build())})")
        ctx.exit()


@click.group(cls=_Root, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the version and how it was built.",
)
def root() -> None:
    """Stoker keeps accelerators fed when training data lives on slow storage."""
