"""Experts go between ranks when lanes come and go, and when a rank is lost whose experts others have: nobody who stays
reads the checkpoint, and tokens stay the same, also if a rank is lost on the way."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from planaria.protocol import Command, SendExperts
from planaria.wire import ResizeEngine
from tests.model.checkpoints import write_checkpoint
from tests.model.engines import Engine, ask_for
from tests.proc.experts import ASKED
from tests.proc.test_recovery import SLACK, Reads

MODEL = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 1024}
EXPERTS = 2 * 6  # of all layers
EXPERT_BYTES = 3 * 64 * 1024 * 4
EP: dict[str, Any] = {"enable_expert_parallel": True, "data_parallel_size": 2}


@pytest.fixture(scope="module")
def lanes(folder: Path) -> Iterator[Engine]:
    with Engine(str(folder), **EP) as engine:
        yield engine


def test_a_rank_that_stays_reads_nothing(
    lanes: Engine, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it reads is its boots, from the engine's pipe, and how much memory is free. Half of the experts come to it
    when there is one lane, and leave it when there are two."""
    launcher: Any = lanes.loop.gang.launcher
    boots: list[int] = []
    run = launcher.run
    monkeypatch.setattr(launcher, "run", lambda made: (boots.append(8 + len(made[0].encode())), run(made)))
    assert lanes.run(ASKED) == expected
    stays = lanes.pids[0]
    before = Reads(stays)
    for dp in (1, 2):
        assert lanes.run(ASKED, 30, lambda dp=dp: ask_for(lanes.loop, ResizeEngine(f"to {dp}", 1, 1, dp))) == expected
        lanes.finish()
        assert (lanes.resized[-1].id, lanes.resized[-1].error) == (f"to {dp}", "") and len(lanes.pids) == dp
        travel = lanes.recoveries[-1].travel
        assert travel is not None and travel.read == 0 and travel.moved == travel.needed == EXPERTS // 2 * EXPERT_BYTES
    after = Reads(stays)
    assert lanes.pids[0] == stays and len(boots) == 2
    assert 0 <= after.calls - before.calls - sum(boots) <= 2 * (len(Path("/proc/meminfo").read_bytes()) + SLACK)
    assert after.storage - before.storage <= SLACK
    assert after.mapped - before.mapped < EXPERTS // 2 * EXPERT_BYTES // 4  # of the checkpoint


def test_a_rank_dies_while_it_sends_what_it_has(lanes: Engine, expected: list[list[int]]) -> None:
    """It was to leave. Its experts are read again by another in its place, which then leaves."""

    def harm() -> None:
        lanes.kill(1, signal.SIGSTOP)  # so that it can't have sent them
        lanes.loop.handle(ResizeEngine("fewer", 1, 1, 1))
        assert not lanes.resized or lanes.resized[-1].id != "fewer"
        lanes.kill(1, signal.SIGKILL)

    before = len(lanes.recoveries)
    assert lanes.run(ASKED, 40, harm) == expected
    lanes.finish()
    assert (lanes.resized[-1].id, lanes.resized[-1].error, len(lanes.pids)) == ("fewer", "", 1)
    fault, change = lanes.recoveries[before:]
    assert (fault.kind, fault.ranks, change.kind) == ("fault", [1], "layout")
    assert fault.travel is not None and fault.travel.read == EXPERTS // 2
    assert change.travel is not None and change.travel.read == 0


def test_the_one_that_has_them_all_dies_while_another_joins(
    lanes: Engine, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then there is nothing in memory, and what is needed is read."""
    ask, killed = lanes.loop.gang.ask, []

    def harm(command: Command, *more: Any) -> Any:
        if isinstance(command, SendExperts) and not killed:
            pid = lanes.loop.gang.places[0].pid
            killed.append(pid)
            os.kill(pid, signal.SIGKILL)
        return ask(command, *more)

    lanes.loop.handle(ResizeEngine("one", 1, 1, 1))  # unless it is so already
    lanes.finish()
    assert len(lanes.pids) == 1
    monkeypatch.setattr(lanes.loop.gang, "ask", harm)
    assert lanes.run(ASKED, 40, lambda: ask_for(lanes.loop, ResizeEngine("more", 1, 1, 2))) == expected
    assert killed and killed[0] not in lanes.pids and lanes.resized[-1].id == "more"
    assert lanes.run(ASKED) == expected


def test_replicas_are_what_a_lost_rank_is_loaded_from(folder: Path, expected: list[list[int]]) -> None:
    """Every expert has a slot on both ranks, so nothing is read of the one that is lost."""
    config = {"num_redundant_experts": 6, "step_interval": 10_000, "window_size": 100}
    with Engine(str(folder), **EP, enable_eplb=True, eplb_config=config) as engine:
        assert engine.run(ASKED, 40, lambda: engine.kill(1, signal.SIGKILL)) == expected
        travel = engine.recoveries[-1].travel
        assert travel is not None and travel.read == 0 and travel.moved == travel.needed == EXPERTS * EXPERT_BYTES


OFTEN = {"window_size": 4, "step_interval": 4, "num_redundant_experts": 2}
WAYS: dict[str, dict[str, Any]] = {
    "naive": {"all2all_backend": "naive"},
    "tokens dealt to tensor ranks": {"tensor_parallel_size": 2},
    "naive, of two tensor ranks each": {"tensor_parallel_size": 2, "all2all_backend": "naive"},
    "stages": {"pipeline_parallel_size": 2},
    "messages": {"disable_custom_all_reduce": True, "kernels": "torch"},
    "bfloat16": {"dtype": "bfloat16"},
    "eight bits": {"quantization": "q8_0"},
    "four bits": {"quantization": "q4_1", "dtype": "bfloat16"},
    "round robin": {"expert_placement_strategy": "round_robin"},
    "a spare": {"spare_workers": 1},
    "balanced": {"enable_eplb": True, "eplb_config": OFTEN},
    "balanced, a spare": {"enable_eplb": True, "eplb_config": OFTEN, "spare_workers": 1},
    "balanced aside, in micro-batches": {
        "enable_eplb": True, "eplb_config": {**OFTEN, "use_async": True}, "enable_dbo": True,
        "dbo_decode_token_threshold": 1, "dbo_prefill_token_threshold": 4, "tensor_parallel_size": 2,
    },
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_lanes_come_and_go_and_die_in_any_way(folder: Path, way: str) -> None:
    options = WAYS[way]
    numbers = {name: options[name] for name in ("dtype", "quantization", "kernels") if name in options}
    with Engine(str(folder), distributed_executor_backend="uni", **numbers) as one:
        expected = one.run(ASKED)
    tp, pp = options.get("tensor_parallel_size", 1), options.get("pipeline_parallel_size", 1)
    with Engine(str(folder), **EP, **options) as engine:
        for dp in (1, 2):
            wish = ResizeEngine(f"to {dp}", tp, pp, dp)
            assert engine.run(ASKED, 30, lambda wish=wish: ask_for(engine.loop, wish)) == expected
            engine.finish()
            assert (engine.resized[-1].id, engine.resized[-1].error) == (wish.id, "")
            travel = engine.recoveries[-1].travel
            assert travel is not None and travel.read == 0
            if "spare_workers" not in options or dp == 1:  # a spare has what it may need
                assert 0 < travel.needed <= travel.moved
            assert travel.moved == travel.needed or "enable_eplb" in options  # replicas may cost more than the least
        victim = len(engine.pids) - 1
        assert engine.run(ASKED, 40, lambda: engine.kill(victim, signal.SIGKILL)) == expected
        assert engine.recoveries[-1].ranks == [victim] and engine.recoveries[-1].layout == f"dp=2 tp={tp} pp={pp}"
        assert engine.run(ASKED) == expected
        if "enable_eplb" in options:
            assert engine.loop.balancing.stats.bytes_moved > 0


LATENT = {
    "num_hidden_layers": 3, "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "moe_intermediate_size": 64, "n_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2,
    "topk_method": "group_limited_greedy", "kv_lora_rank": 32, "q_lora_rank": None, "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32, "v_head_dim": 32, "routed_scaling_factor": 1.5,
}  # fmt: skip
OF_STAGES = {"pipeline_parallel_size": 2, "pp_layer_partition": "1,2"}  # the first one has no experts
LATENT_WAYS: dict[str, dict[str, Any]] = {
    "tokens dealt to tensor ranks": {"tensor_parallel_size": 2},
    "a stage without experts, balanced": {**OF_STAGES, "enable_eplb": True, "eplb_config": OFTEN},
    "a stage without experts, in micro-batches": {
        **OF_STAGES, "enable_dbo": True, "dbo_decode_token_threshold": 1, "dbo_prefill_token_threshold": 4,
    },
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("way", LATENT_WAYS)
def test_groups_of_experts_after_a_dense_layer(tmp_path: Path, way: str) -> None:
    """As of DeepSeek-V2: experts in groups, layers without any, latent attention."""
    options = LATENT_WAYS[way]
    model = str(write_checkpoint(tmp_path, "deepseek_v2", **LATENT))
    with Engine(model, distributed_executor_backend="uni") as one:
        expected = one.run(ASKED)
    tp, pp = options.get("tensor_parallel_size", 1), options.get("pipeline_parallel_size", 1)
    with Engine(model, **EP, **options) as engine:
        for dp in (1, 2):
            wish = ResizeEngine(f"to {dp}", tp, pp, dp)
            assert engine.run(ASKED, 30, lambda wish=wish: ask_for(engine.loop, wish)) == expected
            engine.finish()
            travel = engine.recoveries[-1].travel
            assert engine.resized[-1].error == "" and travel is not None and travel.read == 0 < travel.moved
        assert engine.run(ASKED, 40, lambda: engine.kill(1, signal.SIGKILL)) == expected
        if "enable_eplb" in options:
            assert engine.loop.balancing.stats.bytes_moved > 0
