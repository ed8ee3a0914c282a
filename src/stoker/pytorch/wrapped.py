"""Any map-style torch data set, with the cache put before its transforms."""

from __future__ import annotations

import copy
import hashlib
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch.utils.data import Dataset, IterableDataset

from stoker.epoch.codec import decode, encode
from stoker.epoch.compact import same
from stoker.errors import ConfigError, SampleCorrupt, SampleNotFound, SourceError
from stoker.pytorch.batch_server import preserved_generators, seed_generators
from stoker.pytorch.dataset import SourceDataset, Transform
from stoker.source.base import BaseSource, check_ids

_PROBES = 8  # samples read at construction
_READS = 3  # times each: a coin flip escapes with probability 4 ** -8


def wrap(
    torch_dataset: Dataset[Any], deterministic: bool = False, name: str | None = None
) -> WrappedDataset:
    """Return ``torch_dataset`` as a data set that a Loader can cache.

    Where it has a ``transform``, ``target_transform`` or joint ``transforms``, these are taken
    out (of a shallow copy) and applied after the cache, as torchvision does: to the first item of
    a sample, the second, or both; a sample that is no tuple is transformed as a whole. What is
    left is cached, so it must give the same sample each time: 8 samples are read 3 times, and
    with and without moving the transforms, and a difference raises. ``deterministic=True``
    leaves these checks out: the caller vouches.

    Of a ``datasets.Dataset`` of Hugging Face the rows of its Arrow table are cached; its format,
    its transform and the decoding of its features come after the cache. Nothing is read to check
    that.

    The cache is private to this job, also between the ranks of torch.distributed, unless
    ``name`` says which data set this is: jobs that give the same name and length share it, and
    must mean the same samples. Since it may then lie on disk or in a pool, where nothing is
    pickled, samples with a name consist of arrays, tensors, images, numbers, text and bytes, in
    tuples, lists and dicts (see :func:`stoker.epoch.codec.encode`).

    Raises :class:`~stoker.errors.ConfigError` for an IterableDataset, one without length or
    samples, one that is not deterministic, one whose transforms cannot be moved, and with a name
    for samples of other types.
    """
    if isinstance(torch_dataset, IterableDataset):
        raise ConfigError(
            f"{type(torch_dataset).__name__} is an IterableDataset, which has no sample ids to "
            "cache by: use a map-style data set, or keep the samples as tar shards"
        )
    if isinstance(torch_dataset, SourceDataset):
        raise ConfigError(f"{type(torch_dataset).__name__} needs no wrap(): give it to the Loader")
    if not (hasattr(torch_dataset, "__len__") and hasattr(torch_dataset, "__getitem__")):
        raise ConfigError(
            f"{type(torch_dataset).__name__} is not map-style: it needs __len__ and __getitem__"
        )
    if len(torch_dataset) == 0:
        raise ConfigError(f"{type(torch_dataset).__name__} has 0 samples: there is nothing to load")
    from stoker.pytorch.hub_dataset import HubDataset, is_of_hub

    if is_of_hub(torch_dataset):
        return HubDataset(torch_dataset, name)
    bare, transforms = _take_out_transforms(torch_dataset)
    with preserved_generators():
        sizes = _probe(
            torch_dataset, bare, transforms, private=name is None, check=not deterministic
        )
    return WrappedDataset(WrappedSource(bare, float(np.mean(sizes)), name), *transforms)


class WrappedSource(BaseSource):
    """The Source that reads the samples of a torch data set and serialises them.

    ``sizes`` is an estimate: the mean over the samples that :func:`wrap` read, since the real
    ones are known only by reading everything. As safe in threads as the data set itself.
    """

    def __init__(self, dataset: Any, mean_size: float, name: str | None) -> None:
        self.dataset = dataset
        self._is_private = name is None
        self.fingerprint = _fingerprint(name, len(dataset))
        self._mean_size = max(1, round(mean_size))

    @property
    def is_private(self) -> bool:
        """Whether the data set has no name that other jobs know it by."""
        return self._is_private

    @property
    def sizes_are_exact(self) -> bool:
        """False: they are not known before the samples are made."""
        return False

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Estimated bytes of each serialised sample, ``i64[N]``, read-only; takes no memory."""
        return np.broadcast_to(np.int64(self._mean_size), len(self))

    def __len__(self) -> int:
        return len(self.dataset)

    def name(self, sample_id: int) -> str:
        """Return what to call a sample in messages."""
        return f"{type(self.dataset).__name__}[{sample_id}]"

    def read(self, ids: ArrayLike) -> list[bytes]:
        """Return serialised samples; raises the SourceError of the first that fails."""
        return [self._read_one(index) for index in check_ids(ids, len(self)).tolist()]

    def read_each(self, ids: ArrayLike) -> tuple[list[bytes | None], dict[int, SourceError]]:
        """Return serialised samples, None for those that failed, and why by row in ``ids``."""
        samples: list[bytes | None] = []
        errors: dict[int, SourceError] = {}
        for row, index in enumerate(check_ids(ids, len(self)).tolist()):
            try:
                samples.append(self._read_one(index))
            except SourceError as error:
                samples.append(None)
                errors[row] = error
        return samples, errors

    def _read_one(self, index: int) -> bytes:
        try:
            return encode(self.dataset[index], private=self.is_private)
        except FileNotFoundError as error:
            raise SampleNotFound(f"{self.name(index)}: {error}", [index]) from error
        except SourceError:
            raise
        except ConfigError as error:  # of a type that the probes at construction did not meet
            raise SampleCorrupt(f"{self.name(index)}: {error}", [index]) from error
        except Exception as error:
            what = f"{self.name(index)} raised {type(error).__name__}: {error}"
            raise SampleCorrupt(what, [index]) from error


class WrappedDataset(SourceDataset):
    """What :func:`wrap` returns: cached samples of a torch data set, transformed after the cache.

    ``transform`` (first item of a sample), ``target_transform`` (second) and ``transforms`` (both
    together) may be set by hand, for a data set that was wrapped without its own.
    """

    source: WrappedSource
    is_bytes_of_source = False

    def __init__(
        self,
        source: WrappedSource,
        transform: Transform | None = None,
        target_transform: Transform | None = None,
        transforms: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__(source)
        self.transform = transform
        self.target_transform = target_transform
        self.transforms = transforms

    @property
    def is_random(self) -> bool:
        """Whether there is a transform, which may draw random numbers."""
        return not (self.transform is self.target_transform is self.transforms is None)

    def decode(self, data: memoryview) -> Any:
        """Return the data set's sample before its transforms."""
        return decode(data, private=self.source.is_private)

    def finish(self, index: int, decoded: Any) -> Any:
        """Return the sample with the transforms applied."""
        return _transformed(decoded, self.transform, self.target_transform, self.transforms)

    def __getattr__(self, name: str) -> Any:
        # classes, targets, data and the like stay where users of the data set look for them.
        source = self.__dict__.get("source")
        if source is None or name.startswith("__"):
            raise AttributeError(name)
        return getattr(source.dataset, name)


_Transforms = tuple[Transform | None, Transform | None, Callable[..., Any] | None]


def _take_out_transforms(dataset: Dataset[Any]) -> tuple[Dataset[Any], _Transforms]:
    """Return a data set without transforms, and what they were."""
    names = ("transform", "target_transform", "transforms")
    transform, target_transform, transforms = (
        value if callable(value := getattr(dataset, name, None)) else None for name in names
    )
    if transform is target_transform is transforms is None:
        return dataset, (None, None, None)
    bare = copy.copy(dataset)
    for name in names:
        if callable(getattr(dataset, name, None)):
            setattr(bare, name, _unchanged)
    if transform is not None or target_transform is not None:
        transforms = None  # torchvision builds it of the other two
    return bare, (transform, target_transform, transforms)


def _unchanged(*values: Any) -> Any:
    return values[0] if len(values) == 1 else values


def _transformed(
    sample: Any,
    transform: Transform | None,
    target_transform: Transform | None,
    transforms: Callable[..., Any] | None,
) -> Any:
    if transforms is not None:
        return transforms(*sample)
    if not isinstance(sample, (tuple, list)):
        return sample if transform is None else transform(sample)
    items = list(sample)
    if transform is not None:
        items[0] = transform(items[0])
    if target_transform is not None:
        items[1] = target_transform(items[1])
    if hasattr(sample, "_fields"):
        return type(sample)(*items)
    return tuple(items) if isinstance(sample, tuple) else items


def _probe(
    dataset: Dataset[Any],
    bare: Dataset[Any],
    transforms: _Transforms,
    *,
    private: bool,
    check: bool,
) -> list[int]:
    """Return the serialised sizes of a few samples; refuse those that a cache would spoil."""
    sizes = []
    for index in np.unique(np.linspace(0, len(bare) - 1, _PROBES).astype(int)).tolist():  # type: ignore[arg-type]
        try:
            first = bare[index]
            sizes.append(len(encode(first, private=private)))
            if check:
                _check_same_again(bare, index, first)
                _check_moved(dataset, bare, transforms, index)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"{type(dataset).__name__}[{index}] could not be read, taken apart from its "
                f"transforms and serialised ({type(error).__name__}: {error}): wrap it without its "
                "transforms, and set .transform of what wrap() returns"
            ) from error
    return sizes


def _check_same_again(bare: Dataset[Any], index: int, first: Any) -> None:
    if all(same(first, bare[index]) for _ in range(_READS - 1)):
        return
    raise ConfigError(
        f"{type(bare).__name__}[{index}] differs from one read to the next, and a cache would "
        "freeze it: give the data set its random part as `transform`, or pass deterministic=True "
        "if the difference does not matter"
    )


def _check_moved(
    dataset: Dataset[Any], bare: Dataset[Any], transforms: _Transforms, index: int
) -> None:
    if bare is dataset:
        return
    seed_generators(index)
    expected = dataset[index]
    seed_generators(index)
    if same(expected, _transformed(bare[index], *transforms)):
        return
    raise ConfigError(
        f"{type(dataset).__name__}[{index}] is not its cached sample with `transform` applied "
        "to the first item and `target_transform` to the second: wrap the data set without its "
        "transforms and set .transform of what wrap() returns, or pass deterministic=True if "
        "only random numbers that the transform keeps to itself make the difference"
    )


def _fingerprint(name: str | None, num_samples: int) -> str:
    if name is None:
        return f"wrap-{uuid.uuid4().hex}"
    if not name:
        raise ConfigError("name='' names no data set: leave it out, or say which one this is")
    return f"wrap-{hashlib.sha256(name.encode()).hexdigest()[:32]}-{num_samples}"
