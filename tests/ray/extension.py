"""A worker extension that tells of its process."""

from __future__ import annotations

import os

from planaria.executor.ray.actor import report


class Environment:
    def environment(self, names: list[str]) -> tuple[dict[str, str], dict[str, str]]:
        """Those of `names` that the process started with, and those that are set now."""
        return report(names), {name: os.environ[name] for name in names if name in os.environ}
