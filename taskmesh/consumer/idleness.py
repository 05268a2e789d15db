"""Is there anything left to do? What `run(until_idle=True)` waits for: nothing claimable or running anywhere for this worker.

What this worker may not have is no reason to wait: what the hook `on_claim` leaves out, what is paused or limited to 0.
"""

from __future__ import annotations

import logging
import time

from pymongo.errors import PyMongoError

from taskmesh.consumer.claimer import Narrow
from taskmesh.consumer.parts import Parts
from taskmesh.store.find import unfinished_left

logger = logging.getLogger("taskmesh.consumer")


async def is_idle(parts: Parts, ask_on_claim: Narrow) -> bool:
    """Whether nothing runs here, nothing is on its way, and the database holds nothing that this worker may run.

    Asks the hook and the database only when all is quiet here. While one of them cannot answer: not idle, as far as
    anybody knows.
    """
    if not _is_quiet(parts):
        return False
    if not parts.claimer.open:
        return True
    settings = parts.settings
    if settings.names and parts.scanner.scans == 0:
        return False
    try:
        narrowed_by = await ask_on_claim()
    except Exception as error:  # noqa: BLE001 -- a user's hook; the scanner, which asks it as well, logs what it raises
        logger.debug("on_claim did not tell whether anything may be claimed: %s", error)
        return False
    if narrowed_by is None:
        return _is_quiet(parts)
    if parts.queue.ready_count(time.monotonic()):
        return False
    shut_groups = parts.limits.shut_groups
    try:
        left = await unfinished_left(
            parts.store,
            settings.worker_id,
            settings.names,
            settings.queues,
            parts.closed_queues | parts.limits.shut_queues,
            known_queues=parts.scanner.known_queues,
            narrowed_by={"$and": [dict(narrowed_by), {"$nor": shut_groups}]} if shut_groups else narrowed_by,
        )
    except PyMongoError as error:
        logger.debug("could not ask whether anything is left: %s", error)
        return False
    # What was claimed while the database was asked runs now, so that it was not seen as claimable.
    return not left and _is_quiet(parts) and not parts.queue.ready_count(time.monotonic())


def _is_quiet(parts: Parts) -> bool:
    return not parts.executions and parts.claimer.idle and parts.finisher.idle
