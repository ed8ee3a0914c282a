"""A queue for a link of limited rate that divides it among flows by weights."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

HEAD = np.dtype(
    [
        ("rate", "f8"),  # bytes per second; 0: no limit
        ("until", "f8"),  # when the limit lapses
        ("free_at", "f8"),  # until when the link is used up
        ("virtual", "f8"),  # virtual time: bytes per weight
    ]
)
FLOW = np.dtype(
    [
        ("token", "u8"),  # 0: none
        ("weight", "f8"),
        ("finish", "f8"),  # virtual time at which its latest grant ends
        ("seen", "f8"),  # when it last asked
        ("is_waiting", "i8"),  # whether that was turned down
        ("granted", "f8"),  # bytes so far
    ]
)
FLOWS = 256
"""Flows that are known at a time; the one not seen for longest gives way to another."""
QUEUE_BYTES = HEAD.itemsize + FLOWS * FLOW.itemsize
"""Size of a queue's memory."""

QUANTUM = 0.005
"""Seconds of the link that are granted at least, so that many small reads take few turns."""
INSTALMENT = 0.1
"""Seconds of the link that are granted at most, so that a large read holds up no other flow."""
BURST = 0.1
"""Seconds of the link that may be made up after no flow asked."""
PRESENT = 0.1
"""Seconds for which a flow that was turned down counts as waiting; it asks again before."""
LAG = 0.25
"""Seconds of the link that a flow may be behind the others and still catch up."""
_AGAIN = 0.002  # seconds after which to ask again, if another flow is first
_LONGEST = 3600.0  # a queue that reaches further is of an earlier boot's clock


class Turn(NamedTuple):
    """What came of asking."""

    granted: float
    """Bytes, more than were asked for or a part of them; 0: not yet; inf: there is no limit."""
    wait: float
    """Seconds after which to ask again, if nothing was granted."""


class FairQueue:
    """Grants bytes of a link to flows in proportion to their weights, if they ask for them.

    Start-time fair queueing (Goyal, Vin, Cheng: SIGCOMM 1996): a grant of ``n`` bytes to a flow of
    weight ``w`` starts at S = max(its last finish F, virtual time v), and then F = S + n / w; of
    the flows that wait, the one with the least S is next. A flow that does not wait holds up no
    other, so the whole link is used while any flow asks. As flows poll, v lags :data:`LAG` seconds
    of the link behind what was granted last: a flow that asks a little late loses nothing, and one
    that was idle makes up no more than that.

    ``memory`` is u8[:data:`QUEUE_BYTES`], zeros for a new queue. No clock is read here; the caller
    keeps other processes from the memory meanwhile.
    """

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self._head = memory[: HEAD.itemsize].view(HEAD)
        self.flows = memory[HEAD.itemsize : QUEUE_BYTES].view(FLOW)
        """The flows, :data:`FLOW` each; those with a token of 0 are none."""

    def limit(self, rate: float, now: float, seconds: float) -> None:
        """Limit the link to ``rate`` bytes per second for so many ``seconds``; 0: no limit."""
        self._head["rate"], self._head["until"] = rate, now + seconds

    def rate(self, now: float) -> float:
        """Return the bytes per second in force; 0: no limit."""
        rate, until = float(self._head["rate"][0]), float(self._head["until"][0])
        return rate if now < until < now + _LONGEST else 0.0

    def ask(self, token: int, weight: float, num_bytes: float, now: float) -> Turn:
        """Ask for ``num_bytes`` for the flow ``token``, whose weight is ``weight`` from now on."""
        rate = self.rate(now)
        if not rate:
            return Turn(np.inf, 0.0)
        own = self._row(token, now)
        own["weight"], own["seen"], own["is_waiting"] = weight, now, 1
        head = self._head[0]
        if head["free_at"] > now + _LONGEST:
            head["free_at"] = now
        if head["free_at"] > now:
            return Turn(0.0, min(float(head["free_at"]) - now, PRESENT / 3))
        start = max(float(own["finish"]), float(head["virtual"]))
        if self._is_other_first(token, start, now):
            return Turn(0.0, _AGAIN)
        granted = min(max(num_bytes, rate * QUANTUM), rate * INSTALMENT)
        own["finish"], own["is_waiting"] = start + granted / weight, 0
        own["granted"] += granted
        head["free_at"] = max(float(head["free_at"]), now - BURST) + granted / rate
        behind = rate * LAG / float(self.flows["weight"][self._are_present(now)].sum())
        head["virtual"] = max(float(head["virtual"]), start - behind)
        return Turn(granted, 0.0)

    def _is_other_first(self, token: int, start: float, now: float) -> bool:
        flows = self.flows
        waiting = self._are_present(now) & (flows["is_waiting"] > 0) & (flows["token"] != token)
        starts = np.maximum(flows["finish"][waiting], self._head["virtual"][0])
        return bool((starts < start).any())

    def _are_present(self, now: float) -> NDArray[np.bool_]:
        age = now - self.flows["seen"]
        return np.asarray((self.flows["token"] > 0) & (age >= 0) & (age < PRESENT))

    def _row(self, token: int, now: float) -> np.void:
        """Return the row of a flow, which takes that of the one longest gone if it is new."""
        found = np.flatnonzero(self.flows["token"] == token)
        if found.size:
            row: np.void = self.flows[found[0]]
            return row
        # What was seen later than now is of an earlier boot.
        seen = np.where(self.flows["seen"] > now, 0.0, self.flows["seen"])
        row = self.flows[int(np.argmin(np.where(self.flows["token"] > 0, seen, -1.0)))]
        row["token"], row["finish"], row["granted"] = token, 0.0, 0.0
        return row
