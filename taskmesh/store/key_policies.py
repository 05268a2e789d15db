"""Policies for a key that is published again and again: when it starts, and whether a publication counts.

They are parts of the one update by which a publication changes an existing task (`store/publish.py`).
"""

from __future__ import annotations

from taskmesh.store import rules
from taskmesh.store.driver import Document


def not_throttled(throttle_ms: int, at: rules.Expression) -> rules.Expression:
    """Whether the last publication that counted is long enough ago. That was its first, if none has been noted."""
    since = {"$ifNull": ["$task_state.throttled_since", "$task_state.create_time"]}
    return {"$lte": [{"$add": [since, throttle_ms]}, at]}


def debounced(debounce_ms: int, most_ms: int | None, at: rules.Expression) -> Document:
    """When it starts, and since when it has been put off: since the first publication after which no execution has begun."""
    since = "$task_state.debounced_since"
    begun = {"$map": {"input": rules.ENTRIES, "in": {"$gte": ["$$this.start_time", since]}}}
    unfinished = {"$in": [rules.status(at), ["INIT", "RUNNING"]]}
    put_off = {"$and": [{"$gt": [since, None]}, unfinished, {"$not": [{"$anyElementTrue": [begun]}]}]}
    first = rules.with_facts(at, {"$cond": [put_off, since, at]})
    latest = [] if most_ms is None else [{"$add": [first, most_ms]}]
    return {"debounced_since": first, "start_time": {"$min": [{"$add": [at, debounce_ms]}, *latest]}}
