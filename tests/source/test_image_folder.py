"""ImageFolderSource: torchvision's order, and when a stored listing is used again."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker.errors import ConfigError, SampleCorrupt, SampleNotFound, SourceError
from stoker.source import ImageFolderSource, Source, image_folder
from stoker.source.image_folder import IMAGE_EXTENSIONS
from stoker.testing import SourceConformance


@pytest.fixture(autouse=True)
def cache_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    return home


class Listings:
    """Counts how often folders are really listed; ``later`` seconds from now."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made, self.later = 0, 10
        clock = SimpleNamespace(time_ns=lambda: time.time_ns() + self.later * 10**9)
        monkeypatch.setattr(image_folder, "time", clock)
        self._really = image_folder.list_folder
        monkeypatch.setattr(image_folder, "list_folder", self._list)

    def _list(self, *args: object) -> object:
        self.made += 1
        return self._really(*args)  # type: ignore[arg-type]


@pytest.fixture
def listings(monkeypatch: pytest.MonkeyPatch) -> Listings:
    return Listings(monkeypatch)


def put(root: Path, *names: str) -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())


def settle(root: Path) -> None:
    """Make every directory look as if it had last changed long ago."""
    for directory, _, _ in os.walk(root):
        os.utime(directory, (1_600_000_000, 1_600_000_000))


def torchvision_samples(root: Path) -> tuple[list[str], list[tuple[str, int]]]:
    """What torchvision.datasets.folder.make_dataset returns, written from its documentation."""
    classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
    samples = []
    for target, name in enumerate(classes):
        for directory, _, files in sorted(os.walk(root / name, followlinks=True)):
            images = [file for file in sorted(files) if file.lower().endswith(IMAGE_EXTENSIONS)]
            samples.extend((str(Path(directory) / image), target) for image in images)
    return classes, samples


@pytest.mark.exact("Class folders of images", "a source, of local files")
class TestImageFolderSource(SourceConformance):
    def make(self, samples: list[bytes], tmp_path: Path) -> Source:
        for number, sample in enumerate(samples):
            path = tmp_path / f"class{number // 10}" / f"{number:04d}.jpg"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(sample)
        return ImageFolderSource(tmp_path)


NAMES = st.text("aAb-._0ß日", min_size=1, max_size=3).filter(lambda name: name not in (".", ".."))
FILES = st.builds(
    lambda folders, name, ending: "/".join([*folders, name + ending]),
    st.lists(NAMES, min_size=1, max_size=3),
    NAMES,
    st.sampled_from([".jpg", ".JPEG", ".png", ".txt", ""]),
)


@pytest.mark.exact("Class folders of images", "order and targets are those of torchvision")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(st.lists(FILES, min_size=1, max_size=15, unique=True))
def test_order_and_targets_are_those_of_torchvision(
    tmp_path_factory: pytest.TempPathFactory, names: list[str]
) -> None:
    root = tmp_path_factory.mktemp("root")
    for name in names:
        try:
            put(root, name)
        except (FileExistsError, NotADirectoryError, IsADirectoryError):
            continue  # one path wants a file where another wants a folder
    classes, samples = torchvision_samples(root)
    if not samples:
        with pytest.raises(ConfigError, match=r"no samples|no class folders"):
            ImageFolderSource(root, allow_empty=True)
        return
    source = ImageFolderSource(root, allow_empty=True)
    assert list(source.classes) == classes
    assert source.class_to_idx == {name: target for target, name in enumerate(classes)}
    assert [source.name(i) for i in range(len(source))] == [path for path, _ in samples]
    assert source.targets.tolist() == [target for _, target in samples]
    again = ImageFolderSource(root, allow_empty=True, cache_listing=False)
    assert again.fingerprint == source.fingerprint


def test_linked_folders_are_followed_but_not_in_circles(tmp_path: Path) -> None:
    put(tmp_path / "elsewhere", "x.jpg")
    put(tmp_path / "root", "a/1.jpg")
    (tmp_path / "root" / "b").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "root" / "a" / "circle").symlink_to("..")
    (tmp_path / "root" / "a" / "itself").symlink_to(".")
    source = ImageFolderSource(tmp_path / "root")
    assert source.classes == ("a", "b")
    names = [source.name(i).removeprefix(f"{tmp_path}/root/") for i in range(len(source))]
    assert names[0] == "a/1.jpg"
    assert names[-1] == "b/x.jpg"
    assert len(names) <= 5


def test_an_unchanged_folder_is_listed_once(tmp_path: Path, listings: Listings) -> None:
    put(tmp_path, "a/1.jpg", "b/deep/2.png")
    settle(tmp_path)
    first = ImageFolderSource(tmp_path)
    second = ImageFolderSource(f"{tmp_path}/")
    assert listings.made == 1
    assert second.read([0, 1]) == [b"a/1.jpg", b"b/deep/2.png"]
    assert second.classes == first.classes
    assert second.targets.tolist() == first.targets.tolist()
    assert second.sizes.tolist() == first.sizes.tolist()
    assert second.fingerprint == first.fingerprint


@pytest.mark.parametrize(
    "change",
    [
        lambda root: put(root, "a/new.jpg"),
        lambda root: put(root, "b/deep/new.jpg"),
        lambda root: put(root, "new/1.jpg"),
        lambda root: (root / "a" / "2.jpg").unlink(),
        lambda root: (root / "a" / "2.jpg").rename(root / "a" / "3.jpg"),
        lambda root: (root / "b").rename(root / "c"),
    ],
)
def test_a_changed_folder_is_listed_again(
    tmp_path: Path, listings: Listings, change: object
) -> None:
    put(tmp_path, "a/1.jpg", "a/2.jpg", "b/deep/2.png")
    settle(tmp_path)
    before = ImageFolderSource(tmp_path)
    change(tmp_path)
    after = ImageFolderSource(tmp_path)
    assert listings.made == 2
    assert after.fingerprint != before.fingerprint
    assert [after.name(i) for i in range(len(after))] == [
        path for path, _ in torchvision_samples(tmp_path)[1]
    ]


def test_s12_another_tree_with_the_same_times_is_listed_anew(
    tmp_path: Path, listings: Listings
) -> None:
    root = tmp_path / "data"
    for tree, names in ((root, ("a/1.jpg", "b/x.jpg")), (tmp_path / "v2", ("a/2.jpg", "b/x.jpg"))):
        put(tree, *names)
        settle(tree)
    assert ImageFolderSource(root).name(0).endswith("a/1.jpg")
    root.rename(tmp_path / "v1")
    (tmp_path / "v2").rename(root)
    settle(tmp_path)
    after = ImageFolderSource(root)
    assert listings.made == 2
    assert after.read([0, 1]) == [b"a/2.jpg", b"b/x.jpg"]
    # Rebuilt where it was, its times set back: as unpacking an archive does.
    (root / "a" / "2.jpg").rename(root / "a" / "3.jpg")
    settle(root)
    assert ImageFolderSource(root).name(0).endswith("a/3.jpg") and listings.made == 3


def test_a_folder_that_changed_a_moment_ago_is_not_trusted(
    tmp_path: Path, listings: Listings
) -> None:
    put(tmp_path, "a/1.jpg")
    listings.later = 0
    ImageFolderSource(tmp_path)
    ImageFolderSource(tmp_path)
    assert listings.made == 2
    listings.later = 10
    ImageFolderSource(tmp_path)
    ImageFolderSource(tmp_path)
    assert listings.made == 3


def test_other_questions_get_other_listings(tmp_path: Path, listings: Listings) -> None:
    put(tmp_path, "a/1.jpg", "a/2.txt")
    settle(tmp_path)
    assert len(ImageFolderSource(tmp_path)) == 1
    assert len(ImageFolderSource(tmp_path, extensions=(".jpg", ".TXT"))) == 2
    assert len(ImageFolderSource(tmp_path, cache_listing=False)) == 1
    assert listings.made == 3


def test_a_damaged_listing_is_made_again(
    tmp_path: Path, cache_home: Path, listings: Listings, caplog: pytest.LogCaptureFixture
) -> None:
    put(tmp_path, "a/1.jpg")
    settle(tmp_path)
    expected = ImageFolderSource(tmp_path).fingerprint
    (stored,) = (cache_home / "stoker" / "listings").iterdir()
    intact = stored.read_bytes()
    damaged = [b"", intact[:40], intact[:-1], b"stoker listing 0\n" + intact[17:]]
    damaged += [intact[:at] + bytes([intact[at] ^ 1]) + intact[at + 1 :] for at in (3, 30, 200, -9)]
    for number, content in enumerate(damaged, start=2):
        stored.write_bytes(content)
        with caplog.at_level(logging.WARNING):
            assert ImageFolderSource(tmp_path).fingerprint == expected
        assert "is damaged" in caplog.text
        assert listings.made == number
        assert stored.read_bytes() != content
        caplog.clear()


def test_a_cache_that_cannot_be_written_is_only_reported(
    tmp_path: Path,
    cache_home: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    put(tmp_path, "a/1.jpg")
    (cache_home / "stoker").write_text("in the way")
    assert len(ImageFolderSource(tmp_path)) == 1
    assert "cannot keep the listing" in caplog.text
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    monkeypatch.setenv("HOME", str(cache_home / "home"))
    assert len(ImageFolderSource(tmp_path)) == 1
    assert (cache_home / "home" / ".cache" / "stoker" / "listings").is_dir()


def test_nothing_is_left_behind_beside_the_listing(tmp_path: Path, cache_home: Path) -> None:
    put(tmp_path, "a/1.jpg")
    for _ in range(3):
        ImageFolderSource(tmp_path)
    assert len(list((cache_home / "stoker" / "listings").iterdir())) == 1


def test_s12_a_tree_rebuilt_in_place_is_listed_anew(tmp_path: Path, listings: Listings) -> None:
    names = [f"a/{number:03d}.jpg" for number in range(200)]
    put(tmp_path, *names)
    settle(tmp_path)
    before = ImageFolderSource(tmp_path)
    assert ImageFolderSource(tmp_path).local_identity == before.local_identity
    put(tmp_path, *names)
    settle(tmp_path)
    assert ImageFolderSource(tmp_path).local_identity != before.local_identity
    assert listings.made == 2


def test_a_file_rewritten_in_place_is_found_by_its_size(
    tmp_path: Path, listings: Listings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_folder, "_LOOKED_AT", 0)  # it is not among those drawn
    put(tmp_path, "a/1.jpg")
    settle(tmp_path)
    ImageFolderSource(tmp_path)
    with (tmp_path / "a" / "1.jpg").open("ab") as file:
        file.write(b"more")
    source = ImageFolderSource(tmp_path)
    assert listings.made == 1
    with pytest.raises(SampleCorrupt, match="grew since it was listed with 7 bytes"):
        source.read([0])


@pytest.mark.parametrize("fault", ["another size", "gone"])
def test_newcomer_2_the_advice_to_list_again_helps(
    tmp_path: Path, listings: Listings, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr(image_folder, "_LOOKED_AT", 0)  # it is not among those drawn
    if fault == "gone":  # as on a mount that keeps no times of directories
        monkeypatch.setattr(image_folder, "_still_holds", lambda listing, threads: True)
    put(tmp_path, "a/1.jpg", "a/2.jpg")
    settle(tmp_path)
    source = ImageFolderSource(tmp_path)
    if fault == "gone":
        (tmp_path / "a" / "1.jpg").unlink()
    else:
        (tmp_path / "a" / "1.jpg").write_bytes(b"others")
    for _ in range(2):
        with pytest.raises(SourceError, match="make the data set again, which lists it again"):
            source.read([0])
    again = ImageFolderSource(tmp_path)
    assert listings.made == 2
    assert again.read([0]) == [b"a/2.jpg" if fault == "gone" else b"others"]
    with pytest.raises(SourceError):
        source.read([0])  # of the old one, which discards no listing that is not its own
    assert ImageFolderSource(tmp_path).fingerprint == again.fingerprint
    assert listings.made == 2


def test_bad_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such place"):
        ImageFolderSource(tmp_path / "no such place")
    put(tmp_path, "file.jpg")
    with pytest.raises(ConfigError, match="not a directory"):
        ImageFolderSource(tmp_path / "file.jpg")
    with pytest.raises(ConfigError, match="no class folders"):
        ImageFolderSource(tmp_path)
    put(tmp_path, "empty/readme.txt")
    with pytest.raises(ConfigError, match="no samples in 'empty'"):
        ImageFolderSource(tmp_path, allow_empty=True)
    put(tmp_path, "full/1.jpg")
    with pytest.raises(ConfigError, match=r"no samples in 'empty'.*allow_empty=True"):
        ImageFolderSource(tmp_path)
    assert ImageFolderSource(tmp_path, allow_empty=True).targets.tolist() == [1]
    for bad in ("", ".jpg", ()):
        with pytest.raises(ConfigError, match="give a tuple"):
            ImageFolderSource(tmp_path, extensions=bad)
    with pytest.raises(ConfigError, match="threads=0"):
        ImageFolderSource(tmp_path, threads=0)


def test_a_link_that_leads_nowhere_is_refused(tmp_path: Path) -> None:
    put(tmp_path, "a/1.jpg")
    (tmp_path / "a" / "2.jpg").symlink_to("nowhere")
    with pytest.raises(SampleNotFound, match=r"a/2\.jpg"):
        ImageFolderSource(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user without rights")
@pytest.mark.parametrize("locked", ("", "a"))
def test_an_unreadable_folder_is_reported(tmp_path: Path, locked: str) -> None:
    put(tmp_path, "root/a/1.jpg")
    (tmp_path / "root" / locked).chmod(0)
    code = (
        "import os, sys\n"
        "from stoker.source import ImageFolderSource\n"
        "import stoker.errors as e\n"
        "os.setuid(65534)\n"
        "try: ImageFolderSource(sys.argv[1], cache_listing=False)\n"
        "except e.SourceUnavailable as error: print(error)\n"
    )
    for directory in (tmp_path, *tmp_path.parents):
        if directory.stat().st_uid == os.geteuid() and directory != Path("/"):
            directory.chmod(directory.stat().st_mode | 0o011)
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "root"], capture_output=True, text=True, check=True
    )
    assert "Permission denied: let this user (id 65534)" in done.stdout
