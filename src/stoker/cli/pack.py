"""``stoker pack``: put a data set of many small files into a few tar shards."""

from __future__ import annotations

import json
import sys
from contextlib import closing

import click

from stoker.cli._options import bytes_bar, named_options, open_url
from stoker.source.pack import Packed
from stoker.source.pack import pack as pack_source
from stoker.types import format_bytes, parse_bytes

_MOST_SHOWN = 5


@click.command()
@click.argument("url")
@click.argument("destination")
@click.option(
    "--image-folder", is_flag=True, help="URL has class folders, as ImageFolder reads them."
)
@click.option(
    "--option", "options", multiple=True, metavar="NAME=VALUE", help="For the object store."
)
@click.option(
    "--to-option", "to_options", multiple=True, metavar="NAME=VALUE", help="For DESTINATION."
)
@click.option("--shard-size", default="256MiB", show_default=True, help="Samples in each shard.")
@click.option("--seed", default=0, show_default=True, help="Of the order of the samples.")
@click.option("--in-order", is_flag=True, help="Keep the order, which blocks of samples then show.")
@click.option("--leave-out", is_flag=True, help="Leave out samples that cannot be read.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, and no progress.")
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
    _report(packed, left_out, as_json)
    sys.exit(1 if left_out else 0)


def _report(packed: Packed, left_out: dict[str, str], as_json: bool) -> None:
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
    for name, why in list(left_out.items())[:_MOST_SHOWN]:
        click.echo(f"left out: {name}: {why}", err=True)
    if len(left_out) > _MOST_SHOWN:
        click.echo(f"... and {len(left_out) - _MOST_SHOWN:,} more", err=True)
