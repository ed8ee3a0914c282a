"""What one wheel for all Pythons from 3.12 on would cost: a hit by way of the stable ABI.

Unpacks two wheels of one commit, the usual one and one with the stable ABI, and reads cached
samples of 3 KB with each, in processes that take turns. Processor time, of which each process keeps
the least of seven:

    make wheel PYTHON=python3.12 VENV=build/venv-3.12 && P=build/venv-3.12/bin/python
    $P -m build --wheel --no-isolation -Cwheel.py-api=cp312 -Cbuild-dir=build/abi3 -o build/stable .
    $P -m pip install numpy && $P benchmarks/wheel_abi.py dist/*-cp312-cp312-*.whl build/stable/*
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

READS = {"get, one": 40_000, "get_many, one": 40_000, "get_many, 256": 400}
PROGRAM = f"""
import json, time
import numpy as np
from stoker.store.arena import Arena

NUM = 4000
arena, random = Arena(NUM, 64 << 20), np.random.default_rng(0)
for first in range(0, NUM, 250):
    arena.put_many(np.arange(first, first + 250), [random.bytes(3000) for _ in range(250)])
assert arena.get_many(np.arange(NUM))[2].all()
single = [random.integers(0, NUM, 1).astype(np.uint32) for _ in range(200)]
batches = [random.integers(0, NUM, 256).astype(np.uint32) for _ in range(200)]
readers = {{
    "get, one": lambda turn: arena.get(turn % NUM),
    "get_many, one": lambda turn: arena.get_many(single[turn % 200]),
    "get_many, 256": lambda turn: arena.get_many(batches[turn % 200]),
}}
least = {{}}
for name, reads in {READS}.items():
    read, times = readers[name], []
    for _ in range(7):
        begin = time.process_time()
        for turn in range(reads):
            read(turn)
        times.append((time.process_time() - begin) / reads)
    least[name] = 1e6 * min(times)
print(json.dumps(least))
"""


def main() -> None:
    """Measure, and print microseconds a call and their paired ratio."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("usual", type=Path)
    parser.add_argument("stable", type=Path)
    parser.add_argument("--rounds", type=int, default=8)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="stoker-abi-") as folder:
        places = [Path(folder, name) for name in ("usual", "stable")]
        for wheel, place in zip((args.usual, args.stable), places, strict=True):
            zipfile.ZipFile(wheel).extractall(place)
        rounds: list[list[dict[str, float]]] = []
        for number in range(args.rounds):
            turn = places if number % 2 else places[::-1]
            found = {place: measure(place) for place in turn}
            rounds.append([found[place] for place in places])
    print("| read | usual, µs | stable ABI, µs | ratio |\n|---|---|---|---|")
    for name in READS:
        usual, stable = ([each[way][name] for each in rounds] for way in (0, 1))
        ratio = statistics.median(b / a for a, b in zip(usual, stable, strict=True))
        medians = f"{statistics.median(usual):.2f} | {statistics.median(stable):.2f}"
        print(f"| {name} | {medians} | {ratio:.3f} |")


def measure(place: Path) -> dict[str, float]:
    """Return microseconds a call, by way of reading, with the Stoker that lies there."""
    told = {**os.environ, "PYTHONPATH": str(place)}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=told, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


if __name__ == "__main__":
    main()
