"""Serve the dashboard from a process of its own: what `taskmesh web` does."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator

import uvicorn

from taskmesh.consumer import logs
from taskmesh.mesh import TaskMesh
from taskmesh.model.errors import InvalidOption, TaskMeshError
from taskmesh.web.app import create_app
from taskmesh.web.security import LOOPBACK

logger = logging.getLogger("taskmesh.web")

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
    user_header: str | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM.

    `token`: that in `TASKMESH_WEB_TOKEN` by default. `base_path`: the path that a proxy strips. `user_header`: in which it says
    who asks. Logs to standard error, unless logging is set up already. Raises `InvalidOption` for an address other than loopback
    without a token, and `TaskMeshError` if it cannot listen there.
    """
    token = (token or os.environ.get(TOKEN, "")).strip() or None
    if token is None and not is_loopback(host):
        raise InvalidOption(
            f"to listen on {host!r}, where others can reach it, the dashboard needs a token: set {TOKEN} "
            "(openssl rand -hex 32 makes one), or listen on 127.0.0.1"
        )
    hosts = LOOPBACK | {host.lower(), f"[{host.lower()}]"} if token is None else None
    app = create_app(mesh, read_only=read_only, token=token, base_path=base_path, hosts=hosts, user_header=user_header)
    with _listening(host, port) as listener:
        logs.set_up(logging.INFO, "text")
        shown = f"[{host}]" if ":" in host else host
        logger.info("the dashboard is at http://%s:%d/ (Ctrl-C ends it)", shown, listener.getsockname()[1])
        server = uvicorn.Server(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                server_header=False,
                lifespan="on",
                timeout_graceful_shutdown=_STOP_WITHIN_S,  # live views never end by themselves
            )
        )
        with _stopped_by_signals(server):
            server.run(sockets=[listener])


def _listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens. Raises `TaskMeshError`, with what to do."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        remedy = {
            errno.EADDRINUSE: "the port is taken: choose another by --port",
            errno.EACCES: "that port is for root alone: choose one from 1024 on by --port",
        }.get(error.errno or 0, f"{error.strerror or error}: choose an address of this machine by --host")
        raise TaskMeshError(f"the dashboard cannot listen on {host}, port {port}: {remedy}") from None


@contextlib.contextmanager
def _stopped_by_signals(server: uvicorn.Server) -> Iterator[None]:
    """Stop the server also on signals before uvicorn handles them; those that it raises again at its end do nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        server.should_exit = True

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
