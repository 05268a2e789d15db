"""`/livez` and `/readyz` for Kubernetes and its like: a server of a few lines, so that a worker needs no web framework.

It runs in the event loop that it tells about: where that stands still, nobody answers, and that is an answer too.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from taskmesh.errors import TaskMeshError

_DEADLINE_S = 5.0
_LONGEST_REQUEST = 8_192


@dataclass(frozen=True)
class Health:
    """How it is. Not `live`: start it anew. Not `ready`: wait."""

    live: bool
    ready: bool
    about: dict[str, Any] = field(default_factory=dict)


async def serve_probes(host: str, port: int, look: Callable[[], Health]) -> asyncio.Server:
    """Answer probes until the server is closed. Raises `TaskMeshError` if the port is taken."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            async with asyncio.timeout(_DEADLINE_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(_response(head.split(b"\r\n", 1)[0].decode("latin-1"), look()))
                await writer.drain()
        writer.close()

    try:
        return await asyncio.start_server(answer, host, port, limit=_LONGEST_REQUEST)
    except OSError as error:
        raise TaskMeshError(f"the probes cannot listen on {host}:{port}: {error}") from None


def _response(request: str, health: Health) -> bytes:
    method, _, rest = request.partition(" ")
    path = rest.partition(" ")[0].partition("?")[0]
    good = {"/livez": health.live, "/readyz": health.live and health.ready}
    if method not in ("GET", "HEAD"):
        status = HTTPStatus.METHOD_NOT_ALLOWED
    elif path not in good:
        status = HTTPStatus.NOT_FOUND
    else:
        status = HTTPStatus.OK if good[path] else HTTPStatus.SERVICE_UNAVAILABLE
    body = json.dumps({"live": health.live, "ready": health.ready, **health.about}).encode() + b"\n"
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nCache-Control: no-store\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + (b"" if method == "HEAD" else body)
