"""`stoker pool` with real servers, each in a directory of its own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from support.redis_servers import SERVER, Server, free_port, needs_server
from support.waiting import until

from stoker import Cache
from stoker.cli.root import root
from stoker.pool import credentials
from stoker.pool.own_server import MARKER, PoolService
from stoker.pool.pool_address import PoolAddress
from stoker.pool.values import PREFIX
from stoker.pytorch import Loader, SampleDataset
from stoker.source.held import MemorySource

pytestmark = needs_server


def run(*arguments: object) -> Result:
    return CliRunner().invoke(root, ["pool", *map(str, arguments)], terminal_width=200)


def passed(*arguments: object) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "pool"
    yield place
    if (place / MARKER).exists():
        PoolService(place).stop()


def up(place: Path, *options: object) -> str:
    """Start a server; return its address."""
    said = passed("up", "--dir", place, "--memory", "20MiB", "--port", free_port(), *options)
    return said.split("pool='")[1].split("'")[0]


def test_up_serves_a_loader_status_counts_and_down_ends_it(place: Path) -> None:
    url = up(place)
    dataset = SampleDataset(MemorySource([bytes([i]) * 100 for i in range(50)]), len)
    for _ in range(2):
        with Loader(dataset, batch_size=10, cache=Cache(0, pool=url)) as loader:
            assert sum(len(batch) for batch in loader) == 50
    assert loader.stats.hits == loader.stats.pool_hits == 50
    [state] = json.loads(passed("status", "--dir", place, "--json"))
    assert (state["keys"], state["policy"], state["limit_bytes"]) == (50, "volatile-ttl", 20 << 20)
    assert state["hits"] == 50
    assert state["memory_bytes"] > 0
    assert "volatile-ttl" in passed("status", url)
    pid = PoolService(place).pid()
    assert "has ended" in passed("down", "--dir", place)
    assert PoolService(place).pid() is None
    assert pid is not None
    assert "no server was running" in passed("down", "--dir", place)
    assert run("status", "--dir", place).exit_code == 1


def test_what_it_keeps_is_private_and_it_asks_for_a_password(place: Path) -> None:
    url = up(place)
    assert place.stat().st_mode & 0o777 == 0o700
    for name in ("password", "server.conf"):
        assert (place / name).stat().st_mode & 0o777 == 0o600
    password = (place / "password").read_text().strip()
    assert len(password) > 30
    assert password not in url
    assert password not in Path(f"/proc/{PoolService(place).pid()}/cmdline").read_text()
    stranger = run("status", url.partition("?")[0])
    assert stranger.exit_code == 1
    assert not list(place.glob("*.rdb")) + list(place.glob("appendonly*"))


def test_c11_the_server_has_one_user_who_may_do_what_a_pool_needs(place: Path) -> None:
    from redis import Redis
    from redis.exceptions import NoPermissionError, RedisError

    url = up(place)
    address = PoolAddress.parse(url)
    (host, port), options = address.servers[0], address.client_options()
    with Redis(host=host, port=port, **options) as client:
        assert client.set("stoker:{x}:1", b"1", px=1000) and client.mget(["stoker:{x}:1"]) == [b"1"]
        for forbidden in (
            lambda: client.set("other", b"1"),
            lambda: client.mget(["other"]),
            client.flushall,
            client.config_get,
            lambda: client.eval("return 1", 0),
            client.acl_list,
            client.shutdown,
            lambda: client.publish("x", "y"),
        ):
            with pytest.raises(NoPermissionError):
                forbidden()
    for login in (options | {"username": None}, options | {"username": "default"}, {}):
        with Redis(host=host, port=port, **login) as client, pytest.raises(RedisError):
            client.ping()
    secret = (place / "password").read_text().strip()
    assert secret not in (place / "server.conf").read_text()


def test_the_documented_rights_are_those_of_our_own_servers() -> None:
    docs = (Path(__file__).parents[2] / "docs" / "pool.md").read_text()
    assert f"~{PREFIX}* {credentials.COMMANDS}\n" in docs


def test_nodes_share_a_password(place: Path, tmp_path: Path) -> None:
    (tmp_path / "given").write_text("same-on-all-nodes\n")
    url = up(place, "--password-file", tmp_path / "given")
    assert (place / "password").read_text() == "same-on-all-nodes\n"
    passed("down", "--dir", place)
    again = up(place)
    assert (place / "password").read_text() == "same-on-all-nodes\n"
    assert again != url
    assert '"error": ""' in passed("status", again, "--json")


def passwords(folder: Path, **words: str) -> Path:
    folder.mkdir(exist_ok=True)
    for user, word in words.items():
        path = folder / user
        path.touch(mode=0o600)
        path.write_text(word)
    return folder


def test_acl_users_each_have_a_password_and_do_what_a_pool_needs(
    place: Path, tmp_path: Path
) -> None:
    from redis import Redis
    from redis.exceptions import AuthenticationError, NoPermissionError

    users = passwords(tmp_path / "users", ann="word-of-ann", bob="word-of-bob")
    (users / "..data").mkdir()  # as Kubernetes mounts a secret
    said = passed(
        *("up", "--dir", place, "--memory", "20MiB", "--port", free_port(), "--acl", users)
    )
    urls = {line.split(":")[0]: line.split("pool=")[1].strip("'") for line in said.splitlines()[1:]}
    assert urls.keys() == {"ann", "bob"}
    dataset = SampleDataset(MemorySource([bytes([i]) * 100 for i in range(50)]), len)
    for url in urls.values():
        with Loader(dataset, batch_size=10, cache=Cache(0, pool=url)) as loader:
            assert sum(len(batch) for batch in loader) == 50
    assert loader.stats.pool_hits == 50  # bob finds what ann read
    address = PoolAddress.parse(urls["ann"])
    (host, port), options = address.servers[0], address.client_options()
    assert (options["username"], options["password"]) == ("ann", "word-of-ann")
    with Redis(host=host, port=port, **options) as client:
        for forbidden in (
            client.flushall,
            client.config_get,
            lambda: client.set("other", b"1"),
            lambda: client.mget(["other"]),
            lambda: client.keys("*"),
            client.acl_list,
            client.monitor().__enter__,
        ):
            with pytest.raises(NoPermissionError):
                forbidden()
    for user, word in (("ann", "word-of-bob"), ("default", "word-of-ann"), ("carl", "x")):
        with (
            Redis(host=host, port=port, username=user, password=word) as client,
            pytest.raises(AuthenticationError),
        ):
            client.ping()
    written = [path.read_text() for path in place.iterdir() if path.name != "password"]
    command = Path(f"/proc/{PoolService(place).pid()}/cmdline").read_text()
    for text in (said, command, *written):
        assert "word-of" not in text
    passed("down", "--dir", place)
    up(place)  # without them
    assert run("status", urls["ann"].replace(str(port), _port_of(place))).exit_code == 1


def _port_of(place: Path) -> str:
    return str(PoolService(place).address().servers[0][1])


def test_a_job_with_a_wrong_password_reads_the_source_and_says_so_once(
    place: Path, tmp_path: Path
) -> None:
    users = passwords(tmp_path / "users", ann="word-of-ann")
    url = up(place, "--acl", users).replace("stoker@", "ann@")
    dataset = SampleDataset(MemorySource([bytes([i]) * 100 for i in range(50)]), len)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Loader(dataset, batch_size=10, cache=Cache(0, pool=url)) as loader:
            for _ in range(3):
                assert sum(len(batch) for batch in loader) == 50
            stats = loader.stats
    assert (stats.fetched, stats.pool_hits) == (150, 0)
    [message] = [str(each.message) for each in caught if "pool" in str(each.message)]
    assert "password" in message
    assert "word-of" not in message
    assert (place / "password").read_text().strip() not in message


@pytest.mark.parametrize(
    ("user", "word", "mode", "says"),
    [
        ("default", "x", 0o600, "neither 'stoker' nor 'default'"),
        ("stoker", "x", 0o600, "neither 'stoker' nor 'default'"),
        ("a b", "x", 0o600, "no name for a user"),
        ("ann", "x", 0o644, "with mode 644"),
        ("ann", "x", 0o620, "with mode 620"),
        ("ann", "", 0o600, "holds no password"),
        ("ann", "one two", 0o600, "holds no password"),
        ("ann", "\0", 0o600, "holds no password"),
    ],
)
def test_users_that_cannot_be_are_refused(
    user: str, word: str, mode: int, says: str, place: Path, tmp_path: Path
) -> None:
    users = passwords(tmp_path / "users", **{user: word})
    (users / user).chmod(mode)
    given = ("up", "--dir", place, "--memory", "20MiB", "--port", free_port(), "--acl", users)
    result = run(*given)
    assert result.exit_code == 1
    assert says in result.output and str(users / user) in result.output
    assert not place.exists()
    for folder in (tmp_path / "nowhere", tmp_path / "empty"):
        if folder.name == "empty":
            folder.mkdir()
        result = run(*given[:-1], folder)
        assert result.exit_code == 1 and str(folder) in result.output


needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not there")


@needs_openssl
def test_with_tls_nothing_passes_unencrypted_and_loaders_find_what_others_read(place: Path) -> None:
    from redis import Redis
    from redis.exceptions import RedisError

    url = up(place, "--tls")
    assert url.startswith("valkeys://stoker@127.0.0.1:")
    dataset = SampleDataset(MemorySource([bytes([i]) * 100 for i in range(50)]), len)
    for _ in range(2):
        with Loader(dataset, batch_size=10, cache=Cache(0, pool=url)) as loader:
            assert sum(len(batch) for batch in loader) == 50
    assert loader.stats.pool_hits == 50
    address = PoolAddress.parse(url)
    options = address.client_options()
    for plain in (
        {name: value for name, value in options.items() if not name.startswith("ssl")},
        options | {"ssl_ca_certs": None},  # of the system's authorities, none signed it
        options | {"password": "another"},
    ):
        with (
            Redis(host="127.0.0.1", port=address.servers[0][1], **plain) as client,
            pytest.raises((RedisError, OSError)),
        ):
            client.ping()
    for path in (place / "tls").iterdir():
        assert path.stat().st_mode & 0o777 == 0o600
    assert {path.name for path in (place / "tls").iterdir()} == {
        "ca.crt",
        "ca.key",
        "tls.crt",
        "tls.key",
    }


@needs_openssl
def test_tls_again_has_the_same_authority_and_nodes_share_it(place: Path, tmp_path: Path) -> None:
    first = up(place, "--tls")
    authority = (place / "tls" / "ca.crt").read_bytes()
    certificate = (place / "tls" / "tls.crt").read_bytes()
    shared = tmp_path / "copied"
    shutil.copytree(place / "tls", shared)
    other = tmp_path / "other & more"
    try:
        second = up(other, "--tls-files", shared, "--password-file", place / "password")
        hosts = [url.partition("@")[2].partition("?")[0] for url in (first, second)]
        both = f"valkeys://stoker@{','.join(hosts)}?{first.partition('?')[2]}"
        states = json.loads(passed("status", both, "--json"))
        assert [state["error"] for state in states] == ["", ""]
        assert '"error": ""' in passed("status", second, "--json")  # its path needs escapes
        own = (other / "tls" / "tls.crt").read_bytes()
        assert own not in (certificate, authority)
    finally:
        PoolService(other).stop()
    passed("down", "--dir", place)
    up(place, "--tls")
    assert (place / "tls" / "ca.crt").read_bytes() == authority
    assert (place / "tls" / "tls.crt").read_bytes() != certificate


@needs_openssl
def test_given_certificates_are_used_as_they_are(place: Path, tmp_path: Path) -> None:
    for name, host in (("fits", "127.0.0.1"), ("other", "10.9.8.7")):
        credentials.provide_certificates(tmp_path / name, host)
        (tmp_path / name / "ca.key").unlink()
    given = (tmp_path / "fits" / "tls.crt").read_bytes()
    for options in (("--tls-files", tmp_path / "fits"), ("--tls",)):
        up(place, *options)
        assert (place / "tls" / "tls.crt").read_bytes() == given
        passed("down", "--dir", place)
    wrong = ("up", "--dir", place, "--memory", "20MiB", "--port", free_port(), "--tls-files")
    result = run(*wrong, tmp_path / "other")
    assert result.exit_code == 1
    assert "its certificate is not accepted at valkeys://127.0.0.1" in result.output
    assert PoolService(place).pid() is None
    (tmp_path / "other" / "tls.key").unlink()
    result = run(*wrong, tmp_path / "other")
    assert result.exit_code == 1
    assert f"{tmp_path / 'other'} lacks certificates" in result.output


def test_without_openssl_tls_says_what_to_install(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "valkey-server").symlink_to(SERVER)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    result = run("up", "--dir", place, "--memory", "20MiB", "--port", free_port(), "--tls")
    assert result.exit_code == 1
    assert "apt-get install openssl" in result.output
    assert not (place / "server.conf").exists()


def test_a_second_server_in_the_same_directory_is_refused(place: Path) -> None:
    up(place)
    result = run("up", "--dir", place, "--memory", "20MiB", "--port", free_port())
    assert result.exit_code == 1
    assert "stoker pool down" in result.output


def test_a_server_that_was_killed_is_started_anew(place: Path) -> None:
    up(place)
    pid = PoolService(place).pid()
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    until(lambda: PoolService(place).pid() is None)
    up(place)
    assert PoolService(place).pid() != pid


def test_a_server_that_was_stopped_is_ended_all_the_same(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker.pool.own_server._PATIENCE", 1.0)
    up(place)
    pid = PoolService(place).pid()
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    assert "has ended" in passed("down", "--dir", place)


def test_only_the_server_of_the_directory_is_ended(place: Path) -> None:
    up(place)
    passed("down", "--dir", place)
    other = Server()
    try:
        (place / "server.pid").write_text(f"{other.pid}\n")
        assert "no server was running" in passed("down", "--dir", place)
        with other.client() as client:
            assert client.ping()
    finally:
        other.close()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--memory", "9999TiB"), "give less by --memory"),
        (("--memory", "1KiB"), "at least 1 MiB"),
        (("--memory", "much"), "--memory='much'"),
        (("--bind", "192.0.2.1"), "192.0.2.1"),
        (("--port", "0"), "port 0"),
        (("--password-file", "/dev/null"), "no password"),
        (("--password-file", "/nowhere/pw"), "/nowhere/pw"),
    ],
)
def test_what_cannot_be_is_refused(options: tuple[str, ...], says: str, place: Path) -> None:
    given = ("up", "--dir", place, "--memory", "20MiB", "--port", free_port(), *options)
    result = run(*given)
    assert result.exit_code == 1
    assert says in result.output
    assert not (place / "server.conf").exists()


def test_a_port_in_use_is_refused(place: Path) -> None:
    other = Server()
    try:
        result = run("up", "--dir", place, "--memory", "20MiB", "--port", other.port)
        assert result.exit_code == 1
        assert "free --port" in result.output
    finally:
        other.close()


def test_a_directory_that_is_not_stokers_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    for arguments in (("up", "--memory", "20MiB"), ("down",), ("status",)):
        result = run(*arguments, "--dir", tmp_path)
        assert result.exit_code == 1
        assert str(tmp_path) in result.output
    assert [path.name for path in tmp_path.iterdir() if path.name != "run"] == ["thesis.tex"]


def test_without_a_server_on_the_path_it_says_what_to_install(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    result = run("up", "--dir", place, "--memory", "20MiB")
    assert result.exit_code == 1
    assert "apt-get install" in result.output


def test_status_says_what_is_amiss_and_with_which_command_to_mend_it() -> None:
    server = Server()
    try:
        result = CliRunner().invoke(root, ["pool", "status", f"redis://{server.name}"])
        assert result.exit_code == 0
        assert "CONFIG SET maxmemory-policy volatile-ttl" in result.output
        assert result.output.count("CONFIG SET") == 2
    finally:
        server.close()
    assert run("status", f"redis://{server.name}").exit_code == 1
