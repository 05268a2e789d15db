"""A task document as the checker and the oracle read it.

The rule in plain Python, from API.md and the design, without the engine's code.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

NEVER = datetime(9999, 12, 31, 23, 59, 59, 999_000, tzinfo=UTC)
LONG_AGO = datetime(1970, 1, 1, tzinfo=UTC)
ANYBODY_ELSE = "a worker that never touched the task"
_ONE_DAY_MS = 86_400_000


def ms(milliseconds: float) -> timedelta:
    """As MongoDB counts: whole milliseconds."""
    return timedelta(milliseconds=int(milliseconds))


@dataclass(frozen=True, slots=True)
class Reading:
    """One version of a task."""

    document: Mapping[str, Any]

    @property
    def state(self) -> Mapping[str, Any]:
        """`task_state`."""
        return self.document["task_state"]  # type: ignore[no-any-return]

    @property
    def option(self) -> Mapping[str, Any]:
        """`task_option`."""
        return self.document["task_option"]  # type: ignore[no-any-return]

    @property
    def entries(self) -> list[dict[str, Any]]:
        """`worker_states`."""
        return self.state["worker_states"]  # type: ignore[no-any-return]

    @property
    def room(self) -> int:
        """How many workers the task allows."""
        return int(self.option["concurrent_worker_cnt"])

    @property
    def cancelled(self) -> bool:
        """Whether it was cancelled."""
        return self.state.get("cancel_time") is not None

    def of(self, state: str) -> list[dict[str, Any]]:
        """The entries in one state."""
        return [entry for entry in self.entries if entry["state"] == state]

    def live(self, now: datetime) -> list[dict[str, Any]]:
        """The entries that hold a lease."""
        return [entry for entry in self.of("RUNNING") if entry["ping_expire_time"] > now]

    def lost(self, now: datetime) -> list[dict[str, Any]]:
        """The entries whose lease ran out."""
        return [entry for entry in self.of("RUNNING") if entry["ping_expire_time"] <= now]

    def leaving(self, now: datetime) -> list[dict[str, Any]]:
        """The executions of earlier lives, or of excluded workers, that keep their places: their handlers may be at work."""
        return [entry for entry in self.state.get("leaving") or () if entry["ping_expire_time"] > now]

    @property
    def deleted(self) -> bool:
        """Whether it is there for nobody, but for the places that it keeps."""
        return self.state.get("deleted_time") is not None

    @property
    def fail_cnt(self) -> int:
        """How many executions have failed."""
        return len(self.of("FAIL")) + int(self.state.get("dropped_fail_cnt") or 0)

    def timeout_cnt(self, now: datetime) -> int:
        """How many executions were lost in a row."""
        return int(self.state["timeout_cnt"]) + len(self.lost(now))

    def expired(self, now: datetime) -> bool:
        """Whether it may not start any more."""
        expire_time = self.state.get("expire_time")
        return expire_time is not None and expire_time <= now and not self.begun

    @property
    def begun(self) -> bool:
        """Whether an execution has recorded a step, a sleep or a wait."""
        return self.state.get("steps_bytes") is not None

    @property
    def failed_for_good(self) -> bool:
        """Whether a handler raised `TaskFailed`."""
        return any(entry.get("final") for entry in self.of("FAIL"))

    @property
    def dependents(self) -> list[str]:
        """The tasks that wait for it, or have."""
        return self.state.get("dependents") or []

    @property
    def waits(self) -> bool:
        """Whether it waits for others."""
        return self.state.get("waits_for") is not None

    @property
    def back_in_line(self) -> bool:
        """Whether it has left its line, in which it stands again if it is begun anew."""
        return self.state.get("line") is not None and self.document.get("status", "INIT") not in ("INIT", "RUNNING")

    def given_up(self, now: datetime) -> bool:
        """Whether it cannot succeed any more."""
        if self.state.get("dependency_failure") is not None:
            return True
        used_up = self.fail_cnt > self.option["max_unexpected_retries"]
        return self.failed_for_good or used_up or self.timeout_cnt(now) > self.option["max_timeouts"]

    def status(self, now: datetime) -> str:
        """Where the task stands."""
        if self.deleted:
            return "DELETED"
        if self.cancelled:
            return "CANCELLED"
        if len(self.of("SUCCESS")) >= self.room:
            return "SUCCESS"
        if self.live(now):
            return "RUNNING"
        if self.given_up(now):
            return "FAIL"
        return "EXPIRED" if self.expired(now) else "INIT"

    def finished(self, now: datetime) -> bool:
        """Whether nothing more happens to it."""
        return self.status(now) not in ("INIT", "RUNNING")

    def retry_time(self, worker_id: str) -> datetime | None:
        """When this worker's delay after the last failure that concerns it is over."""
        of_task = self.option["unexpected_retry_delay_scope"] == "task"
        fails = [entry for entry in self.of("FAIL") if of_task or entry["worker_id"] == worker_id]
        if not fails:
            return None
        last = fails[-1]
        if last.get("retry_time") is not None:
            return last["retry_time"]  # type: ignore[no-any-return]
        further = min(100, (self.fail_cnt if of_task else len(fails)) - 1)
        delay = self.option["unexpected_retry_delay_ms"]
        grown = min(max(_ONE_DAY_MS, delay), delay * self.option["unexpected_retry_backoff"] ** further)
        jitter = 1 + self.option["unexpected_retry_jitter"] * last.get("retry_jitter", 0)
        return last["fail_time"] + ms(grown * jitter)  # type: ignore[no-any-return]

    def claim_time(
        self, worker_id: str, now: datetime, *, parent: str | None = None, labels: Collection[str] | None = ()
    ) -> datetime:
        """From when on this worker may claim the task if nobody touches it, or `NEVER`. `labels`: None: whatever is needed."""
        done, at_work = self.of("SUCCESS"), [*self.live(now), *self.leaving(now)]
        allowed = self.option["specific_worker_ids"]
        never = (
            self.deleted
            or self.cancelled
            or self.given_up(now)
            or self.expired(now)
            or len(done) >= self.room
            or self.waits
            or self.state.get("flow") is not None
            or self.state.get("in_line") is True
            or worker_id in [entry["worker_id"] for entry in done]
            or (allowed and worker_id not in allowed and parent not in allowed)
            or (labels is not None and not set(self.document.get("needs") or ()) <= set(labels))
        )
        if never:
            return NEVER
        times = [self.state.get(name) for name in ("start_time", "resume_time", "suspended_until")]
        times += [entry["ping_expire_time"] for entry in at_work if entry["worker_id"] == worker_id]
        over = len(at_work) + len(done) - self.room
        if over >= 0:
            times.append(sorted(entry["ping_expire_time"] for entry in at_work)[over])
        times.append(self.retry_time(worker_id))
        return max((time for time in times if time is not None), default=LONG_AGO)

    def moves(self, now: datetime) -> bool:
        """Whether the executions that kept it where it is, when a publication wanted it elsewhere, have ended."""
        wanted = self.state.get("moves_to")
        return wanted is not None and not any(entry["running_id"] in wanted["held"] for entry in self.live(now))

    def stands_in(self, now: datetime) -> str | None:
        """The queue in which it stands, but for a dead letter."""
        if self.moves(now):
            return str(self.state["moves_to"]["queue"])
        return self.state.get("home") or self.document.get("queue")

    def home(self, now: datetime) -> str | None:
        """Of a dead letter, which stands in the queue that its option names: the queue that it came from."""
        is_dead = self.status(now) == "FAIL" and self.option.get("on_fail") is not None
        return self.stands_in(now) if is_dead else None

    def derived(self, now: datetime) -> dict[str, Any]:
        """What a write at this time has to derive from the entries; None: the field is absent."""
        finished = self.finished(now)
        # `create_time` shuts no gate: it is the publisher's idea of the server's time, which may be a little ahead.
        workers = self.option["specific_worker_ids"] or [ANYBODY_ELSE]
        opens = max(self.state["create_time"], min(self.claim_time(id_, now, labels=None) for id_ in workers))
        if self.back_in_line:
            opens = NEVER
        ends = [
            None if self.begun else self.state.get("expire_time"),
            *(entry["ping_expire_time"] for entry in self.live(now)),
        ]
        settles = [end for end in sorted(end for end in ends if end is not None) if self.finished(end)]
        if self.state.get("moves_to") is not None and not self.moves(now):
            settles = sorted([*settles, max(entry["ping_expire_time"] for entry in self.live(now))])
        place = self.state["moves_to"] if self.moves(now) else self.document
        queue = self.option["on_fail"] if self.home(now) is not None else self.stands_in(now)
        finish_time = (self.document.get("finish_time") or now) if finished else None
        status = self.status(now)
        retained_ms = self.option["retain_success_ms" if status == "SUCCESS" else "retain_failed_ms"]
        delete_time = None
        if finish_time is not None and (self.deleted or retained_ms is not None):
            # Not before the places that it keeps are free.
            places = [entry["ping_expire_time"] for entry in (*self.live(now), *self.leaving(now))]
            begins = max(finish_time, self.state.get("released_time") or finish_time)
            delete_time = max([now if self.deleted else begins + ms(retained_ms), *places])
        told = self.state.get("ask_time") is None if self.deleted else self.state.get("released_time") is not None
        if self.dependents and not told:
            delete_time = None  # who waits for it needs it
        blocks = status == "FAIL" and self.state.get("on_sequence_failure") == "block"
        if self.state.get("line") is not None and (blocks or self.state.get("ask_time") is not None):
            delete_time = None  # who is behind it in line does not know yet, or may not go on
        return {
            "status": status,
            "queue": queue,
            "group": place.get("group"),
            "pinned": bool(self.option["specific_worker_ids"] or self.document.get("needs")),
            "next_claim_time": None if opens == NEVER else opens,
            "settle_time": None if finished or not settles else settles[0],
            "finish_time": finish_time,
            "delete_time": delete_time,
        }


def stripped(value: Any) -> Any:
    """A document without what is null or absent alike."""
    if isinstance(value, dict):
        return {name: stripped(part) for name, part in value.items() if part is not None}
    return [stripped(part) for part in value] if isinstance(value, list) else value
