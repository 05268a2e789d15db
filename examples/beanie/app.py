"""A shop whose orders are Beanie documents: stored and published together, and changed together with a task's SUCCESS.

See README.md beside this file.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import Any

from beanie import Document, init_beanie
from pymongo import AsyncMongoClient

from taskmesh import TaskMesh, current_task

URI = os.environ.get("TASKMESH_URI", "mongodb://127.0.0.1:27017/?replicaSet=rs0")
DATABASE = os.environ.get("TASKMESH_DATABASE", "shop")

client: AsyncMongoClient[dict[str, Any]] = AsyncMongoClient(URI)
mesh = TaskMesh(client, database=DATABASE)


class Order(Document):
    """What a customer has ordered."""

    item: str
    state: str = "placed"


@mesh.lifespan
async def models() -> AsyncIterator[None]:
    """Let Beanie know its documents, in each worker process. What is no worker enters it by itself."""
    await init_beanie(database=client[DATABASE], document_models=[Order])
    yield


async def place(item: str) -> Order:
    """Store an order and publish its task: both or neither."""
    order = Order(item=item)
    async with client.start_session() as session, await session.start_transaction():
        await order.insert(session=session)
        await ship.configure(session=session).publish(str(order.id), order=str(order.id))
    return order


@mesh.task
async def ship(order: str) -> str:
    """Ship it: the document's new state and this task's SUCCESS are one commit."""
    task = current_task()
    found = await Order.get(order)
    assert found is not None, "it was stored together with this task"
    async with task.transaction() as session:
        found.state = "shipped"
        await found.save(session=session)
        task.set_result(found.item)
    return found.item
