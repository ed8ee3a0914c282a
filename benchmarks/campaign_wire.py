"""TCP proxies that damage on demand what passes: ``campaign_wire.py CONTROL FROM:TO...``.

``CONTROL`` is a file of one 64-bit word for each proxy, written by the campaign: 0 passes all,
other values are a :class:`Wire` fault; those that happen once are set back to 0 when done.
"""

from __future__ import annotations

import asyncio
import mmap
import random
import sys
from enum import IntEnum
from pathlib import Path

import numpy as np


class Wire(IntEnum):
    """What is done to the bytes on a wire."""

    PASS = 0
    FLIP_ANSWER = 1  # one bit of the next answer, once
    FLIP_QUESTION = 2  # one bit of the next question, once
    CUT = 3  # the next answer ends in the middle and the connection with it, once
    HOLD = 4  # nothing passes until this is over


async def _pass(
    control: np.ndarray,
    index: int,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    flip: Wire,
) -> None:
    try:
        while data := await reader.read(1 << 16):
            while control[index] == Wire.HOLD:
                await asyncio.sleep(0.01)
            if control[index] == flip:
                control[index] = Wire.PASS
                damaged = bytearray(data)
                damaged[random.randrange(len(data))] ^= 1 << random.randrange(8)
                data = bytes(damaged)
            elif control[index] == Wire.CUT and flip == Wire.FLIP_ANSWER:
                control[index] = Wire.PASS
                writer.write(data[: len(data) // 2])
                break
            writer.write(data)
            await writer.drain()
    except OSError:
        pass  # one end is gone, and so is the other now
    finally:
        writer.close()


async def _serve(control: np.ndarray, index: int, near: int, far: int) -> None:
    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", far)
        except OSError:
            writer.close()
            return
        ways = (reader, far_writer, Wire.FLIP_QUESTION), (far_reader, writer, Wire.FLIP_ANSWER)
        await asyncio.gather(*(_pass(control, index, *way) for way in ways))

    server = await asyncio.start_server(connect, "127.0.0.1", near)
    async with server:
        await server.serve_forever()


async def _main(path: str, routes: list[str]) -> None:
    with Path(path).open("r+b") as file:
        control = np.frombuffer(mmap.mmap(file.fileno(), 0), np.int64)
    pairs = [tuple(map(int, route.split(":"))) for route in routes]
    await asyncio.gather(*(_serve(control, i, near, far) for i, (near, far) in enumerate(pairs)))


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], sys.argv[2:]))
