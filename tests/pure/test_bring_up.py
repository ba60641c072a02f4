"""How ranks come up: which command follows which, and what stops it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from planaria.config.options import CacheConfig, DeviceConfig, SchedulerConfig
from planaria.errors import CapacityError
from planaria.executor.bring_up import KV_CPU_LIMIT, BringUp, CommittedKV, Memory, differences, kv_blocks, weights_of
from planaria.executor.gang import Gang
from planaria.hosts.host import Place
from planaria.protocol import Allocate, Command, Facts, Failed, Hello, Join, Load, Probe, Ready, Regroup, Reply
from planaria.topology import Layout
from planaria.worker.null import NullRank

GIB = 1 << 30
SCHEDULER = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64)


def starting(tp: int = 2, pp: int = 1, loading: int | None = None, memory: int | None = None) -> BringUp:
    cache, layout = CacheConfig(block_size=16, memory=memory), Layout(tp=tp, pp=pp)
    return BringUp(cache, SCHEDULER, layout, Memory(cpu=True), epoch=3, apart=True, loading=loading)


def hello(rank: int, layout: str = "tp=2", **more: Any) -> Hello:
    digest = f"{layout} {more.get('hashes')}"
    return Hello(rank, 100 + rank, "home", f"node{rank}", "127.0.0.1", digest=digest, **more)


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
    assert load == Load((0, 1)) and probe == Probe() and allocate == Allocate(found.num_blocks, 1)
    assert not regroup.keeps_kv
    assert found.state == "ready" and found.weight_bytes == 20 and found.seconds["part"] == 1.0


def test_weights_that_ranks_of_a_node_share_count_once() -> None:
    alone, shared = Facts(0, 1, 1, 10), [Facts(rank, 1, 1, 10 + rank, 8, "part") for rank in (1, 2, 3)]
    assert weights_of([alone, *shared], ["here", "here", "here", "there"]) == (10 + 3 + 4 + 5 + 2 * 8, 16)
    assert weights_of([alone], ["here"]) == (10, 0)


@pytest.mark.parametrize(
    ("held", "there", "keeps"),
    [
        ([4, 4], CommittedKV(Layout(tp=2), 4, 9), True),
        ([4, 0], CommittedKV(Layout(tp=2), 4, 9), False),
        ([3, 3], CommittedKV(Layout(tp=2), 4, 9), False),
        ([4, 4], CommittedKV(Layout(tp=2), 4, 0), False),
        ([4, 4], CommittedKV(Layout(pp=2), 4, 9), False),
    ],
    ids=["all have it", "one lacks it", "of before", "nothing counts", "another layout"],
)
def test_kv_that_all_ranks_have_is_kept(held: list[int], there: CommittedKV, keeps: bool) -> None:
    found = BringUp(CacheConfig(block_size=16), SCHEDULER, Layout(tp=2), Memory(cpu=True), kv=there)
    found.start()
    command = found.on_done([hello(rank, kv=(number,)) for rank, number in enumerate(held)])
    assert isinstance(command, Regroup) and command.keeps_kv is keeps
    while command is not None and not isinstance(command, Allocate):
        command = found.on_done(answers(command, 2))
    assert isinstance(command, Allocate) and (command == Allocate(9, 4)) is keeps and command.number == 5 - keeps


def test_a_rank_that_computes_nothing_has_room_for_any_kv() -> None:
    layout = Layout(tp=8)
    boot = SimpleNamespace(rank=0, config=SimpleNamespace(parallel=SimpleNamespace(layout=layout)))
    facts = NullRank(boot).handle(Probe())  # type: ignore[arg-type]
    assert isinstance(facts, Facts)
    memory = Memory(cpu=True, ranks_at=(8,) * 8, sharers=4)
    blocks = [kv_blocks([facts] * 8, CacheConfig(memory=asked), SCHEDULER, memory) for asked in (None, 16 * GIB)]
    assert blocks == [16, 16]


@pytest.mark.row("P10")
def test_only_so_many_load_at_a_time() -> None:
    loads = [c.ranks for c in commands_of(starting(tp=2, pp=2, loading=3), 4) if isinstance(c, Load)]
    assert loads == [(0, 1, 2), (3,)]


@pytest.mark.row("P25")
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


LONG = SchedulerConfig(max_num_seqs=1024, max_num_batched_tokens=64, max_model_len=64)
MIB = 1 << 20


def kv(available: list[int], memory: Memory, asked: int | None = None) -> int:
    """Bytes of KV on each rank."""
    facts = [Facts(rank, 1024, free, 10) for rank, free in enumerate(available)]
    return 1024 * kv_blocks(facts, CacheConfig(block_size=16, memory=asked), LONG, memory)


def test_ranks_of_a_node_take_from_the_same_memory() -> None:
    one = kv([8 * MIB], Memory(True, (1,)))
    assert kv([8 * MIB, 8 * MIB], Memory(True, (2, 2))) == one // 2
    assert kv([8 * MIB, 8 * MIB], Memory(True, (1, 1))) == one, "on nodes of their own"
    assert kv([8 * MIB] * 2 + [2 * MIB], Memory(True, (2, 2, 1))) == one // 4, "the poorest decides"
    assert kv([3 * MIB] * 2, Memory(False, (1, 1))) == 3 * MIB, "each has its accelerator"
    assert kv([3 * MIB] * 2, Memory(False, (2, 2))) == 3 * MIB // 2, "both use one"


def test_a_gang_counts_its_ranks_by_the_memory_that_they_take() -> None:
    """Of a node; on accelerators, each its own."""

    def counted(device: str, *places: tuple[str, int]) -> tuple[int, ...]:
        config = SimpleNamespace(device=DeviceConfig(device=device, dtype="bfloat16", quantization="none", threads=1))
        found = [Place(rank, home, home, devices=(number,)) for rank, (home, number) in enumerate(places)]
        gang = SimpleNamespace(
            config=config, places=found, came_up=False, kv_bytes={}, layout=Layout(), kv_share=1,
            kv=SimpleNamespace(returns=0),
        )  # fmt: skip
        return Gang._memory(gang).ranks_at  # type: ignore[arg-type]

    places = ("a", 0), ("a", 1), ("b", 0), ("b", 0)
    assert counted("cpu", *places, ("c", 0)) == (2, 2, 2, 2, 1)
    assert counted("cuda", *places) == (1, 1, 2, 2)


def test_a_size_that_is_given_is_there_for_every_rank_of_a_node() -> None:
    assert kv([4 * MIB] * 2, Memory(True, (2, 2)), asked=2 * MIB) == 2 * MIB
    with pytest.raises(CapacityError, match=r"0\.00 GiB, for each of 2 ranks, 0\.00 GiB are free"):
        kv([4 * MIB] * 2, Memory(True, (2, 2)), asked=3 * MIB)


def test_who_has_served_goes_on_with_what_there_is() -> None:
    """And keeps what it chose, as long as that fits: other engines have taken their share meanwhile."""
    again = Memory(True, (2, 2), before=2 * MIB)
    assert kv([4 * MIB] * 2, again, asked=3 * MIB) == 2 * MIB, "less than was asked for is better than an end"
    assert kv([4 * MIB] * 2, again) == 2 * MIB, "it would be 1 MiB if it were the first time"
    assert kv([3 * MIB] * 2, again) == 3 * MIB // 4
    assert kv([4 * MIB] * 2, Memory(True, (2, 2), before=0)) == MIB, "in another layout it is chosen anew"
    assert KV_CPU_LIMIT > 4 * MIB
    with pytest.raises(CapacityError):
        kv([0], Memory(True, (1,), before=0))


def test_ranks_that_differ_are_refused_by_name_and_field() -> None:
    alike = [hello(0, hashes={"model.hidden_size": "a"}, versions={"torch": "2.13.0"})] * 2
    assert differences(alike) == ""
    other = hello(1, hashes={"model.hidden_size": "b"}, versions={"torch": "2.13.0"})
    assert "rank 1 on node1 differs in configuration model.hidden_size" in differences([alike[0], other])
    older = hello(1, hashes={"model.hidden_size": "a"}, versions={"torch": "2.12.0"})
    assert "version of torch: it has 2.12.0, rank 0 has 2.13.0" in differences([alike[0], older])
    elsewhere = hello(1, "tp=1", hashes={"model.hidden_size": "a"}, versions={"torch": "2.13.0"})
    assert "rank 1 on node1 differs in the layout" in differences([alike[0], elsewhere])
    found = starting()
    found.start()
    assert found.on_done([alike[0], other]) is None
    assert found.failure is not None and found.failure.kind == "config"
