"""``stoker ls``, ``clean`` and ``serve``: the caches that this user's processes share."""

from __future__ import annotations

import json
import logging
import signal
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from stoker.cli.view import printable, serving_page
from stoker.jobs.group_files import SharedFolder
from stoker.jobs.metrics import exposition
from stoker.jobs.protocol import Refused, ask
from stoker.jobs.quotas import Quota
from stoker.jobs.service import Service, ServiceSettings
from stoker.jobs.survey import Watch, count_of_other_versions, survey
from stoker.pool.pool_address import server_name
from stoker.store.disk import CacheDir
from stoker.store.registry import clean as clean_registry
from stoker.tiering import membership, tier_dir
from stoker.types import format_bytes, parse_bytes

_ENDING = signal.SIGINT, signal.SIGTERM  # what ends `stoker serve`


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of the table.")
@click.option("--metrics", is_flag=True, help="Print the text that Prometheus reads.")
@click.option(
    "--socket", type=click.Path(path_type=Path), help="Ask another user's service, at its socket."
)
def ls(as_json: bool, metrics: bool, socket: Path | None) -> None:
    """List the caches that processes of this user share now, and the jobs that use them.

    A cache exists as long as a process holds it: a job, or `stoker serve`. Private caches of a job,
    and caches of other users, are not listed.
    """
    if socket is None:
        _show(_service(), [cache.told() for cache in survey()], as_json, metrics)
        if not (as_json or metrics) and (others := count_of_other_versions()):
            click.echo(f"{others} more are of another version of Stoker, which lists them")
        return
    service = _printable(_service(socket))
    try:
        _show(service, service["caches"], as_json, metrics)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise click.ClickException(f"what answers at {socket} is no service: {error!r}") from error


def _show(
    service: dict[str, Any], caches: Sequence[dict[str, Any]], as_json: bool, metrics: bool
) -> None:
    if metrics:
        click.echo(exposition(caches, service), nl=False)
    elif as_json:
        click.echo(json.dumps(caches, indent=1))
    else:
        if service:
            click.echo(_said(service))
        for each in service.get("quotas", []):
            click.echo(_quota(each))
        for each in service.get("limited", []):
            click.echo(_limited(each))
        for each in service.get("turned_down", []):
            click.echo(_turned_down(each))
        for each in service.get("shared", []):
            click.echo(_shared(each))
        if not caches:
            click.echo("no running process shares a cache")
            return
        console = Console(markup=False, emoji=False)
        console.print(_caches(caches, service.get("idle", [])))
        if any(cache["jobs"] for cache in caches):
            console.print(_jobs(caches))


def _shared(cache: dict[str, Any]) -> str:
    """Return a line on the cache of a folder that a group shares."""
    users = ", ".join(
        f"{user} ({format_bytes(books['read_bytes'])})" for user, books in cache["users"].items()
    )
    return (
        f"shared by the group: {cache['folder']}, {format_bytes(cache['payload_bytes'])} of "
        f"{format_bytes(cache['capacity_bytes'])}, by {cache.get('plans', 0)} plans; "
        f"read for users: {users or 'none'}"
    )


def shared_caches(socket: Path | None, watch: Watch) -> list[dict[str, Any]]:
    """Return this user's caches and jobs, or those that the service at ``socket`` tells of."""
    if socket is None:
        return [cache.told() for cache in watch.look()]
    caches: list[dict[str, Any]] = _printable(_service(socket)).get("caches", [])
    return caches


def _printable(value: Any) -> Any:
    """Return another user's answer without control characters, which could steer a terminal."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, list):
        return [_printable(item) for item in value]
    if isinstance(value, dict):
        return {_printable(key): _printable(item) for key, item in value.items()}
    return value


def _service(socket: Path | None = None) -> dict[str, Any]:
    """Return the service's answer; an empty dict if no service runs and no socket was given."""
    try:
        return ask("list", socket)
    except (OSError, Refused) as error:
        if socket is not None:
            raise click.ClickException(f"no service answers at {socket}: {error}") from error
        return {}


def _said(service: dict[str, Any]) -> str:
    parts = _taken(service)
    if bandwidth := service.get("bandwidth_limit"):
        parts.append(f"fetches {format_bytes(bandwidth)} a second at most")
    if hosted := service.get("hosted"):
        parts.append(f"hosts {hosted} process{'es' if hosted > 1 else ''} of jobs")
    return ", ".join([f"service: process {service['pid']}", *parts])


def _taken(told: dict[str, Any]) -> list[str]:
    """Return what is taken of memory and disk, in words."""
    parts = []
    for name in ("memory", "disk"):
        used, limit = told[f"{name}_bytes"], told[f"{name}_limit_bytes"]
        if used or limit is not None:
            of = "" if limit is None else f" of {format_bytes(limit)}"
            parts.append(f"{name} {format_bytes(used)}{of}")
            borrowed = told.get("borrowed_bytes" if name == "memory" else "disk_borrowed_bytes")
            if borrowed:
                parts.append(f"{format_bytes(borrowed)} of it borrowed")
    return parts


def _quota(told: dict[str, Any]) -> str:
    parts = _taken(told)
    parts += [f"{name} {told[name]}" for name in ("priority", "weight") if told[name]]
    return f"quota of {told['whose']}: {', '.join(parts)}"


def _limited(told: dict[str, Any]) -> str:
    limit, capacity = format_bytes(told["limit_bytes"]), format_bytes(told["capacity_bytes"])
    return f"{told['data']} has {limit} of {capacity} now: {told['why']}"


def _turned_down(told: dict[str, Any]) -> str:
    wanted, room = format_bytes(told["wanted_bytes"]), format_bytes(told["room_bytes"])
    if told["waits"]:
        what = f"has waited {told['seconds']:.0f} s for {wanted}"
    elif told.get("is_of_disk"):
        what = f"has no disk cache: it takes {wanted}, and there is room for {room}"
    else:
        what = f"got {room} of the {wanted} asked for"
    return f"{told['job'] or 'a job'} ({told['data']}) {what}: {told['why']}"


def _caches(caches: Sequence[dict[str, Any]], idle: Sequence[str]) -> Table:
    table = Table()
    table.add_column("data", overflow="fold")
    for name in ("samples", "used", "capacity", "hit ratio", "evictions", "process"):
        table.add_column(name, justify="right")
    for cache in caches:
        stats = cache["stats"]
        hits, misses = stats.get("hits", 0), stats.get("misses", 0)
        held = "kept by the service" if cache["key"] in idle and not cache["jobs"] else ""
        table.add_row(
            cache["description"] or cache["key"],
            f"{stats['entries']:,}" if stats else "?",
            format_bytes(stats["payload_bytes"]) if stats else "?",
            format_bytes(cache["capacity_bytes"]),
            f"{hits / (hits + misses):.1%}" if hits + misses else "",
            f"{stats['evictions']:,}" if stats else "?",
            held or (str(cache["pid"]) if cache["pid"] else "other namespace"),
        )
    return table


def _jobs(caches: Sequence[dict[str, Any]]) -> Table:
    table = Table()
    table.add_column("job", overflow="fold")
    table.add_column("data", overflow="fold")
    for name in ("samples/s", "share", "hit ratio", "from source", "benefit", "eligible"):
        table.add_column(name, justify="right")
    for cache in caches:
        for job in cache["jobs"]:
            accesses = job["accesses"]
            table.add_row(
                job["name"],
                cache["description"] or cache["key"],
                f"{job['rate']:,.0f}",
                f"{job['share']:.0%}",
                f"{job['hits'] / accesses:.1%}" if accesses else "",
                format_bytes(job["bytes_from_source"]),
                f"{job['benefit']:.2f}" + ("" if job["probed"] else " (estimated)"),
                ("yes" if job["eligible"] else "no") if job["kind"] == "score" else "",
            )
    return table


@click.command()
@click.argument("folder", required=False, type=click.Path(path_type=Path))
def clean(folder: Path | None) -> None:
    """Remove what caches of ended processes left in the runtime directory.

    Only sockets and lock files that Stoker made, each a few bytes: the memory of a cache is freed
    with the last process that holds it. Caches in use are left alone. With FOLDER, the
    samples of the disk cache there, or the copies in that tier of stoker run, are removed unless
    a process uses them. Files that are not Stoker's are left alone.
    """
    if folder is not None:
        is_tier = tier_dir.is_tier(folder)
        freed = tier_dir.clean(folder) if is_tier else CacheDir(folder).clean()
        what = "tier" if is_tier else "disk cache"
        click.echo(f"emptied the {what} in {folder}: {format_bytes(freed)} freed")
        return
    removed = clean_registry() + membership.clean()
    if removed:
        click.echo(f"removed the files of {removed} {'cache' if removed == 1 else 'caches'}")
    else:
        click.echo("nothing to remove")


@click.command()
@click.option("--memory", help="Maximum memory of all caches together, like 64GiB.")
@click.option("--disk", help="Maximum disk space of all disk caches together.")
@click.option(
    "--quota",
    "quotas",
    multiple=True,
    metavar="NAMES:memory=SIZE,most=SIZE,disk=SIZE,disk_most=SIZE,priority=N,weight=W",
    help="For jobs of these names, like 'ann-*:...', or a user, 'user=ann:...', together.",
)
@click.option("--bandwidth", help="Maximum fetched by all jobs together, a second, like 500MiB.")
@click.option(
    "--keep", type=float, help="Seconds to keep a cache without a job; by default for ever."
)
@click.option("--metrics-port", type=int, help="Serve Prometheus at this port.")
@click.option(
    "--metrics-host",
    default="127.0.0.1",
    show_default=True,
    help="Address of that port; in a pod of Kubernetes 0.0.0.0.",
)
@click.option(
    "--no-hosting", is_flag=True, help="Leave it to jobs to start the processes that read ahead."
)
@click.option(
    "--web", metavar="PORT|SOCKET", help="Serve a live page of the jobs there; 0: at any free port."
)
@click.option(
    "--socket", type=click.Path(path_type=Path), help="A second socket, for members of --group."
)
@click.option("--group", help="Group whose members may use --socket, and the socket of --web.")
@click.option(
    "--share",
    metavar="DIR[=SIZE]",
    multiple=True,
    help="A folder of images of which the group's members share a cache, all of it by default.",
)
def serve(
    memory: str | None,
    disk: str | None,
    quotas: tuple[str, ...],
    bandwidth: str | None,
    keep: float | None,
    metrics_port: int | None,
    metrics_host: str,
    no_hosting: bool,
    web: str | None,
    socket: Path | None,
    group: str | None,
    share: tuple[str, ...],
) -> None:
    """Keep caches alive between jobs, and list them.

    Jobs of this user find it by themselves, and continue when it ends. It runs until Ctrl-C or
    SIGTERM. `stoker ls` shows what it holds.

    Of several --quota, the first that matches a job's name, or user, counts. They have its memory
    by right, and with most= up to that what others leave, until they need it. Of jobs that wait for
    memory those of the highest priority are served first; without a quota that is 0.

    The page of --web at a port needs a token, which is part of the URL that is printed. A socket
    is for this user and the members of --group.
    """
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    settings = ServiceSettings(
        memory=None if memory is None else parse_bytes(memory, name="--memory"),
        disk=None if disk is None else parse_bytes(disk, name="--disk"),
        quotas=tuple(map(Quota.parse, quotas)),
        bandwidth=None if bandwidth is None else parse_bytes(bandwidth, name="--bandwidth"),
        keep=keep,
        socket=socket,
        group=group,
        shares=tuple(map(SharedFolder.parse, share)),
        metrics_port=metrics_port,
        metrics_host=metrics_host,
        hosts=not no_hosting,
    )
    with ExitStack() as stack:
        for number in _ENDING:  # for a program that calls this and continues
            stack.callback(signal.signal, number, signal.getsignal(number) or signal.SIG_DFL)
        service = stack.enter_context(Service(settings))
        for number in _ENDING:
            signal.signal(number, lambda *_: service.stop())
        bound = (
            "no bound" if settings.memory is None else f"at most {format_bytes(settings.memory)}"
        )
        click.echo(f"serving this user's caches, {bound} of memory; Ctrl-C ends it")
        if service.metrics_port is not None:
            click.echo(f"metrics: http://{server_name(metrics_host, service.metrics_port)}/metrics")
        if web is not None:
            group_id = None if settings.group is None else settings.group_id()
            page = stack.enter_context(serving_page(web, group_id))
            click.echo(f"page: {page.url}")
        service.run()
