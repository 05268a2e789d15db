"""The notebook of the example runs from top to bottom, and again in a new kernel, which finds what the first has computed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples/jupyter/tasks.ipynb"
RUN = """
import sys, nbformat, nbclient
notebook = nbformat.read(sys.argv[1], as_version=4)
nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
nbformat.write(notebook, sys.argv[2])
"""


def outputs(directory: Path, number: int) -> list[str]:
    """Run the notebook, and return what its cells print and show. Raises what a cell raises."""
    done = directory / f"{number}.ipynb"
    subprocess.run([sys.executable, "-c", RUN, str(NOTEBOOK), str(done)], cwd=directory, check=True, timeout=400)
    cells: list[dict[str, Any]] = json.loads(done.read_text("utf-8"))["cells"]
    found = [output for cell in cells for output in cell.get("outputs", ())]
    assert {output["output_type"] for output in found} <= {"stream", "execute_result"}, found
    return ["".join(output["text"] if "text" in output else output["data"]["text/plain"]) for output in found]


@pytest.mark.lasting
def test_it_runs_from_top_to_bottom_and_a_second_time(
    mongo_uri: str, database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"TASKMESH_URI": mongo_uri, "TASKMESH_DATABASE": database}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("JUPYTER_PREFER_ENV_PATH", "1")
    first, second = outputs(tmp_path, 1), outputs(tmp_path, 2)
    assert first[:2] == ["pi is about 3.14, of 8 new estimates\n", "SUCCESS, run by this worker\n"]
    assert second[:2] == ["pi is about 3.14, of 0 new estimates\n", "SUCCESS, run by another worker\n"]
    assert first[2].count("SUCCESS") == second[2].count("SUCCESS") == 8
