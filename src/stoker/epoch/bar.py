"""A progress bar of the epoch at hand: samples a second, and the share of time that is waiting."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from stoker.errors import ConfigError

_EVERY = 0.1  # seconds between two looks of the bar: a batch takes no time of it otherwise


class Bar:
    """What ``progress=True`` shows on the terminal of standard error, or in a notebook.

    Nothing is shown where that is neither, nor in epochs for which ``is_wanted()`` is false. Used
    by the thread of the training loop; it starts no thread, and prints of the loop appear above it.
    Raises :class:`~stoker.errors.ConfigError` without rich.
    """

    def __init__(self, is_wanted: Callable[[], bool] = lambda: True) -> None:
        self._is_wanted = is_wanted
        try:
            from rich import progress
            from rich.console import Console
        except ImportError as error:
            raise ConfigError(
                f"progress=True needs rich ({error}): pip install 'stoker[tui]'"
            ) from error
        self._console = Console(stderr=True)
        self._rich = progress
        self._shown: Any = None
        self._task: Any = None

    def begin(self, epoch: int, batches: int | None) -> None:
        """Show a new epoch, from 0, of so many batches; None if that is not known."""
        self.end()
        is_seen = self._console.is_terminal or self._console.is_jupyter
        if not is_seen or not self._is_wanted():
            return
        rich = self._rich
        self._shown = rich.Progress(
            rich.TextColumn("{task.description}"),
            rich.BarColumn(),
            rich.MofNCompleteColumn(),
            rich.TextColumn("{task.fields[told]}"),
            rich.TimeRemainingColumn(),
            console=self._console,
            auto_refresh=False,
        )
        self._task = self._shown.add_task(f"epoch {epoch + 1}", total=batches, told="")
        self._samples = self._batches = 0
        self._waited = 0.0
        self._began = self._drawn = time.perf_counter()
        self._shown.start()

    def add(self, samples: int, waited: float) -> None:
        """Count a batch for which the loop ``waited`` so many seconds."""
        if self._shown is None:
            return
        self._samples += samples
        self._batches += 1
        self._waited += waited
        now = time.perf_counter()
        if now - self._drawn >= _EVERY:
            self._draw(now)

    def end(self) -> None:
        """Leave the bar as it is at the end of the epoch; may be called again."""
        if self._shown is not None:
            self._draw(time.perf_counter())
            self._shown.stop()
            self._shown = None

    def _draw(self, now: float) -> None:
        self._drawn = now
        seconds = max(1e-9, now - self._began)
        told = f"{self._samples / seconds:,.0f} samples/s, waits {self._waited / seconds:.0%}"
        self._shown.update(self._task, completed=self._batches, told=told, refresh=True)
