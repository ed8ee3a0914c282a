"""The directory of a tier: whose it is, who may empty it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from stoker.cli.root import root
from stoker.errors import ConfigError, SegmentError, StateMismatch
from stoker.node.messages import Channel
from stoker.tiering import tier_dir
from stoker.tiering.tier_dir import TierDir

SOURCE = Path("/data/train")


def test_it_is_made_marked_and_empty(tmp_path: Path) -> None:
    tier = TierDir(tmp_path / "new" / "tier", SOURCE)
    assert tier_dir.is_tier(tier.path) and tier.used == 0 and tier.is_there()
    assert tier.path.stat().st_mode & 0o077 == 0
    assert Path(tier.copy_of(b"a/\xff")) == tier.copies / "a" / os.fsdecode(b"\xff")
    for inside, called in zip((tier.copies, tier.parts), tier.called, strict=True):
        assert called.parent == tier.path and inside.samefile(called)
    tier.close()


def test_copies_are_counted_and_halves_removed(tmp_path: Path) -> None:
    tier = TierDir(tmp_path, SOURCE)
    (tier.copies / "a" / "b").mkdir(parents=True)
    (tier.copies / "a" / "b" / "c").write_bytes(b"123")
    (tier.copies / "d").write_bytes(b"4567")
    Path(tier.part_of(12)).write_bytes(b"half")
    tier.close()
    again = TierDir(tmp_path, SOURCE)
    assert again.used == 7 and not list(again.parts.iterdir())
    again.close()


def test_one_process_has_it_at_a_time(tmp_path: Path) -> None:
    tier = TierDir(tmp_path, SOURCE)
    with pytest.raises(SegmentError, match="in use by another run"):
        TierDir(tmp_path, SOURCE)
    with pytest.raises(SegmentError, match="in use"):
        tier_dir.clean(tmp_path)
    tier.close()
    TierDir(tmp_path, SOURCE).close()


@pytest.mark.parametrize("content", ['{"source": "00"}', "[]", "garbage", '"text"', "{}"])
def test_what_it_is_for_must_be_legible(tmp_path: Path, content: str) -> None:
    TierDir(tmp_path, SOURCE).close()
    (tmp_path / "meta.json").write_text(content)
    with pytest.raises(StateMismatch, match="stoker clean "):
        TierDir(tmp_path, SOURCE)


def test_copies_without_a_source_are_refused(tmp_path: Path) -> None:
    TierDir(tmp_path, SOURCE).close()
    (tmp_path / "meta.json").unlink()
    with pytest.raises(StateMismatch, match="nothing says of which source"):
        TierDir(tmp_path, SOURCE)


def test_another_sources_copies_are_refused(tmp_path: Path) -> None:
    TierDir(tmp_path, SOURCE).close()
    with pytest.raises(StateMismatch, match="holds copies of /data/train, not of /data/other"):
        TierDir(tmp_path, Path("/data/other"))


def test_other_directories_are_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(ConfigError, match=r"not Stoker's \(it holds 'thesis.txt'\)"):
        TierDir(tmp_path, SOURCE)
    with pytest.raises(ConfigError, match="not a tier of Stoker"):
        tier_dir.clean(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.txt"]
    with pytest.raises(ConfigError, match="cannot be used"):
        TierDir(tmp_path / "thesis.txt", SOURCE)


def test_cleaning_removes_copies_and_follows_no_links(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "thesis.txt").write_text("precious")
    tier = TierDir(tmp_path / "tier", SOURCE)
    (tier.copies / "a").mkdir()
    (tier.copies / "a" / "b").write_bytes(b"123")
    (tier.copies / "link").symlink_to(tmp_path / "outside")
    (tier.path / "notes").write_text("somebody's")
    tier.close()
    result = CliRunner().invoke(root, ["clean", str(tier.path)])
    assert result.exit_code == 0 and "emptied the tier" in result.output and "3 B" in result.output
    assert (tmp_path / "outside" / "thesis.txt").read_text() == "precious"
    left = {str(path.relative_to(tier.path)) for path in tier.path.rglob("*")}
    assert left == {"notes", "copies", "copies/link"}


def test_what_a_dead_daemon_left_is_cleaned(runtime_dir: Path) -> None:
    runtime_dir.chmod(0o700)
    (runtime_dir / ".stoker").touch()
    folder = runtime_dir / "tiering-0123456789abcdef"
    folder.mkdir()
    for name in ("lock", "table", "counters", "somebody's"):
        (folder / name).touch()
    Channel.listen(folder / "members").close()
    result = CliRunner().invoke(root, ["clean"])
    assert result.exit_code == 0 and "removed the files of 1 cache" in result.output
    assert {path.name for path in folder.iterdir()} == {"lock", "somebody's"}
    assert "nothing to remove" in CliRunner().invoke(root, ["clean"]).output
