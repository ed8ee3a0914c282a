"""Pickles for memory of this job's own processes, and whether two samples are the same."""

from __future__ import annotations

import functools
import io
import pickle
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch


def dumps(sample: Any, apart: Callable[[pickle.PickleBuffer], Any] | None = None) -> bytes:
    """Return ``sample`` as bytes: pickle protocol 5, tensors as plain arrays.

    ``apart`` is given the memory of each array, which is not among the bytes then. Only for
    anonymous memory and pipes between this job's own processes; what others could write is encoded
    by :mod:`stoker.epoch.codec`. Raises what pickle raises for samples that cannot be pickled.
    """
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=5, buffer_callback=apart).dump(sample)
    return buffer.getvalue()


def loads(data: bytes | memoryview) -> Any:
    """Return the sample that :func:`dumps` made ``data`` of; it shares no memory with ``data``."""
    return pickle.loads(data)


def is_tensor(value: Any) -> bool:
    """Whether it is a plain torch tensor; torch is not loaded for the question."""
    torch = sys.modules.get("torch")
    return torch is not None and type(value) is torch.Tensor


def same(left: Any, right: Any) -> bool:
    """Whether two samples are equal, down to shapes and dtypes; NaN equals NaN."""
    if type(left) is not type(right):
        return False
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(left, torch.Tensor):
        if left.dtype != right.dtype or left.shape != right.shape:
            return False
        return bool(torch.allclose(left, right, rtol=0, atol=0, equal_nan=True))
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and _same_array(left, right)
    if isinstance(left, Mapping):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    try:
        return bool(left == right) or bool(left != left and right != right)
    except Exception:  # what cannot be compared is compared by its bytes
        return dumps(left) == dumps(right)


def _same_array(left: NDArray[Any], right: NDArray[Any]) -> bool:
    has_nan = left.dtype.kind in "fcmM"
    return bool(np.array_equal(left, right, equal_nan=has_nan))


class _Pickler(pickle.Pickler):
    """Stores a tensor as its values; by itself torch stores all that a view's memory spans."""

    def reducer_override(self, value: Any) -> Any:
        if not is_tensor(value) or value.requires_grad or value.device.type != "cpu":
            return NotImplemented
        try:
            return self._reduced(value)
        except (TypeError, RuntimeError):  # sparse, quantised, conjugate: no NumPy twin
            return value.clone().__reduce_ex__(5)

    def _reduced(self, value: torch.Tensor) -> Any:
        if value.dtype in (bits := _bits()):
            return _of_bits, (value.view(bits[value.dtype]), value.dtype)
        if not value.is_contiguous():
            # Channels that lie last stay last, as they do where torch sends a tensor.
            order = sorted(range(value.ndim), key=value.stride, reverse=True)
            if value.permute(order).is_contiguous():
                return _permuted, (value.permute(order), np.argsort(order).tolist())
        return _tensor, (np.ascontiguousarray(value.numpy()).reshape(value.shape),)


@functools.cache
def _bits() -> dict[torch.dtype, torch.dtype]:
    """Return the types that NumPy does not have, and those whose bits they are sent as."""
    import torch

    return {torch.bfloat16: torch.int16, torch.complex32: torch.int32} | {
        dtype: torch.uint8
        for dtype in vars(torch).values()
        if isinstance(dtype, torch.dtype) and dtype.itemsize == 1 and dtype.is_floating_point
    }


def _tensor(values: NDArray[Any]) -> torch.Tensor:
    import torch

    owner: Any = values
    while isinstance(owner, np.ndarray):
        owner = owner.base
    tensor = torch.from_numpy(values)
    if not is_tensor(owner) or owner.nbytes != values.nbytes:
        return tensor
    # Of the tensor that owns the memory, whose allocator follows copies to a device that read it.
    own: torch.Tensor = owner.view(tensor.dtype).view(values.shape)
    return own


def _of_bits(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return bits.view(dtype)


def _permuted(dense: torch.Tensor, order: list[int]) -> torch.Tensor:
    return dense.permute(order)
