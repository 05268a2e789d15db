"""What can be tuned for one task: `TaskOption`, stored with the task and read by the claim rule.

Durations are whole milliseconds. A bad value or an unknown field raises `InvalidOption`, which names the value and the remedy;
nothing is stored then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self, TypedDict, Unpack, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from taskmesh.model.errors import MAX_DURATION_MS, InvalidOption
from taskmesh.model.ids import shown

_DEFAULT_PING_MS = 30_000
MOST_WORKERS = 1_000
"""How many workers one task can name, or be for."""

Milliseconds = Annotated[int, Field(ge=0, le=MAX_DURATION_MS)]
Count = Annotated[int, Field(ge=0, le=1_000_000_000)]
QueueName = Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9_.-]+$")]
WorkerId = Annotated[str, Field(min_length=1, max_length=256)]


class OptionFields(TypedDict, total=False):
    """The fields of `TaskOption` as keywords, documented there."""

    priority: int
    concurrent_worker_cnt: int
    specific_worker_ids: Sequence[str]
    ping_interval_ms: int
    worker_timeout_ms: int
    max_unexpected_retries: int
    unexpected_retry_delay_ms: int
    unexpected_retry_delay_scope: Literal["task", "worker"]
    unexpected_retry_backoff: float
    unexpected_retry_jitter: float
    max_timeouts: int
    run_timeout_ms: int | None
    retain_success_ms: int | None
    retain_failed_ms: int | None
    on_fail: str | None


class TaskOption(BaseModel):
    """How one task is run. Every field can be set per task, and changed later by `mesh.set_option`.

    A change on a running task applies from its next claim, with two exceptions: a worker that is no longer in
    `specific_worker_ids` stops at once, and `ping_interval_ms` applies from the next ping.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] = 0
    """Tasks with a higher priority are claimed first."""

    concurrent_worker_cnt: Annotated[int, Field(ge=1, le=MOST_WORKERS)] = 1
    """How many different workers have to run the task to SUCCESS. As many may run it at once."""

    specific_worker_ids: Annotated[tuple[WorkerId, ...], Field(max_length=MOST_WORKERS, strict=False)] = ()
    """Only these workers may run the task. Empty: any."""

    ping_interval_ms: Annotated[int, Field(ge=1, le=MAX_DURATION_MS)] = _DEFAULT_PING_MS
    """How often the executing worker renews its lease; at the latest when 60 % of the lease are over. The default costs two
    writes a minute; if only `worker_timeout_ms` is given, and is less than a minute, it is half of that."""

    worker_timeout_ms: Annotated[int, Field(ge=2, le=MAX_DURATION_MS)] = 60_000
    """How long a lease lasts without a ping; then other workers may take the task over. Must be more than `ping_interval_ms`;
    by default twice as much, so that one lost ping does no harm."""

    max_unexpected_retries: Count = 3
    """The task can be claimed as long as the FAIL entries of all workers together are not more than this."""

    unexpected_retry_delay_ms: Milliseconds = 10_000
    """How long the task waits after a failure before it is retried."""

    unexpected_retry_delay_scope: Literal["task", "worker"] = "task"
    """Who waits: no worker retries it before (`task`), or only the worker that failed waits (`worker`)."""

    unexpected_retry_backoff: Annotated[float, Field(ge=1.0, le=1000.0, allow_inf_nan=False)] = 1.0
    """Each further failure multiplies the delay by this, up to one day."""

    unexpected_retry_jitter: Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)] = 0.1
    """The delay varies randomly by up to this share, so that what failed together does not return together."""

    max_timeouts: Count = 5
    """How many executions in a row may be lost (worker died, hung, cut off) before the task FAILs."""

    run_timeout_ms: Annotated[int, Field(ge=1, le=MAX_DURATION_MS)] | None = None
    """How long one execution may take. After that it is cancelled and FAILs. None: no limit."""

    retain_success_ms: Milliseconds | None = 86_400_000
    """How long a SUCCESS is kept, and its key taken. None: for ever."""

    retain_failed_ms: Milliseconds | None = 7 * 86_400_000
    """How long a FAIL, CANCELLED or EXPIRED task is kept, and its key taken. None: for ever."""

    on_fail: QueueName | None = None
    """The queue for dead letters: a task that FAILs moves there, in the same write, and back to its own queue when it is
    retried (`taskmesh redrive`). None: it stays where it is."""

    def __init__(self, **fields: Unpack[OptionFields]) -> None:
        derived = "worker_timeout_ms" in fields and "ping_interval_ms" not in fields
        if derived and isinstance(timeout_ms := fields["worker_timeout_ms"], int):
            fields["ping_interval_ms"] = ping_interval_for(timeout_ms)
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise InvalidOption(_explained(error)) from None
        if derived:  # nobody has set it: it continues to follow `worker_timeout_ms`
            self.model_fields_set.discard("ping_interval_ms")

    @model_validator(mode="after")
    def _a_lease_outlives_its_ping(self) -> Self:
        if self.worker_timeout_ms <= self.ping_interval_ms:
            raise ValueError(
                f"worker_timeout_ms ({self.worker_timeout_ms}) must be more than ping_interval_ms "
                f"({self.ping_interval_ms}): set both, for example the timeout to three times the interval"
            )
        return self

    def changed(self, **fields: Any) -> TaskOption:
        """Return a copy with `fields` changed, checked as a whole. Raises `InvalidOption`.

        A `ping_interval_ms` with the default for its `worker_timeout_ms` follows that: a stored option does not say whether
        somebody has set it.
        """
        kept = {name: getattr(self, name) for name in self.model_fields_set}
        if "worker_timeout_ms" in fields and self.ping_interval_ms == ping_interval_for(self.worker_timeout_ms):
            kept.pop("ping_interval_ms", None)
        return TaskOption(**{**kept, **fields})

    def stored(self) -> dict[str, Any]:
        """Return the option as it is stored with a task."""
        stored = {**dict(self), "specific_worker_ids": list(self.specific_worker_ids)}
        if self.on_fail is None:  # as in every task of an older release
            del stored["on_fail"]
        return stored


def ping_interval_for(worker_timeout_ms: int) -> int:
    """Return how often a lease of this length is renewed by default, in milliseconds."""
    return max(1, min(_DEFAULT_PING_MS, worker_timeout_ms // 2))


def checked_changes(given: Mapping[str, Any]) -> OptionFields:
    """Return changes of an option. Raises `InvalidOption` for a name that no option has.

    Remote input is checked before it is passed on as keywords: `name` or `by` would be taken for something else.
    """
    if unknown := [_unknown(name, value) for name, value in given.items() if name not in TaskOption.model_fields]:
        raise InvalidOption("; ".join(unknown))
    return cast("OptionFields", dict(given))


def _unknown(field: str, value: Any) -> str:
    return f"unknown option {field!r} (value {shown(value)}); the options are: {', '.join(TaskOption.model_fields)}"


def _explained(error: ValidationError) -> str:
    """Return in one line what pydantic has found, with the value and the field's name."""
    problems = []
    for found in error.errors(include_url=False):
        if found["type"] == "value_error":
            problems.append(found["msg"].removeprefix("Value error, "))
            continue
        field = ".".join(str(part) for part in found["loc"])
        if found["type"] == "extra_forbidden":
            problems.append(_unknown(field, found["input"]))
        else:
            problems.append(f"{field}={shown(found['input'])}: {found['msg'][0].lower()}{found['msg'][1:]}")
    return "; ".join(problems)
