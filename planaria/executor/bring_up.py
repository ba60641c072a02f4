"""The ranks that step together, as one state machine. Pure: the loop sends what `start` and `on_done` ask for.

launched -> joining -> grouping -> loading (-> sending -> arranging, where experts go between ranks) -> probing ->
allocating -> ready; any failure -> failed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from planaria.config.options import CacheConfig, SchedulerConfig
from planaria.core.eplb.places import ExpertsPlaced, Placing, placed
from planaria.errors import CapacityError
from planaria.protocol import (
    Allocate,
    Command,
    Facts,
    Failed,
    Hello,
    Join,
    KVCut,
    Load,
    PlaceExperts,
    Probe,
    Ready,
    Regroup,
    Reply,
    SendExperts,
)
from planaria.topology import Layout
from planaria.topology.experts import ExpertMap, Move
from planaria.wire import Travel

KV_SHARE = 0.5  # of available memory, where no size is given on a CPU
KV_CPU_LIMIT = 2 << 30


class Memory(msgspec.Struct, frozen=True):
    """What KV memory may be taken from. cpu: ranks of a node, and `sharers` engines, take from the same; `ranks_at`:
    for each rank, how many of the engine's ranks take from its memory, itself counted, none given: 1. `before`: bytes
    of KV that each rank had in this layout, 0 if it is new, None in the first epoch: an engine that has served goes on
    with what there is, and with what it chose once as long as that fits. `share`: of what would fit."""

    cpu: bool
    ranks_at: tuple[int, ...] = ()
    sharers: int = 1
    before: int | None = None
    share: float = 1.0
    returns: int = 0  # bytes of KV that are there while it is asked, and go when this is there

    def budget(self, facts: Sequence[Facts], asked: int | None) -> int:
        """Bytes for each rank; asked: by the user. Raises CapacityError."""
        each = self.ranks_at or (1,) * len(facts)
        free = [max(0, f.available_bytes + self.returns) for f in facts]
        available, ranks = min((bytes // n, n) for bytes, n in zip(free, each, strict=True))
        if asked is None:
            chosen = min(int(available * KV_SHARE / self.sharers), KV_CPU_LIMIT) if self.cpu else available
            return max(chosen, self.before) if self.before is not None and self.before <= available else chosen
        if asked > available and self.before is None:
            among = f", for each of {ranks} ranks" if ranks > 1 else ""
            raise CapacityError(
                f"--kv-cache-memory asks for {asked / 2**30:.2f} GiB{among}, {available * ranks / 2**30:.2f} GiB are "
                "free; ask for less"
            )
        return min(asked, available)


def kv_blocks(facts: Sequence[Facts], cache: CacheConfig, scheduler: SchedulerConfig, memory: Memory) -> int:
    """How many blocks every rank can hold. Raises CapacityError when one request of full length wouldn't fit."""
    block, budget, share = max(f.block_bytes for f in facts), memory.budget(facts, cache.memory), memory.share
    needed = -(-scheduler.max_model_len // cache.block_size)
    blocks = max(int(budget * share) // block, min(needed, budget // block))
    if blocks < needed and not (scheduler.auto_model_len and blocks):
        raise CapacityError(
            f"KV memory of {budget / 2**20:.0f} MiB holds {blocks * cache.block_size} tokens, one request of "
            f"--max-model-len {scheduler.max_model_len} needs {needed * block / 2**20:.0f} MiB; "
            "raise --kv-cache-memory or lower --max-model-len"
        )
    most = scheduler.max_num_seqs * needed
    return min(blocks, most)


def weights_of(facts: Sequence[Facts], homes: Sequence[str]) -> tuple[int, int]:
    """Bytes of all ranks' weights, and of these what is shared; what several ranks of a node share counts once."""
    shared = {(home, f.shared_as): f.shared_bytes for f, home in zip(facts, homes, strict=True) if f.shared_as}
    total = sum(shared.values())
    return total + sum(f.weight_bytes - f.shared_bytes for f in facts), total


PHASES = {
    Join: "connect", Regroup: "groups", Load: "load", SendExperts: "experts", PlaceExperts: "experts",
    Probe: "probe KV", Allocate: "warm-up",
}  # fmt: skip


def differences(members: Sequence[Hello]) -> str:
    """What rank 0 and the first rank that differs from it don't agree on; empty if all agree."""
    first = members[0]
    for other in members[1:]:
        if (first.digest, first.versions) == (other.digest, other.versions):
            continue
        for what, mine, theirs in (
            ("configuration", first.hashes, other.hashes), ("version of", first.versions, other.versions),
        ):  # fmt: skip
            for name in sorted(mine.keys() | theirs.keys()):
                if mine.get(name) != theirs.get(name):
                    values = f"{theirs.get(name, 'nothing')}, rank 0 has {mine.get(name, 'nothing')}"
                    return f"rank {other.rank} on {other.node} differs in {what} {name}: it has {values}"
        return f"rank {other.rank} on {other.node} differs in the layout it was told, or in what it takes for equal"
    return ""


class CommittedKV(msgspec.Struct, frozen=True):
    """KV on all ranks of a layout. `number`: in the order in which an engine's were made, from 1; `num_blocks`: 0, if
    nothing in them counts."""

    layout: Layout
    number: int = 0
    num_blocks: int = 0


class BringUp:
    """Brings the ranks of `layout` from launched to ready. loading: how many read weights at a time, None: all.
    placing: where whole experts may go. kv: of before; `keeps_kv`: they go on with it; full: see Allocate; `damaged`:
    of these, by lane; recut: what ranks make of it for this layout, which has so many blocks, None: nothing.
    `num_blocks`, `seconds`, `maps` and `travel` are known when `state` is "ready".
    """

    def __init__(
        self, cache: CacheConfig, scheduler: SchedulerConfig, layout: Layout, memory: Memory, *, epoch: int = 0,
        apart: bool = False, loading: int | None = None, placing: Placing | None = None,
        kv: CommittedKV | None = None, full: Callable[[], tuple[bytes, ...]] = tuple,
        recut: Callable[[int], KVCut] | None = None,
    ) -> None:  # fmt: skip
        self.cache, self.scheduler, self.layout, self.memory = cache, scheduler, layout, memory
        self.epoch, self.apart, self.loading = epoch, apart, loading
        self.kv, self.keeps_kv, self.full = kv or CommittedKV(layout), False, full
        self.recut = recut
        self.damaged: dict[int, set[int]] = {}
        self.state = "launched"
        self.members: tuple[Hello, ...] = ()
        self.num_blocks = self.kv_bytes = 0  # of KV on each rank
        self.weight_bytes = self.shared_bytes = 0  # of all ranks; of these, what other engines may have, too
        self.attention: list[str] = []  # ways of layers, where there is a choice
        self.seconds: dict[str, float] = {}
        self.failure: Failed | None = None
        self.placing = placing
        # keys of KV blocks that each rank has outside of the cache, by store
        self.stored: dict[int, dict[str, bytes | None]] = {}
        self.addresses: dict[int, str] = {}  # at which ranks of other engines come for blocks
        self.received: dict[int, int] = {}  # bytes of experts that each rank has from others, and that lie aside
        self.lay_aside: dict[int, int] = {}  # of these, before any were sent in this epoch
        self._placed: ExpertsPlaced | None = None
        self._to_load: list[tuple[int, ...]] = []

    def start(self) -> Command:
        self.state = "joining"
        return Join(self.epoch, self.layout, self.apart)

    def on_done(self, replies: list[Reply]) -> Command | None:
        """All ranks answered the last command, replies in rank order; the next one, or None when ready or failed."""
        failed = next((reply for reply in replies if isinstance(reply, Failed)), None)
        if failed is not None:
            return self._fail(failed)
        for reply in replies:
            if isinstance(reply, Ready):
                for part, seconds in reply.seconds.items():
                    self.seconds[part] = max(seconds, self.seconds.get(part, 0.0))
                if "damaged" in reply.facts:
                    self.damaged.setdefault(self.layout.coords(reply.rank).dp, set()).update(reply.facts["damaged"])
                if "stored" in reply.facts:
                    self.stored[reply.rank] = reply.facts["stored"]
                self.attention = self.attention or reply.facts.get("attention", [])
                if "address" in reply.facts:
                    self.addresses[reply.rank] = reply.facts["address"]
                received = max(reply.facts.get("received", 0), self.received.get(reply.rank, 0))
                self.received[reply.rank] = received
                if self.state == "loading":
                    self.lay_aside[reply.rank] = received
        match self.state:
            case "joining":
                self.members = tuple(reply for reply in replies if isinstance(reply, Hello))
                if found := differences(self.members):
                    return self._fail(Failed(0, "connect", found, "", "config"))
                if self.placing is not None:
                    self._placed = placed(self.placing, self.layout, [dict(hello.experts) for hello in self.members])
                    self.members = tuple(msgspec.structs.replace(hello, experts=()) for hello in self.members)
                self.state, there = "grouping", all(self.kv.number in hello.kv for hello in self.members)
                self.keeps_kv = there and self.layout == self.kv.layout and self.kv.num_blocks > 0
                keeps = self.keeps_kv or self.recut is not None
                return Regroup(self.epoch, self.layout, self.members, keeps_kv=keeps)
            case "grouping":
                self.state = "loading"
                world = range(self.layout.size)
                few = self.loading or len(world)
                self._to_load = [tuple(world[i : i + few]) for i in range(0, len(world), few)]
                return self._load()
            case "loading":
                if self._to_load:
                    return self._load()
                if self._placed is None or not self._placed.sent:
                    return self._probe()
                self.state = "sending"
                return SendExperts(0, self._sent())
            case "sending":
                assert self._placed is not None
                self.state = "arranging"
                return PlaceExperts(0, tuple(enumerate(each.slots for each in self._placed.maps)))
            case "arranging":
                return self._probe()
            case "probing":
                facts = [reply for reply in replies if isinstance(reply, Facts)]
                try:
                    self.num_blocks = self._num_blocks(facts)
                except CapacityError as e:
                    least = min(facts, key=lambda found: found.available_bytes)
                    return self._fail(Failed(least.rank, "probe", str(e), "", "capacity"))
                self.kv_bytes = self.num_blocks * max(f.block_bytes for f in facts)
                self.weight_bytes, self.shared_bytes = weights_of(facts, [member.home for member in self.members])
                self.state = "allocating"
                recut = self.recut(self.num_blocks) if self.recut is not None else None
                return Allocate(self.num_blocks, self.kv_number, self.full() if self.keeps_kv else (), recut)
            case _:
                self.state = "ready"
                return None

    @property
    def kv_number(self) -> int:
        """Of the KV in this epoch."""
        return self.kv.number if self.keeps_kv else self.kv.number + 1

    def _num_blocks(self, facts: Sequence[Facts]) -> int:
        """Raises CapacityError."""
        if self.keeps_kv:
            return self.kv.num_blocks
        return kv_blocks(facts, self.cache, self.scheduler, self.memory)

    @property
    def maps(self) -> tuple[ExpertMap, ...]:
        """Where the experts of each layer are now; empty: they aren't dealt whole."""
        return self._placed.maps if self._placed is not None else ()

    @property
    def travel(self) -> Travel:
        """Of experts, for this epoch. What lay aside before it was sent for it by ranks that have left, or belongs to a
        rearrangement that came to nothing."""
        if self._placed is None or self.placing is None:
            return Travel()
        others = 0 if self.placing.sent else sum(self.lay_aside.values())
        moved, sent = sum(self.received.values()) - others, self._placed.sent + self.placing.sent
        each = moved / sent if sent else 0.0
        return Travel(moved, round(each * (self._placed.needed + self.placing.needed)), self._placed.read)

    def _sent(self) -> tuple[Move, ...]:
        return tuple(move for move in self._placed.moves if move.source is not None) if self._placed is not None else ()

    def _load(self) -> Command:
        ranks = self._to_load.pop(0)
        if self._placed is None or self.placing is None:
            return Load(ranks)
        return Load(ranks, self._placed.as_told(self.placing.configured), self._sent())

    def _probe(self) -> Command:
        self.state = "probing"
        return Probe()

    def _fail(self, failed: Failed) -> Command | None:
        self.state, self.failure = "failed", failed
        return None
