"""The reference of the documentation site has every public name. `make docs-site` builds it, and takes no dead link."""

from __future__ import annotations

import re
from typing import Any

import yaml

import taskmesh
from tests.docs.examples import ROOT

_NAMES = re.compile(r"^::: taskmesh\.(\w+)$", re.MULTILINE)


def test_the_reference_has_every_public_name_once() -> None:
    pages = (ROOT / "docs/reference").glob("*.md")
    named = sorted(name for page in pages for name in _NAMES.findall(page.read_text("utf-8")))
    assert named == sorted([*taskmesh.__all__, "testing"])


def test_every_page_can_be_reached() -> None:
    listed = {page for section in _configuration()["nav"] for pages in section.values() for page in pages}
    there = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert listed == {path for path in there if not path.startswith("decisions/")}


def test_nothing_is_fetched_while_it_is_read() -> None:
    theme = _configuration()["theme"]
    assert theme["font"] is False, "the theme would fetch its fonts"


def _configuration() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))
    return loaded
