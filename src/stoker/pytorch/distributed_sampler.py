"""Importance sampling over ranks for torch's own DataLoader; no cache is involved."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import distributed
from torch.utils.data import Dataset
from torch.utils.data import Sampler as TorchSampler

from stoker.epoch.planner import Cursor
from stoker.epoch.ranks import Alone, Collective, LazyRanks, Ranks, exchange
from stoker.errors import ConfigError, StateMismatch
from stoker.plan import Plan
from stoker.pytorch.ranks import current_ranks, joined
from stoker.sampler.baselines import WeightedSampler
from stoker.sampler.uniform import UniformSampler, has_evidence
from stoker.scores import Scores

VERSION = 1
"""Of the saved state."""

Weights = ArrayLike | Scores | Callable[[Scores], ArrayLike] | None
"""What samples are drawn by; see :class:`DistributedImportanceSampler`."""


class DistributedImportanceSampler(TorchSampler[int]):
    """Draws the samples of a map-style data set by weight, for one rank of a job.

    ::

        sampler = DistributedImportanceSampler(dataset)
        loader = DataLoader(WithIds(dataset), 256, sampler=sampler, num_workers=4)
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            for ids, (images, labels) in loader:
                losses = cross_entropy(model(images), labels, reduction="none")
                (losses * sampler.weights_of(ids)).mean().backward()
                sampler.update(ids, losses)

    ``weights``: a non-negative number per sample ``[N]`` (array, list or tensor), a
    :class:`~stoker.scores.Scores` whose rows are copied, or None, with which the first epoch visits
    samples uniformly. :meth:`update` and :meth:`set_weights` change them, from the next epoch on. A
    function is called whenever an epoch begins with the scores that all ranks agree on, and
    returns the weights ``[N]``; it must give the same on all ranks.

    Each epoch has ``draws`` accesses over all ranks (default N), filled up to a multiple of the
    ranks, or cut with ``drop_last``: every rank gets equally many, always. With ``replacement``
    they are independent draws from p = (1 - e) w/sum(w) + e/N, e being ``uniform_part``. Without,
    they are distinct, each sample being among them with probability min(1, c p).
    :meth:`weights_of` undoes this in the loss, so that the mean of weighted gradients has the full
    mean as its expectation; ``uniform_part`` bounds these weights by 1/e (defensive mixture:
    Hesterberg, Technometrics 1995; the draw: Katharopoulos and Fleuret, ICML 2018). With
    ``uniform_part=0`` the draw is as torch's WeightedRandomSampler makes it, for balancing classes,
    say, and there are no such weights.

    Iterating again is the next epoch, unless :meth:`set_epoch` says which. When an epoch begins,
    ranks of torch.distributed exchange what each was told by :meth:`update`, 28 bytes a sample,
    make the same plan and check that it is the same; so all of them must begin it.
    ``num_replicas`` and ``rank`` are those of torch.distributed, torchrun or SLURM if not given.
    Where no process group has these ranks, weights that never change need none, and an epoch that
    begins after :meth:`update` raises StateMismatch.

    Raises :class:`~stoker.errors.ConfigError` for no samples, weights that are negative, not finite
    or of another length, and what :class:`~stoker.sampler.WeightedSampler` refuses; while
    iterating, :class:`~stoker.errors.ConfigError` when ranks make different plans, and
    :class:`~stoker.errors.RanksUnavailable` when another rank does not answer in the time-out that
    ``init_process_group`` was given. Belongs to the training process and one thread of it; the
    DataLoader's workers never see it. Memory: about 55 bytes a sample.
    """

    def __init__(
        self,
        dataset: Sized,
        weights: Weights = None,
        *,
        draws: int | None = None,
        replacement: bool = True,
        uniform_part: float = 0.2,
        num_replicas: int | None = None,
        rank: int | None = None,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        count = len(dataset)
        self._sampler = WeightedSampler(
            count,
            seed,
            uniform_part=uniform_part,
            reweight=uniform_part > 0,
            draws=draws,
            replacement=replacement,
        )
        self._uniform = UniformSampler(count, seed)
        self._ranks = LazyRanks(rank, num_replicas, current_ranks)
        self._drop_last = drop_last
        self._scores = Scores(count)
        self._function: Callable[[Scores], ArrayLike] | None = None
        self._steps = 0  # calls of update() and set_weights()
        if isinstance(weights, Scores):
            _check_length(len(weights), count)
            self._scores.restore(**weights.arrays())
        elif callable(weights):
            self._function = weights
        elif weights is not None:
            self._scores.update(np.arange(count), _checked(weights, count), step=0)
        self._agreed = self._scores.snapshot()
        self._coming = self._at = Cursor()
        self._resumed: int | None = None  # an epoch that had begun when its state was saved
        self._is_running = False
        self._consumed: int | None = None  # as update() tells
        self._table: NDArray[np.float32] | None = None
        self._warned = False
        self._share(Cursor())

    # --- iterating ---

    def __iter__(self) -> Iterator[int]:
        # Nothing happens before the first sample is asked for: torch may make two iterators.
        yield from self._begin().tolist()

    def __len__(self) -> int:
        """Samples that this rank gets in an epoch; in a restored one, those that are left."""
        return self._share(self._at)

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch``, from 0, the next one; the restored one resumes.

        ConfigError for a negative epoch.
        """
        if epoch < 0:
            raise ConfigError(f"epoch={epoch}: epochs count from 0")
        if epoch != self._coming.epoch:
            self._coming = Cursor(int(epoch))
        self._at = self._coming
        self._is_running = False

    # --- weights ---

    def update(self, ids: Any, losses: Any) -> None:
        """Make ``losses`` ``[n]`` the weights of samples ``ids`` ``[n]``, from the next epoch on.

        Arrays or tensors; those on an accelerator are waited for. Losses that are not finite leave
        a sample's weight as it was and are warned of once; those below 0 count as 0. Raises
        ConfigError for ids out of range and for other lengths.
        """
        rows, values = np.atleast_1d(_array(ids)), np.atleast_1d(_array(losses)).astype(np.float64)
        if rows.shape != values.shape:
            raise ConfigError(f"{values.shape} losses for {rows.shape} ids: give one for each")
        finite = np.isfinite(values)
        if not finite.all() and not self._warned:
            self._warned = True
            first = rows[~finite][0]
            warnings.warn(
                f"a loss of sample {first} is not finite: it keeps its weight, and so will others",
                RuntimeWarning,
                stacklevel=2,
            )
        self._steps += 1
        self._scores.update(rows[finite], np.maximum(values[finite], 0.0), self._steps)
        if self._is_running:
            self._consumed = (self._consumed or 0) + len(rows)

    def set_weights(self, weights: ArrayLike) -> None:
        """Make ``weights`` ``[N]`` those of all samples, from the next epoch on.

        Where only some ranks call it, theirs hold. Raises ConfigError as construction does.
        """
        count = len(self._scores)
        self._steps += 1
        self._scores.update(np.arange(count), _checked(weights, count), self._steps)

    def weights_of(self, ids: Any) -> torch.Tensor:
        """Return the loss weights ``float32[n]`` of samples ``ids`` ``[n]`` in this epoch.

        They lie where ``ids`` do. ConfigError for samples that the epoch does not visit, before the
        first one, and with ``uniform_part=0``.
        """
        if not self._sampler.reweight:
            raise ConfigError("uniform_part=0 leaves no weights that undo the draw: give 0.2, say")
        if self._table is None:
            raise ConfigError("there is no epoch yet whose weights to return: iterate first")
        rows = _array(ids)
        found = self._table[rows]
        if np.isnan(found).any():
            wrong = rows[np.isnan(found)].flat[0]
            raise ConfigError(f"sample {wrong} is not visited in epoch {self._at.epoch}")
        device = ids.device if isinstance(ids, torch.Tensor) else "cpu"
        return torch.from_numpy(found).to(device)

    @property
    def scores(self) -> Scores:
        """The weight of each sample (``values``) as this rank knows it, and how often it was seen.

        What other ranks were told is in it once the next epoch has begun.
        """
        return self._scores

    # --- resuming in another run ---

    def state_dict(self, consumed: int | None = None) -> dict[str, Any]:
        """Return the state of this rank: tensors and primitives, 50 bytes a sample.

        To be taken at the same step on every rank. ``consumed``: samples that the training loop
        of this rank has had since the epoch's iteration began; the DataLoader's workers are ahead
        of it, so the sampler cannot know. By default those that :meth:`update` was called for;
        ConfigError in the middle of an epoch in which it was not.
        """
        at, begun = self._coming, self._is_running
        if begun:
            had = self._consumed if consumed is None else consumed
            if had is None:
                raise ConfigError(
                    "an epoch is in progress and update() was not called: give "
                    "state_dict(consumed=samples of this rank), or set_epoch() if it is over"
                )
            if not 0 <= had <= len(self):
                raise ConfigError(f"consumed={had}: this rank has {len(self)} samples")
            if had < len(self):
                at = Cursor(self._at.epoch, self._at.consumed + had * self._ranks.now().world_size)
            else:
                begun = False
        elif self._resumed == at.epoch:
            begun = True
        return {
            "version": VERSION,
            **self._identity(),
            "rank": self._ranks.now().rank,
            "epoch": at.epoch,
            "consumed": at.consumed,
            "has_begun": begun,
            "plan": self._whole(at.epoch, self._agreed).identity if begun else "",
            "steps": self._steps,
            "scores": _tensors(self._scores),
            "agreed": _tensors(self._agreed),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume where the sampler that gave this state was, with as many ranks as there are now.

        What is left of the epoch is divided again. Ranks may all load the state of one of them;
        what the others were told in the epoch in progress is then lost. Raises
        :class:`~stoker.errors.StateMismatch`, and changes nothing, for the state of a sampler of
        other samples, draws or seed, or whose weights give another plan.
        """
        state = dict(state_dict)
        if state.get("version") != VERSION:
            raise StateMismatch(
                f"this is no state of this sampler, or of version {state.get('version')!r} where "
                f"{VERSION} is read: start a new run"
            )
        for name, here in self._identity().items():
            if state.get(name) != here:
                raise StateMismatch(
                    f"the state was saved with {name}={state.get(name)!r} and this sampler has "
                    f"{here!r}: make it as it was, or start a new run"
                )
        agreed = _scores(state["agreed"], len(self._scores)).snapshot()
        epoch = int(state["epoch"])
        if state["has_begun"] and self._whole(epoch, agreed).identity != state["plan"]:
            raise StateMismatch(
                f"the plan of epoch {epoch} is not the one that was saved: the function given as "
                "weights returns others for the same scores"
            )
        own = state["rank"] == self._ranks.now().rank
        self._scores.restore(**(_scores(state["scores"], len(agreed)) if own else agreed).arrays())
        self._agreed = agreed
        self._steps = int(state["steps"])
        self._coming = self._at = Cursor(epoch, int(state["consumed"]))
        self._resumed = epoch if state["has_begun"] else None
        self._is_running = False

    # --- inside ---

    def _begin(self) -> NDArray[np.uint32]:
        """Begin the coming epoch; return this rank's samples."""
        ranks, at = self._ranks.fix(), self._coming
        group = self._together(ranks)
        if self._resumed != at.epoch:
            exchange(self._scores, self._agreed, group)
            self._agreed = self._scores.snapshot()
        self._resumed = None
        whole = self._whole(at.epoch, self._agreed)
        _check_same(group, whole, at)
        self._coming, self._at = Cursor(at.epoch + 1), at
        self._is_running, self._consumed = True, None
        if self._sampler.reweight:
            self._table = np.full(len(self._scores), np.nan, np.float32)
            self._table[whole.ids] = 1.0 if whole.weights is None else whole.weights
        positions = at.consumed + np.arange(self._left(at, ranks.world_size))
        return whole.ids[positions[ranks.rank :: ranks.world_size] % len(whole)]

    def _together(self, ranks: Ranks) -> Collective:
        """Return the ranks that must agree: only this one where nothing ever changes."""
        if ranks.world_size == 1 or self._steps:
            return joined(*ranks)
        is_up = distributed.is_available() and distributed.is_initialized()
        if is_up and Ranks(distributed.get_rank(), distributed.get_world_size()) == ranks:
            return joined(*ranks)
        return Alone()

    def _whole(self, epoch: int, agreed: Scores) -> Plan:
        """Return the plan of all ranks, filled up or cut for no number of them."""
        basis = agreed
        if self._function is not None:
            count = len(agreed)
            basis = Scores(count)
            basis.update(np.arange(count), _checked(self._function(agreed), count), step=0)
        if has_evidence(basis):
            return self._sampler.plan(basis, epoch)
        ids = self._uniform.plan(None, epoch).ids
        return Plan(epoch, epoch * self._sampler.longest, np.resize(ids, self._sampler.size(None)))

    def _left(self, at: Cursor, world_size: int) -> int:
        """Return the accesses from ``at`` on, of all ranks together."""
        left = max(0, self._sampler.size(None) - at.consumed)
        return left - left % world_size if self._drop_last else left + -left % world_size

    def _share(self, at: Cursor) -> int:
        """Return this rank's accesses from ``at`` on."""
        world_size = self._ranks.now().world_size
        share = self._left(at, world_size) // world_size
        if not share and not at.consumed:
            raise ConfigError(
                f"drop_last leaves none of {self._sampler.size(None)} draws to {world_size} ranks: "
                "use fewer ranks or drop_last=False"
            )
        return share

    def _identity(self) -> dict[str, Any]:
        sampler = self._sampler
        return {
            "num_samples": sampler.num_samples,
            "draws": sampler.size(None),
            "replacement": sampler.replacement,
            "uniform_part": sampler.uniform_part,
            "seed": sampler.seed,
        }


def _check_same(group: Collective, plan: Plan, at: Cursor) -> None:
    """Raise ConfigError unless all ranks made the same plan and are at the same position of it."""
    own = f"{plan.identity} from {at.consumed}"
    said = [bytes(part).decode() for part in group.gather(np.frombuffer(own.encode(), np.uint8))]
    if len(set(said)) > 1:
        raise ConfigError(
            f"the ranks made different plans of epoch {at.epoch}: {', '.join(said)}. Give every "
            "rank the same data set, seed, weights and state"
        )


def _checked(weights: ArrayLike, count: int) -> NDArray[np.float64]:
    """Return f64[count], weights that can be drawn by, or raise ConfigError."""
    values = _array(weights).astype(np.float64)
    if values.ndim != 1:
        raise ConfigError(f"weights of shape {values.shape}: give [{count}]")
    _check_length(len(values), count)
    wrong = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
    if wrong.size:
        raise ConfigError(
            f"weight {values[wrong[0]]} of sample {wrong[0]}: give finite numbers, not below 0"
        )
    return values


def _check_length(given: int, count: int) -> None:
    if given != count:
        raise ConfigError(f"{given} weights for {count} samples: give one each")


def _array(given: Any) -> NDArray[Any]:
    if isinstance(given, torch.Tensor):
        given = given.detach().cpu()
        given = given.double() if given.is_floating_point() else given  # NumPy has no bfloat16
    return np.asarray(given)


def _tensors(scores: Scores) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(row) for name, row in scores.arrays().items()}


def _scores(tensors: Mapping[str, torch.Tensor], count: int) -> Scores:
    """Return the scores of a state; StateMismatch for what is none."""
    scores = Scores(count)
    try:
        scores.restore(**{name: row.cpu().numpy() for name, row in tensors.items()})
    except (ConfigError, TypeError, AttributeError) as error:
        raise StateMismatch(f"the state is damaged: {error}") from error
    return scores


class WithIds(Dataset[Any]):
    """Gives ``(id, sample)`` where the map-style ``dataset`` gives ``sample``.

    So the training loop knows whose losses it has. Pickles, and is safe in threads, as ``dataset``
    is.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[int, Any]:
        return index, self.dataset[index]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[int, Any]]:
        """Return several samples, in one call of ``dataset`` if that can."""
        batched = getattr(self.dataset, "__getitems__", None)
        samples = map(self.dataset.__getitem__, indices) if batched is None else batched(indices)
        return list(zip(indices, samples, strict=True))
