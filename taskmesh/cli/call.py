"""Any operation of the REST API, without a server: `call`. A verb that is a row of that table needs no command of its own."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Annotated, Any

import typer

from taskmesh.cli import output
from taskmesh.cli.connected import App, Collection, Database, Uri, mesh_of, run_at
from taskmesh.mesh import TaskMesh
from taskmesh.operations.table import OPERATIONS, BadRequest, Operation


def _operations(incomplete: str) -> list[str]:
    return [name for name in OPERATIONS if name.startswith(incomplete)]


def call(
    operation: Annotated[
        str | None,
        typer.Argument(metavar="OPERATION", help="Its name. Without: list them.", autocompletion=_operations),
    ] = None,
    values: Annotated[
        list[str] | None, typer.Argument(metavar="FIELD=VALUE...", help="What it takes; a value is JSON or text.")
    ] = None,
    *,
    app: App = None,
    uri: Uri = None,
    database: Database = None,
    collection: Collection = None,
) -> None:
    """Perform an operation of the REST API on the database itself, and print its answer as JSON."""
    if operation is None:
        rows = [[each.name, " ".join(_named(each)), each.summary] for each in OPERATIONS.values()]
        output.console().print(output.table(["OPERATION", "TAKES", "WHAT"], rows), crop=False)
        return
    if (found := OPERATIONS.get(operation)) is None:
        raise typer.BadParameter(f"there is no operation {operation!r}: `taskmesh call` lists them")
    given = _read(found, values or [])

    async def perform(mesh: TaskMesh) -> None:
        try:
            with mesh.audit.acting_as(given["by"]) if given.get("by") else nullcontext():
                output.show_json(await found.perform_given(mesh, given))
        except BadRequest as error:
            raise typer.BadParameter(str(error)) from None

    run_at(mesh_of(app, uri, database, collection), perform)


def _named(operation: Operation) -> Iterable[str]:
    return (name if field.is_required() else f"[{name}]" for name, field in operation.fields.items())


def _read(operation: Operation, words: Iterable[str]) -> dict[str, Any]:
    """Read FIELD=VALUE. What a field takes as text is not read as JSON: a key may be `007` or `null`."""
    kinds = {
        name: schema
        for model in (operation.query, operation.body)
        if model is not None
        for name, schema in model.model_json_schema().get("properties", {}).items()
    }
    words = list(words)
    read = output.settings(words)
    for word in words:
        name, _, text = word.partition("=")
        schema = kinds.get(name, {})
        if any(kind.get("type") == "string" for kind in (schema, *schema.get("anyOf", ()))):
            read[name] = text
    return read
