"""Which files and folders are this user's own, so that their content may be trusted.

Caches, copies, locks and sockets are in places that other users may have prepared: /tmp, /dev/shm,
a scratch file system. What is accepted belongs to this user, to root or to users named in
``STOKER_TRUST``, and no other user may write it. The check uses the open descriptor, and contents
are read through it, so no other folder can be put in its place after the check. A user who may
write to a folder above can therefore remove things, and no more.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import grp
import os
import pwd
import stat
from pathlib import Path
from typing import NamedTuple

from stoker.errors import ConfigError, UntrustedPath
from stoker.node.descriptors import Descriptor

TRUST = "STOKER_TRUST"
"""Names the variable: users whose files are taken for one's own, and ``@group`` for groups whose
members may write them, with commas between; ``*`` is everybody, for machines and containers without
other users whose volumes know no owners."""

_HARMLESS = {"lost+found"}  # what a new file system has of its own
_LINKS = 40  # as many as the kernel follows
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FRESH = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_LOOK = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC  # needs no permission to read
_OTHERS, _GROUP = stat.S_IWOTH, stat.S_IWGRP


class _Trusted(NamedTuple):
    users: frozenset[int]
    groups: frozenset[int]
    everybody: bool


def trusts(status: os.stat_result) -> bool:
    """Whether a file with this status belongs to a trusted user.

    Raises :class:`~stoker.errors.ConfigError` for an invalid ``STOKER_TRUST``.
    """
    trusted = _trusted()
    return trusted.everybody or status.st_uid in trusted.users


def trusts_user(user: int) -> bool:
    """Whether that is this user, root or a trusted one; raises as :func:`trusts` does."""
    trusted = _trusted()
    return trusted.everybody or user in trusted.users


def check(status: os.stat_result, path: Path) -> None:
    """Raise :class:`~stoker.errors.UntrustedPath` unless only trusted users may write it.

    ``path`` is what it is called.
    """
    trusted = _trusted()
    if trusted.everybody:
        return
    if status.st_uid not in trusted.users:
        raise UntrustedPath(
            f"{path} belongs to user {_name(status.st_uid)} (mode {_mode(status)}), who could put "
            f"anything there: {_instead(status, path)}, or, if that user is to be trusted, set "
            f"{TRUST}={_name(status.st_uid)}"
        )
    may_group = status.st_mode & _GROUP and status.st_gid not in trusted.groups
    if may_group or status.st_mode & _OTHERS:
        raise UntrustedPath(
            f"{path} of user {_name(status.st_uid)} may be written by others "
            f"(mode {_mode(status)}): {_instead(status, path)}, or run `chmod go-w {path}` if "
            "no other user has changed it before"
            + (f"; {TRUST}=@{_group(status.st_gid)} trusts its group" if may_group else "")
        )


class Folder(Descriptor):
    """A folder of our own, held open: :attr:`inside` leads to it whatever its path leads to now."""

    def __init__(self, path: Path, fd: int) -> None:
        super().__init__(fd)
        self.path = path
        """What it is called."""
        self.inside = Path(f"/proc/self/fd/{fd}")
        """By which its contents are reached; of use to this process, until :meth:`close`."""


def open_folder(path: Path, *, make: bool = False) -> Folder:
    """Return the folder at ``path`` if it is our own; ``make`` creates it with mode 700.

    Links are followed if they are ours, or belong to the owner of their folder. If a umask of 002
    made an empty folder of ours writable for its group, that permission is removed. Raises
    :class:`~stoker.errors.UntrustedPath` for one that others may write to, and :class:`OSError`
    where there is none.
    """
    folder = Folder(path, _reach(path, make))
    try:
        _withdraw_from_group(folder)
        check(os.fstat(folder.fileno()), path)
    except BaseException:
        folder.close()
        raise
    return folder


def adopt(path: Path, marker: str, what: str) -> Folder:
    """Return the folder at ``path``, made if necessary and marked by a file ``marker``.

    Raises as :func:`open_folder` and :func:`check_marked` do.
    """
    folder = open_folder(path, make=True)
    try:
        check_marked(folder, marker, what)
        os.close(open_file(folder.inside / marker, os.O_RDWR | os.O_CREAT, called=path / marker))
    except BaseException:
        folder.close()
        raise
    return folder


def check_marked(folder: Folder, marker: str, what: str) -> None:
    """Raise :class:`~stoker.errors.ConfigError` unless the folder is empty or marked.

    And unless it may be written. ``what`` it is called in the error.
    """
    named = f"{what} {str(folder.path)!r}"
    names = _names(folder)
    if names and marker not in names:
        raise ConfigError(
            f"{named} is not empty and not Stoker's (it holds {min(names)!r}): use an empty or a "
            "new directory"
        )
    if not os.access(folder.inside, os.W_OK | os.X_OK, effective_ids=True):
        raise ConfigError(f"{named} may not be written: use another directory")


def open_file(path: Path, flags: int, mode: int = 0o600, *, called: Path | None = None) -> int:
    """Return a descriptor of the regular file at ``path`` if it is our own.

    ``flags`` are those of ``os.open``; not O_TRUNC, which would act before the check. ``called``:
    its name in errors. Raises :class:`~stoker.errors.UntrustedPath` for a file that others may
    write, a link, and what is no regular file, and :class:`OSError` as opening does.
    """
    named = called or path
    try:
        # A planted pipe must not make us wait.
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise UntrustedPath(f"{named} is a link or no regular file: remove it") from error
        raise
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise UntrustedPath(f"{named} is no regular file: remove it")
        check(status, named)
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_file(path: Path, *, called: Path | None = None) -> bytes:
    """Return what is in a file of our own; raises as :func:`open_file` does."""
    with os.fdopen(open_file(path, os.O_RDONLY, called=called), "rb") as file:
        return file.read()


def write_file(path: Path, content: bytes, *, fsync: bool = False) -> None:
    """Write a file at ``path`` that no other user may read, replacing what was there atomically.

    For folders of our own. With ``fsync`` it is safely on disk when this returns, and so is its
    name. Raises :class:`OSError`.
    """
    fresh = path.with_name(f"{path.name}.new")
    fresh.unlink(missing_ok=True)
    with os.fdopen(os.open(fresh, _FRESH, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        if fsync:
            os.fsync(file.fileno())
    fresh.replace(path)
    if fsync:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def remove_socket(path: Path) -> None:
    """Remove a socket of this user's at ``path``, if one is there.

    Raises :class:`~stoker.errors.UntrustedPath` for anything else, which stays.
    """
    with contextlib.suppress(FileNotFoundError):
        status = path.lstat()
        if not stat.S_ISSOCK(status.st_mode) or status.st_uid != os.geteuid():
            raise UntrustedPath(
                f"{path} is there already and no socket of this user's: remove it, or use another "
                "path"
            )
        path.unlink()


# --- reaching a folder ---


def _reach(path: Path, make: bool) -> int:
    """Return a descriptor of the folder at ``path``; every link on the way is checked."""
    pending = [*reversed((path if path.is_absolute() else Path.cwd() / path).parts[1:])]
    links = 0
    at = os.open("/", _LOOK)
    try:
        while pending:
            name = pending.pop()
            target = _link(at, name, path)
            if target is None:
                below = _enter(at, name, make)
            else:
                links += 1
                if links > _LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
                pending += reversed([part for part in target.parts if part != "/"])
                if not target.is_absolute():
                    continue
                below = os.open("/", _LOOK)
            os.close(at)
            at = below
        return os.open(".", _FOLDER, dir_fd=at)
    finally:
        os.close(at)


def _link(at: int, name: str, path: Path) -> Path | None:
    """Return what the link ``name`` in the folder ``at`` leads to; None if it is no link."""
    try:
        link = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
    except FileNotFoundError:
        return None
    try:
        status = os.fstat(link)
        if not stat.S_ISLNK(status.st_mode):
            return None
        # As the kernel's protected_symlinks: who owns the folder can do as much without a link.
        if status.st_uid != os.fstat(at).st_uid and not trusts(status):
            raise UntrustedPath(
                f"{path} leads over {name!r}, a link of user {_name(status.st_uid)} in a folder of "
                f"another: use another directory, or set {TRUST}={_name(status.st_uid)}"
            )
        return Path(os.readlink("", dir_fd=link))
    finally:
        os.close(link)


def _enter(at: int, name: str, make: bool) -> int:
    try:
        return os.open(name, _LOOK, dir_fd=at)
    except FileNotFoundError:
        if not make:
            raise
    with contextlib.suppress(FileExistsError):  # another process made it just now
        os.mkdir(name, 0o700, dir_fd=at)
    return os.open(name, _LOOK, dir_fd=at)


def _names(folder: Folder) -> set[str]:
    return {entry.name for entry in folder.inside.iterdir()} - _HARMLESS


def _withdraw_from_group(folder: Folder) -> None:
    """Keep the group from writing to an empty folder of ours, where a umask allowed it."""
    status = os.fstat(folder.fileno())
    by_umask = status.st_mode & 0o7022 == _GROUP and status.st_gid not in _trusted().groups
    if by_umask and status.st_uid == os.geteuid() and not _names(folder):
        os.fchmod(folder.fileno(), stat.S_IMODE(status.st_mode) & ~_GROUP)


# --- who is trusted ---


def _trusted() -> _Trusted:
    return _read_trust(os.environ.get(TRUST, ""), os.geteuid())


@functools.lru_cache(maxsize=8)
def _read_trust(text: str, user: int) -> _Trusted:
    users, groups = {0, user}, set[int]()
    names = {name.strip() for name in text.split(",")} - {""}
    for name in sorted(names - {"*"}):
        bare = name.removeprefix("@")
        try:
            if bare.isdecimal():
                number = int(bare)
            else:
                number = grp.getgrnam(bare)[2] if bare != name else pwd.getpwnam(bare)[2]
        except KeyError as error:
            raise ConfigError(
                f"{TRUST}={text!r}: {name!r} is no user here, nor @group: give names or numbers"
            ) from error
        (users if bare == name else groups).add(number)
    return _Trusted(frozenset(users), frozenset(groups), "*" in names)


# --- what errors say ---


def _instead(status: os.stat_result, path: Path) -> str:
    if not stat.S_ISDIR(status.st_mode):
        return "remove it"
    own = f", like {path / 'stoker'}" if os.access(path, os.W_OK | os.X_OK) else ""
    return f"use a directory of your own{own}"


def _mode(status: os.stat_result) -> str:
    return f"{stat.S_IMODE(status.st_mode):04o}"


def _name(user: int) -> str:
    with contextlib.suppress(KeyError):
        return pwd.getpwuid(user)[0]
    return str(user)


def _group(group: int) -> str:
    with contextlib.suppress(KeyError):
        return grp.getgrgid(group)[0]
    return str(group)
