"""Train and Eval in a Loader: the same pixels in workers, threads and the Feed, and no copies."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import default_collate

from stoker import Cache
from stoker.errors import ConfigError, SampleCorrupt
from stoker.feed import Feed
from stoker.images import Eval, Train, decode_image
from stoker.pytorch import ImageFolder, Loader, Normalize, SampleDataset, with_cache
from stoker.source.held import MemorySource

PHOTOGRAPHS, SIZE = 24, 32  # none is large enough to be shrunk while it is decoded


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes of JPEGs of several sizes."""
    folder = tmp_path_factory.mktemp("photographs")
    for number in range(PHOTOGRAPHS):
        noise = np.random.default_rng(number).integers(0, 255, (6 + number % 5, 9, 3))
        pixels = np.kron(noise, np.ones((8, 8, 1))).astype(np.uint8)
        place = folder / f"class{number % 2}" / f"{number:02}.jpg"
        place.parent.mkdir(exist_ok=True)
        Image.fromarray(pixels).save(place, "JPEG", quality=92)
    return folder


def batches(loader: Any, epochs: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    with loader:
        return [(images.clone(), labels) for _ in range(epochs) for images, labels in loader]


def assert_equal(one: list[Any], other: list[Any]) -> None:
    assert len(one) == len(other)
    for mine, theirs in zip(one, other, strict=True):
        for left, right in zip(mine, theirs, strict=True):
            assert torch.equal(torch.as_tensor(left), torch.as_tensor(right))


WAYS: dict[str, dict[str, Any]] = {
    "1 thread": {"decode_threads": 1},
    "3 threads": {"decode_threads": 3},
    "2 workers": {"num_workers": 2},
    "worker of its own": {"num_workers": 1, "multiprocessing_context": "forkserver"},
    "decoded samples": {"cache": Cache("8MiB", stage="decoded")},
    "decoded samples, threads": {"cache": Cache("8MiB", stage="decoded"), "decode_threads": 2},
    "no cache": {"cache": 0},
}


@pytest.fixture(scope="module")
def expected(root: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return batches(Loader(ImageFolder(root, Train(SIZE, (0.4, 1))), batch_size=5, seed=3), 2)


@pytest.mark.parametrize("way", sorted(WAYS))
def test_the_same_pixels_whoever_decodes(root: Path, expected: list[Any], way: str) -> None:
    dataset = ImageFolder(root, Train(SIZE, (0.4, 1)))
    made = batches(Loader(dataset, batch_size=5, seed=3, **WAYS[way]), 2)
    assert_equal(made, expected)
    images, labels = made[0]
    assert (images.shape, images.dtype) == ((5, 3, SIZE, SIZE), torch.uint8)
    assert labels.dtype == torch.int64
    first, again = (torch.cat([images for images, _ in half]) for half in (made[:5], made[5:]))
    assert not torch.equal(first, again)


@pytest.mark.parametrize("threads", [0, 3])
def test_the_feed_gives_the_same(root: Path, expected: list[Any], threads: int) -> None:
    transform = Train(SIZE, (0.4, 1))
    with Feed(str(root), 5, seed=3, decode_threads=threads, transform=transform) as feed:
        made = [(batch.data, batch.targets) for _ in range(2) for batch in feed]
    assert_equal(made, expected)


def test_eval_of_every_image_is_that_of_its_bytes(root: Path) -> None:
    dataset = ImageFolder(root, Eval(40, SIZE))
    assert not dataset.is_random
    with Loader(dataset, batch_size=7, decode_threads=2, return_meta=True) as loader:
        for images, labels, meta in loader:
            for image, label, index in zip(images, labels, meta.ids.tolist(), strict=True):
                raw = dataset.source.read([index])[0]
                np.testing.assert_array_equal(image.numpy(), Eval(40, SIZE)(raw))
                assert label == dataset.targets[index]
    pixels, label = dataset[3]
    assert torch.equal(pixels, torch.from_numpy(Eval(40, SIZE)(dataset.source.read([3])[0])))
    assert label == dataset.targets[3]


@pytest.mark.parametrize("options", [{}, {"decode_threads": 2}])
def test_nothing_is_copied_between_decoder_and_batch(
    root: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        raise AssertionError("copied")

    monkeypatch.setattr(torch, "stack", fail)
    seen: list[int] = []
    dataset = ImageFolder(root, [Train(SIZE), lambda image: seen.append(image.data_ptr()) or image])
    monkeypatch.setattr(dataset, "target_transform", float)
    with Loader(dataset, batch_size=6, **options) as loader:
        for images, labels in loader:
            assert images.data_ptr() == seen[-6] and images.is_contiguous()
            assert labels.dtype == torch.float64


def test_a_function_that_makes_another_tensor_is_heeded(root: Path) -> None:
    plain = ImageFolder(root, Train(SIZE))
    other = ImageFolder(root, [Train(SIZE), lambda image: image.flip(-1)])
    for (images, _), (flipped, _) in zip(
        batches(Loader(plain, batch_size=6)), batches(Loader(other, batch_size=6)), strict=True
    ):
        assert torch.equal(images.flip(-1), flipped)


class Noise:
    """A transform that draws from the generators of the process, as torchvision's v2 does."""

    threads: set[int]

    def __init__(self) -> None:
        self.threads = set()

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        self.threads.add(threading.get_ident())
        assert image.dtype == torch.uint8 and image.shape == (3, SIZE, SIZE)
        return image + torch.randint(3, (1,)) + np.random.randint(3)  # noqa: NPY002


def test_further_transforms_draw_the_same_in_threads_and_leave_training_its_numbers(
    root: Path,
) -> None:
    noise, made, left = Noise(), [], []
    for options in ({}, {"num_workers": 2}, {"decode_threads": 3}):
        torch.manual_seed(9)
        np.random.seed(9)  # noqa: NPY002
        made.append(batches(Loader(ImageFolder(root, [Train(SIZE), noise]), 6, **options)))
        left.append((torch.rand(1).item(), np.random.rand()))  # noqa: NPY002
    assert_equal(made[1], made[0])
    assert_equal(made[2], made[0])
    assert left[0] == left[1] == left[2]
    assert noise.threads == {threading.get_ident()}  # those of workers stay there


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_batches_that_draw_nothing_leave_training_its_numbers(
    root: Path, options: dict[str, Any]
) -> None:
    def drawn(iterator: Iterator[Any]) -> list[Any]:
        torch.manual_seed(9)
        np.random.seed(9)  # noqa: NPY002
        return [(torch.rand(1).item(), np.random.rand()) for _ in iterator]  # noqa: NPY002

    with Loader(ImageFolder(root, Train(SIZE)), batch_size=3, **options) as loader:
        assert drawn(iter(loader)) == drawn(iter(range(PHOTOGRAPHS // 3)))


@pytest.mark.parametrize("given", ["collate_fn", "target_transform"])
def test_other_code_of_the_users_stays_in_the_training_thread(root: Path, given: str) -> None:
    threads, made = set(), []

    def noted(value: Any) -> Any:
        threads.add(threading.get_ident())
        return value if given == "target_transform" else default_collate(value)

    for options in ({}, {"decode_threads": 2}):
        dataset = ImageFolder(root, Train(SIZE), noted if given == "target_transform" else None)
        collate = noted if given == "collate_fn" else None
        made.append(batches(Loader(dataset, 5, collate_fn=collate, **options)))
    assert threads == {threading.get_ident()}
    assert_equal(made[1], made[0])


@pytest.mark.parametrize("threads", [0, 2])
def test_resume_in_the_middle(root: Path, expected: list[Any], threads: int) -> None:
    def loader() -> Loader:
        dataset = ImageFolder(root, Train(SIZE, (0.4, 1)))
        return Loader(dataset, batch_size=5, seed=3, decode_threads=threads)

    made = []
    with loader() as first:
        for images, labels in first:
            made.append((images.clone(), labels))
            if len(made) == 2:
                state = first.state_dict()
                break
    made += batches(_resumed(loader(), state), 2)
    assert_equal(made, expected)


def _resumed(loader: Loader, state: dict[str, Any]) -> Loader:
    loader.load_state_dict(state)
    return loader


def test_an_epoch_that_is_left_ends_its_threads(root: Path) -> None:
    def running() -> int:
        return sum(thread.name.startswith("stoker-feed") for thread in threading.enumerate())

    with Loader(ImageFolder(root, Train(SIZE)), batch_size=2, decode_threads=3) as loader:
        iterator = iter(loader)
        next(iterator)
        assert running()
        for _ in zip(range(2), loader, strict=False):
            pass
        loader.set_epoch(5)
        seen = [meta for images, meta in loader]
        assert len(seen) == PHOTOGRAPHS // 2
        next(iter(loader))
    assert not running()


def damaged(root: Path, place: Path) -> Path:
    """Copy the images; a third of them does not decode, each for its own reason."""
    for number, path in enumerate(sorted(root.rglob("*.jpg"))):
        raw = path.read_bytes()
        bad = [raw[: len(raw) // 2], b"none", b"\xff\xd8\xff" + bytes(99)]
        own = place / path.relative_to(root)
        own.parent.mkdir(parents=True, exist_ok=True)
        own.write_bytes(bad[number % 3] if number % 4 == 1 else raw)
    return place


@pytest.mark.parametrize("way", ["alone", "2 workers", "3 threads"])
def test_bad_images_are_replaced_on_error(root: Path, tmp_path: Path, way: str) -> None:
    folder = damaged(root, tmp_path)
    made = []
    for options in ({}, WAYS.get(way, {})):
        dataset = ImageFolder(folder, Train(SIZE))
        with Loader(dataset, batch_size=6, on_error="skip", return_meta=True, **options) as loader:
            made.append([batch for _ in range(2) for batch in loader])
    for (images, labels, meta), (others, _, same) in zip(*made, strict=True):
        assert torch.equal(images, others) and (meta.ids == same.ids).all()
        assert (dataset.targets[meta.ids] == labels.numpy()).all()
        for image, index, position in zip(images, meta.ids, meta.positions, strict=True):
            assert decode_image(dataset.source.read([index])[0]).ndim == 3
            assert image.float().std() > 1, position


@pytest.mark.parametrize("options", [{}, {"decode_threads": 2}, {"num_workers": 1}])
def test_a_bad_image_raises_and_is_named(
    root: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    folder = damaged(root, tmp_path)
    with (
        Loader(ImageFolder(folder, Train(SIZE)), batch_size=6, **options) as loader,
        pytest.raises(SampleCorrupt, match=r"sample \d+ \(.*\.jpg\): .*do not decode"),
    ):
        list(loader)
    with pytest.raises(SampleCorrupt, match=r"sample 1 \(.*\.jpg\): .*do not decode"):
        ImageFolder(folder, Train(SIZE))[1]


def test_training_may_continue_after_a_bad_batch(root: Path, tmp_path: Path) -> None:
    """As with torch's own loader: the iterator gives the batches that come after it."""
    folder = damaged(root, tmp_path)
    with Loader(ImageFolder(folder, Train(SIZE)), batch_size=1, decode_threads=2) as loader:
        good, bad, iterator = 0, 0, iter(loader)
        while True:
            try:
                next(iterator)
                good += 1
            except SampleCorrupt:
                bad += 1
            except StopIteration:
                break
    assert (good, bad) == (PHOTOGRAPHS - 6, 6)


def test_samples_of_any_source_and_a_decoder(root: Path) -> None:
    raws = [path.read_bytes() for path in sorted(root.rglob("*.jpg"))]
    targets = np.arange(len(raws))
    encoded = SampleDataset(MemorySource(raws), transform=Train(SIZE), targets=targets)
    decoded = SampleDataset(
        MemorySource(raws), decode=decode_image, transform=[Train(SIZE)], targets=targets
    )
    one, other = (batches(Loader(data, batch_size=5)) for data in (encoded, decoded))
    assert_equal(one, other)
    with Feed(MemorySource(raws), 5, transform=Train(SIZE), targets=targets) as feed:
        assert_equal([(batch.data, batch.targets) for batch in feed], one)


def test_the_feeds_further_transforms_have_numbers_of_their_own(root: Path) -> None:
    drawn = []

    def then(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        drawn.append(rng.random())
        return image[:, ::2]

    with Feed(str(root), 5, transform=[Train(SIZE), then], decode_threads=0) as feed:
        assert all(batch.data.shape[1:] == (3, SIZE // 2, SIZE) for batch in feed)
    assert len(set(drawn)) == PHOTOGRAPHS
    flips = [value < 0.5 for value in drawn]
    assert 4 < sum(flips) < 20


def test_a_cached_data_set_without_a_loader(root: Path) -> None:
    with_threads = with_cache(ImageFolder(root, Eval(40, SIZE)), cache="8MiB")
    try:
        for _ in range(2):
            for place, (image, target) in enumerate(with_threads.__getitems__([4, 7])):
                plain, label = ImageFolder(root, Eval(40, SIZE))[[4, 7][place]]
                assert torch.equal(image, plain) and target == label
    finally:
        with_threads.close()


class Inverted(ImageFolder):
    """A data set with a decoder of its own."""

    def decode(self, data: memoryview) -> Any:
        return 255 - super().decode(data)


def test_a_decode_that_a_subclass_overrides_is_called(root: Path) -> None:
    own, inverted = (kind(root, Eval(SIZE, SIZE))[0][0] for kind in (ImageFolder, Inverted))
    assert (own.int() - (255 - inverted.int())).abs().max() <= 1


def test_the_limit_of_pixels_is_the_data_sets(root: Path) -> None:
    with pytest.raises(SampleCorrupt, match="more than 99 pixels"):
        ImageFolder(root, Train(SIZE), max_pixels=99)[0]


def test_rescored_batches_come_from_threads_too(root: Path) -> None:
    calls: list[int] = []

    def rescore(batch: Any) -> torch.Tensor:
        calls.append(len(batch[0]))
        return batch[0].float().mean((1, 2, 3))

    dataset = ImageFolder(root, Train(SIZE))
    with Loader(
        dataset, batch_size=6, decode_threads=2, recipe="impact", rescore=rescore
    ) as loader:
        for _ in range(2):
            for images, _ in loader:
                loader.observe(images.float().mean((1, 2, 3)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda root: ImageFolder(root, [np.asarray, Train(8)]), "only the first"),
        (lambda root: ImageFolder(root, [Train(8), 3]), "only the first"),
        (lambda root: ImageFolder(root, "flip"), "only the first"),
        (lambda root: ImageFolder(root, Train(8), output="array"), "makes tensors"),
        (lambda root: Feed(str(root), 4, transform=[Train(8), Eval(8, 8)]), "only the first"),
        (lambda root: Loader(ImageFolder(root), decode_threads=-1), "decode_threads=-1"),
        (lambda root: Loader(ImageFolder(root), num_workers=1, decode_threads=1), "none beside"),
        (lambda root: Normalize(std=(1, 1)), "three of each"),
        (lambda root: Normalize(std=(1, 1, 0)), "std above 0"),
        (lambda root: Normalize(dtype=torch.int8), "floating"),
        (lambda root: Normalize(layout="nchw"), "nchw"),
        (lambda root: Normalize()(torch.zeros(2, 3, 4, 4)), "takes uint8"),
        (lambda root: Normalize()(torch.zeros(2, 4, 4, 3, dtype=torch.uint8)), "3 channels"),
    ],
)
def test_what_makes_no_sense(root: Path, make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(root)


@pytest.fixture
def images() -> Iterator[torch.Tensor]:
    yield torch.arange(2 * 3 * 5 * 7).remainder(256).to(torch.uint8).reshape(2, 3, 5, 7)


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("layout", ["chw", "hwc"])
def test_normalize(images: torch.Tensor, dtype: torch.dtype, error: float, layout: Any) -> None:
    mean, std = torch.tensor([0.1, 0.4, 0.7]), torch.tensor([0.2, 0.3, 0.5])
    given = images if layout == "chw" else images.permute(0, 2, 3, 1).contiguous()
    made = Normalize(mean.tolist(), std.tolist(), dtype, layout=layout)(given)
    expected = (images / 255 - mean.view(-1, 1, 1)) / std.view(-1, 1, 1)
    assert made.dtype == dtype and made.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(made.float(), expected, atol=error, rtol=error)
    assert not Normalize().state_dict()


@pytest.mark.parametrize(
    "cast",
    [
        lambda model: model.to(torch.bfloat16),
        lambda model: model.half(),
        lambda model: model.to(torch.float64),
        lambda model: model.to("meta").to_empty(device="cpu"),
    ],
)
def test_a_cast_of_the_model_does_not_round_the_constants(images: torch.Tensor, cast: Any) -> None:
    expected = Normalize()(images)
    model = cast(torch.nn.Sequential(Normalize(), torch.nn.Identity()))
    assert model[0].scale.dtype == torch.float32
    torch.testing.assert_close(model(images), expected, rtol=0, atol=0)
    assert pickle.loads(pickle.dumps(model))(images).equal(expected)
