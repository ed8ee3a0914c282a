"""The progress bar: on a terminal, and nowhere else."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import stoker
from stoker.errors import ConfigError
from stoker.source import MemorySource

PROGRAM = """
import time
import stoker
from stoker.source import MemorySource

source = MemorySource([bytes([n]) * 100 for n in range(60)])
with stoker.Feed(source, 10, epochs=2, progress=True) as feed:
    for _ in range(2):
        for number, batch in enumerate(feed):
            time.sleep(0.03)  # a step
    next(iter(feed))  # and one epoch is left early
print("over")
"""


def run(folder: Path, stderr: int) -> str:
    script = folder / "script.py"
    script.write_text(PROGRAM)
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    done = subprocess.run(
        [sys.executable, str(script)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        check=True,
    )
    return done.stdout


def test_a_terminal_sees_each_epoch_to_its_end(tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    assert run(tmp_path, theirs) == "over\n"
    os.close(theirs)
    shown = b""
    while True:
        try:
            shown += os.read(ours, 65536)
        except OSError:  # the other end is closed, and everything is read
            break
    os.close(ours)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    for told in ("epoch 1", "epoch 2", "6/6", "samples/s, waits"):
        assert told in text, text
    assert "\x1b[?25h" in shown.decode(), "the cursor is shown again"


def test_a_log_file_sees_nothing(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w+") as log:
        assert run(tmp_path, log.fileno()) == "over\n"
        log.seek(0)
        assert log.read() == ""


def test_without_rich_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    with pytest.raises(ConfigError, match=r"pip install 'stoker\[tui\]'"):
        stoker.Feed(MemorySource([b"x"]), 1, progress=True)
