"""`web`: the dashboard and the REST API (extra `web`)."""

from __future__ import annotations

from typing import Annotated

import typer

from taskmesh.cli.connected import Collection, Database, Uri, mesh_at


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
    from taskmesh.web import serve  # noqa: PLC0415 — an extra

    mesh = mesh_at(uri, database, collection)
    serve(mesh, host=host, port=port, read_only=read_only, base_path=base_path, user_header=user_header)
