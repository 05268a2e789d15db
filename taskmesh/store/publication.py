"""A publication, and the document of the new task that it becomes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from zlib import crc32

from bson import ObjectId

from taskmesh.model.configuration import Configuration
from taskmesh.model.labels import words
from taskmesh.model.task import unchecked_id
from taskmesh.store.apart import Apart
from taskmesh.store.mongodb.driver import Document
from taskmesh.store.numbers import moment_of, number_at
from taskmesh.store.pipeline.event_stamp import stamped

PublishId = ObjectId
"""A repeated publish is recognised by it."""
LANES = 64
"""Every task is in a lane, by its `_id`; live workers divide the lanes among themselves, so that they seldom race."""


@dataclass(slots=True)
class Publication:
    """A task to publish: its checked params, and the configuration that says how."""

    name: str
    key: str
    params: Document
    configuration: Configuration = field(default_factory=Configuration)
    size: int = 0
    """The size of the params, in bytes of BSON."""
    trace: Document | None = None
    flow: str | None = None
    """The flow whose gate is shut until all its members are there."""
    publish_id: PublishId = field(default_factory=PublishId)
    """A repeated publish is recognised by it. Tasks that are published by one call may share it."""
    parent: str | None = None
    """The task whose handler starts it."""
    detached: bool = False
    """Whether it goes on when its parent is cancelled or fails."""
    broadcast: bool = False
    """Whether it is for those of the workers that it names that are live."""
    apart: Sequence[Apart] = ()
    """Params that are stored separately, and have to be written first."""
    sealed: bool = False
    """Whether its params are encrypted. Then the key that a worker needs is stored again with them."""
    loop: Document | None = None
    """How it repeats, if it is a loop (see `Loop.stored`)."""
    number: int = 0
    """Its place in the order of publication, once it has one."""
    seen: Document | None = None
    """What stood under its key when the call began, if that was read: then its first attempt need not read it again."""
    sent_to: Document | None = None
    """The existing task to which a change was sent whose answer is missing. The change is repeated for no other task."""

    @property
    def id(self) -> str:
        """The `_id` of the task."""
        return unchecked_id(self.name, self.key)

    @property
    def waits(self) -> bool:
        """Whether its task, if new, waits for others, or in line: then it has a mark."""
        return bool(self.configuration.after) or self.configuration.sequence_key is not None

    @property
    def marks(self) -> Document:
        """The top-level fields that its publisher sets, both for a new task and for an existing one."""
        if self.loop is None and not self.sealed:
            return self.configuration.marks
        loop = {} if self.loop is None else {"loop": self.loop}
        return {**self.configuration.marks, **loop, "needs": words(self.configuration.needs)}


def new_document(publication: Publication, now: datetime, option: Mapping[str, Any] | None = None) -> Document:
    """Return the document of a new task. `now`: the server's time as we know it. `option`: as it is stored, if known."""
    configuration = publication.configuration
    start_time = configuration.starts(now)
    number = publication.number or number_at(now)
    # The time of the call: so the index has tasks in the order of their numbers, however long each was on its way.
    called_for = min(now, moment_of(number))
    id_ = publication.id
    document: Document = {
        "_id": id_,
        "name": publication.name,
        "key": publication.key,
        "queue": configuration.queue,
        "params": publication.params,
        "task_option": option or configuration.option.stored(),
        "task_state": {
            "create_time": called_for,
            "start_time": start_time,
            "expire_time": configuration.expire_time,
            "timeout_cnt": 0,
            "worker_states": [],
            **configuration.since(now),
        },
        "status": "INIT",
        "next_claim_time": max(start_time, called_for) if start_time else called_for,
        "pinned": bool(configuration.option.specific_worker_ids or configuration.needs),
        "lane": lane_of(id_),
        "publish_id": publication.publish_id,
        "publish_number": number,
    }
    if configuration.expire_time is not None:
        document["settle_time"] = configuration.expire_time
    if configuration.group is not None:
        document["group"] = configuration.group
    if publication.trace is not None:
        document["trace"] = publication.trace
    if publication.parent is not None:
        document["task_state"] |= {"parent": publication.parent, "pending": True}
        # Its parent may wait for it at any time: naming it from the beginning saves a write then.
        named = {"detached": True} if publication.detached else {"dependents": [publication.parent]}
        document["task_state"] |= named
    if configuration.after is not None:
        document["task_state"] |= configuration.after.stored()
    if shut := _shut(publication, number, now):
        document["task_state"] |= shut
        del document["next_claim_time"]
    if configuration.needs:
        # The stamp tells whoever reads a group along its index that this is not enough: the rule decides who may have the task.
        document |= {"needs": words(configuration.needs), "event": stamped("published", now)}
    if publication.broadcast:
        document["broadcast"] = True
    if marks := publication.marks:
        document |= {name: value for name, value in marks.items() if name != "tags" or value}
    return document


def _shut(publication: Publication, number: int, now: datetime) -> Document:
    """Return the fields of `task_state` that shut gates of a new task until somebody else opens them."""
    configuration, shut = publication.configuration, Document()
    if configuration.after:  # whoever checks next links it with its dependencies
        shut |= {"waits_for": configuration.on_dependency_failure, "ask_time": now}
        if configuration.on_dependency_failure == "run":
            shut["unlinked"] = True  # until all that it waits for names it, nobody can tell when that is over
    if publication.flow is not None:
        shut["flow"] = publication.flow
    if configuration.sequence_key is not None:  # whoever checks next sees whether it is its turn
        shut |= {**line_of(configuration), "place": number, "in_line": True, "ask_time": now}
    return shut


def line_of(configuration: Configuration) -> Document:
    """Return the fields that say in which line the task stands, and what its failure means there."""
    assert configuration.sequence_key is not None
    blocks = {"on_sequence_failure": "block"} if configuration.on_sequence_failure == "block" else {}
    # The name of a line: the queue in which its tasks are published (which has no colon in its name), and their key.
    return {"line": f"{configuration.queue}:{configuration.sequence_key}", **blocks}


def lane_of(id_: str) -> int:
    """Return the lane of a task."""
    return crc32(id_.encode()) % LANES
