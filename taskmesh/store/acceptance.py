"""Acceptance: turns what programs in other languages insert into a task like all others.

The insert is the protocol (docs/protocol.md): `_id`, `name`, `key`, `params`, `status` INIT, and whatever else the publisher
wants to set. The publisher knows no rules and no defaults; a task is accepted by an update that gives it what a publication
from Python would have stored. Until then it has no `queue`, which is how it is recognised, and no scan sees it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from bson import ObjectId
from bson.timestamp import Timestamp

from taskmesh.model.task import Task
from taskmesh.store import rules
from taskmesh.store.mongodb.driver import CODEC, Document
from taskmesh.store.numbers import NUMBERS_PER_MS, number_at
from taskmesh.store.pipeline.by_id import in_parts
from taskmesh.store.pipeline.event_stamp import stamp
from taskmesh.store.pipeline.prepared import prepared
from taskmesh.store.publication import Publication, new_document
from taskmesh.store.store import Store

INSERTED: Document = {
    "status": "INIT",
    "queue": {"$exists": False},
    "_id": {"$type": "string"},
    "$expr": {
        "$cond": [
            {"$and": [{"$eq": [{"$type": "$name"}, "string"]}, {"$eq": [{"$type": "$key"}, "string"]}]},
            {"$eq": ["$_id", {"$concat": ["$name", ":", "$key"]}]},
            False,
        ]
    },
}
"""Matches what nobody has accepted yet. A document without `queue` that is not of this form is never accepted."""
_MAY_BE_THERE = frozenset(
    ["_id", "name", "key", "params", "status", "configuration", "publish_time", "task_state", "event"]
)
"""Fields of ours that a task may have before it is accepted. State and event come from a signal that arrived before."""


@dataclass(slots=True, frozen=True)
class Inserted:
    """A task that another language has inserted."""

    id: str
    name: str
    key: str
    params: Any
    configuration: Any
    publish_time: Any
    ours: tuple[str, ...]
    """The fields that only taskmesh may write, and that the publisher has set."""

    def published(self, now: datetime) -> tuple[datetime, int] | None:
        """Return when it was inserted, by the server's clock, and its place in the order of publication. None: it does not say.

        Raises `TypeError` for what is not a BSON timestamp.
        """
        if self.publish_time is None:
            return None
        if not isinstance(self.publish_time, Timestamp):
            raise TypeError
        moment = datetime.fromtimestamp(self.publish_time.time, UTC)
        if self.publish_time.time == 0 or moment > now:
            return None
        return moment, number_at(moment) + min(self.publish_time.inc, NUMBERS_PER_MS - 1)


async def inserted(store: Store, limit: int) -> list[str]:
    """Return the `_id`s of tasks that nobody has accepted yet and that a majority has."""
    tasks = store.driver.collection(store.tasks, CODEC, majority=True)
    cursor = tasks.find(INSERTED, {"_id": 1}, limit=limit, batch_size=limit + 1).hint("taskmesh_status")
    return [document["_id"] for document in await cursor.to_list(limit)]


async def read(store: Store, ids: Sequence[str]) -> list[Inserted]:
    """Return those of these tasks that nobody has accepted yet."""
    found: list[Document] = []
    for part in in_parts(ids):
        found += await store.find({"$and": [{"_id": {"$in": part}}, INSERTED]}, {}, codec=CODEC)
    return [
        Inserted(
            task["_id"],
            task["name"],
            task["key"],
            task.get("params"),
            task.get("configuration"),
            task.get("publish_time"),
            tuple(sorted(field for field in task if field in Task.OWN_FIELDS and field not in _MAY_BE_THERE)),
        )
        for task in found
    ]


@dataclass(slots=True, frozen=True)
class Verdict:
    """What an inserted task becomes: the task that its publisher meant or, with a reason, a task that has FAILed."""

    publication: Publication
    now: datetime
    error: tuple[str, str] | None = None
    """The kind of error, and the reason."""
    by: str = ""
    """Which worker refuses it."""


async def accept(store: Store, verdicts: Sequence[Verdict]) -> int:
    """Accept inserted tasks, each atomically. Return how many. Accepting a task a second time changes nothing.

    Eligible: no `queue`. Writes every field that a publication writes; params and the publisher's own fields stay as they are.
    """
    if not verdicts:
        return 0
    query = {"$and": [{"_id": {"$in": [each.publication.id for each in verdicts]}}, INSERTED]}
    reply = await store.update(query, _stages(store.now), constants={"new": [_made(each) for each in verdicts]})
    return int(reply["nModified"])


def _made(verdict: Verdict) -> Document:
    """Return what the task gets: all that a publication from Python would have stored, except for the params."""
    new = new_document(verdict.publication, verdict.now)
    del new["params"]
    if verdict.error is not None:
        new["task_state"]["worker_states"] = [_refusal(verdict)]
    return new


def _stages(now: rules.Expression) -> list[Document]:
    """Return the stages that accept all matching tasks; `$$new` has what each gets. One pipeline serves all, since it is long."""
    own = {"$first": {"$filter": {"input": "$$new", "cond": {"$eq": ["$$this._id", "$_id"]}}}}
    params = {"$cond": [{"$eq": [{"$type": "$params"}, "object"]}, "$params", {}]}
    signals = {name: f"$task_state.{name}" for name in ("signals", "signals_bytes")}
    signalled = {"$cond": [{"$isArray": ["$task_state.signals"]}, signals, {}]}
    state = {"$mergeObjects": ["$$own.task_state", signalled]}
    merged = {"$mergeObjects": ["$$ROOT", "$$own", {"params": params, "task_state": state}]}
    return [
        # The new fields contain what the publisher asked for by now. Other fields of ours were not the publisher's to write.
        {"$unset": sorted(Task.OWN_FIELDS - {"_id", "params", "task_state"})},
        # The fields that it lacks. What its publisher stored stays, and so do signals that have come already.
        {"$replaceWith": {"$let": {"vars": {"own": own}, "in": merged}}},
        # The stamp that announces it to workers and readers of events.
        {"$set": {"event": stamp("published", now)}},
        # Status and times follow.
        *prepared(rules.derivation, now),
    ]


def _refusal(verdict: Verdict) -> Document:
    """The entry of an execution that failed for good before it began."""
    assert verdict.error is not None
    kind, reason = verdict.error
    return {
        "running_id": str(ObjectId()),
        "worker_id": verdict.by,
        "state": "FAIL",
        "start_time": verdict.now,
        "fail_time": verdict.now,
        "fail_reason": reason,
        "fail_type": kind,
        "final": True,
    }
