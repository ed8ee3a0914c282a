"""``stoker warm``: fill a disk cache before training begins."""

from __future__ import annotations

import json
import math
import sys
from contextlib import closing
from pathlib import Path

import click
import numpy as np

from stoker.cli._options import bytes_bar, open_url
from stoker.epoch.stage import Samples, Stage, check_stage, make_stage
from stoker.errors import ConfigError
from stoker.policy.baselines import MinIO
from stoker.source.base import Source
from stoker.store.arena import Arena
from stoker.store.disk import Wanted, plan_disk
from stoker.store.fill import Filled, fill
from stoker.types import format_bytes, parse_bytes

_MOST_SHOWN = 5


@click.command()
@click.argument("url")
@click.option(
    "--disk", required=True, type=click.Path(path_type=Path), help="Directory of the cache."
)
@click.option(
    "--disk-size",
    help="Size, or share of the data. Default: all, or the size of an existing cache.",
)
@click.option(
    "--image-folder", is_flag=True, help="URL has class folders, as ImageFolder reads them."
)
@click.option(
    "--option", "options", multiple=True, metavar="NAME=VALUE", help="For the object store."
)
@click.option(
    "--stage",
    "stage_name",
    default="encoded",
    show_default=True,
    help="That of the Loader's cache: encoded, resized:SIDE or resized:SIDE:QUALITY.",
)
@click.option("--threads", type=click.IntRange(1, 256), default=16, show_default=True)
@click.option("--keep-free", help="Space to leave free on the disk. Default: 1 GiB or 5 %.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, and no progress.")
def warm(
    url: str,
    disk: Path,
    disk_size: str | None,
    image_folder: bool,
    options: tuple[str, ...],
    stage_name: str,
    threads: int,
    keep_free: str | None,
    as_json: bool,
) -> None:
    """Fill the disk cache of the data set at URL, a folder or an address like s3://bucket/train.

    A Loader with the same data set and stoker.Cache(disk=) then reads from URL only what is not on
    disk. As many samples as fit are kept, from the first on. Samples on disk are not read again:
    after an interruption, run it again to resume. Exits with status 1 if samples could not be read
    or kept.
    """
    with closing(open_url(url, image_folder, options)) as originals:
        stage = _stage(originals, stage_name)
        source = stage.source
        plan = plan_disk(disk, disk_size, _wanted(originals, stage), name="--disk-size")
        if plan is None:
            raise ConfigError(f"--disk-size={disk_size} leaves nothing to fill: give it more")
        floor = None if keep_free is None else parse_bytes(keep_free, name="--keep-free")
        with (
            plan.open(MinIO().regions(), keep_free=floor) as shared,
            bytes_bar("warming", _that_fit(source, shared.arena), shown=not as_json) as progress,
        ):
            filled = fill(source, shared.arena, threads=threads, progress=progress)
        _report(source, filled, as_json)
    sys.exit(1 if filled.failed or filled.refused else 0)


def _stage(originals: Source, name: str) -> Stage:
    check_stage(name)
    if name == "decoded":
        raise ConfigError("--stage decoded: only a Loader knows how samples are decoded")
    if not len(originals):
        raise ConfigError("there are no samples: nothing to fill the cache with")
    return make_stage(Samples(originals), name)


def _wanted(originals: Source, stage: Stage) -> Wanted:
    sizes = stage.source.sizes
    total = int(sizes.sum())
    return Wanted(
        stage.key,
        len(sizes),
        total,
        int(originals.sizes.sum()),
        math.ceil(total * stage.headroom),
        int(np.max(sizes)),
        total / len(sizes),
        originals.local_identity,
    )


def _that_fit(source: Source, arena: Arena) -> int:
    ends = np.cumsum(source.sizes)
    return int(ends[ends <= arena.capacity_bytes].max(initial=0))


def _report(source: Source, filled: Filled, as_json: bool) -> None:
    if as_json:
        facts = {**vars(filled), "failed": {i: str(why) for i, why in filled.failed.items()}}
        click.echo(json.dumps(facts, indent=1))
        return
    click.echo(
        f"{filled.present + filled.read:,} of {len(source):,} samples are on disk: "
        f"{filled.read:,} read now ({format_bytes(filled.bytes_read)}), "
        f"{filled.present:,} already there"
    )
    if filled.busy:
        click.echo(f"{filled.busy:,} were being read by another process")
    if filled.refused:
        click.echo(f"{filled.refused:,} did not fit on disk", err=True)
    for sample, why in list(filled.failed.items())[:_MOST_SHOWN]:
        click.echo(f"not read: {source.name(sample)}: {why}", err=True)
    if len(filled.failed) > _MOST_SHOWN:
        click.echo(f"... and {len(filled.failed) - _MOST_SHOWN:,} more", err=True)
