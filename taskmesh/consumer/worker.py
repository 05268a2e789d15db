"""The consumer: what its user can ask and set, and its life from start to stop. Its parts are wired in `parts`."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, Literal, Protocol

import anyio

from taskmesh.client.change_feed import Feed
from taskmesh.client.definition import TaskDefinition
from taskmesh.client.events import DEFAULT_BUFFER, EventReader
from taskmesh.client.publisher import Publisher
from taskmesh.client.schedules import Schedules
from taskmesh.consumer import signals
from taskmesh.consumer.execution import Execution
from taskmesh.consumer.executor import AfterHook, BeforeHook
from taskmesh.consumer.idleness import is_idle
from taskmesh.consumer.observer import Observer
from taskmesh.consumer.parts import Parts
from taskmesh.consumer.settings import (
    DEFAULT_STALL_LIMIT_MS,
    Settings,
    checked_concurrency,
    checked_names,
    checked_queues,
    worker_id_or_new,
)
from taskmesh.consumer.stopping import (
    DEFAULT_GRACE_MS,
    StopWish,
    unless_it_takes_too_long,
    unless_stopped,
    wind_down,
)
from taskmesh.consumer.timing import until
from taskmesh.model.errors import InvalidOption, WorkerIdTaken
from taskmesh.store import Store
from taskmesh.store.clock import ServerClock
from taskmesh.store.driver import Document

logger = logging.getLogger("taskmesh.consumer")

State = Literal["ready", "running", "stopping", "stopped"]
ClaimHook = Callable[["Consumer"], Mapping[str, Any] | Awaitable[Mapping[str, Any] | None] | None]

_IDLE_CHECK_S = 0.1


class Mesh(Protocol):
    """What a consumer needs of its mesh."""

    # ruff: noqa: D102 — each is documented where the mesh has it

    @property
    def store(self) -> Store: ...
    @property
    def clock(self) -> ServerClock: ...
    @property
    def feed(self) -> Feed: ...
    @property
    def definitions(self) -> Mapping[str, TaskDefinition[Any, Any]]: ...
    @property
    def publisher(self) -> Publisher: ...
    @property
    def schedules(self) -> Schedules: ...


class Consumer:
    """A worker: claims tasks and runs their handlers. Made by `mesh.consumer(…)`, run once."""

    def __init__(
        self,
        mesh: Mesh,
        *,
        worker_id: str | None = None,
        concurrency: int = 100,
        names: Sequence[str] | None = None,
        queues: Sequence[str] | None = None,
        listen: bool = True,
        on_claim: ClaimHook | None = None,
        before: BeforeHook | None = None,
        after: AfterHook | None = None,
        stall_limit_ms: int = DEFAULT_STALL_LIMIT_MS,
        observer: Observer | None = None,
    ) -> None:
        self._mesh = mesh
        self._settings = Settings(
            worker_id=worker_id_or_new(worker_id),
            names=checked_names(mesh.definitions, names),
            queues=checked_queues(queues),
            concurrency=checked_concurrency(concurrency),
            listen=listen,
            before=before,
            after=after,
            stall_limit_ms=stall_limit_ms,
            observer=observer,
        )
        self._on_claim = on_claim
        self.worker_id = self._settings.worker_id
        self.names = self._settings.names
        self.queues = self._settings.queues
        self.state: State = "ready"
        self._begun = False
        """Whether `run` was called. It is shown as ready until it is registered."""
        self.paused = False
        self._parts: Parts | None = None
        """None until it runs."""
        self._stop_wish = StopWish()
        self._stopped = asyncio.Event()
        self._readers: list[EventReader] = []
        self._fatal: BaseException | None = None

    # --- what a user can ask and set ---

    @property
    def running(self) -> list[str]:
        """The keys of the tasks that run here."""
        return [execution.key for execution in self._executions()]

    @property
    def at_work(self) -> bool:
        """Whether `run()` has begun and not ended yet."""
        return self._begun and not self._stopped.is_set()

    @property
    def finished(self) -> int:
        """How many executions have ended here, whatever their outcome."""
        return 0 if self._parts is None else self._parts.executor.finished

    @property
    def silent_ms(self) -> float:
        """How long ago the database last took this worker's sign of life; they come every two seconds."""
        return 0.0 if self._parts is None else (time.monotonic() - self._parts.registration.seen_at) * 1000

    @property
    def stream_silent_ms(self) -> float:
        """For how long the change stream has not moved on: see `Feed.silent_ms`. 0 for one that does not listen."""
        return self._mesh.feed.silent_ms if self._parts is not None and self._settings.listen else 0.0

    @property
    def concurrency(self) -> int:
        """How many executions may run here at once. Can be set while the consumer runs; what runs, runs on."""
        return self._settings.concurrency

    @concurrency.setter
    def concurrency(self, concurrency: int) -> None:
        self._settings.concurrency = checked_concurrency(concurrency)
        if self._parts is not None:
            self._parts.concurrency_changed()

    def pause(self) -> None:
        """Claim no more, on this worker alone; what runs, runs on."""
        self._set_paused(True)

    def resume(self) -> None:
        """Claim again."""
        self._set_paused(False)

    def events(self, *, buffer: int = DEFAULT_BUFFER) -> EventReader:
        """Return an async iterator of what this worker does with tasks, from now on. It ends when the consumer has stopped."""
        reader = EventReader(self._mesh.feed, self._mesh.store, worker_id=self.worker_id, buffer=buffer)
        self._readers.append(reader)
        if self.state == "stopped":
            reader.close()
        return reader

    async def read_queues(self) -> None:
        """Learn at once which queues are paused or limited, as the mesh does when it has changed one."""
        if self._parts is not None and self.state == "running":
            await self._parts.read_queues()

    async def stop(self, grace_ms: int = DEFAULT_GRACE_MS) -> None:
        """Stop: no new claims; wait up to `grace_ms` for what runs; then cancel and release the rest, which is not counted.

        Returns when the consumer has stopped. A second call with a shorter grace hastens the first.
        """
        if not self._begun:
            self._end_before_it_ran()
        self.begin_stop(grace_ms)
        await self._stopped.wait()

    def begin_stop(self, grace_ms: int) -> None:
        """Ask the consumer to stop, without waiting for it."""
        self._stop_wish.say(grace_ms)

    # --- its life ---

    async def run(self, until_idle: bool = False) -> None:
        """Work until `stop()`, a signal, or cancellation (which cancels and releases what runs).

        `until_idle`: return once nothing that this worker may run is claimable or running anywhere. What `on_claim` leaves
        out, and what is paused or limited to 0, it may not run; nor may it run anything while it is paused. In the main thread,
        SIGINT and SIGTERM stop it (the first gracefully, the second at once) unless the program handles them itself.
        """
        if self._begun or self.state != "ready":
            state = "starting" if self.state == "ready" else self.state
            raise RuntimeError(f"this consumer is {state}: a consumer runs once, make another")
        if getattr(sys.modules.get("taskmesh.consumer.subprocess.child"), "serving", False):
            raise RuntimeError(
                "a consumer was started in the child process of a handler: the script that defines the handler must start "
                "its consumer under `if __name__ == '__main__':`"
            )
        parts = self._parts = Parts(
            self._mesh,
            self._settings,
            narrow=self._narrow,
            state=self._described,
            ordered=self._obey,
            id_lost=self._lose_id,
        )
        self._begun = True
        try:
            entered = await unless_stopped(self._stop_wish, parts.enter())
        except BaseException:
            self._begun = False
            if self._stop_wish.said.is_set():
                self._end_before_it_ran()
            raise
        if entered:
            self.state = "running"
        if self.paused:  # by its user, before it ran
            parts.set_claiming(False)
        with signals.handled_by(self):
            try:
                async with anyio.create_task_group() as loops:
                    if entered and await unless_stopped(self._stop_wish, parts.open()):
                        parts.start(loops)
                        self._tell_start()
                        await self._until_asked_to_stop(parts, until_idle)
                    await self._wind_down(parts, self._stop_wish.grace_ms)
                    loops.cancel_scope.cancel()
            except BaseException:
                self.state = "stopping"
                parts.close_claims()
                await unless_it_takes_too_long(self._wind_down(parts, 0))
                raise
            finally:
                await unless_it_takes_too_long(self._end(parts))
                self._stopped.set()
        if self._fatal is not None:
            raise self._fatal

    def _end_before_it_ran(self) -> None:
        self.state = "stopped"
        self._stopped.set()

    def _tell_start(self) -> None:
        names, queues = ", ".join(self.names), self.queues or "all queues"
        logger.info("worker %s runs %s from %s, %d at once", self.worker_id, names, queues, self.concurrency)

    async def _until_asked_to_stop(self, parts: Parts, until_idle: bool) -> None:
        while not self._stop_wish.said.is_set():
            stopping = await until(self._stop_wish.said, _IDLE_CHECK_S if until_idle else None)
            if not stopping and await is_idle(parts, self._ask_on_claim):
                return

    async def _wind_down(self, parts: Parts, grace_ms: int) -> None:
        self.state = "stopping"
        await wind_down(parts, self._stop_wish, grace_ms)

    async def _end(self, parts: Parts) -> None:
        """Give everything back."""
        parts.listener.close()
        parts.limits.close()
        await parts.pinger.stop()
        await parts.reporter.flush()
        await parts.executor.close()
        self.state = "stopped"
        if not isinstance(self._fatal, WorkerIdTaken):
            await parts.registration.leave()
        for reader in self._readers:
            reader.close()
        logger.info("worker %s has stopped", self.worker_id, extra={"worker": self.worker_id})

    # --- what its parts ask and tell it ---

    async def _narrow(self) -> Mapping[str, Any] | None:
        """What the hook `on_claim` says; None, nothing may be claimed, if it fails."""
        try:
            return await self._ask_on_claim()
        except Exception:
            logger.exception("the hook 'on_claim' failed: no claims this round")
            return None

    async def _ask_on_claim(self) -> Mapping[str, Any] | None:
        if self._on_claim is None:
            return {}
        narrowed_by = self._on_claim(self)
        if isinstance(narrowed_by, Awaitable):
            narrowed_by = await narrowed_by
        if narrowed_by is not None and not isinstance(narrowed_by, Mapping):
            raise TypeError(f"on_claim returns a filter on task documents, or None, not {narrowed_by!r}")
        return narrowed_by

    def _obey(self, order: Document) -> None:
        """Do what was ordered from afar."""
        if "concurrency" in order:
            try:
                self.concurrency = order["concurrency"]
            except InvalidOption as error:  # of another release, or by hand
                logger.warning("an order is not obeyed: %s", error)
        if "paused" in order:
            self._set_paused(bool(order["paused"]))
        if "stop_grace_ms" in order:
            logger.info("worker %s was told to stop", self.worker_id, extra={"worker": self.worker_id})
            self.begin_stop(order["stop_grace_ms"])

    def _set_paused(self, paused: bool) -> None:
        self.paused = paused
        if self._parts is not None:
            if self.state == "running":
                self._parts.set_claiming(not paused)
            self._parts.registration.show_soon()

    def _lose_id(self) -> None:
        """Another worker has our id, since we were silent for too long."""
        self._fatal = WorkerIdTaken(
            f"worker id {self.worker_id!r} was taken over by another process while this one was silent: this one stops"
        )
        logger.error("%s", self._fatal)
        self.begin_stop(0)

    def _described(self) -> Document:
        return {"state": self.state if self.state != "ready" else "running", "paused": self.paused}

    def _executions(self) -> Collection[Execution]:
        return [] if self._parts is None else self._parts.executions
