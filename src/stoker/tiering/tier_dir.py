"""The directory of one tier: marked as Stoker's, of one source, with copies of its files."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from stoker.errors import ConfigError, SegmentError, StateMismatch
from stoker.store.ofd import try_lock

MARKER = ".stoker-tier"
"""File that marks the directory as Stoker's; nothing is ever removed from one without it."""

_META, _COPIES, _PARTS = "meta.json", "copies", "parts"
_PART = re.compile(r"[0-9]+")
_HARMLESS = {"lost+found"}  # what a new file system has of its own


class TierDir:
    """A directory that holds whole copies of a source's files; one process has it at a time.

    The copy of ``a/b.jpg`` is ``copies/a/b.jpg``, with the file's size and modification time, by
    which the next run knows whether it is still good. Unfinished copies lie in ``parts``.
    Construction makes and marks the directory and removes unfinished copies; it raises
    :class:`~stoker.errors.ConfigError` where the directory cannot be used,
    :class:`~stoker.errors.StateMismatch` if it is another source's, and
    :class:`~stoker.errors.SegmentError` while another process has it. Threads may share it.
    """

    def __init__(self, path: Path, source: Path) -> None:
        self.path = path
        self.copies = path / _COPIES
        self.parts = path / _PARTS
        with _errors_named(path):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_ours(path)
            self._marker = os.open(path / MARKER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if not try_lock(self._marker):
                raise SegmentError(f"{path} is in use by another run: use another directory")
            with _errors_named(path):
                self._claim(source)
                self.copies.mkdir(mode=0o700, exist_ok=True)
                self.parts.mkdir(mode=0o700, exist_ok=True)
                _clear_parts(self.parts)
                self.used = sum(size for _, size in _walk(self.copies))
                """Bytes of the copies that were there when it was opened."""
                self.dev = self.parts.stat().st_dev
        except BaseException:
            os.close(self._marker)
            raise

    def close(self) -> None:
        """Let another process have the directory; the copies stay."""
        os.close(self._marker)

    def copy_of(self, relative: bytes) -> Path:
        """Return where the copy of a file is or would be; ``relative`` to the source."""
        return self.copies / os.fsdecode(relative)

    def part_of(self, entry: int) -> Path:
        """Return where the copy that an entry of the table describes is made."""
        return self.parts / str(entry)

    def is_there(self) -> bool:
        """Whether the directory still is the one that was opened: not removed, not unmounted."""
        try:
            return os.path.samestat((self.path / MARKER).stat(), os.fstat(self._marker))
        except OSError:
            return False

    def _claim(self, source: Path) -> None:
        """Write down whose copies these are, or refuse those of another source."""
        meta = self.path / _META
        wanted = {"source": os.fsencode(source).hex(), "named": str(source), "version": 1}
        way_out = f"run `stoker clean --cache-dir {self.path}`, or use another directory"
        try:
            found = json.loads(meta.read_text())
            holds = found["named"] if found != wanted else None
        except FileNotFoundError:
            if self.copies.exists():
                raise StateMismatch(
                    f"{self.path} holds copies and nothing says of which source: {way_out}"
                ) from None
            fresh = self.path / f"{_META}.new"
            fresh.write_text(json.dumps(wanted, ensure_ascii=True))
            fresh.replace(meta)
            return
        except (ValueError, TypeError, KeyError) as error:
            raise StateMismatch(f"{meta} is not legible ({error!r}): {way_out}") from error
        if holds is not None:
            raise StateMismatch(f"{self.path} holds copies of {holds}, not of {source}: {way_out}")


def is_tier(path: Path) -> bool:
    """Whether the directory is marked as a tier of Stoker's."""
    return (path / MARKER).is_file()


def clean(path: Path) -> int:
    """Remove the copies in a tier, and return how many bytes they had; the directory stays.

    Raises :class:`~stoker.errors.ConfigError` for a directory without the marker, and
    :class:`~stoker.errors.SegmentError` while a run uses it. Links are removed, not followed.
    """
    if not is_tier(path):
        raise ConfigError(f"{path} has no {MARKER}: it is no tier of Stoker's")
    with _errors_named(path):
        marker = os.open(path / MARKER, os.O_RDWR | os.O_CLOEXEC)
        try:
            if not try_lock(marker):
                raise SegmentError(f"{path} is in use: end the runs that use it first")
            freed = sum(_remove_files(path / name) for name in (_COPIES, _PARTS))
            for name in (f"{_META}.new", _META, MARKER):
                (path / name).unlink(missing_ok=True)
        finally:
            os.close(marker)
    return freed


def _check_ours(path: Path) -> None:
    names = {entry.name for entry in path.iterdir()} - _HARMLESS
    if names and MARKER not in names:
        raise ConfigError(
            f"tier {str(path)!r} is not empty and not Stoker's (it holds {min(names)!r}): "
            "use an empty or a new directory"
        )
    if not os.access(path, os.W_OK | os.X_OK, effective_ids=True):
        raise ConfigError(f"tier {str(path)!r} may not be written: use another directory")


def _clear_parts(folder: Path) -> None:
    for part in folder.iterdir():
        if _PART.fullmatch(part.name) and part.is_file() and not part.is_symlink():
            part.unlink()


def _walk(folder: Path) -> Iterator[tuple[str, int]]:
    """Yield path and size of every file below; what is neither file nor folder is not ours."""
    pending = [str(folder)]
    while pending:
        with os.scandir(pending.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
                elif entry.is_file(follow_symlinks=False):
                    yield entry.path, entry.stat(follow_symlinks=False).st_size


def _remove_files(folder: Path) -> int:
    """Remove the files below and the folders that are empty then; return the files' bytes."""
    if not folder.is_dir() or folder.is_symlink():
        return 0
    freed = 0
    for path, size in list(_walk(folder)):
        Path(path).unlink()
        freed += size
    for parent, _, _ in os.walk(folder, topdown=False):
        with contextlib.suppress(OSError):  # something in it is not ours
            Path(parent).rmdir()
    return freed


@contextlib.contextmanager
def _errors_named(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"tier {str(path)!r} cannot be used ({error.strerror}): "
            "use a directory on a local disk or in memory that you may write"
        ) from error
