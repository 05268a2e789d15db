"""The portal: an event loop in a thread of its own, through which code without a loop publishes.

There is one per process, created at first use; a forked child creates its own.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_lock = threading.Lock()
_loops: dict[int, asyncio.AbstractEventLoop] = {}


def _reset_after_fork() -> None:
    global _lock  # noqa: PLW0603 — it may be held by a thread that the child does not have
    _lock = threading.Lock()
    _loops.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)


def portal_loop() -> asyncio.AbstractEventLoop:
    """Return this process's background loop."""
    with _lock:
        loop = _loops.get(os.getpid())
        if loop is None:
            loop = _loops[os.getpid()] = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="taskmesh portal", daemon=True).start()
        return loop


def run_blocking(coroutine: Coroutine[Any, Any, T], what: str) -> T:
    """Run the coroutine in the background loop and wait. Raises `RuntimeError` from inside a running loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run_coroutine_threadsafe(coroutine, portal_loop()).result()
    coroutine.close()
    raise RuntimeError(f"{what} would block the running event loop: use `await` and the async form instead")
