"""``stoker top``: the running jobs, what bounds each and what would help."""

from __future__ import annotations

import json
import os
import select
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from stoker.cli.caches import shared_caches
from stoker.epoch.stats import Stats, bound_of
from stoker.jobs.metrics import COUNTS
from stoker.jobs.waits import quantile
from stoker.types import format_bytes

_WINDOW = 10.0  # seconds that figures are taken over
_LEAST = 5.0  # seconds; jobs publish once a second, and a batch may take longer
_OF_NOW = frozenset(metric.field for metric in COUNTS if metric.kind == "gauge")
_OF_NODE = frozenset(metric.field for metric in COUNTS if metric.of_node)
_ZERO = Stats()
_OTHER_LINES = 4  # of the table's head and of the verdict
Job = Mapping[str, Any]


@dataclass(frozen=True)
class JobView:
    """One job as it is shown. Shares are from 0 to 1, rates per second, times in seconds."""

    name: str
    pid: int
    data: str
    """What it reads."""
    processes: int
    rate: float
    """Samples."""
    stall: float
    """Share of the time that training waited."""
    hits: float
    """Share of the samples, those from disk and pool included."""
    from_disk: float
    from_pool: float
    substituted: float
    packaged: float
    reads: float
    """Samples read from the source."""
    read_bytes: float
    """Bytes from the source."""
    wait_p50: float
    wait_p99: float
    """For a batch."""
    bound: str
    """start-up, compute, storage or decode; idle if no batch came lately."""
    verdict: str
    """What would help."""


SORTED_BY = {"r": "rate", "w": "stall", "h": "hits", "b": "read_bytes", "n": "name"}
"""The key to press, and the column that it sorts by."""


def view_of(data: str, job: Job, earlier: Job | None = None) -> JobView:
    """Return how ``job`` did since ``earlier``; since it began where that is None.

    Raises LookupError, TypeError or ValueError for what is no job.
    """
    counts = _since(job["counts"], {} if earlier is None else earlier["counts"])
    waits = [int(count) for count in job["waits"]]
    if earlier is not None:
        waits = [now - before for now, before in zip(waits, earlier["waits"], strict=True)]
    stats = _mean_rank(counts, job["processes"])
    samples = max(1.0, counts["accesses"])
    seconds = stats.epoch_seconds
    return JobView(
        name=str(job["name"]),
        pid=int(job["pid"]),
        data=data,
        processes=int(job["processes"]),
        rate=counts["accesses"] / seconds if seconds > 0 else 0.0,
        stall=stats.stall_share,
        hits=counts["hits"] / samples,
        from_disk=counts["disk_hits"] / samples,
        from_pool=counts["pool_hits"] / samples,
        substituted=counts["substituted"] / samples,
        packaged=counts["packaged"] / samples,
        reads=(counts["read"] + counts["read_ahead"]) / seconds if seconds > 0 else 0.0,
        read_bytes=counts["bytes_from_source"] / seconds if seconds > 0 else 0.0,
        wait_p50=quantile(waits, 0.5),
        wait_p99=quantile(waits, 0.99),
        bound="idle" if earlier is not None and not counts["accesses"] else bound_of(stats),
        verdict=stats.verdict,
    )


def _since(now: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    return {
        metric.field: now[metric.field]
        - (0 if metric.field in _OF_NOW else before.get(metric.field, 0))
        for metric in COUNTS
    }


def _mean_rank(counts: Mapping[str, float], processes: int) -> Stats:
    """Return the counts of a mean rank, as a verdict is about one rank's time."""
    mean = {
        name: value if name in _OF_NODE else value / processes for name, value in counts.items()
    }
    values: dict[str, Any] = {name: type(getattr(_ZERO, name))(v) for name, v in mean.items()}
    return Stats(**values)


class History:
    """What jobs published in the last seconds, so that figures are of now."""

    def __init__(self) -> None:
        self._taken: deque[tuple[float, dict[Any, Job]]] = deque()

    def add(self, caches: Sequence[Mapping[str, Any]], now: float) -> list[JobView]:
        """Take in what was published at ``now`` seconds; return the jobs as they are.

        Raises as :func:`view_of` does.
        """
        jobs = {
            (cache["key"], job["name"], job["pid"]): (cache["description"] or cache["key"], job)
            for cache in caches
            for job in cache["jobs"]
        }
        while len(self._taken) > 1 and self._taken[1][0] <= now - _WINDOW:
            self._taken.popleft()
        is_old = bool(self._taken) and self._taken[0][0] <= now - _LEAST
        before = self._taken[0][1] if is_old else {}
        self._taken.append((now, {key: job for key, (_, job) in jobs.items()}))
        return [view_of(data, job, before.get(key)) for key, (data, job) in jobs.items()]


@dataclass
class Screen:
    """What the keys chose."""

    column: str = "rate"
    at: int = 0
    """Row of the chosen job."""
    is_open: bool = False
    """Whether that job is shown by itself."""
    is_over: bool = False

    def press(self, key: str, rows: int) -> None:
        """Do what a key asks for, where ``rows`` jobs are shown."""
        if key in SORTED_BY:
            self.column = SORTED_BY[key]
        elif key in ("j", "k"):
            self.at = max(0, min(rows - 1, self.at + (1 if key == "j" else -1)))
        elif key in ("\r", "\n"):
            self.is_open = not self.is_open
        elif key == "q":
            self.is_over = True

    def frame(self, views: Sequence[JobView], lines: int | None = None) -> RenderableType:
        """Return what is to be seen of ``views`` on so many lines; None: all jobs."""
        if not views:
            return Text("no running job shares a cache")
        ordered = self.ordered(views)
        self.at = min(self.at, len(ordered) - 1)
        if self.is_open:
            return _one(ordered[self.at])
        rows = len(ordered) if lines is None else max(1, lines - _OTHER_LINES)
        first = max(0, self.at - rows + 1)
        shown = ordered[first : first + rows]
        return Group(_all(shown, self.at - first), Text(ordered[self.at].verdict))

    def ordered(self, views: Sequence[JobView]) -> list[JobView]:
        """Return the jobs in the order chosen: names from A, figures from the largest."""
        is_name = self.column == "name"
        return sorted(views, key=lambda view: getattr(view, self.column), reverse=not is_name)


def _all(views: Sequence[JobView], at: int) -> Table:
    # It fits into 80 columns; an open job shows the rest.
    table = Table(box=None, header_style="bold", collapse_padding=True, pad_edge=False)
    table.add_column("job", min_width=10, overflow="ellipsis", no_wrap=True)
    for name in ("samples/s", "waits", "hits", "reads/s", "source/s", "p50", "p99"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("bound by", no_wrap=True)
    for row, view in enumerate(views):
        table.add_row(
            Text(view.name),
            f"{view.rate:,.0f}",
            f"{view.stall:.0%}",
            f"{view.hits:.1%}",
            f"{view.reads:,.0f}",
            format_bytes(view.read_bytes),
            _time(view.wait_p50),
            _time(view.wait_p99),
            view.bound,
            style="reverse" if row == at and len(views) > 1 else "",
        )
    return table


def _one(view: JobView) -> Group:
    table = Table.grid(padding=(0, 2))
    for name, shown in {
        "data": view.data,
        "process": f"{view.pid}, {view.processes} of this job here",
        "samples/s": f"{view.rate:,.1f}",
        "training waits": f"{view.stall:.1%} of the time",
        "hits": f"{view.hits:.1%} (disk {view.from_disk:.1%}, pool {view.from_pool:.1%})",
        "substituted": f"{view.substituted:.1%}",
        "packaged": f"{view.packaged:.1%}",
        "source": f"{view.reads:,.1f} reads/s, {format_bytes(view.read_bytes)}/s",
        "wait for a batch": f"p50 {_time(view.wait_p50)}, p99 {_time(view.wait_p99)}",
        "bound by": view.bound,
    }.items():
        table.add_row(name, Text(shown))
    return Group(Text(view.name, style="bold"), table, Text(view.verdict))


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"


@click.command()
@click.option("--once", is_flag=True, help="Print one frame, of each job since it began.")
@click.option("--json", "as_json", is_flag=True, help="With --once: print the numbers as JSON.")
@click.option(
    "--sort",
    type=click.Choice(list(SORTED_BY.values())),
    default="rate",
    show_default=True,
    help="Column to sort by.",
)
@click.option(
    "--every", type=click.FloatRange(0.1), default=2.0, show_default=True, help="Seconds to wait."
)
@click.option(
    "--socket", type=click.Path(path_type=Path), help="Ask another user's service, at its socket."
)
def top(once: bool, as_json: bool, sort: str, every: float, socket: Path | None) -> None:
    """Show the running jobs of this user, or with --socket those of a service.

    Rate, share of the time that training waits, hits, reads and bytes of the source, the wait for a
    batch, and what bounds each job. The line below says what would help the chosen job.

    Keys: r w h b n sort by rate, waiting, hits, bytes or name; j k choose; Enter opens; q quits.
    """
    if as_json and not once:
        raise click.UsageError("--json goes with --once")
    screen = Screen(sort)
    if once:
        views = screen.ordered(_look(History(), socket))
        if as_json:
            click.echo(json.dumps([asdict(view) for view in views], indent=1))
        else:
            Console(markup=False, emoji=False).print(screen.frame(views))
        return
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise click.UsageError("this is no terminal: give --once")
    _live(screen, every, socket)


def _look(history: History, socket: Path | None) -> list[JobView]:
    try:
        return history.add(shared_caches(socket), time.monotonic())
    except (LookupError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise click.ClickException(f"what answers at {socket} is no service: {error!r}") from error


def _live(screen: Screen, every: float, socket: Path | None) -> None:
    """Show jobs until a key ends it."""
    history, console = History(), Console(markup=False, emoji=False)
    views: list[JobView] = []
    due = 0.0
    with _keys() as keyboard, Live(console=console, screen=True, auto_refresh=False) as live:
        while not screen.is_over:
            if time.monotonic() >= due:
                views, due = _look(history, socket), time.monotonic() + every
            live.update(screen.frame(views, console.height), refresh=True)
            ready, _, _ = select.select([keyboard], [], [], max(0.0, due - time.monotonic()))
            if ready:
                key = os.read(keyboard, 1).decode(errors="replace")
                screen.press(key or "q", len(views))  # nothing: the terminal is gone


@contextmanager
def _keys() -> Iterator[int]:
    """Give the descriptor of a keyboard whose keys come at once, and are not shown."""
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)
    tty.setcbreak(keyboard)
    try:
        yield keyboard
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
