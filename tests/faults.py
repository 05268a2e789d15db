"""Faults that a real server makes on demand: its failpoints, and who they are for."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from pymongo import AsyncMongoClient

from taskmesh import TaskMesh


@asynccontextmanager
async def failing_commands(
    uri: str,
    commands: list[str],
    *,
    times: int | None = None,
    skip: int | None = None,
    appname: str = "taskmesh",
    **how: Any,
) -> AsyncIterator[Callable[..., Awaitable[object]]]:
    """Let commands of clients named `appname` fail while the block lasts: all, all but the first `skip`, or the first `times`.

    What it gives waits until the first has failed, or so many.

    `how`: `errorCode=…`, `closeConnection=True`, `writeConcernError={…}`, `blockConnection=True, blockTimeMS=…`.
    """
    mode: Any = {"times": times} if times is not None else {"skip": skip} if skip is not None else "alwaysOn"
    data = {"failCommands": commands, "appName": appname, **how}
    async with AsyncMongoClient[dict[str, Any]](uri, appname="the saboteur") as client:
        set_up = await client.admin.command({"configureFailPoint": "failCommand", "mode": mode, "data": data})

        async def have_failed(count: int = 1) -> object:
            entered = {"timesEntered": int(set_up["count"]) + count, "maxTimeMS": 60_000}
            return await client.admin.command({"waitForFailPoint": "failCommand", **entered})

        try:
            yield have_failed
        finally:
            await client.admin.command({"configureFailPoint": "failCommand", "mode": "off"})


@asynccontextmanager
async def another_mesh(mongo_uri: str, database: str, appname: str) -> AsyncIterator[TaskMesh]:
    """A mesh of its own, whose commands can be made to fail apart from those of the test."""
    async with (
        AsyncMongoClient[dict[str, Any]](mongo_uri, appname=appname, tz_aware=True) as client,
        TaskMesh(client, database=database) as mesh,
    ):
        yield mesh


@asynccontextmanager
async def server_parameter(uri: str, name: str, value: object) -> AsyncIterator[None]:
    """Let the server have this parameter as long as the block lasts, and then what it had before."""
    async with AsyncMongoClient[dict[str, Any]](uri, appname="the saboteur") as client:
        before = (await client.admin.command({"setParameter": 1, name: value}))["was"]
        try:
            yield
        finally:
            await client.admin.command({"setParameter": 1, name: before})
