"""The code of docs/frameworks.md is that of the examples, which have tests of their own."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.docs.examples import ROOT

_BLOCK = re.compile(r"^(?:<!-- from: (?P<file>\S+) -->\n)?```\w+\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


def code_of(file: Path) -> str:
    """Return the text of a file; of a notebook, that of its cells."""
    text = file.read_text("utf-8")
    if file.suffix != ".ipynb":
        return text
    cells = json.loads(text)["cells"]
    return "".join("".join(cell["source"]) + "\n" for cell in cells if cell["cell_type"] == "code")


def test_every_block_is_cut_out_of_the_file_that_it_names() -> None:
    blocks = list(_BLOCK.finditer((ROOT / "docs/frameworks.md").read_text("utf-8")))
    assert len(blocks) > 5
    for block in blocks:
        assert block["file"], f"no file is named for:\n{block['text']}"
        assert block["text"] in code_of(ROOT / block["file"]), f"{block['file']} has not:\n{block['text']}"


def test_every_example_of_a_framework_is_tested_and_explained() -> None:
    page = (ROOT / "docs/frameworks.md").read_text("utf-8")
    for directory in sorted(path for path in (ROOT / "examples").iterdir() if (path / "README.md").exists()):
        assert (ROOT / f"tests/examples/test_{directory.name}.py").exists(), directory
        assert directory.name == "agent" or f"examples/{directory.name}/" in page, directory
