"""What requests to the API may say, and what small things it answers. What is not known, or out of bounds, is refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, Json, StringConstraints

from taskmesh.model.errors import MAX_DURATION_MS
from taskmesh.model.schedule import Missed, Overlap

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.\-]{1,100}$")]
Key = Annotated[str, StringConstraints(min_length=1, max_length=512, pattern=r"^[^\x00]+$")]
Text = Annotated[str, StringConstraints(max_length=500, pattern=r"^[^\x00]*$")]
Where = Annotated[str, StringConstraints(max_length=4_000, pattern=r"^[^\x00]*$")]
"""A filter. Reasons are long, and a quote within what is quoted takes five characters."""
Group = Annotated[str, StringConstraints(min_length=1, max_length=256, pattern=r"^[^\x00]+$")]
WorkerId = Annotated[str, StringConstraints(min_length=1, max_length=256, pattern=r"^[^\x00]+$")]
Milliseconds = Annotated[int, Field(ge=0, le=MAX_DURATION_MS)]
Positive = Annotated[int, Field(ge=1, le=1_000_000)]


class _Request(BaseModel):
    """What a request says, in its query or its body. What is not known is refused."""

    model_config = ConfigDict(extra="forbid")


class Nothing(_Request):
    """No parameters."""


class TheTask(_Request):
    """Which task."""

    name: Name
    key: Key


class TheEvent(TheTask):
    """Which event of a signal to which task."""

    event: Annotated[str, StringConstraints(min_length=1, max_length=256, pattern=r"^[^\x00]+$")]


class Retrying(TheTask):
    """Which task to retry, and how."""

    fresh: bool = False
    """Start over, with nothing recorded and no signals."""


class Signalling(_Request):
    """What a signal says. Without a payload it is `{}`."""

    payload: Any = None
    signal_id: Annotated[str, StringConstraints(min_length=1, max_length=256, pattern=r"^[^\x00]+$")] | None = None
    """Sent again under the same id, it is the same signal."""


class TheFlow(_Request):
    """Which flow."""

    key: Key


class TheAction(_Request):
    """Which bulk action."""

    id: Annotated[str, StringConstraints(min_length=1, max_length=100, pattern=r"^[^\x00]+$")]


class TheQueue(_Request):
    """Which queue."""

    queue: Name


class TheWorker(_Request):
    """Which worker."""

    worker_id: WorkerId


class OfWorker(TheWorker):
    """What waits, as one worker sees it: tasks of one name, or of all."""

    name: Name | None = None


class TheSchedule(_Request):
    """Which schedule."""

    schedule_id: Key


class Listing(_Request):
    """Which page of which tasks."""

    where: Where = Field("", description="A filter like `status:FAIL name:resize error:timeout age>1h`.")
    newest_first: bool = True
    after: Annotated[str, StringConstraints(max_length=4_000)] | None = Field(
        None, description="`following` of the page before."
    )
    limit: int = Field(50, ge=1, le=500)


class Counting(_Request):
    """Which tasks to count."""

    where: Where = ""
    at_most: int = Field(10_000, ge=1, le=10_000_000, description="Count no further.")


class Count(BaseModel):
    """How many."""

    count: int


class Asking(TheTask):
    """Which task, and which worker."""

    worker_id: WorkerId | None = None


class Publishing(_Request):
    """A task to publish."""

    name: Name
    key: Key
    params: dict[str, Any] = {}
    configuration: dict[str, Any] = Field({}, description="As in `configure`; times in ISO 8601.")


class PublishingMany(_Request):
    """Tasks of one name to publish."""

    name: Name
    params_by_key: dict[Key, dict[str, Any]] = Field(max_length=10_000)
    configuration: dict[str, Any] = {}


class Published(BaseModel):
    """What a publish did."""

    name: str
    key: str
    created: bool
    updated: bool
    warnings: list[str]


class WhatIfOption(TheTask):
    """Which changes of a task's option to try out."""

    changes: Annotated[Json[dict[str, Any]], Field(description="Fields of `TaskOption`, as JSON.")]


class WhichErrors(_Request):
    """Which errors, and how far to look for them."""

    name: Name | None = None
    at_most: int = Field(2_000, ge=1, le=100_000, description="How many tasks to look at, some of each name.")


class OptionChange(_Request):
    """Fields of `TaskOption` to change."""

    changes: dict[str, Any]


class Redriving(_Request):
    """How to retry dead letters."""

    dry_run: bool = Field(False, description="Only count.")
    by: Text | None = Field(None, description="Who does it, for the list of what was done.")
    undo: bool = Field(True, description="Copy each task aside, so that it can be undone within an hour.")


class Bulk(Redriving):
    """What to do to all tasks that match a filter."""

    where: Where


class Purge(_Request):
    """Which finished tasks to delete."""

    where: Where = ""
    dry_run: bool = False
    by: Text | None = None


class Stopping(_Request):
    """How to stop."""

    grace_ms: Milliseconds = 30_000


class Concurrency(_Request):
    """How many executions at once."""

    concurrency: Positive


class PausingSchedule(_Request):
    """Why, and who."""

    reason: Text | None = None
    by: Text | None = None


class Pausing(PausingSchedule):
    """Why, who, and for how long."""

    for_ms: Annotated[int, Field(ge=1, le=MAX_DURATION_MS)] | None = None
    group: Group | None = None


class Resuming(_Request):
    """What to resume: the queue, or one group of it."""

    group: Group | None = None


class Limits(_Request):
    """What changes about a queue's limits: null takes one away, what is left out stays as it is."""

    rate: Positive | None = None
    per_ms: Annotated[int, Field(ge=1, le=7 * 86_400_000)] | None = None
    running: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    group_running: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    group_rate: Positive | None = None
    group_per_ms: Annotated[int, Field(ge=1, le=7 * 86_400_000)] | None = None

    @property
    def given(self) -> dict[str, int | None]:
        """The limits that are given."""
        return {name: getattr(self, name) for name in Limits.model_fields if name in self.model_fields_set}


class WhatIfLimit(Limits, TheQueue):
    """Limits of a queue to try out; with `group`: `running` for that group."""

    group: Group | None = None


class GroupLimit(_Request):
    """What one group of a queue is limited to."""

    group: Group
    running: Annotated[int, Field(ge=0, le=1_000_000)] | None = None


Cron = Annotated[str, StringConstraints(max_length=200)]
TimeZone = Annotated[str, StringConstraints(max_length=100, pattern=r"^[^\x00]*$")]


class WhatIfSchedule(_Request):
    """When to run: `cron` or `interval_ms`. What is not given is as the schedule of that id has it, if there is one."""

    schedule_id: Key | None = None
    cron: Cron | None = None
    interval_ms: int | None = None
    timezone: TimeZone | None = None


class Scheduling(_Request):
    """A schedule to create, which needs a name; or to change: then what is not given stays as it is."""

    name: Name | None = None
    cron: Cron | None = None
    interval_ms: int | None = None
    timezone: TimeZone = "UTC"
    params: dict[str, Any] = {}
    missed: Missed = "latest"
    overlap: Overlap = "allow"
    jitter_ms: int = Field(0, ge=0, le=86_400_000)


class WhichEvents(_Request):
    """Which events to tell of, and behind which to begin."""

    name: Name | None = None
    key: Key | None = None
    after: Annotated[str, StringConstraints(max_length=4_000)] | None = None


class Done(BaseModel):
    """Done."""

    done: Literal[True] = True
