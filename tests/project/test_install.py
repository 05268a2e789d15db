"""The wheel and the sdist in empty environments, as users install them: each Python that is found here, each extra."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
VERSIONS = ("3.11", "3.12", "3.13", "3.14")
pytestmark = [pytest.mark.slow, pytest.mark.lasting]

WITH = {
    "cli": "from taskmesh.cli.app import app",
    "cron": "import taskmesh; taskmesh.TaskMesh().task(name='x', cron='0 * * * * *')(lambda: 1)",
    "embedded": "from taskmesh.embedded import find_mongod; assert find_mongod()",
    "encryption": (
        "from taskmesh.integrations.encryption import AESCodec; AESCodec(keys={'a': AESCodec.new_key()}, current='a')"
    ),
    "metrics": "from taskmesh.integrations.metrics import WorkerMetrics; WorkerMetrics()",
    "process": (
        "import taskmesh; from taskmesh.consumer.subprocess.handler_reference import reference;"
        "reference(taskmesh.TaskMesh().task(name='x', run='process')(lambda: 1))"
    ),
    "pydantic-ai": "import taskmesh.integrations.pydantic_ai",
    "speed": "from taskmesh.cli.worker.system import loop_factory; assert loop_factory()",
    "tracing": "import opentelemetry.trace",
    "web": "import taskmesh, taskmesh.web; taskmesh.web.create_app(taskmesh.TaskMesh())",
}
"""What each extra is for, in a line that does it."""
WITHOUT = WITH | {"cli": "from taskmesh.cli import main; main()"}
"""What names the extra where it is missing."""
SILENT = {"speed", "tracing"}
"""Without these nothing is an error: another event loop is used; who traces brings OpenTelemetry."""

ONE_TASK = """
import asyncio
from taskmesh import TaskMesh

mesh = TaskMesh()

@mesh.task
async def double(n: int) -> int:
    return 2 * n

async def main() -> None:
    async with mesh:
        handle = await double.publish("k", n=21)
        consumer = mesh.consumer()
        running = asyncio.create_task(consumer.run(until_idle=True))
        print(await handle.result(timeout=60))
        await running

asyncio.run(main())
"""
TYPED = """
from taskmesh import TaskMesh, TaskOption

mesh = TaskMesh()

@mesh.task(option=TaskOption(max_unexpected_retries=1))
async def double(n: int) -> int:
    return 2 * n

async def publishes() -> int:
    handle = await double.publish("k", n=21)
    await double.publish("k", n="21")  # refused
    return await handle.result()
"""


@cache
def interpreter(version: str) -> str | None:
    """Return a Python of this version: one on PATH, or one of pyenv's."""
    of_pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = [*sorted(map(str, of_pyenv.glob(f"{version}.*/bin/python"))), shutil.which(f"python{version}") or ""]
    for python in filter(None, found):
        asked = [python, "-c", "import sys, venv; print('%d.%d' % sys.version_info[:2])"]
        if subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip() == version:
            return python
    return None


def run(*command: str | Path, cwd: Path, status: int = 0, env: Mapping[str, str] | None = None) -> str:
    """Return what it says. It sees nothing of this environment but PATH and where pip looks."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TASKMESH", "VIRTUAL_ENV"))
    }
    done = subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        env=kept | dict(env or {}),
        timeout=300,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheel and the sdist, built out of what is committed or about to be, and of nothing that lies about."""
    place = tmp_path_factory.mktemp("built")
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT).splitlines()
    for name in listed:
        if (ROOT / name).is_file():
            (place / "clone" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, place / "clone" / name)
    run(sys.executable, "-m", "venv", "--without-pip", place / "env", cwd=place)
    python = place / "env/bin/python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "hatchling", cwd=place)
    run(python, "-m", "hatchling", "build", "-d", place / "dist", cwd=place / "clone")
    return {"wheel": next(place.glob("dist/*.whl")), "sdist": next(place.glob("dist/*.tar.gz"))}


@pytest.fixture
def installed(tmp_path: Path) -> Callable[..., Path]:
    """Install something into an empty environment, and return its Python."""

    def install(what: str, python: str = sys.executable, constraints: Path = ROOT / "constraints.txt") -> Path:
        run(python, "-m", "venv", "--without-pip", tmp_path / "env", cwd=tmp_path)
        own = tmp_path / "env/bin/python"
        pip = (
            sys.executable,
            "-m",
            "pip",
            "--python",
            own,
            "install",
            "--quiet",
            "--no-compile",
            "--constraint",
            constraints,
        )
        run(*pip, what, cwd=tmp_path)
        return own

    return install


def declared() -> dict[str, Any]:
    """What pyproject.toml says of the project."""
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project


def works(python: Path, extras: Iterable[str], directory: Path) -> None:
    """Each of these extras does what it is for, the command line starts, and a task runs."""
    for extra in extras:
        run(python, "-c", WITH[extra], cwd=directory)
    assert "worker" in run(python.with_name("taskmesh"), "--help", cwd=directory)
    (directory / "one.py").write_text(ONE_TASK)
    assert run(python, "one.py", cwd=directory).splitlines()[-1] == "42"


def found_or_skipped(version: str) -> str:
    python = interpreter(version)
    if python is None:
        pytest.skip(f"NOT TESTED: there is no Python {version} on PATH and none of pyenv's")
    return python


@pytest.mark.parametrize("version", VERSIONS)
def test_the_core_works_alone_and_names_the_extra_that_is_missing(
    version: str, built: dict[str, Path], installed: Callable[..., Path], tmp_path: Path
) -> None:
    python = installed(str(built["wheel"]), found_or_skipped(version))
    assert run(python, "-c", "import taskmesh; print(taskmesh.__file__)", cwd=tmp_path).startswith(str(tmp_path))
    for extra, script in WITHOUT.items():
        if extra in SILENT:
            continue
        said = run(python, "-c", script, cwd=tmp_path, status=1).splitlines()[-1]
        assert f"pip install 'taskmesh-mongodb[{extra}]'" in said, said
    assert run(python.with_name("taskmesh"), "--help", cwd=tmp_path, status=1) == (
        "taskmesh: the command line needs typer and rich: pip install 'taskmesh-mongodb[cli]'\n"
    )


@pytest.mark.parametrize("version", VERSIONS)
def test_with_all_extras_a_task_runs_on_the_embedded_mongod(
    version: str, built: dict[str, Path], installed: Callable[..., Path], tmp_path: Path
) -> None:
    works(installed(f"{built['wheel']}[all,pydantic-ai]", found_or_skipped(version)), WITH, tmp_path)


def test_the_oldest_releases_that_are_declared_will_do(
    built: dict[str, Path], installed: Callable[..., Path], tmp_path: Path
) -> None:
    """Who pins these gets a command line that starts, a dashboard, and a task that runs."""
    of_all = WITH.keys() - {"pydantic-ai"}  # which brings a newer pydantic
    extras = declared()["optional-dependencies"]
    asked = [*declared()["dependencies"], *(each for extra in of_all for each in extras[extra])]
    (tmp_path / "oldest.txt").write_text("\n".join(each.replace(">=", "==") for each in asked))
    works(installed(f"{built['wheel']}[all]", constraints=tmp_path / "oldest.txt"), of_all, tmp_path)


def test_every_extra_is_tried() -> None:
    extras = declared()["optional-dependencies"]
    assert WITH.keys() == extras.keys() - {"all", "dev"}


@pytest.mark.parametrize("extra", WITH)
def test_an_extra_brings_all_that_it_needs(
    extra: str, built: dict[str, Path], installed: Callable[..., Path], tmp_path: Path
) -> None:
    python = installed(f"{built['wheel']}[{extra}]")
    run(python, "-c", WITH[extra], cwd=tmp_path)


def test_an_sdist_holds_what_it_needs_and_installs(
    built: dict[str, Path], installed: Callable[..., Path], tmp_path: Path
) -> None:
    with tarfile.open(built["sdist"]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        archive.extractall(tmp_path / "unpacked", filter="data")
    beside = {name for name in names if not name.startswith("taskmesh/")}
    assert beside == {"pyproject.toml", "PKG-INFO", "README.md", "CHANGELOG.md", "LICENSE", ".gitignore"}
    with zipfile.ZipFile(built["wheel"]) as archive_of_wheel:
        packaged = {name for name in archive_of_wheel.namelist() if name.startswith("taskmesh/")}
    assert {"taskmesh/py.typed", "taskmesh/web/templates/base.html"} <= packaged
    assert packaged == {name for name in names if name.startswith("taskmesh/")}
    assert not [name for name in packaged if name.endswith((".pyc", ".pyo"))]
    for file in (tmp_path / "unpacked").rglob("*"):
        if file.is_file():
            told = re.findall(
                rb"/(?:home|Users|root|work)/[\w./-]+|" + re.escape(str(ROOT).encode()), file.read_bytes()
            )
            assert not told, f"{file.name} names a path of some machine: {told}"
    python = installed(str(built["sdist"]))
    run(python, "-c", "import taskmesh", cwd=tmp_path)


def test_a_type_checker_sees_our_types_in_what_was_installed(
    built: dict[str, Path], installed: Callable[..., Path], tmp_path: Path
) -> None:
    python = installed(str(built["wheel"]))
    (tmp_path / "user.py").write_text(TYPED)
    mypy = (sys.executable, "-m", "mypy", "--strict", "--config-file=", f"--cache-dir={tmp_path}/cache")
    said = run(*mypy, "--python-executable", python, "user.py", cwd=tmp_path, status=1)
    assert re.findall(r"^user\.py:(\d+): error: .*\[(.*)\]$", said, re.MULTILINE) == [("12", "arg-type")], said


COUNT_CALLS = """
import sys

calls = 0

def count(frame, event, argument):
    global calls
    calls += event in ("call", "c_call")

sys.setprofile(count)
import {package}
sys.setprofile(None)
print(calls)
"""


def test_importing_us_costs_little_more_than_importing_the_driver(
    built: dict[str, Path], installed: Callable[..., Path], tmp_path: Path
) -> None:
    """At most 2.5 times as many calls (2.2 when this was written): they are as many on a busy machine as on an idle one."""
    python = installed(str(built["wheel"]))
    calls: dict[str, int] = {}
    for package in ("pymongo", "taskmesh"):
        run(python, "-c", f"import {package}", cwd=tmp_path)  # compiled from now on
        calls[package] = int(run(python, "-c", COUNT_CALLS.format(package=package), cwd=tmp_path))
    assert calls["taskmesh"] <= 2.5 * calls["pymongo"], calls
