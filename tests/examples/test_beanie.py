"""The Beanie example: documents and tasks come together, and change together."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from types import ModuleType
from typing import Any

import pytest

from taskmesh import Status
from tests.examples.web import imported

pytestmark = pytest.mark.skipif(sys.version_info >= (3, 14), reason="Beanie 2.2 does not install on Python 3.14")


@pytest.fixture
async def shop(mongo_uri: str, database: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ModuleType]:
    """The example, as a program that only publishes uses it."""
    module = imported("examples.beanie.app", monkeypatch, mongo_uri, database)
    async with module.client, module.mesh:
        await module.client[database].create_collection("Order")
        async with module.models():
            yield module


async def test_an_order_is_shipped_by_a_worker_and_its_document_says_so(shop: ModuleType) -> None:
    order = await shop.place("a ring")
    await shop.mesh.consumer().run(until_idle=True)
    task = await shop.mesh.get("ship", str(order.id))
    assert (task.status, task.successes[0].returns) == (Status.SUCCESS, "a ring")
    assert (await shop.Order.get(order.id)).state == "shipped"


async def test_without_its_task_there_is_no_order(shop: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*_: Any, **__: Any) -> None:
        raise ConnectionError("cut off")

    monkeypatch.setattr(type(shop.ship), "publish", fails)
    with pytest.raises(ConnectionError):
        await shop.place("a ring")
    assert await shop.Order.count() == 0
    assert [task async for task in shop.mesh.find()] == []
