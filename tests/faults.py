"""Faults that a real server makes on demand: its failpoints, and who they are for."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from pymongo import AsyncMongoClient


@asynccontextmanager
async def failing_commands(
    uri: str, commands: list[str], *, times: int | None = None, appname: str = "taskmesh", **how: Any
) -> AsyncIterator[None]:
    """Let commands of clients named `appname` fail: all while the block lasts, or only the first `times`.

    `how`: `errorCode=…`, `closeConnection=True`, `writeConcernError={…}`, `blockConnection=True, blockTimeMS=…`.
    """
    mode: Any = "alwaysOn" if times is None else {"times": times}
    data = {"failCommands": commands, "appName": appname, **how}
    async with AsyncMongoClient[dict[str, Any]](uri, appname="the saboteur") as client:
        await client.admin.command({"configureFailPoint": "failCommand", "mode": mode, "data": data})
        try:
            yield
        finally:
            await client.admin.command({"configureFailPoint": "failCommand", "mode": "off"})
