"""One process of a crew: `python -m benchmarks.worker ROLE '{…}'`. See `benchmarks.crew`."""

from __future__ import annotations

import asyncio
import gc
import json
import sys

from benchmarks.line import Line, Role


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
