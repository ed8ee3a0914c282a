"""The examples, programs that know nothing of Stoker: on tiers they read what the files contain."""

from __future__ import annotations

import importlib.util
import re
import struct
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest

from stoker._core import crc32c
from tiering.conftest import age, write_files
from tiering.runs import Done, Setup

EXAMPLES = Path(__file__).parents[2] / "examples"
EPOCH = re.compile(r"epoch (\d+): (\d+) samples, sum (\d+), ")


def epochs(said: str) -> list[tuple[str, ...]]:
    return [match.groups() for match in map(EPOCH.match, said.splitlines()) if match]


def run(
    source: Path, script: str, *options: str, quota: int, each: tuple[int, int], workers: int = 2
) -> Done:
    """Run an example on tiers; it must say in each epoch how many samples there are and their sum.

    First opens wait for copies, so that how much is read does not depend on who is faster.
    """
    program = [sys.executable, EXAMPLES / script, source, f"--workers={workers}", *options]
    tier = source.parent / "tier", quota
    done = Setup(source, (tier,), ("--json", "--small=8MiB")).run(*program)
    assert done.status == 0, done.err
    said = epochs(done.out)
    assert said == [(str(n + 1), *map(str, each)) for n in range(len(said))] and len(said) >= 2
    return done


def sums(written: dict[str, bytes], record: int) -> tuple[int, int]:
    """Return the samples in the files, and the sum of their checksums."""
    each = [
        zlib.crc32(content[at : at + record])
        for content in written.values()
        for at in range(0, len(content), record)
    ]
    return len(each), sum(each)


def tfrecord(records: list[bytes]) -> bytes:
    """A file of these records, with the checksums that TensorFlow looks at."""

    def checked(data: bytes) -> bytes:
        crc = crc32c(data)
        return data + struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)

    return b"".join(checked(struct.pack("<Q", len(each))) + checked(each) for each in records)


# With a fork server too: tests/shim/test_loader.py
@pytest.mark.parametrize(("method", "count"), [("fork", 3), ("spawn", 2)])
def test_pytorch(tmp_path: Path, method: str, count: int) -> None:
    sizes = {f"{i % 3}/{i:03d}.bin": 10_000 + 100 * i for i in range(60)}
    written = write_files(tmp_path / "source", sizes)
    total = sum(sizes.values())
    options = (f"--start-method={method}", f"--epochs={count}")
    # Workers that are not forked import torch anew in each epoch.
    source, workers = tmp_path / "source", 2 if method == "fork" else 1
    done = run(
        source,
        "tiering_pytorch.py",
        *options,
        quota=total // 2,
        each=sums(written, 1 << 20),
        workers=workers,
    )
    assert len(epochs(done.out)) == count
    report = done.report
    placed = report["tiers"][0]
    share = placed["used"] / total
    assert 0.45 < share <= 0.5
    read = report["source"]["bytes"] + report["source"]["copied_bytes"]
    assert read <= 1.05 * (share + count * (1 - share)) * total
    assert report["bytes_avoided"] >= (count - 1) * placed["used"]
    assert report["opens_avoided"] >= (count - 1) * placed["files"]


def test_pytorch_reading_at_random_in_large_files(tmp_path: Path) -> None:
    written = write_files(tmp_path / "source", {f"{i}.bin": 12_000_000 for i in range(4)})
    done = run(
        tmp_path / "source",
        "tiering_pytorch.py",
        "--record=200000",
        quota=24_000_000,
        each=sums(written, 200_000),
    )
    assert done.report["tiers"][0]["files"] == 2
    read = done.report["source"]["bytes"] + done.report["source"]["copied_bytes"]
    # Reads that came before the copies had begun are read twice.
    assert read <= 1.2 * (0.5 + 3 * 0.5) * 48_000_000


@pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None,
    reason="no TensorFlow here: pip install 'stoker[frameworks-tests]'",
)
def test_tensorflow_with_tfrecord(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    sizes = []
    lengths = [np.random.default_rng(shard).integers(5_000, 15_000, 40) for shard in range(6)]
    for shard, each_length in enumerate(lengths):
        path = source / f"{shard}.tfrecord"
        sizes.append(path.write_bytes(tfrecord([b"x" * length for length in each_length])))
        age(path)
    each = 240, int(np.sum(lengths))
    done = run(source, "tiering_tensorflow.py", quota=sum(sorted(sizes)[-3:]), each=each)
    report = done.report
    assert report["tiers"][0]["files"] >= 3
    share = report["tiers"][0]["used"] / sum(sizes)
    read = report["source"]["bytes"] + report["source"]["copied_bytes"]
    assert read <= 1.05 * (share + 3 * (1 - share)) * np.sum(sizes)
