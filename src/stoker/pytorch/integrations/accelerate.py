"""Hugging Face Accelerate: a Loader in the place of what ``accelerator.prepare`` makes of one.

::

    loader = stoker.Loader(dataset, 64, return_meta=True, recipe="shade")
    model, optimizer = accelerator.prepare(model, optimizer)
    for x, y, meta in prepare(loader, accelerator):
        with accelerator.accumulate(model):
            losses = cross_entropy(model(x), y, reduction="none")
            accelerator.backward(observe_and_weigh(loader, losses, meta))
            optimizer.step()
            optimizer.zero_grad()
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from accelerate import Accelerator
from accelerate.data_loader import DataLoaderStateMixin
from accelerate.state import GradientState
from accelerate.utils import send_to_device

from stoker.pytorch.integrations import check_returns_meta
from stoker.pytorch.loader import Loader

_END = object()


def prepare(loader: Loader, accelerator: Accelerator) -> PreparedLoader:
    """Return ``loader`` for use with ``accelerator``: batches on its device, the last one known.

    ``accelerator.prepare(loader)`` itself would read around the cache, and raises. Raises
    :class:`~stoker.errors.ConfigError` without ``return_meta=True``, as Accelerate draws a batch
    ahead.
    """
    check_returns_meta(loader)
    return PreparedLoader(loader, accelerator)


class PreparedLoader(DataLoaderStateMixin):  # type: ignore[misc]
    """A Loader whose batches lie on the accelerator's device; anything else is the Loader's.

    One batch is drawn ahead, so that gradient accumulation ends with the epoch. Used by one
    thread.
    """

    def __init__(self, loader: Loader, accelerator: Accelerator) -> None:
        self.loader = loader
        self.gradient_state = GradientState()
        self._handed_out = 0
        self._state: dict[str, Any] | None = None
        self._device = accelerator.device
        self._non_blocking = accelerator.non_blocking
        self._drop_last = True  # nothing is filled up that gather_for_metrics() would cut off

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        resumed, self._state = self._state, None
        if resumed is not None:
            self.loader.load_state_dict(resumed)
        self.begin()
        self._handed_out = 0
        try:
            batches = iter(self.loader)
            batch = next(batches, _END)
            if resumed is not None and batch is _END:  # that epoch was over
                batches = iter(self.loader)
                batch = next(batches, _END)
            while batch is not _END:
                batch = send_to_device(batch, self._device, non_blocking=self._non_blocking)
                following = next(batches, _END)
                self.end_of_dataloader = following is _END
                self._handed_out += 1
                yield batch
                batch = following
        finally:
            self.end()

    def state_dict(self) -> dict[str, Any]:
        """Return the Loader's state without the batch that is drawn ahead, which comes again."""
        if self._state is not None:
            return self._state
        return self.loader.state_dict(None if self.end_of_dataloader else self._handed_out)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume there when the next iteration begins; ``len()`` is of whole epochs until then.

        If nothing of that epoch is left, that iteration is the next epoch.
        """
        self._state = state_dict

    def __getattr__(self, name: str) -> Any:
        loader = self.__dict__.get("loader")
        if loader is None or name.startswith("__"):
            raise AttributeError(name)
        return getattr(loader, name)
