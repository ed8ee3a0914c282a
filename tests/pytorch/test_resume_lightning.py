"""Resume through the hooks that Lightning has for loaders; with Lightning itself where it is."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import pytest
import torch
from support.parts import number_of, numbers

from stoker.pytorch import Loader, SampleDataset

NUM, STEPS, EPOCHS = 101, 13, 3


def loader_of(**arguments: Any) -> Loader:
    return Loader(SampleDataset(numbers(NUM), number_of), batch_size=8, cache=0, **arguments)


@runtime_checkable
class Stateful(Protocol):
    """How Lightning tells loaders that it saves from those that it does not."""

    def state_dict(self) -> dict[Any, Any]: ...
    def load_state_dict(self, state_dict: dict[Any, Any]) -> None: ...


class Fit:
    """The part of Lightning's fit loop that touches the loader, version 2.2 to 2.6.

    One ``iter()`` when it sets up, after the state was loaded, and one for each later epoch; the
    epoch is told to ``loader.sampler``; the end of an epoch is where the batches that are ready,
    those before the restart included, have reached ``len(loader)``: StopIteration is not awaited.
    """

    def __init__(self, loader: Loader) -> None:
        self.loader = loader
        self.epoch = self.ready = 0
        self.seen: list[tuple[int, int, list[int]]] = []

    def run(self, stop: int | None = None, checkpoint: dict[str, Any] | None = None) -> Any:
        """Train to the end, or return a checkpoint after ``stop`` batches."""
        loader = self.loader
        if checkpoint is not None:
            self.epoch, self.ready = checkpoint["epoch"], checkpoint["ready"]
        loader.sampler.set_epoch(self.epoch)
        if checkpoint is not None:
            assert isinstance(loader, Stateful)
            loader.load_state_dict(checkpoint["loader"])
        iterator = iter(loader)
        length = len(loader)
        if self.ready == length:
            self.epoch, self.ready = self.epoch + 1, 0
        for epoch in range(self.epoch, EPOCHS):
            loader.sampler.set_epoch(epoch)
            if epoch > self.epoch:
                iterator, self.ready, self.epoch = iter(loader), 0, epoch
            while self.ready < length:
                batch = next(iterator)
                self.seen.append((epoch, self.ready, batch.tolist()))
                self.ready += 1
                if len(self.seen) == stop:
                    return {"epoch": epoch, "ready": self.ready, "loader": loader.state_dict()}
        return None


@pytest.mark.parametrize("stop", [1, 5, 12, 13, 14, 20, 26, 38, 39])
def test_the_protocol(stop: int) -> None:
    with loader_of() as loader:
        fit = Fit(loader)
        fit.run()
        expected = fit.seen
        assert len(expected) == EPOCHS * STEPS
    with loader_of(num_workers=2) as loader:
        fit = Fit(loader)
        buffer = io.BytesIO()
        torch.save(fit.run(stop), buffer)
        begun = fit.seen
    buffer.seek(0)
    with loader_of() as loader:
        fit = Fit(loader)
        fit.run(checkpoint=torch.load(buffer, weights_only=True))
        assert begun + fit.seen == expected


def lightning() -> Any:
    return pytest.importorskip("lightning", reason="lightning is not installed")


def module_of(stop: int, at_epoch_end: bool, path: Path) -> Any:
    """A module that notes its batches, and saves a checkpoint and stops after ``stop`` of them."""

    class Noting(lightning().LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
            self.seen: list[tuple[int, int, list[int]]] = []

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            self.seen.append((self.current_epoch, index, batch.tolist()))
            return self.layer(batch.float()[:, None]).mean()

        def on_train_batch_end(self, *_: Any) -> None:
            self.stop(at_epoch_end)

        def on_train_epoch_end(self) -> None:
            self.stop(not at_epoch_end)

        def stop(self, elsewhere: bool) -> None:
            if len(self.seen) == stop and not elsewhere:
                self.trainer.save_checkpoint(path)
                raise InterruptedError

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 1e-9)

    return Noting()


def data_module_of(loader: Loader) -> Any:
    class Data(lightning().LightningDataModule):  # type: ignore[misc]
        def train_dataloader(self) -> Loader:
            return loader

    return Data()


def fit(
    module: Any, place: Path, checkpoint: Path | None = None, by_module: bool = False, **how: Any
) -> Any:
    trainer = lightning().Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=place,
    )
    with loader_of(**how) as loader, contextlib.suppress(InterruptedError):
        data = data_module_of(loader) if by_module else loader
        trainer.fit(module, data, ckpt_path=checkpoint)
    return module.seen


@pytest.mark.exact(
    "Lightning",
    "resumes with the missing samples, with another number of workers",
)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("stop", "at_epoch_end"), [(5, False), (STEPS, False), (20, False), (STEPS, True)]
)
def test_lightning_itself(stop: int, at_epoch_end: bool, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    expected = fit(module_of(-1, False, path), tmp_path)
    assert len(expected) == EPOCHS * STEPS
    begun = fit(module_of(stop, at_epoch_end, path), tmp_path, num_workers=2)
    assert begun + fit(module_of(-1, False, path), tmp_path, path) == expected


@pytest.mark.exact("Lightning", "also with a Loader from a DataModule")
@pytest.mark.filterwarnings("ignore")
def test_a_data_module(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    expected = fit(module_of(-1, False, path), tmp_path)
    begun = fit(module_of(20, False, path), tmp_path, by_module=True, num_workers=2)
    assert 0 < len(begun) < len(expected)
    assert begun + fit(module_of(-1, False, path), tmp_path, path, by_module=True) == expected
