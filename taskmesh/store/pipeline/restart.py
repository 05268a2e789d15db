"""Restart: the state in which a task restarts, and the requests for another run that came while it was running.

`retry`, `run_again`, a publication that restarts, and `Next` use these; each adds what it changes itself. Derivation follows.
"""

from __future__ import annotations

from taskmesh.store import rules
from taskmesh.store.mongodb.driver import Document

STAGED: rules.Expression = {"$gt": ["$task_state.stages", []]}
"""Whether the task has moved on by `Next`. Then the first of its stages says where and with which params it restarts."""

OWN_PARAMS: rules.Expression = {"$ifNull": ["$task_state.own_params", "$$REMOVE"]}
"""Whether the params of the current stage came from `Next`: not from a publication, nor from dependencies."""


def fresh_state(now: rules.Expression, changes: Document) -> rules.Expression:
    """Return `task_state` as of a task that nobody has tried, but with its times, requests, destination and occupied places.

    Dependencies and dependents are kept, too: if it has waited for dependencies, it waits for them again. Records and signals
    are dropped with the rest.
    """
    times = (
        "create_time",
        "start_time",
        "expire_time",
        "wanted",
        "params_version",
        "moves_to",
        "debounced_since",
        "throttled_since",
        "home",
    )
    links = (
        "flow",
        "after",
        "waits_for",
        "unlinked",
        "dependents",
        "ask_time",
        "stages",
        "own_params",
        "parent",
        "detached",
        "has_children",
        "line",
        "place",
        "in_line",
        "on_sequence_failure",
    )
    kept = {name: f"$task_state.{name}" for name in (*times, *links)}
    return {**kept, "timeout_cnt": 0, "worker_states": {"$literal": []}, "leaving": rules.sent_away(now), **changes}


def restarted_state(now: rules.Expression, changes: Document) -> rules.Expression:
    """Return `task_state` as of a task that nobody has tried, in its first stage again. See also `first_params_if`."""
    return fresh_state(now, {**in_first_stage(), **changes})


def in_first_stage() -> Document:
    """Return the fields of `task_state` that bring a task back to the queue of its first stage. The derivation moves it."""
    moves_on = {"$mergeObjects": [rules.MOVES_TO, {"queue": of_first_stage("queue")}]}
    return {
        "home": {"$ifNull": [of_first_stage("queue"), rules.HOME, "$$REMOVE"]},
        "moves_to": {"$cond": [{"$and": [STAGED, {"$gt": [rules.MOVES_TO, None]}]}, moves_on, rules.MOVES_TO]},
        "stages": "$$REMOVE",
        "own_params": "$$REMOVE",
    }


def first_params_if(condition: rules.Expression) -> rules.Expression:
    """Return the params with which the task starts, where the condition holds; otherwise those that it has."""
    return {"$cond": [{"$and": [STAGED, condition]}, of_first_stage("params"), "$params"]}


def of_first_stage(name: str) -> rules.Expression:
    """Return a field of the first stage; missing if there is none."""
    return {"$let": {"vars": {"first": {"$arrayElemAt": ["$task_state.stages", 0]}}, "in": f"$$first.{name}"}}


def reopened_if_requested(now: rules.Expression, reopened_by: rules.Expression = "$$REMOVE") -> Document:
    """Reopen a task that is finished now, if `run_again` was requested after its executions had started.

    An execution notes at its claim how many requests there were (`wish`); a publish during the run adds one. A request is
    served by all executions that SUCCEEDed after it or, if the task FAILs, by one execution after it, even a lost one; for a
    task that has moved on by `Next`, by the stages that began after it.
    """
    lost = {"$concatArrays": ["$$lost", {"$ifNull": ["$task_state.losses", []]}]}
    served = {
        "$cond": [
            {"$eq": ["$$status", "SUCCESS"]},
            {"$min": _requests_seen("$$done")},
            {"$max": _requests_seen({"$concatArrays": ["$$fails", lost]})},
        ]
    }
    unserved = {
        "$let": {
            "vars": {"status": rules.status(now)},
            "in": {
                "$and": [
                    {"$in": ["$$status", ["SUCCESS", "FAIL"]]},
                    {"$gt": ["$task_state.wanted", {"$ifNull": [of_first_stage("wish"), served]}]},
                ],
            },
        }
    }
    wished = {"$gt": ["$task_state.wanted", None]}
    condition = {"$and": [wished, rules.with_facts(now, unserved)]}
    # A task with a sequence key joins its line again, behind whatever was published before the request.
    has_line = {"$gt": [rules.LINE, None]}
    in_line = {
        name: {"$cond": [has_line, value, f"$task_state.{name}"]}
        for name, value in (("in_line", True), ("place", rules.NEXT_PLACE), ("ask_time", rules.next_mark(now)))
    }
    afresh = restarted_state(now, {"reopened_by": reopened_by, **in_line})
    # Restart in the very write that would have finished the task: nobody sees it finished in between.
    return {
        "$set": {
            "task_state": {"$cond": [condition, afresh, "$task_state"]},
            "params": first_params_if(condition),
        }
    }


def _requests_seen(entries: rules.Expression) -> rules.Expression:
    return {"$map": {"input": entries, "in": {"$ifNull": ["$$this.wish", 0]}}}
