"""Quotas that cannot be had are refused, with the numbers."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from stoker.errors import CapacityError
from stoker.tiering import tier_dir
from stoker.tiering.tier_dir import TierDir, check_room, file_system


def test_types_of_file_systems(tmp_path: Path) -> None:
    assert file_system(Path("/proc").stat().st_dev) == "proc"
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "22 1 8:1 / / rw shared:1 - ext4 /dev/sda1 rw\n"
        "23 22 0:25 / /dev/shm rw,nosuid shared:3 master:1 - tmpfs tmpfs rw,size=1k\n"
    )
    assert file_system(os.makedev(8, 1), mounts) == "ext4"
    assert file_system(os.makedev(0, 25), mounts) == "tmpfs"
    assert file_system(os.makedev(9, 9), mounts) == "" == file_system(1, tmp_path / "none")


def test_more_than_is_free_is_refused(tmp_path: Path) -> None:
    tier = TierDir(tmp_path, Path("/data"))
    check_room(tier, 1000)
    with pytest.raises(CapacityError, match=r"do not fit, .* are free there"):
        check_room(tier, 1 << 60)
    tier.close()


def test_a_tier_in_memory_may_not_take_more_than_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = TierDir(tmp_path, Path("/data"))
    monkeypatch.setattr(tier_dir, "file_system", lambda dev: "tmpfs")
    monkeypatch.setattr(tier_dir, "read_memory", lambda: SimpleNamespace(available=5000))
    check_room(tier, 5000)
    with pytest.raises(OSError, match="available as memory"):
        check_room(tier, 5001)
    tier.used = 1
    check_room(tier, 5001)
    tier.close()
