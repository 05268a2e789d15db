"""Django's tasks on taskmesh: the backend keeps what Django promises, under each Django that can be had, and the site works."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pymongo import MongoClient

from tests.cli.shell import Shell

ROOT = Path(__file__).parents[2]
NEEDED = ["anyio", "motor", "pydantic", "pymongo", "Django>=6", "django-mongodb-backend>=6"]


def passes(python: str, module: str, settings: str, mongo_uri: str, database: str) -> str:
    """Run a module of tests under another interpreter, and return what it says. A warning is an error there too."""
    environment = os.environ | {
        "DJANGO_SETTINGS_MODULE": settings,
        "PYTHONPATH": str(ROOT),
        "TASKMESH_DATABASE": database,
        "TASKMESH_URI": mongo_uri,
    }
    command = [python, "-W", "error", "-m", "unittest", module]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^Ran [1-9]\d* tests? in", done.stderr, re.MULTILINE), done.stderr
    return done.stderr


def pythons() -> Iterator[str]:
    """Yield interpreters that Django 6 runs on."""
    if sys.version_info >= (3, 12):
        yield sys.executable
    for minor in (12, 13, 14):
        if found := shutil.which(f"python3.{minor}"):
            yield found
        yield from map(str, sorted(Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python")))


def python_with_django_6(place: Path) -> str:
    """Return an interpreter of a fresh environment with the newest Django; skip, loudly, where none can be made."""
    said = "there is no Python 3.12 or newer"
    for number, python in enumerate(pythons()):
        directory = place / f"venv{number}"
        made = subprocess.run([python, "-m", "venv", "--without-pip", directory], capture_output=True, check=False)
        if made.returncode != 0:  # a shim of an interpreter that is not there
            continue
        inside = str(directory / "bin" / "python")
        install = [sys.executable, "-m", "pip", "--python", inside, "install", "--quiet", "--disable-pip-version-check"]
        # Compiled is what is imported, a small part of Django.
        install += ["--no-compile", *NEEDED]
        done = subprocess.run(install, capture_output=True, text=True, timeout=400, check=False)
        if done.returncode == 0:
            return inside
        said = f"pip could not install Django 6 for {python}: {done.stderr[-500:]}"
    pytest.skip(f"DJANGO 6 WAS NOT TESTED: {said}")


def test_the_backend_keeps_djangos_promises_with_the_package_django_tasks(mongo_uri: str, database: str) -> None:
    passes(
        sys.executable,
        "tests.integrations.django_conformance",
        "tests.integrations.django_settings",
        mongo_uri,
        database,
    )


@pytest.mark.lasting
def test_the_backend_and_the_site_of_the_example_keep_their_promises_under_django_6(
    tmp_path: Path, mongo_uri: str, database: str, subtests: pytest.Subtests
) -> None:
    """In one environment, since making it takes as long as both."""
    python = python_with_django_6(tmp_path)
    with subtests.test("the backend"):
        conformance, settings = "tests.integrations.django_conformance", "tests.integrations.django_settings"
        said = passes(python, conformance, settings, mongo_uri, database)
        assert "skipped" not in said, "django-mongodb-backend is installed there"
    with MongoClient[dict[str, object]](mongo_uri) as client:
        client.drop_database(database)
    with subtests.test("the site"):
        passes(python, "tests.integrations.django_site", "examples.django.settings", mongo_uri, database)


def test_a_worker_is_started_by_one_command(taskmesh: Shell) -> None:
    (taskmesh.directory / "site_settings.py").write_text(
        'TASKS = {"default": {"BACKEND": "taskmesh.integrations.django.TaskmeshBackend"}}\nSECRET_KEY = "x"\nUSE_TZ = True\n'
    )
    (taskmesh.directory / "site_tasks.py").write_text(
        "from tests.integrations.django_here import tasks\n\n\n@tasks.task\ndef add(a, b):\n    return a + b\n"
    )
    taskmesh.environment["DJANGO_SETTINGS_MODULE"] = "site_settings"
    taskmesh.done("publish", "django", "k", '{"task": "site_tasks.add", "args": [40], "kwargs": {"b": 2}}')
    taskmesh.done("worker", "taskmesh.integrations.django:mesh", "--until-idle", TASKMESH_DATABASE=taskmesh.database)
    [entry] = taskmesh.done("show", "django", "k", "--json").json["task_state"]["worker_states"]
    assert (entry["state"], entry["returns"]) == ("SUCCESS", 42)
