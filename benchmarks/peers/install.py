"""Install the peers' packages into an environment of their own (`benchmarks/peers/.environment`), one for each Python peer.

Servers (redis-server, PostgreSQL) and compilers (node, cargo, go) are taken from the machine; what is missing is skipped.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers.catalogue import ENVIRONMENT, HERE

PACKAGES: dict[str, list[str]] = {
    "dramatiq": ["dramatiq[redis]==2.2.1", "hiredis==3.5.0"],
    "taskiq": ["taskiq==0.13.0", "taskiq-redis==1.2.4", "hiredis==3.5.0", "uvloop==0.23.0"],
    "celery": ["celery[redis]==5.7.0", "hiredis==3.5.0"],
    "rq": ["rq==2.12.0", "hiredis==3.5.0"],
    "huey": ["huey==3.5.4", "redis", "hiredis==3.5.0"],
    "saq": ["saq[redis]==0.26.4", "typing_extensions", "hiredis==3.5.0", "uvloop==0.23.0"],
    "arq": ["arq==0.28.0", "hiredis==3.5.0", "uvloop==0.23.0"],
    "streaq": ["streaq==7.2.0", "uvloop==0.23.0"],
    "procrastinate": ["procrastinate==3.10.0", "psycopg[binary,pool]"],
}


def install() -> None:
    """Install whatever can be installed; say what cannot."""
    ENVIRONMENT.mkdir(exist_ok=True)
    for name, packages in PACKAGES.items():
        environment = ENVIRONMENT / "envs" / name
        _do(name, [sys.executable, "-m", "venv", str(environment)], HERE)
        _do(name, [str(environment / "bin" / "python"), "-m", "pip", "install", "-q", *packages], HERE)
    for kind, program in (("node", "npm"), ("go", "go"), ("rust", "cargo")):
        if shutil.which(program) is None:
            print(f"{kind}: {program} is not installed: skipped")
            continue
        # Beside what it installs, so that nothing is built in the source tree.
        shutil.copytree(HERE / kind, ENVIRONMENT / kind, dirs_exist_ok=True)
        for command in _COMMANDS[kind]:
            _do(kind, command, ENVIRONMENT / kind)


_COMMANDS: dict[str, list[list[str]]] = {
    "node": [["npm", "install", "--no-audit", "--no-fund"]],
    "go": [
        ["go", "mod", "tidy"],
        ["go", "build", "-o", "bin/river", "./river"],
        ["go", "build", "-o", "bin/asynq", "./asynq"],
    ],
    "rust": [["cargo", "build", "--release"]],
}


def _do(name: str, command: Sequence[str], directory: Path) -> None:
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    print(f"{name}: {' '.join(command[:4])}: {'ok' if done.returncode == 0 else done.stderr[-500:]}", flush=True)
