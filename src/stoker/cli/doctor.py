"""``stoker doctor``: what is installed, what a storage delivers, what limits a running job."""

from __future__ import annotations

import importlib
import importlib.util
import json
import multiprocessing
import os
import platform
import shutil
import sys
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

import stoker
from stoker.cli._options import open_url
from stoker.cli._storage import diagnose, probe, show_diagnosis
from stoker.cli.caches import shared_caches
from stoker.cli.view import NO_JOB, JobView, view_of
from stoker.images.resize import native
from stoker.jobs.survey import JobInfo, Watch
from stoker.node.memory import Memory, read_memory
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
_MEANS = {
    "start-up": "waits for the first batch of an epoch",
    "storage": "waits while workers read, or wait for reads",
    "decode": "waits while workers decode and transform",
    "compute": "does not wait",
}
_PATIENCE = 60.0  # seconds for a probe
_Jobs = dict[tuple[str, int], tuple[str, Mapping[str, Any]]]


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
        _tell_of(job, socket, seconds, has_probe=has_probe, as_json=as_json)
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


def _tell_of(
    name: str, socket: Path | None, seconds: float, *, has_probe: bool, as_json: bool
) -> None:
    """Watch the jobs of that name for so many seconds, and print what limits them.

    ``socket``: where a service tells of them; None: they are this user's. ``has_probe``: what they
    would gain if data were free is measured too. Raises ClickException if no such job runs, or it
    ends meanwhile.
    """
    watch = Watch()
    before = _jobs(name, socket, watch)
    time.sleep(seconds)
    after = _jobs(name, socket, watch)
    try:
        views = [
            view_of(data, job, before[key][1] if key in before else None)
            for key, (data, job) in after.items()
        ]
        measured = [
            _measured(watch, job, before[key][1]) if has_probe and key in before else None
            for key, (_, job) in after.items()
        ]
    except NO_JOB as error:
        raise click.ClickException(f"what answers at {socket} is no service: {error!r}") from error
    if as_json:
        told = [
            asdict(view) | {"headspace_measured": headspace}
            for view, headspace in zip(views, measured, strict=True)
        ]
        click.echo(json.dumps(told, indent=1))
        return
    console = Console(markup=False, emoji=False)
    for view, headspace in zip(views, measured, strict=True):
        _show_job(view, seconds, console, _free(view, headspace, has_probe=has_probe))


def _jobs(name: str, socket: Path | None, watch: Watch) -> _Jobs:
    """Return the jobs of that name, with their data, by cache and process."""
    try:
        every = [(cache, job) for cache in shared_caches(socket, watch) for job in cache["jobs"]]
        found: _Jobs = {
            (cache["key"], job["pid"]): (cache["description"] or cache["key"], job)
            for cache, job in every
            if job["name"] == name
        }
        others = ", ".join(sorted({repr(job["name"]) for _, job in every}))
    except NO_JOB as error:
        raise click.ClickException(f"what answers at {socket} is no service: {error!r}") from error
    if not found:
        running = f"these share a cache: {others}" if others else "no running job shares a cache"
        raise click.ClickException(f"no job is named {name!r}; {running}")
    return found


def _measured(watch: Watch, job: Mapping[str, Any], earlier: Mapping[str, Any]) -> float | None:
    """Return how many times as fast a job runs if data is free, by a probe; None: not known."""
    batches: int = sum(job["waits"]) - sum(earlier["waits"])
    seconds: float = job["counts"]["epoch_seconds"] - earlier["counts"]["epoch_seconds"]
    if not batches or seconds <= 0:
        return None
    found = watch.probe(JobInfo(**job), _PATIENCE)
    if found is None or not found.seconds:
        return None
    return max(1.0, seconds / batches / found.seconds)


def _free(view: JobView, measured: float | None, *, has_probe: bool) -> str:
    """Return what is known of the job's headspace, in words."""
    if measured is not None:
        return f"if data were free: {measured:.2f} times as fast (measured by a probe)"
    told = f"if data were free: {view.headspace:.2f} times as fast (an estimate, from the time that"
    why = "; the probe found nothing: too few batches came in its time" if has_probe else ""
    return f"{told} training waits{why})"


def _show_job(view: JobView, seconds: float, console: Console, free: str) -> None:
    console.print(
        Text(f"{view.name} (process {view.pid})", style="bold"),
        Text(f"over {seconds:g} s: {view.rate:,.0f} samples/s, hits {view.hits:.1%}"),
    )
    if view.bound == "idle":
        console.print(Text("no batch came in this time: it is idle, or a batch takes longer"))
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("stage")
    table.add_column("time", justify="right")
    table.add_column("training")
    for stage, share in sorted(view.stages.items(), key=lambda item: -item[1]):
        mark = "  <- the limit" if stage == view.bound else ""
        table.add_row(stage, f"{share:.0%}", Text(_MEANS[stage] + mark))
    console.print(table)
    console.print(Text(free))
    if view.verdict:
        console.print(Text(view.verdict))
