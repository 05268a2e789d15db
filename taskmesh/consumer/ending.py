"""How an execution ended: judged from what its handler returned or raised, and from why it was stopped, if it was."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace
from typing import Any, Literal

from taskmesh.consumer.execution import Execution, Stop
from taskmesh.consumer.pause import varied
from taskmesh.consumer.reasons import MAX_REASON_CHARS, reason_of
from taskmesh.errors import LeaseLost, Retry, Snooze, TaskFailed, TransactionConflict, delay_of
from taskmesh.logs import fields_of
from taskmesh.store.driver import Document
from taskmesh.store.finish import Outcome

logger = logging.getLogger("taskmesh.executor")


_CONFLICTS_IN_A_ROW = 100
"""So many conflicts of `transaction()` are a failure. Waiting between them takes longer than a dead worker's locks last."""
_FIRST_WAIT_MS, _LONGEST_WAIT_MS = 20, 1_000


@dataclass(frozen=True, slots=True)
class Ending:
    """How an execution ended, as the hook `after` is told."""

    kind: Literal["succeeded", "failed", "snoozed", "released", "cancelled", "lost"]
    value: Any = None
    reason: str | None = None
    error: BaseException | None = None
    fail_type: str | None = None
    """Of a failure by an error: its type."""
    fail_frame: str | None = None
    """Of a failure by an error: file, line and function where it was raised."""


def ending_with(execution: Execution, value: Any) -> Ending:
    """Judge what a handler returned: it counts, unless the execution was stopped before."""
    if execution.recorded:
        return Ending("succeeded", value=execution.result)
    return _stopped_before(execution) or Ending("succeeded", value=value)


def ending_of(execution: Execution, error: BaseException) -> Ending:
    """Judge what a handler (or a check before it) raised."""
    if execution.recorded:
        logger.warning(
            "task %s raised after its transaction had recorded it: %r", execution.id, error, extra=fields_of(execution)
        )
        return Ending("succeeded", value=execution.result)
    if stopped := _stopped_before(execution, error):
        return stopped
    if isinstance(error, LeaseLost):
        return Ending("lost", reason=Stop.LEASE_LOST.value, error=error)
    if isinstance(error, asyncio.CancelledError):
        if execution.stop_reason is Stop.WORKER_STOPS:
            return Ending("released", reason=Stop.WORKER_STOPS.value, error=error)
        return Ending("failed", reason="CancelledError: the handler was cancelled, and not by taskmesh", error=error)
    if isinstance(error, (Retry, Snooze)):
        try:
            delay_of(error)
        except Exception as refusal:  # noqa: BLE001 — an attribute of a handler's own class may be anything
            return failed_by(refusal)
    if isinstance(error, TransactionConflict) and execution.conflicts + 1 >= _CONFLICTS_IN_A_ROW:
        met = f"TransactionConflict: {execution.conflicts + 1} executions in a row met one"
        remedy = "make what is in transaction() shorter, or let fewer of these tasks run at once"
        return replace(failed_by(error), reason=f"{met}: {remedy}\n{error}")
    if isinstance(error, Snooze):
        return Ending("snoozed", reason=reason_of(error).text, error=error)
    return failed_by(error)


def failed_by(error: BaseException) -> Ending:
    """Return the ending of an execution that this error has made fail."""
    why = reason_of(error)
    return Ending("failed", reason=why.text, error=error, fail_type=why.type, fail_frame=why.frame)


def _stopped_before(execution: Execution, error: BaseException | None = None) -> Ending | None:
    """How it ended if it was stopped for a reason that outweighs whatever the handler did then."""
    reason = execution.stop_reason
    if reason is Stop.TIMEOUT:
        limit_ms = execution.stored_option["run_timeout_ms"]
        return Ending("failed", reason=f"run_timeout_ms: the execution took more than {limit_ms} ms", error=error)
    if reason in (Stop.CANCELLED, Stop.DELETED, Stop.NOT_ALLOWED):
        return Ending("cancelled", reason=reason.value, error=error)
    if reason is Stop.LEASE_LOST:
        return Ending("lost", reason=reason.value, error=error)
    return None


def failure(execution: Execution, ending: Ending) -> Outcome:
    """Return the outcome of an execution that failed, and log it: this is the only way to one."""
    _tell(execution, ending)
    entry: Document = {"fail_reason": (ending.reason or "")[:MAX_REASON_CHARS], "retry_jitter": varied(1.0, 1.0) - 1.0}
    if ending.fail_type is not None:
        entry |= {"fail_type": ending.fail_type, "fail_frame": ending.fail_frame}
    if isinstance(ending.error, TaskFailed):
        entry["final"] = True
    delay_ms = delay_of(ending.error) if isinstance(ending.error, Retry) else None
    return execution.outcome("failed", entry, 5_000, delay_ms)


def _tell(execution: Execution, ending: Ending) -> None:
    """Log a failure with its traceback: an error if no retry is left, else a warning."""
    reason = (ending.reason or "").partition("\n")[0]
    retries, most = execution.failures, execution.stored_option["max_unexpected_retries"]
    if isinstance(ending.error, TaskFailed) or retries >= most:
        level, what = logging.ERROR, "failed for good"
    else:
        level, what = logging.WARNING, f"failed and will be retried ({retries + 1} of {most})"
    logger.log(level, "task %s %s: %s", execution.id, what, reason, exc_info=ending.error, extra=fields_of(execution))


def snoozed(execution: Execution, ending: Ending) -> Outcome:
    """Return the outcome of an execution that comes again, uncharged. One that met a conflict waits for a time by chance."""
    if isinstance(ending.error, TransactionConflict):
        longest = min(_FIRST_WAIT_MS * 2.0 ** min(execution.conflicts, 10), _LONGEST_WAIT_MS)
        return execution.outcome("conflicted", {}, delay_ms=int(varied(longest, 0.5)))
    return execution.outcome("snoozed", {}, delay_ms=delay_of(ending.error) if isinstance(ending.error, Snooze) else 0)


def stopped(execution: Execution) -> Outcome:
    """Return a note for the entry of a cancelled task. It changes no other."""
    return execution.outcome("stopped", {"fail_reason": "the task was cancelled"})
