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
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Self

VARIABLE = "TASKMESH_SUPERVISED"
FAILED = 1
HOPELESS = 78
"""Exit status of a child that would fail in the same way again: EX_CONFIG of sysexits.h."""

Word = Literal["ready", "recycle", "done", "well", "unwell"]


class Pipe:
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
        """Send the supervisor a word, if it still runs."""
        if self._words is not None:
            with contextlib.suppress(OSError):
                os.write(self._words, f"{word}\n".encode())

    def when_alone(self, call: Callable[[], None]) -> None:
        """Call this in the running loop when the supervisor has ended."""
        if self._life is None:
            return
        loop = asyncio.get_running_loop()
        life = self._life

        def gone() -> None:
            loop.remove_reader(life)
            call()

        loop.add_reader(life, gone)


class Child:
    """One of the children: a process, and its successors."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name = name
        self.command = command
        self.process: asyncio.subprocess.Process | None = None
        self.ready = asyncio.Event()
        self.words: set[str] = set()
        self.failures = 0
        self.failed_starts = 0
        self.replacing = False
        self.started_at = 0.0
        self.well = False
        self.heard_at = 0.0
        """When (monotonic) its event loop last sent something."""
        self._stops_sent = 0
        self._listening: asyncio.Task[None] | None = None

    async def start(self, life: int, environment: Mapping[str, str], output: int | None = None) -> None:
        """Start the process. `output`: a descriptor for all it prints, instead of ours."""
        reading, writing = os.pipe()
        self.ready.clear()
        self.words = set()
        self.replacing = False
        self._stops_sent = 0
        self.well = False
        self.started_at = self.heard_at = time.monotonic()
        try:
            self.process = await asyncio.create_subprocess_exec(
                *self.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**environment, VARIABLE: f"{life},{writing}"},
                pass_fds=(life, writing),
                process_group=0,
            )
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        self._listening = asyncio.create_task(self._listen(reading))

    async def _listen(self, descriptor: int) -> None:
        reader = asyncio.StreamReader()
        with os.fdopen(descriptor, "rb", buffering=0) as pipe:
            transport, _ = await asyncio.get_running_loop().connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(reader), pipe
            )
            try:
                while line := await reader.readline():
                    self._hear(line.decode().strip())
            finally:
                transport.close()

    def _hear(self, word: str) -> None:
        self.heard_at = time.monotonic()
        if word in ("well", "unwell"):
            self.well = word == "well"
        else:
            self.words.add(word)
        if word == "ready":
            self.ready.set()

    async def ended(self) -> int:
        """Wait for its end, and return the exit status; a signal's number is negative."""
        assert self.process is not None
        status = await self.process.wait()
        if self._listening is not None:
            # A process that it left behind may hold the pipe open: only what is in it now is read.
            await asyncio.wait([self._listening], timeout=0.5)
            self._listening.cancel()
        return status

    @property
    def alive(self) -> bool:
        """Whether its process runs."""
        return self.process is not None and self.process.returncode is None

    def send(self, number: int) -> None:
        """Send a signal, if the process runs."""
        if self.alive and self.process is not None:
            # Not by `process.send_signal`: that asks first whether it has ended, and asyncio then never learns its exit status.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    def stop(self, count: int) -> None:
        """Send stop signals until it has received `count`; two different ones, since equal ones may be merged."""
        while self._stops_sent < count:
            self.send(signal.SIGTERM if self._stops_sent == 0 else signal.SIGINT)
            self._stops_sent += 1
