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
from starlette.routing import Route

from taskmesh.web.pages import routes
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
    "slip-in-filter": "/tasks?where=status:SLOW",
    "publish": "/tasks?publish=image.resize",
    "flow": "/flow?key=album-2026-11",
    "bulk": "/bulk?action=retry&where=status:FAIL",
    "errors": "/errors",
    "doctor": "/doctor",
    "done-to-many": "/bulk",
    "workers": "/workers",
    "worker": "/worker?id=photo-1",
    "queues": "/queues",
    "queue-what-if": "/queues?queue=mail&rate=5&per_ms=1000",
    "schedules": "/schedules",
    "schedule-what-if": "/schedules?schedule_id=later&name=report.monthly&cron=0+6+*+*+1",
    "api": "/api",
    "not-there": task("video.transcode", "no-such-film"),
}


REFUSED = {"not-there": 404, "slip-in-filter": 422}
"""Pages that say what is wrong, by the status that they have."""
ELSEWHERE = {"/login": "test_token.py"}
"""Pages that another file shows to axe."""


def test_no_page_is_left_out() -> None:
    pages = {route.path for route in routes() if _shows(route)}
    shown = {path.partition("?")[0] for path in PAGES.values()}
    assert shown | ELSEWHERE.keys() == pages


def _shows(route: Route) -> bool:
    """Whether it shows something by itself: not what forms do, the stream of changes and what pages load."""
    return "GET" in (route.methods or ()) and route.path not in ("/publish", "/live", "/static/{name}")


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
    answer = await page.goto(PAGES[name])
    assert answer is not None
    assert answer.status == REFUSED.get(name, 200)
    if name == "overview":
        await expect(page.locator("#curves polyline").first).to_be_attached()
        if not phone:
            await _curves(page, site)
    await keep(page, f"{name}-phone" if phone else name, tmp_path)
    if not phone:
        await _tab_reaches_everything(page)
    results = await Axe().run(page)
    assert results.violations_count == 0, results.generate_report()
    wider = await page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert wider <= 0, f"the page is {wider} px wider than the window"
    await context.close()
    assert watched.wrong == []


async def _tab_reaches_everything(page: Page) -> None:
    """Whatever can be clicked can be reached and seen by the key Tab alone, in the order of the page."""
    reachable = await page.evaluate(_CLICKABLE)
    assert reachable, "each page has a menu at least"
    await page.evaluate("document.activeElement.blur(); getSelection().removeAllRanges()")
    reached: set[int] = set()
    for _ in range(len(reachable) + 20):
        await page.keyboard.press("Tab")
        if (number := await page.evaluate("[...(window.clickable || [])].indexOf(document.activeElement)")) >= 0:
            reached.add(number)
        if len(reached) == len(reachable):
            return
    assert [what for number, what in enumerate(reachable) if number not in reached] == []


_CLICKABLE = """() => {
  const seen = each => each.checkVisibility({visibilityProperty: true}) && !each.disabled && each.type !== "hidden"
  const all = [...document.querySelectorAll("a[href], button, input, select, textarea, summary, [onclick], [role=button]")]
  window.clickable = all.filter(each => seen(each) && !(each.type === "radio" && !each.checked))
  return window.clickable.map(each => each.outerHTML.slice(0, 200))
}"""


async def _curves(page: Page, site: Site) -> None:
    """Let something happen while the page watches, so that there is something to draw."""
    async with site.mesh() as shop:
        await expect(page.locator("#live")).to_have_text("live")
        for number in range(252, 256):
            await shop.publish("image.resize", f"2026/11/21/IMG_{number:04}.jpg", {"path": f"original/{number:04}.jpg"})
        await expect(page.locator("figcaption", has_text="Run: median")).not_to_contain_text("nothing yet")
        await expect(page.locator("figcaption", has_text="Wait: median")).not_to_contain_text("nothing yet")
