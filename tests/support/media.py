"""Audio and video as people have them, encoded by PyAV."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

av = pytest.importorskip("av", reason="PyAV is not installed: pip install 'stoker[media]'")


def write_video(
    path: Path,
    codec: str = "libx264",
    pictures: int = 60,
    *,
    side: int = 64,
    times: Sequence[int] | None = None,
    noise: bool = False,
    sound: bool = False,
    options: Mapping[str, str] | None = None,
    container: Mapping[str, str] | None = None,
) -> Path:
    """Write a video of 25 pictures a second, ``times`` apart, each other than all others.

    ``noise`` makes it large; with ``sound`` there is a stream of audio between the pictures.
    """
    rng = np.random.default_rng(0)
    base = rng.integers(0, 255, (side, side, 3), np.uint8)
    with av.open(str(path), "w", options=dict(container or {})) as file:
        stream = file.add_stream(codec, rate=25, options=dict(options or {}))
        stream.width = stream.height = side
        stream.pix_fmt = "yuv420p"
        beside = file.add_stream("aac", rate=48000, layout="mono") if sound else None
        for number in range(pictures):
            pixels = base if noise else base // 4
            frame = av.VideoFrame.from_ndarray(np.roll(pixels, 3 * number, 1) + np.uint8(number))
            if times is not None:
                frame.pts, frame.time_base = times[number], Fraction(1, 25)
            file.mux(stream.encode(frame))
            if beside is not None:
                tone = rng.standard_normal((1, 1920)).astype(np.float32) / 10
                file.mux(beside.encode(_sound(tone, "fltp", "mono", 48000, number * 1920)))
        for each in (stream, *filter(None, [beside])):
            file.mux(each.encode())
    return path


def write_audio(
    path: Path,
    codec: str,
    samples: int = 100_000,
    *,
    options: Mapping[str, str] | None = None,
) -> Path:
    """Write two channels of tones that rise, at 48 kHz."""
    at = np.arange(samples) / 48000
    tones = [np.sin(2000 * at * (1 + at)), np.sin(3000 * at)]
    values = (np.stack(tones, 1) * 20000).astype(np.int16).reshape(1, -1)
    with av.open(str(path), "w") as file:
        stream = file.add_stream(codec, rate=48000, layout="stereo", options=dict(options or {}))
        file.mux(stream.encode(_sound(values, "s16", "stereo", 48000, 0)))
        file.mux(stream.encode())
    return path


def _sound(values: Any, form: str, layout: str, rate: int, pts: int) -> Any:
    frame = av.AudioFrame.from_ndarray(values, format=form, layout=layout)
    frame.sample_rate, frame.pts = rate, pts
    return frame


def all_pictures(path: Path) -> Any:
    """Return ``u8[T, H, W, 3]``, what decoding the file from its start gives."""
    with av.open(str(path)) as file:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)])


def all_samples(path: Path) -> Any:
    """Return ``f32[channels, samples]``, what decoding the file from its start gives."""
    with av.open(str(path)) as file:
        resampler = av.AudioResampler(format="fltp")
        frames = [part for frame in file.decode(audio=0) for part in resampler.resample(frame)]
        return np.concatenate([frame.to_ndarray() for frame in frames], 1)
