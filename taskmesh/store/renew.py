"""Ping: renew the leases of what runs here, all that is due in one update. Called from the pinger's thread.

A lease that ran out is not renewed, even if nobody has taken the task yet: expired is lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pymongo.errors import OperationFailure

from taskmesh.store import rules
from taskmesh.store.grouped import Grouped
from taskmesh.store.mongodb.driver import TOGETHER_DEADLINE_MS, Document
from taskmesh.store.mongodb.server_errors import is_over_deadline
from taskmesh.store.pipeline.prepared import prepared
from taskmesh.store.store import Store, run_sync

PING_DEADLINE_MS = 2_000


def ping(
    store: Store,
    database: Any,
    held: Iterable[tuple[str, str]],
    lease_ms: int,
    deadline_ms: int = PING_DEADLINE_MS,
) -> int:
    """Renew the leases of `held`, pairs of `_id` and `running_id`, by `lease_ms`. Return how many were found alive.

    The length is the one that the worker uses since its claim, whatever the task's option says by now: a lease that is shorter
    on one side than on the other would be lost unnoticed.

    Eligible: the task is RUNNING and the entry is live. Writes: `ping_expire_time`, the derived fields. Safe to repeat. If the
    count is less than expected, `still_held` tells which are left.
    """
    pairs = list(held)
    ids, running_ids = [id_ for id_, _ in pairs], sorted({running_id for _, running_id in pairs})
    query, pipeline = _renewal(store, ids, running_ids, lease_ms)
    return int(run_sync(database, store.update_command(query, pipeline, deadline_ms))["n"])


async def extend(store: Store, id_: str, running_id: str, lease_ms: int) -> bool:
    """Make one lease end so much later than now, whatever the option says. False if it is lost. Safe to repeat."""
    query, pipeline = _renewal(store, [id_], [running_id], lease_ms)
    return bool((await store.update(query, pipeline))["n"])


Lease = tuple[str, str, int]
"""The `_id` of a task, the `running_id` of an execution, and how long its lease becomes, in ms."""


class Extensions(Grouped[Lease, bool]):
    """Extends leases, those of one moment in one update."""

    async def extend(self, id_: str, running_id: str, lease_ms: int) -> bool:
        """See `extend`."""
        lease = (id_, running_id, lease_ms)
        together = await self.of([lease])
        return together[lease] if lease in together else await extend(self._store, *lease)

    async def call(self, leases: Sequence[Lease]) -> Mapping[Lease, bool]:
        """Extend them. Return those that are held; none of a set of which one is not, or is locked, or of one that is alone."""
        found: dict[Lease, bool] = {}
        for lease_ms in {lease_ms for _, _, lease_ms in leases}:
            some = [lease for lease in leases if lease[2] == lease_ms]
            if len(some) > 1 and await self._extended(some, lease_ms):
                found |= dict.fromkeys(some, True)
        return found

    async def _extended(self, leases: Sequence[Lease], lease_ms: int) -> bool:
        query, pipeline = _renewal(
            self._store, [lease[0] for lease in leases], [lease[1] for lease in leases], lease_ms
        )
        try:
            reply = await self._store.update(query, pipeline, TOGETHER_DEADLINE_MS + len(leases))
        except OperationFailure as error:
            if not is_over_deadline(error):
                raise
            return False
        return int(reply["n"]) == len(leases)


def keep_places(
    store: Store,
    database: Any,
    stopped: Iterable[tuple[str, str]],
    lease_ms: int,
    deadline_ms: int = PING_DEADLINE_MS,
) -> dict[tuple[str, str], Document]:
    """Renew the leases of executions whose handlers clean up after they were stopped from outside: they keep their places.

    Return which still exist, each with what `why_stopped` needs of the task. What such an execution does no longer counts.

    Eligible: the lease is not over; whatever became of the task. Writes: `ping_expire_time`, the derived fields. Safe to
    repeat.
    """
    pairs = set(stopped)
    running_ids = sorted({running_id for _, running_id in pairs})
    mine = {"$and": [{"$in": ["$$this.running_id", {"$literal": running_ids}]}, rules.holds_its_lease(store.now)]}
    renewed = {"$mergeObjects": ["$$this", {"ping_expire_time": {"$add": [store.now, lease_ms]}}]}
    # An entry that has ended keeps its time; one that is still ending has no state.
    entry = {"$cond": [{"$and": [{"$eq": ["$$this.state", "RUNNING"]}, mine]}, renewed, "$$this"]}
    leaving = {"$map": {"input": rules.LEAVING, "in": {"$cond": [mine, renewed, "$$this"]}}}
    state = {"worker_states": _map_entries(entry), "leaving": rules.if_any(leaving)}
    of_task = {"$in": ["$$this.running_id", {"$literal": running_ids}]}
    kept = {"$anyElementTrue": [{"$map": {"input": rules.places(store.now), "in": of_task}}]}
    query = {"_id": {"$in": [id_ for id_, _ in pairs]}, "$expr": kept}
    pipeline = [
        # The renewed lease, whether the place belongs to an entry or to one that is still ending.
        {"$set": {"task_state": state}},
        # When the task is free, and when its document may go, follow from the leases.
        *prepared(rules.derivation, store.now),
    ]
    run_sync(database, store.update_command(query, pipeline, deadline_ms))
    found: dict[tuple[str, str], Document] = {}
    for task in database[store.tasks].find(query, STOPPED_FIELDS):
        state = task["task_state"]
        held = {entry["running_id"] for entry in state["worker_states"] if entry["state"] == "RUNNING"}
        for running_id in held | {entry["running_id"] for entry in state.get("leaving", ())}:
            if (task["_id"], running_id) in pairs:
                found[task["_id"], running_id] = task
    return found


STOPPED_FIELDS: Document = {
    "status": 1,
    "task_option.specific_worker_ids": 1,
    "task_state.deleted_time": 1,
    "task_state.worker_states.running_id": 1,
    "task_state.worker_states.state": 1,
    "task_state.leaving.running_id": 1,
}


def _renewal(store: Store, ids: list[str], running_ids: list[str], lease_ms: int) -> tuple[Document, list[Document]]:
    mine = _is_mine(running_ids, store.now)
    query = {"_id": {"$in": ids}, "status": "RUNNING", "$expr": {"$anyElementTrue": [_map_entries(mine)]}}
    renewed = {"$mergeObjects": ["$$this", {"ping_expire_time": {"$add": [store.now, lease_ms]}}]}
    pipeline = [
        # A new lease for each live entry of ours; the others as they are. No stamp: nobody is told of a ping.
        {"$set": {"task_state.worker_states": _map_entries({"$cond": [mine, renewed, "$$this"]})}},
        # When the next claim is possible, and when time alone ends the task, follow from the leases.
        *prepared(rules.derivation, store.now),
    ]
    return query, pipeline


def still_held(store: Store, database: Any, held: Iterable[tuple[str, str]]) -> dict[tuple[str, str], Document]:
    """Return which of `held` are live, with the task's current option."""
    pairs = set(held)
    query = {"_id": {"$in": [id_ for id_, _ in pairs]}, "status": "RUNNING"}
    mine = _is_mine(sorted({running_id for _, running_id in pairs}), store.now)
    fields = {
        "task_option": 1,
        "running_ids": {
            "$map": {"input": {"$filter": {"input": rules.ENTRIES, "cond": mine}}, "in": "$$this.running_id"}
        },
    }
    found: dict[tuple[str, str], Document] = {}
    for document in database[store.tasks].find(query, fields):
        for running_id in document["running_ids"]:
            if (document["_id"], running_id) in pairs:
                found[document["_id"], running_id] = document["task_option"]
    return found


async def held_of(store: Store, held: Mapping[str, str]) -> set[str]:
    """Return which tasks these executions seem to hold: by what is stored, whatever time has changed."""
    mine = {"$elemMatch": {"running_id": {"$in": sorted(set(held.values()))}, "state": "RUNNING"}}
    query = {
        "_id": {"$in": list(held)},
        "status": {"$in": ["INIT", "RUNNING"]},
        "task_state.worker_states": mine,
        "task_state.deleted_time": None,
    }
    cursor = store.driver.collection(store.tasks).find(query, {"_id": 1}, batch_size=10_000)
    return {document["_id"] for document in await cursor.to_list(None)}


def _is_mine(running_ids: list[str], now: rules.Expression) -> rules.Expression:
    return {"$and": [{"$in": ["$$this.running_id", {"$literal": running_ids}]}, rules.is_live(now)]}


def _map_entries(result: rules.Expression) -> rules.Expression:
    return {"$map": {"input": rules.ENTRIES, "in": result}}


async def end_lease(store: Store, id_: str, running_id: str) -> None:
    """End the lease of an execution now, as if nobody had renewed it, so that a fault test need not wait for that."""
    mine = {"$and": [{"$eq": ["$$this.running_id", {"$literal": running_id}]}, {"$eq": ["$$this.state", "RUNNING"]}]}
    over = {"$mergeObjects": ["$$this", {"ping_expire_time": store.now}]}
    entries = {"$map": {"input": rules.ENTRIES, "in": {"$cond": [mine, over, "$$this"]}}}
    # The entry with its lease over; status and times follow.
    stages = [{"$set": {"task_state": {"worker_states": entries}}}, *prepared(rules.derivation, store.now)]
    await store.update({"_id": id_, "task_state.worker_states.running_id": running_id}, stages)
