"""What several commands take: recipes, sizes, addresses and times as a user gives them."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from stoker import recipes
from stoker.errors import ConfigError
from stoker.sampler.base import as_sampler
from stoker.sim.replay import IMAGENET_MEAN, as_cached
from stoker.source.base import Source
from stoker.source.open import open_image_folder, open_source

DATALOADER = "dataloader"
"""Names torch's own DataLoader, without a cache, beside the recipes of Stoker's Loader."""
SIZES_HELP = (
    "equal; lognormal:MEAN,SIGMA in bytes (ImageNet: 110000,0.6); or a FILE, .npy or text with a "
    "number per line. Sizes are drawn from the file unless it has one for each sample."
)
_WAY_OUT = "give equal, lognormal:MEAN,SIGMA or a file of sizes"
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def choose_recipes(names: str, *, is_trained: bool = True) -> list[str]:
    """Return the recipes named in ``"lru,minio"``, or for ``"all"`` those that keep to the cache.

    "all" leaves out the oracle, which caches everything whatever the size, recipes whose libraries
    are not installed, and with ``is_trained=False`` recipes that learn from training. Raises
    ConfigError, which lists the known names, for an unknown name, for none, or for a recipe that
    has to be trained.
    """
    if names == "all":
        kept = [name for name in recipes.names() if not recipes.get(name).preload]
        return [n for n in kept if (is_trained or not _learns(n)) and _is_installed(n)]
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    if not chosen:
        known = ", ".join(recipes.names())
        raise ConfigError(f"--recipes {names!r} names none: use all, or some of {known}")
    for name in chosen:
        recipes.get(name)
        if not is_trained and _learns(name):
            raise ConfigError(
                f"recipe {name!r} learns from training, and this command does not train: "
                "use stoker demo"
            )
    return chosen


def choose_loaders(names: str, *, with_dataloader: bool) -> list[str]:
    """Return the recipes named in ``names``, preceded by DATALOADER if ``with_dataloader``.

    ``"dataloader"`` may be among the names; alone it stands for no recipe at all. Raises
    ConfigError as :func:`choose_recipes` does, and if DATALOADER is named but not wanted.
    """
    given = [name.strip() for name in names.split(",")]
    if DATALOADER not in given:
        return [DATALOADER] * with_dataloader + choose_recipes(names)
    if not with_dataloader:
        raise ConfigError(f"--recipes {names!r} names {DATALOADER!r}: leave out --no-dataloader")
    rest = ",".join(name for name in given if name and name != DATALOADER)
    return [DATALOADER, *(choose_recipes(rest) if rest else [])]


def _is_installed(name: str) -> bool:
    """Whether the libraries that a recipe scores with are installed."""
    try:
        recipes.get(name).scorer(1)
    except ConfigError:
        return False
    return True


def _learns(name: str) -> bool:
    """Whether what a recipe visits, keeps or serves depends on what training shows of samples."""
    recipe = recipes.get(name)
    made = recipe.sampler(1, seed=0, shuffle=True, pad_to=1, drop_last=False, epochs=1)
    follows = recipe.policy.follows_scores
    return follows or recipe.substitution is not None or as_sampler(made).uses_scores


def draw_sizes(text: str, num_samples: int, seed: int) -> NDArray[np.int64]:
    """Return i64[num_samples] bytes as ``--sizes`` says; raises ConfigError for a bad value."""
    kind, _, rest = text.partition(":")
    rng = np.random.default_rng([seed, 0x512E])
    if text == "equal":
        return np.full(num_samples, IMAGENET_MEAN, np.int64)
    if kind == "lognormal":
        mean, sigma = _two_numbers(text, rest)
        drawn = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, num_samples)
        return np.maximum(1, np.rint(drawn)).astype(np.int64)
    known = _read_sizes(text)
    return known if len(known) == num_samples else rng.choice(known, num_samples)


def draw_cached(text: str, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return i64[N], what ``--cached-sizes`` makes of ``sizes``; ConfigError for a bad value."""
    try:
        factor = float(text)
    except ValueError:
        return as_cached(_read_sizes(text, "--cached-sizes", "give a factor or a file"), sizes)
    return as_cached(factor, sizes)


def _two_numbers(text: str, rest: str) -> tuple[float, float]:
    try:
        mean, sigma = (float(part) for part in rest.split(","))
    except ValueError:
        mean = sigma = -1.0
    if not (0 < mean < 2**32 and 0 <= sigma <= 4):
        raise ConfigError(f"--sizes {text!r} is invalid: {_WAY_OUT}, with bytes and 0 to 4")
    return mean, sigma


def _read_sizes(text: str, name: str = "--sizes", way_out: str = _WAY_OUT) -> NDArray[np.int64]:
    path = Path(text)
    if not path.is_file():
        raise ConfigError(f"{name} {text!r} is invalid: {way_out}")
    try:
        found = np.load(path) if path.suffix == ".npy" else np.loadtxt(path, ndmin=1)
    except ValueError as error:
        raise ConfigError(f"{name} {text!r} cannot be read ({error}): {way_out}") from error
    if found.ndim != 1 or not len(found) or not (found >= 1).all():
        raise ConfigError(f"{name} {text!r} has no sizes of 1 byte or more: {way_out}")
    return np.rint(found).astype(np.int64)


def open_url(url: str, image_folder: bool, options: tuple[str, ...]) -> Source:
    """Return the source at ``url``; ``options`` are ``NAME=VALUE`` for the object store.

    ``image_folder``: it has class folders. Raises ConfigError for a malformed option, and what
    :func:`open_source` raises. The caller closes the source.
    """
    named = {"storage_options": named_options(options)} if options else {}
    return (open_image_folder if image_folder else open_source)(url, **named)


def named_options(options: tuple[str, ...], flag: str = "--option") -> dict[str, str]:
    """Return what ``NAME=VALUE`` says by name; ConfigError for one that is malformed."""
    pairs = [option.partition("=") for option in options]
    for name, equals, _ in pairs:
        if not (name and equals):
            raise ConfigError(f"{flag} {name!r} is invalid: give it as NAME=VALUE")
    return {name: value for name, _, value in pairs}


@contextmanager
def bytes_bar(what: str, total: int, *, shown: bool) -> Iterator[Callable[[int, int], None]]:
    """Show a bar of ``total`` bytes; yield the function that advances it, by samples and bytes."""
    columns = (
        TextColumn("[progress.description]{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not shown) as progress:
        task = progress.add_task(what, total=total)
        yield lambda samples, size: progress.advance(task, size)


def need_torch(command: str) -> None:
    """Raise ConfigError, which says how to install it, if torch is missing; does not import it."""
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(
            f"stoker {command} needs torch, which is not installed: pip install 'stoker[torch]'"
        )


def as_seconds(ctx: click.Context, param: click.Parameter, value: str) -> float:
    """Return a time such as ``5ms``, ``200us`` or ``0.1s`` in seconds; else raises BadParameter."""
    match = re.fullmatch(r"\s*([0-9]+\.?[0-9]*|\.[0-9]+)\s*(us|ms|s)\s*", value)
    if match is None:
        raise click.BadParameter(f"{value!r} is not a time: give one like 5ms or 0.1s")
    return float(match[1]) * _SECONDS[match[2]]
