"""What is named by an id is that thing alone: an operator, or what is no text, is refused before it enters a query."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from taskmesh import InvalidKey, InvalidName, InvalidOption, TaskMesh
from taskmesh.store import registry
from tests.working import working

BAD: dict[str, Any] = {
    "operator": {"$ne": ""},
    "another operator": {"$gt": ""},
    "regular expression": {"$regex": "."},
    "None": None,
    "int": 7,
    "bool": True,
    "bytes": b"w",
    "list": ["w"],
    "empty": "",
    "NUL": "a\0b",
    "overlong": "x" * 5_000,
    "half a surrogate pair": "\ud800",
}
MAY_BE_NONE = {
    "what_if of a schedule",
    "pause of a group",
    "resume of a group",
    "explain",
    "errors",
    "events",
    "events of a key",
    "find",
    "find in a queue",
    "find by prefix",
    "find behind",
}
BY = {"by", "by of a task", "by of a queue", "by of a worker", "by of a schedule"}
MAY_BE_NONE |= {
    "pause of a group",
    "resume of a group",
    "explain_worker of a name",
    "on_fail",
    "consumer",
    "configure(group)",
    "reason",
    "reason of a schedule",
    "page",
} | BY
MAY_BE_EMPTY = {"find by prefix", "reason", "reason of a schedule", "count", "page"} | BY
MAY_BE_LONG = {"page", "count"}


async def _listed(found: Any) -> Any:
    return [task async for task in found]


CALLS: dict[str, Callable[[TaskMesh, Any], Any]] = {
    # tasks: by name, by key
    "get": lambda mesh, id_: mesh.get(id_, "k"),
    "get by key": lambda mesh, id_: mesh.get("job", id_),
    "get_sync": lambda mesh, id_: asyncio.to_thread(mesh.get_sync, id_, "k"),
    "get_sync by key": lambda mesh, id_: asyncio.to_thread(mesh.get_sync, "job", id_),
    "cancel": lambda mesh, id_: mesh.cancel(id_, "k"),
    "cancel by key": lambda mesh, id_: mesh.cancel("job", id_),
    "retry": lambda mesh, id_: mesh.retry(id_, "k"),
    "retry by key": lambda mesh, id_: mesh.retry("job", id_),
    "delete": lambda mesh, id_: mesh.delete(id_, "k"),
    "delete by key": lambda mesh, id_: mesh.delete("job", id_),
    "set_option": lambda mesh, id_: mesh.set_option(id_, "k", priority=1),
    "set_option by key": lambda mesh, id_: mesh.set_option("job", id_, priority=1),
    "specific_worker_ids": lambda mesh, id_: mesh.set_option("job", "k", specific_worker_ids=id_),
    "what_if_option": lambda mesh, id_: mesh.what_if.option(id_, "k", priority=1),
    "what_if_option by key": lambda mesh, id_: mesh.what_if.option("job", id_, priority=1),
    "timeline": lambda mesh, id_: mesh.inspect.timeline(id_, "k"),
    "timeline by key": lambda mesh, id_: mesh.inspect.timeline("job", id_),
    "explain a task": lambda mesh, id_: mesh.explain(id_, "k"),
    "explain a key": lambda mesh, id_: mesh.explain("job", id_),
    "explain": lambda mesh, id_: mesh.explain("job", "k", id_),
    "explain_worker": lambda mesh, id_: mesh.inspect.explain_worker(id_),
    "explain_worker of a name": lambda mesh, id_: mesh.inspect.explain_worker("w", id_),
    "finished": lambda mesh, id_: mesh.tasks.finished(id_, "k", 0.1),
    "finished key": lambda mesh, id_: mesh.tasks.finished("job", id_, 0.1),
    "events": lambda mesh, id_: mesh.events(id_),
    "events of a key": lambda mesh, id_: mesh.events("job", id_),
    "find": lambda mesh, id_: _listed(mesh.find(id_)),
    "find in a queue": lambda mesh, id_: _listed(mesh.find(queue=id_)),
    "find by prefix": lambda mesh, id_: _listed(mesh.find("job", key_prefix=id_)),
    "find behind": lambda mesh, id_: _listed(mesh.find("job", after=id_)),
    "publish": lambda mesh, id_: mesh.publish(id_, "k"),
    "publish_many": lambda mesh, id_: mesh.publisher.publish_many(id_, {"k": {}}),
    "publish key": lambda mesh, id_: mesh.publish("job", id_),
    "configure(queue)": lambda mesh, id_: mesh.publish("job", "k", queue=id_),
    "configure(group)": lambda mesh, id_: mesh.publish("job", "k", group=id_),
    "registered": lambda mesh, id_: mesh.publisher.registered(id_),
    # many tasks
    "count": lambda mesh, id_: mesh.listing.count(id_),
    "page": lambda mesh, id_: mesh.listing.page(after=id_),
    "cancel_all": lambda mesh, id_: mesh.bulk.cancel(id_),
    "delete_all": lambda mesh, id_: mesh.bulk.delete(id_),
    "redrive": lambda mesh, id_: mesh.bulk.redrive(id_),
    "on_fail": lambda mesh, id_: mesh.set_option("job", "k", on_fail=id_),
    "undo": lambda mesh, id_: mesh.bulk.undo(id_),
    "errors": lambda mesh, id_: mesh.inspect.errors(id_),
    "by": lambda mesh, id_: mesh.bulk.cancel("name:nobody", by=id_),
    "by of a task": lambda mesh, id_: mesh.cancel("job", "k", by=id_),
    "by of a queue": lambda mesh, id_: mesh.pause("q", by=id_),
    "by of a worker": lambda mesh, id_: mesh.pause_worker("w", by=id_),
    "by of a schedule": lambda mesh, id_: mesh.schedules.pause("tick", by=id_),
    # queues and groups
    "pause": lambda mesh, id_: mesh.pause(id_),
    "reason": lambda mesh, id_: mesh.pause("q", reason=id_),
    "resume": lambda mesh, id_: mesh.resume(id_),
    "pause of a group": lambda mesh, id_: mesh.pause("q", group=id_),
    "resume of a group": lambda mesh, id_: mesh.resume("q", group=id_),
    "set_limit": lambda mesh, id_: mesh.set_limit(id_, running=1),
    "queue": lambda mesh, id_: mesh.queue(id_, pause_on_failures=0.5),
    "pause_on_failures": lambda mesh, id_: mesh.queues.pause_on_failures(id_, 0.5),
    "forget": lambda mesh, id_: mesh.queues.forget(id_),
    "set_group_limit": lambda mesh, id_: mesh.queues.set_group_limit(id_, "g", 1),
    "set_group_limit of a group": lambda mesh, id_: mesh.queues.set_group_limit("q", id_, 1),
    "what_if_limit": lambda mesh, id_: mesh.what_if.limit(id_, running=1),
    "what_if_group_limit": lambda mesh, id_: mesh.what_if.group_limit("q", id_, 1),
    # workers
    "stop_worker": lambda mesh, id_: mesh.stop_worker(id_),
    "pause_worker": lambda mesh, id_: mesh.pause_worker(id_),
    "resume_worker": lambda mesh, id_: mesh.resume_worker(id_),
    "set_concurrency": lambda mesh, id_: mesh.fleet.set_concurrency(id_, 3),
    "consumer": lambda mesh, id_: mesh.consumer(worker_id=id_),
    "consumer of names": lambda mesh, id_: mesh.consumer(names=[id_]),
    "consumer of queues": lambda mesh, id_: mesh.consumer(queues=[id_]),
    # schedules
    "every": lambda mesh, id_: mesh.every(id_, interval_ms=60_000),
    "put": lambda mesh, id_: mesh.schedules.put(id_, name="job", interval_ms=60_000),
    "what_if of a schedule": lambda mesh, id_: mesh.what_if.schedule(id_, interval_ms=60_000),
    "put by name": lambda mesh, id_: mesh.schedules.put("tock", name=id_, interval_ms=60_000),
    "pause_schedule": lambda mesh, id_: mesh.schedules.pause(id_),
    "reason of a schedule": lambda mesh, id_: mesh.schedules.pause("tick", reason=id_),
    "resume_schedule": lambda mesh, id_: mesh.schedules.resume(id_),
    "trigger": lambda mesh, id_: mesh.schedules.trigger(id_),
    "unschedule": lambda mesh, id_: mesh.schedules.remove(id_),
    "signal": lambda mesh, id_: mesh.signal(id_, "k", "go"),
    "signal by key": lambda mesh, id_: mesh.signal("job", id_, "go"),
    "flow": lambda mesh, id_: mesh.flow(id_),
    "flow_status": lambda mesh, id_: mesh.flow_status(id_),
    "flow of a task": lambda mesh, id_: mesh.flows.of(id_, "k"),
    "flow of a key": lambda mesh, id_: mesh.flows.of("job", id_),
}


@pytest.mark.parametrize("call", CALLS)
async def test_what_cannot_be_an_id_is_refused_and_nothing_is_done(
    mesh: TaskMesh, subtests: pytest.Subtests, call: str
) -> None:
    @mesh.task
    async def job() -> None: ...

    await job.configure(delay_ms=3_600_000).publish("k")
    await mesh.every("job", schedule_id="tick", interval_ms=3_600_000)
    await mesh.bulk.cancel("status:INIT name:job")  # which could be undone
    await registry.register(mesh.store, "w", "an instance", {"state": "running", "names": ["job"], "host": "here"})
    before = await _everything(mesh)
    for bad, id_ in BAD.items():
        allowed = (
            (id_ is None and call in MAY_BE_NONE)
            or (id_ == "" and call in MAY_BE_EMPTY)
            or (bad == "overlong" and call in MAY_BE_LONG)
        )
        if allowed or (call == "specific_worker_ids" and bad in ("list", "NUL")):
            continue
        with subtests.test(bad=bad):
            with pytest.raises((InvalidName, InvalidKey, InvalidOption)) as refusal:
                await _called(CALLS[call], mesh, id_)
            assert len(str(refusal.value)) < 1_000, "it names the value, however long that is, and can be read"
    assert await _everything(mesh) == before


async def _called(call: Callable[[TaskMesh, Any], Any], mesh: TaskMesh, id_: Any) -> None:
    answer = call(mesh, id_)
    if inspect.isawaitable(answer):
        await answer


async def _everything(mesh: TaskMesh) -> dict[str, list[dict[str, Any]]]:
    """All that is stored, but for signs of life."""
    database = mesh.store.driver.database
    found = {}
    for name in sorted(await database.list_collection_names()):
        documents = await database[name].find({}).sort("_id", 1).to_list(None)
        if name == "workers":
            documents = [{part: document.get(part) for part in ("_id", "order")} for document in documents]
        found[name] = documents
    return found


async def test_an_operator_stops_no_worker(mesh: TaskMesh) -> None:
    @mesh.task
    async def job() -> None: ...

    async with working(mesh, "w") as consumer:
        with pytest.raises(InvalidOption, match=r"worker_id must be .*, got \{'\$ne': ''\}"):
            await mesh.stop_worker({"$ne": ""})  # type: ignore[arg-type]  # that is the point
        assert consumer.state == "running"


def test_every_public_call_that_names_something_is_tried(mongo_uri: str) -> None:
    """By the names of parameters: a new call with an id, of a mesh or of what it holds, belongs into the table above."""
    ids = {"name", "key", "queue", "group", "worker_id", "schedule_id", "action_id", "where"}
    mesh = TaskMesh(mongo_uri)
    found = set()
    for part in (mesh, *vars(mesh).values()):
        for call, function in inspect.getmembers(type(part), inspect.isfunction):
            if not call.startswith("_") and ids & set(inspect.signature(function).parameters):
                found.add(f"{type(part).__name__}.{call}")
    tried = {code for call in CALLS.values() for code in call.__code__.co_names}
    like = {
        "Publisher.publication_of",
        "Publisher.after_of",
        "Publisher.check_many",
        "Publisher.addressed",
        "Publisher.new_publication",
        "Publisher.handle",
        "Publisher.handle_of",
        "TaskMesh.handle",
        "TaskMesh.task",
        "Flows.member",
    }  # by the same checks as `publish`
    like |= {"Flows.key_of", "Flows.status", "Flows.publish", "Flows.result"}  # as `flow_status` and `flow`
    like |= {
        "Schedules.publication_of_tick",
        "Bulk.retry",
        "Bulk.purge",
        "Listing.count_within",
    }  # as `cancel` and `count`
    missing = {call for call in found if call.partition(".")[2] not in tried}
    assert missing <= like, missing - like


COUNTED: dict[str, Callable[[TaskMesh, Any], Any]] = {
    "find": lambda mesh, count: anext(mesh.find(limit=count)),
    "page": lambda mesh, count: mesh.listing.page(limit=count),
    "count": lambda mesh, count: mesh.listing.count(at_most=count),
    "bulk actions": lambda mesh, count: mesh.bulk.actions(count),
    "noted actions": lambda mesh, count: mesh.audit.actions(count),
    "errors": lambda mesh, count: mesh.inspect.errors(at_most=count),
    "what_if of a schedule": lambda mesh, count: mesh.what_if.schedule(interval_ms=1_000, count=count),
    "undo_ms of a bulk action": lambda mesh, count: mesh.bulk.retry("name:work", undo_ms=count),
}


@pytest.mark.parametrize("call", COUNTED)
async def test_a_count_is_a_whole_number_within_bounds(mesh: TaskMesh, call: str, subtests: pytest.Subtests) -> None:
    for bad in ({"$ne": 1}, "5", 1.5, True, -1, 2**70):
        with (
            subtests.test(bad=bad),
            pytest.raises(InvalidOption, match="must be a whole number from"),
        ):
            await COUNTED[call](mesh, bad)
