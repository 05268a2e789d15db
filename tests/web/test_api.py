"""The REST API: everything the command line can do, and every refusal as a status that says why."""

from __future__ import annotations

import re
from base64 import b64encode
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

import anyio
import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from taskmesh import TaskFailed, TaskMesh, TaskOption
from taskmesh.web import create_app
from taskmesh.web.api import _event_lines
from tests.waiting import eventually
from tests.web.conftest import ORIGIN, browser
from tests.working import finished, working

API = "/api/v1"


async def ask(client: httpx.AsyncClient, method: str, path: str, status: int = 200, **request: Any) -> Any:
    if "{" in path:
        given = dict(request.pop("params"))
        path = re.sub(r"{(\w+)}", lambda found: quote(given.pop(found[1]), safe=""), path)
        request |= {"params": given} if given else {}
    answer = await client.request(method, API + path, **request)
    assert answer.status_code == status, answer.text
    return answer.json()


async def test_a_task_is_published_run_looked_at_and_deleted(mesh: TaskMesh, client: httpx.AsyncClient) -> None:
    @mesh.task(queue="math")
    async def double(n: int) -> dict[str, Any]:
        return {"n": 2 * n, "when": datetime(2026, 1, 1, tzinfo=UTC), "big": 2**60}

    told = await ask(
        client,
        "POST",
        "/tasks",
        json={"name": "double", "key": "a/b c", "params": {"n": 21}, "configuration": {"priority": 3}},
    )
    assert told["created"]
    assert any("no worker is alive" in warning for warning in told["warnings"])
    task = {"name": "double", "key": "a/b c"}
    explained = await ask(client, "GET", "/tasks/{name}/{key}/explain", params=task)
    assert explained[0]["gates"]
    [waiting] = await ask(
        client, "GET", "/workers/{worker_id}/explain", params={"worker_id": "nobody", "name": "double"}
    )
    assert (waiting["tasks"], waiting["example_key"]) == (1, "a/b c")
    assert waiting["shut"] == []
    async with working(mesh):
        await (await mesh.publish("double", "a/b c", {"n": 21})).result(timeout=60)
    found = await ask(client, "GET", "/tasks/{name}/{key}", params=task)
    assert (found["status"], found["queue"], found["task_option"]["priority"]) == ("SUCCESS", "math", 3)
    returns = found["task_state"]["worker_states"][0]["returns"]
    assert returns == {"n": 42, "when": "2026-01-01T00:00:00.000Z", "big": str(2**60)}
    assert (await ask(client, "POST", "/tasks/{name}/{key}/retry", params=task))["status"] == "INIT"
    changed = await ask(client, "PATCH", "/tasks/{name}/{key}/option", params=task, json={"changes": {"priority": -1}})
    assert changed["task_option"]["priority"] == -1
    assert (await ask(client, "PATCH", "/tasks/{name}/{key}/option", params=task, json={"changes": {}}))[
        "status"
    ] == "INIT"
    assert (await ask(client, "POST", "/tasks/{name}/{key}/cancel", params=task))["status"] == "CANCELLED"
    assert (await ask(client, "DELETE", "/tasks/{name}/{key}", params=task))["key"] == "a/b c"
    refused = await ask(client, "GET", "/tasks/{name}/{key}", 404, params=task)
    assert refused["error"] == "TaskNotFound"
    assert "a/b c" in refused["message"]


async def test_pages_of_a_listing_show_each_task_once(mesh: TaskMesh, client: httpx.AsyncClient) -> None:
    await mesh.publisher.publish_many("work", {f"k{n:03}": {"secret": "params"} for n in range(25)})
    for newest in ("true", "false"):
        seen: list[str] = []
        after: dict[str, str] = {}
        while True:
            where = {"where": "name:work", "limit": "10", "newest_first": newest}
            page = await ask(client, "GET", "/tasks", params=where | after)
            seen += [task["key"] for task in page["tasks"]]
            assert "secret" not in str(page)
            if page["following"] is None:
                break
            after = {"after": page["following"]}
        assert sorted(seen) == [f"k{n:03}" for n in range(25)]
    assert await ask(client, "GET", "/tasks/count", params={"where": "key:k00"}) == {"count": 10}


async def test_bulk_actions_count_before_they_act(client: httpx.AsyncClient) -> None:
    await ask(client, "POST", "/tasks/many", json={"name": "work", "params_by_key": {f"k{n}": {} for n in range(5)}})
    body = {"where": "name:work", "dry_run": True}
    assert (await ask(client, "POST", "/bulk/cancel", json=body))["matched"] == 5
    assert (await ask(client, "POST", "/bulk/cancel", json=body | {"dry_run": False}))["done"] == 5
    assert (await ask(client, "POST", "/bulk/retry", json={"where": "status:CANCELLED key:k1"}))["done"] == 1
    assert (await ask(client, "POST", "/bulk/purge", json={}))["done"] == 4
    assert (await ask(client, "POST", "/bulk/delete", 422, json={"where": ""}))["error"] == "InvalidOption"


async def test_who_does_what_to_many_is_listed_and_whether_it_can_be_undone(client: httpx.AsyncClient) -> None:
    await ask(client, "POST", "/tasks/many", json={"name": "work", "params_by_key": {f"k{n}": {} for n in range(3)}})
    cancelled = await ask(client, "POST", "/bulk/cancel", json={"where": "name:work", "by": "ann"})
    retried = await ask(client, "POST", "/bulk/retry", json={"where": "name:work", "by": "bob", "undo": False})
    assert (await ask(client, "POST", "/bulk/purge", json={"by": "cron"}))["done"] == 0
    assert (cancelled["id"] is not None, retried["id"]) == (True, None)
    listed = await ask(client, "GET", "/bulk")
    told = {each["action"]: (each["by"], each["undoable"]) for each in listed}
    assert (told["cancel"], told["retry"], told["purge"]) == (("ann", True), ("bob", False), ("cron", False))


async def test_who_does_what_to_single_things_is_written_down_when_it_is_done(mesh: TaskMesh) -> None:
    await mesh.publish("work", "k")
    task = {"name": "work", "key": "k"}
    user = {"X-Forwarded-User": "mia@shop.example"}
    async with browser(mesh, user_header="X-Forwarded-User") as client:
        await ask(client, "POST", "/tasks/{name}/{key}/cancel", params=task, headers=user)
        await ask(client, "POST", "/tasks/{name}/{key}/cancel", 404, params=task | {"key": "other"}, headers=user)
        await client.post("/do/queue.set_limit", data={"queue": "slow", "running": "3"}, headers=user)
        await client.post("/do-selected", data={"action": "retry", "task": "work:k"})
        claimed = {"where": "name:work", "by": "somebody else"}
        forged = {"changes": {"priority": 1, "by": "somebody else"}}
        await ask(client, "PATCH", "/tasks/{name}/{key}/option", 422, params=task, json=forged, headers=user)
        await ask(client, "POST", "/bulk/cancel", json=claimed, headers=user)
        listed = [(each["action"], each["about"], each["by"]) for each in await ask(client, "GET", "/actions")]
        assert listed == [
            ("task.retry", "name 'work', key 'k'", "the dashboard, from 127.0.0.1"),
            ("queue.set_limit", "queue 'slow', running 3", "mia@shop.example"),
            ("task.cancel", "name 'work', key 'k'", "mia@shop.example"),
        ]
        [bulk] = await ask(client, "GET", "/bulk")
        assert (bulk["action"], bulk["by"]) == ("cancel", "mia@shop.example")
        page = (await client.get("/bulk")).text
        assert "mia@shop.example" in page
        assert "queue.set_limit" in page


async def test_a_header_that_says_who_asks_is_not_believed_unless_it_was_named(
    mesh: TaskMesh, client: httpx.AsyncClient
) -> None:
    await mesh.publish("work", "k")
    user = {"X-Forwarded-User": "mia@shop.example"}
    await ask(client, "POST", "/tasks/{name}/{key}/cancel", params={"name": "work", "key": "k"}, headers=user)
    [noted] = await mesh.audit.actions()
    assert noted.by == "the dashboard, from 127.0.0.1"


async def test_it_is_logged_who_changes_what_and_no_params(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "taskmesh.web")
    task = {"name": "work", "key": "k"}
    await ask(client, "POST", "/tasks", json={**task, "params": {"password": "secret"}})
    await ask(client, "POST", "/tasks/{name}/{key}/cancel", params=task)
    await ask(client, "GET", "/tasks/{name}/{key}", params=task)
    logged = [record.getMessage() for record in caplog.records if record.name == "taskmesh.web"]
    assert logged == [
        f"{what} by the dashboard, from 127.0.0.1: name 'work', key 'k'" for what in ("tasks.publish", "task.cancel")
    ]


async def test_what_fails_and_what_is_wrong_is_told(mesh: TaskMesh, client: httpx.AsyncClient) -> None:
    @mesh.task
    async def work() -> None:
        raise TaskFailed("it rained")

    await work.publish("k")
    async with working(mesh):
        await finished(mesh, "work", "k")
    report = await ask(client, "GET", "/errors")
    assert [(group["error"], group["failed"]) for group in report["groups"]] == [("it rained", 1)]
    assert (await ask(client, "GET", "/errors", params={"name": "other", "at_most": "10"}))["groups"] == []
    findings = await ask(client, "GET", "/doctor")
    assert {"level", "subject", "found", "remedy"} == set(findings[0])


async def test_what_a_change_would_do_is_told_and_not_done(mesh: TaskMesh, client: httpx.AsyncClient) -> None:
    await mesh.publish("work", "k", specific_worker_ids=["nobody"])
    asked = {"name": "work", "key": "k", "changes": '{"specific_worker_ids": []}'}
    effect = await ask(client, "GET", "/tasks/{name}/{key}/option/what-if", params=asked)
    assert (effect["status_now"], effect["status_then"], effect["stops"]) == ("INIT", "INIT", [])
    await ask(client, "GET", "/tasks/{name}/{key}/option/what-if", 422, params=asked | {"changes": "{"})
    await ask(client, "GET", "/tasks/{name}/{key}/option/what-if", 422, params=asked | {"changes": '{"colour": "red"}'})
    await ask(client, "GET", "/tasks/{name}/{key}/option/what-if", 404, params=asked | {"key": "other"})
    limited = await ask(client, "GET", "/queues/{queue}/limit/what-if", params={"queue": "default", "running": "0"})
    assert (limited["claimable_now"], limited["claimable_then"]) == (1, 0)
    grouped = {"queue": "default", "group": "g", "running": "2"}
    assert (await ask(client, "GET", "/queues/{queue}/limit/what-if", params=grouped))["limits_then"]["groups"] == {
        "g": 2
    }
    assert (await ask(client, "GET", "/queues"))[0]["limits"]["running"] is None
    assert (await mesh.get("work", "k")).task_option.specific_worker_ids == ("nobody",)


async def test_workers_are_told_what_to_do(mesh: TaskMesh, client: httpx.AsyncClient) -> None:
    @mesh.task
    async def work() -> None:
        return None

    async with working(mesh, "w/1") as consumer:
        one = {"worker_id": "w/1"}
        (worker,) = await ask(client, "GET", "/workers")
        assert (worker["worker_id"], worker["state"]) == ("w/1", "running")
        await ask(client, "POST", "/workers/{worker_id}/concurrency", params=one, json={"concurrency": 7})
        await eventually(lambda: consumer.concurrency == 7)
        await ask(client, "POST", "/workers/{worker_id}/pause", params=one)
        await eventually(lambda: consumer.paused)
        await ask(client, "POST", "/workers/{worker_id}/resume", params=one)
        await eventually(lambda: not consumer.paused)
        await ask(client, "POST", "/workers/{worker_id}/stop", params=one, json={"grace_ms": 0})
        await eventually(lambda: consumer.state == "stopped")
    await ask(client, "POST", "/workers/{worker_id}/stop", 404, params={"worker_id": "nobody"}, json={})


async def test_dead_letters_are_redriven(mesh: TaskMesh, client: httpx.AsyncClient) -> None:
    @mesh.task(option=TaskOption(on_fail="dead", max_unexpected_retries=0))
    async def work() -> None:
        raise RuntimeError("no")

    await work.publish("k")
    await mesh.consumer().run(until_idle=True)
    dead = next(each for each in await ask(client, "GET", "/queues") if each["queue"] == "dead")
    assert dead["dead_letters"] == 1
    queue = {"queue": "dead"}
    counted = await ask(client, "POST", "/queues/{queue}/redrive", params=queue, json={"dry_run": True})
    assert (counted["action"], counted["matched"], counted["done"]) == ("redrive", 1, 0)
    done = await ask(client, "POST", "/queues/{queue}/redrive", params=queue, json={"by": "ann", "undo": False})
    assert (done["done"], done["id"]) == (1, None)
    assert (await mesh.get("work", "k")).queue == "default"


async def test_queues_are_paused_and_limited(client: httpx.AsyncClient) -> None:
    queue = {"queue": "slow"}
    await ask(
        client, "POST", "/queues/{queue}/pause", params=queue, json={"reason": "deploy", "by": "ann", "for_ms": 60_000}
    )
    await ask(client, "PUT", "/queues/{queue}/limit", params=queue, json={"running": 3, "rate": 5, "per_ms": 1_000})
    await ask(client, "PUT", "/queues/{queue}/group-limit", params=queue, json={"group": "customer-7", "running": 1})
    (found,) = await ask(client, "GET", "/queues")
    assert (found["paused"], found["paused_by"], found["limits"]["running"]) == (True, "ann", 3)
    assert found["limits"]["groups"] == {"customer-7": 1}
    assert found["paused_until"] is not None
    await ask(client, "POST", "/queues/{queue}/resume", params=queue)
    await ask(client, "PUT", "/queues/{queue}/limit", params=queue, json={"running": None, "group_rate": 7})
    (found,) = await ask(client, "GET", "/queues")
    assert (found["paused"], found["limits"]["running"], found["limits"]["rate"]) == (False, None, 5)
    assert (found["limits"]["group_rate"], found["limits"]["group_per_ms"]) == (7, 1_000)
    await ask(
        client, "POST", "/queues/{queue}/pause", params=queue, json={"group": "a/b", "reason": "late", "by": "ann"}
    )
    (found,) = await ask(client, "GET", "/queues")
    assert (found["paused"], found["paused_groups"]["a/b"]["by"]) == (False, "ann")
    await ask(client, "POST", "/queues/{queue}/resume", params=queue, json={"group": "a/b"})
    (found,) = await ask(client, "GET", "/queues")
    assert found["paused_groups"] == {}
    await ask(client, "DELETE", "/queues/{queue}", params=queue)
    assert await ask(client, "GET", "/queues") == []
    await ask(client, "DELETE", "/queues/{queue}", 404, params=queue)


async def test_schedules_are_declared_paused_triggered_and_removed(client: httpx.AsyncClient) -> None:
    one = {"schedule_id": "nightly"}
    declared = {"name": "report", "cron": "0 3 * * *", "timezone": "Europe/Berlin", "params": {"deep": True}}
    assert (await ask(client, "PUT", "/schedules/{schedule_id}", params=one, json=declared))["cron"] == "0 3 * * *"
    assert (await ask(client, "POST", "/schedules/{schedule_id}/pause", params=one, json={"by": "ann"}))["paused"]
    assert (await ask(client, "POST", "/schedules/{schedule_id}/trigger", params=one))["created"]
    assert not (await ask(client, "POST", "/schedules/{schedule_id}/resume", params=one))["paused"]
    (found,) = await ask(client, "GET", "/schedules")
    assert [tick["kind"] for tick in found["ticks"]] == ["triggered"]
    await ask(client, "DELETE", "/schedules/{schedule_id}", params=one)
    await ask(client, "POST", "/schedules/{schedule_id}/trigger", 404, params=one)
    await ask(client, "PUT", "/schedules/{schedule_id}", 422, params=one, json={"name": "report", "cron": "whenever"})
    await ask(client, "PUT", "/schedules/{schedule_id}", 422, params=one, json={"cron": "0 3 * * *"})
    asked = {"cron": "0 3 * * *", "timezone": "Europe/Berlin"}
    soon = await ask(client, "GET", "/schedules/what-if", params=asked)
    assert (soon["words"], len(soon["times"])) == ("At 03:00 every day (Europe/Berlin)", 5)
    await ask(client, "GET", "/schedules/what-if", 422, params={"cron": "whenever"})


async def test_a_schedule_that_code_declared_is_changed_in_what_is_given_alone(
    mesh: TaskMesh, client: httpx.AsyncClient
) -> None:
    declared: dict[str, Any] = {
        "params": {"deep": True},
        "timezone": "Europe/Berlin",
        "missed": "all",
        "overlap": "skip",
        "jitter_ms": 500,
    }
    settings: dict[str, Any] = {"queue": "slow", "run_timeout_ms": 5_000, "specific_worker_ids": ["w1"]}
    before = await mesh.every("report", schedule_id="s", cron="0 3 * * *", **declared, **settings)
    assert before.settings == settings
    one = {"schedule_id": "s"}
    after = await ask(
        client, "PUT", "/schedules/{schedule_id}", params=one, json={"name": "report", "cron": "0 4 * * *"}
    )
    assert {field: after[field] for field in declared} == declared
    assert (after["cron"], after["settings"]) == ("0 4 * * *", settings)
    form = {"schedule_id": "s", "name": "report", "interval_ms": "60000", "cron": "", "timezone": "", "params": ""}
    await client.post("/do/schedule.declare", data={**form, "missed": "skip"})
    [changed] = await mesh.schedules.all()
    assert (changed.cron, changed.interval_ms, changed.missed) == (None, 60_000, "skip")
    assert (changed.params, changed.overlap, changed.settings) == ({"deep": True}, "skip", settings)
    await mesh.schedules.trigger("s")
    [task] = [task async for task in mesh.find("report")]
    assert (task.queue, task.task_option.run_timeout_ms) == ("slow", 5_000)


async def test_events_are_streamed(mesh: TaskMesh) -> None:
    # httpx collects the whole answer of an ASGI app, so the stream is read where it is made.
    lines = _event_lines(mesh.events("work"))
    assert (await anext(lines)).startswith(":")
    await mesh.publish("other", "k")
    await mesh.publish("work", "k")
    with anyio.fail_after(10):
        text = await anext(lines)
    await lines.aclose()  # type: ignore[attr-defined]  # it is a generator
    assert "event: published" in text
    assert '"key": "k"' in text
    assert "id: " in text


REFUSED: list[Any] = [
    ("GET", "/tasks/{name}/{key}", {"params": {"name": "bad name", "key": "k"}}, 422),
    ("GET", "/tasks/{name}/{key}/option/what-if", {"params": {"name": "work", "key": "k"}}, 422),
    ("GET", "/tasks/work/", {}, 422),
    ("GET", "/tasks/{name}/{key}", {"params": {"name": "work", "key": "k\0"}}, 422),
    ("GET", "/tasks/a/k?name=b", {}, 422),
    ("GET", "/tasks", {"params": {"where": "colour:red"}}, 422),
    ("GET", "/tasks", {"params": {"where": "error:a\0b"}}, 422),
    ("GET", "/tasks", {"params": {"after": "nonsense"}}, 422),
    ("GET", "/tasks", {"params": {"after": b64encode(b"[" * 3_000).decode()}}, 422),
    ("GET", "/tasks", {"params": {"limit": "1000000"}}, 422),
    ("GET", "/tasks", {"params": {"page": "1"}}, 422),
    ("POST", "/tasks", {"content": b"{", "headers": {"Content-Type": "application/json"}}, 400),
    ("POST", "/tasks", {"content": b"[" * 100_000, "headers": {"Content-Type": "application/json"}}, 400),
    ("POST", "/tasks", {"content": b"a=b", "headers": {"Content-Type": "text/plain"}}, 415),
    ("POST", "/tasks", {"json": {"name": "work", "key": "k", "configuration": {"colour": "red"}}}, 422),
    ("POST", "/tasks", {"json": {"name": "work", "key": "k", "configuration": {"start_time": "soon"}}}, 422),
    ("POST", "/tasks", {"content": rb'{"name": "work", "key": "k", "params": {"text": "\ud800"}}'}, 422),
    ("POST", "/tasks", {"content": rb'{"name": "work", "key": "\ud800"}'}, 422),
    ("POST", "/tasks", {"json": {"name": "work", "key": "k", "params": {"n": 2**70}}}, 422),
    (
        "POST",
        "/tasks",
        {"content": b'{"name": "work", "key": "k", "params": {"v": ' + b"[" * 300 + b"]" * 300 + b"}}"},
        422,
    ),
    (
        "PUT",
        "/schedules/s",
        {"content": b'{"name": "work", "interval_ms": 60000, "params": {"v": ' + b"[" * 300 + b"]" * 300 + b"}}"},
        422,
    ),
    (
        "PATCH",
        "/tasks/{name}/{key}/option",
        {"params": {"name": "a", "key": "b"}, "json": {"changes": {"priority": "x"}}},
        404,
    ),
    *(
        ("POST", "/tasks", {"json": {"name": "work", "key": "k", "configuration": {word: "x"}}}, 422)
        for word in ("name", "key", "params", "by", "self")
    ),
    *(
        (
            "POST",
            "/tasks/many",
            {"json": {"name": "work", "params_by_key": {"k": {}}, "configuration": {word: "x"}}},
            422,
        )
        for word in ("name", "params_by_key")
    ),
    *(("PATCH", "/tasks/work/k/option", {"json": {"changes": {word: "x"}}}, 422) for word in ("name", "key", "by")),
    ("GET", "/tasks/{name}/{key}/option/what-if", {"params": {"name": "w", "key": "k", "changes": '{"key": 1}'}}, 422),
    ("PUT", "/queues/q/limit", {"json": {"running": False}}, 422),
    ("PUT", "/queues/q/limit", {"json": {"rate": "5"}}, 422),
    ("PUT", "/queues/q/limit", {"json": {"rate": 5.0}}, 422),
    ("POST", "/workers/w/concurrency", {"json": {"concurrency": True}}, 422),
    ("POST", "/bulk/delete", {"json": {"where": "age>0s", "dry_run": 0}}, 422),
    ("POST", "/bulk/delete", {"json": {"where": "age>0s", "dry_run": "no"}}, 422),
    ("GET", "/task", {"params": {"name": "work", "key": "k"}}, 404),
    ("GET", "/no/such/path", {}, 404),
    ("DELETE", "/tasks", {}, 405),
]


async def test_what_cannot_be_is_refused_with_a_reason(client: httpx.AsyncClient, subtests: pytest.Subtests) -> None:
    for method, path, request_, status in REFUSED:
        with subtests.test(method=method, path=path, request_=request_, status=status):
            told = await ask(client, method, path, status, **request_)
            assert told["error"]
            assert told["message"]


async def test_a_slash_of_a_key_is_part_of_the_key_however_the_key_ends(
    mesh: TaskMesh, client: httpx.AsyncClient
) -> None:
    for key in ("a", "a/explain", "100%", "a%2Fb", "?#"):
        await mesh.publish("work", key)
        task = {"name": "work", "key": key}
        assert (await ask(client, "GET", "/tasks/{name}/{key}", params=task))["key"] == key
        assert isinstance(await ask(client, "GET", "/tasks/{name}/{key}/explain", params=task), list)
    assert isinstance(await ask(client, "GET", "/tasks/work/a/explain"), list)
    mounted = httpx.AsyncClient(
        transport=httpx.ASGITransport(Starlette(routes=[Mount("/ops mesh", create_app(mesh))])), base_url=ORIGIN
    )
    async with mounted:
        found = await mounted.get("/ops%20mesh/api/v1/tasks/work/a%2Fexplain")
    assert found.json()["key"] == "a/explain"


async def test_who_asks_what_may_be_done_at_an_address_is_told_all_of_it(client: httpx.AsyncClient) -> None:
    allowed = {
        "/tasks": "GET, HEAD, POST",
        "/tasks/work/k": "DELETE, GET, HEAD",
        "/schedules/s": "DELETE, PUT",
        "/tasks/work/k/retry": "POST",
    }
    for path, methods in allowed.items():
        for method in ("OPTIONS", "REPORT"):
            answer = await client.request(method, API + path)
            assert answer.status_code == 405
            assert ", ".join(sorted(answer.headers["Allow"].split(", "))) == methods


async def test_an_error_of_ours_is_no_leak(mesh: TaskMesh, client: httpx.AsyncClient) -> None:
    mesh.stats = None  # type: ignore[method-assign,assignment]  # break something
    told = await ask(client, "GET", "/stats", 500)
    assert told == {"error": "InternalError", "message": "internal error: see the server's log"}


async def test_the_openapi_document_names_every_operation(client: httpx.AsyncClient) -> None:
    document = await ask(client, "GET", "/openapi.json")
    assert document["servers"] == [{"url": API}]
    called = {(path, method) for path, methods in document["paths"].items() for method in methods}
    assert ("/tasks/{name}/{key}/retry", "post") in called
    assert len(called) == 47
    assert document["components"]["securitySchemes"].keys() == {"token", "program"}
    assert document["security"] == []
    assert document["paths"]["/tasks"]["post"]["security"] == [{"program": []}]
    assert "security" not in document["paths"]["/tasks"]["get"]
    text = str(document)
    for reference in {part.split("'")[0] for part in text.split("#/components/schemas/")[1:]}:
        assert reference in document["components"]["schemas"]
