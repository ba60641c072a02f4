"""What one rank says of itself before it meets the others, and what it asks of the exchange between lanes. No other is
there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

import planaria.mesh.all2all as all2all
from planaria.config.digest import compared, compute_hash, hash_fields
from planaria.config.options import EngineConfig
from planaria.protocol import Join
from planaria.topology import Layout
from planaria.worker.groups import Groups
from tests.model.checkpoints import write_checkpoint
from tests.model.ranks import boot_of
from tests.model.test_parallel import config_for


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    return config_for(str(write_checkpoint(tmp_path_factory.mktemp("moe"), "qwen2_moe", num_experts=4)))


def groups_of(config: EngineConfig, layout: Layout, **given: Any) -> Groups:
    parallel = msgspec.structs.replace(
        config.parallel, tensor_parallel_size=layout.tp, lanes=layout.dp, enable_expert_parallel=True, **given
    )
    found = Groups(boot_of(msgspec.structs.replace(config, parallel=parallel)))
    found.layout = layout
    return found


@pytest.mark.row("P24")
def test_a_rank_says_what_shapes_its_computation(config: EngineConfig) -> None:
    """Field by field, as one digest with the layout in force, and which versions it runs."""
    groups, layout = groups_of(config, Layout(tp=2)), Layout(tp=2)
    said = groups.bring(Join(0, layout), (), 0)
    own = groups.boot.config
    assert said.hashes == hash_fields(own) and said.versions == compared(own)
    assert said.digest == compute_hash(own, str(layout)) != compute_hash(own, str(Layout()))


@pytest.mark.parametrize(("layout", "name", "dealt"), [
    (Layout(dp=2, tp=2), "naive", True), (Layout(dp=2, tp=2), "allgather_reducescatter", True),
    (Layout(dp=2), "naive", False), (Layout(dp=2, tp=2), "pplx", False),
])  # fmt: skip
@pytest.mark.row("P23")
def test_tensor_ranks_share_what_their_lane_tells(
    config: EngineConfig, layout: Layout, name: str, dealt: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that no token crosses twice; not where the exchange does that by itself."""
    asked: list[tuple[str, int, bool]] = []
    monkeypatch.setattr(
        all2all, "make", lambda name, group, shapes, *, dealt: asked.append((name, shapes.width, dealt))
    )
    groups = groups_of(config, layout, all2all_backend=name)
    groups.mesh = SimpleNamespace(ep=SimpleNamespace(size=layout.size), further=())  # type: ignore[assignment]
    groups._make_exchanges()
    assert asked == [(name, layout.tp, dealt)]
