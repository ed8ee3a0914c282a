"""The programs of docs/examples.md train on the same samples with the page's diffs as without."""

from __future__ import annotations

import importlib.util
import json
import re
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from PIL import Image
from support.pages import ROOT, blocks
from support.processes import run_python

PORTED = ROOT / "examples" / "ported"
PAGE = "docs/examples.md"
IMAGES, BATCH, EPOCHS = 44, 8, 2
TOKENS, BLOCK, WINDOWS, STEPS = 680, 16, 40, 12


class Case(NamedTuple):
    """A program, its section of the page, the arguments for two epochs, and what it needs."""

    program: str
    section: str
    arguments: str
    package: str = "torch"


CASES = [
    Case(
        "timm_train",
        "timm",
        "--data-dir {data} --model test_byobnet --img-size 32 --batch-size 8 --epochs 2 "
        "--workers 1 --num-classes 44",
        "timm",
    ),
    Case(
        "hf_image_classification",
        "Transformers",
        "--train_dir {data}/train --output_dir {here}/out --use_cpu --num_train_epochs 2 "
        "--per_device_train_batch_size 8 --report_to none --save_strategy no --disable_tqdm true "
        "--remove_unused_columns false",
        "transformers",
    ),
    Case("lightning_cifar", "Lightning", "{data}/train", "lightning"),
    Case(
        "torchvision_reference",
        "torchvision's references",
        "--data-path {data} --epochs 2 --batch-size 8 --workers 1",
    ),
    Case(
        "nanogpt",
        "nanoGPT",
        f"{{data}}/train.bin --max_iters {STEPS} --batch_size 8 --block_size {BLOCK} --n_embd 16 "
        f"--vocab_size {TOKENS}",
    ),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of a class each, and tokens that count: targets say what a batch is made of."""
    root = tmp_path_factory.mktemp("data")
    for number in range(IMAGES):
        place = root / "train" / f"{number:03}"
        place.mkdir(parents=True)
        Image.fromarray(np.full((32, 32, 3), number, np.uint8)).save(place / "image.png")
    np.arange(TOKENS, dtype=np.uint16).tofile(root / "train.bin")
    return root


def diff_of(case: Case) -> str:
    (diff,) = blocks(PAGE, case.section, "diff")
    return diff


def patched(text: str, diff: str) -> str:
    """Apply the hunks of a diff, which are parted by @@ and must each fit in one place."""
    for hunk in diff.split("@@\n"):
        lines = hunk.splitlines(keepends=True)
        before = "".join(line[1:] for line in lines if line[0] in " -")
        after = "".join(line[1:] for line in lines if line[0] in " +")
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    return text


def record(
    case: Case, data: Path, here: Path, *launcher: str, only_ported: bool = False
) -> list[list[list[int]]]:
    """The targets of each step, of the program as it is and as the diff makes it, for each rank."""
    if importlib.util.find_spec(case.package) is None:
        pytest.skip(f"{case.package} is not installed: pip install 'stoker[frameworks-tests]'")
    program = PORTED / f"{case.program}.py"
    ported = here / f"{case.program}.py"
    ported.write_text(patched(program.read_text(), diff_of(case)))
    arguments = case.arguments.format(data=data, here=here).split()
    programs = [str(program), str(ported)][only_ported:]
    recording = str(Path(__file__).with_name("recording.py"))
    words = [*launcher, recording, str(here / "steps"), *programs, "--", *arguments]
    env = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(here),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT / "tests"),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    done = run_python(*words, folder=here, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    files = sorted(here.glob("steps*"))
    return [program for file in files for program in json.loads(file.read_text())]


def sizes(steps: list[list[int]]) -> list[int]:
    return [len(targets) for targets in steps]


@pytest.mark.parametrize("case", CASES[:4], ids=lambda case: case.program)
def test_images_are_the_same_with_the_diff(case: Case, data: Path, tmp_path: Path) -> None:
    before, after = record(case, data, tmp_path)
    assert sizes(before) == sizes(after)
    steps, left = len(before) // EPOCHS, IMAGES % BATCH
    drops = case.program == "timm_train"  # the last batch, as it is not whole
    assert steps == IMAGES // BATCH + (not drops)
    for program in before, after:
        epochs = [[*chain(*program[at : at + steps])] for at in (0, steps)]
        for epoch in epochs:
            assert len(set(epoch)) == len(epoch) == IMAGES - left * drops, "each once an epoch"
        assert epochs[0] != epochs[1], "in a new order"


def test_two_ranks_share_the_images_of_an_epoch(data: Path, tmp_path: Path) -> None:
    """As torch's DistributedSampler divides them: 22 for each."""
    case = next(case for case in CASES if case.program == "torchvision_reference")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    first, second = record(case, data, tmp_path, *launcher, only_ported=True)
    assert sizes(first) == sizes(second) == [8, 8, 6] * EPOCHS
    for at in (0, 3):
        seen = [*chain(*first[at : at + 3], *second[at : at + 3])]
        assert sorted(seen) == [*range(IMAGES)]


def test_windows_of_tokens_come_once_an_epoch_with_the_diff(data: Path, tmp_path: Path) -> None:
    before, after = record(CASES[-1], data, tmp_path)
    assert sizes(before) == sizes(after) == [BATCH * BLOCK] * STEPS
    rows = [np.reshape(step, (BATCH, BLOCK)) for step in after]
    for row in np.concatenate(rows):
        assert row[0] % (BLOCK + 1) == 1 and (np.diff(row) == 1).all(), "a whole window"
    epoch = WINDOWS // BATCH
    for at in (0, epoch):
        begins = np.concatenate(rows[at : at + epoch])[:, 0]
        assert sorted(begins // (BLOCK + 1)) == [*range(WINDOWS)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.program)
def test_a_diff_has_five_new_lines_at_most_and_the_page_counts_them(case: Case) -> None:
    lines = diff_of(case).splitlines()
    more, less = (sum(line[:1] == sign for line in lines) for sign in "+-")
    assert 0 < more <= 5
    page = (ROOT / PAGE).read_text()
    (told,) = re.findall(rf"/{case.program}\.py\) \| (\d+, \d+) \|", page)
    assert told == f"{more}, {less}"


def test_all_programs_are_on_the_page() -> None:
    assert {path.stem for path in PORTED.glob("*.py")} == {case.program for case in CASES}
