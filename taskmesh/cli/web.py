"""`web`: the dashboard and the REST API (extra `web`)."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Annotated

import typer

from taskmesh.cli.connected import Collection, Database, Uri, mesh_at
from taskmesh.errors import TaskMeshError

_NEEDED = ("starlette", "uvicorn", "jinja2")


def web(
    host: Annotated[str, typer.Option(help="Where it listens; another than loopback asks for a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65_535, help="Its port.")] = 8080,
    read_only: Annotated[bool, typer.Option("--read-only", help="Nobody can change anything.")] = False,
    base_path: Annotated[
        str, typer.Option(help="The path under which a proxy serves it, and which the proxy strips: /ops/mesh.")
    ] = "",
    user_header: Annotated[
        str | None,
        typer.Option(
            help="The header in which a proxy says who asks: X-Forwarded-User. Let nobody else reach the port then."
        ),
    ] = None,
    uri: Uri = None,
    database: Database = None,
    collection: Collection = None,
) -> None:
    """Serve the dashboard and the REST API until Ctrl-C."""
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        raise TaskMeshError(f"the dashboard needs {', '.join(missing)}: pip install 'taskmesh[web]'")
    mesh = mesh_at(uri, database, collection)
    import_module("taskmesh.web").serve(
        mesh, host=host, port=port, read_only=read_only, base_path=base_path, user_header=user_header
    )
