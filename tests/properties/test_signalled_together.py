"""Signals that go together arrive as if each had been sent alone."""

from __future__ import annotations

import asyncio
import os
from datetime import UTC, datetime
from random import Random
from typing import Any

from taskmesh.store.signals import Signal, Signals, signal_alone
from tests.chaos.reading import ms
from tests.properties.documents import Documents
from tests.properties.oracle import Document, Oracle
from tests.properties.patience import PatientStore

SEED = os.environ.get("SEED", "taskmesh")
BEGIN = datetime(2030, 1, 1, tzinfo=UTC)
_COUNT = 400
_PAYLOADS: tuple[Any, ...] = ({"$gt": [], "a.b": "$_id"}, "$name", ["$$ROOT"], 7)


async def test_signals_that_go_together_arrive_as_each_alone(mongo_uri: str, database: str) -> None:
    there = _drawn()
    signals = [
        Signal(f"job:{n}", "go", f"s{n}", _PAYLOADS[n % len(_PAYLOADS)], 5 + n) for n in range(_COUNT + 5)
    ]  # for the last few there is no task
    answers: list[list[str]] = []
    after: list[dict[str, Document]] = []
    together = 0
    for name in ("alone", "together"):
        store = PatientStore(mongo_uri, database, name, now=BEGIN)
        try:
            await store.driver.collection(store.tasks).insert_many([dict(document) for document in there])
            if name == "alone":
                answers.append([await signal_alone(store, signal) for signal in signals])
            else:
                sender = Signals(store)
                known = await sender.call(signals)
                together = len(known)
                assert set(known.values()) <= {"sent"}
                rest = [signal for signal in signals if signal not in known]
                alone = dict(zip(rest, await asyncio.gather(*(signal_alone(store, s) for s in rest)), strict=True))
                answers.append([known.get(signal) or alone[signal] for signal in signals])
            after.append({document["_id"]: document for document in await store.find({}, {})})
        finally:
            await store.close()
    told = [("sent", "sent") if "known" in pair else pair for pair in zip(*answers, strict=True)]
    assert all(one == other for one, other in told)
    assert after[0] == after[1]
    assert not {field for document in after[1].values() for field in document if field.startswith("_")} - {"_id"}
    assert {"sent", "known", "finished", "full", "absent"} == set(answers[0])
    assert together > answers[0].count("sent") * 0.9


def _drawn() -> list[Document]:
    """Documents of which many wait for the event, some for another, and some know the signal, or have no room for it."""
    random = Random(SEED)
    documents = list(Documents(SEED, BEGIN).draw(_COUNT))
    for n, document in enumerate(documents):
        state = document["task_state"]
        if random.random() < 0.6:
            waits = {"id": "wait:1:go", "kind": "wait", "name": "go", "event": random.choice(("go", "go", "no"))}
            state["steps"] = [{"id": "wait:1:go", "kind": "wait", "name": "go", "size": 10}]
            state |= {"steps_bytes": 10, "suspended_for": waits}
            state["suspended_until"] = BEGIN + ms(random.choice((-1, 0, 1, 9_000, 9_000)))
        kind = random.choice(("", "", "", "mailbox", "full", "many", "known", "consumed", "earlier"))
        if kind in ("mailbox", "known"):
            state["signals"] = [{"event": "go", "id": f"s{n}" if kind == "known" else "s", "payload": 1, "size": 1}]
            state["signals_bytes"] = 1
        elif kind == "full":
            state["signals_bytes"] = 1_000_000 - random.choice((4, 5, 6)) - n
        elif kind == "many":
            state["signals"] = [{"event": "x", "id": f"x{i}", "size": 1} for i in range(random.choice((999, 1_000)))]
        elif kind == "consumed":
            state["steps"] = [*(state.get("steps") or []), {"id": "wait:0:x", "signal_id": f"s{n}", "size": 1}]
        elif kind == "earlier":
            state["stages"] = [{"steps": [{"id": "wait:0:x", "signal_id": f"s{n}", "size": 1}]}]
        Oracle(document).derive(BEGIN)
    return [{name: value for name, value in document.items() if value is not None} for document in documents]
