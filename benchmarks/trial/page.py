"""The page of the trial: its facts, plots and tables, from the summary of all runs."""

from __future__ import annotations

import json
from pathlib import Path

import pages

from trial.plots import draw
from trial.summary import Summary
from trial.tables import tables

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
    return f"{facts}\n\n{pictures}\n\n{reports}".rstrip()


def published(folder: Path) -> Summary:
    """Return what :func:`publish` wrote, or what is known where it has not."""
    file = folder / "results" / "trial.json"
    return json.loads(file.read_text()) if file.exists() else {}


def publish(summary: Summary, folder: Path) -> None:
    """Write ``results/trial.json``, the made part of ``results/trial.md``, and the plots.

    What was simulated before stays where ``summary`` has none.
    """
    summary = {"simulated": published(folder).get("simulated", {})} | summary
    results, plots = folder / "results", folder / "plots"
    pages.dump(summary, results / "trial.json")
    pages.put(results, "fair_trial", "trial", made_part(summary))
    plots.mkdir(exist_ok=True)
    draw(summary, plots)
