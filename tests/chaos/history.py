"""All that bears witness about a run: the handlers' own history, the publishers', the documents, the log of versions, events."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.reading import Reading
from tests.chaos.versions import Document, Version, told
from tests.processes.history import Mark, Run, runs_in

DIED_AS_ASKED = 3
"""The exit code of a worker that its handler ends on purpose."""


@dataclass(frozen=True, slots=True)
class Published:
    """One publish that was tried. `created`: what the publisher was told; None if it was told an error."""

    id: str
    created: bool | None
    ends: tuple[str, ...]
    """The statuses in which the task may come to its end."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One call of a verb that changes or removes a task, whatever its caller was told."""

    id: str
    kind: str
    """What its write says: `deleted`, `cancelled`, `retried`, `option_changed`."""


@dataclass(frozen=True, slots=True)
class Told:
    """One event as a reader of `mesh.events()` was told of it."""

    id: str
    kind: str
    worker_id: str | None


@dataclass
class Evidence:
    """What a run left behind. The log of versions is checked while it runs; of it only the sequence of kinds is kept."""

    published: Sequence[Published] = ()
    asked: Sequence[Asked] = ()
    """Of a task of which one call of a kind is noted here, all of that kind are."""
    done: Mapping[Asked, int] = field(default_factory=dict)
    """How often the log says that it was done."""
    documents: Mapping[str, Document] = field(default_factory=dict)
    limits: Sequence[Document] = ()
    """What the queues' limits have booked."""
    marks: Sequence[Mark] = ()
    died: Mapping[int, Sequence[float]] = field(default_factory=dict)
    """When which process was gone."""
    suspended: Sequence[tuple[int, float, float]] = ()
    """Which process was suspended from when to when."""
    exits: Sequence[tuple[str, int]] = ()
    """With what exit code (minus a signal's number) which worker ended, once it worked."""
    effects: Sequence[str] = ()
    """The `_id`s of tasks whose handlers wrote in `transaction()`, one for each such write that is there."""
    moves: Sequence[tuple[str, str]] = ()
    """What transfers wrote beside their effects: from which account one was taken, and to which it was given."""
    accounts: Mapping[str, int] = field(default_factory=dict)
    """What the accounts hold, that held nothing in the beginning."""
    told: Sequence[Told] = ()
    claims: Mapping[str, set[tuple[str, str]]] = field(default_factory=dict)
    """By task: the `running_id` and worker of every claim."""
    happened: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """By task: what the log says that happened, as the kinds of events."""

    @property
    def runs(self) -> list[Run]:
        """The handlers' runs."""
        return runs_in(self.marks)


class Log:
    """Keeps of the versions what the check at the end needs."""

    def __init__(self) -> None:
        self.claims: dict[str, set[tuple[str, str]]] = defaultdict(set)
        self.happened: dict[str, list[str]] = defaultdict(list)
        self.done: Counter[Asked] = Counter()

    def add(self, version: Version) -> None:
        """Take the next version."""
        if version.after is None:
            return
        if version.before is None:
            self.happened[version.id].append("published")
            return
        known = {entry["running_id"] for entry in version.before["task_state"]["worker_states"]}
        for entry in version.after["task_state"]["worker_states"]:
            if entry["running_id"] not in known:
                self.claims[version.id].add((entry["running_id"], entry["worker_id"]))
        if (text := told(version.before, version.after)) is None:
            return
        kind, time, _, *lost = text.split("\x1f")
        self.done[Asked(version.id, kind)] += 1
        self.happened[version.id] += ["timed_out"] * len(lost)
        if time.endswith("p"):  # progress that came with how the execution ended
            self.happened[version.id].append("progressed")
        if kind not in ("settled", "stopped", "opened"):
            self.happened[version.id].append(kind)
        status = version.after["status"]
        if status != version.before["status"] and status in ("SUCCESS", "FAIL", "CANCELLED", "EXPIRED"):
            self.happened[version.id].append("finished")


def was_told_to_go(version: Version) -> bool:
    """Whether somebody deleted the task, and not time alone."""
    return version.before is not None and Reading(version.before).deleted


def returned_value(run: Run) -> Any:
    """What the handler of a run noted as its value."""
    return None if run.end is None else run.end.more.get("value")
