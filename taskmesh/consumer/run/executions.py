"""The executions that hold a slot of one consumer, and how many slots are free."""

from __future__ import annotations

import asyncio

from taskmesh.consumer.run.execution import Execution
from taskmesh.consumer.settings import Settings

_MANY_SLOTS = 50


class Executions(dict[str, Execution]):
    """The executions that hold a slot, by `_id`: until their outcome is recorded and their handler has really ended."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self._settings = settings
        self.recording: set[Execution] = set()
        """The executions whose outcomes are on their way to the database."""
        self.freed = asyncio.Event()
        """Set whenever a slot becomes free. Whoever waits for it clears it."""
        self.loop_ended = asyncio.Event()
        """Set when the execution of a loop has ended. Whoever waits for it clears it."""
        self.started = 0
        self.finished = 0

    @property
    def free_slots(self) -> int:
        """How many executions may start now.

        If there are many slots, a handler that has ended frees its slot while its outcome is still on its way to the database,
        so that the next tasks are claimed meanwhile. At most half as many again may be on their way. If there are few slots,
        each outcome is recorded before its slot is used again. Loops hold no slot: a singleton would occupy one for ever.
        """
        loops = sum(id_ in self for id_ in self._settings.loop_ids)
        concurrency, held = self._settings.concurrency, len(self) - loops
        at_work = held - len(self.recording)
        beside = concurrency // 2 if concurrency >= _MANY_SLOTS else 0
        return max(0, min(concurrency - at_work, concurrency + beside - held))
