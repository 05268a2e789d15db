"""A handler's annotations may name what comes later in its module, or what only type checkers import."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from taskmesh import ChangeEvent, TaskMesh
from taskmesh.integrations.celery_compat import Celery

MODULE = """
from pydantic import BaseModel

@mesh.lifespan
async def opened() -> Opened:
    yield

@mesh.task
async def add(order: Order) -> Answer:
    return Answer(n=order.n + 1)

@mesh.on_change("orders")
async def changed(event: ChangeEvent) -> Answer: ...

@app.task
def old(order: Order) -> Answer: ...

class Order(BaseModel):
    n: int

class Answer(BaseModel):
    n: int
"""
HEADERS = ["from __future__ import annotations", *([""] if sys.version_info >= (3, 14) else [])]


@pytest.mark.parametrize("header", HEADERS, ids=["strings", "deferred"][: len(HEADERS)])
async def test_annotations_may_name_what_comes_later(mesh: TaskMesh, header: str) -> None:
    module: dict[str, Any] = {"__name__": "theirs", "mesh": mesh, "app": Celery(mesh), "ChangeEvent": ChangeEvent}
    exec(compile(header + MODULE, "theirs.py", "exec", dont_inherit=True), module)
    handle = await module["add"].publish("k", order=module["Order"](n=41))
    await mesh.consumer(names=["add"]).run(until_idle=True)
    assert await handle.result() == module["Answer"](n=42)
