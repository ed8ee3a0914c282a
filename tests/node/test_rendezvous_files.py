import pytest

from stoker.node import descriptors
from stoker.node.rendezvous import RendezvousFiles


@pytest.fixture
def place(tmp_path):
    return RendezvousFiles.of(tmp_path, "any key: /with\0all kinds of characters")


def names(tmp_path):
    return sorted(path.suffix for path in tmp_path.iterdir())


def test_one_serves_and_others_hold(place, tmp_path):
    serve = place.try_serve()
    assert place.try_serve() is None
    holders = place.try_alone("t1")
    assert place.try_alone("t2") is None, "the holder shares the arena already"
    other = place.join("t1")
    assert not place.leave(serve, holders), "there is still another"
    assert names(tmp_path) == [".holders", ".serve"]
    assert place.leave(*other)
    assert names(tmp_path) == []


def test_a_new_arena_is_not_mistaken_for_the_old_one(place):
    serve = place.try_serve()
    holders = place.try_alone("new")
    with pytest.raises(ConnectionError, match="went away"):
        place.join("old")
    assert place.leave(serve, holders)
    with pytest.raises(FileNotFoundError):
        place.join("new")


def test_a_removed_file_is_not_locked_in_place_of_the_new_one(place, tmp_path):
    first = place.try_serve(), place.try_alone("a")
    second = place.join("a")
    for path in tmp_path.iterdir():
        path.unlink()
    renewed = place.try_serve(), place.try_alone("b")
    assert not place.leave(*first)
    assert not place.leave(*second)
    assert names(tmp_path) == [".holders", ".serve"], "those of the new arena"
    assert place.leave(*renewed)


def test_cleaning_removes_what_nobody_holds(place, tmp_path):
    place.socket.touch()
    (tmp_path / "notes.txt").touch()
    (tmp_path / "deadbeef.sock").touch()
    serve = place.try_serve()
    holders = place.try_alone("a")
    assert [other.clean() for other in RendezvousFiles.all(tmp_path)] == [False]
    descriptors.drop(serve)
    assert not place.clean(), "a holder is left to take over"
    descriptors.drop(holders)
    assert [other.clean() for other in RendezvousFiles.all(tmp_path)] == [True]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["deadbeef.sock", "notes.txt"]


def test_links_are_not_followed(place, tmp_path):
    target = tmp_path / "precious"
    target.write_text("data")
    place._holders.symlink_to(target)
    serve = place.try_serve()
    with pytest.raises(OSError, match="is a link or no regular file"):
        place.try_alone("token")
    descriptors.drop(serve)
    assert target.read_text() == "data"
