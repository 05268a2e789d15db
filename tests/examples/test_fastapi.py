"""The FastAPI example: an order and its task come together, and its progress is told until it is done."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import ModuleType

import httpx
import pytest

from tests.examples.web import imported, served, told
from tests.working import working

STOCK = 10


@pytest.fixture
def shop(mongo_uri: str, database: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return imported("examples.fastapi.app", monkeypatch, mongo_uri, database)


@pytest.fixture
async def http(shop: ModuleType) -> AsyncIterator[httpx.AsyncClient]:
    async with served(shop.app) as client:
        await shop.stock.insert_one({"_id": "ring", "left": STOCK})
        yield client


async def test_the_progress_of_an_order_is_told_until_it_is_done(shop: ModuleType, http: httpx.AsyncClient) -> None:
    placed = (await http.post("/orders", json={"item": "ring", "count": 3})).raise_for_status().json()
    async with http.stream("GET", placed["progress"]) as response:
        events = told(response.aiter_lines())
        first = await anext(events)
        assert first == {"status": "INIT", "fraction": 0.0, "message": None, "result": None}
        async with working(shop.mesh):
            seen = [event async for event in events]
    assert seen[-1] == {"status": "SUCCESS", "fraction": 1.0, "message": "parcel 3 of 3", "result": "3 x ring"}
    assert (await http.get(f"/orders/{placed['order']}")).json() == seen[-1]
    async with http.stream("GET", placed["progress"]) as response:
        assert [event async for event in told(response.aiter_lines())] == seen[-1:], (
            "one who comes later is told the end"
        )


async def test_what_is_refused_leaves_neither_order_nor_task_nor_a_smaller_stock(
    shop: ModuleType, http: httpx.AsyncClient
) -> None:
    answers = [await http.post("/orders", json={"item": "ring", "count": count}) for count in (STOCK + 1, 0)]
    assert [answer.status_code for answer in answers] == [409, 422]
    assert await shop.orders.count_documents({}) == 0
    assert [task async for task in shop.mesh.find()] == []
    assert await shop.stock.find_one() == {"_id": "ring", "left": STOCK}
    assert (await http.get("/orders/none/progress")).status_code == 404


async def test_requests_at_once_sell_no_more_than_there_is(shop: ModuleType, http: httpx.AsyncClient) -> None:
    answers = await asyncio.gather(*(http.post("/orders", json={"item": "ring", "count": 3}) for _ in range(5)))
    assert sorted(answer.status_code for answer in answers) == [202, 202, 202, 409, 409]
    stored = sorted([order["_id"] async for order in shop.orders.find()])
    assert sorted([task.key async for task in shop.mesh.find("ship")]) == stored
    assert len(stored) == 3
    assert await shop.stock.find_one() == {"_id": "ring", "left": 1}
