"""Users of a server of your own, as rules of its access list: who may do what a pool needs."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from stoker.errors import ConfigError
from stoker.pool.values import PREFIX

USER = "stoker"
"""The user that every server has; all but those that are named beside it, the default one too, are
off."""

COMMANDS = "+mget +set +pexpire +unlink +ping +info +cluster|slots +command"
"""What a pool asks of its servers, as rules of an access list."""

_LONGEST = 4096  # bytes of a file with a password

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


def rules(passwords: dict[str, str]) -> list[str]:
    """Return the access list, as lines of a server's settings, of users with their passwords.

    It has digests of the passwords, not these.
    """
    digests = {name: hashlib.sha256(word.encode()).hexdigest() for name, word in passwords.items()}
    return [
        "user default off resetpass resetchannels -@all",
        *(
            f"user {name} on #{digest} ~{PREFIX}* resetchannels -@all {COMMANDS}"
            for name, digest in digests.items()
        ),
    ]


def read_users(folder: Path) -> dict[str, str]:
    """Return the passwords in ``folder``, of users who are called as its files are.

    Files whose names begin with a dot are left out, as those are that Kubernetes adds to a secret.
    Raises :class:`~stoker.errors.ConfigError` for a folder without any, names that a server would
    not take, files that other users may read or another user owns, and what is no password.
    """
    try:
        files = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as error:
        raise ConfigError(f"{folder} cannot be used: {error.strerror or error}") from error
    if not files:
        raise ConfigError(f"{folder} has no users: give it a file for each, with the password")
    for path in files:
        if not _NAME.fullmatch(path.name) or path.name in (USER, "default"):
            raise ConfigError(
                f"{path} is no name for a user: give letters, digits, '.', '_' and '-', and "
                f"neither {USER!r} nor 'default'"
            )
    return {path.name: _read_private(path) for path in files}


def read_password(path: Path) -> str:
    """Return the password in a file; ConfigError if there is none."""
    return _read(path)[0]


def _read_private(path: Path) -> str:
    password, info = _read(path)
    if info.st_mode & 0o027 or info.st_uid not in (0, os.geteuid()):
        raise ConfigError(
            f"{path} belongs to user {info.st_uid} with mode {info.st_mode & 0o777:o}, and a "
            "password lies there: it must be yours, with mode 600"
        )
    return password


def _read(path: Path) -> tuple[str, os.stat_result]:
    """Return the password in a file, and whose the file is."""
    try:
        with path.open("rb") as file:
            info = os.fstat(file.fileno())
            found = file.read(_LONGEST)
    except OSError as error:
        raise ConfigError(f"{path} cannot be used: {error.strerror or error}") from error
    password = found.decode("ascii", "replace").strip()
    if not re.fullmatch(r"[!-~]+", password) or set(password) & set("\"'#"):
        raise ConfigError(f"{path} holds no password: one word of letters, digits, - and _")
    return password, info
