"""The short forms of claim, SUCCESS, record and signal do to the tasks that they take what the whole forms do.

They take most plain ones. On documents that differ from a plain task in few things, so that each thing is what alone keeps a
short form away.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from random import Random
from typing import Any

import pytest

from taskmesh.store import Store, finish, rules, steps
from taskmesh.store.claim import claim
from taskmesh.store.finish import Kind, Outcome
from taskmesh.store.relations import dependencies, opening
from taskmesh.store.relations.around_locks import update_around_locks
from taskmesh.store.relations.opening import Gate, open_gate
from taskmesh.store.signals import Signal, signal_alone
from tests.chaos.reading import NEVER, ms
from tests.properties.documents import Documents, renamed
from tests.properties.oracle import Document, Oracle
from tests.properties.patience import PatientStore
from tests.properties.world import known_bytes

SEED = os.environ.get("SEED", "taskmesh")
_COUNT = 500
_LIKELY_PLAIN = 0.9
BEGIN = datetime(2030, 1, 1, tzinfo=UTC)
_RUNNING_ID = "r"


@asynccontextmanager
async def _store(uri: str, database: str, collection: str) -> AsyncIterator[Store]:
    store = PatientStore(uri, database, collection, now=BEGIN)
    try:
        yield store
    finally:
        await store.close()


def _nearly_plain(*, claimed: bool) -> list[Document]:
    """Random documents in which most things are as in a task that nobody has tried, or that runs for the first time."""
    random = Random(f"{SEED} {claimed}")
    documents = list(Documents(SEED, BEGIN).draw(_COUNT))
    for document in documents:
        option, state = document["task_option"], document["task_state"]
        plain_option = {"concurrent_worker_cnt": 1, "specific_worker_ids": [], "max_timeouts": 5}
        option |= {name: value for name, value in plain_option.items() if random.random() < _LIKELY_PLAIN}
        entry = {"running_id": _RUNNING_ID, "worker_id": "w1", "state": "RUNNING", "start_time": BEGIN - ms(1_000)}
        lease_end = BEGIN + ms(random.choice((-1, 0, 1, 2_000, 2_000, 2_000)))
        plain_state = {"worker_states": [entry | {"ping_expire_time": lease_end}] if claimed else [], "timeout_cnt": 0}
        for name in list(state):
            if name != "create_time" and random.random() < _LIKELY_PLAIN:
                if name in plain_state:
                    state[name] = plain_state[name]
                else:
                    del state[name]
        Oracle(document).derive(BEGIN)
    return [_stored(document) for document in documents]


def _stored(document: Document) -> Document:
    """As the engine stores it, by which a field is there or not."""
    return {name: value for name, value in document.items() if value is not None}


async def _filled(store: Store, documents: list[Document]) -> dict[str, Document]:
    await store.driver.collection(store.tasks).insert_many(documents)
    return await _documents(store)


async def _documents(store: Store) -> dict[str, Document]:
    return {document["_id"]: document for document in await store.find({}, {})}


def _whole_only(patch: pytest.MonkeyPatch, store: Store) -> None:
    """Make the store's short forms, which name the index to use, take nothing."""
    command = store.update_command

    def whole(query: Document, *arguments: Any, **options: Any) -> Document:
        return command({"_id": {"$in": []}} if options.get("hint") else query, *arguments, **options)

    patch.setattr(store, "update_command", whole)


async def test_a_claim_of_untried_tasks_is_the_claim_by_the_whole_rule(
    mongo_uri: str, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = _nearly_plain(claimed=False)
    async with _store(mongo_uri, database, "short") as short, _store(mongo_uri, database, "whole") as whole:
        before = await _filled(short, documents)
        await _filled(whole, documents)
        _whole_only(monkeypatch, whole)
        ids, closed = list(before), ["odd"]
        counts = [await claim(store, ids, "w1", _RUNNING_ID, closed_queues=closed) for store in (short, whole)]
        after = await _documents(short)
        assert counts[0] == counts[1]
        assert after == await _documents(whole)

    assert len([id_ for id_ in ids if after[id_] != before[id_]]) == counts[0]
    assert _COUNT / 8 < counts[0] < _COUNT * 7 / 8


async def test_the_success_of_a_single_execution_is_the_success_by_the_whole_rule(
    mongo_uri: str, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = _nearly_plain(claimed=True)
    async with _store(mongo_uri, database, "short") as short, _store(mongo_uri, database, "whole") as whole:
        before = await _filled(short, documents)
        await _filled(whole, documents)
        _whole_only(monkeypatch, whole)
        outcomes = [
            Outcome(id_, _RUNNING_ID, "succeeded", {"returns": n}, progress={"fraction": 1.0} if n % 2 else None)
            for n, id_ in enumerate(before)
        ]
        counts = [await finish.finish(store, "w1", outcomes) for store in (short, whole)]
        after = await _documents(short)
        assert counts[0] == counts[1]
        assert after == await _documents(whole)
    assert _COUNT / 8 < counts[0] < _COUNT * 7 / 8


@pytest.mark.parametrize("together", [True, False])
async def test_the_record_of_a_single_execution_is_the_record_by_the_whole_rule(
    mongo_uri: str, database: str, monkeypatch: pytest.MonkeyPatch, together: bool
) -> None:
    """Of many executions in one statement, or of each by modifiers."""
    documents = _nearly_plain(claimed=True)
    for n, document in enumerate(documents):
        if n % 3:
            document["task_state"] |= {"steps": [{"id": f"step:1:s{n % 7}", "value": n, "size": 30}], "steps_bytes": 30}
        elif n % 2:  # with the first record the time to start by binds no more
            document["task_state"]["expire_time"] = BEGIN + ms(5_000)
        Oracle(document).derive(BEGIN)
    async with _store(mongo_uri, database, "short") as short, _store(mongo_uri, database, "whole") as whole:
        before = await _filled(short, [_stored(document) for document in documents])
        await _filled(whole, [_stored(document) for document in documents])
        _whole_only(monkeypatch, whole)
        modified = 0

        async def records(outcomes: list[Outcome], now: datetime) -> tuple[int, int]:
            """Write them into both, and return how many counted."""
            nonlocal modified
            whole.now = short.now = now
            counted = await steps.record(whole, "w1", outcomes)
            if together:
                return counted, await steps.record(short, "w1", outcomes)
            stored = await _documents(short)
            alone = 0
            for outcome in outcomes:
                outcome.made_at = now
                outcome.bytes_before = known_bytes(stored[outcome.id], outcome.step or {})
                alone += await steps.record(short, "w1", [outcome])
            after = await _documents(short)
            modified += sum(_by_the_workers_clock(task) for task in after.values())
            return counted, alone

        def outcome(n: int, id_: str, lease_ms: int) -> Outcome:
            step = {"id": f"step:1:s{n % 5}", "value": {"$n": n, "$ref": 1, "a.b": "$name"}, "size": n + 1}
            return Outcome(id_, _RUNNING_ID, "stepped", step=step, lease_ms=lease_ms)

        leases = itertools.cycle((1_000, 2_600, 2_600, 4_000))
        counts = await records([outcome(n, *pair) for n, pair in enumerate(zip(before, leases, strict=False))], BEGIN)
        after = await _documents(short)
        assert counts[0] == counts[1]
        assert _without_marks(after) == await _documents(whole)
        assert _COUNT / 8 < counts[0] < _COUNT * 7 / 8

        recorded = [id_ for id_ in before if after[id_] != before[id_]]
        outcomes = [
            Outcome(id_, _RUNNING_ID, "stepped", step={"id": step, "value": None, "size": 1}, lease_ms=1_400)
            for id_, step in zip(recorded, itertools.cycle(("a", "b")), strict=False)
        ]
        later = await records(outcomes, BEGIN + ms(500))
        assert later[0] == later[1] > _COUNT / 8
        assert _without_marks(await _documents(short)) == await _documents(whole)
    assert together == (modified == 0)
    assert together or modified > _COUNT / 4


def _by_the_workers_clock(task: Document) -> bool:
    return "w\x1f" in task.get("record_event", "")


def _without_marks(tasks: dict[str, Document]) -> dict[str, Document]:
    """Without what says whose clock a stamp is by."""
    return {
        id_: task | ({"record_event": task["record_event"].replace("w\x1f", "\x1f")} if "record_event" in task else {})
        for id_, task in tasks.items()
    }


async def test_a_signal_that_is_waited_for_is_the_signal_by_the_whole_rule(
    mongo_uri: str, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = _nearly_plain(claimed=False)
    for n, document in enumerate(documents):
        records: list[Document] = [
            {"id": "wait:1:go#2", "kind": "wait", "name": "go#2", "size": 10},
            {"id": "wait:2:go", "kind": "wait", "name": "go#2", "size": 10} | ({"time": BEGIN} if n % 11 == 0 else {}),
        ]
        waits: Document = {"id": "wait:2:go", "kind": "wait", "name": "go#2", "event": "go" if n % 5 else "no"}
        if n % 13 == 0:  # an older release
            del waits["id"]
        until = BEGIN + ms((-1, 0, 1, 9_000, 9_000, 9_000)[n % 6])
        state = {"steps": records, "steps_bytes": 20, "suspended_for": waits, "suspended_until": until}
        if n % 3 == 0:
            state |= {"signals": [{"event": "other", "id": "s", "size": 1}], "signals_bytes": 1}
        document["task_state"] |= state
        Oracle(document).derive(BEGIN)
    async with _store(mongo_uri, database, "short") as short, _store(mongo_uri, database, "whole") as whole:
        before = await _filled(short, [_stored(document) for document in documents])
        await _filled(whole, [_stored(document) for document in documents])
        _whole_only(monkeypatch, whole)
        for n, id_ in enumerate(before):
            payload = ({"$n": n}, "$name", n)[n % 3]
            answers = [await signal_alone(store, Signal(id_, "go", f"s{n}", payload, 5)) for store in (short, whole)]
            assert answers[0] == answers[1]
        after = await _documents(short)
        assert after == await _documents(whole)
    taken = [task["task_state"] for task in after.values() if task["task_state"]["steps_bytes"] > 20]
    assert _COUNT / 8 < len(taken) < _COUNT * 7 / 8
    assert all((state["steps"][1]["size"], state["suspended_until"]) == (15, BEGIN) for state in taken)
    over = [id_ for n, id_ in enumerate(before) if n % 11 == 0]
    assert all(after[id_]["task_state"]["steps"] == before[id_]["task_state"]["steps"] for id_ in over)


@pytest.mark.parametrize("kind", ["released", "snoozed", "suspended", "conflicted"])
async def test_a_single_execution_is_given_back_as_by_the_whole_rule(
    mongo_uri: str, database: str, monkeypatch: pytest.MonkeyPatch, kind: Kind
) -> None:
    documents = _nearly_plain(claimed=True)
    waits: list[Document] = [
        {"id": "join:1:a", "kind": "join", "name": "a"},
        {"id": "wait:1:go", "kind": "wait", "name": "go", "event": "go"},
        {
            "id": "sleep:1:s",
            "kind": "sleep",
            "name": "s",
            "record": {"id": "sleep:1:s", "size": 9},
            "timeout_ms": 4_000,
        },
    ]
    for n, document in enumerate(documents):
        if n % 4 == 0:
            document["task_state"] |= {"signals": [{"event": "go", "id": "s", "size": 1}], "signals_bytes": 1}
        if n % 5 == 0:
            gone_on = [{"id": "wait:1:go", "kind": "wait", "until": BEGIN + ms(7_000), "size": 3}]
            document["task_state"] |= {"steps": gone_on, "steps_bytes": 3}
        if n % 6 == 0:
            document["task_state"]["timeout_cnt"] = 2
            document["task_option"]["max_timeouts"] = 1
        if n % 7 == 0:
            others = [entry | {"running_id": "other"} for entry in document["task_state"]["worker_states"]]
            document["task_state"]["worker_states"] += others
        Oracle(document).derive(BEGIN)
    async with _store(mongo_uri, database, "short") as short, _store(mongo_uri, database, "whole") as whole:
        before = await _filled(short, [_stored(document) for document in documents])
        await _filled(whole, [_stored(document) for document in documents])
        _whole_only(monkeypatch, whole)
        short.now = whole.now = BEGIN + ms(1)  # some leases have run out by now
        outcomes = [
            Outcome(
                id_,
                _RUNNING_ID,
                kind,
                delay_ms=(None, 0, 5_000)[n % 3] if kind == "snoozed" or n % 2 else None,
                progress={"fraction": 1.0} if n % 2 else None,
                step=waits[n % 3] if kind == "suspended" else None,
            )
            for n, id_ in enumerate(before)
        ]
        counts = [await finish.finish(store, "w1", outcomes) for store in (short, whole)]
        after = await _documents(short)
        assert counts[0] == counts[1]
        assert after == await _documents(whole)
        assert _COUNT / 8 < counts[0] < _COUNT * 7 / 8

        taken = [id_ for id_ in before if after[id_]["event"] != before[id_]["event"]]
        untried = [
            id_
            for id_ in taken
            if before[id_]["task_state"]["timeout_cnt"] == 0
            and len(before[id_]["task_state"]["worker_states"]) == 1
            and not _UNUSUAL & {name for name, value in before[id_]["task_state"].items() if value is not None}
        ]
        await short.driver.collection(short.tasks).delete_many({})
        await _filled(short, [before[id_] for id_ in untried])
        commands = _counted(monkeypatch, short)
        again = [outcome for outcome in outcomes if outcome.id in untried]
        assert await finish.finish(short, "w1", again) == len(again) > _COUNT / 8
        assert len(commands) == 1, "single executions took the whole form"


_UNUSUAL = {
    *("expire_time", "dropped_fail_cnt", "leaving", "moves_to", "released_time", "in_line", "flow", "waits_for"),
    *("cancel_time", "deleted_time", "dependency_failure"),
}


async def test_the_start_of_children_is_recorded_as_by_the_whole_rule(
    mongo_uri: str, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = _nearly_plain(claimed=True)
    for n, document in enumerate(documents):
        if n % 3:  # what this execution, or another, has started just before
            record = {"id": "start:1:a", "kind": "start", "names": ["job:a"], "size": 30}
            steps_before = [record | {"running_id": _RUNNING_ID if n % 2 else "other"}]
            document["task_state"] |= {"steps": steps_before, "steps_bytes": 30}
        Oracle(document).derive(BEGIN)
    async with _store(mongo_uri, database, "short") as short, _store(mongo_uri, database, "whole") as whole:
        before = await _filled(short, [_stored(document) for document in documents])
        await _filled(whole, [_stored(document) for document in documents])
        _whole_only(monkeypatch, whole)
        outcomes = [
            Outcome(
                id_,
                _RUNNING_ID,
                "stepped",
                step={
                    "id": f"start:1:{name}",
                    "kind": "start",
                    "running_id": _RUNNING_ID,
                    "names": [name],
                    "size": n + 1,
                },
                lease_ms=lease_ms,
            )
            for n, (id_, name, lease_ms) in enumerate(
                zip(
                    before, itertools.cycle(("job:a", "job:$b", "job:c")), itertools.cycle((2_600, 4_000)), strict=False
                )
            )
        ]
        counts = [await steps.record_starts(store, "w1", outcomes, None) for store in (short, whole)]
        after = await _documents(short)
        assert counts[0] == counts[1]
        assert after == await _documents(whole)
        assert _COUNT / 8 < counts[0] < _COUNT * 7 / 8
        assert await steps.record_starts(short, "w1", outcomes, None) == 0, "recorded twice"


@pytest.mark.parametrize("gate", list(Gate))
async def test_a_gate_that_is_opened_is_opened_as_by_the_whole_rule(
    mongo_uri: str, database: str, monkeypatch: pytest.MonkeyPatch, gate: Gate
) -> None:
    documents = _nearly_plain(claimed=False)
    shut = {Gate.DEPENDENCIES: "run", Gate.SEQUENCE: True, Gate.FLOW: "f"}
    for n, document in enumerate(documents):
        state = document["task_state"]
        if n % 9:
            state[gate.rpartition(".")[2]] = shut[gate]
        if n % 7 == 0:  # another is shut as well
            other = list(Gate)[n % 3]
            state[other.rpartition(".")[2]] = shut[other]
        if n % 5 == 0:
            until = BEGIN + ms((-1, 0, 9_000)[n % 3]) if n % 2 else NEVER
            state |= {"suspended_until": until, "suspended_for": {"kind": ("join", "wait")[n % 2]}, "steps_bytes": 3}
        if n % 8 == 0:
            failed = {"running_id": "f", "worker_id": "w1", "state": "FAIL", "start_time": BEGIN, "fail_time": BEGIN}
            state["worker_states"] = [failed | {"ping_expire_time": BEGIN + ms(3_000)}]
        if n % 10 == 1:
            state["expire_time"] = BEGIN + ms(1)
        Oracle(document).derive(BEGIN)
    async with _store(mongo_uri, database, "short") as short, _store(mongo_uri, database, "whole") as whole:
        before = await _filled(short, [_stored(document) for document in documents])
        await _filled(whole, [_stored(document) for document in documents])
        where = {"queue": {"$ne": "odd"}}
        short.now = whole.now = BEGIN + ms(1)
        commands = _counted(monkeypatch, short)
        assert await open_gate(short, gate, list(before), where)
        assert len(commands) == 2, "what the short form left was not asked for by the whole rule"
        with monkeypatch.context() as patch:
            patch.setattr(opening, "_held_back", _nothing)
            assert await open_gate(whole, gate, list(before), where)
        after = await _documents(short)
        assert after == await _documents(whole)

        opened = [id_ for id_ in before if after[id_] != before[id_]]
        assert _COUNT / 8 < len(opened) < _COUNT
        assert all(after[id_]["queue"] != "odd" for id_ in opened)
        assert all(gate.rpartition(".")[2] in before[id_]["task_state"] for id_ in opened)
        commands.clear()
        plain = [
            id_
            for id_ in opened
            if after[id_]["status"] == "INIT"
            and not after[id_]["task_state"]["worker_states"]
            and not {"expire_time", "leaving", "moves_to"} & after[id_]["task_state"].keys()
        ]
        await short.driver.collection(short.tasks).delete_many({})
        await _filled(short, [before[id_] for id_ in plain])
        assert await open_gate(short, gate, plain, where)
        assert len(commands) == 1, "tasks that nobody has tried took the whole form"
        assert len(plain) > _COUNT / 8


async def test_unfinished_tasks_name_their_dependents_as_by_the_whole_rule(mongo_uri: str, database: str) -> None:
    documents = [*_nearly_plain(claimed=False), *(renamed(each, "-run") for each in _nearly_plain(claimed=True))]
    async with _store(mongo_uri, database, "short") as short, _store(mongo_uri, database, "whole") as whole:
        before = await _filled(short, documents)
        await _filled(whole, documents)
        named = {"$literal": ["job:x", "job:$z"]}
        count = await update_around_locks(short, list(before), dependencies._GOES_ON, dependencies.naming(named))
        after = await _documents(short)
        taken = [id_ for id_ in before if after[id_] != before[id_]]
        assert count == len(taken)
        assert _COUNT / 2 < len(taken) < 2 * _COUNT
        await update_around_locks(whole, taken, {}, dependencies._keeping(named, whole.now))
        assert after == await _documents(whole)

        assert {after[id_]["status"] for id_ in taken} == {"INIT", "RUNNING"}
        left = [id_ for id_ in before if id_ not in taken and "released_time" not in before[id_]["task_state"]]
        assert {"INIT", "RUNNING"}.isdisjoint(before[id_]["status"] for id_ in left)
        assert await dependencies._name(short, list(before), named)
        named_by = [task["task_state"]["dependents"] for task in (await _documents(short)).values()]
        assert all({"job:x", "job:$z"} <= set(names) for names in named_by)


def _counted(patch: pytest.MonkeyPatch, store: Store) -> list[Document]:
    """The queries of its updates, as they are sent."""
    sent: list[Document] = []
    command = store.update_command

    def noted(query: Document, *arguments: Any, **options: Any) -> Document:
        sent.append(query)
        return command(query, *arguments, **options)

    patch.setattr(store, "update_command", noted)
    return sent


def _nothing(*_: Any) -> Document:
    return {"_id": None}


async def test_short_forms_take_the_plain_tasks_and_no_others(
    mongo_uri: str, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with _store(mongo_uri, database, "tasks") as store:
        state: Document = {
            "create_time": BEGIN,
            "start_time": None,
            "expire_time": None,
            "timeout_cnt": 0,
            "worker_states": [],
        }
        option = next(Documents(SEED, BEGIN).draw(1))["task_option"]
        option |= {"concurrent_worker_cnt": 1, "specific_worker_ids": [], "max_timeouts": 5}
        plain = {"_id": "job:plain", "queue": "q", "pinned": False, "task_option": option, "task_state": state}
        gated = plain | {"_id": "job:gated", "task_state": state | {"suspended": BEGIN + ms(1)}}
        for document in (plain, gated):
            Oracle(document).derive(BEGIN)
        await _filled(store, [_stored(plain), _stored(gated)])

        # A gate that the short form knows nothing of.
        gates = rules.task_gates
        monkeypatch.setattr(rules, "task_gates", lambda now: gates(now) | {"not suspended": "$task_state.suspended"})
        sent = _counted(monkeypatch, store)
        ids = ["job:plain", "job:gated"]
        assert await claim(store, ids, "w1", "r1") == 1
        assert {id_ for id_, task in (await _documents(store)).items() if task["status"] == "RUNNING"} == {"job:plain"}
        assert len(sent) == 2, "what the short form left was not asked for by the whole rule"

        sent.clear()
        made = Outcome("job:plain", "r1", "stepped", step={"id": "step:1:a", "value": 1, "size": 1}, lease_ms=1_000)
        assert await steps.record(store, "w1", [made]) == 1
        assert len(sent) == 1, "a record of a single execution with a young lease took the whole form"
        assert await steps.record(store, "w1", [made]) == 0, "recorded twice"

        sent.clear()
        made = replace(made, step={"id": "step:1:b", "value": 1, "size": 1}, made_at=BEGIN, bytes_before=1)
        assert await steps.record(store, "w1", [made]) == 1
        assert not sent, "what one execution recorded was a statement for many"
        assert await steps.record(store, "w1", [made]) == 0, "recorded twice"

        sent.clear()
        started = {"id": "start:1:job:c", "kind": "start", "running_id": "r1", "names": ["job:c"], "size": 5}
        assert await steps.record_starts(store, "w1", [replace(made, step=started, made_at=None)], None) == 1
        assert len(sent) == 1, "the start of a child took the whole form"

        sent.clear()
        assert await finish.finish(store, "w1", [Outcome("job:plain", "r1", "succeeded", {"returns": None})]) == 1
        assert len(sent) == 1, "a single execution's SUCCESS took the whole form"

        sent.clear()
        waiting = state | {"steps": [{"id": "wait:1:go", "size": 1}], "steps_bytes": 1, "suspended_until": NEVER}
        waiting["has_children"] = True
        waiting["suspended_for"] = {"id": "wait:1:go", "event": "go"}
        suspended = plain | {"_id": "job:suspended", "task_state": waiting}
        Oracle(suspended).derive(BEGIN)
        await store.driver.collection(store.tasks).insert_one(_stored(suspended))
        assert await signal_alone(store, Signal("job:suspended", "go", "s", {"$x": 1}, 1)) == "sent"
        assert len(sent) == 1, "a signal to a task that waits for it took the whole form"
        assert await claim(store, ["job:suspended"], "w1", "r3") == 1
        assert len(sent) == 2, "the claim of a task that was put aside took the whole form"
        store.now = BEGIN + ms(1)
        assert await claim(store, ["job:gated"], "w1", "r2") == 1
