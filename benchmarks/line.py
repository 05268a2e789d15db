"""What a member of a crew and its leader say to each other; see `benchmarks.crew`."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

Setting = dict[str, Any]


class Line:
    """What a member says and is told."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.end = asyncio.Event()
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._listen, args=(loop,), daemon=True).start()

    def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        for word in sys.stdin:
            loop.call_soon_threadsafe(self.go.set if word.strip() == "go" else self.end.set)
        os._exit(1)  # whoever started us is gone

    def say(self, **told: Any) -> None:
        """Say something, now."""
        print(json.dumps(told), flush=True)

    async def sample(self, done: Callable[[], int], every_s: float = 0.1) -> None:
        """Say for ever how much is done.

        Seldom: by saying it fifty times a second, sixteen members slowed down what they measured.
        """
        while True:
            self.say(t=time.monotonic(), n=done())
            await asyncio.sleep(every_s)


Role = Callable[[Line, Setting], Awaitable[None]]
