"""A shop: an order is taken off the stock, stored and published in one transaction; its progress is a stream of events.

See README.md beside this file.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, AsyncIterable
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import Depends, FastAPI, HTTPException
from fastapi.sse import EventSourceResponse, ServerSentEvent
from pydantic import BaseModel, Field
from pymongo.asynchronous.client_session import AsyncClientSession

from examples.fastapi.tasks import DATABASE, client, mesh, ship
from taskmesh import Task, TaskNotFound

orders = client[DATABASE]["orders"]
stock = client[DATABASE]["stock"]


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncGenerator[None, None]:
    """Connect the mesh while the application runs."""
    async with client, mesh:
        yield


app = FastAPI(lifespan=lifespan)


class Order(BaseModel):
    """What a customer sends."""

    item: str
    count: int = Field(gt=0)


@app.post("/orders", status_code=202)
async def place(order: Order) -> dict[str, str]:
    """Take it off the stock, store it and publish its task: all of that, or nothing."""
    key = uuid.uuid4().hex

    async def write(session: AsyncClientSession) -> None:
        enough = {"_id": order.item, "left": {"$gte": order.count}}
        if await stock.find_one_and_update(enough, {"$inc": {"left": -order.count}}, session=session) is None:
            raise HTTPException(409, f"not enough of {order.item!r}")
        await orders.insert_one({"_id": key, **order.model_dump()}, session=session)
        await ship.configure(session=session).publish(key, order=key)

    async with client.start_session() as session:
        await session.with_transaction(write)  # called again where two requests want the same item
    return {"order": key, "progress": f"/orders/{key}/progress"}


async def known(key: str) -> Task:
    """Return the order's task, or answer with 404."""
    try:
        return await mesh.get("ship", key)
    except TaskNotFound:
        raise HTTPException(404, f"there is no order {key!r}") from None


Known = Annotated[Task, Depends(known)]


def shown(task: Task) -> dict[str, Any]:
    """Return what a customer may know of a task."""
    progress = task.task_state.progress
    return {
        "status": task.status,
        "fraction": progress.fraction if progress else 0.0,
        "message": progress.message if progress else None,
        "result": task.successes[0].returns if task.successes else None,
    }


@app.get("/orders/{key}")
async def status(task: Known) -> dict[str, Any]:
    """Tell how far an order is."""
    return shown(task)


@app.get("/orders/{key}/progress", response_class=EventSourceResponse)
async def progress(task: Known) -> AsyncIterable[ServerSentEvent]:
    """Tell it again and again, until the order is done."""
    async with mesh.events(task.name, task.key) as events:
        task = await mesh.get(task.name, task.key)  # read after the stream is open: nothing falls in between
        yield ServerSentEvent(data=shown(task))
        while not task.status.finished:
            await anext(events)
            task = await mesh.get(task.name, task.key)
            yield ServerSentEvent(data=shown(task))
