"""`upkeep.due` tells what there is to do, and looks at nothing that has time."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pymongo import MongoClient

from taskmesh import TaskMesh
from taskmesh.store.upkeep import Upkeep, due

MANY, A_FEW = 1_000, 3
WHEN: dict[str, tuple[Upkeep, str, dict[str, Any], str]] = {
    "a task that time alone finishes": (Upkeep.SETTLE, "tasks", {}, "settle_time"),
    "a finished task that others wait for": (Upkeep.MARKS, "tasks", {}, "task_state.ask_time"),
    "a flow to be opened": (Upkeep.FLOWS, "flows", {"state": "sealed"}, "state_time"),
    "a flow that may be empty": (Upkeep.FLOWS, "flows", {"state": "opened"}, "check_time"),
    "a flow that was never sealed": (Upkeep.FLOWS, "flows", {"state": "open"}, "check_time"),
    "the head of a line": (Upkeep.SEQUENCES, "sequences", {}, "check_time"),
}


def _document(fields: dict[str, Any], field: str, moment: datetime) -> dict[str, Any]:
    *above, last = field.split(".")
    return {**fields, above[0]: {last: moment}} if above else {**fields, last: moment}


@pytest.mark.usefixtures("never_used")
@pytest.mark.parametrize(("part", "collection", "fields", "field"), WHEN.values(), ids=WHEN)
async def test_what_is_due_is_told_and_what_has_time_is_not_looked_at(
    mesh: TaskMesh,
    mongo_uri: str,
    database: str,
    part: Upkeep,
    collection: str,
    fields: dict[str, Any],
    field: str,
) -> None:
    now = datetime.now(UTC)
    assert await due(mesh.store) == frozenset()
    with MongoClient[dict[str, Any]](mongo_uri) as client:
        documents = client[database]
        later = _document(fields, field, now + timedelta(hours=1))
        many = A_FEW if fields == {"state": "sealed"} else MANY  # no flow is that for long
        documents[collection].insert_many([{"_id": f"job:{n}", **later} for n in range(many)])
        documents.command("profile", 2)
        assert await due(mesh.store) == frozenset()
        documents.command("profile", 0)
        [look] = documents["system.profile"].find({"ns": f"{database}.tasks"})
        assert look["keysExamined"] + look["docsExamined"] < 10
        documents[collection].insert_one({"_id": "job:due", **_document(fields, field, now - timedelta(seconds=2))})
    assert await due(mesh.store) == {part}


async def test_all_that_is_due_is_told_at_once(mesh: TaskMesh, mongo_uri: str, database: str) -> None:
    past = datetime.now(UTC) - timedelta(seconds=2)
    with MongoClient[dict[str, Any]](mongo_uri) as client:
        for number, (_, collection, fields, field) in enumerate(WHEN.values()):
            client[database][collection].insert_one({"_id": f"job:{number}", **_document(fields, field, past)})
    assert await due(mesh.store) == frozenset(Upkeep)


async def test_what_somebody_is_about_to_do_is_left_to_them(mesh: TaskMesh, mongo_uri: str, database: str) -> None:
    now = datetime.now(UTC)
    with MongoClient[dict[str, Any]](mongo_uri) as client:
        client[database].tasks.insert_one({"_id": "job:k", **_document({}, "task_state.ask_time", now)})
        client[database].flows.insert_one({"_id": "f", "state": "sealed", "state_time": now})
        told = await due(mesh.store)
        assert not told or datetime.now(UTC) - now > timedelta(seconds=1)
