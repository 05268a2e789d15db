"""A worker process that is watched: it traces into a file, logs as JSON, and answers Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.shell import Shell, shell_in

APP = '''
"""A service that traces, as its operators set it up."""

import logging
import os
import time

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor

from taskmesh import TaskFailed, TaskMesh

provider = TracerProvider()
spans = open("spans.jsonl", "a", buffering=1)
one_line = lambda span: span.to_json(indent=None) + os.linesep
provider.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter(out=spans, formatter=one_line)))
trace.set_tracer_provider(provider)

mesh = TaskMesh()
log = logging.getLogger("app")


def seen(how: str) -> str:
    log.warning("seen %s", how, extra={"how": how})
    with trace.get_tracer("app").start_as_current_span("inside " + how):
        return format(trace.get_current_span().get_span_context().trace_id, "032x")


@mesh.task
async def in_loop() -> str:
    return seen("in_loop")


@mesh.task
def in_thread() -> str:
    return seen("in_thread")


@mesh.task(run="process")
def in_process() -> str:
    return seen("in_process")


@mesh.task
async def broken() -> None:
    raise TaskFailed("it rained")


@mesh.task
def long(ms: int) -> None:
    time.sleep(ms / 1000)
'''


@pytest.fixture
def taskmesh(mongo_uri: str, database: str, tmp_path: Path) -> Iterator[Shell]:
    """`taskmesh` in a directory with a module `app` that traces."""
    with shell_in(tmp_path, mongo_uri, database) as shell:
        (tmp_path / "app.py").write_text(APP)
        yield shell
