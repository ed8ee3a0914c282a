"""What a source is, the parts that sources have in common, and how one is completed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, Self, cast

import numpy as np
import numpy.typing as npt

from stoker._core import Rooms
from stoker.errors import ConfigError, SampleCorrupt, SourceError, SourceUnavailable
from stoker.source.packed import Buffer, Bytes, Offsets, offsets_of, pack, unpack

Errors = dict[int, SourceError]
PackedRead = tuple[Bytes, Offsets, Errors]
"""What ``read_packed`` returns: samples, where each begins, an error for each that failed."""

REQUIRED = ("__len__", "sizes", "fingerprint", "read")
_OPTIONAL = (
    "sizes_are_exact",
    "local_identity",
    "is_private",
    "is_ready",
    "at_hand",
    "breaks",
    "name",
    "read_each",
    "read_packed",
    "lanes",
    "read_one",
    "multiplexer",
    "close",
)

Room = tuple[Rooms, int]
"""Room in a cache for one sample: which one of several."""


class Multiplexer(Protocol):
    """Reads many samples at once in one thread, to which it belongs, but for :meth:`wake`.

    It only tries: what it does not get, :meth:`Source.read_one` may.
    """

    def start(self, pieces: Sequence[tuple[int, Any]], rooms: Sequence[Room | None]) -> None:
        """Begin to read samples, each given with a ticket that comes back with it.

        And with its room in a cache, if it has one, where it may be written to.
        """
        ...

    def wait(self, seconds: float) -> list[tuple[Any, Buffer | None]]:
        """Return what came, or None in its place, each with its ticket; no bytes: in its room.

        Waits for so long if there is nothing yet; the list may be empty even so.
        """
        ...

    def wake(self) -> None:
        """End a wait that is under way, or the next; any thread."""
        ...

    def close(self) -> None:
        """Give up what is under way."""
        ...


class Source(Protocol):
    """Where the encoded samples of a data set live; sample ids are ``0 .. len(source) - 1``.

    A source is immutable: a sample's bytes never change while ``fingerprint`` stays the same.
    All methods may be called from several threads and, after a fork or after pickling to a child,
    from several processes at once. Your own class needs only ``__len__``, ``sizes``,
    ``fingerprint`` and ``read``: deriving from :class:`BaseSource` supplies the others, and
    ``as_source`` supplies them to an object that does not derive from it.
    """

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    @property
    def sizes(self) -> Offsets:
        """Bytes of each sample, as a read-only int64 array with one element per sample."""
        ...

    @property
    def fingerprint(self) -> str:
        """A short text that is the same exactly for the same samples in the same order."""
        ...

    @property
    def sizes_are_exact(self) -> bool:
        """Whether a sample of another size than :attr:`sizes` says is a corrupt one."""
        ...

    @property
    def local_identity(self) -> str:
        """A hash that tells these files from others with the same fingerprint, on this machine.

        Files rebuilt with their old names, sizes and normalised times have the old fingerprint,
        which must be the same on all nodes and for copies. What is kept on one machine from run to
        run, or shared by its processes, is kept under both. Empty where the storage's own versions
        tell them apart.
        """
        ...

    @property
    def is_private(self) -> bool:
        """Whether the fingerprint has no meaning outside this job."""
        ...

    @property
    def is_ready(self) -> bool:
        """Whether this process can read at once, without starting anything for that first."""
        ...

    def at_hand(self, ids: npt.NDArray[np.uint32]) -> float:
        """Return the share of samples ``u32[n]`` that lie in this machine's memory, from 0 to 1.

        Reading those waits for nothing. Quick: what takes long to find out is not at hand. Raises
        nothing.
        """
        ...

    @property
    def breaks(self) -> npt.NDArray[np.int64]:
        """``i64[K]``, ascending: samples that no request reads together with the one before.

        Such as the first of each shard. Empty where nothing is known of that.
        """
        ...

    def name(self, sample_id: int) -> str:
        """Return a readable name of the sample (a path, a key), for messages."""
        ...

    def read(self, ids: npt.ArrayLike) -> list[bytes]:
        """Return the samples of ``ids``, in that order; all of them or none.

        Raises :class:`SampleNotFound`, :class:`SampleCorrupt` or :class:`SourceUnavailable`,
        whose attribute ``ids`` lists the samples that failed, and :class:`ConfigError` for an id
        that is out of range or a source that is closed.
        """
        ...

    def read_each(self, ids: npt.ArrayLike) -> tuple[list[bytes | None], Errors]:
        """Return the samples of ``ids`` and what went wrong, by position in ``ids``.

        A sample that failed is None in the list and has its error in the dictionary, so that one
        bad sample does not cost the batch. Raises :class:`ConfigError` as :meth:`read` does.
        """
        ...

    def read_packed(self, ids: npt.ArrayLike) -> PackedRead:
        """Return ``(data u8[total], offsets i64[n + 1], errors)`` with no object per sample.

        Sample ``i`` is ``data[offsets[i]:offsets[i + 1]]``; one that failed has no bytes there
        and its error in the dictionary. Raises :class:`ConfigError` as :meth:`read` does.
        """
        ...

    @property
    def lanes(self) -> int:
        """How many threads that each call :meth:`read_one` read best in this process.

        0 where a read of many is better, so that :meth:`read_packed` should be called.
        """
        ...

    def read_one(self, sample_id: int) -> Buffer:
        """Return one sample, in whatever memory it arrived; raises as :meth:`read` does."""
        ...

    def multiplexer(self) -> Multiplexer | None:
        """Return a reader of many samples in one thread; None where :attr:`lanes` are best."""
        ...

    def close(self) -> None:
        """Release what is held (threads, descriptors); reading afterwards raises."""
        ...


class BaseSource:
    """Supplies all of a source except ``__len__``, ``sizes``, ``fingerprint`` and ``read``.

    ``read_each`` and ``read_packed`` here are built on ``read``: correct for any source, but a
    failing batch is read again without the samples that failed. A source that can do better
    overrides them.
    """

    def __len__(self) -> int:
        raise NotImplementedError(f"{type(self).__name__} has to define __len__")

    def read(self, ids: npt.ArrayLike) -> list[bytes]:
        """Return the samples of ``ids``, in that order; all of them or none."""
        raise NotImplementedError(f"{type(self).__name__} has to define read")

    def name(self, sample_id: int) -> str:
        """Return a readable name of the sample."""
        return f"sample {sample_id}"

    @property
    def sizes_are_exact(self) -> bool:
        """Whether a sample of another size than :attr:`Source.sizes` says is a corrupt one."""
        return True

    @property
    def local_identity(self) -> str:
        """Empty: the fingerprint is enough."""
        return ""

    @property
    def is_private(self) -> bool:
        """False: the fingerprint means the same to everyone."""
        return False

    @property
    def is_ready(self) -> bool:
        """True: there is nothing to start."""
        return True

    def at_hand(self, ids: npt.NDArray[np.uint32]) -> float:
        """0: no sample is known to lie in memory."""
        return 0.0

    @property
    def breaks(self) -> npt.NDArray[np.int64]:
        """Empty: nothing is known of where requests must end."""
        return np.empty(0, np.int64)

    def read_each(self, ids: npt.ArrayLike) -> tuple[list[bytes | None], Errors]:
        """Return the samples, None for each that failed, and the errors by position."""
        wanted = check_ids(ids, len(self))
        samples: list[bytes | None] = [None] * len(wanted)
        errors: Errors = {}
        left = np.arange(len(wanted))
        while len(left):
            try:
                found = self.read(wanted[left])
            except SourceError as error:
                failed = self._blame(error, wanted[left])
                errors.update(dict.fromkeys(left[failed].tolist(), error))
                left = left[~failed]
            else:
                for index, sample in zip(left.tolist(), found, strict=True):
                    samples[index] = sample
                break
        return samples, errors

    def _blame(self, error: SourceError, ids: npt.NDArray[np.uint32]) -> npt.NDArray[np.bool_]:
        """Return which of ``ids`` the error is about."""
        failed = np.isin(ids, error.ids)
        if failed.any():
            return failed
        # It does not say which. A storage that is down fails whole, not sample by sample.
        if len(ids) == 1 or isinstance(error, SourceUnavailable):
            return np.ones(len(ids), bool)
        return self._try_one_by_one(ids)

    def _try_one_by_one(self, ids: npt.NDArray[np.uint32]) -> npt.NDArray[np.bool_]:
        """Return which of ``ids`` cannot be read alone."""
        failed = np.zeros(len(ids), bool)
        for index in range(len(ids)):
            try:
                self.read(ids[index : index + 1])
            except SourceError:
                failed[index] = True
        return failed

    @property
    def lanes(self) -> int:
        """0: what is needed at once is better read at once."""
        return 0

    def read_one(self, sample_id: int) -> Buffer:
        """Return one sample; see :meth:`Source.read_one`."""
        return self.read([sample_id])[0]

    def multiplexer(self) -> Multiplexer | None:
        """Return None: there is none."""
        return None

    def read_packed(self, ids: npt.ArrayLike) -> PackedRead:
        """Return the samples in one array; see :meth:`Source.read_packed`."""
        samples, errors = self.read_each(ids)
        return *pack([sample or b"" for sample in samples]), errors

    def close(self) -> None:
        """Release what is held; by default nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_ids(ids: npt.ArrayLike, num_samples: int) -> npt.NDArray[np.uint32]:
    """Return ``ids`` as u32[n]; raises ConfigError unless all are in ``0 .. num_samples - 1``."""
    wanted = np.asarray(ids)
    if wanted.size == 0:
        return np.empty(0, np.uint32)
    if wanted.ndim != 1 or wanted.dtype.kind not in "iu":
        raise ConfigError(
            f"ids have shape {wanted.shape} and dtype {wanted.dtype}: give a flat array of integers"
        )
    if wanted.dtype == np.uint32 and wanted.max() < num_samples:
        return np.ascontiguousarray(wanted)
    wrong = (wanted < 0) | (wanted >= num_samples)
    if wrong.any():
        raise ConfigError(
            f"id {wanted[wrong][0]} is out of range: this source has ids 0 to {num_samples - 1}"
        )
    return np.ascontiguousarray(wanted, np.uint32)


class PackedSource(BaseSource):
    """Supplies ``read`` and ``read_each``; a subclass defines ``read_packed`` and the rest."""

    def read(self, ids: npt.ArrayLike) -> list[bytes]:
        """Return the samples of ``ids``; see :meth:`Source.read`."""
        data, offsets, errors = self.read_packed(ids)
        if errors:
            wanted = check_ids(ids, len(self))
            error = errors[min(errors)]
            error.ids = wanted[sorted(errors)].tolist()
            raise error
        return unpack(data, offsets)

    def read_each(self, ids: npt.ArrayLike) -> tuple[list[bytes | None], Errors]:
        """Return the samples, None for each that failed; see :meth:`Source.read_each`."""
        data, offsets, errors = self.read_packed(ids)
        samples: list[bytes | None] = [*unpack(data, offsets)]
        for index in errors:
            samples[index] = None
        return samples, errors

    def read_packed(self, ids: npt.ArrayLike) -> PackedRead:
        """Return the samples in one array; see :meth:`Source.read_packed`."""
        raise NotImplementedError(f"{type(self).__name__} has to define read_packed")


def read_whole(source: Source, ids: npt.NDArray[np.uint32]) -> PackedRead:
    """Return what ``source.read_packed`` gives; samples with too few or too many bytes are corrupt.

    This detects storage that truncates answers, and changed files, for samples of any
    kind. Raises what the source raises.
    """
    data, offsets, errors = source.read_packed(ids)
    if not source.sizes_are_exact:
        return data, offsets, errors
    lengths, expected = np.diff(offsets), source.sizes[ids]
    wrong = [row for row in np.flatnonzero(lengths != expected).tolist() if row not in errors]
    if not wrong:
        return data, offsets, errors
    cut = {
        row: SampleCorrupt(
            f"{source.name(int(ids[row]))}: {lengths[row]} bytes came, not {expected[row]}",
            [int(ids[row])],
        )
        for row in wrong
    }
    return without({**errors, **cut}, data, offsets)


def in_batches(
    ids: npt.NDArray[np.uint32], sizes: Offsets, *, most_bytes: int, most_samples: int
) -> Iterator[npt.NDArray[np.uint32]]:
    """Yield ``ids`` in parts that are read at once; ``sizes`` are theirs, i64[n], in bytes.

    A part has at most so many bytes and samples, and one sample at least.
    """
    ends = np.cumsum(sizes)
    begin = 0
    while begin < len(ids):
        before = int(ends[begin - 1]) if begin else 0
        end = int(np.searchsorted(ends, before + most_bytes, "right"))
        end = min(max(end, begin + 1), begin + most_samples)
        yield ids[begin:end]
        begin = end


def without(errors: Errors, data: Bytes, offsets: Offsets) -> PackedRead:
    """Return the packed batch with no bytes for the samples that have an error."""
    if not errors:
        return data, offsets, errors
    sizes = np.diff(offsets)
    failed = np.zeros(len(sizes), np.bool_)
    failed[list(errors)] = True
    return data[np.repeat(~failed, sizes)], offsets_of(np.where(failed, 0, sizes)), errors


def as_source(candidate: Any) -> Source:
    """Return ``candidate`` as a full source, supplying the optional methods that it lacks.

    Raises :class:`ConfigError`, naming what is missing, when it has not even ``__len__``,
    ``sizes``, ``fingerprint`` and ``read``.
    """
    missing = [part for part in REQUIRED if not _has(candidate, part)]
    if missing:
        raise ConfigError(
            f"{type(candidate).__name__} is not a source: it lacks {', '.join(missing)}; "
            "see stoker.source.Source"
        )
    if all(_has(candidate, part) for part in _OPTIONAL):
        return cast(Source, candidate)
    return _Completed(candidate)


def _has(candidate: Any, part: str) -> bool:
    return hasattr(type(candidate), part) or hasattr(candidate, part)


class _Completed(BaseSource):
    """An object with only the four required methods, completed by checks and defaults."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self._closed = False

    def __len__(self) -> int:
        return len(self._source)

    @property
    def sizes(self) -> Offsets:
        sizes: Offsets = np.asarray(self._source.sizes, np.int64).view()
        sizes.flags.writeable = False
        return sizes

    @property
    def sizes_are_exact(self) -> bool:
        return bool(getattr(self._source, "sizes_are_exact", True))

    @property
    def fingerprint(self) -> str:
        return cast(str, self._source.fingerprint)

    @property
    def local_identity(self) -> str:
        return str(getattr(self._source, "local_identity", ""))

    @property
    def is_private(self) -> bool:
        return bool(getattr(self._source, "is_private", False))

    @property
    def is_ready(self) -> bool:
        return bool(getattr(self._source, "is_ready", True))

    def at_hand(self, ids: npt.NDArray[np.uint32]) -> float:
        at_hand = getattr(self._source, "at_hand", super().at_hand)
        return float(at_hand(ids))

    @property
    def breaks(self) -> npt.NDArray[np.int64]:
        return np.asarray(getattr(self._source, "breaks", super().breaks), np.int64)

    def name(self, sample_id: int) -> str:
        name = getattr(self._source, "name", super().name)
        return cast(str, name(sample_id))

    def read(self, ids: npt.ArrayLike) -> list[bytes]:
        return cast(list[bytes], self._source.read(self._checked(ids)))

    def read_each(self, ids: npt.ArrayLike) -> tuple[list[bytes | None], Errors]:
        read_each = getattr(self._source, "read_each", super().read_each)
        return cast("tuple[list[bytes | None], Errors]", read_each(self._checked(ids)))

    def read_packed(self, ids: npt.ArrayLike) -> PackedRead:
        read_packed = getattr(self._source, "read_packed", super().read_packed)
        return cast(PackedRead, read_packed(self._checked(ids)))

    def _checked(self, ids: npt.ArrayLike) -> npt.NDArray[np.uint32]:
        if self._closed:
            raise ConfigError(
                f"this {type(self._source).__name__} is closed: make a new one to read from"
            )
        return check_ids(ids, len(self))

    def close(self) -> None:
        self._closed = True
        getattr(self._source, "close", super().close)()
