"""What the packaging process is given when it starts, descriptors included."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from stoker.packaging.package import stamp_of
from stoker.shared import SharedArray
from stoker.source.base import Source
from stoker.source.remote.address import Address
from stoker.store.arena import Handle


@dataclass(frozen=True)
class Job:
    """The samples to pack, and where packages and samples go."""

    source: Source
    arena: Handle
    """The cache, of whose region :attr:`region` packages are for."""
    region: str
    low: int
    """What the ranks write for samples of low importance into the array of places."""
    served: SharedArray
    """``u32[N]``: the stamp of the latest epoch in which a sample was served."""
    place: Path | Address
    """Where packages are kept."""
    is_private: bool
    """The place is a directory that goes with the process."""
    owner: str
    """Tells packages of this job and node from those of others in the same place."""
    min_bytes: int
    seed: int
    holder: str
    """Tells this job on this node from any other, in hexadecimal digits; new in every run."""

    @property
    def group(self) -> str:
        """What the names of this job's packages begin with."""
        return f"{stamp_of(self.source.fingerprint, len(self.source)).hex()[:16]}-{self.owner}"
