"""What the pages tell: in words that users know, what matters first, and nothing that says nothing."""

from __future__ import annotations

import re
from html import unescape

import anyio
import httpx

from taskmesh import TaskMesh, TaskOption
from tests.web.test_pages import shown, told
from tests.working import finished, working


async def test_pages_lead_back_to_the_one_before(mesh: TaskMesh, client: httpx.AsyncClient) -> None:
    await mesh.publisher.publish_many("work", {f"k{number:03}": {} for number in range(120)}, delay_ms=3_600_000)

    def keys(page: str) -> list[str]:
        return re.findall(r">(k\d{3})</a>", page)

    def link(page: str, rel: str) -> str | None:
        found = re.search(rf'rel="{rel}" href="([^"]*)"', page)
        return None if found is None else unescape(found[1])

    first = await shown(client, "/tasks?order=key")
    assert link(first, "prev") is None
    second = await shown(client, link(first, "next") or "")
    third = await shown(client, link(second, "next") or "")
    assert (len(keys(third)), link(third, "next")) == (20, None)
    again = await shown(client, link(third, "prev") or "")
    assert keys(again) == keys(second)
    assert keys(await shown(client, link(again, "prev") or "")) == keys(first)


async def test_a_list_tells_attempts_duration_and_worker_and_no_defaults(
    mesh: TaskMesh, client: httpx.AsyncClient
) -> None:
    @mesh.task(option=TaskOption(max_unexpected_retries=2, unexpected_retry_delay_ms=0))
    async def work() -> None:
        raise RuntimeError("boom")

    await work.publish("k")
    async with working(mesh, "w1"):
        await finished(mesh, "work", "k")
    [row] = (await mesh.listing.page()).tasks
    assert (row.executions, row.worker) == (3, "w1")
    assert row.took_ms is not None
    page = await shown(client, "/tasks")
    [listed] = re.findall(r'<tr data-key="work:k">.*?</tr>', page, re.DOTALL)
    assert '<td class="num minor">3</td>' in listed
    assert "/worker?id=w1" in listed
    assert "failed" in listed
    assert "default" not in listed
    one = await shown(client, "/task?name=work&key=k")
    assert one.count("RuntimeError: boom") == 2, "the banner, and one traceback for three that are equal"
    assert "and 2 times before alike" in one
    options = re.findall(r"<dt>(\w+)</dt>", one[one.index('id="option"') :])
    assert set(options[:2]) == {"max_unexpected_retries", "unexpected_retry_delay_ms"}, (
        "first what differs from the defaults"
    )


async def test_a_worker_has_a_page(mesh: TaskMesh, client: httpx.AsyncClient) -> None:
    started, ended = anyio.Event(), anyio.Event()

    @mesh.task
    async def work() -> None:
        started.set()
        await ended.wait()

    async with working(mesh, "w <1>") as consumer:
        await work.publish("running one")
        await started.wait()
        page = await shown(client, "/worker?id=w+%3C1%3E")
        assert "running one" in page
        assert "of one core" in page
        assert re.search(r"\d+ MB", page)
        assert "w &lt;1&gt;" in page
        ended.set()
        await finished(mesh, "work", "running one")
        del consumer
    assert "no worker" in await shown(client, "/worker?id=nobody", 404)


async def test_an_error_has_a_title_in_words(client: httpx.AsyncClient) -> None:
    assert "<h1>Not found</h1>" in await shown(client, "/task?name=work&key=nope", 404)
    assert "<title>Not found" in await shown(client, "/task?name=work&key=nope", 404)


async def test_schedules_are_told_in_words_and_tried_before_they_are_declared(
    mesh: TaskMesh, client: httpx.AsyncClient
) -> None:
    await mesh.every("work", schedule_id="s", cron="30 6 * * 1-5", timezone="Europe/Berlin")
    page = await shown(client, "/schedules")
    assert "At 06:30 on Monday through Friday (Europe/Berlin)" in page
    assert re.search(r"(Mon|Tue|Wed|Thu|Fri) \d{4}-\d\d-\d\d 06:30", page), "the next run, by its own clock"
    tried = await shown(client, "/schedules?name=work&schedule_id=t&cron=0+3+*+*+*&timezone=&interval_ms=&params=")
    assert tried.count(" 03:00,") + tried.count(" 03:00.") == 5
    assert 'value="0 3 * * *"' in tried, "what was typed stays"
    assert "cannot be read" in await shown(client, "/schedules?cron=whenever", 422)
    assert len(await mesh.schedules.all()) == 1


async def test_zeros_are_quiet_and_statuses_are_words(mesh: TaskMesh, client: httpx.AsyncClient) -> None:
    await mesh.publish("work", "k", delay_ms=3_600_000)
    page = await shown(client, "/")
    totals = page[page.index('id="totals"') : page.index('id="by-name"')]
    assert re.search(r'class="tile init".*?<b>1</b> pending', totals)
    assert re.search(r'class="tile fail zero".*?<b>0</b> failed', totals)
    assert "1 scheduled" in totals
    assert page.index('id="attention"') < page.index('id="now"') < page.index('id="totals"')
    for window, name in (("6h", "6 hours"), ("7d", "7 days"), ("nonsense", "15 minutes")):
        assert f"The last {name}" in await shown(client, f"/?window={window}")
    listed = await shown(client, "/tasks")
    for word in ("pending", "running", "succeeded", "failed", "cancelled", "expired"):
        assert f">{word}</a>" in listed


async def test_a_queue_that_was_a_slip_can_be_forgotten_on_its_page_and_one_with_tasks_cannot(
    mesh: TaskMesh, client: httpx.AsyncClient
) -> None:
    await mesh.publish("work", "k", queue="mail")
    await mesh.pause("mial")
    await mesh.pause("mail")

    async def forgettable() -> list[str]:
        forms = re.findall(r'action="/do/queue.forget".*?</form>', await shown(client, "/queues"), re.DOTALL)
        return re.findall(r'name="queue" value="(\w+)"', "".join(forms))

    assert await forgettable() == ["mial"]
    assert "good" in await told(client, "queue.forget", queue="mial")
    assert [queue.queue for queue in await mesh.queues.all()] == ["mail"]
    assert "bad: queue &#39;mail&#39; has unfinished tasks" in await told(client, "queue.forget", queue="mail")
    refused = await client.delete("/api/v1/queues/mail")
    assert refused.status_code == 409, "not 503: that says that the database is away, and to try again"
    assert "unfinished tasks" in refused.json()["message"]
