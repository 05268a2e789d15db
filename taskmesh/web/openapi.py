"""The OpenAPI document of the REST API, made from the operations themselves."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, TypeAdapter

from taskmesh.model.distribution import VERSION
from taskmesh.operations.table import OPERATIONS, Operation

_SECURITY = {
    "token": {"type": "http", "scheme": "bearer", "description": "The token with which the dashboard was started."},
    "program": {
        "type": "apiKey",
        "in": "header",
        "name": "X-Taskmesh",
        "description": "Any value: a page of another origin cannot send it. Needed by what changes something, without a token.",
    },
}
_REF = "#/components/schemas/{model}"


class Problem(BaseModel):
    """Why a request was refused, and what to do."""

    error: str
    message: str


def document(prefix: str, *, needs_token: bool) -> dict[str, Any]:
    """Return the document. `prefix`: where the API is mounted."""
    schemas: dict[str, Any] = {}
    paths: dict[str, Any] = {}
    _schema(Problem, schemas)
    for operation in OPERATIONS.values():
        described = _described(operation, schemas)
        if operation.changes and not needs_token:
            described["security"] = [{"program": []}]
        paths.setdefault(operation.path, {})[operation.method.lower()] = described
    paths["/events"] = {"get": _events()}
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "taskmesh",
            "version": VERSION,
            "description": "Everything that the command line can do. What changes something has to come from the same "
            "origin, or carry the header `X-Taskmesh: 1` (any value), or a token.",
        },
        "servers": [{"url": prefix or "/"}],
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": _SECURITY},
        "security": [{"token": []}] if needs_token else [],
    }
    return found


def _described(operation: Operation, schemas: dict[str, Any]) -> dict[str, Any]:
    described: dict[str, Any] = {
        "operationId": operation.name.replace(".", "_"),
        "summary": operation.summary,
        "tags": [operation.path.split("/")[1].rstrip("s")],
        "parameters": _parameters(operation, schemas),
        "responses": {
            "200": _content("Done.", _schema(operation.result, schemas, "serialization")),
            **{
                status: _content(text, {"$ref": _REF.format(model="Problem")})
                for status, text in _PROBLEMS.items()
                if operation.changes or status not in ("403", "409", "413", "415")
            },
        },
    }
    if operation.body is not None:
        described["requestBody"] = {
            "required": any(field.is_required() for field in operation.body.model_fields.values()),
            "content": {"application/json": {"schema": _schema(operation.body, schemas)}},
        }
    return described


_PROBLEMS = {
    "400": "The request cannot be read.",
    "401": "The token is missing or wrong.",
    "403": "Read-only, or a request from another origin.",
    "404": "Not found.",
    "409": "The task is running, or is finished; the queue has unfinished tasks.",
    "413": "Too large.",
    "415": "The body is not JSON.",
    "422": "The request is not valid.",
    "503": "The database did not answer.",
}


def _parameters(operation: Operation, schemas: dict[str, Any]) -> list[dict[str, Any]]:
    schema = operation.query.model_json_schema(ref_template=_REF)
    schemas.update(schema.get("$defs", {}))
    required = schema.get("required", [])
    return [
        {
            "name": name,
            "in": "path" if name in operation.placed else "query",
            "required": name in required,
            "schema": _without_null(field),
            **({"description": field["description"]} if "description" in field else {}),
        }
        for name, field in schema.get("properties", {}).items()
    ]


def _without_null(schema: dict[str, Any]) -> dict[str, Any]:
    """A parameter is left out rather than null."""
    choices = [choice for choice in schema.get("anyOf", []) if choice.get("type") != "null"]
    return choices[0] if len(choices) == 1 else schema


def _schema(model: Any, schemas: dict[str, Any], mode: Any = "validation") -> dict[str, Any]:
    schema = TypeAdapter(model).json_schema(ref_template=_REF, mode=mode)
    schemas.update(schema.pop("$defs", {}))
    if isinstance(model, type) and issubclass(model, BaseModel) and "$ref" not in schema:
        schemas[model.__name__] = schema
        return {"$ref": _REF.format(model=model.__name__)}
    return schema


def _content(description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _events() -> dict[str, Any]:
    text = {"type": "string"}
    return {
        "operationId": "events",
        "summary": "Stream what happens to tasks, as server-sent events",
        "tags": ["event"],
        "parameters": [
            {"name": name, "in": "query", "required": False, "schema": text} for name in ("name", "key", "after")
        ],
        "responses": {
            "200": {
                "description": "Events, until the client goes.",
                "content": {"text/event-stream": {"schema": text}},
            },
            "422": _content(_PROBLEMS["422"], {"$ref": _REF.format(model="Problem")}),
        },
    }
