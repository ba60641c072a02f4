"""KV blocks on disk, simulated: what a rank's files hold, what befalls them, and when what is asked for comes. What the
core makes of it is the shipping code, and so are identities, heads and checks of files.

A file's bytes are the cells of a block as this rank would have them: those of another part, or of other weights, give
other cells. So whatever is mixed up shows in the tokens, and before that in the rules
- only committed: what is saved under a key is what its tokens give, when it is saved
- same bytes: what is brought back under a key is what was saved under it
"""

from __future__ import annotations

import random
import struct
from array import array
from typing import TYPE_CHECKING

import msgspec

from planaria.core.kv_cache import KeyScope, chain
from planaria.protocol import KVLoad, KVNews, KVWork, StoreNews
from planaria.topology import Layout
from planaria.worker import kv, kv_store
from planaria.worker.parts import context_of
from tests.reference_worker import mix, number_of
from tests.sim.scenario import BLOCK_BYTES

if TYPE_CHECKING:
    from planaria.core.engine import EngineCore
    from tests.sim.process import Process
    from tests.sim.simulation import Simulation

File = tuple[bytes, bytearray]  # head and payload
HARMS = ("flip", "cut", "vanish", "of another block", "of another part", "all vanish", "read-only", "slow")
BEFORE = "of before"  # weights that there once were
WAIT = 0.02
GARBAGE = 7  # a cell that was spoilt


class SimDisk:
    """Of all nodes. `files` by identity and key. `chance` is its own: scenarios without a disk are as they were."""

    def __init__(self, sim: Simulation) -> None:
        self.sim, self.scenario = sim, sim.scenario
        self.chance = random.Random(f"disk of {sim.scenario.seed}")
        self.files: dict[bytes, dict[bytes, File]] = {}
        self.readonly = False
        self.slow = self.chance.choice([1.0, 1.0, 20.0, 200.0])
        self.left = self.chance.choice([0, 1, 3, 10])  # harms
        self.truth: dict[bytes, list[int]] = {}  # by key: cells
        for asked in self.scenario.asked.values():
            submit = asked.submit
            history, scope = submit.prompt + asked.tokens, KeyScope("", "float32")
            self._learn(history, scope.root(submit.cache_salt, submit.adapter), submit.adapter)
        self._fill()

    def _learn(self, history: list[int], root: bytes, adapter: str) -> None:
        size, h, cells = self.scenario.config.cache.block_size, 0, []
        for token in history:
            h = mix(h, token, *number_of(adapter))
            cells.append(h)
        for i, key in enumerate(chain(history, size, [], root)):
            self.truth[key] = cells[i * size : (i + 1) * size]

    def _fill(self) -> None:
        """What a server of before has left, with these weights or with others."""
        layout = self.scenario.config.parallel.layout
        ranks = layout.tp * layout.pp * layout.pcp
        if self.chance.random() < 0.7:
            for rank in range(ranks):
                identity = kv.identity_of(self.scenario.config, layout, rank, "sim", "")
                for key, cells in self.truth.items():
                    if self.chance.random() < 0.98:
                        self.keep(identity, "", rank, key, self.here(cells, layout, rank))
        if self.chance.random() < 0.5:
            size = self.scenario.config.cache.block_size
            for rank in range(ranks):
                identity = kv.identity_of(self.scenario.config, layout, rank, "sim", BEFORE)
                for asked in self.scenario.asked.values():
                    submit = asked.submit
                    root = KeyScope(BEFORE, "float32").root(submit.cache_salt, submit.adapter)
                    for i, key in enumerate(chain(submit.prompt, size, [], root)):
                        self.keep(identity, BEFORE, rank, key, self.here([7 + i] * size, layout, rank))

        self._of_other_context(layout)

    def _of_other_context(self, layout: Layout) -> None:
        """What ranks have left that had other tokens of the same blocks, in as many bytes."""
        chance, config = random.Random(f"context on the disk of {self.scenario.seed}"), self.scenario.config
        parallel = config.parallel
        size, interleave = parallel.decode_context_parallel_size, parallel.cp_kv_cache_interleave_size
        others = [{"cp_kv_cache_interleave_size": 3 - interleave}]
        others += [
            {"decode_context_parallel_size": other}
            for other in range(1, layout.tp + 1)
            if layout.tp % other == 0 and other != size
        ]
        for other in others:
            left = msgspec.structs.replace(config, parallel=msgspec.structs.replace(parallel, **other))
            for rank in range(layout.tp * layout.pp * layout.pcp) if chance.random() < 0.5 else ():
                identity = kv.identity_of(left, layout, rank, "sim", "")
                for key, cells in self.truth.items():
                    self.keep(identity, "", rank, key, [mix(cell) for cell in self.here(cells, layout, rank)])

    def here(self, cells: list[int], layout: Layout, rank: int) -> list[int]:
        """Of a block's cells, those that this rank has."""
        group = context_of(self.scenario.config, rank, layout)
        return cells if group is None else [cell for at, cell in enumerate(cells) if group.stripes.here(at)]

    def of(self, identity: bytes) -> dict[bytes, File]:
        return self.files.setdefault(identity, {})

    def began(self, core: EngineCore) -> None:
        """What the engine has measured, and how much it has a rank copy in a step."""
        core.tier.rates.token = self.chance.choice([None, 0.001, 0.02])
        core.tier.busy_bytes = self.chance.choice([BLOCK_BYTES, 100 * BLOCK_BYTES])

    def keep(self, identity: bytes, weights: str, part: int, key: bytes, cells: list[int]) -> None:
        payload = encode(cells, weights, part)
        self.of(identity)[key] = kv_store.head_of(identity, key, payload), payload

    def occasion(self) -> None:
        """Something may be done to what is there."""
        chance = self.chance
        there = [(files, key) for _, files in sorted(self.files.items()) for key in sorted(files)]
        if not self.left or not there or chance.random() > 0.1:
            return
        self.left -= 1
        harm = chance.choice(HARMS)
        self.sim.counts[f"disk: {harm}"] += 1
        self.sim.world.note("DISK {}", harm)
        for files, key in there if harm == "flip" and chance.random() < 0.5 else [chance.choice(there)]:
            head, payload = files[key]
            match harm:
                case "flip":
                    payload[chance.randrange(len(payload))] ^= 1 << chance.randrange(8)
                case "cut":
                    del payload[-1:]
                case "vanish":
                    del files[key]
                case "of another block":
                    files[key] = files[chance.choice(sorted(files))]
                case "of another part":
                    other = chance.choice(sorted(self.files))
                    files[key] = self.files[other].get(key, (head, payload))
                case "all vanish":
                    for each in self.files.values():
                        each.clear()
                case "read-only":
                    self.readonly = not self.readonly
                case "slow":
                    self.slow = chance.choice([1.0, 30.0, 1000.0])


def encode(cells: list[int], weights: str, part: int) -> bytearray:
    """As a rank with this part has them."""
    mask = mix(part, len(weights))
    return bytearray(array("q", [cell ^ mask for cell in cells]).tobytes())


def decode(payload: bytearray, part: int) -> list[int]:
    mask = mix(part, 0)
    return [cell ^ mask for cell in struct.unpack(f"<{len(payload) // 8}q", payload)]


class SimTier:
    """See planaria.worker.connector: of one rank in one epoch."""

    def __init__(self, process: Process, disk: SimDisk) -> None:
        self.process, self.disk, self.sim = process, disk, process.sim
        layout = process.layout
        self.part = process.rank % (layout.tp * layout.pp * layout.pcp)
        self.identity = kv.identity_of(disk.scenario.config, process.layout, process.rank, "sim", "")
        self.files = disk.of(self.identity)
        self.open: set[int] = set()
        self.news = _News()

    def stored(self) -> dict[str, bytes]:
        return {"disk": b"".join(sorted(self.files))}

    def begin(self, work: KVWork) -> None:
        assert self.process.worker is not None
        self.disk.occasion()
        self.open.difference_update(work.dropped)
        for load in work.loads:
            self.open.add(load.number)
            seconds = self.disk.slow * self.disk.chance.uniform(0.0005, 0.01) * len(load.keys)
            self.process.later(seconds, self._load, load, 0, seconds)
        for key, block in work.saves:
            cells = list(self.process.worker.cells[block])
            whole = cells == self._truth(key)
            self.sim.world.require(whole, "only committed", f"block {block} is saved and holds something else")
            self.process.later(self.disk.slow * self.disk.chance.uniform(0.001, 0.05), self._save, key, cells)

    def _load(self, load: KVLoad, done: int, seconds: float) -> None:
        worker = self.process.worker
        if load.number not in self.open or worker is None:
            return
        if done < len(load.keys) and self._whole(load.keys[done]):
            payload = self.files[load.keys[done]][1]
            worker.cells[load.blocks[done]] = list(decode(payload, self.part))
            worker.sums[load.blocks[done]] = worker.sum(load.blocks[done])
            self.process.later(seconds / len(load.keys), self._load, load, done + 1, seconds)
            return
        self.open.discard(load.number)
        self.news.loaded.append((load.number, done, seconds))
        self.sim.counts["blocks brought back"] += done

    def _whole(self, key: bytes) -> bool:
        head, payload = self.files.get(key, (b"", bytearray()))
        size = 8 * self.disk.scenario.config.tokens_here(self.process.layout)
        if len(payload) != size or not kv_store.is_whole(head, self.identity, key, payload):
            self.files.pop(key, None)
            self.news.gone.append(key)
            self.sim.counts["blocks found damaged"] += bool(payload)
            return False
        same = decode(payload, self.part) == self._truth(key)
        self.sim.world.require(same, "same bytes", f"rank {self.process.rank} brings back something else")
        return True

    def _truth(self, key: bytes) -> list[int] | None:
        cells = self.disk.truth.get(key)
        return cells and self.disk.here(cells, self.process.layout, self.process.rank)

    def _save(self, key: bytes, cells: list[int]) -> None:
        if self.disk.readonly:
            self.news.refused.append(key)
            return
        self.disk.keep(self.identity, "", self.part, key, cells)
        self.news.stored.append(key)
        self.sim.counts["blocks saved"] += 1

    def finished(self) -> KVNews | None:
        news, self.news = self.news, _News()
        return news.told(self.disk)


class _News:
    def __init__(self) -> None:
        self.loaded: list[tuple[int, int, float]] = []
        self.stored: list[bytes] = []
        self.refused: list[bytes] = []
        self.gone: list[bytes] = []

    def told(self, disk: SimDisk) -> KVNews | None:
        if not (self.loaded or self.stored or self.refused or self.gone):
            return None
        why = "read-only" if disk.readonly and disk.chance.random() < 0.5 else ""
        stores = {"disk": StoreNews(why=why)}
        return KVNews(tuple(self.loaded), tuple(self.stored), tuple(self.refused), tuple(self.gone), stores)
