"""Samples by index through a cache, for loaders that choose the order themselves."""

from __future__ import annotations

import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.images import NUM_IMAGES, write_images
from support.parts import number_of, numbers

from stoker import Cache
from stoker.errors import ConfigError, SampleCorrupt, SegmentError
from stoker.feed import with_cache
from stoker.source.base import BaseSource


def test_samples_come_by_index_and_from_the_cache_the_second_time() -> None:
    with with_cache(numbers(100), "100%", decode=number_of) as sequence:
        for _ in range(2):
            assert [sequence[i] for i in range(len(sequence))] == list(range(100))
        assert sequence[np.int64(3)] == 3 and sequence[-1] == 99
        counts = sequence.store.stats()
        assert counts["fetched"] == 100 and counts["hits"] == 102


def test_targets_and_several_at_once() -> None:
    targets = np.arange(30) * 7
    with with_cache(numbers(30), decode=number_of, targets=targets) as sequence:
        assert sequence._getitems([4, np.uint8(2)]) == [(4, 28), (2, 14)]
        assert [target for _, target in sequence] == targets.tolist()


@pytest.mark.parametrize("index", [100, -101])
def test_an_index_out_of_range(index: int) -> None:
    with with_cache(numbers(100)) as sequence, pytest.raises(IndexError, match=f"index {index}"):
        sequence[index]


def test_threads_share_it() -> None:
    with with_cache(numbers(100), decode=number_of) as sequence, ThreadPoolExecutor(8) as threads:
        for _ in range(3):
            assert list(threads.map(sequence.__getitem__, range(100))) == list(range(100))


def test_what_cannot_be_decoded_is_raised() -> None:
    def fail(raw: bytes) -> Any:
        raise ValueError("no number")

    with (
        with_cache(numbers(10), decode=fail) as sequence,
        pytest.raises(SampleCorrupt, match="no number"),
    ):
        sequence[3]


def test_of_a_path_it_may_be_pickled_for_any_process_which_shares_the_cache(tmp_path: Path) -> None:
    root = write_images(tmp_path / "images")
    script = """
import pickle, sys
sequence = pickle.loads(sys.stdin.buffer.read())
assert "torch" not in sys.modules
image, label = sequence[7]
print(image[0, 0, 0], label, len(sequence), sequence.store.stats()["hits"])
"""
    with with_cache(root, "100%") as sequence:
        for index in range(NUM_IMAGES):
            assert sequence[index][0][0, 0, 0] == index
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", script],
            input=pickle.dumps(sequence),
            capture_output=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.split() == [b"7", b"0", str(NUM_IMAGES).encode(), b"1"]


def test_of_a_source_it_may_not() -> None:
    with with_cache(numbers(10)) as sequence, pytest.raises(TypeError, match="can be pickled only"):
        pickle.dumps(sequence)


def test_it_is_closed_once_and_says_so() -> None:
    sequence = with_cache(numbers(10))
    sequence.close()
    sequence.close()
    with pytest.raises(SegmentError):
        sequence[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recipe": "belady"}, "'belady' needs a plan"),
        ({"cache": Cache("20%", prefetch="1MiB")}, "prefetch='1MiB' needs"),
        ({"cache": "8 parsecs"}, "parsecs"),
        ({"targets": [1, 2]}, "targets of shape"),
    ],
)
def test_bad_arguments_are_refused_at_construction(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        with_cache(numbers(10), **options)


def test_no_samples_are_refused() -> None:
    class Empty(BaseSource):
        sizes = np.empty(0, np.int64)
        fingerprint = "empty"

        def __len__(self) -> int:
            return 0

        def read(self, ids: Any) -> list[bytes]:
            return []

    with pytest.raises(ConfigError, match="0 samples"):
        with_cache(Empty())
