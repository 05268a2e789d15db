"""Dependencies: tasks that wait for others, by level and not by counting.

Each task names those that wait for it (`task_state.dependents`), and is `pending` as long as it is not finished. A task that
waits has a gate that stays shut as long as `task_state.waits_for` says what becomes of it if one of the others fails. Nothing
counts: whenever something has happened that concerns others, a mark stands in the task (`task_state.ask_time`, set by the
derivation or by the insert), and whoever sees it asks the one question, is anything left that this task waits for, and removes
the mark.

The question is asked on the primary of what a majority has, after that has acknowledged what happened, and in no transaction:
of two that ask at once, at least one sees both. Everything here can be done twice, by anybody, in any order. Who dies in the
middle leaves a mark, which `sweep` finds.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pymongo.errors import OperationFailure, PyMongoError

from taskmesh.model.dependency import After, label
from taskmesh.model.errors import TaskNotFound
from taskmesh.store import children, find, rules, sequences
from taskmesh.store.by_id import MOST_IDS, in_parts, own_value
from taskmesh.store.driver import Document
from taskmesh.store.event_stamp import stamp
from taskmesh.store.malformed import WELL_FORMED
from taskmesh.store.prepared import prepared
from taskmesh.store.server_errors import is_over_deadline
from taskmesh.store.store import Store

logger = logging.getLogger("taskmesh.dependencies")

MARKS_FOUND_AFTER_MS = 1_000
"""So old is a mark when somebody else asks than who made it."""
_ASKED_BY_ANOTHER_MS = 2_000
"""For how long a sweep leaves a mark to another sweep that has just begun with it."""
_ASKED_AT_ONCE = 3
"""So many sets; while the server works on one, others wait for their majority."""
_MOST_NAMED = 10_000
_DEADLINE_MS = 2_000
_PART_DEADLINE_MS = 300
_PARTS = 8
_NAMED = 3
_FEW = 20
"""So many are asked about one by one; more than that, by what is unfinished."""
_FEW_TIMES = 8
_FIRST_HOLD_MS, _LONGEST_HOLD_MS = 1_000, 86_400_000
_UNFINISHED = ["INIT", "RUNNING"]
_ID_ALONE = {"$project": {"_id": 1}}


@dataclass(frozen=True, slots=True)
class _Marked:
    """A task with a mark."""

    id: str
    status: str
    dependents: Sequence[str]
    policy: str | None
    """Of one that waits for others: what becomes of it if one of them fails."""
    linked: bool
    """Whether all that it waits for name it."""
    after: Sequence[str]
    """What it waits for, if it does."""
    ask_time: datetime
    has_children: bool
    parent: str | None
    line: str | None
    """The line that it stands in, or stood in."""
    held: bool
    """Whether it is kept for its dependents, and was so before this mark."""

    @property
    def finished(self) -> bool:
        return self.status not in _UNFINISHED

    @property
    def wants_links(self) -> bool:
        """Whether all that it waits for is to name it: it is new, or begun anew; then one of those may be another by now."""
        return bool(self.after) and (not self.linked or self.policy != "run")


async def check(store: Store, ids: Collection[str], session: Any = None) -> None:
    """Raise `TaskNotFound` unless all these tasks are there."""
    found = await there(store, ids, session)
    if missing := [id_ for id_ in ids if id_ not in found]:
        raise TaskNotFound(
            f"there is no task {', '.join(map(label, missing[:_NAMED]))}{' …' if len(missing) > _NAMED else ''}, which after= "
            "names: publish what is waited for first; nothing was published"
        )


async def there(store: Store, ids: Collection[str], session: Any = None) -> set[str]:
    """Return which of these tasks are there, and not past their retention."""
    tasks = store.driver.collection(store.tasks)
    kept = {"$expr": {"$not": [rules.is_forgotten(store.now)]}}
    found: set[str] = set()
    for part in in_parts(ids):
        cursor = tasks.find({"_id": {"$in": part}, **kept}, {"_id": 1}, batch_size=MOST_IDS, session=session)
        found |= {document["_id"] for document in await cursor.to_list(None)}
    return found


async def afters(store: Store, ids: Collection[str]) -> dict[str, After]:
    """Return what those of these tasks wait for, or have waited for, that are there and whose publishers have said it."""
    tasks = store.driver.collection(store.tasks)
    told = {"task_state.after": {"$exists": True}, "$expr": {"$not": [rules.is_forgotten(store.now)]}}
    found: dict[str, After] = {}
    for part in in_parts(ids):
        cursor = tasks.find({"_id": {"$in": part}, **told}, {"task_state.after": 1}, batch_size=MOST_IDS)
        found |= {task["_id"]: After.of(task["task_state"]["after"]) for task in await cursor.to_list(None)}
    return found


async def tell(store: Store, ids: Collection[str]) -> None:
    """Ask what the marks of these tasks want asked, and of those that this concerns in turn.

    To be called when a majority has what left the marks. What cannot be done now is left to a sweep.
    """
    try:
        todo = list(ids)
        while todo:
            concerned: set[str] = set()
            for part in in_parts(todo):
                concerned |= await _answer(store, await _marked(store, part))
            todo = sorted(concerned)
    except PyMongoError as error:
        logger.info(
            "dependents could not be told now (%s: %.200s): a sweep tells them shortly", type(error).__name__, error
        )


async def sweep(store: Store, after_ms: int = MARKS_FOUND_AFTER_MS, known: Collection[str] = ()) -> int:
    """Ask for all whose mark nobody has answered for so long; return how many there were, up to a thousand.

    `known`: those about which the caller is asking already.
    """
    due = {
        "task_state.ask_time": {"$exists": True},
        "$expr": {"$lte": [rules.ASK_TIME, {"$subtract": [store.now, after_ms]}]},
        **WELL_FORMED,
    }
    cursor = store.driver.collection(store.tasks).find(due, {"_id": 1}, limit=MOST_IDS, batch_size=MOST_IDS)
    ids = [document["_id"] for document in await cursor.hint("taskmesh_ask").to_list(None)]
    ids = [id_ for id_ in ids if id_ not in known]
    if ids:
        # So that not every worker does the same; if this one dies, the marks are due again soon.
        later = {"$add": [store.now, _ASKED_BY_ANOTHER_MS - MARKS_FOUND_AFTER_MS]}
        # The mark, put off.
        await store.update({"_id": {"$in": ids}, **due}, [{"$set": {"task_state.ask_time": later}}], _DEADLINE_MS)
        await tell(store, ids)
    return len(ids)


async def any_marks(store: Store) -> bool:
    """Whether somebody is about to ask, so that tasks may become claimable by that."""
    due = {"task_state.ask_time": {"$exists": True}, "$expr": {"$lte": [rules.ASK_TIME, store.now]}}
    cursor = store.driver.collection(store.tasks, majority=True).find(due, {"_id": 1}, limit=1)
    return bool(await cursor.hint("taskmesh_ask").to_list(1))


async def open_edges(store: Store, id_: str) -> tuple[int, list[Document]]:
    """Return how many unfinished tasks this one waits for, and the first few (`_id`, `status`)."""
    which = {"task_state.pending": True, "task_state.dependents": id_}
    tasks = store.driver.collection(store.tasks)
    cursor = tasks.find(which, {"status": 1}, limit=_NAMED, batch_size=_NAMED)
    first = await cursor.hint("taskmesh_pending").to_list(None)
    return await tasks.count_documents(which, hint="taskmesh_pending"), first


async def waited_for(store: Store, id_: str) -> list[Document]:
    """Return what this task waits for or has waited for, as it stands, in that order; of what is gone the `_id` alone."""
    found = await store.find({"_id": id_}, {"ids": "$task_state.after.ids"})
    ids: list[str] = (found[0].get("ids") or []) if found else []
    tasks: dict[str, Document] = {}
    for part in in_parts(ids):
        read = find.get(store, part, params=False, majority=True, forgotten=True)
        tasks |= {task["_id"]: task for task in await read if task["status"] != "DELETED"}
    return [tasks.get(each, {"_id": each}) for each in ids]


async def _marked(store: Store, ids: Sequence[str]) -> list[_Marked]:
    fields = {
        "status": 1,
        "finish_time": 1,
        **{
            f"task_state.{name}": 1
            for name in ("dependents", "waits_for", "unlinked", "ask_time", "has_children", "parent", "line")
        },
        "task_state.after": {"$cond": [{"$gt": ["$task_state.waits_for", None]}, "$task_state.after", "$$REMOVE"]},
    }
    # By `_id`: the server may prefer the index of marks, and look at all that there are.
    query = {"_id": {"$in": list(ids)}, "task_state.ask_time": {"$exists": True}}
    found = await store.find(query, fields, majority=True, hint="_id_")
    return [
        _Marked(
            id=document["_id"],
            status=document["status"],
            dependents=state.get("dependents", ()),
            policy=state.get("waits_for"),
            linked="unlinked" not in state,
            after=state["after"]["ids"] if "after" in state else (),
            ask_time=state["ask_time"],
            has_children="has_children" in state,
            parent=state.get("parent"),
            line=state.get("line"),
            held="finish_time" in document and state["ask_time"] > document["finish_time"],
        )
        for document in found
        for state in (document["task_state"],)
    ]


async def _answer(store: Store, marked: Sequence[_Marked]) -> set[str]:
    """Ask what these marks want asked, and remove them; return which tasks have changed by that."""
    concerned: set[str] = set()
    for some in _sets(marked):
        done = [
            await _link(store, [task for task in some if task.wants_links and not task.finished]),
            await _fail_those_with_failures(store, some, concerned),
            await _restore_dependents(store, some, concerned),
        ]
        # What was started by a task that did not succeed is not wanted any more.
        childless = [task.id for task in some if task.has_children and task.finished and task.status != "SUCCESS"]
        concerned.update(await children.cancel(store, childless) if childless else ())
        asked = {id_ for task in some if task.finished for id_ in task.dependents}
        asked |= {task.id for task in some if task.policy is not None and not task.finished}
        parts = list(in_parts(sorted(asked)))
        for start in range(0, len(parts), _ASKED_AT_ONCE):
            asking = (_ask(store, part, concerned) for part in parts[start : start + _ASKED_AT_ONCE])
            done += await asyncio.gather(*asking)
        done.append(await sequences.advance(store, {task.line for task in some if task.line is not None}))
        await _release(store, [task.id for task in some if task.held])
        if all(done):
            await _unmark(store, some)
    return concerned


def _sets(marked: Sequence[_Marked]) -> Iterator[Sequence[_Marked]]:
    """Part marks into sets that one command can be about: a task may name ten thousand others."""
    some: list[_Marked] = []
    named = 0
    for task in marked:
        named += len(task.dependents) + len(task.after)
        if some and (len(some) == MOST_IDS or named > _MOST_NAMED):
            yield some
            some, named = [], len(task.dependents) + len(task.after)
        some.append(task)
    if some:
        yield some


async def _link(store: Store, waiting: Sequence[_Marked]) -> bool:
    """Let each task that these wait for name them. What is not there (any more) will count as deleted."""
    by_dependencies: dict[tuple[str, ...], list[str]] = {}
    for task in waiting:
        by_dependencies.setdefault(tuple(task.after), []).append(task.id)
    done = True
    for dependencies, dependents in by_dependencies.items():
        linked = True
        for part in in_parts(dependencies):
            linked &= await _update(store, part, {}, linking_pipeline(dependents, store.now))
        if linked:
            # From now on a question about it finds all that it waits for.
            await _update(store, dependents, {}, [{"$unset": "task_state.unlinked"}])
        done &= linked
    return done


def linking_pipeline(dependents: Sequence[str], now: rules.Expression) -> list[Document]:
    """Let a task name these that wait for it: it is kept for them, if it is finished already."""
    known = {"$cond": [{"$isArray": [rules.DEPENDENTS]}, rules.DEPENDENTS, []]}
    later = {"$cond": [_is_finished, {"$add": [now, _FIRST_HOLD_MS]}, "$$REMOVE"]}
    return [
        # Those that it names already, and these.
        {"$set": {"task_state.dependents": {"$setUnion": [known, {"$literal": list(dependents)}]}}},
        # Its retention, if that has begun, stands still again.
        {"$unset": "task_state.released_time"},
        # One that is finished has nothing to tell them, since they ask themselves; but it is kept for them.
        {"$set": {"task_state.ask_time": {"$ifNull": [rules.ASK_TIME, later]}}},
        *prepared(rules.derivation, now),
    ]


_is_finished: rules.Expression = {"$not": [{"$in": ["$status", _UNFINISHED]}]}


async def _fail_those_with_failures(store: Store, marked: Sequence[_Marked], concerned: set[str]) -> bool:
    """Fail what wants that and waits for a task that ended in any other way than SUCCESS: with all that are known by now.

    Those that name one of these tasks among the tasks that they wait for; and of these, what such a task had ended before it
    could tell, or is gone.
    """
    after_of = {task.id: task.after for task in marked if task.policy == "fail" and not task.finished}
    bad = [task for task in marked if task.finished and task.status != "SUCCESS"]
    # But for a child's parent, whose handler hears of it from `results`.
    told = {id_ for task in bad for id_ in task.dependents if id_ != task.parent}
    for part in in_parts(sorted(told - after_of.keys())):
        waiting = {"_id": {"$in": part}, "status": "INIT"}
        rows = await store.find(waiting, {"after": "$task_state.after.ids"}, majority=True)
        after_of |= {row["_id"]: row.get("after", ()) for row in rows}
    ends = await _ends(store, {id_ for after in after_of.values() for id_ in after})
    done, failed = await _fail(store, after_of, ends)
    concerned.update(told, failed)
    return done


async def _ends(store: Store, ids: Collection[str]) -> dict[str, str]:
    """Return the statuses of those of these tasks that are there."""
    ends: dict[str, str] = {}
    for part in in_parts(ids):
        found = await store.find({"_id": {"$in": part}}, {"status": 1}, majority=True)
        ends.update((document["_id"], document["status"]) for document in found)
    return ends


async def _fail(
    store: Store, after_of: Mapping[str, Sequence[str]], ends: Mapping[str, str]
) -> tuple[bool, Collection[str]]:
    """Fail each of these that wants it, and waits for a task that ended in any other way than SUCCESS.

    One that is unfinished has been begun anew meanwhile: it tells when it ends. Returns whether all is done, and which were to
    fail.

    The reason names the first few in the order of its `after`, so that it is the same whoever tells, and in whatever order.
    """
    by_cause: dict[tuple[str, ...], list[str]] = {}
    for dependent, after in after_of.items():
        if bad := [id_ for id_ in after if ends.get(id_) not in (*_UNFINISHED, "SUCCESS")]:
            by_cause.setdefault(tuple(bad[:_NAMED]), []).append(dependent)
    now = store.now
    done = True
    for causes, dependents in by_cause.items():
        how = {label(id_): ends.get(id_, "DELETED") for id_ in causes}
        told = [f"{name} {'was deleted' if end == 'DELETED' else f'ended as {end}'}" for name, end in how.items()]
        reason = f"its dependency {', '.join(told)}"
        failure = {"id": {"$literal": causes[0]}, "reason": {"$literal": reason}, "time": now}
        pipeline = [
            # Why it failed, without having run; from which its status follows.
            {"$set": {"task_state.dependency_failure": failure, "event": stamp("dependency_failed", now)}},
            *prepared(rules.derivation, now),
        ]
        for part in in_parts(dependents):
            done &= await _update(store, part, {"task_state.waits_for": "fail", "status": "INIT"}, pipeline)
    return done, [dependent for dependents in by_cause.values() for dependent in dependents]


async def _restore_dependents(store: Store, marked: Sequence[_Marked], concerned: set[str]) -> bool:
    """Where a task is begun anew: so are those that failed because of it alone. They are asked about by their own marks.

    One that is SUCCESS may have been begun anew, and be done before anybody has asked.
    """
    failed = {"status": "FAIL"}
    done = True
    for task in marked:
        if not task.finished and task.dependents:
            for part in in_parts(task.dependents):
                done &= await _restore(store, part, failed | {"task_state.dependency_failure.id": task.id})
            concerned.update(task.dependents)
    succeeded = [task for task in marked if task.status == "SUCCESS"]
    because = {"task_state.dependency_failure.id": {"$in": [task.id for task in succeeded]}}
    # Looked for first, since hardly ever there is one. A child's parent does not fail because of it.
    for part in in_parts(sorted({id_ for task in succeeded for id_ in task.dependents if id_ != task.parent})):
        found = await store.find({"_id": {"$in": part}, **failed, **because}, {"_id": 1}, majority=True)
        ids = [row["_id"] for row in found]
        done &= await _restore(store, ids, failed | because)
        concerned.update(ids)
    return done


async def _restore(store: Store, ids: Sequence[str], query: Document) -> bool:
    now = store.now
    pipeline = [
        # It has not failed; its gate is shut as before.
        {"$unset": "task_state.dependency_failure"},
        # Told as what it is.
        {"$set": {"event": stamp("retried", now)}},
        *prepared(rules.derivation, now),
    ]
    return await _update(store, ids, query, pipeline)


async def _ask(store: Store, ids: Sequence[str], concerned: set[str]) -> bool:
    """Ask which of these tasks wait for nothing unfinished any more, and open their gates, or fail them."""
    ready = await _unblocked(store, ids)
    ends = await _ends(store, {id_ for row in ready for id_ in row["wanted"]})
    to_open = [row["_id"] for row in ready if all(ends.get(id_) == "SUCCESS" for id_ in row["wanted"])]
    opened = await open_gates(store, to_open)
    done, failed = await _fail(store, {row["_id"]: row["wanted"] for row in ready if row["policy"] == "fail"}, ends)
    concerned.update(to_open, failed)
    return opened and done


async def _unblocked(store: Store, ids: Sequence[str]) -> list[Document]:
    """Return those of these tasks that wait, are linked, and of whose dependencies none is unfinished.

    Of each its policy, and which tasks have to be SUCCESS for its gate to open.
    """
    waits = {"task_state.waits_for": {"$exists": True}, "task_state.unlinked": {"$exists": False}, "status": "INIT"}
    wanted = {"$cond": [{"$eq": ["$task_state.waits_for", "run"]}, [], {"$ifNull": ["$task_state.after.ids", []]}]}
    fields: Document = {"policy": "$task_state.waits_for", "wanted": wanted}
    if len(ids) > _FEW:
        blocked = await _blocked(store, ids)
        return await store.find({"_id": {"$in": [i for i in ids if i not in blocked]}, **waits}, fields, majority=True)
    stages: list[Document] = [
        # Those of them that wait.
        {"$match": {"_id": {"$in": list(ids)}, **waits}},
        # One unfinished task that names it is enough: by the index of those alone, however many there are.
        {
            "$lookup": {
                "from": store.tasks,
                "localField": "_id",
                "foreignField": "task_state.dependents",
                # By the index of what is pending, which ends at the first.
                "pipeline": [{"$match": {"task_state.pending": True}}, {"$limit": 1}, _ID_ALONE],
                "as": "left",
            }
        },
        # Those for which there is none, with what has to be SUCCESS.
        {"$match": {"left": []}},
        # (Only now, since these may be ten thousand.)
        {"$project": fields},
    ]
    return await store.driver.rows(store.tasks, stages, majority=True)


async def _blocked(store: Store, ids: Sequence[str]) -> set[str]:
    """Return which of many tasks wait for something unfinished: all at once, from the unfinished that name any of them."""
    asked = {"$literal": list(ids)}
    stages: list[Document] = [
        # Whatever is unfinished and names one of them, by the index of what is pending.
        {"$match": {"task_state.pending": True, "task_state.dependents": {"$in": list(ids)}}},
        # Of ten thousand that such a one may name, only those that were asked about.
        {"$project": {"_id": 0, "dependents": {"$setIntersection": [rules.DEPENDENTS, asked]}}},
        # Each of those once.
        {"$unwind": "$dependents"},
        # (However many unfinished ones name it.)
        {"$group": {"_id": "$dependents"}},
    ]
    return {row["_id"] for row in await store.driver.rows(store.tasks, stages, majority=True, hint="taskmesh_pending")}


async def open_gates(store: Store, ids: Sequence[str]) -> bool:
    """Open the gate `dependencies` of these tasks. What is open already is left alone."""
    now = store.now
    query = {"task_state.waits_for": {"$exists": True}}
    pipeline = [
        # That is the gate.
        {"$unset": "task_state.waits_for"},
        # A handler that was put aside until its children are finished may go on.
        {"$set": {"task_state.suspended_until": {"$cond": [_joins, now, {"$ifNull": [_suspended_until, "$$REMOVE"]}]}}},
        # Told to those who claim.
        {"$set": {"event": stamp("opened", now)}},
        *prepared(rules.derivation, now),
    ]
    return await _update(store, ids, query, pipeline)


_suspended_until = "$task_state.suspended_until"
_joins: rules.Expression = {
    "$and": [{"$gt": [_suspended_until, None]}, {"$eq": ["$task_state.suspended_for.kind", "join"]}]
}


async def _release(store: Store, held: Sequence[str]) -> None:
    """Begin the retention of finished tasks that nobody unfinished waits for: when the last of those was finished."""
    if not held:
        return
    stages: list[Document] = [
        # What is finished, with those that wait or have waited for it.
        {"$match": {"_id": {"$in": list(held)}, "finish_time": {"$exists": True}}},
        # (By `_id` alone.)
        {"$project": {"dependents": {"$concatArrays": [{"$ifNull": [rules.DEPENDENTS, []]}, ["$task_state.parent"]]}}},
        # Those that wait for it: the end of the last, and whether one is unfinished.
        {
            "$lookup": {
                "from": store.tasks,
                "localField": "dependents",
                "foreignField": "_id",
                "pipeline": [
                    # One row, or none if none is there any more.
                    {
                        "$group": {
                            "_id": None,
                            "unfinished": {"$max": {"$in": ["$status", _UNFINISHED]}},
                            "last": {"$max": "$finish_time"},
                        }
                    }
                ],
                "as": "by",
            }
        },
        # Where none is unfinished: when the last ended.
        {"$match": {"by.unfinished": {"$ne": True}}},
        # (Null, if none is there any more.)
        {"$project": {"last": {"$first": "$by.last"}}},
    ]
    by_time: dict[datetime | None, list[str]] = {}
    for row in await store.driver.rows(store.tasks, stages, majority=True):
        by_time.setdefault(row.get("last"), []).append(row["_id"])
    for last, ids in by_time.items():
        # From then on its retention runs.
        pipeline = [{"$set": {"task_state.released_time": last or store.now}}, *prepared(rules.derivation, store.now)]
        await _update(store, ids, {"finish_time": {"$exists": True}}, pipeline)


async def _unmark(store: Store, marked: Sequence[_Marked]) -> None:
    """Remove the marks that were answered, and none that came since. What is kept for its dependents is asked about again."""
    now = store.now
    retained_ms = {
        "$cond": [{"$eq": ["$status", "SUCCESS"]}, "$task_option.retain_success_ms", "$task_option.retain_failed_ms"]
    }
    kept = {
        "$and": [
            _is_finished,
            rules.HAS_DEPENDENTS,
            {"$gt": [retained_ms, None]},
            {"$ne": ["$status", "DELETED"]},
            {"$not": [{"$gt": ["$task_state.released_time", None]}]},
        ]
    }
    # Not more often than it has waited already, or than it would be kept anyway.
    waited_ms = {"$divide": [{"$subtract": [now, "$finish_time"]}, 4]}
    pause_ms = {"$min": [{"$max": [_FIRST_HOLD_MS, retained_ms, waited_ms]}, _LONGEST_HOLD_MS]}
    ask_again = {"$add": [now, {"$toLong": pause_ms}]}
    mark = {"$cond": [kept, ask_again, "$$REMOVE"]}
    released = [task for task in marked if task.status == "DELETED" or (task.line is not None and task.finished)]
    # It may go now: that is derived.
    await _unmark_all(store, released, mark, prepared(rules.derivation, now))
    await _unmark_all(store, [task for task in marked if task not in released], mark, [])


async def _unmark_all(
    store: Store, marked: Sequence[_Marked], mark: rules.Expression, derived: Sequence[Document]
) -> None:
    """Put `mark` in the place of the marks that were answered."""
    if not marked:
        return
    by_time: dict[datetime, list[str]] = {}
    for task in marked:
        by_time.setdefault(task.ask_time, []).append(task.id)
    if len(by_time) <= _FEW_TIMES:  # what was finished together has one mark
        for time, ids in by_time.items():
            # The mark that was answered goes, or is put off.
            stages: list[Document] = [{"$set": {"task_state.ask_time": mark}}, *derived]
            await _update(store, ids, {"task_state.ask_time": time}, stages)
        return
    its_own = own_value([task.id for task in marked], [task.ask_time for task in marked])
    answered = {"$eq": [rules.ASK_TIME, its_own]}
    # Where the mark is the one that was answered: it goes, or is put off.
    stages = [{"$set": {"task_state.ask_time": {"$cond": [answered, mark, rules.ASK_TIME]}}}, *derived]
    await _update(store, [task.id for task in marked], {"task_state.ask_time": {"$exists": True}}, stages)


async def _update(store: Store, ids: Sequence[str], query: Document, pipeline: Sequence[Document]) -> bool:
    """Update these tasks; False if somebody's open transaction held one of them, so that a sweep has to do it again."""
    if not ids:
        return True
    try:
        await store.update({"_id": {"$in": list(ids)}, **query}, pipeline, _DEADLINE_MS, hint="_id_")
    except OperationFailure as error:
        if not is_over_deadline(error):
            raise
    else:
        return True
    shuffled = random.sample(list(ids), len(ids))
    parts = [shuffled[i::_PARTS] for i in range(min(_PARTS, len(shuffled)))]
    return all(await asyncio.gather(*(_update_part(store, part, query, pipeline) for part in parts)))


async def _update_part(store: Store, ids: Sequence[str], query: Document, pipeline: Sequence[Document]) -> bool:
    try:
        await store.update({"_id": {"$in": list(ids)}, **query}, pipeline, _PART_DEADLINE_MS, hint="_id_")
    except OperationFailure as error:
        if not is_over_deadline(error):
            raise
        return False
    return True
