"""Tasks that the calls of one moment change together come out as if each had been changed alone."""

from __future__ import annotations

import asyncio
import copy
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from bson import ObjectId

from taskmesh.model.configuration import Configuration
from taskmesh.model.errors import TaskRunning
from taskmesh.model.option import TaskOption
from taskmesh.store import Store, publish
from taskmesh.store.mongodb.driver import Document
from taskmesh.store.publication import Publication
from taskmesh.store.publish import Published
from tests.chaos.reading import ms
from tests.properties.documents import Documents
from tests.properties.life import Life
from tests.properties.patience import PatientStore

SEED = os.environ.get("SEED", "taskmesh")
BEGIN = datetime(2030, 1, 1, tzinfo=UTC)
_COUNT = 300
_DATA = {"$gt": [], "a.b": ""}
_CHANGES: dict[str, dict[str, Any]] = {
    "params": {"update_existing_params": True},
    "params, unless it runs": {"update_existing_params": True, "not_update_running": True},
    "params, elsewhere": {"update_existing_params": True, "queue": "odd", "group": "g"},
    "again": {"run_again": True},
    "again, later": {"run_again": True, "delay_ms": 900},
    "again, at another time, with tags": {"run_again": True, "start_time": BEGIN + ms(900), "tags": ("a", "b")},
    "again, what runs is stopped": {"replace_running": True},
    "again after a failure": {"clean_failed": True},
    "again after both": {"clean_failed": True, "clean_success": True, "update_existing_params": True},
    "put off": {"update_existing_params": True, "debounce_ms": 1_000},
    "not too often": {"update_existing_params": True, "throttle_ms": 6_999},
    "not yet again": {"update_existing_params": True, "throttle_ms": 7_001},
}


Publish = Callable[[Store, Sequence[Publication]], Awaitable[Any]]
"""How all of it is published. What that returns is compared."""


class Compared:
    """Two stores: in one, `together` (a function of `publish`) leaves all to `one`."""

    def __init__(self, uri: str, database: str, patch: pytest.MonkeyPatch, together: str, one: str) -> None:
        self._stores = [PatientStore(uri, database, name, now=BEGIN) for name in ("alone", "together")]
        change_together, change_one = getattr(publish, together), getattr(publish, one)
        self.one_by_one = Counter[str]()
        """How many were left to `one`, by store."""

        async def unless_alone(store: Store, *arguments: Any) -> dict[Any, Published]:
            return {} if store.tasks == "alone" else await change_together(store, *arguments)

        async def counted(store: Store, *arguments: Any) -> Any:
            self.one_by_one[store.tasks] += 1
            return await change_one(store, *arguments)

        patch.setattr(publish, together, unless_alone)
        patch.setattr(publish, one, counted)

    async def publish(self, there: Sequence[Document], publications: Sequence[Publication], how: Publish) -> Any:
        """Publish in both. Return what came of it in each, after comparing what is stored then."""
        outcomes, after = [], []
        try:
            for store in self._stores:
                await store.driver.collection(store.tasks).insert_many(copy.deepcopy(there))
                outcomes.append(await how(store, copy.deepcopy(publications)))
                after.append({document["_id"]: document for document in await store.find({}, {})})
        finally:
            for store in self._stores:
                await store.close()
        assert outcomes[0] == outcomes[1]
        assert after[0] == after[1]
        # What looks like an operator or a field's name is data.
        assert all(task["params"].get("data", _DATA).keys() == _DATA.keys() for task in after[1].values())
        return outcomes[0]


@pytest.mark.parametrize("change", _CHANGES.values(), ids=_CHANGES)
async def test_what_is_changed_together_is_changed_as_each_alone(
    mongo_uri: str, database: str, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    async def at_one_moment(store: Store, publications: Sequence[Publication]) -> list[Any]:
        changes = publish.Changes(store)
        calls = (publish.publish(store, [each], BEGIN + ms(n), changes) for n, each in enumerate(publications))
        published = await asyncio.gather(*calls, return_exceptions=True)
        return [str(each) if isinstance(each, TaskRunning) else each for each in published]

    compared = Compared(mongo_uri, database, monkeypatch, "_change_together", "_change_existing")
    outcomes = await compared.publish(*_drawn(change), at_one_moment)
    changed = any(isinstance(each, list) and each[0].updated for each in outcomes)
    assert not changed or compared.one_by_one["together"] < compared.one_by_one["alone"]


@pytest.mark.parametrize("change", _CHANGES.values(), ids=_CHANGES)
async def test_so_is_what_one_transaction_changes(
    mongo_uri: str, database: str, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    async def in_a_transaction(store: Store, publications: Sequence[Publication]) -> list[Published] | str:
        async with store.driver.client.start_session() as session:
            try:
                async with await session.start_transaction():
                    return await publish.publish_in_session(store, publications, BEGIN, session)
            except TaskRunning as error:
                return str(error)

    compared = Compared(mongo_uri, database, monkeypatch, "_change_together_in_session", "_change_one_in_session")
    there, publications = _drawn(change)
    # Some are asked twice.
    publications += [replace(each, publish_id=ObjectId(), number=1_000 + n) for n, each in enumerate(publications[:9])]
    outcome = await compared.publish(there, publications, in_a_transaction)
    assert isinstance(outcome, str) == ("not_update_running" in change)
    if not isinstance(outcome, str):
        assert any(each.updated or each.throttled for each in outcome)
        assert compared.one_by_one["together"] < compared.one_by_one["alone"] / 10


def _drawn(change: dict[str, Any]) -> tuple[list[Document], list[Publication]]:
    """Documents that are there, and what is published. Some of it is new, and nothing changes in others."""
    documents = [_stored(document) for document in Documents(f"{SEED} {change}", BEGIN).draw(_COUNT)]
    there = [{**document, "publish_id": ObjectId()} for n, document in enumerate(documents) if n % 10]
    configuration = Configuration(option=TaskOption()).changed(**change)
    return there, [
        Publication(
            "job",
            document["key"],
            {"n": n % 3, "data": {"$gt": [n, "$$ROOT"], "a.b": "$_id"}} if n % 4 else {"n": 1},
            replace(configuration),  # equal to the others', and not the same
            number=n + 1,
            trace={"traceparent": f"$trace {n}"} if n % 2 else None,
        )
        for n, document in enumerate(documents)
    ]


def _stored(document: Document) -> Document:
    """As the engine stores it, by which a field is there or not."""
    return {name: value for name, value in document.items() if value is not None}


async def test_params_that_are_large_together_go_in_several_commands(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server cuts the connection on which a command of 48 MB comes."""
    alone: list[str] = []
    change_existing = publish._change_existing

    async def noted(store: Store, publication: Publication, now: datetime) -> Published:
        alone.append(publication.key)
        return await change_existing(store, publication, now)

    monkeypatch.setattr(publish, "_change_existing", noted)
    configuration = Configuration(option=TaskOption()).changed(update_existing_params=True)
    await publish.publish(life.store, [Publication("job", key, {}, configuration) for key in "abcd"], life.now)
    most = publish._CHANGED_AT_ONCE_BYTES
    for size, expected in ((most // 4, 0), (most // 4 + 1, 1), (most // 2 + 1, 1 + 4)):
        publications = [Publication("job", key, {"n": size}, configuration, size=size) for key in "abcd"]
        await publish.publish(life.store, publications, life.now)
        assert len(alone) == expected


async def test_who_has_met_a_locked_key_does_not_go_with_the_others(life: Life) -> None:
    """Else it would hold them up each time it tries again."""
    asked: list[str] = []

    class Shared(publish.Changes):
        async def call(self, changes: Sequence[Any], /) -> Mapping[Any, Published]:
            asked.extend(change.publication.key for change in changes)
            return await super().call(changes)

    configuration = Configuration(option=TaskOption()).changed(update_existing_params=True)
    shared = Shared(life.store)
    await publish.publish(life.store, [Publication("job", key, {}, configuration) for key in "ab"], life.now)
    for n, (alone, expected) in enumerate(((True, []), (False, ["a", "b"]))):
        publications = [Publication("job", key, {"n": n}, configuration) for key in "ab"]
        results = await publish.publish(life.store, publications, life.now, shared, alone=alone)
        assert [each.updated for each in results] == [True, True]
        assert asked == expected
