"""One copy: whole or not at all, and who is to blame."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from stoker.tiering import copier
from stoker.tiering.copier import Identity, SourceChanged, TierFault, copy_file, is_copy


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source.bin"
    path.write_bytes(os.urandom(2_500_000))
    os.utime(path, ns=(1, 123_456_789_012_345_678))
    return path


def identity(path: Path) -> Identity:
    return Identity.of(path.stat())


def copy(source: Path, expected: Identity | None = None, **options: Any) -> Path:
    folder = source.parent / "tier"
    folder.mkdir(exist_ok=True)
    final = folder / "copy"
    copy_file(source, folder / "copy.part", final, expected or identity(source), **options)
    return final


@pytest.mark.parametrize("options", [{}, {"fsync": True}, {"checksum": True}])
def test_a_copy_has_bytes_and_identity(source: Path, options: dict[str, bool]) -> None:
    steps: list[int] = []
    inodes: list[int] = []
    final = copy(source, begin=inodes.append, progress=steps.append, **options)
    assert final.read_bytes() == source.read_bytes()
    assert steps == [1 << 20, 2 << 20] and inodes == [final.stat().st_ino]
    assert [entry.name for entry in final.parent.iterdir()] == ["copy"]
    assert final.stat().st_mode & 0o222 == 0
    assert is_copy(final, identity(source), checksum=options.get("checksum", False))


def test_an_empty_file_is_copied(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert copy(tmp_path / "empty").read_bytes() == b""


def test_a_copy_of_another_file_is_told(source: Path) -> None:
    final = copy(source, checksum=True)
    before = identity(source)
    assert not is_copy(final, Identity(before.size + 1, before.mtime_ns))
    assert not is_copy(final, Identity(before.size, before.mtime_ns + 1))
    assert not is_copy(final.with_name("none"), before)
    assert not is_copy(final.parent, before)


def test_a_checksum_tells_damaged_bytes(source: Path) -> None:
    final, expected = copy(source, checksum=True), identity(source)
    final.chmod(0o600)
    with final.open("r+b") as file:
        file.seek(1_000_000)
        file.write(b"x" * 100)
    os.utime(final, ns=(1, expected.mtime_ns))
    assert is_copy(final, expected)
    assert not is_copy(final, expected, checksum=True)


def test_without_a_stored_checksum_none_matches(source: Path) -> None:
    assert not is_copy(copy(source), identity(source), checksum=True)


@pytest.mark.parametrize("change", ["truncate", "append", "rewrite", "replace"])
def test_a_source_that_changes_meanwhile(source: Path, change: str) -> None:
    def now(done: int) -> None:
        if done > 1_500_000 or change == "done":
            return
        if change == "truncate":
            os.truncate(source, 1_200_000)
        elif change == "append":
            with source.open("ab") as file:
                file.write(b"more")
        elif change == "rewrite":
            source.write_bytes(os.urandom(2_500_000))
        else:
            source.unlink()
            source.write_bytes(b"another")

    expected, before = identity(source), source.read_bytes()
    if change == "replace":  # the opened file stays what it was: a correct copy of the old one
        assert copy(source, expected, progress=now).read_bytes() == before
        return
    with pytest.raises(SourceChanged):
        copy(source, expected, progress=now)
    assert not list((source.parent / "tier").iterdir())


def test_a_source_that_is_not_the_expected_one(source: Path, tmp_path: Path) -> None:
    with pytest.raises(SourceChanged):
        copy(source, Identity(1, 1))
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(SourceChanged):
        copy(tmp_path / "fifo", Identity(0, 0))
    with pytest.raises(FileNotFoundError):
        copy(tmp_path / "none", Identity(0, 0))


def test_a_tier_that_fails_is_to_blame(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(copier.os, "write", full)
    with pytest.raises(TierFault) as caught:
        copy(source)
    assert caught.value.errno == errno.ENOSPC
    assert not list((source.parent / "tier").iterdir())
    with pytest.raises(TierFault):
        copy_file(source, Path("/none/p"), Path("/none/f"), identity(source))


def test_a_source_that_cannot_be_read_is_not_the_tiers_fault(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> int:
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(copier.os, "readv", broken)
    with pytest.raises(OSError, match="input/output") as caught:
        copy(source)
    assert not isinstance(caught.value, TierFault)


def test_a_file_system_that_refuses_direct_reads(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.readv

    def picky(fd: int, buffers: Any) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "invalid argument")
        return real(fd, buffers)

    monkeypatch.setattr(copier.os, "readv", picky)
    assert copy(source).read_bytes() == source.read_bytes()
