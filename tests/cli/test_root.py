"""The top of the command line: help, unknown commands, errors without a trace, extras."""

from __future__ import annotations

import subprocess
import sys

import pytest
from click.testing import CliRunner

from stoker.cli.root import root

COMMANDS = ("bench", "clean", "demo", "doctor", "ls", "simulate", "warm")


def test_help_lists_every_command_in_a_line() -> None:
    result = CliRunner().invoke(root, ["--help"])
    assert result.exit_code == 0
    for name in COMMANDS:
        assert f"\n  {name} " in result.output


@pytest.mark.parametrize("command", [*COMMANDS, "bench hits", "bench loader"])
def test_every_command_has_help(command: str) -> None:
    result = CliRunner().invoke(root, [*command.split(), "--help"])
    assert result.exit_code == 0, result.output
    assert f"Usage: root {command}" in result.output


def test_an_unknown_command_is_refused() -> None:
    result = CliRunner().invoke(root, ["bake"])
    assert result.exit_code == 2
    assert "No such command 'bake'" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--recipes", "lru,clairvoyant"], "recipe 'clairvoyant' is not known"),
        (["demo", "--recipes", ","], "names none"),
        (["demo", "--latency", "5"], "'5' is not a time"),
        (["demo", "--data", "/no/such/folder"], "does not exist"),
        (["bench", "hits", "--cache", "120%"], "--cache='120%'"),
    ],
)
def test_a_refusal_names_the_value_and_shows_no_trace(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(root, arguments)
    assert result.exit_code in (1, 2)
    assert message in result.output
    assert isinstance(result.exception, SystemExit)


def test_without_click_the_message_says_what_to_install() -> None:
    code = "import sys; sys.modules['click'] = None; from stoker.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "pip install 'stoker[tui]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_help_of_the_demo_loads_no_torch() -> None:
    code = (
        "import sys; from click.testing import CliRunner; from stoker.cli.root import root; "
        "assert CliRunner().invoke(root, ['demo', '--help']).exit_code == 0; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
