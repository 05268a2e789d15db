"""What becomes of tasks that wait for others, or in line, in plain Python: `store.relations.dependencies.tell`, a second time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from taskmesh.model.dependency import label
from tests.chaos.reading import ms
from tests.properties.oracle import Oracle

_UNFINISHED = ("INIT", "RUNNING")
_FIRST_HOLD_MS, _LONGEST_HOLD_MS = 1_000, 86_400_000


@dataclass(frozen=True)
class _Marked:
    """A task with a mark, as it was when somebody began to ask."""

    id: str
    status: str
    dependents: list[str]
    policy: str | None
    after: list[str]
    linked: bool
    ask_time: datetime
    held: bool
    line: str | None

    @property
    def finished(self) -> bool:
        return self.status not in _UNFINISHED


class Links:
    """The tasks of one world, by `_id`."""

    def __init__(self, oracles: Mapping[str, Oracle]) -> None:
        self._oracles = oracles
        self.heads: dict[str, tuple[str, int]] = {}
        """Of each line that is not empty: the task whose turn it is, and its place."""

    def tell(self, ids: Iterable[str], now: datetime) -> None:
        """Answer the marks of these tasks, and of those that this concerns in turn. They go when all is done (`Leftovers`)."""
        todo = set(ids)
        answered: dict[str, _Marked] = {}
        while todo:
            marked = [self._marked(id_) for id_ in sorted(todo) if self._state(id_).get("ask_time") is not None]
            marked = [task for task in marked if task.id not in answered or answered[task.id].ask_time != task.ask_time]
            answered |= {task.id: task for task in marked}
            todo = self._answer(marked, now)
        for task in answered.values():
            self._unmark(task, now)

    def _state(self, id_: str) -> Mapping[str, Any]:
        oracle = self._oracles[id_]
        return {} if oracle.document is None else oracle.state

    def _status(self, id_: str) -> str | None:
        document = self._oracles[id_].document
        return None if document is None else document["status"]

    def _marked(self, id_: str) -> _Marked:
        oracle = self._oracles[id_]
        state, finish_time = oracle.state, oracle.document.get("finish_time")
        policy = state.get("waits_for")
        return _Marked(
            id=id_,
            status=oracle.document["status"],
            dependents=list(oracle.reading.dependents),
            policy=policy,
            after=list(state["after"]["ids"]) if policy is not None and state.get("after") else [],
            linked=state.get("unlinked") is None,
            ask_time=state["ask_time"],
            held=finish_time is not None and state["ask_time"] > finish_time,
            line=state.get("line"),
        )

    def _answer(self, marked: list[_Marked], now: datetime) -> set[str]:
        concerned: set[str] = set()
        for task in marked:
            if task.after and not task.finished and (not task.linked or task.policy != "run"):
                self._link(task, now)
        told = {id_ for task in marked if task.finished and task.status != "SUCCESS" for id_ in task.dependents}
        waiting = told | {task.id for task in marked if not task.finished}
        failed_before = {id_: self._status(id_) for id_ in self._oracles}
        for id_ in waiting:
            after = (self._state(id_).get("after") or {}).get("ids") or []
            bad = [each for each in after if failed_before[each] not in (*_UNFINISHED, "SUCCESS")]
            if bad and self._fail(id_, bad, now):
                concerned.add(id_)
        concerned.update(told)
        for task in marked:
            if not task.finished:
                concerned.update(task.dependents)
            if not task.finished or task.status == "SUCCESS":
                concerned.update(id_ for id_ in task.dependents if self._restore(id_, task.id, now))
        asked = {id_ for task in marked if task.finished for id_ in task.dependents}
        asked |= {task.id for task in marked if task.policy is not None and not task.finished}
        self._ask(sorted(asked), concerned, now)
        for line in sorted({task.line for task in marked if task.line is not None}):
            self._advance(line, now)
        for task in marked:
            if task.held:
                self._release(task.id, now)
        return concerned

    def _link(self, waiting: _Marked, now: datetime) -> None:
        """Each task that this one waits for names it, and is kept for it."""
        for id_ in waiting.after:
            oracle = self._oracles[id_]
            if oracle.document is None:
                continue
            state = oracle.state
            state["dependents"] = sorted({*oracle.reading.dependents, waiting.id})
            if oracle.document["status"] in _UNFINISHED and state.get("released_time") is None:
                state["pending"] = True
            else:
                state["released_time"] = None
                if oracle.document["status"] not in _UNFINISHED:
                    state["ask_time"] = state.get("ask_time") or now + ms(_FIRST_HOLD_MS)
                oracle.derive(now)
        self._oracles[waiting.id].state["unlinked"] = None

    def _fail(self, id_: str, bad: list[str], now: datetime) -> bool:
        """Fail it because of all of these, if it waits and wants that."""
        oracle = self._oracles[id_]
        if self._status(id_) != "INIT" or oracle.state.get("waits_for") != "fail":
            return False
        reason = f"its dependency {', '.join(_told(each, self._status(each)) for each in bad[:3])}"
        oracle.state["dependency_failure"] = {"id": bad[0], "reason": reason, "time": now}
        oracle.stamp(now, "dependency_failed")
        return True

    def _restore(self, id_: str, dependency: str, now: datetime) -> bool:
        """What failed because of that one alone has not failed when that is begun anew."""
        oracle = self._oracles[id_]
        if self._status(id_) != "FAIL" or (oracle.state.get("dependency_failure") or {}).get("id") != dependency:
            return False
        oracle.state["dependency_failure"] = None
        oracle.stamp(now, "retried")
        return True

    def _ask(self, ids: list[str], concerned: set[str], now: datetime) -> None:
        """Open what waits for nothing unfinished any more, or fail it."""
        ready = {}
        for id_ in ids:
            state = self._state(id_)
            waits = state.get("waits_for") is not None and state.get("unlinked") is None
            if waits and self._status(id_) == "INIT" and not self._is_blocked(id_):
                wanted = [] if state["waits_for"] == "run" else self._oracles[id_].state["after"]["ids"]
                ready[id_] = [each for each in wanted if self._status(each) != "SUCCESS"]
        for id_, unmet in ready.items():
            if not unmet:
                self._oracles[id_].state["waits_for"] = None
                self._oracles[id_].stamp(now, "opened")
                concerned.add(id_)
        for id_, unmet in ready.items():
            bad = [each for each in unmet if self._status(each) not in _UNFINISHED]
            if bad and self._fail(id_, bad, now):
                concerned.add(id_)

    def _is_blocked(self, id_: str) -> bool:
        named = (each.state for each in self._oracles.values() if each.document is not None)
        return any(state.get("pending") and id_ in (state.get("dependents") or []) for state in named)

    def _advance(self, line: str, now: datetime) -> None:
        """Whoever has its turn in a line may be claimed; when it has left the line, it is the turn of the first that waits."""
        if line in self.heads and self._has_left(*self.heads[line]):
            del self.heads[line]
        if line not in self.heads:
            states = {id_: self._state(id_) for id_ in self._oracles}
            waiting = [id_ for id_, state in states.items() if state.get("line") == line and state.get("in_line")]
            if not waiting:
                return
            first = min(waiting, key=lambda id_: (self._oracles[id_].document["publish_number"], id_))
            self.heads[line] = first, states[first]["place"]
        head = self._oracles[self.heads[line][0]]
        if head.state.get("in_line") and head.document["status"] in _UNFINISHED:
            head.state["in_line"] = None
            head.stamp(now, "opened")

    def _has_left(self, id_: str, place: int) -> bool:
        state, status = self._state(id_), self._status(id_)
        blocks = status == "FAIL" and state.get("on_sequence_failure") == "block"
        return state.get("place") != place or (status not in _UNFINISHED and not blocks)

    def _release(self, id_: str, now: datetime) -> None:
        """Its retention begins when the last of those that waited for it is finished, or is gone."""
        oracle = self._oracles[id_]
        if oracle.document is None or oracle.document.get("finish_time") is None:
            return
        by = [each.document for name in oracle.reading.dependents if (each := self._oracles[name]).document is not None]
        if not any(document["status"] in _UNFINISHED for document in by):
            ends = [document["finish_time"] for document in by if document.get("finish_time") is not None]
            oracle.state["released_time"] = max(ends, default=now)
            oracle.derive(now)

    def _unmark(self, task: _Marked, now: datetime) -> None:
        """The mark that was answered goes; what is kept for others is asked about again, a while later."""
        oracle = self._oracles[task.id]
        if oracle.document is None or oracle.state.get("ask_time") != task.ask_time:
            return
        document, state = oracle.document, oracle.state
        names = "retain_success_ms" if document["status"] == "SUCCESS" else "retain_failed_ms"
        retained_ms = document["task_option"].get(names)
        kept = document["status"] not in (*_UNFINISHED, "DELETED") and bool(oracle.reading.dependents)
        state["ask_time"] = None
        if kept and retained_ms is not None and state.get("released_time") is None:
            waited_ms = (now - document["finish_time"]) / ms(1) / 4
            state["ask_time"] = now + ms(int(min(max(_FIRST_HOLD_MS, retained_ms, waited_ms), _LONGEST_HOLD_MS)))
        if task.status == "DELETED" or (task.line is not None and task.finished):
            oracle.derive(now)


def _told(id_: str, end: str | None) -> str:
    return f"{label(id_)} {'was deleted' if end in (None, 'DELETED') else f'ended as {end}'}"
