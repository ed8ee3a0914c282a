"""What docs/tiering.md shows works as it stands, but for paths and sizes."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

from stoker.tiering.config import _FIELDS, Config, read_config
from tiering.conftest import write_files
from tiering.runs import STOKER, Setup, direct

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "tiering.md").read_text()


def test_the_examples_command(tmp_path: Path) -> None:
    write_files(tmp_path / "nfs" / "train", {f"{i}.bin": 10_000 for i in range(8)})
    text = DOCUMENT.partition("## An example\n")[2]
    command = re.findall(r"```\n(stoker run .*?)```", text, re.DOTALL)[0].replace("\\\n", " ")
    here = command.replace("/mnt/nfs", f"{tmp_path}/nfs").replace("/dev/shm", f"{tmp_path}")
    words = shlex.split(here)
    words[words.index("python")] = sys.executable
    words[words.index("examples/tiering_pytorch.py")] = f"{ROOT}/examples/tiering_pytorch.py"
    said = direct(*STOKER, *words[2:], "--workers=1")
    assert said.count("8 samples") == 3
    assert len(list((tmp_path / "stoker" / "copies").iterdir())) == 8


def test_the_documents_configuration(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (text,) = re.findall(r"```toml\n(.*?)```", DOCUMENT, re.DOTALL)
    config = tmp_path / "tiers.toml"
    for path, here in (("/mnt/nfs/", ""), ("/dev/shm/stoker", "one"), ("/nvme/stoker", "two")):
        text = text.replace(path, here)
    config.write_text(text)
    found = read_config(config, {})
    assert [tier.quota for tier in found.tiers] == [8 << 30, 200 << 30]
    assert found.revalidate == 300


def test_every_option_is_documented() -> None:
    for key in _FIELDS:
        assert f"`{key}`" in DOCUMENT
    defaults = Config(Path(), (), Path())
    assert (defaults.threads, defaults.revalidate) == (6, 60)
    assert (defaults.small, defaults.ahead) == (0, 128 << 20)
    shown = direct(*STOKER, "--help")
    for flag in set(re.findall(r"--[a-z]+", shown)) - {"--help"}:
        assert flag.removeprefix("--") in DOCUMENT, flag


def test_every_field_of_the_report_is_documented(tmp_path: Path) -> None:
    write_files(tmp_path / "source", {"a": 10})
    done = Setup(tmp_path / "source", ((tmp_path / "tier", 100),), ("--json",)).run("true")
    report = done.report
    for name in [*report, *report["source"], *report["tiers"][0]]:
        assert f"`{name}`" in DOCUMENT or f"`{name}[]`" in DOCUMENT, name
