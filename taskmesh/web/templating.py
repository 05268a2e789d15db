"""What the templates show besides plain values: times, durations, JSON, and why a task does not run."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.resources import files
from typing import Any
from urllib.parse import urlencode
from zoneinfo import ZoneInfo

from jinja2 import DictLoader, Environment, StrictUndefined
from markupsafe import Markup, escape

from taskmesh.admin.explain import Explanation, Gate
from taskmesh.model.jsonable import to_json
from taskmesh.model.option import TaskOption
from taskmesh.model.task import Task
from taskmesh.model.times import duration

_MOST_JSON_CHARS = 20_000
_MOMENT = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:\.\d{1,6})?(?:Z|[+-]\d\d:\d\d)")
_SMALL = 0.1

# Read at import, where no event loop waits for the disk.
_HERE = files("taskmesh.web")
_TEMPLATES = {
    item.name: item.read_text("utf-8") for item in _HERE.joinpath("templates").iterdir() if item.name.endswith(".html")
}
STATIC = {item.name: item.read_bytes() for item in _HERE.joinpath("static").iterdir() if item.is_file()}
STATIC_VERSION = hashlib.sha256(b"".join(STATIC[name] for name in sorted(STATIC))).hexdigest()[:12]


def _duration(milliseconds: float | None) -> str:
    return "–" if milliseconds is None else duration(milliseconds)


def moment(value: datetime | None) -> Markup:
    """Return a time as an element that the page's script shows as "3 min ago", and that reads well without it."""
    if value is None:
        return Markup('<span class="dim">–</span>')
    at = value.astimezone(UTC) if value.tzinfo else value.replace(tzinfo=UTC)
    return Markup('<time datetime="{}" title="{} UTC">{}</time>').format(
        at.isoformat(), at.strftime("%Y-%m-%d %H:%M:%S.%f")[:-3], at.strftime("%Y-%m-%d %H:%M:%S")
    )


def with_times(text: str) -> Markup:
    """Return a text in which ISO 8601 times are written for people."""
    pieces: list[str] = []
    at = 0
    for match in _MOMENT.finditer(text):
        try:
            found = datetime.fromisoformat(match[0]).astimezone(UTC)
        except (ValueError, OverflowError):  # written by a user: there is no such day
            continue
        shown = Markup('<time class="exact" datetime="{}">{} UTC</time>')
        pieces += [
            escape(text[at : match.start()]),
            shown.format(found.isoformat(), found.strftime("%Y-%m-%d %H:%M:%S")),
        ]
        at = match.end()
    return Markup("").join([*pieces, escape(text[at:])])


def pretty(value: Any) -> str:
    """Return a value as readable JSON, cut where it is long: the API has all of it."""
    text = to_json(value, indent=2)
    if len(text) <= _MOST_JSON_CHARS:
        return text
    return f"{text[:_MOST_JSON_CHARS]}\n… {len(text) - _MOST_JSON_CHARS} more characters: the API has all of it"


def copied(params: Any) -> str | None:
    """Return params as JSON from which they can be published again; None if they are long, or not representable in JSON."""
    text = to_json(params, indent=2)
    return text if len(text) <= _MOST_JSON_CHARS and json.loads(text) == params else None


def copied_settings(task: Task, published: TaskOption) -> str:
    """Return the settings with which a copy of a task is published as the task was. `published`: what it would have without."""
    settings: dict[str, Any] = {"queue": task.queue}
    if task.group is not None:
        settings["group"] = task.group
    if task.tags:
        settings["tags"] = task.tags
    if task.needs:
        settings["needs"] = task.needs
    if task.extra:
        settings["fields"] = task.extra
    option = task.task_option
    settings |= {
        name: getattr(option, name)
        for name in TaskOption.model_fields
        if getattr(option, name) != getattr(published, name)
    }
    return to_json(settings, indent=2)


_WORDS = {"INIT": "pending", "SUCCESS": "succeeded", "FAIL": "failed"}


def word(status: Any) -> str:
    """Return a status, or the state of an execution, in a word for people; filters know it by its stored name."""
    return _WORDS.get(str(status), str(status).lower())


def absolute(value: datetime, timezone: str = "UTC") -> str:
    """Return a time as a text, to the minute where nothing is lost, in a zone."""
    try:
        local = value.astimezone(ZoneInfo(timezone))
    except (KeyError, ValueError, OSError):  # a schedule of a worker that knows more zones
        local = value.astimezone(UTC)
    return local.strftime("%a %Y-%m-%d %H:%M:%S" if local.second else "%a %Y-%m-%d %H:%M")


@dataclass(slots=True)
class Failures:
    """Failures of one task that ended with the same words."""

    reason: str
    worker_ids: list[str]
    times: list[datetime | None]


def failures_of(task: Task) -> list[Failures]:
    """Return the failures of a task, equal ones folded into one; the newest last."""
    found: dict[str, Failures] = {}
    for entry in task.task_state.worker_states:
        if entry.fail_reason:
            alike = found.pop(entry.fail_reason, Failures(entry.fail_reason, [], []))
            alike.worker_ids.append(entry.worker_id)
            alike.times.append(entry.fail_time)
            found[entry.fail_reason] = alike
    return list(found.values())


def number(value: float | None) -> str:
    """Return a number with its thousands separated."""
    if value is None:
        return "–"
    return f"{value:,.0f}".replace(",", " ") if float(value).is_integer() else f"{value:,.1f}".replace(",", " ")


def percent(share: float | None) -> str:
    """Return a share in per cent."""
    if share is None:
        return "–"
    return f"{share * 100:.1f} %" if share < _SMALL else f"{share * 100:.0f} %"


def query(**parameters: Any) -> str:
    """Return a query string of those parameters that are set."""
    given = {name: value for name, value in parameters.items() if value not in (None, "")}
    return urlencode(
        {name: value if isinstance(value, list) else str(value) for name, value in given.items()}, doseq=True
    )


@dataclass(frozen=True, slots=True)
class Why:
    """Why some workers can claim a task, or cannot, all for the same reasons."""

    worker_ids: list[str]
    claimable: bool
    next_claim_time: datetime | None
    shut: list[Gate]
    open: list[Gate]
    note: str | None


def whys_of(explanations: Iterable[Explanation]) -> list[Why]:
    """Return explanations, with identical ones of several workers merged. Workers that can claim the task come first."""
    found: dict[Any, Why] = {}
    for one in explanations:
        alike = (one.claimable, one.next_claim_time, *((gate.name, gate.open) for gate in one.gates))
        if alike in found:
            found[alike].worker_ids.append(one.worker_id)
            continue
        shut, open_ = [gate for gate in one.gates if not gate.open], [gate for gate in one.gates if gate.open]
        found[alike] = Why([one.worker_id], one.claimable, one.next_claim_time, shut, open_, one.note)
    return sorted(found.values(), key=lambda why: (not why.claimable, why.next_claim_time is None))


def option_rows(option: TaskOption) -> list[tuple[str, str, bool]]:
    """Return the fields of an option as text, and whether each differs from its default; those come first."""
    rows = []
    for name, field in TaskOption.model_fields.items():
        value = getattr(option, name)
        if value is None:
            text = "for ever" if name.startswith("retain") else "none"
        elif isinstance(value, tuple):
            text = ", ".join(value) or "any"
        elif name.endswith("_ms"):
            text = duration(value)
        else:
            text = str(value)
        rows.append((name, text, value != field.default))
    return sorted(rows, key=lambda row: not row[2])


def environment() -> Environment:
    """Return the templates, ready to use. Everything in them is escaped."""
    found = Environment(
        loader=DictLoader(_TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    found.filters.update(
        duration=_duration,
        percent=percent,
        moment=moment,
        pretty=pretty,
        number=number,
        with_times=with_times,
        word=word,
        absolute=absolute,
    )
    found.globals.update(query=query, static_version=STATIC_VERSION)
    return found
