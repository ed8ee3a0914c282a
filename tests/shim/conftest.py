"""Fixtures of the shim's tests: a source with a few files, and the C programs beside the tests."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Compile = Callable[..., Path]


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compile:
    """Compile a C program that lies beside the tests, by its name and with more flags.

    ``CC`` and ``STOKER_TEST_EMULATOR`` may name a compiler for another machine and what runs its
    programs here, with the library that ``STOKER_TEST_SHIM`` names.
    """
    emulator = os.environ.get("STOKER_TEST_EMULATOR")
    folder = tmp_path_factory.mktemp("programs")

    def build(name: str, *flags: str) -> Path:
        program = folder / "-".join([name, *(flag.strip("-") for flag in flags)])
        if not program.exists():
            compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or "c++"
            code = Path(__file__).with_name(f"{name}.c")
            binary = program.with_suffix(".guest") if emulator else program
            command = [compiler, "-O1", "-pthread", *flags, "-o", str(binary), str(code)]
            subprocess.run(command, check=True, timeout=120)
            if emulator:
                program.write_text(f'#!/bin/sh\nexec {emulator} {binary} "$@"\n')
                program.chmod(0o755)
        return program

    return build


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A source with two small files, ``one`` and ``sub/two``, and ``large``."""
    folder = tmp_path / "source"
    (folder / "sub").mkdir(parents=True)
    (folder / "one").write_bytes(b"one of the source\n")
    (folder / "sub" / "two").write_bytes(b"two of the source\n")
    (folder / "large").write_bytes(bytes(range(251)) * 1000)
    return folder
