"""How a batch gets from a worker to the training process."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from stoker.pytorch.compact import dumps, loads
from stoker.pytorch.meta import Envelope

_MOST = 512 << 10  # bytes of a batch that is small
_OF_AN_OBJECT = 64  # bytes that each part of a batch takes beside its values, about


class _ByValue:
    """Pickles to an Envelope whose batch holds its values, not descriptors of memory."""

    def __init__(self, envelope: Envelope) -> None:
        # Here and not when it is pickled: what fails then is lost in a thread of torch's queue.
        self._parts = (dumps(envelope.batch), *envelope[1:])

    def __reduce__(self) -> tuple[Any, ...]:
        return _opened, self._parts


def _opened(data: bytes, *rest: Any) -> Envelope:
    return Envelope(loads(data), *rest)


def by_value_if_small(envelope: Envelope) -> Envelope | _ByValue:
    """Return what arrives in the training process as ``envelope``: a collate function of workers.

    torch lays each tensor into shared memory, and the training process asks the worker for its
    descriptor over a new socket: a millisecond of waiting, however small the tensor. What is small
    and plain (tensors, arrays, numbers and texts in tuples, lists and dicts) travels in the message
    itself; everything else as torch does it.
    """
    return _ByValue(envelope) if _size(envelope.batch, _MOST) <= _MOST else envelope


def _size(part: Any, most: int) -> int:
    """Return the bytes of a part of a batch; more than ``most`` when it is large or not plain."""
    kind = type(part)
    if kind is torch.Tensor:
        return part.nbytes if _is_plain(part) else most + 1
    if kind is np.ndarray:
        return part.nbytes if part.dtype.kind in "biufc" else most + 1
    if kind in (int, float, bool, type(None)):
        return 0
    if kind in (bytes, str):
        return len(part)
    if isinstance(part, tuple) or kind is list:
        return _sum(part, most)
    return _sum([*part.keys(), *part.values()], most) if kind is dict else most + 1


def _sum(parts: Any, most: int) -> int:
    total = 0
    for part in parts:
        total += _OF_AN_OBJECT + _size(part, most)
        if total > most:
            break
    return total


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether its values are all there is to it; one in shared memory may be meant to stay so."""
    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not tensor.requires_grad
        and not tensor.is_quantized
        and not tensor.is_shared()  # type: ignore[no-untyped-call]
    )
