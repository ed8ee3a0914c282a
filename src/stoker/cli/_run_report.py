"""What ``stoker run`` says at the end."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from stoker.types import format_bytes


def show(report: dict[str, Any], console: Console) -> None:
    """Print one row for the source and one for each tier, and what was out of the ordinary."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("stoker run", overflow="fold")
    for name in ("opens", "reads", "bytes", "files", "used", "quota", "copy s"):
        table.add_column(name, justify="right", no_wrap=True)
    source = report["source"]
    table.add_row(source["path"], *_counted(source))
    for tier in report["tiers"]:
        table.add_row(
            tier["path"],
            *_counted(tier),
            f"{tier['files']:,}",
            format_bytes(tier["used"]),
            format_bytes(tier["quota"]),
            f"{tier['copy_seconds']:.1f}",
        )
    console.print(table)
    for line in _remarks(report):
        console.print(line, soft_wrap=True)


def _counted(row: dict[str, Any]) -> list[str]:
    return [f"{row['opens']:,}", f"{row['reads']:,}", format_bytes(row["bytes"])]


def _remarks(report: dict[str, Any]) -> list[str]:
    source = report["source"]
    lines = [
        f"The source was read for {format_bytes(source['bytes'] + source['copied_bytes'])}, of "
        f"which {format_bytes(source['copied_bytes'])} to make copies; {report['reads_avoided']:,} "
        f"reads of {format_bytes(report['bytes_avoided'])} were served by copies."
    ]
    reused = sum(tier["reused"] for tier in report["tiers"])
    if reused:
        lines.append(f"{reused:,} copies of earlier runs were used.")
    if report["dropped"]:
        lines.append(f"{report['dropped']:,} copies were dropped: source changed, or copy gone.")
    if (order := report["order"]) is not None:
        lines.append(
            f"Of {order['listed']:,} files listed in the order {order['placed']:,} have a place; "
            f"{order['outside']:,} lie outside the source."
        )
    lines += [f"{count:,} times: {what}" for what, count in report["problems"].items() if count]
    if not report["daemon"]:
        lines.append("The placement daemon died: from then on the source was read.")
    return lines
