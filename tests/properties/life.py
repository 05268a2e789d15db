"""One task led through its life by hand, on the real server and with time as a literal. For tests that tell a story."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from taskmesh.model.configuration import Configuration
from taskmesh.model.option import TaskOption
from taskmesh.store import Store, control, schema
from taskmesh.store.claim import claim
from taskmesh.store.find import get
from taskmesh.store.finish import Kind, Outcome, finish, report
from taskmesh.store.mongodb.driver import Document
from taskmesh.store.publication import Publication
from taskmesh.store.publish import Published, publish
from taskmesh.store.renew import ping
from taskmesh.store.settle import settle
from tests.properties.patience import PatientStore

BEGIN = datetime(2030, 1, 1, tzinfo=UTC)
LEASE = {"ping_interval_ms": 1_000, "worker_timeout_ms": 3_000}


@dataclass(frozen=True)
class Held:
    """An execution."""

    worker_id: str
    running_id: str


class Life:
    """The task `job:1`, published with leases of 3 s and no delay after failures unless the test says otherwise."""

    id = "job:1"

    def __init__(self, store: Store) -> None:
        self.store = store
        self._serial = 0

    @property
    def now(self) -> datetime:
        now: datetime = self.store.now
        return now

    def later(self, milliseconds: int) -> None:
        """Let time pass."""
        self.store.now = self.now + timedelta(milliseconds=milliseconds)

    async def publish(
        self,
        n: int = 0,
        *,
        start_time: datetime | None = None,
        expire_time: datetime | None = None,
        flags: tuple[str, ...] = (),
        publication: Publication | None = None,
        **option: Any,
    ) -> Published:
        """Publish, with `params={"n": n}`."""
        publication = publication or self.publication(
            n, start_time=start_time, expire_time=expire_time, flags=flags, **option
        )
        return (await publish(self.store, [publication], self.now))[0]

    def publication(
        self,
        n: int = 0,
        *,
        start_time: datetime | None = None,
        expire_time: datetime | None = None,
        flags: tuple[str, ...] = (),
        **option: Any,
    ) -> Publication:
        """Return what would be published."""
        tuned = {name: list(v) if isinstance(v, tuple) else v for name, v in option.items()}
        defaults = {**LEASE, "unexpected_retry_delay_ms": 0, "unexpected_retry_jitter": 0.0}
        checked = TaskOption(**{**defaults, **option})
        configuration = Configuration(
            option=checked, tuned=tuned, start_time=start_time, expire_time=expire_time
        ).changed(**dict.fromkeys(flags, True))
        return Publication("job", "1", {"n": n}, configuration)

    async def claim(self, worker_id: str = "w1") -> Held:
        """Claim, which has to go well."""
        held = await self.try_claim(worker_id)
        assert held is not None, f"{worker_id} could not claim {await self.document()}"
        return held

    async def try_claim(self, worker_id: str = "w1") -> Held | None:
        """Claim, if the rule allows it."""
        self._serial += 1
        held = Held(worker_id, f"r{self._serial}")
        return held if await claim(self.store, [self.id], worker_id, held.running_id) else None

    async def end(self, held: Held, kind: Kind, *, delay_ms: int | None = None, **entry: Any) -> bool:
        """End an execution; return whether that counted."""
        outcome = Outcome(self.id, held.running_id, kind, {"retry_jitter": 0.0, **entry}, delay_ms=delay_ms)
        return bool(await finish(self.store, held.worker_id, [outcome]))

    async def succeed(self, held: Held, value: Any = None) -> bool:
        return await self.end(held, "succeeded", returns=value)

    async def fail(self, held: Held, *, delay_ms: int | None = None, final: bool = False) -> bool:
        return await self.end(held, "failed", delay_ms=delay_ms, **({"final": True} if final else {}))

    async def progress(self, held: Held) -> bool:
        outcome = Outcome(self.id, held.running_id, "succeeded", {}, progress={"fraction": 0.5, "time": self.now})
        return bool(await report(self.store, held.worker_id, [outcome]))

    async def ping(self, held: Held) -> bool:
        sync_database = self.store.driver.sync_database()
        try:
            lease_ms = LEASE["worker_timeout_ms"]
            pairs = [(self.id, held.running_id)]
            return bool(await asyncio.to_thread(ping, self.store, sync_database, pairs, lease_ms))
        finally:
            await asyncio.to_thread(sync_database.client.close)

    async def settle(self) -> int:
        return await settle(self.store)

    async def set_option(self, **changes: Any) -> bool:
        stored = (await self.document())["task_option"]
        return bool(await control.set_option(self.store, self.id, changes, stored))

    async def document(self) -> Document:
        """The task as a reader sees it."""
        (document,) = await get(self.store, [self.id])
        return document

    async def status(self) -> str:
        return str((await self.document())["status"])


@asynccontextmanager
async def a_life(uri: str, database: str) -> AsyncIterator[Life]:
    """Open a store with its indexes, on the first of January."""
    store = PatientStore(uri, database, now=BEGIN)
    try:
        await schema.create(store)
        yield Life(store)
    finally:
        await store.close()
