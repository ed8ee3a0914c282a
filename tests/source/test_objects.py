"""ObjectSource against real servers: S3, web servers, folders; forks, listings, keys."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.s3 import Bucket
from support.servers import free_port, serve
from support.waiting import await_true

from stoker.errors import ConfigError, SampleCorrupt, SampleNotFound
from stoker.source import ObjectSource, Pace, Retry, Source
from stoker.source.remote.backend import address_of
from stoker.testing import SourceConformance

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
QUICK = Pace(retry=Retry(deadline=2.0, first=0.01))


class TestFolder(SourceConformance):
    def make(self, samples: list[bytes], tmp_path: Path) -> Source:
        for number, sample in enumerate(samples):
            (tmp_path / f"{number:04d}.bin").write_bytes(sample)
        return ObjectSource(f"file://{tmp_path}")


class TestS3(SourceConformance):
    @pytest.fixture(autouse=True)
    def _bucket(self, bucket: Bucket) -> None:
        self.bucket = bucket

    def make(self, samples: list[bytes], tmp_path: Path) -> Source:
        folder = tmp_path.name
        self.bucket.put({f"{folder}/{n:04d}.bin": sample for n, sample in enumerate(samples)})
        return ObjectSource(f"{self.bucket.url}/{folder}", storage_options=self.bucket.options())


class TestWeb(SourceConformance):
    @pytest.fixture(autouse=True)
    def _web(self, web: tuple[str, Path]) -> None:
        self.web = web

    def make(self, samples: list[bytes], tmp_path: Path) -> Source:
        url, served = self.web
        # One directory for all of them: http.server has no versions but times in seconds.
        folder = served / f"{tmp_path.parent.name}-{tmp_path.name}"
        folder.mkdir(exist_ok=True)
        keys = [f"{number:04d}.bin" for number in range(len(samples))]
        for key, sample in zip(keys, samples, strict=True):
            (folder / key).write_bytes(sample)
            os.utime(folder / key, (10**9 + hash(sample) % 10**6,) * 2)
        # http.server drops connections when many come at once.
        pace = Pace(concurrency=4)
        options = {"allow_http": True}
        return ObjectSource(f"{url}/{folder.name}", keys, storage_options=options, pace=pace)


def open_bucket(bucket: Bucket, folder: str = "", **how: Any) -> ObjectSource:
    return ObjectSource(f"{bucket.url}/{folder}", storage_options=bucket.options(), **how)


def test_keys_of_any_characters_come_in_the_order_of_their_bytes(bucket: Bucket) -> None:
    keys = ["a b", "a#b", "a%20b", "a+b?c=d&e", "ä/日本", "b", "b-/x", "b/x", "b/y/z", "B", "~*'()"]
    bucket.put({f"top/{key}": key.encode() for key in keys})
    source = open_bucket(bucket, "top")
    ordered = sorted(keys, key=str.encode)
    assert source.read(range(len(source))) == [key.encode() for key in ordered]
    assert [source.name(i) for i in range(len(source))] == [
        f"{bucket.url}/top/{key}" for key in ordered
    ]
    listed = open_bucket(bucket, "top", keys=keys)
    assert listed.read(range(len(keys))) == [key.encode() for key in keys]


def test_a_prefix_is_a_folder_and_markers_are_no_samples(bucket: Bucket) -> None:
    bucket.put(
        {"t/a": b"1", "t/b/": b"", "t/b/c": b"2", "t/empty": b"", "train": b"3", "tz/d": b"4"}
    )
    source = open_bucket(bucket, "t")
    assert [source.name(i).rpartition("/t/")[2] for i in range(len(source))] == [
        "a", "b/c", "empty"
    ]  # fmt: skip
    assert source.sizes.tolist() == [1, 1, 0]
    assert len(open_bucket(bucket)) == 5


def test_more_keys_than_a_page(bucket: Bucket) -> None:
    bucket.put({f"n/{number:05d}": b"%d" % number for number in range(1050)})
    source = open_bucket(bucket, "n")
    assert source.read([0, 999, 1000, 1049]) == [b"0", b"999", b"1000", b"1049"]


def read_in_child(source: Source, answers: Any) -> None:
    answers.put((source.read([1, 0]), len(source.read(range(len(source))))))


def test_forks_after_use_in_the_parent_from_a_busy_parent(bucket: Bucket) -> None:
    """The case that hangs or crashes with a client in the parent; here with threads reading."""
    bucket.put({f"{number:03d}": b"%03d" % number for number in range(64)})
    source = open_bucket(bucket, pace=Pace(concurrency=8))
    context = multiprocessing.get_context("fork")
    busy = threading.Event()

    def keep_reading() -> None:
        while not busy.is_set():
            source.read(range(64))

    with ThreadPoolExecutor(2) as pool:
        reading = [pool.submit(keep_reading) for _ in range(2)]
        try:
            for _ in range(3):
                answers = context.SimpleQueue()
                children = [
                    context.Process(target=read_in_child, args=(source, answers)) for _ in range(2)
                ]
                for child in children:
                    child.start()
                for _ in children:
                    assert answers.get() == ([b"001", b"000"], 64)
                for child in children:
                    child.join(60)
                    assert child.exitcode == 0
        finally:
            busy.set()
        for each in reading:
            each.result()


SCRIPT = """
import os, sys
from stoker.source import ObjectSource
source = ObjectSource("file://" + sys.argv[1])
assert source.read([0]) == [b"hello"]
if "fork" in sys.argv:
    pid = os.fork()
    if pid == 0:
        assert source.read([0]) == [b"hello"]
        assert source._client._link._process.pid != 0
        sys.exit(0)
    assert os.waitpid(pid, 0)[1] == 0
print(source._client._link._process.pid, flush=True)
if "killed" in sys.argv:
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("how", ["plain", "fork", "killed"])
def test_a_script_without_main_guard_leaves_no_process(tmp_path: Path, how: str) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "x").write_bytes(b"hello")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-W", "error", script, data, how],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr == ""
    assert done.returncode == (-signal.SIGKILL if how == "killed" else 0)
    helper = int(done.stdout)
    command = Path(f"/proc/{helper}/cmdline")  # empty for a zombie that nobody waits for
    assert await_true(lambda: not command.exists() or command.read_bytes() == b"", 10)


def test_a_killed_helper_is_replaced(bucket: Bucket, caplog: pytest.LogCaptureFixture) -> None:
    bucket.put({"a": b"1"})
    source = open_bucket(bucket)
    assert source.read([0]) == [b"1"]
    os.kill(source._client._link._process.pid, signal.SIGKILL)
    with caplog.at_level(logging.WARNING):
        assert source.read([0]) == [b"1"]
    assert "starting it again" in caplog.text


def test_a_stopped_helper_is_waited_for(bucket: Bucket) -> None:
    bucket.put({"a": b"1"})
    source = open_bucket(bucket)
    source.read([0])
    helper = source._client._link._process.pid
    os.kill(helper, signal.SIGSTOP)
    threading.Timer(0.5, os.kill, (helper, signal.SIGCONT)).start()
    assert source.read([0]) == [b"1"]


def test_a_process_with_a_helper_leaves_reading_to_one_that_needs_none(bucket: Bucket) -> None:
    bucket.put({"a": b"a"})
    source = ObjectSource(bucket.url, storage_options=bucket.options())
    assert source.read([0]) == [b"a"]  # the helper runs by now
    assert not source.is_ready
    source.close()


def test_processes_hold_one_copy_of_what_is_known(bucket: Bucket) -> None:
    bucket.put({f"{number:04d}" + "x" * 100: b"1" for number in range(300)})
    source = open_bucket(bucket)
    with pytest.raises(TypeError, match="child process"):
        pickle.dumps(source)
    assert len(pickle.dumps(source._client)) < 2000


def test_lists_of_keys_are_kept_too(bucket: Bucket) -> None:
    keys = [f"{number:02d}" for number in range(10)]
    bucket.put(dict.fromkeys(keys, b"1"))
    first = open_bucket(bucket, keys=keys)
    assert open_bucket(bucket, keys=keys).fingerprint == first.fingerprint
    bucket.put({"03": b"2"})
    assert open_bucket(bucket, keys=keys).fingerprint != first.fingerprint
    bucket.delete("03")
    with pytest.raises(SampleNotFound, match=r"03 is not there") as raised:
        open_bucket(bucket, keys=keys)
    assert raised.value.ids == [3]


def test_objects_that_change_are_found_out(bucket: Bucket) -> None:
    bucket.put({f"{number}": b"old" for number in range(5)})
    source = open_bucket(bucket)
    bucket.put({"1": b"new", "2": b"longer"})
    bucket.delete("3")
    samples, errors = source.read_each(range(5))
    assert samples == [b"old", None, None, None, b"old"]
    assert {index: type(error) for index, error in errors.items()} == {
        1: SampleCorrupt,
        2: SampleCorrupt,
        3: SampleNotFound,
    }
    assert "replaced by another version" in str(errors[1])
    assert "6 bytes now, and had 3" in str(errors[2])
    assert f"{bucket.url}/3" in str(errors[3])
    assert [errors[index].ids for index in (1, 2, 3)] == [[1], [2], [3]]


def test_bad_arguments_are_refused(bucket: Bucket) -> None:
    options = bucket.options()
    with pytest.raises(ConfigError, match="no objects below"):
        ObjectSource(bucket.url, storage_options=options)
    with pytest.raises(ConfigError, match="NoSuchBucket"):
        ObjectSource("s3://no-such-bucket/x", storage_options=options, pace=QUICK)
    with pytest.raises(ConfigError, match="nonsense"):
        ObjectSource(bucket.url, storage_options={**options, "nonsense": 1})
    for url in ("bucket/x", "://x", "s3://", "http://host/x?token=1", "ftp://host/x"):
        with pytest.raises(ConfigError, match="url="):
            ObjectSource(url)
    for keys in ("one", [], ["a", ""], [b"a"]):
        with pytest.raises(ConfigError, match="keys"):
            ObjectSource(bucket.url, keys, storage_options=options)
    with pytest.raises(ConfigError, match="listing_max_age=-1"):
        open_bucket(bucket, listing_max_age=-1)
    with pytest.raises(ConfigError, match="do not pickle"):
        ObjectSource(bucket.url, storage_options={"credential_provider": lambda: None})
    for bad in ({"concurrency": 0}, {"hedge": 1.5}, {"requests_per_second": 0}):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            Pace(**bad)


@pytest.mark.parametrize(
    ("endpoint", "what"),
    [("http://127.0.0.1:9", "allow_http=True"), ("127.0.0.1:9", "obstore gave up")],
)
@pytest.mark.parametrize("keys", [None, ["a"]])
def test_an_endpoint_that_cannot_be_asked_is_refused_at_once(
    endpoint: str, what: str, keys: list[str] | None
) -> None:
    options = {
        "endpoint": endpoint,
        "access_key_id": "test",
        "secret_access_key": "test",
        "region": "us-east-1",
        "allow_http": what != "allow_http=True",
    }
    # Of the usual pace, whose retries would take two minutes.
    with pytest.raises(ConfigError, match=what):
        ObjectSource("s3://bucket/x", keys, storage_options=options)


def test_the_listing_of_a_web_server_is_refused(web: tuple[str, Path]) -> None:
    with pytest.raises(ConfigError):
        ObjectSource(f"{web[0]}/", storage_options={"allow_http": True}, pace=QUICK)


def test_c9_a_password_in_the_address_is_not_shown(web: tuple[str, Path], tmp_path: Path) -> None:
    """Neither in a sample's name, nor in an error, nor in what a description shows."""
    host = web[0].removeprefix("http://")
    folder = web[1] / tmp_path.name
    folder.mkdir()
    (folder / "a.bin").write_bytes(b"1")
    url = f"http://me:hunter2@{host}/{tmp_path.name}"
    options = {"allow_http": True}
    source = ObjectSource(url, ["a.bin"], storage_options=options, pace=QUICK)
    assert source.name(0) == f"http://{host}/{tmp_path.name}/a.bin"
    assert source.read([0]) == [b"1"]
    (folder / "a.bin").unlink()
    with pytest.raises(SampleNotFound) as gone:
        source.read([0])
    with pytest.raises(SampleNotFound) as missing:
        ObjectSource(url, ["b.bin"], storage_options=options, pace=QUICK)
    with pytest.raises(ConfigError) as queried:
        ObjectSource(f"{url}/x?sig=hunter2", ["x"], storage_options=options)
    with pytest.raises(ConfigError) as odd:
        ObjectSource(url, ["x"], storage_options={**options, "nonsense": 1})
    for error in (gone, missing, queried, odd):
        assert "hunter2" not in f"{error.value!r}" and "me:" not in str(error.value)
    assert "hunter2" not in repr(address_of(url, {"password": "hunter2"}))


def test_c9_addresses_in_messages_lose_what_is_secret() -> None:
    text = "https://u:p@h/x?X-Amz-Date=1&X-Amz-Signature=abc, and s3://b/a@c?sig=d&se=2"
    shown = "https://h/x?X-Amz-Date=1&X-Amz-Signature=***, and s3://b/a@c?sig=***&se=2"
    assert str(ConfigError(text)) == str(SampleNotFound(text)) == shown
    assert str(ConfigError("me@host?sig=1 is no address")) == "me@host?sig=1 is no address"


def test_a_real_server_that_is_stopped_and_started_again(tmp_path: Path) -> None:
    served, port = tmp_path / "served", free_port()
    served.mkdir()
    keys = [f"{number:02d}" for number in range(20)]
    for key in keys:
        (served / key).write_bytes(key.encode())
    command = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1"]
    command += ["--directory", str(served), str(port)]
    options = {"allow_http": True}
    for _ in serve(command, port, tmp_path):
        source = ObjectSource(f"http://127.0.0.1:{port}", keys, storage_options=options)
        assert source.read([0]) == [b"00"]
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(source.read, range(20))
        time.sleep(3)
        assert not reading.done()
        for _ in serve(command, port, tmp_path):
            assert reading.result(60) == [key.encode() for key in keys]
    source.close()


def test_what_was_asked_is_counted(bucket: Bucket) -> None:
    bucket.put({f"{number}": b"123" for number in range(5)})
    source = open_bucket(bucket)
    assert source.tally.requests == 0
    source.read(range(5))
    assert (source.tally.requests, source.tally.received_bytes) == (5, 15)
    source.close()


def test_large_batches_arrive_in_place(bucket: Bucket) -> None:
    samples = [os.urandom(size) for size in np.random.default_rng(0).integers(0, 90_000, 40)]
    bucket.put({f"{number:03d}": sample for number, sample in enumerate(samples)})
    source = open_bucket(bucket)
    ids = np.random.default_rng(1).integers(0, 40, 200)
    assert source.read(ids) == [samples[i] for i in ids]
