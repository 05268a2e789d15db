"""The tutorial works word by word: its files are written, its commands typed, its terminals opened and interrupted."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from taskmesh.embedded import attach
from tests.docs.examples import ROOT, Example, examples_in
from tests.waiting import wait_until

_DOCUMENT = "docs/tutorial.md"
_STOPPED = re.compile(r"^<!-- stop: (\S+) -->$", re.MULTILINE)


class _Reader:
    """Somebody who follows the page, in one directory with several terminals."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._terminals: dict[str, subprocess.Popen[bytes]] = {}
        self._exports: list[str] = []
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith("TASKMESH_")}
        self._environment["PATH"] = f"{Path(sys.executable).parent}:{self._environment['PATH']}"

    def follow(self, example: Example) -> None:
        kind, _, argument = example.about.partition(":")
        if kind == "append":
            with (self._directory / argument).open("a") as file:
                file.write(f"\n\n{example.text}")
        elif kind == "replace":
            path = self._directory / argument
            before, _, _ = path.read_text().partition(example.text.splitlines()[0])
            path.write_text(before + example.text)
        elif example.about.endswith(".py"):
            (self._directory / example.about).write_text(example.text)
        elif kind == "run":
            for command, printed in example.commands:
                self._type(command, printed)
        elif kind == "refused":
            [(command, _)] = example.commands
            assert self._typed(command).returncode == 2
        elif kind == "until":
            [(command, printed)] = example.commands
            wait_until(lambda: self._shows(command, printed), 60, what=f"{command} shows what the page shows")
        else:
            [(command, _)] = example.commands
            self._open(kind, command)

    def interrupt(self, terminal: str) -> None:
        """Press Ctrl-C in a terminal, and wait for its command to end well."""
        process = self._terminals.pop(terminal)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(60) == 0, (self._directory / f"{terminal}.log").read_text()

    def leave(self) -> None:
        for process in self._terminals.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _open(self, terminal: str, command: str) -> None:
        log = self._directory / f"{terminal}.log"
        with log.open("wb") as output:
            self._terminals[terminal] = subprocess.Popen(
                ["bash", "-c", "; ".join([*self._exports, f"exec {command}"])],
                cwd=self._directory,
                env=self._environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        wait_until(lambda: "INFO" in log.read_text(), 60, what=f"{command} has begun")

    def _type(self, command: str, printed: list[str]) -> None:
        if command.startswith("export "):
            self._exports.append(command)
            return
        done = self._typed(command)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        for line in printed:
            assert line in done.stdout.splitlines(), f"{command}: {done.stdout}"

    def _shows(self, command: str, printed: list[str]) -> bool:
        """Whether it prints such lines, whatever the moments and numbers in them."""
        lines = [_without_numbers(line) for line in self._typed(command).stdout.splitlines()]
        wanted = [_without_numbers(line) for line in printed]
        return all(lines.count(line) >= wanted.count(line) for line in wanted)

    def _typed(self, command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", "; ".join([*self._exports, command])],
            cwd=self._directory,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )


def _without_numbers(line: str) -> str:
    line = re.sub(r"at (?:\S*/)?(\w+\.py):\d+", r"at \1:0", line)
    return re.sub(r"\d[\d.]*( ms| s| min \d+ s| min)? ago|\d+(?=[.:TZ-])|\d+(?=Z)", "", line).replace(" ", "").rstrip()


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[_Reader]:
    reader = _Reader(tmp_path)
    yield reader
    reader.leave()


@pytest.mark.slow  # half a minute of processor time: `.ci/run` runs it
def test_the_tutorial_can_be_followed_word_by_word(reader: _Reader, tmp_path: Path) -> None:
    stops = _stops()
    with closing(attach(tmp_path / ".taskmesh")):
        for example in examples_in(_DOCUMENT):
            while stops and stops[0][0] < example.line:
                reader.interrupt(stops.pop(0)[1])
            reader.follow(example)
        reader.interrupt("fourth-worker")
        reader.interrupt("dashboard")
    assert not stops


def _stops() -> list[tuple[int, str]]:
    text = (ROOT / _DOCUMENT).read_text("utf-8")
    return [(text.count("\n", 0, match.start()), match[1]) for match in _STOPPED.finditer(text)]
