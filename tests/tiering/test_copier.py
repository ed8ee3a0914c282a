"""One copy: whole or not at all, and who is to blame."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from stoker.tiering import copier
from stoker.tiering.copier import Origin, SourceChanged, TierFault, copy_file, is_copy
from stoker.types import FileIdentity


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source.bin"
    path.write_bytes(os.urandom(2_500_000))
    os.utime(path, ns=(1, 123_456_789_012_345_678))
    return path


def identity(path: Path) -> FileIdentity:
    return FileIdentity.of(path.stat())


def make(source: Path, expected: FileIdentity | None = None, **options: Any) -> tuple[Path, Origin]:
    folder = source.parent / "tier"
    folder.mkdir(exist_ok=True)
    final = folder / "copy"
    origin = copy_file(source, folder / "copy.part", final, expected or identity(source), **options)
    return final, origin


def copy(source: Path, expected: FileIdentity | None = None, **options: Any) -> Path:
    return make(source, expected, **options)[0]


@pytest.mark.parametrize("options", [{}, {"fsync": True}, {"checksum": True}])
def test_a_copy_has_bytes_and_identity(source: Path, options: dict[str, bool]) -> None:
    steps: list[int] = []
    inodes: list[int] = []
    final, origin = make(source, begin=inodes.append, progress=steps.append, **options)
    assert final.read_bytes() == source.read_bytes()
    assert steps == [1 << 20, 2 << 20] and inodes == [final.stat().st_ino]
    assert [entry.name for entry in final.parent.iterdir()] == ["copy"]
    assert final.stat().st_mode & 0o222 == 0
    assert is_copy(final, identity(source), origin, checksum=options.get("checksum", False))


def test_an_empty_file_is_copied(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert copy(tmp_path / "empty").read_bytes() == b""


def test_a_copy_of_another_file_is_told(source: Path) -> None:
    final, origin = make(source, checksum=True)
    before = identity(source)
    assert is_copy(final, before, origin)
    for field in before._fields:
        other = before._replace(**{field: getattr(before, field) + 1})
        assert not is_copy(final, other, origin), field
    assert not is_copy(final, before, None)
    assert not is_copy(final, before, origin._replace(copy_inode=origin.copy_inode + 1))
    assert not is_copy(final.with_name("none"), before, origin)
    assert not is_copy(final.parent, before, origin)


def test_a_checksum_tells_damaged_bytes(source: Path) -> None:
    (final, origin), expected = make(source, checksum=True), identity(source)
    final.chmod(0o600)
    with final.open("r+b") as file:
        file.seek(1_000_000)
        file.write(b"x" * 100)
    os.utime(final, ns=(1, expected.mtime_ns))
    assert is_copy(final, expected, origin)
    assert not is_copy(final, expected, origin, checksum=True)


def test_without_a_stored_checksum_none_matches(source: Path) -> None:
    final, origin = make(source)
    assert not is_copy(final, identity(source), origin, checksum=True)


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

    expected = identity(source)
    with pytest.raises(SourceChanged):
        copy(source, expected, progress=now)
    assert not list((source.parent / "tier").iterdir())


def test_a_source_that_is_not_the_expected_one(source: Path, tmp_path: Path) -> None:
    with pytest.raises(SourceChanged):
        copy(source, identity(source)._replace(inode=1))
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(SourceChanged):
        copy(tmp_path / "fifo")
    with pytest.raises(FileNotFoundError):
        copy(tmp_path / "none", identity(source))


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

    monkeypatch.setattr(copier.os, "preadv", broken)
    with pytest.raises(OSError, match="input/output") as caught:
        copy(source)
    assert not isinstance(caught.value, TierFault)


def test_a_file_system_that_refuses_direct_reads(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.preadv

    def picky(fd: int, buffers: Any, begin: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "invalid argument")
        return real(fd, buffers, begin)

    monkeypatch.setattr(copier.os, "preadv", picky)
    assert copy(source).read_bytes() == source.read_bytes()
