"""docker-compose.yml, as far as it can be checked where no docker runs."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from taskmesh.web.security import SHORTEST_TOKEN

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docker-compose.yml"


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(FILE.read_text())["services"]
    return found


def test_it_is_valid_by_the_compose_specifications_schema() -> None:
    check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(FILE)]
    done = subprocess.run(check, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_mistake_in_it_would_be_found(tmp_path: Path) -> None:
    broken = tmp_path / "docker-compose.yml"
    broken.write_text(FILE.read_text().replace("healthcheck:", "health_check:"))
    check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(broken)]
    done = subprocess.run(check, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "health_check" in done.stdout


def test_the_database_is_reachable_from_this_machine_alone(services: dict[str, Any]) -> None:
    for service in services.values():
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:")


def test_the_health_check_initiates_the_replica_set_that_the_workers_ask_for(services: dict[str, Any]) -> None:
    uri = services["worker"]["environment"]["TASKMESH_URI"]
    script = services["mongo"]["healthcheck"]["test"][-1]
    assert uri == "mongodb://127.0.0.1:27017/?replicaSet=rs0"
    assert 'rs.initiate({ _id: "rs0", members: [{ _id: 0, host: "127.0.0.1:27017" }] })' in script
    assert services["mongo"]["command"][:3] == ["mongod", "--replSet", "rs0"]
    assert "$" not in script, "compose would take it for a variable"


def test_the_dashboard_can_be_reached_through_its_published_port(services: dict[str, Any]) -> None:
    web = services["web"]
    assert web["network_mode"] == "service:mongo", "whose ports are published"
    assert "127.0.0.1:8080:8080" in services["mongo"]["ports"]
    assert web["command"] == ["web", "--host", "0.0.0.0"], "Docker passes requests on from outside of the container"
    _, _, token = web["environment"]["TASKMESH_WEB_TOKEN"].removesuffix("}").partition(":-")
    assert len(token) >= SHORTEST_TOKEN, "it would refuse to start"
    assert web["environment"]["TASKMESH_URI"] == services["worker"]["environment"]["TASKMESH_URI"]
    assert web["depends_on"]["mongo"]["condition"] == "service_healthy"


def test_workers_and_dashboard_can_be_built_with_packages_of_the_application(services: dict[str, Any]) -> None:
    assert services["worker"]["build"] == services["web"]["build"] == "${TASKMESH_BUILD:-.}"


def test_a_worker_waits_for_the_database_and_has_time_to_stop(services: dict[str, Any]) -> None:
    worker = services["worker"]
    assert worker["depends_on"]["mongo"]["condition"] == "service_healthy"
    assert worker["network_mode"] == "service:mongo"
    assert int(worker["stop_grace_period"].removesuffix("s")) > 30


def test_what_the_image_copies_is_in_the_build_context() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copies = [line.split()[1:-1] for line in (ROOT / "Dockerfile").read_text().splitlines() if line.startswith("COPY")]
    copied = {name for names in copies for name in names}
    assert copied == kept
    assert all((ROOT / name).exists() for name in copied)


def test_every_command_runs_in_the_image() -> None:
    """`docker run IMAGE web` must not ask for a package. A database it has not: it is another container's.

    Nor has it what handlers need: an image of an application's own adds that, as pydantic-ai.
    """
    [installed] = re.findall(r"'\.\[([\w,]+)\]'", (ROOT / "Dockerfile").read_text())
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(installed.split(",")) == extras.keys() - {"all", "dev", "embedded", "pydantic-ai"}
