"""One place among a supervisor's children: a process, and after its end the next."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Mapping, Sequence

from taskmesh.cli.pipe import VARIABLE


class Slot:
    """One place among the children: a process, and after its end the next."""

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
        """When (monotonic) its event loop last said something."""
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
            # A process that it left behind may hold the pipe open: what is in it now is all there is to hear.
            await asyncio.wait([self._listening], timeout=0.5)
            self._listening.cancel()
        return status

    @property
    def alive(self) -> bool:
        """Whether its process runs."""
        return self.process is not None and self.process.returncode is None

    def send(self, number: int) -> None:
        """Send a signal, if there is somebody to receive it."""
        if self.alive and self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)

    def stop(self, count: int) -> None:
        """Send stop signals until it has had `count`; two different ones, since equal ones could merge into one."""
        while self._stops_sent < count:
            self.send(signal.SIGTERM if self._stops_sent == 0 else signal.SIGINT)
            self._stops_sent += 1
