"""What KV an engine's ranks have, whether it outlives them, and where."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol, cast

import msgspec

from planaria.checkpoint.identity import weights_digest, weights_version
from planaria.config.digest import compute_hash
from planaria.config.options import EngineConfig
from planaria.core import kv_index
from planaria.core.kv_cache import KeyScope
from planaria.core.kv_index import BufferIndex, LaneIndex
from planaria.errors import CapacityError
from planaria.executor.bring_up import BringUp, CommittedKV
from planaria.hosts.kv_keys import FIRST, Shape
from planaria.node import Shared
from planaria.protocol import KVCut
from planaria.topology import Layout

SETTLE = 5.0  # seconds in which a dead engine's ranks end


class NodeMemory(Protocol):
    """Where KV of this node's ranks is, so that it outlives them. origin: what they are told, if anything."""

    @property
    def origin(self) -> Shared | None: ...

    def index(self, size: int) -> memoryview:
        """What tells of what is in it. Zeros, where nothing has been written since `clear`."""

    def settle(self, timeout: float) -> bool:
        """Wait until nobody computes in it. False: somebody still does."""

    def clear(self) -> None:
        """All that is in it goes; no rank computes."""

    def whole(self, number: int, layout: Layout, homes: Collection[str]) -> bool:
        """Is KV of this number here for each rank of a layout, where all of `homes` are, and room for another?"""

    def keep(self, number: int) -> None:
        """All goes but KV of this number, the index too."""

    @property
    def num_bytes(self) -> int:
        """That it takes."""


class GangKV:
    """`there`: what there is; `kept`: is it of before this epoch? `moved`: by lane, blocks of before and what they are
    now, where it was cut anew for this epoch's layout. `indexes`: of each lane, what is in it; `scope`: of its keys."""

    def __init__(self, config: EngineConfig) -> None:
        self.config, self.memory = config, cast("NodeMemory | None", None)
        self.there, self.kept = CommittedKV(config.parallel.layout), False
        self.indexes: Sequence[LaneIndex | None] = ()
        self.scope = KeyScope()
        self.known: Callable[[], list[set[int]]] | None = None  # of the engine's lanes: blocks that are full and count
        self.counting: Callable[[], list[list[int]]] | None = None  # all that count, in the order they are to be kept
        self.moved: list[dict[int, int]] | None = None
        self.returns = 0  # bytes that are given back when it is cut
        self.damaged: dict[int, set[int]] = {}  # by lane: blocks of `there` that count for nothing
        self.block_bytes = 1  # of a rank's part of a block
        self.stored: dict[int, dict[str, bytes | None]] = {}  # by rank and store: keys of blocks outside of the cache
        self.addresses: list[str] = []  # of all ranks, for those of engines on other nodes

    def find(self) -> None:
        """What another engine has left. Raises CapacityError: its ranks are still there."""
        self._rescope()
        if self.memory is None:
            return
        if not self.memory.settle(SETTLE):
            raise CapacityError(
                f"the memory of KV is in use by ranks of before, {SETTLE:.0f} s after their engine ended"
            )
        layout = self.config.parallel.layout
        # Numbers begin anywhere: what another engine has left on some node must not bear the number of this one's.
        self.there = CommittedKV(layout, int.from_bytes(os.urandom(6), "little"))
        left = kv_index.found(self.memory.index(FIRST), self._digest(layout))
        if left is not None and left[1] == self._shape(layout, left[1].num_blocks):
            number, shape = left
            buffer = self.memory.index(shape.size)
            self.there = CommittedKV(layout, number, shape.num_blocks)
            self.indexes = [BufferIndex(buffer, shape, lane) for lane in range(shape.lanes)]

    def rescope(self, *, kept: bool = False) -> None:
        """Weights are others: what there is counts for nothing. kept: but for what is open."""
        self._rescope()
        if not kept:
            self.forget()

    def _rescope(self) -> None:
        files = self.config.checkpoint.get("files", ())
        cache = self.config.cache
        version = weights_digest if cache.keeps_blocks or cache.transfer is not None else weights_version
        try:
            self.scope = KeyScope(version(files), self.config.device.dtype, self.config.weights_number)
        except OSError as e:
            raise CapacityError(
                f"--kv-tier, --kv-offloading-size, --kv-transfer-config must read the weights where the engine is: {e}"
            ) from None

    def formed(self, ranks: BringUp) -> None:
        """All ranks have it."""
        there, recut = CommittedKV(ranks.layout, ranks.kv_number, ranks.num_blocks), ranks.recut is not None
        kept, self.there, self.kept = ranks.keeps_kv, there, ranks.keeps_kv or recut
        self.moved = self.moved if recut else None
        self.damaged = ranks.damaged if self.kept else {}
        self.block_bytes = ranks.kv_bytes // max(1, ranks.num_blocks)
        self.stored = ranks.stored if len(ranks.stored) == ranks.layout.size else {}
        self.addresses = [ranks.addresses[rank] for rank in range(ranks.layout.size) if rank in ranks.addresses]
        if kept or self.memory is None:
            return
        if recut:
            self.memory.keep(there.number)
        shape = self._shape(there.layout, there.num_blocks)
        digest = self._digest(there.layout)
        self.indexes = kv_index.begin(self.memory.index(shape.size), shape, digest, there.number)

    def full(self) -> tuple[bytes, ...]:
        """Of each lane, blocks that are full and count."""
        return tuple(_packed(sorted(blocks)) for blocks in self._full())

    def _full(self) -> list[set[int]]:
        if not self.config.cache.kv_checksums:
            return []
        if self.known is not None:
            return self.known()
        return [kv_index.full_blocks(index) for index in self.indexes if index is not None]

    def recut_for(self, layout: Layout, homes: Collection[str]) -> Callable[[int], KVCut] | None:
        """What ranks of a layout on these nodes make of what there is, by how many blocks they have. None: nothing,
        where it is the same layout, or not all of it is on this node."""
        there, parallel, self.returns = self.there, self.config.parallel, 0
        if self.memory is None or self.counting is None or not there.num_blocks or parallel.splits_prefill:
            return None
        if not self.config.device.platform.on_host:  # a rank would have to map what is on another's device
            return None
        if layout == there.layout or layout.dp != there.layout.dp or self.config.model.foreign is not None:
            return None
        whole = self.memory.whole(there.number, there.layout, homes)
        self.returns = self.memory.num_bytes if whole else 0
        return self._recut if whole else None

    def _recut(self, num_blocks: int) -> KVCut:
        assert self.counting is not None
        there, counting = self.there, [blocks[:num_blocks] for blocks in self.counting()]
        self.moved = [{block: at for at, block in enumerate(blocks)} for blocks in counting]
        full = [_packed(moved[block] for block in blocks & moved.keys())
                for moved, blocks in zip(self.moved, self._full(), strict=False)]  # fmt: skip
        packed = tuple(map(_packed, counting))
        return KVCut(there.layout, there.number, there.num_blocks, packed, tuple(full))

    def _digest(self, layout: Layout) -> bytes:
        return (compute_hash(self.config, str(layout)) + self.scope.root().hex()).encode()

    def _shape(self, layout: Layout, num_blocks: int) -> Shape:
        scheduler, size = self.config.scheduler, self.config.cache.block_size
        width = -(-(scheduler.max_model_len + scheduler.max_drafts) // size) + 1
        return Shape(layout.dp, num_blocks, size, scheduler.max_num_seqs, width)

    @property
    def origin(self) -> Shared | None:
        return self.memory.origin if self.memory is not None else None

    def forget(self) -> None:
        """It is computed again in the next epoch."""
        self.there = msgspec.structs.replace(self.there, num_blocks=0)

    def clear(self, layout: Layout) -> None:
        """No rank computes any more, and none goes on with what there is."""
        self.there, self.indexes = CommittedKV(layout, self.there.number + 1), ()
        if self.memory is not None:
            self.memory.clear()


def _packed(blocks: Iterable[int]) -> bytes:
    return array("i", blocks).tobytes()
