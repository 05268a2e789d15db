"""How an execution ended, what is recorded of that, and what the log says about it.

An `Ending` is judged from what the handler returned or raised, and from why it was stopped, if it was; an `Outcome` is what has
to be recorded. Of a failure the type, the message and the last lines of code are recorded, bounded in size, and never the value
of a variable: more people can read a document than the memory of the process that failed.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from taskmesh.client.definition import TaskDefinition
from taskmesh.consumer.hooks import Ending
from taskmesh.consumer.run.context import fields_of
from taskmesh.consumer.run.execution import Execution
from taskmesh.consumer.run.stop_reasons import Stop
from taskmesh.consumer.timing import varied
from taskmesh.model.error_policy import ALWAYS_FINAL, Raised, leaves, raised
from taskmesh.model.errors import (
    CannotDecrypt,
    InvalidOption,
    InvalidParams,
    LeaseLost,
    PayloadMissing,
    Retry,
    Snooze,
    StepMismatch,
    TaskFailed,
    TaskTooLarge,
    TransactionConflict,
    UnstorableValue,
    delay_of,
)
from taskmesh.model.stage import Next, checked_next
from taskmesh.store.finish import Outcome
from taskmesh.store.mongodb.driver import Document
from taskmesh.store.values import MAX_BYTES, MAX_REASON_CHARS, cleaned

logger = logging.getLogger("taskmesh.executor")

_ABOUT_THE_TASK = (TaskFailed, Retry, Snooze, Next)
"""What a handler says about its task. It holds even if its worker is stopping."""
_DOES_NOT_FIT = (StepMismatch, CannotDecrypt, PayloadMissing)
"""Errors that say that the code or the keys of this worker do not fit the task."""
_CONFLICTS_IN_A_ROW = 100
"""This many conflicts of `transaction()` in a row are a failure. The waits between them add up to more time than the
locks of a dead worker last."""
_MISMATCH_WAITS_MS = 5_000
"""How long a task waits if the code or the keys of a worker do not fit it; longer, if its retry delay is."""
_FIRST_WAIT_MS, _LONGEST_WAIT_MS = 20, 1_000
_WINDOW_S = 10.0
_TOLD_SINGLY = 20
"""In each window. Otherwise a busy worker would write thousands of lines a second, and do little else."""
_FRAMES_KEPT = 8
_LEAVES_NAMED = 5
_CALLERS = tuple(
    f"/taskmesh/consumer/{name}.py" for name in ("executor", "run/batches", "subprocess/processes", "subprocess/child")
)
_OF_A_LIBRARY = re.compile(r"site-packages|dist-packages|/lib/python3|^<frozen")


_SUCCEEDED = Ending("succeeded")


def judged(execution: Execution, value: Any, error: BaseException | None) -> Ending:
    """Judge what a handler returned or raised, or what a check before it raised. It counts unless it was told to stop before.

    From here on nothing can tell it to stop any more.
    """
    told = execution.judge()
    error = None if error is None else deciding(error)
    if execution.recorded:
        if error is not None:
            text = "task %s raised after its transaction had recorded it: %r"
            logger.warning(text, execution.id, error, extra=fields_of(execution))
        return Ending("succeeded", value=execution.result)
    if execution.suspended_for is not None and told in (None, Stop.WORKER_STOPS, Stop.TIMEOUT):
        return Ending("suspended", reason="put aside by a sleep or a wait")
    if told is not None and not (told is Stop.WORKER_STOPS and isinstance(error, _ABOUT_THE_TASK)):
        return _told_to_stop(execution, told, error)
    if error is None:
        return _SUCCEEDED if value is None else Ending("succeeded", value=value)
    if isinstance(error, LeaseLost):
        return Ending("lost", reason=Stop.LEASE_LOST.value, error=error)
    if isinstance(error, asyncio.CancelledError):
        return Ending("failed", reason="CancelledError: the handler was cancelled, and not by taskmesh", error=error)
    if isinstance(error, (Retry, Snooze, Next)):
        try:
            _check(error)
        except Exception as refusal:  # noqa: BLE001 — an attribute of a handler's own class may be anything
            return failed_by(refusal)
    if isinstance(error, TransactionConflict) and execution.conflicts + 1 >= _CONFLICTS_IN_A_ROW:
        met = f"TransactionConflict: {execution.conflicts + 1} executions in a row met one"
        remedy = "make what is in transaction() shorter, or let fewer of these tasks run at once"
        return replace(failed_by(error), reason=f"{met}: {remedy}\n{error}")
    if isinstance(error, (Snooze, *_DOES_NOT_FIT, Next)):
        return _put_off(execution, error)
    return failed_by(error)


def deciding(error: BaseException) -> BaseException:
    """Return the error of a group that decides how the execution ends; the group itself, if none does.

    An error that is no group is returned as it is. Errors that say that the code does not fit the task come first: whatever else
    was raised is not the task's fault.
    """
    if not isinstance(error, BaseExceptionGroup):
        return error
    inner = leaves(error)
    for kinds in ((LeaseLost,), _DOES_NOT_FIT, ALWAYS_FINAL):
        if (found := next((each for each in inner if isinstance(each, kinds)), None)) is not None:
            return found
    alone = len(inner) == 1 and isinstance(inner[0], (Retry, Snooze, Next, TransactionConflict))
    return inner[0] if alone else error


def _put_off(execution: Execution, error: Snooze | StepMismatch | CannotDecrypt | PayloadMissing | Next) -> Ending:
    """Return the ending of an execution that snoozes, moves on, or does not fit the code here: the task waits, uncharged."""
    if isinstance(error, Next):
        return Ending("moved", reason=reason_of(error).text, error=error)
    if isinstance(error, Snooze):
        return Ending("snoozed", reason=reason_of(error).text, error=error)
    delay_ms = max(_MISMATCH_WAITS_MS, int(execution.stored_option["unexpected_retry_delay_ms"]))
    text = "task %s is put off for %g s, and nothing is charged: %s"
    logger.error(text, execution.id, delay_ms / 1_000, error, extra=fields_of(execution))
    return Ending("snoozed", reason=reason_of(error).text, error=Snooze(str(error), delay_ms=delay_ms))


def _check(error: Retry | Snooze | Next) -> None:
    """Raise what is wrong with what the handler asks for."""
    if isinstance(error, Next):
        checked_next(error)
    else:
        delay_of(error)


def failed_by(error: BaseException) -> Ending:
    """Return the ending of an execution that failed with this error."""
    why = reason_of(error)
    return Ending("failed", reason=why.text, error=error, fail_type=why.type, fail_frame=why.frame)


def _told_to_stop(execution: Execution, told: Stop, error: BaseException | None) -> Ending:
    """Return the ending of an execution that was told to stop. That outweighs whatever its handler did then."""
    if told is Stop.TIMEOUT:
        limit_ms = execution.stored_option["run_timeout_ms"]
        over = TimeoutError(f"run_timeout_ms: the execution took more than {limit_ms} ms")
        over.__cause__ = error
        return Ending("failed", reason=str(over), error=over)
    if told is Stop.LEASE_LOST:
        return Ending("lost", reason=told.value, error=error)
    if told is Stop.WORKER_STOPS:
        return Ending("released", reason=told.value, error=error)
    return Ending("cancelled", reason=told.value, error=error)


def success(execution: Execution, value: Any) -> Outcome:
    """Return the outcome of an execution whose handler returned this value. If it cannot be stored: a final failure.

    The value of a loop is not stored: the task rests, and runs again.
    """
    payloads = execution.publisher.payloads
    try:
        return payloads.apart_result(stored_success(execution, value, payloads.most_bytes))
    except UnstorableValue as error:
        reason = cleaned(f"UnstorableValue: {error}")
        return failure(execution, Ending("failed", reason=reason, error=error, fail_type="UnstorableValue"))


def stored_success(execution: Execution, value: Any, most: int = MAX_BYTES) -> Outcome:
    """Return that outcome, for a result of at most `most` bytes. Raises `UnstorableValue` for what cannot be stored."""
    if execution.loop is not None:
        return execution.outcome("looped", {}, delay_ms=execution.loop.delay_ms(execution.stored_option))
    entry, size = execution.returns.kept("returns", value, most)
    return execution.outcome("succeeded", entry, size + 200)


def failure(execution: Execution, ending: Ending) -> Outcome:
    """Return the outcome of an execution that failed, and log it. There is no other way to a failure."""
    final = _final_because(execution, ending)
    _tell(execution, ending, final)
    entry: Document = {"fail_reason": (ending.reason or "")[:MAX_REASON_CHARS], "retry_jitter": varied(1.0, 1.0) - 1.0}
    if ending.fail_type is not None:
        entry |= {"fail_type": ending.fail_type, "fail_frame": ending.fail_frame}
    loop = execution.loop
    if final is not None:
        entry |= {"final": True, "final_because": final}
    elif isinstance(ending.error, ALWAYS_FINAL) and loop is None:  # a loop never FAILs for good
        entry["final"] = True
    delay_ms = delay_of(ending.error) if isinstance(ending.error, Retry) else None
    if loop is not None and delay_ms is None:
        delay_ms = loop.delay_after_failure_ms(execution.stored_option)
    return execution.outcome("failed", entry, 5_000, delay_ms)


def _final_because(execution: Execution, ending: Ending) -> str | None:
    """Return why its handler's error policy makes its task FAIL for good, whatever retries are left. None: it does not."""
    if ending.error is None:
        return None
    cause = ending.error.__cause__
    met = cause.met if isinstance(cause, ReasonElsewhere) else raised(ending.error)
    return execution.errors.final_because(ending.error, met)


def _tell(execution: Execution, ending: Ending, final: str | None) -> None:
    """Log a failure with its traceback: as an error if no retry is left, otherwise as a warning."""
    reason = (ending.reason or "").partition("\n")[0]
    retries, most = execution.failures, execution.stored_option["max_unexpected_retries"]
    if execution.loop is not None:
        level, what = logging.WARNING, "failed and will run again"
    elif final is not None or isinstance(ending.error, ALWAYS_FINAL) or retries >= most:
        level, what = logging.ERROR, "failed for good" + (f" ({final})" if final is not None else "")
    else:
        level, what = logging.WARNING, f"failed and will be retried ({retries + 1} of {most})"
    shown = None if execution.secrets else ending.error  # a traceback may contain one
    reason = execution.redacted(reason)
    logger.log(level, "task %s %s: %s", execution.id, what, reason, exc_info=shown, extra=fields_of(execution))


def snoozed(execution: Execution, ending: Ending) -> Outcome:
    """Return the outcome of an execution that runs again, uncharged. After a conflict it waits for a random time."""
    if isinstance(ending.error, TransactionConflict):
        longest = min(_FIRST_WAIT_MS * 2.0 ** min(execution.conflicts, 10), _LONGEST_WAIT_MS)
        return execution.outcome("conflicted", {}, delay_ms=int(varied(longest, 0.5)))
    return execution.outcome("snoozed", {}, delay_ms=delay_of(ending.error) if isinstance(ending.error, Snooze) else 0)


def suspended(execution: Execution) -> Outcome:
    """Return the outcome of an execution that is suspended until what it waits for has happened."""
    return replace(execution.outcome("suspended", {}), step=execution.suspended_for)


def moved(execution: Execution, to: TaskDefinition[Any, Any], error: Next) -> Outcome:
    """Return the outcome of an execution whose task goes on in another queue, where `to` runs it.

    It is a failure if the params do not fit there, or if the task is a loop, which stays where it is.
    """
    if execution.loop is not None:
        refusal = InvalidOption(
            f"task {execution.name!r} is a loop or a singleton, which stays in its queue: return instead"
        )
        return failure(execution, failed_by(refusal))
    entry: Document = {"queue": error.queue}
    size = 0
    if error.params is not None:
        try:
            entry["params"], size = to.params.to_store(error.params)
        except (InvalidParams, TaskTooLarge) as refusal:
            return failure(execution, failed_by(refusal))
    return execution.outcome("moved", entry, size + 200)


def stopped(execution: Execution) -> Outcome:
    """Return a note that the handler of an execution that was stopped from outside has ended. It changes no other entry."""
    return execution.outcome("stopped", {"fail_reason": "the task was cancelled"})


# --- successes in the log ---


class Successes:
    """Logs the successes of one worker."""

    def __init__(self, worker_id: str) -> None:
        self._worker_id = worker_id
        self._window_ends = float("-inf")
        self._told = 0
        self._counted = 0

    def tell(self, execution: Execution) -> None:
        """Log that an execution has been recorded as SUCCESS, or only count it."""
        if not logger.isEnabledFor(logging.INFO):
            return
        now = time.monotonic()
        if now >= self._window_ends:
            self.tell_rest()
            self._window_ends, self._told = now + _WINDOW_S, 0
        if self._told < _TOLD_SINGLY:
            self._told += 1
            took = now - execution.started
            logger.info("task %s succeeded after %.3f s", execution.id, took, extra=fields_of(execution))
            return
        if self._counted == 0:
            asyncio.get_running_loop().call_later(self._window_ends - now, self.tell_rest)
        self._counted += 1

    def tell_rest(self) -> None:
        """Log how many successes were only counted, if any were."""
        counted, self._counted = self._counted, 0
        if counted:
            logger.info("%d more tasks succeeded within %g s", counted, _WINDOW_S, extra={"worker": self._worker_id})


# --- the reason for a failure ---


@dataclass(frozen=True, slots=True)
class Reason:
    """Why an execution failed, as it is recorded."""

    text: str
    type: str | None
    """The error's type, with its module unless that is Python's or taskmesh's own. None: there was no error."""
    frame: str | None
    """Where it was raised: the end of the path, the line and the function of the innermost frame outside of libraries."""


class ReasonElsewhere(Exception):
    """The cause of an error that was raised in another process: reason and classes, taken where the traceback was."""

    def __init__(self, reason: Reason, met: Sequence[Raised] = ()) -> None:
        super().__init__(reason.text)
        self.reason = reason
        self.met = met


def reason_of(error: BaseException) -> Reason:
    """Return type, message and the last frames of an error. Only file, line and code of a frame are kept."""
    if isinstance(error.__cause__, ReasonElsewhere):
        return error.__cause__.reason
    inner = leaves(error)
    frames = traceback.extract_tb(inner[0].__traceback__)  # of a group, where the first of its errors was raised
    # What called the handler is the same for every failure, and says nothing about this one.
    ours = [i for i, frame in enumerate(frames) if _path(frame).endswith(_CALLERS)]
    own = frames[ours[-1] + 1 if ours else 0 :]
    if isinstance(error, _ABOUT_THE_TASK):
        text = _message(error) or type(error).__name__
    else:
        text = _summary(error)
        if isinstance(error, BaseExceptionGroup):
            text += ": " + "; ".join(map(_summary, inner[:_LEAVES_NAMED]))
        text = text[: MAX_REASON_CHARS // 2]
        if own:
            text += "\n" + "".join(traceback.format_list(own[-_FRAMES_KEPT:])).rstrip()
    return Reason(cleaned(text), cleaned(_type(type(error))), _place(own))


def _type(kind: type[BaseException]) -> str:
    own = kind.__module__ in ("builtins", "__main__", "taskmesh.model.errors")
    return kind.__qualname__ if own else f"{kind.__module__}.{kind.__qualname__}"


def _place(frames: list[traceback.FrameSummary]) -> str | None:
    """Return where it was raised. Only the end of the path: the same code is in different places on each machine."""
    if not frames:
        return None
    frame = next((frame for frame in reversed(frames) if not _OF_A_LIBRARY.search(_path(frame))), frames[-1])
    return cleaned(f"{'/'.join(_path(frame).split('/')[-3:])}:{frame.lineno} in {frame.name}")


def _path(frame: traceback.FrameSummary) -> str:
    return frame.filename.replace("\\", "/")


def _summary(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception_only(error)).strip()
    except Exception as second:  # noqa: BLE001 — an exception whose own text cannot be made must not hide that it was raised
        return f"{type(error).__name__} (its text cannot be made: {type(second).__name__})"


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as second:  # noqa: BLE001 — as above
        return f"{type(error).__name__} (its text cannot be made: {type(second).__name__})"
