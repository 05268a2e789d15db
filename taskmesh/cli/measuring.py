"""`/metrics` of a worker (extra `metrics`): its own, and at `/metrics/fleet` those of the whole fleet."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING

from pymongo.errors import PyMongoError

from taskmesh.cli.endpoints import Answer, Routes
from taskmesh.mesh import TaskMesh
from taskmesh.model.distribution import check_extra
from taskmesh.model.errors import TaskMeshError

if TYPE_CHECKING:
    from taskmesh.consumer import Consumer
    from taskmesh.integrations.metrics import WorkerMetrics


def worker_metrics() -> WorkerMetrics:
    """Return what measures a consumer. Raises `TaskMeshError` without the extra."""
    check_extra("metrics", ("prometheus_client",), "--metrics-port")
    from taskmesh.integrations.metrics import WorkerMetrics  # noqa: PLC0415 — an extra

    return WorkerMetrics()


def metrics(mesh: TaskMesh, measured: WorkerMetrics, consumer: Callable[[], Consumer]) -> Routes:
    """Return what answers Prometheus."""
    from taskmesh.integrations.metrics import CONTENT_TYPE, fleet_metrics  # noqa: PLC0415 — an extra

    async def own() -> Answer:
        return Answer(await measured.text(consumer()), content_type=CONTENT_TYPE)

    async def fleet() -> Answer:
        try:
            return Answer(await fleet_metrics(mesh), content_type=CONTENT_TYPE)
        except (PyMongoError, TaskMeshError) as error:
            told = f"the database does not answer ({type(error).__name__})\n"
            return Answer(told.encode(), HTTPStatus.SERVICE_UNAVAILABLE, "text/plain")

    return {"/metrics": own, "/metrics/fleet": fleet}
