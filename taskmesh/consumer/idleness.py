"""Is there anything left to do? What `run(until_idle=True)` waits for: nothing claimable or running anywhere for this worker."""

from __future__ import annotations

import logging
import time

from pymongo.errors import PyMongoError

from taskmesh.consumer.parts import Parts
from taskmesh.store.find import unfinished_left

logger = logging.getLogger("taskmesh.consumer")


async def is_idle(parts: Parts) -> bool:
    """Whether nothing runs here, nothing is on its way, and the database holds nothing that this worker may run.

    Asks the database only when all is quiet here. While it is away: not idle, as far as anybody knows.
    """
    if parts.executions or not parts.claimer.idle or not parts.finisher.idle:
        return False
    settings = parts.settings
    if settings.names and parts.scanner.scans == 0:
        return False
    if parts.queue.ready_count(time.monotonic()):
        return False
    try:
        return not await unfinished_left(
            parts.store,
            settings.worker_id,
            settings.names,
            settings.queues,
            parts.closed_queues | parts.limits.shut_queues,
        )
    except PyMongoError as error:
        logger.debug("could not ask whether anything is left: %s", error)
        return False
