"""What stands in deploy/ fits the server as it is."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from planaria.server.faults import FaultLog
from planaria.server.metrics import Metrics
from tests.deploy.test_helm import options_of_serve

DEPLOY = Path(__file__).parents[2] / "deploy"
ALERTS = DEPLOY / "prometheus/alerts.yaml"
KEPT_BY_PROMETHEUS = {"up"}


def metrics() -> dict[str, set[str]]:
    """Every series of /metrics, and its labels."""
    found = {}
    for family in Metrics(list, lambda: "m", FaultLog(lambda: [0])).collect():
        labels = {*(getattr(family, "_labelnames", ()) or ())}
        suffixes = {"histogram": ("_bucket", "_count", "_sum"), "counter": ("_total",)}.get(family.type, ("",))
        found.update({family.name + suffix: labels | ({"le"} if suffix == "_bucket" else set()) for suffix in suffixes})
    return found


def expressions() -> list[str]:
    rules = [rule["expr"] for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
    board = json.loads((DEPLOY / "grafana/planaria.json").read_text())
    rules += [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    return rules + [note["expr"] for note in board["annotations"]["list"]]


@pytest.mark.parametrize("expression", expressions())
def test_a_rule_or_panel_asks_for_what_there_is(expression: str) -> None:
    known = metrics()
    used = set(re.findall(r"\b((?:vllm|planaria):\w+)", expression))
    assert used <= set(known)
    assert used or KEPT_BY_PROMETHEUS & set(re.findall(r"\w+", expression))
    for name, chosen in re.findall(r"\b((?:vllm|planaria):\w+)\{([^}]*)\}", expression):
        assert set(re.findall(r"(\w+)=", chosen)) <= known[name]
    labels = set.union(*(known[name] for name in used), set()) | {"phase", "part"} if used else set()
    for by in re.findall(r"(?:by|on) \(([^)]*)\)", expression):
        assert set(by.replace(" ", "").split(",")) <= labels


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool here")
def test_every_alert_fires_when_it_should() -> None:
    for command in (["check", "rules", ALERTS.name], ["test", "rules", "alerts_test.yaml"]):
        done = subprocess.run(["promtool", *command], cwd=ALERTS.parent, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_test() -> None:
    names = {rule["alert"] for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]}
    tests = yaml.safe_load((ALERTS.parent / "alerts_test.yaml").read_text())["tests"]
    assert names == {case["alertname"] for test in tests for case in test["alert_rule_test"] if case["exp_alerts"]}


def test_ray_clusters_server_knows_every_option() -> None:
    cluster, service = yaml.safe_load_all((DEPLOY / "kuberay/raycluster.yaml").read_text())
    head = cluster["spec"]["headGroupSpec"]["template"]
    (server,) = [c for c in head["spec"]["containers"] if c["name"] == "server"]
    assert {arg.split("=")[0] for arg in server["args"] if arg.startswith("--")} <= options_of_serve()
    assert service["spec"]["selector"].items() <= head["metadata"]["labels"].items()


def test_the_pool_picks_the_charts_pods() -> None:
    pool, route = yaml.safe_load_all((DEPLOY / "gateway/inferencepool.yaml").read_text())
    helpers = (DEPLOY / "helm/planaria/templates/_helpers.tpl").read_text()
    for label, value in pool["spec"]["selector"]["matchLabels"].items():
        assert f"{label}: {value}" in helpers
    assert route["spec"]["rules"][0]["backendRefs"][0]["name"] == pool["metadata"]["name"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    unit = (DEPLOY / "systemd/planaria.service").read_text()
    (tmp_path / "planaria.service").write_text(unit.replace("/opt/planaria/bin/planaria", shutil.which("true") or ""))
    done = subprocess.run(["systemd-analyze", "verify", tmp_path / "planaria.service"], capture_output=True, text=True)
    assert "planaria.service" not in done.stderr, done.stderr


def test_the_container_file_has_no_fault_that_a_linter_knows() -> None:
    linter = Path(sys.executable).with_name("hadolint")
    if not linter.exists():
        pytest.skip("no hadolint here")
    done = subprocess.run([linter, DEPLOY / "Containerfile"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_container_runs_as_nobody_special_and_says_how_it_is() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    assert re.search(r"^USER 10001", text, re.M) and "HEALTHCHECK" in text and "STOPSIGNAL SIGTERM" in text
