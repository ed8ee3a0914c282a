"""A real browser without a window, which tests steer by Chromium's DevTools protocol."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.waiting import until

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not on PATH")
_PATIENCE = 120.0


class Page:
    """One page; ``said`` are its errors, those of its policy among them."""

    def __init__(self, reading: int, writing: int) -> None:
        self._reading, self._writing = reading, writing
        self._rest, self._number, self._session = b"", 0, ""
        self.said: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def open(self, url: str, *, width: int = 1200, dark: bool = False) -> None:
        """Go to ``url``, in a window of that many pixels."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=900, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self._call("Page.navigate", url=url)

    def value(self, script: str) -> Any:
        """What a line of JavaScript returns."""
        told = self._call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    def until(self, script: str) -> None:
        """Wait until a line of JavaScript is true; on a page that loads it may fail as yet."""
        script = f"(() => {{ try {{ return {script} }} catch {{}} }})()"
        until(lambda: self.value(script), _PATIENCE)

    def screenshot(self) -> bytes:
        """The whole page as a PNG."""
        told = self._call("Page.captureScreenshot", captureBeyondViewport=True)
        return base64.b64decode(told["data"])

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._writing, json.dumps(message).encode() + b"\0")
        while (told := self._next()).get("id") != self._number:
            if told.get("method") in ("Log.entryAdded", "Runtime.exceptionThrown"):
                self.said.append(json.dumps(told["params"]))
        assert "error" not in told, told
        answer: dict[str, Any] = told["result"]
        return answer

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + _PATIENCE
        while b"\0" not in self._rest:
            assert select.select([self._reading], [], [], end - time.monotonic())[0], "no answer"
            part = os.read(self._reading, 1 << 16)
            assert part, "the browser has ended"
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\0")
        told: dict[str, Any] = json.loads(line)
        return told


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """A page of a browser that keeps what it keeps in ``folder``."""
    its_input, to_it = os.pipe()
    from_it, its_output = os.pipe()
    command = [
        "bash", "-c", f'exec "$@" 3<&{its_input} 4>&{its_output}', "-",
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
        "--disable-dev-shm-usage", "--no-first-run", f"--user-data-dir={folder}",
        "--remote-debugging-pipe",
    ]  # fmt: skip
    process = subprocess.Popen(
        command, pass_fds=(its_input, its_output), stderr=subprocess.DEVNULL, start_new_session=True
    )
    os.close(its_input)
    os.close(its_output)
    try:
        yield Page(from_it, to_it)
    finally:
        os.close(to_it)  # it ends with whoever steers it
        os.close(from_it)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
