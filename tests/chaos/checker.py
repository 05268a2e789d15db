"""Decides, for every committed write, which promises it keeps. It knows the rule from the tests' own oracle alone.

What a write was is read off the document: its stamp says who did what at which time of the server; a ping leaves none, but
shows in the lease that it renewed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from taskmesh.store.pipeline.event_stamp import read_stamp
from tests.chaos.findings import Findings
from tests.chaos.history import was_told_to_go
from tests.chaos.reading import NEVER, Reading, stripped
from tests.chaos.versions import Document, Version, told

_MAY_DROP_SUCCESS = ("retried", "published", "deleted", "succeeded", "failed")
"""The last two re-open a task for which `run_again` was asked meanwhile."""
_MAY_DROP_LIVE = ("released", "snoozed", "suspended")
_MAY_SEND_AWAY = ("retried", "published", "deleted", "option_changed")
"""What may stop a handler: it keeps its place."""
_CLOCK_STEP = timedelta(seconds=1)
_LONGEST_WRITE = timedelta(seconds=6)
"""Longer than the deadline that the engine gives a write: it is judged by the time of its beginning."""
HEARD_OF_A_PAUSE_WITHIN = timedelta(seconds=5)
"""How soon a worker that can reach the database has heard: by the stream at once, without it after two seconds."""
_MAY_TAKE_LOST = ("claimed", "settled", "retried", "published", "deleted")


@dataclass(frozen=True, slots=True)
class Write:
    """What a write was."""

    kind: str
    now: datetime | None
    """The time of the server by which it judged."""
    worker_id: str | None = None
    lost: tuple[str, ...] = ()
    roughly: datetime | None = None
    """Not before this, if `now` is not known."""


def check_version(version: Version) -> Findings:
    """Decide every invariant that one committed write can break."""
    findings = Findings()
    if version.after is None:
        _check_deletion(findings, version)
    elif version.before is None:
        _check_insert(findings, version, version.after)
    else:
        _check_update(findings, version.id, version.before, version.after, version.time)
        if _is_claim(version.before, version.after):
            since = version.paused_since
            heard_of = since is not None and version.time - since > HEARD_OF_A_PAUSE_WITHIN
            findings.check("G6", version.id, not heard_of, f"claimed at {version.time}, paused since {since}")
            window = version.window
            findings.check("G7", version.id, window is None or window.starts <= window.rate, f"claimed in {window}")
    return findings


def _is_claim(before: Document, after: Document) -> bool:
    return after.get("event") != before.get("event") and read_stamp(after["event"]).kind == "claimed"


def _check_insert(findings: Findings, version: Version, after: Document) -> None:
    state = after["task_state"]
    findings.check("D1", version.id, after["status"] == "INIT" and not state["worker_states"], after)


def _check_deletion(findings: Findings, version: Version) -> None:
    if version.before is not None:
        delete_time = version.before.get("delete_time")
        forgotten = delete_time is not None and delete_time <= version.time
        places = Reading(version.before).leaving(version.time)
        findings.check("C1", version.id, not places, f"deleted at {version.time}, with the places of {places}")
        findings.check(
            "L1",
            version.id,
            forgotten or was_told_to_go(version),
            f"deleted at {version.time}, retained until {delete_time}",
        )


def _check_update(findings: Findings, id_: str, before: Document, after: Document, time: datetime) -> None:
    write = _what_was_written(before, after, time)
    old, new = Reading(before), Reading(after)
    anew = (
        write.kind == "published" and old.deleted and not new.deleted
    )  # another task, in the place of one that is gone
    for name in ("_id", "name", "key", *(() if anew else ("publish_id",))):
        findings.check("F3", id_, before.get(name) == after.get(name), f"{name} changed in {write}")
    findings.check("F3", id_, anew or old.state["create_time"] == new.state["create_time"], write)
    if write.kind == "claimed" and write.now is not None:
        _check_claim(findings, id_, old, new, write, write.now)
    _check_entries(findings, id_, old, new, write)
    _check_counts(findings, id_, old, new, write)
    _check_budgets(findings, id_, new, write)
    if write.now is not None:
        _check_derived(findings, id_, new, write.now)


def _what_was_written(before: Document, after: Document, time: datetime) -> Write:
    if (text := told(before, after)) is not None:
        stamp = read_stamp(text)
        now = datetime.fromtimestamp(int(text.split("\x1f")[1].rstrip("aprw")) / 1000, UTC)
        return Write(stamp.kind, now, stamp.worker_id, stamp.lost)
    for old, new in _both(Reading(before), Reading(after)):
        if old["ping_expire_time"] != new["ping_expire_time"]:
            now = new["ping_expire_time"] - timedelta(milliseconds=after["task_option"]["worker_timeout_ms"])
            if now <= time + _CLOCK_STEP:
                return Write("pinged", now, new["worker_id"])
            # A longer lease, for a transaction: how long it is, the server's limit says, and when it was taken, the log.
            return Write("extended", None, new["worker_id"], roughly=time - _LONGEST_WRITE)
    places = {place["running_id"]: place["ping_expire_time"] for place in before["task_state"].get("leaving") or ()}
    for place in after["task_state"].get("leaving") or ():
        if places.get(place["running_id"], place["ping_expire_time"]) != place["ping_expire_time"]:
            return Write("kept", None, place["worker_id"], roughly=time - _LONGEST_WRITE)
    return Write("unstamped", None)


def _both(old: Reading, new: Reading) -> Iterator[tuple[Document, Document]]:
    """The entries that stand in both versions."""
    after = {entry["running_id"]: entry for entry in new.entries}
    for entry in old.entries:
        if entry["running_id"] in after:
            yield entry, after[entry["running_id"]]


def _check_claim(findings: Findings, id_: str, old: Reading, new: Reading, write: Write, now: datetime) -> None:
    known = {entry["running_id"] for entry in old.entries}
    added = [entry for entry in new.entries if entry["running_id"] not in known]
    one = len(added) == 1 and added[0]["worker_id"] == write.worker_id and added[0]["state"] == "RUNNING"
    if not findings.check("H1", id_, one, f"a claim added {added}"):
        return
    worker_id = str(write.worker_id)
    option, state = old.option, old.state
    live, done = [*old.live(now), *old.leaving(now)], old.of("SUCCESS")
    findings.check("C1", id_, len(live) + len(done) < old.room, f"{write} into {live} {done}")
    mine = [entry for entry in (*live, *done) if entry["worker_id"] == worker_id]
    findings.check("C2", id_, not mine, f"{write} though it has {mine}")
    for moment in (state.get("start_time"), state.get("resume_time"), state.get("suspended_until")):
        findings.check("G1", id_, moment is None or moment <= now, f"{write} before {moment}")
    findings.check("G2", id_, not old.expired(now), f"{write} after {state.get('expire_time')}")
    allowed = option["specific_worker_ids"]
    findings.check("G3", id_, not allowed or worker_id in allowed, f"{write}, allowed are {allowed}")
    needs = old.document.get("needs")
    findings.check("G3", id_, not needs, f"{write}, which needs {needs}: no worker here has such labels")
    open_ = not old.deleted and not old.cancelled and len(done) < old.room and not old.failed_for_good
    findings.check("G4", id_, open_, f"{write} of a task that is {old.status(now)}")
    retry_time = old.retry_time(worker_id)
    findings.check("G5", id_, retry_time is None or retry_time <= now, f"{write} before {retry_time}")
    findings.check("B1", id_, old.fail_cnt <= option["max_unexpected_retries"], f"{write} at {old.fail_cnt} FAILs")
    losses = old.timeout_cnt(now)
    findings.check("B2", id_, losses <= option["max_timeouts"], f"{write} at {losses} losses in a row")
    findings.check("H1", id_, old.claim_time(worker_id, now) <= now < NEVER, f"{write}: a gate was shut")


def _check_entries(findings: Findings, id_: str, old: Reading, new: Reading, write: Write) -> None:
    """Who changed or removed which entry, and whether it was theirs to change."""
    for before, after in _both(old, new):
        if stripped(before) != stripped(after):
            findings.check("F1", id_, _may_change(old, before, after, write), f"{write} made {before} to {after}")
    left = {entry["running_id"] for entry in new.entries}
    gone = [entry for entry in old.entries if entry["running_id"] not in left]
    for entry in gone:
        kept = entry["state"] != "SUCCESS" or write.kind in _MAY_DROP_SUCCESS
        findings.check("F2", id_, kept, f"{write} removed {entry}")
        if entry["state"] == "RUNNING" and write.now is not None:
            if entry["ping_expire_time"] > write.now:
                mine = write.worker_id == entry["worker_id"]
                reopened = new.state.get("reopened_by") == entry["running_id"]
                given_back = write.kind in _MAY_DROP_LIVE and mine
                sent_away = write.kind in _MAY_SEND_AWAY
                findings.check("F1", id_, given_back or reopened or sent_away, f"{write} removed the live {entry}")
                if sent_away:
                    keeps = entry["running_id"] in [place["running_id"] for place in new.leaving(write.now)]
                    findings.check("C1", id_, keeps, f"{write} took its place from {entry}")
            else:
                findings.check("R2", id_, write.kind in _MAY_TAKE_LOST, f"{write} removed the lost {entry}")
    if write.now is not None and write.kind != "stopped":
        kept_places = {place["running_id"] for place in new.leaving(write.now)}
        for place in old.leaving(write.now):
            findings.check("C1", id_, place["running_id"] in kept_places, f"{write} took the place of {place}")
    for entry in old.of("SUCCESS"):
        findings.check("F2", id_, entry["running_id"] in left or write.kind in _MAY_DROP_SUCCESS, write)


def _may_change(old: Reading, before: Document, after: Document, write: Write) -> bool:
    if old.cancelled and write.kind == "unstamped":  # a stopped execution notes its end, which counts for nothing
        return bool(before["state"] == "RUNNING" and after["state"] == "FAIL")
    if old.cancelled and write.kind not in ("pinged", "extended"):  # while its handler cleans up it keeps its place
        return False
    if write.kind == "retried":
        return bool(before["state"] == "FAIL" and after["state"] == "FAIL")
    now = write.now or write.roughly
    if before["state"] != "RUNNING" or now is None or before["ping_expire_time"] <= now:
        return False
    if write.kind in (
        "pinged",
        "extended",
    ):  # one write renews all that a worker holds, and one worker holds a task once
        return bool(stripped(before | {"ping_expire_time": 0}) == stripped(after | {"ping_expire_time": 0}))
    ends_as = {"succeeded": "SUCCESS", "failed": "FAIL", "progressed": "RUNNING"}
    return ends_as.get(write.kind) == after["state"] and write.worker_id == str(before["worker_id"])


def _check_counts(findings: Findings, id_: str, old: Reading, new: Reading, write: Write) -> None:
    """What a write adds to the counts of failures and losses."""
    counted = {name: new.state.get(name, 0) - old.state.get(name, 0) for name in ("timeout_cnt", "lost_cnt")}
    if write.kind in ("released", "snoozed", "suspended"):
        costs = any(n > 0 for n in counted.values()) or new.fail_cnt != old.fail_cnt
        costs = costs or (write.kind == "released" and any(counted.values()))
        findings.check("R1", id_, not costs, f"{write} counted {counted}, FAILs {old.fail_cnt} to {new.fail_cnt}")
        left = {entry["running_id"] for entry in new.entries}
        gone = [entry["worker_id"] for entry in old.entries if entry["running_id"] not in left]
        findings.check("R1", id_, gone == [write.worker_id], f"{write} gave back what {gone} held")
    if write.kind in ("claimed", "settled") and write.now is not None:
        lost = old.lost(write.now)
        right = counted == {"timeout_cnt": len(lost), "lost_cnt": len(lost)}
        told = sorted(write.lost) == sorted(entry["worker_id"] for entry in lost)
        reopened = write.kind == "settled" and not new.entries and new.state.get("wanted") is not None
        findings.check("R2", id_, told and (right or reopened), f"{write} found {lost} lost and counted {counted}")
    elif write.kind in ("pinged", "extended", "kept", "stopped", "unstamped", "cancelled"):
        findings.check("R2", id_, not any(counted.values()), f"{write} counted {counted}")


def _check_budgets(findings: Findings, id_: str, new: Reading, write: Write) -> None:
    option, room = new.option, new.room
    if not new.cancelled:
        findings.check("B1", id_, new.fail_cnt <= option["max_unexpected_retries"] + room, f"{write}: {new.state}")
    findings.check("B2", id_, new.state["timeout_cnt"] <= option["max_timeouts"] + room, f"{write}: {new.state}")
    if write.now is not None:
        taken = [*new.live(write.now), *new.leaving(write.now), *new.of("SUCCESS")]
        findings.check("C1", id_, len(taken) <= room or write.kind == "option_changed", f"{write}: {taken}")
        workers = [entry["worker_id"] for entry in taken]
        findings.check("C2", id_, len(set(workers)) == len(workers), f"{write}: {taken}")


def _check_derived(findings: Findings, id_: str, new: Reading, now: datetime) -> None:
    for name, derived in new.derived(now).items():
        stored = new.document.get(name)
        findings.check("D1", id_, stored == derived, f"{name} is {stored}, and from the entries follows {derived}")
