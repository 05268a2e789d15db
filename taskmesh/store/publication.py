"""A publication, and the document of the new task that it becomes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from zlib import crc32

from bson import ObjectId

from taskmesh.model.configuration import Configuration
from taskmesh.model.labels import words
from taskmesh.store import sequences
from taskmesh.store.apart import Apart
from taskmesh.store.driver import Document
from taskmesh.store.event_stamp import stamped
from taskmesh.store.numbers import moment_of, number_at

PublishId = ObjectId
"""By which a repeated publish is known."""
LANES = 64
"""Every task sits in a lane, by its `_id`; live workers divide the lanes among themselves, so that they seldom race."""


@dataclass(slots=True)
class Publication:
    """One task to publish: its checked params, and the configuration that says how."""

    name: str
    key: str
    params: Document
    configuration: Configuration = field(default_factory=Configuration)
    size: int = 0
    """Of the params, in bytes of BSON."""
    trace: Document | None = None
    flow: str | None = None
    """The flow whose gate is shut until all its members are there."""
    publish_id: PublishId = field(default_factory=PublishId)
    """By which a repeated publish is known. Tasks that are published by one call may share it."""
    parent: str | None = None
    """The task whose handler starts it."""
    detached: bool = False
    """Whether it goes on when that is cancelled or fails."""
    broadcast: bool = False
    """Whether it is for the workers that it names, as far as they live."""
    apart: Sequence[Apart] = ()
    """What of its params is stored apart, and has to be written first."""
    sealed: bool = False
    """Whether its params are encrypted: which key a worker needs is said anew with them."""
    loop: Document | None = None
    """How it runs again and again, if it does (see `Loop.stored`)."""
    number: int = 0
    """Its place in the order of publication, once it has one."""
    sent_to: Document | None = None
    """The existing task to which a change was sent whose answer is missing: it is repeated for no other."""

    @property
    def id(self) -> str:
        """The `_id` of the task."""
        return f"{self.name}:{self.key}"

    @property
    def marks(self) -> Document:
        """What its publisher sets at the top of the document, of a new task and of an existing one alike."""
        if self.loop is None and not self.sealed:
            return self.configuration.marks
        loop = {} if self.loop is None else {"loop": self.loop}
        return {**self.configuration.marks, **loop, "needs": words(self.configuration.needs)}


def new_document(publication: Publication, now: datetime, option: Document | None = None) -> Document:
    """Return the document of a new task. `now`: the server's time, as well as we know it. `option`: as it is stored, if known."""
    configuration = publication.configuration
    start_time = configuration.starts(now)
    number = publication.number or number_at(now)
    # When it was called for: so the index has tasks in the order of their numbers, however long each was on its way.
    called_for = min(now, moment_of(number))
    document: Document = {
        "_id": publication.id,
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
        "pinned": bool(configuration.option.specific_worker_ids),
        "lane": lane_of(publication.id),
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
        # Its parent may wait for it at any time: named from the beginning, that costs no write then.
        named = {"detached": True} if publication.detached else {"dependents": [publication.parent]}
        document["task_state"] |= named
    if configuration.after is not None:
        document["task_state"] |= configuration.after.stored()
    if shut := _shut(publication, number, now):
        document["task_state"] |= shut
        del document["next_claim_time"]
    if configuration.needs:
        # The stamp says to scans that the index does not tell all of it: whether a worker may have it, the rule does.
        document |= {"needs": words(configuration.needs), "event": stamped("published", now)}
    if publication.broadcast:
        document["broadcast"] = True
    if marks := publication.marks:
        document |= {name: value for name, value in marks.items() if name != "tags" or value}
    return document


def _shut(publication: Publication, number: int, now: datetime) -> Document:
    """Return the fields of `task_state` that shut gates of a new task until somebody else opens them."""
    configuration, shut = publication.configuration, Document()
    if configuration.after:  # whoever asks next links it with what it waits for
        shut |= {"waits_for": configuration.on_dependency_failure, "unlinked": True, "ask_time": now}
    if publication.flow is not None:
        shut["flow"] = publication.flow
    if configuration.sequence_key is not None:  # whoever asks next sees whether it is its turn
        shut |= {**line_of(configuration), "place": number, "in_line": True, "ask_time": now}
    return shut


def line_of(configuration: Configuration) -> Document:
    """Return the fields that say in which line the task stands, and what its failure means there."""
    assert configuration.sequence_key is not None
    blocks = {"on_sequence_failure": "block"} if configuration.on_sequence_failure == "block" else {}
    return {"line": sequences.line_of(configuration.queue, configuration.sequence_key), **blocks}


def lane_of(id_: str) -> int:
    """Return the lane of a task."""
    return crc32(id_.encode()) % LANES
