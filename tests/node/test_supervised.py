"""A process that several ranks share, and what one of them can do to the others."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.waiting import until

from stoker.node import descriptors
from stoker.node.messages import Channel
from stoker.node.supervised import Members


class Member:
    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.close = channel.close

    def obey(self, message: dict[str, Any], fds: list[int]) -> None:
        raise ValueError("it is told nothing")


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[tuple[Path, socket.socket]]:
    path = tmp_path / "socket"
    listener = Channel.listen(path)
    yield path, listener
    descriptors.drop(listener)


def test_a_job_that_was_suspended_held_up_the_process_of_all_others(
    listening: tuple[Path, socket.socket],
) -> None:
    """After two minutes of signs of life that it did not take, it was waited for."""
    path, listener = listening
    members = Members(listener, Member)
    with closing(Channel.connect(path, 60)), closing(Channel.connect(path, 60)) as other:
        until(lambda: members.attend(0) is False and len(members.all) == 2)
        heard = []

        def tell() -> None:
            for number in range(2000):
                members.tell({"number": number})
                answers = iter(other.receive, None)
                heard.append(next(told for told, _ in answers if told.get("number") == number))

        threading.Thread(target=tell, daemon=True).start()
        until(lambda: len(heard) == 2000)
    for member in members.all:
        member.close()
