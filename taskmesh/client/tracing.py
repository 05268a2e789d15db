"""Tracing by OpenTelemetry: publish and execution are one trace, across processes and however long the task waits.

This is the publisher's side; the worker's is `consumer.run.tracing`.

taskmesh imports nothing of OpenTelemetry: a program that traces has imported it, and set a tracer provider. Without that
nothing is written into tasks and nothing is created per execution. Install the extra `tracing` and an SDK, and configure it as
for the rest of the service.

The spans follow the semantic conventions for messaging; the destination is the task's name, which selects its handlers:

| span | kind | parent |
| --- | --- | --- |
| `publish NAME` | PRODUCER | what the publisher was doing |
| `process NAME`, one for each execution | CONSUMER | the publish; for a task that a handler published, that execution |
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

_SYSTEM = "taskmesh"

Carrier = dict[str, Any]
"""What travels with a task: the headers of the configured propagator (`traceparent`, …)."""


def api_in_use() -> Any:
    """Return `opentelemetry.trace` if somebody has set a tracer provider; else None."""
    api = sys.modules.get("opentelemetry.trace")
    if api is None or isinstance(api.get_tracer_provider(), api.ProxyTracerProvider):
        return None
    return api


def tracer(api: Any) -> Any:
    """Return the tracer that creates all spans."""
    return api.get_tracer("taskmesh")


def carrier() -> Carrier | None:
    """Return the current position in the trace, to travel with a task. None if tracing is off."""
    api = api_in_use()
    if api is None or not api.get_current_span().get_span_context().is_valid:
        return None
    from opentelemetry import propagate  # noqa: PLC0415 — it is there, as the API is

    found: Carrier = {}
    propagate.inject(found)
    return found or None


def publishing(name: str, keys: Sequence[str], queue: str) -> AbstractContextManager[Carrier | None]:
    """Open the span of a publish; what it yields travels with the tasks. An error inside is recorded."""
    api = api_in_use()
    return nullcontext() if api is None else _publishing(api, name, keys, queue)


@contextmanager
def _publishing(api: Any, name: str, keys: Sequence[str], queue: str) -> Iterator[Carrier | None]:
    attributes = attributes_of("publish", "send", name, queue)
    if len(keys) == 1:
        attributes["messaging.message.id"] = keys[0]
    else:
        attributes["messaging.batch.message_count"] = len(keys)
    with tracer(api).start_as_current_span(
        f"publish {name}", kind=api.SpanKind.PRODUCER, attributes=attributes, record_exception=False
    ) as span:
        try:
            yield carrier()
        except Exception as error:
            span.record_exception(error)
            span.set_attribute("error.type", type_of(error))
            raise


@contextmanager
def going_on(from_: Carrier | None) -> Iterator[None]:
    """Continue, inside the block, the trace of another thread or process."""
    if from_ is None or "opentelemetry" not in sys.modules:
        yield
        return
    from opentelemetry import context, propagate  # noqa: PLC0415 — it is there, as somebody traces

    token = context.attach(propagate.extract(from_, context.Context()))
    try:
        yield
    finally:
        context.detach(token)


def attributes_of(operation: str, kind: str, name: str, queue: str) -> dict[str, Any]:
    """Return the attributes of every span."""
    return {
        "messaging.system": _SYSTEM,
        "messaging.operation.name": operation,
        "messaging.operation.type": kind,
        "messaging.destination.name": name,
        "taskmesh.queue": queue,
    }


def type_of(error: BaseException) -> str:
    """Return an error's type, as spans name it."""
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
