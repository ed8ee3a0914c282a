"""A web server for machines without nginx: ``file_server.py PORT FOLDER PROCESSES``.

Serves the files of a folder from memory, with as many processes as asked for, which share the port.
Knows GET and HEAD of whole files over connections that stay open.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from email.utils import formatdate
from pathlib import Path

_END = b"\r\n\r\n"


class Connection(asyncio.Protocol):
    """Answers requests, which come one after the other."""

    def __init__(self, root: Path, files: dict[str, tuple[bytes, bytes]]) -> None:
        self._root, self._files = root, files
        self._read = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        self._read += data
        while _END in self._read:
            head, self._read = self._read.split(_END, 1)
            method, path, _ = head.split(b"\r\n", 1)[0].decode().split(" ")
            header, body = self._file(path.lstrip("/"))
            self._transport.write(header if method == "HEAD" else header + body)

    def _file(self, name: str) -> tuple[bytes, bytes]:
        if name not in self._files:
            path = self._root / name
            if not path.is_file():
                return b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", b""
            body, changed = path.read_bytes(), path.stat().st_mtime
            self._files[name] = (
                (
                    f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n"
                    f"Last-Modified: {formatdate(changed, usegmt=True)}\r\n"
                    f'ETag: "{len(body):x}-{changed:.6f}"\r\n\r\n'
                ).encode(),
                body,
            )
        return self._files[name]


async def serve(port: int, root: Path) -> None:
    """Accept connections, for ever."""
    files: dict[str, tuple[bytes, bytes]] = {}
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: Connection(root, files),
        family=socket.AF_INET,
        host="127.0.0.1",
        port=port,
        reuse_port=True,
        backlog=512,
    )
    await server.serve_forever()


def main() -> None:
    """Run until killed; the processes end with the first."""
    port, root, processes = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    parent = os.getpid()
    for _ in range(processes - 1):
        if not os.fork():
            _end_with(parent)
            break
    asyncio.run(serve(port, root))


def _end_with(parent: int) -> None:
    import ctypes
    import signal

    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        sys.exit()


if __name__ == "__main__":
    main()
