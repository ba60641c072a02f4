"""Who started this process, where that is not this package. Pure."""

from __future__ import annotations

import msgspec


class OuterLauncher(msgspec.Struct, frozen=True, kw_only=True):
    """What an outer launcher (torchrun) says of this process in its environment. rank, world_size: of its engine, which
    is number `replica` of `replicas` that share nothing."""

    rank: int
    world_size: int
    replica: int = 0
    replicas: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 29500
    serves_store: bool = False  # a TCP store is there; else rank 0 serves one
    attempt: int = 0  # how often it has started everything again
    own_prompts: bool = False  # each process brings prompts of its own, else all of an engine bring the same

    def divided(self, replicas: int) -> OuterLauncher:
        """As one of so many engines, to which processes are dealt in order. They must come out even."""
        size = self.world_size // replicas
        replica, rank = divmod(self.rank, size)
        return msgspec.structs.replace(self, rank=rank, world_size=size, replica=replica, replicas=replicas)
