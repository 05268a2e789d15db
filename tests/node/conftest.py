"""Node, and the client built with it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.turns import booting

CLIENT = Path(__file__).parents[2] / "clients" / "node"
_OLDEST = 18


@pytest.fixture(scope="session")
def node() -> Path:
    """The directory of the client, built; skips the test where there is no Node that is new enough, or no npm."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("NOT TESTED: the Node client needs node and npm (apt-get install nodejs npm)")
    version = _run("node", "--version").strip()
    if int(version.removeprefix("v").partition(".")[0]) < _OLDEST:
        pytest.skip(f"NOT TESTED: the Node client needs Node {_OLDEST}, and this is {version}")
    with booting():
        installed = CLIENT / "node_modules" / ".package-lock.json"
        wanted = CLIENT / "package-lock.json"
        if not installed.exists() or installed.stat().st_mtime < wanted.stat().st_mtime:
            _run("npm", "ci", "--no-audit", "--no-fund")
            installed.touch()
        _run("npm", "run", "build")
    return CLIENT


def _run(*command: str) -> str:
    done = subprocess.run(command, cwd=CLIENT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
    return done.stdout
