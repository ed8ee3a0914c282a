"""What is kept of all runs: small enough to be committed beside the page that is made of it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

TOTALS = (
    "accesses",
    "hits",
    "substituted",
    "packaged",
    "fetched",
    "rescored",
    "package_reads",
    "rebuild_reads",
    "repack_reads",
    "bytes_from_source",
    "seconds",
    "stall",
)
READS = ("fetched", "rescored", "package_reads", "rebuild_reads", "repack_reads")
"""All requests to the storage."""

Run = dict[str, Any]
Summary = dict[str, Any]


def summary_of(folder: Path, about: dict[str, Any], names: Iterable[str]) -> Summary:
    """Return what is known of the runs in ``folder``, of these contestants.

    Of the seeds judged those that all contestants have run; all, if there is none such.
    """
    known = list(names)
    judged = [run for run in _read(folder / "judge") if run["contestant"] in known]
    count = Counter(run["seed"] for run in judged)
    whole = [run for run in judged if count[run["seed"]] == len(known)]
    judged = whole or judged
    tuned = [run for run in _read(folder / "tune") if run["contestant"] in known]
    return {
        "about": about,
        "judged": sorted(map(_judged, judged), key=lambda r: (r["seed"], known.index(r["name"]))),
        "tuned": sorted(map(_tuned, tuned), key=lambda r: (known.index(r["name"]), r["setting"])),
        "validated": [
            {key: _short(value) for key, value in run.items()} for run in _read(folder / "validate")
        ],
    }


def _read(folder: Path) -> list[Run]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def _judged(run: Run) -> Run:
    epochs = run["epochs"]
    return {
        "name": run["contestant"],
        "seed": run["seed"],
        "setting": run["setting"],
        "accuracy": [_short(value, 4) for value in run["by_epoch"]],
        "seconds": [_short(epoch["seconds"]) for epoch in epochs],
        "worst_class": _short(run["worst_class"], 4),
        "totals": {name: _short(sum(epoch[name] for epoch in epochs)) for name in TOTALS},
        "ess": _short(sum(epoch["ess"] for epoch in epochs) / len(epochs)),
        "coverage": _short(sum(epoch["coverage"] for epoch in epochs) / len(epochs)),
    }


def _tuned(run: Run) -> Run:
    return {
        "name": run["contestant"],
        "seed": run["seed"],
        "setting": run["setting"],
        "accuracy": _short(run["by_epoch"][-1], 4),
    }


def _short(value: Any, digits: int = 3) -> Any:
    if not isinstance(value, float):
        return value
    return int(value) if value == int(value) else round(value, digits)
