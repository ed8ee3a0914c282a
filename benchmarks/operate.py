"""What it costs to be seen: metrics in a training, and `stoker top` and the page with 64 jobs.

Everything is processor time, as the kernel counts it, so that other load does not matter much. In a
job that is what its training thread spends on counting waits and on publishing, once a second, and
what its process spends on answering those who look. `stoker top` runs in a real terminal, and the
service has one page open, each for a while after its start.
"""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

from harness import Report, parser, show

from stoker.jobs.survey import survey

CLI = "from stoker.cli import main; main()"
_STEP = 0.01  # seconds
_EVERY = 2.0  # seconds between two looks of a viewer
_AT_ONCE = 8  # jobs in a process


def main() -> None:
    """Parse the arguments, measure, print the reports."""
    args = parser(__doc__).parse_args()
    show(args, _in_a_job(args.rounds, args.smoke), _of_viewers(args.rounds, args.smoke))


def _in_a_job(rounds: int, smoke: bool) -> Report:
    """Return what metrics cost a training."""
    report = Report(f"Metrics in a job with steps of {1000 * _STEP:.0f} ms", smoke)
    seconds, looks = (1.5, 5) if smoke else (10.0, 200)
    counted, published, answered, shares, batch = [], [], [], [], []
    for _ in range(1 if smoke else rounds):
        with _jobs(1, seconds, 0) as (process, told):
            counted.append(told["waits"] / told["batches"])
            published.append(told["publishing"] / told["publications"])
            answered.append(_spent(process.pid, lambda: [survey() for _ in range(looks)]) / looks)
        by_second = published[-1] + answered[-1] / _EVERY
        batch.append(counted[-1] + _STEP * by_second)
        shares.append(counted[-1] / _STEP + by_second)
    for what, found in {
        "counting the wait for a batch": counted,
        "publishing, once a second": published,
        f"a look of others, every {_EVERY:.0f} s": answered,
        "all, by batch": batch,
    }.items():
        report.row(what=what, **{"µs": 1e6 * median(found), "most": 1e6 * max(found)})
    report.target("metrics and a viewer", 1e6 * median(batch), 20, "µs a batch")
    report.target("metrics and a viewer", 100 * median(shares), 0.5, "% of a step")
    return report


def _of_viewers(rounds: int, smoke: bool) -> Report:
    """Return what those who look take of a processor."""
    jobs, seconds = (8, 3.0) if smoke else (64, 20.0)
    report = Report(f"Viewers of {jobs} jobs, each with a cache of its own", smoke)
    top, service = [], []
    with ExitStack() as stack:
        for first in range(0, jobs, _AT_ONCE):
            stack.enter_context(_jobs(_AT_ONCE, 1.5, first))
        found = sum(len(cache.jobs) for cache in survey())
        assert found == jobs, found
        for _ in range(1 if smoke else max(1, rounds // 3)):
            with _top() as pid:
                top.append(_spent(pid, lambda: time.sleep(seconds)) / seconds)
            with _page() as pid:
                service.append(_spent(pid, lambda: time.sleep(seconds)) / seconds)
    for what, spent in (("stoker top", top), ("stoker serve --web, a page open", service)):
        shown = {"% of a core": 100 * median(spent), "most": 100 * max(spent)}
        report.row(what=what, **shown)
    report.target(f"stoker top with {jobs} jobs", 100 * median(top), 2, "% of a core")
    report.remarks = [
        f"Over {seconds:.0f} s after the first picture, looking every {_EVERY:.0f} s."
    ]
    return report


@contextmanager
def _jobs(
    how_many: int, seconds: float, first: int
) -> Iterator[tuple[subprocess.Popen[str], dict[str, float]]]:
    """Have jobs that have trained for so long, in a process of their own; give what they told."""
    program = Path(__file__).with_name("operate_job.py")
    command = [sys.executable, str(program), str(how_many), str(seconds), str(_STEP), str(first)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield process, json.loads(process.stdout.readline())
        process.communicate()


@contextmanager
def _top() -> Iterator[int]:
    """Run `stoker top` in a terminal, from its first picture on; give its process."""
    ours, its = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100", "LINES": "50"}
    with subprocess.Popen(
        [sys.executable, "-c", CLI, "top"], stdin=its, stdout=its, stderr=its, env=environment
    ) as process:
        os.close(its)
        os.read(ours, 1)
        time.sleep(2 * _EVERY)  # its start is over
        reading = threading.Thread(target=_drain, args=(ours,))
        reading.start()
        yield process.pid
        os.write(ours, b"q")
        process.wait()
        reading.join()
        os.close(ours)


def _drain(terminal: int) -> None:
    """Take what comes until the other side has closed."""
    try:
        while os.read(terminal, 1 << 16):
            pass
    except OSError:  # EIO
        pass


@contextmanager
def _page() -> Iterator[int]:
    """Run a service with its page open; give its process."""
    command = [sys.executable, "-c", CLI, "serve", "--web", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = next(line[6:].strip() for line in process.stdout if line.startswith("page: "))
        with urllib.request.urlopen(url.replace("/?", "/events?"), timeout=60) as events:
            for _ in range(4):
                events.readline()
            reading = threading.Thread(target=events.read)
            reading.start()
            yield process.pid
            process.terminate()
            reading.join()


def _spent(pid: int, act: Callable[[], object]) -> float:
    """Return the processor seconds of a process while ``act`` runs."""
    before = _processor_seconds(pid)
    act()
    return _processor_seconds(pid) - before


def _processor_seconds(pid: int) -> float:
    """Return what a process has spent, with threads that have ended, to the nanosecond."""
    return time.clock_gettime((~pid << 3) | 2)  # clock_getcpuclockid(3)


if __name__ == "__main__":
    main()
