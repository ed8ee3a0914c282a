"""ShardSource and what it is made of: tar files of all kinds, parts, ranges, damage."""

from __future__ import annotations

import io
import os
import struct
import subprocess
import tarfile
from itertools import islice
from pathlib import Path
from typing import Any

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.s3 import Bucket

from stoker.errors import ConfigError, SampleCorrupt, SampleNotFound
from stoker.source import ShardSource, Source, join_parts, split_parts
from stoker.source.shard_index import Member, members
from stoker.source.shards import expand
from stoker.testing import SourceConformance

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")

FORMATS = {
    "ustar": tarfile.USTAR_FORMAT,
    "gnu": tarfile.GNU_FORMAT,
    "pax": tarfile.PAX_FORMAT,
}


def pack(files: list[tuple[str, bytes]], format: int = tarfile.PAX_FORMAT) -> bytes:
    """Return a tar file of these files."""
    into = io.BytesIO()
    with tarfile.open(fileobj=into, mode="w", format=format) as archive:
        for name, data in files:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return into.getvalue()


def write(folder: Path, shards: list[list[tuple[str, bytes]]], **how: Any) -> list[Path]:
    paths = [folder / f"{number:03d}.tar" for number in range(len(shards))]
    for path, files in zip(paths, shards, strict=True):
        path.write_bytes(pack(files, **how))
    return paths


@pytest.mark.exact("Tar shards, WebDataset", "a source, of local files")
class TestLocalShards(SourceConformance):
    def make(self, samples: list[bytes], tmp_path: Path) -> Source:
        files = [(f"{number:04d}.bin", sample) for number, sample in enumerate(samples)]
        return ShardSource(write(tmp_path, [files[:17], files[17:]]), part="bin")


@pytest.mark.exact("Tar shards, WebDataset", "in S3")
class TestShardsInS3(SourceConformance):
    @pytest.fixture(autouse=True)
    def _bucket(self, bucket: Bucket) -> None:
        self.bucket = bucket

    def make(self, samples: list[bytes], tmp_path: Path) -> Source:
        files = [(f"{number:04d}.bin", sample) for number, sample in enumerate(samples)]
        folder = tmp_path.name
        self.bucket.put({f"{folder}/0.tar": pack(files[:9]), f"{folder}/1.tar": pack(files[9:])})
        return ShardSource(
            f"{self.bucket.url}/{folder}/{{0..1}}.tar",
            part="bin",
            storage_options=self.bucket.options(),
        )


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("size", [0, 1, 511, 512, 513, 100_000])
def test_every_kind_of_tar_file_is_read(tmp_path: Path, format: str, size: int) -> None:
    folder = "f" * (90 if format == "ustar" else 300)
    files = [
        (f"{folder}/{'n' * (90 if format == 'ustar' else 200)}{number}.{kind}", os.urandom(size))
        for number in range(5)
        for kind in ("jpg", "seg.png", "cls")
    ]
    source = ShardSource(write(tmp_path, [files], format=FORMATS[format]))
    assert len(source) == 5
    assert source.extensions == ("jpg", "seg.png", "cls")
    for number, sample in enumerate(source.read(range(5))):
        parts = {name: bytes(part) for name, part in split_parts(sample).items()}
        assert list(parts) == ["jpg", "seg.png", "cls"]
        assert list(parts.values()) == [data for _, data in files[3 * number : 3 * number + 3]]
        assert source.name(number) == f"{tmp_path}/000.tar#{files[3 * number][0][:-4]}"
        assert source.sizes[number] == len(sample)


@pytest.mark.parametrize("options", [["--format=gnu"], ["--format=pax"], ["--format=v7"]])
def test_what_the_tar_program_writes_is_read(tmp_path: Path, options: list[str]) -> None:
    data = tmp_path / "data"
    (data / "sub").mkdir(parents=True)
    for name in ("a.jpg", "a.cls", "sub/b.jpg", "sub/b.cls"):
        (data / name).write_bytes(name.encode())
    (data / "sub" / "link.jpg").symlink_to("b.jpg")
    subprocess.run(
        ["tar", *options, "--sort=name", "-cf", tmp_path / "x.tar", "-C", data, "."], check=True
    )
    source = ShardSource(tmp_path / "x.tar")
    found = {
        source.name(i).partition("#")[2]: {k: bytes(v) for k, v in split_parts(s).items()}
        for i, s in enumerate(source.read(range(len(source))))
    }
    assert found == {
        "a": {"cls": b"a.cls", "jpg": b"a.jpg"},
        "sub/b": {"cls": b"sub/b.cls", "jpg": b"sub/b.jpg"},
    }


@pytest.mark.exact("Tar shards, WebDataset", "files are grouped as WebDataset does")
def test_files_are_grouped_as_webdataset_does(tmp_path: Path) -> None:
    names = ["a.jpg", "a.CLS", "b.jpg", "__meta__/x.json", ".hidden", "noext", "b.cls", "a.jpg",
             "d.1/c.x.jpg", "d.1/c.cls"]  # fmt: skip
    (path,) = write(tmp_path, [[(name, name.encode()) for name in names]])
    source = ShardSource(path)
    read = [
        {name: bytes(part) for name, part in split_parts(sample).items()}
        for sample in source.read(range(len(source)))
    ]
    assert read == [
        {"jpg": b"a.jpg", "cls": b"a.CLS"},
        {"jpg": b"b.jpg", "cls": b"b.cls"},
        {"jpg": b"a.jpg"},
        {"x.jpg": b"d.1/c.x.jpg", "cls": b"d.1/c.cls"},
    ]


def test_a_sample_ends_with_its_shard(tmp_path: Path) -> None:
    paths = write(tmp_path, [[("a.jpg", b"1")], [("a.cls", b"2")]])
    assert len(ShardSource(paths)) == 2


def test_shards_are_breaks(tmp_path: Path) -> None:
    files = [(f"{n}.bin", b"x") for n in range(9)]
    with ShardSource(write(tmp_path, [files[:2], [], files[2:7], files[7:]])) as source:
        assert source.breaks.tolist() == [2, 7]
    with ShardSource(write(tmp_path, [files])) as source:
        assert source.breaks.tolist() == []


def test_one_part_of_each_sample(tmp_path: Path) -> None:
    files = [("a.jpg", b"1"), ("a.cls", b"7"), ("b.cls", b"8"), ("b.png", b"2"), ("c.jpg", b"3")]
    (path,) = write(tmp_path, [files])
    assert ShardSource(path, part="jpg;png").read([2, 1, 0]) == [b"3", b"2", b"1"]
    assert ShardSource(path, part="PNG;JPG").read([0]) == [b"1"]
    with pytest.raises(ConfigError, match="1 samples have no such part, the first is 'c'"):
        ShardSource(path, part="cls")
    assert ShardSource(path, part="jpg;png").fingerprint != ShardSource(path).fingerprint


def test_neighbours_come_in_one_request(tmp_path: Path) -> None:
    files = [(f"{number:04d}.bin", os.urandom(1000)) for number in range(100)]
    paths = write(tmp_path, [files, files])
    source = ShardSource(paths, part="bin")
    before = source.tally.requests
    assert source.read(range(200)) == [data for _, data in files] * 2
    assert source.tally.requests == before + 2
    source.read([0, 199, 1, 198, 30])
    assert source.tally.requests == before + 4
    apart = ShardSource(paths, part="bin", coalesce_gap=0, largest_request=1)
    before = apart.tally.requests
    assert apart.read([5, 4, 5]) == [files[5][1], files[4][1], files[5][1]]
    assert apart.tally.requests == before + 3


def test_large_files_are_skipped_by_the_index(tmp_path: Path) -> None:
    files = [(f"{number}.bin", bytes(1_000_000)) for number in range(20)]
    source = ShardSource(write(tmp_path, [files]), part="bin")
    assert source.tally.received_bytes < 500_000
    assert source.sizes.tolist() == [1_000_000] * 20


def test_the_index_is_kept_until_a_shard_changes(tmp_path: Path) -> None:
    paths = write(tmp_path, [[("a.x", b"1")], [("b.x", b"2")]])
    first = ShardSource(paths)
    again = ShardSource(paths)
    assert first.tally.requests > 0
    assert again.tally.requests == 0
    assert again.fingerprint == first.fingerprint
    assert [again.name(i) for i in (0, 1)] == [first.name(i) for i in (0, 1)]
    assert ShardSource(paths, cache_index=False).tally.requests > 0
    paths[1].write_bytes(pack([("b.x", b"3")]))
    changed = ShardSource(paths)
    assert changed.fingerprint != first.fingerprint
    assert split_parts(changed.read([1])[0])["x"] == b"3"


def test_s12_the_index_of_a_shard_rewritten_with_the_same_size_and_time_is_made_anew(
    tmp_path: Path,
) -> None:
    (path,) = write(tmp_path, [[("a.x", b"1"), ("b.x", b"2")]])
    os.utime(path, ns=(10**18, 10**18))
    first = ShardSource(path)
    path.write_bytes(pack([("c.x", b"3"), ("d.x", b"4")]))
    os.utime(path, ns=(10**18, 10**18))
    again = ShardSource(path)
    assert (first.name(0), again.name(0)) != (first.name(0), first.name(0))
    assert again.tally.requests > 0 and again.local_identity != first.local_identity
    assert split_parts(again.read([0])[0])["x"] == b"3"


def test_shards_that_change_are_found_out(tmp_path: Path) -> None:
    paths = write(tmp_path, [[("a.x", b"1")], [("b.x", b"2")], [("c.x", b"3")]])
    source = ShardSource(paths)
    paths[1].write_bytes(pack([("longer.x", bytes(20_000))]))
    paths[2].unlink()
    samples, errors = source.read_each([0, 1, 2])
    assert samples[0] is not None
    assert {index: type(error) for index, error in errors.items()} == {
        1: SampleCorrupt,
        2: SampleNotFound,
    }
    assert str(paths[1]) in str(errors[1])


def test_fsspec_shards(tmp_path: Path) -> None:
    files = fsspec.filesystem("memory")
    files.store.clear()
    files.pipe("/shards/0.tar", pack([("a.x", b"1"), ("a.y", b"2")]))
    source = ShardSource("memory://shards/0.tar")
    assert {name: bytes(part) for name, part in split_parts(source.read([0])[0]).items()} == {
        "x": b"1",
        "y": b"2",
    }
    assert source.name(0) == "memory:///shards/0.tar#a"


def test_damaged_shards_are_refused(tmp_path: Path) -> None:
    good = pack([("a.x", bytes(2000)), ("b.x", bytes(2000))])
    damaged = {
        "cut off": good[:3000],
        "not one of a tar": good[:100] + b"?" + good[101:],
        "cut off in a header": good[:2600],
        "second part": pack([("a.x", b"1"), ("a.X", b"2")]),
    }
    for number, (message, data) in enumerate(damaged.items()):
        path = tmp_path / f"{number}.tar"
        path.write_bytes(data)
        with pytest.raises(SampleCorrupt, match=f"{number}.tar.*{message}"):
            ShardSource(path)


def test_bad_arguments_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    for mode in ("gz", "bz2", "xz"):
        with tarfile.open(path, f"w:{mode}") as archive:
            archive.add(__file__, "a.x")
        with pytest.raises(ConfigError, match=r"x\.tar.*compressed with"):
            ShardSource(path)
    for name in ("x.tar.gz", "x.tgz", "x.tar.zst"):
        with pytest.raises(ConfigError, match="is compressed"):
            ShardSource(name)
    with pytest.raises(ConfigError, match="empty"):
        ShardSource([])
    with pytest.raises(ConfigError, match="several locations"):
        ShardSource(["s3://a/x.tar", "s3://b/x.tar"])
    with pytest.raises(ConfigError, match="coalesce_gap=-1"):
        ShardSource(path, coalesce_gap=-1)
    with pytest.raises(SampleNotFound, match=r"gone\.tar"):
        ShardSource(tmp_path / "gone.tar")
    path.write_bytes(pack([("noextension", b"1")]))
    with pytest.raises(ConfigError, match="no samples"):
        ShardSource(path)


def test_braces_that_stand_for_too_many_are_refused() -> None:
    for pattern in ("{0..99999999999}.tar", "{0..9999}" * 3 + ".tar"):
        with pytest.raises(ConfigError, match="give at most"):
            expand(pattern)
    assert expand("{0.." + "9" * 5000 + "}.tar")  # no number: a name


def test_braces_are_written_out() -> None:
    assert expand("s3://b/{000..002}.tar") == [f"s3://b/00{i}.tar" for i in range(3)]
    assert expand("{a,b}-{9..10}.tar") == ["a-9.tar", "a-10.tar", "b-9.tar", "b-10.tar"]
    assert expand(["x.tar", Path("y.tar")]) == ["x.tar", "y.tar"]
    with pytest.raises(ConfigError, match="counts down"):
        expand("{3..1}.tar")


@given(st.dictionaries(st.text(max_size=10), st.binary(max_size=50), max_size=5))
def test_parts_are_told_apart(parts: dict[str, bytes]) -> None:
    split = split_parts(join_parts(parts))
    assert {name: bytes(part) for name, part in split.items()} == parts


def header(name: str = "a.bin", kind: bytes = tarfile.REGTYPE, **fields: Any) -> bytearray:
    """Return one header of 512 bytes."""
    info = tarfile.TarInfo(name)
    info.type = kind
    for field, value in fields.items():
        setattr(info, field, value)
    return bytearray(info.tobuf(tarfile.GNU_FORMAT))


def summed(block: bytearray) -> bytes:
    """Return the header with the checksum that it should have."""
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def negative(size: int) -> bytes:
    block = header()
    block[124:136] = b"\xff" + size.to_bytes(11, "big", signed=True)
    return summed(block)


def with_pax(*records: bytes, name: str = "a.bin") -> bytes:
    """Return a pax header with these records, then a file of 3 bytes."""
    data = b"".join(records)
    return (
        bytes(header("pax", tarfile.XHDTYPE, size=len(data)))
        + data.ljust(-(-len(data) // 512) * 512, b"\0")
        + bytes(header(name, size=3))
        + b"abc".ljust(512, b"\0")
    )


def record(name: bytes, value: bytes) -> bytes:
    body = b" " + name + b"=" + value + b"\n"
    length = len(body)
    while len(str(length)) + len(body) != length:
        length = len(str(length)) + len(body)
    return str(length).encode() + body


def first_members(archive: bytes, most: int = 100) -> list[Member]:
    """Return at most so many files, so that a loop without end is seen."""

    def read(start: int, length: int) -> memoryview:
        return memoryview(archive)[start : start + length]

    return list(islice(members(read, len(archive), 1 << 20), most))


HOSTILE = {
    "one block back": negative(-512),
    "far back": negative(-(1 << 40)),
    "no number": with_pax(record(b"size", b"abc")),
    "no digit": with_pax(record(b"size", "²".encode())),
    "negative": with_pax(record(b"size", b"-512")),
    "a size of 5,000 digits": with_pax(record(b"size", b"9" * 5000)),
    "a size past the end": with_pax(record(b"size", b"4096")),
    "a record without an end": with_pax(b"9 path=a"),
    "a record of no length": with_pax(b"0 path=a\n"),
    "a record that is too long": with_pax(b"99999999999999999999 path=a\n"),
    "a record without a value": with_pax(b"7 path\n"),
    "a NUL in a name": with_pax(record(b"path", b"a.b\0c")),
    "a name too long": with_pax(record(b"path", b"a" * 5000 + b".bin")),
}


@pytest.mark.parametrize("archive", HOSTILE.values(), ids=HOSTILE)
def test_c5_hostile_archives_are_refused(archive: bytes, tmp_path: Path) -> None:
    archive += bytes(1024)
    with pytest.raises(SampleCorrupt):
        first_members(archive)
    path = tmp_path / "000.tar"
    path.write_bytes(archive)
    with pytest.raises(SampleCorrupt, match=r"000\.tar"):
        ShardSource(path)


def test_c5_an_extension_that_is_not_utf8_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "000.tar"
    path.write_bytes(with_pax(record(b"path", b"a.j\xffg")) + bytes(1024))
    with pytest.raises(SampleCorrupt, match=r"000.tar.*extension that is not UTF-8"):
        ShardSource(path)


@pytest.mark.parametrize("kind", [tarfile.DIRTYPE, tarfile.LNKTYPE, tarfile.SYMTYPE])
def test_what_is_no_file_has_no_data(kind: bytes) -> None:
    archive = summed(header("x", kind, size=4096)) + with_pax(record(b"comment", b"1"))
    assert first_members(archive + bytes(1024)) == [Member("a.bin", 2048, 3)]


def test_what_has_no_parts_is_corrupt() -> None:
    sample = join_parts({"jpg": b"123", "cls": b"4"})
    for bad in (sample[:-1], sample[:5], b"\xff\xd8\xff" * 10, struct.pack("<HQ", 1, 0) + b"\xff"):
        with pytest.raises(SampleCorrupt):
            split_parts(bad)
