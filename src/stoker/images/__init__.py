"""Images without a framework: encoded bytes to pixels, whole or cut and resized for training."""

from stoker.images.decode import EncodedImage, decode_image, to_pil
from stoker.images.transforms import Canvas, Eval, ImageTransform, Train, split

__all__ = [
    "Canvas",
    "EncodedImage",
    "Eval",
    "ImageTransform",
    "Train",
    "decode_image",
    "split",
    "to_pil",
]
