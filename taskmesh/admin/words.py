"""Words that several answers to people share."""

from __future__ import annotations

from collections.abc import Sequence


def first_three(names: Sequence[str]) -> str:
    """Name the first three, and say how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def tasks(count: int, or_more: bool = False) -> str:
    """Say how many tasks: "1 task", "5 tasks", "1000 or more tasks"."""
    return "1 task" if count == 1 and not or_more else f"{count}{' or more' if or_more else ''} tasks"


def tasks_wait(count: int, or_more: bool = False) -> str:
    """Say how many tasks wait: "1 task waits", "5 tasks wait"."""
    return f"{tasks(count, or_more)} wait{'s' if count == 1 and not or_more else ''}"
