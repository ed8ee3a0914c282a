"""Per-sample losses from logits, for classification, token and dense prediction models."""

from __future__ import annotations

import math

import torch
from torch.nn import functional

from stoker.errors import ConfigError


def per_sample_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    ignore_index: int = -100,
    shift: bool = False,
) -> torch.Tensor:
    """Return the cross entropy of each sample, ``float[batch]``, differentiable.

    ``logits`` is ``[batch, ..., classes]`` and ``labels`` ``int[batch, ...]``: classification
    without inner dimensions, token models with one, ``[batch, time]``. Positions labelled
    ``ignore_index`` do not count; a sample's loss is the mean over its other positions, and NaN
    when it has none (``Loader.observe`` then keeps its old score). ``shift=True`` compares
    position ``t`` with label ``t + 1``, for causal language models whose labels are their inputs.

    Raises :class:`~stoker.errors.ConfigError` for shapes that do not fit. Safe in any thread.
    """
    if logits.ndim != labels.ndim + 1 or logits.shape[:-1] != labels.shape or labels.ndim == 0:
        raise ConfigError(
            f"logits {list(logits.shape)} do not fit labels {list(labels.shape)}: give logits "
            "[batch, ..., classes] and labels [batch, ...]"
        )
    if shift:
        if labels.ndim < 2:
            raise ConfigError(f"shift=True needs labels [batch, time], not {list(labels.shape)}")
        logits, labels = logits[:, :-1], labels[:, 1:]
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    flat = functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]),
        labels.reshape(-1),
        ignore_index=ignore_index,
        reduction="none",
    )
    rows = (labels.shape[0], math.prod(labels.shape[1:]))
    counted = (labels != ignore_index).reshape(rows).sum(dim=1)
    # 0 / 0 is NaN on purpose: a sample without a labelled position has no loss.
    return flat.reshape(rows).sum(dim=1) / counted
