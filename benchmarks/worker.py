"""One process of a crew: `python -m benchmarks.worker ROLE '{…}'`. See `benchmarks.crew`."""

from __future__ import annotations

import asyncio
import gc
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

    async def sample(self, done: Callable[[], int], every_s: float = 0.02) -> None:
        """Say for ever how much is done."""
        while True:
            self.say(t=time.monotonic(), n=done())
            await asyncio.sleep(every_s)


Role = Callable[[Line, Setting], Awaitable[None]]


def _role(name: str) -> Role:
    if name.startswith("bare"):
        from benchmarks import bare  # noqa: PLC0415 -- a bare loop does not pay for the engine's import

        return bare.ROLES[name]
    from benchmarks import engine  # noqa: PLC0415 -- the same

    return engine.ROLES[name]


async def _main() -> None:
    await _role(sys.argv[1])(Line(), json.loads(sys.argv[2]))


if __name__ == "__main__":
    gc.set_threshold(50_000)  # as `taskmesh worker` does; for the bare loops too
    asyncio.run(_main())
