from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def load_engine_config_with_overrides(
    config_file_path: str | None = None, overrides: dict[str, Any] | None = None
) -> Any:
    return SimpleNamespace(**overrides or {})
