"""Changes of data, each of which becomes a task: what the handler gets, and what can be asked for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, get_args

from pydantic import ConfigDict

from taskmesh.model.errors import InvalidOption
from taskmesh.model.ids import shown
from taskmesh.model.read_only import ReadOnly

FullDocument = Literal["updateLookup", "default", "whenAvailable"]
OnLost = Literal["stop", "skip"]

STAGES = ("$match", "$project", "$addFields", "$set", "$unset", "$redact")
_DATABASE = re.compile(r'[^\s/\\."$*<>:|?\0]{1,63}')


class ChangeEvent(ReadOnly):
    """One change of a document, or of the collection, as the handler of `mesh.on_change` gets it."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    operation: str | None = None
    """`insert`, `update`, `replace`, `delete`; for the collection `drop`, `rename`. None if a `$project` leaves it out."""
    database: str | None = None
    collection: str | None = None
    document_id: Any = None
    """The `_id` of the document; None if the collection itself has changed."""
    full_document: dict[str, Any] | None = None
    """The document. After an update it is read together with the change: it may have later changes, and is None if it is gone."""
    update_description: dict[str, Any] | None = None
    """What an update changed, as MongoDB tells it: `updatedFields`, `removedFields`, `truncatedArrays`."""
    cluster_time: datetime | None = None
    """When it happened, by the server, to the second."""
    extra: dict[str, Any] = {}
    """Other fields of the event, like those that a `$addFields` of the pipeline adds."""
    cut: bool = False
    """Whether the event does not fit into a task: `full_document`, `update_description` and `extra` were left out."""


@dataclass(frozen=True)
class Watched:
    """Which changes are meant, and what happens if some are lost."""

    collection: str
    database: str | None
    """None: the mesh's own."""
    pipeline: tuple[Mapping[str, Any], ...]
    full_document: FullDocument
    on_lost: OnLost


def checked_watched(collection: Any, pipeline: Any, full_document: Any, on_lost: Any) -> Watched:
    """Return what has to be watched.

    Raises `InvalidOption`; errors that only the server detects are raised when a worker starts.
    """
    if not isinstance(collection, str) or not collection or "\0" in collection or "$" in collection:
        raise InvalidOption(
            f"on_change must be given the name of a collection, as 'orders' or 'shop.orders', got {shown(collection)}"
        )
    database, dot, rest = collection.partition(".")
    if dot and (not rest or not _DATABASE.fullmatch(database)):
        raise InvalidOption(f"collection must be 'orders', or with its database 'shop.orders', got {shown(collection)}")
    for name, value, known in (("full_document", full_document, FullDocument), ("on_lost", on_lost, OnLost)):
        if value not in get_args(known):
            choices = ", ".join(map(repr, get_args(known)))
            raise InvalidOption(f"{name} must be one of {choices}, got {shown(value)}")
    stages = _checked_pipeline(pipeline)
    return Watched(rest if dot else collection, database if dot else None, stages, full_document, on_lost)


def _checked_pipeline(pipeline: Any) -> tuple[Mapping[str, Any], ...]:
    if isinstance(pipeline, (str, Mapping)) or not isinstance(pipeline, Sequence):
        raise InvalidOption(f"pipeline must be a list of stages, like [{{'$match': …}}], got {shown(pipeline)}")
    for stage in pipeline:
        if not isinstance(stage, Mapping) or len(stage) != 1 or next(iter(stage)) not in STAGES:
            raise InvalidOption(
                f"pipeline may have the stages {', '.join(STAGES)}, each a dict with that one key, got {shown(stage)}"
            )
        if _touches_id(*next(iter(stage.items()))):
            raise InvalidOption(
                f"pipeline must leave _id alone, by which a change is known, and got {shown(stage)}: take _id out of the stage"
            )
    return tuple(pipeline)


def _touches_id(name: str, value: Any) -> bool:
    fields = [value] if isinstance(value, str) else list(value) if isinstance(value, (Mapping, Sequence)) else []
    own = [field for field in fields if isinstance(field, str) and (field == "_id" or field.startswith("_id."))]
    if name in ("$match", "$redact") or not own:
        return False
    return not (name == "$project" and own == ["_id"] and value["_id"] in (1, True))
