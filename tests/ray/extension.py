"""A worker extension that tells of its process."""

from __future__ import annotations

import importlib
import os

from planaria.executor.ray.actor import report


class Environment:
    def environment(self, names: list[str]) -> tuple[dict[str, str], dict[str, str]]:
        """Those of `names` that the process started with, and those that are set now."""
        return report(names), {name: os.environ[name] for name in names if name in os.environ}

    def imported(self, module: str, name: str) -> object:
        """What a module of the runtime environment has by this name."""
        return getattr(importlib.import_module(module), name)


class Somebody:
    """An actor that has devices."""

    def ids(self) -> list[str]:
        import ray

        return list(ray.get_runtime_context().get_accelerator_ids()["GPU"])
