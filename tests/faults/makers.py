"""Deployments by name."""

from __future__ import annotations

from pathlib import Path

from tests.faults.deployment import Deployment


def make(kind: str, model: Path, *, real: bool = True) -> Deployment:
    """Not started."""
    if kind in ("ray", "ray-spare"):
        from tests.faults.ray_deployment import RayDeployment

        return RayDeployment(kind, model, real=real)
    if kind == "ray-nodes":
        from tests.faults.ray_nodes_deployment import RayNodesDeployment

        return RayNodesDeployment(kind, model, real=real)
    if kind == "mp-nodes":
        from tests.faults.nodes_deployment import NodesDeployment

        return NodesDeployment(kind, model, real=real)
    return Deployment(kind, model, real=real)
