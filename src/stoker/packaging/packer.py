"""Decides which samples of low importance go into which packages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from stoker.store.tier import Ids, Mask

_MIXED_BYTES = 32 << 20
_MOST_MIXED = 16


def mixed_packages(min_bytes: int) -> int:
    """Return how many packages have their samples mixed into new ones.

    Twice as many are in memory at the same time.
    """
    return int(np.clip(_MIXED_BYTES // min_bytes, 2, _MOST_MIXED))


def pack(
    low: Mask,
    missed: Mask,
    existing: Sequence[Ids],
    sizes: NDArray[np.int64],
    min_bytes: int,
    rng: np.random.Generator,
) -> list[Ids]:
    """Return the packages to make, each as its ids ``u32[n]``, in the order of their use.

    ``low`` (``bool[N]``) says which samples are of low importance: all of these are packed, no
    others. First come those that were ``missed`` (``bool[N]``), then those of ``existing``
    packages, then the rest (iCache, HPCA'23, "Dynamic packaging"). Each part is in random order,
    except that samples of existing packages are only mixed with those of a few others
    (:func:`mixed_packages`, chosen at random), so that each package need be read but once
    or twice.

    Each package has ``min_bytes`` at least, by ``sizes`` (``i64[N]``), and less than that plus its
    last sample; where all of ``low`` together have less, there is a single one. Together they
    hold each sample once, but for the last package, which is filled up with random samples of
    the one before. Pure: the same arguments and state of ``rng`` give the same packages.
    """
    ids = np.flatnonzero(low).astype(np.uint32)
    group = _groups(len(low), existing, mixed_packages(min_bytes), rng)[ids]
    part = np.where(missed[ids], 0, np.where(group >= 0, 1, 2))
    order = np.lexsort((rng.random(len(ids)), group, part))
    return _cut(ids[order], sizes, min_bytes, rng)


def _groups(
    num_samples: int, existing: Sequence[Ids], mixed: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Return ``i64[N]``: the group of packages a sample is mixed with, -1 if in no package."""
    group = np.full(num_samples, -1, np.int64)
    for rank, number in enumerate(rng.permutation(len(existing)).tolist()):
        group[existing[number]] = rank // mixed
    return group


def _cut(ids: Ids, sizes: NDArray[np.int64], min_bytes: int, rng: np.random.Generator) -> list[Ids]:
    ends = np.cumsum(sizes[ids])
    cuts: list[int] = []
    begin = before = 0
    while begin < len(ids) and ends[-1] - before >= min_bytes:
        begin = int(np.searchsorted(ends, before + min_bytes)) + 1
        before = int(ends[begin - 1])
        cuts.append(begin)
    if not cuts:
        return [ids] if ids.size else []
    packages = np.split(ids, cuts)
    rest = packages.pop()
    if rest.size:
        others = rng.permutation(packages[-1])
        lacking = min_bytes - int(sizes[rest].sum())
        filled = int(np.searchsorted(np.cumsum(sizes[others]), lacking)) + 1
        packages.append(np.concatenate([rest, others[:filled]]))
    return packages
