"""One small world, twice: a task collection on the real server and oracles beside it, led through the same operations.

Every world has a collection of its own and a clock of its own: `Store.now` is a literal. So several worlds run at once in
one event loop, and none waits. What concerns different tasks of a world happens at once too; then the two are compared,
whole documents and all that follows from them.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from taskmesh.admin.explain import explain
from taskmesh.admin.filters import TaskFilter
from taskmesh.admin.store.listing import find
from taskmesh.admin.store.task_counts import counts, stale_counts
from taskmesh.model.configuration import Configuration
from taskmesh.model.dependency import After
from taskmesh.model.errors import TaskRunning
from taskmesh.model.option import TaskOption
from taskmesh.store import Store, control, rules, schema
from taskmesh.store.claim import CLAIMED_FIELDS, claim, claim_one, won
from taskmesh.store.find import Claimable, ScanRange, Sort, get, scan, scan_leases, unfinished_left
from taskmesh.store.finish import Outcome, finish, report, whether_recorded
from taskmesh.store.pipeline.event_stamp import read_stamp
from taskmesh.store.publication import Publication
from taskmesh.store.publish import give_numbers, publish, publish_in_session
from taskmesh.store.relations import dependencies
from taskmesh.store.renew import keep_places, ping, still_held
from taskmesh.store.settle import settle
from taskmesh.store.signals import Signal, signal_alone
from taskmesh.store.steps import record as write_record
from taskmesh.store.steps import take_signal
from taskmesh.store.steps import whether_recorded as whether_record_stands
from tests.chaos.reading import ANYBODY_ELSE, NEVER, ms, stripped
from tests.properties.links import Links
from tests.properties.oracle import Document, Oracle
from tests.properties.patience import PATIENCE_MS, PatientStore

BEGIN = datetime(2030, 1, 1, tzinfo=UTC)
WORKERS = ("w1", "w2", "w3")
GROUP_SIZES = (1, 2, 1, 3, 1, 2, 1, 1)
QUEUES = ("even", "odd")
STATUSES = ("INIT", "RUNNING", "SUCCESS", "FAIL", "CANCELLED", "EXPIRED")
_REMEMBERED = 60
LEASE_MS = 3_000
"""What all workers here renew their leases by."""
_ALL_WORKERS = (*WORKERS, ANYBODY_ELSE)
_NOT_COMPARED = ("_id", "name", "key", "lane", "publish_id", "change_ids")


class Difference(AssertionError):
    """The engine and the oracle disagree."""


@dataclass(frozen=True)
class Operation:
    """Something that happens, with all that it needs to happen again."""

    kind: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.kind}({', '.join(f'{name}={value!r}' for name, value in self.arguments.items())})"


@dataclass(frozen=True)
class Held:
    """An execution, as its worker remembers it: perhaps it lost the task long ago."""

    id: str
    worker_id: str
    running_id: str


def queue_of(id_: str) -> str:
    return QUEUES[int(id_.partition(":")[2]) % 2]


class World:
    """Three workers, and a few groups of tasks; one operation is about tasks of one group."""

    def __init__(self, store: Store, sync_database: Any) -> None:
        self.store = store
        self.sync_database = sync_database
        numbers = iter(range(100))
        self.groups = [[f"job:{next(numbers)}" for _ in range(size)] for size in GROUP_SIZES]
        self.oracles = {id_: Oracle() for group in self.groups for id_ in group}
        self.links = Links(self.oracles)
        self.executions: list[Held] = []
        """The newest ones, whatever became of them: their workers may write late."""
        self.operations: list[Operation] = []
        self.now = BEGIN
        self.thorough = False
        """Whether everything is asked after each operation; else a part of it in turn, since that is quicker."""

    @classmethod
    async def create(cls, client: Any, database: str, sync_database: Any, number: int) -> World:
        store = PatientStore(client, database, f"world{number}", now=BEGIN)
        await schema.create_indexes(store)
        return cls(store, sync_database)

    async def begin_again(self) -> None:
        """An empty collection, on the first of January."""
        for collection in (self.store.tasks, self.store.sequences):
            await self.store.driver.collection(collection).delete_many({})
        self.oracles = {id_: Oracle() for id_ in self.oracles}
        self.links = Links(self.oracles)
        self.executions, self.operations = [], []
        self.now = self.store.now = BEGIN

    async def apply(self, *operations: Operation) -> list[bool]:
        """Let all this happen at once on both sides, compare, and say which operations had an effect.

        Raises:
            Difference: the two sides disagree.
        """
        self.operations += operations
        effects = await asyncio.gather(*(self._perform(operation) for operation in operations))
        for turn in range(12) if self.thorough else [len(self.operations) // len(operations)]:
            await self.compare(turn)
            await self._ask(turn)
        return effects

    async def _perform(self, operation: Operation) -> bool:
        wanted_and_found = await getattr(self, f"_{operation.kind}")(**operation.arguments)
        for expected, actual in wanted_and_found:
            if expected != actual:
                raise Difference(f"{operation} answered {actual!r}, and the oracle {expected!r}")
        expected, _ = wanted_and_found[0]
        return any(expected) if isinstance(expected, tuple) else bool(expected)

    # --- operations: each returns pairs of what the oracle says and what the engine says ---

    async def _advance(self, by_ms: int) -> list[tuple[Any, Any]]:
        self.now = self.store.now = self.now + ms(by_ms)
        return [(True, True)]

    async def _publish(
        self,
        task: str,
        n: int,
        option: Document,
        tuned: Document,
        start_ms: int | None,
        expire_ms: int | None,
        flags: frozenset[str],
        policy: Document,
        placed: Document,
        in_session: bool,
        after: tuple[str, ...],
        links: Document,
    ) -> list[tuple[Any, Any]]:
        name, _, key = task.partition(":")
        by_time = n % 2 and start_ms is not None
        configuration = Configuration(
            queue=placed.get("queue") or queue_of(task),
            group=placed.get("group"),
            placed=placed,
            option=TaskOption(**{**option, **tuned}),
            tuned=tuned,
            start_time=self.now + ms(start_ms or 0) if by_time else None,
            delay_ms=None if by_time else start_ms,
            expire_time=None if expire_ms is None else self.now + ms(expire_ms),
            after=After(after) if after else None,
            **links,
        ).changed(**dict.fromkeys(flags, True), **policy)
        publication = Publication(name, key, {"n": n}, configuration)
        expected: Any
        actual: Any
        try:
            give_numbers(self.store, [publication], self.now)
            expected = self.oracles[task].publish(copy.deepcopy(publication), self.now)
        except TaskRunning:
            expected = "running"
        try:
            if in_session:
                async with self.store.driver.session() as session, await session.start_transaction():
                    (published,) = await publish_in_session(self.store, [publication], self.now, session)
            else:
                published = (await publish(self.store, [publication], self.now))[0]
            actual = (published.created, published.updated)
        except TaskRunning:
            actual = "running"
        return [(expected, actual)]

    async def _claim(
        self, worker_id: str, running_id: str, tasks: list[str], closed: list[str]
    ) -> list[tuple[Any, Any]]:
        expected = {
            id_
            for id_ in tasks
            if self.oracles[id_].claim(worker_id, running_id, self.now, closed=self._queue_of(id_) in closed)
        }
        if len(tasks) == 1:
            one = await claim_one(
                self.store,
                tasks[0],
                worker_id,
                running_id,
                closed_queues=closed,
                fields=CLAIMED_FIELDS,
                deadline_ms=PATIENCE_MS,
            )
            count, documents = (0, []) if one is None else (1, [one])
        else:
            count = await claim(self.store, tasks, worker_id, running_id, closed_queues=closed)
            documents = await won(self.store, tasks, running_id, {})
        self.executions += [Held(id_, worker_id, running_id) for id_ in sorted(expected)]
        del self.executions[:-_REMEMBERED]
        return [(len(expected), count), (expected, {document["_id"] for document in documents})]

    def _queue_of(self, id_: str) -> str:
        document = self.oracles[id_].document
        return str(document["queue"]) if document else "none"

    async def _ping(self, held: list[Held]) -> list[tuple[Any, Any]]:
        alive = {h for h in held if self.oracles[h.id].ping(h.running_id, LEASE_MS, self.now)}
        pairs = [(h.id, h.running_id) for h in held]
        count = await asyncio.to_thread(ping, self.store, self.sync_database, pairs, LEASE_MS)
        found = await asyncio.to_thread(still_held, self.store, self.sync_database, pairs)
        return [(len(alive), count), ({(h.id, h.running_id) for h in alive}, set(found))]

    async def _keep_place(self, held: Held) -> list[tuple[Any, Any]]:
        kept = self.oracles[held.id].keep_place(held.running_id, LEASE_MS, self.now)
        pair = (held.id, held.running_id)
        found = await asyncio.to_thread(keep_places, self.store, self.sync_database, [pair], LEASE_MS)
        return [(kept, set(found) == {pair})]

    async def _report(self, held: Held, fraction: float | None, log: str) -> list[tuple[Any, Any]]:
        progress = None if fraction is None else {"fraction": fraction, "message": None, "time": self.now}
        entry = {"logs": [{"time": self.now, "message": log}]}
        outcome = Outcome(held.id, held.running_id, "succeeded", entry, progress=progress)
        expected = self.oracles[held.id].report(held.running_id, copy.deepcopy(entry), progress, self.now)
        return [(int(expected), await report(self.store, held.worker_id, [outcome]))]

    async def _step(
        self, held: list[Held], records: list[Document], delays: list[int | None], lease_ms: int
    ) -> list[tuple[Any, Any]]:
        """Record something, for each execution of another task."""
        outcomes = [
            Outcome(h.id, h.running_id, "stepped", delay_ms=delay, step=_made(h, record), lease_ms=lease_ms)
            for h, record, delay in zip(held, records, delays, strict=True)
        ]
        if len(outcomes) == 1:  # by modifiers; several by one statement
            [outcome] = outcomes
            outcome.made_at = self.now
            outcome.bytes_before = known_bytes(self.oracles[outcome.id].document or {}, outcome.step or {})
        expected = sum(
            self.oracles[o.id].record(o.running_id, copy.deepcopy(o.step or {}), o.delay_ms, lease_ms, self.now)
            for o in outcomes
        )
        actual = await write_record(self.store, held[0].worker_id, outcomes)
        fates = await whether_record_stands(self.store, outcomes)
        return [(expected, actual), *((self._fate_of_step(outcome), fate) for outcome, fate in fates.items())]

    def _fate_of_step(self, outcome: Outcome) -> str:
        oracle, made = self.oracles[outcome.id], outcome.step or {}
        if oracle.document is None:
            return "lost"
        known = next((each for each in oracle.state.get("steps") or () if each["id"] == made["id"]), None)
        if known is not None:
            return "recorded" if known["running_id"] == outcome.running_id else "lost"
        return "held" if oracle.held(outcome.running_id, self.now) else "lost"

    async def _wait(
        self, held: Held, record: Document, event: str, timeout_ms: int | None, lease_ms: int
    ) -> list[tuple[Any, Any]]:
        made = _made(held, record)
        outcome = Outcome(held.id, held.running_id, "stepped", step=made, lease_ms=lease_ms)
        oracle = self.oracles[held.id]
        expected = oracle.take_signal(held.running_id, copy.deepcopy(made), event, timeout_ms, lease_ms, self.now)
        actual = await take_signal(self.store, outcome, event, timeout_ms)
        return [(stripped(expected), stripped(actual))]

    async def _signal(self, task: str, event: str, signal_id: str, payload: Any, size: int) -> list[tuple[Any, Any]]:
        expected = self.oracles[task].signal(event, signal_id, payload, size, self.now)
        actual = await signal_alone(self.store, Signal(task, event, signal_id, payload, size))
        return [(expected == "sent", actual == "sent"), (expected, actual)]

    async def _finish(
        self,
        ending: Any,
        held: list[Held],
        fields: list[Document],
        delays: list[int | None],
        waits: list[Document | None] | None = None,
    ) -> list[tuple[Any, Any]]:
        outcomes = [
            Outcome(h.id, h.running_id, ending, dict(entry), delay_ms=delay, step=wait)
            for h, entry, delay, wait in zip(held, fields, delays, waits or [None] * len(held), strict=True)
        ]
        expected = sum(
            self.oracles[o.id].finish(ending, o.running_id, dict(o.entry), o.delay_ms, self.now, o.step)
            for o in outcomes
        )
        actual = await finish(self.store, held[0].worker_id, outcomes)
        fates = await whether_recorded(self.store, outcomes)
        return [
            (expected, actual),
            *((self._fate(outcome), fate) for outcome, fate in fates.items()),
        ]

    def _fate(self, outcome: Outcome) -> str:
        """What became of an outcome whose write was not answered."""
        oracle = self.oracles[outcome.id]
        if oracle.document is None:
            return "lost"
        entry = next((e for e in oracle.state["worker_states"] if e["running_id"] == outcome.running_id), None)
        if entry is None:
            known = (
                outcome.kind in ("released", "snoozed", "suspended", "conflicted", "moved")
                or oracle.state.get("reopened_by") == outcome.running_id
            )
            return "recorded" if known else "lost"
        if entry["state"] == {"succeeded": "SUCCESS", "failed": "FAIL"}.get(outcome.kind):
            return "recorded"
        return "held" if oracle.held(outcome.running_id, self.now) else "lost"

    async def _note_stopped(self, held: Held) -> list[tuple[Any, Any]]:
        entry = {"fail_reason": "the task was cancelled"}
        changed = self.oracles[held.id].finish("stopped", held.running_id, dict(entry), None, self.now)
        await finish(self.store, held.worker_id, [Outcome(held.id, held.running_id, "stopped", dict(entry))])
        return [(changed, changed)]

    async def _cancel(self, task: str) -> list[tuple[Any, Any]]:
        expected = self.oracles[task].cancel(self.now)
        self.links.tell([task] if expected else [], self.now)
        return [(expected, bool(await control.cancel(self.store, task)))]

    async def _retry(self, task: str, fresh: bool = False) -> list[tuple[Any, Any]]:
        expected = self.oracles[task].retry(self.now, fresh=fresh)
        self.links.tell([task] if expected else [], self.now)
        return [(expected, bool(await control.retry(self.store, task, fresh=fresh)))]

    async def _delete(self, task: str) -> list[tuple[Any, Any]]:
        oracle = self.oracles[task]
        expected = oracle.delete(self.now)
        self.links.tell([task], self.now)
        oracle.forget_if_empty()
        return [(expected, await control.delete(self.store, task))]

    async def _tell(self, tasks: list[str]) -> list[tuple[Any, Any]]:
        """Those that wait for these hear what has become of them."""
        before = copy.deepcopy([self.oracles[id_].document for id_ in tasks])
        self.links.tell(tasks, self.now)
        leftovers = dependencies.Leftovers(self.store)
        await dependencies.tell(self.store, tasks, leftovers)
        await leftovers.removed()
        changed = before != [self.oracles[id_].document for id_ in tasks]
        return [(changed, changed)]

    async def _set_option(self, task: str, changes: Document, outdated: bool) -> list[tuple[Any, Any]]:
        """`outdated`: somebody else has changed the option since it was read."""
        document = self.oracles[task].document
        seen = copy.deepcopy(document["task_option"]) if document else {}
        if outdated:
            seen["priority"] = -1
        expected = not outdated and self.oracles[task].set_option(copy.deepcopy(changes), self.now)
        if expected and changes.keys() & {"retain_success_ms", "retain_failed_ms"}:
            self.links.tell([task], self.now)
        return [(expected, bool(await control.set_option(self.store, task, changes, seen)))]

    async def _settle(self) -> list[tuple[Any, Any]]:
        expected = sum(oracle.settle(self.now) for oracle in self.oracles.values())
        return [(expected, await settle(self.store))]

    async def _sweep(self) -> list[tuple[Any, Any]]:
        """What the TTL monitor does, sooner or later."""
        tasks = self.store.driver.collection(self.store.tasks)
        result = await tasks.delete_many({"delete_time": {"$lte": self.now}})
        gone = [oracle for oracle in self.oracles.values() if oracle.removable(self.now)]
        for oracle in gone:
            oracle.document = None
        return [(len(gone), result.deleted_count)]

    # --- comparison ---

    async def compare(self, turn: int) -> None:
        """Compare documents, what reads show, and when one worker may claim, or whether: the server reads rules slowly."""
        worker = _ALL_WORKERS[turn // 2 % 4]
        when = turn % 2 == 0
        rule = rules.claim_time(worker, self.now) if when else rules.claimable(worker, (), self.now)
        fields = {
            "status": rules.status_on_reading(self.now),
            "rule": {"$ifNull": [rule, None]},
            "document": "$$ROOT",
        }
        cursor = await self.store.driver.aggregate(self.store.tasks, [{"$project": fields}])
        found = {document["_id"]: document for document in await cursor.to_list(None)}
        heads = await self.store.driver.collection(self.store.sequences).find().to_list(None)
        lines = {each["_id"]: (each["head"], each["place"]) for each in heads}
        self._same("the heads of the lines", self.links.heads, lines)
        for id_, oracle in self.oracles.items():
            if oracle.document is None or id_ not in found:
                self._same(f"{id_} exists", oracle.document is not None, id_ in found)
                continue
            actual, created = found[id_], oracle.state["create_time"]
            self._same(f"the document {id_}", stripped(oracle.document), image(actual["document"]))
            self._same(f"the status shown of {id_}", oracle.status(self.now), actual["status"])
            if when:
                claim_time = max(created, actual["rule"] or created)
                self._same(f"when {worker} may claim {id_}", oracle.claim_time(worker, self.now), claim_time)
            else:
                self._same(f"whether {worker} may claim {id_}", oracle.may_claim(worker, self.now), actual["rule"])

    def _same(self, what: str, expected: Any, actual: Any) -> None:
        if expected != actual:
            raise Difference(f"{what}: {difference(expected, actual)}")

    async def _ask(self, turn: int) -> None:
        """Ask another reader, one turn in three."""
        readers = (self._get, self._find, self._scan, self._left, self._count, self._find, self._get, self._explain)
        for reader in readers if self.thorough else readers[turn // 3 % 8 :][: turn % 3 == 0]:
            await reader(turn)

    def _standing(self) -> dict[str, str]:
        """The tasks that a reader sees, with their status."""
        return {
            id_: oracle.status(self.now)
            for id_, oracle in self.oracles.items()
            if oracle.document is not None and not oracle.forgotten(self.now)
        }

    async def _get(self, _: int) -> None:
        found = await get(self.store, list(self.oracles))
        self._same("get", self._standing(), {document["_id"]: document["status"] for document in found})

    async def _find(self, turn: int) -> None:
        wanted = {STATUSES[turn % 6], STATUSES[turn // 6 % 6]}
        which = TaskFilter(name="job", status=tuple(wanted))
        found = {d["_id"]: d["status"] async for d in find(self.store, which)}
        self._same(f"find {wanted}", {i: s for i, s in self._standing().items() if s in wanted}, found)

    async def _explain(self, turn: int) -> None:
        for id_ in list(self._standing())[turn % len(self.oracles) :][:1]:
            oracle, worker = self.oracles[id_], WORKERS[turn // 2 % 3]
            (explanation,) = await explain(self.store, id_, worker)
            time = max(oracle.claim_time(worker, self.now), self.now)
            expected = None if time == NEVER or oracle.finished(time) else time
            self._same(f"explain {id_} to {worker}", expected, explanation.next_claim_time)
            self._same(f"explain {id_} to {worker}, at once", expected == self.now, explanation.claimable)

    async def _scan(self, turn: int) -> None:
        worker = WORKERS[turn // 2 % 3]
        what = ScanRange(["job"], QUEUES, None, self.now)
        found = await all_found(self.store, worker, what)
        due = {id_ for id_, oracle in self.oracles.items() if oracle.may_claim(worker, self.now)}
        claimable = {row.id for row in found if row.claim_time is None or row.claim_time <= self.now}
        self._same(f"what a scan offers {worker}", due, claimable)

    async def _left(self, turn: int) -> None:
        worker = WORKERS[turn // 2 % 3]
        present = [oracle for oracle in self.oracles.values() if oracle.document is not None]
        expected = any(
            (o.status(self.now) == "RUNNING" and o.may_be_for(worker)) or o.may_claim(worker, self.now) for o in present
        )
        self._same("unfinished_left", expected, await unfinished_left(self.store, worker, ["job"], None))

    async def _count(self, _: int) -> None:
        tally: dict[str, int] = dict.fromkeys(STATUSES, 0)
        for row in await counts(self.store):
            tally[row["_id"]["status"]] += row["count"]
        for row in await stale_counts(self.store):
            tally[row["_id"]["stored"]] -= row["count"]
            tally[row["_id"]["now"]] += row["count"]
        expected = dict.fromkeys(STATUSES, 0)
        for oracle in self.oracles.values():
            if oracle.document is not None and not oracle.reading.deleted:
                expected[oracle.status(self.now)] += 1
        self._same("counts", expected, tally)


def _made(held: Held, record: Document) -> Document:
    """A record as this execution writes it."""
    return {**record, "worker_id": held.worker_id, "running_id": held.running_id, "attempt": 1}


async def all_found(store: Store, worker: str, what: ScanRange) -> list[Claimable]:
    """What the scans of a worker find, all together."""
    sorts: tuple[Sort, ...] = ("waiting", "shared", "named")
    found = [row for sort in sorts for row in (await scan(store, worker, what, 10_000, sort)).rows]
    return found + await scan_leases(store, worker, what, 10_000)


def image(document: Document) -> Document:
    """A stored document as the oracle would have it."""
    shown = {name: value for name, value in document.items() if name not in _NOT_COMPARED}
    for name in ("event", "record_event"):
        if name in shown:
            stamp = read_stamp(shown[name])
            shown[name] = [part for part in (stamp.kind, stamp.worker_id, *stamp.lost) if part]
    if dependents := shown["task_state"].get("dependents"):
        shown["task_state"] = shown["task_state"] | {
            "dependents": sorted(dependents)
        }  # a set: the server orders it anyhow
    return stripped(shown)  # type: ignore[no-any-return]


def difference(expected: Any, actual: Any, path: str = "") -> str:
    """Where two values differ, in as few words as possible."""
    if isinstance(expected, dict) and isinstance(actual, dict):
        names: Iterable[str] = sorted(set(expected) | set(actual))
        parts = [
            difference(expected.get(n), actual.get(n), f"{path}.{n}") for n in names if expected.get(n) != actual.get(n)
        ]
        return "; ".join(parts)
    return f"{path or 'it'} is {shown(actual)}, and by the oracle {shown(expected)}"


def shown(value: Any) -> str:
    """A value with its times as milliseconds since the beginning."""
    if isinstance(value, datetime):
        return "NEVER" if value == NEVER else f"T+{(value - BEGIN).total_seconds() * 1000:.0f}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {shown(part)}" for name, part in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(shown(part) for part in value) + "]"
    return repr(value)


def known_bytes(document: Document, record: Document) -> int:
    """Return how many bytes the records had when this one was made, or is made now: it may be written again."""
    known = document.get("task_state", {}).get("steps") or []
    return sum(each["size"] for each in itertools.takewhile(lambda each: each["id"] != record["id"], known))
