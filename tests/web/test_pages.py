"""The pages, as a browser without scripts sees them: what they show, what their forms do, and that they escape everything."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from html import unescape
from html.parser import HTMLParser
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from taskmesh import Status, TaskFailed, TaskMesh, TaskOption, current_task
from taskmesh.web import create_app
from tests.waiting import eventually
from tests.web.conftest import ORIGIN, browser
from tests.working import finished, working

NASTY = "<script>alert(1)</script>\"'&{{7*7}}"


class Outline(HTMLParser):
    """What matters of a page: its links, scripts, ids, labels, and whether its tags close."""

    VOID = frozenset({"meta", "link", "input", "br", "hr", "path", "rect", "option"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.ids: list[str] = []
        self.inline: list[str] = []
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "a":
            self.links.append(given.get("href") or "")
        self.loaded += [given[name] or "" for name in ("src",) if name in given]
        if tag == "link":
            self.loaded.append(given.get("href") or "")
        if given.get("id"):
            self.ids.append(given["id"] or "")
        self.inline += [name for name in given if name.startswith("on") or name == "style"]
        if tag == "style" or (tag == "script" and "src" not in given):
            self.inline.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open, f"</{tag}> closes nothing"
            assert self.open.pop() == tag


async def shown(client: httpx.AsyncClient, path: str, status: int = 200) -> str:
    answer = await client.get(path)
    assert answer.status_code == status, answer.text
    outline = Outline(answer.text)
    assert outline.open == []
    assert outline.inline == [], "the policy forbids it"
    assert len(outline.ids) == len(set(outline.ids)), "ids are unique"
    assert all(path.startswith("/") for path in outline.loaded), "nothing comes from elsewhere"
    return answer.text


async def told(client: httpx.AsyncClient, operation: str, **fields: Any) -> str:
    """Send a form, follow where it leads, and return what is told there."""
    answer = await client.post(f"/do/{operation}", data={"back": "/tasks", **fields})
    assert answer.status_code == 303, answer.text
    page = (await client.get(answer.headers["location"])).text
    match = re.search(r'<p class="told (good|bad)" role="status">(.*?)</p>', page, re.DOTALL)
    assert match is not None
    return f"{match[1]}: {match[2]}"


async def some_life(mesh: TaskMesh) -> None:
    @mesh.task
    async def work(what: str) -> Any:
        task = current_task()
        task.log(f"log {NASTY}")
        await task.progress(0.5, f"half {NASTY}")
        if what == "fail":
            raise TaskFailed(f"reason {NASTY}")
        return {"result": NASTY}

    for what in ("succeed", "fail"):
        await work.configure(group=NASTY[:200]).publish(f"{what} {NASTY}", what)
    async with working(mesh, f"w {NASTY}"):
        for what in ("succeed", "fail"):
            await finished(mesh, "work", f"{what} {NASTY}")
    await mesh.publish("work", "waiting", {"what": NASTY})
    await mesh.set_limit("default", running=5, group_running=2)
    await mesh.pause("default", reason=NASTY, by=NASTY)
    await mesh.every("work", cron="0 6 * * *", params={"what": NASTY}, schedule_id=NASTY)
    await mesh.schedules.pause(NASTY, reason=NASTY)


async def test_t43_whatever_users_put_into_keys_and_results_is_escaped(
    mesh: TaskMesh, client: httpx.AsyncClient
) -> None:
    await some_life(mesh)
    paths = [
        "/",
        "/tasks",
        f"/tasks?where=key:'{NASTY}",
        "/workers",
        "/queues",
        "/schedules",
        "/api",
        "/bulk",
        "/errors",
        "/doctor",
    ]
    links = Outline(await shown(client, "/tasks")).links
    paths += [link for link in links if link.startswith("/task?")]
    assert len(paths) == 13
    for path in paths:
        page = await shown(client, path)
        assert "<script>alert" not in page, path
    assert NASTY not in (await client.post("/do/task.get", data={"back": NASTY})).headers["location"]


async def test_a_task_shows_its_executions_reasons_logs_and_gates(mesh: TaskMesh, client: httpx.AsyncClient) -> None:
    @mesh.task
    async def work(what: str) -> Any:
        current_task().log("a line of the log")
        if what == "fail":
            raise TaskFailed("a good reason")
        return "a fine result"

    await work.publish("bad", "fail")
    await work.publish("good", "succeed")
    async with working(mesh, "w1"):
        await finished(mesh, "work", "bad")
        await finished(mesh, "work", "good")
    await work.publish("waiting", "later")
    bad = await shown(client, "/task?name=work&key=bad")
    assert "a good reason" in bad
    assert "a line of the log" in bad
    assert '<rect class="fail"' in bad
    good = await shown(client, "/task?name=work&key=good")
    assert "a fine result" in good
    assert '<rect class="success"' in good
    waiting = await shown(client, "/task?name=work&key=waiting")
    assert "Why is it not running?" in waiting
    assert "retries left" in waiting
    await shown(client, "/task?name=work&key=unknown", 404)
    await shown(client, "/task?name=not%20a%20name&key=k", 422)


async def test_the_banner_of_a_failure_says_what_was_raised_and_where_and_not_the_line_of_code(
    mesh: TaskMesh, client: httpx.AsyncClient
) -> None:
    @mesh.task(option=TaskOption(max_unexpected_retries=0))
    async def charge() -> None:
        raise KeyError("no such account")  # the secret is s3cr3t

    await charge.publish("k")
    async with working(mesh, "w1"):
        await finished(mesh, "charge", "k")
    page = await shown(client, "/task?name=charge&key=k")
    banner = re.search(r'<p class="told bad">(.*?)</p>', page, re.DOTALL)
    assert banner is not None
    text = unescape(re.sub(r"<[^>]+>", "", banner[1]))
    assert text.startswith("KeyError: 'no such account' at tests/web/test_pages.py:")
    assert text.endswith(" in charge")
    assert "s3cr3t" not in text


async def test_executions_are_drawn_inside_the_picture_from_the_first_start_to_the_last_end(
    mesh: TaskMesh, client: httpx.AsyncClient
) -> None:
    @mesh.task(option=TaskOption(max_unexpected_retries=1, unexpected_retry_delay_ms=300))
    async def fetch() -> None:
        raise ValueError("no")

    await fetch.publish("k")
    # As of a task that was published long before it was retried.
    tasks = mesh.store.driver.collection("tasks")
    await tasks.update_one({}, {"$set": {"task_state.create_time": datetime.now(UTC) - timedelta(hours=3)}})
    async with working(mesh, "w1"):
        await finished(mesh, "fetch", "k")
    page = await shown(client, "/task?name=fetch&key=k")
    bars = [(float(x), float(width)) for x, width in re.findall(r'<rect [^>]*x="([\d.]+)"[^>]* width="([\d.]+)"', page)]
    assert len(bars) == 2
    assert bars[0][0] == 0, "the picture begins with the first execution"
    assert all(x + width <= 1000 for x, width in bars), "the last failure is in the picture"
    assert "from <time" in page.partition('class="axis')[2]


async def test_errors_lead_to_the_tasks_and_to_their_retry(mesh: TaskMesh, client: httpx.AsyncClient) -> None:
    assert "Nothing fails" in await shown(client, "/errors")

    @mesh.task
    async def work(city: str) -> None:
        raise TaskFailed(f"it rained in {city!r}")

    await work.publish_many({f"k{n}": {"city": f"c{n}"} for n in range(3)})
    async with working(mesh, "w1"):
        for n in range(3):
            await finished(mesh, "work", f"k{n}")
    page = await shown(client, "/errors")
    assert "3 failed" in page
    links = Outline(page).links
    listed = next(link for link in links if link.startswith("/tasks?where="))
    assert "3 tasks match" in await shown(client, listed)
    retry = next(link for link in links if link.startswith("/bulk?action=retry"))
    assert "<b>3</b> tasks match" in await shown(client, retry)
    assert "Errors of other" in await shown(client, "/errors?name=other")
    assert "things were checked" in await shown(client, "/doctor")


async def test_the_errors_page_says_how_many_tasks_its_filter_fits_as_it_may_be_more_than_the_group(
    mesh: TaskMesh, client: httpx.AsyncClient
) -> None:
    @mesh.task(option=TaskOption(max_unexpected_retries=0))
    async def work(place: str) -> None:
        if place == "here":
            raise TimeoutError("no answer from the mail server")
        raise TimeoutError("no answer from the mail server")

    await work.publish_many(
        {f"{place}-{n}": {"place": place} for place, n_ in (("here", 2), ("there", 3)) for n in range(n_)}
    )
    async with working(mesh, "w1"):
        for key in ("here-0", "here-1", "there-0", "there-1", "there-2"):
            await finished(mesh, "work", key)

    async def says_so() -> bool:
        page = " ".join(re.sub(r"<[^>]*>", " ", await shown(client, "/errors")).split())
        groups = [page.partition(failed)[2].partition("one of them")[0] for failed in ("3 failed", "2 failed")]
        return all("Retry these and others like them … 5 tasks in all;" in group for group in groups)

    await eventually(says_so, what="both groups say so, once the server has a moment to count")


async def test_failures_with_long_reasons_full_of_quotes_are_retried_from_the_errors_page(
    mesh: TaskMesh, client: httpx.AsyncClient
) -> None:
    @mesh.task
    async def work() -> None:
        raise TaskFailed("'x'\"" * 100)

    await work.publish("k")
    async with working(mesh, "w1"):
        await finished(mesh, "work", "k")
    links = Outline(await shown(client, "/errors")).links
    retry = await shown(client, next(link for link in links if link.startswith("/bulk?action=retry")))
    assert "<b>1</b> task matches" in retry
    where = re.search(r'name="where" value="(.*?)"', retry)
    assert where is not None
    filter_ = unescape(where[1])
    assert len(filter_) > 500
    for path in ("/api/v1/tasks", "/api/v1/tasks/count"):
        assert (await client.get(path, params={"where": filter_})).status_code == 200
    assert (await told(client, "bulk.retry", where=filter_)) == "good: retry: 1 of 1 tasks"
    assert (await mesh.get("work", "k")).status == "INIT"


async def test_what_if_is_told_on_the_page_and_nothing_is_done(mesh: TaskMesh, client: httpx.AsyncClient) -> None:
    await mesh.publish("work", "k", specific_worker_ids=["nobody"])
    page = await shown(client, "/task?name=work&key=k&changes=%7B%22specific_worker_ids%22%3A+%5B%5D%7D&back=%2Ftask")
    assert "Nothing is changed yet" in page
    assert "back=" not in page.partition('name="back" value="')[2].partition('"')[0]
    await shown(client, "/task?name=work&key=k&changes=%7B", 422)
    page = await shown(client, "/queues?queue=default&running=0&rate=&per_ms=&group_running=")
    assert "1 wait, of which 1 could start now and 0 then" in page
    await shown(client, "/queues?queue=default&running=-1", 422)
    assert (await mesh.get("work", "k")).task_option.specific_worker_ids == ("nobody",)


async def test_a_copy_of_a_task_can_be_published_where_json_has_words_for_its_params(
    mesh: TaskMesh, client: httpx.AsyncClient
) -> None:
    await mesh.publish("work", "k", {"text": NASTY, "n": 1})
    await mesh.publish("work", "moment", {"at": datetime.now(UTC)})
    page = unescape(await shown(client, "/task?name=work&key=k"))
    params = re.search(r'<textarea name="params"[^>]*>(.*?)</textarea>', page, re.DOTALL)
    assert params is not None
    said = await told(client, "tasks.publish", name="work", key="copy", params=params[1])
    assert said.startswith("good: published: work copy")
    assert (await mesh.get("work", "copy")).params == {"text": NASTY, "n": 1}
    assert "Publish a copy" not in await shown(client, "/task?name=work&key=moment")


async def test_a_copy_is_published_with_the_settings_of_its_task(mesh: TaskMesh, client: httpx.AsyncClient) -> None:
    settings: dict[str, Any] = {
        "queue": "slow",
        "group": f"customer {NASTY}",
        "priority": 4,
        "run_timeout_ms": 5_000,
        "max_unexpected_retries": 0,
        "unexpected_retry_backoff": 2.5,
        "retain_failed_ms": None,
        "specific_worker_ids": ["w1", NASTY],
    }
    await mesh.publish("work", "k", **settings)

    @mesh.task(option=TaskOption(max_unexpected_retries=7, run_timeout_ms=1_000))
    async def known() -> None:
        return None

    await known.configure(run_timeout_ms=None, max_unexpected_retries=3).publish("k")
    for name in ("work", "known"):
        page = unescape(await shown(client, f"/task?name={name}&key=k"))
        offered = re.search(r'<textarea name="configuration"[^>]*>(.*?)</textarea>', page, re.DOTALL)
        assert offered is not None
        said = await told(client, "tasks.publish", name=name, key="copy", configuration=offered[1])
        assert said.startswith("good: published"), said
        original, copy = await mesh.get(name, "k"), await mesh.get(name, "copy")
        assert (copy.queue, copy.group, copy.task_option) == (original.queue, original.group, original.task_option)


async def test_forms_do_what_their_buttons_say(mesh: TaskMesh, client: httpx.AsyncClient) -> None:
    assert (await told(client, "tasks.publish", name="work", key="k", params='{"n": 1}')).startswith(
        "good: published: work k"
    )
    assert "was there already" in await told(client, "tasks.publish", name="work", key="k", params="{}")
    for field in ("params", "configuration"):
        said = await told(client, "tasks.publish", name="work", key="k2", **{field: "{"})
        assert said.startswith(f"bad: {field} must be JSON: "), said
    said = await told(client, "task.set_option", name="work", key="k", changes="{")
    assert said.startswith("bad: changes must be JSON: "), said
    assert await told(client, "task.cancel", name="work", key="k") == "good: cancel: k"
    assert (await mesh.get("work", "k")).status == "CANCELLED"
    assert await told(client, "task.retry", name="work", key="k") == "good: retry: k"
    assert (await told(client, "task.set_option", name="work", key="k", changes='{"priority": 4}')).startswith("good")
    assert (await mesh.get("work", "k")).task_option.priority == 4
    assert (await told(client, "task.retry", name="work", key="nobody")).startswith("bad: there is no task")
    assert (await told(client, "queue.pause", queue="default", reason="why not")).startswith("good")
    assert (await told(client, "queue.set_limit", queue="default", running="3", rate="", per_ms="")).startswith("good")
    (queue,) = await mesh.queues.all()
    assert (queue.paused_reason, queue.limits.running, queue.limits.rate) == ("why not", 3, None)
    form = {"queue": "default", "running": "", "rate": "4", "per_ms": "", "empty_takes_away": "yes"}
    assert (await told(client, "queue.set_limit", **form)).startswith("good")
    assert (await told(client, "queue.pause", queue="default", group="a", reason="")).startswith("good")
    (queue,) = await mesh.queues.all()
    assert (queue.limits.running, queue.limits.rate, queue.limits.per_ms) == (None, 4, 1_000)
    assert list(queue.paused_groups) == ["a"]
    assert "group a paused" in (await client.get("/queues")).text
    assert (
        await told(client, "schedule.declare", schedule_id="s", name="work", interval_ms="60000", cron="")
    ).startswith("good")
    assert (await told(client, "schedule.trigger", schedule_id="s")).startswith("good: published: work s@by-hand-")
    assert (await told(client, "no.such")).startswith("bad: there is no such operation")
    assert (await told(client, "stats")).startswith("bad")
    assert (await told(client, "task.delete", name="work", key="k")).startswith("good")


async def test_ticked_tasks_and_all_that_fit_a_filter_are_retried(mesh: TaskMesh, client: httpx.AsyncClient) -> None:
    await mesh.publisher.publish_many("work", {f"k:{n}": {} for n in range(6)})
    ticked = {"action": "cancel", "task": ["work:k:1", "work:k:2", "work:gone"], "back": "/tasks"}
    answer = await client.post("/do-selected", data=ticked)
    page = await shown(client, answer.headers["location"])
    assert "cancel: 2 of 3 tasks" in page
    asked = await shown(client, "/bulk?action=retry&where=status:CANCELLED")
    assert "<b>2</b> tasks match" in asked
    to_cancel = await shown(client, "/bulk?action=cancel&where=name:work")
    assert "<b>4</b> tasks match" in to_cancel, "two are finished"
    assert "name:work status:INIT,RUNNING" in to_cancel
    await shown(client, "/bulk?action=cancel&where=status:CANCELLED", 422)
    assert (await told(client, "bulk.retry", where="status:CANCELLED")) == "good: retry: 2 of 2 tasks"
    assert [action.by for action in await mesh.bulk.actions()] == ["the dashboard, from 127.0.0.1"]
    assert (await mesh.stats()).counts == {"work": {"INIT": 6}}
    actions = await shown(client, "/bulk")
    (undo,) = re.findall(r'name="id" value="(.*?)"', actions)
    assert "undone: retry of 2 tasks" in await told(client, "bulk.undo", id=undo)
    assert (await mesh.stats()).counts == {"work": {"INIT": 4, "CANCELLED": 2}}
    assert "Undo</button>" not in await shown(client, "/bulk")
    await shown(client, "/bulk?action=explode&where=status:FAIL", 404)
    await shown(client, "/bulk?action=retry&where=", 422)


async def test_a_stranger_among_the_ticked_ones_keeps_no_other_from_what_is_done(
    mesh: TaskMesh, client: httpx.AsyncClient
) -> None:
    for key in ("a", "b"):
        await mesh.publish("work", key)
    ticked = {"action": "cancel", "task": ["work:a", "no name of ours:x", "work:b"], "back": "/tasks"}
    await client.post("/do-selected", data=ticked)
    told = (await client.get("/tasks")).text
    assert "cancel: 2 of 3 tasks; a task&#39;s name must be" in told
    assert [(await mesh.get("work", key)).status for key in ("a", "b")] == [Status.CANCELLED] * 2


async def test_tasks_are_filtered_by_text_by_form_and_by_page(mesh: TaskMesh, client: httpx.AsyncClient) -> None:
    await mesh.publisher.publish_many("one", {f"a{n:02}": {} for n in range(60)})
    await mesh.publisher.publish_many("two", {"b": {}}, queue="other")
    page = await shown(client, "/tasks?where=name:one&order=key")
    assert "60 tasks match" in page
    (following,) = {link for link in Outline(page).links if "after=" in link}
    assert "a59" in await shown(client, following)
    for query in ("queue=other", "where=queue:other", "name=two&status=INIT", "where=name:two&key=b", "where=b"):
        page = await shown(client, f"/tasks?{query}")
        assert "1 task matches" in page, query
    both = await shown(client, "/tasks?where=status:ready&status=INIT")
    assert 'value="status:INIT"' in both, "the field of the form stands for what the text says of the status"
    page = await shown(client, "/tasks?where=colour:red", 422)
    assert 'role="alert"' in page
    await shown(client, "/tasks?after=nonsense", 422)


async def test_the_list_shows_tags(mesh: TaskMesh, client: httpx.AsyncClient) -> None:
    await mesh.publish("job", "k", {}, tags=["nightly", "<b>"])
    await mesh.store.driver.collection("tasks").update_one({"_id": "job:k"}, {"$push": {"tags": 7}})  # by a stranger
    page = (await client.get("/tasks")).text
    assert "nightly, &lt;b&gt;</td>" in page


async def test_the_overview_counts(mesh: TaskMesh, client: httpx.AsyncClient) -> None:
    assert "No tasks yet" in await shown(client, "/")
    await mesh.publisher.publish_many("work", {f"k{n}": {} for n in range(1_234)})

    async def counted() -> bool:
        return "1 234" in await shown(client, "/")

    await eventually(counted, what="the counts, which are kept for a moment, are those of now")


async def test_it_works_where_it_is_mounted_and_behind_a_proxy(mesh: TaskMesh) -> None:
    await mesh.publish("work", "k")
    mounted = Starlette(routes=[Mount("/ops/mesh", app=create_app(mesh))])
    behind = create_app(mesh, base_path="/ops/mesh")
    for app, under in ((mounted, "/ops/mesh"), (behind, "")):
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url=ORIGIN, headers={"Origin": ORIGIN}
        ) as client:
            for path in ("/", "/tasks", "/task?name=work&key=k"):
                answer = await client.get(under + path)
                assert answer.status_code == 200
                outline = Outline(answer.text)
                assert all(link.startswith(("/ops/mesh/", "#")) for link in outline.links), outline.links
                assert all(link.startswith("/ops/mesh/static/") for link in outline.loaded)
            answer = await client.post(f"{under}/do/task.cancel", data={"name": "work", "key": "k", "back": "/tasks"})
            assert answer.headers["location"] == "/ops/mesh/tasks"
            document = (await client.get(f"{under}/api/v1/openapi.json")).json()
            assert document["servers"] == [{"url": "/ops/mesh/api/v1"}]
            assert (await client.get(f"{under}/static/style.css")).status_code == 200


async def test_the_first_request_connects_a_mesh_that_is_not(mongo_uri: str, database: str) -> None:
    mesh = TaskMesh(mongo_uri, database=database)
    async with browser(mesh) as client:
        assert (await client.get("/readyz")).status_code == 200
        await shown(client, "/")
    await mesh.close()


async def test_without_a_database_pages_say_so() -> None:
    mesh = TaskMesh("mongodb://127.0.0.1:1/?serverSelectionTimeoutMS=300")
    async with browser(mesh) as client:
        assert (await client.get("/livez")).status_code == 200
        assert (await client.get("/readyz")).status_code == 503
        page = await shown(client, "/tasks", 503)
        assert "no MongoDB answers" in page


@pytest.mark.parametrize("name", ["../app.py", "style.css.map", "%2e%2e/pages.py"])
async def test_nothing_but_the_pages_own_files_is_served(client: httpx.AsyncClient, name: str) -> None:
    assert (await client.get(f"/static/{name}")).status_code == 404
