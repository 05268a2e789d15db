"""Screenshots: those that docs/web.md shows, in few bytes."""

from __future__ import annotations

import os
from io import BytesIO
from pathlib import Path

from PIL import Image
from playwright.async_api import Page, ViewportSize

SHOWN = frozenset(
    {"overview", "tasks", "task", "why", "bulk", "workers", "queues", "schedules", "api", "login", "errors", "doctor"}
    | {"overview-phone", "tasks-phone"}
)
"""What docs/web.md shows."""
_COLOURS = 128


async def keep(page: Page, name: str, otherwise: Path) -> None:
    """Keep a picture of the page: where `TASKMESH_SCREENSHOTS` says, else where nobody looks unless the test failed."""
    kept = os.environ.get("TASKMESH_SCREENSHOTS")
    directory = Path(kept) if kept and name in SHOWN else otherwise
    directory.mkdir(parents=True, exist_ok=True)
    width, height = await page.evaluate("[innerWidth, Math.max(innerHeight, document.documentElement.scrollHeight)]")
    await page.set_viewport_size(ViewportSize(width=width, height=height))  # what sticks to the bottom is at the bottom
    # A small palette of its own takes a third of the bytes, and the eye sees no difference.
    with Image.open(BytesIO(await page.screenshot())) as picture:
        small = picture.convert("RGB").quantize(_COLOURS, dither=Image.Dither.NONE)
        small.save(directory / f"{name}.png", optimize=True)
