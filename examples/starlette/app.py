"""One process that serves pages and does the work: a Starlette application with a worker in its lifespan.

See README.md beside this file.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from taskmesh import TaskMesh, TaskNotFound, current_task

mesh = TaskMesh(os.environ.get("TASKMESH_URI"), database=os.environ.get("TASKMESH_DATABASE", "reports"))


@mesh.task
async def count_words(text: str) -> dict[str, int]:
    """Count the words of a text, line by line."""
    lines = text.splitlines()
    counts: Counter[str] = Counter()
    for number, line in enumerate(lines, 1):
        counts.update(line.lower().split())
        await current_task().progress(number / len(lines), f"line {number} of {len(lines)}")
    return dict(counts)


@asynccontextmanager
async def lifespan(_: Starlette) -> AsyncGenerator[None, None]:
    """Connect the mesh, and let a worker run in the same event loop as the pages."""
    async with mesh:
        consumer = mesh.consumer(concurrency=10)
        worker = asyncio.create_task(consumer.run())
        try:
            yield
        finally:
            await consumer.stop(grace_ms=10_000)
            await worker


async def publish(request: Request) -> Response:
    """Take a text, under the key that the client gave it: sent twice, it is counted once."""
    handle = await count_words.publish(request.path_params["key"], text=(await request.body()).decode())
    return JSONResponse({"created": handle.created, "warnings": handle.warnings}, 202)


async def result(request: Request) -> Response:
    """Answer with the counts, or with how far they are."""
    try:
        task = await mesh.get("count_words", request.path_params["key"])
    except TaskNotFound as error:
        raise HTTPException(404, str(error)) from None
    if not task.successes:
        return JSONResponse({"status": task.status, "reasons": task.fail_reasons}, 202)
    return JSONResponse(task.successes[0].returns)


async def events(_: Request) -> Response:
    """Tell what happens to all tasks, as server-sent events, as long as the client listens."""

    async def told() -> AsyncIterator[str]:
        async with mesh.events("count_words") as reader:
            yield ": listening\n\n"
            async for event in reader:
                yield f"data: {json.dumps({'kind': event.kind, 'key': event.key})}\n\n"

    return StreamingResponse(told(), media_type="text/event-stream")


app = Starlette(
    routes=[
        Route("/texts/{key}", publish, methods=["PUT"]),
        Route("/texts/{key}", result),
        Route("/events", events),
    ],
    lifespan=lifespan,
)
