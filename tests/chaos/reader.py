"""A reader of `mesh.events()`, in a thread with an event loop of its own: what a user's dashboard would be told."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from typing import Any

from pymongo import AsyncMongoClient

from taskmesh import TaskMesh
from tests.chaos.history import Told
from tests.waiting import wait_until

APPNAME = "reader of events"
"""By which a fail point can tell it from workers."""


class Reader:
    """Keeps all events, in the order in which they were told."""

    def __init__(self, uri: str, database: str) -> None:
        self._uri, self._database = uri, database
        self.told: list[Told] = []
        self._open = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._reading: asyncio.Task[None] | None = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="reader of events", daemon=True)

    def start(self) -> None:
        """Start, and return when nothing can be missed unsaid."""
        self._thread.start()
        assert self._open.wait(60.0), f"the events did not open: {self.error}"

    def stop(self, expected: int, patience_s: float = 20.0) -> None:
        """Stop once `expected` events are there, or a while has passed: then the check tells what is missing."""
        with suppress(AssertionError):
            wait_until(lambda: len(self.told) >= expected or self.error is not None, patience_s)
        if self._loop is not None and self._reading is not None:
            self._loop.call_soon_threadsafe(self._reading.cancel)
        self._thread.join(30.0)
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        try:
            with suppress(asyncio.CancelledError):
                asyncio.run(self._read())
        except BaseException as error:  # whatever it is, `stop` raises it in the test
            self.error = error
            raise

    async def _read(self) -> None:
        self._loop, self._reading = asyncio.get_running_loop(), asyncio.current_task()
        async with (
            AsyncMongoClient[Any](self._uri, appname=APPNAME, tz_aware=True) as client,
            TaskMesh(client, database=self._database) as mesh,
            mesh.events() as events,
        ):
            self._open.set()
            async for event in events:
                self.told.append(Told(f"{event.name}:{event.key}", event.kind, event.worker_id))
