"""Map-style data sets: of a source, images, mixed, cached; which of their samples are visited."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeGuard

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch.utils.data import Dataset, IterableDataset, Subset

from stoker.epoch.cached import CachedSamples
from stoker.epoch.settings import Cache, Population, Size, as_cache, check_packed
from stoker.epoch.setup import setup_without_plan
from stoker.epoch.stage import Decode, Samples, checked_targets
from stoker.errors import ConfigError, SampleCorrupt
from stoker.images import Canvas, EncodedImage, decode_image, split, to_pil
from stoker.pytorch.ranks import current_ranks, from_rank_zero
from stoker.recipes import Recipe
from stoker.sampler.mixture import Mixture, Weights
from stoker.shared import SharedArray
from stoker.source.base import Source, as_source, read_whole
from stoker.source.image_folder import ImageFolderSource, ImagePrefixSource, ImageShardSource
from stoker.source.joined import JoinedSource
from stoker.source.open import open_image_folder
from stoker.source.pace import Pace

Transform = Callable[[Any], Any]
Transforms = Transform | Sequence[Transform]
"""A function of a sample, or several in a row, of which the first may be of stoker.images."""


class BatchDataset(Dataset[Any], ABC):
    """A map-style data set that serves batches, and single samples as batches of one."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @abstractmethod
    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the samples ``indices``, each from 0 to ``len(self) - 1``."""

    def __getitem__(self, index: int) -> Any:
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} is out of range: there are {len(self)} samples")
        return self.__getitems__([index % len(self)])[0]


class SourceDataset(Samples, BatchDataset):
    """A data set whose samples come from a Source: bytes, then :meth:`decode`, :meth:`finish`.

    Alone it reads through, a batch at a time (``__getitems__``); a Loader or a CachedDataset
    puts its cache before or after :meth:`decode`. Safe in any thread as far as the transforms
    are. Passed to worker processes it costs little at any size: what grows with the number of
    samples lies in shared memory.
    """

    visited: NDArray[np.uint32] | None = None
    """``u32[n]``, ids of the samples to visit, where the data set itself says so; None: all."""

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the samples ``indices``, with one read of the source.

        Raises a :class:`~stoker.errors.SourceError` for the first one that cannot be used.
        """
        ids = np.asarray(indices, np.uint32)
        data, offsets, errors = read_whole(self.source, ids)
        if errors:
            raise errors[min(errors)]
        bounds = pairwise(offsets.tolist())
        return [
            self.finish(index, self._unfinished(index, data.data[begin:end]))
            for index, (begin, end) in zip(ids.tolist(), bounds, strict=True)
        ]

    def _unfinished(self, index: int, data: memoryview) -> Any:
        if self.image_transform is None:
            return self.decode_named(index, data)
        try:
            return self.image_transform(self.image_of(index, data))
        except SampleCorrupt as error:
            raise self.named(index, error) from error


class TransformedDataset(SourceDataset):
    """A data set with a transform, which may be replaced while no loader uses it."""

    _then: Transform | None = None

    @property
    def transform(self) -> Transforms | None:
        """What samples go through, as it was given."""
        return self._transform

    @transform.setter
    def transform(self, transform: Transforms | None) -> None:
        if self.is_packed:
            check_packed({"transform": transform is not None})
        self.image_transform, self._then = split(transform)
        self._transform = transform

    @property
    def is_shown(self) -> bool:
        """Whether code of the user's gets what the image transform made, and may keep it."""
        own = type(self).finish in (SampleDataset.finish, ImageFolder.finish)
        return self._then is not None or not own

    def transformed(self, decoded: Any) -> Any:
        """Return the sample; what an image transform made becomes a tensor in the same memory."""
        sample = decoded if self.image_transform is None else torch.as_tensor(decoded)
        return sample if self._then is None else self._then(sample)


class SampleDataset(TransformedDataset):
    """The samples of any Source, with an optional target each.

    A sample is ``decode(bytes)``, then ``transform`` of it, and with ``targets`` the pair
    ``(that, target)``. Without ``decode`` it is the bytes themselves. ``decode`` must give the
    same for the same bytes; random augmentation belongs into ``transform``, which is a function or
    a list as :class:`ImageFolder` takes it. What ``decode`` raises counts as a corrupt sample.
    ``targets`` is array-like, ``[N]`` or ``[N, ...]``, of numbers. Processes started by spawn or
    forkserver need ``decode`` and ``transform`` to pickle. With ``decode="packed"`` a sample is its
    bytes, and a batch of a Loader their tensors ``(data u8[total], offsets i64[n + 1])``, sample
    ``i`` being ``data[offsets[i]:offsets[i + 1]]``; with targets the pair of these and a tensor
    ``[n, ...]``. No object is made of each sample.

    Raises :class:`~stoker.errors.ConfigError` for targets of another length than the source, and
    a ``transform`` beside ``"packed"``.
    """

    own_form = "bytes"

    def __init__(
        self,
        source: Source,
        decode: Decode | Literal["packed"] | None = None,
        transform: Transforms | None = None,
        targets: ArrayLike | None = None,
    ) -> None:
        super().__init__(as_source(source), decode)
        self.transform = transform
        self._targets = None if targets is None else _shared_targets(targets, len(source))

    @property
    def targets(self) -> NDArray[Any] | None:
        """The targets, ``[N]`` or ``[N, ...]``, or None; to be read only."""
        return None if self._targets is None else self._targets.array

    @property
    def is_random(self) -> bool:
        """Whether there is a transform that may draw random numbers of the process."""
        return self._then is not None

    def finish(self, index: int, decoded: Any) -> Any:
        """Return the transformed sample, with its target if there are targets."""
        sample = self.transformed(decoded)
        if self._targets is None:
            return sample
        target = self._targets.array[index]
        return sample, target.item() if target.ndim == 0 else target.copy()


class ImageFolder(TransformedDataset):
    """Images in class folders, ``root/class/.../image.jpg``: samples are ``(image, target)``.

    Takes the place of ``torchvision.datasets.ImageFolder``. ``root`` is a directory or an address
    (``s3://bucket/train``, ``gs://``, ``az://``, or what fsspec knows), or the tar shards that
    ``stoker pack`` makes of one (``/data/packed``, ``s3://bucket/shard-{000000..000599}.tar``);
    ``storage_options`` and ``pace`` are for addresses, as :class:`~stoker.source.ObjectSource`
    takes them. ``transform`` gets a ``PIL.Image`` in RGB, or with ``output="array"`` an array
    ``u8[height, width, 3]``, which spares making the PIL image (some 7 µs). It may be a list of
    functions, of which the first may be :class:`stoker.images.Train` or ``Eval``: that decodes, and
    hands the next a tensor ``u8[3, size, size]`` in the batch's own memory. ``decode`` replaces the
    built-in decoder: it gets the bytes, and ``transform`` whatever it returns, so that ``output``
    has no meaning beside it. ``target_transform`` gets the class number. Images of more than
    ``max_pixels`` are corrupt samples; the default is Pillow's limit, see
    :func:`~stoker.images.decode_image`.

    Raises :class:`~stoker.errors.ConfigError` for a missing directory, one without images,
    ``storage_options`` or ``pace`` for a directory, and what
    :class:`~stoker.source.ImagePrefixSource` refuses; :class:`~stoker.errors.SourceUnavailable`
    when the storage does not answer.
    """

    own_form = "rgb"
    source: ImageFolderSource | ImagePrefixSource | ImageShardSource

    def __init__(
        self,
        root: str | Path,
        transform: Transforms | None = None,
        target_transform: Transform | None = None,
        *,
        output: Literal["pil", "array"] = "pil",
        decode: Decode | None = None,
        max_pixels: int | None = None,
        storage_options: Mapping[str, Any] | None = None,
        pace: Pace | None = None,
    ) -> None:
        if output not in ("pil", "array"):
            raise ConfigError(f"output={output!r} is not known: use 'pil' or 'array'")
        if split(transform)[0] is not None and output != "pil":
            raise ConfigError(
                f"output={output!r} has no meaning with {transform!r}, which makes tensors: leave "
                "one out"
            )
        if decode is not None and output != "pil":
            raise ConfigError(f"output={output!r} has no meaning with decode=: leave one out")
        if max_pixels is not None and (decode is not None or not max_pixels >= 1):
            raise ConfigError(f"max_pixels={max_pixels!r}: give 1 or more, and not beside decode=")
        given = {"storage_options": storage_options, "pace": pace}
        options = {name: value for name, value in given.items() if value is not None}
        if options and "://" not in str(root):
            raise ConfigError(
                f"{' and '.join(options)} have no meaning for the directory root={str(root)!r}: "
                "leave them out, or give an address like s3://bucket/train"
            )
        super().__init__(open_image_folder(root, **options), decode)
        self.root = str(root)
        self.transform = transform
        self.target_transform = target_transform
        self._max_pixels = max_pixels
        self._as_pil = output == "pil" and decode is None
        self._targets = self.source.targets

    def __getstate__(self) -> dict[str, Any]:
        # A view of memory that the source shares: it would travel as a copy.
        return {**self.__dict__, "_targets": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._targets = self.source.targets

    @property
    def classes(self) -> list[str]:
        """Class names in order; the index in it is the target."""
        return list(self.source.classes)

    @property
    def class_to_idx(self) -> dict[str, int]:
        """Class name -> target."""
        return {name: number for number, name in enumerate(self.source.classes)}

    @property
    def targets(self) -> NDArray[np.int64]:
        """The target of each sample, ``i64[N]``, before ``target_transform``."""
        return self._targets

    @property
    def is_random(self) -> bool:
        """Whether there is a transform that may draw random numbers of the process."""
        return self._then is not None or self.target_transform is not None

    def decode(self, data: memoryview) -> Any:
        """Return the pixels, ``u8[height, width, 3]``, or what ``decode=`` makes of the bytes."""
        if self._decode is None:
            return decode_image(data, self._max_pixels)
        return super().decode(data)

    def image(self, data: memoryview) -> Any:
        """Return the encoded image, or what ``decode=`` makes of the bytes."""
        is_own = self._decode is None and type(self).decode is ImageFolder.decode
        return EncodedImage(data, self._max_pixels) if is_own else self.decode(data)

    def finish(self, index: int, decoded: Any) -> tuple[Any, Any]:
        """Return ``(image, target)`` with the transforms applied."""
        is_plain = self._as_pil and self.image_transform is None
        image = self.transformed(to_pil(decoded) if is_plain else decoded)
        target: Any = int(self._targets[index])
        if self.target_transform is not None:
            target = self.target_transform(target)
        return image, target


class MixedDataset(SourceDataset):
    """Data sets in one, each with its own decoding, transforms and targets.

    ``stoker.mix`` makes it, for a Loader that draws from the data sets by their weights. Indices
    count through the data sets, those under Subsets in full; :meth:`origins` tells them apart, of
    ``meta.ids`` say. A sample is what its data set makes of it; if ``tagged``, the pair of that and
    the place of the data set in :attr:`names`. As safe in threads and processes as the data sets.

    Raises :class:`~stoker.errors.ConfigError` for what is no data set of Stoker's, and for a
    mixture of mixtures.
    """

    def __init__(
        self,
        parts: Sequence[Any],
        names: Sequence[str],
        weights: Weights,
        epoch_samples: Any,
        *,
        tagged: bool = False,
    ) -> None:
        views = [DatasetPopulation(part) for part in parts]
        self.parts = tuple(view.base for view in views)
        """The data sets, in order, under any Subsets."""
        if any(part.mixture is not None for part in self.parts):
            raise ConfigError("a mixture of mixtures has no weights: mix all parts at once")
        if any(part.is_packed for part in self.parts):
            raise ConfigError("a mixture has no packed batches: leave decode='packed' out of it")
        is_plain = all(part.is_bytes_of_source for part in self.parts)
        # Code of the user's stays in the thread that it is called in.
        sources = [part.source for part in self.parts]
        super().__init__(JoinedSource(sources, at_once=is_plain))
        self.is_bytes_of_source = is_plain
        self.mixture: Mixture = Mixture(
            tuple(names),
            tuple(map(len, views)),
            weights,
            epoch_samples,
            tuple(map(len, self.parts)),
        )
        self.tagged = tagged
        """Whether samples say which data set they are from."""
        transforms = [part.image_transform for part in self.parts]
        # One for all writes into the memory of the batch; else each data set applies its own.
        is_common = all(transform == transforms[0] for transform in transforms)
        self.image_transform = transforms[0] if is_common else None
        self._starts: list[int] = self.source.starts.tolist()  # type: ignore[attr-defined]
        if any(view.label for view in views):
            every = zip(views, self._starts, strict=False)
            ids = [view.ids(np.arange(len(view))) + np.uint32(start) for view, start in every]
            self.visited = np.concatenate(ids)

    @property
    def names(self) -> tuple[str, ...]:
        """What the data sets are called, in order."""
        return self.mixture.names

    def origins(self, ids: Any) -> NDArray[np.int64]:
        """Return i64[n], the place in :attr:`names` of the data set of each of ``ids`` ``[n]``."""
        return self.mixture.origins(np.asarray(ids))

    @property
    def is_random(self) -> bool:
        """Whether a data set has a transform that may draw random numbers of the process."""
        return any(part.is_random or self._transforms(part) for part in self.parts)

    @property
    def decode_name(self) -> str | None:
        """What identifies the decoding of all data sets; None where one is code of the user's."""
        names = [part.decode_name for part in self.parts]
        return None if None in names else "+".join(map(str, names))

    def decode_named(self, index: int, data: memoryview) -> Any:
        """Return what the sample's data set makes of its bytes; the error names it."""
        _, part, _ = self._place(index)
        try:
            return part.decode(data)
        except SampleCorrupt as error:
            raise self.named(index, error) from error

    @property
    def is_audited(self) -> bool:
        """Whether a data set is."""
        return any(part.is_audited for part in self.parts)

    def audit(self, ids: NDArray[np.uint32], decoded: Sequence[Any]) -> None:
        """Have the samples' data sets look at what came from the cache."""
        for index, sample in zip(ids.tolist(), decoded, strict=True):
            _, part, local = self._place(index)
            part.audit(np.array([local], np.uint32), [sample])

    def image_of(self, index: int, data: memoryview) -> Any:
        """Return what the sample's data set has its image transform take."""
        _, part, local = self._place(index)
        return part.image_of(local, data)

    def finish(self, index: int, decoded: Any) -> Any:
        """Return the sample as its data set does, tagged if that was asked for."""
        origin, part, local = self._place(index)
        if self._transforms(part):
            decoded = part.image_transform(decoded)
        sample = part.finish(local, decoded)
        return (sample, origin) if self.tagged else sample

    def _transforms(self, part: SourceDataset) -> bool:
        """Whether a data set has an image transform that is not that of all."""
        return part.image_transform is not None and self.image_transform is None

    def _place(self, index: int) -> tuple[int, Any, int]:
        origin = int(self.mixture.origins(np.array(index)))
        return origin, self.parts[origin], index - self._starts[origin]


class CachedDataset(CachedSamples, BatchDataset):
    """Samples served through a cache, a batch at a time.

    :func:`~stoker.pytorch.with_cache` makes one. It works in any loader that takes a
    map-style data set: torch's DataLoader, torchdata's StatefulDataLoader, Subset. Indices are
    ids of the data set. Worker processes of any start method share the cache; safe in
    any thread as far as the data set's transforms are.
    """

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the samples ``indices``, with their transforms applied.

        Raises a :class:`~stoker.errors.SourceError` for the first one that cannot be used.
        """
        transform = self.dataset.image_transform
        canvas = None
        if transform is not None:
            canvas = Canvas(transform, [random.getrandbits(64) for _ in indices])
        fetched = self.fetch(np.asarray(indices, np.uint32), canvas=canvas)
        if fetched.errors:
            raise fetched.errors[min(fetched.errors)]
        finish = self.dataset.finish
        return [finish(*pair) for pair in zip(fetched.ids.tolist(), fetched.decoded, strict=True)]


def with_cache(
    dataset: SourceDataset, cache: Cache | Size = "20%", *, recipe: str | Recipe | None = None
) -> CachedDataset:
    """Return ``dataset`` with a cache in front, for use without a :class:`Loader`.

    For torch's DataLoader, torchdata's StatefulDataLoader and others. Arguments and errors are
    those of a Loader with a sampler of one's own, whose order is not known either: the default of
    ``recipe`` is ``minio``, and its sampling is not used. What needs a Loader raises ConfigError: a
    Cache with ``prefetch``, ``fetchers``, ``locality`` or ``sharing`` of its own. ``close()`` it
    when done.
    Where ranks of torch.distributed wrap a data set without a name, all of them must call this.
    """
    setup = setup_without_plan(dataset, DatasetPopulation(dataset), as_cache(cache), recipe)
    cached = setup.open(current_ranks(), from_rank_zero)
    return CachedDataset(cached.dataset, cached.store, cached.stage, cached.shared)


class DatasetPopulation(Population):
    """The samples that indices of ``view``, the user's data set, stand for in ``base``.

    ``base`` is the data set under any number of Subsets, so that scores and cache speak of the
    same ids whatever part is trained on. Immutable.

    Raises :class:`~stoker.errors.ConfigError` for data sets that cannot be cached by id, and
    for no samples.
    """

    def __init__(self, view: Any) -> None:
        self.base, ids = _unwrapped(view)
        mixture = self.base.mixture
        if mixture is not None and ids is not None:
            raise ConfigError("a Subset of a mixture has no weights: mix Subsets of its parts")
        super().__init__(len(self.base), self.base.visited if ids is None else ids, mixture)
        if len(self) == 0:
            raise ConfigError(f"{type(view).__name__} has 0 samples: there is nothing to load")


def _shared_targets(targets: ArrayLike, num_samples: int) -> SharedArray:
    array = checked_targets(targets, num_samples)
    if array.dtype.kind not in "biuf":
        raise ConfigError(f"targets of type {array.dtype}: give numbers, and keep names beside")
    return SharedArray.copy_of(array, "targets")


def _unwrapped(view: Any) -> tuple[SourceDataset, NDArray[np.uint32] | None]:
    ids: NDArray[Any] | None = None
    base = view
    while is_plain_subset(base):
        inner = np.asarray(base.indices)
        ids = inner.astype(np.int64) if ids is None else inner[ids].astype(np.int64)
        base = base.dataset
    if isinstance(base, IterableDataset):
        raise ConfigError(
            f"{type(base).__name__} is an IterableDataset, which has no sample ids to cache by: "
            "use a map-style data set, or keep the samples as tar shards"
        )
    if not isinstance(base, SourceDataset):
        raise ConfigError(
            f"{type(base).__name__} is not a Stoker data set: use stoker.ImageFolder, "
            "stoker.SampleDataset or stoker.wrap(dataset)"
        )
    if ids is None:
        return base, None
    ids = np.where(ids < 0, ids + len(base), ids)
    if ids.size and not 0 <= ids.min() <= ids.max() < len(base):
        raise ConfigError(
            f"the Subset has indices from {ids.min()} to {ids.max()}, and its data set has "
            f"{len(base)} samples"
        )
    return base, ids.astype(np.uint32)


def is_plain_subset(dataset: Any) -> TypeGuard[Subset[Any]]:
    """Whether it only selects: a Subset with its own ``__getitem__`` may do anything."""
    own = type(dataset)
    return isinstance(dataset, Subset) and own.__getitem__ is Subset.__getitem__
