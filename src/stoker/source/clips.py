"""Clips of long audio and video files: only the packets that they need are read."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import numpy as np
import numpy.typing as npt

from stoker.errors import ConfigError, SampleCorrupt
from stoker.shared import SharedArray
from stoker.source.base import Errors, PackedRead, check_ids
from stoker.source.file_set import FileSet, FileSetSource, Places
from stoker.source.listing import Arrays, kept
from stoker.source.media import ClipFormat, Kind, Track, library, track_of
from stoker.source.pace import Pace
from stoker.source.packed import Offsets, offsets_of, pack

VIDEO = (".mp4", ".m4v", ".mov", ".mkv", ".webm")
AUDIO = (".wav", ".flac", ".mp3", ".ogg", ".opus", ".m4a", ".mka", ".aac")
_log = logging.getLogger(__name__)


class ClipSource(FileSetSource):
    """Clips of one length out of audio or video files, each of which may be hours long.

    A sample is the clip as it is in the file, a few packets; :attr:`decode` makes
    ``u8[length, H, W, 3]`` or ``f32[channels, length]`` of it. So the cache keeps what was read, or
    with ``stage="decoded"`` what it decodes to.

    Where packets lie is found when a file is first seen, and kept with the listings on local disk
    as long as name, size and version of all files are the same. For that MP4 files are read in
    their tables only, others once from beginning to end, and audio is decoded, which alone says
    which samples a packet gives. The index takes about 60 bytes a picture or packet of audio, and 8
    a clip, in shared memory.

    Pictures are those that decoding the file from its start gives, and so are samples of PCM, FLAC
    and MP3; codecs that never forget (Opus, some AAC) get 32 packets before the clip to settle.
    Rotation that a file asks for is not applied. Thread-safe; works in children of every start
    method, also after the parent has read.
    """

    def __init__(
        self,
        files: Places,
        length: int,
        *,
        stride: int = 1,
        hop: int | None = None,
        kind: Kind | None = None,
        size: tuple[int, int] | None = None,
        skip_damaged: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        pace: Pace | None = None,
        cache_index: bool = True,
    ) -> None:
        """Find the packets of all files, or take that from the disk.

        ``files`` are paths, folders or addresses of one bucket or host, with braces and ``*``.
        ``length`` counts pictures, every ``stride``-th of the file, or samples of audio. Clips
        begin at the first and every ``hop`` pictures or samples, by default where the last ended;
        files too short for one give none. ``kind`` is ``"video"`` or ``"audio"``, by default what
        the first file's name says. ``size`` is (height, width), by default that of the file.
        ``skip_damaged`` leaves out files that cannot be used, with one warning in the log.
        ``storage_options`` and ``pace`` are those of :class:`ObjectSource`. ``cache_index=False``
        neither uses nor keeps an index.

        Raises :class:`ConfigError` for numbers below 1, a stride of audio, no clips, files whose
        packets are not in one piece (transport streams), and without PyAV; :class:`SampleCorrupt`
        for damaged files, others than of media, and those without a stream of the kind;
        :class:`SampleNotFound`; :class:`SourceUnavailable`.
        """
        library()
        hop = length * stride if hop is None else hop
        for name, value in (("length", length), ("stride", stride), ("hop", hop)):
            if value < 1:
                raise ConfigError(f"{name}={value}: give 1 or more")
        if size is not None and (len(size) != 2 or min(size) < 1):
            raise ConfigError(f"size={size}: give (height, width) of 1 or more each")
        endings = VIDEO if kind == "video" else VIDEO + AUDIO
        found = FileSet.found(files, endings, storage_options, pace)
        self.kind: Kind = kind or _kind_of(found.name(0))
        """What clips are of."""
        if self.kind not in ("video", "audio"):
            raise ConfigError(f"kind={kind!r}: give 'video' or 'audio'")
        if self.kind == "audio" and (stride > 1 or size):
            raise ConfigError(f"stride={stride}, size={size}: audio has neither")
        self._files, self._span = found, (length, stride)
        self._hop = hop
        self.format = ClipFormat(size)
        """What makes an array of a sample; ``format.decode`` is :attr:`decode`."""
        self._fingerprint = f"{found.keys.fingerprint}-{self.kind}-{self._span}-{self._hop}"
        self._hold(_indexed(found, self.kind, cache_index, skip_damaged))

    def _hold(self, tracks: list[Track | None]) -> None:
        """Keep the index in shared memory; of a file that is left out there is None."""
        there = [track or _NONE for track in tracks]
        self._heads = [track.head(*self._span) for track in there]
        orders = [_order(track, self.kind) for track in there]
        begins = [_entries(track, self.kind) for track in there]
        columns = {
            "starts": [track.starts for track in there],
            "sizes": [track.sizes for track in there],
            "at": [track.at for track in there],
            "counts": [track.counts for track in there],
            "order": orders,
            "begins": begins,
        }
        self._arrays = {
            name: SharedArray.copy_of(np.concatenate(arrays), name)
            for name, arrays in columns.items()
        }
        self._prerolls = [0 if track is None else track.preroll for track in tracks]
        self._packets = offsets_of(np.array([len(track.starts) for track in there]))
        self._shown = offsets_of(np.array([len(order) for order in orders]))
        reach = (self._span[0] - 1) * self._span[1] + 1
        totals = np.array([int(track.counts.sum()) for track in there], np.int64)
        clips = np.maximum((totals - reach) // self._hop + 1, 0)
        self._first = offsets_of(clips)
        if not 0 < self._first[-1] < 1 << 32:
            raise ConfigError(
                f"there are {self._first[-1]} clips of {reach} in {len(tracks)} files, the longest "
                f"of {totals.max()}: a source has 1 to {(1 << 32) - 1}; choose length and hop"
            )
        sizes = [self._sizes_of(file, track) for file, track in enumerate(there) if clips[file]]
        self._sizes = SharedArray.copy_of(np.concatenate(sizes), "sizes")

    def _sizes_of(self, file: int, track: Track) -> Offsets:
        count = int(self._first[file + 1] - self._first[file])
        low, high = self._reach(file, np.arange(count) * self._hop)
        bounds = offsets_of(track.sizes)
        sizes: Offsets = bounds[high] - bounds[low] + 12 * (high - low)
        return sizes + track.head(*self._span).num_bytes

    def _reach(self, file: int, begins: Offsets) -> tuple[Offsets, Offsets]:
        """Return the packets ``[low, high)`` of a file that clips beginning there need."""
        length, stride = self._span
        mine = slice(*self._packets[file : file + 2])
        if self.kind == "audio":
            at = self._arrays["at"].array[mine]
            low = np.searchsorted(at, begins, "right") - 1 - self._prerolls[file]
            return np.maximum(low, 0), np.searchsorted(at, begins + length, "left")
        shown = slice(*self._shown[file : file + 2])
        order = self._arrays["order"].array[shown]
        high = order[begins]
        for number in range(1, length):
            high = np.maximum(high, order[begins + number * stride])
        return self._arrays["begins"].array[shown][begins], high + 1

    @property
    def decode(self) -> Callable[[bytes], npt.NDArray[Any]]:
        """What makes an array of a sample's bytes; see :meth:`ClipFormat.decode`."""
        return self.format.decode

    def place(self, sample_id: int) -> tuple[str, int]:
        """Return the file of a clip, and its first picture or sample in it."""
        file, begin = self._place(sample_id)
        return self._files.name(file), begin

    def _place(self, sample_id: int) -> tuple[int, int]:
        file = int(self._file_of(np.array([sample_id]))[0])
        return file, int(sample_id - self._first[file]) * self._hop

    def name(self, sample_id: int) -> str:
        """Return the file's address and the clip's first picture, like ``s3://b/x.mp4#1600``."""
        return "{}#{}".format(*self.place(sample_id))

    def read_packed(self, ids: npt.ArrayLike) -> PackedRead:
        """Return the clips in one array; see :meth:`Source.read_packed`.

        Packets that lie close together are one request. Raises :class:`ConfigError` also for
        refused credentials, as :class:`KeySource` does.
        """
        self._check_open()
        wanted = check_ids(ids, len(self))
        places = [self._place(sample) for sample in wanted.tolist()]
        ranges = [self._range(file, begin) for file, begin in places]
        rows = np.concatenate([np.arange(low, high) for low, high in ranges] or [_EMPTY])
        lengths = np.array([high - low for low, high in ranges], np.int64)
        which = np.repeat(np.array([file for file, _ in places], np.int64), lengths)
        arrays = {name: shared.array for name, shared in self._arrays.items()}
        sizes = arrays["sizes"][rows]
        data, failures = self._files.fetch_near(which, arrays["starts"][rows], sizes)
        bounds, firsts = offsets_of(sizes), offsets_of(lengths)
        clip_of = np.searchsorted(firsts, np.array(sorted(failures), np.int64), "right") - 1
        errors: Errors = {}
        for clip, packet in zip(clip_of.tolist(), sorted(failures), strict=True):
            file, sample = places[clip][0], int(wanted[clip])
            errors.setdefault(clip, self._files.error(file, failures[packet], [sample]))
        samples = []
        for clip, (file, begin) in enumerate(places):
            if clip in errors:
                samples.append(b"")
                continue
            low, high = ranges[clip]
            at, counts = arrays["at"][low:high], arrays["counts"][low:high]
            # Of the first packets of audio the samples at the end are meant; -1: no picture.
            counts = np.where(at == 0, -counts, counts) if self.kind == "audio" else counts
            table = np.stack([arrays["sizes"][low:high], at - begin, counts], axis=1)
            piece = data[bounds[firsts[clip]] : bounds[firsts[clip + 1]]]
            samples.append(self._heads[file].joined(table, piece))
        return *pack(samples), errors

    def _range(self, file: int, begin: int) -> tuple[int, int]:
        low, high = self._reach(file, np.array([begin]))
        first = int(self._packets[file])
        return first + int(low[0]), first + int(high[0])


_EMPTY = np.empty(0, np.int64)
_NONE = Track(b"{}", b"", _EMPTY, _EMPTY, _EMPTY, _EMPTY, _EMPTY > 0)


def _order(track: Track, kind: Kind) -> Offsets:
    """Return the packet of each picture, i64[T]; none for audio, whose packets are in order."""
    if kind == "audio":
        return _EMPTY
    order = np.empty(int(track.counts.sum()), np.int64)
    shown = np.flatnonzero(track.at >= 0)
    order[track.at[shown]] = shown
    return order


def _entries(track: Track, kind: Kind) -> Offsets:
    """Return the packet with which to begin decoding for each picture, i64[T]."""
    if kind == "audio":
        return _EMPTY
    keys = np.flatnonzero(track.keys)
    shown = np.sort(track.at[keys])
    number = np.searchsorted(shown, np.arange(int(track.counts.sum())), "right") - 1
    entries: Offsets = keys[np.argsort(track.at[keys])][number] if len(keys) else _EMPTY
    return entries


def _kind_of(name: str) -> Kind:
    return "audio" if name.lower().endswith(AUDIO) else "video"


def _indexed(
    files: FileSet, kind: Kind, cache_index: bool, skip_damaged: bool
) -> list[Track | None]:
    """Return the track of each file, from the disk where it is kept; None for one left out."""
    damaged: list[str] = []

    def one(file: int) -> Track | None:
        try:
            return track_of(files, file, kind)
        except (SampleCorrupt, ConfigError) as error:
            if not skip_damaged:
                raise
            damaged.append(str(error))
            return None

    cache = files.index_cache("clips", kind, skip_damaged) if cache_index else None
    tracks = kept(
        cache, lambda arrays: _unpacked(arrays, len(files)), lambda: _packed(files.of_each(one))
    )
    if damaged:
        _log.warning("%d of %d files are left out: %s", len(damaged), len(files), damaged[0])
    return tracks


def _packed(tracks: list[Track | None]) -> Arrays:
    """Return the tracks as arrays that can be kept."""
    there = [track or _NONE for track in tracks]
    arrays: Arrays = {}
    for field in fields(Track):
        each = [getattr(track, field.name) for track in there]
        values = [np.frombuffer(a, np.uint8) if isinstance(a, bytes) else a for a in each]
        arrays[field.name] = np.concatenate(values)
        arrays[f"{field.name} counts"] = np.array([len(a) for a in values], np.int64)
    return arrays


def _unpacked(arrays: Arrays, count: int) -> list[Track | None]:
    columns = []
    for field in fields(Track):
        bounds = np.cumsum(arrays[f"{field.name} counts"])
        if len(bounds) != count:
            raise ValueError(f"{len(bounds)} files where {count} are expected")
        pieces = np.split(arrays[field.name], bounds[:-1])
        as_bytes = field.name in ("about", "extradata")
        columns.append([piece.tobytes() for piece in pieces] if as_bytes else pieces)
    return [Track(*row) if len(row[2]) else None for row in zip(*columns, strict=True)]
