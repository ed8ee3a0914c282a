"""The page of the trial: what is between its two markers is written here, and only here."""

from __future__ import annotations

import json
from pathlib import Path

from trial.plots import draw
from trial.summary import Summary
from trial.tables import tables

BEGIN = "<!-- made by benchmarks/fair_trial.py from trial.json: do not edit -->"
END = "<!-- end -->"
PLOTS = ("trial-hits", "trial-time")


def made_part(summary: Summary) -> str:
    """Return what stands between the markers."""
    about = summary["about"]
    seeds = sorted({run["seed"] for run in summary["judged"]})
    facts = (
        f"{about['samples']:,} images of CIFAR-10 as JPEG files, {about['epochs']} epochs of "
        f"batches of {about['batch_size']}, {about['model']} network, judged on "
        f"{about['test_samples']:,} held-out images with {len(seeds)} paired seeds. Storage "
        f"serves {about['reads']:,g} reads a second, training takes {about['compute']:,g} samples "
        "a second when it does not wait."
    )
    pictures = "\n\n".join(f"![{name.replace('-', ' ')}](../plots/{name}.svg)" for name in PLOTS)
    reports = "\n".join(report.to_text() for report in tables(summary))
    return f"{BEGIN}\n\n{facts}\n\n{pictures}\n\n{reports}\n{END}"


def publish(summary: Summary, folder: Path) -> None:
    """Write ``results/trial.json``, the made part of ``results/trial.md``, and the plots."""
    (folder / "results").mkdir(parents=True, exist_ok=True)
    (folder / "plots").mkdir(exist_ok=True)
    lines = [
        f' "{key}": [\n  ' + ",\n  ".join(json.dumps(run) for run in summary[key]) + "\n ]"
        for key in ("judged", "tuned", "validated")
    ]
    about = f' "about": {json.dumps(summary["about"])}'
    text = "{\n" + ",\n".join([about, *lines]) + "\n}\n"
    (folder / "results" / "trial.json").write_text(text)
    page = folder / "results" / "trial.md"
    before = page.read_text() if page.exists() else f"# A fair trial\n\n{BEGIN}\n{END}\n"
    head, _, rest = before.partition(BEGIN)
    _, _, tail = rest.partition(END)
    page.write_text(head + made_part(summary) + tail)
    draw(summary, folder / "plots")
