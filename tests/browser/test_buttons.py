"""What a click does: each button of the pages, with a real fleet behind them."""

from __future__ import annotations

import pytest
from playwright.async_api import Dialog, Page, expect

from taskmesh import TaskMesh
from taskmesh.model.task import Status
from tests.browser.site import Site
from tests.waiting import eventually
from tests.working import finished, status_is

pytestmark = pytest.mark.browser


async def accept(dialog: Dialog) -> None:
    """Say yes."""
    await dialog.accept()


async def dismiss(dialog: Dialog) -> None:
    """Say no."""
    await dialog.dismiss()


async def status_shown(page: Page, status: str) -> None:
    """Wait until the page of a task shows this status."""
    await expect(page.locator("#head .status").first).to_have_text(status)


async def test_retry_runs_a_failed_task_again(page: Page, site: Site, shop: TaskMesh) -> None:
    await shop.publish("mail.send", "order-1", {"to": "mia@example.org", "template": "shipped"})
    await status_is(shop, "mail.send", "order-1", Status.FAIL, 30)
    await page.goto("/task?name=mail.send&key=order-1")
    await expect(page.locator("#timeline")).to_contain_text("did not answer within 10 s")
    site.open("mail")
    await page.get_by_role("button", name="Retry").click()
    await expect(page.locator(".told")).to_have_text("retry: order-1")
    await status_shown(page, "succeeded")
    await expect(page.locator("#timeline")).to_contain_text("250 2.0.0 accepted")


async def test_cancel_asks_and_stops_what_runs(page: Page, shop: TaskMesh) -> None:
    await shop.publish("report.monthly", "2026-01", {"month": "2026-01"})
    await page.goto("/task?name=report.monthly&key=2026-01")
    await status_shown(page, "running")
    page.once("dialog", dismiss)
    await page.get_by_role("button", name="Cancel").click()
    assert (await shop.get("report.monthly", "2026-01")).status == "RUNNING"
    page.once("dialog", accept)
    await page.get_by_role("button", name="Cancel").click()
    await status_shown(page, "cancelled")
    assert (await shop.get("report.monthly", "2026-01")).status == "CANCELLED"
    await eventually(lambda: _idle(shop), 20, what="no worker runs it any more")


async def _idle(shop: TaskMesh) -> bool:
    task = await shop.get("report.monthly", "2026-01")
    return all(entry.state != "RUNNING" for entry in task.task_state.worker_states)


async def test_delete_asks_and_leads_back_to_the_list(page: Page, shop: TaskMesh) -> None:
    await shop.publish("image.resize", "to-delete", {"path": "a.jpg"}, delay_ms=3_600_000)
    await page.goto("/task?name=image.resize&key=to-delete")
    page.once("dialog", accept)
    await page.get_by_role("button", name="Delete").click()
    await page.wait_for_url("**/tasks")
    await expect(page.locator(".told")).to_contain_text("to-delete")
    assert await shop.listing.count("key:to-delete") == 0


async def test_ticked_tasks_are_cancelled_together_and_the_others_left(page: Page, shop: TaskMesh) -> None:
    await shop.publisher.publish_many(
        "image.resize", {f"tick-{n}": {"path": "a.jpg"} for n in range(4)}, delay_ms=3_600_000
    )
    await page.goto("/tasks?where=name:image.resize key:tick-")
    await expect(page.locator("#listing")).to_contain_text("4 tasks match")
    await page.get_by_label("Select all").check()
    await page.get_by_label("Select tick-2").uncheck()
    page.once("dialog", accept)
    await page.get_by_role("button", name="Cancel", exact=True).click()
    await expect(page.locator(".told")).to_contain_text("3 of 3")
    assert await shop.listing.count("key:tick- status:CANCELLED") == 3
    assert (await shop.get("image.resize", "tick-2")).status == "INIT"


async def test_all_that_fit_a_filter_are_counted_before_they_are_touched(page: Page, shop: TaskMesh) -> None:
    await shop.publisher.publish_many(
        "image.resize", {f"all-{n}": {"path": "a.jpg"} for n in range(3)}, delay_ms=3_600_000
    )
    await page.goto("/tasks?where=name:image.resize key:all-")
    await page.get_by_role("link", name="Cancel …").click()
    await expect(page.locator("main")).to_contain_text("3 tasks match")
    await page.get_by_role("button", name="Cancel 3").click()
    await expect(page.locator(".told")).to_contain_text("3 of 3")
    assert await shop.listing.count("key:all- status:CANCELLED") == 3
    page.once("dialog", accept)
    await page.get_by_role("button", name="Undo").first.click()
    await expect(page.locator(".told")).to_contain_text("undone: cancel of 3 tasks")
    assert await shop.listing.count("key:all- status:INIT") == 3


async def test_a_task_is_published_from_the_page(page: Page, shop: TaskMesh) -> None:
    await page.goto("/tasks")
    await page.get_by_text("Publish a task").click()
    form = page.locator("#publish")
    await form.get_by_label("Name", exact=True).fill("image.resize")
    await form.get_by_label("Key", exact=True).fill("by-hand <1>")
    await form.get_by_label("Name", exact=True).blur()
    await form.get_by_label("path").fill("original/1.jpg")
    await form.get_by_label("width").fill("400")
    await form.get_by_role("button", name="Publish").click()
    await expect(page.locator(".told.good")).to_contain_text("published: image.resize by-hand <1>")
    task = await finished(shop, "image.resize", "by-hand <1>")
    assert task.params == {"path": "original/1.jpg", "width": 400}


async def test_params_of_a_task_that_nobody_has_registered_are_json(page: Page) -> None:
    await page.goto("/tasks?publish=nobody.knows")
    form = page.locator("#publish")
    await form.get_by_label("Key", exact=True).fill("k")
    await form.get_by_label("Params").fill("{'path'")
    await form.get_by_role("button", name="Publish").click()
    await expect(page.locator(".told.bad")).to_contain_text("JSON")


async def test_filters_narrow_the_list(page: Page, shop: TaskMesh) -> None:
    await shop.publisher.publish_many(
        "image.resize", {f"fit-{n:02}": {"path": "a.jpg"} for n in range(60)}, delay_ms=3_600_000
    )
    await shop.publish("backup.verify", "fit-99", {"archive": "a.tar"}, delay_ms=3_600_000)
    await page.goto("/tasks")
    await page.locator("#where").fill("key:fit-")
    await page.locator("#where").press("Enter")
    await expect(page.locator("#listing")).to_contain_text("61 tasks match")
    await page.locator(".quick").get_by_role("link", name="image.resize").click()
    await expect(page.locator("#listing")).to_contain_text("60 tasks match")
    assert await page.locator("#where").input_value() == "name:image.resize key:fit-"
    await page.get_by_role("link", name="Next page").click()
    await expect(page.locator("table.rows tbody tr")).to_have_count(10)
    await page.get_by_role("link", name="Previous page").click()
    await expect(page.locator("table.rows tbody tr")).to_have_count(50)
    await page.locator(".quick").get_by_role("link", name="running", exact=True).click()
    await expect(page.locator("#listing")).to_contain_text("No task matches")
    await page.locator("#where").fill("colour:red")
    await page.get_by_role("button", name="Show").click()
    await expect(page.get_by_role("alert")).to_contain_text("colour")


async def test_a_queue_is_paused_with_a_reason_limited_and_resumed(page: Page, shop: TaskMesh) -> None:
    await shop.publish("image.resize", "paused-1", {"path": "a.jpg"}, queue="slow-disk", delay_ms=3_600_000)
    await page.goto("/queues")
    row = page.locator("tbody tr", has_text="slow-disk")
    await row.get_by_placeholder("why").fill("the disk is full")
    await row.get_by_role("button", name="Pause").click()
    await expect(row).to_contain_text("the disk is full")
    await row.locator("summary", has_text="Limits").click()
    await row.get_by_label("Running at once").fill("3")
    await row.get_by_role("button", name="Set limits").click()
    await expect(row).to_contain_text("0 of 3")
    await row.get_by_role("button", name="Resume").click()
    await expect(row).to_contain_text("open")
    (queue,) = [queue for queue in await shop.queues.all() if queue.queue == "slow-disk"]
    assert (queue.paused, queue.limits.running) == (False, 3)


async def test_a_worker_is_paused_resized_and_stopped(page: Page, site: Site, shop: TaskMesh) -> None:
    process = site.hire("cleo", "--concurrency", "5", "--queues", "nobody-uses-it")
    site.staffed("cleo")
    await page.goto("/workers")
    row = page.locator("tbody tr", has_text="cleo")
    await row.get_by_role("button", name="Pause").click()
    await expect(row.locator(".status")).to_have_text("paused")
    await row.get_by_role("button", name="Resume").click()
    await expect(row.locator(".status")).to_have_text("running")
    await row.get_by_label("Slots of cleo").fill("7")
    await row.get_by_role("button", name="Set slots").click()
    await expect(row).to_contain_text("0/7")
    page.once("dialog", accept)
    await row.get_by_role("button", name="Stop").click()
    await expect(row.locator(".status")).to_have_text("stopped")
    assert process.wait() == 0
    (worker,) = [worker for worker in await shop.workers() if worker.worker_id == "cleo"]
    assert not worker.live


async def test_a_schedule_is_declared_run_paused_and_removed(page: Page, shop: TaskMesh) -> None:
    await page.goto("/schedules")
    await page.get_by_text("Declare a schedule").click()
    await page.get_by_label("Name of the schedule").fill("nightly")
    await page.get_by_label("Name of the task").fill("backup.verify")
    await page.get_by_label("Cron, five fields").fill("0 3 * * *")
    await page.get_by_label("Params, as JSON").fill('{"archive": "a.tar"}')
    await page.get_by_role("button", name="Declare").click()
    row = page.locator("tbody tr", has_text="nightly")
    await row.get_by_role("button", name="Run now").click()
    await expect(row).to_contain_text("by hand")
    await row.get_by_role("button", name="Pause").click()
    await expect(row).to_contain_text("paused")
    page.once("dialog", accept)
    await row.get_by_role("button", name="Remove").click()
    await expect(row).to_have_count(0)
    assert await shop.schedules.all() == []


async def test_errors_lead_to_those_tasks_and_to_their_retry(page: Page, shop: TaskMesh) -> None:
    for key in ("lost-1", "lost-2"):
        await shop.publish("mail.send", key, {"to": f"{key} without an address", "template": "shipped"})
        await status_is(shop, "mail.send", key, Status.FAIL, 30)
    await page.goto("/")
    await page.get_by_role("navigation").get_by_role("link", name="Errors").click()
    group = page.locator("article", has_text="no such mailbox")
    await expect(group).to_contain_text("failed")
    await group.get_by_role("link", name="Show these and others like them").click()
    await expect(page.locator("#listing")).to_contain_text("lost-1")
    await page.go_back()
    await group.get_by_role("link", name="Retry these and others like them …").click()
    await expect(page.locator("main")).to_contain_text("Nothing else is touched")
    await page.get_by_role("link", name="Back").click()
    await expect(page.locator("#listing")).to_contain_text("lost-2")


async def test_what_a_change_would_do_is_told_before_it_is_done(page: Page, shop: TaskMesh) -> None:
    await shop.publish("image.resize", "what-if", {"path": "a.jpg"}, queue="dark", specific_worker_ids=["nobody"])
    await page.goto("/task?name=image.resize&key=what-if")
    await page.get_by_text("Change it").click()
    await page.get_by_label("Fields to change").fill('{"specific_worker_ids": []}')
    await page.get_by_role("button", name="What if?").click()
    await expect(page.locator(".told")).to_contain_text("could claim it then")
    assert (await shop.get("image.resize", "what-if")).task_option.specific_worker_ids == ("nobody",)
    await page.goto("/queues")
    row = page.locator("tbody tr", has_text="dark")
    await row.locator("summary", has_text="Limits").click()
    await row.get_by_label("Running at once").fill("0")
    await row.get_by_role("button", name="What if?").click()
    await expect(page.locator(".told")).to_contain_text("1 could start now and 0 then")
    (queue,) = [queue for queue in await shop.queues.all() if queue.queue == "dark"]
    assert queue.limits.running is None
