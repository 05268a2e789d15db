"""Audit: who changed what, kept for a month. Written by the verbs for people; nothing on a task's own path writes it.

One document for each action: on a single thing (`about`), or on many tasks (`where`, `matched`; see `admin/store/undo.py`).
"""

from __future__ import annotations

import contextlib
import functools
import getpass
import logging
import os
import socket
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from bson import ObjectId
from pymongo.errors import PyMongoError

from taskmesh.model.ids import checked_remark
from taskmesh.store.mongodb.driver import Document
from taskmesh.store.mongodb.server_errors import patiently
from taskmesh.store.store import Store

logger = logging.getLogger("taskmesh.audit")

KEPT_MS = 30 * 86_400_000
"""How long entries are kept."""
_MOST_CHARS = 1_000


@functools.cache
def this_process() -> str:
    """Return the default author of changes: the user of this process, and its host."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        user = f"uid {os.getuid()}"
    return f"{user}@{socket.gethostname()}"


acting: ContextVar[str | None] = ContextVar("acting", default=None)
"""For whom a face (command line, web) acts at the moment: set by `acting_as`."""


@contextlib.contextmanager
def acting_as(by: str) -> Iterator[None]:
    """Sign changes inside the block, for code that acts for others, like the dashboard and the REST API."""
    before = acting.set(by)
    try:
        yield
    finally:
        acting.reset(before)


def author(by: str | None) -> str:
    """Return the author of a change: `by`, or for whom we act, or the user of this process. Raises `InvalidOption`."""
    return checked_remark("by", by) or acting.get() or this_process()


async def note(store: Store, action: str, by: str, **about: Any) -> None:
    """Note that somebody did something to one task, queue, worker or schedule. Fields that are None are left out.

    If that fails, the action stands: a warning is logged, and nothing raised.
    """
    told = ", ".join(f"{name} {value!r}" for name, value in about.items() if value is not None)[:_MOST_CHARS]
    said = {"action": action, "about": told, "by": by}
    try:
        await _insert(store, str(ObjectId()), said)
    except PyMongoError as error:
        logger.warning("the audit record of %s of %s by %s could not be written: %s", action, told, by, error)


async def begin(store: Store, action: str, where: str, by: str, matched: int, undo_ms: int) -> str:
    """Note that somebody is about to change many tasks. Return the action's id."""
    id_ = str(ObjectId())
    until = {"undo_until": {"$add": [store.now, undo_ms]}} if undo_ms else {}
    await _insert(store, id_, {"action": action, "where": where, "by": by, "matched": matched, "done": None}, until)
    return id_


async def _insert(store: Store, id_: str, said: Document, times: Document | None = None) -> None:
    # An update, since an insert cannot contain expressions: the times are the server's.
    fields: Document = {name: {"$literal": value} for name, value in said.items()}
    fields |= {"time": store.now, "delete_time": {"$add": [store.now, KEPT_MS]}, **(times or {})}
    actions = store.driver.collection(store.actions)
    # One stage: the values as they are, the times by the server's clock.
    await patiently(lambda: actions.update_one({"_id": id_}, [{"$set": fields}], upsert=True))


async def end(store: Store, id_: str, done: int) -> None:
    """Note how many tasks were changed."""
    # A plain update: the count alone, nothing computed.
    await store.driver.collection(store.actions).update_one({"_id": id_}, {"$set": {"done": done}})


async def noted(store: Store, limit: int) -> list[Document]:
    """Return what was done to single things, the newest first."""
    cursor = store.driver.collection(store.actions).find({"about": {"$exists": True}}).sort("time", -1).limit(limit)
    found: list[Document] = await cursor.to_list(None)
    return found
