"""What the entries of finished tasks tell afterwards: how many ran at once, how many started in a while."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any

from taskmesh import Status, TaskMesh

Span = tuple[datetime, datetime | None]


async def starts_of(mesh: TaskMesh, name: str, status: Status | None = None) -> list[Span]:
    """Return start and end of every execution that is still known, by the server's clock."""
    spans: list[Span] = []
    async for task in mesh.find(name, status=status, limit=0):
        for entry in task.task_state.worker_states:
            assert entry.start_time is not None
            spans.append((entry.start_time, entry.success_time or entry.fail_time))
    return spans


def most_running(spans: Iterable[Span]) -> int:
    """Return how many of the spans overlapped at most; those without an end last for ever."""
    moments = [(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans if end is not None]
    running = most = 0
    for _, change in sorted(moments):  # an end in the same millisecond comes before a start
        running += change
        most = max(most, running)
    return most


def most_starts_within(starts: Sequence[datetime], window_ms: int) -> int:
    """Return how many of the sorted starts lie in the fullest window of this length."""
    window = timedelta(milliseconds=window_ms)
    most = first = 0
    for i, start in enumerate(starts):
        while start - starts[first] >= window:
            first += 1
        most = max(most, i - first + 1)
    return most


def live_entries(documents: Iterable[dict[str, Any]], now: datetime) -> list[tuple[str, str]]:
    """Return which workers hold a live lease on which of these stored tasks."""
    return [
        (document["_id"], entry["worker_id"])
        for document in documents
        for entry in document["task_state"]["worker_states"]
        if entry["state"] == "RUNNING" and entry["ping_expire_time"] > now
    ]
