"""Images without a framework: encoded bytes to pixels."""

from stoker.images.decode import decode_image, to_pil

__all__ = ["decode_image", "to_pil"]
