"""`import taskmesh` loads what publishes and waits: neither faces nor people's tools nor workers, and no extra."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import taskmesh

ROOT = Path(__file__).parents[2]


def loaded(script: str) -> set[str]:
    """Return which modules there are after this, in a process of its own."""
    script += "; import sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(done.stdout.split())


@pytest.fixture(scope="module")
def of_taskmesh() -> set[str]:
    return loaded(
        "from taskmesh import TaskMesh, TaskOption, current_task; mesh = TaskMesh(); mesh.task(name='x')(lambda: 1)"
    )


def test_neither_faces_nor_tools_nor_workers_are_loaded_to_publish(of_taskmesh: set[str]) -> None:
    rooms = {".".join(name.split(".")[:2]) for name in of_taskmesh if name.startswith("taskmesh.")}
    assert rooms == {"taskmesh.mesh", *(f"taskmesh.{room}" for room in ("model", "store", "client", "consumer"))}
    beside_handlers = {name for name in of_taskmesh if name.startswith("taskmesh.consumer.")}
    assert beside_handlers == {
        f"taskmesh.consumer.{name}" for name in ("run", "run.context", "run.recording", "run.fingerprint", "lifespan")
    }


def test_no_extra_is_loaded_to_publish(of_taskmesh: set[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    lines = [line for extra in extras.keys() - {"all", "dev"} for line in extras[extra]]
    packages = {re.split(r"[<>=;\[ ]", line)[0].replace("-", "_") for line in lines}
    packages |= {"prometheus_client", "opentelemetry", "pydantic_ai", "fiftyone", "motor", "multiprocessing"}
    ours = of_taskmesh - loaded("import pymongo")  # which loads cryptography, where it is there, for certificates
    assert not packages & {name.partition(".")[0] for name in ours}


def test_it_is_no_more_modules_than_the_driver_and_pydantic_are() -> None:
    """A bound for what creeps in: what they load with us, 91 of our own, and a dozen of Python's."""
    more = loaded("import taskmesh") - loaded("import anyio, pymongo, pydantic.main, pydantic.type_adapter")
    assert len(more) <= 106, sorted(more)


def test_names_that_are_loaded_later_are_there_all_the_same() -> None:
    for name in taskmesh.__all__:
        assert getattr(taskmesh, name) is not None
    assert set(dir(taskmesh)) >= set(taskmesh.__all__)
    with pytest.raises(AttributeError, match=r"^module 'taskmesh' has no attribute 'consumers'$"):
        taskmesh.consumers  # noqa: B018 — that it is asked for is the test
