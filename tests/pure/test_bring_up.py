"""How ranks come up: which command follows which, and what stops it."""

from __future__ import annotations

from planaria.config.options import CacheConfig, SchedulerConfig
from planaria.executor.bring_up import BringUp, differences
from planaria.protocol import Allocate, Command, Facts, Failed, Hello, Join, Load, Probe, Ready, Regroup, Reply
from planaria.topology import Layout

GIB = 1 << 30
SCHEDULER = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64)


def starting(tp: int = 2, pp: int = 1, loading: int | None = None, memory: int | None = None) -> BringUp:
    cache, layout = CacheConfig(block_size=16, memory=memory), Layout(tp=tp, pp=pp)
    return BringUp(cache, SCHEDULER, layout, cpu=True, epoch=3, apart=True, loading=loading)


def hello(rank: int, **more: dict[str, str]) -> Hello:
    return Hello(rank, 100 + rank, "home", f"node{rank}", "127.0.0.1", **more)


def answers(command: Command, ranks: int, available: list[int] | None = None) -> list[Reply]:
    if isinstance(command, Join):
        return [hello(rank) for rank in range(ranks)]
    if isinstance(command, Probe):
        return [Facts(rank, 1024, (available or [GIB] * ranks)[rank], 10) for rank in range(ranks)]
    return [Ready(rank, {"part": float(rank)}) for rank in range(ranks)]


def commands_of(bring_up: BringUp, ranks: int, **more: list[int]) -> list[Command]:
    commands: list[Command] = []
    command: Command | None = bring_up.start()
    while command is not None:
        commands.append(command)
        command = bring_up.on_done(answers(command, ranks, **more))
    return commands


def test_the_order_and_what_each_carries() -> None:
    found = starting()
    join, regroup, load, probe, allocate = commands_of(found, 2)
    assert join == Join(3, Layout(tp=2), True)
    assert isinstance(regroup, Regroup) and [m.rank for m in regroup.members] == [0, 1] and regroup.epoch == 3
    assert load == Load((0, 1)) and probe == Probe() and allocate == Allocate(found.num_blocks)
    assert found.state == "ready" and found.weight_bytes == 20 and found.seconds["part"] == 1.0


def test_only_so_many_load_at_a_time() -> None:
    loads = [c.ranks for c in commands_of(starting(tp=2, pp=2, loading=3), 4) if isinstance(c, Load)]
    assert loads == [(0, 1, 2), (3,)]


def test_the_rank_with_the_least_memory_decides() -> None:
    plenty, little = starting(), starting()
    commands_of(plenty, 2)
    commands_of(little, 2, available=[GIB, 20 * 1024])
    assert little.num_blocks == 10 < plenty.num_blocks  # half of it is taken


def test_a_failure_ends_it_and_is_kept() -> None:
    found = starting()
    found.start()
    failed = Failed(1, "connect", "no", "Traceback")
    assert found.on_done([hello(0), failed]) is None
    assert found.state == "failed" and found.failure is failed


def test_too_little_memory_says_both_numbers() -> None:
    found = starting(memory=1024)
    commands_of(found, 2)
    assert found.failure is not None and found.failure.kind == "capacity"
    assert "--max-model-len 64" in found.failure.message


def test_ranks_that_differ_are_refused_by_name_and_field() -> None:
    alike = [hello(0, hashes={"model.hidden_size": "a"}, versions={"torch": "2.13.0"})] * 2
    assert differences(alike) == ""
    other = hello(1, hashes={"model.hidden_size": "b"}, versions={"torch": "2.13.0"})
    assert "rank 1 on node1 differs in configuration model.hidden_size" in differences([alike[0], other])
    older = hello(1, hashes={"model.hidden_size": "a"}, versions={"torch": "2.12.0"})
    assert "version of torch: it has 2.12.0, rank 0 has 2.13.0" in differences([alike[0], older])
    found = starting()
    found.start()
    assert found.on_done([alike[0], other]) is None
    assert found.failure is not None and found.failure.kind == "config"
