"""Running the Python of our documents."""

from __future__ import annotations

import ast
from typing import Any


async def run(code: str, namespace: dict[str, Any], document: str) -> Any:
    """Run lines that may await; return what they call `result`."""
    compiled = compile(code, document, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if (coroutine := eval(compiled, namespace)) is not None:
        await coroutine
    return namespace.get("result")
