"""The claimer: sleeps until a candidate is due and a slot is free, then claims as many tasks as there are slots, as one set.

If the answer to a claim is lost, or the server gives up half-way, the claimer asks what its `running_id` has won: those tasks
are executed, the rest is tried again in smaller sets, and a document that holds up a set is set aside. Nothing is won twice. If
the process dies after a claim, the leases run out and other workers take over.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Collection, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from pymongo.errors import OperationFailure, PyMongoError

from taskmesh.consumer.candidates.claim_filter import ClaimFilter
from taskmesh.consumer.candidates.claim_queue import Candidate, ClaimQueue
from taskmesh.consumer.candidates.limits import Admission, Limits
from taskmesh.consumer.candidates.queues import Queues
from taskmesh.consumer.executor import Executor
from taskmesh.consumer.life import Life
from taskmesh.consumer.observer import Wait
from taskmesh.consumer.run.executions import Executions
from taskmesh.consumer.run.finisher import Finisher
from taskmesh.consumer.settings import Settings
from taskmesh.consumer.timing import until
from taskmesh.consumer.write_times import WriteTimes
from taskmesh.store import Store
from taskmesh.store.claim import claim, claim_one, fields_of_claimed, won
from taskmesh.store.mongodb.driver import Document
from taskmesh.store.mongodb.server_errors import is_over_deadline, is_passing, is_unconfirmed

logger = logging.getLogger("taskmesh.claimer")

_MAX_IN_FLIGHT = 2
_LEAST_DEADLINE_MS = 300
_MOST_DEADLINE_MS = 3_000
_LOCKED_PAUSES_S = 0.1, 3.0
"""The first and the longest pause for a task whose claim missed its deadline: a slow server recovers soon, a transaction may
take a minute."""
_REFUSED_PAUSES_S = 1.0, 30.0
"""The first and the longest pause for a task whose claim failed with another error: most likely its document is corrupt."""
_HELD_OFF_PAUSES_S = 0.1, 5.0
"""The first and the longest pause of all claims, if all of them fail with one error that is not about documents (a revoked
right, an invalid filter)."""
_SPENT_SHARE = 0.2
"""How much of a lease may be used up when its execution starts. All leases of a set begin when the claim begins, even
if it then waits for a locked document."""
_CONFIRMED_WITHIN_S = 5.0
"""How long to wait until a majority has confirmed a claim, as long as for an outcome."""
_READ_WITHIN_S = 60.0
"""How long to try to read what a claim has won. After that its leases are left to run out."""
_ASK_AGAIN_S = 0.1
"""When to go on after `on_claim` lets nothing be claimed, a queue's limits cannot be asked, or a claim has no reply."""
_SECOND_LOOK_S = 0.025
_MAX_SET = 1_000


class Claimed(NamedTuple):
    """What became of a claim."""

    won: set[str]
    answered: bool = True
    """Whether that is certainly all: nothing of it can still take effect."""
    error: PyMongoError | None = None
    """Why it failed, though it may have won something."""


class Claimer:
    """Turns candidates into claimed documents."""

    def __init__(
        self,
        store: Store,
        settings: Settings,
        candidates: ClaimQueue,
        executions: Executions,
        queues: Queues,
        limits: Limits,
        claim_filter: ClaimFilter,
        life: Life,
        executor: Executor,
        finisher: Finisher,
        write_times: WriteTimes,
        params_of: Mapping[str, Sequence[str] | None],
    ) -> None:
        """`params_of`: which params each task is given, by task name. None: all."""
        self._store = store
        self._settings = settings
        self._me = settings.claimant
        self._whole_state = settings.before is not None or settings.after is not None
        self._observer = settings.observer
        self._candidates = candidates
        self._executions = executions
        self._queues = queues
        self._limits = limits
        self._claim_filter = claim_filter
        self._life = life
        self._executor = executor
        self._finisher = finisher
        self._write_times = write_times
        self._params_of = params_of
        self._in_flight: set[asyncio.Task[object]] = set()
        self._late: set[asyncio.Task[None]] = set()
        self._claims_made = 0
        self.reserved = 0
        """Slots promised to claims in flight."""
        self._pause_until = 0.0
        self._held_off_s = 0.0
        """How long claims were last paused because none was accepted. 0: they are accepted."""
        self.tried = 0
        self.won = 0

    @property
    def idle(self) -> bool:
        """Whether no claim is in flight."""
        return not self._in_flight

    async def run(self) -> None:
        """Claim for ever."""
        while True:
            self._candidates.ready.clear()
            pause = await self.run_once()
            await until(self._candidates.ready, pause)

    async def drain(self) -> None:
        """Wait until no claim is in flight, and the fate of those without an answer is known."""
        while self._in_flight or self._late:
            await asyncio.wait(self._in_flight | self._late)

    async def run_once(self) -> float | None:
        """Start all claims that can be made now. Return how long to sleep at most."""
        now = time.monotonic()
        if now < self._pause_until:
            return self._pause_until - now
        while self._life.claims and len(self._in_flight) < _MAX_IN_FLIGHT:
            free = self._executions.free_slots - self.reserved
            loop_due = self._candidates.next_loop_due()
            if free <= 0 and (loop_due is None or loop_due > now):
                return None if loop_due is None else loop_due - now
            if not self._candidates.ready_count(now):
                break
            narrowed_by = await self._claim_filter.current()
            if narrowed_by is None:
                return _ASK_AGAIN_S
            narrowed_by = self._limits.without_paused(narrowed_by)
            taken = self._candidates.take_loops(now)
            if free > 0:
                taken += self._candidates.take(min(free, self._largest_set()), now)
            candidates = [
                c
                for c in taken
                if c.queue not in self._queues.paused
                and not self._limits.is_paused(c.queue, c.group)
                and c.id not in self._executions
                and not self._candidates.is_aside(c.id)
            ]
            if self._limits.queues:
                found = self._limits.sorted_out(candidates)
                candidates = found.unlimited
                if found.admitted.candidates:
                    self._send(self._claim_admitted(found.admitted, narrowed_by), found.admitted.candidates)
                for queue, limited in found.to_ask.items():
                    self._send(self._claim_limited(queue, limited, narrowed_by), limited)
            if candidates:
                self._send(
                    self._claim_set(candidates, self._narrowed_to_their_queues(candidates, narrowed_by)), candidates
                )
        self._candidates.want_more()
        due = self._candidates.next_due(now)
        if due is None or not self._life.claims or len(self._in_flight) >= _MAX_IN_FLIGHT:
            return None
        return max(0.0, due - time.monotonic())

    def _narrowed_to_their_queues(
        self, candidates: Sequence[Candidate], narrowed_by: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Return the filter of a claim that needs no room under a limit: only tasks in the queues of these candidates.

        A task that was moved since it was found may need room in its new queue, or be in a queue that this worker does not
        serve. If no queue has limits and this worker serves all, any queue will do.
        """
        if not self._limits.queues and self._settings.queues is None:
            return narrowed_by
        return {"$and": [{**narrowed_by}, {"queue": {"$in": sorted({candidate.queue for candidate in candidates})}}]}

    def _largest_set(self) -> int:
        """Half of the slots: one half is claimed while the outcomes of the other half are recorded."""
        return min(_MAX_SET, max(1, (self._settings.concurrency + 1) // 2))

    def _send(self, claim: Coroutine[Any, Any, object], candidates: Sequence[Candidate]) -> None:
        size = sum(candidate.id not in self._settings.loop_ids for candidate in candidates)
        self.reserved += size
        # In an asyncio task that nobody cancels: a driver call that is cut off costs a connection, and its claim.
        claiming = self._store.driver.calls.go_on_alone(claim, "taskmesh claim")
        self._in_flight.add(claiming)
        claiming.add_done_callback(functools.partial(self._claimed, size))

    def _claimed(self, size: int, claiming: asyncio.Task[object]) -> None:
        self.reserved -= size
        self._in_flight.discard(claiming)
        if not claiming.cancelled() and (error := claiming.exception()) is not None:
            logger.error("unexpected error in a claim", exc_info=error)
        self._candidates.ready.set()

    async def _claim_limited(self, queue: str, candidates: list[Candidate], narrowed_by: Mapping[str, Any]) -> None:
        """Claim as many tasks as the queue's limits have room for."""
        try:
            admission = await self._admit(queue, candidates)
            await self._claim_admitted(admission, narrowed_by)
        except PyMongoError as error:  # starts that were counted are written off in time
            logger.warning("the limits of queue %s could not be asked (%s)", queue, type(error).__name__)
            self._pause(_ASK_AGAIN_S, [candidate for candidate in candidates if candidate.id not in self._executions])

    async def _admit(self, queue: str, candidates: list[Candidate]) -> Admission:
        """Ask for room. Meanwhile no scan offers the same tasks again."""
        ids = [candidate.id for candidate in candidates]
        self._candidates.being_claimed.update(ids)
        try:
            return await self._limits.admit(queue, candidates)
        finally:
            self._candidates.being_claimed.difference_update(ids)

    async def _claim_admitted(self, admission: Admission, narrowed_by: Mapping[str, Any]) -> None:
        """Claim the tasks for which there is room."""
        if not admission.candidates:
            return
        claimed = Claimed(set(), answered=False)
        try:
            claimed = await self._claim_set(admission.candidates, {"$and": [{**narrowed_by}, admission.claim_filter]})
        finally:  # whatever has happened, no slot is held for ever
            await self._limits.claimed(admission, claimed.won, answered=claimed.answered)

    async def _claim_set(self, candidates: list[Candidate], narrowed_by: Mapping[str, Any]) -> Claimed:
        """Claim a set, and start what was won."""
        claimed = await self._try(candidates, narrowed_by)
        if claimed.error is None:
            return claimed
        rest = [candidate for candidate in candidates if candidate.id not in claimed.won]
        if not is_passing(claimed.error):
            return await self._split(rest, claimed, claimed.error, narrowed_by)
        self._pause(_ASK_AGAIN_S, rest)
        return claimed

    async def _try(self, candidates: list[Candidate], narrowed_by: Mapping[str, Any]) -> Claimed:
        """Claim a set once, and start what was won."""
        ids = [candidate.id for candidate in candidates]
        running_id = self._next_running_id()
        sent = time.monotonic()
        deadline_ms = self._write_times.deadline_ms(_LEAST_DEADLINE_MS + len(ids), _MOST_DEADLINE_MS)
        self.tried += len(ids)
        self._candidates.being_claimed.update(ids)
        try:
            documents, took = await self._claim_and_read(ids, running_id, sent, narrowed_by, deadline_ms)
        except PyMongoError as error:
            if is_over_deadline(error):
                self._write_times.missed(deadline_ms)
            return await self._resolve(ids, running_id, sent, deadline_ms, error)
        finally:
            self._candidates.being_claimed.difference_update(ids)
        self._held_off_s = 0.0
        self._write_times.met(took)
        won_ids = {document["_id"] for document in documents}
        if self._observer is not None:
            waits = [_wait(candidate, sent) for candidate in candidates if candidate.id in won_ids]
            self._observer.claimed(waits, took, len(ids))
        self._begin(documents, running_id, sent, took)
        if len(documents) < len(ids):
            self._candidates.tried_in_vain += len(ids) - len(documents)
            self._look_again(candidates)
        return Claimed(won_ids)

    async def _claim_and_read(
        self, ids: list[str], running_id: str, sent: float, narrowed_by: Mapping[str, Any], deadline_ms: int
    ) -> tuple[list[Document], float]:
        """Claim a set. Return what was won, and how long the claim took."""
        settings: dict[str, Any] = {
            "closed_queues": self._queues.paused,
            "narrowed_by": narrowed_by,
            "deadline_ms": deadline_ms,
        }
        try:
            if len(ids) == 1:
                fields = fields_of_claimed(self._params_of.get(ids[0].partition(":")[0]), whole_state=self._whole_state)
                document = await claim_one(self._store, ids[0], self._me, running_id, fields=fields, **settings)
                return [document] if document is not None else [], time.monotonic() - sent
            count = await claim(self._store, ids, self._me, running_id, **settings)
        except PyMongoError as error:
            if not is_unconfirmed(error):
                raise
            # The claim has its answer, only the disks are slow: a smaller set would do no better.
            documents, is_all = await self._confirmed(ids, running_id, sent)
            if not is_all:
                raise
            return documents, time.monotonic() - sent
        took = time.monotonic() - sent
        return await self._read_won(ids, running_id, sent, count) if count else [], took

    async def _read_won(
        self, ids: list[str], running_id: str, sent: float, count: int, *, majority: bool = False
    ) -> list[Document]:
        """Read what was won, in the order of the candidates. Raises the error if that cannot be read in time."""
        pause = 0.02
        while True:
            try:
                documents = await won(
                    self._store,
                    ids,
                    running_id,
                    self._params_of,
                    whole_state=self._whole_state,
                    majority=majority,
                    count=count or None,
                )
            except PyMongoError as error:
                lasts = time.monotonic() - sent > _READ_WITHIN_S
                if lasts or not (is_passing(error) or is_over_deadline(error)):
                    raise
                await asyncio.sleep(pause)
                pause = min(pause * 2, 1.0)
            else:
                place = {id_: place for place, id_ in enumerate(ids)}
                return sorted(documents, key=lambda document: place[document["_id"]])

    def _next_running_id(self) -> str:
        """Return the fencing token of all that one claim wins. No other claim of any worker has it."""
        self._claims_made += 1
        return f"{self._settings.instance}-{self._claims_made:x}"

    def _begin(self, documents: list[Document], running_id: str, sent: float, took: float) -> None:
        """Start what was won. Give back the tasks whose lease has become too short during the claim, which `took` so long."""
        self.won += len(documents)
        to_start = []
        for document in documents:
            self._candidates.no_longer_aside(document["_id"])
            lease_s = document["task_option"]["worker_timeout_ms"] / 1000
            if took > _SPENT_SHARE * lease_s or not self._life.claims:
                self._give_back(document["_id"], running_id)
            else:
                to_start.append(document)
        self._executor.start(to_start, running_id, sent)

    def _give_back(self, id_: str, running_id: str) -> None:
        """Give back a task that was won, or may have been, and does not start."""
        slot = self._limits.given_back(id_)
        self._finisher.release(id_, running_id, functools.partial(self._limits.free, slot))

    async def _resolve(
        self, ids: list[str], running_id: str, sent: float, deadline_ms: int, error: PyMongoError
    ) -> Claimed:
        """After an error, find out what the claim has won, and start it."""
        if passing := is_passing(error):
            logger.warning("no reply to a claim of %d tasks: asking which of them it won", len(ids))
        documents: list[Document] = []
        is_all = False
        try:
            documents, is_all = await self._confirmed(ids, running_id, sent)
        except PyMongoError as why:
            logger.warning("what a claim of %d tasks has won cannot be read, and is given back (%.200s)", len(ids), why)
        self._begin(documents, running_id, sent, time.monotonic() - sent)
        won_ids = {document["_id"] for document in documents}
        if passing:
            late = asyncio.get_running_loop().create_task(
                self._give_back_late(set(ids) - won_ids, running_id, deadline_ms)
            )
            self._late.add(late)
            late.add_done_callback(self._late.discard)
        elif not is_all:
            for id_ in set(ids) - won_ids:
                self._give_back(id_, running_id)
        self._candidates.want_more()
        return Claimed(won_ids, is_all and not passing, error)

    async def _confirmed(self, ids: list[str], running_id: str, sent: float) -> tuple[list[Document], bool]:
        """Return what an unanswered claim has won, as confirmed by a majority, and whether that is all that the primary shows.

        The rest is given back. A primary that has lost the majority goes on for a while, and shows what will be rolled back.
        """
        while True:
            shown = await self._read_won(ids, running_id, sent, 0)
            confirmed = await self._read_won(ids, running_id, sent, 0, majority=True) if shown else []
            if len(confirmed) >= len(shown) or time.monotonic() - sent > _CONFIRMED_WITHIN_S:
                return confirmed, len(confirmed) >= len(shown)
            await asyncio.sleep(0.05)

    async def _give_back_late(self, ids: Collection[str], running_id: str, deadline_ms: int) -> None:
        """Give back what the claim may have won since it was asked, after the server must have given up."""
        await asyncio.sleep(deadline_ms / 1000 + 0.2)
        for id_ in ids:
            self._finisher.release(id_, running_id)

    async def _split(
        self, rest: list[Candidate], claimed: Claimed, error: PyMongoError, narrowed_by: Mapping[str, Any]
    ) -> Claimed:
        """Try smaller sets, and set aside the document that holds them up. If all fail alike, no document is to blame.

        `rest`: what the claim that failed with this error has not won. Return what all of them together have.
        """
        if len(rest) <= 1:
            for candidate in rest:
                self._set_aside(candidate, error)
            return claimed
        parts = [rest[i::8] for i in range(min(8, len(rest)))]
        tries = await asyncio.gather(*(self._try(part, narrowed_by) for part in parts))
        refused = [
            (each, each.error, [candidate for candidate in part if candidate.id not in each.won])
            for part, each in zip(parts, tries, strict=True)
            if each.error is not None and not is_passing(each.error)
        ]
        left_over = [candidate for *_, left in refused for candidate in left]
        all_fail_alike = len(refused) == len(parts) and _are_alike([error for _, error, _ in refused])
        if all_fail_alike and not all(self._candidates.was_aside(candidate.id) for candidate in left_over):
            self._hold_off(left_over, refused[0][1])
        else:
            smaller = (self._split(left, each, error, narrowed_by) for each, error, left in refused)
            tries += await asyncio.gather(*smaller)
        of_all = [claimed, *tries]
        return Claimed(set[str]().union(*(each.won for each in of_all)), all(each.answered for each in of_all), error)

    def _hold_off(self, candidates: list[Candidate], error: PyMongoError) -> None:
        """Claim nothing for a while, longer each time: the result does not depend on what is claimed."""
        first, longest = _HELD_OFF_PAUSES_S
        if not self._held_off_s:
            logger.error("no task can be claimed (%s: %.200s): trying again until one can", type(error).__name__, error)
        self._held_off_s = min(2 * self._held_off_s or first, longest)
        self._pause(self._held_off_s, candidates)

    def _pause(self, pause: float, candidates: Sequence[Candidate]) -> None:
        """Claim nothing for a while, then try these again."""
        self._pause_until = time.monotonic() + pause
        for candidate in candidates:
            self._candidates.offer(candidate)

    def _set_aside(self, candidate: Candidate, error: PyMongoError) -> None:
        """Try a task again later, and later each time."""
        locked = is_over_deadline(error)
        is_new = not self._candidates.was_aside(candidate.id)
        pause = self._candidates.set_aside(candidate, *(_LOCKED_PAUSES_S if locked else _REFUSED_PAUSES_S))
        if locked and pause >= 1:
            logger.info("task %s is locked, by somebody's transaction most likely: set aside", candidate.id)
        elif not locked and is_new:
            logger.error("task %s cannot be claimed, and is set aside for a while: %.200s", candidate.id, error)

    def _look_again(self, candidates: list[Candidate]) -> None:
        """Try again, a moment later, what had only just become due: our idea of the server's clock may be off."""
        soon = time.monotonic() + _SECOND_LOOK_S
        for candidate in candidates:
            if candidate.timed and candidate.due > soon - 0.1 and candidate.id not in self._executions:
                self._candidates.offer(replace(candidate, due=soon, timed=False))


def _are_alike(errors: Sequence[PyMongoError]) -> bool:
    """Whether all these errors are the same, and not one that a locked document causes."""
    kinds = {error.code if isinstance(error, OperationFailure) else type(error) for error in errors}
    return len(kinds) == 1 and not is_over_deadline(errors[0])


def _wait(candidate: Candidate, sent: float) -> Wait:
    held_from = max(candidate.heard, candidate.since)
    return Wait(candidate.id.partition(":")[0], held_from - candidate.since, max(0.0, sent - held_from))
