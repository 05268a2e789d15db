"""A process that is under supervision."""

from __future__ import annotations

import os
import signal

from taskmesh.cli.worker.child import Child


async def test_a_signal_to_one_that_has_just_been_killed_does_not_hide_how_it_ended() -> None:
    life = os.pipe()
    try:
        for _ in range(50):
            child = Child("sleeps", ["sleep", "60"])
            await child.start(life[0], dict(os.environ))
            child.send(signal.SIGKILL)
            for _ in range(200):
                child.send(signal.SIGCONT)
            assert await child.ended() == -signal.SIGKILL
    finally:
        for end in life:
            os.close(end)
