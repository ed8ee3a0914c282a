"""Your own server for the pool: started, inspected and stopped by ``stoker pool``."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from stoker.errors import CapacityError, ConfigError, SegmentError, UntrustedPath
from stoker.node import owned
from stoker.node.locks import await_lock
from stoker.node.memory import read_memory
from stoker.pool import credentials
from stoker.pool.credentials import USER, read_password, read_users
from stoker.pool.pool_address import PoolAddress, server_name
from stoker.pool.pool_tier import POLICY
from stoker.pool.servers import require_redis
from stoker.types import format_bytes

MARKER = ".stoker-pool"
"""File that marks the directory as Stoker's; nothing is ever removed from one without it."""

PROGRAMS = ("valkey-server", "redis-server")
"""Programs looked for on PATH; the first one found is used."""

_CONFIG, _PASSWORD, _LOG, _PID = "server.conf", "password", "server.log", "server.pid"
_TLS = "tls"  # the folder of certificates
_PATIENCE = 10.0  # seconds for a server to start or to end
_OVERHEAD = 1.1  # what a server takes for each byte it was given: buffers, fragments


def default_directory() -> Path:
    """Return where a server's files are, unless told: ``$XDG_STATE_HOME/stoker/pool``."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "stoker" / "pool"


class PoolService:
    """The server whose files are in ``directory``, which is made and marked by :meth:`start`.

    No method removes or changes a file that is not Stoker's, or ends a process that is not the
    server of this directory. All raise :class:`~stoker.errors.ConfigError` where that cannot be
    used or something in the way has to be decided by the user.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory.expanduser().absolute()

    # --- up ---

    def start(
        self,
        memory_bytes: int,
        bind: str,
        port: int,
        password_file: Path | None = None,
        *,
        tls: bool = False,
        tls_files: Path | None = None,
        acl: Path | None = None,
    ) -> str:
        """Start a server of ``memory_bytes``; return the address to give to ``pool=``.

        It answers at ``bind`` and ``port`` only, to the user ``stoker`` with the password that is
        in ``password_file``, that an earlier server here had, or a new one, and to the users in
        the folder ``acl`` (:func:`~stoker.pool.credentials.read_users`); and to them only
        the commands of a pool, on keys of a pool. With ``tls`` it answers encrypted only, with
        the certificates in ``tls_files``, those of an earlier server here, or new ones
        (:func:`~stoker.pool.credentials.provide_certificates`).

        Raises :class:`~stoker.errors.CapacityError` if that much memory is not available, and
        :class:`~stoker.errors.SegmentError` if the server does not start.
        """
        require_redis()
        program = next(filter(None, map(shutil.which, PROGRAMS)), None)
        if program is None:
            raise ConfigError(
                f"there is neither {' nor '.join(PROGRAMS)} on PATH: install one of them "
                "(on Debian or Ubuntu: apt-get install redis-server)"
            )
        _check_address(bind, port)
        _check_memory(memory_bytes)
        password = None if password_file is None else read_password(password_file)
        users = {} if acl is None else read_users(acl)
        self._mark()
        with self._locked():
            if (pid := self.pid()) is not None:
                raise ConfigError(
                    f"a server is running for {self.directory} already, process {pid}: run "
                    "`stoker pool down`, or give another --dir"
                )
            self._write_password(password)
            if tls or tls_files is not None:
                with _named(tls_files or self.directory):
                    credentials.provide_certificates(self.directory / _TLS, bind, tls_files)
            users[USER] = read_password(self.directory / _PASSWORD)
            self._write_config(memory_bytes, bind, port, tls or tls_files is not None, users)
            self._run(program)
        return self.url()

    def url(self, user: str = USER, password_file: Path | None = None) -> str:
        """Return the address of the server, as it was started, for a user."""
        settings = self._settings()
        tls_port = settings.get("tls-port")
        server = server_name(settings["bind"], int(tls_port or settings["port"]))
        options = f"password_file={quote(str(password_file or self.directory / _PASSWORD))}"
        if tls_port:
            options += f"&ca_certs={quote(str(self.directory / _TLS / credentials.CA))}"
        return f"valkey{'s' if tls_port else ''}://{user}@{server}?{options}"

    def address(self) -> PoolAddress:
        """Return the address to talk to it."""
        return PoolAddress.parse(self.url())

    # --- down ---

    def stop(self) -> bool:
        """End the server and remove its files; return whether it was running.

        Password and certificates stay, so that the next server here has the same.
        """
        self._check_marked()
        with self._locked():
            pid = self.pid()
            if pid is not None:
                self._end(pid)
            for name in (_CONFIG, _LOG, _PID):
                (self.directory / name).unlink(missing_ok=True)
        return pid is not None

    def pid(self) -> int | None:
        """Return the server's process; None if it does not run."""
        try:
            pid = int((self.directory / _PID).read_text())
            # Numbers are used again: it must be a server that was started with our file.
            arguments = Path(f"/proc/{pid}/cmdline").read_bytes()
            folder = Path(f"/proc/{pid}/cwd").readlink()
        except (OSError, ValueError):
            return None
        is_server = any(name.encode() in arguments for name in ("valkey", "redis"))
        return pid if is_server and folder == self.directory.resolve() else None

    # --- inside ---

    def _mark(self) -> None:
        """Make the directory and mark it; raises if it holds something else."""
        with _named(self.directory), owned.adopt(self.directory, MARKER, "--dir") as folder:
            info = os.fstat(folder.fileno())
        if info.st_uid != os.geteuid() or info.st_mode & 0o077:
            raise UntrustedPath(
                f"{self.directory} belongs to user {info.st_uid} with mode "
                f"{info.st_mode & 0o777:o}: it must be yours with mode 700 (a password lies there)"
            )

    def _check_marked(self) -> None:
        if not (self.directory / MARKER).is_file():
            raise ConfigError(
                f"{self.directory} has no {MARKER}: `stoker pool up` started nothing there"
            )

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with _named(self.directory):
            marker = owned.open_file(self.directory / MARKER, os.O_RDWR)
        try:
            if not await_lock(marker, 2 * _PATIENCE):
                raise SegmentError(f"another process is busy with {self.directory}")
            yield
        finally:
            os.close(marker)

    def _write_password(self, password: str | None) -> None:
        path = self.directory / _PASSWORD
        if password is None and path.is_file():
            read_password(path)
            return
        _write_private(path, (password or secrets.token_urlsafe(32)) + "\n")

    def _write_config(
        self, memory_bytes: int, bind: str, port: int, tls: bool, users: dict[str, str]
    ) -> None:
        lines = [
            f"bind {bind}",
            *(_encrypted(port) if tls else (f"port {port}",)),
            "protected-mode yes",
            *credentials.access_list(users),
            f"maxmemory {memory_bytes}",
            f"maxmemory-policy {POLICY}",
            "maxmemory-samples 10",
            "lazyfree-lazy-eviction yes",
            'save ""',
            "appendonly no",
            "daemonize yes",
            f"pidfile {_PID}",
            f"logfile {_LOG}",
        ]
        _write_private(self.directory / _CONFIG, "\n".join(lines) + "\n")

    def _settings(self) -> dict[str, str]:
        self._check_marked()
        try:
            text = (self.directory / _CONFIG).read_text()
        except OSError as error:
            raise ConfigError(f"no server is up for {self.directory}: `stoker pool up`") from error
        return dict(line.partition(" ")[::2] for line in text.splitlines())

    def _run(self, program: str) -> None:
        """Start the server in the background, and wait until it answers."""
        log = self.directory / _LOG
        for name in (_LOG, _PID):
            (self.directory / name).unlink(missing_ok=True)
        begun = subprocess.run(
            [program, str(self.directory / _CONFIG)],
            cwd=self.directory,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
        )
        deadline = time.monotonic() + _PATIENCE * (begun.returncode == 0)
        refusal = ""
        while time.monotonic() < deadline and "certificate" not in refusal:
            refusal = self._refusal()
            if not refusal:
                return
            time.sleep(0.05)
        if (pid := self.pid()) is not None:
            self._end(pid)
        logged = log.read_text(errors="replace") if log.is_file() else ""
        said = (begun.stdout + begun.stderr + logged).strip().splitlines()
        if "certificate" in refusal:
            said = [f"its certificate is not accepted at {self.address()}: {refusal}"]
        for name in (_PID, _CONFIG):
            (self.directory / name).unlink(missing_ok=True)
        raise SegmentError(
            f"{Path(program).name} does not start: {said[-1] if said else 'it does not say why'}"
        )

    def _refusal(self) -> str:
        """Return why the server does not answer; "" if it does."""
        from redis import Redis
        from redis.exceptions import RedisError

        address = self.address()
        host, port = address.servers[0]
        with Redis(host=host, port=port, **address.client_options()) as client:
            try:
                client.ping()
            except (RedisError, OSError) as error:
                return str(error) or type(error).__name__
        return ""

    def _end(self, pid: int) -> None:
        """End the server: it has nothing to save, so if it does not exit it is killed."""
        process = os.pidfd_open(pid)
        try:
            if self.pid() != pid:
                return  # it went, and the number may be another's by now
            for sign in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(process, sign)
                deadline = time.monotonic() + _PATIENCE / 2
                while time.monotonic() < deadline:
                    if self.pid() != pid:
                        return
                    time.sleep(0.02)
        finally:
            os.close(process)
        raise SegmentError(f"process {pid} does not end")


def _encrypted(port: int) -> tuple[str, ...]:
    """Return the settings of a server that listens at ``port``, and encrypted only."""
    return (
        "port 0",
        f"tls-port {port}",
        f"tls-cert-file {_TLS}/{credentials.SERVER}",
        f"tls-key-file {_TLS}/{credentials.SERVER_KEY}",
        f"tls-ca-cert-file {_TLS}/{credentials.CA}",
        "tls-auth-clients no",  # clients show a password
    )


def _check_address(bind: str, port: int) -> None:
    if not 0 < port < 1 << 16:
        raise ConfigError(f"port {port} is invalid: give 1 to 65535")
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((bind, port))
    except OSError as error:
        raise ConfigError(
            f"no server can listen at {bind}:{port} ({error.strerror or error}): give an address "
            "of this machine by --bind, and a free --port"
        ) from error


def _check_memory(memory_bytes: int) -> None:
    if memory_bytes < 1 << 20:
        raise ConfigError(f"--memory of {memory_bytes} bytes is invalid: give at least 1 MiB")
    needed, available = int(memory_bytes * _OVERHEAD), read_memory().available
    if needed > available:
        raise CapacityError(
            f"a server of {format_bytes(memory_bytes)} takes {format_bytes(needed)}, and "
            f"{format_bytes(available)} of memory are free here: give less by --memory"
        )


def _write_private(path: Path, text: str) -> None:
    """Write a file that no other user may read, not even for a moment."""
    with _named(path):
        owned.write_file(path, text.encode())


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    try:
        yield
    except UntrustedPath:
        raise
    except OSError as error:
        raise ConfigError(f"{path} cannot be used: {error.strerror or error}") from error
