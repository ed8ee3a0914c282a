"""Pages of the site that no other test runs: their programs, and lists that must be complete."""

from __future__ import annotations

import io
import re
import tarfile
from pathlib import Path

from support.images import write_images
from support.mds import write
from support.pages import ROOT, blocks, run_script

from stoker import errors

DOCS = ROOT / "docs"
FIRST = "\nbatch = next(iter(loader))\nprint(len(batch), len(batch[0]))\nloader.close()\n"


def blocks_of(page: str) -> list[str]:
    """All code blocks of a page, whatever their language."""
    return re.findall(r"^```[^\n]*\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.M)


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


def test_formats(tmp_path: Path) -> None:
    """Parquet with 40 rows of 8 tokens, and a file of 3 windows."""
    rows, packed, windows = (blocks_of("docs/formats.md")[number] for number in (1, 2, 6))
    program = f"""
import numpy as np, pyarrow.parquet, stoker
numbers = np.arange(320, dtype="u2").reshape(40, 8).tolist()
tokens = pyarrow.array(numbers, pyarrow.list_(pyarrow.uint16()))
table = pyarrow.table({{"tokens": tokens, "label": range(40)}})
pyarrow.parquet.write_table(table, "train.parquet")
{rows}
(batch,) = feed
print(len(batch.data), int(batch.data[0]["tokens"][0]) // 8 - batch.data[0]["label"])
feed.close()
source = stoker.source.open_source("train.parquet", columns="tokens")
{packed}
print(len(rows), *tokens.shape, int(sorted(tokens[:, 0])[39]))
feed.close()
np.arange(3 * 2048, dtype="u2").tofile("tokens-0.bin")
{windows}
print(len(dataset), int(dataset[1][0]))
"""
    assert run_script(program, tmp_path) == [40, 0, 40, 40, 8, 312, 3, 2048]


def test_images(tmp_path: Path) -> None:
    (image,) = sorted(write_images(tmp_path).rglob("*0.png"))[:1]
    first, second = blocks_of("docs/images.md")[0].split("pixels = Eval")
    show = "print(*pixels.shape)\n"
    program = f'encoded = open("{image}", "rb").read()\n'
    program += f"{first}{show}pixels = Eval{second}{show}"
    assert run_script(program, tmp_path) == [3, 224, 224, 3, 224, 224]


def test_every_error_has_its_cause_and_remedy() -> None:
    ours = {
        name
        for name, thing in vars(errors).items()
        if isinstance(thing, type) and issubclass(thing, errors.StokerError)
    }
    page = (DOCS / "reference" / "errors.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.M)) == ours
