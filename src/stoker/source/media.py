"""What PyAV says of audio and video: where packets lie in a file, and what they decode to."""

from __future__ import annotations

import io
import json
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from stoker.errors import ConfigError, SampleCorrupt, SourceError
from stoker.source.file_set import FileSet
from stoker.source.packed import HEADER, Buffer, Bytes, Offsets, join_parts, offsets_of, split_parts

Kind = Literal["video", "audio"]
# Playlists would have the library open other files.
_FORMATS = "mov,mp4,m4a,matroska,webm,mpegts,wav,w64,aiff,flac,mp3,ogg,aac,au,caf"
_WINDOW, _WINDOWS = 1 << 20, 8
_NEAR = 128 << 10  # bytes after the place that a container names, within which a packet begins
_PREROLL = 32  # packets that a lossy audio codec is given before those wanted, to settle
_PARTS = ("about", "extradata", "packets", "data")


def library() -> Any:
    """Return PyAV; raises :class:`ConfigError` without it."""
    try:
        import av
    except ImportError as error:
        raise ConfigError("PyAV is not installed: run pip install 'stoker[media]'") from error
    return av


def _version() -> int:
    return int(library().__version__.partition(".")[0])


def _alone() -> dict[str, int]:
    """Return what has a picture converted without threads, which a fork would wait for forever."""
    return {"threads": 1} if _version() >= 18 else {}  # earlier ones start none


@dataclass(frozen=True, eq=False)
class Track:
    """A stream of a file: ``P`` packets in the order in which they are decoded."""

    about: bytes
    """What a decoder must know, in JSON; see :func:`decoded`."""
    extradata: bytes
    """The codec's own head."""
    starts: Offsets
    """Where each packet begins in the file, i64[P]."""
    sizes: Offsets
    """Its bytes, i64[P]."""
    at: Offsets
    """The first picture or sample that it gives, i64[P]; -1 if it gives none."""
    counts: Offsets
    """How many it gives, i64[P]."""
    keys: npt.NDArray[np.bool_]
    """Whether decoding can begin there, bool[P]."""

    def head(self, length: int, stride: int) -> Head:
        """Return what clips of so many pictures or samples begin with."""
        about = {**json.loads(self.about), "length": length, "stride": stride}
        return Head(_packed(about), self.extradata)

    @property
    def preroll(self) -> int:
        """Packets of audio to decode before those wanted."""
        codec = str(json.loads(self.about)["codec"])
        return 0 if codec.startswith("pcm_") or codec == "flac" else _PREROLL


class _Ranged(io.RawIOBase):
    """A file as an object, read in windows; ranges that are said not to matter are zeros."""

    def __init__(self, files: FileSet, file: int) -> None:
        super().__init__()
        self._files, self._file, self._size = files, file, files.size(file)
        self._at = 0
        self._kept: OrderedDict[int, memoryview] = OrderedDict()
        self._blank: list[tuple[int, int]] = []

    def blank(self, begin: int, end: int) -> None:
        """Give zeros for windows that lie in this range as a whole, without reading them."""
        self._blank.append((begin, end))

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        size = self._size if size < 0 else size
        found = self.piece(self._at, size)
        self._at += len(found)
        return found

    def piece(self, begin: int, size: int) -> bytes:
        """Return these bytes, fewer at the end of the file."""
        end = min(begin + size, self._size)
        pieces = []
        while begin < end:
            number = begin // _WINDOW
            first = number * _WINDOW
            piece = self._window(number)[begin - first : end - first]
            pieces.append(piece)
            begin += len(piece)
        return b"".join(pieces)

    def _window(self, number: int) -> memoryview:
        if number in self._kept:
            self._kept.move_to_end(number)
            return self._kept[number]
        begin = number * _WINDOW
        end = min(begin + _WINDOW, self._size)
        if any(first <= begin and end <= last for first, last in self._blank):
            window = memoryview(bytes(end - begin))
        else:
            window = self._files.read(self._file, begin, end - begin)
        self._kept[number] = window
        if len(self._kept) > _WINDOWS:
            self._kept.popitem(last=False)
        return window


def track_of(files: FileSet, file: int, kind: Kind) -> Track:
    """Return where the first stream of this kind lies in a file; reads it, but not all of MP4.

    Audio is decoded, which alone says how many samples each packet gives. Raises
    :class:`SampleCorrupt` for files that are damaged, none of media, or without such a stream;
    :class:`ConfigError` for those whose packets are not in one piece, and without PyAV; what
    reading raises.
    """
    av, name = library(), files.name(file)
    raw = _Ranged(files, file)
    try:
        options: dict[str, Any] = {"container_options": {"format_whitelist": _FORMATS}}
        if _version() < 19:  # later ones take what is no UTF-8 anyway
            options["metadata_errors"] = "ignore"
        with av.open(raw, "r", **options) as container:
            streams = getattr(container.streams, kind)
            if not streams:
                raise SampleCorrupt(f"{name} has no {kind} stream")
            return _track(raw, container, streams[0], kind, name)
    except (av.FFmpegError, ValueError, OverflowError, EOFError) as error:
        if isinstance(error, ConfigError):
            raise
        raise SampleCorrupt(f"{name} is damaged, or no media file: {error}") from error


def _track(raw: _Ranged, container: Any, stream: Any, kind: Kind, name: str) -> Track:
    about = _about(stream, kind)
    decoder = _decoder(about, stream.codec_context.extradata or b"") if kind == "audio" else None
    table = _table(raw, container, stream) if decoder is None else {}
    rows, counts, end = [], [], 0
    for packet in container.demux(stream):
        if decoder is not None:
            counts.append(sum(frame.samples for frame in decoder.decode(packet or None)))
        if not packet.size:
            continue
        if packet.is_corrupt:
            raise SampleCorrupt(f"{name} is cut off, or damaged at byte {packet.pos}")
        is_key = table.get((packet.pos, packet.size))
        if is_key is None:
            start, is_key = _place(raw, packet, end, name), packet.is_keyframe
        else:
            start = packet.pos
        end = start + packet.size
        # A packet of audio with no time is as good as any; samples are counted.
        pts = packet.pts if packet.pts is not None or kind == "video" else 0
        if pts is None:
            raise ConfigError(f"{name}: its pictures have no times: ffmpeg -i it x.mp4 makes them")
        rows.append((start, packet.size, pts, is_key, packet.is_discard))
    if not rows:
        raise SampleCorrupt(f"{name} has no {kind} in it")
    starts, sizes, times, keys, left_out = np.array(rows, np.int64).T.copy()
    if kind == "audio":
        if any(counts[len(rows) :]):
            raise ConfigError(f"{name}: codec {about['codec']} gives samples late, unlike others")
        given = np.array(counts[: len(rows)], np.int64)
        at, begins = np.cumsum(given) - given, np.ones(len(rows), np.bool_)
    else:
        at, given, begins = _pictures(times, keys > 0, left_out > 0, name)
    extradata = bytes(stream.codec_context.extradata or b"")
    return Track(_packed(about), extradata, starts, sizes, at, given, begins)


def _pictures(
    times: Offsets, keys: npt.NDArray[np.bool_], left_out: npt.NDArray[np.bool_], name: str
) -> tuple[Offsets, Offsets, npt.NDArray[np.bool_]]:
    """Return number and count of the picture of each packet, and whether it is a key frame."""
    if not keys.any():
        raise SampleCorrupt(f"{name} has no key frame, so nothing of it can be decoded")
    shown = np.flatnonzero(~left_out & (times >= times[np.argmax(keys)]))
    if len(np.unique(times[shown])) < len(shown):
        raise SampleCorrupt(f"{name} has several pictures at one time")
    at = np.full(len(times), -1, np.int64)
    at[shown[np.argsort(times[shown])]] = np.arange(len(shown))
    return at, (at >= 0).astype(np.int64), keys & (at >= 0)


def _table(raw: _Ranged, container: Any, stream: Any) -> dict[tuple[int, int], bool]:
    """Return which packets, by place and bytes, are key frames if the file has a table of all.

    Their bytes are not read then.
    """
    if "mov" not in container.format.name:
        return {}
    every = [
        (entry.pos, entry.pos + entry.size)
        for other in container.streams
        for entry in other.index_entries
    ]
    begin = end = 0
    for first, last in sorted(every):
        if first > end + HEADER.size:
            raw.blank(begin, end)
            begin = first
        end = max(end, last)
    raw.blank(begin, end)
    return {(entry.pos, entry.size): entry.is_keyframe for entry in stream.index_entries}


def _place(raw: _Ranged, packet: Any, end: int, name: str) -> int:
    """Return where the packet's bytes lie: near the place that the container names."""
    if packet.pos is not None and packet.pos >= 0:
        data = bytes(packet)
        for begin in {packet.pos, max(packet.pos, end)}:  # several may lie in one page
            found = raw.piece(begin, len(data) + 64).find(data)
            if found < 0:
                found = raw.piece(begin, len(data) + _NEAR).find(data)
            if found >= 0:
                return int(begin + found)
    raise ConfigError(
        f"{name}: its packets are not in one piece, as in transport streams, so that clips cannot "
        "be read alone: ffmpeg -i it -c copy x.mkv puts them into a container where they are"
    )


def _about(stream: Any, kind: Kind) -> dict[str, Any]:
    context = stream.codec_context
    about = {"kind": kind, "codec": context.name}
    if kind == "audio":
        return {**about, "rate": context.sample_rate, "layout": context.layout.name}
    colors = [
        int(getattr(context, name))
        for name in ("color_range", "color_primaries", "color_trc", "colorspace")
    ]
    return {**about, "width": context.width, "height": context.height, "colors": colors}


def _packed(about: dict[str, Any]) -> bytes:
    return json.dumps(about, separators=(",", ":")).encode()


def _decoder(about: dict[str, Any], extradata: bytes, *, is_whole: bool = True) -> Any:
    """Return a decoder that no one else uses; ``is_whole`` if nothing that it refers to is missing.

    Damage is an error then, and no picture in which it is painted over.
    """
    context = library().CodecContext.create(about["codec"], "r")
    context.thread_count = 1  # the loader has threads and processes enough
    options = {"err_detect": "crccheck+bitstream+buffer+explode"} if is_whole else {}
    if about["codec"] == "h264":
        # Streams that do not say how far pictures are reordered: wait for as many as may be.
        options["strict"] = "1"
    context.options = options
    if extradata:
        context.extradata = extradata
    if about["kind"] == "audio":
        context.sample_rate, context.layout = about["rate"], about["layout"]
        return context
    context.width, context.height = about["width"], about["height"]
    names = ("color_range", "color_primaries", "color_trc", "colorspace")
    for name, value in zip(names, about["colors"], strict=True):
        setattr(context, name, value)
    return context


@dataclass(frozen=True)
class Head:
    """What the clips of a stream have in common."""

    about: bytes
    """What a decoder must know, and the clips' length and stride, in JSON."""
    extradata: bytes
    """The codec's own head."""

    @property
    def num_bytes(self) -> int:
        """Bytes of a sample beside its packets and 12 for each of them."""
        names = sum(HEADER.size + len(name) for name in _PARTS)
        return names + len(self.about) + len(self.extradata)

    def joined(self, packets: npt.NDArray[Any], data: Bytes) -> bytes:
        """Return a sample: ``packets`` are (bytes, first picture or sample, count) ``[n, 3]``.

        Pictures and samples are counted from the clip's first; of a packet with a negative count,
        those at its end are meant.
        """
        values = (self.about, self.extradata, packets.astype("<i4").tobytes(), data.data)
        return join_parts(dict(zip(_PARTS, values, strict=True)))


@dataclass(frozen=True)
class ClipFormat:
    """What the bytes of a clip decode to. Immutable, pickles; any thread."""

    size: tuple[int, int] | None = None
    """(height, width) to which pictures are resized; None: as they are."""

    def decode(self, data: Buffer) -> npt.NDArray[Any]:
        """Return ``u8[T, H, W, 3]`` (RGB), or ``f32[channels, samples]`` from -1 to 1.

        Raises :class:`SampleCorrupt` for bytes that are no clip, and where a codec fails or gives
        pictures that it calls damaged; :class:`ConfigError` without PyAV.
        """
        library()
        try:
            parts = split_parts(data)
            about = json.loads(bytes(parts["about"]))
            table = np.frombuffer(parts["packets"], "<i4").reshape(-1, 3).astype(np.int64)
            is_video = about["kind"] == "video"
            # Pictures that come after a key frame and are shown before it refer to what is not
            # here; so does audio that only lets the codec settle.
            at, counts = table[:, 1], table[:, 2]
            is_spare = at < at[0] if is_video else at + np.abs(counts) <= 0
            is_whole = not (is_video and is_spare.any())
            decoder = _decoder(about, bytes(parts["extradata"]), is_whole=is_whole)
            frames = _frames(decoder, table, is_spare, parts["data"])
            if not is_video:
                return _sound(frames, int(about["length"]))
            return self._pictures(frames, int(about["length"]), int(about["stride"]))
        except SourceError:
            raise
        except Exception as error:  # PyAV raises what it likes
            raise SampleCorrupt(f"{len(data)} bytes decode to no clip: {error}") from error

    def _pictures(
        self, frames: Iterator[tuple[list[Any], int, int]], length: int, stride: int
    ) -> npt.NDArray[np.uint8]:
        found: dict[int, npt.NDArray[np.uint8]] = {}
        height, width = self.size or (None, None)
        alone = _alone()
        for frame in (frame for given, _, _ in frames for frame in given):
            at = frame.pts
            if at is None or at < 0 or at % stride or at >= length * stride:
                continue
            if frame.is_corrupt:
                raise SampleCorrupt(f"picture {at} of the clip is damaged")
            plain = frame.reformat(width=width, height=height, format="rgb24", **alone)
            found[at // stride] = plain.to_ndarray()
        if len(found) < length:
            raise SampleCorrupt(f"the clip has {len(found)} pictures where {length} are expected")
        return np.stack([found[number] for number in range(length)])


def _frames(
    decoder: Any,
    table: npt.NDArray[np.int64],
    is_spare: npt.NDArray[np.bool_],
    data: memoryview,
) -> Iterator[tuple[list[Any], int, int]]:
    """Yield the frames that come of each packet, with its row of the table; at last the rest.

    Spare packets may fail.
    """
    av = library()
    sizes, begins, counts = table.T
    if (sizes <= 0).any() or sizes.sum() != len(data):
        raise SampleCorrupt("the packets are not as long as their table says")
    bounds = pairwise(offsets_of(sizes).tolist())
    for row, (begin, end) in enumerate(bounds):
        at, count = int(begins[row]), int(counts[row])
        packet = av.Packet(end - begin)  # with the zeros after it that decoders rely on
        packet.update(data[begin:end])
        packet.pts = packet.dts = at
        try:
            yield decoder.decode(packet), at, count
        except av.FFmpegError:
            if not is_spare[row]:
                raise
    yield decoder.decode(None), 0, 0


def _sound(frames: Iterator[tuple[list[Any], int, int]], length: int) -> npt.NDArray[np.float32]:
    """Return the samples of the clip: each packet gives so many, of which ends may be cut."""
    pieces, filled = [np.empty((0, 0), np.float32)], 0
    for given, at, count in frames:
        if not given or not count:
            continue
        sound = np.concatenate([_floats(frame) for frame in given], axis=1)
        # What a codec needs to settle is before the first sample of a file.
        sound = sound[:, count:] if count < 0 else sound[:, :count]
        sound = sound[:, max(-at, 0) : max(length - at, 0)]
        if sound.shape[1] and at <= filled:
            pieces.append(sound)
            filled += sound.shape[1]
    if filled != length:
        raise SampleCorrupt(f"the clip has {filled} samples where {length} are expected")
    return np.concatenate(pieces[1:], axis=1)


def _floats(frame: Any) -> npt.NDArray[np.float32]:
    """Return ``f32[channels, samples]`` from -1 to 1."""
    values: npt.NDArray[Any] = frame.to_ndarray()
    if not frame.format.is_planar:
        values = values.reshape(-1, frame.layout.nb_channels).T
    if values.dtype.kind == "u":
        return (values.astype(np.float32) - np.float32(128)) / np.float32(128)
    if values.dtype.kind == "i":
        return (values * 2.0 ** (1 - 8 * values.itemsize)).astype(np.float32)
    return values.astype(np.float32)
