"""Every page in light and dark, on a desk and on a phone: accessible by axe-core's rules, and nothing sticks out.

`make screenshots` runs this file alone, and keeps what it sees in docs/web/.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Literal
from urllib.parse import urlencode

import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Browser, Page, ViewportSize, expect

from tests.browser.conftest import PATIENCE_MS
from tests.browser.life import LONG_KEY, a_day
from tests.browser.pictures import keep
from tests.browser.site import Site, opened

pytestmark = pytest.mark.browser

PHONE = ViewportSize(width=360, height=780)
DESK = ViewportSize(width=1200, height=560)


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
    "errors": "/errors",
    "doctor": "/doctor",
    "done-to-many": "/bulk",
    "workers": "/workers",
    "worker": "/worker?id=photo-1",
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
        if not phone:
            await _curves(page, site)
    await keep(page, f"{name}-phone" if phone else name, tmp_path)
    results = await Axe().run(page)
    assert results.violations_count == 0, results.generate_report()
    wider = await page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert wider <= 0, f"the page is {wider} px wider than the window"
    await context.close()
    assert watched.wrong == []


async def _curves(page: Page, site: Site) -> None:
    """Let something happen while the page watches, so that there is something to draw."""
    async with site.mesh() as shop:
        await expect(page.locator("#live")).to_have_text("live")
        for number in range(252, 256):
            await shop.publish("image.resize", f"2026/11/21/IMG_{number:04}.jpg", {"path": f"original/{number:04}.jpg"})
        await expect(page.locator("figcaption", has_text="Run: median")).not_to_contain_text("nothing yet")
        await expect(page.locator("figcaption", has_text="Wait: median")).not_to_contain_text("nothing yet")
