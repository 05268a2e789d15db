"""The change stream, narrowed by the server to what this process can use.

One stream over the database: it shows tasks, queue settings and orders to workers in the order in which they were committed. It
never looks up documents, and pings are delivered to nobody. What it delivers is a hint; the scan is reliable.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from bson.timestamp import Timestamp

from taskmesh.store.mongodb.driver import Document
from taskmesh.store.pipeline.event_stamp import RECORD_EVENT, starting_with
from taskmesh.store.store import Store

HORIZON_MS = 2_000
"""Tasks that are due later than this are not announced: the scan looks ahead, and finds them in time."""
HORIZON_OF_NEW_MS = 7_000
"""New tasks that are due later than this are not announced. The limit is higher for them: a new task may be the first in its
queue, which scans do not know of for some seconds."""

WAKING = (
    "failed",
    "released",
    "snoozed",
    "suspended",
    "signalled",
    "retried",
    "restored",
    "published",
    "replaced",
    "option_changed",
    "succeeded",
    "settled",
    "progressed",
    "stopped",
    "opened",
    "moved",
)
"""Events that can make a task claimable. Renewals and claims cannot."""
STOPPING = ("cancelled", "deleted", "option_changed", "retried", "moved", "replaced")
"""Events that an execution of the task has to learn of."""
FINISHED = ("SUCCESS", "FAIL", "CANCELLED", "EXPIRED")

_UPDATED = "updateDescription.updatedFields"
_ENDS: Document = {"operationType": {"$in": ["drop", "rename", "dropDatabase", "invalidate"]}}
"""The end of a collection, or of the stream."""


@dataclass(frozen=True, slots=True)
class Interest:
    """What the readers of a process want to be told, all together."""

    names: frozenset[str] = frozenset()
    """Tasks of these names, when they can be claimed soon."""
    control: bool = False
    """Whatever may stop an execution; changes of queues; orders to workers; tasks that have to be accepted."""
    finished: bool = False
    """Tasks that finish, or are deleted."""
    events: bool = False
    """Everything that happens to tasks."""
    lanes: frozenset[int] | None = None
    """The lanes of which new tasks are announced, beside tasks that not every worker can run. None: all lanes."""

    def __or__(self, other: Interest) -> Interest:
        return Interest(
            self.names | other.names,
            self.control or other.control,
            self.finished or other.finished,
            self.events or other.events,
            self._lanes_with(other),
        )

    def _lanes_with(self, other: Interest) -> frozenset[int] | None:
        if not (self.names and other.names):
            return self.lanes if self.names else other.lanes
        return None if self.lanes is None or other.lanes is None else self.lanes | other.lanes


@dataclass(slots=True, frozen=True)
class Change:
    """One change event, with what the readers need of it."""

    token: Document
    operation: str
    collection: str | None
    id: Any
    time: datetime
    stamp: str | None
    status: str | None
    next_claim_time: datetime | None
    inserted: Document | None

    @property
    def is_to_be_accepted(self) -> bool:
        """Whether another language has inserted it, so that a worker has to accept it first (`store/acceptance.py`)."""
        return self.inserted is not None and self.inserted.get("status") == "INIT" and "queue" not in self.inserted


def pipeline(store: Store, interest: Interest) -> list[Document]:
    """Return the stages that narrow the stream to an interest, and each event to the fields that are used.

    For each reader the server compares every write to any collection with the first stage, so that stage determines what an
    idle worker costs. The collection of an event is checked only for the events that are left: otherwise the server would
    compare names by a regular expression for each condition (docs/decisions/0015-less-of-the-server.md).
    """
    wanted: list[Document] = [dict(_ENDS)]
    database = store.driver.database.name
    collections = [store.tasks]
    if interest.names:
        wanted.append(
            {
                "operationType": {"$in": ["insert", "replace"]},
                "fullDocument.name": {"$in": sorted(interest.names)},
                "fullDocument.next_claim_time": {"$exists": True},  # otherwise it waits for others
                **_in_lanes(interest.lanes),
                "$expr": {"$lte": ["$fullDocument.next_claim_time", {"$add": ["$wallTime", HORIZON_OF_NEW_MS]}]},
            }
        )
        wanted.append(
            {
                f"{_UPDATED}.event": starting_with(WAKING),
                f"{_UPDATED}.next_claim_time": {"$exists": True},
                "$expr": {"$lte": [f"${_UPDATED}.next_claim_time", {"$add": ["$wallTime", HORIZON_MS]}]},
            }
        )
    if interest.control:
        # What other languages insert, whatever its name: under a backlog, too, since it may be urgent once it is accepted.
        # (Null, not absent: an absent field is known to the server only after it has made an event of the write.)
        wanted.append({"operationType": "insert", "fullDocument.status": "INIT", "fullDocument.queue": None})
        wanted.append({f"{_UPDATED}.event": starting_with(STOPPING)})
        # Documents that somebody else removes; mostly the TTL monitor, in bursts. They are small.
        wanted.append({"operationType": "delete"})
        wanted.append({"ns": {"db": database, "coll": store.queues}})
        wanted.append({f"{_UPDATED}.order_time": {"$exists": True}})
        collections += [store.queues, store.workers]
    if interest.finished:
        wanted.append({f"{_UPDATED}.status": {"$in": list(FINISHED)}})
        wanted.append({f"{_UPDATED}.event": starting_with(["deleted"])})
    if interest.events:
        tasks = {"ns": {"db": database, "coll": store.tasks}}
        wanted.append(tasks | {"operationType": {"$in": ["insert", "replace"]}})
        wanted.append({f"{_UPDATED}.event": {"$exists": True}})
        wanted.append({f"{_UPDATED}.{RECORD_EVENT}": {"$exists": True}})
    kept_of_insert = (
        "name",
        "status",
        "queue",
        "group",
        "next_claim_time",
        "pinned",
        "publish_number",
        "needs",
        "task_option.priority",
        "task_option.specific_worker_ids",
        "task_option.concurrent_worker_cnt",
    )
    kept = {
        "operationType": 1,
        # (As a computed field: otherwise the server would evaluate the last stage first.)
        "collection": {"$concat": ["$ns.coll"]},
        "documentKey._id": 1,
        "wallTime": 1,
        f"{_UPDATED}.event": 1,
        f"{_UPDATED}.{RECORD_EVENT}": 1,
        f"{_UPDATED}.status": 1,
        f"{_UPDATED}.next_claim_time": 1,
        **{f"fullDocument.{field}": 1 for field in kept_of_insert},
    }
    return [
        # Only what some reader of this process wants: the server sends nothing else.
        {"$match": {"$or": wanted}},
        # Of each event the few fields that `change_from` reads, so that neither params nor results are sent.
        {"$project": kept},
        # Only our collections: the database may have others, with fields of the same names.
        {"$match": {"$or": [_ENDS, {"collection": {"$in": collections}}]}},
    ]


def _in_lanes(lanes: frozenset[int] | None) -> Document:
    """Match a new task in one of these lanes, and what concerns others: it names workers, needs labels, or is for several."""
    if lanes is None:
        return {}
    in_lane: Document = {"fullDocument.lane": {"$in": sorted(lanes)}}
    for_several = {"fullDocument.task_option.concurrent_worker_cnt": {"$gt": 1}}
    return {"$or": [in_lane, {"fullDocument.pinned": True}, {"fullDocument.needs": {"$exists": True}}, for_several]}


def change_from(event: Document) -> Change:
    """Read a change event."""
    updated = event.get("updateDescription", {}).get("updatedFields", {})
    return Change(
        token=event["_id"],
        operation=event["operationType"],
        collection=event.get("collection"),
        id=event.get("documentKey", {}).get("_id"),
        time=event["wallTime"],
        stamp=updated.get("event", updated.get(RECORD_EVENT)),
        status=updated.get("status"),
        next_claim_time=updated.get("next_claim_time"),
        inserted=event.get("fullDocument"),
    )


async def open_stream(
    store: Store,
    interest: Interest,
    *,
    place: Document | None = None,
    place_is_of: Interest | None = None,
    await_ms: int = 500,
) -> Any:
    """Open the stream: from now on, or after the event of a resume token.

    `place`: the token, from a stream that was for `place_is_of`. A stream for something else may not find that event, and so
    starts with what happened at the same time: `is_behind` tells what has been seen. `await_ms`: how long a read waits for
    events. Every write wakes a waiting read, whatever it filters for, which takes about 45 µs of the server's time (measured);
    a read that does not wait costs a tenth of that.
    """
    options: Document = {"max_await_time_ms": await_ms, "batch_size": 1000}
    if place is not None and place_is_of != interest and (moment := _time_of(place)) is not None:
        options["start_at_operation_time"] = moment
    elif place is not None:
        options["start_after"] = place
    return await store.driver.watch(pipeline(store, interest), **options)


def is_behind(token: Document, other: Document) -> bool:
    """Whether a resume token belongs to a later event than the other.

    Source: MongoDB's manual, "Resume Tokens from Change Events": the texts in tokens can be compared and sorted.
    """
    return bool(token["_data"] > other["_data"])


def _time_of(token: Document) -> Timestamp | None:
    """Return when the event of a token happened. None if the token has another form.

    It starts with that: a byte for the type, then seconds and increment (the server's `ResumeTokenData`, clusterTime).
    """
    data = str(token["_data"])
    try:
        return Timestamp(int(data[2:10], 16), int(data[10:18], 16)) if data.startswith("82") else None
    except ValueError:
        return None
