"""Python's ways of reading a file, and the libraries that training programs read with."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shim.hand import HandDaemon

PRELUDE = """
import os, sys
path = sys.argv[1]
expected = open(sys.argv[2], "rb").read()
"""

READERS = {
    "open": "assert open(path, 'rb').read() == expected",
    "open, unbuffered": "assert open(path, 'rb', buffering=0).readall() == expected",
    "open, by lines": "assert b''.join(open(path, 'rb')) == expected",
    "os.open": "fd = os.open(path, os.O_RDONLY); assert os.read(fd, 1 << 20) == expected",
    "os.pread": "fd = os.open(path, 0); assert os.pread(fd, 99, 7) == expected[7:106]",
    "os.preadv": "fd = os.open(path, 0); b = bytearray(9); os.preadv(fd, [b], 3); "
    "assert b == expected[3:12]",
    "os.readv": "fd = os.open(path, 0); a, b = bytearray(5), bytearray(6); os.readv(fd, [a, b]); "
    "assert a + b == expected[:11]",
    "pathlib": "import pathlib; assert pathlib.Path(path).read_bytes() == expected",
    "io.FileIO": "import io; assert io.FileIO(path).readall() == expected",
    "dir_fd": "at = os.open(os.path.dirname(path), 0); "
    "assert os.read(os.open(os.path.basename(path), 0, dir_fd=at), 1 << 20) == expected",
    "mmap": "import mmap; f = open(path, 'rb'); "
    "assert mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)[:] == expected",
    "seek": "f = open(path, 'rb'); f.seek(-5, 2); assert f.read() == expected[-5:]; "
    "f.seek(2); assert f.read(3) == expected[2:5] and f.tell() == 5",
    "shutil": "import shutil; shutil.copyfile(path, sys.argv[2] + '.copy'); "
    "assert open(sys.argv[2] + '.copy', 'rb').read() == expected; "
    "shutil.copy2(path, sys.argv[2] + '.2'); assert open(sys.argv[2] + '.2', 'rb').read() "
    "== expected and os.stat(path).st_mtime_ns == os.stat(sys.argv[2] + '.2').st_mtime_ns",
    "sendfile": "import socket; a, b = socket.socketpair(); f = open(path, 'rb'); "
    "assert os.sendfile(a.fileno(), f.fileno(), 0, 50) == 50 and b.recv(50) == expected[:50]",
    "filecmp": "import filecmp; assert filecmp.cmp(path, sys.argv[2], shallow=False)",
    "hashlib": "import hashlib; assert hashlib.file_digest(open(path, 'rb'), 'sha256').digest() "
    "== hashlib.sha256(expected).digest()",
    "threads": "from concurrent.futures import ThreadPoolExecutor as P; "
    "read = lambda _: open(path, 'rb').read(); "
    "assert set(P(8).map(read, range(200))) == {expected}",
    "subprocess": "import subprocess; assert subprocess.check_output(['cat', path]) == expected; "
    "assert subprocess.check_output(['cat'], stdin=open(path)) == expected",
    "multiprocessing": "import multiprocessing as m, pathlib; p = m.get_context('fork').Pool(2); "
    "assert set(p.map(pathlib.Path.read_bytes, [pathlib.Path(path)] * 9)) == {expected}",
    "np.fromfile": "import numpy as np; assert np.fromfile(path, 'u1').tobytes() == expected",
    "np.memmap": "import numpy as np; assert np.memmap(path, 'u1', 'r').tobytes() == expected",
}


@pytest.mark.parametrize("reader", READERS)
def test_reads_the_same_bytes(reader: str, source: Path, tmp_path: Path) -> None:
    """Small and large, not yet placed and placed."""
    code = PRELUDE + READERS[reader]
    for name in ("large", "sub/two"):
        content = (source / "large").read_bytes()[: 50_000 if name == "sub/two" else None]
        (source / name).write_bytes(content)
        (tmp_path / "expected").write_bytes(content)
        with HandDaemon(source, places=True) as daemon:
            for time in range(10):  # cold, placed; on a busy machine the first may not have waited
                daemon.run([sys.executable, "-c", code, source / name, tmp_path / "expected"])
                if time and daemon.counted()["tier_opens"]:
                    break
            assert daemon.counted()["tier_opens"] >= 1


FORMATS = {
    "zipfile": (
        "z = zipfile.ZipFile(path, 'w'); [z.writestr(str(i), data) for i in range(9)]; z.close()",
        "z = zipfile.ZipFile(path); assert all(z.read(n) == data for n in z.namelist()); "
        "assert not z.testzip()",
    ),
    "tarfile": (
        "t = tarfile.open(path, 'w')\n"
        "for i in range(9):\n"
        "    info = tarfile.TarInfo(str(i)); info.size = len(data)\n"
        "    t.addfile(info, io.BytesIO(data))\n"
        "t.close()",
        "t = tarfile.open(path)\n"
        "assert [t.extractfile(m).read() == data for m in t] == [True] * 9\n"
        "assert sum(1 for m in tarfile.open(path, 'r|')) == 9",
    ),
    "gzip": (
        "gzip.open(path, 'wb').write(data)",
        "assert gzip.open(path).read() == data",
    ),
    "sqlite3": (
        "c = sqlite3.connect(path); c.execute('create table t (x)'); "
        "c.execute('insert into t values (?)', (data,)); c.commit(); c.close()",
        "c = sqlite3.connect(f'file:{path}?mode=ro', uri=True)\n"
        "assert c.execute('select x from t').fetchall() == [(data,)]\n"
        "c.close(); c = sqlite3.connect(path); c.execute('insert into t values (1)'); c.commit()\n"
        "assert c.execute('select count(*) from t').fetchall() == [(2,)]\n"
        "c.execute('delete from t where x = 1'); c.commit(); c.close()",
    ),
    "numpy": (
        "np.save(open(path, 'wb'), np.frombuffer(data, 'u1'))",
        "assert np.load(path).tobytes() == data; "
        "assert np.load(path, mmap_mode='r').tobytes() == data",
    ),
    "npz": (
        "np.savez(open(path, 'wb'), a=np.frombuffer(data, 'u1'))",
        "assert np.load(path)['a'].tobytes() == data",
    ),
    "Pillow": (
        "Image.frombytes('L', (200, 150), data).save(path, 'png')",
        "i = Image.open(path); i.load(); assert i.tobytes() == data; "
        "assert Image.open(open(path, 'rb')).convert('RGB').size == (200, 150)",
    ),
    "h5py": (
        "h5py.File(path, 'w')['x'] = np.frombuffer(data, 'u1')",
        "f = h5py.File(path); g = h5py.File(path); assert f['x'][:].tobytes() == data; "
        "assert g['x'][5:10].tobytes() == data[5:10]",
    ),
    "torch": (
        "torch.save(torch.frombuffer(bytearray(data), dtype=torch.uint8), path)",
        "assert bytes(torch.load(path).numpy()) == data; "
        "assert bytes(torch.load(path, mmap=True).numpy()) == data",
    ),
}
NEEDS = {"Pillow": "PIL", "h5py": "h5py", "torch": "torch"}
IMPORTS = {"Pillow": "from PIL import Image", "h5py": "import h5py", "torch": "import torch"}


@pytest.mark.parametrize("kind", FORMATS)
def test_file_formats(kind: str, source: Path) -> None:
    if kind in NEEDS:
        pytest.importorskip(NEEDS[kind])
    write, read = FORMATS[kind]
    prelude = "import gzip, io, sqlite3, sys, tarfile, zipfile, numpy as np\n"
    prelude += IMPORTS.get(kind, "") + "\npath = sys.argv[1]\n"
    prelude += "data = np.random.default_rng(1).integers(0, 256, 30000, 'u1').tobytes()\n"
    path = source / f"file.{kind}"
    with HandDaemon(source, places=True) as daemon:
        # Written below the source by a program under the shim, as preprocessing does.
        daemon.run([sys.executable, "-c", prelude + write, path])
        for _ in ("cold", "placed"):
            daemon.run([sys.executable, "-c", prelude + read, path])
        assert daemon.counted()["tier_opens"] >= 1


READS_ALONG = """
import os, sys
kept = [os.open(sys.argv[1], os.O_RDONLY) for _ in range(4)]
plain = kept[0]
other = os.dup(kept[1])
os.set_inheritable(kept[2], True)
print(os.read(plain, 1000) == b"c" * 1000, flush=True)
sys.stdin.readline()
if sys.argv[2] == "fork" and os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
for fd in kept:
    os.pread(fd, 1, 1)
print([os.readlink(f"/proc/self/fd/{fd}") == sys.argv[3] for fd in kept])
print(os.read(plain, 5) + os.read(plain, 5), os.lseek(plain, 0, os.SEEK_CUR))
print(os.get_inheritable(plain), os.read(other, 3), os.read(kept[1], 3))
"""


@pytest.mark.parametrize("process", ["same", "fork"])
def test_t7_a_descriptor_becomes_the_copy_when_that_is_complete(process: str, source: Path) -> None:
    """Not those that another number, a child or a program might share: they keep one offset."""
    copy = b"c" * 1000 + bytes(range(250)) * 1000
    with HandDaemon(source) as daemon:
        number = daemon.begin("large")
        daemon.advance(number, copy[:5000])
        with subprocess.Popen(
            [sys.executable, "-c", READS_ALONG, source / "large", process, daemon.copies / "large"],
            env=daemon.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        ) as program:  # fmt: skip
            assert program.stdout and program.stdout.readline() == "True\n"
            daemon.finish(number, copy)
            said, _ = program.communicate("\n", timeout=60)
        assert program.returncode == 0
    swapped = process == "same"
    assert said.splitlines() == [
        str([swapped, False, False, swapped]),
        f"{copy[1000:1010]!r} 1010",
        f"False {copy[:3]!r} {copy[3:6]!r}",
    ]
