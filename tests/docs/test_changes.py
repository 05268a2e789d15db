"""The code of docs/changes.md works, and its table has every field."""

from __future__ import annotations

import re
from typing import Any

from taskmesh import ChangeEvent, TaskMesh
from taskmesh.store.triggers import data_changes
from tests.docs.examples import examples_in
from tests.docs.running import run
from tests.docs.tables import table
from tests.waiting import eventually
from tests.working import working

DOCUMENT = "docs/changes.md"


async def test_a_large_customer_is_greeted(mesh: TaskMesh) -> None:
    greeted: list[tuple[str, int, int]] = []
    [example] = examples_in(DOCUMENT)
    await run(example.in_place, {"mesh": mesh, "ChangeEvent": ChangeEvent, "greeted": greeted}, DOCUMENT)

    async def is_begun() -> bool:
        return bool(await data_changes.read_all(mesh.store))

    orders = mesh.store.driver.collection("orders")
    async with working(mesh):
        await eventually(is_begun)
        await orders.insert_many([{"_id": 1, "total": 20}, {"_id": 2, "total": 200}, {"_id": 3, "total": 300}])
        await eventually(lambda: len(greeted) == 2)
    await orders.drop()
    assert sorted(greeted) == [("insert", 2, 200), ("insert", 3, 300)]


def test_the_table_has_every_field() -> None:
    rows: list[dict[str, Any]] = table(DOCUMENT, "field of `ChangeEvent`", "what")
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row["field of `ChangeEvent`"])]
    assert sorted(named) == sorted(ChangeEvent.model_fields)
