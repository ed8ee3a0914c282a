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
the native core; torch is loaded when a name that needs it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from stoker import errors, recipes
from stoker.plan import Plan
from stoker.scores import Scores
from stoker.store.arena import Arena
from stoker.types import Outcome

if TYPE_CHECKING:
    from stoker.pytorch import ImageFolder, Loader, SampleDataset, Stats, wrap

__version__ = "0.1.0"

_NEEDS_TORCH = ("ImageFolder", "Loader", "SampleDataset", "Stats", "wrap")

__all__ = [
    "Arena",
    "ImageFolder",
    "Loader",
    "Outcome",
    "Plan",
    "SampleDataset",
    "Scores",
    "Stats",
    "errors",
    "recipes",
    "wrap",
]


def __getattr__(name: str) -> Any:
    if name in _NEEDS_TORCH:
        return getattr(import_module("stoker.pytorch"), name)
    raise AttributeError(f"module 'stoker' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_NEEDS_TORCH})
