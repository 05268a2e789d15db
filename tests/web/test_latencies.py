"""How long tasks of a queue waited and ran: on its page, in the API, the metrics and the command's table alike."""

from __future__ import annotations

import io
import re

import httpx
from rich.console import Console

from taskmesh import TaskMesh
from taskmesh.cli.queues import queue_table
from tests.waiting import eventually
from tests.working import finished, working


async def test_every_face_tells_them(mesh: TaskMesh, client: httpx.AsyncClient) -> None:
    @mesh.task(queue="mail")
    async def send() -> None: ...

    assert "No task has ended lately" in (await client.get("/queues")).text
    async with working(mesh, "w"):
        await send.publish("k")
        await finished(mesh, "send", "k")
    (told,) = (await client.get("/api/v1/queues")).json()
    assert (told["queue"], told["latency"]["ended"]) == ("mail", 1)
    assert told["latency"]["wait"]["p95_ms"] >= 0
    assert told["latency"]["run"].keys() == {"p50_ms", "p95_ms", "p99_ms"}
    metrics = (await client.get("/metrics")).text
    for name in ("wait", "run"):
        for quantile in ("0.5", "0.95", "0.99"):
            assert f'taskmesh_queue_{name}_seconds{{quantile="{quantile}",queue="mail"}} ' in metrics

    async def is_shown() -> bool:
        page = (await client.get("/queues")).text
        return (
            "newest 1 000 tasks that ended" in page
            and len(re.findall(r'data-label="ran, [^"]+">[\d.]+ m?s<', page)) == 3
        )

    await eventually(is_shown)
    buffer = io.StringIO()
    Console(file=buffer, width=200).print(queue_table(await mesh.queues.all(latencies=True)))
    header, row, *_, footer = buffer.getvalue().splitlines()
    assert header.split()[-2:] == ["WAITED", "RAN"]
    assert re.fullmatch(r"mail +open .*( +[\d.]+ m?s, [\d.]+ m?s, [\d.]+ m?s){2} *", row)
    assert footer.startswith("WAITED, RAN: ")
