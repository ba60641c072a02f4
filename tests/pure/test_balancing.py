"""Balancing beside an engine's steps: what is logged, and when; what is known when load is not."""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from planaria.config.options import CacheConfig, DeviceConfig, EngineConfig, EPLBConfig, ParallelConfig, SchedulerConfig
from planaria.core.eplb.balance import ASK
from planaria.executor.balancing import Balancing
from planaria.executor.reply_ledger import Ticket
from planaria.hosts.host import Place
from planaria.models.config import ModelConfig, MoEConfig, RopeConfig
from planaria.protocol import Command, Done, Failed, PlaceExperts, Ready, Reply, SendExperts, StepPlan, StepResult
from planaria.topology import Layout
from planaria.topology.experts import ExpertMap


class Gang:
    """Two tensor ranks of a node, and what they are sent."""

    def __init__(self, experts: int) -> None:
        self.sent: list[Command] = []
        self.layout, self.places = Layout(tp=2), [Place(rank, "here", "here") for rank in range(2)]
        self.maps = (ExpertMap.linear(experts, 2),)

    def send(self, command: Command) -> None:
        self.sent.append(command)


def balancing(gang: Gang, **eplb: Any) -> Balancing:
    moe = MoEConfig(num_experts=gang.maps[0].num_experts, top_k=1, intermediate_size=32)
    model = ModelConfig(
        architecture="X", hidden_size=32, intermediate_size=32, num_layers=1, num_heads=4, num_kv_heads=4,
        head_dim=8, vocab_size=64, max_position=64, norm_eps=1e-6, rope=RopeConfig(), moe=moe,
    )  # fmt: skip
    config = EngineConfig(
        model=model, checkpoint={}, served_model_name="x", cache=CacheConfig(),
        scheduler=SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=16, max_model_len=64),
        device=DeviceConfig(device="cpu", dtype="float32", quantization="none", threads=1),
        parallel=ParallelConfig(
            tensor_parallel_size=2, enable_expert_parallel=True, enable_eplb=True,
            eplb_config=EPLBConfig(**eplb),
        ),
    )  # fmt: skip
    made = Balancing(config, gang, lambda: None, lambda: 0.0)  # type: ignore[arg-type]
    made.formed()
    return made


class Run:
    """Steps of an engine, whose tokens choose experts by `odds` in each. failed: a rank's answer when its load is asked
    for; seen: what ranks were sent."""

    failed: Failed | None = None

    def __init__(self, odds: Sequence[int], **eplb: Any) -> None:
        self.gang, self.odds, self.unseen = Gang(len(odds)), odds, 0
        self.seen: list[Command] = []
        self.balancing = balancing(self.gang, **eplb)

    def steps(self, count: int) -> None:
        """And every answer that they lead to."""
        for _ in range(count):
            self.unseen += 1
            self.balancing.stepped(self._ticket(StepPlan(0, 0, ((),), ((),)), lambda rank: StepResult(0, 0, ())))
            while self.gang.sent:
                command = self.gang.sent.pop(0)
                self.seen.append(command)
                if command is not ASK:
                    self.balancing.moved(self._ticket(command, Ready))
                    continue
                load = struct.pack(f"<{len(self.odds)}q", *(tokens * self.unseen for tokens in self.odds))
                self.unseen = 0
                lanes = [load, b""]  # tensor ranks count the same
                answers = [self.failed or Done(rank, lanes[rank]) for rank in range(2)]
                self.balancing.told(self._ticket(command, answers.__getitem__))

    def _ticket(self, command: Command, answer: Callable[[int], Reply]) -> Ticket:
        return Ticket(0, command, 0.0, {rank: answer(rank) for rank in range(2)})


@pytest.mark.parametrize("interval", [1, 7, 100])
@pytest.mark.row("E4")
def test_balancedness_is_logged_every_so_many_steps(caplog: pytest.LogCaptureFixture, interval: int) -> None:
    caplog.set_level(logging.INFO, "planaria.engine")
    run = Run((8, 8, 0, 0), log_balancedness=True, log_balancedness_interval=interval)
    run.steps(300)
    said = [record.getMessage() for record in caplog.records]
    assert [line.split(":")[0] for line in said] == [f"step {n}" for n in range(interval, 301, interval)]
    assert all(": balancedness of experts 0.500 in the last " in line for line in said)
    assert f"0.500 in the last {interval}" in said[0]


def test_balancedness_is_of_the_maps_in_force_from_an_epochs_beginning() -> None:
    run = Run((8, 8, 0, 0))
    run.steps(100)
    assert run.balancing.stats is not None and run.balancing.stats.balancedness == 0.5
    run.gang.maps = (ExpertMap.round_robin(4, 2),)
    run.balancing.formed()
    assert run.balancing.stats.balancedness == 1.0


def test_nothing_is_logged_unless_it_is_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "planaria.engine")
    Run((8, 8, 0, 0)).steps(300)
    assert not caplog.records


def test_load_that_a_rank_can_not_tell_takes_back_nothing_that_was_counted() -> None:
    run = Run((8, 8, 0, 0), window_size=1, step_interval=1)
    made = run.balancing

    def shift() -> None:
        """What is even for one load is not for the next."""
        for odds in ((8, 8, 0, 0), (0, 8, 8, 0), (8, 0, 8, 0)):
            run.odds = odds
            run.steps(4)

    shift()
    stats = made.stats
    assert stats is not None and stats.rearrangements > 1 and stats.bytes_moved > 0
    run.failed = Failed(1, "call expert_load", "MemoryError", "")
    run.steps(1)
    run.failed, run.seen = None, []
    shift()
    assert not run.seen, "nothing is asked or moved any more in this epoch"
    assert made.report().stats == stats and not made.report().rearranging
    assert made.state is not None and made.gang.maps == made.state.maps
    version = made.state.version
    made.formed()  # another epoch
    shift()
    assert any(isinstance(command, PlaceExperts) for command in run.seen)
    assert min(command.version for command in run.seen if isinstance(command, SendExperts)) > version, "none twice"
    assert made.stats is not None
    assert made.stats.rearrangements > stats.rearrangements and made.stats.bytes_moved > stats.bytes_moved
