"""A training that is interrupted again and again, on processes that stand by, and what it serves.

A :class:`Script` is run segment by segment, each by other ranks and workers from a saved state.
:func:`check` says which samples each epoch must have served.
"""

from __future__ import annotations

import gc
import io
import os
import signal
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from support.parts import number_of, numbers
from support.processes import warm
from torch import distributed

from pytorch.test_recipes_live import signals
from stoker import Cache, recipes
from stoker.jobs import Sharing
from stoker.policy.base import Substitution
from stoker.policy.score import HighLow
from stoker.policy.shares import FrequencySplit
from stoker.pytorch import Loader, SampleDataset
from stoker.recipes import Recipe
from stoker.recipes.base import part
from stoker.sampler.baselines import SelectiveSampler
from stoker.store.fill import preload
from stoker.types import Outcome

EPOCHS = 3
WORLD = 3
PATIENCE = 150  # seconds for a segment on a busy machine
PATIENCE_AFTER_FAILURE = 1

LOW = Recipe(
    "low",
    "",
    HighLow(0.5, 0.5),
    sampler=part(SelectiveSampler, warm_up=1, full_every=0),
    shares=FrequencySplit(start=0.5),
    substitution=Substitution("low_by_low", "L"),
)
RECIPES: dict[str, Recipe] = {
    "minio": recipes.get("minio"),
    "foresight": recipes.get("foresight"),
    "repeats": recipes.foresight(repeat=EPOCHS, annealed=0.0, window=1.5, static=0.0),
    "blocks": recipes.foresight(block=4),
    "importance": recipes.foresight(importance=True, repeat=2, annealed=0.0),
    "quiver": recipes.get("quiver"),
    "low": LOW,
    "icache": recipes.icache(warm_up=1, full_every=3, package_bytes=128),
    "impact": recipes.impact(max_warm_up=2, package_bytes=128),
    "spidercache": recipes.spidercache(target_degree=8, start=0.5, end=0.5),
}
ONCE_EACH = ("quiver", "low", "icache", "impact")


class Segment(NamedTuple):
    """How the job is run until its next interruption."""

    world_size: int
    workers: int
    steps: int
    """Batches of each rank, over all epochs; the last segment goes on to the end."""
    save: int
    """Of these the state is taken after so many, and what comes after is lost; 0: all is."""
    loads: int
    """The rank whose earlier state all ranks load; -1: each that of the rank of its number."""
    again: int
    """The state that is taken after so many batches is loaded at the end of the steps, once, by the
    loader that runs; 0: it is not."""
    kill: bool
    """Whether a worker of rank 0 is killed at the end."""
    probe: int
    cache: str
    persistent: bool


class Script(NamedTuple):
    """A whole training."""

    recipe: str
    count: int
    batch_size: int
    drop_last: bool
    segments: list[Segment]


class Batch(NamedTuple):
    """What a rank was handed out."""

    epoch: int
    positions: list[int]
    ids: list[int]
    substituted: list[bool]


class Done(NamedTuple):
    """What a rank did up to a state: all that counts, if that is what is gone on from."""

    state: bytes | None
    batches: list[Batch]
    plans: dict[int, list[int]]
    """The plan of each epoch, undivided."""
    low: dict[int, set[int]]
    """The samples of each epoch that may be replaced by one another."""


class Ran(NamedTuple):
    """What a rank did in a segment."""

    done: Done
    substituted: int
    """How often another sample was served, also in batches that do not count."""


# --- on a rank ---


def loader_of(script: Script, segment: Segment, rank: int) -> Loader:
    recipe = RECIPES[script.recipe]
    rescore = (lambda batch: signals(*batch[:2])["losses"]) if script.recipe == "impact" else None
    targets = np.arange(script.count) % 4
    return Loader(
        SampleDataset(numbers(script.count), number_of, targets=targets),
        script.batch_size,
        drop_last=script.drop_last,
        num_workers=segment.workers,
        persistent_workers=segment.persistent and segment.workers > 0,
        multiprocessing_context="fork" if segment.workers else None,
        recipe=recipe,
        cache=Cache(segment.cache, sharing=Sharing(probe=segment.probe)),
        epochs=EPOCHS,
        rank=rank,
        world_size=segment.world_size,
        rescore=rescore,
        return_meta=True,
    )


class Rank:
    """One rank in one segment."""

    def __init__(self, script: Script, segment: Segment, rank: int, number: int) -> None:
        self.segment, self.rank = segment, rank
        self.loader = loader_of(script, segment, rank)
        self.random = np.random.default_rng([number, rank])
        self.batches: list[Batch] = []
        self.plans: dict[int, list[int]] = {}
        self.low: dict[int, set[int]] = {}
        self.substituted = 0
        self.running: Any = None

    def run(self, state: bytes | None, *, is_last: bool) -> Ran:
        done = Done(state, [], {}, {})
        with self.loader as loader:
            if state is not None:
                loader.load_state_dict(loaded(state))
            if is_last:
                self.go(None)
                done = Done(None, self.batches, self.plans, self.low)
            elif self.segment.steps:
                done = self.interrupted(self.segment) or done
        return Ran(done, self.substituted)

    def interrupted(self, segment: Segment) -> Done | None:
        """Train some steps; return what was done up to the state that is taken."""
        if segment.again:
            self.go(segment.again)
            done = self.done()
            self.go(segment.steps)
            self.back_to(done)
        done = None
        for stop in sorted({segment.save, segment.steps}):
            self.go(stop)
            if stop == segment.save and stop:
                done = self.done()
        if segment.kill and segment.workers and self.rank == 0:
            self.lose_a_worker()
        return done

    def done(self) -> Done:
        buffer = io.BytesIO()
        torch.save(self.loader.state_dict(), buffer)
        return Done(buffer.getvalue(), [*self.batches], {**self.plans}, {**self.low})

    def back_to(self, done: Done) -> None:
        assert done.state is not None
        self.loader.load_state_dict(loaded(done.state))
        self.batches, self.plans, self.low = [*done.batches], {**done.plans}, {**done.low}

    def go(self, stop: int | None) -> None:
        """Train until so many batches were had, or to the end of all epochs."""
        while stop is None or len(self.batches) < stop:
            iterator = self.iterator()
            if iterator is None:
                return
            for batch in iterator:
                self.take(*batch)
                if len(self.batches) == stop:
                    return
            self.loader.end_epoch(accuracy=0.5)
            self.running = None

    def iterator(self) -> Any:
        """The iterator of the epoch in progress, or the next one; None: there are no more."""
        session: Any = self.loader._session
        if self.running is not None and self.loader._session.controller.walk is not None:
            return self.running
        epoch = self.loader._session.controller.share.coming.epoch
        if epoch >= EPOCHS:
            return None
        self.running = iter(self.loader)
        store = session.cached.store
        plan = self.loader._session.controller.planner.whole(epoch).ids.tolist()
        assert self.plans.setdefault(epoch, plan) == plan, "the plan of an epoch is one"
        if store.places is not None:
            low = set(np.flatnonzero(store.places.array == HighLow.LOW).tolist())
            assert self.low.setdefault(epoch, low) == low
        # Whatever is cached meanwhile: what is promised does not depend on it.
        some = self.random.random(len(store.source)) < 0.5
        preload(store.source, store.tier, np.flatnonzero(some).astype(np.uint32))
        return self.running

    def take(self, ids: Any, labels: Any, meta: Any) -> None:
        assert ids.tolist() == meta.ids.tolist(), "its bytes"
        assert labels.tolist() == (meta.ids % 4).tolist(), "its label"
        others = (meta.outcomes == Outcome.SUBSTITUTED).tolist()
        self.substituted += sum(others)
        self.batches.append(Batch(meta.epoch, meta.positions.tolist(), meta.ids.tolist(), others))
        self.loader.observe(**signals(ids, labels), meta=meta)

    def lose_a_worker(self) -> None:
        if self.running is None or self.running._envelopes is None:
            return
        workers = getattr(self.running._envelopes, "_workers", ())
        if not workers or not workers[0].is_alive():
            return
        try:  # torch may notice as soon as it is killed
            os.kill(workers[0].pid, signal.SIGKILL)
            workers[0].join()
            for _ in self.running:  # batches that it had ready come, then torch notices
                pass
        except RuntimeError as error:
            assert "exited unexpectedly" in str(error) or "is killed by signal" in str(error)


def loaded(state: bytes) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(io.BytesIO(state), weights_only=True)
    return found


# --- the processes that stand by ---


class Standby:
    """Processes that are the ranks of one segment after the other; new ones after a failure."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._segments = 0
        self._ranks: list[tuple[Any, Any]] = []

    def run(self, script: Script, number: int, states: list[bytes | None]) -> list[Ran]:
        """Run a segment from ``states``, of which each rank loads that of its number, mod all."""
        segment = script.segments[number]
        self._segments += 1
        meeting = f"file://{self._place}/meeting{self._segments}"
        ranks = self._started()[: segment.world_size]
        for rank, (_, pipe) in enumerate(ranks):
            whose = rank % len(states) if segment.loads < 0 else segment.loads % len(states)
            pipe.send((script, number, rank, meeting, states[whose]))
        found = []
        for rank, (_, pipe) in enumerate(ranks):
            result = pipe.recv() if pipe.poll(PATIENCE) else f"rank {rank} of {segment} hangs"
            if not isinstance(result, Ran):
                self.close(PATIENCE_AFTER_FAILURE)
                raise AssertionError(result)
            found.append(result)
        return found

    def close(self, patience: float = 20) -> None:
        for _, pipe in self._ranks:
            pipe.send(None)
        for process, pipe in self._ranks:
            process.join(patience)
            process.kill()
            process.join()
            pipe.close()
        self._ranks = []

    def _started(self) -> list[tuple[Any, Any]]:
        while len(self._ranks) < WORLD:
            ours, theirs = warm.Pipe()
            process = warm.Process(target=_stand_by, args=(theirs, str(self._place)))
            process.start()
            self._ranks.append((process, ours))
        return self._ranks


def _stand_by(pipe: Any, place: str) -> None:
    os.environ["STOKER_RUNTIME_DIR"] = place
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    while (task := pipe.recv()) is not None:
        script, number, rank, meeting, state = task
        segment, is_last = script.segments[number], number + 1 == len(script.segments)
        try:
            distributed.init_process_group(
                "gloo", meeting, rank=rank, world_size=segment.world_size
            )
            result: Any = Rank(script, segment, rank, number).run(state, is_last=is_last)
            distributed.barrier()
            distributed.destroy_process_group()
        except BaseException:
            result = f"rank {rank}, {segment}: {traceback.format_exc()}"
            pipe.send(result)
            return
        pipe.send(result)
        gc.collect()  # loaders refer to themselves: let go of their memory before the next ones


# --- the model ---


def run(standby: Standby, script: Script) -> int:
    """Run a script and check what it served; return how often others were served than asked for."""
    states: list[bytes | None] = [None]
    batches: list[Batch] = []
    plans: dict[int, list[int]] = {}
    low: dict[int, set[int]] = {}
    divided: dict[int, int] = {}
    substituted = 0
    for number, segment in enumerate(script.segments):
        ranks = standby.run(script, number, states)
        states = [rank.done.state for rank in ranks]
        substituted += sum(rank.substituted for rank in ranks)
        for _, new, made, places in (rank.done for rank in ranks):
            batches += new
            divided |= {batch.epoch: segment.world_size for batch in new}
            for epoch, plan in made.items():
                assert plans.setdefault(epoch, plan) == plan, f"epoch {epoch}: the plan is one"
            for epoch, samples in places.items():
                assert low.setdefault(epoch, samples) == samples, f"epoch {epoch}: places"
    for epoch in range(EPOCHS):
        served = [batch for batch in batches if batch.epoch == epoch]
        check(script, served, plans[epoch], low.get(epoch), divided[epoch])
    if script.recipe == "repeats" and not script.drop_last:
        visits = Counter(sample for plan in plans.values() for sample in plan)
        assert visits == dict.fromkeys(range(script.count), EPOCHS)
    return substituted


def check(
    script: Script, batches: list[Batch], plan: list[int], low: set[int] | None, world_size: int
) -> None:
    """Check that an epoch with ``plan``, at last divided by so many ranks, served what it must."""
    accesses = {
        position: (sample, other)
        for batch in batches
        for position, sample, other in zip(*batch[1:], strict=True)
    }
    served = [sample for sample, _ in accesses.values()]
    assert len(served) == sum(len(batch.ids) for batch in batches), "no place of the plan twice"
    filled_up = 0
    if script.drop_last:
        assert set(accesses) <= set(range(len(plan)))
        assert len(plan) - len(accesses) < script.batch_size * WORLD
    else:
        filled_up = len(accesses) - len(plan)
        assert set(accesses) == set(range(len(accesses))), "each place of the plan"
        assert 0 <= filled_up < world_size
    if script.recipe in ONCE_EACH:
        check_once_each(script, Counter(served), plan, low, filled_up)
        return
    for position, (sample, other) in accesses.items():
        # A key sample may stand in, and does not displace what it stands in for.
        stands_in = script.recipe == "spidercache" and other
        assert stands_in or sample == plan[position % len(plan)], f"place {position}"


def check_once_each(
    script: Script, served: Counter[int], plan: list[int], low: set[int] | None, filled_up: int
) -> None:
    """Check that no sample came twice but those that fill up, and each came that had to."""
    assert sum(served.values()) - len(served) <= filled_up, "no sample twice"
    if script.recipe == "quiver":
        assert script.drop_last or set(served) == set(plan) == set(range(script.count))
        return
    assert low is not None
    assert set(served) - set(plan) <= low, "only what matters little stands in unasked"
    assert script.drop_last or set(plan) - set(served) <= low, "only such are stood in for"
