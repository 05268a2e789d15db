"""A dashboard with a token: the browser shows it once, and nobody reads it from the page or the address."""

from __future__ import annotations

from pathlib import Path

import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Browser, ViewportSize, expect

from tests.browser.conftest import PATIENCE_MS
from tests.browser.pictures import keep
from tests.browser.site import Site, opened

pytestmark = pytest.mark.browser
TOKEN = "a-token-that-is-long-enough"


async def test_the_token_opens_the_page_that_was_asked_for_until_log_out(
    chromium: Browser, site: Site, tmp_path: Path
) -> None:
    url = site.serve(TASKMESH_WEB_TOKEN=TOKEN)
    context = await chromium.new_context(base_url=url, viewport=ViewportSize(width=1200, height=420))
    context.set_default_timeout(PATIENCE_MS)
    watched = await opened(context, url)
    page = watched.page
    await page.goto("/workers")
    await expect(page).to_have_title("Token · taskmesh")
    await keep(page, "login", tmp_path)
    results = await Axe().run(page)
    assert results.violations_count == 0, results.generate_report()
    await expect(page.locator("input[name=token]")).to_be_focused()
    await page.keyboard.type("a wrong one")
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("alert")).to_have_text("Wrong token.")
    await expect(page.locator("input[name=token]")).to_be_focused()
    await page.keyboard.type(TOKEN)
    await page.keyboard.press("Enter")
    await page.wait_for_url("**/workers")
    await expect(page.locator("tbody")).to_contain_text("photo-1")
    await expect(page.locator("#live")).to_have_text("live")
    assert TOKEN not in str(await context.cookies()) + page.url + await page.content()
    await page.get_by_role("button", name="Log out").click()
    await expect(page).to_have_title("Token · taskmesh")
    await page.goto("/queues")
    await expect(page).to_have_title("Token · taskmesh")
    await context.close()
    assert watched.wrong == []


async def test_read_only_shows_everything_and_no_button_that_changes_anything(chromium: Browser, site: Site) -> None:
    async with site.mesh() as shop:
        await shop.publish("image.resize", "read-only", {"path": "a.jpg"}, delay_ms=3_600_000)
    url = site.serve("--read-only")
    context = await chromium.new_context(base_url=url)
    context.set_default_timeout(PATIENCE_MS)
    watched = await opened(context, url)
    page = watched.page
    for path in ("/", "/tasks", "/task?name=image.resize&key=read-only", "/workers", "/queues", "/schedules"):
        await page.goto(path)
        await expect(page.locator(".state")).to_contain_text("read-only")
        assert await page.locator("form[method=post] button, input[type=checkbox]").count() == 0, path
    await page.goto("/task?name=image.resize&key=read-only")
    await expect(page.get_by_role("link", name="JSON")).to_be_visible()
    await context.close()
    assert watched.wrong == []
