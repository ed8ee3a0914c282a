"""Configuration: file and flags, defaults, and errors that say where."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from stoker.errors import ConfigError
from stoker.tiering.config import TierConfig, read_config


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def write(tmp_path: Path, text: str, name: str = "tiers.toml") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


TOML = """\
source = "data"
threads = 3
small = "1MiB"
fsync = true

[[tier]]
path = "memory"
size = "1MiB"

[[tier]]
path = "disk"
size = 5_000_000
"""
YAML = """\
source: data
threads: 3
small: 1MiB
fsync: true
tier:
  - path: memory
    size: 1MiB
  - {path: disk, size: 5000000}
"""


@pytest.mark.parametrize(("name", "text"), [("t.toml", TOML), ("t.yaml", YAML)])
def test_a_file_says_everything(tmp_path: Path, source: Path, name: str, text: str) -> None:
    config = read_config(write(tmp_path, text, name), {})
    assert config.source == source, "paths are relative to the file"
    assert config.tiers == (
        TierConfig(tmp_path / "memory", 1 << 20),
        TierConfig(tmp_path / "disk", 5_000_000),
    )
    assert (config.threads, config.small, config.fsync, config.checksum) == (
        3,
        1 << 20,
        True,
        False,
    )


def test_flags_replace_what_the_file_says(tmp_path: Path, source: Path) -> None:
    flags: dict[str, Any] = {"tiers": (f"{tmp_path}/a:b:2KiB",), "threads": 9, "fsync": None}
    config = read_config(write(tmp_path, TOML), flags)
    assert config.tiers == (TierConfig(tmp_path / "a:b", 2048),)
    assert config.threads == 9 and config.fsync


def test_a_source_that_is_a_link_is_followed(tmp_path: Path, source: Path) -> None:
    (tmp_path / "link").symlink_to(source)
    config = read_config(None, {"source": tmp_path / "link", "tiers": (f"{tmp_path}/t:1MiB",)})
    assert config.source == source and config.spelling == tmp_path / "link"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("threads = 3", "threads = 0"), "tiers.toml:2: threads=0"),
        (("threads = 3", "thread = 3"), "tiers.toml:2: unknown key 'thread'"),
        (("threads = 3", "threads = "), "line 2"),
        (("fsync = true", "fsync = 'yes'"), "tiers.toml:4: fsync='yes'"),
        (('small = "1MiB"', 'small = "lots"'), "tiers.toml:3: small='lots'"),
        (('size = "1MiB"', 'size = "lots"'), "tiers.toml:8: size='lots'"),
        (('size = "1MiB"', "size = 0"), "tiers.toml:8: size=0"),
        (("size = 5_000_000", ""), "tiers.toml:10: tier 2 has no size"),
        (("size = 5_000_000", "size = 5\nquota = 5"), "tiers.toml:13: unknown key 'quota'"),
        (('path = "disk"', "path = 7"), "tiers.toml:11: path=7"),
        (('source = "data"', 'source = "nowhere"'), "nowhere' is not a directory"),
        (('path = "disk"', 'path = "data/cache"'), "contain one another"),
        (('path = "disk"', 'path = "memory"'), "contain one another"),
        (('path = "disk"', 'path = "."'), "contain one another"),
    ],
)
def test_errors_name_line_and_key(
    tmp_path: Path, source: Path, change: tuple[str, str], says: str
) -> None:
    assert TOML.count(change[0]) == 1
    with pytest.raises(ConfigError) as caught:
        read_config(write(tmp_path, TOML.replace(*change)), {})
    assert says in str(caught.value)


def test_errors_of_yaml_name_lines_too(tmp_path: Path, source: Path) -> None:
    with pytest.raises(ConfigError, match=r"tiers\.yaml:8: size='lots'"):
        read_config(write(tmp_path, YAML.replace("5000000", "lots"), "tiers.yaml"), {})
    with pytest.raises(ConfigError, match="is not YAML"):
        read_config(write(tmp_path, "a: [", "tiers.yml"), {})
    with pytest.raises(ConfigError, match="holds no keys"):
        read_config(write(tmp_path, "", "tiers.yml"), {})


def test_yaml_without_its_package_is_named(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ConfigError, match=r"stoker\[yaml\]"):
        read_config(write(tmp_path, YAML, "tiers.yaml"), {})


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({}, "--source DIR"),
        ({"source": "data"}, "--tier DIR:SIZE"),
        ({"source": "data", "tiers": ("cache",)}, "--tier 'cache' is not DIR:SIZE"),
        ({"source": "data", "tiers": ("cache:1XB",)}, "--tier cache:1XB: size='1XB'"),
        ({"source": "data", "tiers": ("c:1KB",), "revalidate": -1.0}, "--revalidate: revalidate"),
        ({"source": "data", "tiers": ("c:1KB",), "order": "none"}, "is not a file"),
        ({"source": "/", "tiers": ("c:1KB",)}, "is the whole file system"),
        ({"source": "data", "tiers": tuple(f"c{i}:1KB" for i in range(9))}, "at most 8"),
    ],
)
def test_errors_name_the_flag(
    tmp_path: Path,
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
    flags: dict[str, Any],
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        read_config(None, flags)
    assert says in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_config(tmp_path / "no.toml", {})
