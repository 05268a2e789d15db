"""Nobody needs a mouse, nor scripts."""

from __future__ import annotations

import pytest
from playwright.async_api import Browser, Page, expect

from taskmesh import TaskMesh
from taskmesh.model.task import Status
from tests.browser.conftest import PATIENCE_MS
from tests.browser.site import Site
from tests.working import status_is

pytestmark = pytest.mark.browser


async def test_a_task_is_found_and_retried_by_keys_alone(page: Page, shop: TaskMesh) -> None:
    await shop.publish("mail.send", "order-77", {"to": "nobody", "template": "shipped"})
    await shop.publish("mail.send", "order-78", {"to": "nobody", "template": "shipped"})
    for key in ("order-77", "order-78"):
        await status_is(shop, "mail.send", key, Status.FAIL, 30)
    await page.goto("/")
    press = page.keyboard.press
    await press("g")
    await press("t")
    await page.wait_for_url("**/tasks")
    await press("/")
    await page.keyboard.type("key:order-7 status:fail")
    await press("Enter")
    await page.wait_for_url("**/tasks?where=key*")
    await expect(page.locator("#listing")).to_contain_text("2 tasks match")
    await page.locator("select[name=order]").focus()
    await press("Tab")
    for key, row in (("j", "order-78"), ("j", "order-77"), ("k", "order-78"), ("j", "order-77")):
        await press(key)
        await expect(page.locator("tr.at")).to_contain_text(row)
    await press("x")
    await expect(page.get_by_label("Select order-77")).to_be_checked()
    await press("Enter")
    await page.wait_for_url("**/task?**order-77")
    await tab_to(page, "Retry")
    await press("Enter")
    await expect(page.locator(".told").first).to_have_text("retry: order-77")  # it may have failed again by now


async def tab_to(page: Page, button: str) -> None:
    """Press Tab until a button has the focus, and see that one can see it."""
    for _ in range(60):
        await page.keyboard.press("Tab")
        if await page.evaluate("document.activeElement.textContent.trim()") == button:
            outline = await page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
            assert outline != "none", "the focus is seen"
            return
    raise AssertionError(f"Tab does not lead to {button}")


async def test_the_first_tab_leads_past_the_menu_and_the_question_mark_lists_the_keys(page: Page) -> None:
    await page.goto("/workers")
    await page.keyboard.press("Tab")
    assert await page.evaluate("document.activeElement.textContent") == "Skip to the content"
    await page.keyboard.press("Enter")
    assert await page.evaluate("document.activeElement.id") == "main"
    await page.keyboard.press("?")
    await expect(page.get_by_role("dialog")).to_be_visible()
    await page.keyboard.press("Escape")
    await expect(page.get_by_role("dialog")).to_be_hidden()


async def test_typing_into_a_field_is_no_shortcut(page: Page) -> None:
    await page.goto("/tasks")
    await page.locator("#where").fill("")
    await page.locator("#where").press_sequentially("gt?jkx/")
    assert await page.locator("#where").input_value() == "gt?jkx/"
    assert "/tasks" in page.url


async def test_without_scripts_everything_is_shown_and_done_all_the_same(
    chromium: Browser, site: Site, shop: TaskMesh
) -> None:
    await shop.publish("image.resize", "no-script", {"path": "a.jpg"}, delay_ms=3_600_000)
    context = await chromium.new_context(base_url=site.url, java_script_enabled=False)
    context.set_default_timeout(PATIENCE_MS)
    page = await context.new_page()
    await page.goto("/tasks?where=key:no-script")
    await page.get_by_role("link", name="no-script", exact=True).click()
    await page.get_by_role("button", name="Cancel").click()
    await expect(page.locator(".told")).to_have_text("cancel: no-script")
    await expect(page.locator("#head .status").first).to_have_text("cancelled")
    await context.close()
