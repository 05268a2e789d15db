"""What a change stream has brought with one answer of the server costs no turn of the event loop for each event."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from motor.motor_asyncio import AsyncIOMotorClient
from pymongo import AsyncMongoClient

from taskmesh.store import Store
from taskmesh.store.change_stream import Interest, open_stream
from taskmesh.store.mongodb.driver import core_of, next_event, read_ahead

_MANY = 200


@pytest.mark.parametrize("client_class", [AsyncMongoClient, AsyncIOMotorClient])
async def test_events_that_are_here_are_read_at_once_in_order_and_none_twice(
    mongo_uri: str, database: str, client_class: Any
) -> None:
    client = client_class(mongo_uri)
    store = Store(client, database)
    stream = await open_stream(store, Interest(events=True))
    inserted = [f"job:{n}" for n in range(_MANY)]
    await store.driver.collection(store.tasks).insert_many([{"_id": id_} for id_ in inserted])
    seen: list[str] = []
    turns = most_together = 0
    while len(seen) < _MANY:
        first = await next_event(stream)
        turned: list[None] = []
        asyncio.get_running_loop().call_soon(turned.append, None)
        together = [await next_event(stream) for _ in range(read_ahead(stream))]
        turns += len(turned)
        most_together = max(most_together, len(together))
        seen += [event["documentKey"]["_id"] for event in (first, *together) if event is not None]
    assert seen == inserted
    assert most_together
    assert turns == 0

    await stream.close()
    # Whoever goes on behind what was read meets nothing of it again.
    behind = await open_stream(
        store, Interest(events=True), place=stream.resume_token, place_is_of=Interest(events=True)
    )
    await store.driver.collection(store.tasks).insert_one({"_id": "job:last"})
    event = None
    while event is None:
        event = await next_event(behind)
    assert event["documentKey"]["_id"] == "job:last"
    await behind.close()
    await store.close()
    if isinstance(client, AsyncIOMotorClient):
        await asyncio.to_thread(core_of(client).close)  # it would block the event loop
    else:
        await client.close()
