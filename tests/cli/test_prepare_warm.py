"""`stoker warm` and `stoker clean DIR`: fill, go on, be read by a Loader, be emptied."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from images.photographs import photographs

from stoker import Cache, ImageFolder, Loader
from stoker.cli.root import root
from stoker.errors import SampleNotFound, SourceUnavailable
from stoker.images import Eval
from stoker.source.base import without
from stoker.source.image_folder import ImageFolderSource
from stoker.store.disk import MARKER

KEEP = ["--keep-free", "0"]


def run(*arguments: object, status: int = 0) -> str:
    result = CliRunner().invoke(root, list(map(str, arguments)), terminal_width=200)
    assert result.exit_code == status, result.output
    return result.output


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The ids that are read from the source, in this process."""
    seen: list[int] = []
    read = ImageFolderSource.read_packed

    def noted(self, ids):
        seen.extend(np.asarray(ids).tolist())
        return read(self, ids)

    monkeypatch.setattr(ImageFolderSource, "read_packed", noted)
    return seen


def test_a_loader_reads_nothing_that_was_warmed(
    few_digits: Path, tmp_path: Path, reads: list[int]
) -> None:
    cache_dir = tmp_path / "cache"
    facts = json.loads(run("warm", few_digits, "--disk", cache_dir, "--json", *KEEP))
    source = ImageFolderSource(few_digits)
    assert facts["read"] == facts["wanted"] == len(source) == len(reads)
    reads.clear()
    with Loader(
        ImageFolder(few_digits, np.array), 16, cache=Cache("20%", disk=cache_dir)
    ) as loader:
        assert sum(len(labels) for _, labels in loader) == len(source)
        assert (loader.stats.hits, loader.stats.fetched) == (len(source), 0)
        assert loader.stats.disk_hits >= len(source)
    assert reads == []


def test_a_part_that_was_warmed(few_digits: Path, tmp_path: Path, reads: list[int]) -> None:
    run("warm", few_digits, "--disk", tmp_path / "cache", "--disk-size", "50%", *KEEP)
    warmed = set(reads)
    assert sorted(warmed) == list(range(len(warmed))), "in the order of ids"
    reads.clear()
    with Loader(
        ImageFolder(few_digits, np.array), 16, cache=Cache(0, disk=tmp_path / "cache")
    ) as loader:
        for _ in loader:
            pass
        assert loader.stats.hits == len(warmed)
        assert loader.stats.accesses == len(loader.dataset)
    assert not warmed & set(reads)


def test_it_goes_on_where_it_was_interrupted(
    few_digits: Path, tmp_path: Path, reads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker.store.fill._BATCH_SAMPLES", 10)
    read = ImageFolderSource.read_packed

    def failing(self, ids):
        if 30 in ids:
            raise SourceUnavailable("the line is cut")
        return read(self, ids)

    arguments = ("warm", few_digits, "--disk", tmp_path / "cache", "--threads", 1, *KEEP)
    with monkeypatch.context() as patch:
        patch.setattr(ImageFolderSource, "read_packed", failing)
        assert "the line is cut" in run(*arguments, status=1)
    came = set(reads)
    assert came >= set(range(30))
    reads.clear()
    output = run(*arguments)
    assert not came & set(reads)
    assert f"{len(came)} already there" in output


def test_samples_that_cannot_be_read_are_named(
    few_digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = ImageFolderSource.read_packed

    def lossy(self, ids):
        data, offsets, errors = read(self, ids)
        errors |= {int(k): SampleNotFound("it is gone") for k in np.flatnonzero(ids == 7)}
        return without(errors, data, offsets)

    monkeypatch.setattr(ImageFolderSource, "read_packed", lossy)
    output = run("warm", few_digits, "--disk", tmp_path / "cache", *KEEP, status=1)
    assert f"not read: {ImageFolderSource(few_digits).name(7)}: it is gone" in output
    assert "299 of 300 samples are on disk" in output


def test_refusals(few_digits: Path, tmp_path: Path) -> None:
    for arguments, message in [
        (["--disk-size", "0"], "leaves nothing to fill"),
        (["--disk-size", "1"], "--disk-size='1' is 1 bytes"),
        (["--option", "endpoint"], "NAME=VALUE"),
        (["--keep-free", "1000000TB"], "are to stay free"),
    ]:
        assert message in run(
            "warm", few_digits, "--disk", tmp_path / "cache", *arguments, status=1
        )
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("precious")
    output = run("warm", few_digits, "--disk", tmp_path / "mine", *KEEP, status=1)
    assert "'thesis.tex'" in output


def test_clean_empties_what_is_stokers_and_nothing_else(few_digits: Path, tmp_path: Path) -> None:
    cache_dir = tmp_path / "cache"
    run("warm", few_digits, "--disk", cache_dir, *KEEP)
    (cache_dir / "notes.txt").write_text("precious")
    with Loader(ImageFolder(few_digits, np.array), 16, cache=Cache(disk=cache_dir)) as loader:
        next(iter(loader))
        assert "is in use" in run("clean", cache_dir, status=1)
    assert "freed" in run("clean", cache_dir)
    assert [path.name for path in cache_dir.iterdir()] == ["notes.txt"]
    assert f"no {MARKER}" in run("clean", cache_dir, status=1)


def test_photographs_are_warmed_in_the_form_of_the_loader(tmp_path: Path) -> None:
    folder, cache_dir = tmp_path / "train" / "class", tmp_path / "cache"
    folder.mkdir(parents=True)
    for number in range(24):
        (folder / f"{number:02}.jpg").write_bytes(photographs()[number % len(photographs())])
    given = ("--image-folder", "--disk", cache_dir, "--stage", "resized:96", *KEEP)
    facts = json.loads(run("warm", folder.parent, *given, "--json"))
    assert facts["read"] == 24 and not facts["refused"]
    dataset = ImageFolder(folder.parent, Eval(96, 64))
    assert facts["bytes_read"] < 0.3 * dataset.source.sizes.sum()
    cache = Cache("10%", disk=cache_dir, stage="resized:96")
    with Loader(dataset, 8, cache=cache) as loader:
        assert sum(len(labels) for _, labels in loader) == 24
        assert (loader.stats.hits, loader.stats.fetched) == (24, 0)


@pytest.mark.parametrize("stage", ["decoded", "raw", "resized:0"])
def test_stages_that_make_no_sense_are_refused(
    few_digits: Path, tmp_path: Path, stage: str
) -> None:
    given = ("--disk", tmp_path / "cache", "--stage", stage)
    assert "stage" in run("warm", few_digits, *given, status=1)
