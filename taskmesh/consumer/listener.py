"""The listener: turns hints of the change stream into candidates, and tells executions what concerns them.

A hint may be lost or late; only the scan is reliable. While the claim queue is full, hints about new work are not even
delivered, and a scan catches up when there is room again. A worker that does not listen (`candidates.listening`) asks once a
second about its executions.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from datetime import datetime

from pymongo.errors import PyMongoError

from taskmesh.client.change_feed import Feed, Subscription
from taskmesh.consumer.candidates.backup_claims import BackupClaims
from taskmesh.consumer.candidates.claim_queue import Candidate, ClaimQueue
from taskmesh.consumer.candidates.inserted_tasks import InsertedTasks
from taskmesh.consumer.candidates.listening import Listening
from taskmesh.consumer.candidates.partitions import Partitions
from taskmesh.consumer.candidates.queues import Queues
from taskmesh.consumer.registration import Orders
from taskmesh.consumer.run.execution import Execution
from taskmesh.consumer.run.executions import Executions
from taskmesh.consumer.run.pinger import Pinger
from taskmesh.consumer.run.stop_reasons import why_stopped
from taskmesh.consumer.settings import Settings
from taskmesh.consumer.timing import until
from taskmesh.store import Store, schema
from taskmesh.store.change_stream import STOPPING, Change, Interest
from taskmesh.store.clock import ServerClock
from taskmesh.store.find import get, look_up, number_of
from taskmesh.store.mongodb.driver import Document
from taskmesh.store.pipeline.event_stamp import read_stamp
from taskmesh.store.renew import held_of
from taskmesh.store.rules import NEVER

logger = logging.getLogger("taskmesh.listener")

_LAST_PLACE_TO_TRY = 1
_TOO_LATE_S = 0.5
_CLAIM_LANDS_S = 0.02
LETS_GO_AFTER_S = 10.0
"""How long a stream is kept that covers too many lanes: while a fleet grows, each worker that joins takes over some."""
_QUEUES_EVERY_S = 2.0
_ASK_EVERY_S = 1.0
_STREAM_IS_BACK_WITHIN_S = 2.0


class Listener:
    """One consumer's side of the change feed."""

    def __init__(
        self,
        feed: Feed,
        store: Store,
        settings: Settings,
        listening: Listening,
        clock: ServerClock,
        candidates: ClaimQueue,
        executions: Executions,
        partitions: Partitions,
        queues: Queues,
        backup_claims: BackupClaims,
        pinger: Pinger,
        orders: Orders,
        *,
        inserted_tasks: InsertedTasks,
    ) -> None:
        self._feed = feed
        self._store = store
        self._worker_id = settings.worker_id
        self._me = settings.claimant
        self._names = frozenset(settings.names)
        self._from = frozenset(settings.queues) if settings.queues is not None else None
        """The queues that this worker takes tasks from. None: all."""
        self._listening = listening
        self._clock = clock
        self._candidates = candidates
        self._executions = executions
        self._partitions = partitions
        self._queues = queues
        self._backup_claims = backup_claims
        self._pinger = pinger
        self._orders = orders
        self._inserted_tasks = inserted_tasks
        self._subscription: Subscription | None = None
        self.lanes = partitions.heard
        """The lanes whose new tasks are announced to this worker. None: all."""
        self._lets_go_at = 0.0
        self._woken: dict[str, datetime] = {}
        """Tasks that have become claimable again, and when that was written, by the server's clock."""
        self._concerned: set[str] = set()
        self._queues_changed = False
        self._next_queues = time.monotonic() + _QUEUES_EVERY_S
        """When (monotonic) the settings of queues are read again if no event requests it: none announces the end of a pause."""
        self._orders_changed = False
        self._lag_s = 0.0
        """How late the last hint came."""
        self._dropped = False
        self._something = listening.wake

    async def open(self) -> None:
        """Subscribe, and wait until the stream is open."""
        await self._subscribed().ready.wait()

    def _subscribed(self) -> Subscription:
        self.lanes = self._partitions.heard
        self._subscription = self._feed.subscribe(self._interest(hints=True), self._heard, self._missed)
        return self._subscription

    def _interest(self, *, hints: bool) -> Interest:
        if not hints:
            return Interest(control=True)
        return Interest(names=self._names, control=True, lanes=self.lanes)

    @property
    def listens(self) -> bool:
        """Whether a change stream is open for this worker, or is being opened."""
        return self._subscription is not None

    @property
    def wants_hints(self) -> bool:
        """Whether new work is announced here."""
        return self._subscription is not None and bool(self._subscription.interest.names)

    async def want_hints(self, wanted: bool) -> bool:
        """Subscribe to new work or, while there is more than enough of it, to running executions alone.

        Return whether that changed.

        While this worker does without a stream, its stream is closed.
        """
        if self.listens != self._listening.hears and (wanted or self.listens):
            await self._begin_or_cease()
            return wanted
        if self._subscription is None or wanted == self.wants_hints:
            return False
        self._feed.change(self._subscription, self._interest(hints=wanted), relaxed=not wanted)
        # The scanner waits here. If the stream stays away, it has to look for what the stream would have announced.
        await until(self._subscription.ready, _STREAM_IS_BACK_WITHIN_S)
        return True

    def close(self) -> None:
        """Stop listening."""
        if self._subscription is not None:
            self._feed.unsubscribe(self._subscription)
            self._subscription = None

    async def run(self) -> None:
        """Follow up what hints leave open, for ever: they carry no more than an `_id`."""
        while True:
            left_s = self._next_queues - time.monotonic()
            await until(self._something, left_s if self.listens else min(left_s, _ASK_EVERY_S))
            self._something.clear()
            self._queues_changed |= time.monotonic() >= self._next_queues
            try:
                # Not before the wait: the scanner may have opened or closed the stream meanwhile.
                if self.listens != self._listening.hears:
                    await self._begin_or_cease()
                elif self.listens:
                    self._hear_in_lanes(self._partitions.heard)
                else:
                    self._concerned.update(await self._not_held())
                await self.run_once()
            except PyMongoError as error:
                logger.debug("could not follow up what the stream told (%s): scanning instead", type(error).__name__)
                self._missed()
                await asyncio.sleep(0.5)

    async def _begin_or_cease(self) -> None:
        """Open the stream, or close it and poll from now on. Either way something may have been missed."""
        if not self._listening.hears:
            self.close()
        elif not self.listens:
            await until(self._subscribed().ready, _STREAM_IS_BACK_WITHIN_S)
        self._missed()

    def _hear_in_lanes(self, wanted: frozenset[int] | None) -> None:
        """Subscribe to new tasks in these lanes: at once, if some are missing so far.

        Lanes that are not wanted any more are left later.
        """
        lacks = self.lanes is not None and (wanted is None or not wanted <= self.lanes)
        now = time.monotonic()
        if self.lanes == wanted or not (lacks or now >= self._lets_go_at):
            return
        self.lanes = wanted
        self._lets_go_at = now + LETS_GO_AFTER_S
        if self._subscription is not None and self.wants_hints:
            self._feed.change(self._subscription, self._interest(hints=True), relaxed=False)
            if lacks:
                self._candidates.order_scan()

    async def _not_held(self) -> list[str]:
        """Return the ids of tasks that run here and that this worker does not seem to hold any more."""
        held = {id_: execution.running_id for id_, execution in self._executions.items() if not execution.ended}
        return sorted(held.keys() - await held_of(self._store, held)) if held else []

    def _heard(self, change: Change) -> None:
        if change.collection == self._store.tasks:
            if change.operation in ("insert", "replace"):
                self._heard_of_new(change)
            elif change.operation == "update" and change.stamp is not None:
                self._heard_of_update(change)
            elif change.operation == "delete":
                self._heard_of_end(change)
            elif change.operation in ("drop", "rename"):
                self._dropped = True
                self._something.set()
        elif change.operation == "dropDatabase":
            self._dropped = True
            self._something.set()
        elif change.collection == self._store.queues:
            self._queues_changed = True
            self._something.set()
        elif change.collection == self._store.workers and change.id == self._worker_id:
            self._orders_changed = True
            self._something.set()

    def _missed(self) -> None:
        """There was a gap: look at everything."""
        self._candidates.order_scan()
        self._inserted_tasks.look_soon()
        self._queues_changed = self._orders_changed = True
        self._concerned.update(self._executions, self._candidates.being_claimed)
        self._something.set()

    def _heard_of_new(self, change: Change) -> None:
        task = change.inserted
        if task is not None and change.is_to_be_accepted:
            self._inserted_tasks.heard_of(change.id, task.get("name"))
            return
        if task is None or not isinstance(change.id, str) or task.get("name") not in self._names:
            return
        queue, moment = task.get("queue"), task.get("next_claim_time")
        if not isinstance(queue, str) or not isinstance(moment, datetime | None):
            logger.warning("the document %.200r is not a taskmesh task: left alone", change.id)
            return
        if moment is None:
            return  # it waits for others, or was refused: the stream tells of it where somebody reads events
        if self._from is not None and queue not in self._from:
            return
        self._queues.heard_of(queue, task["name"])
        option = task.get("task_option", {})
        named = option.get("specific_worker_ids", [])
        needs = task.get("needs") or ()
        if not self._me.is_allowed(named) or not self._me.has(needs):
            return
        wanted = option.get("concurrent_worker_cnt")
        wanted = wanted if isinstance(wanted, int) else 1
        place = 0 if named else self._partitions.place_to_hear(change.id, queue, needs, wanted)
        if place > _LAST_PLACE_TO_TRY:
            return
        if queue in self._queues.paused:
            return  # when it opens, a scan is ordered
        if self._candidates.is_behind(queue, task.get("group")):
            return  # others of its group go first, and are read with it
        self._lag_s = max(0.0, time.monotonic() - self._clock.monotonic(change.time))
        if self._lag_s > _TOO_LATE_S:
            self._candidates.missed()  # the task of this hint has most likely been claimed by now
            return
        priority = option.get("priority", 0)
        self._offer(
            change.id,
            queue,
            moment,
            change.time,
            number_of(task, moment),
            priority if isinstance(priority, int) else 0,
            0,
            place,
            task.get("group"),
        )

    def _offer(
        self,
        id_: str,
        queue: str,
        moment: datetime,
        written: datetime,
        number: int,
        priority: int,
        fail_cnt: int,
        place: int,
        group: str | None,
    ) -> None:
        # What was due when it was written is due: only of what is not, the error of our clock decides when it is tried.
        timed = moment > written
        due = self._clock.monotonic(moment) if timed else time.monotonic()
        if place:
            self._backup_claims.add(id_, due + 4 * self._lag_s, place)  # where all are slow, nobody is neglected yet
        elif not self._candidates.taken_meanwhile(id_) and self._candidates.offer(
            Candidate(id_, queue, due, due, number, priority, fail_cnt, group, timed)
        ):
            self._candidates.ready.set()

    def _heard_of_update(self, change: Change) -> None:
        assert change.stamp is not None
        stamp = read_stamp(change.stamp)
        if stamp.kind in STOPPING:
            self._heard_of_end(change)
        # A changed option may open a gate that depends on no time: which workers the task names.
        opened = change.next_claim_time is not None or stamp.kind == "option_changed"
        if opened and isinstance(change.id, str) and change.id.partition(":")[0] in self._names:
            self._candidates.came_back(change.id)
            place = self._partitions.place_of_any(change.id) if stamp.for_any_worker else 0
            if place > _LAST_PLACE_TO_TRY:
                return
            if place and self._from is None and change.next_claim_time is not None:
                due = max(time.monotonic(), self._clock.monotonic(change.next_claim_time))
                self._backup_claims.add(change.id, due + 4 * self._lag_s, place)
                return
            self._woken[change.id] = change.time
            self._something.set()

    def _heard_of_end(self, change: Change) -> None:
        """Something may have ended an execution that is here, or one whose claim has not been answered yet.

        The event may be late, and be about an execution that has ended: the task says what is true of this one.
        """
        if isinstance(change.id, str) and (
            change.id in self._executions or change.id in self._candidates.being_claimed
        ):
            self._concerned.add(change.id)
            self._something.set()

    async def run_once(self) -> None:
        """Follow up what hints have left open."""
        if self._dropped:
            self._dropped = False
            logger.warning("the collection %s was dropped or renamed: creating its indexes again", self._store.tasks)
            try:
                await schema.create(self._store)
            except PyMongoError:
                self._dropped = True
                raise
            self._candidates.order_scan()
        if self._queues_changed:
            self._queues_changed = False
            self._next_queues = time.monotonic() + _QUEUES_EVERY_S
            await self._queues.read()
        if self._orders_changed:
            self._orders_changed = False
            await self._orders.read()
        woken, self._woken = self._woken, {}
        if woken:
            await self._look_at_woken(woken)
        concerned, self._concerned = self._concerned, set()
        if landing := concerned & self._candidates.being_claimed:
            self._concerned |= landing
            asyncio.get_running_loop().call_later(_CLAIM_LANDS_S, self._something.set)
        if concerned:
            await self._look_at_running([self._executions[id_] for id_ in concerned if id_ in self._executions])

    async def _look_at_woken(self, woken: Mapping[str, datetime]) -> None:
        """Read what the places of tasks in the queue depend on, after they became claimable again."""
        for row in await look_up(self._store, self._me, list(woken)):
            if row.claim_time == NEVER or (self._from is not None and row.queue not in self._from):
                continue
            place = 0 if row.named else self._partitions.place_to_hear(row.id, row.queue, row.needs, row.wanted)
            if place <= _LAST_PLACE_TO_TRY:
                moment = max(filter(None, (row.claim_time, row.next_claim_time)))
                self._queues.heard_of(row.queue, row.id.partition(":")[0])
                written = woken[row.id]
                self._offer(
                    row.id, row.queue, moment, written, row.number, row.priority, row.fail_cnt, place, row.group
                )

    async def _look_at_running(self, executions: list[Execution]) -> None:
        """Ask whether these executions still hold their tasks, and apply changed options."""
        found: dict[str, Document] = {
            task["_id"]: task for task in await get(self._store, [e.id for e in executions], params=False)
        }
        for execution in executions:
            task = found.get(execution.id)
            reason = why_stopped(task, execution.running_id, self._me)
            if reason is None:
                assert task is not None
                self._pinger.option_changed(execution, task["task_option"])
            else:
                execution.stop(reason)
