"""Arrays of a saved state as tensors, so that ``torch.load`` reads it with its safe default."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray


def tensor_of(array: NDArray[Any]) -> torch.Tensor:
    """Return a tensor over the memory of ``array``."""
    return torch.from_numpy(array)


def array_of(tensor: torch.Tensor) -> NDArray[Any]:
    """Return a tensor's values, from whichever device; AttributeError for what is no tensor."""
    array: NDArray[Any] = tensor.cpu().numpy()
    return array
