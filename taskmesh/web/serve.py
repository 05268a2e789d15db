"""Serve the dashboard from a process of its own: what `taskmesh web` does."""

from __future__ import annotations

import ipaddress
import os

import uvicorn

from taskmesh.errors import InvalidOption
from taskmesh.mesh import TaskMesh
from taskmesh.web.app import create_app
from taskmesh.web.guard import LOOPBACK

TOKEN = "TASKMESH_WEB_TOKEN"  # noqa: S105 — the name of the variable, not a token
_STOP_WITHIN_S = 3


def serve(
    mesh: TaskMesh,
    host: str = "127.0.0.1",
    port: int = 8080,
    *,
    read_only: bool = False,
    token: str | None = None,
    base_path: str = "",
) -> None:
    """Serve until SIGINT or SIGTERM.

    `token`: that in `TASKMESH_WEB_TOKEN` by default. Raises `InvalidOption` for an address other than loopback without one.
    """
    token = token or os.environ.get(TOKEN) or None
    if token is None and not is_loopback(host):
        raise InvalidOption(
            f"to listen on {host!r}, where others can reach it, the dashboard needs a token: set {TOKEN} "
            "(openssl rand -hex 32 makes one), or listen on 127.0.0.1"
        )
    hosts = LOOPBACK | {host.lower(), f"[{host.lower()}]"} if token is None else None
    app = create_app(mesh, read_only=read_only, token=token, base_path=base_path, hosts=hosts)
    uvicorn.run(
        app,
        host=host,
        port=port,
        log_level="info",
        access_log=False,
        server_header=False,
        lifespan="on",
        timeout_graceful_shutdown=_STOP_WITHIN_S,  # live views never end by themselves
    )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
