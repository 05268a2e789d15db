"""Tasks as their workers have registered them: queue, option and the schema of the params, for publishers without the code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import islice
from typing import Any

from taskmesh.client.params import OTHERS, check_mapping, check_not_given, checked_size
from taskmesh.client.returns import PLAIN
from taskmesh.model.configuration import Configuration
from taskmesh.model.dependency import After
from taskmesh.model.errors import InvalidParams
from taskmesh.model.labels import from_words
from taskmesh.model.loop import check_published
from taskmesh.model.option import TaskOption
from taskmesh.store.mongodb.driver import Document
from taskmesh.store.payloads import marked_secret
from taskmesh.store.values import MAX_BYTES, storable

_MOST_MISFITS = 5


class RegisteredDefinition:
    """What some worker has registered about the tasks of a name; for an unregistered name, the defaults."""

    returns = PLAIN

    def __init__(self, name: str, document: Document | None) -> None:
        self.name = name
        self.found = document is not None
        self.configuration = Configuration()
        self._schema: Any = True
        self._is_loop = bool(document and document.get("loop"))
        self.broadcast = bool(document and document.get("broadcast"))
        self.most_bytes = MAX_BYTES
        """Of params."""
        self.encrypted = bool(document and document.get("encrypted"))
        self._secret: list[str] = (document or {}).get("secret") or []
        if document is not None:
            # A worker of another release may have options that this one does not know.
            option = {field: value for field, value in document["option"].items() if field in TaskOption.model_fields}
            needs = from_words(document.get("needs") or ())
            self.configuration = Configuration(queue=document["queue"], option=TaskOption(**option), needs=needs)
            self._schema = json.loads(document["schema"]) if document.get("schema") else True

    @property
    def schema(self) -> Any:
        """The JSON schema of the params. True: anything."""
        return self._schema

    def to_store(self, params: Mapping[str, Any] | None, after: After | None = None) -> tuple[dict[str, Any], int]:
        """Return params as they are stored, and their size. Raises `InvalidParams` for what does not fit the handler."""
        from taskmesh.client.json_schema import misfits  # noqa: PLC0415 — few publish without the handler

        check_published(self.name, is_loop=self._is_loop)
        if params is not None:
            check_mapping(self.name, params)
        stored = dict(params or {})
        size = checked_size(self.name, stored, self.most_bytes)
        fed = after.params if after is not None else ()
        check_not_given(self.name, stored, fed)
        schema = self._schema
        if isinstance(schema, dict):
            schema = {**schema, "required": [name for name in schema.get("required", ()) if name not in fed]}
        if found := list(islice(misfits(storable(stored)[0], schema), _MOST_MISFITS)):
            raise InvalidParams(f"task {self.name!r}, as its workers have registered it: {'; '.join(found)}")
        return {name: marked_secret(value) if self._hides(name) else value for name, value in stored.items()}, size

    def _hides(self, name: str) -> bool:
        """Whether a param must not be shown."""
        named = self._schema.get("properties", {}) if isinstance(self._schema, dict) else {}
        return name in self._secret or (OTHERS in self._secret and name not in named)
