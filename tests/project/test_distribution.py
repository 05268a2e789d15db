"""What pip is to be asked for: the name and the origin of this installation, in one place."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from taskmesh.model import distribution
from taskmesh.model.errors import ExtraMissing

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def installed_as(place: Path, name: str, origin: object = None) -> None:
    """Put the metadata of an installed distribution there, as pip leaves it."""
    metadata = place / f"{name.replace('-', '_')}-2.5.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}\nVersion: 2.5\n")
    (metadata / "entry_points.txt").write_text("[console_scripts]\ntaskmesh = taskmesh.cli:main\n")
    if origin is not None:
        (metadata / "direct_url.json").write_text(json.dumps(origin))


def run(script: str, first_on_the_path: Path) -> str:
    environment = os.environ | {"PYTHONPATH": f"{first_on_the_path}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, env=environment, cwd=ROOT
    )
    return done.stdout + done.stderr


def test_the_distribution_does_not_have_the_name_that_a_stranger_has_on_the_index() -> None:
    assert PROJECT["name"] != "taskmesh"
    assert PROJECT["scripts"] == {"taskmesh": "taskmesh.cli:main"}
    assert distribution.name() == PROJECT["name"], "the environment is older than pyproject.toml: make install"


@pytest.mark.parametrize(
    ("without", "script", "extra"),
    [
        ("typer", "from taskmesh.cli import main; main()", "cli"),
        ("uvicorn", "import taskmesh.web", "web"),
        ("cronsim", "from taskmesh import TaskMesh; TaskMesh().task(name='x', cron='* * * * *')(lambda: 1)", "cron"),
        ("prometheus_client", "from taskmesh.cli.worker.endpoints import worker_metrics; worker_metrics()", "metrics"),
        ("cryptography", "from taskmesh import AESCodec; AESCodec({'a': bytes(32)}, 'a')", "encryption"),
        ("pydantic_ai", "import taskmesh.integrations.pydantic_ai", "pydantic-ai"),
    ],
)
def test_a_missing_extra_is_installed_under_the_name_of_what_is_installed(
    tmp_path: Path, without: str, script: str, extra: str
) -> None:
    installed_as(tmp_path, "our-fork")
    said = run(f"import sys; sys.modules[{without!r}] = None; {script}", tmp_path)
    assert f"pip install 'our-fork[{extra}]'" in said.splitlines()[-1]
    assert without in said.splitlines()[-1]


def test_the_command_line_needs_no_other_extra(tmp_path: Path) -> None:
    others = ("starlette", "uvicorn", "jinja2", "prometheus_client", "opentelemetry", "cryptography", "cronsim")
    script = f"import sys; sys.modules.update(dict.fromkeys({others})); import taskmesh.cli.app; print('imported')"
    assert run(script, tmp_path) == "imported\n"


def test_a_clone_is_extended_from_where_it_is(tmp_path: Path) -> None:
    clone = tmp_path / "my clone"
    clone.mkdir()
    installed_as(tmp_path, "our-fork", {"url": clone.as_uri(), "dir_info": {"editable": True}})
    said = run("from taskmesh.model import distribution; print(distribution.install('web'))", tmp_path)
    assert said == f"pip install --editable '{clone}[web]'\n"


def test_a_clone_that_is_gone_is_not_named(tmp_path: Path) -> None:
    installed_as(tmp_path, "our-fork", {"url": (tmp_path / "gone").as_uri(), "dir_info": {}})
    assert run("from taskmesh.model import distribution; print(distribution.install('web'))", tmp_path) == (
        "pip install 'our-fork[web]'\n"
    )


def test_a_source_tree_that_is_only_on_the_path_has_the_name_of_pyproject(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distribution, "_installed", lambda: None)
    assert distribution.name() == PROJECT["name"]


def test_what_lacks_an_extra_is_an_import_error_too() -> None:
    with pytest.raises(ImportError, match="this needs not_there: pip install") as raised:
        distribution.check_extra("web", ("not_there", "os"), "this")
    assert isinstance(raised.value, ExtraMissing)


def test_no_document_and_no_message_installs_the_stranger() -> None:
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("taskmesh/**/*.py"), ROOT / "Dockerfile"]
    assert not [str(file) for file in files if "taskmesh[" in file.read_text().replace("error_code", "")]
