"""Why an execution has to stop before its handler returns, and how its task shows that."""

from __future__ import annotations

from enum import Enum

from taskmesh.model.worker import Claimant
from taskmesh.store.mongodb.driver import Document


class Stop(Enum):
    """Why an execution has to stop before its handler returns."""

    LEASE_LOST = "the lease was lost"
    CANCELLED = "the task was cancelled"
    DELETED = "the task was deleted"
    NOT_ALLOWED = "this worker is no longer in specific_worker_ids"
    BEGUN_ANEW = "the task was cancelled, deleted or replaced, and has been started again since"
    TIMEOUT = "run_timeout_ms has passed"
    WORKER_STOPS = "the worker stops"


FROM_OUTSIDE = frozenset([Stop.CANCELLED, Stop.DELETED, Stop.NOT_ALLOWED, Stop.BEGUN_ANEW])
"""Somebody has stopped it: what it does no longer counts, but while its handler is at work it keeps its place in the task."""


def why_stopped(task: Document | None, running_id: str, worker: Claimant) -> Stop | None:
    """Return why this execution has to stop, according to its task as it stands now (None: gone); None if it holds the task."""
    if task is None or task["task_state"].get("deleted_time") is not None:
        return Stop.DELETED
    if task["status"] == "CANCELLED":
        return Stop.CANCELLED
    state = task["task_state"]
    mine = [entry["state"] for entry in state["worker_states"] if entry["running_id"] == running_id]
    if mine == ["RUNNING"] and task["status"] in ("INIT", "RUNNING"):  # its worker knows of a lease that is over
        return None
    allowed = task["task_option"]["specific_worker_ids"]
    if not worker.is_allowed(allowed):
        return Stop.NOT_ALLOWED
    if any(entry["running_id"] == running_id for entry in state.get("leaving") or ()):
        return Stop.BEGUN_ANEW
    return Stop.LEASE_LOST
