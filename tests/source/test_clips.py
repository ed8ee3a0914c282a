"""Clips of audio and video are those of the whole file, and need a small part of it."""

from __future__ import annotations

import json
import logging
import os
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.file_server import FileServer
from support.media import all_pictures, all_samples, write_audio, write_video
from support.s3 import Bucket

import stoker
from stoker.errors import ConfigError, SampleCorrupt
from stoker.source import ClipSource, FileSource, open_source, split_parts
from stoker.source.media import Head
from stoker.testing import SourceConformance

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
_B_FRAMES = {"g": "12", "bf": "3", "x264-params": "b-adapt=0"}
_OPEN = {"g": "12", "bf": "3", "x264-params": "b-adapt=0:open-gop=1"}
VIDEO: dict[str, dict[str, Any]] = {
    "b-frames.mp4": {"options": _B_FRAMES},
    "open.mp4": {"options": _OPEN},
    "open.mkv": {"options": _OPEN},
    "fragments.mp4": {"options": _B_FRAMES, "container": {"movflags": "frag_keyframe+empty_moov"}},
    "sound.mkv": {"options": _B_FRAMES, "sound": True},
    "sound.mp4": {"options": _B_FRAMES, "sound": True},
    "variable.mp4": {"times": np.cumsum(1 + np.arange(60) % 5).tolist()},
    "vp9.webm": {"codec": "libvpx-vp9", "options": {"g": "20", "deadline": "realtime"}},
    "mpeg4.mov": {"codec": "mpeg4", "options": {"g": "15", "bf": "2"}},
}
_WAV = json.dumps(
    {"kind": "audio", "codec": "pcm_u8", "rate": 8000, "layout": "1 channels"}
    | {"length": 40, "stride": 1},
    separators=(",", ":"),
)


def write_wav(path: Path, data: bytes) -> Path:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(1)
        file.setframerate(8000)
        file.writeframes(data)
    return path


@pytest.mark.exact("Audio and video", "a source, of local files")
class TestClips(SourceConformance):
    """A clip of each file, whose bytes are the packets and what a decoder must know."""

    SAMPLES = tuple(
        Head(_WAV.encode(), b"").joined(np.array([[40, 0, -40]]), np.full(40, i, np.uint8))
        for i in range(40)
    )

    def make(self, samples: list[bytes], tmp_path: Path) -> ClipSource:
        for number, sample in enumerate(samples):
            data = bytes(40) if sample == b"other" else bytes(split_parts(sample)["data"])
            write_wav(tmp_path / f"{number:03}.wav", data)
        return ClipSource(tmp_path, 40)


@pytest.mark.exact("Audio and video", "pictures of each clip as decoding from the start gives them")
@pytest.mark.parametrize("name", VIDEO)
def test_pictures_are_those_of_the_whole_file(tmp_path: Path, name: str) -> None:
    path = write_video(tmp_path / name, **VIDEO[name])
    whole = all_pictures(path)
    assert len(whole) == 60
    source = open_source(path, length=4, stride=3, hop=5)
    assert isinstance(source, ClipSource) and len(source) == (60 - 10) // 5 + 1
    order = np.random.default_rng(1).permutation(len(source))
    for clip, sample in zip(order.tolist(), source.read(order), strict=True):
        assert source.place(clip) == (str(path), 5 * clip) and len(sample) == source.sizes[clip]
        pictures = source.decode(sample)
        assert pictures.dtype == np.uint8
        assert np.array_equal(pictures, whole[5 * clip : 5 * clip + 10 : 3]), clip


# How far samples may differ: codecs that never forget what was before are not exact.
@pytest.mark.exact("Audio and video", "samples of PCM, FLAC and MP3 too, of Opus to 1e-5")
@pytest.mark.parametrize(
    ("name", "codec", "tolerance"),
    [
        ("x.wav", "pcm_s16le", 0),
        ("x.flac", "flac", 0),
        ("x.mp3", "libmp3lame", 0),
        ("x.m4a", "aac", 0),
        ("x.opus", "libopus", 1e-5),
        ("x.mka", "libopus", 1e-5),
    ],
)
def test_samples_are_those_of_the_whole_file(
    tmp_path: Path, name: str, codec: str, tolerance: float
) -> None:
    options = {"aac_pns": "0"} if codec == "aac" else {}  # else it has the decoder make up noise
    path = write_audio(tmp_path / name, codec, options=options)
    whole = all_samples(path)
    source = ClipSource(path, 5000, hop=3000)
    assert source.kind == "audio" and len(source) == (whole.shape[1] - 5000) // 3000 + 1
    for clip, sample in enumerate(source.read(range(len(source)))):
        sound = source.decode(sample)
        assert sound.dtype == np.float32 and sound.shape == (2, 5000)
        assert np.abs(sound - whole[:, 3000 * clip : 3000 * clip + 5000]).max() <= tolerance, clip


def test_pictures_are_resized_as_they_are_decoded(tmp_path: Path) -> None:
    path = write_video(tmp_path / "x.mp4")
    source = ClipSource(path, 3, size=(20, 30))
    assert source.decode(source.read([2])[0]).shape == (3, 20, 30, 3)
    assert source.fingerprint == ClipSource(path, 3).fingerprint  # the same is read


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a video of 12 MB and 10 s, with audio, in two containers."""
    folder = tmp_path_factory.mktemp("long")
    options = {"g": "10", "bf": "3", "preset": "ultrafast", "crf": "5"}
    for name in ("x.mp4", "x.mkv"):
        write_video(folder / name, pictures=250, side=224, noise=True, sound=True, options=options)
    return folder


@pytest.mark.exact("Audio and video", "over HTTP, a clip reads its packets only")
@pytest.mark.parametrize("name", ["x.mp4", "x.mkv"])
def test_a_clip_reads_a_small_part_of_the_file(long: Path, name: str) -> None:
    path = long / name
    whole, size = all_pictures(path), path.stat().st_size
    assert size > 8 << 20
    with FileServer(long) as server:
        source = ClipSource(f"{server.url}/{name}", 8, storage_options={"allow_http": True})
        if name == "x.mp4":  # its table says where packets are
            assert server.bytes < size / 2
        before = server.bytes
        sample = source.read([15])[0]
        # Packets from the key frame before, and what lies between those.
        assert server.bytes - before < 1.1 * len(sample) < size / 10
        assert np.array_equal(source.decode(sample), whole[120:128])
        source.close()


def test_the_table_of_mp4_says_what_reading_all_says(long: Path) -> None:
    path = long / "x.mp4"
    by_table = ClipSource(path, 8, hop=1)
    whole = all_pictures(path)
    for clip in (0, 77, 242):
        (sample,) = by_table.read([clip])
        assert np.array_equal(by_table.decode(sample), whole[clip : clip + 8])
    assert by_table.sizes.max() < path.stat().st_size / 10  # no key frame is missed


@pytest.mark.exact("Audio and video", "in S3")
def test_clips_in_s3(tmp_path: Path, bucket: Bucket) -> None:
    path = write_video(tmp_path / "x.mp4")
    bucket.put({"videos/x.mp4": path.read_bytes()})
    address = f"s3://{bucket.name}/videos/*.mp4"
    source = open_source(address, length=6, storage_options=bucket.options())
    whole = all_pictures(path)
    for clip, sample in enumerate(source.read(range(len(source)))):
        assert np.array_equal(source.decode(sample), whole[6 * clip : 6 * clip + 6])


def test_the_index_is_kept_until_a_file_changes(tmp_path: Path) -> None:
    path = write_video(tmp_path / "x.mkv")
    first = ClipSource(tmp_path, 4)
    again = ClipSource(tmp_path, 4)
    assert first.tally.requests > 0 and again.tally.requests == 0
    assert again.read(range(15)) == first.read(range(15))
    write_video(path, pictures=30)
    assert len(ClipSource(tmp_path, 4)) == 7
    _, errors = first.read_each([3])
    assert isinstance(errors[0], SampleCorrupt) and errors[0].ids == [3]


def _damaged(folder: Path) -> dict[str, str]:
    """Write files that cannot be used; return what errors say of them."""
    video = write_video(folder / "good.mp4").read_bytes()
    fast = write_video(folder / "fast.mp4", container={"movflags": "faststart"})
    fast.write_bytes(fast.read_bytes()[:-3000])
    write_audio(folder / "sound.mp4", "aac")
    for name, data in {
        "cut.mp4": video[:4000],
        "text.mp4": b"no video at all" * 100,
        "empty.mp4": b"",
        "list.mp4": b"#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\n" + b"/etc/passwd\n",
    }.items():
        (folder / name).write_bytes(data)
    return {
        "fast.mp4": "cut off",
        "sound.mp4": "has no video stream",
        "cut.mp4": "no media file",
        "text.mp4": "no media file",
        "empty.mp4": "no media file",
        "list.mp4": "no media file",
    }


def test_files_that_cannot_be_used_are_named_or_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name, why in _damaged(tmp_path).items():
        with pytest.raises(SampleCorrupt, match=rf"{name}.*{why}"):
            ClipSource(tmp_path / name, 4)
    with pytest.raises(SampleCorrupt):
        ClipSource(tmp_path, 4, kind="video")
    for _ in range(2):  # from the kept index too
        with caplog.at_level(logging.WARNING):
            source = ClipSource(tmp_path, 4, kind="video", skip_damaged=True)
        assert {source.place(clip)[0] for clip in range(len(source))} == {
            str(tmp_path / "good.mp4")
        }
    assert "6 of 7 files are left out" in caplog.text


def test_transport_streams_are_not_supported(tmp_path: Path) -> None:
    path = write_video(tmp_path / "x.ts", noise=True)
    with pytest.raises(ConfigError, match=r"x\.ts.*ffmpeg -i it -c copy"):
        ClipSource(path, 4)


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    path = write_video(tmp_path / "x.mp4")
    sound = write_audio(tmp_path / "x.wav", "pcm_s16le")
    for where, length, how, why in (
        (path, 0, {}, "length=0"),
        (path, 4, {"stride": 0}, "stride=0"),
        (path, 4, {"hop": 0}, "hop=0"),
        (path, 4, {"size": (0, 4)}, "size="),
        (path, 4, {"kind": "smell"}, "kind='smell'"),
        (path, 61, {}, "the longest of 60"),
        (sound, 4, {"stride": 2}, "audio has neither"),
    ):
        with pytest.raises(ConfigError, match=why):
            ClipSource(where, length, **how)
    assert isinstance(open_source(sound), FileSource)  # whole, where no length is given


def test_damaged_pictures_are_errors_that_on_error_takes(tmp_path: Path) -> None:
    path = write_video(tmp_path / "x.mkv", pictures=40, options={"g": "4", "bf": "0"}, noise=True)
    source = ClipSource(path, 4, cache_index=False)
    (sample,) = source.read([5])
    at = path.read_bytes().index(bytes(split_parts(sample)["data"])[:200])
    times = path.stat()
    with path.open("r+b") as file:
        file.seek(at + 200)
        file.write(np.random.default_rng(0).bytes(400))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(SampleCorrupt):
        source.decode(source.read([5])[0])
    feed = stoker.Feed(source, 2, decode=source.decode, on_error="skip", decode_threads=2)
    served = [clip for batch in feed for clip in batch.ids.tolist()]
    assert set(served) == {0, 1, 2, 3, 4, 6, 7, 8, 9} and len(served) == 10
    assert [failure.id for failure in feed.quarantine] == [5]
    feed.close()


@pytest.mark.exact("Audio and video", "the cache keeps packets, or decoded clips")
@pytest.mark.parametrize("stage", ["encoded", "decoded"])
def test_the_cache_keeps_packets_or_decoded_clips(tmp_path: Path, stage: str) -> None:
    path = write_video(tmp_path / "x.mp4")
    whole = all_pictures(path)
    source = ClipSource(path, 4, hop=4)
    cache = stoker.Cache("100%", stage=stage)
    with stoker.Feed(source, 5, decode=source.decode, cache=cache, decode_threads=2) as feed:
        for _ in range(2):
            seen = []
            for batch in feed:
                for clip, pictures in zip(batch.ids.tolist(), batch.data, strict=True):
                    assert np.array_equal(pictures, whole[4 * clip : 4 * clip + 4])
                    seen.append(clip)
            assert sorted(seen) == list(range(15))
        assert feed.stats.hits == 15


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_of_a_loader_decode_clips(tmp_path: Path, start: str) -> None:
    path = write_video(tmp_path / "x.mp4")
    whole = all_pictures(path)
    source = ClipSource(path, 4)
    source.decode(source.read([0])[0])  # the library was used before
    dataset = stoker.SampleDataset(source, decode=source.decode)
    loader = stoker.Loader(
        dataset, batch_size=5, num_workers=2, cache="50%", multiprocessing_context=start
    )
    seen = 0
    for batch in loader:
        for pictures in batch[0] if isinstance(batch, list | tuple) else batch:
            assert (whole.reshape(15, 4, 64, 64, 3) == np.asarray(pictures)).all((1, 2, 3, 4)).any()
            seen += 1
    assert seen == 15


def test_bytes_that_are_no_clip_are_corrupt(tmp_path: Path) -> None:
    source = ClipSource(write_video(tmp_path / "x.mp4", pictures=8), 4)
    (sample,) = source.read([0])
    for data in (b"", sample[:-1], sample[:40], sample + b"x"):
        with pytest.raises(SampleCorrupt):
            source.decode(data)
