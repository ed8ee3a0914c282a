"""What the page of `stoker serve --web` shows: the figures of `stoker top`, as JSON."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stoker.cli.view import COLUMNS, NO_JOB, History, JobView, facts
from stoker.errors import ConfigError, StokerError
from stoker.jobs.http_server import WebServer
from stoker.jobs.survey import Watch


class Frames:
    """Makes a frame of the page, of what ``look`` finds. For one thread at a time."""

    def __init__(self, look: Callable[[], Sequence[Mapping[str, Any]]]) -> None:
        self._look = look
        self._history = History()

    def __call__(self) -> str:
        """Return the jobs as they are now, as JSON on one line; StokerError if they are none."""
        try:
            views = self._history.add(self._look(), time.monotonic())
            columns = [{"title": column.title, "field": column.field} for column in COLUMNS]
            return json.dumps(
                {"columns": columns, "jobs": [_shown(view) for view in views]}, allow_nan=False
            )
        except NO_JOB as error:
            raise StokerError(f"jobs have published what is no count: {error!r}") from error


def _shown(view: JobView) -> dict[str, Any]:
    return {
        "id": f"{view.data} {view.name} {view.pid}",
        "cells": [column.write(view) for column in COLUMNS],
        "sort": {column.field: getattr(view, column.field) for column in COLUMNS},
        "kinds": {
            "memory": view.from_memory,
            "disk": view.from_disk,
            "pool": view.from_pool,
            "substituted": view.substituted,
            "packaged": view.packaged,
        },
        "stages": view.stages,
        "facts": facts(view),
        "verdict": view.verdict,
    }


@contextmanager
def serving_page(where: str, group: int | None) -> Iterator[WebServer]:
    """Serve the page of this user's jobs at a port or socket, in a thread, within the context.

    Raises :class:`~stoker.errors.ConfigError` if it cannot be served there.
    """
    at = int(where) if where.isdecimal() else Path(where)
    if isinstance(at, int) and at > 65535:
        raise ConfigError(f"web={at} is no port: give 0 to 65535, or the path of a socket")
    watch = Watch()
    server = WebServer(at, Frames(lambda: [cache.told() for cache in watch.look()]), group=group)
    threading.Thread(target=server.run, daemon=True).start()
    try:
        yield server
    finally:
        server.close()
