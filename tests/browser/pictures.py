"""Screenshots in few bytes."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

from PIL import Image

_COLOURS = 128


def save(png: bytes, path: Path) -> None:
    """Write a screenshot with a small palette of its own: a fifth of the bytes, and the eye sees no difference."""
    with Image.open(BytesIO(png)) as picture:
        small = picture.convert("RGB").quantize(_COLOURS, dither=Image.Dither.NONE)
        small.save(path, optimize=True)
