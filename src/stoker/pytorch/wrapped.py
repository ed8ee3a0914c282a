"""Any map-style torch data set, with the cache put before its transforms."""

from __future__ import annotations

import copy
import hashlib
import multiprocessing
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch.utils.data import Dataset, IterableDataset, Subset

from stoker.epoch.codec import decode, dumps, encode
from stoker.errors import ConfigError, SampleCorrupt, SampleNotFound, SourceError
from stoker.pytorch.dataset import SourceDataset, Transform, is_plain_subset
from stoker.source.base import BaseSource, check_ids

_PATIENCE = 60.0  # seconds for the one sample that is read at construction
_CHECKED = 8  # first samples whose transforms are seen to be where they can be moved from
_AUDITED = 16  # first hits that are held against the data set


def wrap(
    torch_dataset: Dataset[Any],
    deterministic: bool = False,
    name: str | None = None,
    *,
    sample_bytes: int | None = None,
) -> WrappedDataset | Subset[Any]:
    """Return ``torch_dataset`` as a data set that a Loader can cache.

    Where it has a ``transform``, ``target_transform`` or joint ``transforms``, these are taken
    out (of a shallow copy) and applied after the cache, as torchvision does: to the first item of
    a sample, the second, or both; a sample that is no tuple is transformed as a whole. What is
    left is cached, so it must give the same sample each time.

    ``sample_bytes`` is the mean size of a sample before its transforms; without it, one sample is
    read to know, once, in a process of its own, so that nothing is opened or waited for here. The
    rest is checked where samples are read anyway, and raises
    :class:`~stoker.errors.ConfigError` there: of the first samples that each process reads, that
    their transforms came last; and of the first that each serves from the cache, that the data set
    still gives the same, with the call that torch's DataLoader would have made for that visit.
    ``deterministic=True`` leaves out the latter: the caller vouches.

    Of a ``Subset``, as ``random_split`` returns, the data set under it is wrapped, whose
    transforms they are: what is returned is a ``Subset`` of that, with the same indices.

    Of a ``datasets.Dataset`` of Hugging Face the rows of its Arrow table are cached, and the files
    of images and recordings that they have the path of; its format, its transform and the decoding
    of its features come after the cache. Nothing is read to check that.

    The cache is private to this job, also between the ranks of torch.distributed, unless
    ``name`` says which data set this is: jobs that give the same name and length share it, and
    must mean the same samples. Since it may then lie on disk or in a pool, where nothing is
    pickled, samples with a name consist of arrays, tensors, images, numbers, text and bytes, in
    tuples, lists and dicts (see :func:`stoker.epoch.codec.encode`).

    Raises :class:`~stoker.errors.ConfigError` for an IterableDataset, one without length or
    samples, a ``sample_bytes`` below 1, transforms that it does not let be replaced, a first sample
    that takes longer than a minute or whose transforms cannot be moved, and with a name for
    samples of other types.
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
    if is_plain_subset(torch_dataset):
        whole = wrap(torch_dataset.dataset, deterministic, name, sample_bytes=sample_bytes)
        return Subset(whole, torch_dataset.indices)
    from stoker.pytorch.hub_dataset import HubDataset, is_of_hub

    if sample_bytes is not None and sample_bytes < 1:
        raise ConfigError(f"sample_bytes={sample_bytes} is out of range: give 1 or more")
    if is_of_hub(torch_dataset):
        return HubDataset(torch_dataset, name, sample_bytes)
    bare, transforms = _take_out_transforms(torch_dataset)
    source = WrappedSource(bare, sample_bytes or 1, name, _marked(torch_dataset, transforms))
    if deterministic:
        source.audits = 0
    if sample_bytes is None:
        source.measure()
    return WrappedDataset(source, *transforms)


class WrappedSource(BaseSource):
    """The Source that reads the samples of a torch data set and serialises them.

    ``sizes`` is an estimate: what :func:`wrap` was told or read, since the real
    ones are known only by reading everything. As safe in threads as the data set itself.
    """

    def __init__(
        self, dataset: Any, mean_size: float, name: str | None, marked: Marked | None = None
    ) -> None:
        self.dataset = dataset
        self.audits = _AUDITED
        """Hits that this process has yet to hold against the data set."""
        self._marked, self._unchecked = marked, 0 if marked is None else _CHECKED
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

    def measure(self) -> None:
        """Read one sample in a process of its own, for the mean size; raises ConfigError."""
        index = len(self) // 2
        self._mean_size = max(1, _in_a_process(lambda: self._size_of(index), self.name(index)))

    def audit(self, index: int, cached: Any) -> None:
        """Raise ConfigError if the data set has another sample than the ``cached`` one."""
        self.audits -= 1
        try:
            fresh = decode(memoryview(self._read_one(index)), private=self.is_private)
        except SourceError:
            return  # it is there in the cache
        if not same(fresh, cached):
            raise ConfigError(
                f"{self.name(index)} differs from one read to the next, and a cache freezes it: "
                "give the data set its random part as `transform`, or pass deterministic=True if "
                "the difference does not matter"
            )

    def _sample(self, index: int) -> Any:
        """Return a sample before its transforms; the first ones are seen to have them last."""
        if self._marked is None or self._unchecked <= 0:
            return self.dataset[index]
        self._unchecked -= 1
        try:
            return self._marked.sample(index, self.name(index))
        except (ConfigError, SourceError, OSError):
            raise
        except Exception as error:
            self.dataset[index]  # which raises as well if the sample is at fault
            raise ConfigError(
                f"{self.name(index)} could not be taken apart from its transforms "
                f"({type(error).__name__}: {error}): wrap the data set without its transforms, and "
                "set .transform of what wrap() returns"
            ) from error

    def _size_of(self, index: int) -> int:
        return len(encode(self._sample(index), private=self.is_private))

    def _read_one(self, index: int) -> bytes:
        try:
            sample = self._sample(index)
        except FileNotFoundError as error:
            raise SampleNotFound(f"{self.name(index)}: {error}", [index]) from error
        except (SourceError, ConfigError):
            raise
        except Exception as error:
            what = f"{self.name(index)} raised {type(error).__name__}: {error}"
            raise SampleCorrupt(what, [index]) from error
        try:
            return encode(sample, private=self.is_private)
        except ConfigError as error:  # of a type that the first sample was not of
            raise SampleCorrupt(f"{self.name(index)}: {error}", [index]) from error
        except Exception as error:
            what = f"{self.name(index)} raised {type(error).__name__}: {error}"
            raise SampleCorrupt(what, [index]) from error


def same(left: Any, right: Any) -> bool:
    """Whether two samples are equal, down to shapes and dtypes; NaN equals NaN."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
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

    @property
    def is_audited(self) -> bool:
        """Whether this process has served few samples from the cache yet."""
        return self.source.audits > 0

    def audit(self, ids: NDArray[np.uint32], decoded: Sequence[Any]) -> None:
        """Hold the first samples that this process got from the cache against the data set."""
        for index, cached in zip(ids.tolist()[: self.source.audits], decoded, strict=False):
            self.source.audit(index, cached)

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
            _replace(bare, name, _unchanged)
    if transform is not None or target_transform is not None:
        transforms = None  # torchvision builds it of the other two
    return bare, (transform, target_transform, transforms)


def _replace(dataset: Any, name: str, transform: Callable[..., Any]) -> None:
    try:
        setattr(dataset, name, transform)
    except Exception as error:  # of a setter: whatever it raises
        raise ConfigError(
            f"{type(dataset).__name__} does not let its `{name}` be replaced ({error!r}), so that "
            "nothing can be cached before it: keep torch's DataLoader for it"
        ) from error


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


class _Mark:
    """Stands for what a transform would have made of ``value``."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __reduce__(self) -> Any:
        raise ConfigError("a transform is applied inside of the sample")


class Marked:
    """A data set whose transforms leave marks, which show whether they come last."""

    def __init__(self, dataset: Any, transforms: _Transforms) -> None:
        transform, target_transform, joint = transforms
        self._first = (transform or joint) is not None
        self._second = (target_transform or joint) is not None
        self._dataset = copy.copy(dataset)
        for name, mark in (
            ("transform", _Mark),
            ("target_transform", _Mark),
            ("transforms", self._both),
        ):
            if callable(getattr(dataset, name, None)):
                _replace(self._dataset, name, mark)

    def _both(self, first: Any, second: Any) -> tuple[Any, Any]:
        return _Mark(first) if self._first else first, _Mark(second) if self._second else second

    def sample(self, index: int, name: str) -> Any:
        """Return the sample before its transforms, with one call.

        Raises ConfigError where they are not what comes last, and what the data set raises.
        """
        sample = self._dataset[index]
        is_row = isinstance(sample, (tuple, list))
        items = list(sample) if is_row else [sample]
        wanted = [self._first, self._second and is_row] + [False] * len(items)
        if [isinstance(item, _Mark) for item in items] != wanted[: len(items)]:
            raise ConfigError(
                f"{name} is not its cached sample with `transform` applied to the first item and "
                "`target_transform` to the second: wrap the data set without its transforms and "
                "set .transform of what wrap() returns"
            )
        plain = [item.value if isinstance(item, _Mark) else item for item in items]
        if not is_row:
            return plain[0]
        if hasattr(sample, "_fields"):
            return type(sample)(*plain)
        return tuple(plain) if isinstance(sample, tuple) else plain


def _marked(dataset: Any, transforms: _Transforms) -> Marked | None:
    return None if transforms == (None, None, None) else Marked(dataset, transforms)


def _in_a_process(function: Callable[[], int], name: str) -> int:
    """Return what ``function`` does in a fork of this process; ConfigError if it fails there."""
    if multiprocessing.current_process().daemon:  # which may have no children
        return function()
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(
        target=_answer, args=(function, name, theirs), daemon=True
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
        process.start()
    theirs.close()
    answer: Any = None
    try:
        if ours.poll(_PATIENCE):
            answer = ours.recv()
    except EOFError:
        process.join(_PATIENCE)
        answer = f"ended its process with {process.exitcode}"
    finally:
        process.kill()
        process.join()
        process.close()
        ours.close()
    if isinstance(answer, int):
        return answer
    if isinstance(answer, ConfigError):
        raise answer
    raise ConfigError(
        f"{name} {answer or f'did not come within {_PATIENCE:.0f} s'}: give wrap() sample_bytes=, "
        "the mean size of a sample, and it reads none"
    )


def _answer(function: Callable[[], int], name: str, pipe: Any) -> None:
    """Send what ``function`` returns, or why it does not."""
    torch.set_num_threads(1)  # the threads of others do not survive a fork
    try:
        pipe.send(function())
    except ConfigError as error:
        pipe.send(ConfigError(str(error)))
    except Exception as error:
        pipe.send(
            ConfigError(
                f"{name} could not be read, taken apart from its transforms and serialised "
                f"({type(error).__name__}: {error}): wrap the data set without its transforms, and "
                "set .transform of what wrap() returns"
            )
        )


def _fingerprint(name: str | None, num_samples: int) -> str:
    if name is None:
        return f"wrap-{uuid.uuid4().hex}"
    if not name:
        raise ConfigError("name='' names no data set: leave it out, or say which one this is")
    return f"wrap-{hashlib.sha256(name.encode()).hexdigest()[:32]}-{num_samples}"
