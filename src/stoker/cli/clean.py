"""``stoker clean``: remove what caches of ended processes left behind, or a disk cache."""

from __future__ import annotations

from pathlib import Path

import click

from stoker.store.disk import CacheDir
from stoker.store.registry import clean as clean_registry
from stoker.tiering import membership, tier_dir
from stoker.types import format_bytes


@click.command()
@click.option("--cache-dir", type=click.Path(path_type=Path), help="Empty this one instead.")
def clean(cache_dir: Path | None) -> None:
    """Remove what caches of ended processes left in the runtime directory.

    Only sockets and lock files that Stoker made, each a few bytes: the memory of a cache is freed
    with the last process that holds it. Caches in use are left alone. With --cache-dir, the
    samples of a disk cache, or the copies in a tier of stoker run, are removed unless a process
    uses them. Files that are not Stoker's are left alone.
    """
    if cache_dir is not None:
        is_tier = tier_dir.is_tier(cache_dir)
        freed = tier_dir.clean(cache_dir) if is_tier else CacheDir(cache_dir).clean()
        what = "tier" if is_tier else "disk cache"
        click.echo(f"emptied the {what} in {cache_dir}: {format_bytes(freed)} freed")
        return
    removed = clean_registry() + membership.clean()
    if removed:
        click.echo(f"removed the files of {removed} {'cache' if removed == 1 else 'caches'}")
    else:
        click.echo("nothing to remove")
