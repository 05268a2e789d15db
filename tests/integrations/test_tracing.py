"""Publish and execution are one trace, by the conventions for messaging; without a tracer nothing is written or made."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.trace import SpanKind, StatusCode

from taskmesh import Retry, Snooze, Status, TaskFailed, TaskMesh, TaskOption, current_task
from tests.waiting import eventually
from tests.working import finished, working

pytest.importorskip("opentelemetry.sdk", reason="a dev dependency: make install")
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter


class Spans:
    """What was exported."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()

    def named(self, name: str) -> list[ReadableSpan]:
        """Return the spans of this name that have ended."""
        return [span for span in self.exporter.get_finished_spans() if span.name == name]

    async def many(self, name: str, count: int) -> list[ReadableSpan]:
        """Wait for so many spans of this name."""
        await eventually(lambda: len(self.named(name)) == count, what=f"{count} spans {name!r}")
        return self.named(name)

    async def one(self, name: str) -> ReadableSpan:
        """Wait for the one span of this name."""
        return (await self.many(name, 1))[0]


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[Spans]:
    """Trace, as a service that sets a provider does, for the time of a test."""
    found = Spans()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(found.exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)  # can be set once in a process, by its own rules
    yield found
    provider.shutdown()


def span_context(span: ReadableSpan) -> trace.SpanContext:
    context = span.get_span_context()
    assert context is not None
    return context


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


async def test_publish_and_execution_are_one_trace(mesh: TaskMesh, spans: Spans) -> None:
    @mesh.task(queue="thumbs")
    async def resize() -> str:
        return format(trace.get_current_span().get_span_context().span_id, "x")

    with trace.get_tracer("test").start_as_current_span("request") as request:
        handle = await resize.publish("img-42")
    async with working(mesh, "w1"):
        seen_by_the_handler = await handle.result(timeout=60)
    published, processed = await spans.one("publish resize"), await spans.one("process resize")
    assert published.parent is not None
    assert published.parent.span_id == request.get_span_context().span_id
    assert processed.parent is not None
    assert processed.parent.span_id == span_context(published).span_id
    assert span_context(processed).trace_id == span_context(published).trace_id == request.get_span_context().trace_id
    assert seen_by_the_handler == format(span_context(processed).span_id, "x")
    assert (published.kind, processed.kind) == (SpanKind.PRODUCER, SpanKind.CONSUMER)
    assert attributes(published) == {
        "messaging.system": "taskmesh",
        "messaging.operation.name": "publish",
        "messaging.operation.type": "send",
        "messaging.destination.name": "resize",
        "messaging.message.id": "img-42",
        "taskmesh.queue": "thumbs",
    }
    task = await handle.task()
    assert attributes(processed) == {
        "messaging.system": "taskmesh",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": "resize",
        "messaging.message.id": "img-42",
        "messaging.client.id": "w1",
        "taskmesh.queue": "thumbs",
        "taskmesh.running_id": task.task_state.worker_states[0].running_id,
        "taskmesh.attempt": 1,
        "taskmesh.outcome": "succeeded",
    }


async def test_each_execution_is_a_span_with_its_error(mesh: TaskMesh, spans: Spans) -> None:
    @mesh.task(option=TaskOption(unexpected_retry_delay_ms=0))
    async def flaky() -> None:
        if current_task().attempt == 1:
            raise ValueError("it rained\nall day")
        raise TaskFailed("no use")

    await flaky.publish("k")
    async with working(mesh):
        await finished(mesh, "flaky", "k")
    first, second = await spans.many("process flaky", 2)
    [published] = spans.named("publish flaky")
    assert {span.parent.span_id for span in (first, second) if span.parent} == {span_context(published).span_id}
    assert [attributes(span)["taskmesh.attempt"] for span in (first, second)] == [1, 2]
    assert [attributes(span)["error.type"] for span in (first, second)] == [
        "ValueError",
        "taskmesh.model.errors.TaskFailed",
    ]
    assert first.status.status_code is StatusCode.ERROR
    assert first.status.description == "ValueError: it rained"
    [event] = first.events
    assert event.name == "exception"
    assert dict(event.attributes or {})["exception.message"] == "it rained\nall day"


class Unspeakable(Exception):
    """Its own text cannot be made."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize("error", [Unspeakable, Snooze])
async def test_an_error_or_a_span_processor_that_is_broken_costs_no_slot(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    class Broken(SpanProcessor):
        def on_end(self, span: ReadableSpan) -> None:  # noqa: ARG002 — its own name for it
            raise RuntimeError("the exporter is broken")

    seen: list[str] = []

    @mesh.task(option=TaskOption(max_unexpected_retries=0))
    async def work() -> None:
        if not seen:
            seen.append("")
            raise error

    await work.publish("k")
    provider = TracerProvider()
    if error is Snooze:
        provider.add_span_processor(Broken())
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    async with working(mesh, concurrency=1) as consumer:
        task = await finished(mesh, "work", "k")
        await eventually(lambda: not consumer.running)
    if error is Snooze:
        assert task.status is Status.SUCCESS
    else:
        assert "Unspeakable: <exception str() failed>" in task.fail_reasons[0]


async def test_to_come_back_later_is_no_error(mesh: TaskMesh, spans: Spans) -> None:
    @mesh.task
    async def later() -> None:
        if not spans.named("process later"):
            raise Snooze(delay_ms=1)

    await later.publish("k")
    async with working(mesh):
        await finished(mesh, "later", "k")
    first, second = await spans.many("process later", 2)
    assert (attributes(first)["taskmesh.outcome"], first.status.status_code) == ("snoozed", StatusCode.UNSET)
    assert attributes(second)["taskmesh.outcome"] == "succeeded"


async def test_what_a_handler_publishes_goes_on_in_its_trace(mesh: TaskMesh, spans: Spans) -> None:
    @mesh.task
    async def first() -> None:
        await current_task().publish(second, "k")

    @mesh.task
    def second() -> None:  # in a thread
        trace.get_tracer("test").start_span("inner").end()

    await first.publish("k")
    async with working(mesh):
        await finished(mesh, "first", "k")
        await finished(mesh, "second", "k")
    outer, chained = await spans.one("process first"), await spans.one("process second")
    assert chained.parent is not None
    assert chained.parent.span_id == span_context(outer).span_id
    inner = await spans.one("inner")
    assert inner.parent is not None
    assert inner.parent.span_id == span_context(chained).span_id


async def test_many_are_one_publish_and_a_key_that_runs_again_follows_its_newest(mesh: TaskMesh, spans: Spans) -> None:
    @mesh.task
    async def work() -> None:
        return None

    await work.publish_many({f"k{n}": {} for n in range(3)})
    assert attributes(await spans.one("publish work"))["messaging.batch.message_count"] == 3
    spans.exporter.clear()
    await work.configure(run_again=True).publish("k1")
    again = await spans.one("publish work")
    async with working(mesh):
        for n in range(3):
            await finished(mesh, "work", f"k{n}")
    processed = [
        span for span in await spans.many("process work", 3) if attributes(span)["messaging.message.id"] == "k1"
    ]
    assert processed[0].parent is not None
    assert processed[0].parent.span_id == span_context(again).span_id


async def test_a_publish_that_is_refused_is_an_error_of_its_span(mesh: TaskMesh, spans: Spans) -> None:
    @mesh.task
    async def work() -> None:
        raise Retry(delay_ms=1)

    await work.publish("k")
    await mesh.store.driver.database.command(
        {"collMod": "tasks", "validator": {"name": "other"}, "validationLevel": "strict"}
    )
    with pytest.raises(Exception, match="validation"):
        await work.publish("k2")
    _, refused = spans.named("publish work")
    assert refused.status.status_code is StatusCode.ERROR
    assert [event.name for event in refused.events] == ["exception"]
    assert "error.type" in attributes(refused)


async def test_without_a_tracer_nothing_is_written_and_nothing_is_made(mesh: TaskMesh) -> None:
    @mesh.task
    async def work() -> bool:
        return trace.get_current_span().get_span_context().is_valid

    handle = await work.publish("k")
    async with working(mesh):
        assert await handle.result(timeout=60) is False
    [stored] = await mesh.store.find({"_id": "work:k"}, {"trace": 1})
    assert "trace" not in stored


@pytest.mark.parametrize("headers", [{"traceparent": 7}, {"traceparent": "nonsense"}, "nonsense", {"": None}])
async def test_a_trace_that_a_stranger_has_spoilt_hurts_nobody(mesh: TaskMesh, spans: Spans, headers: Any) -> None:
    @mesh.task
    async def work() -> str:
        return "done"

    handle = await work.publish("k")
    await mesh.store.driver.collection("tasks").update_one({"_id": "work:k"}, {"$set": {"trace": headers}})
    async with working(mesh):
        assert await handle.result(timeout=60) == "done"
    assert (await spans.one("process work")).parent is None


def test_taskmesh_imports_neither_opentelemetry_nor_motor_by_itself() -> None:
    code = "import sys, taskmesh; sys.exit(any(n.partition('.')[0] in ('opentelemetry', 'motor') for n in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
