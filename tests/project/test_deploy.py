"""deploy/: dashboards, alerts and triggers ask for metrics that exist; manifests have the shape that their systems want."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import typer.main
import yaml
from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel, ConfigDict, Field

from taskmesh import TaskMesh
from taskmesh.admin.doctor import CLAIMS_LOST_TOLERATED, CLAIMS_TELLING
from taskmesh.cli.app import app
from taskmesh.integrations.metrics import WorkerMetrics, fleet_metrics
from tests.working import finished, working

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana.json").read_text())
ALERTS = yaml.safe_load((DEPLOY / "alerts.yml").read_text())
KUBERNETES = list(yaml.safe_load_all((DEPLOY / "kubernetes.yml").read_text()))
AUTOSCALER = yaml.safe_load((DEPLOY / "hpa.yml").read_text())
KEDA = list(yaml.safe_load_all((DEPLOY / "keda.yml").read_text()))
UNIT = (DEPLOY / "taskmesh.service").read_text()
UNIT_OF_WEB = (DEPLOY / "taskmesh-web.service").read_text()


def asked() -> Iterator[tuple[str, str]]:
    """Yield every query with where it stands."""
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", []):
            yield f"panel {panel['title']!r}", target["expr"]
    for group in ALERTS["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]
    for line in (DEPLOY / "hpa.yml").read_text().splitlines():
        if "metricsQuery: " in line:
            yield "hpa.yml", line.partition("metricsQuery: ")[2]
    for trigger in KEDA[0]["spec"]["triggers"]:
        yield trigger["type"], trigger["metadata"].get("query") or trigger["metadata"]["valueLocation"]


@pytest.fixture
def measured() -> WorkerMetrics:
    """What measures a worker."""
    return WorkerMetrics()


@pytest.fixture
async def exported(mesh: TaskMesh, measured: WorkerMetrics) -> dict[str, set[str]]:
    """Which samples there are, and their labels, after a worker has done a little of everything."""

    @mesh.task
    async def work() -> None:
        return None

    await mesh.pause("other")  # one that is listed
    await work.publish("k")
    async with working(mesh, observer=measured) as consumer:
        await finished(mesh, "work", "k")
        measured.renewed("work", 0.5)
        texts = [await fleet_metrics(mesh), await measured.text(consumer)]
    found: dict[str, set[str]] = {}
    for text in texts:
        for family in text_string_to_metric_families(text.decode()):
            for sample in family.samples:
                found.setdefault(sample.name, set()).update(sample.labels)
    return found


async def test_every_query_asks_for_metrics_and_labels_that_exist(exported: dict[str, set[str]]) -> None:
    seen = set()
    for where, query in asked():
        names = set(re.findall(r"\b(?:taskmesh|process)_\w+", query))
        assert names, f"{where} asks for nothing of ours: {query}"
        assert names <= exported.keys(), f"{where}: there is no {names - exported.keys()}"
        labels = {label for braces in re.findall(r"{(.*?)}", query) for label in re.findall(r"(\w+)\s*=", braces)}
        labels |= {label.strip() for by in re.findall(r"by \((.*?)\)", query) for label in by.split(",")}
        known = set.union(*(exported[name] for name in names))
        assert labels <= known | {"instance"}, f"{where}: {labels - known}"
        assert query.count("(") == query.count(")")
        seen |= names
    ours = {
        name for name in exported if name.startswith("taskmesh_") and not name.endswith(("_created", "_sum", "_count"))
    }
    assert not ours - seen, "exported, and shown nowhere"


def test_the_dashboard_can_be_imported() -> None:
    assert DASHBOARD["schemaVersion"] >= 36
    assert [variable["name"] for variable in DASHBOARD["templating"]["list"]] == ["datasource"]
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, f"panel {panel['title']!r} lies over another"
        taken |= cells


class Shape(BaseModel):
    """What a manifest may say, and nothing else."""

    model_config = ConfigDict(extra="forbid")


class Rule(Shape):
    alert: str = Field(pattern=r"^Taskmesh[A-Z]\w+$")
    expr: str
    for_: str = Field("0s", alias="for", pattern=r"^\d+[smh]$")
    labels: dict[str, str]
    annotations: dict[str, str]


class RuleGroup(Shape):
    name: str
    rules: list[Rule]


class Metadata(Shape):
    name: str = Field(pattern=r"^[a-z0-9-]{1,63}$")
    labels: dict[str, str] = {}


class Manifest(Shape):
    apiVersion: str  # noqa: N815 — Kubernetes' name for it
    kind: str
    metadata: Metadata
    spec: dict[str, Any]


class Probe(Shape):
    httpGet: dict[str, str]  # noqa: N815
    periodSeconds: int  # noqa: N815
    timeoutSeconds: int = 1  # noqa: N815
    failureThreshold: int = 3  # noqa: N815


class Trigger(Shape):
    type: str
    metadata: dict[str, str]
    """KEDA takes texts alone: a number without quotes is refused."""
    authenticationRef: dict[str, str] = {}  # noqa: N815


def test_alert_rules_have_the_shape_that_prometheus_wants() -> None:
    assert ALERTS.keys() == {"groups"}
    rules = [rule for group in ALERTS["groups"] for rule in RuleGroup.model_validate(group).rules]
    assert len({rule.alert for rule in rules}) == len(rules)
    for rule in rules:
        assert rule.labels["severity"] in ("page", "ticket")
        assert rule.annotations.keys() == {"summary"}


def test_the_alert_on_claims_is_as_patient_as_the_doctor() -> None:
    [expr] = [expr for name, expr in asked() if name == "TaskmeshClaimsContended"]
    assert [float(bound) for bound in re.findall(r"> ([\d.]+)", expr)] == [CLAIMS_LOST_TOLERATED, CLAIMS_TELLING]


def test_manifests_have_the_shape_that_kubernetes_wants() -> None:
    kinds = [(each.apiVersion, each.kind) for each in map(Manifest.model_validate, [*KUBERNETES, AUTOSCALER, *KEDA])]
    assert kinds == [
        ("apps/v1", "Deployment"),
        ("policy/v1", "PodDisruptionBudget"),
        ("apps/v1", "Deployment"),
        ("v1", "Service"),
        ("autoscaling/v2", "HorizontalPodAutoscaler"),
        ("keda.sh/v1alpha1", "ScaledObject"),
        ("keda.sh/v1alpha1", "TriggerAuthentication"),
    ]
    deployment, budget, web, service = (each["spec"] for each in KUBERNETES)
    labels = deployment["template"]["metadata"]["labels"]
    assert deployment["selector"]["matchLabels"] == budget["selector"]["matchLabels"] == labels
    assert web["selector"]["matchLabels"] == service["selector"] == web["template"]["metadata"]["labels"]
    scaled = KEDA[0]["spec"]
    for target in (scaled["scaleTargetRef"], AUTOSCALER["spec"]["scaleTargetRef"]):
        assert target["name"] == KUBERNETES[0]["metadata"]["name"]
    triggers = [Trigger.model_validate(trigger) for trigger in scaled["triggers"]]
    assert [trigger.type for trigger in triggers] == ["prometheus", "metrics-api"]


def test_a_pod_has_time_to_drain_and_its_probes_and_metrics_are_where_they_are_asked() -> None:
    pod = KUBERNETES[0]["spec"]["template"]
    [container] = pod["spec"]["containers"]
    assert container["command"] == ["taskmesh"], "whatever entrypoint the image has"
    words = ["taskmesh", *container["args"]]
    given = dict(word.removeprefix("--").split("=", 1) for word in words if word.startswith("--"))
    ports = {port["name"]: str(port["containerPort"]) for port in container["ports"]}
    assert (ports["health"], ports["metrics"]) == (given["health-port"], given["metrics-port"])
    assert pod["metadata"]["annotations"]["prometheus.io/port"] == given["metrics-port"]
    for name, path in (("startupProbe", "/livez"), ("livenessProbe", "/livez"), ("readinessProbe", "/readyz")):
        assert Probe.model_validate(container[name]).httpGet == {"path": path, "port": "health"}
    before = shlex.split(container["lifecycle"]["preStop"]["exec"]["command"][-1])
    assert before[:3] == ["taskmesh", "stop-worker", "$POD_NAME"]
    grace_s = int(before[before.index("--grace-ms") + 1]) / 1000
    assert grace_s == int(given["grace-ms"]) / 1000
    assert pod["spec"]["terminationGracePeriodSeconds"] >= grace_s + 30
    _accepted(words)
    _accepted(before)


def test_the_dashboard_is_where_its_probes_and_the_autoscaler_look() -> None:
    _, _, deployment, service = KUBERNETES
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["taskmesh"], "whatever entrypoint the image has"
    _accepted(["taskmesh", *container["args"]])
    [port] = container["ports"]
    assert f"--port={port['containerPort']}" in container["args"]
    for name, path in (("startupProbe", "/livez"), ("livenessProbe", "/livez"), ("readinessProbe", "/readyz")):
        assert Probe.model_validate(container[name]).httpGet == {"path": path, "port": port["name"]}
    url = urlsplit(KEDA[0]["spec"]["triggers"][1]["metadata"]["url"])
    [offered] = service["spec"]["ports"]
    assert (url.hostname, url.port) == (service["metadata"]["name"], offered["port"])
    assert offered["targetPort"] == port["name"]


def test_the_systemd_unit_starts_a_worker_and_waits_for_its_grace() -> None:
    settings = dict(line.split("=", 1) for line in UNIT.splitlines() if "=" in line and not line.startswith("#"))
    _accepted(["taskmesh", *settings["ExecStart"].split()[1:]])
    assert int(settings["TimeoutStopSec"]) > 30
    web = dict(line.split("=", 1) for line in UNIT_OF_WEB.splitlines() if "=" in line and not line.startswith("#"))
    _accepted(["taskmesh", *web["ExecStart"].split()[1:]])


def _accepted(words: list[str]) -> None:
    """Fail unless our command line takes these words."""
    command = typer.main.get_command(app).get_command(None, words[1])  # type: ignore[attr-defined]  # it is a group
    assert command is not None
    command.make_context(words[1], list(words[2:]), resilient_parsing=True)
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word.partition("=")[0] for word in words if word.startswith("--")} <= known
