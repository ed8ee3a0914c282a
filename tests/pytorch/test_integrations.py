"""score_lands_on_the_served_sample through the frameworks that run the loop themselves."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.lanes import use_lane
from support.parts import number_of, numbers

from pytorch.test_scores_land import RECIPES, f
from stoker.errors import ConfigError, StateMismatch
from stoker.importance.baselines import SelectiveBackward
from stoker.policy.baselines import MinIO
from stoker.pytorch import Loader, SampleDataset
from stoker.pytorch.integrations import observe_and_weigh
from stoker.recipes import Recipe

NUM, EPOCHS = 90, 3  # 11 batches of 8, and one of 2
pytestmark = pytest.mark.filterwarnings("ignore")  # what the frameworks warn of is theirs


@pytest.fixture(autouse=True)
def _one_ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the last recipe, batches are copied to a device before the framework has them."""
    if request.node.name.endswith(f"[{RECIPES[-1].name}]"):
        use_lane(monkeypatch, more=0)


def as_inputs(samples: list[tuple[int, int]]) -> dict[str, torch.Tensor]:
    ids, labels = zip(*samples, strict=True)
    return {"ids": torch.tensor(ids), "labels": torch.tensor(labels)}


def loader_of(recipe: Any, **options: Any) -> Loader:
    dataset = SampleDataset(numbers(NUM), number_of, targets=np.arange(NUM) % 2)
    defaults: dict[str, Any] = {"cache": "40%", "epochs": EPOCHS, "return_meta": True}
    defaults["pin_memory"] = "cpu"
    return Loader(dataset, 8, recipe=recipe, **{**defaults, **options})


class Model(torch.nn.Module):
    """Two logits whose cross entropy against either label is f(id): the weight stays at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen = np.zeros(NUM, np.int64)
        self.labels_are_right = True

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        np.add.at(self.seen, ids.numpy(), 1)
        self.labels_are_right &= bool((labels == ids % 2).all())
        # -log p = f, so the logit of the label lies log(p / (1 - p)) above the other one.
        share = torch.exp(-f(ids))
        right = torch.log(share / (1 - share)) + 0 * self.weight
        return {"logits": torch.nn.functional.one_hot(labels, 2) * right[:, None]}


def check(loader: Loader, model: Model) -> None:
    assert model.labels_are_right
    np.testing.assert_array_equal(loader.scores.seen, model.seen)
    known = np.flatnonzero(model.seen)
    # The log-rank of other recipes would do as well, but only losses say which sample it was.
    np.testing.assert_allclose(loader.scores.values[known], f(known).numpy(), rtol=1e-5)


@pytest.mark.exact("Accelerate", "each loss is credited to the sample that was served")
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_score_lands_on_the_served_sample_with_accelerate(recipe: Recipe) -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    from stoker.pytorch.integrations.accelerate import prepare

    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4)
    model = Model()
    wrapped, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    syncs = []
    with loader_of(recipe, num_workers=2) as loader:
        with pytest.raises(ConfigError, match=r"integrations.accelerate.prepare"):
            accelerator.prepare(loader)
        batches = prepare(loader, accelerator)
        for _ in range(EPOCHS):
            count = 0
            for ids, labels, meta in batches:
                with accelerator.accumulate(wrapped):
                    logits = wrapped(ids, labels)["logits"]
                    losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
                    accelerator.backward(observe_and_weigh(loader, losses, meta))
                    optimizer.step()
                    optimizer.zero_grad()
                    count += 1
                    syncs.append(accelerator.sync_gradients)
            assert syncs[-1], "gradient accumulation ends with the epoch"
            assert len(batches) == len(loader) > 0
        check(loader, model)


def test_accelerate_needs_meta() -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    from stoker.pytorch.integrations.accelerate import prepare

    with loader_of("minio", return_meta=False) as loader, pytest.raises(ConfigError, match="meta"):
        prepare(loader, accelerate.Accelerator(cpu=True))


@pytest.mark.exact("Hugging Face Trainer", "each loss is credited to the sample that was served")
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_score_lands_on_the_served_sample_with_hf_trainer(recipe: Recipe, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    from stoker.pytorch.integrations.hf_trainer import LoaderTrainer

    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        num_train_epochs=EPOCHS,
        gradient_accumulation_steps=4,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        seed=1,
    )
    model = Model()
    with loader_of(recipe, collate_fn=as_inputs, num_workers=2) as loader:
        LoaderTrainer(model, arguments, train_loader=loader).train()
        assert len(loader.epoch_stats) == EPOCHS
        check(loader, model)


@pytest.mark.exact("Lightning", "each loss is credited to the sample that was served")
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_score_lands_on_the_served_sample_with_lightning(recipe: Recipe, tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning", reason="lightning is not installed")
    from stoker.pytorch.integrations.lightning import LoaderCallback

    model = Model()

    class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            ids, labels, meta = batch
            logits = self.model(ids, labels)["logits"]
            losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
            self.log("accuracy", float(self.current_epoch) / 10)
            return observe_and_weigh(loader, losses, meta)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    with loader_of(recipe) as loader:
        trainer = lightning.Trainer(
            max_epochs=EPOCHS,
            accelerator="cpu",
            logger=False,
            accumulate_grad_batches=4,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
            callbacks=[LoaderCallback(loader, accuracy="accuracy")],
        )
        trainer.fit(Module(), loader)
        check(loader, model)
        next(iter(loader))
        np.testing.assert_allclose(loader.scores.accuracies, [0, 0.1, 0.2])


def test_lightning_that_would_divide_once_more_is_refused() -> None:
    lightning = pytest.importorskip("lightning", reason="lightning is not installed")
    from stoker.pytorch.integrations.lightning import LoaderCallback

    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy="ddp_spawn", logger=False, barebones=True
    )
    with loader_of("minio") as loader:
        callback = LoaderCallback(loader)
        with pytest.raises(ConfigError, match="use_distributed_sampler=False"):
            callback.setup(trainer, lightning.LightningModule(), "fit")


def test_weights_of_a_backward_pass_that_selects_reach_the_mean() -> None:
    recipe = Recipe("base", "", MinIO(), backward=lambda: SelectiveBackward(beta=2.0, history=64))
    with loader_of(recipe) as loader:
        kept = 0
        for ids, _, meta in loader:
            losses = f(ids).requires_grad_()
            mean = observe_and_weigh(loader, losses, meta)
            mean.backward()
            weights = meta.weights.numpy()
            assert losses.grad is not None
            np.testing.assert_allclose(losses.grad.numpy(), weights / len(ids), rtol=1e-6)
            chosen = weights > 0
            if chosen.any():
                expected = losses.detach().numpy()[chosen].mean()
                np.testing.assert_allclose(mean.item(), expected, rtol=1e-6)
            kept += int(chosen.sum())
        assert 0 < kept < NUM


# --- Ray Train, by the stand-in of tests/cluster/test_ray_example.py; the real one is there too ---


@pytest.fixture
def checkpoints(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Checkpoints, in a Ray of one worker that keeps them in ``tmp_path``."""
    stand_in = Path(__file__).parents[1] / "cluster" / "one_worker" / "ray.py"
    spec = importlib.util.spec_from_file_location("ray", stand_in)
    assert spec is not None and spec.loader is not None
    ray = importlib.util.module_from_spec(spec)
    for name in ("ray", "ray.train", "ray.train.torch"):
        monkeypatch.setitem(sys.modules, name, ray)
    spec.loader.exec_module(ray)
    ray._run.storage = tmp_path
    name = "stoker.pytorch.integrations.ray_train"
    monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(name).Checkpoints
    del sys.modules[name]


def test_ray_goes_on_with_the_rest_of_the_epoch_and_the_parts(checkpoints: Any) -> None:
    model = torch.nn.Linear(1, 1)
    with loader_of("lru") as loader:
        saved = checkpoints(loader, model=model)
        assert saved.restore() == 0, "nothing is saved yet"
        whole = [meta.ids.tolist() for *_, meta in loader]
        batches = iter(loader)
        begun = [next(batches)[-1].ids.tolist() for _ in range(3)]
        saved.report(1, loss=0.5)
        left = [meta.ids.tolist() for *_, meta in batches]
    other = torch.nn.Linear(1, 1)
    with loader_of("lru") as loader:
        assert checkpoints(loader, model=other).restore() == 1
        assert [meta.ids.tolist() for *_, meta in loader] == left
    for epoch in (whole, begun + left):
        assert sorted(itertools.chain(*epoch)) == list(range(NUM))
    assert other.state_dict() == model.state_dict()


def test_ray_refuses_a_checkpoint_that_lacks_a_part_and_loads_nothing(checkpoints: Any) -> None:
    model = torch.nn.Linear(1, 1)
    with loader_of("lru") as loader:
        next(iter(loader))
        checkpoints(loader, model=model).report(0)
    with loader_of("lru") as loader:
        new = checkpoints(loader, model=torch.nn.Linear(1, 1), schedule=model)
        with pytest.raises(StateMismatch, match="no state of schedule: it has model"):
            new.restore()
        assert len(list(loader)) == len(loader), "the epoch begins at its beginning"
