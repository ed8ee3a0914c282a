"""``stoker warm`` and ``stoker pack``: bring a data set closer before training begins."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import click
import numpy as np

from stoker.cli._options import bytes_bar, named_options, open_url
from stoker.epoch.stage import Samples, Stage, check_stage, make_stage
from stoker.errors import ConfigError
from stoker.policy.baselines import MinIO
from stoker.source.base import Source
from stoker.source.pack import Packed
from stoker.source.pack import pack as pack_source
from stoker.store.arena import Arena
from stoker.store.disk import Wanted, plan_disk
from stoker.store.fill import Filled, fill
from stoker.types import format_bytes, parse_bytes

_MOST_SHOWN = 5
_IMAGE_FOLDER = click.option(
    "--image-folder", is_flag=True, help="URL has class folders, as ImageFolder reads them."
)
_OPTION = click.option(
    "--option", "options", multiple=True, metavar="NAME=VALUE", help="For the object store."
)
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON, and no progress.")


@click.command()
@click.argument("url")
@click.option(
    "--disk", required=True, type=click.Path(path_type=Path), help="Directory of the cache."
)
@click.option(
    "--disk-size",
    help="Size, or share of the data. Default: all, or the size of an existing cache.",
)
@_IMAGE_FOLDER
@_OPTION
@click.option(
    "--stage",
    "stage_name",
    default="encoded",
    show_default=True,
    help="That of the Loader's cache: encoded, resized:SIDE or resized:SIDE:QUALITY.",
)
@click.option("--threads", type=click.IntRange(1, 256), default=16, show_default=True)
@click.option("--keep-free", help="Space to leave free on the disk. Default: 1 GiB or 5 %.")
@_JSON
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
        _report_warm(source, filled, as_json)
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


def _report_warm(source: Source, filled: Filled, as_json: bool) -> None:
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
    _list([f"not read: {source.name(sample)}: {why}" for sample, why in filled.failed.items()])


@click.command()
@click.argument("url")
@click.argument("destination")
@_IMAGE_FOLDER
@_OPTION
@click.option(
    "--to-option", "to_options", multiple=True, metavar="NAME=VALUE", help="For DESTINATION."
)
@click.option("--shard-size", default="256MiB", show_default=True, help="Samples in each shard.")
@click.option("--seed", default=0, show_default=True, help="Of the order of the samples.")
@click.option("--in-order", is_flag=True, help="Keep the order, which blocks of samples then show.")
@click.option("--leave-out", is_flag=True, help="Leave out samples that cannot be read.")
@_JSON
def pack(
    url: str,
    destination: str,
    image_folder: bool,
    options: tuple[str, ...],
    to_options: tuple[str, ...],
    shard_size: str,
    seed: int,
    in_order: bool,
    leave_out: bool,
    as_json: bool,
) -> None:
    """Pack the data set at URL, a folder or an address like s3://bucket/train.

    DESTINATION is a folder too, or the address of a prefix like s3://bucket/packed. The samples are
    shuffled and written to plain tar files, shard-000000.tar and so on, which stoker.ImageFolder
    and WebDataset read, with an index beside them. Each is read again and compared. After an
    interruption, run it again to resume. Exits with status 1 if samples were left out.
    """
    size = parse_bytes(shard_size, name="--shard-size")
    with (
        closing(open_url(url, image_folder, options)) as source,
        bytes_bar("packing", int(source.sizes.sum()), shown=not as_json) as progress,
    ):
        packed = pack_source(
            source,
            destination,
            shard_bytes=size,
            seed=None if in_order else seed,
            leave_out=leave_out,
            storage_options=named_options(to_options, "--to-option"),
            progress=progress,
        )
        left_out = {source.name(sample): str(why) for sample, why in packed.left_out.items()}
    _report_pack(packed, left_out, as_json)
    sys.exit(1 if left_out else 0)


def _report_pack(packed: Packed, left_out: dict[str, str], as_json: bool) -> None:
    if as_json:
        facts = {**vars(packed), "shards": list(map(str, packed.shards)), "left_out": left_out}
        click.echo(json.dumps(facts, indent=1))
        return
    shards = "shard" if len(packed.shards) == 1 else "shards"
    folder, _, last = str(packed.shards[-1]).rpartition("/")
    where = f"{packed.shards[0]} to {last}"
    if "://" in folder:  # such as another program takes it
        number = last.removeprefix("shard-").removesuffix(".tar")
        where = f"{folder}/shard-{{{0:0{len(number)}d}..{number}}}.tar"
    click.echo(
        f"{packed.samples:,} samples are in {len(packed.shards):,} {shards} of together "
        f"{format_bytes(packed.bytes)}: {where}; {packed.present:,} were there already"
    )
    _list([f"left out: {name}: {why}" for name, why in left_out.items()])


def _list(failures: Sequence[str]) -> None:
    """Print the first of them, and how many more there are."""
    for failure in failures[:_MOST_SHOWN]:
        click.echo(failure, err=True)
    if len(failures) > _MOST_SHOWN:
        click.echo(f"... and {len(failures) - _MOST_SHOWN:,} more", err=True)
