"""A task's life in plain Python: the rule written a second time, from API.md, for tests alone.

An `Oracle` is one key of the collection: the document that should stand there, or None. Each verb takes the moment at
which it happens, and returns what the store's verb of that name reports. No MongoDB, no clock, no chance. What a document
means when it is read is in `tests.chaos.reading`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from taskmesh.model.configuration import Configuration
from taskmesh.model.errors import TaskRunning
from taskmesh.store.publication import Publication
from tests.chaos.reading import NEVER, Reading, ms, stripped

Document = dict[str, Any]
Entries = list[Document]
KEPT_FAILS, KEPT_LOSSES, KEPT_STAGES = 32, 8, 100
RECORDED = ("steps", "steps_bytes", "signals", "signals_bytes", "suspended_until", "suspended_for")


class Oracle:
    """One key, and the document that belongs there."""

    def __init__(self, document: Document | None = None) -> None:
        self.document: Any = document

    @property
    def state(self) -> Any:
        return self.document["task_state"]

    @property
    def reading(self) -> Reading:
        """What the document means."""
        return Reading(self.document)

    def entries(self, state: str) -> Entries:
        return self.reading.of(state)

    def live(self, now: datetime) -> Entries:
        return self.reading.live(now)

    def lost(self, now: datetime) -> Entries:
        return self.reading.lost(now)

    def held(self, running_id: str, now: datetime) -> Document | None:
        """The entry that this execution may still write to."""
        live = self.live(now) if self.document and self.document["status"] == "RUNNING" else []
        return next((entry for entry in live if entry["running_id"] == running_id), None)

    def drop(self, entries: Entries) -> None:
        self.state["worker_states"] = [entry for entry in self.state["worker_states"] if entry not in entries]

    def expired(self, now: datetime) -> bool:
        return self.reading.expired(now)

    def status(self, now: datetime) -> str:
        return self.reading.status(now)

    def finished(self, now: datetime) -> bool:
        return self.reading.finished(now)

    def claim_time(self, worker_id: str, now: datetime, **who: Any) -> datetime:
        """From when on this worker may claim the task, as things stand, or `NEVER`."""
        created: datetime = self.state["create_time"]
        return max(created, self.reading.claim_time(worker_id, now, **who))

    def derive(self, now: datetime) -> None:
        """Write down what follows from the entries, as every write does."""
        reading, moves = self.reading, self.reading.moves(now)
        was_finished = self.document.get("status", "INIT") not in ("INIT", "RUNNING")
        finished = reading.finished(now)
        changed = finished != was_finished or (reading.deleted and self.document.get("status") != "DELETED")
        line = self.state.get("line")
        has_children = self.state.get("has_children") is True
        if changed and (reading.dependents or has_children or (was_finished and reading.waits) or line is not None):
            self.state["ask_time"] = now + ms(1) if self.state.get("ask_time") == now else now
        self.state.pop("pending", None)
        if reading.dependents and not finished:
            self.state["pending"] = True
        derived, back_in_line, home = reading.derived(now), reading.back_in_line, reading.home(now)
        self.document |= derived
        blocks = derived["status"] == "FAIL" and self.state.get("on_sequence_failure") == "block"
        if finished and not blocks:
            self.state.pop("in_line", None)
        elif not finished and back_in_line:
            self.state.update({"in_line": True, "place": (self.state.get("place") or 0) + 1})
        if moves:
            self.state["moves_to"] = None
        self.state.pop("home", None)
        if home is not None:
            self.state["home"] = home

    def stamp(self, now: datetime, kind: str, *workers: str) -> None:
        self.document["event"] = [kind, *workers]
        self.derive(now)

    def note_record(self, now: datetime, worker_id: str) -> None:
        self.document["record_event"] = ["step_recorded", worker_id]
        self.derive(now)

    def forgotten(self, now: datetime) -> bool:
        """Whether the key is free again: the task was deleted, or is finished and past its retention."""
        return bool(self.document and (self.reading.deleted or self.removable(now)))

    def removable(self, now: datetime) -> bool:
        """Whether nobody needs the document any more."""
        return bool(self.document and (self.document.get("delete_time") or NEVER) <= now)

    def sent_away(self, now: datetime, entries: Entries) -> Entries | None:
        """The places that are kept when these entries are removed; None: the field is absent."""
        names = ("running_id", "worker_id", "ping_expire_time")
        moved = [{name: entry[name] for name in names} for entry in self.live(now) if entry in entries]
        return [*self.reading.leaving(now), *moved] or None

    def publish(self, wish: Publication, now: datetime) -> tuple[bool, bool]:
        """Return (created, updated). Raises `TaskRunning`."""
        asked = wish.configuration
        delay_ms = asked.delay_ms if asked.debounce_ms is None else asked.debounce_ms
        start_time = asked.start_time if delay_ms is None else now + ms(delay_ms)
        times = {"start_time": start_time, "expire_time": asked.expire_time}
        if self.document is None or self.forgotten(now):
            return self._publish_new(wish, times, now)
        if not asked.changes_existing:
            return False, False
        before = copy.deepcopy(self.document)
        waited = self.status(now) == "INIT"
        running = self.document["status"] == "RUNNING" and bool(self.live(now))
        if running and asked.not_update_running:
            raise TaskRunning("and must not be disturbed")
        if self._throttled(asked, now):
            return False, False
        again = asked.run_again or asked.replace_running or bool(asked.debounce_ms or asked.throttle_ms)
        if asked.debounce_ms is not None:
            times["start_time"] = self._put_off(asked.debounce_ms, asked.debounce_max_ms, now)
        if asked.update_existing_params or again:
            self._take_params(wish.params, asked.placed, now, again=again)
            self.state.update({name: time for name, time in times.items() if time is not None or again})
            self._tune(asked.tuned, now)
        if again:
            if asked.sequence_key is not None and self.document["status"] not in ("INIT", "RUNNING"):
                self.state.update(self._line(asked))
            self.state["wanted"] = (self.state.get("wanted") or 0) + 1
            if not running or asked.replace_running:
                self._begin_anew(now)
        if not running:
            self._clean(asked, before, now)
        if stripped(self.document) != stripped(before):
            # Behind what waits, if it did not wait itself.
            number = {"publish_number": wish.number} if asked.begins_anew and not waited else {}
            self.document |= {"event": ["replaced" if asked.replace_running else "published"], **number}
        self.derive(now)
        return False, stripped(self.document) != stripped(before)

    def _publish_new(self, wish: Publication, times: Document, now: datetime) -> tuple[bool, bool]:
        asked = wish.configuration
        state: Document = {"create_time": now, **times, "timeout_cnt": 0, "worker_states": []}
        state["debounced_since"] = now if asked.debounce_ms is not None else None
        state["throttled_since"] = now if asked.throttle_ms is not None else None
        told = {} if self.document is None else {"event": ["published"]}  # an insert tells by itself
        leaving = None if self.document is None else self.sent_away(now, self.entries("RUNNING"))
        state["leaving"] = leaving
        if asked.after:
            unlinked = {"unlinked": True} if asked.on_dependency_failure == "run" else {}
            state |= asked.after.stored() | {"waits_for": asked.on_dependency_failure, "ask_time": now} | unlinked
        if asked.sequence_key is not None:
            state |= {**self._line(asked), "place": wish.number, "in_line": True, "ask_time": now}
        untold = self.document is not None and self.reading.deleted and self.state.get("ask_time") is not None
        if untold and self.reading.dependents:  # who has not heard that the old one was deleted, waits for the new one
            state |= {name: self.state[name] for name in ("dependents", "ask_time")}
        self.document = {
            "queue": asked.queue,
            "group": asked.group,
            "params": wish.params,
            "task_option": asked.option.stored(),
            "task_state": state,
            "publish_number": wish.number,
            **told,
        }
        # If it has expired, those who read will see.
        self.derive(now if leaving or state.get("dependents") else min(now, (asked.expire_time or NEVER) - ms(1)))
        return True, False

    def _clean(self, asked: Configuration, before: Document, now: datetime) -> None:
        if asked.clean_success:
            if any(entry["state"] == "SUCCESS" for entry in before["task_state"]["worker_states"]):
                self.state.update(dict.fromkeys(RECORDED))
                self._back_to_first_stage()
            self.drop(self.entries("SUCCESS"))
        if asked.clean_failed:
            self.state.update(self._values())
            self.drop([*self.entries("FAIL"), *self.lost(now)])
            counts = ("dropped_fail_cnt", "losses", "lost_cnt", "resume_time", "reopened_by", "conflict_cnt")
            forgotten = (*counts, "dependency_failure")
            self.state.update({"timeout_cnt": 0, **dict.fromkeys(forgotten)})

    @staticmethod
    def _line(asked: Configuration) -> Document:
        """In which line a publication puts the task."""
        policy = "block" if asked.on_sequence_failure == "block" else None
        return {"line": f"{asked.queue}:{asked.sequence_key}", "on_sequence_failure": policy}

    def _take_params(self, params: Document, placed: Mapping[str, Any], now: datetime, *, again: bool) -> None:
        """A publication says how the task begins. What a handler gave to a later stage it leaves alone, unless it moves it."""
        stages: Entries = self.state.get("stages") or []
        follows, changes = True, self.document["params"] != params
        if stages:
            first = stages[0]
            follows = not again and ("queue" in placed or self.state.get("own_params") is None)
            changes = first["params"] != params or (follows and changes)
            told = {"queue": placed["queue"]} if "queue" in placed else {}
            self.state["stages"] = [{**first, "params": params, **told}, *stages[1:]]
        if changes:
            self.state["params_version"] = (self.state.get("params_version") or 0) + 1
        if follows:
            self.document["params"] = params
            self.state["own_params"] = None
        stays = stages and again
        self._wish_elsewhere({name: each for name, each in placed.items() if not (stays and name == "queue")}, now)

    def _throttled(self, asked: Configuration, now: datetime) -> bool:
        """Whether the publication comes too soon; if not, the next one is measured from it."""
        last = self.state.get("throttled_since") or self.state["create_time"]
        if asked.throttle_ms is None or last + ms(asked.throttle_ms) > now:
            return asked.throttle_ms is not None
        self.state["throttled_since"] = now
        return False

    def _put_off(self, by_ms: int, most_ms: int | None, now: datetime) -> datetime:
        """Later with each publication, up to the first execution that begins after them, but not for ever."""
        since = self.state.get("debounced_since")
        begun = since is not None and any(entry["start_time"] >= since for entry in self.state["worker_states"])
        if since is None or begun or self.finished(now):
            since = self.state["debounced_since"] = now
        latest = NEVER if most_ms is None else since + ms(most_ms)
        return min(now + ms(by_ms), latest)

    def _wish_elsewhere(self, placed: Mapping[str, Any], now: datetime) -> None:
        """Where limits count what runs, it stays till that has ended."""
        stands = self.document | {"queue": self.state.get("home") or self.document["queue"]}
        goes_to = self.state.get("moves_to") or stands
        place = {name: goes_to.get(name) for name in ("queue", "group")}
        if place | dict(placed) != place:
            self.state["moves_to"] = place | dict(placed) | {"held": [entry["running_id"] for entry in self.live(now)]}

    def _back_to_first_stage(self) -> None:
        """Where and how it began, if it has gone on by `Next` since."""
        if stages := self.state.get("stages"):
            self.document |= {"queue": stages[0]["queue"], "params": stages[0]["params"]}
            self.state.update(stages=None, own_params=None, home=None)
            if self.state.get("moves_to") is not None:
                self.state["moves_to"] = self.state["moves_to"] | {"queue": stages[0]["queue"]}

    def _begin_anew(self, now: datetime, **changes: Any) -> None:
        self._start_afresh(now, **changes)
        self._back_to_first_stage()

    def _go_on(self, entry: Document, to: Document, now: datetime) -> None:
        """`Next`: the task is as if nobody had tried it, in another queue; what ended here is a stage of it."""
        stages: Entries = self.state.get("stages") or []
        wanted = self.state.get("moves_to") or {}
        ended = {
            "queue": self.document["queue"] if stages else wanted.get("queue") or self.document["queue"],
            "params": self.document["params"],
            "wish": entry.get("wish") or 0,
            "steps": self.state.get("steps") or [],
            "end_time": now,
            **{name: entry[name] for name in ("worker_id", "running_id", "start_time")},
        }
        if len(stages) >= KEPT_STAGES:
            stages = [stages[0], *stages[len(stages) - (KEPT_STAGES - 2) :]]
        version = self.state.get("params_version")
        if "params" in to:
            self.document["params"], version = to["params"], (version or 0) + 1
        if wanted:
            self.document["group"] = wanted.get("group")
        kept = {name: self.state.get(name) for name in ("own_params", "signals", "signals_bytes")}
        if "params" in to:
            kept["own_params"] = True
        changes = {"params_version": version, "moves_to": None, "steps_bytes": 0}
        self._start_afresh(now, stages=[*stages, ended], **kept, **changes)
        self.document["queue"] = to["queue"]

    def _start_afresh(self, now: datetime, **changes: Any) -> None:
        """As if nobody had tried, but with the task's times, its count of wishes and the places that are kept."""
        own = (
            "create_time",
            "start_time",
            "expire_time",
            "wanted",
            "params_version",
            "moves_to",
            "debounced_since",
            "throttled_since",
            "home",
        )
        line = ("line", "place", "in_line", "on_sequence_failure")
        links = (
            "flow",
            "after",
            "waits_for",
            "unlinked",
            "dependents",
            "has_children",
            "ask_time",
            "stages",
            "own_params",
        )
        kept = (*own, *line, *links)
        times = {name: self.state.get(name) for name in kept}
        leaving = self.sent_away(now, self.entries("RUNNING"))
        self.document["task_state"] = {**times, "timeout_cnt": 0, "worker_states": [], "leaving": leaving, **changes}

    def may_be_for(self, worker_id: str) -> bool:
        """Whether the worker is allowed and has not had its SUCCESS."""
        named = self.document["task_option"]["specific_worker_ids"]
        done = [entry["worker_id"] for entry in self.entries("SUCCESS")]
        return (not named or worker_id in named) and worker_id not in done

    def may_claim(self, worker_id: str, now: datetime, *, closed: bool = False) -> bool:
        return self.document is not None and not closed and self.claim_time(worker_id, now) <= now

    def claim(self, worker_id: str, running_id: str, now: datetime, *, closed: bool = False) -> bool:
        if not self.may_claim(worker_id, now, closed=closed):
            return False
        lost = self._count_lost(now)
        entry = {"running_id": running_id, "worker_id": worker_id, "state": "RUNNING", "start_time": now}
        entry["ping_expire_time"] = now + ms(self.document["task_option"]["worker_timeout_ms"])
        entry |= {"wish": self.state.get("wanted"), "params_version": self.state.get("params_version")}
        self.state["worker_states"].append(entry)
        if self.state.get("leaving") is not None:
            self.state["leaving"] = self.reading.leaving(now)
        self.stamp(now, "claimed", worker_id, *lost)
        return True

    def _count_lost(self, now: datetime) -> list[str]:
        """Drop the entries whose lease ran out, and count them; return whose they were."""
        lost, state = self.lost(now), self.state
        if lost:
            kept = ("running_id", "worker_id", "start_time", "ping_expire_time", "wish")
            evidence = [{name: entry.get(name) for name in kept} for entry in lost]
            state["losses"] = [*(state.get("losses") or []), *evidence][-KEPT_LOSSES:]
            state["lost_cnt"] = (state.get("lost_cnt") or 0) + len(lost)
            state["timeout_cnt"] += len(lost)
            self.drop(lost)
        return [entry["worker_id"] for entry in lost]

    def ping(self, running_id: str, lease_ms: int, now: datetime) -> bool:
        if (entry := self.held(running_id, now)) is None:
            return False
        entry["ping_expire_time"] = now + ms(lease_ms)
        self.derive(now)
        return True

    def keep_place(self, running_id: str, lease_ms: int, now: datetime) -> bool:
        if self.document is None:
            return False
        mine = [e for e in (*self.live(now), *self.reading.leaving(now)) if e["running_id"] == running_id]
        for entry in mine:
            entry["ping_expire_time"] = now + ms(lease_ms)
        if mine:
            self.state["leaving"] = self.state.get("leaving") or None
            self.derive(now)
        return bool(mine)

    def report(self, running_id: str, fields: Document, progress: Document | None, now: datetime) -> bool:
        if (entry := self.held(running_id, now)) is None:
            return False
        entry |= fields
        if progress:  # logs alone are no progress
            self.state.update({"timeout_cnt": 0, "progress": progress})
        self.stamp(now, "progressed", entry["worker_id"])
        return True

    def finish(
        self,
        kind: str,
        running_id: str,
        fields: Document,
        delay_ms: int | None,
        now: datetime,
        step: Document | None = None,
    ) -> bool:
        """False if the execution had lost the task; but `stopped` only notes the end of one that was stopped from outside."""
        if kind == "stopped":
            return self.document is not None and self._note_stopped(running_id, fields, now)
        if (entry := self.held(running_id, now)) is None:
            return False
        resume_time = None if delay_ms is None else now + ms(delay_ms)
        if kind == "succeeded":
            entry |= {"state": "SUCCESS", "success_time": now, **fields}
        else:
            self.drop([entry])
            if resume_time is not None:  # nobody at all comes back before the latest of such moments
                self.state["resume_time"] = max(resume_time, self.state.get("resume_time") or resume_time)
        if kind == "failed":
            entry |= {"state": "FAIL", "fail_time": now, "retry_time": resume_time, **fields}
            self.state["worker_states"].append(entry)
            droppable = [entry for entry in self.entries("FAIL") if not entry.get("final")]
            if (surplus := len(droppable) - KEPT_FAILS) > 0:
                self.drop(droppable)
                self.state["worker_states"] += droppable[surplus:]
                self.state["dropped_fail_cnt"] = (self.state.get("dropped_fail_cnt") or 0) + surplus
        if kind == "suspended":
            self._suspend(step or {}, now)
        if kind == "moved":
            self._go_on(entry, fields, now)
        if kind != "released":  # its worker lives, so what it lost before was not lost in a row with what comes
            self.state["timeout_cnt"] = 0
            conflicts = (self.state.get("conflict_cnt") or 0) + 1
            self.state["conflict_cnt"] = conflicts if kind == "conflicted" else None
        if kind in ("succeeded", "failed"):
            self._reopen_if_wished(now, running_id)
        self.stamp(now, "snoozed" if kind == "conflicted" else kind, entry["worker_id"])
        return True

    def _suspend(self, wait: Document, now: datetime) -> None:
        """Shut the gate, unless a signal that would open it is there."""
        known = next((record for record in self.state.get("steps") or [] if record["id"] == wait.get("id")), None)
        until = known.get("until") if known else None
        if "record" in wait:
            timeout_ms = wait["timeout_ms"]
            until = until or (None if timeout_ms is None else now + ms(timeout_ms))
            self.state["steps"] = [*(self.state.get("steps") or []), wait["record"] | {"until": until}]
            self.state["steps_bytes"] = (self.state.get("steps_bytes") or 0) + wait["record"]["size"]
        arrived = any(signal["event"] == wait.get("event") for signal in self.state.get("signals") or [])
        self.state["suspended_until"] = now if arrived else until or NEVER
        told = {name: wait[name] for name in ("id", "kind", "name", "event") if name in wait}
        self.state["suspended_for"] = told | {"until": until}

    def record(self, running_id: str, record: Document, delay_ms: int | None, lease_ms: int, now: datetime) -> bool:
        """Add a record, once; it renews the lease, and counts as progress."""
        entry = self.held(running_id, now)
        if entry is None or any(known["id"] == record["id"] for known in self.state.get("steps") or []):
            return False
        until = {} if delay_ms is None else {"until": now + ms(delay_ms)}
        self._keep([*(self.state.get("steps") or []), {**record, "time": now, **until}], entry, lease_ms, now)
        self.state["timeout_cnt"] = 0
        self.note_record(now, entry["worker_id"])
        return True

    def _keep(self, steps: Entries, entry: Document, lease_ms: int, now: datetime) -> None:
        self.state.update(steps=steps, steps_bytes=sum(record["size"] for record in steps))
        if entry["ping_expire_time"] <= now + ms(lease_ms - lease_ms // 4):
            entry["ping_expire_time"] = now + ms(lease_ms)

    def take_signal(
        self, running_id: str, record: Document, event: str, timeout_ms: int | None, lease_ms: int, now: datetime
    ) -> Document | None:
        """Look whether what is waited for has come, and return the record of that; None if the lease is lost."""
        if (entry := self.held(running_id, now)) is None:
            return None
        steps: Entries = self.state.get("steps") or []
        known = next((each for each in steps if each["id"] == record["id"]), None)
        if known is not None and known.get("time") is not None:
            self.derive(now)  # nothing else is written, but a lease may have run out since the last write
            return known
        ends = None if timeout_ms is None else now + ms(timeout_ms)
        until = known.get("until") if known is not None else ends
        signals: Entries = self.state.get("signals") or []
        oldest = next((signal for signal in signals if signal["event"] == event), None)
        made = {**record, "until": until}
        if oldest is not None:
            made |= {"value": oldest["payload"], "signal_id": oldest["id"], "time": now}
            made["size"] += oldest["size"]
            self.state["signals"] = [signal for signal in signals if signal is not oldest]
            self.state["signals_bytes"] -= oldest["size"]
        elif until is not None and until <= now:
            made |= {"value": None, "time": now}
        self._keep([*(each for each in steps if each is not known), made], entry, lease_ms, now)
        if made.get("time") is not None:
            self.state["timeout_cnt"] = 0
            self.note_record(now, entry["worker_id"])
        else:
            self.derive(now)
        return made

    @property
    def signal_ids(self) -> list[str]:
        """The ids of the signals that it has consumed, in whatever stage, and of those in its mailbox."""
        if self.document is None:
            return []
        before: Entries = [record for stage in self.state.get("stages") or [] for record in stage["steps"]]
        records: Entries = [*before, *(self.state.get("steps") or [])]
        consumed = [record["signal_id"] for record in records if record.get("signal_id")]
        return [*consumed, *(signal["id"] for signal in self.state.get("signals") or [])]

    def signal(self, event: str, signal_id: str, payload: Any, size: int, now: datetime) -> str:
        """Put a signal into the mailbox, and wake who waits for it."""
        if self.document is None or self.forgotten(now):
            return "absent"
        signals: Entries = self.state.get("signals") or []
        if signal_id in self.signal_ids:
            return "known"
        if self.finished(now):
            return "finished"
        if len(signals) >= 1_000 or (self.state.get("signals_bytes") or 0) + size > 1_000_000:
            return "full"
        waits_for = self.state.get("suspended_for") or {}
        waits = (self.state.get("suspended_until") or now) > now and waits_for.get("event") == event
        records: Entries = self.state.get("steps") or []
        ended = [each for each in records if waits and each["id"] == waits_for.get("id") and each.get("time") is None]
        for record in ended:  # one, or none
            record |= {"value": payload, "signal_id": signal_id, "time": now, "size": record["size"] + size}
            self.state["steps_bytes"] += size
        if not ended:
            sent = {"event": event, "id": signal_id, "payload": payload, "size": size, "time": now}
            self.state.update(signals=[*signals, sent], signals_bytes=(self.state.get("signals_bytes") or 0) + size)
        if waits:
            self.state["suspended_until"] = now
        self.stamp(now, "signalled")
        return "sent"

    def _values(self) -> Document:
        """What was recorded, but for errors."""
        kept = [record for record in self.state.get("steps") or [] if record.get("error") is None]
        begun = {"steps": kept, "steps_bytes": sum(record["size"] for record in kept)}
        return begun if self.reading.begun else {}

    def _note_stopped(self, running_id: str, fields: Document, now: datetime) -> bool:
        cancelled = self.entries("RUNNING") if self.document["status"] == "CANCELLED" else []
        mine = [own for own in cancelled if own["running_id"] == running_id]
        places = self.state.get("leaving") or []
        left = [place for place in places if place["running_id"] != running_id]
        if not mine and left == places:
            return False
        for own in mine:
            own.update({"state": "FAIL", "fail_time": now, **fields})
        self.state["leaving"] = left or None
        if self.document["status"] in ("INIT", "RUNNING"):
            self.document["event"] = ["stopped"]
        self.derive(now)
        return True

    def _reopen_if_wished(self, now: datetime, running_id: str | None = None) -> None:
        """A wish for one more run is served by an execution that began after it."""
        status, wanted = self.status(now), self.state.get("wanted") or 0
        tried = [*self.entries("FAIL"), *self.lost(now), *(self.state.get("losses") or [])]
        wishes = [entry.get("wish") or 0 for entry in (self.entries("SUCCESS") if status == "SUCCESS" else tried)]
        served = (min if status == "SUCCESS" else max)(wishes, default=0)
        if stages := self.state.get("stages"):
            served = stages[0]["wish"]
        if status in ("SUCCESS", "FAIL") and wanted > served:
            self._begin_anew(now, reopened_by=running_id)
            if self.state.get("line") is not None:
                mark = now + ms(1) if self.state.get("ask_time") == now else now
                self.state.update({"in_line": True, "place": (self.state.get("place") or 0) + 1, "ask_time": mark})

    def cancel(self, now: datetime) -> bool:
        if self.document is None or self.finished(now):
            return False
        self.state["cancel_time"] = now
        self.stamp(now, "cancelled")
        return True

    def retry(self, now: datetime, *, fresh: bool = False) -> bool:
        if self.document is None or self.forgotten(now) or self.status(now) == "RUNNING":
            return False
        kept = {} if fresh else self._values()
        if self.status(now) == "INIT" and not fresh:
            self.state.update(start_time=None, resume_time=None, **kept)
            for entry in self.entries("FAIL"):
                entry["retry_time"] = now
        else:
            expires = self.state.get("expire_time")
            expire_time = None if (expires or NEVER) <= now else expires  # though it did not bind what had begun
            if not fresh:
                kept |= {name: self.state.get(name) for name in ("signals", "signals_bytes")}
            begin = self._begin_anew if fresh else self._start_afresh
            begin(now, start_time=None, expire_time=expire_time, **kept)
        if self.state.get("waits_for") in ("fail", "wait") and self.state.get("after") is not None:
            self.state["ask_time"] = now
        self.stamp(now, "retried")
        return True

    def set_option(self, changes: Document, now: datetime) -> bool:
        if self.document is None or self.forgotten(now):
            return False
        self._tune(changes, now)
        if "specific_worker_ids" in changes:
            allowed = changes["specific_worker_ids"]
            excluded = [entry for entry in self.live(now) if allowed and entry["worker_id"] not in allowed]
            self.state["leaving"] = self.sent_away(now, excluded)
            self.drop(excluded)
        self.stamp(now, "option_changed")
        return True

    def _tune(self, changes: Mapping[str, Any], now: datetime) -> None:
        """Set options. If others have waited for it, a new retention may begin at once."""
        assert self.document is not None
        option = self.document["task_option"]
        differs = any(option.get(name) != changes[name] for name in changes if name.startswith("retain"))
        option.update(changes)
        held = self.document.get("finish_time") is not None and self.state.get("released_time") is None
        if differs and held and self.reading.dependents:
            self.state["ask_time"] = now + ms(1) if self.state.get("ask_time") == now else now

    def delete(self, now: datetime) -> bool:
        if self.document is None:
            return False
        if not self.reading.deleted:
            leaving = self.sent_away(now, self.entries("RUNNING"))
            self.state.update(deleted_time=now, worker_states=[], leaving=leaving, steps=None, signals=None)
            del self.document["params"]
            self.stamp(now, "deleted")
        return True

    def forget_if_empty(self) -> None:
        """The document of a deleted task goes when nobody needs it: no handler, and nobody who has not heard of it."""
        if self.document and self.reading.deleted and not self.state.get("leaving") and not self.state.get("ask_time"):
            self.document = None

    def settle(self, now: datetime) -> bool:
        if self.document is None or (self.document.get("settle_time") or NEVER) > now:
            return False
        lost = self._count_lost(now)
        self._reopen_if_wished(now)
        self.stamp(now, "settled", *lost)
        return True
