"""A flow as a drawing: boxes in columns, from left to right; many tasks of one name share a box."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from taskmesh.model.flow import FlowStatus, TaskName

_ALONE_UP_TO = 12
"""Up to this many tasks of one name in one column have a box each; more share one box."""
_WIDTH, _HEIGHT, _GAP_X, _GAP_Y, _EDGE = 190, 40, 70, 14, 10
_MOST_CHARS = 24
_WORST_FIRST = ("FAIL", "EXPIRED", "CANCELLED", "GONE", "RUNNING", "INIT", "SUCCESS")


@dataclass(slots=True)
class Box:
    """One task, or many of one name in one column."""

    name: str
    x: int
    y: int
    keys: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def status(self) -> str:
        """The worst status of its tasks."""
        return next(status for status in _WORST_FIRST if self.counts[status])

    @property
    def label(self) -> str:
        """Its label."""
        text = self.keys[0] if len(self.keys) == 1 else f"{len(self.keys)} tasks"
        return text if len(text) <= _MOST_CHARS else text[: _MOST_CHARS - 1] + "…"

    @property
    def says(self) -> str:
        """Its tasks by status."""
        return ", ".join(f"{count} {status}" if len(self.keys) > 1 else status for status, count in self.counts.items())


@dataclass(frozen=True, slots=True)
class Drawing:
    """Boxes, lines between them (`x1 y1 x2 y2`), and the total size."""

    boxes: list[Box]
    lines: list[tuple[int, int, int, int]]
    width: int
    height: int


def drawn(flow: FlowStatus) -> Drawing:
    """Return the drawing of a flow."""
    columns = _columns(flow)
    status = {(task.name, task.key): task.status or "GONE" for task in flow.tasks}
    by_place: dict[tuple[int, str], list[TaskName]] = {}
    for task, column in columns.items():
        by_place.setdefault((column, task[0]), []).append(task)
    boxes: dict[TaskName, Box] = {}
    filled: Counter[int] = Counter()
    all_boxes: list[Box] = []
    for (column, name), tasks in sorted(by_place.items(), key=lambda item: item[0][0]):
        groups = [[task] for task in tasks] if len(tasks) <= _ALONE_UP_TO else [tasks]
        for group in groups:
            box = Box(name, _EDGE + column * (_WIDTH + _GAP_X), _EDGE + filled[column] * (_HEIGHT + _GAP_Y))
            filled[column] += 1
            all_boxes.append(box)
            for task in group:
                box.keys.append(task[1])
                box.counts[status[task]] += 1
                boxes[task] = box
    lines = {
        (boxes[a].x + _WIDTH, boxes[a].y + _HEIGHT // 2, boxes[b].x, boxes[b].y + _HEIGHT // 2)
        for a, b in flow.edges
        if a in boxes and b in boxes and boxes[a] is not boxes[b]
    }
    width = 2 * _EDGE + (max(columns.values(), default=0) + 1) * (_WIDTH + _GAP_X) - _GAP_X
    height = 2 * _EDGE + max(filled.values(), default=1) * (_HEIGHT + _GAP_Y) - _GAP_Y
    return Drawing(all_boxes, sorted(lines), width, height)


def _columns(flow: FlowStatus) -> dict[TaskName, int]:
    """Return the column of each member: one to the right of the last task that it waits for."""
    columns: dict[TaskName, int] = {(task.name, task.key): 0 for task in flow.tasks}
    after: dict[TaskName, list[TaskName]] = {}
    left: Counter[TaskName] = Counter()
    for a, b in flow.edges:
        if a in columns and b in columns:
            after.setdefault(a, []).append(b)
            left[b] += 1
    ready = [task for task in columns if not left[task]]
    while ready:
        task = ready.pop()
        for later in after.get(task, ()):
            columns[later] = max(columns[later], columns[task] + 1)
            left[later] -= 1
            if not left[later]:
                ready.append(later)
    return columns
