"""Pages of the site that no other test runs: their programs, and lists that must be complete."""

from __future__ import annotations

import ast
import io
import re
import tarfile
from pathlib import Path

from support.images import write_images
from support.mds import write
from support.modules import modules
from support.pages import ROOT, blocks, run_script

from stoker import errors

DOCS = ROOT / "docs"
FIRST = "\nbatch = next(iter(loader))\nprint(len(batch), len(batch[0]))\nloader.close()\n"


def test_the_first_program(tmp_path: Path) -> None:
    write_images(tmp_path / "train")
    (program,) = blocks("docs/start.md", "3. Change three lines", "python")
    here = program.replace("/mnt/nfs", str(tmp_path)).replace("print(loader.stats)", "pass")
    assert run_script("import torch\ntorch.set_num_threads(1)\n" + here, tmp_path) == []
    assert "<html" in (tmp_path / "run.html").read_text()


def test_from_webdataset(tmp_path: Path) -> None:
    images = sorted(write_images(tmp_path / "images").rglob("*.*"))
    for number in range(2):
        with tarfile.open(tmp_path / f"train-{number:03}.tar", "w") as tar:
            for label, path in enumerate([each for each in images if each.is_file()][number::2]):
                name = f"{number}-{label}"
                for extension, data in (("jpg", path.read_bytes()), ("cls", b"%d" % label)):
                    entry = tarfile.TarInfo(f"{name}.{extension}")
                    entry.size = len(data)
                    tar.addfile(entry, io.BytesIO(data))
    (program,) = blocks("docs/migrate.md", "WebDataset", "python")
    assert run_script(program.replace("/data", str(tmp_path)) + FIRST, tmp_path) == [8, 2]


def test_from_streaming(tmp_path: Path) -> None:
    rows = [{"x": f"text {n}", "y": n} for n in range(20)]
    folder = tmp_path / "mds"
    folder.mkdir()
    write(folder, [rows[:12], rows[12:]], {"x": "str", "y": "int"})
    (program,) = blocks("docs/migrate.md", "MosaicML Streaming", "python")
    assert run_script(program.replace("/data", str(tmp_path)) + FIRST, tmp_path) == [8, 2]


def test_every_error_has_its_cause_and_remedy() -> None:
    ours = {
        name
        for name, thing in vars(errors).items()
        if isinstance(thing, type) and issubclass(thing, errors.StokerError)
    }
    page = (DOCS / "reference" / "errors.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.M)) == ours


def test_every_environment_variable_is_told() -> None:
    used = {
        node.value
        for module in modules()
        for node in module.nodes
        if isinstance(node, ast.Constant) and re.fullmatch("STOKER_[A-Z_]+", str(node.value))
    }
    page = (DOCS / "reference" / "configuration.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.M)) == used
