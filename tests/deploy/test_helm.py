"""The chart's documents are what Kubernetes takes, and say what the server needs."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from planaria.cli.app import app
from tests.deploy.gotemplate import render

CHART = Path(__file__).parents[2] / "deploy/helm/planaria"
ALONE = {"model": "org/model"}
MANY = {
    "model": "/models/m", "nodes": 3, "options": ["-tp", "2", "-pp", "3"], "models": {"existingClaim": "models"},
    "secrets": {"nodes": "s", "apiKey": "k", "huggingFace": "h"}, "podMonitor": {"enabled": True},
    "nodeSelector": {"disk": "fast"}, "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "podAnnotations": {"a": "b"}, "affinity": {"nodeAffinity": {}}, "servedModelName": "m",
}  # fmt: skip


def one(documents: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (found,) = [document for document in documents if document["kind"] == kind]
    return found


@pytest.mark.parametrize("values", [ALONE, MANY], ids=["one node", "nodes"])
def test_kubernetes_would_take_it(values: dict[str, Any]) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    for document in render(CHART, values):
        if document["apiVersion"] != "monitoring.coreos.com/v1":
            validate.validate(document, validate.latest_version(), strict=True)


@pytest.mark.parametrize("values", [ALONE, MANY], ids=["one node", "nodes"])
@pytest.mark.skipif(shutil.which("helm") is None, reason="no helm here")
def test_helm_says_the_same(values: dict[str, Any], tmp_path: Path) -> None:
    import yaml

    (tmp_path / "values.yaml").write_text(json.dumps(values))
    subprocess.run(["helm", "lint", "--strict", str(CHART), "-f", str(tmp_path / "values.yaml")], check=True)
    said = subprocess.run(
        ["helm", "template", "release", str(CHART), "-f", str(tmp_path / "values.yaml")],
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    key = lambda d: (d["kind"], d["metadata"]["name"])  # noqa: E731
    assert sorted((d for d in yaml.safe_load_all(said) if d), key=key) == sorted(render(CHART, values), key=key)


@pytest.mark.skipif(shutil.which("helm") is None, reason="no helm here")
def test_helm_names_what_is_missing() -> None:
    for values, what in (([], "model is needed"), (["--set", "model=a,nodes=2"], "secrets.nodes is needed")):
        done = subprocess.run(["helm", "template", "r", str(CHART), *values], capture_output=True, text=True)
        assert done.returncode and what in done.stderr


def options_of_serve() -> set[str]:
    from typer.main import get_command

    serve = get_command(app).commands["serve"]  # type: ignore[attr-defined]
    return {option for parameter in serve.params for option in parameter.opts}


@pytest.mark.parametrize("values", [ALONE, MANY], ids=["one node", "nodes"])
def test_the_server_knows_every_option(values: dict[str, Any]) -> None:
    documents = render(CHART, values)
    workload = one(documents, "StatefulSet" if "nodes" in values else "Deployment")
    args = workload["spec"]["template"]["spec"]["containers"][0]["args"]
    assert {arg.split("=")[0] for arg in args if arg.startswith("-")} <= options_of_serve()
    assert values["model"] in args


def test_a_recovery_is_no_reason_to_restart() -> None:
    container = one(render(CHART, ALONE), "Deployment")["spec"]["template"]["spec"]["containers"][0]
    assert container["livenessProbe"]["httpGet"]["path"] == "/version"
    assert container["readinessProbe"]["httpGet"]["path"] == "/health"


def test_a_rolling_update_waits_for_the_new_and_drains_the_old() -> None:
    spec = one(render(CHART, {**ALONE, "drainSeconds": 120}), "Deployment")["spec"]
    assert spec["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
    assert spec["template"]["spec"]["terminationGracePeriodSeconds"] == 150
    assert "--shutdown-timeout=120" in spec["template"]["spec"]["containers"][0]["args"]


def test_nodes_find_one_another() -> None:
    documents = render(CHART, MANY, "llm")
    workload = one(documents, "StatefulSet")
    container = workload["spec"]["template"]["spec"]["containers"][0]
    assert workload["spec"]["serviceName"] in {d["metadata"]["name"] for d in documents if d["kind"] == "Service"}
    assert "--master-addr=llm-0.llm-nodes" in container["args"]
    given = {variable["name"] for variable in container["env"]}
    assert {"PLANARIA_SECRET", "PLANARIA_HOST_IP", "PLANARIA_API_KEY", "HF_TOKEN"} <= given
    assert workload["spec"]["podManagementPolicy"] == "Parallel"


def test_what_is_missing_is_named() -> None:
    with pytest.raises(ValueError, match="model is needed"):
        render(CHART, {})
    with pytest.raises(ValueError, match=r"secrets\.nodes"):
        render(CHART, {**MANY, "secrets": {"nodes": ""}})
