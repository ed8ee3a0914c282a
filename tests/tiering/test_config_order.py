"""Warm lists and importance scores."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from stoker.errors import ConfigError
from stoker.tiering.config import read_order

SOURCE = Path("/data/train")


def test_a_warm_list_keeps_its_order(tmp_path: Path) -> None:
    path = tmp_path / "warm.txt"
    path.write_bytes(
        b"# most used first\nb/2.jpg\n\n/data/train/a/1.jpg\n/elsewhere/3.jpg\n../4.jpg\n"
        b"a/../b/2.jpg\n\xff\xfe.bin\n/data/train2/x\n"
    )
    assert read_order(path, SOURCE) == ([b"b/2.jpg", b"a/1.jpg", b"\xff\xfe.bin"], 3)


@pytest.mark.parametrize("kind", ["U", "S"])
def test_scores_are_sorted(tmp_path: Path, kind: str) -> None:
    paths = np.array(["low", "unknown", "high", "also high", "/data/train/mid"]).astype(kind)
    scores = np.array([0.1, np.nan, 3, 3, 2], np.float32)
    np.savez(tmp_path / "s.npz", paths=paths, scores=scores)
    found, skipped = read_order(tmp_path / "s.npz", SOURCE)
    assert found == [b"high", b"also high", b"mid", b"low", b"unknown"] and skipped == 0


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"paths": np.array(["a"])}, "scores"),
        ({"paths": np.array(["a"]), "scores": np.ones(2)}, "one path and one score"),
        ({"paths": np.array([1]), "scores": np.ones(1)}, "one path and one score"),
        ({"paths": np.array(["a"]), "scores": np.array(["b"])}, "not numbers"),
        ({"paths": np.array(["a"], object), "scores": np.ones(1)}, "importance scores"),
    ],
)
def test_other_arrays_are_refused(tmp_path: Path, arrays: dict[str, object], says: str) -> None:
    np.savez(tmp_path / "s.npz", **arrays)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=says):
        read_order(tmp_path / "s.npz", SOURCE)


def test_c11_names_with_line_feeds_stand_in_a_list(tmp_path: Path) -> None:
    path = tmp_path / "warm"
    path.write_bytes(b"a\nb\0#c\0" + bytes(SOURCE) + b"/d\n\0/elsewhere\0\0")
    assert read_order(path, SOURCE) == ([b"a\nb", b"#c", b"d\n"], 1)


def test_what_is_no_list_is_refused(tmp_path: Path) -> None:
    (tmp_path / "s.npz").write_bytes(b"garbage")
    with pytest.raises(ConfigError, match="importance scores"):
        read_order(tmp_path / "s.npz", SOURCE)
    (tmp_path / "list").write_bytes(b"fine\nnot\0fine\n")
    with pytest.raises(ConfigError, match="list:2"):
        read_order(tmp_path / "list", SOURCE)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_order(tmp_path / "none", SOURCE)
