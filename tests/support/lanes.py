"""A device that is the host, for machines without an accelerator."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stoker.pytorch import device


class Lane:
    """A lane whose copies are clones with ``more`` added; ``log`` is told what it is asked for."""

    def __init__(self, log: list[Any], more: int = 100) -> None:
        self.log, self._more = log, more
        self._copies = 0

    def copied(self, tensor: torch.Tensor) -> torch.Tensor:
        self._copies += 1
        return tensor + self._more

    def mark(self) -> Any:
        self.log.append(f"copied {self._copies}")
        return self._copies

    def hand_over(self, mark: Any, tensors: list[torch.Tensor]) -> None:
        self.log.append(f"waited for {mark}: {len(tensors)}")


def use_lane(monkeypatch: pytest.MonkeyPatch, more: int = 100) -> list[Any]:
    """Have Loaders with ``pin_memory="cpu"`` copy batches in a Lane; return its log."""
    log: list[Any] = []
    monkeypatch.setattr(device, "is_accelerator", lambda target: target is not None)
    monkeypatch.setattr(device, "AcceleratorLane", lambda target: Lane(log, more))
    return log
