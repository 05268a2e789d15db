"""One trace from a publisher to a worker process and its children; JSON logs with the task's fields; metrics of a worker."""

from __future__ import annotations

import http.client
import json
import re
import uuid
from datetime import datetime
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from taskmesh import TaskMesh
from tests.cli.shell import DEADLINE_S, Shell, Started
from tests.waiting import eventually
from tests.working import finished

pytest.importorskip("opentelemetry.sdk", reason="a dev dependency: make install")

WAYS = ("in_loop", "in_thread", "in_process")


def ports_of(started: Started, count: int = 1) -> list[int]:
    started.says("metrics are at http://127.0.0.1:", times=count)
    return [int(port) for port in re.findall(r"metrics are at http://127\.0\.0\.1:(\d+)", started.err)]


def scraped(port: int, path: str = "/metrics") -> dict[str, float]:
    """Return all samples, named as Prometheus shows them, with their labels."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        text = answer.read().decode()
    finally:
        connection.close()
    assert answer.status == 200, text
    assert (answer.getheader("Content-Type") or "").startswith("text/plain; version=0.0.4")
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def records(worker: Started) -> list[dict[str, Any]]:
    """Return its log; every line of it has to be JSON."""
    return [json.loads(line) for line in worker.err.splitlines()]


async def test_a_trace_and_the_tasks_fields_reach_handlers_of_every_kind(mesh: TaskMesh, taskmesh: Shell) -> None:
    trace_id = uuid.uuid4().hex
    header = {"traceparent": f"00-{trace_id}-00f067aa0ba902b7-01"}
    for way in WAYS:  # as a publisher that traces leaves them
        await mesh.publish(way, "k", {})
        await mesh.store.driver.collection("tasks").update_one({"_id": f"{way}:k"}, {"$set": {"trace": header}})
    worker = taskmesh.start("worker", "app:mesh", "--worker-id", "w1", "--log-format", "json")
    for way in WAYS:
        task = await finished(mesh, way, "k", DEADLINE_S)
        [entry] = task.task_state.worker_states
        told = [each for each in records(worker) if each.get("how") == way and each["running_id"] == entry.running_id]
        assert [(each["task"], each["key"], each["worker"], each["level"], each["message"]) for each in told] == [
            (way, "k", "w1", "warning", f"seen {way}")
        ]
        assert datetime.fromisoformat(told[0]["time"]).tzinfo is not None
    await mesh.publish("broken", "k", {})
    await finished(mesh, "broken", "k", DEADLINE_S)
    [failure] = [each for each in records(worker) if each["message"].startswith("task broken:k failed")]
    assert failure["running_id"]
    assert (failure["task"], failure["key"], failure["worker"]) == ("broken", "k", "w1")
    assert worker.stop() == 0
    spans = [json.loads(line) for line in (taskmesh.directory / "spans.jsonl").read_text().splitlines()]
    traced = {span["name"]: span for span in spans if span["context"]["trace_id"] == f"0x{trace_id}"}
    for way in WAYS:
        assert traced[f"process {way}"]["parent_id"] == "0x00f067aa0ba902b7"
        assert traced[f"inside {way}"]["parent_id"] == traced[f"process {way}"]["context"]["span_id"]
    [failed] = [span for span in spans if span["name"] == "process broken"]
    assert failed["status"]["status_code"] == "ERROR"


async def test_prometheus_reads_what_a_worker_did(mesh: TaskMesh, taskmesh: Shell) -> None:
    worker = taskmesh.start("worker", "app:mesh", "--worker-id", "w1", "--concurrency", "7", "--metrics-port", "0")
    [port] = ports_of(worker)
    for key in ("a", "b"):
        await mesh.publish("in_loop", key, {})
    await mesh.publish("broken", "k", {})
    option: dict[str, Any] = {"ping_interval_ms": 200, "worker_timeout_ms": 10_000}
    await mesh.publish("long", "k", {"ms": 1_500}, **option)
    for name, key in (("in_loop", "a"), ("in_loop", "b"), ("broken", "k"), ("long", "k")):
        await finished(mesh, name, key, DEADLINE_S)
    await eventually(lambda: "taskmesh_executions_total{name=long,outcome=succeeded}" in scraped(port), DEADLINE_S)
    await eventually(
        lambda: scraped(port)["taskmesh_running"] == 0, DEADLINE_S, what="the last outcome has given its slot back"
    )
    found = scraped(port)
    assert found["taskmesh_executions_total{name=in_loop,outcome=succeeded}"] == 2
    assert found["taskmesh_executions_total{name=broken,outcome=failed}"] == 1
    assert found["taskmesh_execution_seconds_count{name=in_loop}"] == 2
    assert found["taskmesh_execution_seconds_sum{name=long}"] >= 1.5
    assert found["taskmesh_claims_won_total"] == found["taskmesh_claim_wait_seconds_count"] == 4
    assert found["taskmesh_claims_tried_total"] >= 4
    for stage in ("unseen", "held", "claim", "start"):
        assert found[f"taskmesh_start_stage_seconds_count{{name=in_loop,stage={stage}}}"] == 2, stage
    parts = [value for name, value in found.items() if name.startswith("taskmesh_start_stage_seconds_sum")]
    assert sum(parts) >= found["taskmesh_claim_wait_seconds_sum"]
    assert found["taskmesh_lease_left_ratio_count{name=long}"] >= 1
    assert (found["taskmesh_slots"], found["taskmesh_running"], found["taskmesh_claiming"]) == (7, 0, 1)
    assert 0 <= found["taskmesh_stream_silent_seconds"] < 60
    assert found["process_resident_memory_bytes"] > 1e6
    fleet = scraped(port, "/metrics/fleet")
    assert fleet["taskmesh_tasks{name=in_loop,status=SUCCESS}"] == 2
    assert fleet["taskmesh_worker_slots{worker=w1}"] == 7
    assert worker.stop() == 0


@pytest.mark.slow
def test_each_of_several_processes_answers_at_a_port_of_its_own(taskmesh: Shell) -> None:
    workers = taskmesh.start("worker", "app:mesh", "--processes", "2", "--metrics-port", "0")
    ports = ports_of(workers, 2)
    assert len(set(ports)) == 2
    assert all(scraped(port)["taskmesh_slots"] == 100 for port in ports)
    assert workers.stop() == 0
