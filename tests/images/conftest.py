"""Real image files."""

from pytorch.conftest import image_root, jpeg

__all__ = ["image_root", "jpeg"]
