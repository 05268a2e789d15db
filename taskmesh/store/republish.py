"""Republish: what a publish does to a task whose key exists already, as far as its publisher asked for that."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from taskmesh.store import repeated, rules
from taskmesh.store.driver import Document
from taskmesh.store.event_stamp import stamp
from taskmesh.store.finish import fresh_state
from taskmesh.store.prepared import prepared

if TYPE_CHECKING:
    from taskmesh.store.publish import Publication

IS_RUNNING: rules.Expression = {"$and": [{"$ne": ["$$live", []]}, {"$eq": ["$status", "RUNNING"]}]}


_COUNTED_AGAINST = ("dropped_fail_cnt", "losses", "lost_cnt", "resume_time", "reopened_by", "conflict_cnt")
"""What `clean_failed` forgets, beside the entries and `timeout_cnt`."""


def constants(publication: Publication) -> Document:
    """What `change_pipeline` refers to: the params, so that they stand in a command once, however large."""
    return {"params": publication.params}


def change_pipeline(publication: Publication, now: datetime, at: rules.Expression) -> list[Document]:
    """Apply a publication to an existing task. What changes nothing leaves the document as it was, event and all."""
    configuration = publication.configuration
    before: Document = {field: f"${field}" for field in ("task_option", "task_state")}
    sets_params = configuration.update_existing_params or configuration.run_again
    before["params_stay"] = {"$eq": ["$params", "$$params"]} if sets_params else True
    stages: list[Document] = [{"$set": {"_before": before}}]
    if sets_params:
        stages.append({"$set": _new_wish(publication, now)})
    if sets_params and configuration.placed:
        stages.append({"$set": {"task_state.moves_to": rules.with_facts(at, _moves_to(configuration.placed))}})
    running = rules.with_facts(at, IS_RUNNING)
    if configuration.run_again:
        again = fresh_state(at, {"wanted": {"$add": [{"$ifNull": ["$task_state.wanted", 0]}, 1]}})
        one_more = {"$mergeObjects": ["$task_state", {"wanted": again["wanted"]}]}
        stages.append({"$set": {"task_state": {"$cond": [running, one_more, again]}}})
    for wanted, state in ((configuration.clean_success, "SUCCESS"), (configuration.clean_failed, "FAIL")):
        if wanted:
            stages.append({"$set": {"task_state": {"$cond": [running, "$task_state", _without(state, at)]}}})
    if configuration.clean_failed:
        forgotten = {name: {"$cond": [running, f"$task_state.{name}", "$$REMOVE"]} for name in _COUNTED_AGAINST}
        stages.append({"$set": {"task_state": forgotten}})
    same = [{"$eq": [f"${field}", f"$_before.{field}"]} for field in ("task_option", "task_state")]
    unchanged = {"$and": ["$_before.params_stay", *same]}
    marks = {
        name: {"$cond": [unchanged, {"$ifNull": [f"${name}", "$$REMOVE"]}, value]}
        for name, value in (
            ("event", stamp("published", at)),
            ("change_ids", repeated.with_change(publication.publish_id)),
        )
    }
    return [*stages, {"$set": marks}, {"$unset": "_before"}, *prepared(rules.derivation, at)]


def _new_wish(publication: Publication, now: datetime) -> Document:
    """The params, and the times and options that the publisher set itself."""
    configuration = publication.configuration
    start_time = configuration.starts(now)
    version = {"$ifNull": ["$task_state.params_version", 0]}
    state: Document = {
        "params_version": {
            "$cond": [
                "$_before.params_stay",
                {"$ifNull": ["$task_state.params_version", "$$REMOVE"]},
                {"$add": [version, 1]},
            ]
        }
    }
    if start_time is not None or configuration.run_again:
        state["start_time"] = start_time
    if configuration.expire_time is not None or configuration.run_again:
        state["expire_time"] = configuration.expire_time
    changes: Document = {"params": "$$params", "task_state": state}
    if publication.trace is not None:
        changes["trace"] = {"$literal": publication.trace}
    if configuration.tuned:
        changes["task_option"] = {name: {"$literal": value} for name, value in configuration.tuned.items()}
    return changes


def _moves_to(placed: Mapping[str, Any]) -> rules.Expression:
    """Where the task is to go, from where it is or was to go; nothing new if that is the same. The derivation moves it."""
    now_at = {"queue": "$queue", "group": {"$ifNull": ["$group", None]}}
    told = {name: f"{rules.MOVES_TO}.{name}" for name in now_at}
    going_to = {"$cond": [{"$gt": [rules.MOVES_TO, None]}, told, now_at]}
    wanted = {"$mergeObjects": ["$$going_to", {"$literal": placed}]}
    return {
        "$let": {
            "vars": {"going_to": going_to},
            "in": {
                "$cond": [
                    {"$eq": [wanted, "$$going_to"]},
                    rules.MOVES_TO,
                    {"$mergeObjects": [wanted, {"held": "$$live.running_id"}]},
                ]
            },
        }
    }


def _without(state: str, at: rules.Expression) -> rules.Expression:
    """`task_state` without the entries of this state; without failures, a lease that ran out counts no more either."""
    dropped: rules.Expression = {"$eq": ["$$this.state", state]}
    if state == "FAIL":
        dropped = {"$or": [dropped, rules.is_lost(at)]}
    changes: Document = {"worker_states": {"$filter": {"input": rules.ENTRIES, "cond": {"$not": [dropped]}}}}
    if state == "FAIL":
        changes["timeout_cnt"] = 0
    return {"$mergeObjects": ["$task_state", changes]}
