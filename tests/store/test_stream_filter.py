"""A stream tells its readers of our collections alone, and the server sorts out by the oplog what is not for them."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from taskmesh.store import Store
from taskmesh.store.change_stream import Change, Interest, change_from, open_stream, pipeline
from taskmesh.store.mongodb.driver import next_event

_NOW = datetime.now(UTC)
WORKER = Interest(names=frozenset(["job"]), control=True)
IN_LANES = Interest(names=frozenset(["job"]), control=True, lanes=frozenset([3, 5]))
INTERESTS = [WORKER, IN_LANES, Interest(finished=True), Interest(events=True)]


@pytest.mark.parametrize("interest", INTERESTS)
async def test_what_others_write_beside_us_is_told_to_nobody_whatever_fields_it_has(
    mongo_uri: str, database: str, interest: Interest
) -> None:
    store = Store(mongo_uri, database)
    stream = await open_stream(store, interest)
    task: dict[str, Any] = {"name": "job", "next_claim_time": _NOW}
    for name in ("theirs", store.tasks):
        collection = store.driver.collection(name)
        for n, fields in enumerate(({**task, "queue": "q"}, {"status": "INIT"}, {})):
            await collection.insert_one({"_id": f"{name}:{n}", **fields})
        for kind in ("cancelled", "failed", "deleted"):
            changes = {"event": f"{kind}\x1f1\x1fw", "next_claim_time": datetime.now(UTC), "status": "SUCCESS"}
            await collection.update_one({"_id": f"{name}:2"}, {"$set": changes | {"order_time": _NOW}})
            await collection.update_one({"_id": f"{name}:2"}, {"$unset": dict.fromkeys(changes, "")})
        await collection.delete_one({"_id": f"{name}:1"})
    await store.driver.collection(store.tasks).drop()
    told: list[Change] = []
    while not told or told[-1].operation != "drop":
        if (event := await next_event(stream)) is not None:
            told.append(change_from(event))
    assert {change.collection for change in told} == {store.tasks}
    assert sum(change.operation == "update" for change in told) >= 3
    await stream.close()
    await store.close()


async def test_of_new_tasks_those_in_the_lanes_asked_for_are_told_and_those_that_name_their_workers(
    mongo_uri: str, database: str
) -> None:
    store = Store(mongo_uri, database)
    stream = await open_stream(store, IN_LANES)
    tasks = store.driver.collection(store.tasks)
    for lane in range(8):
        task = {"name": "job", "queue": "q", "status": "INIT", "next_claim_time": datetime.now(UTC), "lane": lane}
        await tasks.insert_one({"_id": f"job:{lane}", **task, "pinned": lane == 6})
        await tasks.insert_one({"_id": f"other:{lane}", **task, "name": "other"})
    again = {"event": "failed\x1f1\x1fw", "next_claim_time": datetime.now(UTC)}
    await tasks.update_one({"_id": "job:1"}, {"$set": again})  # whose lane an update does not tell
    await tasks.drop()
    told: list[Change] = []
    while not told or told[-1].operation != "drop":
        if (event := await next_event(stream)) is not None:
            told.append(change_from(event))
    assert [change.id for change in told[:-1]] == ["job:3", "job:5", "job:6", "job:1"]
    await stream.close()
    await store.close()


def test_readers_of_one_process_hear_in_the_lanes_of_all_of_them() -> None:
    everywhere, nowhere = Interest(names=frozenset(["a"])), Interest(finished=True)
    three, five = (Interest(names=frozenset(["a"]), lanes=frozenset([lane])) for lane in (3, 5))
    assert (three | five).lanes == frozenset([3, 5])
    assert (three | nowhere).lanes == (nowhere | three).lanes == frozenset([3])
    assert (three | everywhere).lanes is None
    assert (everywhere | three).lanes is None


@pytest.mark.parametrize("interest", [WORKER, IN_LANES])
async def test_a_workers_stream_makes_no_event_of_what_is_not_for_it(
    mongo_uri: str, database: str, interest: Interest
) -> None:
    """An event that is made and then dropped costs the server several times what a look at the entry does (decision 15)."""
    store = Store(mongo_uri, database)
    await store.driver.collection(store.tasks).insert_one({"_id": "job:1"})
    stages = [{"$changeStream": {}}, *pipeline(store, interest)]
    explain = {"explain": {"aggregate": 1, "pipeline": stages, "cursor": {}}, "verbosity": "queryPlanner"}
    shown = (await store.driver.command(explain))["stages"]
    await store.close()
    asked_of_the_oplog = json.dumps(shown[0]["$cursor"]["queryPlanner"]["parsedQuery"], default=str)
    assert '"o.queue"' in asked_of_the_oplog, "of each insert an event is made, to see whether it has a queue"
    assert ('"o.lane"' in asked_of_the_oplog) is (interest.lanes is not None)
    assert f"{store.tasks}$" not in asked_of_the_oplog, "the collection's name is looked for by a regular expression"
    assert [*shown[-1]] == ["$match"], "what is asked at last is asked first"
    assert [*shown[-2]] == ["$project"]
