"""Pages follow what happens, without a reload: by server-sent events, over outages of the dashboard too."""

from __future__ import annotations

import asyncio
import signal
import time

import pytest
from playwright.async_api import Browser, Page, Route, expect

from taskmesh import TaskMesh
from tests.browser.site import Site, gate_to
from tests.browser.test_buttons import accept
from tests.waiting import eventually

pytestmark = pytest.mark.browser

MARK = "window.same = true"
SAME = "window.same === true"


async def test_a_task_is_followed_from_its_publishing_to_its_result(page: Page, site: Site, shop: TaskMesh) -> None:
    await shop.publish("report.monthly", "2026-02", {"month": "2026-02"}, delay_ms=3_600_000)
    await page.goto("/task?name=report.monthly&key=2026-02")
    await expect(page.locator("#head .status").first).to_have_text("scheduled")
    await expect(page.locator("#explain")).to_contain_text("Why is it not running?")
    await expect(page.locator("#live")).to_have_text("live")
    await page.evaluate(MARK)
    await shop.retry("report.monthly", "2026-02")
    await expect(page.locator("#head")).to_contain_text("reading orders")
    for step, what in enumerate(("adding up", "drawing charts", "writing the PDF")):
        site.open(f"2026-02.{step}")
        await expect(page.locator("#head")).to_contain_text(what)
    site.open("2026-02.3")
    await expect(page.locator("#head .status").first).to_have_text("succeeded")
    await expect(page.locator("#timeline")).to_contain_text("reports/2026-02.pdf")
    assert await page.evaluate(SAME), "it was the same page all the time"


async def test_a_killed_workers_task_is_seen_to_be_taken_over(page: Page, site: Site, shop: TaskMesh) -> None:
    doomed = site.hire("doomed")
    site.staffed("doomed")
    await shop.publish("video.transcode", "film-1", {"source": "film.mov"}, specific_worker_ids=["doomed"])
    await page.goto("/task?name=video.transcode&key=film-1")
    await expect(page.locator("#timeline")).to_contain_text("doomed")
    await shop.set_option("video.transcode", "film-1", specific_worker_ids=[])
    doomed.signal(signal.SIGKILL)
    site.open("film-1")
    await expect(page.locator("#timeline .status").first).to_have_text("lost")
    await expect(page.locator("#head .status").first).to_have_text("succeeded")
    await expect(page.locator("#timeline rect.lost").first).to_be_attached()
    await expect(page.locator("#timeline rect.success")).to_have_count(1)


async def test_the_list_and_the_overview_move_by_themselves(page: Page, shop: TaskMesh) -> None:
    await page.goto("/tasks?where=key:live-")
    await expect(page.locator("#listing")).to_contain_text("No task matches")
    await expect(page.locator("#live")).to_have_text("live")
    await shop.publisher.publish_many("image.resize", {f"live-{n}": {"path": "a.jpg"} for n in range(3)})
    await expect(page.locator("#listing .status.success")).to_have_count(3)
    await page.goto("/")
    await expect(page.locator("#curves")).to_be_visible()


async def test_what_a_reader_does_survives_a_refresh(page: Page, shop: TaskMesh) -> None:
    await shop.publisher.publish_many(
        "image.resize", {f"keep-{n}": {"path": "a.jpg"} for n in range(3)}, delay_ms=3_600_000
    )
    await page.goto("/tasks?where=key:keep-&order=key")
    await expect(page.locator("#live")).to_have_text("live")
    await page.get_by_label("Select keep-1").check()
    link = page.get_by_role("link", name="keep-2")
    await link.focus()
    await shop.cancel("image.resize", "keep-0")
    await expect(page.locator("#listing .status.cancelled")).to_have_count(1)
    await expect(page.get_by_label("Select keep-1")).to_be_checked()
    await expect(link).to_be_focused()


async def test_when_the_dashboard_is_away_the_page_says_so_and_catches_up(
    chromium: Browser, site: Site, shop: TaskMesh
) -> None:
    await shop.publish("image.resize", "away", {"path": "a.jpg"}, delay_ms=3_600_000)
    async with gate_to(site.url) as gate:
        context = await chromium.new_context(base_url=f"http://127.0.0.1:{gate.port}")
        page = await context.new_page()
        await page.goto("/task?name=image.resize&key=away")
        await expect(page.locator("#live")).to_have_text("live")
        gate.shut()
        await expect(page.locator("#live")).to_contain_text("reconnecting")
        await shop.cancel("image.resize", "away")
        await gate.open()
        await expect(page.locator("#live")).to_have_text("live")
        await expect(page.locator("#head .status").first).to_have_text("cancelled")
        await context.close()


async def test_a_task_that_is_deleted_meanwhile_is_no_longer_shown_as_if_it_were_there(
    page: Page, shop: TaskMesh
) -> None:
    await shop.publish("image.resize", "deleted", {"path": "a.jpg"}, delay_ms=3_600_000)
    await page.goto("/task?name=image.resize&key=deleted")
    await expect(page.locator("#live")).to_have_text("live")
    await shop.delete("image.resize", "deleted")
    await expect(page.locator("#notice")).to_contain_text("there is no task")


async def test_a_button_pressed_where_the_task_has_gone_tells_why(page: Page, shop: TaskMesh) -> None:
    await shop.publish("image.resize", "gone", {"path": "a.jpg"}, delay_ms=3_600_000)
    await page.goto("/task?name=image.resize&key=gone")
    page.once("dialog", accept)
    await shop.delete("image.resize", "gone")
    await page.get_by_role("button", name="Cancel").click()
    await expect(page.locator("main")).to_contain_text("there is no task")


async def test_what_is_typed_and_not_sent_yet_survives_a_refresh_and_is_what_is_sent(
    page: Page, site: Site, shop: TaskMesh
) -> None:
    site.hire("dora", "--concurrency", "5", "--queues", "nobody-uses-it")
    site.staffed("dora")
    await page.goto("/workers")
    row = page.locator("tbody tr", has_text="dora")
    await expect(page.locator("#live")).to_have_text("live")
    await row.get_by_label("Slots of dora").fill("50")
    await page.keyboard.press("Tab")
    button = row.get_by_role("button", name="Set slots")
    await expect(button).to_be_focused()
    await shop.pause_worker("dora")
    await expect(row.locator(".status")).to_have_text("paused")
    await expect(row.get_by_label("Slots of dora")).to_have_value("50")
    await expect(button).to_be_focused()
    await button.press("Enter")
    await expect(row).to_contain_text("0/50")


async def test_a_row_that_comes_or_goes_takes_nothing_from_its_neighbours(page: Page, shop: TaskMesh) -> None:
    names = ("between-1", "between-3")
    for name in names:
        await shop.publish("image.resize", name, {"path": "a.jpg"}, queue=name, delay_ms=3_600_000)
    await page.goto("/queues")
    await expect(page.locator("#live")).to_have_text("live")
    row = page.locator("tbody tr", has_text="between-3")
    await row.locator("summary").click()
    await row.get_by_label("Running at once").fill("3")
    await row.get_by_placeholder("why").fill("because")
    await row.locator("summary").focus()
    await shop.publish("image.resize", "between-2", {"path": "a.jpg"}, queue="between-2", delay_ms=3_600_000)
    new = page.locator("tbody tr", has_text="between-2")
    await expect(new).to_be_visible()
    await expect(new.get_by_placeholder("why")).to_have_value("")
    await expect(row.get_by_label("Running at once")).to_have_value("3")
    await expect(row.locator("summary")).to_be_focused()
    await shop.delete("image.resize", "between-1")
    await expect(page.locator("tbody tr", has_text="between-1")).to_have_count(0)
    await expect(row.get_by_placeholder("why")).to_have_value("because")
    await expect(row.locator("summary")).to_be_focused()
    await expect(row.get_by_label("Running at once")).to_be_visible()


async def test_a_refresh_between_press_and_release_loses_no_click(page: Page, shop: TaskMesh) -> None:
    await shop.publish("image.resize", "pressed", {"path": "a.jpg"}, delay_ms=3_600_000)
    await page.goto("/task?name=image.resize&key=pressed")
    await expect(page.locator("#live")).to_have_text("live")
    box = await page.get_by_role("button", name="Run now").bounding_box()
    assert box is not None
    await page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    await page.mouse.down()
    async with page.expect_response(lambda answer: "/task?" in answer.url):
        await shop.set_option("image.resize", "pressed", priority=7)
    await page.mouse.up()
    await expect(page.locator(".told")).to_have_text("retry: pressed")


async def test_what_was_held_back_for_a_press_or_a_selection_is_shown_behind_it(page: Page, shop: TaskMesh) -> None:
    await shop.publish("image.resize", "held", {"path": "a.jpg"}, delay_ms=3_600_000)
    await page.goto("/task?name=image.resize&key=held")
    await expect(page.locator("#live")).to_have_text("live")
    selected = "getSelection().toString().trim()"
    await page.evaluate("getSelection().selectAllChildren(document.querySelector('#head .status'))")
    async with page.expect_response(lambda answer: "/task?" in answer.url):
        await shop.cancel("image.resize", "held")
    await expect(page.locator("#explain")).to_be_hidden()  # what is not selected moves on
    assert await page.evaluate(selected) == "scheduled"
    await page.evaluate("getSelection().removeAllRanges()")
    await expect(page.locator("#head .status").first).to_have_text("cancelled")


async def test_a_chart_has_a_window_an_axis_and_its_values_under_the_pointer(page: Page) -> None:
    await page.goto("/")
    await page.get_by_role("link", name="6 hours").click()
    await expect(page.get_by_role("heading", name="The last 6 hours")).to_be_visible()
    figure = page.locator("#curves figure").nth(1)
    await expect(figure.locator(".scale li")).to_have_count(3)
    await expect(figure.locator(".when span")).to_have_count(3)
    box = await figure.locator("svg.curve").bounding_box()
    assert box is not None
    said = figure.locator("[data-said]")
    await page.mouse.move(box["x"] + box["width"] - 3, box["y"] + 20)
    await expect(said).to_contain_text("at ")
    await page.mouse.move(1, 1)
    await expect(said).to_have_text("")


HIDEABLE = """
Object.defineProperty(document, "hidden", { get: () => sessionStorage.getItem("hidden") === "yes" });
window.hide = (hidden) => {
  sessionStorage.setItem("hidden", hidden ? "yes" : "no");
  document.dispatchEvent(new Event("visibilitychange"));
};
"""
"""A headless browser shows all its tabs at once: so a tab says by itself whether it is seen."""


async def test_tabs_that_nobody_sees_take_no_connection_and_catch_up_when_they_are_seen(
    chromium: Browser, site: Site, shop: TaskMesh
) -> None:
    await shop.publish("image.resize", "tabs", {"path": "a.jpg"}, delay_ms=3_600_000)
    context = await chromium.new_context(base_url=site.url)
    await context.add_init_script(HIDEABLE)
    tabs = []
    for _ in range(8):  # two more than connections
        tab = await context.new_page()
        await tab.goto("/task?name=image.resize&key=tabs")
        await expect(tab.locator("#live")).to_have_text("live")
        await tab.evaluate("hide(true)")
        tabs.append(tab)
    first = tabs[0]
    await first.reload()  # opened in the background
    await shop.cancel("image.resize", "tabs")
    last = await context.new_page()
    await last.goto("/task?name=image.resize&key=tabs")
    await expect(last.locator("#live")).to_have_text("live")
    for tab in (first, tabs[1]):
        await tab.evaluate("hide(false)")
        await expect(tab.locator("#head .status").first).to_have_text("cancelled")
        await expect(tab.locator("#live")).to_have_text("live")
    await context.close()


async def test_a_page_that_takes_the_database_long_is_asked_for_the_more_seldom(page: Page, shop: TaskMesh) -> None:
    takes_s = 0.6
    asked: list[float] = []
    answered: list[float] = []

    async def slowly(route: Route) -> None:
        asked.append(time.monotonic())
        await asyncio.sleep(takes_s)  # as a filter that no index serves
        answered.append(time.monotonic())
        await route.continue_()

    await page.goto("/tasks?where=key:slow-")
    await expect(page.locator("#live")).to_have_text("live")
    await page.route("**/tasks?*", slowly)
    number = 0

    async def asked_often() -> bool:
        nonlocal number
        number += 1
        await shop.publish("image.resize", f"slow-{number}", {"path": "a.jpg"}, delay_ms=3_600_000)
        return len(asked) >= 3

    await eventually(asked_often, 60, what="the page was fetched three times")
    rests = [begun - ended for begun, ended in zip(asked[1:], answered, strict=False)]
    assert min(rests) >= 3.9 * takes_s
