"""A rank's KV: in memory that outlives it where its boot names some, else in its own; and what keeps blocks of it
outside of memory, where there is anything.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import math
import mmap
import platform
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial, reduce
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from planaria.checkpoint.identity import weights_digest
from planaria.config.digest import compared, compute_hash
from planaria.config.options import EngineConfig, TierConfig, TransferConfig
from planaria.config.secret import deployment_secret
from planaria.errors import CapacityError, ConfigError
from planaria.executor.boot import RankBoot
from planaria.hosts.memory import KVMemory, KVPart
from planaria.node import ProcessGone
from planaria.protocol import Allocate, KVNews, KVWork, StepPlan
from planaria.topology.layout import Layout
from planaria.worker.connector import RankConnector, Unconnected
from planaria.worker.device import keepers_of
from planaria.worker.kv_layout import CACHES, full_of, layout_of_kv, parts_of_kv, recut
from planaria.worker.kv_pages import HugeBlocks
from planaria.worker.kv_shared import SharedKV
from planaria.worker.kv_sums import BlockSums

if TYPE_CHECKING:
    from planaria.kernels.ops import Ops
    from planaria.topology.kv_parts import KVRect
    from planaria.types import KVLayout
    from planaria.worker.kv_layout import Items
    from planaria.worker.kv_peers import KVPeers
    from planaria.worker.kv_recut import Recut
    from planaria.worker.kv_store_loads import StoreLoads
    from planaria.worker.kv_tier import Store
    from planaria.worker.runner import Runner

MakeStore = Callable[[bytes, int], "Store"]  # of parts with this identity, of so many bytes

FEWEST = 16  # blocks that a folder must have room for

logger = logging.getLogger("planaria.worker")


class RankKV:
    """`made`: (rank, number of the KV) that the model's caches are of."""

    def __init__(self, boot: RankBoot) -> None:
        self.memory: KVMemory | None = None
        self.made: tuple[int, int] | None = None
        self.own = False  # has this process computed what is in them?
        self.connector: RankConnector | None = None  # of this epoch
        self.shared: SharedKV | None = None  # of other engines, in this epoch
        self.peers: KVPeers | StoreLoads | None = None  # ranks of other servers, or what they have stored
        self.sums: BlockSums | None = None
        self.pages: HugeBlocks | None = None  # of the model's caches, in memory of the node
        self.enter(boot)

    def enter(self, boot: RankBoot) -> None:
        """For another epoch."""
        self.disconnect()
        self.rank, self.address = boot.rank, boot.place.address
        shared, keepers = boot.memories.kv, keepers_of(boot)
        self.on_host = boot.config.device.platform.on_host
        if self.memory is not None and self.memory.origin == shared:
            self.memory.keepers = keepers
            return
        self.unmap()
        if self.memory is not None:
            self.memory.close()
        self.memory = None
        if shared is not None and (self.on_host or keepers is not None):
            try:
                self.memory = KVMemory.of(shared, keepers)
                self.memory.compute()
            except ProcessGone as e:
                logger.warning("KV will not outlive rank %d: %s", boot.rank, e)

    @property
    def numbers(self) -> tuple[int, ...]:
        """Of the KV in this rank's parts."""
        return self.memory.numbers(self.rank) if self.memory is not None else ()

    def forget(self, model: Any) -> None:
        """It counts for nothing, and its memory is given back."""
        self.disconnect()
        self.unmap()
        if model is not None:
            model.drop_kv()
        if self.memory is not None:
            for number in range(2):
                self.memory.clear_part(self.rank, number)
            self.memory.unmap()  # also as another rank

    def distrust(self) -> None:
        """This rank's device has failed: what it has written there isn't known."""
        if self.memory is not None and self.memory.keepers is not None:
            for number in range(2):
                self.memory.clear_part(self.rank, number)

    def take_over(
        self, boot: RankBoot, layout: Layout, command: Allocate, model: Any, ops: Ops
    ) -> Callable[[], dict[str, Any]]:
        """After `make`. What it returns waits for facts: `damaged`, of what another process has written, or a rank of
        another layout. It is looked at meanwhile, by all cores, while this thread has other things to do."""
        self.sums = None
        if self.memory is None:
            return dict
        config, lane, cut = boot.config, layout.coords(boot.rank).dp, command.recut
        damaged = recut(config, layout, boot.rank, model, ops, self.memory, cut) if cut else set()
        if not config.cache.kv_checksums or not self.on_host:
            return dict
        blocks, rows = model.kv_blocks(), config.scheduler.max_num_seqs
        table = np.frombuffer(self.memory.sums(self.rank, command.number, len(blocks[0])), np.int64)
        self.sums = BlockSums(blocks, table, rows, config.cache.block_size)
        if cut:
            self.sums.note(block for block in full_of(cut, lane) if block not in damaged)
            return lambda: {"damaged": sorted(damaged)}
        if self.own or len(command.full) <= lane:
            return dict
        beside = ThreadPoolExecutor(1)
        looked = beside.submit(self.sums.wrong, np.frombuffer(command.full[lane], np.int32).tolist())
        beside.shutdown(wait=False)
        return lambda: {"damaged": looked.result()}

    def unmap(self) -> None:
        """There is no model any more that computes in it."""
        self.made = self.pages = None

    def make(self, model: Any, ops: Ops, num_blocks: int, block_size: int, number: int) -> None:
        """Have caches of this KV, with all that is in its part. Raises CapacityError."""
        self.own = bool(number) and self.made == (self.rank, number)
        if self.own:
            return
        self.unmap()
        try:
            if self.memory is not None:
                size = num_blocks * model.kv_block_bytes(block_size)
                ops.kv_part = self._part(self.memory, number, size, CACHES * len(model.layers))
            kept = ops.kv_part is not None
            model.make_kv(num_blocks, block_size)
        except (RuntimeError, MemoryError) as e:
            raise CapacityError(f"no memory for {num_blocks} KV blocks of {block_size} tokens: {e}") from None
        finally:
            ops.kv_part = None
        self.made = self.rank, number
        if self.memory is not None and kept:
            self.memory.made(self.rank, number)
            if self.on_host:
                self.pages = HugeBlocks(model.kv_blocks())

    def _part(self, memory: KVMemory, number: int, size: int, count: int) -> KVPart | None:
        """That outlives this process; None: a device's keeper has none."""
        if number not in memory.numbers(self.rank):
            memory.clear_part(self.rank, number)
        try:
            return memory.part(self.rank, number, size, count)
        except OSError as e:
            if memory.keepers is None:
                raise
            logger.warning("KV will not outlive rank %d: %s", self.rank, e)
            return None

    # -- what is kept outside of memory

    def connect(self, config: EngineConfig, layout: Layout, model: Any, ops: Ops) -> dict[str, Any]:
        """Open this rank's part of what is configured. Facts: `stored`, keys."""
        self.disconnect()
        if config.lends_memory and self.memory is not None and self.on_host:
            blocks, digest = model.kv_blocks(), compute_hash(config, str(layout))
            self.shared = SharedKV(self.rank, blocks, digest, self.sums)
        transfer = config.cache.transfer
        network = transfer if transfer is not None and not transfer.by_store else None
        if not config.cache.keeps_blocks and network is None:
            return {"stored": {}} if self.shared is not None else {}
        from planaria.worker.kv_tier import RATE, KVStores, StoreThreads

        blocks, news = model.kv_blocks(), threading.Condition()
        size, mine = sum(part.shape[1] for part in blocks), layout_of_kv(config, layout)
        kernels, loaded = str(getattr(ops, "target", "")), self.sums.note if self.sums is not None else None

        @functools.cache
        def weights() -> str:
            return weights_digest(config.checkpoint.get("files", ()))

        def identity() -> bytes:
            return identity_of(config, layout, self.rank, f"{kernels} {size}", weights())

        def of_part(part: KVRect, of: KVLayout) -> bytes:
            """In a store of those who have that layout alone, for what has the same key there is found by it."""
            written = of if network is None else None
            return identity_of_part(config, part, of.block_size, kernels, weights(), written)

        recut = self._recut(config, layout, model, ops, of_part) if transfer is not None else None

        def common() -> bytes:
            """Of what servers of other layouts read, too."""
            return identity() if recut is None else of_part(recut.own[self.rank], mine)

        def opened(name: str, make: MakeStore, rate: float, own: Callable[[], bytes]) -> StoreThreads | Unconnected:
            try:
                return StoreThreads(name, make(own(), size), blocks, loaded, news=news, rate=rate)
            except (ImportError, OSError, ValueError, ConfigError) as e:
                logger.warning("rank %d keeps no KV blocks in the store %s: %s", self.rank, name, e)
                return Unconnected(name, f"rank {self.rank} keeps no KV blocks there; its log says why")

        stores = []
        if config.cache.kv_offloading:
            share = config.cache.kv_offloading // layout.size
            stores.append(opened("memory", partial(self._in_memory, most=share), math.inf, identity))
        if config.cache.kv_tier is not None and (transfer is None or transfer.folder is None):
            stores.append(opened("disk", partial(_on_disk, tier=config.cache.kv_tier), RATE, identity))
        if transfer is not None and transfer.by_store:
            from planaria.worker.kv_coming import PartLoads
            from planaria.worker.kv_recut import PartSource
            from planaria.worker.kv_store_loads import StoreLoads

            make = _shared_store(transfer)
            stores.append(opened(transfer.connector, make, RATE, common))
            loads = PartLoads(PartSource(self.rank, b"", size), blocks, recut, loaded, news)
            self.peers = StoreLoads(loads, mine, make)
        self.connector = KVStores(stores, news, mine) if stores else None
        stored: dict[str, bytes | None] = dict(self.connector.stored()) if self.connector is not None else {}
        if network is not None:
            from planaria.worker.kv_peers import KVPeers

            stored |= {network.connector: None}
            place = config.parallel.data_parallel_index * config.parallel.layout.size + self.rank
            if not network.port:
                network, place = msgspec.structs.replace(network, host=self.address), 0
            secret = deployment_secret(config.parallel, network.host)
            self.peers = KVPeers(network, secret, place, self.rank, common(), blocks, size, recut, loaded, news)
            if not network.port and self.peers.server is not None:
                return {"stored": stored, "address": self.peers.server.address}
        return {"stored": stored}

    def _recut(
        self, config: EngineConfig, layout: Layout, model: Any, ops: Ops, identity: Callable[[KVRect, KVLayout], bytes]
    ) -> Recut | None:
        """None: caches are somebody else's."""
        if config.model.foreign is not None:
            return None
        from planaria.worker.kv_recut import Recut

        def items(heads: int, tokens: int) -> Items:
            """Of caches that are made for this."""
            found: Items = model.layers[0].attention.cache(ops, 1, tokens, heads).items()
            return found

        size = config.cache.block_size
        return Recut(config.model, parts_of_kv(config, layout), self.rank, model.kv_blocks(), size, items, identity)

    def _in_memory(self, identity: bytes, size: int, *, most: int) -> Store:
        """In memory of the node, where there is any, so that it outlives this process."""
        from planaria.worker.kv_memory import MemoryStore, slots_of

        if slots_of(most, size) < FEWEST:
            raise ConfigError(
                "--kv-offloading-size", f"{most} bytes of a rank", f"has no room for {FEWEST} blocks of {size} bytes",
                "give more",
            )  # fmt: skip
        memory = self.memory.kept(self.rank, most) if self.memory is not None else mmap.mmap(-1, most)
        return MemoryStore(memory, identity, size)

    def disconnect(self, *, last: bool = False) -> None:
        """Nothing is written into a block any more. last: the process ends."""
        if self.connector is not None:
            self.connector.close(last=last)
            self.connector = None
        if self.shared is not None:
            self.shared.close()
            self.shared = None
        if self.peers is not None:
            self.peers.close()
            self.peers = None

    @property
    def busy(self) -> bool:
        """Is there something that wants each step done before the next?"""
        return any(each is not None for each in (self.connector, self.shared, self.peers, self.sums))

    def begin(self, plan: StepPlan, lane: int) -> None:
        """What comes before a step's computation."""
        if self.pages is not None and (blocks := [max(row.blocks) for row in plan.lanes[lane] if row.blocks]):
            self.pages.reach(max(blocks))
        work = plan.kv[lane] if plan.kv else KVWork()
        if plan.kv and self.connector is not None:
            self.connector.begin(work)
        if self.shared is not None:
            self.shared.begin(work)
            self.shared.copy(idle=work.waits)
        if self.peers is not None and plan.kv:
            self.peers.begin(work)

    def finished(self, plan: StepPlan, lane: int, runner: Runner) -> KVNews | None:
        """The step was computed. What came of what was begun with it, and with those before."""
        if self.sums is not None:
            self.sums.filled(plan.lanes[lane], runner)
        said = [self.shared.finished()] if self.shared is not None else []
        waits = bool(plan.kv) and plan.kv[lane].waits
        if self.peers is not None:
            said.append(self.peers.finished(waits=waits and not any(said) and self.connector is None))
        if self.connector is not None:
            said.append(self.connector.finished(waits=waits and not any(said)))
        return reduce(_joined, filter(None, said), None)


def _joined(one: KVNews | None, other: KVNews) -> KVNews:
    """Of different parts of a rank: what only stores say is said once."""
    if one is None:
        return other
    return msgspec.structs.replace(
        other, loaded=one.loaded + other.loaded, failed=one.failed | other.failed, stores=one.stores | other.stores
    )


def _shared_store(transfer: TransferConfig) -> MakeStore:
    """Of servers that exchange blocks by one."""
    if transfer.folder is not None:
        return partial(_on_disk, tier=transfer.folder)

    def make(identity: bytes, size: int) -> Store:
        from planaria.worker.kv_lmcache import LMCacheStore

        return LMCacheStore(transfer.remote_url, identity, size)

    return make


def _on_disk(identity: bytes, size: int, *, tier: TierConfig) -> Store:
    from planaria.config.machine import own_folder
    from planaria.worker.kv_store import BlockStore

    own_folder("--kv-tier", tier.folder)
    if tier.size < FEWEST * size:
        raise ConfigError("--kv-tier", tier.size, f"has no room for {FEWEST} blocks of {size} bytes", "give more")
    return BlockStore(tier.folder, identity, size, tier.size)


def identity_of(config: EngineConfig, layout: Layout, rank: int, kernels: str, weights: str) -> bytes:
    """Of all that the bytes of a rank's blocks depend on but their keys. 16 bytes."""
    at, partition = layout.coords(rank), config.parallel.pp_layer_partition
    place: list[object] = [layout.tp, layout.pp, at.tp, at.pp, partition, layout.pcp, at.pcp]
    place += [config.cache.block_size, config.parallel.context(layout)]
    return _identity(config, place, kernels, weights)


def identity_of_part(
    config: EngineConfig, part: KVRect, block_size: int, kernels: str, weights: str, written: KVLayout | None = None
) -> bytes:  # fmt: skip
    """Of a part of each block of so many tokens, whichever layout's rank has it, or of those that this one has written.
    16 bytes."""
    layers, heads, stripes = part
    place: list[object] = [[layers.start, layers.stop], [heads.start, heads.stop], stripes, block_size, written]
    return _identity(config, place, kernels, weights)


def _identity(config: EngineConfig, place: list[object], kernels: str, weights: str) -> bytes:
    device = config.device
    model = msgspec.json.encode(config.model).decode()
    parts = [
        "planaria KV 1", compared(config)["planaria"], weights, model, device.device, device.dtype,
        device.quantization, device.kernels, device.batch_invariant, kernels, platform.machine(), place,
    ]  # fmt: skip
    return hashlib.sha256(msgspec.json.encode(parts)).digest()[:16]
