"""Tracing by OpenTelemetry: publish and execution are one trace, across processes and however long the task waits.

taskmesh imports nothing of OpenTelemetry: who traces has imported it, and set a tracer provider. Without that nothing is
written into tasks and nothing is made per execution. Install the extra `tracing` and an SDK, and configure it as for the rest
of the service.

The spans follow the semantic conventions for messaging; the destination is the task's name, which is what selects its handlers:

| span | kind | parent |
| --- | --- | --- |
| `publish NAME` | PRODUCER | what the publisher was doing |
| `process NAME`, one for each execution | CONSUMER | the publish; for a task that a handler published, that execution |
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from taskmesh.consumer.logs import fields_of

if TYPE_CHECKING:
    from opentelemetry.trace import Span

logger = logging.getLogger("taskmesh.tracing")

_SYSTEM = "taskmesh"
_OUTCOME = "taskmesh.outcome"

Carrier = dict[str, Any]
"""What travels with a task: the headers of the configured propagator (`traceparent`, …)."""


class _Executed(Protocol):
    """What a span tells of an execution."""

    name: str
    key: str
    queue: str
    worker_id: str
    running_id: str
    document: dict[str, Any]

    @property
    def attempt(self) -> int: ...


class _Ended(Protocol):
    """What a span tells of its end; see `Ending`."""

    @property
    def kind(self) -> str: ...
    @property
    def reason(self) -> str | None: ...
    @property
    def error(self) -> BaseException | None: ...


def _api() -> Any:
    """Return `opentelemetry.trace` if somebody has set a tracer provider; else None."""
    api = sys.modules.get("opentelemetry.trace")
    if api is None or isinstance(api.get_tracer_provider(), api.ProxyTracerProvider):
        return None
    return api


def _tracer(api: Any) -> Any:
    return api.get_tracer("taskmesh")


def carrier() -> Carrier | None:
    """Return where we are in which trace, to travel with a task; None if nobody traces."""
    api = _api()
    if api is None or not api.get_current_span().get_span_context().is_valid:
        return None
    from opentelemetry import propagate  # noqa: PLC0415 — it is there, as the API is

    found: Carrier = {}
    propagate.inject(found)
    return found or None


def publishing(name: str, keys: Sequence[str], queue: str) -> AbstractContextManager[Carrier | None]:
    """Open the span of a publish; what it gives travels with the tasks. An error inside is recorded."""
    api = _api()
    return nullcontext() if api is None else _publishing(api, name, keys, queue)


@contextmanager
def _publishing(api: Any, name: str, keys: Sequence[str], queue: str) -> Iterator[Carrier | None]:
    attributes = _attributes("publish", "send", name, queue)
    if len(keys) == 1:
        attributes["messaging.message.id"] = keys[0]
    else:
        attributes["messaging.batch.message_count"] = len(keys)
    with _tracer(api).start_as_current_span(
        f"publish {name}", kind=api.SpanKind.PRODUCER, attributes=attributes, record_exception=False
    ) as span:
        try:
            yield carrier()
        except Exception as error:
            span.record_exception(error)
            span.set_attribute("error.type", _type_of(error))
            raise


@contextmanager
def going_on(from_: Carrier | None) -> Iterator[None]:
    """Be, inside the block, where somebody in another thread or process was."""
    if from_ is None or "opentelemetry" not in sys.modules:
        yield
        return
    from opentelemetry import context, propagate  # noqa: PLC0415 — it is there, as somebody traces

    token = context.attach(propagate.extract(from_, context.Context()))
    try:
        yield
    finally:
        context.detach(token)


def process_span(execution: _Executed) -> ProcessSpan | None:
    """Begin the span of an execution, current in this asyncio task from now on; None if nobody traces."""
    api = _api()
    if api is None:
        return None
    try:
        return ProcessSpan(api, execution)
    except Exception:  # a sampler, a propagator: whatever is wrong with the tracing, the task has to run
        logger.exception("task %s runs without its span", execution.key, extra=fields_of(execution))
        return None


class ProcessSpan:
    """The span of one execution."""

    def __init__(self, api: Any, execution: _Executed) -> None:
        from opentelemetry import context, propagate  # noqa: PLC0415 — it is there, as the API is

        attributes = _attributes("process", "process", execution.name, execution.queue) | {
            "messaging.message.id": execution.key,
            "messaging.client.id": execution.worker_id,
            "taskmesh.running_id": execution.running_id,
            "taskmesh.attempt": execution.attempt,
        }
        stored = execution.document.get("trace")
        headers = stored.items() if isinstance(stored, Mapping) else ()
        parent = propagate.extract({name: text for name, text in headers if isinstance(text, str)}, context.Context())
        self._api = api
        self._span: Span = _tracer(api).start_span(
            f"process {execution.name}", context=parent, kind=api.SpanKind.CONSUMER, attributes=attributes
        )
        self._context = api.set_span_in_context(self._span, parent)
        context.attach(self._context)  # never detached: the asyncio task of an execution has a context of its own

    @property
    def carrier(self) -> Carrier | None:
        """What travels with a task that the handler publishes."""
        from opentelemetry import propagate  # noqa: PLC0415 — it is there, as the API is

        found: Carrier = {}
        propagate.inject(found, self._context)
        return found or None

    def end(self, ending: _Ended) -> None:
        """End it, with how the execution ended. Raises nothing: an error's own text, or a span processor, may be broken."""
        for step in (partial(self._tell, ending), self._span.end):
            try:
                step()
            except Exception:
                logger.exception("the span of an execution could not be ended as it should")

    def _tell(self, ending: _Ended) -> None:
        self._span.set_attribute(_OUTCOME, ending.kind)
        if ending.kind in ("failed", "lost"):
            kind = _type_of(ending.error) if ending.error is not None else ending.kind
            self._span.set_attribute("error.type", kind)
            reason = (ending.reason or "").partition("\n")[0]
            self._span.set_status(self._api.Status(self._api.StatusCode.ERROR, reason))
            if isinstance(ending.error, Exception):
                self._span.record_exception(ending.error)


def _attributes(operation: str, kind: str, name: str, queue: str) -> dict[str, Any]:
    return {
        "messaging.system": _SYSTEM,
        "messaging.operation.name": operation,
        "messaging.operation.type": kind,
        "messaging.destination.name": name,
        "taskmesh.queue": queue,
    }


def _type_of(error: BaseException) -> str:
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
