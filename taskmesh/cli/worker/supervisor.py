"""The supervisor: keeps a set of worker processes alive, and passes signals on.

A child that dies is replaced, after a pause that grows while its successors die young. One whose end says that trying
again is useless ends all, unless others of its kind work. SIGTERM or SIGINT stops the children gracefully, a second one at
once; SIGHUP replaces them one by one, unless `nohup` has it ignored; SIGUSR1 is theirs. Should the supervisor be killed, the
children hear of it (see `Pipe`) and stop gracefully.

Children have process groups of their own: Ctrl-C in the terminal is for the supervisor, which then tells them once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence

from taskmesh.cli.worker.child import HOPELESS, Child
from taskmesh.cli.worker.endpoints import Health, probes, serve
from taskmesh.cli.worker.force_exit import stop_signals
from taskmesh.cli.worker.system import changed_files, notify, notify_reloading, rss_mb

logger = logging.getLogger("taskmesh.supervisor")

SETTLED_S = 10.0
"""A child that lived this long did not fail at once: the pause before its successor is short again."""
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 10.0
_STARTS_AT_MOST = 5
"""How often a child may fail before it was ever ready, when no other is."""
_READY_DEADLINE_S = 120.0
_KILL_AFTER_S = 30.0
"""Longer than a child's own forced exit takes."""
_LOOK_S = 1.0
_DUMP_S = 1.0
_STALE_S = 10.0
"""A child that has sent nothing for this long is not ready."""


class Supervisor:
    """Keeps one child per command alive. `run` returns the exit status."""

    def __init__(
        self,
        commands: Mapping[str, Sequence[str]],
        *,
        environment: Mapping[str, str],
        grace_ms: int,
        max_rss_mb: int | None = None,
        hang_timeout_ms: int = 0,
        reload: bool = False,
        health: tuple[str, int] | None = None,
    ) -> None:
        self._children = [Child(name, command) for name, command in commands.items()]
        self._environment = environment
        self._grace_ms = grace_ms
        self._max_rss_mb = max_rss_mb
        self._hang_timeout_s = hang_timeout_ms / 1000
        self._reload = reload
        self._probes = health
        self._stops = 0
        self._stopping = asyncio.Event()
        self._changed = asyncio.Event()
        self._status = 0
        self._life = -1
        self._background: set[asyncio.Task[None]] = set()
        self._rolling = False
        self._terminal = sys.stdin is not None and sys.stdin.isatty()

    async def run(self) -> int:
        """Keep the children until they are done, or until told to stop."""
        self._life, held = os.pipe()  # nobody else ever holds the second: its closing is our death
        self._take_signals()
        server = None
        if self._probes is not None:
            server = await serve(*self._probes, probes(self.health))
            logger.info("probes answer at http://%s:%d", *server.sockets[0].getsockname()[:2])
        self._spawn(self._announce())
        if self._max_rss_mb is not None:
            self._spawn(self._watch_memory(self._max_rss_mb))
        if self._hang_timeout_s:
            self._spawn(self._watch_loops())
        if self._reload:
            self._spawn(self._watch_files())
        try:
            await asyncio.gather(*(self._keep(child) for child in self._children))
        finally:
            for task in self._background:
                task.cancel()
            if server is not None:
                server.close()
            os.close(held)
            os.close(self._life)
        logger.info("all workers have ended%s", "" if self._status == 0 else ", some of them with errors")
        return self._status

    def health(self) -> Health:
        """Return how the children are: live as long as this loop turns; ready when all of them are."""
        children = {child.name: self._state_of(child) for child in self._children}
        ready = not self._stopping.is_set() and set(children.values()) <= {"ready", "done"}
        return Health(live=True, ready=ready, about={"workers": children})

    def _state_of(self, child: Child) -> str:
        if not child.alive:
            return "done" if "done" in child.words else "restarting"
        if not child.ready.is_set():
            return "starting"
        if time.monotonic() - child.heard_at > _STALE_S:
            return "hanging"
        return "ready" if child.well else "without database"

    # --- one child after the other ---

    async def _keep(self, child: Child) -> None:
        while not self._stopping.is_set():
            await child.start(self._life, self._environment)
            child.stop(self._stops)  # told to stop while it was starting
            status = await child.ended()
            if self._stopping.is_set() or (status == 0 and "done" in child.words):
                return
            await self._before_the_next(child, status)

    async def _before_the_next(self, child: Child, status: int) -> None:
        """Decide by how a child ended: wait before its successor starts, or give up."""
        if status == 0 or child.replacing:
            child.failures = child.failed_starts = 0
            return
        lived_s = time.monotonic() - child.started_at
        if child.ready.is_set():
            child.failed_starts = 0
        else:
            child.failed_starts += 1
        child.failures = 1 if child.ready.is_set() and lived_s >= SETTLED_S else child.failures + 1
        others_work = any(other.alive and other.ready.is_set() for other in self._children)
        useless = not child.ready.is_set() and (status == HOPELESS or child.failed_starts >= _STARTS_AT_MOST)
        if useless and self._reload:
            logger.error("worker %s cannot start: waiting for a change of its files", child.name)
            self._changed.clear()
            await self._either(self._changed, None)
            return
        if useless and not others_work:
            if status != HOPELESS:
                logger.error(
                    "worker %s failed %d times before it could begin: giving up", child.name, child.failed_starts
                )
            self._fail()
            return
        pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** (child.failures - 1))
        if status == HOPELESS:
            pause_s = _LONGEST_PAUSE_S
        logger.warning(
            "worker %s %s after %.1f s: the next one starts in %.1f s", child.name, _ending(status), lived_s, pause_s
        )
        await self._either(self._stopping, pause_s)

    def _fail(self) -> None:
        self._status = 1
        self._begin_stop()

    async def _either(self, event: asyncio.Event, timeout_s: float | None) -> None:
        """Wait for the event, the time, or the order to stop."""
        waits = [asyncio.ensure_future(event.wait()), asyncio.ensure_future(self._stopping.wait())]
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    # --- signals ---

    def _take_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_stop, signal.Signals(number).name)
        if signal.SIGHUP in stop_signals():
            loop.add_signal_handler(signal.SIGHUP, self._on_hang_up)
        loop.add_signal_handler(signal.SIGUSR1, self._pass_on, signal.SIGUSR1)

    def _pass_on(self, number: int) -> None:
        for child in self._children:
            child.send(number)

    def _on_stop(self, why: str) -> None:
        logger.info("%s: stopping %s", why, "at once" if self._stops else "gracefully (again: at once)")
        self._begin_stop()

    def _begin_stop(self) -> None:
        self._stops += 1
        self._stopping.set()
        notify("STOPPING=1")
        for child in self._children:
            child.stop(self._stops)
        self._spawn(self._kill_after(_KILL_AFTER_S + (self._grace_ms / 1000 if self._stops == 1 else 0)))

    async def _kill_after(self, deadline_s: float) -> None:
        """Kill children that have not ended; other workers take their tasks over when the leases run out."""
        await asyncio.sleep(deadline_s)
        for child in self._children:
            if child.alive:
                logger.error("worker %s did not stop within %.0f s: killed", child.name, deadline_s)
                self._status = 1
                child.send(signal.SIGKILL)

    def _on_hang_up(self) -> None:
        """Stop if the terminal was closed; without a terminal, SIGHUP asks for new processes."""
        if self._terminal and not _has_terminal():
            self._on_stop("the terminal was closed")
        elif not self._stopping.is_set() and not self._rolling:
            self._spawn(self._roll())

    # --- replacing children ---

    async def _roll(self) -> None:
        """Replace the children one by one; stop at the first whose successor does not become ready."""
        self._rolling = True
        notify_reloading()
        try:
            for child in self._children:
                logger.info("replacing worker %s", child.name)
                if not await self._replace(child):
                    logger.error("the successor of worker %s is not ready: the others stay as they are", child.name)
                    return
            logger.info("all workers were replaced")
        finally:
            self._rolling = False
            notify("READY=1")

    async def _replace(self, child: Child) -> bool:
        before = child.process
        child.replacing = True
        child.stop(1)
        deadline = time.monotonic() + self._grace_ms / 1000 + _READY_DEADLINE_S
        while time.monotonic() < deadline and not self._stopping.is_set():
            if child.process is not before and (child.ready.is_set() or child.failures):
                return child.ready.is_set()
            await asyncio.sleep(0.05)
        return False

    async def _watch_memory(self, limit_mb: int) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            for child in self._children:
                used = rss_mb(child.process.pid) if child.alive and child.process is not None else None
                if used is not None and used > limit_mb and not child.replacing and child.ready.is_set():
                    logger.warning("worker %s uses %.0f MB, more than %d: replacing it", child.name, used, limit_mb)
                    child.replacing = True
                    child.stop(1)

    async def _watch_loops(self) -> None:
        """Dump the stacks of a child whose event loop is blocked, and replace it: it has lost its leases."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(_LOOK_S)
            if time.monotonic() - before > 2 * _LOOK_S:
                continue  # our own loop was blocked: what the children sent meanwhile is not read yet
            for child in self._children:
                silent_s = time.monotonic() - child.heard_at
                if child.alive and child.ready.is_set() and silent_s > self._hang_timeout_s:
                    logger.error("worker %s has not responded for %.0f s: replacing it", child.name, silent_s)
                    child.send(signal.SIGUSR1)
                    await asyncio.sleep(_DUMP_S)
                    child.send(signal.SIGKILL)
                    child.heard_at = time.monotonic()

    async def _watch_files(self) -> None:
        async for path in changed_files():
            logger.info("%s has changed: restarting", path)
            self._changed.set()
            for child in self._children:
                child.replacing = True
                child.stop(2)

    async def _announce(self) -> None:
        for child in self._children:
            await child.ready.wait()
        notify("READY=1", f"STATUS={len(self._children)} workers run")
        logger.info("all %d workers are ready", len(self._children))

    def _spawn(self, work: object) -> None:
        task = asyncio.ensure_future(work)  # type: ignore[call-overload]
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def _ending(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    with contextlib.suppress(ValueError):
        return f"was ended by {signal.Signals(-status).name}"
    return f"was ended by signal {-status}"


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True
