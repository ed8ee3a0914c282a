"""``stoker top``: the running jobs, what bounds each and what would help."""

from __future__ import annotations

import json
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import click
from rich.cells import cell_len, set_cell_size
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from stoker.cli.caches import shared_caches
from stoker.cli.view import COLUMNS, NO_JOB, History, JobView, facts
from stoker.jobs.survey import Watch

_OTHER_LINES = 4  # of the table's head and of the verdict
_NAME = 16  # letters of a name in the table
SORTED_BY = {column.key: column.field for column in COLUMNS}
"""The key to press, and the figure that it sorts by."""


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
        is_text = self.column in ("name", "bound")
        return sorted(views, key=lambda view: getattr(view, self.column), reverse=not is_text)


def _all(views: Sequence[JobView], at: int) -> Text:
    # It fits into 80 columns; an open job shows the rest. Rich's own table takes far longer.
    rows = [[column.title for column in COLUMNS]]
    rows += [[column.write(view) for column in COLUMNS] for view in views]
    for row in rows:
        row[0] = row[0] if cell_len(row[0]) <= _NAME else set_cell_size(row[0], _NAME - 1) + "…"
    widths = [max(map(cell_len, cells)) for cells in zip(*rows, strict=True)]
    text = Text(no_wrap=True, overflow="crop", end="")
    for number, row in enumerate(rows):
        style = "bold" if not number else "reverse" if number == at + 1 and len(views) > 1 else ""
        text.append(_line(row, widths), style)
        text.append("\n")
    return text


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Return cells side by side: the first and the last from the left, figures from the right."""
    last = len(cells) - 1
    padded = [
        cell + room if at in (0, last) else room + cell
        for at, cell in enumerate(cells)
        for room in [" " * (widths[at] - cell_len(cell))]
    ]
    return " ".join(padded)


def _one(view: JobView) -> Group:
    table = Table.grid(padding=(0, 2))
    for name, shown in facts(view).items():
        table.add_row(name, Text(shown))
    return Group(Text(view.name, style="bold"), table, Text(view.verdict))


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

    Keys: n r w h s b 5 9 o sort by name, rate, waiting, hits, reads, bytes, p50, p99, what bounds;
    j k choose; Enter opens; q quits.
    """
    if as_json and not once:
        raise click.UsageError("--json goes with --once")
    screen = Screen(sort)
    if once:
        views = screen.ordered(_Looks(socket).look())
        if as_json:
            click.echo(json.dumps([asdict(view) for view in views], indent=1))
        else:
            Console(markup=False, emoji=False).print(screen.frame(views))
        return
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise click.UsageError("this is no terminal: give --once")
    _live(screen, every, socket)


class _Looks:
    """Looks at the jobs of this user, or of the service at ``socket``, again and again."""

    def __init__(self, socket: Path | None) -> None:
        self._socket, self._watch, self._history = socket, Watch(), History()

    def look(self) -> list[JobView]:
        """Return the jobs as they are now; ClickException if what answers is no service."""
        try:
            caches = shared_caches(self._socket, self._watch)
            return self._history.add(caches, time.monotonic())
        except NO_JOB as error:
            message = f"what answers at {self._socket} is no service: {error!r}"
            raise click.ClickException(message) from error


def _live(screen: Screen, every: float, socket: Path | None) -> None:
    """Show jobs until a key ends it."""
    looks, console = _Looks(socket), Console(markup=False, emoji=False)
    views: list[JobView] = []
    due = 0.0
    with _keys() as keyboard, Live(console=console, screen=True, auto_refresh=False) as live:
        while not screen.is_over:
            if time.monotonic() >= due:
                views, due = looks.look(), time.monotonic() + every
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
