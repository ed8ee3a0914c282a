"""Per-sample losses and gradient norms from logits: classification, token, dense prediction."""

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
    _check_shapes(logits, labels)
    if shift:
        if labels.ndim < 2:
            raise ConfigError(f"shift=True needs labels [batch, time], not {list(labels.shape)}")
        logits, labels = logits[:, :-1], labels[:, 1:]
    flat = functional.cross_entropy(
        _single(logits).reshape(-1, logits.shape[-1]),
        labels.reshape(-1),
        ignore_index=ignore_index,
        reduction="none",
    )
    rows = _rows(labels)
    counted = (labels != ignore_index).reshape(rows).sum(dim=1)
    # 0 / 0 is NaN on purpose: a sample without a labelled position has no loss.
    return flat.reshape(rows).sum(dim=1) / counted


@torch.no_grad()
def gradient_norms(
    logits: torch.Tensor, labels: torch.Tensor, ignore_index: int = -100
) -> torch.Tensor:
    """Return the norm of the gradient of each sample's loss by its logits, ``float[batch]``.

    Shapes, errors and samples without a labelled position as for :func:`per_sample_loss`. With
    p = softmax(logits): ||p - onehot(label)|| for classification (Katharopoulos and Fleuret,
    ICML 2018, Eq. 16-20, the factor of the last layer), and of the mean over positions otherwise.
    Computed where the logits are.
    """
    _check_shapes(logits, labels)
    shares = _single(logits).softmax(dim=-1)
    counts = labels != ignore_index
    own = shares.gather(-1, labels.where(counts, 0)[..., None])[..., 0]
    # ||p - y||^2 without the one-hot vectors; rounding may take it below 0.
    squares = ((shares * shares).sum(dim=-1) - 2 * own + 1).clamp(min=0) * counts
    rows = _rows(labels)
    return squares.reshape(rows).sum(dim=1).sqrt() / counts.reshape(rows).sum(dim=1)


def _check_shapes(logits: torch.Tensor, labels: torch.Tensor) -> None:
    if logits.ndim != labels.ndim + 1 or logits.shape[:-1] != labels.shape or labels.ndim == 0:
        raise ConfigError(
            f"logits {list(logits.shape)} do not fit labels {list(labels.shape)}: give logits "
            "[batch, ..., classes] and labels [batch, ...]"
        )


def _single(logits: torch.Tensor) -> torch.Tensor:
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


def _rows(labels: torch.Tensor) -> tuple[int, int]:
    return labels.shape[0], math.prod(labels.shape[1:])
