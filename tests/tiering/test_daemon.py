"""The daemon at its socket: what it is told, and what it does not believe."""

from __future__ import annotations

import os
import socket
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.waiting import until

from stoker.errors import ConfigError
from stoker.tiering.config import Config, TierConfig
from stoker.tiering.layout import REQUEST, REQUEST_MAGIC, Kind
from stoker.tiering.membership import Membership
from tiering.conftest import write_files

NONE = 0xFFFFFFFF


@pytest.fixture
def member(tmp_path: Path) -> Iterator[Membership]:
    write_files(tmp_path / "source", {"a": 100, "b": 200})
    (tmp_path / "secret").write_bytes(b"x" * 50)
    source = tmp_path / "source"
    with Membership(Config(source, (TierConfig(tmp_path / "tier", 1000),), source)) as found:
        yield found


def request(path: bytes, kind: int = Kind.OPENED, entry: int = NONE, **more: int) -> bytes:
    values = {"magic": REQUEST_MAGIC, "source": 0, "length": len(path)} | more
    return (
        REQUEST.pack(
            values["magic"], kind, values["source"], values["length"], entry, zlib.crc32(path)
        )
        + path
    )


def tell(member: Membership, message: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.sendto(message, str(member.folder.requests))


def test_what_makes_no_sense_is_ignored(member: Membership, tmp_path: Path) -> None:
    for message in (
        b"",
        b"garbage",
        os.urandom(2000),
        request(b"a", magic=7),
        request(b"a", source=3),
        request(b"a", length=9),
        request(b"a", kind=99),
        request(b"../secret"),
        request(b"x/../../secret"),
        request(b"/etc/passwd"),
        request(b"./a"),
        request(b"a/"),
        request(b"a\0b"),
        request(b""),
        request(b"none"),
        request(b"other", length=1),
        request(b"a", kind=Kind.CHANGED, entry=12345),
        request(b"a", kind=Kind.CHANGED),
    ):
        tell(member, message)
    tell(member, request(b"b"))
    until(lambda: member.report()["tiers"][0]["files"] == 1)
    report = member.report()
    assert report["daemon"] and report["refused"] == 0 and report["tiers"][0]["used"] == 200
    copies = tmp_path / "tier" / "copies"
    assert [path.name for path in copies.rglob("*")] == ["b"]


def test_requests_about_another_table_s_entries_are_ignored(
    member: Membership, tmp_path: Path
) -> None:
    """A program that outlived its daemon still has that one's numbers."""
    tell(member, request(b"a"))
    until(lambda: member.report()["tiers"][0]["files"] == 1)
    (tmp_path / "source" / "a").write_bytes(b"another")
    tell(member, request(b"b", kind=Kind.CHANGED, entry=0))
    tell(member, request(b"b"))
    until(lambda: member.report()["tiers"][0]["files"] == 2)
    assert member.report()["dropped"] == 0
    tell(member, request(b"a", kind=Kind.CHANGED, entry=0))
    until(lambda: member.report()["dropped"] == 1)


def test_a_member_that_asks_nonsense_costs_nothing(member: Membership) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
        other.connect(str(member.folder.members))
        other.recv(1 << 16)
        other.send(b"garbage")
        assert other.recv(1 << 16) == b"", "it is hung up on"
    assert member.report()["daemon"]


def test_a_refusal_reaches_whoever_started_it(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "tier").mkdir()
    (tmp_path / "tier" / "thesis.txt").touch()
    source = tmp_path / "source"
    with pytest.raises(ConfigError, match=r"thesis\.txt"):
        Membership(Config(source, (TierConfig(tmp_path / "tier", 1000),), source))
    Membership(Config(source, (TierConfig(tmp_path / "good", 1000),), source)).close()


def test_a_runtime_directory_with_a_long_path_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOKER_RUNTIME_DIR", str(tmp_path / ("x" * 100)))
    (tmp_path / "source").mkdir()
    source = tmp_path / "source"
    with pytest.raises(ConfigError, match="set STOKER_RUNTIME_DIR to a shorter path"):
        Membership(Config(source, (TierConfig(tmp_path / "tier", 1000),), source))
