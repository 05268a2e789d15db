"""Makes up histories: good ones by the rule as the checker reads it, and bad ones by bending those. No database."""

from __future__ import annotations

import copy
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from taskmesh import TaskOption
from tests.chaos.checker import check_version
from tests.chaos.findings import Findings
from tests.chaos.history import Evidence, Log, Published, Told
from tests.chaos.reading import Reading, ms
from tests.chaos.versions import Document, Version
from tests.processes.history import Mark

BEGIN = datetime(2030, 1, 1, tzinfo=UTC)
_ENDS = {"succeeded": ("SUCCESS", "success_time"), "failed": ("FAIL", "fail_time")}


class Story:
    """One task's life, write by write, as the engine should have written it."""

    def __init__(self, name: str = "work", key: str = "k", **option: Any) -> None:
        self.now = BEGIN
        self.id = f"{name}:{key}"
        times = {time: option.pop(time, None) for time in ("start_time", "expire_time")}
        tuned = TaskOption(**{"ping_interval_ms": 500, "worker_timeout_ms": 1_000, **option}).stored()
        self.document: Document = {
            "_id": self.id,
            "name": name,
            "key": key,
            "publish_id": 1,
            "params": {},
            "task_option": tuned,
            "task_state": {"create_time": BEGIN, **times, "timeout_cnt": 0, "worker_states": []},
        }
        self.versions: list[Version] = []
        self.marks: list[Mark] = []
        self.writes(lambda _: None)

    @property
    def state(self) -> Document:
        """`task_state`."""
        return self.document["task_state"]  # type: ignore[no-any-return]

    def later(self, milliseconds: int) -> Story:
        """Let time pass."""
        self.now += ms(milliseconds)
        return self

    def writes(
        self, change: Callable[[Document], object], kind: str | None = None, worker: str = "", *lost: str
    ) -> Story:
        """Let something be written, right or wrong; what is derived follows from it."""
        before = copy.deepcopy(self.document) if self.versions else None
        change(self.document)
        if kind is not None:
            moment = round(self.now.timestamp() * 1000)
            self.document["event"] = "\x1f".join([kind, str(moment), worker, *lost])
        self.document |= Reading(self.document).derived(self.now)
        self.versions.append(Version(self.id, self.now, before, copy.deepcopy(self.document)))
        return self

    def underived(self, change: Callable[[Document], object]) -> Story:
        """Change what is derived, as only the derivation may."""
        self.writes(lambda _: None, "option_changed")
        last = self.versions.pop()
        change(self.document)
        self.versions.append(Version(last.id, last.time, last.before, copy.deepcopy(self.document)))
        return self

    def claims(self, worker: str, running_id: str) -> Story:
        """Claim it, whether the rule allows it or not."""
        lost = Reading(self.document).lost(self.now)
        lease = ms(self.document["task_option"]["worker_timeout_ms"])
        entry = {
            "running_id": running_id,
            "worker_id": worker,
            "state": "RUNNING",
            "ping_expire_time": self.now + lease,
        }
        count = len(lost)

        def claim(document: Document) -> None:
            state = document["task_state"]
            state["timeout_cnt"] += count
            state["lost_cnt"] = state.get("lost_cnt", 0) + count
            state["worker_states"] = [e for e in state["worker_states"] if e not in lost] + [entry]

        self.mark("started", worker, running_id)
        return self.writes(claim, "claimed", worker, *(e["worker_id"] for e in lost))

    def ends(self, kind: str, worker: str, running_id: str, delay_ms: int | None = None, **fields: Any) -> Story:
        """End an execution: `succeeded`, `failed`, `released`, `snoozed`."""
        [mine] = [entry for entry in self.state["worker_states"] if entry["running_id"] == running_id]

        def end(document: Document) -> None:
            state = document["task_state"]
            state["worker_states"] = [e for e in state["worker_states"] if e is not mine]
            if delay_ms is not None:
                state["resume_time"] = self.now + ms(delay_ms)
            if kind in _ENDS:
                ended, moment = _ENDS[kind]
                state["worker_states"].append({**mine, "state": ended, moment: self.now, **fields})
                state["timeout_cnt"] = 0

        if kind == "succeeded":
            self.mark("returned", worker, running_id, value=fields.get("returns"))
        else:
            self.mark("raised", worker, running_id, error="ValueError")
        return self.writes(end, kind, worker)

    def changes_entry(self, running_id: str, kind: str | None = None, worker: str = "", **fields: Any) -> Story:
        """Change fields of an entry, whether anybody may or not."""

        def change(document: Document) -> None:
            for entry in document["task_state"]["worker_states"]:
                if entry["running_id"] == running_id:
                    entry.update(fields)

        return self.writes(change, kind, worker)

    def pings(self, running_id: str) -> Story:
        """Renew the lease, whether it is live or not."""
        lease = ms(self.document["task_option"]["worker_timeout_ms"])
        return self.changes_entry(running_id, ping_expire_time=self.now + lease)

    def mark(self, what: str, worker: str, running_id: str, **more: Any) -> None:
        """Let a handler note something."""
        name, _, key = self.id.partition(":")
        mono = self.now.timestamp()
        self.marks.append(Mark(what, name, key, worker, running_id, 1, pid_of(worker), mono, mono, more))

    # --- what is known of it ---

    def findings(self) -> Findings:
        """What the checker finds in the versions."""
        findings = Findings()
        for version in self.versions:
            findings += check_version(version)
        return findings

    def evidence(self, **changes: Any) -> Evidence:
        """All witnesses of this one task, telling the truth but for `changes`."""
        log = Log()
        for version in self.versions:
            log.add(version)
        effect = self.document["name"] in ("writes", "transfers") and self.document["status"] == "SUCCESS"
        truth: dict[str, Any] = {
            "published": [Published(self.id, True, (self.document["status"],))],
            "documents": {self.id: self.document},
            "limits": [{"_id": "default", "starts": [{"n": 1}]}],
            "marks": self.marks,
            "claims": log.claims,
            "happened": log.happened,
            "done": log.done,
            "asked": list(log.done.elements()),
            "told": [Told(self.id, kind, None) for kind in log.happened[self.id]],
            "effects": [self.id] * effect,
        }
        return Evidence(**{**truth, **changes})


def pid_of(worker: str) -> int:
    """The process id of a made-up worker."""
    return sum(map(ord, worker))
