"""Figures of the papers that the trial covers."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Figure(NamedTuple):
    """One figure of a paper."""

    told: str
    theirs: str
    kind: Literal["accuracy", "hits", "served", "hits to", "visits", "seconds"]
    of: str
    verdict: str
    """``same``, or ``differs because`` of what."""
    to: str | None = None
    """What it is compared with; None: the default."""


_SCALE = "differs because their trainings are ten times as long, and of 50,000 images or more"
_READS = "differs because here reads are all that limits; there a GPU and decoding do as well"
PAPERS: dict[str, tuple[Figure, ...]] = {
    "SHADE (FAST 2023)": (
        Figure(
            "hits, cache 20 %, as its public code repeats",
            "72.5 %",
            "hits",
            "shade x3",
            "differs because first epochs count here, and its code serves cached samples first",
        ),
        Figure(
            "the same, cached samples first",
            "72.5 %",
            "hits",
            "shade x3, hits first",
            "differs because first epochs count here, where nothing is cached",
        ),
        Figure(
            "final accuracy to uniform epochs",
            "equal or better",
            "accuracy",
            "shade x3",
            _SCALE,
        ),
        Figure("the same, by its paper", "equal or better", "accuracy", "shade", _SCALE),
    ),
    "iCache (HPCA 2023)": (
        Figure(
            "hits with substitution, cache 20 %",
            "37 %",
            "served",
            "icache",
            "differs by the share of full epochs: warm-up and every third one",
        ),
        Figure("hits of LRU, cache 20 %", "2 %", "hits", "default", "same"),
        Figure("time to LRU's", "1.7 to 2.4 times", "seconds", "icache", _READS),
        Figure("final accuracy to uniform epochs", "-1 points", "accuracy", "icache", _SCALE),
    ),
    "ImPACT (TC 2025)": (
        Figure(
            "hits with substitution, cache 20 %",
            "43 %",
            "served",
            "impact",
            "differs because a warm-up of full epochs is a large part of a short training",
        ),
        Figure("time to CoorDL's (MinIO)", "up to 3.5 times", "seconds", "impact", _READS, "minio"),
    ),
    "SpiderCache (ICPP 2025)": (
        Figure(
            "hits with substitution to LRU's",
            "4.15 times on average, 8.5 at most",
            "hits to",
            "spidercache",
            "differs because LRU hits next to nothing at 20 %; they average over larger caches",
        ),
        Figure("time to LRU's", "2.33 times", "seconds", "spidercache", _READS),
        Figure(
            "final accuracy to uniform epochs, CIFAR-10",
            "+3.1 points",
            "accuracy",
            "spidercache",
            _SCALE,
        ),
    ),
    "InfoBatch (ICLR 2024)": (
        Figure(
            "visits", "0.6 to 0.75 of all", "visits", "infobatch", "same, as pruning begins at once"
        ),
        Figure(
            "final accuracy to uniform epochs",
            "0 points, after 200 epochs",
            "accuracy",
            "infobatch",
            "differs because of fewer steps: see the rows with as many visits, and of mean 1",
        ),
    ),
}
