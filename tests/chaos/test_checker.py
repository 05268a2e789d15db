"""The checker itself: it finds nothing in a good history, and in each forged one the promise that is broken there."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from tests.chaos.endings import check_endings
from tests.chaos.forging import BEGIN, Story, pid_of
from tests.chaos.history import DIED_AS_ASKED, Asked, Evidence, Published, Told
from tests.chaos.invariants import INVARIANTS
from tests.chaos.rates import Rates
from tests.chaos.versions import Document, Version


def done() -> Story:
    return Story().claims("w1", "r1").later(100).ends("succeeded", "w1", "r1", returns=7)


def eventful() -> Story:
    """A life in which much goes wrong, and everything as it should."""
    story = Story(concurrent_worker_cnt=2, unexpected_retry_delay_ms=100, unexpected_retry_jitter=0.0)
    story.claims("w1", "r1").later(400).pings("r1").later(200).claims("w2", "r2")
    story.later(100).ends("failed", "w2", "r2", fail_reason="no").later(150).claims("w3", "r3")
    story.later(100).ends("released", "w3", "r3").later(400).mark("raised", "w1", "r1", error="CancelledError")
    story.later(500).claims("w3", "r4")  # r1 has run out
    story.later(100).ends("snoozed", "w3", "r4", delay_ms=300).later(400).claims("w1", "r5").claims("w4", "r6")
    story.later(50).changes_entry("r5", "progressed", "w1", logs=["half way"])
    return story.later(100).ends("succeeded", "w1", "r5", returns=1).ends("succeeded", "w4", "r6", returns=2)


def lengthened() -> Story:
    """A transaction takes a longer lease."""
    story = Story("writes").claims("w", "r").later(100)
    story.changes_entry("r", ping_expire_time=story.now + timedelta(seconds=65))
    return story.later(20_000).ends("succeeded", "w", "r")


def early() -> Story:
    """The publisher's idea of the server's time was a little ahead, so that the claim came before the creation."""
    return Story().later(-19).claims("w1", "r1").later(100).ends("succeeded", "w1", "r1", returns=7)


def expiring() -> Story:
    story = Story(expire_time=BEGIN + timedelta(seconds=1)).claims("w1", "r1").ends("released", "w1", "r1")
    return story.later(1_000).writes(lambda _: None, "settled")


def cancelled() -> Story:
    story = Story(start_time=BEGIN).claims("w1", "r1").later(10)
    story.writes(lambda document: document["task_state"].update(cancel_time=story.now), "cancelled")
    story.mark("raised", "w1", "r1", error="CancelledError")
    return story.later(10).changes_entry("r1", state="FAIL", fail_time=story.now)


def sent_away(*, keeps: bool = True) -> Callable[[Document], None]:
    """Take the live entries out of the task, as a retry, a deletion or an exclusion does."""
    names = ("running_id", "worker_id", "ping_expire_time")

    def send(document: Document) -> None:
        state = document["task_state"]
        places = [{name: entry[name] for name in names} for entry in state["worker_states"]]
        state.update(worker_states=[], cancel_time=None, leaving=places if keeps else [])

    return send


def begun_anew() -> Story:
    """A retried task waits for the handler that cleans up, whose worker keeps its place and then leaves it."""
    story = Story().claims("w1", "r1").later(10)
    story.writes(lambda document: document["task_state"].update(cancel_time=story.now), "cancelled")
    story.later(10).writes(sent_away(), "retried").later(500)
    [place] = story.state["leaving"]
    story.writes(lambda _: place.update(ping_expire_time=story.now + timedelta(seconds=1))).later(800)
    story.mark("raised", "w1", "r1", error="CancelledError")
    story.writes(lambda document: document["task_state"].pop("leaving"), "stopped").later(10)
    return story.claims("w2", "r2").later(10).ends("succeeded", "w2", "r2", returns=7)


def deleted(*, keeps: bool = True) -> Story:
    story = Story().claims("w1", "r1").later(10)

    def delete(document: Document) -> None:
        sent_away(keeps=keeps)(document)
        document["task_state"]["deleted_time"] = story.now

    return story.writes(delete, "deleted")


def forgotten() -> Story:
    story = done().later(30 * 60 * 60 * 1_000)
    story.versions.append(Version(story.id, story.now, story.document, None))
    return story


def test_a_good_history_has_no_violation() -> None:
    findings = forgotten().findings()
    writes = Story("writes", specific_worker_ids=("w",)).claims("w", "r").ends("succeeded", "w", "r")
    for story in (done(), early(), eventful(), lengthened(), expiring(), cancelled(), begun_anew(), writes, chained()):
        findings += story.findings()
        findings += check_endings(with_child(story) if story.id == "chains:k" else story.evidence())
    findings += check_endings(_joined(0))
    assert [str(violation) for violation in findings.violations] == []
    assert set(findings.checked) == set(INVARIANTS), "every invariant was put to the test"


def chained() -> Story:
    return Story("chains").claims("w1", "r1").ends("succeeded", "w1", "r1")


def with_child(story: Story, **changes: Any) -> Evidence:
    child = Story(key="after-k").claims("w1", "r2").ends("succeeded", "w1", "r2", returns=None)
    documents = {story.id: story.document, child.id: {**child.document, "params": {"chained_by": "k"}}}
    log = child.evidence()
    truth = {
        "documents": documents,
        "marks": [*story.marks, *child.marks],
        "claims": {**story.evidence().claims, **log.claims},
        "told": (),
    }
    return story.evidence(**{**truth, **changes})


def without_entries(document: Document) -> None:
    document["task_state"]["worker_states"] = []


def counting(name: str, *, drop: bool = False) -> Callable[[Document], None]:
    def count(document: Document) -> None:
        document["task_state"][name] = document["task_state"].get(name, 0) + 1
        if drop:
            without_entries(document)

    return count


def in_a_second() -> datetime:
    return BEGIN + timedelta(seconds=1)


FORGED: dict[str, tuple[str, Callable[[], Story]]] = {
    "a third worker joins a task for two": (
        "C1",
        lambda: Story(concurrent_worker_cnt=2).claims("w1", "r1").claims("w2", "r2").claims("w3", "r3"),
    ),
    "a place that a handler keeps is taken": (
        "C1",
        lambda: Story().claims("w1", "r1").later(10).writes(sent_away(), "option_changed").claims("w2", "r2"),
    ),
    "a handler at work loses its place": (
        "C1",
        lambda: Story().claims("w1", "r1").later(10).writes(sent_away(keeps=False), "option_changed"),
    ),
    "a deleted task forgets the handler at work": ("C1", lambda: deleted(keeps=False)),
    "the document of a deleted task goes before its handler": ("C1", lambda: _removed(deleted())),  # made below
    "a worker that has succeeded claims again": (
        "C2",
        lambda: Story(concurrent_worker_cnt=2).claims("w1", "r1").ends("succeeded", "w1", "r1").claims("w1", "r2"),
    ),
    "a late SUCCESS counts": (
        "F1",
        lambda: Story().claims("w1", "r1").later(2_000).changes_entry("r1", "succeeded", "w1", state="SUCCESS"),
    ),
    "a late ping counts": ("F1", lambda: Story().claims("w1", "r1").later(2_000).pings("r1")),
    "a lease that ran out is lengthened": (
        "F1",
        lambda: (
            Story().claims("w1", "r1").later(9_000).changes_entry("r1", ping_expire_time=BEGIN + timedelta(minutes=2))
        ),
    ),
    "one worker ends the execution of another": (
        "F1",
        lambda: Story().claims("w1", "r1").later(10).changes_entry("r1", "succeeded", "w2", state="SUCCESS"),
    ),
    "a live entry is thrown out": (
        "F1",
        lambda: Story().claims("w1", "r1").later(10).writes(without_entries, "settled"),
    ),
    "a result is overwritten": ("F1", lambda: done().later(10).changes_entry("r1", returns=8)),
    "a SUCCESS disappears": ("F2", lambda: done().later(10).writes(without_entries, "option_changed")),
    "a task changes its name": ("F3", lambda: done().writes(lambda document: document.update(name="other"))),
    "an execution starts before start_time": ("G1", lambda: Story(start_time=in_a_second()).claims("w1", "r1")),
    "a snooze is cut short": (
        "G1",
        lambda: Story().claims("w1", "r1").ends("snoozed", "w1", "r1", delay_ms=500).later(100).claims("w2", "r2"),
    ),
    "an execution starts after expire_time": (
        "G2",
        lambda: Story(expire_time=in_a_second()).later(2_000).claims("w1", "r1"),
    ),
    "a worker that is not allowed claims": ("G3", lambda: Story(specific_worker_ids=("w2",)).claims("w1", "r1")),
    "a cancelled task is claimed": ("G4", lambda: cancelled().claims("w2", "r2")),
    "a failed worker tries again at once": (
        "G5",
        lambda: Story().claims("w1", "r1").ends("failed", "w1", "r1").later(10).claims("w2", "r2"),
    ),
    "a task is tried once more than allowed": (
        "B1",
        lambda: Story(max_unexpected_retries=0).claims("w1", "r1").ends("failed", "w1", "r1").claims("w2", "r2"),
    ),
    "a poison task circles on": (
        "B2",
        lambda: Story(max_timeouts=0).claims("w1", "r1").later(2_000).claims("w2", "r2"),
    ),
    "a release is charged": (
        "R1",
        lambda: Story().claims("w1", "r1").later(10).writes(counting("timeout_cnt", drop=True), "released", "w1"),
    ),
    "a release keeps the task": ("R1", lambda: Story().claims("w1", "r1").writes(lambda _: None, "released", "w1")),
    "a claim from a queue that is paused": ("G6", lambda: _in_a_paused_queue()),  # noqa: PLW0108 -- made below
    "a claim when the rate is used up": ("G7", lambda: _beyond_the_rate()),  # noqa: PLW0108 -- made below
    "a lost lease is not counted": (
        "R2",
        lambda: Story().claims("w1", "r1").later(2_000).writes(without_entries, "settled", "", "w1"),
    ),
    "a loss is counted that was none": (
        "R2",
        lambda: Story().claims("w1", "r1").later(10).writes(counting("timeout_cnt"), "cancelled"),
    ),
    "the status is not what the entries say": (
        "D1",
        lambda: done().later(10).underived(lambda document: document.update(status="INIT")),
    ),
    "next_claim_time drifts": (
        "D1",
        lambda: Story().later(10).underived(lambda document: document.update(next_claim_time=None)),
    ),
    "a claim without an entry": ("H1", lambda: Story().writes(lambda _: None, "claimed", "w1")),
}


def _removed(story: Story) -> Story:
    story.versions.append(Version(story.id, story.now, story.document, None))
    return story


def _in_a_paused_queue() -> Story:
    story = Story().later(9_000).claims("w1", "r1")
    story.versions[-1] = replace(story.versions[-1], paused_since=BEGIN)
    return story


def _beyond_the_rate() -> Story:
    story = Story().later(9_000).claims("w1", "r1")
    rates = Rates()
    rates.learn("q", {"rate": 2, "per_ms": 1_000}, BEGIN)
    for ms_later in (9_000, 9_900, 9_999):
        window = rates.started("q", BEGIN + timedelta(milliseconds=ms_later))
    story.versions[-1] = replace(story.versions[-1], window=window)
    return story


def test_as_many_starts_as_the_rate_allows_are_no_finding() -> None:
    rates = Rates()
    rates.learn("q", {"rate": 2, "per_ms": 1_000}, BEGIN)
    starts = (8_000, 8_100, 9_000, 9_100, 8_050)
    windows = [rates.started("q", BEGIN + timedelta(milliseconds=ms_later)) for ms_later in starts]
    assert [window.starts for window in windows if window is not None] == [1, 2, 2, 2, 3]
    rates.learn("q", {}, BEGIN)
    assert rates.started("q", BEGIN + timedelta(days=1)) is None


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_write_is_found(name: str) -> None:
    invariant, forge = FORGED[name]
    assert invariant in forge().findings().broken


def test_a_deletion_before_the_retention_is_over_is_found() -> None:
    story = done()
    story.versions.append(Version(story.id, story.now, story.document, None))
    assert story.findings().broken == {"L1"}


ENDINGS: dict[str, tuple[str, Callable[[], Evidence]]] = {
    "a published task is gone": ("P1", lambda: done().evidence(documents={})),
    "two publishers created it": (
        "P1",
        lambda: done().evidence(published=_published(2)),
    ),
    "nobody created it": ("P1", lambda: done().evidence(published=[Published("work:k", False, ("SUCCESS",))])),
    "a later task is deleted as well": ("P1", lambda: removed().evidence(documents={}, published=_published(2))),
    "one call deletes twice": ("P3", lambda: removed(2).evidence(asked=[Asked("work:k", "deleted")])),
    "one call cancels twice": (
        "P3",
        lambda: cancelled().writes(lambda _: None, "cancelled").evidence(asked=[Asked("work:k", "cancelled")]),
    ),
    "a task from nowhere": ("P2", lambda: done().evidence(published=[])),
    "a task that waits for ever": (
        "L1",
        lambda: Story().evidence(published=[Published("work:k", True, ("SUCCESS",))]),
    ),
    "a worker ends with an error of its own": ("L1", lambda: done().evidence(exits=[("w1", 0), ("w1", 1)])),
    "one SUCCESS too few": (
        "S1",
        lambda: done().evidence(documents={"work:k": _for_two(done())}),
    ),
    "a result that no handler returned": ("S2", lambda: _marks_bent(done(), value=8)),
    "a SUCCESS of a handler that was told to stop": ("S3", lambda: _marks_bent(done(), value=7, told=True)),
    "a SUCCESS without a handler": ("S2", lambda: done().evidence(marks=[])),
    "a FAIL without a handler": (
        "S2",
        lambda: Story().claims("w1", "r1").ends("failed", "w1", "r1").evidence(marks=[]),
    ),
    "a handler without a claim": ("H1", lambda: done().evidence(claims={})),
    "two handlers at once": ("C3", lambda: _overlapping().evidence()),
    "a child process works on beside its successor": ("C3", lambda: _child_and_successor(0, 2_900).evidence()),
    "a rate keeps an element for each start": (
        "M1",
        lambda: done().evidence(limits=[{"_id": "q", "starts": [{"n": 1}] * 500}]),
    ),
    "an effect without its SUCCESS": (
        "X1",
        lambda: Story("writes").claims("w1", "r1").ends("failed", "w1", "r1").evidence(effects=["writes:k"]),
    ),
    "an effect twice": (
        "X1",
        lambda: Story("writes").claims("w1", "r1").ends("succeeded", "w1", "r1").evidence(effects=["writes:k"] * 2),
    ),
    "a transfer that is half there": (
        "X1",
        lambda: _transferred().evidence(moves=[("a", "b")], accounts={"a": -1, "b": 0}),
    ),
    "a transfer that moved twice": (
        "X1",
        lambda: _transferred().evidence(moves=[("a", "b")], accounts={"a": -2, "b": 2}),
    ),
    "a conflict is charged": ("X3", lambda: _conflicted().evidence()),
    "a wish to run again is missing": ("X2", lambda: _refreshed(wanted=None)),
    "a wish to run again is there twice": ("X2", lambda: _refreshed(wanted=2)),
    "a wish to run again is not served": ("L1", lambda: _refreshed(wanted=1, wish=0)),
    "a chained task is missing": ("X2", lambda: chained().evidence()),
    "a chained task of a failed one": (
        "X2",
        lambda: with_child(Story("chains").claims("w1", "r1").ends("failed", "w1", "r1")),
    ),
    "who waits for another starts before its end": ("A1", lambda: _joined(1)),
    "who waits for another that is gone starts": ("A1", lambda: _joined(None)),
    "an event is missing": ("O1", lambda: done().evidence(told=[Told("work:k", "published", None)])),
    "events out of order": (
        "O1",
        lambda: done().evidence(
            told=[Told("", "gap", None), *(Told("work:k", kind, None) for kind in ("finished", "published"))]
        ),
    ),
}


def _joined(late_ms: int | None) -> Evidence:
    """A task that came after another; which was finished so much later than it started, or is not there."""
    story = done()
    entry = story.document["task_state"]["worker_states"][0]
    story.document["task_state"]["after"] = {"ids": ["work:before"]}
    started = entry.setdefault("start_time", BEGIN)
    before = copy.deepcopy(story.document) | {"_id": "work:before", "key": "before"}
    del before["task_state"]["after"]
    before["task_state"]["worker_states"][0]["running_id"] = "r0"
    before["finish_time"] = started + timedelta(milliseconds=late_ms or 0)
    documents = {"work:k": story.document} | ({} if late_ms is None else {"work:before": before})
    return story.evidence(
        documents=documents,
        published=[Published(id_, True, ("SUCCESS",)) for id_ in documents],
        marks=[*story.marks, *(replace(mark, key="before", running_id="r0") for mark in story.marks)],
        claims={"work:k": {("r1", "w1")}, "work:before": {("r0", "w1")}},
    )


def _published(times: int) -> list[Published]:
    return [Published("work:k", True, ("SUCCESS",))] * times


def removed(times: int = 1) -> Story:
    """Somebody deletes the task, so often; each time it is published anew, and nothing more is known of the last."""
    story = done()
    for _ in range(times):
        story.later(10).writes(lambda _: None, "deleted")
        story.versions.append(Version(story.id, story.now, story.document, None))
    return story


def _transferred() -> Story:
    return Story("transfers").claims("w1", "r1").ends("succeeded", "w1", "r1")


def _conflicted() -> Story:
    story = Story("transfers").claims("w1", "r1").ends("failed", "w1", "r1")
    story.marks = [replace(mark, more={**mark.more, "conflict": mark.what == "raised"}) for mark in story.marks]
    return story


def _refreshed(wanted: int | None, wish: int | None = None) -> Evidence:
    """Two tasks have published a third; `wanted`: how often it is to be run again, `wish`: for which of these it ran."""
    first = Story("refreshes").claims("w1", "r1").ends("succeeded", "w1", "r1")
    second = copy.deepcopy(first.document) | {"_id": "refreshes:second", "key": "second"}
    target = done().document | {"_id": "refreshed:all", "name": "refreshed", "key": "all"}
    target["task_state"]["wanted"] = wanted
    target["task_state"]["worker_states"][0]["wish"] = wanted if wish is None else wish
    return first.evidence(documents={task["_id"]: task for task in (first.document, second, target)})


def test_wishes_that_are_all_there_and_served_are_no_finding() -> None:
    assert not {"X2", "L1"} & check_endings(_refreshed(wanted=1)).broken


def _for_two(story: Story) -> Document:
    return {**story.document, "task_option": {**story.document["task_option"], "concurrent_worker_cnt": 2}}


def _marks_bent(story: Story, **more: Any) -> Evidence:
    return story.evidence(marks=[replace(mark, more=more) for mark in story.marks])


def _overlapping() -> Story:
    story = Story().claims("w1", "r1").later(2_000).claims("w2", "r2").later(100)
    story.ends("succeeded", "w2", "r2", returns=1).later(100)
    story.mark("returned", "w1", "r1")
    return story


@pytest.mark.parametrize("name", ENDINGS)
def test_forged_evidence_is_found(name: str) -> None:
    invariant, forge = ENDINGS[name]
    assert invariant in check_endings(forge()).broken


def test_every_invariant_has_a_forged_history() -> None:
    assert {invariant for invariant, _ in [*FORGED.values(), *ENDINGS.values()]} == set(INVARIANTS)


def test_a_suspended_handler_is_not_at_work() -> None:
    story = _overlapping()
    assert "C3" in check_endings(story.evidence()).broken
    pid, begin = pid_of("w1"), BEGIN.timestamp()
    assert "C3" not in check_endings(story.evidence(suspended=[(pid, begin + 0.5, begin + 2.1)])).broken
    assert "C3" not in check_endings(story.evidence(suspended=[(pid, begin + 0.5, begin + 1.2)])).broken


def _child_and_successor(*beats_ms: int) -> Story:
    """A handler in a child process is killed, so that nobody knows more of it than its beats; another one follows after 2 s."""
    story = Story().claims("w1", "r1")
    passed = 0
    for beat_ms in sorted(beats_ms):
        if passed < 2_000 <= beat_ms:
            story.later(2_000 - passed).claims("w2", "r2")
            passed = 2_000
        story.later(beat_ms - passed).mark("beats", "w1", "r1")
        passed = beat_ms
    if passed < 2_000:
        story.later(2_000 - passed).claims("w2", "r2")
    return story.later(1_000).ends("succeeded", "w2", "r2", returns=1)


def test_a_child_process_that_is_killed_as_it_starts_is_not_at_work_for_ever() -> None:
    story = _child_and_successor(2_900)
    assert "C3" in check_endings(story.evidence()).broken
    story.marks = [mark for mark in story.marks if mark.what != "beats"]
    assert "C3" in check_endings(story.evidence()).broken, "of a handler that does not beat, nobody knows"
    story.marks = [replace(mark, more={"beats": True}) if mark.worker_id == "w1" else mark for mark in story.marks]
    assert "C3" not in check_endings(story.evidence()).broken


def test_a_child_process_was_at_work_until_its_last_beat() -> None:
    """And not until its worker's death, nor for ever."""
    assert "C3" not in check_endings(_child_and_successor(0, 500, 1_900).evidence()).broken
    assert "C3" in check_endings(_child_and_successor(0, 500, 1_900, 2_900).evidence()).broken
    asleep = (pid_of("w1"), BEGIN.timestamp() + 0.5, BEGIN.timestamp() + 4.0)
    story = _child_and_successor(0, 500, 1_900, 2_900)
    for mark in [mark for mark in story.marks if mark.worker_id == "w1"]:
        story.marks[story.marks.index(mark)] = replace(
            mark, pid=4_000_000
        )  # its own, so its worker's sleep excuses nothing
    assert "C3" in check_endings(story.evidence(suspended=[asleep])).broken


def test_a_worker_that_is_told_to_stop_or_killed_is_no_finding() -> None:
    assert not check_endings(done().evidence(exits=[("w1", 0), ("w1", -9), ("w1", DIED_AS_ASKED)])).broken


def test_after_a_gap_events_may_be_missing() -> None:
    story = done()
    told = [Told("", "gap", None), Told(story.id, "published", None), Told(story.id, "finished", None)]
    assert "O1" not in check_endings(story.evidence(told=told)).broken
