"""What the operating system knows (a process's memory, which source files have changed), and what systemd is told."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

_LOOK_S = 0.5
_LEFT_OUT = frozenset({"__pycache__", "node_modules", "site-packages"})


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return what makes uvloop's event loops, if the extra `speed` is there; None: asyncio's own."""
    try:
        import uvloop  # noqa: PLC0415 — an extra
    except ImportError:
        return None
    return uvloop.new_event_loop


def rss_mb(pid: int) -> float | None:
    """Return the resident memory of a process, or None if it has gone."""
    try:
        if Path("/proc/self/statm").exists():  # Linux
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            return pages * os.sysconf("SC_PAGE_SIZE") / 1_000_000
        asked = subprocess.run(  # the ps of the system, whatever PATH says
            ["/bin/ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True, check=True
        )
        return int(asked.stdout) * 1024 / 1_000_000
    except (OSError, ValueError, IndexError, subprocess.CalledProcessError):
        return None


async def changed_files(directory: Path | None = None) -> AsyncIterator[Path]:
    """Yield a .py file below the directory each time one was changed, made or removed."""
    root = directory or Path.cwd()
    before = await asyncio.to_thread(_source_files, root)
    while True:
        await asyncio.sleep(_LOOK_S)
        now = await asyncio.to_thread(_source_files, root)
        different = sorted(now.items() ^ before.items())
        before = now
        if different:
            yield Path(different[0][0]).relative_to(root)


def _source_files(root: Path) -> dict[str, int]:
    found: dict[str, int] = {}
    for directory, directories, files in os.walk(root):
        directories[:] = [name for name in directories if name not in _LEFT_OUT and not name.startswith(".")]
        for name in files:
            if name.endswith(".py"):
                path = os.path.join(directory, name)  # noqa: PTH118  # thousands of times: no objects for that
                try:
                    found[path] = os.stat(path).st_mtime_ns  # noqa: PTH116  # the same
                except OSError:
                    continue  # removed between listing and looking
    return found


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
