"""The code of docs/durable.md works."""

from __future__ import annotations

import asyncio
from typing import Any

from pydantic_ai.models.test import TestModel

from taskmesh import TaskMesh, current_task
from tests.docs.examples import ROOT, examples_in
from tests.docs.running import run
from tests.durable.test_suspension import due_now, suspended
from tests.working import working

DOCUMENT = "docs/durable.md"
EXAMPLES = {example.about: example for example in examples_in(DOCUMENT)}


def test_every_block_is_run_by_a_test() -> None:
    assert (ROOT / DOCUMENT).read_text("utf-8").count("```python") == len(EXAMPLES)
    assert set(EXAMPLES) == {"effects", "order", "approve", "publish", "children", "changed", "agent"}


class Shop:
    """The bank, the post and the stock of the examples."""

    def __init__(self, mesh: TaskMesh) -> None:
        self.done: list[str] = []
        self.namespace: dict[str, Any] = {
            "mesh": mesh,
            "current_task": current_task,
            "bank": self,
            "send_mail": self.send_mail,
            "check_stock": self.check_stock,
            "ship_all": self.ship_all,
        }

    async def run(self, *examples: str) -> dict[str, Any]:
        """Run these blocks, one after the other, and return what they have defined."""
        for about in examples:
            await run(EXAMPLES[about].in_place, self.namespace, DOCUMENT)
        return self.namespace

    async def charge(self, cents: int, *, idempotency_key: str) -> str:
        self.done.append(f"charged {cents} of {idempotency_key}")
        return "receipt"

    async def refund(self, receipt: str) -> None:
        self.done.append(f"refunded {receipt}")

    async def send_mail(self, text: str) -> None:
        self.done.append(text)

    def check_stock(self, order_id: str) -> None:
        self.done.append(f"checked {order_id}")

    def ship_all(self, order_id: str, boxes: int) -> str:
        self.done.append(f"shipped {order_id}")
        return f"{boxes} boxes"


async def test_an_order_is_charged_once_approved_by_its_link_and_packed(mesh: TaskMesh) -> None:
    shop = Shop(mesh)
    names = await shop.run("effects", "order", "approve", "publish")
    async with working(mesh, "w1"):
        await suspended(mesh, "order", "7")
    link = shop.done[-1]
    signed = link.rpartition("=")[2]
    assert not await names["approve"]("8", signed), "the signature is of another order"
    async with working(mesh, "w2"):
        assert await names["approve"]("7", signed)
        assert await names["handle"].result(60) == ["parcel 7/0", "parcel 7/1"]
    assert await names["approve"]("7", signed), "a second click changes nothing"
    assert shop.done == ["charged 25000 of 7", link]


async def test_an_order_that_nobody_approves_is_refunded(mesh: TaskMesh) -> None:
    shop = Shop(mesh)
    names = await shop.run("effects", "order", "publish")
    async with working(mesh, "w1"):
        await suspended(mesh, "order", "7")
        await due_now(mesh, "7")
        assert await names["handle"].result(60) == []
    assert shop.done[-1] == "refunded receipt"


async def test_new_code_takes_over_an_order_under_way(mesh: TaskMesh, mongo_uri: str, database: str) -> None:
    old = Shop(mesh)
    await old.run("effects", "order", "publish")
    async with working(mesh, "w1"):
        await suspended(mesh, "order", "7")
    async with TaskMesh(mongo_uri, database=database) as renewed:
        new = Shop(renewed)
        await new.run("effects", "changed")
        async with working(renewed, "w2"):
            await renewed.signal("order", "7", "approved")
            handle = old.namespace["handle"]
            assert await handle.result(60) == ["2 boxes"]
    assert new.done == ["checked 7", "shipped 7"], "nothing is charged again"
    names = [step.name for step in (await handle.task()).steps]
    assert names == ["charge", "ask", "approved", "check stock", "ship"], "the left-over record is shown"


async def test_a_parcel_waits_for_its_boxes(mesh: TaskMesh) -> None:
    namespace: dict[str, Any] = {"mesh": mesh, "current_task": current_task}
    await run(EXAMPLES["children"].in_place, namespace, DOCUMENT)
    handle = await namespace["parcel"].publish("p", boxes=2)
    async with working(mesh, "w1"):
        assert await handle.result(60) == ["box 0", "box 1"]


async def test_the_calls_of_an_agent_are_steps(mesh: TaskMesh) -> None:
    async def search(words: str) -> str:
        await asyncio.sleep(0)
        return f"found {words}"

    namespace: dict[str, Any] = {"mesh": mesh, "model": TestModel(), "search": search}
    await run(EXAMPLES["agent"].in_place, namespace, DOCUMENT)
    handle = await namespace["research"].publish("1", question="?")
    async with working(mesh, "w1"):
        assert await handle.result(60) == '{"search":"found a"}'
    names = [step.name for step in (await handle.task()).steps]
    assert (names[0], names[2]) == ("researcher__model.request", "researcher__model.request#2")
    assert ".call_tool:search:" in names[1]
