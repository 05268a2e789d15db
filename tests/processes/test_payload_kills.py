"""Whoever is killed while a large value is being stored leaves chunks that no task refers to; never the other way round."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from bson import ObjectId
from pymongo.collection import Collection

from taskmesh import Status, TaskMesh
from taskmesh.store import apart
from taskmesh.store.payloads import references
from tests import warm
from tests.processes.payload_writers import DEATHS, TEXT, define
from tests.working import finished, working


@pytest.fixture
async def large(mongo_uri: str, database: str) -> AsyncIterator[TaskMesh]:
    """A mesh that stores apart what has more than a thousand bytes."""
    async with TaskMesh(mongo_uri, database=database, payload_threshold=1_000) as mesh:
        yield mesh


def stored_values(documents: Collection[dict[str, Any]]) -> set[ObjectId]:
    """Which values stand apart, in part or whole."""
    return {chunk["_id"]["id"] for chunk in documents.database["payloads"].find({}, {"_id": 1})}


def referred_to(documents: Collection[dict[str, Any]]) -> set[ObjectId]:
    """Which values tasks refer to."""
    return {value for document in documents.find() for value in references(document)}


async def test_whoever_is_killed_between_chunks_and_task_leaves_orphans_that_go_after_a_day_and_nothing_else_goes(
    large: TaskMesh, mongo_uri: str, database: str, documents: Collection[dict[str, Any]], tmp_path: Path
) -> None:
    echo = define(large)
    log = tmp_path / "log"
    log.touch()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}

    def start(role: str, id_: str, death: str) -> warm.WarmProcess:
        command = [role, mongo_uri, database, id_, death]
        return warm.start("payloads", command, stdout=log, stderr=log, env=environment)

    await echo.publish("kept", text=TEXT)
    victims = {}
    for number, death in enumerate(DEATHS):
        victims[f"publisher, {death}"] = start("publisher", f"unpublished{number}", death)
        await echo.configure(specific_worker_ids=[f"victim{number}", "heir"]).publish(f"run{number}", text="short")
        victims[f"worker, {death}"] = start("worker", f"victim{number}", death)
    for what, process in victims.items():
        assert process.wait(60) == -signal.SIGKILL, f"{what}:\n{log.read_text()[-3000:]}"
    kept = referred_to(documents)
    assert len(kept) == 1, "no task refers to what was not written whole; that of nobody refers to anything"
    left = stored_values(documents) - kept
    assert len(left) >= len(victims), "each has left a value, in part or whole; who lost a lease before, another"
    keys = {document["key"] for document in documents.find()}
    assert keys == {"kept", *(f"run{number}" for number in range(len(DEATHS)))}, (
        "no task was published without its params"
    )

    # Who comes after them publishes and runs the same, once.
    for number in range(len(DEATHS)):
        assert (await echo.publish(f"unpublished{number}", text=TEXT)).created
    async with working(large, "heir"):
        for key in (*keys, *(f"unpublished{number}" for number in range(len(DEATHS)))):
            assert (await finished(large, "echo", key)).status is Status.SUCCESS
    kept = referred_to(documents)
    assert len(kept) == 2 + 3 * len(DEATHS), "params and results of what was published large, results of the others"
    assert stored_values(documents) == kept | left

    for hours in (1, 11):
        large.store.move_on(timedelta(hours=hours))
        assert await apart.sweep(large.store, references) == 0, "somebody may be about to write the task"
    large.store.move_on(timedelta(hours=13))
    assert await apart.sweep(large.store, references) == len(left)
    assert stored_values(documents) == kept
    for document in documents.find():
        task = await large.get("echo", document["key"])
        assert [entry.returns for entry in task.task_state.worker_states] == [TEXT]
