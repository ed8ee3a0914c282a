from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.parts import images, number_of, numbers

from stoker import Cache
from stoker.epoch.stage import make_stage
from stoker.errors import SampleCorrupt
from stoker.pytorch import ImageFolder, Loader, SampleDataset
from stoker.source import MemorySource


def test_keys_tell_stages_and_decoders_apart(image_root: Path) -> None:
    def key(dataset: Any, stage: str) -> tuple[str, bool]:
        made = make_stage(dataset, stage)
        return made.key, made.is_private

    plain, other = images(image_root), ImageFolder(image_root, decode=len)
    assert key(plain, "encoded") == key(other, "encoded") == (plain.source.fingerprint, False)
    assert key(plain, "decoded") == key(images(image_root), "decoded")
    assert key(plain, "decoded") != key(plain, "encoded")
    # Nobody can tell whether two functions decode alike, so these are not shared.
    assert key(other, "decoded") != key(other, "decoded")
    assert key(other, "decoded")[1]


def test_sizes_are_those_of_decoded_samples(image_root: Path) -> None:
    stage = make_stage(images(image_root), "decoded")
    assert stage.source.sizes.shape == (60,)
    assert 8 * 8 * 3 < stage.source.sizes[0] < 8 * 8 * 3 + 40
    samples = stage.source.read([3, 4])
    assert len(samples[0]) == stage.source.sizes[0]
    assert stage.source.name(3).endswith("003.png")


def test_corrupt_samples_are_not_cached() -> None:
    source = MemorySource([b"00000000", b"?" * 8, b"00000002"])
    stage = make_stage(SampleDataset(source, number_of), "decoded")
    samples, errors = stage.source.read_each([0, 1, 2])
    assert samples[1] is None and isinstance(errors[1], SampleCorrupt)
    with pytest.raises(SampleCorrupt, match="sample 1"):
        stage.source.read([0, 1])


def test_bytes_from_source_are_the_encoded_ones(jpeg: Callable[..., bytes]) -> None:
    source = MemorySource([jpeg(64, 64, seed=seed) for seed in range(10)])
    from stoker.images import decode_image

    dataset = SampleDataset(source, decode_image)
    with Loader(dataset, batch_size=5, cache=Cache("100%", stage="decoded")) as loader:
        for _ in range(2):
            for batch in loader:
                assert batch.shape[1:] == (64, 64, 3)
        assert loader.stats.bytes_from_source == source.sizes.sum()
        assert loader.stats.bytes_from_cache >= 10 * 64 * 64 * 3
        assert loader.epoch_stats[1].bytes_from_source == 0


def test_decoding_happens_once() -> None:
    calls = []

    def decode(raw: bytes) -> int:
        calls.append(raw)
        return number_of(raw)

    with Loader(
        SampleDataset(numbers(20), decode), batch_size=4, cache=Cache("100%", stage="decoded")
    ) as loader:
        calls.clear()
        for _ in range(3):
            assert sorted(i for batch in loader for i in batch.tolist()) == list(range(20))
    assert len(calls) == 20
