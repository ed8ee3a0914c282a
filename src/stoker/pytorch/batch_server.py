"""What runs in a worker: a Request in, an Envelope out.

Augmentation is tied to the position of a sample in the plan: Python's, NumPy's and torch's global
generators are seeded before each sample, so that it depends on (seed, epoch, position) and not on
which worker ran it or how many there were. Costs 7 µs a sample, and nothing for data sets without
transforms. Generators that a transform owns itself are its own affair.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset, get_worker_info

from stoker.epoch.batch import Request, sample_seeds
from stoker.epoch.cached import Fetched, RequestServer, ServedRequest
from stoker.pytorch.dataset import SampleDataset
from stoker.pytorch.hand_over import Envelope, Meta, private_collate
from stoker.source.packed import Packed, pack

_COLLATE_STREAM = 0xC011A7E  # keeps the seed of collate_fn apart from that of the first sample


class Prepared(NamedTuple):
    """A batch before its transforms, or finished where no code of the user's is left to be run.

    Of ``served``, ``finished`` and ``error`` one is given.
    """

    request: Request
    seeds: list[int]
    served: ServedRequest | None = None
    finished: Envelope | None = None
    error: Exception | None = None


class BatchServer(Dataset[Any]):
    """The data set of the inner torch loader, whose "indices" are Requests.

    Fetches, transforms and collates a batch in one call, or takes what :meth:`prepare` made in a
    thread. Attributes that it does not have are those of the base data set, so that
    ``get_worker_info().dataset`` is of use in a ``worker_init_fn``.
    """

    def __init__(self, requests: RequestServer, collate: Callable[[Any], Any], seed: int) -> None:
        self._requests = requests
        self._collate = collate
        self._seed = seed

    def __len__(self) -> int:
        return len(self._requests.cached)

    def __getitems__(self, wanted: Request | Prepared) -> Envelope:
        """Return the batch; raises what its samples or transforms raise."""
        prepared = wanted if isinstance(wanted, Prepared) else self.prepare(wanted)
        if prepared.error is not None:
            raise prepared.error
        if prepared.finished is not None:
            return prepared.finished
        assert prepared.served is not None
        if get_worker_info() is not None:
            return self._finish(*prepared[:2], prepared.served)
        with preserved_generators():  # in the training process they belong to the model
            return self._finish(*prepared[:2], prepared.served)

    def prepare(self, request: Request) -> Prepared:
        """Return what threads may make of the batch, or what went wrong; safe in any thread."""
        seeds = sample_seeds(self._seed, request.epoch, request.positions)
        try:
            served = self._requests.serve(request, seeds)
            if self._runs_code():
                return Prepared(request, seeds, served)
            return Prepared(request, seeds, finished=self._finish(request, seeds, served))
        except Exception as error:
            return Prepared(request, seeds, error=error)

    def _runs_code(self) -> bool:
        """Whether to finish a batch may run code of the user's, which may draw random numbers."""
        dataset = self._requests.cached.dataset
        is_own = dataset.image_transform is not None and self._collate is private_collate
        return not is_own or dataset.is_shown or dataset.is_random

    def _finish(self, request: Request, seeds: list[int], served: ServedRequest) -> Envelope:
        fetched, failures, missed = served
        meta = Meta(
            token=request.token,
            epoch=request.epoch,
            ids=fetched.ids,
            outcomes=fetched.outcomes,
            positions=request.positions,
            plan_weights=request.weights,
        )
        return Envelope(self._batch(request, fetched, seeds), meta, failures, missed)

    def _batch(self, request: Request, fetched: Fetched, seeds: list[int]) -> Any:
        """Return the samples transformed and collated."""
        ids, dataset = fetched.ids, self._requests.cached.dataset
        if dataset.is_packed:
            assert isinstance(dataset, SampleDataset)
            packed = fetched.packed or Packed(*pack(fetched.decoded))  # some were replaced
            return _tensors(packed, None if dataset.targets is None else dataset.targets[ids])
        is_random = dataset.is_random
        rows: Iterable[Any] = fetched.decoded
        collate = self._collate
        if fetched.pixels is not None:
            owner = fetched.pixels.base  # a tensor where that gave the memory
            whole = owner if isinstance(owner, torch.Tensor) else torch.from_numpy(fetched.pixels)
            rows = whole
            if collate is private_collate:
                collate = partial(private_collate, whole=whole)
        samples = []
        for index, decoded, seed in zip(ids.tolist(), rows, seeds, strict=True):
            if is_random:
                seed_generators(seed)
            samples.append(dataset.finish(index, decoded))
        if self._runs_code():
            seed_generators(seeds[0] ^ _COLLATE_STREAM)
        return collate(samples[0] if request.single else samples)

    def __getattr__(self, name: str) -> Any:
        requests = self.__dict__.get("_requests")
        if requests is None or name.startswith("__"):
            raise AttributeError(name)
        return getattr(requests.cached.dataset, name)


def _tensors(packed: Packed, targets: NDArray[Any] | None) -> Any:
    """Return a batch of bytes in tensors of the same memory, with its targets if there are any."""
    data, offsets = packed
    if not data.flags.writeable:  # a source's own memory
        data = data.copy()
    batch = torch.from_numpy(data), torch.from_numpy(offsets)
    return batch if targets is None else (batch, torch.from_numpy(targets))


def as_it_is(envelope: Envelope) -> Envelope:
    """Return the argument: the collate function of the inner loader, whose batches are made."""
    return envelope


def seed_generators(seed: int) -> None:
    """Seed Python's, NumPy's and torch's CPU generators of this process with 64 bits."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)  # noqa: NPY002 (users' transforms draw from the global one)
    # torch.manual_seed would also visit every accelerator: 130 µs instead of 1.
    torch.default_generator.manual_seed(seed)


@contextmanager
def preserved_generators() -> Iterator[None]:
    """Give this process's global generators back as they were; NumPy's begins at a seed of 0."""
    python_state = random.getstate()
    numpy_state = np.random.get_state(legacy=False)  # noqa: NPY002
    numpy_random: Any = np.random  # its stubs lack what exchanges the bits
    numpy_bits = numpy_random.get_bit_generator()
    torch_state = torch.default_generator.get_state()
    spare = _spare_bits()
    numpy_random.set_bit_generator(np.random.MT19937() if spare is numpy_bits else spare)
    np.random.seed(0)  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(python_state)
        # To set the state costs 60 µs; without it only a normal number drawn in advance is lost.
        numpy_random.set_bit_generator(numpy_bits)
        if numpy_state["has_gauss"]:
            np.random.set_state(numpy_state)  # noqa: NPY002
        torch.default_generator.set_state(torch_state)


@cache
def _spare_bits() -> np.random.MT19937:
    """Return what NumPy's global generator draws from while its own are preserved."""
    return np.random.MT19937()
