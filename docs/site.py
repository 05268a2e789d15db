"""What the documentation site needs beside its pages: the decisions in its navigation, and links that stay inside."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

_DOCS = Path(__file__).parent
_LINK = re.compile(r"\[([^\]]*)\]\((\.\./[^)\s#]*)[^)]*\)")


def on_config(config: Any) -> Any:
    """Add the decision records to the last section."""
    decisions = sorted(path.relative_to(_DOCS).as_posix() for path in _DOCS.glob("decisions/*.md"))
    [section] = [entry for entry in config.nav if "How it is built" in entry]
    section["How it is built"].append({"Decisions": decisions})
    return config


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Name the files of the repository that are no pages, instead of linking to them."""

    def outside(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page.file.src_uri), match[2]))
        return match[0] if path.startswith("docs/") else f"{match[1]} (`{path}` in the repository)"

    return _LINK.sub(outside, markdown)
