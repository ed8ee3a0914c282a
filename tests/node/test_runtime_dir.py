import os
import tempfile

import pytest

from stoker.errors import UntrustedPath
from stoker.node.runtime_dir import (
    MARKER,
    existing_runtime_dir,
    prepare_runtime_dir,
    runtime_dir,
)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("STOKER_RUNTIME_DIR", raising=False)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_the_users_choice_comes_first_then_the_session_then_the_temporary_one(
    monkeypatch, tmp_path
):
    assert runtime_dir() == tmp_path / f"stoker-{os.geteuid()}"
    session = tmp_path / "session"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(session))
    assert runtime_dir() == tmp_path / f"stoker-{os.geteuid()}", "a session that is not there"
    session.mkdir()
    assert runtime_dir() == session / "stoker"
    monkeypatch.setenv("STOKER_RUNTIME_DIR", str(tmp_path / "mine"))
    assert runtime_dir() == tmp_path / "mine"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give directories away")
def test_another_users_session_is_passed_over(monkeypatch, tmp_path):
    session = tmp_path / "session"
    session.mkdir()
    os.chown(session, 12345, 12345)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(session))
    assert runtime_dir() == tmp_path / f"stoker-{os.geteuid()}"


def test_it_is_made_private_and_marked():
    assert existing_runtime_dir() is None
    path = prepare_runtime_dir()
    assert path == prepare_runtime_dir() == existing_runtime_dir()
    assert path.stat().st_mode & 0o777 == 0o700
    assert (path / MARKER).is_file()


def test_a_directory_without_the_marker_is_not_stokers():
    path = prepare_runtime_dir()
    (path / MARKER).unlink()
    assert existing_runtime_dir() is None


def test_links_and_files_are_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    runtime_dir().symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UntrustedPath, match="is a link or not a directory"):
        prepare_runtime_dir()
    assert existing_runtime_dir() is None
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_directory_open_to_others_is_refused():
    runtime_dir().mkdir()
    runtime_dir().chmod(0o770)
    with pytest.raises(PermissionError, match="chmod 700"):
        prepare_runtime_dir()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give directories away")
def test_c10_processes_settle_on_another_directory_than_somebody_elses():
    taken = runtime_dir()
    taken.mkdir(mode=0o700)
    os.chown(taken, 12345, 12345)
    ours = prepare_runtime_dir()
    assert ours == taken.with_name(f"{taken.name}+1") == existing_runtime_dir()
    taken.rmdir()  # he goes away; those who come now must find those who came before
    assert runtime_dir() == prepare_runtime_dir() == ours


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give directories away")
def test_c10_a_chosen_directory_of_somebody_else_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("STOKER_RUNTIME_DIR", str(tmp_path / "mine"))
    runtime_dir().mkdir(mode=0o700)
    os.chown(runtime_dir(), 12345, 12345)
    with pytest.raises(UntrustedPath, match="belongs to user 12345: set STOKER_RUNTIME_DIR"):
        prepare_runtime_dir()
    assert existing_runtime_dir() is None
