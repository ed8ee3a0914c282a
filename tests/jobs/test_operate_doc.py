"""Each command of docs/operate.md runs, with ports, sizes and times of the test's own."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from support.images import write_images
from support.pages import ROOT, blocks
from support.servers import free_port

CLI = "from stoker.cli import main; main()"
WALK = "From nothing to a dashboard"
IS_SHOWN = "until stoker top --once --json | grep -q 'my run'; do sleep 0.2; done"
UNTIL_TOLD = "iter(lambda: __import__('os').path.exists('enough'), True)"
"""Epochs until the walk has been at all that looks at them."""
ELSEWHERE = {
    "stoker top": "tests/cli/test_top.py, in a terminal",
    'stoker doctor --job "vit-b lr=3e-4"': "tests/cli/test_doctor_job.py",
    'stoker doctor --job "vit-b lr=3e-4" --probe': "tests/cli/test_doctor_job.py",
    "stoker serve --web 9401": "the walk, and tests/cli/test_web.py",
    "ssh -N -L 9401:127.0.0.1:9401 node": "needs another machine",
    "ssh -N -L 9401:/home/ann/jobs.sock node": "needs another machine",
}
"""Commands that run in other tests."""


def tools(folder: Path) -> str:
    """A PATH on which `python` and `stoker` are ours."""
    folder.mkdir()
    for name, what in (("python", ""), ("stoker", f'-c "{CLI}" ')):
        (folder / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {what}"$@"\n')
        (folder / name).chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def commands() -> list[str]:
    """What stands in the page's blocks of commands, without what only explains."""
    text = (ROOT / "docs" / "operate.md").read_text()
    found = [
        line.partition("  #")[0].strip()
        for language, code in re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.M)
        for line in code.splitlines()
        if not language
    ]
    return [line for line in found if re.match(r"(stoker|ssh|curl|python|prometheus)\b", line)]


def test_the_walk_runs(tmp_path: Path) -> None:
    (program,) = blocks("docs/operate.md", WALK, "python")
    (walk,) = blocks("docs/operate.md", WALK)
    images = write_images(tmp_path / "images")
    program = program.replace("/mnt/nfs/train", str(images)).replace("range(90)", UNTIL_TOLD)
    (tmp_path / "train.py").write_text(program)
    shutil.copytree(ROOT / "deploy", tmp_path / "deploy")
    metrics, web, database = free_port(), free_port(), free_port()
    config = tmp_path / "deploy" / "prometheus.yml"
    config.write_text(config.read_text().replace("9400", str(metrics)))
    walk = walk.replace("9400", str(metrics)).replace("9401", str(web)).replace("64GiB", "64MiB")
    walk = walk.replace("sleep 10", IS_SHOWN).replace("--seconds 5", "--seconds 1")
    walk = walk.replace(
        "prometheus.yml", f"prometheus.yml --web.listen-address=127.0.0.1:{database}"
    )
    walk = walk.replace("wait %2", "touch enough; wait %2")
    if shutil.which("prometheus") is None:
        print("prometheus is not on PATH: that line is left out")
        walk = re.sub(r"^prometheus .*\n", "", walk, flags=re.M)
    ending = "kill $(jobs -p) 2>/dev/null; wait"
    done = subprocess.run(
        ["bash", "-c", f"trap '{ending}' EXIT\nset -eo pipefail\n{walk}"],
        cwd=tmp_path,
        env=os.environ | {"PATH": tools(tmp_path / "bin"), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert f"page: http://127.0.0.1:{web}/?token=" in done.stdout
    assert "over 1 s:" in done.stdout, "doctor watched it"
    assert 'job="my run"' in done.stdout, "metrics name it"
    assert "kept by the service" in done.stdout, "the cache is there after its job"
    assert "<svg" in (tmp_path / "run.html").read_text()


def test_the_other_commands_run_here_or_elsewhere(tmp_path: Path) -> None:
    walk = "\n".join(blocks("docs/operate.md", WALK))
    others = [line for line in commands() if line not in walk and line not in ELSEWHERE]
    assert others == ["stoker top --once --json", "stoker serve --web ~/jobs.sock"]
    search = {**os.environ, "PATH": tools(tmp_path / "bin"), "HOME": str(tmp_path)}
    looked = subprocess.run(
        shlex.split(others[0]), env=search, capture_output=True, text=True, check=True
    )
    assert looked.stdout == "[]\n"
    with subprocess.Popen(
        ["bash", "-c", f"exec {others[1]}"], env=search, stdout=subprocess.PIPE, text=True
    ) as service:
        assert service.stdout is not None
        try:
            assert f"page: {tmp_path / 'jobs.sock'}\n" in iter(service.stdout.readline, "")
            curl = ["curl", "-s", "--unix-socket", str(tmp_path / "jobs.sock"), "http://x/"]
            page = subprocess.run(curl, capture_output=True, text=True, check=True).stdout
            assert "<title>Stoker" in page
        finally:
            service.terminate()
