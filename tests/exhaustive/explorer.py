"""Walks through every state that a task can reach, by the engine's own verbs on a real server, a whole layer at a time.

A state is a task's document, the server's time, and which executions have been given out. In each state everything happens
that could: any worker claims; every execution that was ever given out pings, reports, succeeds, fails or is given back,
however long ago it lost the task; time goes on. A worker that crashed is one that sends nothing more, a suspended one sends
later, a message that was held up is one that is sent later: so all their interleavings are among the paths.

Two tasks share nothing but a claim's `running_id`, and each is written atomically: their states are the product of the states
of one. So one is enough.

States that differ in nothing but the workers' names are one: the rule compares names, those of workers and of executions,
and does nothing else with them; whatever can happen in one such state can happen in the other, with the names exchanged. (Not so
where an option names workers: there each state stands for itself.) Nor does anything depend on how many leases were lost
in all: `lost_cnt` is shown, and each write is checked for what it adds to it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from pymongo.errors import WriteConcernError

from taskmesh import TaskOption
from taskmesh.model.configuration import Configuration
from taskmesh.store import Store, rules, schema
from taskmesh.store.claim import claim
from taskmesh.store.finish import Kind, Outcome, cancel_pipeline, finish, report
from taskmesh.store.mongodb.server_errors import Code
from taskmesh.store.publication import Publication, new_document
from taskmesh.store.renew import ping
from taskmesh.store.settle import settle
from tests.chaos.checker import check_version
from tests.chaos.findings import Findings
from tests.chaos.reading import Reading
from tests.chaos.versions import Document, Version

BEGIN = datetime(2030, 1, 1, tzinfo=UTC)
TICK_MS = 1_000
_BATCH = 500
_ID = "job:k"
_OF_NO_CONSEQUENCE = ("_id", "event", "finish_time", "delete_time", "publish_id", "publish_number", "lane")
_OF_NO_CONSEQUENCE_IN_THE_STATE = ("losses", "lost_cnt")
_OF_NO_CONSEQUENCE_IN_AN_ENTRY = ("start_time", "success_time", "params_version", "wish", "logs")
_ENDS: tuple[Kind, ...] = ("succeeded", "failed", "released", "snoozed")


@dataclass(frozen=True)
class Model:
    """How large the world is."""

    workers: int
    claims: int
    """How often each worker may win the task."""
    ticks: int
    cancelled: bool = False
    """Whether somebody may cancel the task at any moment."""
    snoozed: bool = False
    """Whether handlers may ask for a delay, of one tick."""
    starts: int | None = None
    """The tick of `start_time`."""
    expires: int | None = None
    """The tick of `expire_time`."""
    option: Mapping[str, Any] = field(default_factory=dict)
    needs: Mapping[str, Any] = field(default_factory=dict)
    """Labels, of which no worker has any."""

    @property
    def worker_ids(self) -> list[str]:
        return [f"w{number}" for number in range(1, self.workers + 1)]


@dataclass(frozen=True, slots=True)
class State:
    """A state; its document stands for all that differ in nothing of consequence."""

    document: Document
    won: tuple[int, ...]
    """How often each worker has won the task: what it may still write about."""


@dataclass(frozen=True, slots=True)
class Step:
    """Something that can happen in a state."""

    what: str
    worker: int = 0
    running_id: str = ""


@dataclass
class Explored:
    """What was found."""

    states: int = 0
    transitions: int = 0
    """Writes that were tried, whether they counted or not; each is checked."""
    counted: int = 0
    """Those that changed something."""
    statuses: set[str] = field(default_factory=set)
    findings: Findings = field(default_factory=Findings)


class Explorer:
    """One model on one database."""

    def __init__(self, uri: str, database: str, sync_database: Any, model: Model) -> None:
        self._stores = {name: Store(uri, database, collection=name) for name in ("tasks", "settled")}
        self._sync_database = sync_database
        self._model = model
        self._option = TaskOption(
            worker_timeout_ms=2 * TICK_MS,
            ping_interval_ms=TICK_MS,
            unexpected_retry_delay_ms=TICK_MS,
            unexpected_retry_jitter=0.0,
        ).changed(**model.option)
        self.found = Explored()

    async def explore(self, until_broken: str | None = None) -> Explored:
        """Visit every state, moment by moment: time alone never goes back. Or stop when this promise is broken."""
        for store in self._stores.values():
            await schema.create_indexes(store)
        states = {s: State(d, (0,) * self._model.workers) for s, d in [self._beginning()]}
        for tick in range(self._model.ticks):
            now = moment(tick)
            for store in self._stores.values():
                store.now = now
            states = await self._all_from(states, now)
            self.found.states += len(states)
            if until_broken in self.found.findings.broken:
                break
        for store in self._stores.values():
            await store.close()
        return self.found

    def _beginning(self) -> tuple[Any, Document]:
        publication = Publication(
            name="job",
            key="k",
            params={},
            configuration=Configuration(
                option=self._option,
                start_time=_time_of(self._model.starts),
                expire_time=_time_of(self._model.expires),
                needs=self._model.needs,
            ),
        )
        document = new_document(publication, BEGIN)
        return self._image(document, (0,) * self._model.workers), document

    async def _all_from(self, states: dict[Any, State], now: datetime) -> dict[Any, State]:
        """Return all states that can be reached at this moment."""
        known, fresh = dict(states), dict(states)
        while fresh:
            todo = [(state, step) for state in fresh.values() for step in self._steps(state)]
            fresh = {}
            for start in range(0, len(todo), _BATCH):
                for state in await self._taken(todo[start : start + _BATCH], now):
                    image = self._image(state.document, state.won)
                    if image not in known:
                        known[image] = fresh[image] = state
        return known

    def _steps(self, state: State) -> Iterable[Step]:
        yield Step("settle")
        if self._model.cancelled:
            yield Step("cancel")
        for worker, times in enumerate(state.won):
            if times < self._model.claims:
                yield Step("claim", worker, _running_id(worker, times))
            for number in range(times):
                for what in ("ping", "report", *_ENDS[: len(_ENDS) if self._model.snoozed else -1]):
                    yield Step(what, worker, _running_id(worker, number))

    async def _taken(self, todo: list[tuple[State, Step]], now: datetime) -> list[State]:
        """Take each step from a copy of its state, and check what became of it."""
        by_step: dict[Step, list[str]] = {}
        documents: dict[str, list[Document]] = {name: [] for name in self._stores}
        for number, (state, step) in enumerate(todo):
            id_ = f"job:{number}"
            by_step.setdefault(step, []).append(id_)
            documents["settled" if step.what == "settle" else "tasks"].append({**state.document, "_id": id_})
        for name, copies in documents.items():
            if copies:
                await self._stores[name].driver.collection(name).insert_many(copies, ordered=False)
        await asyncio.gather(*(self._take(step, ids) for step, ids in by_step.items()))
        after = {document["_id"]: document for store in self._stores.values() for document in await store.find({}, {})}
        for name, copies in documents.items():
            if copies:
                await self._stores[name].driver.collection(name).delete_many({})
        return [self._checked(state, step, after[f"job:{number}"], now) for number, (state, step) in enumerate(todo)]

    async def _take(self, step: Step, ids: list[str]) -> None:
        store, worker_id = self._stores["tasks"], f"w{step.worker + 1}"
        outcomes = [Outcome(id_, step.running_id, "succeeded") for id_ in ids]
        takes: dict[str, Callable[[], Awaitable[Any]]] = {
            "settle": self._settle,
            "cancel": lambda: store.update(
                {"_id": {"$in": ids}, "$expr": _unfinished(store.now)}, cancel_pipeline(store.now)
            ),
            "claim": lambda: claim(store, ids, worker_id, step.running_id, deadline_ms=60_000),
            "ping": lambda: asyncio.to_thread(
                ping, store, self._sync_database, [(id_, step.running_id) for id_ in ids], 2 * TICK_MS, 60_000
            ),
            "report": lambda: report(store, worker_id, outcomes),
        }
        if step.what in takes:
            await takes[step.what]()
        else:
            kind: Kind = next(end for end in _ENDS if end == step.what)
            entry = {"fail_reason": "no", "retry_jitter": 0.0} if kind == "failed" else {}
            delay_ms = TICK_MS if kind == "snoozed" else None
            ended = [Outcome(id_, step.running_id, kind, entry, delay_ms) for id_ in ids]
            await finish(store, worker_id, ended, deadline_ms=60_000)

    async def _settle(self) -> None:
        settled = 1
        while settled:  # it has a deadline, which a busy machine may miss, also when it waits for the majority
            try:
                settled = await settle(self._stores["settled"])
            except WriteConcernError as error:
                if error.code != Code.MAX_TIME_MS_EXPIRED:
                    raise

    def _checked(self, state: State, step: Step, after: Document, now: datetime) -> State:
        """Check the promises of one write, and that it counted if, and only if, it had to."""
        found, before = self.found, state.document
        after = {**after, "_id": _ID}
        before = {**before, "_id": _ID}
        changed = after != before
        found.transitions += 1
        found.counted += changed
        if changed:
            found.findings += check_version(Version(_ID, now, before, after))
        old, new = Reading(before), Reading(after)
        won = state.won
        if step.what == "claim":
            worker_id = f"w{step.worker + 1}"
            claimable = old.claim_time(worker_id, now) <= now
            found.findings.check("H1", _ID, changed == claimable, f"{step}: {claimable=}, {changed=}: {before}")
            if changed:
                won = tuple(n + (i == step.worker) for i, n in enumerate(won))
        elif step.running_id:
            held = [e for e in old.live(now) if e["running_id"] == step.running_id and old.status(now) == "RUNNING"]
            # Said twice at one moment, a ping or a report says nothing new.
            right = changed == bool(held) or (step.what in ("ping", "report") and bool(held))
            found.findings.check("F1", _ID, right, f"{step}: {held=}, {changed=}: {before}")
        finished = new.finished(now)
        goes_on = any(after.get(name) is not None for name in ("next_claim_time", "settle_time"))
        found.findings.check("L1", _ID, finished or goes_on, f"nobody will ever come back to {after}")
        found.statuses.add(new.status(now))
        return State(after, won)

    def _image(self, document: Document, won: tuple[int, ...]) -> Any:
        """What of a state has consequences, under those names of the workers that make it smallest."""
        kept = {name: value for name, value in document.items() if name not in _OF_NO_CONSEQUENCE}
        state = dict(kept.pop("task_state"))
        entries = [
            {name: value for name, value in entry.items() if name not in _OF_NO_CONSEQUENCE_IN_AN_ENTRY}
            for entry in state.pop("worker_states")
        ]
        for name in _OF_NO_CONSEQUENCE_IN_THE_STATE:
            state.pop(name, None)
        rest = repr(_sorted([kept, state]))
        if self._option.specific_worker_ids:
            return won, repr(_sorted(entries)), rest
        orders = itertools.permutations(range(self._model.workers))
        return (*min(_renamed(entries, won, order) for order in orders), rest)


def _renamed(entries: list[Document], won: tuple[int, ...], order: tuple[int, ...]) -> tuple[tuple[int, ...], str]:
    """The same with worker `order[i]` in the place of worker `i`."""
    place = {f"w{old + 1}": f"w{new + 1}" for new, old in enumerate(order)}
    renamed = []
    for entry in entries:
        worker_id, _, number = entry["running_id"].partition("-")
        assert worker_id == entry["worker_id"]
        name = place[worker_id]
        renamed.append({**entry, "worker_id": name, "running_id": f"{name}-{number}"})
    return tuple(won[old] for old in order), repr(_sorted(renamed))


def moment(tick: int) -> datetime:
    """The server's time at a tick."""
    return BEGIN + timedelta(milliseconds=tick * TICK_MS)


def _time_of(tick: int | None) -> datetime | None:
    return None if tick is None else moment(tick)


def _unfinished(now: rules.Expression) -> rules.Expression:
    return rules.with_facts(now, {"$in": [rules.status(now), ["INIT", "RUNNING"]]})


def _running_id(worker: int, number: int) -> str:
    return f"w{worker + 1}-{number}"


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        return sorted((name, _sorted(part)) for name, part in value.items())
    return [_sorted(part) for part in value] if isinstance(value, list) else value
