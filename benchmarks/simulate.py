"""The simulator against closed forms, libcachesim, real runs of the Loader, and the clock.

--part forms: LRU, MinIO, top-k, Che, Belady with the plan and SHADE's min(1, r H) at caches of 5 to
80 %. --part peers: the same traces through libcachesim (LRU, FIFO, SIEVE, S3-FIFO, Belady), hit for
hit; its S3-FIFO has a small queue of 10 % and a ghost of 90 % of the cache and promotes after two
visits, as ours. Its Belady knows the whole trace and admits everything: so does ours here. --part
loader (--data: a folder of class folders): hits of real training loops.
--part foresight: real hits beyond the cache, also of two ranks on one arena. --part speed: accesses
a second and memory a sample, at the number of ImageNet's images; for quiet machines. --part
imagenet: every recipe at that number, with sizes like those of its files. --part scale: 100 million
samples, 6 GB of memory; not with all.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from harness import Report, parser, show

from stoker import recipes
from stoker.importance.baselines import LossHistory
from stoker.policy.base import Region
from stoker.policy.next_use import NextUse
from stoker.policy.score import Score
from stoker.recipes import Recipe
from stoker.recipes.base import Same, part
from stoker.sampler import WeightedSampler
from stoker.sim import limits, replay
from stoker.sim.result import SimResult
from stoker.sim.signals import with_made_up_graph

SHARES = (0.05, 0.2, 0.4, 0.6, 0.8)
IMAGENET = 1_281_167
POINT = 0.01


def main() -> None:
    """Parse the arguments, run the parts asked for, print their reports."""
    arguments = parser(__doc__)
    arguments.add_argument("--part", choices=[*PARTS, "all"], default="all")
    arguments.add_argument("--data", type=Path, help="for --part loader")
    arguments.add_argument("--samples", type=int, default=10_000, help="for --part loader")
    arguments.add_argument("--seeds", type=int, default=3, help="for --part forms")
    arguments.add_argument("--recipes", help="for --part speed and imagenet")
    args = arguments.parse_args()
    for name in PARTS if args.part == "all" else [args.part]:
        if args.part == "all" and (name == "scale" or (name == "loader" and args.data is None)):
            continue
        show(args, PARTS[name](args), part=name)


# --- closed forms ---


def forms(args: argparse.Namespace) -> Report:
    """Compare with every closed form; rows have means over seeds and the worst distance."""
    report = Report("Simulated against closed form, hit ratio", args.smoke)
    n = 2_000 if args.smoke else 50_000
    p = 1 / np.arange(1, n + 1) ** 0.7
    for c in SHARES:
        for name, simulated, theory in _forms(n, p, c):
            found = np.array([simulated(seed) for seed in range(args.seeds)])
            worst = float(np.abs(found - theory).max())
            report.row(rule=name, cache=c, simulated=found.mean(), theory=theory, worst=worst)
            report.target(f"{name} at {c:.0%}", worst, POINT)
    return report


def _forms(n: int, p: np.ndarray[Any, Any], c: float) -> list[tuple[str, Any, float]]:
    losses = 1 + np.log(np.arange(1, n + 1))

    def draws(seed: int) -> list[np.ndarray[Any, Any]]:
        rng = np.random.default_rng(seed)
        return [rng.choice(n, 4 * n, p=p / p.sum()) for _ in range(3)]

    def shuffled(name: str) -> Any:
        return lambda seed: replay(name, n, 4, c, seed=seed, batch_size=32).after(1).hit_ratio

    def drawn(name: str, batch: int) -> Any:
        return lambda seed: (
            replay(name, n, 2, c, trace=draws(seed), batch_size=batch).after(1).hit_ratio
        )

    def scored(recipe: Recipe, given: np.ndarray[Any, Any]) -> Any:
        return lambda seed: replay(recipe, n, 8, c, losses=given, seed=seed).after(5).hit_ratio

    weighted = Recipe(
        "weighted", "", Score(), sampler=part(WeightedSampler), scorer=Same(LossHistory())
    )
    repeated = Recipe(
        "repeated",
        "",
        Score(),
        sampler=recipes.shade(repetition=2.0, important=c).sampler,
        scorer=Same(LossHistory()),
    )
    return [
        ("lru", shuffled("lru"), float(limits.lru_epochs(c))),
        ("minio", shuffled("minio"), float(limits.uniform(c))),
        ("belady", shuffled("belady"), float(limits.uniform(c))),
        ("top-k of draws", scored(weighted, p), limits.top_k(p, c * n)),
        ("lru of draws (Che)", drawn("lru", 32), limits.lru_draws(p, c * n)),
        ("belady of draws", drawn("belady", 32), limits.belady_draws(p, c * n)),
        ("shade, r = 2", scored(repeated, losses), limits.shade(losses, c * n, 2.0)),
    ]


# --- libcachesim ---


def peers(args: argparse.Namespace) -> Report:
    """Compare hits with libcachesim's on the same traces."""
    report = Report("Simulated against libcachesim, hits", args.smoke)
    n, rounds = (1_000, 4) if args.smoke else (20_000, 5)
    for kind in ("shuffled", "zipf"):
        for c in (0.05, 0.2, 0.6):
            rng = np.random.default_rng(0)
            p = 1 / np.arange(1, n + 1) ** 0.8
            epochs = [
                rng.permutation(n) if kind == "shuffled" else rng.choice(n, n, p=p / p.sum())
                for _ in range(rounds)
            ]
            for name, peer in PEERS.items():
                sizes = np.ones(n, np.int64)
                whole = np.concatenate(epochs)
                recipe = ADMITTING if name == "belady" else name
                ours = replay(recipe, n, 1, c, sizes=sizes, trace=[whole], batch_size=1)
                hits, theirs = ours.per_epoch[0].hits, _peer_hits(peer, whole, round(c * n))
                report.row(trace=kind, policy=name, cache=c, ours=hits, libcachesim=theirs)
                report.target(f"{name} at {c:.0%}, {kind}: difference", abs(hits - theirs), 0)
    return report


class Admitting(NextUse):
    """Belady's rule as libcachesim has it: every sample enters; ours may refuse one."""

    def regions(self) -> tuple[Region, ...]:
        """One region ordered by next use."""
        return (Region("main", 1.0, order="key"),)


ADMITTING = Recipe("belady", "", Admitting())
PEERS = {"lru": "LRU", "fifo": "FIFO", "sieve": "Sieve", "s3fifo": "S3FIFO", "belady": "Belady"}


def _peer_hits(name: str, ids: np.ndarray[Any, Any], capacity: int) -> int:
    import libcachesim

    never, seen = 2**62, dict[int, int]()
    coming = np.full(len(ids), never)
    for at in range(len(ids) - 1, -1, -1):
        coming[at] = seen.get(int(ids[at]), never)
        seen[int(ids[at])] = at
    cache = getattr(libcachesim, name)(capacity, hashpower=16)
    hits = 0
    for at, sample in enumerate(ids.tolist()):
        request = libcachesim.Request()
        request.obj_id, request.obj_size, request.clock_time = sample, 1, at
        request.next_access_vtime = int(coming[at])
        hits += bool(cache.get(request))
    return hits


# --- the Loader ---


def loader(args: argparse.Namespace) -> Report:
    """Compare with real loops over files."""
    import torch

    import stoker
    from stoker.source.files import FileSource
    from stoker.source.image_folder import ImageFolderSource

    report = Report("Simulated against the real Loader, hit ratio", args.smoke)
    listing = ImageFolderSource(args.data)
    step = max(1, len(listing) // args.samples)
    paths = [listing.name(i) for i in range(0, len(listing), step)][: args.samples]
    sizes = np.array([Path(path).stat().st_size for path in paths])
    losses = np.random.default_rng(1).lognormal(0, 1, len(paths))
    for name, params in LOADED.items():
        recipe = getattr(recipes, name)(**params)
        with stoker.Loader(
            stoker.SampleDataset(FileSource(paths), decode=len),
            batch_size=64,
            cache=stoker.Cache("20%", prefetch=0, stands_aside=False),
            recipe=recipe,
            epochs=EPOCHS,
            return_meta=True,
        ) as run:
            for _ in range(EPOCHS):
                for _, meta in run:
                    run.observe(torch.as_tensor(losses[meta.ids]), meta=meta)
            real = run.stats
        found = replay(recipe, len(paths), EPOCHS, 0.2, sizes=sizes, losses=losses, batch_size=64)
        gap = max(
            abs(found.hit_ratio - real.hits / real.accesses),
            abs(found.substituted_ratio - real.substituted / real.accesses),
        )
        report.row(
            recipe=name,
            samples=len(paths),
            loader=real.hits / real.accesses,
            simulated=found.hit_ratio,
            loader_substituted=real.substituted / real.accesses,
            simulated_substituted=found.substituted_ratio,
            distance=gap,
        )
        report.target(f"{name}, distance", gap, 0.015)
    return report


EPOCHS = 6
LOADED: dict[str, dict[str, Any]] = {
    "lru": {},
    "minio": {},
    "s3fifo": {},
    "belady": {},
    "foresight": {"repeat": 2, "annealed": 0.0},
    "shade": {"repetition": 2.0},
    "quiver": {},
}


# --- foresight ---


def foresight(args: argparse.Namespace) -> Report:
    """Show real hits beyond the cache's share, at c = .2."""
    report = Report("foresight, c = .2, hit ratio after the first super-epoch", args.smoke)
    n = 2_000 if args.smoke else 50_000
    for repeat, least in ((2, 0.55), (4, 0.75)):
        found = replay(recipes.foresight(repeat, annealed=0.0), n, 3 * repeat, 0.2)
        found = found.after(repeat)
        ratio = found.hit_ratio
        q = 1 - float(np.mean([epoch.coverage for epoch in found.per_epoch]))
        report.row(case=f"R = {repeat}", hits=ratio, limit=float(limits.super_epochs(0.2, q)))
        report.target(f"R = {repeat}, hits", ratio, least, at_least=True)
        both = _two_ranks(repeat, 2_000 if args.smoke else 10_000)
        report.row(case=f"R = {repeat}, Loader, 2 ranks on one arena", hits=both)
        report.target(f"R = {repeat}, 2 ranks, hits", both, least, at_least=True)
    sizes = image_sizes(n)
    bound = limits.smallest_first(sizes, 0.2 * float(sizes.sum()))
    for name, request in (("free requests", 0.0), ("a request costs 1 MB", 1e6), ("1 GB", 1e9)):
        found = replay(recipes.foresight(request_bytes=request), n, 4, 0.2, sizes=sizes).after(1)
        report.row(
            case=f"real sizes, R = 1, {name}",
            hits=found.hit_ratio,
            bytes=found.byte_hit_ratio,
            limit=bound,
        )
    report.target("real sizes, R = 1, hits in number", found.hit_ratio, 0.2, at_least=True)
    by_plan = recipes.foresight(importance=True, repeat=4, annealed=0.0)
    by_scores = Recipe("top-k", "", Score(), sampler=by_plan.sampler)
    known = replay(by_plan, n, 12, 0.2).after(4)
    scored = replay(by_scores, n, 12, 0.2).after(4)
    report.row(case="importance, R = 4, by the plan", hits=known.hit_ratio)
    report.row(case="importance, R = 4, top-k by the same scores", hits=scored.hit_ratio)
    gain = known.hit_ratio - scored.hit_ratio
    report.target("importance: above top-k", gain, 0.10, at_least=True)
    return report


def image_sizes(count: int) -> np.ndarray[Any, Any]:
    """Return sizes like those of ImageNet's files: log-normal, mean 110 kB, sigma .6."""
    drawn = np.random.default_rng(7).lognormal(np.log(110_000) - 0.18, 0.6, count)
    return np.maximum(1, drawn).astype(np.int64)


def _two_ranks(repeat: int, samples: int) -> float:
    """Return the hit ratio of two ranks of a real Loader that share a cache."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as folder:
        told = context.Queue()
        ranks = [
            context.Process(target=_rank, args=(rank, repeat, samples, folder, told))
            for rank in range(2)
        ]
        for rank in ranks:
            rank.start()
        counts = np.array([told.get(timeout=200) for _ in ranks]).sum(axis=0)
        for rank in ranks:
            rank.join()
    return float(counts[0] / counts[1])


def _rank(rank: int, repeat: int, samples: int, folder: str, told: Any) -> None:
    import torch.distributed

    import stoker
    from stoker.source.held import MemorySource

    os.environ["STOKER_RUNTIME_DIR"] = folder  # the harness gave each process one of its own
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2
    )
    data = np.zeros(samples * 100, np.uint8)
    source = MemorySource((data, np.arange(samples + 1, dtype=np.int64) * 100))
    with stoker.Loader(
        stoker.SampleDataset(source, decode=len),
        batch_size=16,
        cache=stoker.Cache("20%", prefetch=0),
        recipe=recipes.foresight(repeat=repeat, annealed=0.0),
        epochs=3 * repeat,
    ) as run:
        for epoch in range(3 * repeat):
            for _ in run:
                torch.distributed.barrier()  # the all-reduce of a step, which keeps ranks together
            if epoch + 1 == repeat:
                first = run.stats
        later = run.stats.since(first)
        torch.distributed.barrier()  # one that leaves early takes the cache with it
        told.put((later.hits, later.accesses))
    torch.distributed.destroy_process_group()


# --- speed ---


def speed(args: argparse.Namespace) -> Report:
    """Time replays of ImageNet's number of samples, and weigh them, each in its own process."""
    report = Report("Speed of the simulator, equal sizes, c = .2", args.smoke)
    n, epochs, rounds = (20_000, 3, 1) if args.smoke else (IMAGENET, 10, args.rounds)
    names = args.recipes.split(",") if args.recipes else SPEED[:: 4 if args.smoke else 1]
    runs: dict[str, list[tuple[float, float, int, SimResult]]] = {name: [] for name in names}
    for name in list(names) * rounds:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            real = name.endswith("+sizes")
            runs[name].append(pool.apply(_timed, (name.removesuffix("+sizes"), n, epochs, real)))
    for name, each in runs.items():
        taken, cpu, weights, found = zip(*each, strict=True)
        accesses = sum(epoch.accesses for epoch in found[0].per_epoch)
        seconds, weight = float(np.median(taken)), max(weights) / n
        report.row(
            recipe=name,
            seconds=seconds,
            fastest=min(taken),
            slowest=max(taken),
            million_accesses_a_second=accesses / seconds / 1e6,
            million_a_cpu_second=accesses / float(np.median(cpu)) / 1e6,
            bytes_a_sample=weight,
        )
        rate, wanted = accesses / seconds / 1e6, 5 if name in FAST else 3
        report.target(f"{name}, million accesses a second", rate, wanted, at_least=True)
        report.target(f"{name}, bytes a sample", weight, 100)
        report.target(f"{name}, seconds of {epochs} epochs", seconds, 120)
    report.remarks = [
        f"Medians of {rounds} interleaved rounds. A thread walks the cache while the next batches "
        "are scored: a CPU second is one of both together."
    ]
    return report


FAST = ("lru", "minio", "foresight")
SPEED = (
    *FAST,
    *("fifo", "s3fifo", "sieve", "lfu", "random", "belady", "infobatch", "shade"),
    *("foresight:repeat=4", "foresight:importance=true", "lru+sizes", "belady+sizes"),
    *("impact", "quiver", "spidercache", "icache"),
)


def scale(args: argparse.Namespace) -> Report:
    """Replay 100 million samples."""
    n, epochs = (20_000, 2) if args.smoke else (100_000_000, 2)
    report = Report(f"{n:,} samples, {epochs} epochs, c = .2", args.smoke)
    for name in (args.recipes or "lru").split(","):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            seconds, cpu, num_bytes, found = pool.apply(_timed, (name, n, epochs, False))
        report.row(
            recipe=name,
            seconds=seconds,
            cpu_seconds=cpu,
            gigabytes=num_bytes / 1e9,
            hits=found.after(1).hit_ratio,
            limit=recipes.get(name).predicted_hit_ratio(0.2),
        )
        report.target(f"{name}, bytes a sample", num_bytes / n, 100)
    return report


def imagenet(args: argparse.Namespace) -> Report:
    """Replay every recipe over ImageNet's number of samples, of sizes like its files."""
    n, epochs = (20_000, 4) if args.smoke else (IMAGENET, 10)
    report = Report(f"{n:,} samples of ImageNet's sizes, {epochs} epochs, c = .2", args.smoke)
    every = (*recipes.names(), *REPEATING)
    for name in args.recipes.split(",") if args.recipes else every[:: 5 if args.smoke else 1]:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            seconds, cpu, _, found = pool.apply(_timed, (name, n, epochs, True))
        late = found.after(epochs // 2)
        limit = recipes.get(name).predicted_hit_ratio(0.2)
        report.row(
            recipe=name,
            hits=late.hit_ratio,
            hits_of_bytes=late.byte_hit_ratio,
            with_others=late.hit_ratio + late.substituted_ratio + late.packaged_ratio,
            equal_sizes_limit=limit,
            ess=late.ess,
            coverage=late.coverage,
            seconds=seconds,
            cpu_seconds=cpu,
        )
        report.target(f"{name}, seconds", seconds, 120)
    report.remarks = [
        f"hits and what stands beside them: the last {epochs - epochs // 2} epochs. with_others: "
        "with what was substituted or came in a package. equal_sizes_limit: the recipe's own "
        "formula, for samples of one size.",
    ]
    return report


REPEATING = (
    "foresight:repeat=4:annealed=0",
    "foresight:repeat=8:annealed=0",
    "foresight:importance=true:repeat=4:annealed=0",
)


def _timed(name: str, samples: int, epochs: int, real: bool) -> tuple[float, float, int, SimResult]:
    import resource

    recipe = with_made_up_graph(recipes.get(name))
    replay(recipe, 1_000, 8, 0.2)  # imports, and pages that every run needs
    sizes = image_sizes(samples) if real else None
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin, cpu = time.perf_counter(), time.process_time()
    found = replay(recipe, samples, epochs, 0.2, sizes=sizes)
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    return seconds, cpu, grown, found


PARTS = {
    "forms": forms,
    "peers": peers,
    "foresight": foresight,
    "loader": loader,
    "speed": speed,
    "imagenet": imagenet,
    "scale": scale,
}

if __name__ == "__main__":
    main()
