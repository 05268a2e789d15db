"""Mutants of the engine: each breaks one gate, one guard or one thing that a verb writes. `test_mutations.py` finds them out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from taskmesh.store import claim, control, finish, publish, renew, rules, settle, signals, steps
from taskmesh.store.mongodb import driver
from taskmesh.store.pipeline import restart
from taskmesh.store.relations import dependencies, sequences
from tests.properties.mutation import ANYTHING, Mutant, changed, constant, replaced, result, sent, unguarded, written

_TASK_GATES = (
    "unfinished",
    "unexpired",
    "started",
    "room",
    "retries left",
    "timeouts left",
    "delay asked for",
    "suspended",
)
_LINK_GATES = ("dependencies", "flow", "sequence")
"""Found out by the documents on the shelf, which have all that they are about."""
_WORKER_GATES = ("worker allowed", "not twice", "retry delay")
"""But *labels*: `test_claim_rule` asks for them."""
_OPEN_IN_TIME = ("started", "room", "delay asked for", "suspended", "not twice", "retry delay")
_OWN = {"$in": ["$$this.running_id", ANYTHING]}
"""How the verbs of an execution find their entry."""


def gates() -> Iterator[tuple[str, Mutant]]:
    """Always open, never open, a millisecond off."""
    for gate in (*_TASK_GATES, *_WORKER_GATES):
        yield f"{gate}: always open", _gate(gate, lambda _: None)
        yield f"{gate}: never open", _gate(gate, lambda _: rules.NEVER)
        if gate in _OPEN_IN_TIME:
            yield f"{gate}: a millisecond early", _gate(gate, lambda opens: {"$subtract": [opens, 1]})
            yield f"{gate}: a millisecond late", _gate(gate, _a_millisecond_late)
    yield "queue: always open", replaced(rules, "queue_gate", lambda _: {"queue": None})
    yield "queue: never open", replaced(rules, "queue_gate", lambda _: {"queue": rules.NEVER})


def links() -> Iterator[tuple[str, Mutant]]:
    """What others open, and what is derived of tasks that wait for others, or in line: found out by the shelf."""
    for gate in _LINK_GATES:
        yield f"{gate}: always open", _gate(gate, lambda _: None)
        yield f"{gate}: never open", _gate(gate, lambda _: rules.NEVER)
    concerned = {"$or": [rules.HAS_DEPENDENTS, ANYTHING, ANYTHING, _HAS_A_LINE]}
    yield "nobody is asked when a place in line is left", result(rules, "derivation", concerned, rules.HAS_DEPENDENTS)
    yield "nobody is asked when a dependency ends", result(rules, "derivation", concerned, _HAS_A_LINE)
    waits_anew = {"$and": [ANYTHING, rules._waits_for_others]}
    yield "nobody is asked about what waits anew", result(rules, "derivation", waits_anew, False)
    yield "two marks are one", replaced(rules, "next_mark", lambda now: now)
    pending = {"$and": [{"$not": ANYTHING}, rules.HAS_DEPENDENTS]}
    yield "what others wait for is not pending", result(rules, "derivation", pending, False)
    kept = {"$and": [rules.HAS_DEPENDENTS, {"$cond": ANYTHING}]}
    yield "what others wait for is not kept", result(rules, "derivation", kept, False)
    yield "what blocks its line is not kept", result(rules, "derivation", _BLOCKS, False)
    back_or_there = rules.derivation()[-1]["$set"]["task_state.in_line"]["$cond"][0]
    _, still_there = back_or_there["$or"]
    yield "begun anew, it is not back in line", result(rules, "derivation", back_or_there, still_there)
    yield "begun anew, it has its old place", replaced(rules, "NEXT_PLACE", {"$ifNull": ["$task_state.place", 0]})
    before_its_turn = {"$cond": [{"$and": [ANYTHING, _HAS_A_LINE]}, rules.NEVER, None]}
    yield "begun anew, it seems to have its turn", result(rules, "derivation", before_its_turn, None)
    yield "what is finished stays in line", result(rules, "derivation", still_there, _IN_LINE)


_HAS_A_LINE = {"$gt": [rules.LINE, None]}
_IN_LINE = {"$eq": ["$task_state.in_line", True]}
_BLOCKS = {"$eq": ["$task_state.on_sequence_failure", "block"]}


def _a_millisecond_late(opens: Any) -> Any:
    """But not later than never, which no date can say."""
    return {"$cond": [{"$lt": [opens, rules.NEVER]}, {"$add": [opens, 1]}, opens]}


def _gate(name: str, change: Callable[[Any], Any]) -> Mutant:
    def apply(patch: pytest.MonkeyPatch) -> None:
        for function in ("task_gates", "worker_gates"):
            original = getattr(rules, function)

            def mutated(argument: Any, original: Any = original) -> dict[str, Any]:
                return {n: change(opens) if n == name else opens for n, opens in original(argument).items()}

            patch.setattr(rules, function, mutated)

    return apply


def facts() -> Iterator[tuple[str, Mutant]]:
    """What is live, lost, expired, used up."""
    yield "a lease lives a millisecond longer", result(rules, "is_live", "$gt", "$gte")
    yield "a lease is lost a millisecond late", result(rules, "is_lost", "$lte", "$lt")
    yield "a task expires a millisecond late", result(rules, "_expired", "$lte", "$lt")
    yield "one SUCCESS more is asked for", constant(rules, "_succeeded", "$gte", "$gt")
    yield "one failure fewer is allowed", constant(rules, "_retries_used_up", "$gt", "$gte")
    yield "one lost lease fewer is allowed", constant(rules, "_timeouts_used_up", "$gt", "$gte")
    yield "room for one more", constant(rules, "_room_opens", "$lt", "$lte")
    yield "room as soon as one lease ends", constant(rules, "_room_opens", {"$arrayElemAt": [ANYTHING, "$$over"]}, None)
    yield "TaskFailed is like any failure", constant(rules, "_failed_for_good", True, "no")


def derived() -> Iterator[tuple[str, Mutant]]:
    """What follows from the entries is not written down, or wrongly."""
    for module in (claim, finish, renew, settle, control, publish):
        yield f"derivation skipped in {module.__name__}", _underived(module)
    yield "a refused claim derives all the same", written("claim", {"$ne": ["$_claim.refused", True]}, True)
    yield "next_claim_time of nobody in particular", replaced(rules, "_opens_for_some_worker", None)
    yield "settle_time before the last lease ends", result(rules, "_settle_time", "$max", "$min")
    yield "settle_time of expiring tasks alone", result(rules, "_settle_time", "$or", "$and")
    yield "a task that runs moves at once", replaced(rules, "_moves", {"$gt": [rules.MOVES_TO, None]})
    yield "a task whose worker is gone moves when somebody comes", result(rules, "_settle_time", rules.MOVES_TO, None)
    yield "finish_time moves with every write", result(rules, "derivation", "$finish_time", None)
    yield "a dead letter stays where it failed", result(rules, "derivation", "$task_option.on_fail", None)
    yield (
        "a dead letter forgets where it came from",
        result(rules, "derivation", {"$ifNull": [rules.HOME, "$queue"]}, "$queue"),
    )
    yield "a success is kept like a failure", result(rules, "derivation", *_RETENTION)


_RETENTION = ("$task_option.retain_success_ms", "$task_option.retain_failed_ms")


def _underived(module: Any) -> Mutant:
    class Underived:
        def __getattr__(self, name: str) -> Any:
            return (lambda *_, **__: []) if name == "derivation" else getattr(rules, name)

    return replaced(module, "rules", Underived())


def places() -> Iterator[tuple[str, Mutant]]:
    """A handler that was stopped from outside does not keep its place until it has ended."""
    yield "whoever is on his way out counts for nothing", replaced(rules, "LEAVING", {"$literal": []})
    yield "whoever is on his way out takes no room", constant(rules, "_room_opens", {"$size": "$$leaving"}, 0)
    yield "whoever is on his way out may come in again", result(rules, "_own_entry_ends", "$$leaving", [])
    yield "who begins a task anew forgets who is on his way out", replaced(rules, "sent_away", lambda *_: "$$REMOVE")
    yield "a document goes before the places it keeps", result(rules, "derivation", "$_derived.leases_end", None)
    yield "a deleted task is still there", constant(rules, "_deleted", "$gt", "$lt")
    yield "the end of a handler frees no place", written("finish", _NOT_MY_PLACE, True)


_NOT_MY_PLACE = {"$not": [{"$in": [{"$concat": ANYTHING}, ANYTHING]}]}


def guards() -> Iterator[tuple[str, Mutant]]:
    """A condition that a verb restates, dropped: fencing above all."""
    yield "an outcome of a lease that ran out counts", unguarded("finish", "$expr")
    yield "an outcome after cancel counts", unguarded("finish", "status")
    yield "progress of a lease that ran out counts", unguarded("report", "$expr")
    yield "progress after cancel counts", unguarded("report", "status")
    yield (
        "a lease that ran out is renewed",
        result(renew, "_is_mine", {"$gt": ["$$this.ping_expire_time", ANYTHING]}, True),
    )
    yield "a ping after cancel renews", unguarded("ping", "status")
    for verb in ("finish", "report", "ping"):
        yield f"{verb}: whoever writes, counts", sent(verb, _unfenced)
    yield "the end of a handler is noted whatever the status", _stopped_without_status()
    yield "finished tasks are cancelled", unguarded("cancel", "$expr")
    yield "running tasks are retried", unguarded("retry", "$expr")
    yield "an outdated option is overwritten", unguarded("set_option", "$expr")
    yield "not_update_running updates", unguarded("publish", "$expr")
    yield "clean and run_again disturb a running task", replaced(publish, "IS_RUNNING", {"$literal": False})
    yield "settle does not wait", unguarded("settle", "$expr")
    yield "a claim wins unseen", written("claim", {"$lte": [{"$max": ANYTHING}, ANYTHING]}, True)


def _unfenced(query: Any, pipeline: Any) -> tuple[Any, Any]:
    """Any execution of the task for any other."""
    query.pop("task_state.worker_states", None)
    return changed(query, _OWN, True), changed(pipeline, _OWN, True)


def _stopped_without_status() -> Mutant:
    cancelled = {"$eq": ["$status", "CANCELLED"]}

    def change(query: Any, pipeline: Any) -> tuple[Any, Any]:
        for either in query.get("$or", ()):
            either.pop("status", None)
        return query, changed(pipeline, cancelled, True)

    return sent("finish", change)


def verbs() -> Iterator[tuple[str, Mutant]]:
    """What they write."""
    yield "a release is charged", sent("finish", _charged)
    yield "a delay asked for binds only who asked", replaced(finish, "_resume_time", lambda *_: {})
    yield "a delay asked for is not exact", written("finish", "retry_time", "retry_about")
    yield "a wish for one more run is forgotten at the end", _unwished(finish)
    yield "a run does not know which wish it serves", written("claim", "$task_state.wanted", None)
    yield "progress does not start the count of timeouts anew", written("report", "timeout_cnt", "nothing")
    yield "logs start the count of timeouts anew", replaced(finish, "_progressed", _logs_count_too)
    yield "a ping renews by too little", _renewed_too_briefly
    yield "a lease is as long as the ping's interval", written("claim", *_LEASE)
    yield "a claim does not count the leases that ran out", replaced(claim, "counted_losses", dict)
    yield "settle does not count the leases that ran out", replaced(settle, "counted_losses", dict)
    yield "a claim keeps the leases that ran out", written("claim", {"$not": [{"$and": ANYTHING}]}, True)
    yield "retry leaves the delay", replaced(control, "_without_delay", lambda _: rules.ENTRIES)
    yield "a failure does not start the count of timeouts anew", sent("finish", _timeouts_go_on("failed"))
    yield "a snooze does not start the count of timeouts anew", sent("finish", _timeouts_go_on("snoozed"))
    yield "a conflict is not counted", sent("finish", _conflicts_stay)
    yield "the last delay asked for counts, not the latest", replaced(finish, "_resume_time", _last_delay)
    yield "failures that are dropped are not counted", result(finish, "_oldest_fails_dropped", *_UNCOUNTED)
    yield "a failure for good is dropped among others", result(finish, "_oldest_fails_dropped", *_DROPPABLE)
    yield "a wish for one more run is forgotten by settle", _unwished(settle)


_UNCOUNTED = ("task_state.dropped_fail_cnt", "task_state.nothing")
_DROPPABLE = ({"$ne": ["$$this.final", True]}, True)
_LEASE = ("$task_option.worker_timeout_ms", "$task_option.ping_interval_ms")


def records() -> Iterator[tuple[str, Mutant]]:
    """What executions record, what they wait for, and what others signal."""
    yield "a record of a lease that ran out counts", sent("write_record", _recorded_by_anybody)
    yield "a record is written twice", sent("write_record", lambda q, p: (changed(q, _UNKNOWN, True), p))
    yield "a record renews no lease", written("write_record", {"$mergeObjects": ["$$this", ANYTHING]}, "$$this")
    yield "a record renews every lease", written("write_record", {"$lte": [_LEASE_ENDS, ANYTHING]}, True)
    yield "a record is no progress", written("write_record", "timeout_cnt", "nothing")
    for condition in ("status", *(f"task_state.{name}" for name in _OF_A_SINGLE)):
        yield f"a single record does not look at {condition}", _single_record(condition)
    for condition in ("$size", "running_id", "ping_expire_time"):
        yield f"a single record does not look at the {condition} of entries", _single_record(condition)
    yield "a signal of a known id comes twice", _signalled_again(rules.SIGNALS)
    yield "a signal that was consumed comes again", _signalled_again(rules.STEPS)
    yield "a signal wakes nobody", written("signal_alone", "suspended_until", "nothing")
    yield "a signal wakes whoever waits", written("signal_alone", {"$eq": [_WAITS_FOR, ANYTHING]}, True)
    yield "a signal ends another wait too", written("signal_alone", {"$eq": ["$$this.id", _WAIT]}, True)
    yield (
        "a signal that ends a wait is lost",
        written("signal_alone", {"$mergeObjects": ["$$this", ANYTHING]}, "$$this"),
    )
    yield "a signal changes a wait that has ended", written("signal_alone", _HAS_NOT_ENDED, True)
    yield (
        "a signal adds nothing to its record",
        written("signal_alone", {"$add": ["$$this.size", ANYTHING]}, "$$this.size"),
    )
    yield (
        "a signal adds nothing to the records",
        written("signal_alone", {"$add": [_RECORDS_BYTES, ANYTHING]}, _RECORDS_BYTES),
    )
    yield "a mailbox has the size of its last signal", written("signal_alone", *_LAST_SIGNAL)
    for name in ("start_time", "resume_time"):
        yield f"who is woken forgets its {name}", result(signals, "_woken", f"$task_state.{name}", None)
    yield "who is woken may be claimed since it was made", written("signal_alone", *_WOKEN)
    yield (
        "who waits no more is woken",
        result(signals, "_waiting", {"$gt": ["$task_state.suspended_until", ANYTHING]}, {}),
    )
    yield "who has failed is woken as if it had not", result(signals, "_waiting", {"$size": 0}, {"$type": "array"})
    yield "a full mailbox takes more", sent("signal_alone", lambda q, p: (changed(q, 1_000_000, 9_000_000), p))
    yield "a finished task takes signals", sent("signal_alone", lambda q, p: (changed(q, ["INIT", "RUNNING"], _ANY), p))
    yield "who suspends does not look for signals", result(finish, "_suspended", {"$in": ANYTHING}, False)
    yield "who suspends does so for ever", result(finish, "_suspended", {"$getField": ANYTHING}, None)
    yield "who suspends forgets its wait", result(finish, "_suspended", {"$concatArrays": ANYTHING}, rules.STEPS)
    yield (
        "a wait that is put aside at once is never over",
        result(finish, "_suspended", {"$ifNull": [{"$getField": ANYTHING}, ANYTHING]}, None),
    )
    yield "a wait forgets when it ends", _wait("$_wait.known.until", None)
    yield "a wait leaves the signal that it took", _wait({"$ne": ["$$this.id", "$_wait.oldest.id"]}, True)
    yield "a wait takes the newest signal", _wait("$first", "$last")
    yield "a mailbox keeps the size of what was taken", _wait({"$subtract": [_SIGNALS_BYTES, ANYTHING]}, _SIGNALS_BYTES)
    yield "a record that has grown is counted twice", _wait({"$subtract": [ANYTHING, ANYTHING]}, 10)
    yield "a wait that is over takes another signal", _wait({"$gt": ["$_wait.known.time", None]}, False)
    yield "a wait is never over", _wait({"$lte": ["$_until", ANYTHING]}, False)
    yield "retry forgets what was recorded", replaced(control, "values_kept", dict)
    yield "retry keeps errors", result(control, "values_kept", {"$not": [{"$gt": ["$$this.error", None]}]}, True)
    yield "expire_time binds what has begun", replaced(rules, "BEGUN", {"$literal": False})


_OF_A_SINGLE = ("steps_bytes", "timeout_cnt", "expire_time", "leaving")
_HAS_NOT_ENDED = {"$not": [{"$gt": ["$$this.time", None]}]}
_RECORDS_BYTES, _SIGNALS_BYTES = "$task_state.steps_bytes", "$task_state.signals_bytes"
_LAST_SIGNAL = ({"$add": [{"$ifNull": [_SIGNALS_BYTES, 0]}, "$_sent.size"]}, "$_sent.size")
_WOKEN = ({"$max": [*(f"$task_state.{name}" for name in ("create_time", "start_time", "resume_time")), ANYTHING]}, None)
_UNKNOWN = {"$not": [{"$in": [ANYTHING, {"$map": ANYTHING}]}]}
_LEASE_ENDS = "$$this.ping_expire_time"
_WAITS_FOR, _WAIT = "$task_state.suspended_for.event", "$task_state.suspended_for.id"
_ANY = ["INIT", "RUNNING", "SUCCESS", "FAIL", "CANCELLED", "EXPIRED"]


def _signalled_again(where: Any) -> Mutant:
    """A signal that is not looked for in the mailbox, or among what was consumed."""
    return result(signals, "_is_known", {"$in": ["$$id", {"$map": {"input": where, "in": ANYTHING}}]}, False)


def _single_record(condition: str) -> Mutant:
    """A record that is written by modifiers, without one of its conditions."""
    original = steps._by_modifiers

    def mutated(worker_id: str, outcome: Any) -> Any:
        query, changes = original(worker_id, outcome)
        entries = query["task_state.worker_states"]
        for conditions in (query, entries, entries["$elemMatch"]):
            conditions.pop(condition, None)
        return query, changes

    return replaced(steps, "_by_modifiers", mutated)


def _recorded_by_anybody(query: Any, pipeline: Any) -> tuple[Any, Any]:
    return changed(query, {"$anyElementTrue": ANYTHING}, True), pipeline


def _wait(old: Any, new: Any) -> Mutant:
    """A change to what a wait writes."""
    original = driver.find_and_update

    async def mutated(collection: Any, query: Any, stages: Any, **options: Any) -> Any:
        return await original(collection, query, changed(list(stages), old, new), **options)

    return replaced(steps, "find_and_update", mutated)


def stages() -> Iterator[tuple[str, Mutant]]:
    """What goes on by `Next`, and where it begins anew."""
    yield "a stage has the params of the one before it", result(finish, "_moved", _NEXT_PARAMS, "$params")
    yield (
        "new params of a stage are no other version",
        result(finish, "_moved", {"$gt": ["$_next.params", None]}, False),
    )
    yield "of too many stages the first is dropped", result(finish, "_moved", *_FIRST_KEPT)
    yield "a stage that goes on forgets in which group it was wanted", result(finish, "_moved", _GROUP, "$group")
    yield "a stage that goes on forgets where it was to begin", result(finish, "_moved", *_BEGINS)
    yield "who works beside it loses his place", result(finish, "_moved", {"$not": [_MINE]}, False)
    yield "who goes on keeps its own place", result(finish, "_moved", {"$not": [_MINE]}, True)
    yield "what starts over stays in its stage", replaced(restart, "in_first_stage", dict)
    yield "what has succeeded starts over in its stage", replaced(publish, "in_first_stage", dict)
    yield (
        "what starts over goes where its stage was wanted",
        result(restart, "in_first_stage", {"$and": ANYTHING}, False),
    )
    for module in (restart, control, publish):
        last_params = replaced(module, "first_params_if", lambda _: "$params")
        yield f"what starts over has the params of its stage, in {module.__name__}", last_params
    yield "signals are lost on the way to the next stage", replaced(finish, "_moved", _signals_lost)
    yield (
        "a signal that an earlier stage has consumed comes again",
        result(signals, "_is_known", {"$anyElementTrue": ANYTHING}, False),
    )
    yield "a later stage serves a wish", result(finish, "reopened_if_requested", restart.of_first_stage("wish"), None)
    yield "a publication changes the params under way", _params_follow(follow=True)
    yield "a publication leaves the params of a stage that has none of its own", _params_follow(follow=False)
    yield "a publication changes no first stage", replaced(publish, "_first_stage", lambda _: _STAGES)
    yield "a publication takes a stage elsewhere", replaced(publish, "_moves", lambda c: publish._moves_to(c.placed))
    yield "a first stage forgets where it is wanted", result(publish, "_first_stage", *_PLACED)


_NEXT_PARAMS = {"$ifNull": ["$_next.params", "$params"]}
_FIRST_KEPT = ({"$concatArrays": [{"$slice": [ANYTHING, 1]}, ANYTHING]}, {"$slice": ["$task_state.stages", -2]})
_GROUP = {"$cond": [{"$gt": [rules.MOVES_TO, None]}, ANYTHING, "$group"]}
_BEGINS = ({"$cond": [restart.STAGED, "$queue", ANYTHING]}, "$queue")
_MINE = {"$and": [{"$eq": ["$$this.state", "RUNNING"]}, _OWN]}
_STAGES = {"$ifNull": ["$task_state.stages", "$$REMOVE"]}
_PLACED = ({"params": "$$params", "queue": ANYTHING}, {"params": "$$params"})


_original_move = finish._moved


def _signals_lost(outcomes: Any, now: Any) -> Any:
    return changed(changed(_original_move(outcomes, now), "signals", "nothing"), "signals_bytes", "nothing_bytes")


def _params_follow(*, follow: bool) -> Mutant:
    original = publish._of_params

    def mutated(configuration: Any, params: Any) -> Any:
        return original(configuration, params) | {"params_follow": follow or {"$not": [restart.STAGED]}}

    return replaced(publish, "_of_params", mutated)


def lines() -> Iterator[tuple[str, Mutant]]:
    """Whose turn it is among the tasks of one sequence key."""
    yield "a failure that blocks its line lets the next go on", replaced(sequences, "_has_left", _left(blocks=False))
    yield "who is begun anew is still at the head", replaced(sequences, "_has_left", _left(place=False))
    yield "who was finished has left its line for good", replaced(sequences, "_has_left", _left(returns=False))
    yield "a line goes by keys", _looked_up({"task_state.line": 1, "publish_number": 1, "_id": 1}, {"_id": 1})
    yield "no head makes way", replaced(sequences, "_has_left", lambda *_: False)
    yield "the head of a line is not opened", replaced(sequences, "_open", _nothing_opened)
    yield "what is begun anew stays in its old line", result(publish, "change_pipeline", *_OTHER_LINE)
    yield (
        "a wish keeps its place in line",
        result(finish, "reopened_if_requested", rules.NEXT_PLACE, "$task_state.place"),
    )
    yield "what is done with a line is kept", replaced(dependencies, "_unmark_all", _underived_unmark)


_OTHER_LINE = ({"$not": [{"$in": ["$status", ["INIT", "RUNNING"]]}]}, False)


def _left(*, blocks: bool = True, place: bool = True, returns: bool = True) -> Callable[[Any, Any], bool]:
    original = sequences._has_left

    def mutated(head: Any, task: Any) -> bool:
        state = {} if task is None else task["task_state"]
        if task is not None and not blocks:
            state = {name: value for name, value in state.items() if name != "on_sequence_failure"}
        if task is not None and not place:
            state = state | {"place": head["place"]}
        if not returns and task is not None and task["status"] == "INIT" and state.get("place") != head["place"]:
            return False
        return original(head, None if task is None else {**task, "task_state": state})

    return mutated


async def _nothing_opened(*_: Any) -> bool:
    return True


_unmark_all = dependencies._unmark_all


async def _underived_unmark(store: Any, marked: Any, mark: Any, _: Any) -> None:
    await _unmark_all(store, marked, mark, [])


def asked() -> Iterator[tuple[str, Mutant]]:
    """What becomes of tasks that wait for others."""
    yield (
        "a link forgets who waited before",
        result(dependencies, "_with", {"$cond": [{"$isArray": ANYTHING}, *_TWO]}, []),
    )
    keeping = "_keeping"
    yield "a link leaves the retention running", result(dependencies, keeping, "task_state.released_time", "nothing")
    yield "what is kept is asked about too early", result(dependencies, keeping, 1_000, 999)
    kept_anew = "what is kept is not asked about when its retention changes"
    yield kept_anew, replaced(dependencies, "mark_of_option", lambda *_: {})
    yield "whoever waits fails with what it waits for", _linked(_WANTS_TO_FAIL, {"status": "INIT"})
    yield "what failed because of others is restored", _linked(_FAILED_BY_IT, {"status": "FAIL"})
    yield "a dependency that failed has succeeded", replaced(dependencies, "_ends", _all_succeeded)
    yield "a gate opens while a dependency is unfinished", _looked_up({"left": []}, {})
    yield "retention begins while somebody waits", _looked_up({"by.unfinished": {"$ne": True}}, {})
    yield (
        "nobody asks again about what is kept",
        _linked({"$cond": [{"$and": ANYTHING}, ANYTHING, "$$REMOVE"]}, "$$REMOVE"),
    )
    yield "marks stay", replaced(dependencies, "_unmark", _left_marked)


_TWO = (ANYTHING, ANYTHING)
_WANTS_TO_FAIL = {"task_state.waits_for": "fail", "status": "INIT"}
_FAILED_BY_IT = {"task_state.dependency_failure.id": ANYTHING, "status": "FAIL"}


def _linked(old: Any, new: Any) -> Mutant:
    """A change to what is written to tasks that wait for others, or are waited for."""
    original = vars(dependencies)["_update"]

    async def mutated(store: Any, ids: Any, query: Any, pipeline: Any) -> Any:
        return await original(store, ids, changed(query, old, new), changed(list(pipeline), old, new))

    return replaced(dependencies, "_update", mutated)


def _looked_up(old: Any, new: Any) -> Mutant:
    """A change to a question about them."""
    original = driver.Driver.aggregate

    async def mutated(self: Any, collection: Any, pipeline: Any, **options: Any) -> Any:
        return await original(self, collection, changed(pipeline, old, new), **options)

    return replaced(driver.Driver, "aggregate", mutated)


async def _all_succeeded(_: Any, ids: Any) -> dict[str, str]:
    return dict.fromkeys(ids, "SUCCESS")


async def _left_marked(*_: Any) -> None:
    """Let the marks stand."""


def _renewed_too_briefly(patch: pytest.MonkeyPatch) -> None:
    renewal = renew._renewal
    patch.setattr(renew, "_renewal", lambda store, ids, running_ids, ms: renewal(store, ids, running_ids, ms - 1))


def _charged(query: Any, pipeline: Any) -> tuple[Any, Any]:
    """A release costs a timeout."""
    if "released" in repr(pipeline):
        pipeline.insert(1, {"$set": {"task_state.timeout_cnt": {"$add": ["$task_state.timeout_cnt", 1]}}})
    return query, pipeline


def _logs_count_too(outcomes: Any) -> Any:
    return finish._progress(outcomes) | {"timeout_cnt": 0}


def _timeouts_go_on(kind: str) -> Callable[[Any, Any], tuple[Any, Any]]:
    def go_on(query: Any, pipeline: Any) -> tuple[Any, Any]:
        if kind in repr(pipeline[-3:-2]):  # the stage that says what happened; a short form has one stage
            del pipeline[0]["$set"]["task_state"]["timeout_cnt"]
        return query, pipeline

    return go_on


def _conflicts_stay(query: Any, pipeline: Any) -> tuple[Any, Any]:
    pipeline[0].get("$set", {}).get("task_state", {}).pop("conflict_cnt", None)
    return query, pipeline


def _last_delay(outcomes: Any, now: Any) -> Any:
    if all(outcome.delay_ms is None for outcome in outcomes):
        return {}
    last = {"$ifNull": [finish.asked_for(outcomes, now), "$task_state.resume_time", "$$REMOVE"]}
    return {"resume_time": last}


def _unwished(module: Any) -> Mutant:
    return replaced(module, "reopened_if_requested", lambda *_: {"$set": {}})
