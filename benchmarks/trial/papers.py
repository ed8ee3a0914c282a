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


_SCALE = "differs: their trainings are far longer, and of 50,000 images or more"
_PACKAGES = (
    "differs: half of this training is warm-up, and building packages reads the same storage"
)
PAPERS: dict[str, tuple[Figure, ...]] = {
    "SHADE (FAST 2023)": (
        Figure(
            "hits, cache 20 %, repeats spread",
            "72.5 %",
            "hits",
            "shade x3",
            "differs: its code serves cached samples first; first epochs count here; tuned b0",
        ),
        Figure(
            "the same, as its code orders them",
            "72.5 %",
            "hits",
            "shade x3, hits first",
            "differs: first epochs count here, and tuning flattened its ranks (b0) for accuracy",
        ),
        Figure(
            "accuracy to uniform epochs", "no worse", "accuracy", "shade x3, hits first", _SCALE
        ),
        Figure("the same, by its paper", "no worse", "accuracy", "shade", _SCALE),
    ),
    "iCache (HPCA 2023)": (
        Figure("hits with substitution, cache 20 %", "37 %", "served", "icache", "same"),
        Figure("hits of LRU, cache 20 %", "2 %", "hits", "default", "same"),
        Figure("speed to LRU", "1.7 to 2.4 times", "seconds", "icache", _PACKAGES),
        Figure(
            "accuracy to uniform epochs",
            "less than 1 point lower",
            "accuracy",
            "icache",
            "not told apart",
        ),
    ),
    "ImPACT (TC 2025)": (
        Figure(
            "hits with substitution, cache 20 %",
            "43 %",
            "served",
            "impact",
            "differs: its warm-up, over MinIO, is a large part of a short training",
        ),
        Figure(
            "speed to CoorDL (MinIO)", "up to 3.5 times", "seconds", "impact", _PACKAGES, "minio"
        ),
    ),
    "SpiderCache (ICPP 2025)": (
        Figure(
            "hits with substitution to LRU's",
            "4.15 times, up to 8.5",
            "hits to",
            "spidercache",
            "differs: LRU hits next to nothing at 20 %, and they average over larger caches",
        ),
        Figure(
            "speed to LRU",
            "2.33 times",
            "seconds",
            "spidercache",
            "differs: with neighbours scaled to the data few samples can stand in for others",
        ),
        Figure(
            "accuracy to uniform epochs, CIFAR-10", "+3.1 points", "accuracy", "spidercache", _SCALE
        ),
    ),
    "InfoBatch (ICLR 2024)": (
        Figure(
            "visits",
            "0.6 of all",
            "visits",
            "infobatch",
            "differs: tuning chose to prune a quarter, not a half",
        ),
        Figure(
            "accuracy to uniform epochs",
            "the same, after 200 epochs",
            "accuracy",
            "infobatch",
            "differs: fewer steps and larger ones, see [why](trial.md#infobatchs-loss)",
        ),
    ),
}
