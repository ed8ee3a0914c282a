"""``stoker doctor``: what is installed, which limits apply, what a storage delivers."""

from __future__ import annotations

import importlib
import importlib.util
import json
import multiprocessing
import os
import platform
import shutil
import sys
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

import stoker
from stoker.cli._job import tell_of
from stoker.cli._options import open_url
from stoker.cli._storage import diagnose, probe, show_diagnosis
from stoker.images.native import native
from stoker.node.memory_limits import Memory, read_memory
from stoker.node.runtime_dir import runtime_dir
from stoker.types import format_bytes, parse_bytes

# As pyproject.toml: there are wheels for this processor only.
_RESIZERS = ("cykooz_resizer",) if platform.machine() == "x86_64" else ()
_EXTRAS = {
    "torch": ("torch", "PIL", "simplejpeg"),
    "images": ("PIL", "simplejpeg", *_RESIZERS),
    "cloud": ("obstore", "fsspec"),
    "cluster": ("redis",),
    "importance": ("faiss", "scipy", "usearch"),
    "metrics": ("prometheus_client",),
    "plot": ("matplotlib",),
    "tui": ("click", "rich"),
}


@click.command()
@click.argument("url", required=False)
@click.option(
    "--image-folder", is_flag=True, help="URL has class folders, as ImageFolder reads them."
)
@click.option(
    "--option", "options", multiple=True, metavar="NAME=VALUE", help="For the object store."
)
@click.option(
    "--compute-rate",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SAMPLES/S",
    help="How fast one machine trains from memory.",
)
@click.option(
    "--job", metavar="NAME", help="Say what limits a running job, and what it would gain."
)
@click.option(
    "--probe",
    "has_probe",
    is_flag=True,
    help="With --job: measure the gain. The job holds some batches back, and serves them then.",
)
@click.option(
    "--socket", type=click.Path(path_type=Path), help="Where another user's service tells of it."
)
@click.option(
    "--seconds",
    type=click.FloatRange(0.5, 600),
    default=15.0,
    show_default=True,
    help="For which the storage is measured, or the job watched.",
)
@click.option(
    "--most", default="1GiB", show_default=True, help="Maximum bytes to read while probing."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(
    url: str | None,
    image_folder: bool,
    options: tuple[str, ...],
    compute_rate: float | None,
    job: str | None,
    has_probe: bool,
    socket: Path | None,
    seconds: float,
    most: str,
    as_json: bool,
) -> None:
    """Say what Stoker finds on this machine and what it would use.

    With URL, a folder or an address like s3://bucket/train, it also measures that storage and says
    what will limit training, and which cache removes that limit. With --job, it watches a running
    job instead, as `stoker top` names it, and says where its time goes and which setting to change.
    What it would gain if data were free is estimated, or with --probe measured: the job collects up
    to 16 batches, in 10 seconds and 256 MiB at most, and then serves them without a wait. Each is
    served once and in its turn.

    Exits with status 1 if the native core is missing: nothing is cached without it.
    """
    if job is not None:
        if url is not None:
            raise click.UsageError("give an address or --job, not both")
        if has_probe and socket is not None:
            raise click.UsageError("--probe changes a job: only its own user may, without --socket")
        tell_of(job, socket, seconds, has_probe=has_probe, as_json=as_json)
        return
    if socket is not None or has_probe:
        raise click.UsageError("--socket and --probe go with --job")
    facts = examine()
    if url is not None:
        with closing(open_url(url, image_folder, options)) as source:
            most_bytes = parse_bytes(most, name="--most")
            found = probe(source, seconds=seconds, most_bytes=most_bytes)
            facts["storage"] = diagnose(url, source, found, compute_rate)
    if as_json:
        click.echo(json.dumps(facts, indent=1))
    else:
        console = Console()
        show(facts, console)
        if url is not None:
            show_diagnosis(facts["storage"], console)
    sys.exit(0 if facts["core"]["found"] else 1)


def examine() -> dict[str, Any]:
    """Return everything that the command reports, as primitives; sizes in bytes."""
    memory = read_memory()
    return {
        "stoker": stoker.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "core": _core(),
        "build": examine_build(),
        "memory": asdict(memory) | {"available": memory.available},
        "shm": _shm(),
        "cpus": {"usable": len(os.sched_getaffinity(0)), "online": os.cpu_count()},
        "extras": {name: _missing(modules) for name, modules in _EXTRAS.items()},
        "would_use": _would_use(memory),
    }


def _core() -> dict[str, Any]:
    try:
        core = importlib.import_module("stoker._core")
    except ImportError as error:
        return {"found": False, "error": str(error)}
    return {"found": True, "path": core.__file__}


def examine_build() -> dict[str, str]:
    """Return how the compiled parts were built: names and values, "" for what is not known.

    ``version``, ``commit``, ``compiler`` and ``abi`` of the core, ``libjpeg_turbo``, and
    ``preload``, where the preload library of ``stoker run`` lies; empty without the core.
    """
    try:
        core = importlib.import_module("stoker._core")
    except ImportError:
        return {}
    library, preload = native(), Path(core.__file__ or "").with_name("libstoker_preload.so")
    return {
        **core.BUILD,
        "libjpeg_turbo": library.JPEG_VERSION if library else "",
        "preload": str(preload) if preload.exists() else "",
    }


def describe_build(build: dict[str, str]) -> str:
    """Return what :func:`examine_build` found in one line."""
    if not build:
        return "without its native core"
    return ", ".join(
        (
            f"commit {build['commit'] or 'unknown'}",
            build["compiler"],
            build["abi"],
            f"libjpeg-turbo {build['libjpeg_turbo']}" * bool(build["libjpeg_turbo"])
            or "no libjpeg-turbo",
            "preload library" if build["preload"] else "no preload library",
        )
    )


def _shm() -> dict[str, int] | None:
    """Return the size of /dev/shm: torch's workers need it, Stoker's cache does not."""
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError:
        return None
    return {"total": usage.total, "free": usage.free}


def _missing(modules: tuple[str, ...]) -> list[str]:
    return [name for name in modules if importlib.util.find_spec(name) is None]


def _would_use(memory: Memory) -> dict[str, Any]:
    """Return the choices that follow from the facts; half the memory is left to training."""
    pillow, simplejpeg = (not _missing((name,)) for name in ("PIL", "simplejpeg"))
    decoder = "simplejpeg, then Pillow" if simplejpeg else "Pillow"
    library = native()
    if library is None:
        parts = "whole images are decoded: Stoker was built without libjpeg-turbo 2.1 or newer"
    else:
        parts = f"only what is kept is decoded, by libjpeg-turbo {library.JPEG_VERSION}"
    return {
        "largest_cache": memory.available,
        "sensible_cache": memory.available // 2,
        "decoder": decoder if pillow else "none: pip install 'stoker[images]'",
        "image_parts": parts,
        "start_method": multiprocessing.get_start_method(),
        "runtime_dir": str(runtime_dir()),
    }


def show(facts: dict[str, Any], console: Console) -> None:
    """Print the facts as one table, one line each."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in _lines(facts):
        table.add_row(name, value)
    console.print(table)


def _lines(facts: dict[str, Any]) -> list[tuple[str, str]]:
    core, memory, use = facts["core"], facts["memory"], facts["would_use"]
    found = "[green]found[/]" if core["found"] else f"[red]missing[/]: {core['error']}"
    if core["found"] and facts["build"]["version"] != facts["stoker"]:
        found = f"[red]of version {facts['build']['version']}[/]: install stoker again"
    lines = [
        ("stoker", f"{facts['stoker']}, Python {facts['python']}, {facts['system']}"),
        ("native core", found),
        ("build", describe_build(facts["build"])),
        ("processors", f"{facts['cpus']['usable']} usable of {facts['cpus']['online']}"),
        ("memory", f"{format_bytes(memory['free'])} free of {format_bytes(memory['total'])}"),
    ]
    for group in memory["cgroups"]:
        used = f"{format_bytes(group['used'])} used of {format_bytes(group['limit'])}"
        lines.append(("cgroup limit", f"{used} (version {group['version']}, {group['path']})"))
    if not memory["cgroups"]:
        lines.append(("cgroup limit", "none"))
    lines.append(("/dev/shm", _shm_line(facts["shm"])))
    for name, missing in facts["extras"].items():
        state = f"needs {', '.join(missing)}: pip install 'stoker[{name}]'" if missing else "ready"
        lines.append((f"extra {name}", state.replace("[", r"\[")))
    lines += [
        ("largest cache", f"{format_bytes(use['largest_cache'])} of payload and overhead together"),
        ("sensible cache", f"up to {format_bytes(use['sensible_cache'])}; training needs the rest"),
        ("image decoder", use["decoder"].replace("[", r"\[")),
        ("parts of JPEGs", use["image_parts"]),
        ("worker start", use["start_method"]),
        ("runtime files", use["runtime_dir"]),
    ]
    return lines


def _shm_line(shm: dict[str, int] | None) -> str:
    if shm is None:
        return "missing; the cache does not need it, torch's workers do"
    size = f"{format_bytes(shm['free'])} free of {format_bytes(shm['total'])}"
    return size if shm["total"] > 1 << 30 else f"{size}; small for torch's workers, not for caches"
