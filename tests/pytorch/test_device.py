"""Batches on their way to an accelerator; without one, a lane that writes down what it is told."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.lanes import Lane, use_lane
from torch.nn.utils.rnn import pack_sequence

from stoker.errors import ConfigError, SampleCorrupt
from stoker.images import Train
from stoker.pytorch import ImageFolder, Loader, SampleDataset, device
from stoker.pytorch.device import AcceleratorLane, Ahead, checked_target
from stoker.pytorch.hand_over import Envelope, Meta
from stoker.source.held import MemorySource

Pair = namedtuple("Pair", "left right")
META = Meta(7, 1, np.arange(2, dtype=np.uint32), np.zeros(2, np.int8), np.arange(2))
N = 40


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Of the lane of a Loader with ``pin_memory="cpu"``."""
    return use_lane(monkeypatch)


def numbers() -> SampleDataset:
    source = MemorySource([bytes([i]) for i in range(N)])
    return SampleDataset(source, decode=lambda data: torch.tensor(data[0]))


def envelopes(batches: list[Any]) -> Iterator[Envelope]:
    for batch in batches:
        if isinstance(batch, Exception):
            raise batch
        yield Envelope(batch, META, ())


def test_one_batch_is_copied_ahead() -> None:
    log: list[Any] = []
    arriving = Ahead(envelopes([torch.tensor(i) for i in range(3)]), Lane(log))
    seen = []
    for envelope in arriving:
        log.append(f"trains {int(envelope.batch)}")
        seen.append(envelope.meta)
    assert seen == [META] * 3
    assert log == [
        "copied 1",
        "copied 2",
        "waited for 1: 1",
        "trains 100",
        "copied 3",
        "waited for 2: 1",
        "trains 101",
        "waited for 3: 1",
        "trains 102",
    ]


def test_an_error_comes_after_the_batches_before_it() -> None:
    class Once:
        """Fails at the second batch, and has a third."""

        batches = iter([torch.tensor(1), SampleCorrupt("second"), torch.tensor(3)])

        def __iter__(self) -> Once:
            return self

        def __next__(self) -> Envelope:
            return next(envelopes([next(self.batches)]))

    arriving = Ahead(Once(), Lane([]))
    assert int(next(arriving).batch) == 101
    with pytest.raises(SampleCorrupt, match="second"):
        next(arriving)
    assert int(next(arriving).batch) == 103
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(arriving)


class Mapped(UserDict):  # type: ignore[type-arg]
    """Like what tokenizers give."""


@pytest.mark.parametrize(
    ("make", "tensors"),
    [
        (lambda t: t, 1),
        (lambda t: (t, [t, "text", 3]), 2),
        (lambda t: Pair(t, None), 1),
        (lambda t: OrderedDict(x=t, y={"z": t}), 2),
        (lambda t: Mapped(x=t), 1),
        (lambda t: pack_sequence([t.view(1), t.view(1)]), 1),
        (lambda t: {"array": np.ones(2), "text": "t"}, 0),
    ],
)
def test_every_tensor_of_a_batch_moves(make: Callable[[Any], Any], tensors: int) -> None:
    log: list[Any] = []
    before = make(torch.tensor(5))
    moved = next(Ahead(envelopes([before]), Lane(log))).batch
    assert type(moved) is type(before)
    assert str(moved) == str(make(torch.tensor(105)))
    assert str(before) == str(make(torch.tensor(5)))
    assert log[-1] == f"waited for {tensors}: {tensors}"


class Streams:
    """A module of torch for devices that are the host."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.now = "training"

    def Stream(self, target: torch.device) -> str:  # noqa: N802 (named as in torch)
        return "lane"

    @contextmanager
    def stream(self, name: str) -> Iterator[None]:
        self.now, before = name, self.now
        yield
        self.now = before

    def Event(self) -> Streams:  # noqa: N802
        return self

    def record(self, name: str) -> None:
        self.log.append(f"event in {name}")

    def current_stream(self, target: torch.device) -> Streams:
        return self

    def wait_event(self, event: Any) -> None:
        self.log.append(f"{self.now} waits")


class Tensor:
    """Says in which stream it is copied and used."""

    def __init__(self, kind: Streams) -> None:
        self.kind = kind

    def to(self, target: torch.device, non_blocking: bool) -> Tensor:
        assert non_blocking
        self.kind.log.append(f"{self.kind.now}: to {target}")
        return self

    def record_stream(self, stream: Any) -> None:
        self.kind.log.append(f"used by {stream.now}")


def test_a_lane_copies_in_a_stream_of_its_own() -> None:
    kind = Streams()
    lane, tensor = AcceleratorLane(torch.device("cuda:1"), kind), Tensor(kind)
    copied: Any = lane.copied(tensor)  # type: ignore[arg-type]
    lane.hand_over(lane.mark(), [copied])
    assert kind.log == ["lane: to cuda:1", "event in lane", "training waits", "used by training"]


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"decode_threads": 2}], ids=str)
def test_a_loader_gives_the_same_batches_in_the_same_order(
    log: list[Any], options: dict[str, Any]
) -> None:
    with Loader(numbers(), 8, cache=0, **options) as loader:
        expected = [batch.tolist() for _ in range(2) for batch in loader]
    with Loader(numbers(), 8, cache=0, pin_memory="cpu", **options) as loader:
        seen = []
        for _ in range(2):
            for batch in loader:
                seen.append([value - 100 for value in batch.tolist()])
                assert loader.last_ids.tolist() == seen[-1]
                loader.observe(torch.ones(8))
    assert seen == expected
    assert len(log) == 2 * len(expected)


def test_state_counts_what_was_handed_out(log: list[Any]) -> None:
    with Loader(numbers(), 8, cache=0) as loader:
        expected = [batch.tolist() for batch in loader]
    with Loader(numbers(), 8, cache=0, pin_memory="cpu") as loader:
        batches = iter(loader)
        seen = [(next(batches) - 100).tolist() for _ in range(2)]
        state = loader.state_dict()
    with Loader(numbers(), 8, cache=0, pin_memory="cpu") as loader:
        loader.load_state_dict(state)
        seen += [(batch - 100).tolist() for batch in loader]
    assert seen == expected


def test_meta_stays_and_an_epoch_may_be_left(log: list[Any]) -> None:
    with Loader(numbers(), 8, cache=0, pin_memory="cpu", return_meta=True) as loader:
        for batch, meta in loader:
            assert (batch - 100).tolist() == meta.ids.tolist()
            loader.observe(torch.ones(8), meta=meta)
            break
        assert sum(1 for _ in loader) == 5


@pytest.mark.parametrize("workers", [{}, {"num_workers": 1, "persistent_workers": True}], ids=str)
def test_the_epoch_may_be_named_before_the_first_batch(
    log: list[Any], workers: dict[str, Any]
) -> None:
    with Loader(numbers(), 8, cache=0) as loader:
        loader.set_epoch(3)
        expected = [batch.tolist() for batch in loader]
    with Loader(numbers(), 8, cache=0, pin_memory="cpu", **workers) as loader:
        batches = iter(loader)
        loader.set_epoch(3)
        assert [(batch - 100).tolist() for batch in batches] == expected
        assert len(log) == 2 * len(expected)


def test_rescoring_gets_batches_on_the_device(log: list[Any]) -> None:
    seen: list[int] = []

    def rescore(batch: torch.Tensor) -> torch.Tensor:
        seen.extend((batch - 100).tolist())
        return torch.ones(len(batch))

    options = {"recipe": "impact:warm_up=1", "epochs": 4, "rescore": rescore}
    with Loader(numbers(), 8, cache="50%", pin_memory="cpu", **options) as loader:
        for _ in range(4):
            for batch in loader:
                loader.observe(torch.ones(len(batch)))
    assert seen and set(seen) <= set(range(N))


def test_the_cpu_is_passed_through() -> None:
    with Loader(numbers(), 8, cache=0, pin_memory="cpu") as loader:
        assert sorted(torch.cat(list(loader)).tolist()) == list(range(N))
        assert not loader.pin_memory


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("nonsense", "give True, False or a device"),
        ("meta", "has no streams"),
        (3.5, "give True, False or a device"),
        ("cuda:99", r"torch finds \d+ devices of 'cuda'"),
    ],
)
def test_a_device_that_is_not_there(bad: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Loader(numbers(), 8, pin_memory=bad)


def test_devices() -> None:
    assert checked_target(True) is None and checked_target(False) is None
    assert checked_target("cpu") == checked_target(torch.device("cpu")) == torch.device("cpu")


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Addresses of memory that would be pinned."""
    addresses = []

    def memory(_: Any, shape: tuple[int, ...]) -> Any:
        tensor = torch.empty(shape, dtype=torch.uint8)
        addresses.append(tensor.data_ptr())
        return tensor.numpy()

    monkeypatch.setattr(device, "pins", lambda outer: True)
    monkeypatch.setattr(device.PinnedMemory, "pixels", memory)
    return addresses


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_lie_in_pinned_memory_that_torch_owns(
    pinned: list[int], workers: int, image_root: Path
) -> None:
    """Else torch would copy them there, or give the memory out again during a copy to a device."""
    dataset = ImageFolder(image_root, transform=Train(64))
    with Loader(dataset, 8, cache=0) as loader:
        expected = next(iter(loader))[0].clone()
    pinned.clear()
    with Loader(dataset, 8, cache=0, num_workers=workers) as loader:
        images, labels = next(iter(loader))
    assert images.equal(expected)
    for tensor in [images, labels] if workers else [images]:
        assert tensor.untyped_storage().data_ptr() in pinned
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_types_that_numpy_has_not_lie_there_too(pinned: list[int]) -> None:
    def sample(data: bytes) -> dict[str, torch.Tensor]:
        values = torch.arange(4096) + data[0]
        return {"half": values.bfloat16(), "none": torch.empty(0), "last": values.view(4, 4, 256)}

    dataset = SampleDataset(MemorySource([bytes([i]) for i in range(8)]), decode=sample)
    with Loader(dataset, 4, cache=0, num_workers=1) as loader:
        batch = next(iter(loader))
    assert batch["half"].untyped_storage().data_ptr() in pinned
    assert batch["last"].untyped_storage().data_ptr() in pinned
    assert (batch["half"].dtype, batch["none"].shape) == (torch.bfloat16, (4, 0))


needs_cuda = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device: copies to one are not tested here"
)


@needs_cuda
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_lie_on_a_real_device(workers: int, image_root: Path) -> None:
    dataset = ImageFolder(image_root, transform=Train(24))
    with Loader(dataset, 8, cache=0, num_workers=workers) as loader:
        expected = [images.clone() for images, _ in loader]
    with Loader(dataset, 8, cache=0, num_workers=workers, pin_memory="cuda") as loader:
        for (images, labels), same in zip(loader, expected, strict=True):
            assert images.is_cuda and labels.is_cuda
            assert images.cpu().equal(same)


@needs_cuda
def test_pinned_batches_are_pinned(image_root: Path) -> None:
    dataset = ImageFolder(image_root, transform=Train(24))
    with Loader(dataset, 8, cache=0, num_workers=1, pin_memory=True) as loader:
        images, labels = next(iter(loader))
    assert images.is_pinned() and labels.is_pinned()
    assert device.PinnedMemory().pixels((1 << 16,)).base.is_pinned()
