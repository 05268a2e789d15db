"""What happens next in a world: chosen by a seeded generator that knows where the edges are."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from random import Random
from typing import Any

from tests.chaos.reading import NEVER, ms
from tests.properties.oracle import Document, Oracle
from tests.properties.world import QUEUES, WORKERS, Held, Operation, World

FLAGS = (
    "update_existing_params",
    "not_update_running",
    "clean_success",
    "clean_failed",
    "run_again",
    "replace_running",
)
POLICIES = ({"debounce_ms": 1_000}, {"debounce_ms": 500, "debounce_max_ms": 1_200}, {"throttle_ms": 1_500})
ENDINGS = ("succeeded", "failed", "released", "snoozed", "suspended", "conflicted", "moved")
EVENTS = ("paid", "$x")
_SHARE_OF_THE_WORLDS = 0.55
_OF_THE_WORLD = {"advance": 8, "settle": 2, "sweep": 1}
_OF_TASKS = {
    "claim": 36,
    "finish": 10,
    "publish": 14,
    "ping": 4,
    "report": 4,
    "step": 3,
    "wait": 3,
    "signal": 4,
    "set_option": 4,
    "retry": 3,
    "cancel": 3,
    "note_stopped": 4,
    "keep_place": 1,
    "delete": 1,
    "tell": 6,
}
_PLACES = (
    {"queue": QUEUES[0]},
    {"queue": QUEUES[1]},
    {"group": "g"},
    {"group": None},
    {"queue": QUEUES[1], "group": "h"},
)
LABELS = frozenset(
    [
        *_OF_THE_WORLD,
        *_OF_TASKS,
        *(f"finish {ending}" for ending in ENDINGS),
        *(f"publish {flag}" for flag in FLAGS),
        "publish elsewhere",
        *("retry fresh", "wait with a value", "step that fails", "step with a time"),
        *("publish after others", "publish in line", "publish anew in line", "finish with new params"),
        *("publish created", "publish in session", "finish Retry", "finish TaskFailed", "claim of several"),
    ]
)
"""The kinds of operation: each has to succeed now and then."""


def labels(operation: Operation) -> Iterator[str]:
    """Yield the kinds that an operation belongs to."""
    given = operation.arguments
    yield operation.kind
    if operation.kind == "finish":
        yield f"finish {given['ending']}"
        if given["ending"] == "failed":
            yield from ["finish Retry"] * any(delay is not None for delay in given["delays"])
            yield from ["finish TaskFailed"] * any(fields.get("final") for fields in given["fields"])
        if given["ending"] == "moved":
            yield from ["finish with new params"] * any("params" in fields for fields in given["fields"])
    if operation.kind == "publish":
        yield from (f"publish {flag}" for flag in given["flags"])
        yield from ["publish created"] * (not given["flags"])
        yield from ["publish after others"] * bool(given["after"])
        yield from ["publish in line", *(["publish anew in line"] * ("run_again" in given["flags"]))] * (
            given["links"]["sequence_key"] is not None
        )
        yield from ["publish in session"] * given["in_session"]
        yield from ["publish elsewhere"] * (
            bool(given["placed"]) and bool({"update_existing_params", "run_again"} & given["flags"])
        )
    if operation.kind == "retry":
        yield from ["retry fresh"] * given["fresh"]
    if operation.kind == "wait":
        yield from ["wait with a value"] * (given["timeout_ms"] is None)
    if operation.kind == "step":
        yield from ["step that fails"] * any(record.get("error") is not None for record in given["records"])
        yield from ["step with a time"] * any(delay is not None for delay in given["delays"])
    if operation.kind == "claim":
        yield from ["claim of several"] * (len(given["tasks"]) > 1)


class Chance:
    """Draws operations for one world."""

    def __init__(self, seed: str) -> None:
        self.random = Random(seed)
        self.serial = 0

    def operations(self, world: World) -> list[Operation]:
        """Draw what happens next: something to the whole world, or at once something to each group of its tasks."""
        if self.random.random() < _SHARE_OF_THE_WORLDS:
            kind = self._kind(_OF_THE_WORLD)
            return [Operation(kind, self._advance(world) if kind == "advance" else {})]
        drawn = (self._of_group(world, group) for group in world.groups)
        return [operation for operation in drawn if operation is not None]

    def _of_group(self, world: World, group: list[str]) -> Operation | None:
        kind = self._kind(_OF_TASKS)
        if self._holding(world, group):
            further = 5 if self._able(world, group) else 0  # what several do to one task at once is the hardest
            steps = 6 if self._stopping(world, group) else 2  # beside a handler that is on its way out
            kinds = (kind, "finish", "ping", "report", "cancel", "step", "wait", "claim")
            kind = self.random.choices(kinds, (5, 4, 1, 1, 1, steps, 2, further))[0]
        elif self._stopping(world, group) and self.random.random() < 0.6:
            shares = {"note_stopped": 4, "keep_place": 2, "retry": 2, "publish": 2}
            kind = self._kind(shares | dict.fromkeys(("finish", "report", "ping", "delete", "claim"), 1))
        elif not self._able(world, group) and self.random.random() < 0.4:
            kind = self.random.choice(
                ("publish", "publish", "publish", "retry", "signal", "signal")
            )  # where nothing goes on
        marked = any(world.oracles[id_].document and world.oracles[id_].state.get("ask_time") for id_ in group)
        if marked and self.random.random() < 0.3:
            kind = "tell"
        arguments = getattr(self, f"_{kind}")(world, group)
        return None if arguments is None else Operation(kind, arguments)

    def _kind(self, weights: dict[str, int]) -> str:
        return self.random.choices(list(weights), list(weights.values()))[0]

    def _advance(self, world: World) -> Document:
        """Mostly to an edge: the very millisecond at which something opens or ends, or the one before or after."""
        edges = [edge for oracle in world.oracles.values() for edge in _edges(oracle) if edge > world.now]
        if edges and self.random.random() < 0.9:
            edge = self.random.choice(sorted(set(edges))[:3])
            return {"by_ms": (edge - world.now) // ms(1) + self.random.choice((-1, 0, 0, 1))}
        return {"by_ms": self.random.choice((1, 10, 500, 1_000))}

    def _publish(self, world: World, group: list[str]) -> Document:
        task = self.random.choice(group)
        flags: set[str] = set()
        if world.oracles[task].document is not None:
            flags = set(self.random.sample(FLAGS, self.random.choice((0, 1, 1, 1, 1, 2, 3))))
        policy = self.random.choice(POLICIES) if self.random.random() < 0.15 else {}
        if policy or "replace_running" in flags:
            flags.discard("not_update_running")
        before = [each for each in group if each < task]  # so that no two wait for each other
        new = world.oracles[task].document is None and not policy
        after = self.random.sample(before, self.random.choice((0, 1, len(before)))) if new and before else []
        option = self._option()
        tuned = {name: option[name] for name in self.random.sample(list(option), self.random.choice((0, 0, 1, 2)))}
        return {
            "task": task,
            "n": self.random.randrange(4),
            "option": option,
            "tuned": tuned,
            "policy": policy,
            "start_ms": None if policy else self.random.choice((None, None, None, None, 0, 1_500, -1_000)),
            "expire_ms": self.random.choice((None,) * 6 + (2_500, 9_000, 0)),
            "flags": frozenset(flags),
            "placed": self.random.choice(({}, {}, {}, *_PLACES)),
            "in_session": not after and self.random.random() < 0.1,
            "after": tuple(after),
            "links": {
                "on_dependency_failure": self.random.choice(("fail", "fail", "wait", "run")),
                "sequence_key": group[0] if self.random.random() < 0.3 else None,
                "on_sequence_failure": self.random.choice(("continue", "continue", "block")),
            },
        }

    def _option(self) -> Document:
        pick = self.random.choice
        return {
            "concurrent_worker_cnt": pick((1, 1, 2, 3)),
            "specific_worker_ids": pick(([], [], [], ["w1"], ["w1", "w3"], ["w2", "w3", "w2"])),
            "ping_interval_ms": 1_000,
            "worker_timeout_ms": pick((3_000, 3_000, 5_000)),
            "max_unexpected_retries": pick((0, 1, 2, 9, 9)),
            "unexpected_retry_delay_ms": pick((0, 0, 0, 1_000, 4_000, 50_000_000)),
            "unexpected_retry_delay_scope": pick(("task", "worker")),
            "unexpected_retry_backoff": pick((1.0, 1.0, 2.0)),
            "unexpected_retry_jitter": pick((0.0, 0.5)),
            "max_timeouts": pick((0, 1, 2, 5)),
            "retain_success_ms": pick((None, None, 0, 4_000)),
            "retain_failed_ms": pick((None, None, 0, 4_000)),
            "on_fail": pick((None, None, "dead", QUEUES[0])),
        }

    def _claim(self, world: World, group: list[str]) -> Document:
        """Mostly by a worker that may; of the one task, of a few, or of all."""
        worker, task = self.random.choice(WORKERS), self.random.choice(group)
        if (able := self._able(world, group)) and self.random.random() < 0.8:
            worker, task = self.random.choice(able)
        tasks = {task} if self.random.random() < 0.5 else {task, *group}
        self.serial += 1
        closed = [self.random.choice(QUEUES)] if self.random.random() < 0.15 else []
        return {"worker_id": worker, "running_id": f"r{self.serial}", "tasks": sorted(tasks), "closed": closed}

    def _ping(self, world: World, group: list[str]) -> Document | None:
        held = self._held(world, group)
        if held is None:
            return None
        return {"held": [h for h in self._known(world, group) if h.worker_id == held.worker_id]}

    def _report(self, world: World, group: list[str]) -> Document | None:
        held = self._held(world, group)
        return (
            None
            if held is None
            else {"held": held, "fraction": self.random.choice((None, 0.25, 0.5)), "log": f"line {self.serial}"}
        )

    def _finish(self, world: World, group: list[str]) -> Document | None:
        first = self._held(world, group)
        if first is None:
            return None
        ending = self.random.choices(ENDINGS, (4, 6, 1, 2, 3, 1, 3))[0]
        if self._others_run(world, first) and self.random.random() < 0.4:
            ending = "snoozed"  # several ask for a delay: which of them counts?
        others = [h for h in self._known(world, group) if h.worker_id == first.worker_id and h.id != first.id]
        held = [first, *self.random.sample(others, min(len(others), self.random.choice((0, 0, 1))))]
        fields = [self._entry_fields(ending) for _ in held]
        delays: list[int | None] = [None for _ in held]
        if ending in ("snoozed", "conflicted") or (ending == "failed" and self.random.random() < 0.3):
            delays = [self.random.choice((0, 2_000, 6_000)) for _ in held]
        if ending == "failed" and self.random.random() < 0.3:
            delays[0] = None
        waits = [self._suspension(world, h) for h in held] if ending == "suspended" else None
        return {"ending": ending, "held": held, "fields": fields, "delays": delays, "waits": waits}

    def _suspension(self, world: World, held: Held) -> Document:
        """What an execution waits for: mostly a sleep or a wait that it has recorded."""
        document = world.oracles[held.id].document
        known = (document["task_state"].get("steps") if document else None) or []
        recorded = [record for record in known if record["kind"] != "step"]
        if recorded and self.random.random() < 0.9:
            timed = [record for record in recorded if record.get("until") is not None]
            record = self.random.choice(timed if timed and self.random.random() < 0.7 else recorded)
            told = {name: record[name] for name in ("id", "kind", "name")}
            return told | ({"event": record["name"]} if record["kind"] == "wait" else {})
        event = self.random.choice(EVENTS)
        wait: Document = {"id": f"wait:9:{event}", "kind": "wait", "name": event, "event": event}
        if self.random.random() < 0.8 and not any(record["id"] == wait["id"] for record in known):
            record = {"id": wait["id"], "kind": "wait", "name": event, "size": 10}
            wait |= {"record": record, "timeout_ms": self.random.choice((None, 1_000, 4_000))}
        return wait

    def _step(self, world: World, group: list[str]) -> Document | None:
        first = self._held(world, group)
        if first is None:
            return None
        others = [h for h in self._known(world, group) if h.worker_id == first.worker_id and h.id != first.id]
        further = self.random.sample(others, min(len(others), self.random.choice((0, 0, 1))))
        held = list({h.id: h for h in (first, *further)}.values())
        sleeps = self.random.random() < 0.5
        return {
            "held": held,
            "records": [self._record("sleep" if sleeps else "step") for _ in held],
            "delays": [self.random.choice((0, 1_000, 4_000)) if sleeps else None for _ in held],
            "lease_ms": self.random.choice((1_000, 3_000, 5_000)),
        }

    def _record(self, kind: str) -> Document:
        name = self.random.choice(("a", "b", "$c"))
        record: Document = {"id": f"{kind}:1:{name}", "kind": kind, "name": name, "size": self.random.choice((10, 20))}
        if kind == "step":
            failed = self.random.random() < 0.2
            value = self.random.choice((None, 1, "$x", {"$literal": {"a.b": 1}}))
            record |= {"error": {"message": "no"}} if failed else {"value": value, "fingerprint": "f"}
        return record

    def _wait(self, world: World, group: list[str]) -> Document | None:
        held = self._held(world, group)
        event, number = self.random.choice(EVENTS), self.random.choice((1, 1, 2))
        return (
            None
            if held is None
            else {
                "held": held,
                "record": {"id": f"wait:{number}:{event}", "kind": "wait", "name": event, "size": 10},
                "event": event,
                "timeout_ms": self.random.choice((None, None, 0, 2_000)),
                "lease_ms": self.random.choice((1_000, 3_000, 5_000)),
            }
        )

    def _signal(self, world: World, group: list[str]) -> Document:
        """Mostly to one that is there, now and then with an id that it has had before."""
        there = [id_ for id_ in group if world.oracles[id_].document is not None] or group
        task = self.random.choice(there if self.random.random() < 0.9 else group)
        had = world.oracles[task].signal_ids
        self.serial += 1
        return {
            "task": task,
            "event": self.random.choice(EVENTS),
            "signal_id": self.random.choice(had) if had and self.random.random() < 0.25 else f"s{self.serial}",
            "payload": self.random.choice(({}, 7, "$x", {"$literal": 1})),
            "size": self.random.choice((10, 10, 600_000)),
        }

    @staticmethod
    def _others_run(world: World, held: Held) -> bool:
        oracle = world.oracles[held.id]
        if oracle.document is None:
            return False
        asked_for = oracle.state.get("resume_time")
        return len(oracle.live(world.now)) > 1 or bool(asked_for and asked_for > world.now)

    def _entry_fields(self, ending: str) -> Document:
        if ending == "succeeded":
            return {"returns": self.random.choice((None, 1, "$x", {"$literal": {"a.b": 1}}))}
        if ending == "failed":
            fields: Document = {"fail_reason": "no luck", "retry_jitter": self.random.choice((-1.0, -0.5, 0.0, 1.0))}
            return fields | ({"final": True} if self.random.random() < 0.1 else {})
        if ending == "moved":
            params = {"params": {"n": self.random.randrange(4)}} if self.random.random() < 0.6 else {}
            return {"queue": self.random.choice(QUEUES), **params}
        return {}

    def _note_stopped(self, world: World, group: list[str]) -> Document | None:
        candidates = self._stopping(world, group) or self._known(world, group)
        return {"held": self.random.choice(candidates)} if candidates else None

    _keep_place = _note_stopped

    def _cancel(self, _: World, group: list[str]) -> Document:
        return {"task": self.random.choice(group)}

    _delete = _cancel

    def _tell(self, _: World, group: list[str]) -> Document:
        return {"tasks": sorted(group)}

    def _retry(self, _: World, group: list[str]) -> Document:
        return {"task": self.random.choice(group), "fresh": self.random.random() < 0.2}

    def _set_option(self, _: World, group: list[str]) -> Document:
        option = self._option()
        names = self.random.sample(list(option), self.random.choice((1, 1, 2)))
        changes = {name: option[name] for name in names}
        return {"task": self.random.choice(group), "changes": changes, "outdated": self.random.random() < 0.1}

    def _able(self, world: World, group: list[str]) -> list[tuple[str, str]]:
        return [(w, id_) for w in WORKERS for id_ in group if world.oracles[id_].may_claim(w, world.now)]

    def _holding(self, world: World, group: list[str]) -> list[Held]:
        return [h for h in self._known(world, group) if world.oracles[h.id].held(h.running_id, world.now)]

    def _stopping(self, world: World, group: list[str]) -> list[Held]:
        """Those that were stopped from outside, and have not come to their end."""
        return [
            held
            for held in self._known(world, group)
            if (oracle := world.oracles[held.id]).document
            and any(entry["running_id"] == held.running_id for entry in _on_their_way_out(oracle))
        ]

    @staticmethod
    def _known(world: World, group: list[str]) -> list[Held]:
        return [held for held in world.executions if held.id in group]

    def _held(self, world: World, group: list[str]) -> Held | None:
        """Mostly one that holds its task, else any that ever did: it writes late."""
        current = self._holding(world, group)
        late = self._stopping(world, group) if self.random.random() < 0.5 else self._known(world, group)
        candidates = late if (late and self.random.random() < 0.25) or not current else current
        return self.random.choice(candidates) if candidates else None


def _on_their_way_out(oracle: Oracle) -> list[Document]:
    cancelled = oracle.entries("RUNNING") if oracle.document["status"] == "CANCELLED" else []
    return [*cancelled, *(oracle.state.get("leaving") or [])]


def _edges(oracle: Oracle) -> Iterator[datetime]:
    """Yield the moments at which something about this task changes by time alone."""
    document: Any = oracle.document
    if document is None:
        return
    state = oracle.state
    times = [state.get(name) for name in ("start_time", "expire_time", "resume_time", "suspended_until")]
    times += [record.get("until") for record in state.get("steps") or []]
    times += [document.get(name) for name in ("next_claim_time", "settle_time", "delete_time")]
    times += [entry["ping_expire_time"] for entry in (*oracle.entries("RUNNING"), *(state.get("leaving") or []))]
    times += [oracle.reading.retry_time(worker) for worker in WORKERS]
    yield from (time for time in times if time is not None and time < NEVER)
