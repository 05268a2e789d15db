"""Publish: create tasks, once per key, whoever publishes and how often.

With plain inserts first: an upsert of a key that is in somebody's open transaction hangs past any deadline (measured), an
insert does not. Existing tasks are then updated as far as their publisher asked for that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import bson
from bson.raw_bson import RawBSONDocument
from pymongo.errors import OperationFailure, PyMongoError, WriteConcernError

from taskmesh.model.configuration import Configuration
from taskmesh.model.errors import TaskRunning, TaskTooLarge
from taskmesh.store import rules
from taskmesh.store.control import NOT_DELETED, values_kept
from taskmesh.store.grouped import Grouped
from taskmesh.store.mongodb.driver import CODEC, TOGETHER_DEADLINE_MS, Document
from taskmesh.store.mongodb.server_errors import DOCUMENT_TOO_LARGE, Code, is_passing, patiently
from taskmesh.store.numbers import number_at
from taskmesh.store.pipeline import repeated
from taskmesh.store.pipeline.by_id import in_parts, own_value
from taskmesh.store.pipeline.event_stamp import stamp
from taskmesh.store.pipeline.prepared import prepared
from taskmesh.store.pipeline.restart import (
    OWN_PARAMS,
    STAGED,
    first_params_if,
    in_first_stage,
    of_first_stage,
    restarted_state,
)
from taskmesh.store.publication import Publication, line_of, new_document
from taskmesh.store.relations import dependencies
from taskmesh.store.store import WRITE_DEADLINE_MS, Store

_FIRST_BATCH = 1_000
_LATER_BATCH = 2_000
"""More than the first, which nothing else covers while it is made: each set waits once for the journal of a majority."""
_MAX_BATCH_BYTES = 8_000_000
_MAX_IN_FLIGHT = 2
_AT_A_STRETCH = 100
"""So many are made before other tasks in the event loop have their turn."""
_CHANGED_AT_ONCE = 50
_KINDS = 20
"""A change is compared with so many sets, of which each asks for something else."""
_CHANGED_AT_ONCE_BYTES = 2_000_000
"""More params than these go one by one: a pipeline has to fit in 16 MB, and reading it is the least of the work by then."""
_FEWEST_TOGETHER = 2
_NAMED = 3
"""An error names so many tasks."""
_SIZE_OF_THE_REST = 1_000
"""How many bytes a new document has beside its params; rather too many than too few."""


@dataclass(slots=True)
class _Turns:
    """What the sets of one call do one after the other, so that one is made while the one before it is inserted."""

    to_make: asyncio.Lock = field(default_factory=asyncio.Lock)
    to_insert: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held meanwhile, so that nobody sees a later set of one call before an earlier one."""


@dataclass(slots=True, frozen=True)
class Published:
    """The result of a publish."""

    created: bool
    updated: bool = False
    throttled: bool = False
    """Whether it did nothing, since it came too soon after another."""
    mark: datetime | None = None
    """The mark of a task that was inserted by this very call (`task_state.ask_time`), if it waits for others, or in line."""


_CREATED = Published(created=True)


async def publish(
    store: Store,
    publications: Sequence[Publication],
    now: datetime,
    changes: Changes | None = None,
    *,
    alone: bool = False,
) -> list[Published]:
    """Insert new tasks, in the order given, then treat existing ones as each publication asks. Results in the same order.

    Tasks that others in this process publish at the same moment are inserted in the same command, and changed in the same, if
    these share `changes`. `alone`: without those, since this one has met a locked key, and would hold them up.

    Safe to repeat: a repeated insert of ours is recognised by its `publish_id`. Raises `TaskRunning` for a publication with
    `not_update_running`; the others are made nevertheless.
    """
    give_numbers(store, publications, now)
    results: dict[int, Published] = {}
    refused: list[TaskRunning] = []
    batches = _batches(publications)
    turns = _Turns() if len(publications) > _FIRST_BATCH else None
    changes = Changes(store) if changes is None or alone else changes

    async def publish_batches() -> None:
        for batch in batches:
            # What is known to exist need not be inserted.
            new = [i for i in batch if publications[i].seen is None]
            asked = [publications[i] for i in new]
            duplicates = await _insert(store, asked, now, alone=alone, turns=turns) if new else set()
            created = (i for place, i in enumerate(new) if place not in duplicates)
            results.update({i: Published(True, mark=now) if publications[i].waits else _CREATED for i in created})
            existing = {i: publications[i] for i in batch if i not in results}
            results.update(await _treat_existing(store, existing, now, changes, refused))

    if turns is None:
        await publish_batches()
    else:  # one batch is made, and its existing tasks are treated, while another is on its way
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(_MAX_IN_FLIGHT):
                    group.create_task(publish_batches())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
    if refused:
        raise refused[0]
    return [results[i] for i in range(len(publications))]


def give_numbers(store: Store, publications: Sequence[Publication], now: datetime) -> None:
    """Give each its place in the order of publication, in the order given. A publication that has one keeps it."""
    without = [publication for publication in publications if not publication.number]
    first = store.numbers.take(len(without), now)
    for number, publication in enumerate(without, first):
        publication.number = number


def _batches(publications: Sequence[Publication]) -> Iterator[list[int]]:
    batch: list[int] = []
    size, most = 0, _FIRST_BATCH
    for i, publication in enumerate(publications):
        bytes_ = publication.size + _SIZE_OF_THE_REST
        if batch and (len(batch) == most or size + bytes_ > _MAX_BATCH_BYTES):
            yield batch
            batch, size, most = [], 0, _LATER_BATCH
        batch.append(i)
        size += bytes_
    if batch:
        yield batch


async def _insert(
    store: Store,
    publications: list[Publication],
    now: datetime,
    *,
    alone: bool = False,
    turns: _Turns | None = None,
) -> set[int]:
    """Insert documents, together with what others publish now. Return the places of those whose key existed already.

    `turns`: those of the sets of one call.
    """
    documents: Sequence[Mapping[str, Any]]
    if turns is None:
        documents = _new_documents(publications, now)
    else:
        async with turns.to_make:
            documents = await _encoded(publications, now)
    size = sum(each.size + _SIZE_OF_THE_REST for each in publications)
    async with turns.to_insert if turns is not None else nullcontext():
        reply = await store.insert(documents, size, WRITE_DEADLINE_MS, alone=alone)
    if "writeConcernError" in reply:  # whatever else the reply says, what was inserted may yet be rolled back
        concern = reply["writeConcernError"]
        raise WriteConcernError(concern.get("errmsg", ""), concern.get("code"), reply)
    failed = reply.get("writeErrors", [])
    for failure in failed:
        if failure["code"] != Code.DUPLICATE_KEY:
            raise OperationFailure(failure["errmsg"], failure["code"], reply)
    return {failure["index"] for failure in failed}


def _new_documents(publications: Sequence[Publication], now: datetime) -> list[Document]:
    # Mostly they share one option: computing and encoding it once saves half of what a publish costs here.
    options = {id(option): option for publication in publications for option in (publication.configuration.option,)}
    stored = {key: RawBSONDocument(bson.encode(option.stored())) for key, option in options.items()}
    return [new_document(each, now, stored[id(each.configuration.option)]) for each in publications]


async def _encoded(publications: Sequence[Publication], now: datetime) -> list[RawBSONDocument]:
    """Make a large set while another is on its way. In between, its reply and its successor have their turn."""
    documents: list[RawBSONDocument] = []
    for start in range(0, len(publications), _AT_A_STRETCH):
        made = _new_documents(publications[start : start + _AT_A_STRETCH], now)
        documents += [RawBSONDocument(bson.encode(document, codec_options=CODEC)) for document in made]
        await asyncio.sleep(0)
    return documents


async def _treat_existing(
    store: Store, existing: dict[int, Publication], now: datetime, changes: Changes, refused: list[TaskRunning]
) -> dict[int, Published]:
    """Treat existing tasks. Errors for running tasks that must not be changed are added to `refused`."""
    if not existing:
        return {}
    untouched = {
        i: publication for i, publication in existing.items() if not publication.configuration.changes_existing
    }
    results = await _replace_forgotten(store, untouched, now)
    changed = {i: _Change(each, now) for i, each in existing.items() if i not in untouched}
    together = await changes.of(list(changed.values())) if changed else {}
    results |= {i: together[change] for i, change in changed.items() if change in together}
    others = [i for i, change in changed.items() if change not in together]
    for start in range(0, len(others), _CHANGED_AT_ONCE):
        chunk = others[start : start + _CHANGED_AT_ONCE]
        outcomes = await asyncio.gather(
            *(_change_existing(store, existing[i], now) for i in chunk), return_exceptions=True
        )
        for i, outcome in zip(chunk, outcomes, strict=True):
            if isinstance(outcome, TaskRunning):
                refused.append(outcome)
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                results[i] = outcome
    return results


async def _existing(store: Store, ids: list[str]) -> list[Document]:
    """Read the fields by which a publish recognises its own tasks, and whether the tasks are past their retention.

    Also what they wait for, or have waited for, if their publishers have said (`after`).
    """
    fields = {**repeated.FIELDS, "forgotten": rules.is_forgotten(store.now), "after": "$task_state.after"}
    return await store.find({"_id": {"$in": ids}}, fields) if ids else []


class Existing(Grouped[str, Document]):
    """Reads what stands under keys before publications change it; what is asked at one moment together."""

    async def read(self, ids: Collection[str]) -> Mapping[str, Document]:
        """Return what there is, except for what is past its retention; perhaps of others as well.

        Tries again while the database is unreliable.
        """
        return await patiently(lambda: self.of(ids))

    async def call(self, ids: Sequence[str]) -> Mapping[str, Document]:
        """See `read`."""
        found: dict[str, Document] = {}
        for part in in_parts(ids):
            found |= {task["_id"]: task for task in await _existing(self._store, part) if not task["forgotten"]}
        return found


async def _replace_forgotten(store: Store, existing: dict[int, Publication], now: datetime) -> dict[int, Published]:
    """Publish afresh what is past its retention and not removed by the TTL monitor yet; leave the rest."""
    ids = {publication.id: i for i, publication in existing.items()}
    results = {i: Published(created=False) for i in existing}
    for document in await _existing(store, list(ids)):
        i = ids[document["_id"]]
        if document.get("publish_id") == existing[i].publish_id:
            results[i] = _CREATED  # an insert of ours that was made, and whose answer was lost
        elif document["forgotten"]:
            results[i] = Published(created=await _replace(store, existing[i], now))
    return results


async def _replace(store: Store, publication: Publication, now: datetime) -> bool:
    query = {"_id": publication.id, "$expr": rules.is_forgotten(store.now)}
    reply = await store.update(query, _afresh(publication, now, store.now))
    if reply["n"] == 0:  # somebody else did it, or the TTL monitor removed it in between
        return not await _insert(store, [publication], now)
    return True


def _afresh(publication: Publication, now: datetime, at: rules.Expression) -> list[Document]:
    """Replace a task that is gone by a new one. The stream announces it by its stamp.

    Handlers of the old one that are still ending keep their places in the new one.
    """
    new = {"$literal": new_document(publication, now)}
    own = {"$getField": {"field": "task_state", "input": new}}
    # Dependents that have not been told yet that the old one was deleted wait for the new one.
    untold = {
        "$and": [rules.HAS_DEPENDENTS, {"$gt": ["$task_state.deleted_time", None]}, {"$gt": [rules.ASK_TIME, None]}]
    }
    kept = {
        "leaving": rules.sent_away(at),
        "dependents": {
            "$cond": [
                untold,
                {
                    "$setUnion": [
                        rules.DEPENDENTS,
                        {"$ifNull": [{"$getField": {"field": "dependents", "input": own}}, []]},
                    ]
                },
                {"$ifNull": [{"$getField": {"field": "dependents", "input": own}}, "$$REMOVE"]},
            ]
        },
        "ask_time": {
            "$cond": [
                untold,
                rules.ASK_TIME,
                {"$ifNull": [{"$getField": {"field": "ask_time", "input": own}}, "$$REMOVE"]},
            ]
        },
    }
    derived = {"$or": [{"$gt": ["$task_state.leaving", None]}, rules.HAS_DEPENDENTS]}
    return [
        # The new document as an insert would have stored it, with the places of the old one's handlers.
        {"$replaceWith": {"$mergeObjects": [new, {"task_state": {"$mergeObjects": [own, kept]}}]}},
        # The stream itself announces an insert; this update is announced by its stamp.
        {"$set": {"event": stamp("published", at)}},
        # The derived fields of a new document are right as they are, unless a place is still occupied, or it has dependents.
        *rules.derivation(at, where=derived),
    ]


@dataclass(slots=True, eq=False)
class _Change:
    """What a publication asks of an existing task. `now`: the time of the call."""

    publication: Publication
    now: datetime


class Changes(Grouped[_Change, Published]):
    """Changes existing tasks as the publications of one moment ask: those that ask for the same in one command.

    Most of what a change costs the server is reading the pipeline. What is left goes one by one (`_change_existing`).
    """

    async def call(self, changes: Sequence[_Change]) -> Mapping[_Change, Published]:
        """Make them. Return those of which it is known what came of them."""
        results: dict[_Change, Published] = {}
        for alike in _alike(changes):
            results |= await _change_together(self._store, alike)
        return results


def _alike(changes: Sequence[_Change]) -> Iterator[list[_Change]]:
    """Divide them into sets that may go together. What is alone is left out."""
    sets: list[_Set] = []
    for change in changes:
        for some in sets[-_KINDS:]:
            if some.takes(change):
                some.add(change)
                break
        else:
            sets.append(_Set(change))
    return (list(some.by_id.values()) for some in sets if len(some.by_id) >= _FEWEST_TOGETHER)


class _Set:
    """Changes of as many tasks that differ in nothing but what each brings of its own (see `change_pipeline`)."""

    def __init__(self, first: _Change) -> None:
        self._first = first.publication
        self._marks = _encoded_marks(first.publication)
        self._size = first.publication.size
        self.by_id = {first.publication.id: first}

    def takes(self, change: _Change) -> bool:
        """Whether this may go with those that are there."""
        first, each = self._first, change.publication
        return (
            len(self.by_id) < _CHANGED_AT_ONCE
            and self._size + each.size <= _CHANGED_AT_ONCE_BYTES
            and each.id not in self.by_id
            and (each.trace is None) == (first.trace is None)
            and (each.configuration is first.configuration or each.configuration == first.configuration)
            and _encoded_marks(each) == self._marks
        )

    def add(self, change: _Change) -> None:
        """Let it go with them."""
        self._size += change.publication.size
        self.by_id[change.publication.id] = change


def _encoded_marks(publication: Publication) -> bytes:
    """Return them as they are stored: to Python, 1 and True are the same."""
    return bson.encode(publication.marks, codec_options=CODEC)


async def _change_together(store: Store, changes: Sequence[_Change]) -> dict[_Change, Published]:
    """Change existing tasks in the same way, in one command. Return those of which it is known what came of them."""
    of = {change.publication.id: change for change in changes}
    seen = {id_: change.publication.seen for id_, change in of.items()}
    read = await _existing(store, [id_ for id_, task in seen.items() if task is None])
    found = {
        task["_id"]: task
        for task in (*read, *filter(None, seen.values()))
        if not task["forgotten"] and _already(of[task["_id"]].publication, task) is None
    }
    changing = {id_: of[id_] for id_ in found}
    if len(changing) < _FEWEST_TOGETHER:
        return {}
    unanswered = {id_ for id_, change in changing.items() if change.publication.sent_to is not None}
    for id_, change in changing.items():
        change.publication.sent_to = repeated.same(found[id_])
        change.publication.seen = None  # whoever asks again reads what has become of it
    first = next(iter(changing.values()))
    known = own_value(list(found), [task.get("publish_id") for task in found.values()])
    made = repeated.has_change(own_value(list(found), [each.publication.publish_id for each in changing.values()]))
    bound = [{"$eq": [{"$ifNull": ["$publish_id", None]}, known]}, {"$not": [made]}]
    query: Document = {
        "$and": [
            {"_id": {"$in": list(found)}, **NOT_DELETED, "$expr": {"$and": bound}},
            _unless_it_may_not(first.publication, store.now),
        ]
    }
    stages = change_pipeline(first.publication, first.now, store.now, changing)
    try:
        reply = await store.update(query, stages, TOGETHER_DEADLINE_MS + 10 * len(found), hint="_id_")
    except PyMongoError as error:
        if is_passing(error):
            raise
        return {}  # one is locked, too large or refused; others may have been changed: they are recognised
    if reply["nModified"] == len(changing):
        return {change: Published(created=False, updated=True) for change in changing.values()}
    results: dict[_Change, Published] = {}
    after = {task["_id"]: task for task in await store.find({"_id": {"$in": list(found)}}, repeated.FIELDS)}
    for id_, change in changing.items():
        task = after.get(id_)
        if task is not None and repeated.is_changed_by(task, change.publication.publish_id):
            results[change] = Published(created=False, updated=True)
        elif reply["n"] == len(changing):  # it may be changed, and there is nothing to change
            results[change] = Published(created=False)
        elif id_ not in unanswered:
            change.publication.sent_to = None
    return results


async def _change_existing(store: Store, publication: Publication, now: datetime) -> Published:
    """Update an existing task as its publication asks."""
    for _ in range(10):
        seen, publication.seen = publication.seen, None
        found = await _existing(store, [publication.id]) if seen is None else [seen]
        if not found:  # deleted in between
            if not await _insert(store, [publication], now):
                return _CREATED
            continue
        task = found[0]
        if (published := _already(publication, task)) is not None:
            return published
        if task["forgotten"]:
            if await _replace(store, publication, now):
                return _CREATED
            continue
        query = {
            **repeated.unchanged_by(task, publication.publish_id),
            **NOT_DELETED,
            **_unless_it_may_not(publication, store.now),
        }
        all_answered = publication.sent_to is None
        publication.sent_to = repeated.same(task)
        stages = change_pipeline(publication, now, store.now)
        with _told_if_too_large([publication]):
            reply = await store.update(query, stages, constants=constants(publication))
        if reply["n"]:
            return Published(created=False, updated=bool(reply["nModified"]))
        if all_answered:
            publication.sent_to = None
        found = await store.find({**repeated.same(task), **NOT_DELETED}, repeated.FIELDS)
        if found and not repeated.is_changed_by(found[0], publication.publish_id):
            if publication.configuration.throttle_ms is not None:
                return Published(created=False, throttled=True)
            if publication.configuration.not_update_running:
                raise _is_running(publication)
    raise TaskRunning(
        f"task {publication.name!r} {publication.key!r} keeps being created and deleted by others: publish it when "
        "they have ended"
    )


@contextmanager
def _told_if_too_large(publications: Sequence[Publication]) -> Iterator[None]:
    """Name these tasks, if one of them would be too large."""
    try:
        yield
    except OperationFailure as error:
        if error.code not in DOCUMENT_TOO_LARGE:
            raise
        names = list(dict.fromkeys(f"{each.name!r} {each.key!r}" for each in publications))
        which = f"task {names[0]}"
        if len(names) > 1:
            which = f"one of the tasks {', '.join(names[:_NAMED])}{' …' if len(names) > _NAMED else ''}"
        raise TaskTooLarge(
            f"{which} would be larger than the 16 MB that MongoDB stores, with new params beside the results that it has: "
            "pass a reference to what is stored elsewhere, or use run_again, which drops results"
        ) from error


def _already(publication: Publication, task: Document) -> Published | None:
    """Return what earlier attempts without an answer have done, as far as the task tells. None: nothing yet."""
    if task.get("publish_id") == publication.publish_id:
        return _CREATED
    if repeated.is_changed_by(task, publication.publish_id):
        return Published(created=False, updated=True)
    if publication.sent_to is not None and publication.sent_to != repeated.same(task):
        return Published(created=False)  # it was for the task before; this one was published after it
    return None


def _is_running(publication: Publication) -> TaskRunning:
    return TaskRunning(
        f"task {publication.name!r} {publication.key!r} is running, and not_update_running was asked for: "
        "publish again when it is done, or use run_again"
    )


async def publish_in_session(
    store: Store,
    publications: Sequence[Publication],
    now: datetime,
    session: Any,
    touching: Callable[[str], object] = lambda _: None,
) -> list[Published]:
    """Publish inside the caller's transaction: the tasks appear if and when that commits. Results in the order given.

    Existing keys are read from the transaction's snapshot and not locked, unless they are really changed. A key may occur
    several times: a task that is new at the first is existing at the next. `touching` is called with each existing task before
    it is changed.
    """
    give_numbers(store, publications, now)
    results: dict[int, Published] = {}
    tasks = store.driver.collection(store.tasks)
    for batch in _batches(publications):
        by_id: dict[str, list[int]] = {}
        for i in batch:
            by_id.setdefault(publications[i].id, []).append(i)
        fields = {"queue": 1, "forgotten": rules.is_forgotten(store.now)}
        cursor = tasks.find({"_id": {"$in": [*by_id]}}, fields, session=session)
        stored = {document["_id"]: document for document in await cursor.to_list(None)}
        new = [places.pop(0) for id_, places in by_id.items() if id_ not in stored]
        if unknown := _waited_for_before(publications, new, known=stored):
            await dependencies.check(store, unknown, session)
        if new:
            await tasks.insert_many(_new_documents([publications[i] for i in new], now), session=session)
        results.update(dict.fromkeys(new, _CREATED))
        changing: dict[str, list[int]] = {}
        for id_, places in by_id.items():
            touching(id_)
            if places and id_ in stored and stored[id_]["forgotten"]:
                pipeline = _afresh(publications[places[0]], now, store.now)
                await store.update({"_id": id_}, pipeline, WRITE_DEADLINE_MS, session)
                results[places.pop(0)] = _CREATED
            results.update(dict.fromkeys(places, Published(created=False)))
            if asked := [i for i in places if publications[i].configuration.changes_existing]:
                if id_ in stored and "queue" not in stored[id_]:
                    raise _accepted_meanwhile(id_)
                changing[id_] = asked
        changes = {id_: [publications[i] for i in asked] for id_, asked in changing.items()}
        for id_, changed in (await _change_in_session(store, changes, now, session)).items():
            results.update(dict.fromkeys(changing[id_], changed))
    return [results[i] for i in range(len(publications))]


def _waited_for_before(
    publications: Sequence[Publication], new: Sequence[int], known: Collection[str]
) -> Collection[str]:
    """Return the dependencies of new tasks that are neither known, nor new and earlier in the list: so they form no circle."""
    there, unknown = set(known), set[str]()
    for i in new:
        if after := publications[i].configuration.after:
            unknown.update(id_ for id_ in after.ids if id_ not in there)
        there.add(publications[i].id)
    return unknown


def _accepted_meanwhile(id_: str) -> OperationFailure:
    """Return the error for a task that another language has inserted, and that was not accepted when the transaction began."""
    return OperationFailure(
        f"the task {id_!r} was inserted by another program, and accepted since this transaction began: repeat the transaction",
        Code.WRITE_CONFLICT,
        {"errorLabels": ["TransientTransactionError"]},
    )


async def _change_in_session(
    store: Store, asked: Mapping[str, Sequence[Publication]], now: datetime, session: Any
) -> dict[str, Published]:
    """Change existing tasks (by `_id`) as their publications ask: what is asked of many alike, in one command."""
    results: dict[str, Published] = {}
    once = [_Change(publications[0], now) for publications in asked.values() if len(publications) == 1]
    for alike in _alike(once):
        results |= await _change_together_in_session(store, alike, session)
    for id_, publications in asked.items():
        if id_ not in results:
            results[id_] = await _change_one_in_session(store, publications, now, session)
    return results


async def _change_together_in_session(store: Store, changes: Sequence[_Change], session: Any) -> dict[str, Published]:
    """Change existing tasks in the same way, in one command. Return those of which it is known what came of them."""
    of = {change.publication.id: change for change in changes}
    query: Document = {"_id": {"$in": list(of)}, **_unless_it_may_not(changes[0].publication, store.now)}
    stages = change_pipeline(changes[0].publication, changes[0].now, store.now, of)
    with _told_if_too_large([change.publication for change in changes]):
        reply = await store.update(query, stages, session=session, hint="_id_")
    results = dict.fromkeys(of, Published(created=False, updated=True))
    if reply["nModified"] == len(of):
        return results
    made = repeated.has_change(own_value(list(of), [change.publication.publish_id for change in changes]))
    query = {"_id": {"$in": list(of)}, "$expr": {"$not": [made]}}
    cursor = store.driver.collection(store.tasks).find(query, {"_id": 1}, session=session, batch_size=len(of))
    for task in await cursor.to_list(None):
        if reply["n"] == len(of):  # it may be changed, and there is nothing to change
            results[task["_id"]] = Published(created=False)
        elif changes[0].publication.configuration.throttle_ms is not None:  # what may be changed notes the time
            results[task["_id"]] = Published(created=False, throttled=True)
        else:
            del results[task["_id"]]
    return results


async def _change_one_in_session(
    store: Store, publications: Sequence[Publication], now: datetime, session: Any
) -> Published:
    """Change one existing task as each publication asks, one after the other, in one command."""
    statements = []
    for publication in publications:
        query: Document = {"_id": publication.id, **_unless_it_may_not(publication, store.now)}
        statements.append((query, change_pipeline(publication, now, store.now), constants(publication)))
    with _told_if_too_large(publications):
        reply = await store.update_each(statements, session)
    undisturbed = [publication for publication in publications if publication.configuration.not_update_running]
    if reply["n"] < len(statements) and undisturbed:
        raise _is_running(undisturbed[0])
    return Published(created=False, updated=bool(reply["nModified"]), throttled=not reply["n"])


# --- what a publication does to an existing task, as far as its publisher asked for that --------------------------------

IS_RUNNING: rules.Expression = {"$and": [{"$ne": ["$$live", []]}, {"$eq": ["$status", "RUNNING"]}]}


def _unless_it_may_not(publication: Publication, at: rules.Expression) -> Document:
    """Return the condition that the task is not running, or that the last publication that counted is long enough ago."""
    if publication.configuration.not_update_running:
        return {"$expr": {"$not": [rules.with_facts(at, IS_RUNNING)]}}
    throttle_ms = publication.configuration.throttle_ms
    return {} if throttle_ms is None else {"$expr": _not_throttled(throttle_ms, at)}


def _not_throttled(throttle_ms: int, at: rules.Expression) -> rules.Expression:
    """Whether the last publication that counted is long enough ago. That was its first, if none has been noted."""
    since = {"$ifNull": ["$task_state.throttled_since", "$task_state.create_time"]}
    return {"$lte": [{"$add": [since, throttle_ms]}, at]}


RECORDED = ("steps", "steps_bytes", "signals", "signals_bytes", "suspended_until", "suspended_for")
"""What executions have recorded and others have signalled. Removed when a task starts over."""
_COUNTED_AGAINST = (
    "dropped_fail_cnt",
    "losses",
    "lost_cnt",
    "resume_time",
    "reopened_by",
    "conflict_cnt",
    "dependency_failure",
)
"""What `clean_failed` removes, beside the entries and `timeout_cnt`."""


def constants(publication: Publication) -> Document:
    """Return what `change_pipeline` refers to: the params, so that they are in a command once, however large."""
    return {"params": publication.params}


def change_pipeline(
    publication: Publication, now: datetime, at: rules.Expression, together: Mapping[str, _Change] | None = None
) -> list[Document]:
    """Apply a publication to an existing task. If nothing changes, the document stays as it was, including its event.

    `together`: instead of to one, apply each of these, which are alike, to its own task, by `_id`.
    """
    configuration = publication.configuration
    own = _own(publication, now)
    stages: list[Document] = []
    if together:
        each_of = [_own(change.publication, change.now) for change in together.values()]
        given = {name: own_value(list(together), [each[name] for each in each_of]) for name in own}
        # What each brings of its own.
        stages.append({"$set": {"_given": given}})
        own = {name: f"$_given.{name}" for name in own}
    else:
        own |= {"params": "$$params", "trace": {"$literal": own.get("trace")}}
    params = own["params"]
    # What there was before, to tell in the end whether anything has changed.
    before: Document = {field: f"${field}" for field in ("task_option", "task_state")}
    sets_params = configuration.update_existing_params or configuration.runs_again
    marked = publication.marks if sets_params else {}
    if marked:
        before["marks"] = {name: f"${name}" for name in marked}
    before |= _of_params(configuration, params) if sets_params else {"params_stay": True}
    if configuration.begins_anew:
        before["waits"] = {"$eq": [rules.with_facts(at, rules.status(at)), "INIT"]}
    # Remember it inside the document while the stages below change it.
    stages.append({"$set": {"_before": before}})
    if sets_params:
        # The new params, and the times and options that the publisher set.
        stages.append({"$set": _new_wish(publication, own, at)})
    if sets_params and configuration.placed:
        # Where it has to go. It moves with the first write that finds no execution of the old place at work.
        stages.append({"$set": {"task_state.moves_to": rules.with_facts(at, _moves(configuration))}})
    running = rules.with_facts(at, IS_RUNNING)
    if configuration.runs_again and configuration.sequence_key is not None:
        # A task that is recorded as finished has left its line: it may join another.
        finished = {"$not": [{"$in": ["$status", ["INIT", "RUNNING"]]}]}
        policy = {"on_sequence_failure": "$$REMOVE"}
        stands = {name: {"$literal": value} for name, value in line_of(configuration).items()}
        moved = {
            n: {"$cond": [finished, v, {"$ifNull": [f"$task_state.{n}", "$$REMOVE"]}]}
            for n, v in (policy | stands).items()
        }
        stages.append({"$set": {"task_state": moved}})
    if configuration.runs_again:
        again = restarted_state(at, {"wanted": {"$add": [{"$ifNull": ["$task_state.wanted", 0]}, 1]}})
        one_more = {"$mergeObjects": ["$task_state", {"wanted": again["wanted"]}]}
        # A running task is counted as requested once more, and restarts when it ends; any other, or one to be replaced,
        # restarts now: what runs is stopped, and keeps its place until its handler has ended.
        goes_on = False if configuration.replace_running else running
        begun = {"task_state": {"$cond": [goes_on, one_more, again]}, "params": first_params_if({"$not": [goes_on]})}
        stages.append({"$set": begun})
    stages += _cleaned(configuration, running, at)
    same = [{"$eq": [f"${field}", f"$_before.{field}"]} for field in ("task_option", "task_state")]
    same += [{"$eq": [f"${name}", f"$_before.marks.{name}"]} for name in marked]
    unchanged = {"$and": ["$_before.params_stay", *same]}
    marks = {
        name: {"$cond": [unchanged, {"$ifNull": [f"${name}", "$$REMOVE"]}, value]}
        for name, value in (
            ("event", stamp("replaced" if configuration.replace_running else "published", at)),
            ("change_ids", repeated.with_change(own["change_id"])),
        )
    }
    if configuration.begins_anew:
        # A finished task goes behind what waits; a waiting task keeps its place.
        keeps = {"$or": [unchanged, "$_before.waits"]}
        own_number = {"$ifNull": ["$publish_number", "$$REMOVE"]}
        marks["publish_number"] = {"$cond": [keeps, own_number, own["number"]]}
    return [
        *stages,
        # Only if something has changed: the stamp that wakes workers, and the publication's mark on the task.
        {"$set": marks},
        # What there was before is not stored, nor what was given beside it.
        {"$unset": ["_before", "_given"]},
        # Status and times follow.
        *prepared(rules.derivation, at),
    ]


def _own(publication: Publication, now: datetime) -> dict[str, Any]:
    """Return what a publication brings that another with the same configuration does not."""
    own = {
        "params": publication.params,
        "number": publication.number or number_at(now),
        "change_id": publication.publish_id,
        "start_time": publication.configuration.starts(now),
        "trace": publication.trace,
    }
    return {name: value for name, value in own.items() if value is not None}


def _cleaned(configuration: Configuration, running: rules.Expression, at: rules.Expression) -> list[Document]:
    """Return the stages for `clean_success` and `clean_failed`, which do not affect a running handler."""
    stages: list[Document] = []
    for wanted, state in ((configuration.clean_success, "SUCCESS"), (configuration.clean_failed, "FAIL")):
        if wanted:
            # Remove the entries of this state, so that it runs again; but not while one is at work.
            stages.append({"$set": {"task_state": {"$cond": [running, "$task_state", _without(state, at)]}}})
    if configuration.clean_success:
        # A task that had succeeded starts over, with nothing recorded, in its first stage.
        succeeded = {"$in": ["SUCCESS", "$_before.task_state.worker_states.state"]}
        over = {"$and": [succeeded, {"$not": [running]}]}
        begins = {**dict.fromkeys(RECORDED, "$$REMOVE"), **in_first_stage()}
        begun = {name: {"$cond": [over, value, f"$task_state.{name}"]} for name, value in begins.items()}
        stages.append({"$set": {"task_state": begun, "params": first_params_if(over)}})
    if configuration.clean_failed:
        # A recorded failure is removed like the entries; values stay.
        forgets = {"$and": [rules.BEGUN, {"$not": [running]}]}
        kept = {
            name: {"$cond": [forgets, values_kept()[name], f"$task_state.{name}"]} for name in ("steps", "steps_bytes")
        }
        stages.append({"$set": {"task_state": kept}})
        forgotten = {name: {"$cond": [running, f"$task_state.{name}", "$$REMOVE"]} for name in _COUNTED_AGAINST}
        # And so are the counts of its failures: merging objects cannot remove fields.
        stages.append({"$set": {"task_state": forgotten}})
    return stages


def _of_params(configuration: Configuration, params: rules.Expression) -> Document:
    """Return whether the task gets the params of this publication (`params_follow`), and whether none changes (`params_stay`).

    The params are those with which the task starts. A task that has moved on by `Next` keeps the params that its handler gave
    it, until it restarts; if its handler gave none, or this publication moves the task, it gets these, too.
    """
    follow: rules.Expression = {"$not": [STAGED]}
    if not configuration.runs_again:
        follow = True if "queue" in configuration.placed else {"$not": [{"$gt": ["$task_state.own_params", None]}]}
    same = {"$eq": ["$params", params]}
    begins_the_same = {"$cond": [STAGED, {"$eq": [of_first_stage("params"), params]}, True]}
    return {"params_follow": follow, "params_stay": {"$and": [begins_the_same, {"$cond": [follow, same, True]}]}}


def _first_stage(configuration: Configuration, params: rules.Expression) -> rules.Expression:
    """Return the stages of a task. The first says where and with which params it starts: as this publication wants it."""
    placed = {name: {"$literal": place} for name, place in configuration.placed.items() if name == "queue"}
    first = {"$mergeObjects": [{"$arrayElemAt": ["$task_state.stages", 0]}, {"params": params, **placed}]}
    others = {"$slice": ["$task_state.stages", 1, {"$size": "$task_state.stages"}]}
    return {"$cond": [STAGED, {"$concatArrays": [[first], others]}, {"$ifNull": ["$task_state.stages", "$$REMOVE"]}]}


def _new_wish(publication: Publication, own: Mapping[str, rules.Expression], at: rules.Expression) -> Document:
    """Return the params, and the times and options that the publisher set. `own`: see `_own`."""
    configuration, params = publication.configuration, own["params"]
    start_time = own.get("start_time")
    version = {"$ifNull": ["$task_state.params_version", 0]}
    # Executions note which version of the params they had: changed params are a new version.
    state: Document = {
        "params_version": {
            "$cond": [
                "$_before.params_stay",
                {"$ifNull": ["$task_state.params_version", "$$REMOVE"]},
                {"$add": [version, 1]},
            ]
        },
        "stages": _first_stage(configuration, params),
        "own_params": {"$cond": ["$_before.params_follow", "$$REMOVE", OWN_PARAMS]},
    }
    if start_time is not None or configuration.runs_again:
        state["start_time"] = start_time
    if configuration.debounce_ms is not None:
        state |= _debounced(configuration.debounce_ms, configuration.debounce_max_ms, at)
    if configuration.throttle_ms is not None:
        state["throttled_since"] = at
    if configuration.expire_time is not None or configuration.runs_again:
        state["expire_time"] = configuration.expire_time
    if publication.loop is not None and (interval_ms := publication.loop.get("interval_ms")) is not None:
        state["resume_time"] = _runs_again(interval_ms, at)
    state |= dependencies.mark_of_option(configuration.tuned, at)
    changes: Document = {"params": {"$cond": ["$_before.params_follow", params, "$params"]}, "task_state": state}
    changes |= {name: {"$literal": value} for name, value in publication.marks.items()}
    if configuration.tags == ():
        changes["tags"] = "$$REMOVE"
    if publication.trace is not None:
        changes["trace"] = own["trace"]
    if configuration.tuned:
        changes["task_option"] = {name: {"$literal": value} for name, value in configuration.tuned.items()}
    return changes


def _debounced(debounce_ms: int, most_ms: int | None, at: rules.Expression) -> Document:
    """When it starts, and since when it has been put off: since the first publication after which no execution has begun."""
    since = "$task_state.debounced_since"
    begun = {"$map": {"input": rules.ENTRIES, "in": {"$gte": ["$$this.start_time", since]}}}
    unfinished = {"$in": [rules.status(at), ["INIT", "RUNNING"]]}
    put_off = {"$and": [{"$gt": [since, None]}, unfinished, {"$not": [{"$anyElementTrue": [begun]}]}]}
    first = rules.with_facts(at, {"$cond": [put_off, since, at]})
    latest = [] if most_ms is None else [{"$add": [first, most_ms]}]
    return {"debounced_since": first, "start_time": {"$min": [{"$add": [at, debounce_ms]}, *latest]}}


def _runs_again(interval_ms: int, at: rules.Expression) -> rules.Expression:
    """Return when a resting loop runs again: after its interval as declared now. A time that it requested itself stays."""
    ended, asked = "$task_state.rounds.end_time", "$task_state.resume_time"
    rests = {"$and": [{"$gt": [asked, at]}, {"$eq": [asked, {"$add": [ended, "$loop.interval_ms"]}]}]}
    return {"$cond": [rests, {"$add": [ended, interval_ms]}, {"$ifNull": [asked, "$$REMOVE"]}]}


def _moves(configuration: Configuration) -> rules.Expression:
    """Return where the task has to go. A task that has moved on by `Next` and runs again restarts in that queue."""
    moves_to = _moves_to(configuration.placed)
    if not configuration.runs_again or "queue" not in configuration.placed:
        return moves_to
    placed = {name: place for name, place in configuration.placed.items() if name != "queue"}
    return {"$cond": [STAGED, _moves_to(placed), moves_to]}


def _moves_to(placed: Mapping[str, Any]) -> rules.Expression:
    """Return where the task has to go, from where it is or had to go; unchanged if that is the same. The derivation moves it."""
    now_at = {"queue": {"$ifNull": [rules.HOME, "$queue"]}, "group": {"$ifNull": ["$group", None]}}
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
    """Return `task_state` without the entries of this state. Without failures, leases that ran out no longer count, either."""
    dropped: rules.Expression = {"$eq": ["$$this.state", state]}
    if state == "FAIL":
        dropped = {"$or": [dropped, rules.is_lost(at)]}
    changes: Document = {"worker_states": {"$filter": {"input": rules.ENTRIES, "cond": {"$not": [dropped]}}}}
    if state == "FAIL":
        changes["timeout_cnt"] = 0
    return {"$mergeObjects": ["$task_state", changes]}
