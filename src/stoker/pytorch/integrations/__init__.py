"""Frameworks that run the training loop themselves, and draw batches ahead of the step.

One module each, imported by name and only where its framework is installed. What they share: the
batch carries its :class:`~stoker.pytorch.Meta`, and losses are observed with it.
"""

from stoker.pytorch.integrations.weigh import observe_and_weigh

__all__ = ["observe_and_weigh"]
