"""What samples are made of, and in which form the cache keeps them: encoded, resized or decoded."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stoker.epoch.codec import decode, encode
from stoker.errors import ConfigError, SampleCorrupt, SourceError
from stoker.images import ImageTransform
from stoker.images.resize import Resized
from stoker.sampler.mixture import Mixture
from stoker.shared import SharedArray
from stoker.source.base import BaseSource, PackedRead, PackedSource, Source, check_ids, read_whole
from stoker.source.held import MemorySource
from stoker.source.packed import Buffer, pack
from stoker.store.counters import Counters

Decode = Callable[[bytes], Any]
"""What turns the bytes of one sample into what transforms work on."""

_PROBES = 32  # samples, at most
_ESTIMATED = 1.5
_RESIZED = 1  # version of what is done to an image: part of the key


class Samples:
    """The samples of a Source: :meth:`decode` of their bytes, then :meth:`finish`.

    With ``decode="packed"`` they are the bytes. The cache stands before or after :meth:`decode`.
    Safe in any thread as far as what subclasses do there is.
    """

    is_bytes_of_source = True
    """Whether the source has the bytes that :meth:`decode` takes, so that others can read them."""
    image_transform: ImageTransform | None = None
    """What comes before :meth:`finish` and, if it decodes, in the place of :meth:`decode`."""

    mixture: Mixture | None = None
    """How the sources that the samples come from are mixed; None: there is one source."""

    is_packed = False
    """Whether batches are wanted as bytes one after the other, not as an object a sample."""

    own_form: str | None = None
    """What identifies to other jobs how :meth:`decode` works without code of the user's; None: they
    cannot know."""

    def __init__(self, source: Source, decode: Decode | Literal["packed"] | None = None) -> None:
        if isinstance(decode, str) and decode != "packed":
            raise ConfigError(f"decode={decode!r} is not known: give a function, or 'packed'")
        self.source = source
        self.is_packed = decode == "packed"
        self._decode = None if isinstance(decode, str) else decode

    @property
    def is_shown(self) -> bool:
        """Whether code of the user's gets what :attr:`image_transform` made, and may keep it."""
        return True

    @property
    def is_random(self) -> bool:
        """Whether :meth:`finish` may draw random numbers."""
        return False

    @property
    def decode_name(self) -> str | None:
        """What identifies :meth:`decode` to other jobs; None where it is code of the user's."""
        return self.own_form if self._decode is None else None

    @property
    def is_audited(self) -> bool:
        """Whether :meth:`audit` is to be called."""
        return False

    def audit(self, ids: NDArray[np.uint32], decoded: Sequence[Any]) -> None:
        """Look at samples ``u32[n]`` that came from the cache, as :meth:`decode` gave them.

        Raises :class:`~stoker.errors.ConfigError` if they should not have been cached.
        """

    def decode(self, data: memoryview) -> Any:
        """Return what the transforms work on, from its bytes; the same every time.

        That is what the user's function returns for them; without one, the bytes. Raises
        :class:`~stoker.errors.SampleCorrupt`, whatever the function raises.
        """
        raw = bytes(data)
        return raw if self._decode is None else decoded_by(self._decode, raw)

    def image(self, data: memoryview) -> Any:
        """Return what :attr:`image_transform` takes, encoded or decoded; raises as decode."""
        return self.decode(data)

    def image_of(self, index: int, data: memoryview) -> Any:
        """Return :meth:`image` of sample ``index``."""
        return self.image(data)

    def finish(self, index: int, decoded: Any) -> Any:
        """Return the sample: transforms applied, target attached; drawn again for each use."""
        raise NotImplementedError

    def decode_named(self, index: int, data: memoryview) -> Any:
        """Return :meth:`decode` of sample ``index``; the error of a corrupt one names it."""
        try:
            return self.decode(data)
        except SampleCorrupt as error:
            raise self.named(index, error) from error

    def named(self, index: int, error: SampleCorrupt) -> SampleCorrupt:
        """Return ``error`` as that of sample ``index``."""
        return SampleCorrupt(f"sample {index} ({self.source.name(index)}): {error}", [index])

    def __len__(self) -> int:
        return len(self.source)


def decoded_by(function: Decode, raw: bytes) -> Any:
    """Return what a function of the user's makes of bytes; SampleCorrupt, whatever it raises."""
    try:
        return function(raw)
    except SampleCorrupt:
        raise
    except Exception as error:
        raise SampleCorrupt(
            f"decode raised {type(error).__name__} for {len(raw)} bytes: {error}"
        ) from error


def checked_targets(targets: ArrayLike, num_samples: int) -> NDArray[Any]:
    """Return targets as an array ``[N, ...]``; ConfigError unless there is one for each sample."""
    array = np.asarray(targets)
    if array.ndim == 0 or len(array) != num_samples:
        raise ConfigError(
            f"targets of shape {list(array.shape)} do not fit {num_samples} samples: give one each"
        )
    return array


class Stage(Protocol):
    """What the cache holds of a data set, and how that becomes what transforms work on."""

    key: str
    """Names the cached form for those who share it."""
    is_private: bool
    """Whether ``key`` says nothing to other jobs, and rank 0's must be used by all."""
    is_bytes_of_source: bool
    """Whether the cached form is what the data set's source reads, so that anyone can read it."""
    can_read_ahead: bool
    """Whether any process can make the cached form, without code of the user's."""
    headroom: float
    """How much larger all samples may be than ``source.sizes`` says; 1 where it is exact."""
    originals: Source | None
    """What a share of the data set is a share of, and what is read for a sample of :attr:`source`,
    if not that sample itself."""

    @property
    def source(self) -> Source:
        """Where the cached form comes from."""
        ...

    def decoded(self, index: int, data: memoryview) -> Any:
        """Return what :meth:`Samples.decode` would, from the cached form."""
        ...

    def image(self, index: int, data: memoryview) -> Any:
        """Return what :attr:`Samples.image_transform` takes, from the cached form."""
        ...

    def bytes_from_source(self, stored: int) -> int:
        """Return the bytes read from storage when ``stored`` bytes were fetched for the cache."""
        ...

    def forget_reads(self) -> None:
        """Do not count the bytes read so far, which were not training's."""
        ...


def check_stage(stage: object) -> None:
    """Raise ConfigError unless :func:`make_stage` knows ``stage``, for some data set."""
    if stage in ("encoded", "decoded"):
        return
    try:
        known = isinstance(stage, str) and Resized.parse(stage) is not None
    except ConfigError as error:
        raise ConfigError(f"stage={stage!r} is invalid: {error}") from error
    if not known:
        raise ConfigError(
            f"stage={stage!r} is not known: use 'encoded', 'decoded', or 'resized:SIDE' or "
            "'resized:SIDE:QUALITY', such as 'resized:288:90'"
        )


def make_stage(dataset: Samples, stage: str) -> Stage:
    """Return the stage of that name; ConfigError where it makes no sense."""
    if stage == "encoded":
        return EncodedStage(dataset)
    if not dataset.is_bytes_of_source:
        raise ConfigError(
            f"stage={stage!r} has no meaning for a wrapped data set, whose samples are "
            "cached as it returns them: leave stage out"
        )
    form = Resized.parse(stage)
    return DecodedStage(dataset) if form is None else ResizedStage(dataset, form)


class EncodedStage:
    """Bytes as the source has them."""

    def __init__(self, dataset: Samples) -> None:
        self.source: Source = dataset.source
        self.key = dataset.source.fingerprint
        self.is_private = dataset.source.is_private
        self.is_bytes_of_source = dataset.is_bytes_of_source
        self.can_read_ahead = self.is_bytes_of_source
        is_exact = self.is_bytes_of_source and dataset.source.sizes_are_exact
        self.headroom = 1.0 if is_exact else _ESTIMATED
        self.originals: Source | None = None
        self._dataset = dataset

    def decoded(self, index: int, data: memoryview) -> Any:
        """Decode; see :class:`Stage`."""
        return self._dataset.decode_named(index, data)

    def image(self, index: int, data: memoryview) -> Any:
        """Return what the data set makes of the bytes; see :class:`Stage`."""
        return self._dataset.image_of(index, data)

    def bytes_from_source(self, stored: int) -> int:
        """Return ``stored``."""
        return stored

    def forget_reads(self) -> None:
        """Nothing is counted here."""


class ResizedStage(EncodedStage):
    """Photographs in JPEG, made smaller when they are read: less bytes, and less decoding."""

    def __init__(self, dataset: Samples, form: Resized) -> None:
        super().__init__(dataset)
        self.originals = dataset.source
        self.source = resized = ResizedSource(dataset.source, form)
        self.key = resized.fingerprint
        self.is_bytes_of_source = False
        self.can_read_ahead = not isinstance(dataset.source, MemorySource)
        # None is larger than its original.
        self.headroom = min(_ESTIMATED, 1 / max(resized.factor, 1e-9))


class DecodedStage:
    """Decoded samples: more bytes, no decoding any more; augmentation still comes after it."""

    def __init__(self, dataset: Samples) -> None:
        self.is_private = dataset.decode_name is None
        self._decoded = DecodedSource(dataset, private=self.is_private)
        self.source: Source = self._decoded
        self.is_bytes_of_source = self.can_read_ahead = False
        self.headroom = _ESTIMATED
        self.originals: Source | None = None
        how = dataset.decode_name or uuid.uuid4().hex
        self.key = f"{dataset.source.fingerprint}-decoded-{how}"

    def decoded(self, index: int, data: memoryview) -> Any:
        """Return the decoded sample; arrays of bytes are views of ``data``."""
        return self.image(index, data)

    def image(self, index: int, data: memoryview) -> Any:
        """Return the decoded sample."""
        return decode(data, private=self.is_private)

    def bytes_from_source(self, stored: int) -> int:
        """Return the encoded bytes read, whatever they became."""
        return int(self._decoded.counters.totals()["bytes"])

    def forget_reads(self) -> None:
        """Count from zero; to be called before the stage is passed to other processes."""
        self._decoded.counters = Counters(("bytes",))


class ResizedSource(PackedSource):
    """The samples of ``source`` as ``form`` makes them, by whichever process reads.

    ``sizes`` is an estimate: those of ``source``, times the mean factor of 32 samples that are
    read at construction. As safe in threads and processes as ``source``.
    """

    def __init__(self, source: Source, form: Resized) -> None:
        self._source, self._form = source, form
        self.factor = self._measured()
        """Estimated bytes of all samples / those of the originals."""
        sizes = np.ceil(source.sizes * self.factor).astype(np.int64)
        self._sizes = SharedArray.copy_of(sizes, "stoker-resized")

    def __len__(self) -> int:
        return len(self._source)

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Estimated bytes of each sample, ``i64[N]``, read-only."""
        return self._sizes.read_only

    @property
    def sizes_are_exact(self) -> bool:
        """False: they are not known before the samples are made."""
        return False

    @property
    def fingerprint(self) -> str:
        """That of the originals, and the form."""
        form = f"{self._form.short_side}-{self._form.quality}"
        return f"{self._source.fingerprint}-resized{_RESIZED}-{form}"

    @property
    def local_identity(self) -> str:
        """That of the originals."""
        return self._source.local_identity

    @property
    def is_private(self) -> bool:
        """Whether the originals' fingerprint has no meaning outside this job."""
        return self._source.is_private

    @property
    def is_ready(self) -> bool:
        """Whether the originals can be read at once."""
        return self._source.is_ready

    def name(self, sample_id: int) -> str:
        """Return what the original is called."""
        return self._source.name(sample_id)

    @property
    def lanes(self) -> int:
        """As many as for the originals."""
        return self._source.lanes

    def read_one(self, sample_id: int) -> Buffer:
        """Return one sample; see :meth:`Source.read_one`."""
        return self._form(self._source.read_one(sample_id))

    def read_packed(self, ids: ArrayLike) -> PackedRead:
        """Return the samples in one array; see :meth:`Source.read_packed`."""
        data, offsets, errors = read_whole(self._source, check_ids(ids, len(self)))
        view = data.data
        samples = [self._form(view[begin:end]) for begin, end in pairwise(offsets.tolist())]
        return *pack(samples), errors

    def close(self) -> None:
        """Close the originals."""
        self._source.close()

    def _measured(self) -> float:
        ids = _probes(len(self))
        _, offsets, errors = self.read_packed(ids)
        good = np.delete(np.arange(len(ids)), list(errors))
        before = int(self._source.sizes[ids[good]].sum())
        return float(np.diff(offsets)[good].sum() / before) if before else 1.0


class DecodedSource(BaseSource):
    """A Source of decoded samples, over the encoded one of ``dataset``.

    ``sizes`` is an estimate: the mean of 32 samples that are decoded at construction. With
    ``private`` no other job finds them. As safe in threads and processes as the data set's source
    and ``decode``.
    """

    def __init__(self, dataset: Samples, *, private: bool) -> None:
        self._dataset = dataset
        self._private = private
        self.counters = Counters(("bytes",))
        self.fingerprint = dataset.source.fingerprint
        samples, _ = self.read_each(_probes(len(dataset)))
        lengths = [len(sample) for sample in samples if sample is not None]
        self._mean_size = max(1, round(float(np.mean(lengths)))) if lengths else 1
        self.counters = Counters(("bytes",))  # the probes above are not training's reads

    def __len__(self) -> int:
        return len(self._dataset)

    @property
    def sizes_are_exact(self) -> bool:
        """False: they are not known before the samples are made."""
        return False

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Estimated bytes of each decoded sample, ``i64[N]``, read-only; takes no memory."""
        return np.broadcast_to(np.int64(self._mean_size), len(self))

    def name(self, sample_id: int) -> str:
        """Return what the encoded source calls the sample."""
        return self._dataset.source.name(sample_id)

    def read(self, ids: ArrayLike) -> list[bytes]:
        """Return decoded samples; raises the SourceError of the first that fails."""
        samples, errors = self.read_each(ids)
        if errors:
            raise errors[min(errors)]
        return [sample for sample in samples if sample is not None]

    def read_each(self, ids: ArrayLike) -> tuple[list[bytes | None], dict[int, SourceError]]:
        """Return decoded samples, None for those that failed, and why by row in ``ids``."""
        wanted = np.asarray(ids)
        data, offsets, errors = read_whole(self._dataset.source, wanted)
        self.counters.add(bytes=int(offsets[-1]))
        samples: list[bytes | None] = [None] * len(wanted)
        for row, index in enumerate(wanted.tolist()):
            if row in errors:
                continue
            encoded = data.data[offsets[row] : offsets[row + 1]]
            try:
                sample = self._dataset.decode_named(index, encoded)
            except SampleCorrupt as error:
                errors[row] = error
            else:
                samples[row] = encode(sample, private=self._private)
        return samples, errors


def _probes(num_samples: int) -> NDArray[np.uint32]:
    """Return the ids ``u32[n]`` of samples that are made to learn how large they become."""
    return np.unique(np.linspace(0, num_samples - 1, _PROBES).astype(np.uint32))
