"""The settings of a consumer: who it is, what it runs, how much at once. Checked here, before anything starts."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from taskmesh.consumer.hooks import AfterHook, BeforeHook
from taskmesh.consumer.observer import Observer
from taskmesh.model.errors import InvalidOption
from taskmesh.model.ids import checked_worker_id, shown
from taskmesh.model.labels import HOST, checked_labels
from taskmesh.model.queue import checked_queue
from taskmesh.model.task import checked_name
from taskmesh.model.worker import Claimant


@dataclass(kw_only=True)
class Settings:
    """The settings of one consumer."""

    worker_id: str
    labels: dict[str, Any]
    names: list[str]
    """The names of the tasks that it runs."""
    queues: list[str] | None
    """The queues that it takes tasks from. None: all."""
    concurrency: int
    """How many executions run at once. It can be changed while the consumer runs; all other settings are fixed."""
    listen: bool
    before: BeforeHook | None
    after: AfterHook | None
    stall_limit_ms: int
    observer: Observer | None = None
    """What measures it, if anything does."""
    loop_ids: frozenset[str] = frozenset()
    """The tasks of the loops that it may run. These take no slot."""
    instance: str = field(default_factory=lambda: secrets.token_hex(6))
    """Distinguishes this run from any other under the same worker id."""

    @property
    def claimant(self) -> Claimant:
        """The worker as the claim rule sees it."""
        return Claimant.labelled(self.worker_id, self.labels)


def all_labels(labels: Any) -> dict[str, Any]:
    """Return a worker's labels: the given ones, and its host. Raises `InvalidOption`."""
    return {HOST: socket.gethostname(), **checked_labels("labels", labels)}


def worker_id_or_new(worker_id: str | None) -> str:
    """Return the id, or a generated one. Raises `InvalidOption`."""
    if worker_id is None:
        return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
    return checked_worker_id(worker_id)


def checked_listen(listen: Any) -> bool:
    """Return whether it may open a change stream. Raises `InvalidOption`."""
    if not isinstance(listen, bool):
        raise InvalidOption(f"listen must be True or False, got {shown(listen)}")
    return listen


def checked_names(defined: Iterable[str], names: Sequence[str] | None) -> list[str]:
    """Return the names of the tasks to run: all that are defined, if none are given. Raises `InvalidOption`."""
    known = sorted(defined)
    if names is None:
        return known
    if isinstance(names, str):
        raise InvalidOption(f"names must be a list of task names, got a str: write [{names!r}]")
    if unknown := sorted({checked_name(name) for name in names} - set(known)):
        raise InvalidOption(f"no handler is defined for {', '.join(unknown)}; there are: {', '.join(known) or 'none'}")
    return sorted(names)


def checked_queues(queues: Sequence[str] | None) -> list[str] | None:
    """Return the queues to take tasks from. None: all. Raises `InvalidOption`."""
    if queues is None:
        return None
    if isinstance(queues, str):
        raise InvalidOption(f"queues must be a list of queue names, got a str: write [{queues!r}]")
    return [checked_queue(queue) for queue in queues]
