"""Migration: jobs are taken from another program's collection one by one, so that each runs here or there, never in both.

Taking a job stops it there and marks it, in one update, if nothing has happened to it since it was read; it is marked once more
when it has been published here. If the migration dies in between, the next run finds the mark, and goes on.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from taskmesh.store.mongodb.driver import Document, own_database
from taskmesh.store.store import Store

MARK = "taskmesh"
"""The field that marks another program's job as taken: `state` (`taking`, `taken`), and what it had `before`."""


@dataclass(frozen=True, slots=True)
class Source:
    """Another program's collection, on the same servers."""

    store: Store
    database: str
    collection: str

    @property
    def _jobs(self) -> Any:
        return own_database(self.store.driver.client, self.database).get_collection(self.collection)

    async def jobs(self) -> AsyncIterator[tuple[Document, bool]]:
        """Yield the jobs that are not taken yet, as they were before, and whether taking them has begun."""
        cursor = self._jobs.find({f"{MARK}.state": {"$ne": "taken"}}).sort("_id", 1)
        try:
            while batch := await cursor.to_list(100):
                for job in batch:
                    mark = job.pop(MARK, None)
                    yield ({**job, **mark["before"]}, True) if mark else (job, False)
        finally:
            await cursor.close()

    async def take(self, job: Document, unchanged: Document, changes: Document) -> bool:
        """Stop a job there, unless anything has happened to it. Return whether that was done."""
        before = {name: job.get(name) for name in changes}
        # As values: what the other program has stored may look like an operator.
        as_read = {name: {"$eq": value} for name, value in unchanged.items()}
        query = {"_id": job["_id"], MARK: {"$exists": False}, **as_read}
        taken = {**changes, MARK: {"state": "taking", "before": before}}
        return bool((await self._jobs.update_one(query, {"$set": taken})).modified_count)

    async def give_back(self, job: Document, changes: Document) -> None:
        """Let the job go on there: it could not be published here."""
        before = {name: job[name] for name in changes if name in job}
        gone = {name: "" for name in (*changes, MARK) if name not in before}
        await self._jobs.update_one({"_id": job["_id"]}, {"$unset": gone} | ({"$set": before} if before else {}))

    async def taken(self, job: Document) -> None:
        """Note that the job is here now."""
        await self._jobs.update_one({"_id": job["_id"]}, {"$set": {f"{MARK}.state": "taken"}})
