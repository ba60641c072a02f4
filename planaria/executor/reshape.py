"""Whether an engine could have another layout, before anything is touched."""

from __future__ import annotations

from planaria.config.options import EngineConfig
from planaria.errors import ConfigError
from planaria.layers.deal import deal, expert_map
from planaria.topology import Layout


def why_not(config: EngineConfig, layout: Layout, backend: str, replaces: bool) -> str:
    """A line, empty if nothing is known against it. backend: the launcher's name; replaces: see Launcher."""
    if not replaces:
        return f"the executor back end {backend} can't change its layout: start it again with the other one"
    if backend == "uni" and layout.size > 1:
        return f"{layout} needs {layout.size} processes: start with --distributed-executor-backend mp"
    try:
        experts = expert_map(config.model, config.parallel, layout.dp * layout.tp)
        deal(config.model, layout.tp, layout.pp, experts=experts)
    except ConfigError as e:
        return str(e)
    return ""
