"""The shop's tasks: what `taskmesh worker examples.fastapi.tasks:mesh` runs, and what the web application publishes."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from pymongo import AsyncMongoClient
from pymongo.asynchronous.collection import AsyncCollection

from taskmesh import TaskMesh, current_task

URI = os.environ.get("TASKMESH_URI", "mongodb://127.0.0.1:27017/?replicaSet=rs0")
DATABASE = os.environ.get("TASKMESH_DATABASE", "shop")

client: AsyncMongoClient[dict[str, Any]] = AsyncMongoClient(URI)
mesh = TaskMesh(client, database=DATABASE)


@dataclass
class Shop:
    """What the handlers of one worker process share."""

    orders: AsyncCollection[dict[str, Any]]


@mesh.lifespan
async def shop() -> AsyncIterator[Shop]:
    """Open what handlers need, once in each worker process: connection pools, HTTP clients, models."""
    yield Shop(client[DATABASE]["orders"])


@mesh.task
async def ship(order: str) -> str:
    """Pack what was ordered, parcel by parcel."""
    found = await shop.state.orders.find_one({"_id": order}) or {}
    parcels = int(found["count"])
    for parcel in range(1, parcels + 1):
        await shop.state.orders.update_one({"_id": order}, {"$addToSet": {"packed": parcel}})
        await current_task().progress(parcel / parcels, f"parcel {parcel} of {parcels}")
    return f"{parcels} x {found['item']}"
