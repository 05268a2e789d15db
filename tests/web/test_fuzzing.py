"""Whatever its own OpenAPI document allows, and what it forbids: the API never fails, and answers as the document says."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.cli.shell import shell_in
from tests.web.serving import serve

pytestmark = pytest.mark.slow
EXAMPLES = int(os.environ.get("TASKMESH_EXAMPLES", "25"))
ENDLESS = "/events"
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture(scope="module")
def api(mongo_uri: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of an API with a little in its database."""
    directory: Path = tmp_path_factory.mktemp("fuzzed")
    with shell_in(directory, mongo_uri, "test_fuzzed") as shell:
        _, url = serve(shell)
        api = f"{url}/api/v1"
        headers = {"X-Taskmesh": "1"}
        httpx.post(f"{api}/tasks", json={"name": "a", "key": "0"}, headers=headers).raise_for_status()
        declared = {"name": "a", "cron": "0 3 * * *"}
        httpx.put(f"{api}/schedules/0", json=declared, headers=headers).raise_for_status()
        yield api
        httpx.post(f"{api}/bulk/delete", json={"where": "age>0s"}, headers=headers).raise_for_status()


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["allowed", "forbidden"])
def test_no_request_makes_the_api_fail(api: str, mode: GenerationMode) -> None:
    schema = schemathesis.openapi.from_url(f"{api}/openapi.json")
    asked = 0
    for found in schema.get_all_operations():
        assert isinstance(found, Ok), found
        operation = found.ok()
        if operation.path == ENDLESS:
            continue
        asked += 1
        if mode is GenerationMode.NEGATIVE and not (operation.query or operation.body):
            continue  # nothing can be wrong about a request that says nothing

        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def answers(case: Any) -> None:
            response = case.call(headers={"X-Taskmesh": "1"})
            case.validate_response(response, checks=CHECKS)

        answers()
    assert asked == 46
