"""Parts of the packaging process: who is agreed with, what is reported, what is counted."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.waiting import until

from stoker.bundles import Packaging
from stoker.bundles.packager import FIELDS, Flags, Totals
from stoker.bundles.packing import Hands, Loading, Rank, agreed, take_missed
from stoker.bundles.workshop import Epoch, Loaded
from stoker.errors import CapacityError
from stoker.shared import SharedArray

NONE = np.zeros(3, np.bool_)


def rank(stamp: int | None, missed: tuple[int, ...] = ()) -> Any:
    flags = NONE.copy()
    flags[list(missed)] = True
    epoch = None if stamp is None else Epoch(stamp - 1, stamp, NONE)
    return SimpleNamespace(epoch=epoch, missed=flags)


def test_an_epoch_begins_when_all_have_begun_it() -> None:
    assert agreed([]) is None
    assert agreed([rank(None), rank(None)]) is None
    found = agreed([rank(5), rank(4), rank(None)])
    assert found is not None
    assert found.stamp == 4


def test_what_was_missed_is_taken_once() -> None:
    ranks = [rank(1, (0,)), rank(1, (2,))]
    assert take_missed(ranks).tolist() == [True, False, True]
    assert take_missed(ranks).tolist() == [False, False, False]


def test_hands_report_trouble_until_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.bundles.packing._BACK_OFF", 0.01)
    is_broken = threading.Event()
    is_broken.set()

    def work() -> float:
        if is_broken.is_set():
            raise KeyError("a source of the user's raises anything")
        return 0.001

    hands = Hands("test", work)
    until(lambda: hands.trouble is not None)
    assert "KeyError" in str(hands.trouble)
    is_broken.clear()
    until(lambda: hands.trouble is None)
    hands.stop(10.0)


class Workshop:
    def __init__(self, *outcomes: Loaded | None) -> None:
        self.outcomes = list(outcomes)

    def load(self) -> Loaded | None:
        return self.outcomes.pop(0)


def test_loading_looks_less_often_while_there_is_no_room() -> None:
    shop = Workshop(Loaded.NO_ROOM, None, *[Loaded.NO_ROOM] * 20, Loaded.DONE, Loaded.NO_ROOM)
    loading = Loading(SimpleNamespace(workshop=shop))  # type: ignore[arg-type]
    pauses = [loading() for _ in range(24)]
    assert pauses[:22] == sorted(pauses[:22])
    assert pauses[0] < pauses[21] <= 0.05
    assert pauses[22] == 0
    assert pauses[23] == pauses[0]


def test_a_lossy_depot_is_not_hammered() -> None:
    loading = Loading(SimpleNamespace(workshop=Workshop(Loaded.LOST)))  # type: ignore[arg-type]
    assert loading() >= 0.5


def test_a_region_that_shrank_is_trouble() -> None:
    shop = SimpleNamespace(workshop=Workshop(Loaded.TOO_LARGE))
    with pytest.raises(CapacityError, match="smaller than one package"):
        Loading(shop)()  # type: ignore[arg-type]


def test_a_process_that_starts_anew_goes_on_counting() -> None:
    totals, ours, other = Totals(), np.zeros(len(FIELDS)), np.zeros(len(FIELDS))
    ours[FIELDS.index("package_reads")] = 7
    totals.join(ours)
    totals.join(other)
    totals.add(package_reads=1, package_bytes=100)
    assert dict(zip(FIELDS, other.tolist(), strict=True))["package_reads"] == 8
    assert np.array_equal(ours, other)
    totals.leave(ours)
    totals.add(package_reads=1)
    assert ours[FIELDS.index("package_reads")] == 8
    assert other[FIELDS.index("package_reads")] == 9


def test_flags_are_the_same_for_all_ranks() -> None:
    flags, ours, other = Flags(5), np.zeros(5, np.uint8), np.zeros(5, np.uint8)
    ours[4] = 1  # a process before this one brought it
    flags.join(ours)
    flags.set(np.array([1, 2], np.uint32))
    flags.join(other)
    flags.clear(np.array([2], np.uint32))
    assert ours.tolist() == other.tolist() == [0, 1, 0, 0, 1]
    assert flags.ids.tolist() == [1, 4]
    flags.leave(ours)
    flags.set(np.array([0], np.uint32))
    assert ours[0] == 0
    assert other[0] == 1


def test_a_rank_that_has_left_is_written_to_no_more() -> None:
    job = SimpleNamespace(source=range(3), low=1)
    flags, totals = Flags(3), Totals()
    channel = SimpleNamespace(close=lambda: None)
    member = Rank(channel, job, flags, totals)  # type: ignore[arg-type]
    packaged = SharedArray.create(3, np.uint8)
    sums = SharedArray.create(len(FIELDS), np.float64)
    member.obey({"order": "join"}, [packaged.fileno(), sums.fileno()])
    flags.set(np.array([1], np.uint32))
    totals.add(packages_built=1)
    member.close()
    flags.set(np.array([2], np.uint32))
    totals.add(packages_built=1)
    assert packaged.array.tolist() == [0, 1, 0]
    assert sums.array[0] == 1


def test_what_a_rank_says_of_an_epoch() -> None:
    job = SimpleNamespace(source=range(3), low=1)
    member = Rank(None, job, Flags(3), Totals())  # type: ignore[arg-type]
    places = SharedArray.copy_of(np.array([0, 1, 1], np.uint8))
    message = {"order": "epoch", "epoch": 4, "stamp": 5, "missed": 0}
    nothing, some = SharedArray.create(0, np.uint32), SharedArray.copy_of(np.array([2], np.uint32))
    member.obey(message, [places.fileno(), nothing.fileno()])
    assert member.epoch is not None
    assert (member.epoch.number, member.epoch.stamp) == (4, 5)
    assert member.epoch.low.tolist() == [False, True, True]
    member.obey({**message, "missed": 1}, [places.fileno(), some.fileno()])
    assert member.missed.tolist() == [False, False, True]
    with pytest.raises(ValueError, match="unknown"):
        member.obey({"order": "sing"}, [])
    with pytest.raises(KeyError):
        member.obey({}, [])


def test_settings_do_not_show_secrets_and_can_be_compared() -> None:
    settings = Packaging(url="s3://b/p", storage_options={"secret_access_key": "hush"})
    assert "hush" not in repr(settings)
    assert hash(settings) != hash(Packaging())
    assert settings == Packaging(url="s3://b/p", storage_options={"secret_access_key": "hush"})
