"""A real fleet with one part of the engine broken: the checker names the promise that does not hold, and none where all is whole.

Each scene brings about the moment in which the part matters, with real processes and real faults; it is played twice, by
workers that a patch has broken (`tests/processes/broken.py`) and by whole ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from taskmesh import InvalidOption, Status
from taskmesh.store import rules
from tests.chaos.checker import HEARD_OF_A_PAUSE_WITHIN
from tests.chaos.endings import MOST_KEPT
from tests.chaos.rates import HEARD_OF_A_RATE_WITHIN
from tests.chaos.reader import APPNAME as READER
from tests.chaos.scene_handlers import IN_PROCESS, OPTION
from tests.chaos.stage import APPNAME as STAGE
from tests.chaos.stage import Stage, stage
from tests.faults import failing_commands
from tests.processes.broken import BROKEN, GATES
from tests.processes.fleet import Worker
from tests.waiting import eventually

pytestmark = pytest.mark.blocks_the_loop  # the fleet is started and stopped by blocking calls

WAITS = "waits_before_claims"
_PATIENCE_S, _BROKEN_PATIENCE_S = 30.0, 5.0
"""How long the tasks have to end; where something is broken, some may never."""
_NEVER_HERE = timedelta(hours=1)
_NEVER_HERE_MS = 3_600_000
_APPLIED: dict[str, Any] = {"writeConcernError": {"code": 64, "errmsg": "waiting for replication timed out"}}
_CUT_OFF: dict[str, Any] = {"closeConnection": True}

Play = Callable[[Stage], Awaitable[None]]


@dataclass(frozen=True)
class Scene:
    """What is broken, which promise that breaks, and what happens."""

    broken: str
    promise: str
    play: Play
    here: bool = False
    """Whether the part is broken in the test's own process (publisher, reader of events), and not in the workers."""


# --- gates: what a worker wants to claim changes before it does ---


async def _is_cancelled_meanwhile(stage: Stage) -> None:
    stage.worker("w1", WAITS)
    await stage.publish(ends="CANCELLED")
    await stage.until("w1 wants to claim")
    await stage.cancel()
    await stage.let("w1")


async def _expires_meanwhile(stage: Stage) -> None:
    stage.worker("w1", WAITS)
    await stage.publish(ends="EXPIRED", expire_time=stage.mesh.clock.now() + timedelta(seconds=2))
    await stage.until("w1 wants to claim")
    await stage.until_status(Status.EXPIRED)
    await stage.let("w1")


async def _is_put_off_meanwhile(stage: Stage) -> None:
    stage.worker("w1", WAITS)
    await stage.publish(ends="CANCELLED")
    await stage.until("w1 wants to claim")
    later = stage.mesh.clock.now() + _NEVER_HERE
    await stage.mesh.publish("work", "victim", start_time=later, update_existing_params=True)
    await stage.let("w1")
    await stage.cancel()


async def _two_want_it(stage: Stage) -> None:
    stage.worker("w1", WAITS)
    await stage.publish(params={"waits": True})
    await stage.until("w1 wants to claim")
    stage.worker("w2", WAITS)
    await stage.until("w2 wants to claim")
    await stage.let("w1", "w2")
    stage.signs.give("w1 may end")
    stage.signs.give("w2 may end")


async def _fails_meanwhile(stage: Stage, ends: str = "FAIL", **option: Any) -> None:
    stage.worker("w2", WAITS)
    await stage.publish(params={"then": "raise"}, ends=ends, **option)
    await stage.until("w2 wants to claim")
    stage.worker("w1")
    await stage.until_marked("raised")
    await eventually(lambda: stage.is_told("failed"), 20.0)
    await stage.let("w2")


async def _fails_for_the_last_time_meanwhile(stage: Stage) -> None:
    await _fails_meanwhile(stage, max_unexpected_retries=0)


async def _fails_and_is_to_wait_meanwhile(stage: Stage) -> None:
    await _fails_meanwhile(stage, "CANCELLED", unexpected_retry_delay_ms=3_600_000)
    await stage.cancel()


async def _is_lost_for_the_last_time_meanwhile(stage: Stage) -> None:
    stage.worker("w2", WAITS)
    await stage.publish(params={"then": "die"}, ends="FAIL", max_timeouts=0)
    await stage.until("w2 wants to claim")
    stage.worker("w1")
    await stage.until_marked("started")
    await stage.until_status(Status.FAIL)
    await stage.let("w2")


async def _snoozes_meanwhile(stage: Stage) -> None:
    stage.worker("w2", WAITS)
    await stage.publish(params={"then": "snooze"}, ends="CANCELLED")
    await stage.until("w2 wants to claim")
    stage.worker("w1")
    await eventually(lambda: stage.is_told("snoozed"), 20.0)
    await stage.let("w2")
    await stage.cancel()


async def _is_meant_for_another_meanwhile(stage: Stage) -> None:
    stage.worker("w1", WAITS)
    await stage.publish(ends="CANCELLED")
    await stage.until("w1 wants to claim")
    await stage.mesh.set_option("work", "victim", specific_worker_ids=("nobody",))
    await stage.let("w1")
    await stage.cancel()


async def _it_needs_a_label_meanwhile(stage: Stage) -> None:
    stage.worker("w1", WAITS)
    await stage.publish(ends="CANCELLED")
    await stage.until("w1 wants to claim")
    tasks = stage.mesh.store.driver.collection(stage.mesh.store.tasks)
    await tasks.update_one({"_id": "work:victim"}, {"$set": {"needs": ["gpu=true"]}})
    await stage.let("w1")
    await stage.cancel()


async def _one_tries_twice(stage: Stage) -> None:
    stage.worker("w1", "claims_again")
    await stage.publish(concurrent_worker_cnt=2)
    await eventually(lambda: stage.is_told("succeeded"), 20.0)
    stage.signs.give("w1 may claim again")
    await stage.until("w1 has tried again")
    stage.worker("w2")


async def _its_queue_is_paused_meanwhile(stage: Stage) -> None:
    stage.worker("w1", WAITS)
    await stage.publish()
    await stage.until("w1 wants to claim")
    await stage.mesh.pause("default")
    await asyncio.sleep(HEARD_OF_A_PAUSE_WITHIN.total_seconds() + 0.5)  # the time that workers have to hear of it
    await stage.let("w1")
    await stage.mesh.resume("default")


# --- fencing, release, counting ---


async def _suspended_in_the_middle(stage: Stage) -> Worker:
    """A worker that will not notice by itself that it has lost what it ran."""
    w1 = stage.worker("w1", broken=["notices_no_loss"])
    await stage.publish(params={"waits": True})
    await stage.until_marked("started")
    w1.suspend()
    return w1


async def _a_lease_runs_out_in_a_suspended_worker(stage: Stage) -> None:
    w1 = await _suspended_in_the_middle(stage)
    await stage.until_status(Status.INIT)
    stage.signs.give("w1 may end")
    w1.resume()


async def _another_has_it_when_a_suspended_worker_returns(stage: Stage) -> None:
    w1 = await _suspended_in_the_middle(stage)
    stage.worker("w2")
    await stage.until_marked("started", 2)
    stage.signs.give("w1 may end")
    w1.resume()
    await stage.until_marked("returned")
    w1.terminate()  # which waits until its outcome is recorded or known to be lost
    w1.wait()
    stage.signs.give("w2 may end")


async def _a_suspended_worker_pings_late(stage: Stage) -> None:
    w1 = await _suspended_in_the_middle(stage)
    await stage.until_status(Status.INIT)
    w1.resume()
    await asyncio.sleep(1.5)  # five times the interval of pings
    stage.signs.give("w1 may end")


async def _a_worker_stops_in_the_middle(stage: Stage) -> None:
    w1 = stage.worker("w1")
    await stage.publish(params={"waits": True})
    await stage.until_marked("started")
    w1.terminate()
    w1.wait()
    stage.signs.give("w2 may end")
    stage.worker("w2")


async def _another_transaction_has_what_it_writes(stage: Stage) -> None:
    stage.worker("w1")
    scenery = stage.client[stage.database]["scenery"]
    await scenery.insert_one({"_id": "shared"})
    async with stage.client.start_session() as session, await session.start_transaction():
        await scenery.update_one({"_id": "shared"}, {"$set": {"others": 1}}, session=session)
        await stage.publish(params={"writes": True})
        await stage.until_marked("raised")


async def _a_worker_dies_in_the_middle(stage: Stage) -> None:
    stage.worker("w1")
    await stage.publish(params={"then": "die"})
    await stage.until_marked("started")
    stage.worker("w2")


# --- the end of an execution ---


async def _a_lease_runs_out_while_a_ping_hangs(stage: Stage) -> None:
    stage.worker("w1")
    await stage.publish(params={"then": "obey"}, worker_timeout_ms=4_000)
    await stage.until_marked("started")
    hangs: dict[str, Any] = {"times": 1, "blockConnection": True, "blockTimeMS": 6_000}
    async with _on_tasks(stage, "update", **hangs):
        await stage.until_marked("returned")


async def _a_worker_stops_and_its_handler_obeys(stage: Stage) -> None:
    w1 = stage.worker("w1")
    await stage.publish(params={"then": "obey"})
    await stage.until_marked("started")
    w1.terminate()
    w1.wait()
    stage.worker("w2")


async def _a_handler_is_closed(stage: Stage) -> None:
    stage.worker("w1")
    await stage.publish(params={"then": "close"})
    await stage.until_marked("raised")


# --- answers that are lost ---


async def _a_claim_is_not_answered(stage: Stage, **fault: Any) -> None:
    stage.worker("w1", WAITS)
    await stage.publish(params={"waits": True}, max_timeouts=0)
    await stage.until("w1 wants to claim")
    async with _on_tasks(stage, "update", "findAndModify", **fault):
        stage.signs.give("w1 may claim")
        await stage.until("w1 had no answer")
    await stage.until_marked("started")
    await asyncio.sleep(0.5)
    stage.signs.give("w1 may end")


async def _a_claim_is_cut_off(stage: Stage) -> None:
    await _a_claim_is_not_answered(stage, **_CUT_OFF)


async def _the_answer_to_a_claim_is_lost(stage: Stage) -> None:
    stage.worker("w1", WAITS)
    await stage.publish(max_timeouts=0)
    await stage.until("w1 wants to claim")
    async with _on_tasks(stage, "update", "findAndModify", **_APPLIED):
        stage.signs.give("w1 may claim")
        # Who asks what it has won learns it while all this lasts.
        told = ("w1 had no answer", "w1 has tried")
        await eventually(lambda: any(stage.signs.given(sign) for sign in told), what=" or ".join(told))


async def _an_outcome_is_cut_off(stage: Stage) -> None:
    stage.worker("w1", "tells_of_lost_outcomes")
    await stage.publish(params={"waits": True}, max_timeouts=0)
    await stage.until_marked("started")
    async with _on_tasks(stage, "update", **_CUT_OFF):
        stage.signs.give("w1 may end")
        await stage.until("w1 had no answer")


@asynccontextmanager
async def _on_tasks(stage: Stage, *commands: str, **fault: Any) -> AsyncIterator[None]:
    """Let these commands fail on the collection of tasks."""
    async with failing_commands(stage.uri, [*commands], namespace=f"{stage.database}.tasks", **fault):
        yield


async def _a_deletion_is_repeated_after_a_publication(stage: Stage) -> None:
    await stage.publish(delay_ms=_NEVER_HERE_MS)
    update, calls = stage.mesh.store.update, []

    async def update_after_a_publication(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 2:
            await stage.publish()
        return await update(*arguments)

    stage.mesh.store.update = update_after_a_publication  # type: ignore[assignment,method-assign]
    async with _on_tasks(stage, "delete", appname=STAGE, times=1, **_APPLIED):
        await stage.delete()
    assert len(calls) == 2
    stage.worker("w1")


async def _a_cancel_is_repeated_after_a_retry(stage: Stage) -> None:
    await stage.publish(delay_ms=_NEVER_HERE_MS)
    update_one = stage.mesh.store.update_one

    async def update_without_an_answer(*arguments: Any) -> Any:
        stage.mesh.store.update_one = update_one  # type: ignore[method-assign]
        await update_one(*arguments)
        await stage.mesh.retry("work", "victim")
        async with _on_tasks(stage, "findAndModify", appname=STAGE, times=1, errorCode=10107):
            return await update_one(*arguments)

    stage.mesh.store.update_one = update_without_an_answer  # type: ignore[method-assign, assignment]  # it takes anything
    await stage.cancel()
    stage.worker("w1")


async def _somebody_stops_no_worker_in_particular(stage: Stage) -> None:
    w1 = stage.worker("w1")
    try:
        await stage.mesh.stop_worker({"$ne": ""}, grace_ms=0)  # type: ignore[arg-type]  # that is the point
    except InvalidOption:
        pass
    else:
        await eventually(lambda: not w1.running, 30.0)
    await stage.publish()


# --- what stops a handler ---


async def _it_is_begun_anew_while_its_handler_cleans_up(stage: Stage, begin_anew: Play) -> None:
    stage.signs.give("w1 cleans up")
    stage.worker("w1")
    await stage.publish(params={"waits": True})
    await stage.until_marked("started")
    await begin_anew(stage)
    await stage.until("w1 is on its way out")
    stage.signs.give("w2 may end")
    stage.worker("w2")
    await asyncio.sleep(3.0)  # twice a lease, and many scans: a worker that may not claim tells nobody
    stage.signs.give("w1 may leave")
    stage.signs.give("w1 may end")


async def _it_is_retried_while_its_handler_cleans_up(stage: Stage) -> None:
    async def begin_anew(stage: Stage) -> None:
        await stage.cancel()
        await stage.mesh.retry("work", "victim")

    await _it_is_begun_anew_while_its_handler_cleans_up(stage, begin_anew)


async def _it_is_published_anew_while_its_handler_cleans_up(stage: Stage) -> None:
    async def begin_anew(stage: Stage) -> None:
        await stage.delete()
        await stage.publish(params={"waits": True})

    await _it_is_begun_anew_while_its_handler_cleans_up(stage, begin_anew)


async def _its_worker_is_excluded_and_cleans_up(stage: Stage) -> None:
    async def begin_anew(stage: Stage) -> None:
        await stage.mesh.set_option("work", "victim", specific_worker_ids=("w2",))

    await _it_is_begun_anew_while_its_handler_cleans_up(stage, begin_anew)


async def _word_of_an_earlier_life_comes_late(stage: Stage) -> None:
    stage.worker("w1")
    await stage.publish(params={"waits": True}, max_timeouts=0, ping_interval_ms=20_000, worker_timeout_ms=30_000)
    await stage.until_marked("started")
    async with failing_commands(stage.uri, ["getMore"], blockConnection=True, blockTimeMS=3_000) as held_up:
        await held_up()
        await stage.cancel()
        stage.signs.give("w1 may end")
        await stage.until_marked("returned")
        stage.signs.take_back("w1 may end")

        async def has_left() -> bool:
            return all(entry.state == "FAIL" for entry in (await stage.task()).task_state.worker_states)

        await eventually(has_left, 20.0)
        await stage.mesh.retry("work", "victim")
        await stage.until_marked("started", 2)
    await asyncio.sleep(4.0)  # by then the stream has told of it; what it does not lead to tells nobody
    stage.signs.give("w1 may end")


# --- the stream ---


async def _events_happen_while_the_reader_has_no_stream(stage: Stage, code: int) -> None:
    stage.worker("w1")
    await stage.publish("before")
    await eventually(lambda: stage.is_told("finished"), 20.0)
    async with _no_stream(stage, READER, code):
        await stage.publish("meanwhile")
        await stage.until_status(Status.SUCCESS, "meanwhile")
    for n in range(30):  # until the reader has a stream again
        await stage.publish(f"after-{n}")
        with suppress(AssertionError):
            await eventually(lambda: stage.is_told("finished", f"after-{n}"), 1.0)  # noqa: B023 -- awaited here
            return


async def _the_reader_loses_its_place(stage: Stage) -> None:
    await _events_happen_while_the_reader_has_no_stream(stage, 286)


async def _the_reader_keeps_its_place(stage: Stage) -> None:
    await _events_happen_while_the_reader_has_no_stream(stage, 43)


async def _work_comes_while_the_worker_has_no_stream(stage: Stage, code: int) -> None:
    stage.worker("w1", "scans_when_told")
    await stage.publish("before")
    await _until_the_worker_has_heard_of(stage, "before")
    async with _no_stream(stage, "taskmesh", code):
        await stage.publish("meanwhile")
    await stage.publish("after")


async def _until_the_worker_has_heard_of(stage: Stage, key: str) -> None:
    """Say it again now and then: who never scans hears of nothing that happened before its stream was open.

    Said again is when it may start: a change of an option that leaves `next_claim_time` as it is wakes nobody.
    """

    async def is_done() -> bool:
        return (await stage.task(key)).status is Status.SUCCESS

    for _ in range(10):
        with suppress(AssertionError):
            await eventually(is_done, 5.0)
            return
        await stage.mesh.publish("work", key, start_time=stage.mesh.clock.now(), update_existing_params=True)
    raise AssertionError(f"the worker never did {key}")


async def _the_worker_loses_its_place(stage: Stage) -> None:
    await _work_comes_while_the_worker_has_no_stream(stage, 286)


async def _the_worker_keeps_its_place(stage: Stage) -> None:
    await _work_comes_while_the_worker_has_no_stream(stage, 43)


@asynccontextmanager
async def _no_stream(stage: Stage, appname: str, code: int) -> AsyncIterator[None]:
    """Streams fail so, and none can be opened."""
    async with failing_commands(
        stage.uri,
        ["getMore", "aggregate"],
        appname=appname,
        namespace=f"{stage.database}.$cmd.aggregate",
        errorCode=code,
    ) as first_has_failed:
        await first_has_failed()
        yield


async def _a_child_raises_what_must_not_reach_its_worker(stage: Stage) -> None:
    stage.worker("w1")
    handle = await stage.mesh.publish(IN_PROCESS, "victim", **{**dict(OPTION), "max_unexpected_retries": 0})
    stage.note_published("victim", handle.created, "FAIL", IN_PROCESS)
    await stage.until_marked("raised")


async def _a_child_goes_on_while_its_worker_is_suspended(stage: Stage) -> None:
    w1 = stage.worker("w1")
    handle = await stage.mesh.publish(IN_PROCESS, "victim", {"waits": True}, **dict(OPTION))
    stage.note_published("victim", handle.created, name=IN_PROCESS)
    await stage.until_marked("started")
    w1.suspend()
    stage.worker("w2")
    await stage.until_marked("started", 2)
    await asyncio.sleep(2.0)  # what the checker forgives, and more; a child that has ended tells nobody
    stage.signs.give("w2 may end")
    await stage.until_marked("returned")
    w1.resume()


# --- limits ---


async def _a_rate_is_used_up_again_and_again(stage: Stage) -> None:
    await stage.mesh.set_limit("default", rate=10, per_ms=2_000)
    await asyncio.sleep(HEARD_OF_A_RATE_WITHIN.total_seconds() + 0.5)  # the time that workers have to hear of it
    stage.worker("w1")
    await stage.publish("first")
    await eventually(lambda: stage.is_told("finished", ":first"), 20.0)
    await asyncio.sleep(1.0)  # half a window
    for n in range(25):
        await stage.publish(f"k{n}")


async def _a_long_window_holds_many_starts(stage: Stage) -> None:
    await stage.mesh.set_limit("default", rate=200_000, per_ms=86_400_000)
    for n in range(MOST_KEPT + 20):
        await stage.publish(f"k{n}")
    stage.worker("w1", concurrency=1)
    await eventually(lambda: stage.is_told("finished", f":k{MOST_KEPT}"), 60.0)


SCENES = [
    Scene("gate unfinished", "G4", _is_cancelled_meanwhile),
    Scene("gate unexpired", "G2", _expires_meanwhile),
    Scene("gate started", "G1", _is_put_off_meanwhile),
    Scene("gate room", "C1", _two_want_it),
    Scene("gate retries left", "B1", _fails_for_the_last_time_meanwhile),
    Scene("gate timeouts left", "B2", _is_lost_for_the_last_time_meanwhile),
    Scene("gate delay asked for", "G1", _snoozes_meanwhile),
    Scene("gate worker allowed", "G3", _is_meant_for_another_meanwhile),
    Scene("gate labels", "G3", _it_needs_a_label_meanwhile),
    Scene("gate not twice", "C2", _one_tries_twice),
    Scene("gate retry delay", "G5", _fails_and_is_to_wait_meanwhile),
    Scene("gate queue", "G6", _its_queue_is_paused_meanwhile),
    Scene("fencing by lease", "F1", _a_lease_runs_out_in_a_suspended_worker),
    Scene("fencing by execution", "F1", _another_has_it_when_a_suspended_worker_returns),
    Scene("fencing of pings", "F1", _a_suspended_worker_pings_late),
    Scene("release: charged", "R1", _a_worker_stops_in_the_middle),
    Scene("release: entry kept", "R1", _a_worker_stops_in_the_middle),
    Scene("count of losses", "R2", _a_worker_dies_in_the_middle),
    Scene("conflicts: charged", "X3", _another_transaction_has_what_it_writes),
    Scene("derivation", "D1", _fails_and_is_to_wait_meanwhile),
    Scene("told to stop: not decided", "S3", _a_lease_runs_out_while_a_ping_hangs),
    Scene("told to stop: not judged", "S3", _a_worker_stops_and_its_handler_obeys),
    Scene("outcome: gone past", "L1", _a_handler_is_closed),
    Scene("claims without an answer: taken for won", "H1", _a_claim_is_cut_off),
    Scene("claims without an answer: taken for lost", "L1", _the_answer_to_a_claim_is_lost),
    Scene("outcomes without an answer: taken for recorded", "L1", _an_outcome_is_cut_off),
    Scene("outcomes without an answer: taken for lost", "L1", _an_outcome_is_cut_off),
    Scene("errors of children: made by their class", "L1", _a_child_raises_what_must_not_reach_its_worker),
    Scene("leases of children: not told", "C3", _a_child_goes_on_while_its_worker_is_suspended),
    Scene("repeated verbs: for whatever stands there", "P3", _a_deletion_is_repeated_after_a_publication, here=True),
    Scene("repeated verbs: done again", "P3", _a_cancel_is_repeated_after_a_retry, here=True),
    Scene("ids: anything", "L1", _somebody_stops_no_worker_in_particular, here=True),
    Scene("places: of nobody on his way out", "C1", _it_is_retried_while_its_handler_cleans_up),
    Scene("places: of nobody on his way out", "C3", _it_is_published_anew_while_its_handler_cleans_up),
    Scene("places: of nobody on his way out", "C3", _its_worker_is_excluded_and_cleans_up),
    Scene("events: obeyed unseen", "L1", _word_of_an_earlier_life_comes_late),
    Scene("stream: gaps are not told", "O1", _the_reader_loses_its_place, here=True),
    Scene("stream: begins anew", "O1", _the_reader_keeps_its_place, here=True),
    Scene("stream: gaps are not told", "L1", _the_worker_loses_its_place),
    Scene("stream: begins anew", "L1", _the_worker_keeps_its_place),
    Scene("scan: none", "L1", _the_worker_loses_its_place),
    Scene("rate: a bucket leaves with its first start", "G7", _a_rate_is_used_up_again_and_again),
    Scene("rate: starts are kept one by one", "M1", _a_long_window_holds_many_starts),
]


def test_every_gate_and_every_part_is_broken_in_a_scene() -> None:
    assert {scene.broken for scene in SCENES} == set(BROKEN)
    gates = {*rules.task_gates("now"), *rules.worker_gates("w1"), *rules.queue_gate(["q"])}
    gates -= {"dependencies", "flow", "suspended", "sequence"}  # which mutants break: tests/properties
    assert {name.removeprefix("gate ") for name in GATES} == gates


@pytest.mark.chaos
@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: f"{scene.broken}: {scene.promise}")
async def test_what_is_broken_is_found(
    mongo_uri: str, database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scene: Scene
) -> None:
    if scene.here:
        BROKEN[scene.broken](monkeypatch.setattr)
    async with stage(mongo_uri, database, tmp_path, [] if scene.here else [scene.broken]) as set_up:
        await scene.play(set_up)
        findings = await set_up.end(_BROKEN_PATIENCE_S)
    assert scene.promise in findings.broken, [str(violation)[:500] for violation in findings.violations]


@pytest.mark.chaos
@pytest.mark.parametrize("play", dict.fromkeys(scene.play for scene in SCENES), ids=lambda play: play.__name__[1:])
async def test_nothing_is_found_where_nothing_is_broken(
    mongo_uri: str, database: str, tmp_path: Path, play: Play
) -> None:
    """So what is found is due to the broken part alone."""
    async with stage(mongo_uri, database, tmp_path) as set_up:
        await play(set_up)
        findings = await set_up.end(_PATIENCE_S)
    assert [str(violation)[:500] for violation in findings.violations] == []


@pytest.mark.chaos
async def test_who_never_scans_hears_what_is_said_again(mongo_uri: str, database: str, tmp_path: Path) -> None:
    """So no scene depends on how soon a worker's stream is open, or on how late it tells."""
    async with stage(mongo_uri, database, tmp_path, ["scan: none"]) as set_up:
        await set_up.publish("before")
        set_up.worker("w1", "scans_when_told")
        await _until_the_worker_has_heard_of(set_up, "before")
        findings = await set_up.end(_PATIENCE_S)
    assert [str(violation)[:500] for violation in findings.violations] == []
