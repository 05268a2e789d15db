"""How the claim rule evaluates tasks for workers, gate by gate: what `explain`, what-if and the timeline put into words.

The server evaluates the rule's own expressions (`store/rules.py`), also for a task as it would be after a change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from taskmesh.model.worker import Claimant
from taskmesh.store import rules
from taskmesh.store.control import option_stages
from taskmesh.store.find import as_read
from taskmesh.store.malformed import Strange, past_strangers
from taskmesh.store.mongodb.driver import Document
from taskmesh.store.store import Store

_TOLD = ("name", "key", "queue", "group", "needs", "status", "task_option", "loop")


@dataclass(frozen=True, slots=True)
class Judgement:
    """A task as the rule sees it at a moment."""

    now: datetime
    """The server's time."""
    task: Document
    """The stored fields that are put into words."""
    status: str
    running_on: list[str]
    """Workers with a live execution."""
    leaving: list[str]
    """Workers whose execution was stopped, and keeps its place until it has ended."""
    done: int
    fail_cnt: int
    timeout_cnt: int
    """Executions lost in a row."""
    ended_by_time: datetime | None
    """When it will have expired, or failed by the last lease that is allowed to run out, if nobody does anything."""
    final_because: str | None
    """Why it has FAILed for good, if `retry_on` or `fail_on` says so."""
    opens: list[dict[str, datetime | None]]
    """When each gate opens, for each of the workers. None: it is open; `rules.NEVER`: never."""
    entries: list[int]
    """How many live, leaving and successful entries each of these workers has in the task."""


async def judge(
    store: Store, ids: Sequence[str], workers: Sequence[Claimant], as_if: Sequence[Document] = ()
) -> list[Judgement]:
    """Return how the rule evaluates each of these tasks that exists. `as_if`: as these stages would change it.

    Without malformed documents: they cannot be evaluated.
    """
    now = store.now
    me = rules.Me("$$worker.id", "$$worker.parent", "$$worker.labels")
    of_task, of_worker = rules.task_gates(now), rules.worker_gates(me)
    asked = [{"id": w.id, "parent": w.parent, "labels": list(w.labels)} for w in workers]
    taking_part = {"$concatArrays": ["$$live.worker_id", "$$leaving.worker_id", "$$done.worker_id"]}
    mine = {"$filter": {"input": taking_part, "cond": {"$eq": ["$$this", me.id]}}}
    for_worker = {"opens": _moments(of_worker), "entries": {"$size": mine}}
    facts = {
        "status": rules.status(now),
        "running_on": "$$live.worker_id",
        "leaving": "$$leaving.worker_id",
        "done": {"$size": "$$done"},
        "fail_cnt": rules.FAIL_CNT,
        "timeout_cnt": rules.TIMEOUT_CNT,
        "ended_by_time": rules.ended_by_time(),
        "final_because": {"$ifNull": [{"$max": "$$fails.final_because"}, None]},
        "opens": _moments(of_task),
        "workers": {"$map": {"input": {"$literal": asked}, "as": "worker", "in": for_worker}},
    }
    # The gates and the facts that they compare, all of one moment; of the task only what is put into words.
    shape = {
        "now": now,
        "facts": rules.with_facts(now, facts),
        "task": {name: f"${name}" for name in _TOLD},
        "expire_time": "$task_state.expire_time",
        "waits_for": "$task_state.waits_for",
        "suspended_for": "$task_state.suspended_for",
        "line": rules.LINE,
    }

    async def read(query: Document) -> list[Document]:
        stages: list[Document] = [
            # The requested tasks.
            {"$match": query},
            # What if: the change, in memory.
            *as_if,
            # What the rule says.
            {"$project": shape},
        ]
        found = await store.driver.rows(store.tasks, stages)
        if any(not isinstance(row["task"].get(name), str) for row in found for name in ("name", "key", "queue")):
            raise Strange(f"one of {len(found)} tasks has no name, key or queue")
        return found

    # Except for those that no reader sees any more.
    asked_about = {"_id": {"$in": list(ids)}, "$expr": {"$not": [rules.is_forgotten(now)]}}
    found = await past_strangers(store, asked_about, read)
    return [_judgement(row, (*of_task, *of_worker)) for row in found]


def _moments(gates: dict[str, rules.Expression]) -> list[rules.Expression]:
    return [{"$ifNull": [gate, None]} for gate in gates.values()]


def _judgement(row: Document, gates: Sequence[str]) -> Judgement:
    facts = row["facts"]
    of_task, workers = facts.pop("opens"), facts.pop("workers")
    return Judgement(
        now=row["now"],
        task={**row["task"], **{name: row.get(name) for name in ("expire_time", "waits_for", "suspended_for", "line")}},
        opens=[dict(zip(gates, of_task + worker["opens"], strict=True)) for worker in workers],
        entries=[worker["entries"] for worker in workers],
        **facts,
    )


def as_if_option(changes: Document, now: rules.Expression) -> list[Document]:
    """Return the stages that change these fields of a task's option in memory, with all that follows from them."""
    return [
        # This shows who could claim it when the stopped workers have ended: the places that they keep until then are left out.
        {"$set": {"_leaving": "$task_state.leaving"}},
        *option_stages(changes, now),
        # The places as they were before.
        {"$set": {"task_state.leaving": "$_leaving"}},
        # The fields that follow from the option, as every update derives them.
        *rules.derivation(now),
    ]


async def read_with_losses(store: Store, id_: str) -> tuple[Document, list[str], datetime] | None:
    """Return a task as it stands, which of its executions (`running_id`) are lost by now, and the server's time."""
    lost = {"$filter": {"input": rules.ENTRIES, "cond": rules.is_lost(store.now)}}
    stages: list[Document] = [
        # The task.
        {"$match": {"_id": id_}},
        # Before the status is derived, so that both are of one moment; a foreign document may have no entries.
        {"$set": {"_lost": {"$cond": [{"$isArray": [rules.ENTRIES]}, lost, []]}, "_now": store.now}},
        # Of these entries the id alone. A stage of its own: it reads the list made above.
        {"$set": {"_lost": "$_lost.running_id"}},
        # The task as it stands; nothing, if no reader sees it any more.
        *as_read(store.now, params=True),
    ]
    found = await store.driver.rows(store.tasks, stages)
    return (found[0], found[0].pop("_lost"), found[0].pop("_now")) if found else None
