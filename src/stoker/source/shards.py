"""A data set of samples in tar files, on disk or in an object store: ``train-{000..099}.tar``.

An index lies beside shards that ``stoker pack`` made, so that no machine has to read them for one.
"""

from __future__ import annotations

import logging
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from stoker.errors import ConfigError, SampleCorrupt, redacted
from stoker.shared import SharedArray
from stoker.source.base import PackedRead, check_ids, without
from stoker.source.file_set import FileSet, FileSetSource, Places, written_out
from stoker.source.listing import Arrays, decode, encode, kept
from stoker.source.pace import Pace
from stoker.source.packed import Bytes, Offsets, offsets_of, part_header, split_parts
from stoker.source.remote.request import Requests, coalesce, error_of
from stoker.source.shard_index import Member, Read, ShardIndex, index_of, members

INDEX = "stoker-index.bin"
"""What an index is called, in the folder or below the prefix of its shards."""
_PROBE = 512  # bytes: the header of a file in the archive, which lies right before its data
_PROBES = 3  # of a shard
_COMPRESSED = (".tgz", ".tbz", ".txz", ".gz", ".bz2", ".xz", ".zst", ".lz4", ".zip")
_PACKED = re.compile(r"shard-[0-9]{6,}\.tar")  # as stoker pack calls them
_SLACK = 1 << 20  # bytes that an index may have beyond those of the shards
_log = logging.getLogger(__name__)
# How much data is rather read along than skipped, when only the headers are wanted.
_SEEK_LOCAL, _SEEK_REMOTE = 64 << 10, 1 << 20


def expand(shards: Places) -> list[str]:
    """Return the addresses of the shards, braces written out.

    Raises :class:`ConfigError` when there are none, or one is a compressed archive.
    """
    names = written_out(shards)
    if not names:
        raise ConfigError("shards is empty: give at least one tar file")
    for name in names:
        if name.lower().endswith(_COMPRESSED):
            raise ConfigError(
                f"{name} is compressed, so samples in it cannot be read one by one: unpack it to "
                "a plain .tar (images do not get smaller anyway)"
            )
    return names


class ShardSource(FileSetSource):
    """The samples of tar files: consecutive files ``key.extension`` of one key are a sample.

    A sample's bytes are its parts, framed so that :func:`stoker.source.packed.split_parts` takes
    them apart; with ``part`` they are the bytes of that part alone. Samples are in the order in
    which the shards and their files come.

    The shards are indexed once, in one pass over each, many at once: headers only where files
    are large, everything where they are small. Where ``stoker pack`` left an index beside them,
    three headers of each shard tell whether it is theirs, and no more is read. The index is kept
    with the listings on local disk, and is used as long as name, size and version of all shards
    are the same: one request for each shard tells. It takes about 40 bytes and the key for each
    sample, in shared memory.

    Ranges of one shard that lie close together are read by one request, so batches of
    neighbours cost little, and samples at random positions one request each.

    Processes, threads and forks: as :class:`KeySource`; local shards need no helper.
    """

    def __init__(
        self,
        shards: Places,
        *,
        part: str | None = None,
        coalesce_gap: int = 64 << 10,
        largest_request: int = 8 << 20,
        storage_options: Mapping[str, Any] | None = None,
        pace: Pace | None = None,
        cache_index: bool = True,
    ) -> None:
        """Index the shards, or take the index from the disk of this machine.

        ``shards`` are paths or addresses of one bucket or host, or one with braces:
        ``train-{000..099}.tar``, ``{a,b}.tar``. ``part`` is an extension like ``"jpg"``, or
        several like ``"jpg;png"`` of which each sample has one. ``coalesce_gap`` and
        ``largest_request`` are in bytes. ``storage_options`` and ``pace`` are those of
        :class:`ObjectSource`. ``cache_index=False`` neither uses nor keeps an index.

        Raises :class:`ConfigError` for compressed archives, no shards, shards in several locations,
        no samples, or a ``part`` that samples lack; :class:`SampleNotFound` for a shard that is
        not there; :class:`SampleCorrupt` for one that is damaged; :class:`SourceUnavailable`.
        """
        if coalesce_gap < 0 or largest_request < 1:
            raise ConfigError(
                f"coalesce_gap={coalesce_gap}, largest_request={largest_request}: give bytes, "
                "0 or more and 1 or more"
            )
        self._gap, self._largest = coalesce_gap, largest_request
        self._files = FileSet(expand(shards), storage_options, pace)
        self._hold(self._index(cache_index), part)

    def _index(self, cache_index: bool) -> ShardIndex:
        """Return the index of all parts, made or stored."""
        shards = self._files
        seek = _SEEK_REMOTE if shards.root else _SEEK_LOCAL

        def made() -> Arrays:
            index = self._beside() if cache_index else None
            if index is None:
                files = shards.of_each(lambda shard: self._members(shard, seek))
                index = index_of(files, shards.name)
            return index.as_arrays()

        cache = shards.index_cache("shards") if cache_index else None
        return kept(cache, ShardIndex.from_arrays, made)

    def _beside(self) -> ShardIndex | None:
        """Return the index that ``stoker pack`` left beside the shards, if it is theirs."""
        shards = self._files
        paths = (shards.keys[shard].decode() for shard in range(len(shards)))
        names = [path.rpartition("/")[2] for path in paths]
        if not all(map(_PACKED.fullmatch, names)):
            return None
        try:
            stored = shards.beside(INDEX, most=int(shards.keys.sizes.sum()) + _SLACK)
            if stored is None:
                return None
            index, which, probes = _index_from_bytes(bytes(stored), names, shards.keys.sizes)
            lengths = np.full(len(which), _PROBE, np.int64)
            headers, failures = shards.fetch(which, probes[:, 0], lengths)
            found = [zlib.crc32(header.data) for header in headers.reshape(-1, _PROBE)]
            if not failures and found == probes[:, 1].tolist():
                return index
            why = "it is of shards that were replaced"
        except Exception as error:  # whatever lies there, the shards themselves can be read
            why = str(error)
        _log.warning("%s beside %s is not used: %s", INDEX, shards.name(0), why)
        return None

    def _members(self, shard: int, seek: int) -> list[Member]:
        """Return the files of one shard; errors name it."""
        shards = self._files

        def read(start: int, length: int) -> memoryview:
            return shards.read(shard, start, length)

        with shards.named(shard):
            return list(members(read, shards.size(shard), seek))

    def _hold(self, index: ShardIndex, part: str | None) -> None:
        """Keep everything in shared memory."""
        self._framed = part is None
        if part is not None:
            index = index.only([extension.lower() for extension in part.split(";")])
        sizes = index.framed_sizes() if self._framed else index.sizes
        self._fingerprint = f"{self._files.keys.fingerprint}{index.fingerprint}{part or ''}"
        self._extensions = index.extensions
        self._sizes = SharedArray.copy_of(sizes, "sizes")
        shard_of = index.shards[index.first[:-1]]
        self._first = np.searchsorted(shard_of, np.arange(len(self._files) + 1))
        arrays = {name: array for name, array in index.as_arrays().items() if name != "extensions"}
        self._arrays = {name: SharedArray.copy_of(array, name) for name, array in arrays.items()}

    @property
    def _parts(self) -> ShardIndex:
        """The index, as views of the shared memory."""
        return ShardIndex(
            **{name: shared.array for name, shared in self._arrays.items()},
            extensions=self._extensions,
        )

    @property
    def extensions(self) -> tuple[str, ...]:
        """All extensions that there are, in the order in which they first come."""
        return self._extensions

    def name(self, sample_id: int) -> str:
        """Return the shard's address and the sample's key, like ``s3://b/000.tar#n01/0017``."""
        (shard,) = self._file_of(np.array([sample_id])).tolist()
        return f"{self._files.name(shard)}#{redacted(self.key(sample_id))}"

    def key(self, sample_id: int) -> str:
        """Return the sample's key in its shard, like ``n01/0017``."""
        return self._parts.key(sample_id)

    def parts(self, sample_id: int, sample: memoryview) -> dict[str, memoryview]:
        """Return the parts of a sample that was read, by extension, as views of it."""
        if self._framed:
            return split_parts(sample)
        index = self._parts
        return {self._extensions[index.kinds[index.first[sample_id]]]: sample}

    def read_packed(self, ids: npt.ArrayLike) -> PackedRead:
        """Return the samples in one array; see :meth:`Source.read_packed`.

        Raises :class:`ConfigError` also for refused credentials, as :class:`KeySource` does.
        """
        self._check_open()
        wanted = check_ids(ids, len(self))
        index = self._parts
        first, last = index.first[wanted], index.first[wanted.astype(np.int64) + 1] - 1
        requests = coalesce(
            index.shards[first],
            index.starts[first],
            index.starts[last] + index.sizes[last],
            self._gap,
            self._largest,
        )
        fetched, failures = self._files.fetch(requests.shards, requests.starts, requests.lengths)
        data, offsets = self._lay_out(wanted, index, requests, fetched)
        errors = {
            row: error_of(self.name(sample), failures[request], [sample])
            for row, (sample, request) in enumerate(
                zip(wanted.tolist(), requests.request_of.tolist(), strict=True)
            )
            if request in failures
        }
        return without(errors, data, offsets)

    def _lay_out(
        self, wanted: npt.NDArray[np.uint32], index: ShardIndex, requests: Requests, fetched: Bytes
    ) -> tuple[Bytes, Offsets]:
        """Return the samples one after the other, taken from what the requests brought."""
        offsets = offsets_of(self._sizes.array[wanted])
        data = np.empty(offsets[-1], np.uint8)
        into, source = data.data, fetched.data
        # Where byte 0 of the shard would be in `fetched`.
        origins = (offsets_of(requests.lengths)[:-1] - requests.starts).tolist()
        for row, sample in enumerate(wanted.tolist()):
            at, origin = int(offsets[row]), origins[requests.request_of[row]]
            for part in range(index.first[sample], index.first[sample + 1]):
                size = int(index.sizes[part])
                if self._framed:
                    header = part_header(self._extensions[index.kinds[part]], size)
                    into[at : at + len(header)] = header
                    at += len(header)
                begin = origin + int(index.starts[part])
                into[at : at + size] = source[begin : begin + size]
                at += size
        return data, offsets


class Layout(NamedTuple):
    """What is where in a shard."""

    members: list[Member]
    probes: npt.NDArray[np.int64]
    """``i64[n, 2]``: where headers lie that tell this shard from others, and their CRC-32."""


class _StoredIndex(NamedTuple):
    """An index as it was stored, of shards that may be others by now."""

    layout: ShardIndex
    shards: npt.NDArray[np.uint32]
    """``u32[n]``, the shard of each probe."""
    probes: npt.NDArray[np.int64]
    """``i64[n, 2]``: where to read a header, and its CRC-32."""


def layout_of(members: Sequence[Member], read: Read) -> Layout:
    """Return the layout of a shard of these ``members``, which ``read`` reads."""
    chosen = sorted(
        {len(members) * part // _PROBES for part in range(_PROBES)} | {len(members) - 1}
    )
    starts = [members[i].start - _PROBE for i in chosen if 0 <= i < len(members)]
    probes = [(start, zlib.crc32(read(start, _PROBE))) for start in starts]
    return Layout(list(members), np.array(probes, np.int64).reshape(-1, 2))


def index_to_bytes(
    layouts: Sequence[Layout], name: Callable[[int], str], sizes: Sequence[int]
) -> bytes:
    """Return what to store for shards called ``name(i)``, of ``sizes`` bytes.

    Raises :class:`~stoker.errors.ConfigError` where there are no samples.
    """
    arrays = index_of((layout.members for layout in layouts), name).as_arrays()
    names = "\0".join(name(number) for number in range(len(layouts)))
    arrays["shard_names"] = np.frombuffer(names.encode(), np.uint8)
    arrays["shard_sizes"] = np.array(sizes, np.int64)
    counts = [len(layout.probes) for layout in layouts]
    arrays["probe_shards"] = np.repeat(np.arange(len(layouts), dtype=np.uint32), counts)
    arrays["probes"] = np.concatenate([layout.probes for layout in layouts]).ravel()
    return encode(arrays)


def _index_from_bytes(stored: bytes, names: Sequence[str], sizes: Offsets) -> _StoredIndex:
    """Return the index of shards of these ``names`` and ``sizes`` (``i64[S]``), some or all of it.

    Raises an exception of any kind for bytes that are none, and where it is that of other shards.
    """
    arrays = decode(stored)
    told = arrays.pop("shard_names").tobytes().decode().split("\0")
    place, told_sizes = {name: i for i, name in enumerate(told)}, arrays.pop("shard_sizes")
    chosen = np.array([place.get(name, -1) for name in names], np.int64)
    if (chosen < 0).any() or len(np.unique(chosen)) < len(chosen) or len(told) != len(told_sizes):
        raise SampleCorrupt("it is of other shards")
    if not np.array_equal(told_sizes[chosen], sizes):
        raise SampleCorrupt("it is of shards that were replaced")
    shards, probes = arrays.pop("probe_shards"), arrays.pop("probes").reshape(-1, 2)
    index = ShardIndex.from_arrays(arrays)
    index.check(told_sizes)
    if len(shards) != len(probes) or (shards >= len(told)).any():
        raise SampleCorrupt("its probes are of no shard")
    if (probes[:, 0] < 0).any() or (probes[:, 0] > told_sizes[shards] - _PROBE).any():
        raise SampleCorrupt("its probes are beyond the shards")
    if not np.isin(index.shards, shards).all():
        raise SampleCorrupt("it has shards without a probe")
    now = np.full(len(told), -1, np.int64)
    now[chosen] = np.arange(len(chosen))
    is_wanted = now[shards] >= 0
    which = now[shards[is_wanted]].astype(np.uint32)
    if len(told) > len(chosen) or (np.diff(chosen) < 0).any():
        index = index.of_shards(chosen)
    if len(index.first) < 2:
        raise SampleCorrupt("these shards are empty")
    return _StoredIndex(index, which, probes[is_wanted])
