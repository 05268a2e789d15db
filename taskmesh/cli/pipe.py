"""The line between a supervisor and one of its children: two pipes.

One tells the child that its supervisor lives: the supervisor alone holds the writing end, so the child reads its end when
the supervisor has gone, however it went. On the other the child says, a line each: `ready`; `recycle` (it has done its
share and wants a successor); `done` (it ended because there is nothing more to do); and every second, out of its event
loop, `well` or `unwell` (the database does not hear of it).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from typing import Literal, Self

VARIABLE = "TASKMESH_SUPERVISED"
HOPELESS = 78
"""Exit status of a child that would fail in the same way again: EX_CONFIG of sysexits.h."""

Word = Literal["ready", "recycle", "done", "well", "unwell"]


class Link:
    """The child's end. Without a supervisor every call does nothing."""

    def __init__(self, life: int | None, words: int | None) -> None:
        self._life = life
        self._words = words

    @classmethod
    def from_environment(cls) -> Self:
        """Take the pipes over, so that no process that a handler starts takes itself for a child of our supervisor."""
        value = os.environ.pop(VARIABLE, None)
        if value is None:
            return cls(None, None)
        life, words = (int(number) for number in value.split(","))
        for descriptor in (life, words):
            os.set_inheritable(descriptor, False)
        os.set_blocking(words, False)  # a supervisor that does not listen must not hold up our event loop
        return cls(life, words)

    @property
    def supervised(self) -> bool:
        """Whether there is a supervisor."""
        return self._life is not None

    def say(self, word: Word) -> None:
        """Tell the supervisor; one that has gone hears nothing."""
        if self._words is not None:
            with contextlib.suppress(OSError):
                os.write(self._words, f"{word}\n".encode())

    def when_alone(self, call: Callable[[], None]) -> None:
        """Call this, in the running loop, when the supervisor has gone."""
        if self._life is None:
            return
        loop = asyncio.get_running_loop()
        life = self._life

        def gone() -> None:
            loop.remove_reader(life)
            call()

        loop.add_reader(life, gone)
