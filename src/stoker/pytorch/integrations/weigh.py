"""From the losses of a batch to the number that is trained on."""

from __future__ import annotations

from typing import Any

import torch

from stoker.errors import ConfigError
from stoker.pytorch.loader import Loader
from stoker.pytorch.meta import Meta


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
