"""Beyond one process: what the ranks of a job tell each other."""

from stoker.cluster.collective import Alone, Collective, Group, joined
from stoker.cluster.exchange import exchange

__all__ = ["Alone", "Collective", "Group", "exchange", "joined"]
