"""SIGINT and SIGTERM: the first stops the consumers of this process gracefully, the second at once.

Only where the program leaves these signals to their defaults; whoever handles them itself is not disturbed.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from taskmesh.consumer.consumer import Consumer

logger = logging.getLogger("taskmesh.signals")

GRACE_MS = 30_000
_handled: list[Consumer] = []
_received: list[int] = []


@contextmanager
def handled_by(consumer: Consumer) -> Iterator[None]:
    """Let signals stop this consumer while it runs."""
    if not _handled:
        _install()
    _handled.append(consumer)
    try:
        yield
    finally:
        _handled.remove(consumer)
        if not _handled:
            _remove()


_installed: list[tuple[Any, int, Any]] = []


def _install() -> None:
    _received.clear()
    if threading.current_thread() is not threading.main_thread():
        return
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        before = signal.getsignal(number)
        if number == signal.SIGTERM and before is not signal.SIG_DFL:
            continue
        if number == signal.SIGINT and before is not signal.default_int_handler and not _is_asyncios(before):
            continue
        with suppress(NotImplementedError, ValueError):  # Windows has no signal handlers in the loop
            loop.add_signal_handler(number, _on_signal, number)
            _installed.append((loop, number, before))


def _is_asyncios(handler: Any) -> bool:
    """Whether this is the handler by which `asyncio.run` turns SIGINT into a cancellation."""
    return getattr(getattr(handler, "func", None), "__qualname__", "") == "Runner._on_sigint"


def _remove() -> None:
    while _installed:
        loop, number, before = _installed.pop()
        if not loop.is_closed():
            loop.remove_signal_handler(number)
        signal.signal(number, before)


def _on_signal(number: int) -> None:
    _received.append(number)
    name = signal.Signals(number).name
    grace_ms = GRACE_MS if len(_received) == 1 else 0
    logger.info("%s: stopping %s", name, "gracefully (again: at once)" if grace_ms else "at once")
    for consumer in _handled:
        consumer.begin_stop(grace_ms)
