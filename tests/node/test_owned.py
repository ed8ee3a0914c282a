"""What another user has made, or could change, is not taken for our own."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.users import OTHER, as_other, needs_two_users

from stoker.bundles.depot import DirectoryDepot, check_directory
from stoker.errors import ConfigError
from stoker.jobs.protocol import ask, service_path
from stoker.node import messages, rendezvous
from stoker.node.messages import Channel
from stoker.policy.baselines import LRU
from stoker.source.listing import ListingCache
from stoker.source.pace import RateLimit
from stoker.store.disk import CacheDir, DiskMeta, open_disk
from stoker.store.registry import open_arena
from stoker.tiering import tier_dir
from stoker.tiering.tier_dir import TierDir

META = DiskMeta("data-1", 100, 50_000, 500)
SOURCE = Path("/data/train")


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder like /tmp: all may make files there, and remove their own."""
    path = Path(tempfile.mkdtemp(prefix="stoker-shared-"))
    path.chmod(0o1777)
    yield path
    shutil.rmtree(path)


@pytest.fixture(autouse=True)
def _own_runtime_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_RUNTIME_DIR", str(tmp_path / "run"))


def use_tier(path: Path) -> None:
    TierDir(path, SOURCE).close()


def use_cache_dir(path: Path) -> None:
    place = CacheDir(path)
    with open_disk(place, META, LRU().regions(), keep_free=0, share=False):
        pass
    assert place.read() == META


def use_depot(path: Path) -> None:
    check_directory(path)
    DirectoryDepot(path, "group").close()


ADOPTERS = {"c1-tier": use_tier, "c2-cache_dir": use_cache_dir, "packages": use_depot}
adopters = pytest.mark.parametrize("use", ADOPTERS.values(), ids=ADOPTERS)
Use = Callable[[Path], None]


# --- folders ---


@adopters
@needs_two_users
def test_c1_c2_a_folder_that_another_user_made_is_refused(use: Use, shared: Path) -> None:
    path = shared / "cache"
    as_other(lambda: use(path))
    with pytest.raises(ConfigError, match=rf"cache belongs to user {OTHER} \(mode 0700\)"):
        use(path)


@adopters
def test_c1_c2_a_folder_that_others_may_write_is_refused(use: Use, shared: Path) -> None:
    path = shared / "cache"
    use(path)
    for mode in (0o777, 0o775, 0o1777):
        path.chmod(mode)
        with pytest.raises(ConfigError, match=rf"\(mode {mode:04o}\): .*chmod go-w"):
            use(path)
    path.chmod(0o755)
    use(path)


@adopters
@needs_two_users
def test_c1_c2_what_was_planted_while_a_folder_was_open_to_all_is_refused(
    use: Use, shared: Path
) -> None:
    path = shared / "cache"
    path.mkdir()
    path.chmod(0o777)
    as_other(lambda: plant_markers(path))
    path.chmod(0o700)  # as the error says
    with pytest.raises(ConfigError, match=rf"/\.stoker-\w+ belongs to user {OTHER}.*remove it"):
        use(path)


def plant_markers(path: Path) -> None:
    for name in (".stoker-tier", ".stoker-cache", ".stoker-packages"):
        (path / name).touch()


@adopters
@needs_two_users
def test_c1_c2_a_link_of_another_user_is_not_followed(use: Use, shared: Path) -> None:
    ours = shared / "ours"
    ours.mkdir(mode=0o700)
    as_other(lambda: (shared / "cache").symlink_to(ours))
    with pytest.raises(ConfigError, match=f"a link of user {OTHER}"):
        use(shared / "cache")
    with pytest.raises(ConfigError, match=f"a link of user {OTHER}"):
        use(shared / "cache" / "below")
    assert not list(ours.iterdir())


@adopters
def test_links_of_our_own_and_missing_folders_are_fine(use: Use, shared: Path) -> None:
    (shared / "far").mkdir()
    (shared / "link").symlink_to("far")
    (shared / "far" / "back").symlink_to(shared / "link")
    use(shared / "link" / "back" / ".." / "far" / "deep" / "cache")
    made = shared / "far" / "deep"
    assert {path.stat().st_mode & 0o777 for path in (made, made / "cache")} == {0o700}


@adopters
def test_an_empty_folder_made_under_a_umask_of_groups_is_made_ours(use: Use, shared: Path) -> None:
    path = shared / "cache"
    path.mkdir()
    path.chmod(0o775)
    use(path)
    assert path.stat().st_mode & 0o777 == 0o755


@adopters
@needs_two_users
@pytest.mark.parametrize("trust", [str(OTHER), f"root, {OTHER}"])
def test_who_is_named_is_trusted(
    use: Use, trust: str, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A share without owners of its own, or a folder that a platform's user prepares."""
    as_other(lambda: use(shared / "cache"))
    monkeypatch.setenv("STOKER_TRUST", trust)
    use(shared / "cache")


@adopters
@needs_two_users
def test_a_group_that_is_named_may_write(
    use: Use, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = shared / "cache"
    use(path)
    os.chown(path, -1, OTHER)
    path.chmod(0o2770)
    with pytest.raises(ConfigError, match=f"STOKER_TRUST=@{OTHER} trusts its group"):
        use(path)
    monkeypatch.setenv("STOKER_TRUST", f"@{OTHER}")
    use(path)


@adopters
def test_everybody_may_be_trusted_where_volumes_know_no_owners(
    use: Use, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOKER_TRUST", "*")
    (shared / "cache").mkdir()
    (shared / "cache").chmod(0o777)
    use(shared / "cache")
    use(shared / "cache")
    assert (shared / "cache").stat().st_mode & 0o777 == 0o777


def test_trust_in_nobody_who_is_known_is_refused(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOKER_TRUST", "no-such-user")
    with pytest.raises(ConfigError, match="STOKER_TRUST='no-such-user'"):
        use_tier(shared / "cache")


@needs_two_users
def test_c1_a_planted_copy_is_not_served(shared: Path, tmp_path: Path) -> None:
    """Same size, same time: all that a tier went by."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "one").write_text("truth")
    status = (source / "one").stat()

    def plant() -> None:
        TierDir(shared / "tier", source).close()
        copy = shared / "tier" / "copies" / "one"
        copy.write_text("wrong")
        os.utime(copy, ns=(status.st_mtime_ns, status.st_mtime_ns))

    as_other(plant)
    command = [sys.executable, "-P", "-c", "from stoker.cli import main; main()", "run", "--quiet"]
    tier = f"--tier={shared / 'tier'}:1MiB"
    done = subprocess.run(
        [*command, f"--source={source}", tier, "--", "cat", source / "one"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "wrong" not in done.stdout
    assert done.returncode != 0 and f"belongs to user {OTHER}" in done.stderr


@needs_two_users
def test_c2_a_planted_disk_cache_is_not_served(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plant() -> None:
        os.environ["STOKER_RUNTIME_DIR"] = str(shared / "run-of-the-other")
        place = CacheDir(shared / "cache")
        with open_disk(place, META, LRU().regions(), keep_free=0) as opened:
            opened.arena.put(7, b"wrong")

    as_other(plant)
    with pytest.raises(ConfigError, match=f"belongs to user {OTHER}"):
        open_disk(CacheDir(shared / "cache"), META, LRU().regions(), keep_free=0)
    with pytest.raises(ConfigError, match=f"belongs to user {OTHER}"):
        CacheDir(shared / "cache").clean()
    assert (shared / "cache" / ".stoker-cache").exists()


def test_c1_a_tier_that_is_exchanged_under_us_gets_nothing(tmp_path: Path) -> None:
    """By one who may write to the folder above: what was looked at is what is used."""
    tier = TierDir(tmp_path / "tier", SOURCE)
    (tmp_path / "tier").rename(tmp_path / "moved")
    (tmp_path / "tier" / "parts").mkdir(parents=True)
    precious = tmp_path / "precious"
    precious.write_text("data")
    (tmp_path / "tier" / "parts" / "1").symlink_to(precious)
    Path(tier.part_of(1)).write_text("a part")
    assert precious.read_text() == "data"
    assert (tmp_path / "moved" / "parts" / "1").read_text() == "a part"
    assert not tier.is_there()
    tier.close()


def test_a_tier_is_not_cleaned_for_others_to_plant_in(shared: Path) -> None:
    use_tier(shared / "tier")
    (shared / "tier").chmod(0o777)
    with pytest.raises(ConfigError, match="chmod go-w"):
        tier_dir.clean(shared / "tier")
    assert (shared / "tier" / "meta.json").exists()


# --- the runtime directory, and what lay beside it ---

SHARE = """
import sys, warnings
warnings.simplefilter("error")
from stoker.policy.baselines import LRU
from stoker.store.registry import open_arena
with open_arena("data", 10, 10_000, 100.0, LRU().regions()) as opened:
    print(opened.shared, opened.created, opened.arena.get(3))
"""


@pytest.fixture
def without_session(shared: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No runtime directory but that in the folder for temporary files, which is shared."""
    monkeypatch.delenv("STOKER_RUNTIME_DIR")
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(shared))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return shared


@needs_two_users
@pytest.mark.parametrize("planted", ["a folder", "a file", "a link"])
def test_c10_ranks_share_one_cache_when_another_user_has_taken_the_name(
    planted: str, without_session: Path
) -> None:
    name = without_session / f"stoker-{os.geteuid()}"
    how = {
        "a folder": name.mkdir,
        "a file": name.touch,
        "a link": lambda: name.symlink_to(without_session),
    }
    as_other(how[planted])
    with open_arena("data", 10, 10_000, 100.0, LRU().regions()) as opened:
        opened.arena.put(3, b"three")
        assert opened.shared
        done = subprocess.run(
            [sys.executable, "-c", SHARE], capture_output=True, text=True, check=False
        )
        assert done.stdout == "True False b'three'\n", done.stderr


@needs_two_users
def test_c10_a_runtime_directory_of_another_user_is_an_error_not_a_cache_per_rank(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOKER_RUNTIME_DIR", str(shared / "run"))
    as_other(lambda: (shared / "run").mkdir(mode=0o700))
    with pytest.raises(ConfigError, match="set STOKER_RUNTIME_DIR to a directory"):
        open_arena("data", 10, 10_000, 100.0, LRU().regions())


@needs_two_users
def test_c10_a_planted_rate_file_fails_no_job(without_session: Path) -> None:
    limit = RateLimit("s3://bucket", requests=1000)

    def plant() -> None:
        try:
            limit.path.touch()
        except OSError:  # it does not lie where others may make files
            (without_session / f"stoker-{os.geteuid()}").mkdir()

    as_other(plant)
    assert RateLimit("s3://bucket", requests=1000).take(1) < 1


@needs_two_users
def test_a_planted_listing_is_not_used(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    monkeypatch.setenv("XDG_CACHE_HOME", str(shared))
    as_other(lambda: ListingCache("question").store({"sizes": np.arange(3)}))
    cache = ListingCache("question")
    assert cache.path.exists() and cache.load(dict) is None


# --- sockets ---


@needs_two_users
def test_c10_a_service_of_another_user_is_not_asked(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would say how much memory there is, and be told of our data."""
    monkeypatch.setenv("STOKER_RUNTIME_DIR", str(shared))
    with listening_as_other(service_path()), pytest.raises(PermissionError, match="is served by"):
        ask("list")


@needs_two_users
@pytest.mark.parametrize("connect", [Channel.connect, rendezvous.inquire])
def test_memory_and_orders_are_not_taken_from_another_user(
    connect: Callable[[Path], object], shared: Path
) -> None:
    kind = socket.SOCK_SEQPACKET if connect == Channel.connect else socket.SOCK_STREAM
    refused = pytest.raises(PermissionError, match=f"is served by user {OTHER}")
    with listening_as_other(shared / "socket", kind), refused:
        connect(shared / "socket")


@contextlib.contextmanager
def listening_as_other(path: Path, kind: int = socket.SOCK_STREAM) -> Iterator[None]:
    """A socket that the other user made and listens at; nobody answers there."""
    with socket.socket(socket.AF_UNIX, kind) as listener:
        os.seteuid(OTHER)  # the kernel names the one who calls listen()
        try:
            listener.bind(str(path))
            listener.listen(8)
        finally:
            os.seteuid(0)
        yield


@pytest.mark.parametrize("listen", [messages.listen, Channel.listen])
def test_c8_nothing_but_a_socket_makes_way_for_one(
    listen: Callable[[Path], socket.socket], tmp_path: Path
) -> None:
    path = tmp_path / "socket"
    for make in (lambda: path.write_text("thesis"), lambda: path.symlink_to("nowhere")):
        make()
        with pytest.raises(OSError, match="no socket of this user's"):
            listen(path)
        assert os.path.lexists(path)
        path.unlink()
    listen(path).close()
    listen(path).close()  # the one that is left of the first
    assert path.stat().st_mode & 0o777 == 0o600
