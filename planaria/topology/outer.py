"""Who started this process, where that is not this package. Pure."""

from __future__ import annotations

import msgspec


class OuterLauncher(msgspec.Struct, frozen=True, kw_only=True):
    """What an outer launcher (torchrun) says of this process in its environment."""

    rank: int
    world_size: int
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 29500
    serves_store: bool = False  # a TCP store is there; else rank 0 serves one
    attempt: int = 0  # how often it has started everything again
    own_prompts: bool = False  # each process brings prompts of its own, else all bring the same
