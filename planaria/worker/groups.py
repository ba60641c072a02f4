"""The groups of a rank: what it brings to those of an epoch, how it meets the others, how it leaves them."""

from __future__ import annotations

import dataclasses
import logging
import os
from typing import TYPE_CHECKING, Any

from planaria.config.all2all import way_of
from planaria.config.digest import compared, compute_hash, hash_fields
from planaria.errors import CapacityError
from planaria.executor.boot import RankBoot
from planaria.executor.preflight import Door, doors_of_others, reach, unreachable
from planaria.mesh.boot import Opening, create_segments, open_mesh
from planaria.mesh.edges import EdgeComm
from planaria.mesh.mesh import Mesh
from planaria.protocol import Hello, Join, Regroup
from planaria.worker.device import shared_memory

if TYPE_CHECKING:
    from planaria.mesh.all2all import All2All

logger = logging.getLogger("planaria.worker")

REACH_TIMEOUT = 10.0  # seconds to connect to every rank elsewhere


class Groups:
    """Of one rank in one epoch after the other. `mesh`: its groups; `exchanges`: of tokens, with the ranks of other
    lanes, one for each micro-batch; `layout`: in force. boot: of the present epoch."""

    def __init__(self, boot: RankBoot) -> None:
        self.boot = boot
        self.layout = boot.config.parallel.layout
        self.mesh = Mesh(boot.rank)
        self.exchanges: list[All2All] = []
        self._opening = Opening()
        self._segments: dict[str, tuple[int, int]] = {}  # that this rank made
        self._door: Door | None = None  # for others to knock at, until they have met
        self._store: Any = None  # that groups across nodes meet at, on rank 0

    @property
    def whole_experts(self) -> bool:
        """Are experts dealt to ranks whole? Then they travel."""
        return self.boot.config.model.moe is not None and self.boot.config.parallel.enable_expert_parallel

    @property
    def shared_experts(self) -> bool:
        """Are they dealt to ranks of all lanes, whole or in slices?"""
        return self.boot.config.model.moe is not None and self.boot.config.parallel.shares_experts

    @property
    def spreads(self) -> bool:
        """Are experts dealt to ranks that have tokens of their own?"""
        return self.layout.dp * self.layout.pcp > 1 and self.shared_experts

    @property
    def _num_micro_batches(self) -> int:
        """Only what is exchanged can be hidden."""
        return self.boot.config.parallel.num_micro_batches if self.spreads else 1

    @property
    def _shares_memory(self) -> bool:
        """Where the nodes, or the devices, allow it."""
        return not self.boot.config.parallel.disable_custom_all_reduce

    def bring(self, command: Join, held: tuple[tuple[int, tuple[int, ...]], ...], kv: tuple[int, ...]) -> Hello:
        """Have left the groups of before; say what this rank brings to the new ones. held, kv: see Hello."""
        config, place, rank, layout = self.boot.config, self.boot.place, self.boot.rank, self.layout
        self._opening = Opening()
        self._door = Door(place.address) if command.apart else None
        self._segments = create_segments(
            rank, layout, experts=self.shared_experts, micro_batches=self._num_micro_batches
        )
        store = None
        by_store = command.apart or not self._shares_memory or not config.device.platform.on_host
        if rank == 0 and layout.size > 1 and by_store:
            from planaria.mesh.gloo import open_store

            self._store, port = open_store(place.address)
            store = place.address, port
        return Hello(
            rank, os.getpid(), place.home, place.node, place.address, compared(config), hash_fields(config),
            self._segments, store, self._door.port if self._door is not None else 0, held,
            kv, compute_hash(config, str(layout)),
            -1 if config.device.platform.on_host else next(iter(place.devices), 0),
        )  # fmt: skip

    def meet(self, command: Regroup) -> None:
        """Make the groups with all who joined. Raises CapacityError where some can't be reached."""
        config, boot = self.boot.config, self.boot
        own = command.members[boot.rank]
        failed = reach(doors_of_others(own, command.members), REACH_TIMEOUT)
        if failed:
            raise CapacityError(unreachable(own, command.members, failed))
        self.mesh = open_mesh(
            boot.rank, command.layout, command.epoch, command.members, fast=self._shares_memory,
            shared=lambda: shared_memory(config), lanes=boot.lanes, crowded=boot.crowded,
            collective=config.device.platform.collective, deadline=command.deadline, opening=self._opening,
            experts=self.shared_experts, micro_batches=self._num_micro_batches,
        )  # fmt: skip
        self._opening.check()
        self.exchanges = self._make_exchanges()

    def _make_exchanges(self) -> list[All2All]:
        """Called by all ranks of the expert group together."""
        moe = self.boot.config.model.moe
        if not self.spreads or moe is None:
            return []
        from planaria.mesh.all2all import Shapes, make

        config = self.boot.config.with_layout(self.layout)
        parallel, model, tokens = config.parallel, config.model, config.scheduler.max_num_batched_tokens
        most = [tokens] + [-(-tokens // self._num_micro_batches)] * len(self.mesh.further)
        slots, ranks = parallel.expert_slots(moe.num_experts), self.mesh.ep.size
        name = way_of(parallel.all2all_backend, slots, ranks)
        if name != parallel.all2all_backend:
            logger.warning(
                "tokens are exchanged by %s: %s has no way for %d experts on %d ranks", name, parallel.all2all_backend,
                slots, ranks,
            )  # fmt: skip
        return [
            make(
                name, group,
                Shapes(
                    max_tokens=limit, width=self.layout.tp, num_slots=slots, top_k=moe.top_k,
                    hidden_size=model.hidden_size,
                ),
                dealt=parallel.use_sequence_parallel_moe,
            )
            for group, limit in zip((self.mesh.ep, *self.mesh.further), most, strict=True)
        ]  # fmt: skip

    def by_edges(self) -> None:
        """Hidden states pass to the next stage with the answers, not in a group."""
        self.mesh = dataclasses.replace(self.mesh, pp=EdgeComm(self.mesh.pp))

    def abort(self, reason: str) -> None:
        """End what this rank waits for in its groups, or where it meets them. Any thread."""
        self._opening.abort(reason)
        self.mesh.abort(reason)

    def leave(self) -> None:
        self.mesh.close()
        self.mesh, self.exchanges = Mesh(self.boot.rank), []
        self._store = None
        self.close_door()
        for fd, _ in self._segments.values():
            os.close(fd)
        self._segments = {}

    def close_door(self) -> None:
        if self._door is not None:
            self._door.close()
            self._door = None
