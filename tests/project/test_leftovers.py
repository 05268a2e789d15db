"""A test run leaves no server behind, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.docs.examples import ROOT
from tests.waiting import wait_until

PROGRAM = """
import sys, time
from pathlib import Path
from tests.mongods import small_mongod

with small_mongod(Path(sys.argv[1])) as ends_by_itself:
    pass
server = small_mongod(Path(sys.argv[1])).start()
server.suspend()
print(server.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_a_server_ends_with_its_test_process(tmp_path: Path, number: signal.Signals) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "db")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as tests:
        assert tests.stdout is not None
        server = psutil.Process(int(tests.stdout.readline()))
        try:
            tests.send_signal(number)
            tests.wait()
            wait_until(lambda: not server.is_running() or server.status() == psutil.STATUS_ZOMBIE)
        finally:
            tests.kill()
            if server.is_running():
                server.kill()
