"""The loops of one worker: makes sure that their tasks exist, and are tried as soon as they are due, whatever else waits.

A loop is a task like any other, published by the workers that run it, under a key for the fleet, the worker or the host: so
claims, leases and fencing make sure that it runs once. It never finishes: an execution that ends well is given back with a
delay.

Nothing is decided here. If the process dies, the leases of its loops run out, and other workers, which look once a second, go
on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from pymongo.errors import PyMongoError

from taskmesh.client.definition import TaskDefinition
from taskmesh.consumer.candidates.claim_queue import Candidate, ClaimQueue
from taskmesh.consumer.candidates.partitions import LAST_PLACE_TO_WAIT, Partitions, wait_s
from taskmesh.consumer.run.executions import Executions
from taskmesh.consumer.settings import Settings
from taskmesh.consumer.timing import until, varied
from taskmesh.model.labels import HOST, words
from taskmesh.model.loop import Loop
from taskmesh.model.worker import read_workers
from taskmesh.store import Store, registry
from taskmesh.store.clock import ServerClock
from taskmesh.store.find import Claimable, look_up
from taskmesh.store.publication import Publication
from taskmesh.store.publish import publish
from taskmesh.store.rules import NEVER
from taskmesh.store.triggers import loops

logger = logging.getLogger("taskmesh.loops")

_LOOK_EVERY_S = 1.0
_FORGET_EVERY_S = 60.0
_JUST_S = 0.1
"""What became due less than this ago may not be due by the server's clock. Then it is tried again."""


class Loops:
    """Looks after the loops of one worker."""

    def __init__(
        self,
        store: Store,
        settings: Settings,
        clock: ServerClock,
        definitions: Mapping[str, TaskDefinition[Any, Any]],
        candidates: ClaimQueue,
        executions: Executions,
        partitions: Partitions,
    ) -> None:
        self._store = store
        self._settings = settings
        self._me = settings.claimant
        self._clock = clock
        self._candidates = candidates
        self._executions = executions
        self._partitions = partitions
        self._publications = publications_of(settings, definitions)
        self._next_forget = time.monotonic() + varied(_FORGET_EVERY_S, 0.5)

    async def declare(self) -> None:
        """Publish the loops. Existing ones take over queue, option and labels as declared now."""
        if self._publications:
            await publish(self._store, list(self._publications.values()), self._clock.now())

    async def run(self) -> None:
        """Look for ever."""
        while self._publications:
            try:
                pause = await self.run_once()
            except PyMongoError as error:
                logger.debug("could not look after the loops (%s): trying again", type(error).__name__)
                pause = _LOOK_EVERY_S
            await until(self._executions.loop_ended, pause)
            self._executions.loop_ended.clear()

    async def run_once(self) -> float:
        """Try what is due. Return how many seconds to wait before the next look."""
        found = {row.id: row for row in await look_up(self._store, self._me, list(self._publications))}
        await self._restore([id_ for id_ in self._publications if id_ not in found])
        now = time.monotonic()
        places = {row.id: self._place(row) for row in found.values()}
        # Those that are behind in the order for every loop share the looks, and do not wake for what is due.
        among_the_first = min(places.values(), default=0) <= LAST_PLACE_TO_WAIT
        pause = varied(_LOOK_EVERY_S if among_the_first else self._partitions.in_turn(_LOOK_EVERY_S), 0.1)
        for row in found.values():
            if row.id in self._executions or row.claim_time == NEVER:
                continue
            due = self._due(row, places[row.id])
            if due <= now:
                self._offer(row, due, now)
            elif places[row.id] <= LAST_PLACE_TO_WAIT:
                pause = min(pause, due - now)
        if now >= self._next_forget:
            self._next_forget = now + varied(_FORGET_EVERY_S, 0.5)
            await self._forget_those_of_others_gone()
        return pause

    def _place(self, row: Claimable) -> int:
        """Return how many workers come before this one for a loop."""
        return 0 if row.named else self._partitions.place(row.id, row.queue, row.needs)

    def _due(self, row: Claimable, place: int) -> float:
        """Return when this worker tries it: a moment later for each worker that comes before it, so that they do not race."""
        moment = row.next_claim_time if row.claim_time is None else max(row.claim_time, row.next_claim_time)
        return self._clock.monotonic(moment) + wait_s(place)

    def _offer(self, row: Claimable, due: float, now: float) -> None:
        if self._candidates.is_aside(row.id) or row.id in self._candidates.being_claimed:
            return
        timed = now - due < _JUST_S
        candidate = Candidate(row.id, row.queue, due, due, row.number, row.priority, row.fail_cnt, row.group, timed)
        if self._candidates.offer(candidate):
            self._candidates.ready.set()

    async def _restore(self, ids: list[str]) -> None:
        """Publish again what somebody has deleted. Cancelled loops stay cancelled."""
        if not ids:
            return
        there = await loops.which_are_there(self._store, ids)
        gone = [publication for id_, publication in self._publications.items() if id_ in ids and id_ not in there]
        if gone:
            await publish(self._store, gone, self._clock.now())

    async def _forget_those_of_others_gone(self) -> None:
        """Delete the loops of workers and hosts that have not been seen for an hour."""
        seen = read_workers(await registry.workers(self._store))
        places = {
            "worker": [worker.worker_id for worker in seen],
            "host": [str(worker.labels.get(HOST, worker.host)) for worker in seen],
        }
        for publication in self._publications.values():
            per = (publication.loop or {})["per"]
            if per in places:
                kept = [*places[per], publication.key]
                await loops.forget(self._store, publication.name, publication.configuration.queue, per, kept)

    async def leave(self) -> None:
        """Delete the loops that only this worker could run. A worker that starts under the same id publishes them again."""
        own = [id_ for id_, publication in self._publications.items() if (publication.loop or {})["per"] == "worker"]
        if own:
            try:
                await loops.delete_waiting(self._store, own)
            except PyMongoError as error:  # other workers do it within an hour
                logger.debug("could not delete the loops of this worker: %s", type(error).__name__)


def publications_of(settings: Settings, definitions: Mapping[str, TaskDefinition[Any, Any]]) -> dict[str, Publication]:
    """Return the publications of the loops that this worker may run, by `_id`."""
    made: dict[str, Publication] = {}
    for definition in definitions.values():
        loop = definition.loop
        if loop is None or (settings.queues is not None and definition.queue not in settings.queues):
            continue
        publication = _publication(definition, loop, settings)
        configuration = publication.configuration
        me = settings.claimant
        if me.is_allowed(configuration.option.specific_worker_ids) and me.has(words(configuration.needs)):
            made[publication.id] = publication
    return made


def _publication(definition: TaskDefinition[Any, Any], loop: Loop, settings: Settings) -> Publication:
    configuration = definition.configuration
    option = configuration.option
    if loop.per == "worker" and settings.claimant.is_allowed(option.specific_worker_ids):
        option = option.changed(specific_worker_ids=(settings.worker_id,))
    needs = configuration.needs
    if loop.per == "host":
        needs = {HOST: settings.labels[HOST], **needs}
    # The whole option and the queue are set: an existing task follows what is declared now.
    changed = configuration.changed(**dict(option), queue=configuration.queue, needs=needs, update_existing_params=True)
    params, size = definition.params.to_store({})
    return Publication(
        definition.name, loop.key(settings.worker_id, settings.labels), params, changed, size, loop=loop.stored()
    )
