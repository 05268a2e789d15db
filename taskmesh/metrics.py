"""Metrics of the whole fleet for Prometheus (extra `metrics`): what one can alert on, read when it is asked for."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from taskmesh.mesh import TaskMesh
from taskmesh.stats import Stats


async def fleet_metrics(mesh: TaskMesh, stats: Stats | None = None) -> bytes:
    """Return the metrics of all workers, queues and tasks as text. `stats`: counts that were read already."""
    counts = stats or await mesh.stats()
    tasks = GaugeMetricFamily("taskmesh_tasks", "Tasks that are kept.", labels=["name", "status"])
    for name, by_status in counts.counts.items():
        for status, count in by_status.items():
            tasks.add_metric([name, status], count)
    lag = GaugeMetricFamily(
        "taskmesh_oldest_claimable_seconds",
        "For how long the oldest claimable task has been waiting; 0 if none is.",
        value=(counts.oldest_claimable_ms or 0) / 1000,
    )
    started = GaugeMetricFamily(
        "taskmesh_started_per_second", "Executions started by all live workers.", value=counts.started_per_s
    )
    finished = GaugeMetricFamily(
        "taskmesh_finished_per_second", "Executions ended on all live workers.", value=counts.finished_per_s
    )
    return generate_latest(
        _registry([tasks, lag, started, finished, *await _of_workers(mesh), *await _of_queues(mesh)])
    )


async def _of_workers(mesh: TaskMesh) -> list[Metric]:
    running = GaugeMetricFamily("taskmesh_worker_running", "Executions that run on a worker.", labels=["worker"])
    slots = GaugeMetricFamily("taskmesh_worker_slots", "Executions that may run on a worker.", labels=["worker"])
    live = GaugeMetricFamily("taskmesh_workers", "Workers of the last hour, by state.", labels=["state"])
    states: dict[str, int] = {}
    for worker in await mesh.workers():
        states[worker.state] = states.get(worker.state, 0) + 1
        if worker.live:
            running.add_metric([worker.worker_id], worker.running)
            slots.add_metric([worker.worker_id], worker.concurrency)
    for state, count in states.items():
        live.add_metric([state], count)
    return [running, slots, live]


async def _of_queues(mesh: TaskMesh) -> list[Metric]:
    waiting = GaugeMetricFamily("taskmesh_queue_waiting", "Due tasks, counted to 10 000.", labels=["queue"])
    running = GaugeMetricFamily("taskmesh_queue_running", "Executions of a queue.", labels=["queue"])
    paused = GaugeMetricFamily("taskmesh_queue_paused", "1 if nothing is claimed from it.", labels=["queue"])
    for queue in await mesh.queues():
        waiting.add_metric([queue.queue], queue.waiting)
        running.add_metric([queue.queue], queue.running)
        paused.add_metric([queue.queue], int(queue.paused))
    return [waiting, running, paused]


class _Read(Collector):
    """What was read, as a collector."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> list[Metric]:
        """Return it."""
        return self._metrics


def _registry(metrics: list[Metric]) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(_Read(metrics))
    return registry
