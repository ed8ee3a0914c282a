"""What sources of class folders have in common, wherever the folders are."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from stoker.errors import ConfigError
from stoker.shared import SharedArray
from stoker.source.packed import Offsets


class ClassFolders:
    """Classes and targets of a source whose samples come class by class."""

    def _hold_classes(self, classes: tuple[str, ...], class_sizes: Offsets) -> None:
        """Keep the class names, and how many samples each has."""
        self._classes = classes
        targets = np.repeat(np.arange(len(classes)), class_sizes)
        self._targets = SharedArray.copy_of(targets, "targets")

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names, sorted; the place in it is the target."""
        return self._classes

    @property
    def class_to_idx(self) -> dict[str, int]:
        """The target of each class name."""
        return {name: target for target, name in enumerate(self._classes)}

    @property
    def targets(self) -> npt.NDArray[np.int64]:
        """The target of each sample, i64[N], read-only."""
        return self._targets.read_only


def check_extensions(extensions: tuple[str, ...]) -> None:
    """Raise ConfigError for a lone extension, or none."""
    if isinstance(extensions, str) or not extensions:
        raise ConfigError(f'extensions={extensions!r}: give a tuple like (".jpg", ".png")')
