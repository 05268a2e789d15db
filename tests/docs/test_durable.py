"""The code of docs/durable.md works."""

from __future__ import annotations

from typing import Any

from taskmesh import TaskMesh, current_task
from tests.docs.examples import examples_in
from tests.docs.running import run
from tests.durable.test_suspension import due_now, suspended
from tests.working import working

DOCUMENT = "docs/durable.md"
EXAMPLES = {example.about: example for example in examples_in(DOCUMENT)}


async def test_an_order_is_charged_once_waits_and_is_shipped(mesh: TaskMesh) -> None:
    done: list[str] = []

    async def charge_card(order_id: str) -> str:
        done.append(f"charged {order_id}")
        return "receipt"

    def ship(order_id: str, receipt: str) -> None:
        done.append(f"shipped {order_id} {receipt}")

    namespace: dict[str, Any] = {
        "mesh": mesh,
        "current_task": current_task,
        "charge_card": charge_card,
        "ship": ship,
    }
    await run(EXAMPLES["order"].in_place, namespace, DOCUMENT)
    await run(EXAMPLES["signal"].in_place, namespace, DOCUMENT)
    async with working(mesh, "w1"):
        await suspended(mesh, "order", "order-7")
        await due_now(mesh, "order-7")
        assert await namespace["handle"].result(60) == "shipped for ann"
    assert done == ["charged 7", "shipped 7 receipt"]


async def test_a_parcel_waits_for_its_boxes(mesh: TaskMesh) -> None:
    namespace: dict[str, Any] = {"mesh": mesh, "current_task": current_task}
    await run(EXAMPLES["children"].in_place, namespace, DOCUMENT)
    handle = await namespace["parcel"].publish("p", boxes=2)
    async with working(mesh, "w1"):
        assert await handle.result(60) == ["box 0", "box 1"]
