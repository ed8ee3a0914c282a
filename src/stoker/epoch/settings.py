"""What a training's epochs are like."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EpochSettings:
    """How epochs are planned, and what they keep; checked by those who make it."""

    seed: int = 0
    """Of order and augmentation."""
    epochs: int | None = None
    """Epochs of the whole training; None when not known."""
    batch_size: int | None = 1
    """Samples of a batch of one rank; None for samples one by one."""
    shuffle: bool = True
    """Whether samples come in random order, equally many to each rank."""
    drop_last: bool = False
    """Whether ranks and batches are cut to equal lengths, and not filled up."""
    is_planned: bool = True
    """Whether epochs are planned here; else a sampler of the user's gives the order."""
    needs_scores: bool = False
    """Whether cache or training use scores, even if plans do not."""
    ranks_substitute: bool = False
    """Whether ranks serve samples for each other, and so begin their epochs together."""
    without_accuracy: str = ""
    """What becomes of the cache where no accuracy is told; empty if that is no matter."""
    probe: int = 0
    """Batches of a block read past the cache to measure what it is worth; 0: none."""
    is_resumable: bool = True
    """Whether states are saved, also within an epoch: the scores that its plan was made from are
    kept for them."""
