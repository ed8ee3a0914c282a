"""Stoker keeps accelerators fed when training data lives on slow storage.

::

                ┌──────────────────────── scores ◄──────────────┐
                ▼                                               │
    sampler ─► plan ─► prefetch ─► store ─► loader ─► training ─► importance
                          │          ▲ │
                          ▼          │ ▼
                        source     policy (reads plan + scores, says who stays)

Change three lines of a PyTorch script: ``stoker.ImageFolder`` for the data set,
``stoker.Loader`` for the loader, and ``with`` around it. Importing this package loads NumPy and
little else; the rest is loaded when a name that needs it is first used, torch by those of
:mod:`stoker.pytorch` only. Without torch, :class:`stoker.Feed` gives batches of NumPy arrays.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if sys.platform != "linux":  # before the core, which cannot be built there
    raise ImportError(
        f"Stoker runs on Linux only, and this is {sys.platform}: its processes share a cache by "
        "memfd and open-file-description locks. Use a Linux machine, or a Linux container on this "
        "one"
    )

from stoker import errors
from stoker.plan import Plan
from stoker.scores import Scores
from stoker.types import Outcome

if TYPE_CHECKING:
    from stoker import images, recipes, source
    from stoker.epoch.settings import Cache
    from stoker.feed import Feed
    from stoker.mixing import mix
    from stoker.pytorch import ImageFolder, Loader, SampleDataset, Stats, wrap
    from stoker.sampler.mixture import Stages
    from stoker.sampler.token_batches import Buckets, Packing, TokenBudget
    from stoker.store.arena import Arena

__version__ = "1.0.0rc1"

# What is loaded when it is first used: torch by the names of stoker.pytorch only.
_LATER = {
    "Arena": "stoker.store.arena",
    "Cache": "stoker.epoch.settings",
    "Feed": "stoker.feed",
    **dict.fromkeys(("Buckets", "Packing", "TokenBudget"), "stoker.sampler.token_batches"),
    "Stages": "stoker.sampler.mixture",
    "mix": "stoker.mixing",
    **dict.fromkeys(("ImageFolder", "Loader", "SampleDataset", "Stats", "wrap"), "stoker.pytorch"),
}

_MODULES = ("images", "recipes", "source")

__all__ = [
    "Arena",
    "Buckets",
    "Cache",
    "Feed",
    "ImageFolder",
    "Loader",
    "Outcome",
    "Packing",
    "Plan",
    "SampleDataset",
    "Scores",
    "Stages",
    "Stats",
    "TokenBudget",
    "errors",
    "images",
    "mix",
    "recipes",
    "source",
    "wrap",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"stoker.{name}")
    if name in _LATER:
        return getattr(import_module(_LATER[name]), name)
    raise AttributeError(f"module 'stoker' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER, *_MODULES})
