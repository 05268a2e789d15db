"""SIGUSR1: what is this process doing? All threads, all tasks of the event loop, and the keys that run."""

from __future__ import annotations

import asyncio
import faulthandler
import signal
import sys
from types import FrameType

from taskmesh.cli import output
from taskmesh.consumer import Consumer

_MOST = 200


def dump_on_signal(consumer: Consumer) -> None:
    """Install it. A plain signal handler, not the loop's: it also answers while a handler blocks the loop."""
    loop = asyncio.get_running_loop()

    def dump(_number: int, _frame: FrameType | None) -> None:
        running = consumer.running
        say = sys.stderr.write
        say(f"--- worker {consumer.worker_id}: {consumer.state}, {len(running)} running\n")
        for key in running[:_MOST]:
            say(f"    {output.printable(key)}\n")
        say("--- threads\n")
        sys.stderr.flush()
        faulthandler.dump_traceback(sys.stderr, all_threads=True)
        say("--- tasks of the event loop\n")
        for task in list(asyncio.all_tasks(loop))[:_MOST]:
            task.print_stack(limit=8, file=sys.stderr)
        say("--- end\n")
        sys.stderr.flush()

    signal.signal(signal.SIGUSR1, dump)
