"""Dependencies: tasks that wait for others. What counts is the state of the tasks, not a counter.

Each task names its dependents (`task_state.dependents`), and is `pending` as long as it is not finished. A waiting task has a
gate that stays shut as long as `task_state.waits_for` is set, which says what happens if one of the others fails. Nothing is
counted: whenever something happens that concerns others, a mark is set in the task (`task_state.ask_time`, by the derivation or
the insert). Whoever sees the mark checks one thing, whether anything is left that the dependent waits for, and removes the
mark, at once or a moment later (`Leftovers`).

The check reads, on the primary, what a majority has, after a majority has acknowledged what happened, and in no transaction: of
two checks at once, at least one sees both changes. Everything here can be done twice, by anybody, in any order. A process that
dies in the middle leaves a mark, which `sweep` finds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import anyio
from pymongo.errors import PyMongoError

from taskmesh.model.dependency import label
from taskmesh.model.errors import TaskNotFound
from taskmesh.store import find, rules
from taskmesh.store.grouped import Grouped
from taskmesh.store.malformed import WELL_FORMED
from taskmesh.store.mongodb.driver import Document
from taskmesh.store.mongodb.server_errors import patiently
from taskmesh.store.pipeline.by_id import MOST_IDS, in_parts, own_value
from taskmesh.store.pipeline.event_stamp import stamp
from taskmesh.store.pipeline.prepared import prepared
from taskmesh.store.publication import Publication, new_document
from taskmesh.store.relations import children, sequences
from taskmesh.store.relations.around_locks import DEADLINE_MS, update_around_locks
from taskmesh.store.relations.opening import Gate, open_gate
from taskmesh.store.store import Store

logger = logging.getLogger("taskmesh.dependencies")

MARKS_FOUND_AFTER_MS = 1_000
"""A mark is at least this old when a worker other than the one that set it acts on it."""
_ASKED_BY_ANOTHER_MS = 2_000
"""How long a sweep leaves a mark to another sweep that has just started with it."""
_ASKED_AT_ONCE = 3
"""So many sets at once: while the server works on one, others wait for their majority."""
_MOST_NAMED = 10_000
_LINKED_AT_ONCE_BYTES = 2_000_000
"""More than these are linked in several updates: a pipeline has to fit in 16 MB."""
_LEFT_FOR_S = 0.3
"""How long marks that were acted on are left: others find them much later."""
_CLOSES_WITHIN_S = 2.0
_ENOUGH = 50
"""More marks than these are removed at once, since nothing is gained by waiting for others."""
_NAMED = 3
_FEW = 20
"""Up to so many are checked one by one; more of them, by what is unfinished."""
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
    """For a task that waits for others: what happens if one of them fails."""
    linked: bool
    """Whether a check finds all that it waits for. Noted of tasks that run however those end; the others are asked about each."""
    after: Sequence[str]
    """What it waits for, if anything."""
    ask_time: datetime
    has_children: bool
    parent: str | None
    in_line: Document | None
    """The task as `sequences` reads it, if it stands in a line, or stood there."""
    held: bool
    """Whether it is kept for its dependents, and was before this mark."""

    @property
    def finished(self) -> bool:
        return self.status not in _UNFINISHED

    @property
    def is_released(self) -> bool:
        """Whether nobody waits for it any more, once its mark was acted on."""
        return self.status == "DELETED" or (self.in_line is not None and self.finished)

    @property
    def wants_links(self) -> bool:
        """Whether its dependencies still have to name it: it is new, or restarted, and they may be other tasks by now."""
        return bool(self.after) and (not self.linked or self.policy != "run")


async def check(store: Store, ids: Collection[str], session: Any = None) -> None:
    """Raise `TaskNotFound` unless all these tasks exist."""
    raise_if_missing(ids, await there(store, ids, session))


def raise_if_missing(ids: Collection[str], found: Container[str]) -> None:
    """Raise `TaskNotFound` unless all these tasks are among those that were found."""
    if missing := [id_ for id_ in ids if id_ not in found]:
        raise TaskNotFound(
            f"there is no task {', '.join(map(label, missing[:_NAMED]))}{' …' if len(missing) > _NAMED else ''}, which after= "
            "names: publish dependencies first; nothing was published"
        )


async def there(store: Store, ids: Collection[str], session: Any = None) -> set[str]:
    """Return which of these tasks exist and are not past their retention."""
    tasks = store.driver.collection(store.tasks)
    kept = {"$expr": {"$not": [rules.is_forgotten(store.now)]}}
    found: set[str] = set()
    for part in in_parts(ids):
        cursor = tasks.find({"_id": {"$in": part}, **kept}, {"_id": 1}, batch_size=MOST_IDS, session=session)
        found |= {document["_id"] for document in await cursor.to_list(None)}
    return found


class Leftovers:
    """What can wait once marks have been acted on: to remove these, and lines that are empty. Together, a moment later.

    If the process dies before, a sweep finds the marks, and acts on them again.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._marked: dict[str, _Marked] = {}
        """By `_id`: a mark that was acted on later has replaced the one before."""
        self._empty: set[str] = set()
        self._at_once = asyncio.Event()
        self._removing: asyncio.Task[None] | None = None

    def add(self, marked: Sequence[_Marked], empty: Collection[str]) -> None:
        """Leave these for a moment. `empty`: lines whose head has left, and in which nobody waited."""
        self._marked.update((task.id, task) for task in marked)
        self._empty.update(empty)
        if self._removing is None and self._marked:
            self._removing = asyncio.get_running_loop().create_task(self._remove(), name="taskmesh leftovers")

    async def removed(self) -> None:
        """Remove all of it now."""
        while self._removing is not None:
            self._at_once.set()
            await asyncio.wait([self._removing])

    async def close(self) -> None:
        """Remove it now, as far as that takes a moment only."""
        if self._removing is None or self._removing.get_loop() is not asyncio.get_running_loop():
            return  # (A forked child, for example, has nothing to remove.)
        with anyio.move_on_after(_CLOSES_WITHIN_S):
            await self.removed()
        if self._removing is not None:
            self._removing.cancel()

    async def _remove(self) -> None:
        try:
            while self._marked:
                with anyio.move_on_after(_LEFT_FOR_S):
                    await self._at_once.wait()
                self._at_once.clear()
                marked, self._marked = list(self._marked.values()), {}
                empty, self._empty = self._empty, set()
                if await sequences.advance(self._store, empty):
                    for some in _sets(marked):
                        await _unmark(self._store, some)
        except PyMongoError as error:
            logger.info("marks could not be removed now (%s: %.200s): a sweep does it", type(error).__name__, error)
        except Exception:
            logger.exception("unexpected error while removing marks: a sweep does it")
        finally:
            self._removing = None


async def tell(
    store: Store, ids: Collection[str], leftovers: Leftovers | None = None, new: Sequence[_Marked] = ()
) -> None:
    """Act on the marks of these tasks, and of the tasks that this concerns in turn.

    Call it when a majority has what set the marks. What cannot be done now is left to a sweep.

    `leftovers`: takes what can wait. None: nothing waits. `new`: others, whose marks need not be read.
    """
    answered = {(task.id, task.ask_time) for task in new}
    try:
        concerned = await _answer(store, new, leftovers)
        todo = sorted(concerned.union(ids))
        while todo:
            concerned = set()
            for part in in_parts(todo):
                marked = [task for task in await _marked(store, part) if (task.id, task.ask_time) not in answered]
                # (What is left for later is still marked, and may be concerned by what follows from it.)
                answered.update((task.id, task.ask_time) for task in marked)
                concerned |= await _answer(store, marked, leftovers)
            todo = sorted(concerned)
    except PyMongoError as error:
        logger.info(
            "dependents could not be told now (%s: %.200s): a sweep tells them shortly", type(error).__name__, error
        )


class Links:
    """What the publishers of one process ask and say about dependencies and lines; those of one moment together."""

    def __init__(self, store: Store) -> None:
        self._leftovers = Leftovers(store)
        self._there = _There(store)
        self._tell = _Tell(store, self._leftovers)

    async def check(self, ids: Collection[str]) -> None:
        """Raise `TaskNotFound` unless all these tasks exist. Tries again while the database is unreliable."""
        raise_if_missing(ids, await patiently(lambda: self._there.of(ids)))

    async def tell(self, publications: Iterable[tuple[Publication, datetime | None]]) -> None:
        """See `tell`. With each publication goes the mark of its task, if that is new."""
        await self._tell.of([_Asked(each.id, _new(each, mark)) for each, mark in publications])

    async def close(self) -> None:
        """See `Leftovers.close`."""
        await self._leftovers.close()


class _There(Grouped[str, bool]):
    async def call(self, ids: Sequence[str]) -> Mapping[str, bool]:
        return dict.fromkeys(await there(self._store, ids), True)


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    """A task that may have a mark. `marked`: if it is new, and nothing has to be read."""

    id: str
    marked: _Marked | None


class _Tell(Grouped[_Asked, None]):
    def __init__(self, store: Store, leftovers: Leftovers) -> None:
        super().__init__(store)
        self._leftovers = leftovers

    async def call(self, asked: Sequence[_Asked]) -> Mapping[_Asked, None]:
        known = {each.id for each in asked if each.marked is None}
        new = [each.marked for each in asked if each.marked is not None]
        await tell(self._store, known, self._leftovers, new)
        return {}


def due(store: Store, after_ms: int) -> Document:
    """Return the filter for tasks with a mark that is at least so old."""
    old = {"$lte": [rules.ASK_TIME, {"$subtract": [store.now, after_ms]}]}
    return {"task_state.ask_time": {"$exists": True}, "$expr": old}


async def sweep(store: Store, after_ms: int = MARKS_FOUND_AFTER_MS, known: Collection[str] = ()) -> int:
    """Act on all marks that are at least so old. Return how many there were, up to a thousand.

    `known`: the tasks that the caller is dealing with already.
    """
    marked = {**due(store, after_ms), **WELL_FORMED}
    cursor = store.driver.collection(store.tasks).find(marked, {"_id": 1}, limit=MOST_IDS, batch_size=MOST_IDS)
    ids = [document["_id"] for document in await cursor.hint("taskmesh_ask").to_list(None)]
    ids = [id_ for id_ in ids if id_ not in known]
    if ids:
        # So that not every worker does the same. If this one dies, the marks are due again soon.
        later = {"$add": [store.now, _ASKED_BY_ANOTHER_MS - MARKS_FOUND_AFTER_MS]}
        # The mark, postponed.
        await store.update({"_id": {"$in": ids}, **marked}, [{"$set": {"task_state.ask_time": later}}], DEADLINE_MS)
        await tell(store, ids)
    return len(ids)


async def any_marks(store: Store) -> bool:
    """Whether somebody is about to act on a mark, which may make tasks claimable."""
    cursor = store.driver.collection(store.tasks, majority=True).find(due(store, 0), {"_id": 1}, limit=1)
    return bool(await cursor.hint("taskmesh_ask").to_list(1))


async def open_edges(store: Store, id_: str) -> tuple[int, list[Document]]:
    """Return how many unfinished tasks this one waits for, and the first few (`_id`, `status`)."""
    which = {"task_state.pending": True, "task_state.dependents": id_}
    tasks = store.driver.collection(store.tasks)
    cursor = tasks.find(which, {"status": 1}, limit=_NAMED, batch_size=_NAMED)
    first = await cursor.hint("taskmesh_pending").to_list(None)
    return await tasks.count_documents(which, hint="taskmesh_pending"), first


class WaitedFor:
    """Reads what tasks wait for, or have waited for; what is asked at one moment together."""

    def __init__(self, store: Store) -> None:
        self._named = _Named(store)
        self._read = _Read(store)

    async def by(self, id_: str) -> list[Document]:
        """Return the tasks that this one waits for or has waited for, in that order. Of those that are gone: the `_id` alone."""
        ids = (await self._named.of([id_])).get(id_, ())
        tasks = await self._read.of(ids) if ids else {}
        return [tasks.get(each, {"_id": each}) for each in ids]


class _Named(Grouped[str, Sequence[str]]):
    async def call(self, ids: Sequence[str]) -> Mapping[str, Sequence[str]]:
        found = await self._store.find({"_id": {"$in": list(ids)}}, {"ids": "$task_state.after.ids"})
        return {task["_id"]: task.get("ids") or () for task in found}


class _Read(Grouped[str, Document]):
    copied = True

    async def call(self, ids: Sequence[str]) -> Mapping[str, Document]:
        tasks: dict[str, Document] = {}
        for part in in_parts(ids):
            read = find.get(self._store, part, params=False, majority=True, forgotten=True)
            tasks |= {task["_id"]: task for task in await read if task["status"] != "DELETED"}
        return tasks


async def _marked(store: Store, ids: Sequence[str]) -> list[_Marked]:
    fields = {
        "status": 1,
        "finish_time": 1,
        **{
            f"task_state.{name}": 1
            for name in ("dependents", "waits_for", "unlinked", "ask_time", "has_children", "parent")
        },
        **sequences.FIELDS,
        "task_state.after": {"$cond": [{"$gt": ["$task_state.waits_for", None]}, "$task_state.after", "$$REMOVE"]},
    }
    # By `_id`: the server might prefer the index of marks, and look at all of them.
    query = {"_id": {"$in": list(ids)}, "task_state.ask_time": {"$exists": True}}
    return [_read(document) for document in await store.find(query, fields, majority=True, hint="_id_")]


def _new(publication: Publication, mark: datetime | None) -> _Marked | None:
    """Return the task as it was inserted, with this mark."""
    if mark is None:
        return None
    document = new_document(publication, mark)
    return _read({name: document[name] for name in ("_id", "status", "task_state")})


def _read(document: Document) -> _Marked:
    state = document["task_state"]
    return _Marked(
        id=document["_id"],
        status=document["status"],
        dependents=state.get("dependents", ()),
        policy=state.get("waits_for"),
        linked="unlinked" not in state,
        after=state["after"]["ids"] if "after" in state else (),
        ask_time=state["ask_time"],
        has_children="has_children" in state,
        parent=state.get("parent"),
        in_line=document if "line" in state else None,
        held="finish_time" in document and state["ask_time"] > document["finish_time"],
    )


async def _answer(store: Store, marked: Sequence[_Marked], leftovers: Leftovers | None) -> set[str]:
    """Act on these marks, and remove them. Return which tasks have changed by that."""
    concerned: set[str] = set()
    for some in _sets(marked):
        held = await _link(store, [task for task in some if task.wants_links and not task.finished])
        failed, blocked, ready = await _fail_those_with_failures(store, some, concerned)
        done = [not held, failed, await _restore_dependents(store, some, concerned)]
        if ready := ready - held:
            done.append(await open_gate(store, Gate.DEPENDENCIES, sorted(ready)))
            concerned.update(ready)
        # What was started by a task that did not succeed is no longer wanted.
        childless = [task.id for task in some if task.has_children and task.finished and task.status != "SUCCESS"]
        concerned.update(await children.cancel(store, childless) if childless else ())
        asked = {id_ for task in some if task.finished for id_ in task.dependents}
        asked |= {task.id for task in some if task.policy is not None and not task.finished} - held - blocked - ready
        parts = list(in_parts(sorted(asked)))
        for start in range(0, len(parts), _ASKED_AT_ONCE):
            asking = (_ask(store, part, concerned) for part in parts[start : start + _ASKED_AT_ONCE])
            done += await asyncio.gather(*asking)
        in_line = [task.in_line for task in some if task.in_line is not None]
        empty = None if leftovers is None or len(some) > _ENOUGH else set[str]()
        done.append(await sequences.advance_those_of(store, in_line, empty))
        await _release(store, [task.id for task in some if task.held])
        if all(done) and leftovers is not None and empty is not None:
            leftovers.add(some, empty)
        elif all(done):
            await _unmark(store, some)
    return concerned


def _sets(marked: Sequence[_Marked]) -> Iterator[Sequence[_Marked]]:
    """Divide marks into sets that fit one command: a task may name ten thousand others."""
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


async def _link(store: Store, waiting: Sequence[_Marked]) -> set[str]:
    """Let the dependencies of these tasks name them. A dependency that does not exist (any more) will count as deleted.

    Returns those that could not be linked, since somebody's open transaction holds a dependency: a sweep has to do it again.
    """
    by_dependencies: dict[tuple[str, ...], list[_Marked]] = {}
    for task in waiting:
        by_dependencies.setdefault(tuple(task.after), []).append(task)
    if len(by_dependencies) > 1 and await _link_at_once(store, waiting):
        return set()
    held: set[str] = set()
    for dependencies, dependents in by_dependencies.items():
        ids = [task.id for task in dependents]
        linked = True
        for part in in_parts(dependencies):
            linked &= await _name(store, part, {"$literal": ids})
        if not (linked and await _note_linked(store, dependents)):
            held.update(ids)
    return held


async def _link_at_once(store: Store, waiting: Sequence[_Marked]) -> bool:
    """Link all in one update. False: that is too large, or somebody's open transaction holds a dependency.

    (Which is to stop only its own dependents.)
    """
    if sum(len(task.id.encode()) * len(task.after) for task in waiting) > _LINKED_AT_ONCE_BYTES:
        return False
    dependents_of: dict[str, list[str]] = {}
    for task in waiting:
        for dependency in task.after:
            dependents_of.setdefault(dependency, []).append(task.id)
    for part in in_parts(dependents_of):
        if not await _name(store, part, own_value(part, [dependents_of[id_] for id_ in part])):
            return False
    return await _note_linked(store, waiting)


async def _note_linked(store: Store, dependents: Sequence[_Marked]) -> bool:
    # From now on a check finds all that these wait for.
    linked = [{"$unset": "task_state.unlinked"}]
    return await _update(store, [task.id for task in dependents if not task.linked], {}, linked)


async def _name(store: Store, dependencies: Sequence[str], dependents: rules.Expression) -> bool:
    """Let these tasks name those as their dependents. False if somebody's open transaction held one of them."""
    unfinished = await update_around_locks(store, dependencies, _GOES_ON, naming(dependents))
    if unfinished == len(dependencies):
        return True
    others = await update_around_locks(store, dependencies, {}, _keeping(dependents, store.now))
    return unfinished is not None and others is not None


_GOES_ON: Document = {
    "status": {"$in": _UNFINISHED},
    "task_state.worker_states": {"$type": "array"},
    "task_state.released_time": None,
}
"""The task is not finished, nor was a finished one that is kept no longer. (What another language has inserted, and nobody has
accepted yet, would lose what it names.)"""


def naming(dependents: rules.Expression) -> list[Document]:
    """Let an unfinished task name these dependents. Nothing else follows from that before it is finished."""
    return [
        # Those that it names already, and these.
        {"$set": {"task_state.dependents": _with(dependents), "task_state.pending": True}},
    ]


def _with(dependents: rules.Expression) -> rules.Expression:
    known = {"$cond": [{"$isArray": [rules.DEPENDENTS]}, rules.DEPENDENTS, []]}
    return {"$setUnion": [known, dependents]}


def _keeping(dependents: rules.Expression, now: rules.Expression) -> list[Document]:
    """Let a task name these dependents. If it is finished already, it is kept for them."""
    later = {"$cond": [_is_finished, {"$add": [now, _FIRST_HOLD_MS]}, "$$REMOVE"]}
    return [
        # Those that it names already, and these.
        {"$set": {"task_state.dependents": _with(dependents)}},
        # Its retention, if that has begun, stops again.
        {"$unset": "task_state.released_time"},
        # A finished task has nothing to tell its dependents, since they check by themselves; but it is kept for them.
        {"$set": {"task_state.ask_time": {"$ifNull": [rules.ASK_TIME, later]}}},
        *prepared(rules.derivation, now),
    ]


_is_finished: rules.Expression = {"$not": [{"$in": ["$status", _UNFINISHED]}]}
_is_held: rules.Expression = {
    "$and": [_is_finished, rules.HAS_DEPENDENTS, {"$not": [{"$gt": ["$task_state.released_time", None]}]}]
}
"""Whether it is kept for its dependents."""


def mark_of_option(changes: Mapping[str, Any], now: rules.Expression) -> Document:
    """Return what has to be set in `task_state` before the task's option is changed so. Nothing, if its retention stays.

    What is kept for its dependents is checked then: it may have no mark so far, if it was to be kept for ever, or one far ahead.
    """
    retention = {name: value for name, value in changes.items() if name in ("retain_success_ms", "retain_failed_ms")}
    if not retention:
        return {}
    differs = {"$or": [{"$ne": [f"$task_option.{name}", {"$literal": value}]} for name, value in retention.items()]}
    checked = {"$and": [differs, _is_held]}
    return {"ask_time": {"$cond": [checked, rules.next_mark(now), {"$ifNull": [rules.ASK_TIME, "$$REMOVE"]}]}}


async def _fail_those_with_failures(
    store: Store, marked: Sequence[_Marked], concerned: set[str]
) -> tuple[bool, set[str], set[str]]:
    """Fail the tasks that want to fail and have a dependency that ended in any other way than SUCCESS, as far as is known.

    That is: tasks that name one of these as a dependency; and those of these whose own dependency had ended before it could tell
    them, or is gone.

    Returns whether all is done; and which of these need not be asked about: those that wait for something unfinished, which will
    tell them, and those of which all that they wait for is SUCCESS.
    """
    after_of = {task.id: task.after for task in marked if task.policy == "fail" and not task.finished}
    bad = [task for task in marked if task.finished and task.status != "SUCCESS"]
    # Except for a child's parent, whose handler gets the failure from `results`.
    told = {id_ for task in bad for id_ in task.dependents if id_ != task.parent}
    for part in in_parts(sorted(told - after_of.keys())):
        waiting = {"_id": {"$in": part}, "status": "INIT"}
        rows = await store.find(waiting, {"after": "$task_state.after.ids"}, majority=True)
        after_of |= {row["_id"]: row.get("after", ()) for row in rows}
    ends = await _ends(store, {id_ for after in after_of.values() for id_ in after})
    done, failed = await _fail(store, after_of, ends)
    concerned.update(told, failed)
    of_each = {id_: {ends.get(each) for each in after} for id_, after in after_of.items()}
    blocked = {id_ for id_, statuses in of_each.items() if not statuses.isdisjoint(_UNFINISHED)}
    return done, blocked, {task.id for task in marked if of_each.get(task.id) == {"SUCCESS"}}


async def _ends(store: Store, ids: Collection[str]) -> dict[str, str]:
    """Return the statuses of these tasks, as far as they exist."""
    ends: dict[str, str] = {}
    for part in in_parts(ids):
        found = await store.find({"_id": {"$in": part}}, {"status": 1}, majority=True)
        ends.update((document["_id"], document["status"]) for document in found)
    return ends


async def _fail(
    store: Store, after_of: Mapping[str, Sequence[str]], ends: Mapping[str, str]
) -> tuple[bool, Collection[str]]:
    """Fail each of these tasks that wants to fail, and whose dependency ended in any other way than SUCCESS.

    A dependency that is unfinished has been restarted meanwhile: it acts when it ends. Returns whether all is done, and
    which tasks had to fail.

    The reason names the first few in the order of `after`, so that it is the same whoever writes it, and in whatever order.
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
            # Why it failed without having run. Its status follows from that.
            {"$set": {"task_state.dependency_failure": failure, "event": stamp("dependency_failed", now)}},
            *prepared(rules.derivation, now),
        ]
        for part in in_parts(dependents):
            done &= await _update(store, part, {"task_state.waits_for": "fail", "status": "INIT"}, pipeline)
    return done, [dependent for dependents in by_cause.values() for dependent in dependents]


async def _restore_dependents(store: Store, marked: Sequence[_Marked], concerned: set[str]) -> bool:
    """Where a task is restarted, so are those that failed only because of it. Their own marks have them checked.

    A task that is SUCCESS may have been restarted, and have finished before anybody checked.
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
    # Looked for first, since there hardly ever is one. A child's parent does not fail because of it.
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
        # Announced as what it is.
        {"$set": {"event": stamp("retried", now)}},
        *prepared(rules.derivation, now),
    ]
    return await _update(store, ids, query, pipeline)


async def _ask(store: Store, ids: Sequence[str], concerned: set[str]) -> bool:
    """Check which of these tasks wait for nothing unfinished any more, and open their gates, or fail them."""
    ready = await _unblocked(store, ids)
    ends = await _ends(store, {id_ for row in ready for id_ in row["wanted"]})
    to_open = [row["_id"] for row in ready if all(ends.get(id_) == "SUCCESS" for id_ in row["wanted"])]
    opened = await open_gate(store, Gate.DEPENDENCIES, to_open)
    done, failed = await _fail(store, {row["_id"]: row["wanted"] for row in ready if row["policy"] == "fail"}, ends)
    concerned.update(to_open, failed)
    return opened and done


async def _unblocked(store: Store, ids: Sequence[str]) -> list[Document]:
    """Return those of these tasks that wait, are linked, and have no unfinished dependency.

    Each with its policy, and with the tasks that have to be SUCCESS for its gate to open.
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
    """Return which of many tasks have an unfinished dependency: all at once, from the unfinished tasks that name any of them."""
    asked = {"$literal": list(ids)}
    stages: list[Document] = [
        # Whatever is unfinished and names one of them, by the index of what is pending.
        {"$match": {"task_state.pending": True, "task_state.dependents": {"$in": list(ids)}}},
        # Such a task may name ten thousand: only those that were asked about.
        {"$project": {"_id": 0, "dependents": {"$setIntersection": [rules.DEPENDENTS, asked]}}},
        # Each of those once.
        {"$unwind": "$dependents"},
        # (However many unfinished ones name it.)
        {"$group": {"_id": "$dependents"}},
    ]
    return {row["_id"] for row in await store.driver.rows(store.tasks, stages, majority=True, hint="taskmesh_pending")}


async def _release(store: Store, held: Sequence[str]) -> None:
    """Begin the retention of finished tasks that have no unfinished dependent: at the moment when the last of those finished."""
    if not held:
        return
    stages: list[Document] = [
        # Finished tasks, with those that wait or have waited for them.
        {"$match": {"_id": {"$in": list(held)}, "finish_time": {"$exists": True}}},
        # (By `_id` alone.)
        {"$project": {"dependents": {"$concatArrays": [{"$ifNull": [rules.DEPENDENTS, []]}, ["$task_state.parent"]]}}},
        # Their dependents: the end of the last, and whether one is unfinished.
        {
            "$lookup": {
                "from": store.tasks,
                "localField": "dependents",
                "foreignField": "_id",
                "pipeline": [
                    # One row, or none if none exists any more.
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
        # (Null, if none exists any more.)
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
    """Remove the marks that were acted on, and none that were set since.

    What is kept for its dependents is checked again later.
    """
    now = store.now
    retained_ms = {
        "$cond": [{"$eq": ["$status", "SUCCESS"]}, "$task_option.retain_success_ms", "$task_option.retain_failed_ms"]
    }
    kept = {"$and": [_is_held, {"$gt": [retained_ms, None]}, {"$ne": ["$status", "DELETED"]}]}
    # Not more often than it has waited already, or than it would be kept anyway.
    waited_ms = {"$divide": [{"$subtract": [now, "$finish_time"]}, 4]}
    pause_ms = {"$min": [{"$max": [_FIRST_HOLD_MS, retained_ms, waited_ms]}, _LONGEST_HOLD_MS]}
    ask_again = {"$add": [now, {"$toLong": pause_ms}]}
    mark = {"$cond": [kept, ask_again, "$$REMOVE"]}
    # It may go now: that is derived.
    await _unmark_all(store, [task for task in marked if task.is_released], mark, prepared(rules.derivation, now))
    await _unmark_all(store, [task for task in marked if not task.is_released], mark, [])


async def _unmark_all(
    store: Store, marked: Sequence[_Marked], mark: rules.Expression, derived: Sequence[Document]
) -> None:
    """Replace the marks that were acted on by `mark`."""
    if not marked:
        return
    ids, times = [task.id for task in marked], [task.ask_time for task in marked]
    its_own = times[0] if len(set(times)) == 1 else own_value(ids, times)
    answered = {"$eq": [rules.ASK_TIME, its_own]}
    stages: list[Document] = [
        # Where the mark is the one that was acted on: it is removed, or postponed.
        {"$set": {"task_state.ask_time": {"$cond": [answered, mark, rules.ASK_TIME]}}},
        *derived,
    ]
    await _update(store, ids, {"task_state.ask_time": {"$exists": True}}, stages)


async def _update(store: Store, ids: Sequence[str], query: Document, pipeline: Sequence[Document]) -> bool:
    """Update these tasks. False if somebody's open transaction held one of them, so that a sweep has to do it again."""
    return await update_around_locks(store, ids, query, pipeline) is not None
