"""Tracing on the worker's side: a span for each execution, in the trace of its publish. See `client.tracing`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from taskmesh.client.tracing import Carrier, api_in_use, attributes_of, tracer, type_of
from taskmesh.consumer.run.context import fields_of

if TYPE_CHECKING:
    from opentelemetry.trace import Span

logger = logging.getLogger("taskmesh.tracing")

_OUTCOME = "taskmesh.outcome"


class _Executed(Protocol):
    """What a span says about an execution."""

    name: str
    key: str
    queue: str
    worker_id: str
    running_id: str
    document: dict[str, Any]

    @property
    def attempt(self) -> int: ...


class _Ended(Protocol):
    """What a span says about its end; see `outcome.Ending`."""

    @property
    def kind(self) -> str: ...
    @property
    def reason(self) -> str | None: ...
    @property
    def error(self) -> BaseException | None: ...


def process_span(execution: _Executed) -> ProcessSpan | None:
    """Begin the span of an execution, current in this asyncio task from now on. None if tracing is off."""
    api = api_in_use()
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

        attributes = attributes_of("process", "process", execution.name, execution.queue) | {
            "messaging.message.id": execution.key,
            "messaging.client.id": execution.worker_id,
            "taskmesh.running_id": execution.running_id,
            "taskmesh.attempt": execution.attempt,
        }
        stored = execution.document.get("trace")
        headers = stored.items() if isinstance(stored, Mapping) else ()
        parent = propagate.extract({name: text for name, text in headers if isinstance(text, str)}, context.Context())
        self._api = api
        self._span: Span = tracer(api).start_span(
            f"process {execution.name}", context=parent, kind=api.SpanKind.CONSUMER, attributes=attributes
        )
        self._context = api.set_span_in_context(self._span, parent)
        context.attach(self._context)  # never detached: the asyncio task of an execution has a context of its own

    @property
    def carrier(self) -> Carrier | None:
        """What a task that the handler publishes carries along."""
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
                logger.exception("the span of an execution could not be ended")

    def _tell(self, ending: _Ended) -> None:
        self._span.set_attribute(_OUTCOME, ending.kind)
        if ending.kind in ("failed", "lost"):
            kind = type_of(ending.error) if ending.error is not None else ending.kind
            self._span.set_attribute("error.type", kind)
            reason = (ending.reason or "").partition("\n")[0]
            self._span.set_status(self._api.Status(self._api.StatusCode.ERROR, reason))
            if isinstance(ending.error, Exception):
                self._span.record_exception(ending.error)
