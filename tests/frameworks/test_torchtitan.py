"""The data loader for torchtitan, built from its Config, and in torch's checkpoints."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "torchtitan_tokens.py"
WINDOWS, LENGTH = 44, 16
SCRIPT = """
import itertools, runpy, sys
import torch.distributed.checkpoint as dcp

if __name__ == "__main__":
    example, tokens, place = sys.argv[1:]
    TokenDataLoader = runpy.run_path(example)["TokenDataLoader"]

    def build(workers, rank=0, world_size=1):
        config = TokenDataLoader.Config(dataset_path=tokens, num_workers=workers)
        ranks = {"dp_rank": rank, "dp_world_size": world_size}
        loader = config.build(seq_len=15, local_batch_size=4, tokenizer=None, **ranks)
        loader.load_state_dict({})
        return loader

    def windows(batches):
        found = []
        for inputs, labels in batches:
            assert (inputs["input"][:, 1:] == labels[:, :-1]).all()
            found.append((inputs["input"][:, 0] // 16).tolist())
        return found

    with build(2) as loader:
        expected = windows(itertools.islice(loader, 22))
        for epoch in expected[:11], expected[11:]:
            assert sorted(itertools.chain(*epoch)) == [*range(44)]
    with build(2) as loader:
        batches = iter(loader)
        assert windows(itertools.islice(batches, 15)) == expected[:15]
        dcp.save({"dataloader": loader}, checkpoint_id=place, no_dist=True)
        batches.close()
    with build(1) as loader:
        dcp.load({"dataloader": loader}, checkpoint_id=place, no_dist=True)
        assert windows(itertools.islice(loader, 7)) == expected[15:]
    both = []
    for rank in range(2):
        with build(0, rank, 2) as loader:
            dcp.load({"dataloader": loader}, checkpoint_id=place, no_dist=True)
            both += itertools.chain(*windows(itertools.islice(loader, 4)))
    # 28 are left, 14 for each rank: three batches of four, and one of two.
    assert sorted(both) == sorted(itertools.chain(*expected[15:])), both
    print("done")
"""


@pytest.mark.exact(
    "torchtitan",
    "resumes with the missing samples, with another number of workers, and another degree of data "
    "parallelism",
)
@pytest.mark.skipif(
    importlib.util.find_spec("torchtitan") is None,
    reason="torchtitan is not installed: pip install 'stoker[frameworks-tests]'",
)
def test_it_resumes_with_other_workers_and_another_degree_of_parallelism(tmp_path: Path) -> None:
    tokens = np.arange(WINDOWS * LENGTH, dtype=np.uint16)
    tokens.tofile(tmp_path / "tokens.bin")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, script, EXAMPLE, tmp_path / "tokens.bin", tmp_path / "checkpoint"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.stdout.endswith("done\n"), done.stderr
