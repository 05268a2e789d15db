"""Changes of users' collections: the stream of them, and the position up to which they have become tasks.

The position is one document. It advances in the same transaction in which the tasks for the changes before it are published,
and only from where its reader saw it: so each change becomes one task, whoever dies when, however many read, and however long
ago the task of a change has been run and removed. (A key alone would ensure that only for as long as the task is kept.)

A reader that is killed within a transaction keeps the position locked until the server aborts the transaction, after
`transactionLifetimeLimitSeconds`: a minute, by default, in which nothing is published and nothing is lost.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from typing import Any

from pymongo.errors import DuplicateKeyError

from taskmesh.model.data_change import Watched
from taskmesh.store.mongodb.driver import CODEC, Document, next_event, read_ahead
from taskmesh.store.publication import Publication
from taskmesh.store.publish import publish_in_session
from taskmesh.store.store import Store

MOST = 500
"""The most events that become tasks in one transaction."""
_KEPT_GAPS = 10
_PREFIX = "changes:"
_LARGE_PARTS = ("fullDocument", "updateDescription")


@dataclass(frozen=True)
class Place:
    """The position up to which the changes of a collection have become tasks."""

    id: str
    token: Document
    revision: int
    read_time: datetime
    """When it was last known that nothing was left."""


class Overtaken(Exception):
    """Somebody else has advanced the position meanwhile: what was read from it is theirs to publish, or is published."""


def place_id(store: Store, name: str, watched: Watched) -> str:
    """Return the `_id` of the position for a task's changes. Another collection has another position."""
    return f"{_PREFIX}{name}:{namespace(store, watched)}"


def namespace(store: Store, watched: Watched) -> str:
    """Return the database and the collection that are meant."""
    return f"{watched.database or store.driver.database.name}.{watched.collection}"


def is_our_own(store: Store, watched: Watched) -> bool:
    """Whether it is a collection of this mesh: each of its changes would cause another."""
    in_ours = watched.database in (None, store.driver.database.name)
    return in_ours and watched.collection in (*store.collections, store.payloads, store.meta)


def key_of(event: Document) -> str:
    """Return the key of the task for an event, from its resume token: when it happened, and what is unique to it."""
    token: str = event["_id"]["_data"]
    return f"{token[2:18]}-{sha256(token.encode()).hexdigest()[:32]}"


def told(event: Document, *, cut: bool) -> Document:
    """Return an event of the stream in the form of `ChangeEvent`. `cut`: without what may be large."""
    rest = {name: value for name, value in event.items() if name not in ("_id", "lsid", "txnNumber", "wallTime")}
    namespace, time = rest.pop("ns", {}), rest.pop("clusterTime", None)
    key = rest.pop("documentKey", {})
    change: Document = {
        "operation": rest.pop("operationType", None),
        "database": namespace.get("db"),
        "collection": namespace.get("coll"),
        "document_id": key.get("_id"),
        "cluster_time": None if time is None else time.as_datetime(),
    }
    document, update = (rest.pop(name, None) for name in _LARGE_PARTS)
    if cut:
        return {**change, "cut": True}
    return {**change, "full_document": document, "update_description": update, "extra": rest}


# --- the stream ---


@asynccontextmanager
async def opened(store: Store, watched: Watched, token: Document | None, *, cut: bool = False) -> AsyncIterator[Any]:
    """Open the stream after a token, or from now on. `cut`: without what may be large.

    Raises the driver's errors, which `is_history_lost` and `is_event_too_large` classify.
    """
    stages: list[Any] = [
        # The end of a stream (its collection was dropped) is no change.
        {"$match": {"operationType": {"$ne": "invalidate"}}},
        # What the developer asks for: stages, never anybody else's values.
        *watched.pipeline,
    ]
    if cut:
        # An event may be larger than a message: only this lets the server say so.
        stages.append({"$unset": list(_LARGE_PARTS)})
    options: Document = {"max_await_time_ms": 500, "batch_size": MOST}
    if watched.full_document != "default":
        options["full_document"] = watched.full_document
    if token is not None:
        options["start_after"] = token
    stream = await store.driver.watch(stages, watched.database, watched.collection, **options)
    try:
        yield stream
    finally:
        await stream.close()


async def next_events(stream: Any, most: int = MOST) -> list[Document]:
    """Return the next events, as many as have come together; an empty list if none come within half a second."""
    event = await next_event(stream)
    events = [] if event is None else [event]
    while events and len(events) < most and read_ahead(stream):
        events.append(await next_event(stream))
    return events


# --- the position ---


async def read(store: Store, id_: str) -> Place | None:
    """Return where the last reader was, as a majority knows it. None if nobody has read yet."""
    found = await store.driver.collection(store.meta, CODEC, majority=True).find_one({"_id": id_})
    return None if found is None or "token" not in found else _place(found)


async def begin(store: Store, id_: str, token: Document) -> None:
    """Note where the first reader begins, unless another one has begun."""
    first = {"token": {"$literal": token}, "revision": 1, "read_time": store.now}
    try:
        # The position, by the server's clock.
        await _meta(store).update_one({"_id": id_, "token": {"$exists": False}}, [{"$set": first}], upsert=True)
    except DuplicateKeyError:
        return


async def move(store: Store, place: Place, token: Document, *, gap: str | None = None) -> None:
    """Note that there is nothing to publish up to here. `gap`: or what is there is lost, and why. Raises `Overtaken`."""
    await _moved(store, place, token, None, gap)


async def publish_and_move(
    store: Store, place: Place, publications: Sequence[Publication], token: Document, now: datetime
) -> None:
    """Publish tasks and advance the position, both or neither, with a majority. Raises `Overtaken`."""
    async with store.driver.session() as session:
        await store.driver.start_transaction(session)
        try:
            # First, so that whoever comes second writes nothing.
            await _moved(store, place, token, session)
            await publish_in_session(store, publications, now, session)
            await store.driver.commit(session)
        finally:
            await store.driver.abort(session)


async def _moved(store: Store, place: Place, token: Document, session: Any, gap: str | None = None) -> None:
    fields: Document = {"token": {"$literal": token}, "revision": place.revision + 1, "read_time": store.now}
    if gap is not None:
        lost = {"from": "$read_time", "to": store.now, "reason": {"$literal": gap}}
        gaps = {"$concatArrays": [{"$ifNull": ["$gaps", []]}, [lost]]}
        fields["gaps"] = {"$slice": [gaps, -_KEPT_GAPS]}
    stages = [
        # The position, by the server's clock, and what was lost before it, if anything.
        {"$set": fields},
        # It has advanced: what was in its way no longer is.
        {"$unset": "trouble"},
    ]
    as_seen = {"_id": place.id, "revision": place.revision}
    result = await _meta(store).update_one(as_seen, stages, session=session)
    if not result.matched_count:
        raise Overtaken


async def note_trouble(store: Store, id_: str, reason: str, *, lost: bool) -> None:
    """Note why nobody can read on, and since when. `lost`: the changes after the position are gone."""
    since = {"$ifNull": ["$trouble.since", store.now]}
    trouble = {"reason": {"$literal": reason}, "lost": lost, "since": since}
    # For the doctor: the position stays where it is.
    await _meta(store).update_one({"_id": id_}, [{"$set": {"trouble": trouble}}], upsert=True)


async def read_all(store: Store) -> list[Document]:
    """Return all positions: `task`, `namespace`, and, if known, `read_time`, its `age_ms`, `trouble` and `gaps`."""
    stages = [
        # The positions alone: other documents of this mesh are in the same collection.
        {"$match": {"_id": {"$gte": _PREFIX, "$lt": _PREFIX[:-1] + chr(ord(_PREFIX[-1]) + 1)}}},
        # How long ago that was, by the server's clock.
        {"$set": {"age_ms": {"$subtract": [store.now, "$read_time"]}, "now": store.now}},
    ]
    places = await store.driver.rows(store.meta, stages)
    for place in places:
        _, place["task"], place["namespace"] = place["_id"].split(":", 2)
    return places


def _place(document: Document) -> Place:
    return Place(document["_id"], document["token"], document["revision"], document["read_time"])


def _meta(store: Store) -> Any:
    return store.driver.collection(store.meta)
