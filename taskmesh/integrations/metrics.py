"""Metrics for Prometheus (extra `metrics`).

`fleet_metrics`: of the whole fleet, read from the database when it is asked for: scrape one place for it. `WorkerMetrics`: of one
worker, counted in its process while it works, without any question to the database: scrape all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from taskmesh.model.distribution import check_extra

check_extra("metrics", ("prometheus_client",), "WorkerMetrics")

# ruff: noqa: E402 — after the check: without the extra it is a bare ImportError
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from taskmesh.admin.queues import NEWEST_ENDED
from taskmesh.admin.stats import Stats
from taskmesh.consumer.observer import Wait
from taskmesh.consumer.worker import Consumer
from taskmesh.mesh import TaskMesh
from taskmesh.model.queue import Percentiles

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1_800, 7_200)
_COUNTED_TO = 10_000
"""How far the tasks that wait in a queue are counted: an autoscaler wants to know more than a person."""
_SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8)


class WorkerMetrics:
    """What one worker has done, and how long things took: the `observer` of a consumer.

    Made before the event loop runs, since it looks at the process's files.
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        counter, gauge = partial(Counter, registry=self._registry), partial(Gauge, registry=self._registry)
        seconds = partial(Histogram, buckets=_SECONDS, registry=self._registry)
        self._ended = counter("taskmesh_executions", "Executions that ended here.", ["name", "outcome"])
        self._seconds = seconds("taskmesh_execution_seconds", "From the claim to the handler's end.", ["name"])
        self._waited = seconds(
            "taskmesh_claim_wait_seconds",
            "From when a task could be claimed to the claim that won it: until it was seen, and a slot was free.",
        )
        self._stage = seconds(
            "taskmesh_start_stage_seconds",
            "The way from claimable to the handler's start: unseen by this worker, held for a slot or a limit, claim, start.",
            ["name", "stage"],
        )
        self._claim = seconds("taskmesh_claim_seconds", "How long the server took to claim a set.")
        self._tried = counter("taskmesh_claims_tried", "Tasks that were tried to claim.")
        self._won = counter("taskmesh_claims_won", "Tasks that were won; the rest were somebody else's.")
        self._lease_left = Histogram(
            "taskmesh_lease_left_ratio",
            "The share of a lease that was left when it was renewed; near 0 a task is about to run twice.",
            ["name"],
            buckets=_SHARES,
            registry=self._registry,
        )
        self._running = gauge("taskmesh_running", "Executions that run here now.")
        self._slots = gauge("taskmesh_slots", "Executions that may run here.")
        self._claiming = gauge("taskmesh_claiming", "1 if this worker claims: not paused, not stopping.")
        self._silent = gauge("taskmesh_silent_seconds", "How long ago the database last took its heartbeat.")
        self._stream_silent = gauge(
            "taskmesh_stream_silent_seconds",
            "For how long its change stream has not moved on; then tasks start by scans alone, up to a second later.",
        )

    def claimed(self, waits: Sequence[Wait], took_s: float, tried: int) -> None:
        """Count a claim."""
        self._claim.observe(took_s)
        self._tried.inc(tried)
        self._won.inc(len(waits))
        for wait in waits:
            self._waited.observe(wait.all_s)
            for stage, seconds in (("unseen", wait.unseen_s), ("held", wait.held_s), ("claim", took_s)):
                self._stage.labels(wait.name, stage).observe(seconds)

    def started(self, name: str, after_s: float) -> None:
        """Count a start."""
        self._stage.labels(name, "start").observe(after_s)

    def renewed(self, name: str, share_left: float) -> None:
        """Count a renewal."""
        self._lease_left.labels(name).observe(share_left)

    def ended(self, name: str, outcome: str, seconds: float) -> None:
        """Count an end."""
        self._ended.labels(name, outcome).inc()
        self._seconds.labels(name).observe(seconds)

    async def text(self, consumer: Consumer) -> bytes:
        """Return all of it, with how the consumer is now."""
        self._running.set(len(consumer.running))
        self._slots.set(consumer.concurrency)
        self._claiming.set(consumer.state == "running" and not consumer.paused)
        self._silent.set(consumer.silent_ms / 1000)
        self._stream_silent.set(consumer.stream_silent_ms / 1000)
        return await asyncio.to_thread(generate_latest, self._registry)  # it reads files of /proc


async def fleet_metrics(mesh: TaskMesh, stats: Stats | None = None) -> bytes:
    """Return the metrics of all workers, queues and tasks as text. `stats`: counts that were read already."""
    counts = stats or await mesh.inspect.stats()
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
    for worker in await mesh.fleet.workers():
        states[worker.state] = states.get(worker.state, 0) + 1
        if worker.live:
            running.add_metric([worker.worker_id], worker.running)
            slots.add_metric([worker.worker_id], worker.concurrency)
    for state, count in states.items():
        live.add_metric([state], count)
    return [running, slots, live]


async def _of_queues(mesh: TaskMesh) -> list[Metric]:
    waiting = GaugeMetricFamily("taskmesh_queue_waiting", f"Due tasks, counted to {_COUNTED_TO}.", labels=["queue"])
    running = GaugeMetricFamily("taskmesh_queue_running", "Executions of a queue.", labels=["queue"])
    paused = GaugeMetricFamily("taskmesh_queue_paused", "1 if nothing is claimed from it.", labels=["queue"])
    of_ended = f"Of the newest {NEWEST_ENDED} tasks that ended: "
    waits = GaugeMetricFamily(
        "taskmesh_queue_wait_seconds",
        f"{of_ended}from when each could start to its first start.",
        labels=["queue", "quantile"],
    )
    runs = GaugeMetricFamily(
        "taskmesh_queue_run_seconds", f"{of_ended}how long its last execution ran.", labels=["queue", "quantile"]
    )
    for queue in await mesh.queues.all(counted_to=_COUNTED_TO, latencies=True):
        if queue.latency is not None:
            _add_quantiles(waits, queue.queue, queue.latency.wait)
            _add_quantiles(runs, queue.queue, queue.latency.run)
        waiting.add_metric([queue.queue], queue.waiting)
        running.add_metric([queue.queue], queue.running)
        paused.add_metric([queue.queue], int(queue.paused))
    return [waiting, running, paused, waits, runs]


def _add_quantiles(metric: GaugeMetricFamily, queue: str, times: Percentiles | None) -> None:
    if times is not None:
        for quantile, ms in (("0.5", times.p50_ms), ("0.95", times.p95_ms), ("0.99", times.p99_ms)):
            metric.add_metric([queue, quantile], ms / 1000)


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
