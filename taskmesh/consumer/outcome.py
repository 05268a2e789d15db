"""How an execution ended: judged from what its handler returned or raised, and from why it was stopped, if it was."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace
from typing import Any, Literal

from taskmesh.consumer.execution import Execution, Stop
from taskmesh.consumer.logs import fields_of
from taskmesh.consumer.reasons import MAX_REASON_CHARS, reason_of
from taskmesh.consumer.timing import varied
from taskmesh.model.errors import LeaseLost, Retry, Snooze, TaskFailed, TransactionConflict, delay_of
from taskmesh.store.driver import Document
from taskmesh.store.finish import Outcome

logger = logging.getLogger("taskmesh.executor")

_ABOUT_THE_TASK = (TaskFailed, Retry, Snooze)
"""What a handler says of its task, which holds though it says so while its worker stops."""


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


def judged(execution: Execution, value: Any, error: BaseException | None) -> Ending:
    """Judge what a handler returned, or what it (or a check before it) raised: it counts, unless it was told to stop before.

    From here on nothing can tell it to stop any more.
    """
    told = execution.judge()
    if execution.recorded:
        if error is not None:
            text = "task %s raised after its transaction had recorded it: %r"
            logger.warning(text, execution.id, error, extra=fields_of(execution))
        return Ending("succeeded", value=execution.result)
    if told is not None and not (told is Stop.WORKER_STOPS and isinstance(error, _ABOUT_THE_TASK)):
        return _told_to_stop(execution, told, error)
    if error is None:
        return Ending("succeeded", value=value)
    if isinstance(error, LeaseLost):
        return Ending("lost", reason=Stop.LEASE_LOST.value, error=error)
    if isinstance(error, asyncio.CancelledError):
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


def _told_to_stop(execution: Execution, told: Stop, error: BaseException | None) -> Ending:
    """How it ended if it was told to stop for a reason that outweighs whatever the handler did then."""
    if told is Stop.TIMEOUT:
        limit_ms = execution.stored_option["run_timeout_ms"]
        return Ending("failed", reason=f"run_timeout_ms: the execution took more than {limit_ms} ms", error=error)
    if told is Stop.LEASE_LOST:
        return Ending("lost", reason=told.value, error=error)
    if told is Stop.WORKER_STOPS:
        return Ending("released", reason=told.value, error=error)
    return Ending("cancelled", reason=told.value, error=error)


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
    """Return a note that the handler of an execution which was stopped from outside has ended. It changes no other entry."""
    return execution.outcome("stopped", {"fail_reason": "the task was cancelled"})
