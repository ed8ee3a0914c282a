"""Who may use a server of your own, by password, and how clients know it, by certificate.

Users are rules of the server's access list: who may do what a pool needs. A folder of certificates
has the files that cert-manager and Kubernetes' secrets of type ``tls`` have too: ``ca.crt``, which
clients trust, ``tls.crt`` and ``tls.key`` of the server, and ``ca.key``, with which more servers
can be given certificates, where the authority is our own.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import re
import secrets
import socket
import subprocess
import tempfile
from pathlib import Path

from stoker.errors import ConfigError
from stoker.node import owned
from stoker.pool.values import PREFIX

USER = "stoker"
"""The user that every server has; all but those that are named beside it, the default one too, are
off."""

COMMANDS = "+mget +set +pexpire +unlink +ping +info +cluster|slots +command"
"""What a pool asks of its servers, as rules of an access list."""

_LONGEST = 4096  # bytes of a file with a password

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
CA, CA_KEY, SERVER, SERVER_KEY = "ca.crt", "ca.key", "tls.crt", "tls.key"

_CA_DAYS, _SERVER_DAYS = 3650, 825
# Complete, so that the machine's own configuration does not matter; strict clients want each line.
_RULES = """\
[req]
distinguished_name = names
prompt = no
[names]
CN = {name}
[authority]
basicConstraints = critical,CA:TRUE
keyUsage = critical,keyCertSign,cRLSign
subjectKeyIdentifier = hash
[server]
basicConstraints = critical,CA:FALSE
keyUsage = critical,digitalSignature
extendedKeyUsage = serverAuth,clientAuth
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
subjectAltName = {hosts}
"""
_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def access_list(passwords: dict[str, str]) -> list[str]:
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


def provide_certificates(folder: Path, host: str, given: Path | None = None) -> None:
    """Put ``ca.crt``, ``tls.crt`` and ``tls.key`` for a server at ``host`` into ``folder``.

    Files in ``given`` come first, then those that are there: with a ``ca.key`` the server gets a
    new certificate, which names ``host`` and this machine and is valid for 825 days; without one
    it must have its own. Where there is nothing, an authority is made, valid for ten years. No
    other user may read what is written.

    Raises :class:`~stoker.errors.ConfigError` if files are missing, or ``openssl`` is or fails,
    and OSError for files that cannot be used.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    if given is not None:
        _take(given.expanduser(), folder)
    if not (folder / CA).exists():
        _sign(folder, "authority", CA_KEY, CA, "stoker pool, authority")
    if (folder / CA_KEY).exists():
        _sign(folder, "server", SERVER_KEY, SERVER, "stoker pool, server", host)


def _take(given: Path, folder: Path) -> None:
    """Replace what is in ``folder`` by what is in ``given``."""
    names = {path.name for path in given.iterdir()}
    if CA not in names or not (CA_KEY in names or {SERVER, SERVER_KEY} <= names):
        raise ConfigError(
            f"{given} lacks certificates: put {CA} there, with {SERVER} and {SERVER_KEY} of this "
            f"server, or with the {CA_KEY} that signs one"
        )
    for name in (CA_KEY, CA, SERVER, SERVER_KEY):
        if name in names:
            owned.write_file(folder / name, (given / name).read_bytes())
        else:
            (folder / name).unlink(missing_ok=True)


def _sign(folder: Path, kind: str, key: str, certificate: str, name: str, host: str = "") -> None:
    """Make a key and its certificate, signed by itself or by the authority in ``folder``."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=".making-") as made:
        place = Path(made)
        (place / "rules").write_text(_RULES.format(name=name, hosts=_subjects(host)))
        _openssl(place, "req", "-new", "-config", "rules", *_NEW_KEY, "-keyout", key, "-out", "csr")
        by = ("-CA", f"../{CA}", "-CAkey", f"../{CA_KEY}") if host else ("-signkey", key)
        days = str(_SERVER_DAYS if host else _CA_DAYS)
        # Drawn: two nodes with one authority must not give the same number.
        serial = ("-set_serial", str(secrets.randbits(120)))
        rules = ("-extfile", "rules", "-extensions", kind, "-days", days, *serial)
        _openssl(place, "x509", "-req", "-sha256", "-in", "csr", *by, *rules, "-out", certificate)
        for file in (key, certificate):
            owned.write_file(folder / file, (place / file).read_bytes())


def _subjects(host: str) -> str:
    """Return what a certificate for a server at ``host`` names: that, and this machine."""
    try:
        own = f"IP:{ipaddress.ip_address(host)}"
    except ValueError:
        own = f"DNS:{host or 'none'}"
    return f"{own},DNS:{socket.gethostname()}"


def _openssl(place: Path, *arguments: str) -> None:
    try:
        done = subprocess.run(
            ["openssl", *arguments],
            cwd=place,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            umask=0o077,
        )
    except FileNotFoundError as error:
        raise ConfigError(
            "openssl is not on PATH: install it (on Debian or Ubuntu: apt-get install openssl), "
            "or give certificates by --tls-files"
        ) from error
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["it does not say why"]
        raise ConfigError(f"openssl {arguments[0]} fails for a certificate: {said[0]}")
