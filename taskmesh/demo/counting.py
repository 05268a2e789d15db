"""What one task does: tokenize a source file, and count."""

from __future__ import annotations

import hashlib
import io
import os
import sysconfig
import tokenize
from pathlib import Path
from typing import Any

_LEFT_OUT = frozenset({"site-packages", "dist-packages", "__pycache__"})


def library() -> Path:
    """Return the directory of the running Python's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def source_files(limit: int | None = None) -> list[str]:
    """Return the paths of its `.py` files, relative to it; the first `limit` of them."""
    found: list[str] = []
    root = library()
    for directory, directories, files in os.walk(root):
        directories[:] = sorted(name for name in directories if name not in _LEFT_OUT)
        found += [(Path(directory) / name).relative_to(root).as_posix() for name in files if name.endswith(".py")]
    return sorted(found)[:limit]


def count(path: str) -> dict[str, Any]:
    """Return lines, tokens and digest of a file; `tokens` is None for the few that are wrong on purpose."""
    source = (library() / path).read_bytes()
    tokens: int | None = 0
    try:
        tokens = sum(1 for _ in tokenize.tokenize(io.BytesIO(source).readline))
    except (SyntaxError, tokenize.TokenError, UnicodeError):
        tokens = None
    return {"lines": len(source.splitlines()), "tokens": tokens, "sha256": hashlib.sha256(source).hexdigest()}
