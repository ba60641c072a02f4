"""How many examples Hypothesis draws, which files a run begins with, and what collecting them costs.

Rules: the default run draws the same examples each time and lets none be too slow, so that a busy machine changes
nothing; `--hypothesis-profile=search` draws others, and forty times as many. The files that take longest come first,
so that no worker of a parallel run ends with one of them (the Makefile has xdist keep this order). Ray's go to one
worker, whose files share a cluster; but for those on networks of their own, which have clusters of their own.
Torch's threads sleep while they wait, here and in every process that a test starts: where there are more of them than
cores they spent five sixths of all time in waiting loops.
A test that hangs fails (pyproject's `timeout`), but for those that take long; what fails is named at once, so that also
a run that is cut says what it found.
What was collected is not looked through for garbage again and again, and Hypothesis does not read the whole package for
constants to draw (which would make examples depend on the tests that ran before, too): each worker collects all tests.
"""

from __future__ import annotations

import atexit
import gc
import os
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

gc.disable()  # while all of it is imported
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is imported

settings.register_profile(
    "planaria", max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("search", settings.get_profile("planaria"), max_examples=1000, derandomize=False)
settings.load_profile("planaria")

_constants = providers._get_local_constants
# It is asked for when tests have been collected, and by each of them.
providers._get_local_constants = lambda: Constants() if settings().derandomize else _constants()

RAY, ON_NETWORKS = "tests/ray/", "tests/ray/test_fleet_networks.py"
LONGEST_FIRST = (
    "ray/test_ray.py", "ray/test_facts.py", "ray/test_fleet.py", "ray/test_lanes.py", "ray/test_losses.py",
    "ray/test_fault_matrix.py", "ray/test_without_ray.py", "ray/test_cluster.py", "ray/test_devices.py",
    "ray/test_fleet_networks.py", "sim/test_sim.py", "model/test_exact.py", "model/test_gpu_kernels.py",
    "proc/test_external.py", "proc/test_prefill_decode.py", "proc/test_context.py", "proc/test_nodes.py",
    "proc/test_sleep.py", "proc/test_pods.py", "model/test_structured.py", "model/test_foreign.py",
    "model/test_parallel.py", "proc/test_node_loss.py", "proc/test_fault_matrix.py", "proc/test_recovery.py",
    "proc/test_api_servers.py", "proc/test_kv_transfer.py", "proc/test_fleet_nodes.py", "proc/test_fleet.py",
    "proc/test_soak.py", "proc/test_engine_death.py", "proc/test_serve.py", "proc/test_expert_nodes.py",
    "proc/test_replace.py", "proc/test_dashboard.py", "proc/test_new_weights.py", "proc/test_every_prompt.py",
    "proc/test_expert_travel.py", "proc/test_balancing.py", "proc/test_expert_parallel.py", "proc/test_cli.py",
    "proc/test_mp.py", "proc/test_invariant.py", "proc/test_links.py", "proc/test_journal_death.py",
    "proc/test_security.py", "proc/test_custom.py", "proc/test_expert_slices.py", "proc/test_layouts.py",
    "model/test_models.py", "model/test_mesh.py", "model/test_staged_ranks.py", "model/test_weights_from_memory.py",
    "proc/test_batch.py", "proc/test_ps.py", "proc/test_dbo.py", "deploy/test_docs.py",
)  # fmt: skip


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """As `--dist loadfile`, but for Ray's files."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            own = not nodeid.startswith(RAY) or nodeid.startswith(ON_NETWORKS)
            return str(super()._split_scope(nodeid)) if own else RAY

    return ByFile(config, log)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


atexit.register(gc.unfreeze)  # else libraries name what they think is leaked; not before pytest has collected, twice


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: i for i, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: place.get("/".join(item.path.parts[-2:]), len(place)))
    for item in items:
        if any(item.iter_markers("long")) or any(item.iter_markers("clients")):
            item.add_marker(pytest.mark.timeout(0))


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Failures(config))


class Failures:
    """Names each when it comes."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self.config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None:
            crash = getattr(report.longrepr, "reprcrash", None)
            why = (crash.message if crash else report.longreprtext).strip().partition("\n")[0]
            terminal.write(f"\n{report.nodeid} failed ({report.when}): {why[:300]}\n")
