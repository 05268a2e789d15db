"""Random documents: tasks in any state that one can write down, whether or not the engine would ever bring them there."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from random import Random
from typing import Any

from tests.chaos.reading import NEVER, ms
from tests.properties.oracle import Document, Oracle
from tests.properties.world import QUEUES, WORKERS, queue_of

_IN_LINE: tuple[Document, ...] = (
    *({} for _ in range(7)),
    {"line": "q:k", "place": 7, "in_line": True},
    {"line": "q:k", "place": 7},
    {"line": "q:k", "place": 7, "on_sequence_failure": "block"},
    {"line": "q:k", "place": 7, "on_sequence_failure": "block", "in_line": True},
)
_NEAR_MS = (-6_000, -3_001, -3_000, -1_000, -1, 0, 0, 1, 999, 1_000, 4_000)


class Documents:
    """Draws documents as they stand at a moment; all that happens around them is a few seconds away, or right then."""

    def __init__(self, seed: str, now: datetime) -> None:
        self.random = Random(seed)
        self.now = now

    def draw(self, count: int) -> Iterator[Document]:
        """Yield so many, with the derived fields that their last write gave them."""
        for number in range(count):
            document = self._document(f"job:{number}")
            oracle = Oracle(document)
            oracle.derive(self.now)
            yield document

    def _document(self, id_: str) -> Document:
        pick = self.random.choice
        option = {
            "priority": pick((0, 0, 1)),
            "concurrent_worker_cnt": pick((1, 1, 2, 3)),
            "specific_worker_ids": pick(([], [], [], ["w1"], ["w1", "w2"], ["w3", "w2", "w3"])),
            "worker_timeout_ms": 3_000,
            "max_unexpected_retries": pick((0, 1, 2, 5)),
            "unexpected_retry_delay_ms": pick((0, 1_000, 3_000, 100_000_000)),
            "unexpected_retry_delay_scope": pick(("task", "worker")),
            "unexpected_retry_backoff": pick((1.0, 1.0, 2.0)),
            "unexpected_retry_jitter": pick((0.0, 0.5)),
            "max_timeouts": pick((0, 1, 2, 5)),
            "retain_success_ms": pick((None, 1_000)),
            "retain_failed_ms": pick((None, 2_000)),
            "on_fail": pick((None, None, "dead")),
        }
        state = {
            "create_time": self.now - ms(7_000),
            "start_time": self._time(0.3),
            "expire_time": self._time(0.2),
            "cancel_time": self._time(0.05),
            "resume_time": self._time(0.2),
            "suspended_until": pick((None, None, None, None, NEVER, *(self._time(1.0) for _ in range(3)))),
            "steps_bytes": pick((None, None, None, 0, 10)),
            "timeout_cnt": pick((0, 0, 0, 1, 2)),
            "dropped_fail_cnt": pick((None, None, None, 1, 2)),
            "wanted": pick((None, None, 1, 2)),
            "moves_to": self._moves_to(id_),
            "home": pick((None,) * 5 + ("odd",)),
            "deleted_time": self._time(0.03),
            "worker_states": self._entries(id_),
            "leaving": self._leaving(id_),
            "dependents": pick((None, None, None, [], ["job:x"], ["job:x", "job:y"])),
            "has_children": pick((None, None, None, True)),
            "waits_for": pick((None,) * 9 + ("fail", "run")),
            "flow": pick((None,) * 9 + ("f",)),
            **pick(_IN_LINE),
            "dependency_failure": pick((None,) * 9 + ({"id": "job:x", "reason": "no", "time": self.now},)),
            "ask_time": self._time(0.1),
            "released_time": self._time(0.1),
        }
        name, _, key = id_.partition(":")
        return {
            "_id": id_,
            "name": name,
            "key": key,
            "queue": queue_of(id_),
            "params": {"n": 1},
            "lane": 1,
            **pick(({}, {"status": "INIT"}, {"status": "SUCCESS"})),
            "event": "published\x1f0\x1f",
            "task_option": option,
            "task_state": {field: value for field, value in state.items() if value is not None},
        }

    def _time(self, likely: float) -> datetime | None:
        return self.now + ms(self.random.choice(_NEAR_MS)) if self.random.random() < likely else None

    def _entries(self, id_: str) -> list[Document]:
        return [self._entry(f"{id_}/{place}") for place in range(self.random.choice((0, 0, 1, 1, 2, 3, 4)))]

    def _leaving(self, id_: str) -> list[Document] | None:
        pick = self.random.choice
        count = pick((None, None, None, 0, 1, 2))
        if count is None:
            return None
        return [
            {"running_id": f"{id_}/l{n}", "worker_id": pick(WORKERS), "ping_expire_time": self.now + ms(pick(_NEAR_MS))}
            for n in range(count)
        ]

    def _moves_to(self, id_: str) -> Document | None:
        if self.random.random() < 0.8:
            return None
        held = [f"{id_}/{place}" for place in range(4) if self.random.random() < 0.5]
        return {"queue": self.random.choice(QUEUES), "group": self.random.choice((None, "g")), "held": held}

    def _entry(self, running_id: str) -> Document:
        pick = self.random.choice
        state = pick(("RUNNING", "RUNNING", "SUCCESS", "FAIL", "FAIL"))
        entry: Document = {"running_id": running_id, "worker_id": pick(WORKERS), "state": state}
        entry["start_time"] = self.now - ms(6_500)
        entry["ping_expire_time"] = self.now + ms(pick(_NEAR_MS))
        if wish := pick((None, 1, 2)):
            entry["wish"] = wish
        if state == "SUCCESS":
            entry["success_time"] = self.now + ms(min(0, pick(_NEAR_MS)))
        if state == "FAIL":
            entry |= {"fail_time": self.now + ms(min(0, pick(_NEAR_MS))), "fail_reason": "no luck"}
            entry |= pick(
                ({}, {"retry_jitter": 1.0}, {"retry_jitter": -1.0}, {"retry_time": self.now + ms(pick(_NEAR_MS))})
            )
            entry |= {"final": True} if self.random.random() < 0.1 else {}
        return entry


def renamed(document: Document, suffix: str) -> Document:
    """The same task under another key."""
    return {**document, "_id": document["_id"] + suffix, "key": document["key"] + suffix}


def without_key(document: Any) -> Document:
    """What two tasks have in common that were treated alike."""
    return {name: value for name, value in document.items() if name not in ("_id", "key")}
