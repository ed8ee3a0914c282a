"""A TCP proxy that makes a server far away: ``slow_proxy.py PORT TARGET_PORT DELAY_MS MB_PER_S``.

Every byte is delayed by DELAY_MS each way, and all connections together get MB_PER_S (10^6 bytes)
in each direction. Nothing is invented: what a client measures is what the server really sent.
``--clock FILE`` keeps a :class:`Clock` there, for a benchmark that asks when the first request
came and how much went through.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import mmap
import time
from pathlib import Path

import numpy as np

_CHUNK = 1 << 16
_AHEAD = 64  # chunks of one connection that may wait for their time


class Clock:
    """When the first request came and the last byte left, and how many bytes went each way.

    ``float64[4]`` in a file that proxy and benchmark map; times are ``time.monotonic()``, 0 when
    there was none. Writing zeros begins a new measurement.
    """

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            file.truncate(32)
            self._values = np.frombuffer(mmap.mmap(file.fileno(), 32), np.float64)

    def reset(self) -> None:
        """Begin a new measurement."""
        self._values[:] = 0

    def note(self, answer: bool, num_bytes: int) -> None:
        """Count bytes of a request, or of an ``answer``, as they pass."""
        if answer:
            self._values[1] = time.monotonic()
        elif not self._values[0]:
            self._values[0] = time.monotonic()
        self._values[2 + answer] += num_bytes

    @property
    def first_request(self) -> float:
        """When the first byte of a request came."""
        return float(self._values[0])

    @property
    def last_byte(self) -> float:
        """When the latest byte of an answer came from the server."""
        return float(self._values[1])

    @property
    def answered(self) -> int:
        """Bytes of answers."""
        return int(self._values[3])


class Line:
    """One direction of a line of limited width, which all connections share."""

    def __init__(self, delay: float, bytes_per_second: float) -> None:
        self._delay, self._rate = delay, bytes_per_second
        self._free_at = 0.0

    def arrival(self, num_bytes: int) -> float:
        """Return when bytes that are sent now have arrived."""
        self._free_at = max(self._free_at, time.monotonic()) + num_bytes / self._rate
        return self._free_at + self._delay


async def pump(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    line: Line,
    clock: Clock | None,
    answer: bool,
) -> None:
    """Carry one direction of one connection until its end."""
    on_the_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_AHEAD)

    async def deliver() -> None:
        while True:
            arrival, chunk = await on_the_way.get()
            await asyncio.sleep(max(0.0, arrival - time.monotonic()))
            if not chunk:
                break
            writer.write(chunk)
            await writer.drain()
        with contextlib.suppress(OSError):
            writer.write_eof()

    delivery = asyncio.create_task(deliver())
    chunk = b"-"
    while chunk:
        try:
            chunk = await reader.read(_CHUNK)
        except OSError:
            chunk = b""
        if chunk and clock is not None:
            clock.note(answer, len(chunk))
        put = asyncio.create_task(on_the_way.put((line.arrival(len(chunk)), chunk)))
        await asyncio.wait((put, delivery), return_when=asyncio.FIRST_COMPLETED)
        if delivery.done():
            put.cancel()
            break
    with contextlib.suppress(OSError):
        await delivery


async def serve(port: int, target: int, delay: float, rate: float, clock: Clock | None) -> None:
    """Accept connections on ``port`` of this machine and carry them to ``target``, for ever."""
    up, down = Line(delay, rate), Line(delay, rate)

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", target)
        except OSError:
            writer.close()
            return
        await asyncio.gather(
            pump(reader, far_writer, up, clock, False), pump(far_reader, writer, down, clock, True)
        )
        for side in (writer, far_writer):
            side.close()

    server = await asyncio.start_server(carry, "127.0.0.1", port, backlog=512, limit=1 << 18)
    await server.serve_forever()


def main() -> None:
    """Run the proxy until it is killed."""
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("port", type=int)
    arguments.add_argument("target_port", type=int)
    arguments.add_argument("delay_ms", type=float, help="one way")
    arguments.add_argument("mb_per_s", type=float)
    arguments.add_argument("--clock", type=Path)
    args = arguments.parse_args()
    clock = Clock(args.clock) if args.clock else None
    asyncio.run(serve(args.port, args.target_port, args.delay_ms / 1e3, args.mb_per_s * 1e6, clock))


if __name__ == "__main__":
    main()
