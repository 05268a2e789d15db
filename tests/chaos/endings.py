"""Decides, after a run, the promises that need all witnesses together: handlers, publishers, documents, the log, events."""

from __future__ import annotations

import signal
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

from tests.chaos.findings import Findings
from tests.chaos.history import DIED_AS_ASKED, Asked, Evidence, Published, Told
from tests.chaos.versions import Document
from tests.processes.history import Run, end_of, runs_by_task

MOST_KEPT = 150
"""Elements kept of a rate: a hundred buckets, and the bookings that are on their way."""
_AWAKE_AGAIN_S = 1.5
"""How long a worker that was suspended may take, after it wakes up, to learn that it lost a task and stop the handler."""
_SLOW_TO_STOP_S = 0.75
"""How much longer than its lease a handler may run because the machine is busy just when it is cancelled."""
_IN_TRANSACTION = ("writes", "transfers", "writes_in_process")
"""Handlers that record their SUCCESS themselves, before they return."""
_MAY_EXIT_WITH = (0, -signal.SIGKILL, DIED_AS_ASKED)
"""Told to stop, killed, or ended by a handler on purpose."""
REFRESHED = "refreshed:all"
"""The task that every `refreshes` publishes, to be run again. Nobody else does."""
_NOT_TO_BE_STOPPED = ("blocks", "in_thread")
"""Handlers that no cancellation reaches: one whose lease is lost runs on beside its successor, and what it did counts for
nothing. What is promised of them (docs/reliability.md) is all the rest."""


def check_endings(evidence: Evidence) -> Findings:
    """Decide every invariant that needs the whole run."""
    findings = Findings()
    runs = runs_by_task(evidence.runs)
    _check_publishes(findings, evidence)
    _check_asked(findings, evidence)
    _check_statuses(findings, evidence)
    for id_, document in evidence.documents.items():
        own = {run.start.running_id: run for run in runs.get(id_, [])}
        _check_outcomes(findings, id_, document, own, _failed_by_hooks(evidence, id_))
    for id_, of_task in runs.items():
        _check_runs(findings, evidence, id_, of_task)
    for worker_id, code in evidence.exits:
        findings.check("L1", worker_id, code in _MAY_EXIT_WITH, f"the worker ended by itself, with exit code {code}")
    for limit in evidence.limits:
        kept = len(limit.get("starts", ()))
        findings.check("M1", str(limit["_id"]), kept <= MOST_KEPT, f"its rate keeps {kept} elements")
    _check_effects(findings, evidence)
    _check_chained(findings, evidence, runs)
    _check_dependencies(findings, evidence)
    _check_told(findings, evidence)
    return findings


def _check_publishes(findings: Findings, evidence: Evidence) -> None:
    by_id: dict[str, list[Published]] = defaultdict(list)
    for published in evidence.published:
        by_id[published.id].append(published)
    for id_, tries in by_id.items():
        created = sum(published.created is True for published in tries)
        unknown = sum(published.created is None for published in tries)
        there = id_ in evidence.documents
        removed = evidence.done.get(Asked(id_, "deleted"), 0)
        answered = created or any(published.created is False for published in tries)
        gone = created <= removed if removed else not answered
        findings.check("P1", id_, there or gone, f"it was published, removed {removed} times, and is not there")
        once = created <= 1 + removed
        findings.check("P1", id_, once, f"{created} publishers were told that they created it, removed {removed} times")
        findings.check("P1", id_, created + unknown >= 1, "nobody was told that it created it")
    for id_, document in evidence.documents.items():
        chained = document["params"].get("chained_by") is not None or id_ == REFRESHED
        findings.check("P2", id_, id_ in by_id or chained, "nobody published it")


def _check_asked(findings: Findings, evidence: Evidence) -> None:
    """What was asked for so often was not done more often, to whichever task stood under the key by then."""
    for asked, count in Counter(evidence.asked).items():
        done = evidence.done.get(asked, 0)
        findings.check("P3", asked.id, done <= count, f"{asked.kind} {done} times, asked for {count} times")


def _check_statuses(findings: Findings, evidence: Evidence) -> None:
    ends = {published.id: published.ends for published in evidence.published}
    for id_, document in evidence.documents.items():
        status, allowed = document["status"], ends.get(id_, ("SUCCESS",))
        findings.check("L1", id_, status in allowed, f"it ended as {status}, not as {' or '.join(allowed)}")
        entries = document["task_state"]["worker_states"]
        if status == "SUCCESS":
            workers = {entry["worker_id"] for entry in entries if entry["state"] == "SUCCESS"}
            successes = sum(entry["state"] == "SUCCESS" for entry in entries)
            wanted = document["task_option"]["concurrent_worker_cnt"]
            findings.check("S1", id_, successes == wanted == len(workers), f"{successes} of {workers}, not {wanted}")


def _failed_by_hooks(evidence: Evidence, id_: str) -> set[str]:
    """The executions that may have been failed by the hook `before`."""
    raised = (mark for mark in evidence.marks if mark.what == "before raised" and f"{mark.name}:{mark.key}" == id_)
    return {running_id for mark in raised for running_id in mark.more["running_ids"]}


def _check_outcomes(
    findings: Findings, id_: str, document: Document, runs: dict[str, Run], failed_by_hooks: set[str]
) -> None:
    """Each entry that ended is what a handler did, or a hook."""
    cancelled = document["task_state"].get("cancel_time") is not None
    for entry in document["task_state"]["worker_states"]:
        run = runs.get(entry["running_id"])
        mine = run is not None and run.start.worker_id == entry["worker_id"]
        if entry["state"] == "SUCCESS":
            told = run.end.more.get("value") if run is not None and run.end is not None else None
            recorded_itself = (
                document["name"] in _IN_TRANSACTION and run is not None
            )  # in transaction(), before it returns
            right = run is not None and (recorded_itself or (run.returned and entry.get("returns") == told))
            findings.check("S2", id_, mine and right, f"{entry} is not what the handler did: {run}")
            obeyed = run is not None and run.end is not None and run.end.more.get("told")
            findings.check("S3", id_, not obeyed, f"{entry}, and the handler returned early as it was told to: {run}")
        elif entry["state"] == "FAIL" and entry["running_id"] in failed_by_hooks and run is None:
            continue
        elif entry["state"] == "FAIL" and not cancelled:
            raised = run is not None and run.end is not None and run.end.what == "raised"
            findings.check("S2", id_, mine and raised, f"{entry} is not what the handler did: {run}")
            met = run is not None and run.end is not None and run.end.more.get("conflict", False)
            findings.check("X3", id_, not met, f"{entry} is charged for a conflict: {run}")


def _check_runs(findings: Findings, evidence: Evidence, id_: str, runs: list[Run]) -> None:
    claims = evidence.claims.get(id_, set())
    for run in runs:
        claimed = (run.start.running_id, run.start.worker_id) in claims
        findings.check("H1", id_, claimed, f"a handler ran without a claim: {run.start}")
    document = evidence.documents.get(id_)
    if document is not None and document["name"] not in _NOT_TO_BE_STOPPED:
        most = _most_at_work(evidence, runs)
        allowed = document["task_option"]["concurrent_worker_cnt"]
        findings.check("C3", id_, most <= allowed, f"{most} handlers at once, {allowed} allowed: {runs}")


def _most_at_work(evidence: Evidence, runs: list[Run]) -> int:
    """How many handlers were at work at once, without the times in which a process was suspended or waking up."""
    steps = [step for run in runs for begin, end in _at_work(evidence, run) for step in ((begin, 1), (end, -1))]
    now = most = 0
    for _, step in sorted(steps):
        now += step
        most = max(most, now)
    return most


def _at_work(evidence: Evidence, run: Run) -> Iterator[tuple[float, float]]:
    begin, pid = run.start.mono, run.start.pid
    end = end_of(run, evidence.died)
    if run.was_stopped:
        end -= _SLOW_TO_STOP_S
    for suspended, asleep, awake in sorted(evidence.suspended):
        if suspended == pid and begin < asleep < end:
            yield begin, asleep
            begin = awake + _AWAKE_AGAIN_S
    if begin < end:
        yield begin, end


def _check_effects(findings: Findings, evidence: Evidence) -> None:
    written = Counter(evidence.effects)
    for id_, document in evidence.documents.items():
        if document["name"] in _IN_TRANSACTION:
            successes = _successes(document)
            findings.check("X1", id_, written[id_] == successes, f"{successes} SUCCESS, {written[id_]} times written")
    balances = Counter(dict.fromkeys(evidence.accounts, 0))
    for giver, taker in evidence.moves:
        balances.update({giver: -1})
        balances.update({taker: 1})
    findings.check("X1", "accounts", dict(balances) == evidence.accounts, f"{evidence.accounts}, not {balances}")


def _successes(document: Document) -> int:
    return sum(entry["state"] == "SUCCESS" for entry in document["task_state"]["worker_states"])


def _check_chained(findings: Findings, evidence: Evidence, runs: dict[str, list[Run]]) -> None:
    """A chained task is there exactly if the task that publishes it SUCCEEDed."""
    for id_, document in evidence.documents.items():
        if document["name"] == "chains":
            there = f"work:after-{document['key']}" in evidence.documents
            findings.check("X2", id_, there == (document["status"] == "SUCCESS"), f"{document['status']}, {there=}")
        parent = document["params"].get("chained_by")
        if parent is not None:
            findings.check("X2", id_, f"chains:{parent}" in runs, "the task that publishes it never ran")
    refreshed = evidence.documents.get(REFRESHED)
    wishes = sum(_successes(document) for document in evidence.documents.values() if document["name"] == "refreshes")
    counted = 0 if refreshed is None else 1 + (refreshed["task_state"].get("wanted") or 0)
    findings.check("X2", REFRESHED, counted == wishes, f"{wishes} published it, {counted} did so by the count")
    if refreshed is not None:
        entries = refreshed["task_state"]["worker_states"]
        # A failure before it, of a hook for instance, may stand beside the SUCCESS that served the last wish.
        served = [entry.get("wish") or 0 for entry in entries if entry["state"] == "SUCCESS"]
        findings.check("L1", REFRESHED, served == [counted - 1], f"run for the wishes {served}, of {counted - 1}")


def _check_dependencies(findings: Findings, evidence: Evidence) -> None:
    """What waits for others started when all of them had succeeded, by the server's time of both writes."""
    for id_, document in evidence.documents.items():
        for before in (document["task_state"].get("after") or {}).get("ids", ()):
            dependency = evidence.documents.get(before, {})
            finished = dependency.get("finish_time") if dependency.get("status") == "SUCCESS" else None
            for entry in document["task_state"]["worker_states"]:
                right = finished is not None and finished <= entry["start_time"]
                findings.check("A1", id_, right, f"{entry}, and {before} was finished at {finished}")


def _check_told(findings: Findings, evidence: Evidence) -> None:
    """A reader of events was told what happened, up to where it was told that some may be missing."""
    if not evidence.told:
        return
    gaps = sum(event.kind in ("gap", "missed") for event in evidence.told)
    by_task: dict[str, list[str]] = defaultdict(list)
    for event in evidence.told:
        by_task[event.id].append(event.kind)
    for id_, happened in evidence.happened.items():
        told = by_task.get(id_, [])
        right = told == list(happened) if not gaps else _is_part_of(told, happened)
        findings.check("O1", id_, right, f"happened: {list(happened)}; told: {told}; gaps: {gaps}")


def _is_part_of(told: Iterable[str], happened: Iterable[str]) -> bool:
    """Whether all that was told happened, in that order."""
    left = iter(happened)
    return all(kind in left for kind in told)


__all__ = ["Told", "check_endings"]
