"""pyproject.toml and constraints.txt agree, and the core stays small."""

from __future__ import annotations

import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found


@pytest.fixture(scope="module")
def tested() -> dict[str, Requirement]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(pin.name): pin for pin in pins}


def wanted_here(project: dict[str, Any]) -> list[Requirement]:
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *(line for lines in extras.values() for line in lines)]
    found = [Requirement(line) for line in lines]
    return [one for one in found if one.name != project["name"] and (one.marker is None or one.marker.evaluate())]


def test_the_core_needs_four_packages_and_no_more(project: dict[str, Any]) -> None:
    assert {Requirement(line).name for line in project["dependencies"]} == {"anyio", "motor", "pydantic", "pymongo"}


def test_all_holds_every_extra_that_is_for_users(project: dict[str, Any]) -> None:
    extras = project["optional-dependencies"]
    assert Requirement(extras["all"][0]).extras == set(extras) - {
        "all",
        "dev",
        "pydantic-ai",
    }  # that one brings 31 MB: by name alone


def test_every_package_has_a_lower_bound_and_a_tested_version(
    project: dict[str, Any], tested: dict[str, Requirement]
) -> None:
    for one in wanted_here(project):
        assert {part.operator for part in one.specifier} <= {">=", "=="}
        assert one.specifier, f"{one.name} has no lower bound"
        [pin] = tested[canonicalize_name(one.name)].specifier
        assert one.specifier.contains(pin.version), f"{one} is not what was tested: {pin}"


def test_what_is_tested_here_is_what_the_constraints_say(
    project: dict[str, Any], tested: dict[str, Requirement]
) -> None:
    for one in wanted_here(project):
        assert tested[canonicalize_name(one.name)].specifier.contains(version(one.name)), one.name
