"""Open pages: where the last scan of a backlog ended, so that the next one can read on there.

A scan from the start passes over everything that was claimed within the last minutes, since the server keeps its index entries
for a while, and over all that is held here or lies in other workers' lanes. Reading the next page does not.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from pymongo.errors import PyMongoError

from taskmesh.store.find import OpenScan, Page, close_scans
from taskmesh.store.malformed import Strange

logger = logging.getLogger("taskmesh.scanner")


class OpenPages:
    """What continues the pages of one consumer's last scan from the start."""

    def __init__(self) -> None:
        self._rests: Sequence[OpenScan] = ()
        self._over_at = 0.0
        """When to scan from the start again (monotonic): something may stand in front meanwhile."""

    @property
    def left_s(self) -> float:
        """How long they can be read. 0: there are none."""
        return max(0.0, self._over_at - time.monotonic()) if self._rests else 0.0

    async def keep(self, rests: Sequence[OpenScan], over_at: float) -> None:
        """Keep these until then (monotonic), instead of those before."""
        await self.close()
        self._rests, self._over_at = rests, over_at

    async def close(self) -> None:
        """Scan from the start next time."""
        rests, self._rests = self._rests, ()
        await close_scans(rests)

    async def next_pages(self) -> list[Page]:
        """Read the next page of each. Return none if that is not possible, as after a failover."""
        try:
            pages = [await rest.next_page() for rest in self._rests]
        except (PyMongoError, Strange) as error:
            logger.debug("could not continue a scan (%s): scanning from the start", type(error).__name__)
            await self.close()
            return []
        self._rests = [page.rest for page in pages if page.rest is not None]
        return pages
