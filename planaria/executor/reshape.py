"""Whether an engine could have another layout, before anything is touched; and where its lanes would be."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from planaria.config.experts import expert_map
from planaria.config.options import EngineConfig
from planaria.core.eplb.places import Placing
from planaria.errors import ConfigError, PlanariaError
from planaria.executor.backend import Borrower, Launcher
from planaria.models.deal import deal, deal_layers
from planaria.topology import LaneGroup, Layout
from planaria.topology.experts import ExpertMap
from planaria.wire import ResizeEngine


def placing(config: EngineConfig, layout: Layout, in_force: tuple[ExpertMap, ...]) -> Placing | None:
    """Where whole experts may go in a layout; None: they are sliced, or there are none."""
    configured = expert_map(config.model, config.parallel, layout.dp * layout.tp)
    if configured is None:
        return None
    partition = config.parallel.pp_layer_partition
    if partition is not None and len(partition) != layout.pp:
        partition = None
    layers = deal_layers(config.model.num_layers, layout.pp, partition)
    stages = tuple(
        stage for layer in config.model.moe_layers for stage, own in enumerate(layers) if layer in own
    )
    return Placing(configured, stages, in_force)


def wanted(wish: ResizeEngine, asked: Layout) -> Layout:
    """The layout of a wish, where there should be `asked` now."""
    return Layout(tp=max(1, wish.tp), pp=max(1, wish.pp), dp=max(1, wish.dp or asked.dp))


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


def lend(launcher: Launcher, groups: Sequence[LaneGroup]) -> tuple[Callable[[], object], str]:
    """Let the launcher have these for its lanes. What takes that back, and a line if it can't be."""
    if not groups or not isinstance(launcher, Borrower):
        return (lambda: None), ""
    try:
        before = launcher.lend(groups)
    except PlanariaError as e:
        return (lambda: None), str(e)
    return (lambda: launcher.lend(before)), ""
