"""Each example trains, dies in the middle of an epoch, and resumes with exactly what is missing."""

from __future__ import annotations

import importlib.util
import io
import os
import re
import subprocess
import sys
import tokenize
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from PIL import Image
from support.processes import run_python

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"
IMAGES, BATCH = 44, 8
STEPS = -(-IMAGES // BATCH)
DIES_AFTER = STEPS + 3  # in the second of two epochs


class Case(NamedTuple):
    """An example, and what it needs."""

    example: str
    package: str
    workers: tuple[int, int] = (2, 1)
    """Before and after the crash."""
    environment: dict[str, str] = {}  # noqa: RUF012
    also: str = ""
    """A further package."""
    takes_splits: bool = False
    """Whether it wants the folder of ``train`` and ``val``."""

    def __str__(self) -> str:
        return "-".join([self.example, *self.environment.values()])


def keras(backend: str) -> Case:
    return Case("keras_pydataset", "keras", (4, 1), {"KERAS_BACKEND": backend}, backend)


RESUMES = "resumes with the missing samples, with another number of workers"
THREADS = "resumes with the missing samples, with another number of threads"
BY_MARK = [
    (Case("accelerate_loop", "accelerate"), pytest.mark.exact("Accelerate", RESUMES)),
    (Case("composer_trainer", "composer"), pytest.mark.exact("Composer", RESUMES)),
    (Case("fastai_learner", "fastai", (2, 0)), pytest.mark.exact("fastai", RESUMES)),
    (Case("grain_source", "grain", (4, 1)), pytest.mark.exact("Grain", THREADS)),
    (Case("hf_trainer", "transformers"), pytest.mark.exact("Hugging Face Trainer", RESUMES)),
    (Case("jax_feed", "jax", (4, 0)), pytest.mark.exact("JAX", THREADS)),
    (Case("lightning_fit", "lightning"), pytest.mark.exact("Lightning", RESUMES)),
    (keras("jax"), pytest.mark.exact("Keras 3", THREADS)),
    (keras("torch"), pytest.mark.exact("Keras 3", THREADS)),
    (keras("tensorflow"), pytest.mark.exact("Keras 3", "with TensorFlow too")),
    (Case("tensorflow_feed", "tensorflow", (4, 1)), pytest.mark.exact("TensorFlow", THREADS)),
    (Case("timm_loader", "timm"), pytest.mark.exact("timm", RESUMES)),
    (Case("torchdata_nodes", "torchdata"), pytest.mark.exact("torchdata nodes", RESUMES)),
    (
        Case("ultralytics_classify", "ultralytics", takes_splits=True),
        pytest.mark.exact("Ultralytics", RESUMES),
    ),
]
OTHERS = "pip install 'stoker[frameworks-tests]'"
INSTALL = {"composer": "it asks for torch 2.7, and runs with others: see docs/frameworks.md"}
WITHOUT_TORCH = {"grain", "jax", "tensorflow"}
CASES = [pytest.param(case, marks=mark, id=str(case)) for case, mark in BY_MARK]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of a class each, so that the classes of a batch say what it is made of."""
    root = tmp_path_factory.mktemp("images") / "train"
    root.mkdir()
    (root.parent / "val").symlink_to(root)
    for number in range(IMAGES):
        place = root / f"{number:03}"
        place.mkdir()
        Image.fromarray(np.full((40, 48, 3), number, np.uint8)).save(place / "image.png")
    return root


def run(
    case: Case, folder: Path, *runs: tuple[int, Path], dies_after: int | None = None
) -> list[str]:
    """Run the example in a process, with so many workers in each place; return its classes."""
    words = [
        *(HERE / "crashing.py", dies_after or 10**6, EXAMPLES / f"{case.example}.py", folder),
        *(f"{workers}:{place}" for workers, place in runs),
    ]
    env = {
        **os.environ,
        **case.environment,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(HERE.parent),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "HOME": str(runs[0][1]),
    }
    if {case.package, case.also} & WITHOUT_TORCH:
        command = [sys.executable, *map(str, words)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    else:
        done = run_python(*words, folder=folder, env=env)
    assert done.returncode == (9 if dies_after else 0), done.stderr
    # After what progress bars left on the line.
    return re.findall(r"classes (?:in epoch|of batch) \d+:(.*)", done.stdout)


@pytest.mark.timeout(600)  # two programs, which import much
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_resume_with_other_workers_gives_exactly_what_is_missing(
    case: Case, folder: Path, tmp_path: Path
) -> None:
    for package in filter(None, (case.package, case.also)):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: {INSTALL.get(package, OTHERS)}")
    before, after = case.workers
    if case.takes_splits:
        folder = folder.parent
    whole = tmp_path / "whole"
    whole.mkdir()
    first = run(case, folder, (before, tmp_path), dies_after=DIES_AFTER)
    # What is compared with comes after, for the frameworks are imported already.
    then = run(case, folder, (after, tmp_path), (before, whole))
    left = 2 * STEPS - len(first)
    expected = then[left:]
    for part in expected[:STEPS], expected[STEPS:]:
        seen = Counter(int(number) for line in part for number in line.split())
        assert seen == Counter(range(IMAGES)), "each sample once an epoch"
    assert first + then[:left] == expected


@pytest.mark.parametrize(
    "example", sorted({case.example for case, _ in BY_MARK} | {"ray_train", "torchtitan_tokens"})
)
def test_an_example_has_at_most_30_lines_of_code(example: str) -> None:
    assert lines_of_code((EXAMPLES / f"{example}.py").read_text()) <= 30


def lines_of_code(text: str) -> int:
    """Count lines that are no comment, and no string alone."""
    own = [
        token
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in (tokenize.COMMENT, tokenize.NL, tokenize.INDENT, tokenize.DEDENT)
    ]
    code: set[int] = set()
    statement: list[tokenize.TokenInfo] = []
    for token in own:
        if token.type != tokenize.NEWLINE:
            statement.append(token)
            continue
        if [part.type for part in statement] != [tokenize.STRING]:
            code.update(row for part in statement for row in range(part.start[0], part.end[0] + 1))
        statement = []
    return len(code)
