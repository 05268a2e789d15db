"""Telling systemd how we are (`Type=notify`): sd_notify(3) without its library."""

from __future__ import annotations

import contextlib
import os
import socket
import time


def notify(*states: str) -> None:
    """Send these states ("READY=1") to the service manager, if one listens."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address or not hasattr(socket, "AF_UNIX"):
        return
    if address.startswith("@"):  # an abstract socket
        address = "\0" + address[1:]
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to_manager:
        to_manager.connect(address)
        to_manager.sendall("\n".join(states).encode())


def notify_reloading() -> None:
    """Say that a reload begins; `READY=1` ends it."""
    notify("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1_000}")
