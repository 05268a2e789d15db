"""Every page in light and dark, on a desk and on a phone: accessible by axe-core's rules, and nothing sticks out.

`make screenshots` runs this file alone, and keeps what it sees in docs/web/.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Literal
from urllib.parse import urlencode

import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Browser, Page, ViewportSize, expect

from tests.browser.conftest import PATIENCE_MS
from tests.browser.life import LONG_KEY, a_day
from tests.browser.pictures import save
from tests.browser.site import Site, opened

pytestmark = pytest.mark.browser

SCREENSHOTS = os.environ.get("TASKMESH_SCREENSHOTS")
PHONE = ViewportSize(width=390, height=844)
DESK = ViewportSize(width=1200, height=760)


def task(name: str, key: str) -> str:
    """Return the path of a task's page."""
    return "/task?" + urlencode({"name": name, "key": key})


PAGES = {
    "overview": "/",
    "tasks": "/tasks",
    "failed": "/tasks?where=status:FAIL",
    "task": task("video.transcode", "wedding-2026-11-14"),
    "running": task("report.monthly", "2026-10"),
    "why": task("price.import", "northern-lights-2026-q4"),
    "long-key": task("image.resize", LONG_KEY),
    "bulk": "/bulk?action=retry&where=status:FAIL",
    "workers": "/workers",
    "queues": "/queues",
    "schedules": "/schedules",
    "api": "/api",
    "not-there": task("video.transcode", "no-such-film"),
}


@pytest.fixture(scope="module")
async def day(site: Site) -> AsyncIterator[None]:
    """Something to show."""
    async with site.mesh() as shop:
        await a_day(site, shop)
        yield
        site.open("2026-10.2", "2026-10.3")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", PAGES)
@pytest.mark.usefixtures("day")
async def test_a_page_is_accessible_and_fits(
    name: str, scheme: Literal["light", "dark"], chromium: Browser, site: Site, tmp_path: Path
) -> None:
    """In light on a desk, in dark on a phone: two visits see both of both."""
    phone = scheme == "dark"
    context = await chromium.new_context(
        base_url=site.url,
        viewport=PHONE if phone else DESK,
        has_touch=phone,
        color_scheme=scheme,
        reduced_motion="reduce",
        timezone_id="UTC",
    )
    context.set_default_timeout(PATIENCE_MS)
    watched = await opened(context, site.url)
    page = watched.page
    await page.goto(PAGES[name])
    if name == "overview":
        await expect(page.locator("#curves polyline").first).to_be_attached()
    await _keep(page, f"{name}-phone" if phone else name, tmp_path)
    results = await Axe().run(page)
    assert results.violations_count == 0, results.generate_report()
    wider = await page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert wider <= 0, f"the page is {wider} px wider than the window"
    await context.close()
    assert watched.wrong == []


async def _keep(page: Page, name: str, otherwise: Path) -> None:
    """Keep a screenshot where `TASKMESH_SCREENSHOTS` says, else where nobody looks unless the test failed."""
    directory = Path(SCREENSHOTS) if SCREENSHOTS else otherwise
    directory.mkdir(parents=True, exist_ok=True)
    width, height = await page.evaluate("[innerWidth, Math.max(innerHeight, document.documentElement.scrollHeight)]")
    await page.set_viewport_size(ViewportSize(width=width, height=height))  # what sticks to the bottom is at the bottom
    save(await page.screenshot(), directory / f"{name}.png")
