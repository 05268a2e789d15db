"""The web applications of the examples, served over HTTP in the event loop of the test."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import ModuleType
from typing import Any

import httpx
import pytest
import uvicorn

from tests.waiting import eventually


def imported(module: str, monkeypatch: pytest.MonkeyPatch, uri: str, database: str) -> ModuleType:
    """Import a module of an example anew, as a process does that finds this in its environment."""
    monkeypatch.setenv("TASKMESH_URI", uri)
    monkeypatch.setenv("TASKMESH_DATABASE", database)
    package = module.rpartition(".")[0]
    for name in [name for name in sys.modules if name.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, name)
    return importlib.import_module(module)


@asynccontextmanager
async def served(app: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Serve it while the block lasts, and return a client."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    serving = asyncio.create_task(server.serve())
    try:
        await eventually(lambda: server.started or serving.done(), what="the application has started")
        port = server.servers[0].sockets[0].getsockname()[1]
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            yield client
    finally:
        server.should_exit = True
        await serving


async def told(lines: AsyncIterator[str]) -> AsyncIterator[Any]:
    """Yield what server-sent events say."""
    async for line in lines:
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))
