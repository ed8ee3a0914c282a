"""Which samples may be served in place of others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from stoker.errors import ConfigError

Kind = Literal["low_by_low", "neighbour", "any"]


@dataclass(frozen=True)
class Substitution:
    """What is served for a sample that is not cached, so that no read is needed.

    The label, the loss and the score belong to the sample served. Immutable. Raises
    :class:`~stoker.errors.ConfigError` for an unknown kind or an empty region.
    """

    kind: Kind
    """``low_by_low``: for a sample whose place is ``region``, another one cached there whose
    place it is too, each once an epoch (iCache, HPCA 2023). ``neighbour``: the key sample in
    ``region`` that serves for it (SpiderCache, ICPP 2025). ``any``: for any sample any other one
    cached in ``region``, each once an epoch (Quiver, FAST 2020)."""
    region: str
    """The region of the cache that substitutes are taken from."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ConfigError(f"kind={self.kind!r} is not known: use one of {get_args(Kind)}")
        if not self.region:
            raise ConfigError("region='' is empty: name a region of the policy")

    @property
    def is_once_each(self) -> bool:
        """Whether each sample is to be served once an epoch, in whatever order."""
        return self.kind != "neighbour"
