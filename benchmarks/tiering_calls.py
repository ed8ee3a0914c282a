"""What the preload library costs a call that has nothing to do with tiering.

A C program opens, reads and preads a small file outside of every source, with and without the
library and a live daemon, in interleaved rounds. A figure is the quickest of many short bursts,
which is what other work on the machine disturbs least.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from harness import Report, interleave, parser

from stoker.tiering.config import Config, TierConfig
from stoker.tiering.launcher import preloaded, shim_file
from stoker.tiering.membership import Membership

_PROGRAM = r"""
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

int main(int argc, char** argv) {
  (void)argc;
  const char* what = argv[1];
  char byte;
  double best = 1e18;
  for (int burst = atoi(argv[3]); burst > 0; burst--) {
    const int fd = open(argv[2], O_RDONLY);
    const double begin = now();
    for (int i = 0; i < 500; i++) {
      if (strcmp(what, "open") == 0) {
        close(open(argv[2], O_RDONLY));
      } else if (strcmp(what, "read") == 0) {
        if (read(fd, &byte, 1) != 1) return 1;
      } else if (pread(fd, &byte, 1, 0) != 1) {
        return 1;
      }
    }
    const double each = (now() - begin) / 500;
    if (each < best) best = each;
    close(fd);
  }
  printf("%f\n", best);
  return 0;
}
"""
_LIMITS_NS = {"open": 1000, "read": 50, "pread": 50}


def main() -> None:
    """Measure and print."""
    args = parser(__doc__).parse_args()
    report = Report("Cost of a call with nothing to do", args.smoke)
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as name:
        folder = Path(name)
        program = build(folder)
        outside = folder / "outside.bin"
        outside.write_bytes(bytes(4096))
        (folder / "source").mkdir()
        tiers = (TierConfig(folder / "tier", 1 << 20),)
        with Membership(Config(folder / "source", tiers, folder / "source")) as membership:
            shim = preloaded(os.environ, shim_file("libstoker_preload.so"))
            shim |= membership.environment()
            for call in _LIMITS_NS:
                measure(report, call, [str(program), call, str(outside)], shim, args)
    report.show(args.json)


def measure(report: Report, call: str, command: list[str], shim: dict[str, str], args) -> None:
    """Compare one call with and without the library."""
    bursts = "20" if args.smoke else "2000"

    def once(environment: dict[str, str]) -> float:
        done = subprocess.run(
            [*command, bursts], env=environment, capture_output=True, text=True, check=True
        )
        return float(done.stdout)

    rounds = 1 if args.smoke else args.rounds
    found = interleave(
        {"plain": lambda: once(dict(os.environ)), "shim": lambda: once(shim)}, rounds
    )
    more = statistics.median(b - a for a, b in zip(found["plain"], found["shim"], strict=True))
    report.row(
        call=call,
        plain_ns=statistics.median(found["plain"]),
        shim_ns=statistics.median(found["shim"]),
        more_ns=more,
    )
    report.target(f"{call}, more than without", more, _LIMITS_NS[call], "ns")


def build(folder: Path) -> Path:
    """Compile the program."""
    source = folder / "calls.c"
    source.write_text(_PROGRAM)
    program = folder / "calls"
    subprocess.run(["cc", "-O2", "-o", program, source], check=True)
    return program


if __name__ == "__main__":
    sys.exit(main())
