"""deploy/, as the programs that load them judge them, or those programs' own schemas and types."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.project.wheels import downloaded_wheel

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
ALERTS = DEPLOY / "alerts.yml"

SCHEMAS = "kubernetes-validate==1.37.0"
"""A package that carries them: 22 MB in 17,000 files, so it is read out of its wheel and not installed."""
_OF_KUBERNETES = "kubernetes_validate/kubernetes-json-schema/v1.37.0-local-strict/"

KINDS = {
    "Deployment": "deployment-apps-v1",
    "Service": "service-v1",
    "PodDisruptionBudget": "poddisruptionbudget-policy-v1",
    "HorizontalPodAutoscaler": "horizontalpodautoscaler-autoscaling-v2",
}

OF_NPM = ("@grafana/schema@13.2.3", "@kubernetes-models/keda@2.0.0", "typescript@5.9.3")
"""Grafana's own types of a dashboard, and KEDA's custom resources as types."""
TYPED = """
import type {{ Dashboard }} from "@grafana/schema";
import type {{ IScaledObject }} from "@kubernetes-models/keda/keda.sh/v1alpha1/ScaledObject";
import type {{ ITriggerAuthentication }} from "@kubernetes-models/keda/keda.sh/v1alpha1/TriggerAuthentication";

// In a file an enum's value is its text.
type Written<T> = T extends string ? (string extends T ? string : `${{T}}`)
  : T extends (infer Item)[] ? Written<Item>[]
  : T extends object ? {{ [Name in keyof T]: Written<T[Name]> }} : T;

export const written: Written<{type}> = {value};
"""

FIRES = {
    "TaskmeshNoWorkers": ['taskmesh_workers{state="stopped"}', "2x30"],
    "TaskmeshLag": ["taskmesh_oldest_claimable_seconds", "90x30"],
    "TaskmeshFailures": ['taskmesh_tasks{status="FAIL",name="mail"}', "0+5x30"],
    "TaskmeshQueuePaused": ['taskmesh_queue_paused{queue="mail"}', "1x90"],
    "TaskmeshLeaseNearlyLost": ['taskmesh_lease_left_ratio_bucket{le="0.1",name="mail"}', "0+1x30"],
    "TaskmeshLeasesLost": ['taskmesh_executions_total{outcome="lost",name="mail"}', "0+1x30"],
    "TaskmeshWorkerCutOff": ['taskmesh_silent_seconds{instance="a"}', "0+20x30"],
    "TaskmeshStreamSilent": ['taskmesh_stream_silent_seconds{instance="a"}', "0+20x30"],
    "TaskmeshClaimsContended": ["taskmesh_claims_won_total", "0+1600x90", "taskmesh_claims_tried_total", "0+4000x90"],
}
"""Series, minute by minute, of which each alert has to tell."""
QUIET = {
    "TaskmeshNoWorkers": ['taskmesh_workers{state="running"}', "2x30"],
    "TaskmeshLag": ["taskmesh_oldest_claimable_seconds", "3x30"],
    "TaskmeshFailures": ['taskmesh_tasks{status="FAIL",name="mail"}', "40x30"],
    "TaskmeshClaimsContended": ["taskmesh_claims_won_total", "0+2400x90", "taskmesh_claims_tried_total", "0+4000x90"],
}
"""Series of a fleet that is well: these must not fire."""


@cache
def promtool() -> str:
    found = os.environ.get("PROMTOOL") or shutil.which("promtool")
    if found is None:
        pytest.skip("NOT CHECKED: promtool is neither on PATH nor in PROMTOOL (Debian: the package prometheus)")
    return found


def accepted(*command: str | Path) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_prometheus_loads_the_alert_rules() -> None:
    rules = sum(len(group["rules"]) for group in yaml.safe_load(ALERTS.read_text())["groups"])
    assert f"SUCCESS: {rules} rules found" in accepted(promtool(), "check", "rules", "--lint-fatal", ALERTS)


def test_every_query_of_the_dashboard_is_promql(tmp_path: Path) -> None:
    panels = json.loads((DEPLOY / "grafana.json").read_text())["panels"]
    asked = [target["expr"] for panel in panels for target in panel.get("targets", [])]
    known = [re.sub(r"\$__(rate_interval|interval|range)", "5m", query) for query in asked]
    rules = [{"record": f"panel:query:{number}", "expr": query} for number, query in enumerate(known)]
    file = tmp_path / "queries.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    assert f"SUCCESS: {len(asked)} rules found" in accepted(promtool(), "check", "rules", file)


def test_each_alert_fires_when_it_should_and_not_when_all_is_well(tmp_path: Path) -> None:
    alerts = {rule["alert"] for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]}
    assert alerts == FIRES.keys()
    tests = []
    for name, series in [*FIRES.items(), *QUIET.items()]:
        given = [{"series": one, "values": values} for one, values in zip(series[::2], series[1::2], strict=True)]
        minutes = 80 if name in ("TaskmeshQueuePaused", "TaskmeshClaimsContended") else 25
        tests.append(
            {
                "interval": "1m",
                "input_series": given,
                "promql_expr_test": [
                    {
                        "expr": f'count(ALERTS{{alertname="{name}", alertstate="firing"}}) or vector(0)',
                        "eval_time": f"{minutes}m",
                        "exp_samples": [{"labels": "{}", "value": int(series is FIRES[name])}],
                    }
                ],
            }
        )
    file = tmp_path / "tests.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": tests}))
    accepted(promtool(), "test", "rules", file)


@pytest.mark.parametrize("unit", ["taskmesh.service", "taskmesh-web.service"])
def test_systemd_takes_the_units(unit: str, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("NOT CHECKED: there is no systemd-analyze on this machine")
    text = (DEPLOY / unit).read_text()
    wanted = re.findall(r"^ExecStart=(\S+)", text, re.MULTILINE)
    assert wanted == ["/opt/app/.venv/bin/taskmesh"]
    text = text.replace(wanted[0], f'"{Path(sys.executable).with_name("taskmesh")}"')
    (tmp_path / unit).write_text(text)
    assert unit not in accepted("systemd-analyze", "verify", tmp_path / unit)
    (tmp_path / unit).write_text(text.replace("RestartSec=", "RestartSecs="))
    done = subprocess.run(["systemd-analyze", "verify", tmp_path / unit], capture_output=True, text=True, check=False)
    assert "RestartSecs" in done.stderr, "a mistake is not found"


@pytest.fixture(scope="module")
def of_kubernetes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kubernetes' schemas, which know each field of each kind and allow no other."""
    place = tmp_path_factory.mktemp("schemas")
    with zipfile.ZipFile(downloaded_wheel(SCHEMAS, place)) as wheel:
        for kind in ("_definitions", *KINDS.values()):
            text = wheel.read(f"{_OF_KUBERNETES}{kind}.json").decode()
            schema = json.loads(text.replace("/api/_definitions.json", "_definitions.json"))
            schema.pop("$id", None)  # an address in the web: what it refers to lies beside it
            (place / f"{kind}.json").write_text(json.dumps(schema))
    return place


@pytest.mark.slow
def test_kubernetes_takes_the_manifests(of_kubernetes: Path, tmp_path: Path) -> None:
    def judged(manifest: dict[str, Any]) -> subprocess.CompletedProcess[str]:
        (tmp_path / "manifest.json").write_text(json.dumps(manifest))
        schema = of_kubernetes / f"{KINDS[manifest['kind']]}.json"
        check = [sys.executable, "-m", "check_jsonschema", "--schemafile", schema, tmp_path / "manifest.json"]
        return subprocess.run(list(map(str, check)), capture_output=True, text=True, check=False)

    manifests = [
        one for file in ("kubernetes.yml", "hpa.yml") for one in yaml.safe_load_all((DEPLOY / file).read_text())
    ]
    assert {manifest["kind"] for manifest in manifests} == KINDS.keys()
    for manifest in manifests:
        found = judged(manifest)
        assert found.returncode == 0, found.stdout + found.stderr
    manifests[0]["spec"]["template"]["spec"]["containers"][0]["readinesProbe"] = {}
    assert "readinesProbe" in judged(manifests[0]).stdout, "a mistake is not found"


@pytest.fixture(scope="module")
def of_npm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which TypeScript knows Grafana's and KEDA's types."""
    if shutil.which("npm") is None:
        pytest.skip("NOT CHECKED: there is no npm on this machine (Debian: nodejs npm)")
    place = tmp_path_factory.mktemp("types")
    (place / "package.json").write_text("{}")
    command = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--ignore-scripts", *OF_NPM]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=place)
    if done.returncode != 0:
        pytest.skip(f"NOT CHECKED: {' '.join(OF_NPM)} could not be installed: {(done.stderr or done.stdout)[-300:]}")
    return place


@pytest.mark.slow
def test_grafana_and_keda_know_each_field_that_we_write(of_npm: Path) -> None:
    """By their types, which allow no other fields; what Grafana's own queries ask, `promtool` judges."""

    def mistakes(type_: str, value: Any) -> str:
        (of_npm / "written.ts").write_text(TYPED.format(type=type_, value=json.dumps(value, indent=1)))
        compiler = ["node", "node_modules/typescript/bin/tsc", "--noEmit", "--strict", "--skipLibCheck"]
        modules = ["--module", "nodenext", "--moduleResolution", "nodenext", "written.ts"]
        return subprocess.run([*compiler, *modules], capture_output=True, text=True, check=False, cwd=of_npm).stdout

    dashboard = json.loads((DEPLOY / "grafana.json").read_text())
    assert mistakes("Dashboard", dashboard) == ""
    dashboard["panels"][2]["titel"] = "a slip"
    assert '"titel"' in mistakes("Dashboard", dashboard), "a mistake is not found"
    dashboard["panels"][1]["fieldConfig"]["defaults"]["thresholds"]["mode"] = "relative"
    assert '"relative"' in mistakes("Dashboard", dashboard), "a mistake is not found"
    scaled, authentication = yaml.safe_load_all((DEPLOY / "keda.yml").read_text())
    assert mistakes("IScaledObject", scaled) == ""
    assert mistakes("ITriggerAuthentication", authentication) == ""
    scaled["spec"]["poolingInterval"] = scaled["spec"].pop("pollingInterval")
    assert '"poolingInterval"' in mistakes("IScaledObject", scaled), "a mistake is not found"
