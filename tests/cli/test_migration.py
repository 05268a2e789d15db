"""`taskmesh migrate`: what Agenda and mscheduler have stored becomes tasks, each once. `peers/` has what they wrote."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from bson import json_util
from pymongo import MongoClient
from pymongo.database import Database

from taskmesh import TaskMesh
from taskmesh.admin.migration import Agenda, MScheduler, migrate
from taskmesh.admin.store.migration import Source
from tests.cli.shell import Shell

PEERS = Path(__file__).parent / "peers"
JOBS = "agendaJobs"
LATER = datetime(2100, 1, 1, tzinfo=UTC)


@pytest.fixture
def there(mongo_uri: str, database: str) -> Iterator[Database[dict[str, Any]]]:
    """The database of the other program."""
    with MongoClient[dict[str, Any]](mongo_uri, tz_aware=True) as client:
        yield client[database]


def stored_by(peer: str) -> list[dict[str, Any]]:
    text = (PEERS / f"{peer}.json").read_text("utf-8")
    documents: list[dict[str, Any]] = json_util.loads(
        text, json_options=json_util.RELAXED_JSON_OPTIONS.with_options(tz_aware=True)
    )
    return documents


async def moved(mesh: TaskMesh, peer: Agenda | MScheduler, collection: str = JOBS, *, take: bool = True) -> list[Any]:
    source = Source(mesh.store, mesh.connection.database, collection)
    return [each async for each in migrate(source, peer, mesh.publisher, mesh.schedules, take=take)]


async def test_agendas_jobs_become_tasks_and_schedules(
    taskmesh: Shell, mesh: TaskMesh, there: Database[dict[str, Any]], database: str
) -> None:
    jobs = stored_by("agenda-6.2.6")
    there[JOBS].insert_many(jobs)
    command = ("migrate", "agenda", "--from", f"{database}.{JOBS}")
    told = taskmesh.done(*command).out
    assert "3 left, 6 would move" in told
    assert list(there[JOBS].find().sort("_id")) == sorted(jobs, key=lambda job: job["_id"])
    assert [task async for task in mesh.find()] == []
    report = taskmesh.done(*command, "--take", "--json").json
    why = {each["why"].partition(":")[0].partition("=")[0] for each in report if each["what"] == "left"}
    assert why == {"it is running, or was when its process died", "repeatAt", "it is disabled"}
    tasks = {task.params["to"]: task async for task in mesh.find(params=True) if task.params}
    assert {to.partition("@")[0] for to in tasks} == {"later", "urgent", "unique"}
    later = tasks["later@example.com"]
    assert (later.name, later.params) == ("send_email", {"to": "later@example.com", "n": 1})
    assert later.task_state.start_time == datetime(2100, 1, 2, 3, 4, 5, tzinfo=UTC)
    assert tasks["urgent@example.com"].task_option.priority == 10
    schedules = {each.schedule_id: each for each in await mesh.schedules.all()}
    assert schedules.keys() == {"report", "clean_up", "poll"}
    clean_up = schedules["clean_up"]
    assert (clean_up.cron, clean_up.timezone, clean_up.params) == ("0 3 * * *", "Europe/Berlin", {"days": 30})
    assert (schedules["report"].interval_ms, schedules["poll"].interval_ms) == (300_000, 90_000)
    # Agenda looks for jobs that are not disabled: it finds none of those that moved, and all others as they were.
    assert there[JOBS].count_documents({"taskmesh.state": "taken", "disabled": True}) == 6
    left = [job for job in jobs if there[JOBS].find_one(job) is not None]
    assert len(left) == len(jobs) - 6
    again = taskmesh.done(*command, "--take", "--json").json
    assert [each["what"] for each in again] == ["left"] * 3
    assert len([task async for task in mesh.find()]) == 3


async def test_who_died_between_taking_and_publishing_is_replaced(
    mesh: TaskMesh, there: Database[dict[str, Any]]
) -> None:
    there[JOBS].insert_one(
        {"_id": 1, "name": "a", "data": {"n": 1}, "nextRunAt": LATER, "lockedAt": None, "priority": 3}
    )
    source, peer = Source(mesh.store, mesh.connection.database, JOBS), Agenda({"a": "b"})
    [(job, begun)] = [each async for each in source.jobs()]
    assert not begun
    assert await source.take(job, peer.unchanged(job), peer.stopped(job))
    assert not await source.take(job, peer.unchanged(job), peer.stopped(job)), "somebody else has it"
    [told] = await moved(mesh, peer)
    assert (told.what, told.name, told.key) == ("moved", "b", "agenda-1")
    task = await mesh.get("b", "agenda-1")
    assert (task.params, task.task_state.start_time, task.task_option.priority) == ({"n": 1}, LATER, 3)
    assert await moved(mesh, peer) == []


async def test_a_job_that_begins_meanwhile_stays_there(mesh: TaskMesh, there: Database[dict[str, Any]]) -> None:
    there[JOBS].insert_one({"_id": 1, "name": "a", "data": None, "nextRunAt": LATER, "lockedAt": None})
    source, peer = Source(mesh.store, mesh.connection.database, JOBS), Agenda()
    [(job, _)] = [each async for each in source.jobs()]
    there[JOBS].update_one({"_id": 1}, {"$set": {"lockedAt": LATER}})
    assert not await source.take(job, peer.unchanged(job), peer.stopped(job))
    assert "taskmesh" not in (there[JOBS].find_one() or {})


@pytest.mark.parametrize("stored", [{"$gte": 1}, {"$exists": False}])
async def test_what_a_job_has_stored_is_a_value_and_no_operator(
    mesh: TaskMesh, there: Database[dict[str, Any]], stored: dict[str, Any]
) -> None:
    there[JOBS].insert_one({"_id": 1, "name": "mail", "data": {}, "nextRunAt": LATER, "lastRunAt": stored})
    assert [each.what for each in await moved(mesh, Agenda())] == ["moved"]
    assert there[JOBS].count_documents({"taskmesh.state": "taken"}) == 1


async def test_what_does_not_fit_the_handler_is_left_there_as_it_was(
    mesh: TaskMesh, there: Database[dict[str, Any]]
) -> None:
    @mesh.task
    async def email(to: str) -> None: ...

    fields: dict[str, Any] = {"name": "email", "data": {}, "nextRunAt": LATER, "lockedAt": None}
    jobs = [
        fields | {"_id": 1, "data": {"whom": "ann"}},
        fields | {"_id": 2, "name": "x" * 200},
        fields | {"_id": 3, "repeatInterval": "now and then"},
        fields | {"_id": 4, "repeatInterval": "1 hour and 2 days", "data": {"to": "ann"}},
    ]
    there[JOBS].insert_many(jobs)
    told = await moved(mesh, Agenda())
    assert [each.what for each in told] == ["left", "left", "left", "moved"]
    assert ["whom" in str(told[0].why), "1 to 100" in str(told[1].why), "now and then" in str(told[2].why)] == [
        True
    ] * 3
    assert list(there[JOBS].find({"_id": {"$lt": 4}})) == jobs[:3]
    assert [each.interval_ms for each in await mesh.schedules.all()] == [(24 * 2 + 1) * 3_600_000]


async def test_mschedulers_collection_is_read_by_its_names(mesh: TaskMesh, there: Database[dict[str, Any]]) -> None:
    there["jobs"].insert_many(stored_by("mscheduler-0.3.1"))
    live = {"running_id": "r", "worker_id": "w", "ping_expire_time": LATER, "success_time": None, "fail_time": None}
    there["jobs"].update_one({"key": "live"}, {"$set": {"task_state.worker_states": [live]}})
    told = {each.key or each.why: each.what for each in await moved(mesh, MScheduler("resize", "path"), "jobs")}
    assert told == {
        "plain": "moved",
        "later": "moved",
        "tuned": "moved",
        "failed once": "moved",
        "it is running": "left",
    }
    plain, later, tuned = [await mesh.get("resize", key) for key in ("plain", "later", "tuned")]
    assert plain.params == {"path": "a.png"}
    assert later.task_state.start_time == LATER
    option = tuned.task_option
    assert (option.concurrent_worker_cnt, option.specific_worker_ids) == (2, ("w1", "w2"))
    assert (option.ping_interval_ms, option.worker_timeout_ms, option.max_unexpected_retries) == (1_000, 5_000, 3)
    taken = there["jobs"].find({"taskmesh.state": "taken"})
    assert [task["task_option"]["specific_worker_ids"] for task in taken] == [["moved to taskmesh"]] * 4
    assert [each.what for each in await moved(mesh, MScheduler("resize", "path"), "jobs")] == ["left"]


def test_what_it_needs_to_know_is_asked_for(taskmesh: Shell) -> None:
    for wrong, said in (
        (("agenda", "--from", "jobs"), "DATABASE.COLLECTION"),
        (("mscheduler", "--from", "a.b"), "--name resize"),
        (("agenda", "--from", "a.b", "--name", "old"), "OLD=NEW"),
    ):
        ran = taskmesh("migrate", *wrong)
        assert ran.status == 2
        assert said in ran.err
