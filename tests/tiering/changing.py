"""Changes files that have copies, and prints what it then reads; for ``stoker run``.

``changing.py FOLDER HOW``: ``HOW`` is the process that changes them: ``itself``, a ``fork`` of it,
or another ``program``. With ``change`` it changes them and does nothing else.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path


def change(folder: Path) -> None:
    """Change files in ways other than to write to them."""
    (folder / "a/01.bin").replace(folder / "a/00.bin")
    (folder / "a/02.bin").unlink()
    os.truncate(folder / "a/03.bin", 100)
    (folder / "a/04.bin").unlink()
    os.link(folder / "a/05.bin", folder / "a/04.bin")
    (folder / "a/06.bin").unlink()
    (folder / "a/06.bin").symlink_to("07.bin")
    (folder / "b").rename(folder / "c/b")
    (folder / "a/08.bin").chmod(0)


def is_copy(path: Path) -> bool:
    """Whether opening the file opens a copy."""
    file = os.open(path, os.O_RDONLY)
    try:
        return "copies" in Path(f"/proc/self/fd/{file}").readlink().parts
    finally:
        os.close(file)


def read(path: Path) -> str:
    """What the file holds, or why it cannot be read."""
    try:
        return f"{path.read_bytes()!r} {path.stat().st_mode:o}"
    except OSError as error:
        return str(error.errno)


def main() -> None:
    """Do as the arguments say."""
    folder, how = Path(sys.argv[1]), sys.argv[2]
    if how == "change":
        change(folder)
        return
    names = [f"{sub}/{i:02d}.bin" for sub in "ab" for i in range(10)]
    deadline = time.monotonic() + 60
    while "STOKER_TIERING" in os.environ and not all(is_copy(folder / name) for name in names):
        assert time.monotonic() < deadline, "files are not placed"
        time.sleep(0.05)
    if how == "itself":
        change(folder)
    elif how == "program":
        subprocess.run([sys.executable, __file__, folder, "change"], check=True)
    elif (child := os.fork()) == 0:
        change(folder)
        os._exit(0)
    else:
        assert os.waitpid(child, 0)[1] == 0
    for name in [*names, "c/b/00.bin", "c/b/09.bin"]:
        print(name, read(folder / name))


if __name__ == "__main__":
    main()
