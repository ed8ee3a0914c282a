"""How a batch gets from a worker to the training process."""

from __future__ import annotations

import itertools
import pickle
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch.utils.data import get_worker_info

from stoker.pytorch.buffers import Buffers
from stoker.pytorch.compact import dumps
from stoker.pytorch.meta import Envelope
from stoker.shared import SharedArray

_MOST = 32 << 20  # bytes of a batch, and of a slot; slots take the memory that was written
_IN_MESSAGE = 16 << 10  # bytes of tensors and arrays that travel in the message itself
_OF_AN_OBJECT = 64  # bytes that each part of a batch takes beside its values, at least
_ALIGNMENT = 64

_opened_here: WeakValueDictionary[int, HandOver] = WeakValueDictionary()
_numbers = itertools.count()


class HandOver:
    """The collate function of the workers of one torch loader, which made the batches already.

    torch lays each tensor into new shared memory, and the training process asks the worker for its
    descriptor over a new socket and maps its pages one by one: a millisecond or two of the training
    loop, however small the tensor. Here each worker has ``each`` slots in memory that is there from
    the start. What is plain (tensors, arrays, numbers and texts in tuples, lists and dicts) and has
    up to 32 MiB is laid into one and copied out of it, so that the batch is private memory and the
    slot free again; what is small travels in the message. All else goes as torch sends it, and so
    does a batch that finds no free slot.

    Each slot is filled by one worker and freed by the training process, so that there is no lock.
    Raises :class:`~stoker.errors.CapacityError` where the system has no memory to share.
    """

    def __init__(self, workers: int, each: int) -> None:
        slots = workers * each
        self._memory = SharedArray.create((slots, _MOST), np.uint8, name="batches")
        self._is_taken = SharedArray.create(slots, np.bool_, name="taken batches")
        self._buffers = Buffers()
        self._each = each
        self._number = next(_numbers)
        _opened_here[self._number] = self

    def __call__(self, envelope: Envelope) -> Envelope | _Packed:
        """Return what arrives in the training process as ``envelope``."""
        if _size(envelope.batch, _MOST) > _MOST:
            return envelope
        parts: list[pickle.PickleBuffer] = []
        # Here and not when it is sent: what fails then is lost in a thread of torch's queue.
        head, rest = dumps(envelope.batch, parts.append), tuple(envelope[1:])
        raw = [np.frombuffer(part.raw(), np.uint8) for part in parts]
        if sum(map(len, raw)) <= _IN_MESSAGE:
            return _Packed(head, [part.tobytes() for part in raw], rest)
        slot = self._take()
        return envelope if slot is None else _Packed(head, self._lay(slot, raw), rest)

    def copied(self, laid: _Laid) -> list[Any]:
        """Return copies of the parts that lie in a slot, and free it: in the training process."""
        # One copy for each, so that who keeps the labels does not keep the images.
        row = self._memory.array[laid.slot]
        parts = [self._buffers.copy_of(row[begin : begin + size]) for begin, size in laid.spans]
        self._is_taken.array[laid.slot] = False
        return parts

    def _take(self) -> int | None:
        """Take a free slot of this worker."""
        worker = get_worker_info()
        first = self._each * (0 if worker is None else worker.id)
        free = np.flatnonzero(~self._is_taken.array[first : first + self._each])
        if not len(free):
            return None
        self._is_taken.array[first + free[0]] = True
        return int(first + free[0])

    def _lay(self, slot: int, parts: list[Any]) -> _Laid:
        spans, begin, row = [], 0, self._memory.array[slot]
        for part in parts:
            row[begin : begin + len(part)] = part
            spans.append((begin, len(part)))
            begin += -(-len(part) // _ALIGNMENT) * _ALIGNMENT
        return _Laid(self._number, slot, spans)


class _Laid(NamedTuple):
    """Where the parts of a batch lie."""

    number: int
    """Of the HandOver, in the training process."""
    slot: int
    spans: list[tuple[int, int]]
    """First byte and length of each."""


class _Packed:
    """Pickles to an Envelope: its batch without the parts, these or where they lie, the rest."""

    def __init__(self, head: bytes, parts: list[bytes] | _Laid, rest: tuple[Any, ...]) -> None:
        self._parts = head, parts, rest

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpacked, self._parts


def _unpacked(head: bytes, parts: list[bytes] | _Laid, rest: tuple[Any, ...]) -> Envelope:
    own: list[Any]
    if isinstance(parts, _Laid):
        own = _opened_here[parts.number].copied(parts)
    else:
        own = [bytearray(part) for part in parts]
    return Envelope(pickle.loads(head, buffers=own), *rest)


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
