"""Address of a pool, and how to connect to its servers: ``valkey://user:password@h1,h2``."""

from __future__ import annotations

import ipaddress
import math
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from stoker.errors import ConfigError

PASSWORD_VARIABLE = "STOKER_POOL_PASSWORD"
"""Where the password comes from if the address has none."""

SOCKET = "unix:"
"""Begins the address of a service on this node, which shares a cache among users of a group."""

_PLAIN, _TLS = ("valkey", "redis"), ("valkeys", "rediss")
_FORM = 'give it as "valkey://h1:6379,h2:6379", or "valkeys://..." for TLS'
_OPTIONS = ("username", "password_file", "ca_certs", "certfile", "keyfile", "check_hostname")
_TIMEOUT, _PORT = 0.5, 6379
_IN_BRACKETS = re.compile(r"(?<=[/@,])\[[^]@/]*\]")


def check_pool(url: str) -> None:
    """Raise :class:`~stoker.errors.ConfigError` for what is no address of a pool."""
    if isinstance(url, str) and url.startswith(SOCKET):
        socket_path(url)
    else:
        PoolAddress.parse(url)


def socket_path(url: str) -> Path:
    """Return where ``unix:/path`` or ``unix:///path`` leads; ConfigError unless it is absolute."""
    path = Path(url.removeprefix(SOCKET).removeprefix("//"))
    if not path.is_absolute():
        raise ConfigError(f"pool={url!r} is no address: give it as 'unix:/run/stoker.sock'")
    return path


@dataclass(frozen=True)
class PoolAddress:
    """Servers, and the credentials for them. Passwords are not in its ``repr``."""

    servers: tuple[tuple[str, int], ...]
    """Host and port of each, in the order given."""
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    password_file: str | None = None
    """Read again by each process that connects."""
    tls: bool = False
    ca_certs: str | None = None
    """File with the certificates trusted beside those of the system; ``certfile`` and ``keyfile``:
    our own, where the servers ask for one."""
    certfile: str | None = None
    keyfile: str | None = None
    check_hostname: bool = True
    """Whether a certificate must name the server it came from."""
    timeout: float = _TIMEOUT
    """Seconds that a server may take to start its answer."""

    @staticmethod
    def parse(url: str) -> PoolAddress:
        """Return what ``url`` says.

        ``valkey://[[USER]:PASSWORD@]HOST[:PORT],HOST[:PORT]...[?OPTION=VALUE&...]``, with the
        schemes ``valkey`` and ``redis``, or ``valkeys`` and ``rediss`` for TLS. Options:
        ``username``, ``password_file``, ``timeout`` in seconds, and for TLS ``ca_certs``,
        ``certfile``, ``keyfile`` and ``check_hostname=no``.

        Raises :class:`~stoker.errors.ConfigError`, without the password, for anything else.
        """
        if not isinstance(url, str):
            raise ConfigError(f"pool={type(url).__name__}(...) is not an address: {_FORM}")
        netloc = re.split("[/?#]", url.partition("://")[2], maxsplit=1)[0]
        try:  # of several hosts, it takes none in brackets
            parts = urlsplit(_IN_BRACKETS.sub("host", url))._replace(netloc=netloc)
        except ValueError as error:  # whose text may show what is a password
            why = "" if "@" in url else f" ({error})"
            raise ConfigError(f"pool=... is not an address{why}: {_FORM}") from None
        is_cut = "@" in parts.path + parts.query + parts.fragment
        if is_cut and not parts.query.startswith(tuple(f"{name}=" for name in _OPTIONS)):
            raise ConfigError(
                "pool=... has an '@' behind its hosts: write '/', '?', '#' and '@' in a user or "
                "password as %2F, %3F, %23 and %40, or put the password into a file and give "
                "?password_file="
            )
        if parts.scheme not in _PLAIN + _TLS:
            raise ConfigError(f"pool={parts.scheme + '://...'!r} is not an address: {_FORM}")
        given, _, hosts = parts.netloc.rpartition("@")
        shown = f"{parts.scheme}://{hosts}{parts.path}"
        if parts.path.strip("/") or parts.fragment:
            raise ConfigError(f"pool={shown!r} has a path, and pools have no databases: {_FORM}")
        user, _, password = given.partition(":")
        options = _options(parts, shown)
        is_tls = parts.scheme in _TLS
        if not is_tls and (unfit := options.keys() & {"ca_certs", "certfile", "keyfile"}):
            raise ConfigError(f"pool={shown!r} has {min(unfit)} without TLS: begin it with valkeys")
        return PoolAddress(
            tuple(_server(host, shown) for host in hosts.split(",")),
            username=options.get("username") or unquote(user) or None,
            password=unquote(password) or os.environ.get(PASSWORD_VARIABLE) or None,
            password_file=options.get("password_file"),
            tls=is_tls,
            ca_certs=options.get("ca_certs"),
            certfile=options.get("certfile"),
            keyfile=options.get("keyfile"),
            check_hostname=options.get("check_hostname", "yes") != "no",
            timeout=_seconds(options.get("timeout", str(_TIMEOUT)), shown),
        )

    def client_options(self) -> dict[str, Any]:
        """Return what redis-py's clients take, the hosts apart. Raises OSError for lost files."""
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        password = self.password
        if self.password_file is not None:
            password = Path(self.password_file).read_text().strip()
        options: dict[str, Any] = {
            "username": self.username,
            "password": password,
            "socket_timeout": self.timeout,
            "socket_connect_timeout": self.timeout,
            "socket_keepalive": True,
            # A cache that hesitates is passed by: the source has the sample as well.
            "retry": Retry(NoBackoff(), 0),
            "protocol": 2,
        }
        if self.tls:
            options |= {
                "ssl": True,
                "ssl_ca_certs": self.ca_certs,
                "ssl_certfile": self.certfile,
                "ssl_keyfile": self.keyfile,
                "ssl_check_hostname": self.check_hostname,
            }
        return options

    def __str__(self) -> str:
        scheme = "valkeys" if self.tls else "valkey"
        return f"{scheme}://{','.join(server_name(*server) for server in self.servers)}"


def server_name(host: str, port: int) -> str:
    """Return ``host:port``, the host in brackets where it is an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _options(parts: SplitResult, shown: str) -> dict[str, str]:
    if not parts.query:
        return {}
    try:
        options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=True))
    except ValueError:
        raise ConfigError(f"pool={shown!r} has options that are not ?NAME=VALUE&...") from None
    for name in options:
        if name not in (*_OPTIONS, "timeout"):
            known = ", ".join((*_OPTIONS, "timeout"))
            raise ConfigError(f"pool={shown!r} has the unknown option {name!r}: known are {known}")
    return options


def _server(text: str, shown: str) -> tuple[str, int]:
    """Return host and port of ``host``, ``host:port``, ``[v6]`` or ``[v6]:port``."""
    host, colon, port = text, "", ""
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        colon, port = rest[:1], rest[1:]
        try:
            ipaddress.IPv6Address(host)
        except ValueError as error:
            raise ConfigError(f"pool={shown!r} names no server in {text!r}: {error}") from error
    else:
        host, colon, port = text.partition(":")
    number = int(port) if port.isascii() and port.isdigit() else (-1 if colon else _PORT)
    if not host or colon not in ("", ":") or not 0 < number < 1 << 16:
        raise ConfigError(f"pool={shown!r} names no server in {text!r}: {_FORM}")
    return host, number


def _seconds(text: str, shown: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.01 <= value <= 60:
        raise ConfigError(f"pool={shown!r} has timeout={text}: give 0.01 to 60 seconds")
    return value
