"""The configuration of a publish: one object, created by `configure` and read by the pipelines that insert."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import datetime, timedelta
from typing import Any, Literal, Self

from taskmesh.model.dependency import After, Dependencies, OnDependencyFailure, checked_after, checked_policy
from taskmesh.model.errors import MAX_DURATION_MS, InvalidOption
from taskmesh.model.ids import checked_group, checked_text, shown
from taskmesh.model.labels import checked_labels
from taskmesh.model.option import OptionFields, TaskOption
from taskmesh.model.queue import checked_queue
from taskmesh.model.task import Task
from taskmesh.model.times import checked_time

OnSequenceFailure = Literal["continue", "block"]
_MOST_TAGS = 50
_MOST_FIELDS = 100
_FLAGS = (
    "update_existing_params",
    "not_update_running",
    "clean_success",
    "clean_failed",
    "run_again",
    "replace_running",
)
_DURATIONS = ("delay_ms", "debounce_ms", "debounce_max_ms", "throttle_ms")


class PublishSettings(OptionFields, total=False):
    """What `configure` and `publish` take as keywords: every field of `TaskOption`, and these."""

    queue: str
    start_time: datetime | None
    expire_time: datetime | None
    delay_ms: int | None
    session: Any
    group: str | None
    after: Dependencies | None
    on_dependency_failure: OnDependencyFailure
    sequence_key: str | None
    on_sequence_failure: OnSequenceFailure
    tags: Collection[str]
    fields: Mapping[str, Any]
    needs: Mapping[str, Any]
    update_existing_params: bool
    not_update_running: bool
    clean_success: bool
    clean_failed: bool
    run_again: bool
    replace_running: bool
    debounce_ms: int | None
    debounce_max_ms: int | None
    throttle_ms: int | None


@dataclass(frozen=True, slots=True)
class Configuration:
    """What a publisher may set beside the params."""

    queue: str = "default"
    """The queue of the task."""
    option: TaskOption = field(default_factory=TaskOption)
    tuned: Mapping[str, Any] = field(default_factory=dict)
    """The option fields that this publisher has set, as they are stored. Only these are changed in an existing task."""
    placed: Mapping[str, str | None] = field(default_factory=dict)
    """`queue` and `group` as far as this publisher, and not the definition, has set them: an existing task moves there."""
    start_time: datetime | None = None
    """The task does not start before this."""
    expire_time: datetime | None = None
    """A task that has not started by then becomes EXPIRED."""
    delay_ms: int | None = None
    """The task does not start until so long after the publish. Excludes `start_time`."""
    session: Any = None
    """The session of the caller's MongoDB transaction in which to publish, of an async or a blocking client."""
    group: str | None = None
    """The task's group, for limits by group."""
    after: After | None = None
    """What a new task waits for. An existing task keeps its dependencies."""
    on_dependency_failure: OnDependencyFailure = "fail"
    """What happens if one of these ends in any other way than SUCCESS."""
    sequence_key: str | None = None
    """Tasks of one key in one queue run one after the other, in the order of publication. An existing task keeps its key."""
    on_sequence_failure: OnSequenceFailure = "continue"
    """Whether the next task of its key goes on if this one FAILs, or waits until it is retried or deleted."""
    tags: tuple[str, ...] | None = None
    """Words by which the task is found. None: no words, and an existing task keeps its words."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """The publisher's own fields at the top of the task's document."""
    needs: Mapping[str, Any] = field(default_factory=dict)
    """Labels that a worker must have to run it. An existing task keeps its own."""
    update_existing_params: bool = False
    """For an existing task: set the new params. A running execution keeps the ones it has."""
    not_update_running: bool = False
    """For an existing task: raise `TaskRunning` instead of changing a running one."""
    clean_success: bool = False
    """For an existing task: remove its SUCCESS entries."""
    clean_failed: bool = False
    """For an existing task: remove its FAIL entries and counts."""
    run_again: bool = False
    """For an existing task: exactly one more run with the newest params, whatever its state."""
    replace_running: bool = False
    """As `run_again`, but a running execution is stopped, and its successor starts when its handler has ended."""
    debounce_ms: int | None = None
    """As `run_again`, but it starts only after nobody has published it again for so long."""
    debounce_max_ms: int | None = None
    """With `debounce_ms`: it starts at the latest so long after the first of these publications. None: no limit."""
    throttle_ms: int | None = None
    """As `run_again`, but for so long after a publication that counted, further ones do nothing."""

    def changed(self, **settings: Any) -> Self:
        """Return a copy with other settings, checked: any of `PublishSettings`. Raises `InvalidOption`."""
        checked_settings(settings)
        options = {name: value for name, value in settings.items() if name in TaskOption.model_fields}
        mine = {name: value for name, value in settings.items() if name not in options}
        placed: dict[str, str | None] = {name: mine[name] for name in ("queue", "group") if name in mine}
        changed = replace(self, **_checked(mine), placed={**self.placed, **placed})
        if changed.start_time is not None and changed.delay_ms is not None:
            raise InvalidOption("start_time and delay_ms were both set: use one of them")
        changed._check_policies()  # noqa: SLF001 — its own
        if changed.after is not None and (wrong := changed.for_existing):
            raise InvalidOption(
                f"after and {wrong[0]} were both set: after says what a new task waits for, {wrong[0]} changes an existing one; "
                "use one of them"
            )
        if not options:
            return changed
        option = changed.option.changed(**options)
        before, stored = changed.option.stored(), option.stored()
        # What follows from the given settings is set with them.
        tuned = {n: stored.get(n) for n in TaskOption.model_fields if n in options or stored.get(n) != before.get(n)}
        return replace(changed, option=option, tuned={**changed.tuned, **tuned})

    def _check_policies(self) -> None:
        """Raise `InvalidOption` for settings that contradict each other."""
        apart = (
            ("debounce_ms", "start_time"),
            ("debounce_ms", "delay_ms"),
            ("debounce_ms", "throttle_ms"),
            ("not_update_running", "replace_running"),
            ("not_update_running", "throttle_ms"),
        )
        for one, other in apart:
            if getattr(self, one) not in (None, False) and getattr(self, other) not in (None, False):
                raise InvalidOption(f"{one} and {other} were both set: use one of them")
        if self.debounce_max_ms is not None and (self.debounce_ms is None or self.debounce_max_ms < self.debounce_ms):
            raise InvalidOption(
                f"debounce_max_ms ({self.debounce_max_ms}) must go with a debounce_ms that is not longer, got "
                f"{self.debounce_ms}: set both"
            )

    def starts(self, now: datetime) -> datetime | None:
        """Return when a task that is published now may first be claimed. None: at once, or as before."""
        delay_ms = self.debounce_ms if self.delay_ms is None else self.delay_ms
        return self.start_time if delay_ms is None else now + timedelta(milliseconds=delay_ms)

    def since(self, now: datetime) -> dict[str, datetime]:
        """Return what a new task that is published now notes for later publications."""
        if self.debounce_ms is None and self.throttle_ms is None:  # most of them, and there are thousands per second
            return {}
        policies = {"debounced_since": self.debounce_ms, "throttled_since": self.throttle_ms}
        return {name: now for name, ms in policies.items() if ms is not None}

    @property
    def runs_again(self) -> bool:
        """Whether an existing task has to run once more, whatever its state."""
        return self.run_again or self.replace_running or self.debounce_ms is not None or self.throttle_ms is not None

    @property
    def marks(self) -> dict[str, Any]:
        """Tags and fields that this publisher has set, as they are stored at the top of a task's document."""
        return {**self.fields, "tags": list(self.tags)} if self.tags is not None else dict(self.fields)

    @property
    def given_after(self) -> After | None:
        """What the task waits for. None: for what it has waited for before, if it exists."""
        return self.after or (None if self.changes_existing else After())

    @property
    def for_existing(self) -> list[str]:
        """Which of the settings for existing tasks were set, by name."""
        return [flag for flag in (*_FLAGS, "debounce_ms", "throttle_ms") if getattr(self, flag)]

    @property
    def changes_existing(self) -> bool:
        """Whether an existing task has to be changed, or at least read."""
        return self.runs_again or any(getattr(self, flag) for flag in _FLAGS)

    @property
    def begins_anew(self) -> bool:
        """Whether an existing task that is finished may restart."""
        return self.runs_again or self.clean_success or self.clean_failed


def _checked(settings: dict[str, Any]) -> dict[str, Any]:
    """Check settings that are no options. Times are returned in UTC."""
    for name in ("start_time", "expire_time"):
        if settings.get(name) is not None:
            settings[name] = checked_time(name, settings[name])
    for name in _FLAGS:
        if not isinstance(settings.get(name, False), bool):
            raise InvalidOption(f"{name} must be True or False, got {shown(settings[name])}")
    for name in _DURATIONS:
        ms = settings.get(name)
        least = 0 if name == "delay_ms" else 1
        if ms is not None and not (isinstance(ms, int) and not isinstance(ms, bool) and least <= ms <= MAX_DURATION_MS):
            raise InvalidOption(
                f"{name} must be a whole number from {least} to {MAX_DURATION_MS} (ten years), got {shown(ms)}"
            )
    if (session := settings.get("session")) is not None and not hasattr(session, "in_transaction"):
        raise InvalidOption(f"session must be what client.start_session() gives, got {shown(session)}")
    if "queue" in settings:
        checked_queue(settings["queue"])
    if settings.get("group") is not None:
        checked_group(settings["group"])
    if "after" in settings:
        settings["after"] = checked_after(settings["after"])
    _check_sequence(settings)
    if "on_dependency_failure" in settings:
        checked_policy(settings["on_dependency_failure"])
    marks: dict[str, Callable[[Any], Any]] = {"tags": checked_tags, "fields": checked_fields, "needs": checked_needs}
    return settings | {name: checked(settings[name]) for name, checked in marks.items() if name in settings}


def _check_sequence(settings: Mapping[str, Any]) -> None:
    if settings.get("sequence_key") is not None:
        checked_text("sequence_key", settings["sequence_key"])
    policy = settings.get("on_sequence_failure", "continue")
    if not isinstance(policy, str) or policy not in ("continue", "block"):
        raise InvalidOption(f"on_sequence_failure must be 'continue' or 'block', got {shown(policy)}")


def checked_needs(needs: Any) -> dict[str, Any]:
    """Return what tasks need of a worker. Raises `InvalidOption`."""
    return checked_labels("needs", needs)


def checked_tags(tags: Any) -> tuple[str, ...] | None:
    """Return tags, each once. Raises `InvalidOption`."""
    if tags is None:
        return None
    if isinstance(tags, (str, bytes, Mapping)) or not isinstance(tags, Collection) or len(tags) > _MOST_TAGS:
        raise InvalidOption(f"tags must be a list of up to {_MOST_TAGS} texts, got {shown(tags)}")
    return tuple(dict.fromkeys(checked_text("a tag", tag) for tag in tags))


def checked_fields(own: Any) -> dict[str, Any]:
    """Return fields for the top of a task's document. Raises `InvalidOption` for invalid names, and those that are ours."""
    if not isinstance(own, Mapping) or len(own) > _MOST_FIELDS:
        raise InvalidOption(f"fields must be a mapping of up to {_MOST_FIELDS} values by name, got {shown(own)}")
    for name in own:
        checked_text("the name of a field", name)
        if name in Task.OWN_FIELDS:
            raise InvalidOption(f"fields: {name!r} is a field of taskmesh's own: give it another name")
        if name[0] in "_$" or "." in name:
            raise InvalidOption(
                f"fields: the name {name!r} must not begin with '_' or '$', nor have a '.': give it another name"
            )
    return dict(own)


def checked_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings. Raises `InvalidOption` for anything else.

    Remote input is checked before it is passed on as keywords: `name` or `by` would be taken for something else.
    """
    own = {f.name for f in fields(Configuration)} - {"option", "tuned", "placed"}
    if unknown := set(given) - own - set(TaskOption.model_fields):
        raise InvalidOption(
            f"unknown setting {', '.join(sorted(unknown))}; there are {', '.join(sorted(own))} and the options "
            f"{', '.join(TaskOption.model_fields)}"
        )
    return dict(given)
