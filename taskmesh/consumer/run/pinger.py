"""The pinger: renews leases from a thread of its own, with a blocking client.

So a handler that blocks the event loop loses no lease. The thread also watches the loop: a handler that blocks it is named in
the log, and if the loop has been blocked for so long that it must be considered dead, pings stop and other workers take over.
If this process is suspended and wakes up late, its leases have run out on the monotonic clock, too. If the machine was
suspended, that clock may have stood still: when another clock has jumped against it, every lease is renewed at once, and the
server says which are lost.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from typing import Any

from pymongo.errors import PyMongoError

from taskmesh.consumer.run.execution import Execution
from taskmesh.consumer.run.executions import Executions
from taskmesh.consumer.run.stop_reasons import Stop, why_stopped
from taskmesh.consumer.settings import Settings
from taskmesh.consumer.worker_stats import WorkerStats
from taskmesh.consumer.write_times import WriteTimes
from taskmesh.store import Store
from taskmesh.store.clock import Jumps
from taskmesh.store.mongodb.server_errors import is_over_deadline
from taskmesh.store.renew import PING_DEADLINE_MS, keep_places, ping, still_held

logger = logging.getLogger("taskmesh.pinger")

_PATIENCE_MS = 5_000
"""Longer than the deadline of any ping. A connection that is silent for so long is dead, even if it does not know."""
_LONGEST_CONNECT_PAUSE_S = 5.0
_TICK_S = 0.25
_SHORTEST_TICK_S = 0.01
_BLOCKED_S = 1.0
_MAX_BATCH = 1_000
_MOST_DEADLINE_MS = 4_000
_PARTS = 8


class Pinger:
    """The leases of one consumer."""

    def __init__(
        self,
        store: Store,
        settings: Settings,
        executions: Executions,
        stats: WorkerStats,
        write_times: WriteTimes,
    ) -> None:
        """Create it in the loop that it watches."""
        self._store = store
        self._me = settings.claimant
        self._loop = asyncio.get_running_loop()
        self._stall_limit_s = settings.stall_limit_ms / 1000
        self._executions = executions
        self._stats = stats
        self._write_times = write_times
        self._ping_times = WriteTimes()
        """Measured apart: if everything that runs here is locked, claims need not wait longer."""
        self._observer = settings.observer
        self._given_up: set[Execution] = set()
        self._tick_s = _TICK_S
        self._locked: set[Execution] = set()
        """Executions whose tasks held up a set. They are pinged alone until that succeeds."""
        self._changed = threading.Condition()
        self._answered = self._late_ms = 0
        """How many writes the server has answered in this round, and the longest deadline at which it gave one up."""
        self._round = threading.Lock()
        """Held while pings are on their way."""
        self._stopping = False
        self._jumps = Jumps()
        self._loop_thread = threading.get_ident()
        self._loop_alive = time.monotonic()
        self._blocked_told = False
        self.stalled = False
        """Whether the loop has been blocked for longer than the limit."""
        self._thread = threading.Thread(target=self._run, name="taskmesh pinger", daemon=True)

    def start(self) -> None:
        """Start the thread. Call it in the loop that is watched."""
        self._beat()
        self._thread.start()

    def expect(self, every_s: float) -> None:
        """Check often enough for executions that ping at this interval."""
        if every_s / 4 < self._tick_s and (tick_s := _tick_for(every_s)) < self._tick_s:
            with self._changed:
                self._tick_s = tick_s
                self._changed.notify()

    def option_changed(self, execution: Execution, stored_option: dict[str, Any]) -> None:
        """Apply a changed ping interval from the next ping on. All other fields of an option count from the next claim."""
        with self._changed:
            execution.stored_option = execution.stored_option | {"ping_interval_ms": stored_option["ping_interval_ms"]}
            if not execution.writes_held_back:  # else a ping would abort its open transaction
                execution.next_ping = min(execution.next_ping, time.monotonic() + execution.ping_every_s)
            self._changed.notify()

    async def pause_pings(self, execution: Execution, seconds: float) -> None:
        """Pause the pings of an execution for so long. On return none of them is on its way."""

        def wait_for_the_round() -> None:
            with self._round:
                pass

        # Noted here and not in that thread, which goes on if we are cancelled, and would note it too late.
        execution.silent_until = time.monotonic() + seconds
        await asyncio.to_thread(wait_for_the_round)
        execution.silent_until = time.monotonic() + seconds

    async def stop(self) -> None:
        """End the thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread.ident is not None:  # it was started
            await asyncio.to_thread(self._thread.join)

    def _beat(self) -> None:
        """Show the thread that the loop turns, and stop executions whose lease has ended: the thread may be blocked in a ping."""
        now = self._loop_alive = time.monotonic()
        for execution in list(self._executions.values()):
            if now >= execution.lease_until and not execution.recorded_or_lost:
                execution.stop(Stop.LEASE_LOST)
        if not self._stopping:
            self._loop.call_later(self._tick_s, self._beat)

    def _run(self) -> None:
        database = self._database()
        if database is None:
            return
        try:
            while not self._stopping:
                try:
                    with self._round:
                        self.run_once(database)
                except Exception:
                    logger.exception("unexpected error in the pinger: continuing")
                self._wait(self._pause())
        finally:
            database.client.close()

    def _database(self) -> Any:
        """Create a client, however long that takes: with `mongodb+srv://` a name server has to answer. None: told to stop."""
        pause = _TICK_S
        while not self._stopping:
            try:
                return self._store.driver.sync_database(socket_timeout_ms=_PATIENCE_MS)
            except Exception:
                logger.exception("could not create a client for pings: trying again in %.2g s", pause)
            self._wait(pause)
            pause = min(2 * pause, _LONGEST_CONNECT_PAUSE_S)
        return None

    def _wait(self, seconds: float) -> None:
        with self._changed:
            if not self._stopping:
                self._changed.wait(seconds)

    def _pause(self) -> float:
        held = self._held()
        self._tick_s = _tick_for(min((e.ping_every_s for e in held), default=float("inf")))
        soonest = min((min(e.next_ping, e.lease_until) for e in held), default=float("inf"))
        return max(0.005, min(self._tick_s, soonest - time.monotonic()))

    def _held(self) -> list[Execution]:
        """Return the executions whose leases have to be kept.

        This is the loop's own dict, copied by a single call in C that no other thread can interrupt: so no lock is needed for
        each task, most of which end before their first ping.
        """
        held = [e for e in list(self._executions.values()) if not e.recorded_or_lost or e.leaving]
        self._given_up.intersection_update(held)
        self._locked.intersection_update(held)
        return [e for e in held if e not in self._given_up]

    def run_once(self, database: Any) -> None:
        """Renew what is due, in the pinger's thread."""
        self._watch_loop()
        now = time.monotonic()
        held = self._held()
        if self._jumps.any_since():
            logger.info("this machine's clock has jumped: checking %d leases with the server", len(held))
            for execution in held:
                if not execution.writes_held_back:
                    execution.next_ping = now
        self._jumps = Jumps()
        for execution in held:
            if now >= execution.lease_until:
                self._give_up(execution)
        if self.stalled:
            return
        # Slightly early, so that what is due at about the same time goes in one write.
        self._renew_all(database, [e for e in held if e.next_ping - 0.02 <= now < e.lease_until])

    def _renew_all(self, database: Any, due: list[Execution]) -> None:
        self._answered = self._late_ms = 0
        leaving = [e for e in due if e.leaving]
        alone = [e for e in due if e in self._locked and e not in leaving]
        together: dict[int, list[Execution]] = {}
        for execution in due:
            if execution not in self._locked and execution not in leaving:
                together.setdefault(execution.stored_option["worker_timeout_ms"], []).append(execution)
        for alike in together.values():
            for start in range(0, len(alike), _MAX_BATCH):
                self._ping(database, alike[start : start + _MAX_BATCH])
        for execution in alone:
            self._ping(database, [execution])
        self._keep_places(database, leaving)
        if self._late_ms and not self._answered:
            self._ping_times.missed(self._late_ms)

    def _ping(self, database: Any, executions: list[Execution]) -> None:
        """Renew leases of one length; in parts, if the server does not manage all of them in time."""
        if not self._renew(database, executions):
            self._split(database, executions)

    def _renew(self, database: Any, executions: list[Execution]) -> bool:
        """Renew leases of one length. False if the server gave up at the deadline."""
        sent = time.monotonic()
        lease_ms = executions[0].stored_option["worker_timeout_ms"]
        deadline_ms = self._deadline_ms(lease_ms)
        pairs = [(e.id, e.running_id) for e in executions]
        try:
            alive = ping(self._store, database, pairs, lease_ms, deadline_ms)
            held = None if alive == len(pairs) else still_held(self._store, database, pairs)
        except PyMongoError as error:
            if is_over_deadline(error):
                self._late_ms = max(self._late_ms, deadline_ms)
                return False
            logger.warning("a ping of %d tasks failed (%s): trying again", len(executions), type(error).__name__)
            for execution in executions:
                execution.ping_again(time.monotonic())
            return True
        self._answered += 1
        self._ping_times.met(time.monotonic() - sent)
        for execution, pair in zip(executions, pairs, strict=True):
            if held is None or pair in held:
                share_left = max(0.0, (execution.lease_until - sent) * 1000 / lease_ms)
                self._stats.renewed(execution.name, share_left)
                if self._observer is not None:
                    self._observer.renewed(execution.name, share_left)
                execution.renewed(sent)
                self._locked.discard(execution)
        if held is not None:
            self._keep_places(database, [e for e, pair in zip(executions, pairs, strict=True) if pair not in held])
        return True

    def _deadline_ms(self, lease_ms: int) -> int:
        """Return a short deadline, since a locked document holds up the others, and one that leaves time for another try."""
        least_ms = max(100, min(PING_DEADLINE_MS, lease_ms // 8))
        return max(times.deadline_ms(least_ms, _most_ms(lease_ms)) for times in (self._write_times, self._ping_times))

    def _keep_places(self, database: Any, executions: list[Execution]) -> None:
        """Renew the places of executions that lost their tasks, or may have: if stopped from outside, they keep their place."""
        alike: dict[int, list[Execution]] = {}
        for execution in executions:
            alike.setdefault(execution.stored_option["worker_timeout_ms"], []).append(execution)
        for lease_ms, group in alike.items():
            for start in range(0, len(group), _MAX_BATCH):
                self._keep_alike(database, group[start : start + _MAX_BATCH], lease_ms)

    def _keep_alike(self, database: Any, executions: list[Execution], lease_ms: int) -> None:
        sent = time.monotonic()
        pairs = [(e.id, e.running_id) for e in executions]
        try:
            tasks = keep_places(self._store, database, pairs, lease_ms, self._deadline_ms(lease_ms))
        except PyMongoError as error:
            if is_over_deadline(error) and len(executions) > 1:
                for execution in executions:
                    self._keep_alike(database, [execution], lease_ms)
                return
            for execution in executions:
                execution.ping_again(time.monotonic())
            return
        for execution, pair in zip(executions, pairs, strict=True):
            if pair not in tasks:
                self._give_up(execution)
                continue
            execution.renewed(sent)
            if not execution.leaving and (reason := why_stopped(tasks[pair], execution.running_id, self._me)):
                self._tell(execution, reason)

    def _split(self, database: Any, late: list[Execution]) -> None:
        """Renew the others without a document that somebody's transaction holds. If the server is slow, wait longer instead."""
        if len(late) == 1:
            if not self._is_slow(late):
                self._locked.add(late[0])
                late[0].ping_again(time.monotonic())
            return
        late_parts: list[list[Execution]] = []
        for i in range(min(_PARTS, len(late))):
            part = late[i::_PARTS]
            if not self._renew(database, part):
                late_parts.append(part)
                if i == 0 and self._is_slow(late):
                    return
        for part in late_parts:
            self._split(database, part)

    def _is_slow(self, late: list[Execution]) -> bool:
        """Whether the server is probably slow with everything.

        Then the same writes are tried again at once, with a longer deadline.

        It is considered slow if it has renewed nothing in this round, unless it had as much time as a lease allows.
        """
        if self._answered or self._late_ms >= _most_ms(late[0].stored_option["worker_timeout_ms"]):
            return False
        for execution in late:
            execution.next_ping = time.monotonic()
        return True

    def _give_up(self, execution: Execution) -> None:
        self._given_up.add(execution)
        self._tell(execution, Stop.LEASE_LOST)

    def _tell(self, execution: Execution, reason: Stop) -> None:
        try:
            self._loop.call_soon_threadsafe(execution.stop, reason)
        except RuntimeError:  # the loop is closed
            self._stopping = True

    def _watch_loop(self) -> None:
        still_s = time.monotonic() - self._loop_alive - _TICK_S
        if still_s < _BLOCKED_S:
            self._blocked_told = False
            if self.stalled:
                self.stalled = False
                logger.warning("the event loop runs again: pings resume")
            return
        self._stats.stood_still(still_s)
        if not self._blocked_told:
            self._blocked_told = True
            logger.warning("the event loop is blocked for %.1f s by %s", still_s, self._culprit())
        if still_s > self._stall_limit_s and not self.stalled:
            self.stalled = True
            logger.error(
                "the event loop has been blocked for %.0f s: treating this worker as dead, pings stop\n%s",
                still_s,
                _all_stacks(),
            )

    def _culprit(self) -> str:
        """Name the task whose handler blocks the loop, and the line where it is."""
        running = asyncio.current_task(self._loop)
        name = running.get_name() if running is not None else "a callback"
        frame = sys._current_frames().get(self._loop_thread)  # noqa: SLF001 — the documented way to see another thread
        where = (
            "".join(traceback.format_stack(frame, limit=None)[-1:]).strip() if frame is not None else "an unknown place"
        )
        return f"{name}, at {where}"


def _most_ms(lease_ms: int) -> int:
    return min(_MOST_DEADLINE_MS, lease_ms // 3)


def _tick_for(every_s: float) -> float:
    """Return how often to check for executions that ping at this interval."""
    return min(_TICK_S, max(_SHORTEST_TICK_S, every_s / 4))


def _all_stacks() -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"--- {names.get(ident, ident)}\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()  # noqa: SLF001 — the documented way to see other threads
    )
