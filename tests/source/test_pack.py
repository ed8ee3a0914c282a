"""Packing into shards: what is read from them is what was packed, whatever came in between."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.s3 import Bucket
from support.waiting import until

from stoker.errors import ConfigError, SampleCorrupt, SampleNotFound, UntrustedPath
from stoker.source import (
    BaseSource,
    ImageFolderSource,
    MemorySource,
    ShardSource,
    open_image_folder,
    open_source,
)
from stoker.source.pack import MARKER, pack
from stoker.source.remote.obstore_backend import Writer
from stoker.source.shards import INDEX

SIZES = [0, 1, 511, 512, 513, 5_000, 70_000, 3] * 5


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """Class folders with names that a tar header has to be stretched for."""
    root = tmp_path / "images"
    rng = np.random.default_rng(0)
    for number, size in enumerate(SIZES):
        name = ("cat", "dög", "x" * 120)[number % 3]
        (root / name).mkdir(parents=True, exist_ok=True)
        extension = ("jpg", "PNG")[number % 2]
        (root / name / f"a.b {number}.{extension}").write_bytes(rng.bytes(size))
    return root


def content(source: ImageFolderSource | ShardSource) -> list[tuple[str, bytes]]:
    """Classes and bytes of all samples, sorted."""
    samples = source.read(np.arange(len(source)))
    return sorted(zip((source.classes[t] for t in source.targets), samples, strict=True))


def test_class_folders_come_back_with_their_classes(folders: Path, tmp_path: Path) -> None:
    source = ImageFolderSource(folders)
    packed = pack(source, tmp_path / "packed", shard_bytes=100_000)
    assert len(packed.shards) > 3 and packed.samples == len(SIZES) and not packed.present
    assert packed.bytes == sum(shard.stat().st_size for shard in packed.shards)
    read = open_image_folder(tmp_path / "packed")
    assert read.classes == source.classes and content(read) == content(source)
    assert (
        read.fingerprint
        == open_image_folder(
            str(packed.shards[0]).replace("000000", f"{{000000..{len(packed.shards) - 1:06d}}}")
        ).fingerprint
    )


def test_neighbours_are_drawn_at_random_unless_the_order_is_kept(
    folders: Path, tmp_path: Path
) -> None:
    source = ImageFolderSource(folders)
    shuffled = [pack(source, tmp_path / f"{n}", seed=n).shards[0].read_bytes() for n in (1, 2)]
    assert shuffled[0] != shuffled[1]
    assert pack(source, tmp_path / "again", seed=1).shards[0].read_bytes() == shuffled[0]
    pack(source, tmp_path / "kept", seed=None, shard_bytes=50_000)
    kept = open_image_folder(tmp_path / "kept")
    ids = np.arange(len(source))
    assert kept.read(ids) == source.read(ids) and np.array_equal(kept.targets, source.targets)


def test_any_tar_reads_them(folders: Path, tmp_path: Path) -> None:
    source = ImageFolderSource(folders)
    (shard,) = pack(source, tmp_path / "packed").shards
    with tarfile.open(shard) as archive:
        for member in archive:
            name, _, rest = member.name.partition("/")
            number, _, extension = rest.partition(".")
            file = archive.extractfile(member)
            assert file and file.read() == source.read([int(number)])[0]
            assert name == source.classes[source.targets[int(number)]]
            assert extension in ("jpg", "png") and (member.mode, member.mtime) == (0o644, 0)


def test_parts_stay_together_though_keys_repeat(tmp_path: Path) -> None:
    """Samples of two shards that have one key must not become one."""
    for shard in "ab":
        with tarfile.open(tmp_path / f"{shard}.tar", "w") as archive:
            for extension in ("jpg", "seg.png"):
                (tmp_path / "file").write_bytes(f"{shard}{extension}".encode() * 99)
                archive.add(tmp_path / "file", f"n/same.{extension}")
    whole = ShardSource([tmp_path / "a.tar", tmp_path / "b.tar"])
    packed = pack(whole, tmp_path / "whole", seed=None)
    assert ShardSource(packed.shards).read([0, 1]) == whole.read([0, 1])
    one = ShardSource([tmp_path / "a.tar", tmp_path / "b.tar"], part="seg.png")
    packed = pack(one, tmp_path / "one", seed=None)
    again = ShardSource(packed.shards, part="seg.png")
    assert again.read([0, 1]) == one.read([0, 1]) and again.extensions == ("seg.png",)


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    sizes=st.lists(st.integers(0, 3_000), min_size=1, max_size=40),
    shard_bytes=st.integers(1, 40_000),
    seed=st.one_of(st.none(), st.integers(0, 5)),
)
def test_nothing_is_lost_or_twice(
    sizes: list[int], shard_bytes: int, seed: int | None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rng = np.random.default_rng(len(sizes))
    samples = [bytes([n]) + rng.bytes(size) for n, size in enumerate(sizes)]
    packed = pack(
        MemorySource(samples), tmp_path_factory.mktemp("packed"), shard_bytes=shard_bytes, seed=seed
    )
    found = ShardSource(packed.shards, part="bin").read(np.arange(len(samples)))
    assert sorted(found) == sorted(samples)


class Spoilt(BaseSource):
    """Some samples cannot be read."""

    fingerprint = "the same"

    def __init__(self, samples: list[bytes], bad: tuple[int, ...] = ()) -> None:
        self.samples, self.bad = samples, bad
        self.sizes = np.array([len(sample) for sample in samples], np.int64)

    def __len__(self) -> int:
        return len(self.samples)

    def read(self, ids: npt.ArrayLike) -> list[bytes]:
        wanted = np.asarray(ids).tolist()
        if missing := [sample for sample in wanted if sample in self.bad]:
            raise SampleNotFound("gone", missing)
        return [self.samples[sample] for sample in wanted]


def test_what_cannot_be_read_ends_it_or_is_left_out(tmp_path: Path) -> None:
    source = Spoilt([bytes([n]) * 400 for n in range(20)], bad=(7,))
    with pytest.raises(SampleNotFound, match="gone"):
        pack(source, tmp_path / "packed", shard_bytes=3_000, seed=None)
    assert (tmp_path / "packed" / "shard-000000.tar").exists(), "what was finished stays"
    packed = pack(source, tmp_path / "packed", shard_bytes=3_000, seed=None, leave_out=True)
    assert list(packed.left_out) == [7] and packed.samples == 19 and packed.present
    found = ShardSource(packed.shards, part="bin").read(np.arange(19))
    assert found == [bytes([n]) * 400 for n in range(20) if n != 7]


PROGRAM = """
import sys
from pathlib import Path
from stoker.source import ImageFolderSource
from stoker.source.pack import pack
print(pack(ImageFolderSource(sys.argv[1]), Path(sys.argv[2]), shard_bytes=20_000).present)
"""


def test_a_killed_one_is_resumed(folders: Path, tmp_path: Path) -> None:
    target = tmp_path / "packed"
    command = [sys.executable, "-c", PROGRAM, str(folders), str(target)]
    for finished in (1, 3):
        with subprocess.Popen(command) as process:
            until(lambda n=finished: len(list(target.glob("*.tar"))) >= n or process.poll() == 0)
            process.send_signal(signal.SIGKILL)
    (target / "shard-000000.tar").unlink()
    packed = pack(ImageFolderSource(folders), target, shard_bytes=20_000)
    assert content(open_image_folder(target)) == content(ImageFolderSource(folders))
    assert not list(target.glob("*.part"))
    again = pack(ImageFolderSource(folders), target, shard_bytes=20_000)
    assert again.present == len(SIZES) and again.shards == packed.shards


def test_what_is_not_packed_to_the_end_is_not_read(folders: Path, tmp_path: Path) -> None:
    def stop(samples: int, size: int) -> None:
        raise KeyboardInterrupt

    for progress in (stop, lambda samples, size: None):
        with contextlib.suppress(KeyboardInterrupt):
            pack(ImageFolderSource(folders), tmp_path / "packed", progress=progress)
        if progress is stop:
            with pytest.raises(ConfigError, match="run the same `stoker pack` again"):
                open_image_folder(tmp_path / "packed")
    assert len(open_image_folder(tmp_path / "packed")) == len(SIZES)


def test_other_samples_or_another_way_are_refused(folders: Path, tmp_path: Path) -> None:
    target = tmp_path / "packed"
    pack(ImageFolderSource(folders), target)
    with pytest.raises(ConfigError, match=r"another way \(other seed\): use a new folder"):
        pack(ImageFolderSource(folders), target, seed=1)
    time.sleep(0.01)
    next(folders.rglob("*.jpg")).write_bytes(b"other")
    with pytest.raises(ConfigError, match="other samples"):
        pack(ImageFolderSource(folders, cache_listing=False), target)
    (target / MARKER).write_text("{")
    with pytest.raises(ConfigError, match="is damaged"):
        pack(ImageFolderSource(folders), target)


def test_folders_of_others_are_left_alone(folders: Path, tmp_path: Path) -> None:
    source = ImageFolderSource(folders)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").touch()
    with pytest.raises(ConfigError, match="not empty and not Stoker's"):
        pack(source, tmp_path / "full")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(UntrustedPath):
        pack(source, tmp_path / "open")
    assert [p.name for p in (tmp_path / "full").iterdir()] == ["precious"]


def test_two_at_once_are_refused(folders: Path, tmp_path: Path) -> None:
    source = ImageFolderSource(folders)

    def second(samples: int, size: int) -> None:
        with pytest.raises(ConfigError, match="another process packs"):
            pack(source, tmp_path / "packed")

    assert pack(source, tmp_path / "packed", progress=second).samples == len(SIZES)


def test_progress_adds_up(folders: Path, tmp_path: Path) -> None:
    source, told = ImageFolderSource(folders), [0, 0]

    def progress(samples: int, size: int) -> None:
        told[0] += samples
        told[1] += size

    for times in (1, 2):
        pack(source, tmp_path / "packed", shard_bytes=9_000, progress=progress)
        assert told == [times * len(SIZES), times * sum(SIZES)]


def test_damage_on_the_way_is_noticed(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = os.fsync

    def damage(fd: int) -> None:
        if Path(f"/proc/self/fd/{fd}").readlink().suffix == ".part":
            os.pwrite(fd, b"!!", os.fstat(fd).st_size // 2)
        whole(fd)

    monkeypatch.setattr(os, "fsync", damage)
    with pytest.raises(SampleCorrupt, match="not written as it was read"):
        pack(ImageFolderSource(folders), tmp_path / "packed")
    assert not list((tmp_path / "packed").glob("*.tar"))


def test_too_little_space_is_said_before_anything_is_written(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = os.statvfs(tmp_path)
    full = os.statvfs_result([*status[:3], 1, 1, *status[5:]])
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    with pytest.raises(ConfigError, match="use another disk"):
        pack(ImageFolderSource(folders), tmp_path / "packed")
    assert not list((tmp_path / "packed").glob("shard*"))


@pytest.mark.parametrize(
    ("options", "words"), [({"shard_bytes": 0}, "shard_bytes=0"), ({}, "no samples")]
)
def test_bad_arguments(options: dict[str, int], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        pack(Spoilt([b"x"] if options else []), tmp_path / "packed", **options)
    assert not (tmp_path / "packed").exists()


def test_a_class_that_readers_leave_out_is_refused(tmp_path: Path) -> None:
    (tmp_path / "images" / "__cat__").mkdir(parents=True)
    (tmp_path / "images" / "__cat__" / "1.jpg").touch()
    with pytest.raises(ConfigError, match="rename it"):
        pack(ImageFolderSource(tmp_path / "images"), tmp_path / "packed")


def test_shards_without_folders_have_no_classes(tmp_path: Path) -> None:
    shards = pack(MemorySource([b"x"]), tmp_path / "packed").shards
    (tmp_path / "packed" / "again.jpg").write_bytes(b"x")
    with tarfile.open(tmp_path / "flat.tar", "w") as archive:
        archive.add(tmp_path / "packed" / "again.jpg", "1.jpg")
    with pytest.raises(ConfigError, match="no class"):
        open_image_folder(tmp_path / "flat.tar")
    assert len(open_source(shards)) == 1


def names_in(bucket: Bucket, prefix: str) -> list[str]:
    return sorted(
        entry["Key"].removeprefix(prefix)
        for entry in bucket._client.list_objects_v2(Bucket=bucket.name, Prefix=prefix)["Contents"]
    )


def test_a_bucket_gets_what_a_folder_gets(folders: Path, tmp_path: Path, bucket: Bucket) -> None:
    source, where = ImageFolderSource(folders), f"{bucket.url}/some/packed"
    packed = pack(source, where, shard_bytes=100_000, storage_options=bucket.options())
    local = pack(source, tmp_path / "packed", shard_bytes=100_000)
    assert [str(each).rpartition("/")[2] for each in packed.shards] == [
        Path(each).name for each in local.shards
    ]
    assert (packed.samples, packed.bytes) == (local.samples, local.bytes)
    pattern = f"{where}/shard-{{000000..{len(packed.shards) - 1:06d}}}.tar"
    read = open_image_folder(pattern, storage_options=bucket.options())
    assert content(read) == content(source)
    for name in (INDEX, "shard-000000.tar"):
        stored = bucket._client.get_object(Bucket=bucket.name, Key=f"some/packed/{name}")
        assert stored["Body"].read() == (tmp_path / "packed" / name).read_bytes()


def test_a_bucket_is_resumed_and_its_index_made_again(folders: Path, bucket: Bucket) -> None:
    source, where, told = ImageFolderSource(folders), f"{bucket.url}/packed", []

    def stop(samples: int, size: int) -> None:
        told.append(samples)
        if len(told) == 3:
            raise KeyboardInterrupt

    options = {"shard_bytes": 50_000, "storage_options": bucket.options()}
    with contextlib.suppress(KeyboardInterrupt):
        pack(source, where, progress=stop, **options)
    before = names_in(bucket, "packed/")
    assert MARKER in before and INDEX not in before and "shard-000001.tar" in before
    packed = pack(source, where, **options)
    assert 0 < packed.present < len(SIZES) == packed.samples
    assert INDEX in names_in(bucket, "packed/")
    again = pack(source, where, **options)
    assert again.present == len(SIZES)
    with pytest.raises(ConfigError, match="in another way"):
        pack(source, where, seed=5, **options)


def test_a_bucket_of_others_is_left_alone(folders: Path, bucket: Bucket) -> None:
    bucket.put({"full/precious": b"x"})
    source, options = ImageFolderSource(folders), {"storage_options": bucket.options()}
    with pytest.raises(ConfigError, match="not empty and not Stoker's"):
        pack(source, f"{bucket.url}/full", **options)
    assert names_in(bucket, "full/") == ["precious"]
    for url in ("http://host/packed", "memory://packed"):
        with pytest.raises(ConfigError, match="cannot be packed into"):
            pack(source, url)


def test_what_a_bucket_damages_is_noticed(
    folders: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = Writer.put_file

    def damaged(self: Writer, key: str, path: Path) -> None:
        whole = path.read_bytes()
        path.write_bytes(b"!!" + whole[2:])
        put(self, key, path)
        path.write_bytes(whole)

    monkeypatch.setattr(Writer, "put_file", damaged)
    with pytest.raises(SampleCorrupt, match="not stored as it was written"):
        pack(
            ImageFolderSource(folders),
            f"{bucket.url}/damaged",
            storage_options=bucket.options(),
        )


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The shards that were read for an index."""
    found: list[int] = []
    whole = ShardSource._members

    def members(self: ShardSource, shard: int, seek: int) -> object:
        found.append(shard)
        return whole(self, shard, seek)

    monkeypatch.setattr(ShardSource, "_members", members)
    return found


def test_no_machine_indexes_the_shards_again(
    folders: Path, tmp_path: Path, scans: list[int]
) -> None:
    shards = pack(ImageFolderSource(folders), tmp_path / "packed", shard_bytes=50_000).shards
    beside = ShardSource(shards)
    assert not scans
    made = ShardSource(shards, cache_index=False)
    assert sorted(scans) == list(range(len(shards)))
    assert beside.fingerprint == made.fingerprint
    ids = np.arange(len(SIZES))
    assert beside.read(ids) == made.read(ids)
    assert [beside.key(i) for i in ids] == [made.key(i) for i in ids]
    # Some of them, in another order.
    some = [shards[3], shards[0], shards[2]]
    scans.clear()
    part = ShardSource(some)
    assert not scans
    alone = ShardSource(some, cache_index=False)
    assert part.fingerprint == alone.fingerprint and part.extensions == alone.extensions
    assert part.read(np.arange(len(part))) == alone.read(np.arange(len(alone)))
    # Resumed, of shards that another call wrote too.
    Path(shards[1]).unlink()
    (tmp_path / "packed" / INDEX).unlink()
    pack(ImageFolderSource(folders), tmp_path / "packed", shard_bytes=50_000)
    assert (tmp_path / "packed" / INDEX).exists()


def _rewritten(packed: Path) -> None:
    """Another shard of the same size, with a file in it called otherwise."""
    shard = packed / "shard-000000.tar"
    data = bytearray(shard.read_bytes())
    end = data.index(b"\0")
    other = tarfile.TarInfo(data[:end].decode().replace(".", "-"))
    other.size, other.mode = (
        tarfile.TarInfo.frombuf(bytes(data[:512]), "utf-8", "strict").size,
        0o644,
    )
    data[:512] = other.tobuf(tarfile.USTAR_FORMAT)
    shard.write_bytes(data)


def _damaged(packed: Path) -> None:
    index = bytearray((packed / INDEX).read_bytes())
    index[len(index) // 2] ^= 1
    (packed / INDEX).write_bytes(index)


def _of_others(packed: Path) -> None:
    source = MemorySource([bytes([n]) * 900 for n in range(9)])
    pack(source, packed.with_name("other"), shard_bytes=6_000, seed=3)
    (packed / INDEX).write_bytes((packed.with_name("other") / INDEX).read_bytes())


@pytest.mark.parametrize("change", [_rewritten, _damaged, _of_others])
def test_an_index_of_other_shards_is_not_used(
    change: Callable[[Path], None],
    tmp_path: Path,
    scans: list[int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = MemorySource([bytes([n]) * 700 for n in range(9)])
    shards = pack(source, tmp_path / "packed", shard_bytes=6_000).shards
    change(tmp_path / "packed")
    found = ShardSource(shards)
    assert scans and "is not used" in caplog.text
    assert found.fingerprint == ShardSource(shards, cache_index=False).fingerprint


def test_an_index_that_makes_no_sense_is_refused(tmp_path: Path) -> None:
    shards = pack(MemorySource([b"1", b"22", b"333"]), tmp_path / "packed").shards
    index, sizes = ShardSource(shards)._parts, np.array([Path(shards[0]).stat().st_size])
    index.check(sizes)
    for name, wrong in {
        "first": np.array([0, 2, 1, 3]),
        "shards": np.array([0, 0, 1], np.uint32),
        "starts": np.array([0, 1, sizes[0]]),
        "sizes": np.array([1, -2, 3]),
        "kinds": np.array([0, 0, 9], np.uint32),
        "offsets": np.array([0, 5, 3, len(index.names)]),
        "names": index.names[:-1],
    }.items():
        with pytest.raises(SampleCorrupt, match="does not fit"):
            replace(index, **{name: wrong}).check(sizes)
