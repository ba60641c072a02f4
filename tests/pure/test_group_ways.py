"""What carries a group of ranks on devices, and what people are told of it."""

from __future__ import annotations

import msgspec

from planaria.mesh.ways import GLOO, MEMORY, choose
from planaria.protocol import Hello
from planaria.topology.platforms import CPU, ROCM


def on(device: int, rank: int, home: str = "here") -> Hello:
    return Hello(rank, 1, home, f"node-{home}", "127.0.0.1", segments={"tp": (3, 4)}, device=device)


def test_the_first_way_that_has_no_refusal() -> None:
    apart, same = [on(0, 0), on(1, 1)], [on(0, 4), on(1, 5), on(0, 6)]
    assert choose(apart, "NCCL", there=True) == ("NCCL", "NCCL")
    of_two_nodes = [on(0, 0), on(0, 1, "there")]  # each has a device 0
    assert choose(of_two_nodes, "NCCL", there=True) == ("NCCL", "NCCL")
    one = "not NCCL: ranks 4 and 6 are both on device 0 of node-here, and it wants one for each"
    assert choose(same, "NCCL", there=True) == (MEMORY, f"shared memory ({one})")
    assert choose(apart, "NCCL", there=False) == (MEMORY, "shared memory (not NCCL: this PyTorch has none)")
    way, line = choose([*same, on(0, 7, "there")], "NCCL", there=True)
    assert way == GLOO and line.endswith("; not shared memory: ranks 4 and 7 are on different nodes)")
    bare = [msgspec.structs.replace(each, segments={}) for each in same]
    assert choose(bare, "NCCL", there=True)[1].endswith("; not shared memory: this system has no memory files)")


def test_it_is_called_as_the_platform_calls_it() -> None:
    """RCCL is NCCL by another name: what people are told has theirs."""
    assert choose([on(0, 0), on(1, 1)], ROCM.collective, there=True) == ("RCCL", "RCCL")
    assert choose([on(0, 0), on(0, 1)], ROCM.collective, there=True)[1].startswith("shared memory (not RCCL: ranks 0")
    assert CPU.collective == MEMORY  # by which a mesh knows that ranks compute there
