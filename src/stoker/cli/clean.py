"""``stoker clean``: remove what caches of ended processes left behind."""

from __future__ import annotations

import click

from stoker.store.registry import clean as clean_registry


@click.command()
def clean() -> None:
    """Remove what caches of ended processes left in the runtime directory.

    Only sockets and lock files that Stoker made, each a few bytes: the memory of a cache goes
    with the last process that holds it. Caches in use are left alone.
    """
    removed = clean_registry()
    if removed:
        click.echo(f"removed the files of {removed} {'cache' if removed == 1 else 'caches'}")
    else:
        click.echo("nothing to remove")
