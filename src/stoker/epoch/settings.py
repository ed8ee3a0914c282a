"""What a user says of a training, checked: its cache, its epochs, the samples that are visited.

``Cache("20%", disk="/nvme/train", stage="decoded")`` is all that is said of the cache.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.epoch.stage import check_stage
from stoker.errors import ConfigError, warn_caller
from stoker.importance.base import Scorer
from stoker.jobs.member import Sharing
from stoker.pool.pool_address import check_pool
from stoker.recipes import as_recipe
from stoker.recipes.base import Recipe, mixed, uniform
from stoker.recipes.baselines import minio
from stoker.sampler.batching import Batching, Grouping
from stoker.sampler.mixture import Mixture
from stoker.scores import Scores
from stoker.source.base import Source
from stoker.store.disk import CacheDir
from stoker.types import parse_bytes

Size = int | float | str
"""Bytes, ``8 << 30`` or ``"8GiB"``, or where that has a meaning a share, ``"20%"``."""

_EVERYTHING = 1 << 60  # stands for a data set that is not known yet, whatever share is asked for


@dataclass(frozen=True)
class Cache:
    """Where samples are kept, how many of them, and in which form. Immutable; safe to share.

    Sizes are payload bytes: bookkeeping is extra. Shares are of the bytes of the visited samples.
    Nothing is opened or reserved here. Raises :class:`~stoker.errors.ConfigError`, which names
    the value, for what makes no sense whatever the data set.
    """

    memory: Size = "20%"
    """Memory, shared by all processes of this machine; 0 switches the cache in memory off."""
    disk: str | os.PathLike[str] | None = None
    """A directory on a local disk, for one data set only, where a second cache lies below the one
    in memory; what is there when the next run begins is not read again."""
    disk_size: Size | None = None
    """Size of the cache on disk; None: all samples, or as it was made. 0: there is none."""
    pool: str | None = field(default=None, repr=False)  # it may have a password
    """Servers that all nodes share, ``"valkey://h1:6379,h2:6379"``, where samples are looked for
    before the source is read; or ``"unix:/run/stoker.sock"``, a cache that the service there shares
    among the users of a group."""
    pool_size: Size | None = None
    """What this data set may take of the pool; None: what the servers have. 0: there is none."""
    stage: str = "encoded"
    """``"encoded"`` bytes; ``"resized:288"`` or ``"resized:288:90"``, JPEG files whose short side
    and quality are these, where originals are larger: a third of the bytes, and less work; or
    ``"decoded"`` arrays: more bytes, least work. Transforms of the data set, which may be random,
    come after each. Shares of a cache of resized ones are shares of the originals' bytes."""
    prefetch: Size = "256MiB"
    """Bytes, on top of the memory, that a process of its own may read ahead for the ranks of this
    machine; no more than 5 % of the cache or a few batches. 0: nothing is read ahead."""
    fetchers: int | str = "auto"
    """Processes that read ahead. ``"auto"``: one, and more while each makes reading faster, up to
    half the cores and 8."""
    stands_aside: bool = True
    """Whether workers read past the cache, and nothing is read ahead, as long as the samples lie in
    this machine's page cache anyway. ``stats.direct`` counts what was read so."""
    locality: bool = True
    """With ranks on several nodes: whether each sample has one node that keeps it, and ranks prefer
    samples of their node, as far as each step of all ranks has the samples that the plan has there.
    False: ranks divide each step as on one node, and nodes keep what they read."""
    sharing: Sharing = field(default_factory=Sharing)
    """How this job and others that share the cache agree on what stays in it."""

    def __post_init__(self) -> None:
        _check_size("cache", self.memory)
        _check_where("disk", self.disk, self.disk_size)
        _check_where("pool", self.pool, self.pool_size)
        if self.disk is not None:
            CacheDir(self.disk)
        if self.pool is not None:
            check_pool(self.pool)
        check_stage(self.stage)
        parse_bytes(self.prefetch, name="prefetch")
        if self.fetchers != "auto" and not _is_count(self.fetchers):
            raise ConfigError(f"fetchers={self.fetchers!r} is invalid: give 1 to 64, or 'auto'")
        for name in ("stands_aside", "locality"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ConfigError(f"{name}={value!r} is invalid: give True or False")
        if not isinstance(self.sharing, Sharing):
            raise ConfigError(f"sharing={self.sharing!r} is invalid: give a stoker.jobs.Sharing")


def as_cache(cache: Cache | Size) -> Cache:
    """Return a Cache, or one of that much memory; raises ConfigError for anything else."""
    return cache if isinstance(cache, Cache) else Cache(cache)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 64


def _check_size(name: str, size: Size) -> int:
    return parse_bytes(size, of=_EVERYTHING, name=name)


def _check_where(name: str, where: object, size: Size | None) -> None:
    """Raise ConfigError for an invalid size, and for a size without the other."""
    if size is not None and _check_size(f"{name}_size", size) and where is None:
        what = "a directory" if name == "disk" else "servers"
        raise ConfigError(f"{name}_size={size!r} needs {what}: give {name} too")


@dataclass(frozen=True)
class EpochSettings:
    """How epochs are planned, and what they keep.

    Raises :class:`~stoker.errors.ConfigError` for a wrong number of epochs; the rest is checked by
    those who make it.
    """

    seed: int = 0
    """Of order and augmentation."""
    epochs: int | None = None
    """Epochs of the whole training; None when not known."""
    batch_size: int | None = 1
    """Samples of a batch of one rank; None for samples one by one."""
    shuffle: bool = True
    """Whether samples come in random order, equally many to each rank."""
    drop_last: bool = False
    """Whether ranks and batches are cut to equal lengths, and not filled up."""
    is_planned: bool = True
    """Whether epochs are planned here; else a sampler of the user's gives the order."""
    needs_scores: bool = False
    """Whether cache or training use scores, even if plans do not."""
    ranks_substitute: bool = False
    """Whether ranks serve samples for each other, and so begin their epochs together."""
    without_accuracy: str = ""
    """What becomes of the cache where no accuracy is told; empty if that is no matter."""
    probe: int = 0
    """Batches of a block read past the cache to measure what it is worth; 0: none."""
    grouping: Grouping | None = None
    """What puts the samples of an epoch into batches by their lengths, of :attr:`batch_size`
    samples in the mean; None: each has so many."""
    is_resumable: bool = True
    """Whether states are saved, also within an epoch: the scores that its plan was made from are
    kept for them."""

    def __post_init__(self) -> None:
        epochs = self.epochs
        if epochs is not None and (isinstance(epochs, bool) or int(epochs) != epochs or epochs < 1):
            raise ConfigError(f"epochs={epochs!r}: give how many there will be, 1 or more")

    def of_recipe(self, recipe: Recipe, probe: int) -> EpochSettings:
        """Return these settings with what ``recipe`` asks of an epoch, and with ``probe``."""
        policy, shares = recipe.policy, recipe.shares
        without = "" if shares is None or not self.is_planned else shares.without_accuracy
        return replace(
            self,
            needs_scores=shares is not None or policy.has_places or policy.follows_scores,
            ranks_substitute=recipe.substitution is not None,
            without_accuracy=without,
            probe=probe,
        )

    def batched(self, batching: Batching, source: Source, population: Population) -> EpochSettings:
        """Return these settings with batches by the lengths of the samples of ``source``.

        Raises :class:`~stoker.errors.ConfigError` where samples do not fit.
        """
        lengths = batching.lengths_of(source.sizes, are_exact=source.sizes_are_exact)
        visited = population.ids(np.arange(len(population))) if population.label else None
        grouping = Grouping(
            batching,
            lengths,
            visited,
            seed=self.seed,
            shuffle=self.shuffle,
            drop_last=self.drop_last,
        )
        return replace(self, grouping=grouping, batch_size=grouping.typical)


class Population:
    """The samples that are visited, of a data set of ``num_samples``: the view of a training.

    ``ids`` (``u32[n]``) are those of the data set that the indices of the view stand for, in any
    order, some perhaps several times; None: all, in order. Scores and caches speak of ids of the
    data set whatever part of it is visited. ``mixture``: how the sources that it consists of are
    mixed, if there are several. Immutable.
    """

    def __init__(
        self,
        num_samples: int,
        ids: NDArray[np.uint32] | None = None,
        mixture: Mixture | None = None,
    ) -> None:
        self.num_samples = num_samples
        """Samples of the data set, visited or not."""
        self.mixture = mixture
        """How sources are mixed; None: there is one."""
        self._ids = ids

    def __len__(self) -> int:
        return self.num_samples if self._ids is None else len(self._ids)

    def ids(self, indices: NDArray[np.int64] | NDArray[np.uint32]) -> NDArray[np.uint32]:
        """Return base ids ``u32[n]`` for indices of the view ``[n]``; negative ones count back.

        Raises :class:`~stoker.errors.ConfigError` for those out of range.
        """
        if indices.size and not -len(self) <= indices.min() <= indices.max() < len(self):
            raise ConfigError(
                f"the sampler gave indices from {indices.min()} to {indices.max()}, which is out "
                f"of range: there are {len(self)} samples, 0 to {len(self) - 1}"
            )
        if indices.dtype.kind == "i":
            indices = np.where(indices < 0, indices + len(self), indices)
        chosen = indices if self._ids is None else self._ids[indices]
        return np.ascontiguousarray(chosen, np.uint32)

    def sizes(self, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return those of the base's ``sizes``, ``i64[N]``, that are visited, each once."""
        return sizes if self._ids is None else sizes[np.unique(self._ids)]

    def visited(self, ids: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """Return those of ``ids`` ``u32[n]`` of the base that are visited."""
        return ids if self._ids is None else ids[np.isin(ids, self._ids)]

    def spread(self, times: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return f32[N], ``times`` f32[n] until samples of the view are used, by id of the base.

        Of a sample that comes twice in the view the earlier; one that does not, at the very end.
        """
        if self._ids is None:
            return times
        by_id = np.full(self.num_samples, np.finfo(np.float32).max / 2, np.float32)
        np.minimum.at(by_id, self._ids, times)
        return by_id

    def scores(self, scores: Scores) -> Scores:
        """Return the scores of the samples that are visited, by index of the view.

        For the whole data set these are ``scores`` themselves, else a copy.
        """
        if self._ids is None:
            return scores
        part = Scores(len(self))
        arrays = scores.arrays()
        for name in ("values", "last", "seen", "volatile", "basis"):
            arrays[name] = arrays[name][self._ids]
        part.restore(**arrays)
        return part

    @property
    def label(self) -> str:
        """Empty for the whole data set, else a short hash of the subset's ids."""
        if self._ids is None:
            return ""
        return hashlib.blake2b(self._ids.tobytes(), digest_size=8).hexdigest()


def check_accuracy(accuracy: Any) -> float:
    """Return an accuracy as a float; ConfigError unless it is a share from 0 to 1."""
    value = float(accuracy)
    if 0 <= value <= 1:
        return value
    hint = f": if that is per cent, give {value / 100:g}" if 1 < value <= 100 else ""
    raise ConfigError(f"accuracy={value:g} is not a share: give a share from 0 to 1{hint}")


def check_known_end(recipe: Recipe, epochs: int | None) -> None:
    """Warn if ``recipe`` divides its cache by the progress of a training of unknown length."""
    without = "" if recipe.shares is None else recipe.shares.without_epochs
    if epochs is None and without:
        warn_caller(
            f"recipe {recipe.name!r} goes by how far training is, and does not know how long it "
            f"will be: {without}. Give the Loader epochs="
        )


def recipe_of(
    recipe: str | Recipe | None,
    *,
    is_planned: bool,
    shuffle: bool,
    rescore: Any,
    mixture: Mixture | None = None,
    batching: Batching | None = None,
    has_size: bool = False,
) -> Recipe:
    """Return the recipe of a training, as the user gave it or the default.

    What is visited in order is best cached by ``minio``. ``has_size``: the user gave the size of a
    batch. Raises ConfigError for one that does not exist, or does not go with a sampler of the
    user's, a mixture or ``batching``; warns if it lacks ``rescore``.
    """
    chosen = as_recipe(recipe, is_planned=is_planned)
    if mixture is not None:
        if not (is_planned and shuffle):
            raise ConfigError(
                "a mixture is drawn at random by its weights: leave out shuffle, sampler and "
                "batch_sampler"
            )
        chosen = mixed(chosen, mixture)
    elif not is_planned:
        _check_own_order(chosen)
    elif not shuffle and not chosen.preload:
        chosen = minio()
    chosen = _as_scored(chosen, rescore)
    if batching is not None:
        _check_batching(batching, chosen, has_size, is_planned, rescore)
    return chosen


def _check_own_order(recipe: Recipe) -> None:
    """Raise ConfigError unless ``recipe`` goes with a sampler of the user's."""
    if recipe.sampler is not uniform:
        raise ConfigError(
            f"recipe {recipe.name!r} draws samples itself: leave out sampler and batch_sampler, "
            "or use a recipe that only caches, like 'minio'"
        )
    if recipe.needs_plan:
        raise ConfigError(
            f"recipe {recipe.name!r} needs a plan, which a sampler does not give: leave out "
            "sampler and batch_sampler, or use a recipe like 'minio'"
        )


def _as_scored(recipe: Recipe, rescore: Any) -> Recipe:
    """Return what ``recipe`` is with ``rescore``, a function or None; warns if it lacks one."""
    if rescore is not None or recipe.unscored is None:
        return recipe
    warn_caller(
        f"recipe {recipe.name!r} rescores samples between epochs, and there is no function to "
        "do it: samples keep the score of their last visit, and the cache has no region for those "
        "to be scored. Give the Loader rescore=, a function from a batch to its losses, or choose "
        "that by stoker.recipes.impact(evaluation='history')"
    )
    return recipe.unscored


def _check_batching(
    batching: Batching, recipe: Recipe, has_size: bool, is_planned: bool, rescore: Any
) -> None:
    """Raise ConfigError unless ``batching`` is a Batching that goes with the other arguments."""
    if not isinstance(batching, Batching):
        raise ConfigError(
            f"batching={batching!r} is not known: give a stoker.TokenBudget, Buckets or Packing"
        )
    if has_size:
        raise ConfigError("batching= says what a batch is, and so does batch_size=: leave one out")
    if not is_planned:
        raise ConfigError("batching= plans batches: leave out sampler and batch_sampler, or it")
    if recipe.substitution is not None:
        raise ConfigError(
            f"recipe {recipe.name!r} serves samples in the place of others, whose lengths differ: "
            "leave out batching=, or use a recipe like 'foresight'"
        )
    if rescore is not None:
        raise ConfigError("rescore= scores batches of a fixed size: leave it out, or batching=")


def check_rescore(rescore: Any, recipe: Recipe, scorer: Scorer) -> None:
    """Raise ConfigError unless ``rescore`` is a function that ``recipe`` has a use for, or None.

    Warns where it is None and ``recipe`` would have a use for it.
    """
    if rescore is None:
        if scorer.rescores:
            warn_caller(
                f"recipe {recipe.name!r} rescores samples between epochs, and there "
                "is no function to do it: they keep the score of their last visit. Give the "
                "Loader rescore=, a function from a batch to its losses"
            )
        return
    if not callable(rescore):
        raise ConfigError(f"rescore={rescore!r} is no function: give one from a batch to losses")
    if not scorer.rescores:
        raise ConfigError(
            f"rescore= is of no use to recipe {recipe.name!r}, which rescores nothing: leave it "
            "out, or use a recipe like 'impact'"
        )
    if others := scorer.needs - {"losses"}:
        raise ConfigError(
            f"rescore= gives losses, and recipe {recipe.name!r} scores by {', '.join(others)}: "
            "leave it out, or use a scorer of losses"
        )


def check_packed(needs: Mapping[str, bool]) -> None:
    """Raise ConfigError for the first argument that is given and needs samples one by one."""
    for name, is_given in needs.items():
        if is_given:
            raise ConfigError(
                f"decode='packed' leaves samples as bytes, and {name} needs them decoded: give "
                "decode= a function, or leave the other out"
            )
