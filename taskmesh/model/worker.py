"""Workers as they describe themselves in the registry, and the rule of which of them could run a task."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from taskmesh.model.errors import InvalidOption
from taskmesh.model.labels import HOST, WORKER, words
from taskmesh.model.read_only import ReadOnly

DEFAULT_STALL_LIMIT_MS = 60_000
MOST_AT_ONCE = 1_000_000


def checked_concurrency(concurrency: int) -> int:
    """Return the number. Raises `InvalidOption`."""
    if isinstance(concurrency, bool) or not isinstance(concurrency, int) or not 1 <= concurrency <= MOST_AT_ONCE:
        raise InvalidOption(f"concurrency must be a whole number from 1 to {MOST_AT_ONCE}, got {concurrency!r}")
    return concurrency


def checked_grace(grace_ms: int) -> int:
    """Return the milliseconds. Raises `InvalidOption`."""
    if isinstance(grace_ms, bool) or not isinstance(grace_ms, int) or grace_ms < 0:
        raise InvalidOption(f"grace_ms must be a whole number of milliseconds, 0 or more, got {grace_ms!r}")
    return grace_ms


@dataclass(frozen=True, slots=True)
class Claimant:
    """A worker as the claim rule sees it."""

    id: str
    parent: str | None = None
    """For one of several processes, the id without its number: `specific_worker_ids` may name that, too."""
    labels: tuple[str, ...] = ()
    """Its labels, as they are stored."""

    @classmethod
    def labelled(cls, worker_id: str, labels: Mapping[str, Any]) -> Claimant:
        """Return the worker with this id and these labels."""
        parent = labels.get(WORKER)
        return cls(worker_id, parent if isinstance(parent, str) else None, tuple(words(labels)))

    @property
    def names(self) -> list[str]:
        """The names by which `specific_worker_ids` may refer to it."""
        return [self.id] if self.parent is None else [self.id, self.parent]

    def is_allowed(self, named: Collection[str]) -> bool:
        """Whether a task with these `specific_worker_ids` is for this worker."""
        return not named or any(name in named for name in self.names)

    def has(self, needs: Iterable[str]) -> bool:
        """Whether it has all labels that a task needs."""
        return all(need in self.labels for need in needs)


class LeaseLeft(ReadOnly):
    """How close the leases of a worker came to their end within the last hour."""

    name: str
    """The name of the tasks."""
    share: float
    """The smallest share of a lease that was left when it was renewed. Near 0, a task is about to run twice."""


class WorkerInfo(ReadOnly):
    """A worker as it last described itself."""

    worker_id: str
    host: str
    pid: int
    version: str
    state: str
    """`running`, `stopping`, `stopped`; `gone` if it has sent no heartbeat for a while."""
    names: list[str]
    queues: list[str] | None
    """None: all."""
    concurrency: int
    running: int
    last_seen: datetime
    labels: dict[str, Any] = {}
    """What tasks may need; `host` is one of them."""
    paused: bool = False
    listens: bool = True
    """Whether it has a change stream open. If not, it polls, at least once a second."""
    may_listen: bool = True
    """Whether it may open one: see `listen` of `mesh.consumer`."""
    start_time: datetime | None = None
    started: int = 0
    finished: int = 0
    started_per_s: float = 0.0
    finished_per_s: float = 0.0
    cpu_share: float | None = None
    """How much of one core its process used recently. Child processes that run handlers are not counted."""
    memory_peak_bytes: int | None = None
    """The most memory that its process has had."""
    claims_tried: int = 0
    """Tasks that it tried to claim within the last hour."""
    claims_won: int = 0
    """Those of them that it won; the others went elsewhere, or had changed."""
    lease_left: list[LeaseLeft] = []
    stood_still_ms: int = 0
    """How long, at most, its event loop was blocked within the last hour, if that was a second or more."""
    on_claim: str | None = None
    """The latest answer of its hook `on_claim`. None: it has none."""
    on_claim_claims_nothing: bool = False
    """Whether that was that nothing may be claimed."""
    clock_off_ms: int = 0
    """How far its machine's clock is ahead of the server's."""

    @property
    def live(self) -> bool:
        """Whether the worker is live."""
        return self.state not in ("stopped", "gone")

    def runs(self, name: str, queue: str) -> bool:
        """Whether it has the handler of these tasks and serves that queue. Whether it is live does not matter."""
        return name in self.names and self.takes_from(queue)

    @property
    def claimant(self) -> Claimant:
        """The worker as the claim rule sees it."""
        return Claimant.labelled(self.worker_id, self.labels)

    def takes_from(self, queue: str) -> bool:
        """Whether it serves that queue."""
        return self.queues is None or queue in self.queues

    def competes_for(self, names: Collection[str], queues: Collection[str] | None) -> bool:
        """Whether it now claims some of the tasks that a worker with these names and queues (None: all) claims."""
        share_a_queue = queues is None or self.queues is None or not set(queues).isdisjoint(self.queues)
        return self.claims and share_a_queue and not set(names).isdisjoint(self.names)

    def runs_all(self, names: Collection[str], queues: Collection[str] | None) -> bool:
        """Whether it has the handlers of all these tasks and serves all these queues (None: all), whatever tasks need."""
        takes_all = self.queues is None or (queues is not None and set(queues).issubset(self.queues))
        return takes_all and set(names).issubset(self.names)

    def can_stand_in_for(self, other: WorkerInfo) -> bool:
        """Whether it can run all tasks that the other can, except for those that name a worker or a host."""
        labels = {name: value for name, value in other.labels.items() if name not in (HOST, WORKER)}
        return self.runs_all(other.names, other.queues) and self.claimant.has(words(labels))

    @property
    def claims(self) -> bool:
        """Whether it claims tasks now: it is running, and not paused."""
        return self.state == "running" and not self.paused

    @property
    def claims_lost_share(self) -> float | None:
        """The share of its claims in the last hour that won nothing. None if it tried none."""
        return 1 - self.claims_won / self.claims_tried if self.claims_tried else None

    @property
    def least_lease_left(self) -> LeaseLeft | None:
        """The lease that came closest to its end within the last hour. None if none was renewed."""
        return min(self.lease_left, key=lambda left: left.share, default=None)

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> WorkerInfo:
        """Read a document of the registry, as `store.registry.workers` returns it."""
        state = document.get("state", "stopped")
        if not document.get("live") and state != "stopped":
            state = "gone"
        return cls.model_validate({**document, "worker_id": document["_id"], "state": state})


def read_workers(documents: Iterable[Mapping[str, Any]]) -> list[WorkerInfo]:
    """Read the registry. Invalid and incomplete entries are left out."""
    found = []
    for document in documents:
        with suppress(ValueError):
            found.append(WorkerInfo.from_document(document))
    return found


def able_workers(
    workers: Iterable[WorkerInfo], name: str, queue: str, only: Collection[str] = (), needs: Sequence[str] = ()
) -> list[WorkerInfo]:
    """Return the live workers that run tasks of this name from this queue, are allowed to, and have the needed labels.

    `only`: the task's `specific_worker_ids`; empty: any worker is allowed. `needs`: labels as they are stored. A paused worker
    counts: it will go on.
    """
    running = [worker for worker in workers if worker.live and worker.runs(name, queue)]
    return [worker for worker in running if worker.claimant.is_allowed(only) and worker.claimant.has(needs)]


def known_names(workers: Iterable[WorkerInfo]) -> set[str]:
    """Return the names of the tasks for which some live worker has the handler."""
    return {name for worker in workers if worker.live for name in worker.names}
