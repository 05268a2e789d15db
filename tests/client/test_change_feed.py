"""The feed goes on where it stands when its readers want to hear of something else."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from pymongo import AsyncMongoClient

from taskmesh.client.change_feed import Feed
from taskmesh.store import Store
from taskmesh.store.change_stream import Change, Interest
from tests.waiting import eventually

_PATIENCE_S = 30.0
ALL = Interest(events=True)
FINISHED = Interest(finished=True)


@pytest.mark.parametrize("together", [True, False])
async def test_who_wants_to_hear_of_less_and_then_of_more_again_hears_of_each_once(
    mongo_uri: str, database: str, caplog: pytest.LogCaptureFixture, together: bool
) -> None:
    """In the middle of a transaction, whose events all have one time, as behind single writes."""
    caplog.set_level(logging.WARNING, "taskmesh")
    store = Store(mongo_uri, database)
    feed = Feed(store)
    heard: list[tuple[str, str]] = []
    gaps: list[None] = []

    def hear(change: Change) -> None:
        heard.append((change.id, change.operation))
        if not narrowed.is_set() and len(heard) == 4:
            feed.change(subscription, FINISHED, relaxed=False)
            narrowed.set()

    narrowed = asyncio.Event()
    subscription = feed.subscribe(ALL, hear, lambda: gaps.append(None))
    async with AsyncMongoClient[dict[str, Any]](mongo_uri) as client:
        tasks = client[database]["tasks"]
        await asyncio.wait_for(subscription.ready.wait(), _PATIENCE_S)
        await tasks.insert_one({"_id": "first", "status": "INIT"})
        if together:
            async with client.start_session() as session, await session.start_transaction():
                for n in range(9):
                    await tasks.insert_one({"_id": f"new {n}", "status": "INIT"}, session=session)
        else:
            await tasks.insert_many([{"_id": f"new {n}", "status": "INIT"} for n in range(9)])
        await asyncio.wait_for(narrowed.wait(), _PATIENCE_S)
        # What is not wanted now, and then wanted again from where the stream stood.
        await asyncio.wait_for(subscription.ready.wait(), _PATIENCE_S)
        await tasks.update_one({"_id": "first"}, {"$set": {"status": "SUCCESS"}})
        await eventually(lambda: ("first", "update") in heard, _PATIENCE_S)
        feed.change(subscription, ALL, relaxed=False)
        await asyncio.wait_for(subscription.ready.wait(), _PATIENCE_S)
        await tasks.insert_one({"_id": "last", "status": "INIT"})
        await eventually(lambda: ("last", "insert") in heard, _PATIENCE_S)
    await feed.close()
    await store.close()
    new = [id_ for id_, _ in heard[1:-2]]
    assert new == [f"new {n}" for n in range(len(new))], "each once, and in order"
    assert len(new) >= 3
    assert [heard[0], *heard[-2:]] == [("first", "insert"), ("first", "update"), ("last", "insert")]
    assert not gaps
    assert not caplog.records
