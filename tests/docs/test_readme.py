"""The example in the README runs as typed."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import closing, nullcontext
from pathlib import Path

import pytest

from taskmesh.embedded import attach
from tests.docs.examples import ROOT, examples_in
from tests.embedded.users import servers_in
from tests.waiting import wait_until


@pytest.mark.lasting
@pytest.mark.parametrize("server_runs_already", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_example_runs_as_typed_and_prints_what_it_says(tmp_path: Path, *, server_runs_already: bool) -> None:
    """That the embedded MongoDB starts, ends and keeps what it has, is also what tests/embedded is about."""
    with closing(attach(tmp_path / ".taskmesh")) if server_runs_already else nullcontext():
        _run_as_typed(tmp_path)
    wait_until(lambda: not servers_in(tmp_path / ".taskmesh"), what="the embedded MongoDB has gone")


def _run_as_typed(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TASKMESH_")}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    exports: list[str] = []
    commands = 0
    for example in examples_in("README.md"):
        if example.about != "run":
            (tmp_path / example.about).write_text(example.text)
            continue
        for command, printed in example.commands:
            if command.startswith("export "):
                exports.append(command)
                continue
            commands += 1
            done = subprocess.run(
                ["bash", "-c", "; ".join([*exports, command])],
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
            assert done.returncode == 0, f"{command}: {done.stderr}"
            for line in printed:
                assert line in done.stdout.splitlines(), command
    assert commands == 5


def test_the_example_has_twenty_lines() -> None:
    [example, *_] = examples_in("README.md")
    lines = [line for line in example.text.splitlines() if line.strip()]
    assert len(lines) <= 20


def test_the_commands_that_it_names_exist() -> None:
    targets = {line.partition(":")[0] for line in (ROOT / "Makefile").read_text().splitlines() if ":" in line}
    assert {"demo", "test", "install"} <= targets
