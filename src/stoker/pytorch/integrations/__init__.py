"""Frameworks that run the training loop themselves, and draw batches ahead of the step.

One module each, imported by name and only where its framework is installed. What they share: the
batch carries its :class:`~stoker.pytorch.Meta`, and losses are observed with it.
"""

from __future__ import annotations

from typing import Any

import torch

from stoker.errors import ConfigError
from stoker.pytorch.hand_over import Meta
from stoker.pytorch.loader import Loader

__all__ = ["observe_and_weigh"]


def observe_and_weigh(
    loader: Loader, losses: torch.Tensor, meta: Meta, **signals: Any
) -> torch.Tensor:
    """Observe ``losses`` ``[n]`` of the batch of ``meta``, and return their weighted mean.

    ``signals``: further arguments of ``Loader.observe``. Raises what that raises.
    """
    loader.observe(losses, meta=meta, **signals)
    return (losses * meta.weights.to(losses.device, losses.dtype)).mean()


def check_returns_meta(loader: Loader) -> None:
    """Raise ConfigError unless the batches of ``loader`` say what they are made of."""
    if not loader.returns_meta:
        raise ConfigError(
            "this framework draws batches ahead of the step, so each must say what it is made of: "
            "give the Loader return_meta=True"
        )
