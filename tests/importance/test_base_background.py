import subprocess
import sys
import threading

import numpy as np
import pytest

from stoker.errors import ConfigError
from stoker.importance.base import Background, Observation, Signal
from stoker.importance.baselines import LossHistory
from stoker.importance.graph import Graph
from stoker.importance.hybrid import Hybrid
from stoker.scores import Scores


def shown(*ids: int, step: int = 0) -> Observation:
    return Observation(np.array(ids, np.uint32), step, 0, losses=np.array(ids, np.float64))


class Gate:
    """Scores when it is let through."""

    needs: frozenset[Signal] = frozenset({"losses"})

    def __init__(self) -> None:
        self.open = threading.Event()
        self.entered = threading.Semaphore(0)

    def update(self, scores: Scores, observation: Observation) -> None:
        self.entered.release()
        assert self.open.wait(60)
        LossHistory().update(scores, observation)


def test_update_returns_before_the_scores_are_there() -> None:
    scores, gate = Scores(9), Gate()
    scorer = Background(gate, depth=2)
    scorer.update(scores, shown(1, 2))
    assert gate.entered.acquire(timeout=60)
    scorer.update(scores, shown(3, step=1))
    assert not scores.seen.any() and scorer.take_scored() == []
    gate.open.set()
    scorer.drain()
    assert np.flatnonzero(scores.seen).tolist() == [1, 2, 3]
    scored = scorer.take_scored()
    assert [batch.ids.tolist() for batch in scored] == [[1, 2], [3]]
    assert scored[0].neighbours is None and scorer.take_scored() == []
    scorer.close()


def test_the_queue_is_bounded() -> None:
    """With one batch being scored and one waiting, a third waits for room."""
    scores, gate = Scores(9), Gate()
    scorer = Background(gate, depth=1)
    scorer.update(scores, shown(1))
    assert gate.entered.acquire(timeout=60)
    scorer.update(scores, shown(2))
    third = threading.Thread(target=scorer.update, args=(scores, shown(3)))
    third.start()
    third.join(0.2)
    assert third.is_alive()
    gate.open.set()
    third.join(60)
    assert not third.is_alive()
    scorer.drain()
    assert scores.seen[:4].tolist() == [0, 1, 1, 1]
    scorer.close()


def test_errors_surface_and_others_are_scored() -> None:
    scores, scorer = Scores(3), Background(LossHistory())
    scorer.update(scores, shown(5))
    scorer._jobs.join()
    with pytest.raises(ConfigError, match="id 5 is out of range"):
        scorer.update(scores, shown(1))
    scorer.update(scores, shown(1))
    scorer.drain()
    assert scores.seen.tolist() == [0, 1, 0]
    scorer.update(scores, shown(7))
    with pytest.raises(ConfigError, match="id 7"):
        scorer.begin_epoch(scores, 1)
    scorer.close()


def test_what_the_other_scorer_has_is_there() -> None:
    scores = Scores(20)
    hybrid = Background(Hybrid(20, cache_samples=8, max_warm_up=2))
    assert hybrid.needs == {"losses"}
    for epoch in range(2):
        hybrid.update(scores, shown(*range(20)))
        hybrid.begin_epoch(scores, epoch + 1)
    assert len(hybrid.volatile) == 2 and scores.ready
    assert hybrid.state_dict().keys() == Hybrid(20).state_dict().keys()
    assert hybrid.neighbours is None
    hybrid.close()
    assert Background(LossHistory()).state_dict() == {}
    with pytest.raises(AttributeError):
        _ = Background(LossHistory()).anything


def test_neighbours_come_with_their_batch() -> None:
    scores, scorer = Scores(20), Background(Graph(20))
    rng = np.random.default_rng(0)
    for step in range(3):
        ids = np.arange(4 * step, 4 * step + 4, dtype=np.uint32)
        embeddings = rng.standard_normal((4, 2)).astype(np.float32)
        observation = Observation(ids, step, 0, embeddings=embeddings, labels=np.zeros(4, np.int64))
        scorer.update(scores, observation)
    scorer.drain()
    for step, (ids, neighbours) in enumerate(scorer.take_scored()):
        assert neighbours is not None and neighbours.step == step
        np.testing.assert_array_equal(neighbours.ids, ids)
    assert scorer.neighbours.step == 2
    scorer.close()


def test_closing_drops_what_waits_and_ends_the_thread() -> None:
    scores, gate = Scores(9), Gate()
    scorer = Background(gate, depth=3)
    for sample in (1, 2, 3):
        scorer.update(scores, shown(sample))
    assert gate.entered.acquire(timeout=60)
    thread = scorer._thread
    threading.Timer(0.1, gate.open.set).start()
    scorer.close()
    assert thread is not None and not thread.is_alive()
    assert scores.seen[1] == 1 and not scores.seen[2:].any()
    scorer.close()


def test_the_thread_ends_with_its_scorer_and_with_the_process() -> None:
    """A script that forgets to close it ends at once, with native searches under way."""
    script = """
import gc, threading
import numpy as np
from stoker.importance.base import Background
from stoker.importance.base import Observation
from stoker.importance.graph import Graph
from stoker.importance.knn import HnswIndex
from stoker.scores import Scores
def give(scorer, scores, count):
    for step in range(4):
        ids = np.arange(count, dtype=np.uint32)
        shown = np.random.default_rng(step).standard_normal((count, 8)).astype(np.float32)
        scorer.update(scores, Observation(ids, step, 0, embeddings=shown, labels=ids % 3))
scores = Scores(3000)
scorer = Background(Graph(3000))
give(scorer, scores, 50)
del scorer
gc.collect()
assert threading.active_count() == 1, threading.enumerate()
scorer = Background(Graph(3000, index=HnswIndex))
give(scorer, scores, 3000)
print("end")
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, timeout=240
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


def test_a_depth_of_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="depth=0"):
        Background(LossHistory(), depth=0)
