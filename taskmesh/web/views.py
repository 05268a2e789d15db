"""What the templates show beside plain values: times, durations, JSON, and the bars of a task's executions."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from importlib.resources import files
from typing import Any
from urllib.parse import urlencode

from jinja2 import DictLoader, Environment, StrictUndefined
from markupsafe import Markup

from taskmesh.task import Task
from taskmesh.web.jsonable import jsonable, to_json

_MOST_JSON_CHARS = 20_000
_SVG_WIDTH = 1000.0
_SECOND, _MINUTE, _HOUR, _DAY = 1_000.0, 60_000.0, 3_600_000.0, 86_400_000.0

# Read at import, where no event loop waits for the disk.
_HERE = files("taskmesh.web")
_TEMPLATES = {
    item.name: item.read_text("utf-8") for item in _HERE.joinpath("templates").iterdir() if item.name.endswith(".html")
}
STATIC = {item.name: item.read_bytes() for item in _HERE.joinpath("static").iterdir() if item.is_file()}
STATIC_VERSION = hashlib.sha256(b"".join(STATIC[name] for name in sorted(STATIC))).hexdigest()[:12]


def duration(milliseconds: float | None) -> str:
    """Return a duration as people say it."""
    if milliseconds is None:
        return "–"
    value = abs(milliseconds)
    for unit, size in (("d", _DAY), ("h", _HOUR), ("min", _MINUTE), ("s", _SECOND)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g} ms"


def moment(value: datetime | None) -> Markup:
    """Return a time as an element that the page's script shows as "3 min ago", and that reads well without it."""
    if value is None:
        return Markup('<span class="dim">–</span>')
    at = value.astimezone(UTC) if value.tzinfo else value.replace(tzinfo=UTC)
    return Markup('<time datetime="{}" title="{} UTC">{}</time>').format(
        at.isoformat(), at.strftime("%Y-%m-%d %H:%M:%S.%f")[:-3], at.strftime("%Y-%m-%d %H:%M:%S")
    )


def pretty(value: Any) -> str:
    """Return a value as readable JSON, cut where it is long: the API has all of it."""
    text = to_json(value, indent=2)
    if len(text) <= _MOST_JSON_CHARS:
        return text
    return f"{text[:_MOST_JSON_CHARS]}\n… {len(text) - _MOST_JSON_CHARS} more characters: the API has all of it"


def number(value: float | None) -> str:
    """Return a number with its thousands apart."""
    if value is None:
        return "–"
    return f"{value:,.0f}".replace(",", " ") if float(value).is_integer() else f"{value:,.1f}".replace(",", " ")


def query(**parameters: Any) -> str:
    """Return a query string of those parameters that are set."""
    return urlencode({name: str(value) for name, value in parameters.items() if value not in (None, "")})


@dataclass(frozen=True, slots=True)
class Bar:
    """One execution in the timeline."""

    worker_id: str
    state: str
    running_id: str
    start: datetime
    end: datetime | None
    x: float
    width: float


def bars_of(task: Task, now: datetime) -> list[Bar]:
    """Return the executions of a task, the lost ones too, as bars between its publishing and its end."""
    state = task.task_state
    spans: list[tuple[str, str, str, datetime, datetime | None]] = [
        (loss.worker_id, "LOST", loss.running_id, loss.start_time, loss.ping_expire_time)
        for loss in state.losses
        if loss.start_time is not None
    ]
    for entry in state.worker_states:
        if entry.start_time is None:
            continue
        live = entry.state == "RUNNING" and entry.ping_expire_time is not None and entry.ping_expire_time > now
        end = entry.success_time or entry.fail_time or (None if live else entry.ping_expire_time)
        shown = entry.state if live or entry.state != "RUNNING" else "LOST"
        spans.append((entry.worker_id, shown, entry.running_id, entry.start_time, end))
    spans.sort(key=lambda span: span[3])
    if not spans:
        return []
    first = min(state.create_time, spans[0][3])
    last = max([end or now for *_, end in spans] + [first + timedelta(milliseconds=1)])
    scale = _SVG_WIDTH / ((last - first) / timedelta(milliseconds=1))

    def place(moment: datetime) -> float:
        return (moment - first) / timedelta(milliseconds=1) * scale

    return [
        Bar(
            worker,
            shown,
            running_id,
            start,
            end,
            round(place(start), 1),
            round(max(4.0, place(end or now) - place(start)), 1),
        )
        for worker, shown, running_id, start, end in spans
    ]


def environment() -> Environment:
    """Return the templates, ready to use. Everything in them is escaped."""
    found = Environment(
        loader=DictLoader(_TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    found.filters.update(duration=duration, moment=moment, pretty=pretty, number=number, jsonable=jsonable)
    found.globals.update(query=query, static_version=STATIC_VERSION)
    return found
