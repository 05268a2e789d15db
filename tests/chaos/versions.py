"""The committed versions of every task, put together from the change stream, which only shows what no failover takes back.

An update's event tells what changed; applied to the version before, it gives the version after. The checker so sees
every state that a task was ever in, though nobody polled for it.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from bson.codec_options import CodecOptions
from pymongo import MongoClient
from pymongo.errors import PyMongoError

from tests.chaos.rates import Rates, Window
from tests.waiting import wait_until

Document = dict[str, Any]
_PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True)
class Version:
    """One committed write to a task: what stood there before (None: nothing) and after (None: nothing any more)."""

    id: str
    time: datetime
    """The server's wall clock at the commit."""
    before: Document | None
    after: Document | None
    paused_since: datetime | None = None
    """Since when the task's queue has been paused, if it is."""
    window: Window | None = None
    """If an execution began with this write under a rate: how many did in the fullest window that it is in."""


def told(before: Document, after: Document) -> str | None:
    """The stamp that this write has left, if any."""
    changed = (after[name] for name in ("event", "record_event") if after.get(name) not in (None, before.get(name)))
    return next(changed, None)


class Versions:
    """Puts versions together from change events."""

    def __init__(self) -> None:
        self.newest: dict[str, Document] = {}
        """The last version of every task that is there."""
        self._paused: dict[str, datetime] = {}
        """Since when which queue has been paused."""
        self._rates = Rates()
        self.seen = 0

    def apply(self, event: Mapping[str, Any]) -> Version | None:
        """Take the next event; None if it is not about a task that was seen from its beginning."""
        operation = event["operationType"]
        if operation in ("drop", "rename", "dropDatabase"):
            self.newest.clear()
            return None
        if operation not in ("insert", "replace", "update", "delete"):
            return None
        id_ = event["documentKey"]["_id"]
        if event["ns"]["coll"] == "queues":
            self._note_queue(id_, event)
            return None
        before = self.newest.get(id_)
        after: Document | None
        if operation == "delete":
            after = None
        elif operation in ("insert", "replace"):
            after = event["fullDocument"]
        elif before is None:
            return None
        else:
            after = applied(before, event["updateDescription"])
        if after is None:
            self.newest.pop(id_, None)
        else:
            self.newest[id_] = after
        self.seen += 1
        queue = (after or {}).get("queue", "default")
        window = None
        for start in _starts(before, after):
            window = self._rates.started(queue, start)
        return Version(id_, event["wallTime"], before, after, self._paused.get(queue), window)

    def _note_queue(self, queue: str, event: Mapping[str, Any]) -> None:
        changes = event.get("fullDocument") or event.get("updateDescription", {}).get("updatedFields", {})
        if "limits" in changes or event["operationType"] == "delete":
            self._rates.learn(queue, changes.get("limits") or {}, event["wallTime"])
        if changes.get("paused"):
            self._paused.setdefault(queue, event["wallTime"])
        elif "paused" in changes or event["operationType"] == "delete":
            self._paused.pop(queue, None)


def _starts(before: Document | None, after: Document | None) -> Iterator[datetime]:
    """When each execution began that is new in this version."""
    old, new = (document["task_state"]["worker_states"] if document else [] for document in (before, after))
    known = {entry["running_id"] for entry in old}
    return (entry["start_time"] for entry in new if entry["running_id"] not in known)


def applied(before: Document, description: Mapping[str, Any]) -> Document:
    """Return the document after the change that an event describes."""
    after = copy.deepcopy(before)
    for path in description.get("removedFields", ()):
        holder, name = _place(after, path)
        del holder[name]
    for cut in description.get("truncatedArrays", ()):
        holder, name = _place(after, cut["field"])
        del holder[name][cut["newSize"] :]
    for path, value in description.get("updatedFields", {}).items():
        holder, name = _place(after, path)
        if isinstance(holder, list) and name == len(holder):
            holder.append(value)
        else:
            holder[name] = value
    return after


def _place(document: Any, path: str) -> tuple[Any, Any]:
    *way, last = path.split(".")
    for step in way:
        document = document[int(step) if isinstance(document, list) else step]
    return document, int(last) if isinstance(document, list) else last


class Watcher:
    """A thread that reads the change stream of a database, and goes on behind the last event after every fault."""

    def __init__(self, uri: str, database: str, on_event: Callable[[Mapping[str, Any]], None]) -> None:
        self._uri, self._database, self._on_event = uri, database, on_event
        self._stopping = threading.Event()
        self._open = threading.Event()
        self.error: BaseException | None = None
        self.last_event = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="watcher", daemon=True)

    def start(self) -> None:
        """Start, and return when nothing can be missed any more."""
        self._thread.start()
        assert self._open.wait(60.0), f"the change stream did not open: {self.error}"

    def stop(self, quiet_s: float = 2.0) -> None:
        """Stop once nothing has come for a while."""
        wait_until(lambda: time.monotonic() - self.last_event > quiet_s, _PATIENCE_S, what="no more events")
        self._stopping.set()
        self._thread.join(30.0)
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        token: Mapping[str, Any] | None = None
        with MongoClient[Document](self._uri, appname="watcher", tz_aware=True, socketTimeoutMS=10_000) as client:
            database = client.get_database(self._database, codec_options=CodecOptions(tz_aware=True))
            while not self._stopping.is_set():
                try:
                    for event, place in _events(database, token):
                        token = place
                        if event is not None:
                            self.last_event = time.monotonic()
                            self._on_event(event)
                        self._open.set()
                        if self._stopping.is_set():
                            return
                except PyMongoError as error:
                    if not _passes(error):
                        self.error = error
                        return
                    self._stopping.wait(0.1)
                except BaseException as error:  # whatever it is, `stop` raises it in the test
                    self.error = error
                    raise


def _events(
    database: Any, token: Mapping[str, Any] | None
) -> Iterator[tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]]:
    tasks = [{"$match": {"$or": [{"ns.coll": {"$in": ["tasks", "queues"]}}, {"operationType": "dropDatabase"}]}}]
    with database.watch(tasks, start_after=token, max_await_time_ms=200) as stream:
        while stream.alive:
            event = stream.try_next()
            yield event, stream.resume_token


def _passes(error: PyMongoError) -> bool:
    """Whether the same place in the stream can still be read: all but a lost history."""
    return getattr(error, "code", None) not in (286, 280, 260)
