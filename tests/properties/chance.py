"""What happens next in a world: chosen by a seeded generator that knows where the edges are."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from random import Random
from typing import Any

from tests.properties.oracle import Document, Oracle
from tests.properties.world import QUEUES, WORKERS, Held, Operation, World

FLAGS = ("update_existing_params", "not_update_running", "clean_success", "clean_failed", "run_again")
ENDINGS = ("succeeded", "failed", "released", "snoozed")
_WEIGHTS = {
    "advance": 18,
    "claim": 24,
    "finish": 20,
    "publish": 12,
    "ping": 8,
    "report": 6,
    "set_option": 4,
    "settle": 4,
    "retry": 4,
    "cancel": 2,
    "note_stopped": 3,
    "sweep": 2,
    "delete": 1,
}
LABELS = frozenset(
    [
        *_WEIGHTS,
        *(f"finish {ending}" for ending in ENDINGS),
        *(f"publish {flag}" for flag in FLAGS),
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
    if operation.kind == "publish":
        yield from (f"publish {flag}" for flag in given["flags"])
        yield from ["publish created"] * (not given["flags"])
        yield from ["publish in session"] * given["in_session"]
    if operation.kind == "claim":
        yield from ["claim of several"] * (len(given["tasks"]) > 1)


class Chance:
    """Draws operations for one world."""

    def __init__(self, seed: str) -> None:
        self.random = Random(seed)
        self.serial = 0

    def operation(self, world: World) -> Operation:
        """Draw what happens next."""
        kind = self.random.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
        if not self._able(world) and not self._holding(world) and self.random.random() < 0.6:
            kind = self.random.choices(("publish", "advance", "retry"), (5, 5, 1))[0]  # where nothing goes on
        arguments = getattr(self, f"_{kind}")(world)
        return self.operation(world) if arguments is None else Operation(kind, arguments)

    # --- operations ---

    def _advance(self, world: World) -> Document:
        """Mostly to an edge: the very millisecond at which something opens or ends, or the one before or after."""
        edges = [
            (edge - world.now).total_seconds() * 1000 for oracle in world.oracles.values() for edge in _edges(oracle)
        ]
        ahead = sorted(edge for edge in edges if edge > 0)
        if ahead and self.random.random() < 0.8:
            edge = self.random.choice(ahead[:3])
            return {"by_ms": max(0, int(edge) + self.random.choice((-1, 0, 0, 1)))}
        return {"by_ms": self.random.choice((1, 10, 500, 1_000, 1_000, 2_000, 7_000))}

    def _publish(self, world: World) -> Document:
        task = self._task(world)
        flags: set[str] = set()
        if world.oracles[task].document is not None:
            flags = set(self.random.sample(FLAGS, self.random.choice((0, 1, 1, 1, 1, 2, 3))))
        option = self._option()
        tuned = {name: option[name] for name in self.random.sample(list(option), self.random.choice((0, 0, 1, 2)))}
        return {
            "task": task,
            "n": self.random.randrange(4),
            "option": option,
            "tuned": tuned,
            "start_ms": self.random.choice((None, None, None, 0, 1_500, 4_000, -1_000)),
            "expire_ms": self.random.choice((None, None, None, None, 2_500, 9_000, 0)),
            "flags": frozenset(flags),
            "in_session": self.random.random() < 0.1,
        }

    def _option(self) -> Document:
        pick = self.random.choice
        return {
            "concurrent_worker_cnt": pick((1, 1, 2, 3)),
            "specific_worker_ids": pick(([], [], [], ["w1"], ["w1", "w3"], ["w2", "w3", "w2"])),
            "ping_interval_ms": 1_000,
            "worker_timeout_ms": pick((3_000, 3_000, 5_000)),
            "max_unexpected_retries": pick((0, 1, 2, 3, 9)),
            "unexpected_retry_delay_ms": pick((0, 1_000, 4_000, 50_000_000)),
            "unexpected_retry_delay_scope": pick(("task", "worker")),
            "unexpected_retry_backoff": pick((1.0, 1.0, 2.0)),
            "unexpected_retry_jitter": pick((0.0, 0.5)),
            "max_timeouts": pick((0, 1, 2, 5)),
            "retain_success_ms": pick((None, 0, 4_000, 20_000)),
            "retain_failed_ms": pick((None, 0, 4_000, 20_000)),
        }

    def _claim(self, world: World) -> Document:
        """Mostly by a worker that may; of the one task, of a few, or of all."""
        worker, task = self.random.choice(WORKERS), self._task(world)
        if (able := self._able(world)) and self.random.random() < 0.8:
            worker, task = self.random.choice(able)
        tasks = {task} if self.random.random() < 0.5 else {task, *world.oracles}
        self.serial += 1
        closed = [self.random.choice(QUEUES)] if self.random.random() < 0.15 else []
        return {"worker_id": worker, "running_id": f"r{self.serial}", "tasks": sorted(tasks), "closed": closed}

    def _ping(self, world: World) -> Document | None:
        held = self._held(world)
        if held is None:
            return None
        return {"held": [h for h in world.executions if h.worker_id == held.worker_id]}

    def _report(self, world: World) -> Document | None:
        held = self._held(world)
        return (
            None
            if held is None
            else {"held": held, "fraction": self.random.choice((None, 0.25, 0.5)), "log": f"line {self.serial}"}
        )

    def _finish(self, world: World) -> Document | None:
        first = self._held(world)
        if first is None:
            return None
        ending = self.random.choices(ENDINGS, (4, 6, 1, 2))[0]
        others = [h for h in world.executions if h.worker_id == first.worker_id and h.id != first.id]
        held = [first, *self.random.sample(others, min(len(others), self.random.choice((0, 0, 1))))]
        fields = [self._entry_fields(ending) for _ in held]
        delays: list[int | None] = [None for _ in held]
        if ending == "snoozed" or (ending == "failed" and self.random.random() < 0.3):
            delays = [self.random.choice((0, 2_000, 6_000)) for _ in held]
        if ending == "failed" and self.random.random() < 0.3:
            delays[0] = None
        return {"ending": ending, "held": held, "fields": fields, "delays": delays}

    def _entry_fields(self, ending: str) -> Document:
        if ending == "succeeded":
            return {"returns": self.random.choice((None, 1, "$x", {"$literal": {"a.b": 1}}))}
        if ending == "failed":
            fields: Document = {"fail_reason": "no luck", "retry_jitter": self.random.choice((-1.0, -0.5, 0.0, 1.0))}
            return fields | ({"final": True} if self.random.random() < 0.1 else {})
        return {}

    def _note_stopped(self, world: World) -> Document | None:
        cancelled = [h for h in world.executions if self._was_cancelled(world.oracles[h.id])]
        candidates = cancelled if self.random.random() < 0.8 else world.executions
        return {"held": self.random.choice(candidates)} if candidates else None

    @staticmethod
    def _was_cancelled(oracle: Oracle) -> bool:
        return oracle.document is not None and oracle.document["status"] == "CANCELLED"

    def _cancel(self, world: World) -> Document:
        return {"task": self._task(world)}

    _retry = _delete = _cancel

    def _set_option(self, world: World) -> Document:
        option = self._option()
        names = self.random.sample(list(option), self.random.choice((1, 1, 2)))
        return {"task": self._task(world), "changes": {name: option[name] for name in names}}

    def _settle(self, _: World) -> Document:
        return {}

    _sweep = _settle

    # --- choices ---

    def _task(self, world: World) -> str:
        return self.random.choice(list(world.oracles))

    def _able(self, world: World) -> list[tuple[str, str]]:
        oracles = world.oracles.items()
        return [(worker, id_) for worker in WORKERS for id_, o in oracles if o.may_claim(worker, world.now)]

    def _holding(self, world: World) -> list[Held]:
        return [held for held in world.executions if world.oracles[held.id].held(held.running_id, world.now)]

    def _held(self, world: World) -> Held | None:
        """Mostly one that holds its task, else any that ever did: it writes late."""
        current = self._holding(world)
        late = self.random.random() < 0.25 and world.executions
        candidates = world.executions if late else current
        return self.random.choice(candidates) if candidates else None


def _edges(oracle: Oracle) -> Iterator[datetime]:
    """Yield the moments at which something about this task changes by time alone."""
    document: Any = oracle.document
    if document is None:
        return
    state = oracle.state
    times = [state.get(name) for name in ("start_time", "expire_time", "resume_time")]
    times += [document.get(name) for name in ("next_claim_time", "settle_time", "delete_time")]
    times += [entry["ping_expire_time"] for entry in oracle.entries("RUNNING")]
    times += [oracle.retry_time(worker) for worker in WORKERS]
    yield from (time for time in times if time is not None)
