"""The metrics of the fleet, as Prometheus reads them."""

from __future__ import annotations

import httpx

from taskmesh import TaskMesh


async def test_the_fleet_can_be_scraped(mesh: TaskMesh, client: httpx.AsyncClient) -> None:
    await mesh.publish("work", "k")
    await mesh.pause("default")
    answer = await client.get("/metrics")
    assert answer.status_code == 200
    assert 'taskmesh_tasks{name="work",status="INIT"} 1.0' in answer.text
    assert 'taskmesh_queue_paused{queue="default"} 1.0' in answer.text
