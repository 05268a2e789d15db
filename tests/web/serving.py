"""`taskmesh web` as a process of its own."""

from __future__ import annotations

import httpx

from tests.cli.shell import Shell, Started
from tests.mongod import free_port
from tests.waiting import wait_until

READY_WITHIN_S = 60.0


def serve(shell: Shell, *words: str, **environment: str) -> tuple[Started, str]:
    """Start the dashboard, and wait until it answers. Returns its process and its address."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    started = shell.start("web", "--port", str(port), *words, **environment)

    def answers() -> bool:
        assert started.process.poll() is None, f"it ended:\n{started.out}{started.err}"
        try:
            return httpx.get(f"{url}/readyz", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    wait_until(answers, READY_WITHIN_S, what="the dashboard answers")
    return started, url
