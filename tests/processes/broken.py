"""The engine with one part broken at a time: gates, fencing, release, counting, what follows a lost answer, the stream.

Each breaks the process it is called in, by `replace(owner, name, by)`: `setattr` in a worker that is broken for good,
`monkeypatch.setattr` in a test. That somebody notices is shown by `tests/exhaustive/test_sabotage.py` on the rule alone, and
by `tests/chaos/test_sabotage.py` on fleets of real processes.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from typing import Any

from pymongo.errors import PyMongoError

from taskmesh.admin import fleet
from taskmesh.client import change_feed
from taskmesh.consumer.claimer import Claimed, Claimer
from taskmesh.consumer.durable import transactions
from taskmesh.consumer.executor import Executor
from taskmesh.consumer.listener import Listener
from taskmesh.consumer.run import finisher
from taskmesh.consumer.run.execution import Execution
from taskmesh.consumer.run.stop_reasons import Stop
from taskmesh.consumer.scanner import Scanner
from taskmesh.consumer.subprocess import wire
from taskmesh.consumer.subprocess.processes import Child
from taskmesh.store import claim, finish, renew, rules
from taskmesh.store.change_stream import open_stream
from taskmesh.store.pipeline import repeated
from taskmesh.store.pipeline.event_stamp import read_stamp
from taskmesh.store.queues import limits

Replace = Callable[[Any, str, Any], None]
Break = Callable[[Replace], None]


# --- gates ---


def without_gate(gate: str) -> Break:
    """The rule asks all gates but one."""

    def break_it(replace: Replace) -> None:
        whole: dict[str, Callable[..., dict[str, Any]]] = {
            "task_gates": rules.task_gates,
            "worker_gates": rules.worker_gates,
            "queue_gate": rules.queue_gate,
        }
        assert any(gate in gates(["w1"]) for gates in whole.values()), f"there is no gate {gate!r} to break"
        for name, gates in whole.items():
            replace(rules, name, _lacking(gates, gate))

    return break_it


def without_gate_and_status(gate: str) -> Break:
    """Candidates are also chosen by their status, which alone would hold: so that is broken too."""

    def break_it(replace: Replace) -> None:
        without_gate(gate)(replace)
        replace(claim, "_candidates", lambda ids, _: {"_id": ids})

    return break_it


def _lacking(gates: Callable[..., dict[str, Any]], gate: str) -> Callable[..., dict[str, Any]]:
    # A gate that stands open, and not none at all: where no gate is left there is no latest of them.
    return lambda *arguments: {name: None if name == gate else opens for name, opens in gates(*arguments).items()}


# --- fencing ---


def any_lease_will_do(replace: Replace) -> None:
    """Outcomes count though the lease is over."""

    def held(outcomes: list[finish.Outcome], _: Any) -> Any:
        running = {"$elemMatch": {"running_id": outcomes[0].running_id, "state": "RUNNING"}}
        return {"_id": {"$in": [outcome.id for outcome in outcomes]}, "task_state.worker_states": running}

    replace(finish, "still_held_by", held)


def whoever_runs_it_has_ended(replace: Replace) -> None:
    """Outcomes are written by the task alone, as engines without a fencing token do."""
    replace(finish, "still_held_by", lambda outcomes, _: {"_id": {"$in": [o.id for o in outcomes]}})
    replace(finish, "held_entry", lambda _: {"$eq": ["$$this.state", "RUNNING"]})


def pings_revive(replace: Replace) -> None:
    """A lease that is over is renewed."""
    replace(renew, "_is_mine", lambda ids, _: {"$in": ["$$this.running_id", {"$literal": ids}]})
    # As time has written it down meanwhile, the task may not be RUNNING any more.
    whole = renew._renewal

    def renewal(*arguments: Any) -> Any:
        query, pipeline = whole(*arguments)
        return {name: part for name, part in query.items() if name != "status"}, pipeline

    replace(renew, "_renewal", renewal)


# --- release, counting, derivation ---


def releases_are_charged(replace: Replace) -> None:
    """Giving back counts like a loss."""
    given_back = finish._given_back

    def charged(outcomes: list[finish.Outcome], now: Any) -> Any:
        count = {"$set": {"task_state.timeout_cnt": {"$add": ["$task_state.timeout_cnt", 1]}}}
        return [*given_back(outcomes, now), count]

    replace(finish, "_given_back", charged)


def releases_leave_the_entry(replace: Replace) -> None:
    """Giving back says so, and keeps the task."""
    replace(finish, "_given_back", lambda *_: [])


def losses_are_not_counted(replace: Replace) -> None:
    """A worker that takes over does not say what it found."""
    replace(claim, "counted_losses", dict)


def nothing_is_derived(replace: Replace) -> None:
    """Writes do not end with the derivation."""
    replace(rules, "derivation", lambda *_, **__: [])


def conflicts_are_charged(replace: Replace) -> None:
    """What the server undoes in favour of others counts as the handler's own failure."""
    replace(transactions, "_met", lambda _: None)


# --- the end of an execution ---


def cancelled_decides_nothing(replace: Replace) -> None:
    """A handler reads that it should stop when its lease is over; the worker decides that later, or never."""

    def told(self: Execution) -> bool:
        return self.stop_reason is not None or time.monotonic() >= self.lease_until

    replace(Execution, "is_told_to_stop", told)


def who_was_told_to_stop_is_not_asked(replace: Replace) -> None:
    """Whatever a handler returns counts."""
    whole = Execution.judge

    def judge(self: Execution) -> None:
        whole(self)

    replace(Execution, "judge", judge)


def closing_goes_past_the_outcome(replace: Replace) -> None:
    """What closes the coroutines of an execution ends its asyncio task, and nobody looks at that."""
    whole = Executor._handler_ended

    def look_away(self: Executor, execution: Execution, value: Any, error: BaseException | None) -> None:
        if not isinstance(error, GeneratorExit):
            whole(self, execution, value, error)

    replace(Executor, "_handler_ended", look_away)
    replace(Executor, "_task_is_over", lambda *_: None)


# --- after an answer was lost ---


def unanswered_claims_are_taken_for_won(replace: Replace) -> None:
    """Who gets no answer runs all that it asked for."""

    async def resolve(self: Any, ids: list[str], running_id: str, sent: float, *_: Any, **__: Any) -> Any:
        documents = await self._store.find({"_id": {"$in": ids}}, claim.WHOLE_FIELDS | {"params": 1})
        self._begin(documents, running_id, sent, 0.0)
        return Claimed(set(ids), answered=False)

    replace(Claimer, "_resolve", resolve)


def unanswered_claims_are_taken_for_lost(replace: Replace) -> None:
    """Who gets no answer asks for nothing, and forgets what it may have won."""

    async def resolve(*_: Any, **__: Any) -> Claimed:
        return Claimed(set(), answered=False)

    async def confirmed(*_: Any) -> tuple[list[Any], bool]:
        return [], False

    replace(Claimer, "_resolve", resolve)
    replace(Claimer, "_confirmed", confirmed)


def unanswered_outcomes_are_taken_for_recorded(replace: Replace) -> None:
    """Who gets no answer goes on to the next task."""
    whole: Any = vars(finisher)["finish"]

    async def record(*arguments: Any, **settings: Any) -> int:
        try:
            return int(await whole(*arguments, **settings))
        except PyMongoError:
            return len(arguments[2])

    replace(finisher, "finish", record)


def unanswered_outcomes_are_taken_for_lost(replace: Replace) -> None:
    """Who gets no answer takes it that somebody else has the task by now."""

    async def taken_for_lost(_: Any, outcomes: list[finish.Outcome]) -> Any:
        return dict.fromkeys(outcomes, "lost")

    replace(finisher, "whether_recorded", taken_for_lost)


# --- the stream ---


def gaps_are_not_told(replace: Replace) -> None:
    """A stream that has lost its place goes on as if nothing had been."""
    replace(change_feed.Feed, "_announce_gap", lambda _: None)


def streams_begin_anew(replace: Replace) -> None:
    """A stream that broke is opened from now on, and not behind its last event."""

    async def open_anew(
        store: Any, interest: Any, *, place: Any = None, place_is_of: Any = None, await_ms: int = 500
    ) -> Any:
        assert place is None or place_is_of is not None
        return await open_stream(store, interest, await_ms=await_ms)

    replace(change_feed, "open_stream", open_anew)


def nothing_is_scanned(replace: Replace) -> None:
    """A worker relies on what it is told."""

    async def run_once(self: Any) -> int:
        self._candidates.know_to(None)  # nothing that was told waits for a look
        return 0

    replace(Scanner, "run_once", run_once)


# --- what stops a handler, and how long that keeps its place ---


def who_is_on_his_way_out_counts_for_nothing(replace: Replace) -> None:
    """A worker claims a task though a handler of its earlier life, or an excluded one, is still at work."""
    whole = rules.with_facts

    def with_facts(now: Any, result: Any) -> Any:
        facts = whole(now, result)
        facts["$let"]["vars"]["leaving"] = []
        return facts

    replace(rules, "with_facts", with_facts)


def events_are_obeyed_unseen(replace: Replace) -> None:
    """Whatever an event says of a task is done to what runs of it by now."""
    heard = Listener._heard_of_update

    def obeyed(self: Any, change: Any) -> None:
        running = self._executions.get(change.id)
        if running is not None and read_stamp(change.stamp).kind == "cancelled":
            running.stop(Stop.CANCELLED)
        heard(self, change)

    replace(Listener, "_heard_of_update", obeyed)


# --- verbs that are repeated ---


def repeated_verbs_are_for_whatever_stands_there(replace: Replace) -> None:
    """Who repeats a verb does it to the key, whoever published what stands there by then."""
    replace(repeated, "same", lambda task: {"_id": task["_id"]})


def repeated_verbs_are_done_again(replace: Replace) -> None:
    """Who repeats a verb does not ask whether it was done already."""
    replace(repeated, "unchanged_by", lambda task, _: repeated.same(task))


# --- child processes ---


def errors_of_children_are_made_by_their_class(replace: Replace) -> None:
    """An error that a handler's child process tells is made as unpickling would: by code of its class."""

    def made(told: Any) -> Any:
        found: Any = importlib.import_module(told["module"])
        for part in told["class"].split("."):
            found = getattr(found, part)
        return found(*told["args"])

    replace(wire, "_made", made)


def children_trust_their_leases(replace: Replace) -> None:
    """A handler's child process is never told until when it may go on: it relies on its worker to be awake."""
    replace(Child, "lease_until", lambda *_: None)


# --- limits ---


_COUNTED = {"$filter": {"input": {"$ifNull": ["$starts", []]}, "cond": {"$gt": ["$$this.leaves", "$$NOW"]}}}


def a_bucket_leaves_with_its_first_start(replace: Replace) -> None:
    """What started last in it is forgotten before its window is over."""
    one = [{"n": {"$sum": "$$counted.n"}, "leaves": {"$min": "$$counted.leaves"}}]
    bucket = {"$let": {"vars": {"counted": _COUNTED}, "in": {"$cond": [{"$eq": ["$$counted", []]}, [], one]}}}
    _count_starts_by(replace, bucket)


def starts_are_kept_one_by_one(replace: Replace) -> None:
    """Each booking has an element of its own, for as long as the window lasts."""
    _count_starts_by(replace, _COUNTED)


def _count_starts_by(replace: Replace, counted: Any) -> None:
    """Keep this of the starts of a queue, whatever is kept of those of its groups."""
    whole = limits._in_buckets

    def in_buckets(now: Any, starts: str, *sizes: Any) -> Any:
        return counted if starts == "starts" else whole(now, starts, *sizes)

    replace(limits, "_in_buckets", in_buckets)


# --- ids ---


def anything_is_an_id(replace: Replace) -> None:
    """What is no text enters a query all the same."""
    replace(fleet, "checked_worker_id", lambda worker_id: worker_id)


GATES: dict[str, Break] = {
    "gate unfinished": without_gate_and_status("unfinished"),
    "gate unexpired": without_gate_and_status("unexpired"),
    "gate started": without_gate("started"),
    "gate room": without_gate("room"),
    "gate retries left": without_gate_and_status("retries left"),
    "gate timeouts left": without_gate_and_status("timeouts left"),
    "gate delay asked for": without_gate("delay asked for"),
    "gate worker allowed": without_gate("worker allowed"),
    "gate labels": without_gate("labels"),
    "gate not twice": without_gate("not twice"),
    "gate retry delay": without_gate("retry delay"),
    "gate queue": without_gate("queue"),
}
WRITES: dict[str, Break] = {
    "fencing by lease": any_lease_will_do,
    "fencing by execution": whoever_runs_it_has_ended,
    "fencing of pings": pings_revive,
    "release: charged": releases_are_charged,
    "release: entry kept": releases_leave_the_entry,
    "count of losses": losses_are_not_counted,
    "derivation": nothing_is_derived,
}
ENDING: dict[str, Break] = {
    "told to stop: not decided": cancelled_decides_nothing,
    "told to stop: not judged": who_was_told_to_stop_is_not_asked,
    "outcome: gone past": closing_goes_past_the_outcome,
}
RESUMING: dict[str, Break] = {
    "claims without an answer: taken for won": unanswered_claims_are_taken_for_won,
    "claims without an answer: taken for lost": unanswered_claims_are_taken_for_lost,
    "outcomes without an answer: taken for recorded": unanswered_outcomes_are_taken_for_recorded,
    "outcomes without an answer: taken for lost": unanswered_outcomes_are_taken_for_lost,
    "stream: gaps are not told": gaps_are_not_told,
    "stream: begins anew": streams_begin_anew,
    "scan: none": nothing_is_scanned,
}
CHILDREN: dict[str, Break] = {
    "errors of children: made by their class": errors_of_children_are_made_by_their_class,
    "leases of children: not told": children_trust_their_leases,
}
REPEATING: dict[str, Break] = {
    "repeated verbs: for whatever stands there": repeated_verbs_are_for_whatever_stands_there,
    "repeated verbs: done again": repeated_verbs_are_done_again,
    "ids: anything": anything_is_an_id,
}
CHARGING: dict[str, Break] = {
    "conflicts: charged": conflicts_are_charged,
}
LIMITS: dict[str, Break] = {
    "rate: a bucket leaves with its first start": a_bucket_leaves_with_its_first_start,
    "rate: starts are kept one by one": starts_are_kept_one_by_one,
}
STOPPING: dict[str, Break] = {
    "places: of nobody on his way out": who_is_on_his_way_out_counts_for_nothing,
    "events: obeyed unseen": events_are_obeyed_unseen,
}
BROKEN = GATES | WRITES | ENDING | RESUMING | REPEATING | CHARGING | CHILDREN | LIMITS | STOPPING
