"""Ranks on several nodes: processes of one machine that STOKER_NODE parts."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.ranks import run_ranks
from support.waiting import await_true
from torch import distributed

from pytorch.on_nodes import N, alone, cached_in, loader_of
from stoker import recipes
from stoker.epoch.ranks import Nodes, Ranks, is_first_on_node, node_name
from stoker.errors import ConfigError, StateMismatch
from stoker.node.runtime_dir import runtime_dir
from stoker.pytorch import Loader
from stoker.pytorch.ranks import find_nodes


def epochs_of(loader: Loader, epochs: int, observe: bool = False) -> dict[str, Any]:
    """Batches and places by epoch, and what was cached after each."""
    result: dict[str, Any] = {"steps": [], "places": [], "cached": [], "hits": [], "served": []}
    for _ in range(epochs):
        steps, places, served = [], [], []
        for batch, meta in loader:
            if observe:
                loader.observe(meta.ids.astype(np.float32) + 1, meta=meta)
            steps.append(batch.tolist())
            places.append(meta.positions.tolist())
            served += meta.ids.tolist()
        distributed.barrier()
        result["steps"].append(steps)
        result["places"].append(places)
        result["served"].append(served)
        result["cached"].append(cached_in(loader))
        stats = loader.epoch_stats[-1]
        result["hits"].append((stats.hits + stats.substituted + stats.packaged) / stats.accesses)
        distributed.barrier()
    return result


def train(rank: int, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    os.environ["STOKER_NODE"] = f"n{rank}"
    results = []
    for case in cases:
        case = dict(case)
        epochs, observe = case.pop("epochs_run", 3), case.pop("observe", False)
        if "package_bytes" in case:
            case["recipe"] = getattr(recipes, case["recipe"])(
                package_bytes=case.pop("package_bytes")
            )
        with loader_of(**case) as loader:
            results.append(epochs_of(loader, epochs, observe))
            distributed.barrier()
    return results


def mixed(first: list[int], second: list[int]) -> list[int]:
    return [i for pair in zip(first, second, strict=True) for i in pair]


def test_two_nodes_keep_each_sample_once_and_steps_stay_the_same(tmp_path: Path) -> None:
    cases: list[dict[str, Any]] = [{}, {"locality": False}, {"prefetch": "1MiB"}]
    first, second = run_ranks(2, tmp_path, train, [{"recipe": "minio"} | case for case in cases])
    expected = alone()
    for case, (one, two) in enumerate(zip(first, second, strict=True)):
        is_local = "locality" not in cases[case]
        for epoch in range(3):
            for here, there, step in zip(
                one["steps"][epoch], two["steps"][epoch], expected[epoch], strict=True
            ):
                assert len(here) == len(there) == len(step) // 2
                assert sorted(here + there) == sorted(step)
                if not is_local:
                    assert mixed(here, there) == step, "the very order of one node"
            twice = set(one["cached"][epoch]) & set(two["cached"][epoch])
            assert not twice or not is_local
        if is_local:
            # 40 % are cached; few are drawn anew; where more belong to a node than it has room
            # for in a step, some are read elsewhere.
            assert 0.37 < np.mean([one["hits"][1:], two["hits"][1:]]) <= 0.4
            assert all(len(run["cached"][-1]) >= 0.19 * N for run in (one, two))
        else:
            assert np.mean([one["hits"][1:], two["hits"][1:]]) < 0.25
    # Places are those in the plan, which augmentation depends on.
    for run in (first[0], second[0]):
        for steps, places, whole in zip(run["steps"], run["places"], expected, strict=True):
            order = np.concatenate(whole)
            for batch, where in zip(steps, places, strict=True):
                assert order[where].tolist() == batch


RECIPES: list[dict[str, Any]] = [
    {"recipe": "lru"},
    {"recipe": "belady"},
    {"recipe": "quiver"},
    {"recipe": "shade", "observe": True},
    {"recipe": "icache", "observe": True, "epochs_run": 7, "cache": "30%", "package_bytes": 256},
]


def test_recipes_keep_each_sample_once(tmp_path: Path) -> None:
    first, second = run_ranks(2, tmp_path, train, RECIPES)
    for case, one, two in zip(RECIPES, first, second, strict=True):
        name = case["recipe"]
        for epoch, (here, there) in enumerate(zip(one["cached"], two["cached"], strict=True)):
            assert here and there, name
            assert not set(here) & set(there), (name, epoch)
            served = one["served"][epoch] + two["served"][epoch]
            if name != "shade":
                assert len(set(served)) == len(served), f"{name} serves a sample once an epoch"
            assert len(one["served"][epoch]) == len(two["served"][epoch])
    # Next use over two nodes hits as MinIO does.
    belady = [run[1]["hits"][1:] for run in (first, second)]
    assert 0.34 < np.mean(belady) <= 0.4


def interrupted(rank: int) -> Any:
    """An epoch of Quiver in two parts, with and without homes, and what one node's state lacks."""
    os.environ["STOKER_NODE"] = f"n{rank}"
    served = []
    options: dict[str, Any] = {"recipe": "quiver", "cache": "30%"}
    for locality in (True, False):
        options["locality"] = locality
        with loader_of(**options) as loader:
            whole = [i for _, meta in loader for i in meta.ids.tolist()]
            part = [i for _, meta in islice(loader, 7) for i in meta.ids.tolist()]
            state = loader.state_dict()
            substituted = loader.stats.substituted
            distributed.barrier()
        with loader_of(**options) as loader:
            loader.load_state_dict(state)
            part += [i for _, meta in loader for i in meta.ids.tolist()]
            distributed.barrier()
        served += [whole, part]
    states = [state]
    distributed.broadcast_object_list(states)
    with loader_of(**options) as loader:
        loader.load_state_dict(states[0])
        with pytest.raises(StateMismatch, match="Give each rank the state that it saved") as error:
            next(iter(loader))
        distributed.barrier()
    return served, substituted, str(error.value)


def test_s1_nodes_resume_with_substitution(tmp_path: Path) -> None:
    """Each node's state knows what was served there; together they are all that was served."""
    first, second = run_ranks(2, tmp_path, interrupted)
    for here, there in zip(first[0], second[0], strict=True):
        assert sorted(here + there) == list(range(N))
    assert first[1] + second[1] > 0
    assert first[2] == second[2]


def loss_of(ids: Any, epoch: int) -> Any:
    """Losses whose ranks move from epoch to epoch, those of the first samples most."""
    ids = np.asarray(ids, np.int64)
    return (ids + (ids < N // 4) * ((epoch * 7919 + ids * 104729) % N)).astype(np.float32)


def train_impact(rank: int, cache: str) -> tuple[list[int], list[int], float]:
    os.environ["STOKER_NODE"] = f"n{rank}"
    recipe = recipes.impact(max_warm_up=3, package_bytes=128)
    now = [0]
    with loader_of(
        recipe=recipe, cache=cache, epochs=8, rescore=lambda batch: loss_of(batch, now[0])
    ) as loader:
        for epoch in range(6):
            now[0] = epoch
            for _, meta in loader:
                loader.observe(loss_of(meta.ids, epoch), meta=meta)
            distributed.barrier()
        arena = loader.cache.store.tier.arena  # type: ignore[union-attr]
        kept = arena.list("S").tolist()
        region = arena.stats()["regions"]["S"]
        distributed.barrier()
        volatile = np.flatnonzero(loader._session.controller.agreement.agreed.volatile).tolist()  # type: ignore[union-attr]
        return kept, volatile, region["bytes"] / region["budget"]


@pytest.mark.parametrize(("nodes", "cache"), [(2, "30%"), (4, "15%")])
def test_s3_the_static_set_of_impact_fills_its_share_of_all_nodes(
    tmp_path: Path, nodes: int, cache: str
) -> None:
    found = run_ranks(nodes, tmp_path, train_impact, cache)
    volatile = found[0][1]
    assert all(of == volatile for _, of, _ in found)
    # A quarter of what all nodes hold together.
    assert len(volatile) == pytest.approx(0.25 * 0.6 * N, rel=0.1)
    kept = [sample for own, _, _ in found for sample in own]
    assert len(set(kept)) == len(kept), "each on one node"
    assert set(kept) <= set(volatile)
    # Homes are drawn at random: a node has some more of them, or less, than it has room for.
    fills = [fill for _, _, fill in found]
    assert np.mean(fills) > 0.8, fills
    assert min(fills) > 0.6, fills


def keep_packages(rank: int, place: str) -> list[str]:
    """Train for an epoch with packages in a place that all nodes share; return their locks."""
    os.environ["STOKER_NODE"] = f"n{rank}"
    recipe = recipes.icache(package_bytes=256, package_url=place)
    with loader_of(recipe=recipe, cache="30%", epochs=2) as loader:
        for _, meta in loader:
            loader.observe(loss_of(meta.ids, 0), meta=meta)
        await_true(lambda: len(list(Path(place).glob(".*.lock"))) >= 2, 20)
        found = sorted(Path(place).glob(".*.lock"))
        distributed.barrier()
        return [path.name.partition("-")[2] for path in found]


@pytest.mark.parametrize("launcher", [{}, {"SLURM_NODEID": "0"}, {"GROUP_RANK": "0"}])
def test_s11_nodes_that_share_a_place_have_packages_of_their_own(
    launcher: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the launcher has set, or inherited from another one."""
    for name, value in launcher.items():
        monkeypatch.setenv(name, value)
    place = tmp_path / "packages"
    for locks in run_ranks(2, tmp_path, keep_packages, str(place)):
        assert locks == ["0.lock", "1.lock"]


# --- who is where ---


def meet(rank: int, names: list[str]) -> Any:
    os.environ["STOKER_NODE"] = names[rank]
    return find_nodes(Ranks(rank, len(names)))


def test_nodes_are_numbered_by_their_first_ranks(tmp_path: Path) -> None:
    found = run_ranks(3, tmp_path, meet, ["b", "a", "b"])
    assert {nodes.of_rank for nodes in found} == {(0, 1, 0)}
    assert [nodes.own for nodes in found] == [0, 1, 0]
    assert [nodes.is_first for nodes in found] == [True, True, False]
    assert [nodes.ranks_here for nodes in found] == [2, 1, 2]
    assert found[0].count == 2


def test_one_machine_needs_no_talk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert find_nodes(Ranks(1, 4)) is None
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert find_nodes(Ranks(1, 4)) is None, "nobody to ask, and no sign of other machines"


@pytest.mark.parametrize(
    "environment", [{"LOCAL_WORLD_SIZE": "2"}, {"SLURM_STEP_NUM_NODES": "2"}, {"STOKER_NODE": "a"}]
)
def test_nodes_that_cannot_talk_are_told(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.warns(RuntimeWarning, match="init_process_group"):
        assert find_nodes(Ranks(1, 4)) is None


def test_srun_says_who_is_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    monkeypatch.setenv("SLURM_LOCALID", "0")
    assert is_first_on_node(Ranks(2, 4))
    monkeypatch.setenv("SLURM_LOCALID", "1")
    assert not is_first_on_node(Ranks(3, 4))
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")  # one task that started four processes
    assert is_first_on_node(Ranks(0, 4)) and not is_first_on_node(Ranks(1, 4))


def test_a_chosen_node_has_a_directory_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STOKER_NODE", raising=False)
    machine, name = runtime_dir(), node_name()
    monkeypatch.setenv("STOKER_NODE", "rack-1.b")
    assert runtime_dir() == machine.with_name(f"{machine.name}-rack-1.b")
    assert node_name() == "rack-1.b" != name
    monkeypatch.setenv("STOKER_NODE", "../up")
    with pytest.raises(ConfigError, match=r"STOKER_NODE='../up' is invalid"):
        runtime_dir()


def test_one_node_is_its_own_first() -> None:
    nodes = Nodes((0, 0), 1)
    assert (nodes.count, nodes.own, nodes.is_first) == (1, 0, False)
