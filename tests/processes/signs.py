"""Signs by which a test and its worker processes wait for each other: files in the directory of the history."""

from __future__ import annotations

from pathlib import Path

import anyio


class Signs:
    """What was given stays given, unless it is taken back."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def give(self, name: str) -> None:
        """Let whoever waits for it go on."""
        self._path(name).touch()

    def take_back(self, name: str) -> None:
        """Let the next one wait for it again."""
        self._path(name).unlink()

    def given(self, name: str) -> bool:
        """Whether somebody has given it."""
        return self._path(name).exists()

    async def wait(self, name: str) -> None:
        """Wait for it, for as long as it takes."""
        while not self.given(name):  # noqa: ASYNC110 -- a file tells nobody that it came
            await anyio.sleep(0.01)

    def _path(self, name: str) -> Path:
        return self._directory / f"{name}.sign"
