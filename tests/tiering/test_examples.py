"""The examples, programs that know nothing of Stoker: the same with it and without it."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from tiering.conftest import age, write_files
from tiering.runs import Done, Setup, direct

EXAMPLES = Path(__file__).parents[2] / "examples"
EPOCH = re.compile(r"epoch (\d+): (\d+) samples, sum (\d+), ")


def epochs(said: str) -> list[tuple[str, ...]]:
    return [match.groups() for match in map(EPOCH.match, said.splitlines()) if match]


def compare(
    source: Path,
    script: str,
    *options: str,
    quota: int,
    workers: int = 2,
    plain: tuple[str, ...] | None = None,
) -> Done:
    """Run an example with and without tiers: it must say the same.

    First opens wait for copies, so that how much is read does not depend on who is faster.
    ``plain``: other options that without tiers come to the same.
    """
    program = [sys.executable, EXAMPLES / script, source]
    expected = epochs(direct(*program, *(plain or (f"--workers={workers}", *options))))
    assert expected
    program += [f"--workers={workers}", *options]
    tier = source.parent / "tier", quota
    done = Setup(source, (tier,), ("--json", "--small=8MiB")).run(*program)
    assert done.status == 0, done.err
    assert epochs(done.out) == expected
    return done


@pytest.mark.parametrize(("method", "count"), [("fork", 3), ("spawn", 2), ("forkserver", 2)])
def test_pytorch(tmp_path: Path, method: str, count: int) -> None:
    sizes = {f"{i % 3}/{i:03d}.bin": 10_000 + 100 * i for i in range(60)}
    write_files(tmp_path / "source", sizes)
    total = sum(sizes.values())
    options = (f"--start-method={method}", f"--epochs={count}")
    # Workers that are not forked import torch anew in each epoch.
    source, workers = tmp_path / "source", 2 if method == "fork" else 1
    plain = ("--workers=1", "--start-method=fork", f"--epochs={count}")
    done = compare(
        source, "tiering_pytorch.py", *options, quota=total // 2, workers=workers, plain=plain
    )
    report = done.report
    placed = report["tiers"][0]
    share = placed["used"] / total
    assert 0.45 < share <= 0.5
    read = report["source"]["bytes"] + report["source"]["copied_bytes"]
    assert read <= 1.05 * (share + count * (1 - share)) * total
    assert report["bytes_avoided"] >= (count - 1) * placed["used"]
    assert report["opens_avoided"] >= (count - 1) * placed["files"]


def test_pytorch_reading_at_random_in_large_files(tmp_path: Path) -> None:
    write_files(tmp_path / "source", {f"{i}.bin": 12_000_000 for i in range(4)})
    done = compare(tmp_path / "source", "tiering_pytorch.py", "--record=200000", quota=24_000_000)
    assert done.report["tiers"][0]["files"] == 2
    read = done.report["source"]["bytes"] + done.report["source"]["copied_bytes"]
    # Reads that came before the copies had begun are read twice.
    assert read <= 1.2 * (0.5 + 3 * 0.5) * 48_000_000


@pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None,
    reason="no TensorFlow here: pip install 'stoker[tiering-tests]'",
)
def test_tensorflow_with_tfrecord(tmp_path: Path) -> None:
    write = """
import sys
import numpy as np
import tensorflow as tf
for shard in range(6):
    with tf.io.TFRecordWriter(f"{sys.argv[1]}/{shard}.tfrecord") as out:
        for size in np.random.default_rng(shard).integers(5_000, 15_000, 40):
            out.write(b"x" * int(size))
"""
    source = tmp_path / "source"
    source.mkdir()
    direct(sys.executable, "-c", write, source)
    sizes = []
    for path in source.iterdir():
        age(path)
        sizes.append(path.stat().st_size)
    done = compare(source, "tiering_tensorflow.py", quota=sum(sorted(sizes)[-3:]))
    report = done.report
    assert report["tiers"][0]["files"] >= 3
    share = report["tiers"][0]["used"] / sum(sizes)
    read = report["source"]["bytes"] + report["source"]["copied_bytes"]
    assert read <= 1.05 * (share + 3 * (1 - share)) * np.sum(sizes)
