"""How a batch gets from a worker to the training process, and what travels with it."""

from __future__ import annotations

import contextlib
import itertools
import math
import mmap
import pickle
import weakref
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import default_collate, get_worker_info
from torch.utils.data._utils.collate import collate, collate_tensor_fn, default_collate_fn_map

from stoker.epoch.batch import Failure, ServedBatch
from stoker.epoch.cached import BatchMemory
from stoker.epoch.codec import dumps
from stoker.errors import ConfigError
from stoker.node.descriptors import generation
from stoker.shared import SharedArray

Bytes = NDArray[np.uint8]
CopyOf = Callable[[Bytes], Bytes]

_MOST = 64 << 20  # bytes of a batch, and of a slot; slots take the memory that was written
_IN_MESSAGE = 16 << 10  # bytes of a batch that travel in the message itself
_OF_AN_OBJECT = 64  # bytes that each part of a batch takes beside its values, at least
_ALIGNMENT = 64
_KEPT = 64 << 20  # unused bytes that are kept for what comes
_SMALL = 64 << 10  # bytes that malloc serves well

_opened_here: WeakValueDictionary[int, HandOver] = WeakValueDictionary()
_numbers = itertools.count()


@dataclass(frozen=True, eq=False, slots=True)
class Meta(ServedBatch):
    """What a batch of ``n`` samples is made of; give it to ``Loader.observe``.

    Stays on the host: frameworks that move batches to a device leave it as it is.
    """

    @property
    def weights(self) -> torch.Tensor:
        """The weight of each sample in the loss, ``float32[n]``, on the CPU.

        A recipe that learns from a part of each batch only sets them in ``Loader.observe``.
        """
        return weights_of(self)

    def to(self, *args: Any, **kwargs: Any) -> Meta:
        """Return itself: called by frameworks that move everything in a batch to a device."""
        return self


def weights_of(batch: ServedBatch) -> torch.Tensor:
    """Return the weight of each sample in the loss, ``float32[n]``, on the CPU; notes the use."""
    batch.note_weights_used()
    if batch.plan_weights is None:
        return torch.ones(len(batch))
    return torch.from_numpy(batch.plan_weights.copy())


class Envelope(NamedTuple):
    """A batch and what it is made of, on the way from a worker to the main process.

    A tuple, so that torch pins the tensors of ``batch`` and leaves the rest alone.
    """

    batch: Any
    meta: Meta
    failures: tuple[Failure, ...]
    missed: NDArray[np.uint32] | None = None
    """``u32[m]``, samples asked for that were not cached; None where that does not matter."""


def attach(batch: Any, meta: Meta) -> Any:
    """Return ``batch`` with ``meta``: under the key "meta", or as its last element.

    A batch that is neither mapping, tuple nor list becomes the tuple ``(batch, meta)``. Raises
    :class:`~stoker.errors.ConfigError` for a batch that has a key "meta" of its own.
    """
    if isinstance(batch, Mapping):
        if "meta" in batch:
            raise ConfigError("the batch has a key 'meta' already: rename it for return_meta=True")
        if not isinstance(batch, MutableMapping):
            return {**batch, "meta": meta}
        batch["meta"] = meta
        return batch
    if isinstance(batch, list):
        return [*batch, meta]
    if isinstance(batch, tuple):
        return (*batch, meta)
    return batch, meta


class Buffers:
    """Private memory for large arrays, which is used again once nothing refers to it.

    A batch that malloc gave lies on top of what the model's step has freed; freeing it gives all of
    that back to the system, which costs milliseconds, and the next step its page faults. May be
    used by several threads.
    """

    def __init__(self) -> None:
        self._free: deque[Bytes] = deque()

    def copy_of(self, part: Bytes) -> Bytes:
        """Return a copy of ``part`` u8[n]; it is in use while anything refers to its memory."""
        size = len(part)
        if size < _SMALL:
            return part.copy()
        memory = self._take(size)
        # Of its memoryview: views of an array that owns its memory refer to that array only.
        copy = np.frombuffer(memory.data, np.uint8, size)
        # A weak reference, so that a batch that is kept for long keeps no more than its own memory.
        weakref.finalize(copy, _give_back, weakref.ref(self), memory).atexit = False
        copy[:] = part
        return copy

    def give_back(self, memory: Bytes) -> None:
        """Keep ``memory``, which is not used any more, and no more than 64 MiB with it."""
        # Without a lock: this may run wherever the last reference to a batch goes, also in here.
        self._free.append(memory)
        with contextlib.suppress(IndexError):
            while sum(map(len, self._free.copy())) > _KEPT:
                self._free.popleft()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle to one without memory, for a worker that is spawned."""
        return Buffers, ()

    def _take(self, size: int) -> Bytes:
        """Return memory of ``size`` bytes, and of no more than twice as many."""
        for _ in range(len(self._free)):
            try:
                memory = self._free.pop()
            except IndexError:  # another thread took it
                break
            if size <= len(memory) <= 2 * size:
                return memory
            self._free.appendleft(memory)
        return np.empty(size, np.uint8)


def _give_back(to: weakref.ref[Buffers], memory: Bytes) -> None:
    buffers = to()
    if buffers is not None:
        buffers.give_back(memory)


class HandOver(BatchMemory):
    """The collate function of the workers of one torch loader, which made the batches already.

    torch lays each tensor into new shared memory, and the training process asks the worker for its
    descriptor over a new socket and maps its pages one by one: a millisecond or two of the training
    loop, however small the tensor. Here each worker has slots in memory that is there from the
    start: ``each`` for batches on their way, and two or three for those that training has. What is
    plain (tensors, arrays, numbers and texts in tuples, lists and dicts) and has up to 64 MiB is
    laid into one; what is small travels in the message. All else goes as torch sends it, and so
    does a batch that finds no free slot. Slots take the memory that batches under way take anyway,
    but until the workers end.

    Images, and the bytes of packed batches, are written into a slot at once: a HandOver is the
    memory of the batches that its worker makes, one after the other. What is large in a batch stays
    in its slot until training has let go of all of it, and is copied only where training keeps more
    batches of a worker than there are slots for. A batch that outlives its HandOver keeps the
    memory of its own slot only. ``copy_of`` copies every array out, ``u8[n]``.

    Each slot is filled by one worker and freed by the training process, so that there is no lock.
    Raises :class:`~stoker.errors.CapacityError` where the system has no memory to share.
    """

    def __init__(self, workers: int, each: int, copy_of: CopyOf | None = None) -> None:
        # Training has one batch, lets go of the one before it as it gets that, and may keep one.
        self._lent = 0 if copy_of is not None else 2 if workers > 1 else 3
        self._each = each + self._lent
        slots = workers * self._each
        self._memory = SharedArray.create((slots, _MOST), np.uint8, name="batches")
        self._is_taken = SharedArray.create(slots, np.bool_, name="taken batches")
        self._copy_of = Buffers().copy_of if copy_of is None else copy_of
        self._number = next(_numbers)
        # Of the training process: which slots it uses without a copy.
        self._is_lent = np.zeros(slots, np.bool_)
        # Of a worker: the slot of the batch that it makes, and what it laid into which.
        self._begun: int | None = None
        self._laid: dict[int, weakref.ref[Bytes]] = {}
        _opened_here[self._number] = self
        mapping: Any = self._memory.array.base
        rest = partial(_forget_rest, generation(), mapping, self._is_lent)
        weakref.finalize(self, rest).atexit = False

    # --- in a worker ---

    def pixels(self, shape: tuple[int, ...]) -> Bytes:
        """Return memory for the images of the coming batch, ``u8`` of that shape."""
        whole = self.data(math.prod(shape))
        return super().pixels(shape) if whole is None else whole.reshape(shape)

    def data(self, num_bytes: int) -> Bytes | None:
        """Return memory for the coming batch, ``u8[num_bytes]``, in a slot if one is free."""
        if not _SMALL <= num_bytes <= _MOST or (slot := self._take()) is None:
            return None
        self._begun = slot
        # Of its memoryview: views of an array that owns its memory refer to that array only.
        whole = np.frombuffer(self._memory.array[slot].data[:num_bytes], np.uint8)
        self._laid[slot] = weakref.ref(whole)
        return whole

    def __call__(self, envelope: Envelope) -> Envelope | _Packed:
        """Return what arrives in the training process as ``envelope``."""
        try:
            return self._handed_over(envelope)
        finally:
            self._free_begun()

    def _handed_over(self, envelope: Envelope) -> Envelope | _Packed:
        if _size(envelope.batch, _MOST) > _MOST:
            return envelope
        buffers: list[pickle.PickleBuffer] = []
        # Here and not when it is sent: what fails then is lost in a thread of torch's queue.
        head, rest = dumps(envelope.batch, buffers.append), tuple(envelope[1:])
        raw = memoryview(head), *(buffer.raw() for buffer in buffers)
        parts = [np.frombuffer(part, np.uint8) for part in raw]
        size = sum(len(part) + _ALIGNMENT for part in parts)
        if size <= _IN_MESSAGE:
            return _Packed([bytearray(part) for part in parts], rest)
        laid = self._lay(parts) if size <= _MOST else None
        return envelope if laid is None else _Packed(laid, rest)

    def _lay(self, parts: list[Bytes]) -> _Laid | None:
        """Return where parts of a batch lie, those there already and the others; None: nowhere."""
        begun = self._begun
        there = [None if begun is None else self._place(begun, part) for part in parts]
        ends = [at + len(part) for at, part in zip(there, parts, strict=True) if at is not None]
        slot, end = (begun, _aligned(max(ends))) if ends else (self._take(), 0)
        if slot is None:
            return None
        row, spans = self._memory.array[slot], []
        for place, part in zip(there, parts, strict=True):
            at = end if place is None else place
            if place is None:
                end += _aligned(len(part))
                if end > _MOST:
                    return None
                row[at : at + len(part)] = part
            spans.append((at, len(part)))
        self._begun = None  # the training process frees it
        return _Laid(self._number, slot, spans)

    def _place(self, slot: int, part: Bytes) -> int | None:
        """Return where in a slot these bytes are; None if they are elsewhere."""
        at = _address(part) - _address(self._memory.array[slot])
        return at if 0 <= at <= _MOST - len(part) else None

    def _take(self) -> int | None:
        """Take a free slot of this worker; what was begun is free again."""
        self._free_begun()
        worker = get_worker_info()
        first = self._each * (0 if worker is None else worker.id)
        for slot in range(first, first + self._each):
            laid = self._laid.get(slot)
            # The user's code may have kept of an earlier batch what nothing was copied of.
            if not self._is_taken.array[slot] and (laid is None or laid() is None):
                self._is_taken.array[slot] = True
                return slot
        return None

    def _free_begun(self) -> None:
        if self._begun is not None:
            self._is_taken.array[self._begun] = False
            self._begun = None

    # --- in the training process ---

    def taken_out(self, laid: _Laid) -> Any:
        """Return the batch in a slot, which is free when nothing refers to its memory any more."""
        slot = laid.slot
        whole = np.frombuffer(self._memory.array[slot].data, np.uint8)
        self._free_with(whole, slot)
        first = self._each * (slot // self._each)
        others = np.count_nonzero(self._is_lent[first : first + self._each])
        head, *parts = (whole.data[begin : begin + size] for begin, size in laid.spans)
        # Who keeps the labels does not keep the images: what is small is copied.
        stays = [others < self._lent and len(part) >= _SMALL for part in parts]
        self._is_lent[slot] = any(stays)
        buffers = [
            part if is_lent else self._copy_of(np.frombuffer(part, np.uint8))
            for part, is_lent in zip(parts, stays, strict=True)
        ]
        return pickle.loads(head, buffers=buffers)

    def _free_with(self, whole: Bytes, slot: int) -> None:
        """Free a slot when nothing refers to its memory, ``whole``, any more."""
        own, taken, lent, hand_over = generation(), self._is_taken, self._is_lent, weakref.ref(self)
        mapping: Any = self._memory.array.base

        def free() -> None:
            if generation() == own:  # a forked child lets go of its own view only
                lent[slot] = taken.array[slot] = False
                if hand_over() is None:
                    _forget(mapping, slot)

        weakref.finalize(whole, free).atexit = False


def _forget(mapping: mmap.mmap, slot: int) -> None:
    """Give back the memory of a slot that is not used again."""
    with contextlib.suppress(OSError, ValueError):
        mapping.madvise(mmap.MADV_REMOVE, slot * _MOST, _MOST)


def _forget_rest(own: int, mapping: mmap.mmap, is_lent: NDArray[np.bool_]) -> None:
    """Give back the memory of all slots but of those that training still uses."""
    if generation() == own:
        for slot in np.flatnonzero(~is_lent).tolist():
            _forget(mapping, slot)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _address(part: Bytes) -> int:
    address: int = part.__array_interface__["data"][0]
    return address


class _Laid(NamedTuple):
    """Where a batch lies: its pickle and, apart from that, its arrays."""

    number: int
    """Of the HandOver, in the training process."""
    slot: int
    spans: list[tuple[int, int]]
    """First byte and length of each."""


class _Packed:
    """Pickles to an Envelope: the parts of its batch or where they lie, and the rest."""

    def __init__(self, parts: list[bytearray] | _Laid, rest: tuple[Any, ...]) -> None:
        self._parts = parts, rest

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpacked, self._parts


def _unpacked(parts: list[bytearray] | _Laid, rest: tuple[Any, ...]) -> Envelope:
    if not isinstance(parts, _Laid):
        head, *buffers = parts
        return Envelope(pickle.loads(head, buffers=buffers), *rest)
    hand_over = _opened_here.get(parts.number)
    # Without one the loader is gone, and a thread of torch's empties its queue.
    return Envelope(None if hand_over is None else hand_over.taken_out(parts), *rest)


def private_collate(samples: list[Any], whole: torch.Tensor | None = None) -> Any:
    """Return torch's ``default_collate(samples)``, but not in memory that a worker shares.

    Tensors that are the rows of ``whole``, in order, become that, and nothing is copied.
    """
    if default_collate_fn_map.get(torch.Tensor) is not collate_tensor_fn:  # the user's own
        return default_collate(samples)
    stack = partial(_stacked, whole=whole)
    return collate(samples, collate_fn_map={**default_collate_fn_map, torch.Tensor: stack})


def _stacked(
    batch: list[torch.Tensor], *, whole: torch.Tensor | None, collate_fn_map: Any = None
) -> torch.Tensor:
    first = batch[0]
    if whole is not None and len(batch) == len(whole) and all(map(_is_same, batch, whole)):
        return whole
    if _is_plain(first) and not first.is_nested and first.nbytes * len(batch) <= _MOST:
        return torch.stack(batch)
    stacked: torch.Tensor = collate_tensor_fn(batch, collate_fn_map=collate_fn_map)
    return stacked


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both are the same values in the same memory."""
    return (
        one.data_ptr() == other.data_ptr()
        and one.dtype == other.dtype
        and one.shape == other.shape
        and one.stride() == other.stride()
    )


def _size(part: Any, most: int) -> int:
    """Return the bytes of a part of a batch; more than ``most`` when it is large or not plain."""
    kind = type(part)
    if kind is torch.Tensor:
        return part.nbytes if _is_plain(part) else most + 1
    if kind is np.ndarray:
        # What cannot be written to stays so in a pickle, and torch's does not.
        return part.nbytes if part.dtype.kind in "biufc" and part.flags.writeable else most + 1
    if kind in (int, float, bool, type(None)):
        return 0
    if kind in (bytes, str):
        return len(part)
    if (isinstance(part, tuple) and not hasattr(part, "__dict__")) or kind is list:
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
    """Whether its values are all there is to it."""
    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not tensor.requires_grad
        and not tensor.is_quantized
    )
