"""The Trainer of Transformers, and Accelerate, resume with exactly the samples that are missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.parts import number_of, numbers

from stoker.errors import StateMismatch
from stoker.pytorch import Loader, SampleDataset

NUM, EPOCHS, ACCUMULATED = 90, 3, 5
STEPS = 12  # 11 batches of 8, and one of 2
UPDATES = 3  # of 5, 5 and 2 batches
pytestmark = pytest.mark.filterwarnings("ignore")  # what the frameworks warn of is theirs


class Model(torch.nn.Module):
    """Notes the ids of each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen: list[list[int]] = []
        self.epochs: dict[int, float] = {}

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.seen.append(ids.tolist())
        return {"logits": torch.nn.functional.one_hot(labels, 2) * self.weight}


def as_inputs(samples: list[tuple[int, int]]) -> dict[str, torch.Tensor]:
    ids, labels = zip(*samples, strict=True)
    return {"ids": torch.tensor(ids), "labels": torch.tensor(labels)}


def loader_of(workers: int, **options: Any) -> Loader:
    dataset = SampleDataset(numbers(NUM), number_of, targets=np.arange(NUM) % 2)
    return Loader(
        dataset,
        8,
        recipe="foresight",
        cache="40%",
        epochs=EPOCHS,
        return_meta=True,
        seed=3,
        num_workers=workers,
        **options,
    )


def train(folder: Path, stop: int, workers: int, resume: bool = False) -> tuple[Model, int]:
    """Train, up to update ``stop`` if that is one; return the model and the updates made."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from stoker.pytorch.integrations.hf_trainer import LoaderTrainer

    class Stop(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
        updates = 0

        def on_optimizer_step(self, *_: Any, **__: Any) -> None:
            self.updates += 1

        def on_log(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            model.epochs[state.global_step] = state.epoch

        def on_step_begin(self, arguments: Any, state: Any, *_: Any, **__: Any) -> None:
            if state.global_step == stop:
                raise InterruptedError

    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=EPOCHS,
        gradient_accumulation_steps=ACCUMULATED,
        use_cpu=True,
        report_to=[],
        save_strategy="steps",
        save_steps=max(1, stop),
        logging_steps=1,
        disable_tqdm=True,
        seed=1,
    )
    model, noting = Model(), Stop()
    with loader_of(workers, collate_fn=as_inputs) as loader:
        trainer = LoaderTrainer(model, arguments, train_loader=loader, callbacks=[noting])
        try:
            trainer.train(resume_from_checkpoint=resume or None)
        except InterruptedError:
            assert stop > 0
    return model, noting.updates


@pytest.mark.exact(
    "Hugging Face Trainer", "resumes with the missing samples, with another number of workers"
)
@pytest.mark.parametrize("stop", [1, UPDATES, 5])
def test_the_trainers_own_resume(stop: int, tmp_path: Path) -> None:
    expected, updates = train(tmp_path / "whole", -1, workers=0)
    assert len(expected.seen) == EPOCHS * STEPS and updates == EPOCHS * UPDATES
    begun, before = train(tmp_path / "cut", stop, workers=1)
    assert before == stop
    rest, after = train(tmp_path / "cut", -1, workers=0, resume=True)
    assert begun.seen + rest.seen == expected.seen
    assert before + after == updates, "the last batches of an epoch are not left out of a step"
    assert begun.epochs | rest.epochs == expected.epochs
    assert expected.epochs[UPDATES] == 1 and expected.epochs[updates] == EPOCHS


def test_a_checkpoint_without_the_loaders_state_is_refused(tmp_path: Path) -> None:
    train(tmp_path, 1, workers=0)
    (state,) = tmp_path.glob("checkpoint-1/stoker-loader-0.pt")
    state.unlink()
    with pytest.raises(StateMismatch, match=r"has no state of the Loader \(stoker-loader-0.pt\)"):
        train(tmp_path, -1, workers=0, resume=True)


def batches_of(workers: int, most: int, folder: Path, resume: bool = False) -> list[list[int]]:
    """The ids of so many batches, from the checkpoint in a folder on; else one is written there."""
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    from stoker.pytorch.integrations.accelerate import prepare

    accelerator = accelerate.Accelerator(cpu=True)
    seen: list[list[int]] = []
    with loader_of(workers) as loader:
        prepared = prepare(loader, accelerator)
        accelerator.register_for_checkpointing(prepared)
        if resume:
            accelerator.load_state(str(folder))
        assert len(prepared) == STEPS
        while len(seen) < most:
            for ids, _, _ in prepared:
                seen.append(ids.tolist())
                if len(seen) == most:
                    break
        if not resume:
            accelerator.save_state(str(folder))
    return seen


@pytest.mark.exact("Accelerate", "resumes with the missing samples, with another number of workers")
@pytest.mark.parametrize("stop", [1, STEPS - 1, STEPS, 17])
def test_accelerates_checkpoints(stop: int, tmp_path: Path) -> None:
    whole = EPOCHS * STEPS
    expected = batches_of(0, whole, tmp_path / "whole")
    begun = batches_of(1, stop, tmp_path / "cut")
    rest = batches_of(0, whole - stop, tmp_path / "cut", resume=True)
    assert begun + rest == expected
