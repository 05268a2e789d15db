"""Filters on tasks, and the text in which people write them: `status:FAIL name:resize error:timeout age>1h`.

Listings, bulk actions and purges share one filter, so that what was counted is what is changed.
"""

from __future__ import annotations

import re
import shlex
from typing import Annotated, Any, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from taskmesh.model.errors import MAX_DURATION_MS, InvalidOption
from taskmesh.model.ids import shown
from taskmesh.model.task import Standing, Status
from taskmesh.model.times import milliseconds, written

_TOKEN = re.compile(r"(?P<field>[a-z_]+)(?P<sign>[:<>])(?P<value>.*)\Z", re.DOTALL)

Text = Annotated[str, Field(min_length=1, max_length=512, pattern=r"^[^\x00]*$", strict=True)]
Age = Annotated[int, Field(ge=0, le=MAX_DURATION_MS)]


_EXPECTED = {
    "status": f"the status in a filter must be one of {', '.join([*Status, *get_args(Standing)])}",
    "lost": "lost in a filter must be yes or no (True or False)",
    "older_than_ms": "the age in a filter must be from 0 to 3660d (ten years; in milliseconds where it is a number)",
    "younger_than_ms": "the age in a filter must be from 0 to 3660d (ten years; in milliseconds where it is a number)",
} | {
    field: f"{said} in a filter must be a text of 1 to 512 characters"
    for field, said in (
        ("name", "the name"),
        ("queue", "the queue"),
        ("tags", "a tag"),
        ("group", "the group"),
        ("key_prefix", "the key"),
        ("error", "the error"),
        ("worker", "the worker"),
    )
}
"""What a value must be, by field."""
_UNKNOWN = "a filter has no field {!r}: there are " + ", ".join([*_EXPECTED])
_JOINS = ("and", "or", "not", "&&", "||")


class TaskFilter(BaseModel):
    """A filter on tasks. Unset fields match everything; a task has to match all fields that are set."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Text | None = None
    status: tuple[Status, ...] = ()
    """Any of these, as of now."""
    standing: tuple[Standing, ...] = ()
    """Only these among INIT tasks: `status:ready`, `status:scheduled`, `status:retrying`. Without a status: only these."""
    queue: Text | None = None
    group: Text | None = None
    tags: tuple[Text, ...] = ()
    """The task has all of these tags."""
    key_prefix: Text | None = None
    error: Text | None = None
    """Part of the reason of a failure. Case does not matter."""
    worker: Text | None = None
    """A worker with an entry in the task."""
    lost: bool | None = None
    """Whether an execution of it was lost: its worker died, hung or was cut off."""
    older_than_ms: Age | None = None
    """Published at least this long ago."""
    younger_than_ms: Age | None = None

    @model_validator(mode="before")
    @classmethod
    def _standing_is_a_status(cls, given: Any) -> Any:
        """A standing implies the status INIT."""
        if isinstance(given, dict) and given.get("standing") and not given.get("status"):
            return given | {"status": (Status.INIT,)}
        return given

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a filter from text. Raises `InvalidOption`.

        `name: status: queue: group: tag: key: error: worker:` with a value (in quotes if it has spaces), `lost:yes`, `lost:no`,
        `age>1h`, `age<5m`; a single word is the beginning of a key. Several statuses are separated by commas.
        """
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise InvalidOption(f"the filter {shown(text)} cannot be read: {error}") from None
        fields: dict[str, Any] = {}
        for word in words:
            name, value = _field(word)
            if name == "tags":
                value = (*fields.pop("tags", ()), *value)
            if name in fields:
                raise InvalidOption(f"the filter {shown(text)} says {name} twice")
            fields[name] = value
        return cls.checked(**fields)

    @classmethod
    def checked(cls, **fields: Any) -> Self:
        """Return a filter. Raises `InvalidOption`. `status` may also contain a standing of INIT, like `ready`."""
        try:
            return cls(**fields | _standing_in(fields))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            field = str(first["loc"][0])
            raise InvalidOption(
                f"{_EXPECTED.get(field, _UNKNOWN.format(field))}, got {shown(first['input'])}"
            ) from None

    def __str__(self) -> str:
        """Return the text that `parse` reads."""
        parts = [
            f"{name}:{_word(value)}"
            for name, value in (
                ("name", self.name),
                ("status", ",".join(self._statuses()) or None),
                ("queue", self.queue),
                ("group", self.group),
                ("key", self.key_prefix),
                ("error", self.error),
                ("worker", self.worker),
                ("lost", None if self.lost is None else "yes" if self.lost else "no"),
            )
            if value is not None
        ]
        parts += [f"tag:{_word(tag)}" for tag in self.tags]
        parts += [f"age>{written(self.older_than_ms)}"] if self.older_than_ms is not None else []
        parts += [f"age<{written(self.younger_than_ms)}"] if self.younger_than_ms is not None else []
        return " ".join(parts)

    def _statuses(self) -> list[str]:
        """Return the statuses as they are written, INIT by its standings if there are any."""
        return [
            word for s in self.status for word in (self.standing if s == Status.INIT and self.standing else (str(s),))
        ]

    @property
    def is_empty(self) -> bool:
        """Whether every task matches."""
        return self == type(self)()


def _standing_in(fields: dict[str, Any]) -> dict[str, Any]:
    """Separate the standings of INIT from the statuses. INIT itself includes all of them."""
    words = fields.get("status", ())
    known = get_args(Standing)
    if not (standing := tuple(word.lower() for word in words if str(word).lower() in known)):
        return {}
    status = tuple(word for word in words if str(word).lower() not in known)
    return (
        {"status": status, "standing": ()} if "INIT" in status else {"status": (*status, "INIT"), "standing": standing}
    )


def _word(text: str) -> str:
    """Return a text as one word, in the quotes that read best: 'its' in double quotes."""
    return f'"{text}"' if "'" in text and not set(text) & set('"\\') else shlex.quote(text)


def _field(word: str) -> tuple[str, Any]:
    """Read one word of a filter's text."""
    if word.lower() in _JOINS:
        raise InvalidOption(
            f"{word} is not part of a filter: all conditions have to hold, so write them one after the other, like "
            f"'name:resize status:FAIL,CANCELLED'; to ask for keys that begin with {word!r}, write key:{word}"
        )
    match = _TOKEN.match(word)
    if match is None:
        return "key_prefix", word
    field, sign, value = match.group("field", "sign", "value")
    if field == "age" and sign in "<>":
        return ("older_than_ms" if sign == ">" else "younger_than_ms"), milliseconds(value)
    if field in ("http", "https") or sign != ":":
        return "key_prefix", word
    if field == "status":
        return field, tuple(part.upper() for part in value.split(","))
    if field in ("name", "queue", "group", "error", "worker"):
        return field, value
    if field == "tag":
        return "tags", (value,)
    if field == "key":
        return "key_prefix", value
    if field == "lost":
        if value not in ("yes", "no"):
            raise InvalidOption(f"lost: must be yes or no, got {value!r}")
        return field, value == "yes"
    raise InvalidOption(
        f"a filter has no field {field}{sign}: use name: status: queue: group: tag: key: error: worker: lost: age> or age<; to "
        f"ask for keys that begin with {word!r}, write key:{shlex.quote(word)}"
    )
