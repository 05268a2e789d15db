"""The executions that hold a slot of one consumer, and how many slots are free."""

from __future__ import annotations

import asyncio

from taskmesh.consumer.execution import Execution
from taskmesh.consumer.settings import Settings

_MANY_SLOTS = 50


class Executions(dict[str, Execution]):
    """What holds a slot, by `_id`: until its outcome is recorded, and its handler has really ended."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self._settings = settings
        self.recording: set[Execution] = set()
        """Whose outcomes are on their way to the database."""
        self.freed = asyncio.Event()
        """Set whenever an execution gives its slot back; cleared by whoever waits for that."""
        self.loop_ended = asyncio.Event()
        """Set when the execution of a loop has ended; cleared by whoever waits for that."""
        self.started = 0
        self.finished = 0

    @property
    def free_slots(self) -> int:
        """How many executions may begin now.

        Where there are many slots, a handler that has ended makes room though its outcome is still on its way to the
        database: so the next tasks are claimed meanwhile. But only half as many again may be on their way. Where there are
        few, each outcome is recorded before another task has its slot. Loops hold none: a singleton would keep it for ever.
        """
        loops = sum(id_ in self for id_ in self._settings.loop_ids)
        concurrency, held = self._settings.concurrency, len(self) - loops
        at_work = held - len(self.recording)
        beside = concurrency // 2 if concurrency >= _MANY_SLOTS else 0
        return max(0, min(concurrency - at_work, concurrency + beside - held))
