"""What the README and the pages of docs/ show runs as it stands, and their links lead somewhere."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from pytorch.conftest import own_places  # noqa: F401  (fixture)
from support.images import write_images
from support.pages import ROOT, blocks, readmes_program, run_script
from support.parts import number_of, numbers
from support.redis_servers import needs_server
from support.s3 import Bucket

from stoker import Cache
from stoker.cli.root import root
from stoker.pytorch import Loader, SampleDataset

README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
BEFORE = """
import numpy, torch, stoker
my_transform = lambda image: torch.from_numpy(numpy.array(image))
model = torch.nn.Linear(1, 1)
"""
AFTER = """
seen = sum(len(labels) for _, labels in loader)
print(seen, loader.stats.fetched)
loader.close()
"""


def free_port() -> int:
    with socket.create_server(("localhost", 0)) as server:
        return int(server.getsockname()[1])


def run_command(line: str) -> str:
    program, *arguments = shlex.split(line)
    assert program == "stoker"
    result = CliRunner().invoke(root, arguments)
    assert result.exit_code == 0, result.output
    return result.output


def test_the_readmes_program(tmp_path: Path) -> None:
    """It trains on 60 images for three epochs, with the default recipe."""
    (program,) = blocks("README.md", "Use", "python")
    assert len([line for line in program.splitlines() if line.strip()]) <= 12, "twelve lines"
    assert run_script(readmes_program(tmp_path), tmp_path) == [180, 1]


def test_the_readme_takes_four_minutes() -> None:
    assert len(README.read_text().split()) <= 800


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        assert "://" in target or (page.parent / target).exists(), target


def test_every_page_is_part_of_the_site_whose_index_the_readme_links() -> None:
    docs = README.parent / "docs"
    part_of = {"index"}
    for page in (docs / "index.md", docs / "reference" / "index.md"):
        for tree in re.findall(r"```\{toctree\}\n(.*?)```", page.read_text(), re.DOTALL):
            entries = [line for line in tree.splitlines() if line and line[0] != ":"]
            part_of |= {
                str((page.parent / each).resolve().relative_to(docs))
                for each in entries
                if not each.startswith("../")
            }
    pages = {str(page.relative_to(docs).with_suffix("")) for page in docs.rglob("*.md")}
    assert pages == part_of
    assert "docs/index.md" in README.read_text()


def test_from_s3(bucket: Bucket, tmp_path: Path) -> None:
    images = write_images(tmp_path / "images")
    files = [path for path in images.rglob("*") if path.is_file()]
    bucket.put({f"train/{file.relative_to(images)}": file.read_bytes() for file in files})
    options = bucket.options()
    (snippet,) = blocks("docs/storage.md", "From S3", "python")
    here = snippet.replace("s3://bucket", bucket.url)
    here = here.replace('{"region": "eu-central-1"}', repr(options))
    seen, fetched = run_script(BEFORE + here + AFTER, tmp_path)
    assert seen == 60 and fetched >= 12
    (command,) = blocks("docs/storage.md", "From S3")
    given = [f" --option {name}={value}" for name, value in options.items()]
    here = command.strip().replace("s3://bucket", bucket.url)
    here = here.replace(" --option region=eu-central-1", "".join(given).lower())
    output = run_command(f"{here} --seconds 1")
    assert "bound by" in output and "smallest cache" in output


def test_from_nfs_to_nvme(tmp_path: Path) -> None:
    write_images(tmp_path / "nfs" / "train")

    def here(text: str) -> str:
        moved = text.replace("/mnt/nfs", f"{tmp_path}/nfs").replace("/nvme", f"{tmp_path}/nvme")
        return moved.replace("8GiB", "20%")

    (tmp_path / "nvme").mkdir()
    (snippet,) = blocks("docs/storage.md", "From NFS to a local NVMe", "python")
    (command,) = blocks("docs/storage.md", "From NFS to a local NVMe")
    run_command(here(command))
    assert run_script(BEFORE + here(snippet) + AFTER, tmp_path) == [60, 0], "nothing is read again"


def test_several_nodes(tmp_path: Path) -> None:
    """Both commands on this machine, as two nodes of one rank each."""
    write_images(tmp_path / "train")
    (snippet,) = blocks("docs/nodes.md", "", "python")
    (command,) = blocks("docs/nodes.md", "")
    here = snippet.replace("/mnt/nfs", str(tmp_path))
    here = here.replace('"20%"', 'stoker.Cache("20%", stands_aside=False)')
    (tmp_path / "train.py").write_text(here)
    program, *arguments = shlex.split(command)
    assert program == "torchrun"
    replaced = {"4": "1", "node1:29500": f"localhost:{free_port()}"}
    launch = [sys.executable, "-m", "torch.distributed.run"]
    launch += [replaced.get(argument, argument) for argument in arguments]
    nodes = [
        subprocess.Popen(
            launch,
            cwd=tmp_path,
            env={**os.environ, "STOKER_NODE": name, "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in "ab"
    ]
    said = [node.communicate(timeout=120) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    found = sorted(re.findall(r"rank (\d): (\d+)% hits", "".join(out for out, _ in said)))
    assert [rank for rank, _ in found] == ["0", "1"]
    assert sum(int(hits) for _, hits in found) / 2 > 30, "two nodes hit more than one can"


@needs_server
def test_a_pool_of_several_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    commands, *_ = blocks("docs/pool.md", "Servers of your own: `stoker pool`")
    start, look = commands.splitlines()
    try:
        said = run_command(f"{start.replace('20%', '20MiB')} --port {free_port()}")
        (address,) = re.findall("pool='(valkey://.*)'", said)
        assert address.split("?")[0].rpartition("@")[2] in run_command(look)
        dataset = SampleDataset(numbers(50), number_of)
        for _ in range(2):
            with Loader(dataset, batch_size=10, cache=Cache(0, pool=address)) as loader:
                assert sum(len(batch) for batch in loader) == 50
        assert loader.stats.pool_hits == 50
    finally:
        assert "has ended" in run_command("stoker pool down")


@needs_server
@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not there")
def test_a_pool_with_certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    *_, commands = blocks("docs/pool.md", "Servers of your own: `stoker pool`")
    monkeypatch.chdir(tmp_path)
    first, second = (tmp_path / name / "stoker" / "pool" for name in ("first", "second"))
    said = []
    try:
        for node, command in zip((first, second), commands.splitlines(), strict=True):
            if node == second:  # copies what the page says
                shutil.copytree(first / "tls", "pool-tls")
                shutil.copy(first / "password", "pool-password")
            monkeypatch.setenv("XDG_STATE_HOME", str(node.parents[1]))
            here = re.sub(r"10\.0\.0\.\d", "127.0.0.1", command.partition(" #")[0])
            said.append(run_command(f"{here.replace('64GiB', '20MiB')} --port {free_port()}"))
        servers = ",".join(re.findall("valkeys://stoker@(.*)[?]", "".join(said)))
        options = f"password_file=pool-password&ca_certs={first}/tls/ca.crt"
        both = f"'valkeys://stoker@{servers}?{options}'"
        states = json.loads(run_command(f"stoker pool status {both} --json"))
        assert [state["error"] for state in states] == ["", ""]
    finally:
        for node in (first, second):
            run_command(f"stoker pool down --dir {node}")


def test_resuming_after_a_crash(tmp_path: Path) -> None:
    write_images(tmp_path / "train")
    save, load = blocks("docs/resume.md", "", "python")
    loader = "loader = stoker.Loader(stoker.ImageFolder('train', my_transform), 10)\n"
    begin = "for step, _ in enumerate(loader):\n    if step == 1:\n        break\n"
    run_script(BEFORE + loader + begin + save + "loader.close()\n", tmp_path)
    count = "print(sum(len(labels) for _, labels in loader))\nloader.close()\n"
    loop = load.replace("    ...", "    print(len(labels))")
    assert run_script(BEFORE + loader + loop + count, tmp_path) == [10, 10, 10, 10, 60]
