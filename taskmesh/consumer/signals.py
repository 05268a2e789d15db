"""SIGINT and SIGTERM: the first signal stops the consumers of this process gracefully, the second at once.

This applies only if the program leaves these signals at their defaults. A program that handles them itself is not disturbed.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

logger = logging.getLogger("taskmesh.signals")

GRACE_MS = 30_000


class Stoppable(Protocol):
    """What a signal stops: a consumer."""

    def begin_stop(self, grace_ms: int) -> None: ...  # noqa: D102 — see `Consumer`
    def __hash__(self) -> int: ...


_handled: dict[Stoppable, asyncio.AbstractEventLoop] = {}
"""The running consumers of this process, in whichever thread."""
_installed_for: list[Stoppable] = []
"""Those in the main thread, which alone receives signals."""
_received: list[int] = []


@contextmanager
def handled_by(consumer: Stoppable) -> Iterator[None]:
    """Let signals stop this consumer while it runs. In another thread than the main one: only while one runs in that, too."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    _handled[consumer] = asyncio.get_running_loop()
    if in_main_thread:
        if not _installed_for:
            _install()
        _installed_for.append(consumer)
    try:
        yield
    finally:
        del _handled[consumer]
        if in_main_thread:
            _installed_for.remove(consumer)
            if not _installed_for:
                _remove()


_installed: list[tuple[Any, int, Any]] = []


def _install() -> None:
    _received.clear()
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
    for consumer, loop in tuple(_handled.items()):
        with suppress(RuntimeError):  # its loop has ended meanwhile
            loop.call_soon_threadsafe(consumer.begin_stop, grace_ms)
