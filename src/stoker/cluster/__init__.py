"""Beyond one process: what the ranks of a job tell each other.

Only :mod:`stoker.cluster.group`, which is not imported here, needs torch.
"""

from stoker.cluster.collective import Alone, Collective, exchange

__all__ = ["Alone", "Collective", "exchange"]
