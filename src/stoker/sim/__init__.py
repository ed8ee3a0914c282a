"""Replay of the production policies and samplers without storage, and what no cache can exceed.

``replay`` runs a recipe over a ``ReplayedCache`` (the arena and store of training, over samples in
miniature), told losses by ``losses``; ``SimResult`` has what was counted, ``limits`` what theory
says. ``Trace`` is a recorded training, ``Conditions`` what its time is computed by.
"""

from stoker.sim import limits
from stoker.sim.clock import Conditions, EpochTime
from stoker.sim.replay import replay
from stoker.sim.result import EpochResult, SimResult
from stoker.sim.trace import Trace

__all__ = ["Conditions", "EpochResult", "EpochTime", "SimResult", "Trace", "limits", "replay"]
