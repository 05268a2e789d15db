"""What docs/migrating.md says of arq and RQ, tried on jobs that they have put into a real Redis themselves."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from taskmesh import TaskMesh
from tests.docs.examples import ROOT, examples_in
from tests.mongod import free_port

PEERS = ("arq==0.28.0", "rq==3.0.0")
EXAMPLES = {example.about: example for example in examples_in("docs/migrating.md")}
pytestmark = pytest.mark.slow

WRITES = """
import asyncio, datetime, sys
from arq import create_pool
from arq.connections import RedisSettings
from redis import Redis
from rq import Queue, Retry
import reports

async def main(port):
    pool = await create_pool(RedisSettings(port=port))
    await pool.enqueue_job("fetch", "https://example.com", _job_id="home")
    await pool.enqueue_job("fetch", url="https://example.com/later", _job_id="later", _defer_by=3600)
    queue = Queue("reports", connection=Redis(port=port))
    queue.enqueue(reports.render, "2026-11", job_id="2026-11", retry=Retry(max=3, interval=10))
    queue.enqueue_in(datetime.timedelta(hours=1), reports.render, month="2026-12", job_id="2026-12")

asyncio.run(main(int(sys.argv[3])))
"""
TAKES = """
import asyncio, sys
from datetime import UTC, datetime
from arq import create_pool
from arq.connections import RedisSettings
from redis import Redis
from rq import Queue
from taskmesh import Retry, TaskMesh, TaskOption, current_task

_, uri, database, port = sys.argv
mesh = TaskMesh(uri, database=database)

@mesh.task
async def fetch(url: str) -> int: ...

@mesh.task(queue="reports")
def render(month: str) -> str: ...

{code}

async def main():
    async with mesh:
        pool = await create_pool(RedisSettings(port=int(port)))
        await take_over_from_arq(pool)
        assert await pool.queued_jobs() == []

asyncio.run(main())
mesh = TaskMesh(uri, database=database)
queue = Queue("reports", connection=Redis(port=int(port)))
take_over_from_rq(queue)
assert queue.job_ids == queue.scheduled_job_registry.get_job_ids() == []
"""


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[int]:
    """The port of a Redis of this test's own."""
    program, port = shutil.which("redis-server"), free_port()
    if program is None:
        pytest.skip("NOT TRIED: there is no redis-server on this machine (Debian: redis-server)")
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert any("Ready to accept connections" in line for line in server.stdout)
        yield port
        server.kill()


async def test_what_waits_in_redis_is_taken_over_once(
    mesh: TaskMesh, mongo_uri: str, database: str, redis: int, tmp_path: Path
) -> None:
    await asyncio.to_thread(_write_and_take, [mongo_uri, database, str(redis)], tmp_path)
    now = datetime.now(UTC)
    for name, key, params, queue, delayed in (
        ("fetch", "home", {"url": "https://example.com"}, "default", False),
        ("fetch", "later", {"url": "https://example.com/later"}, "default", True),
        ("render", "2026-11", {"month": "2026-11"}, "reports", False),
        ("render", "2026-12", {"month": "2026-12"}, "reports", True),
    ):
        task = await mesh.get(name, key)
        assert (task.params, task.queue) == (params, queue)
        start = task.task_state.start_time or task.task_state.create_time
        assert abs(start - now - timedelta(hours=delayed)) < timedelta(minutes=10)


def _write_and_take(where: list[str], directory: Path) -> None:
    """Let arq and RQ write jobs, and the code of the page take them over."""
    peers = directory / "peers"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-warn-conflicts", "--target", str(peers), *PEERS]
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"NOT TRIED: {' '.join(PEERS)} could not be installed: {done.stderr.strip().splitlines()[-1]}")
    (directory / "reports.py").write_text("def render(month):\n    return month\n")
    code = "\n\n".join(EXAMPLES[about].text for about in ("arq-jobs", "rq-jobs"))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (directory, peers, ROOT)))}
    for script in (WRITES, TAKES.replace("{code}", code)):
        command = [sys.executable, "-c", script, *where]
        run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=directory)
        assert run.returncode == 0, run.stdout + run.stderr
