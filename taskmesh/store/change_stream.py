"""Watch: the change stream, narrowed by the server to what this process can use.

One stream over the database: it shows tasks, queue settings and orders to workers in the order in which they were
committed. It never looks up documents, and pings are delivered to nobody. What it delivers is a hint; the scan is the truth.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from taskmesh.store.driver import Document
from taskmesh.store.event_stamp import starting_with
from taskmesh.store.store import Store

HORIZON_MS = 2_000
"""Tasks due later than this are not announced: the scan, which looks ahead, finds them in time."""
HORIZON_OF_NEW_MS = 7_000
"""New tasks due later than this are not announced. It is longer than for others: they may be the first in their queue,
which the scan does not know of for some seconds."""

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
"""What can make a task claimable. Renewals and claims cannot."""
STOPPING = ("cancelled", "deleted", "option_changed", "retried", "moved", "replaced")
"""What an execution of the task has to hear of."""
FINISHED = ("SUCCESS", "FAIL", "CANCELLED", "EXPIRED")

_UPDATED = "updateDescription.updatedFields"


@dataclass(frozen=True, slots=True)
class Interest:
    """What the readers of a process want to hear of, all together."""

    names: frozenset[str] = frozenset()
    """Tasks of these names, when they can be claimed soon."""
    control: bool = False
    """Whatever should stop an execution; changes of queues; orders to workers; what is to be accepted."""
    finished: bool = False
    """Tasks that finish, or are deleted."""
    events: bool = False
    """Everything that happens to tasks."""

    def __or__(self, other: Interest) -> Interest:
        return Interest(
            self.names | other.names,
            self.control or other.control,
            self.finished or other.finished,
            self.events or other.events,
        )


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
    """The stages that narrow the stream to an interest, and each event to what is used of it."""
    wanted: list[Document] = [{"operationType": {"$in": ["drop", "rename", "dropDatabase", "invalidate"]}}]
    tasks = {"ns.coll": store.tasks}
    if interest.names:
        wanted.append(
            tasks
            | {
                "operationType": {"$in": ["insert", "replace"]},
                "fullDocument.name": {"$in": sorted(interest.names)},
                "fullDocument.next_claim_time": {"$exists": True},  # else it waits for others
                "$expr": {"$lte": ["$fullDocument.next_claim_time", {"$add": ["$wallTime", HORIZON_OF_NEW_MS]}]},
            }
        )
        wanted.append(
            tasks
            | {
                f"{_UPDATED}.event": starting_with(WAKING),
                f"{_UPDATED}.next_claim_time": {"$exists": True},
                "$expr": {"$lte": [f"${_UPDATED}.next_claim_time", {"$add": ["$wallTime", HORIZON_MS]}]},
            }
        )
    if interest.control:
        # What other languages insert, whatever its name: under a backlog, too, since it may be urgent once it is accepted.
        wanted.append(
            tasks | {"operationType": "insert", "fullDocument.status": "INIT", "fullDocument.queue": {"$exists": False}}
        )
        wanted.append(tasks | {f"{_UPDATED}.event": starting_with(STOPPING)})
        # Documents that somebody removes past us; most are the TTL monitor's, in bursts, and small.
        wanted.append(tasks | {"operationType": "delete"})
        wanted.append({"ns.coll": store.queues})
        wanted.append({"ns.coll": store.workers, f"{_UPDATED}.order_time": {"$exists": True}})
    if interest.finished:
        wanted.append(tasks | {f"{_UPDATED}.status": {"$in": list(FINISHED)}})
        wanted.append(tasks | {f"{_UPDATED}.event": starting_with(["deleted"])})
    if interest.events:
        wanted.append(tasks | {"operationType": {"$in": ["insert", "replace"]}})
        wanted.append(tasks | {f"{_UPDATED}.event": {"$exists": True}})
    kept_of_insert = (
        "name",
        "status",
        "queue",
        "group",
        "next_claim_time",
        "pinned",
        "publish_number",
        "lane",
        "needs",
        "task_option.priority",
        "task_option.specific_worker_ids",
    )
    kept = {
        "operationType": 1,
        "ns.coll": 1,
        "documentKey._id": 1,
        "wallTime": 1,
        f"{_UPDATED}.event": 1,
        f"{_UPDATED}.status": 1,
        f"{_UPDATED}.next_claim_time": 1,
        **{f"fullDocument.{field}": 1 for field in kept_of_insert},
    }
    return [
        # Only what some reader of this process wants to hear of: the server sends nothing else.
        {"$match": {"$or": wanted}},
        # Of each event the few fields that `change_from` reads, so that neither params nor results travel.
        {"$project": kept},
    ]


def change_from(event: Document) -> Change:
    """Read a change event."""
    updated = event.get("updateDescription", {}).get("updatedFields", {})
    return Change(
        token=event["_id"],
        operation=event["operationType"],
        collection=event.get("ns", {}).get("coll"),
        id=event.get("documentKey", {}).get("_id"),
        time=event["wallTime"],
        stamp=updated.get("event"),
        status=updated.get("status"),
        next_claim_time=updated.get("next_claim_time"),
        inserted=event.get("fullDocument"),
    )


async def open_stream(
    store: Store, interest: Interest, *, start_after: Document | None = None, await_ms: int = 500
) -> Any:
    """Open the stream: from now on, or from behind the event of a resume token.

    `await_ms`: how long a read waits for something to come. Every write to the server wakes a waiting read, whatever it
    filters for, at about 45 µs of the server's time (measured); a read that does not wait costs a tenth of that.
    """
    options: Document = {"max_await_time_ms": await_ms, "batch_size": 1000}
    if start_after is not None:
        options["start_after"] = start_after
    return await store.driver.watch(pipeline(store, interest), **options)
