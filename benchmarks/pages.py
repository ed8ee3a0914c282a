"""Pages of results: what stands between two markers is written here, from the JSON beside the page.

A part of a page begins with a marker that names its program and its file of JSON, and nothing
between that marker and the next ``<!-- end -->`` is to be edited. All that stands outside is
written by hand and stays as it is.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

END = "<!-- end -->"
_PART = re.compile(
    r"<!-- made by benchmarks/(\w+)\.py from ([\w-]+)\.json: do not edit -->\n(.*?)" + END, re.S
)
_PAGE_OF = {
    "accelerator": "accelerator",
    "accuracy_of_repeats": "foresight",
    "arena_hits": "hit-path",
    "arena_insert": "hit-path",
    "block": "block",
    "cache_stage": "images",
    "campaign": "trust",
    "confirmation": "trial",
    "curves": "foresight",
    "fair_trial": "trial",
    "fairness": "jobs",
    "feed": "feeding",
    "formats": "formats",
    "frontier": "foresight",
    "group": "many-processes",
    "hit_ratio": "hit-ratio",
    "ids_scale": "hit-path",
    "images": "images",
    "importance": "importance",
    "importance_time": "time-to-accuracy",
    "index_memory": "importance",
    "jobs": "jobs",
    "label_noise": "foresight",
    "line_rate": "line-rate",
    "loader_cached": "hit-path",
    "many_processes": "many-processes",
    "mechanisms": "mechanisms",
    "no_regret": "no-regret",
    "nodes": "nodes",
    "operate": "operate",
    "papers": "papers",
    "pool": "pool",
    "scoring_cost": "importance",
    "shim_cost": "tiering",
    "sim_vs_live": "simulator",
    "simulate": "simulator",
    "stands_down": "feeding",
    "tiering": "tiering",
    "tiering_small": "tiering",
    "virtual_time": "simulator",
}
_ELSEWHERE = {"feed-peers": "s3", "feed-s3": "s3", "feed-small": "s3"}


def page_of(program: str, name: str) -> str:
    """Return the page, without its suffix, that shows what a program wrote to ``name.json``."""
    return _ELSEWHERE.get(name) or _PAGE_OF[program]


def parts(page: Path) -> dict[str, str]:
    """Return what stands between the markers of a page, by the name of its JSON."""
    return {name: text.strip() for _, name, text in _PART.findall(page.read_text())}


def put(results: Path, program: str, name: str, text: str) -> None:
    """Replace a part of its page, or append it to a page that does not have it yet.

    ``results`` is the folder of the pages; the part is what ``name.json`` says.
    """
    page = results / f"{page_of(program, name)}.md"
    before = page.read_text() if page.exists() else f"# {page.stem}\n"
    begin = f"<!-- made by benchmarks/{program}.py from {name}.json: do not edit -->"
    part = f"{begin}\n\n{text.strip()}\n\n{END}"
    if begin not in before:
        page.write_text(f"{before.rstrip()}\n\n{part}\n")
        return
    head, _, rest = before.partition(begin)
    page.write_text(head + part + rest.partition(END)[2])


def dump(document: dict[str, Any], file: Path) -> None:
    """Write a document as JSON, each object of its lists on a line of its own."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(_told(document, "\n") + "\n")


def plain(number: Any) -> Any:
    """Return a number of NumPy as one of Python; the ``default`` of ``json.dumps``."""
    return number.item()


def _told(value: Any, margin: str) -> str:
    if not _has_rows(value):
        return json.dumps(value, default=plain)
    inner = f"{margin} "
    if isinstance(value, dict):
        items = [f"{json.dumps(key)}: {_told(each, inner)}" for key, each in value.items()]
        return "{" + inner + f",{inner}".join(items) + margin + "}"
    return "[" + inner + f",{inner}".join(_told(each, inner) for each in value) + margin + "]"


def _has_rows(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_rows, value.values()))
    return isinstance(value, list) and any(isinstance(each, dict) for each in value)
