"""The ranks that step together, as one state machine. Pure: the loop sends what `start` and `on_done` ask for.

launched -> loading -> probing -> allocating -> ready; any failure -> failed.
"""

from __future__ import annotations

from planaria.config.options import CacheConfig, SchedulerConfig
from planaria.errors import CapacityError
from planaria.protocol import Allocate, Command, Facts, Failed, Load, Probe, Ready

KV_SHARE = 0.5  # of available memory, where no size is given on a CPU
KV_CPU_LIMIT = 2 << 30


def kv_blocks(facts: list[Facts], cache: CacheConfig, scheduler: SchedulerConfig, *, cpu: bool) -> int:
    """How many blocks every rank can hold. Raises CapacityError when one request of full length wouldn't fit."""
    block = max(f.block_bytes for f in facts)
    available = min(f.available_bytes for f in facts)
    if cache.memory is not None:
        if cache.memory > available:
            raise CapacityError(
                f"--kv-cache-memory asks for {cache.memory / 2**30:.2f} GiB, {available / 2**30:.2f} GiB are free; "
                "ask for less"
            )
        budget = cache.memory
    else:
        budget = min(int(available * KV_SHARE), KV_CPU_LIMIT) if cpu else available
    blocks = budget // block
    needed = -(-scheduler.max_model_len // cache.block_size)
    if blocks < needed:
        raise CapacityError(
            f"KV memory of {budget / 2**20:.0f} MiB holds {blocks * cache.block_size} tokens, one request of "
            f"--max-model-len {scheduler.max_model_len} needs {needed * block / 2**20:.0f} MiB; "
            "raise --kv-cache-memory or lower --max-model-len"
        )
    most = scheduler.max_num_seqs * needed
    return min(blocks, most)


class Gang:
    """Brings ranks from launched to ready. `num_blocks` and `seconds` are known when `state` is "ready"."""

    def __init__(self, cache: CacheConfig, scheduler: SchedulerConfig, *, cpu: bool) -> None:
        self.cache, self.scheduler, self.cpu = cache, scheduler, cpu
        self.state = "launched"
        self.num_blocks = 0
        self.weight_bytes = 0
        self.seconds: dict[str, float] = {}
        self.failure: Failed | None = None

    def start(self) -> Command:
        self.state = "loading"
        return Load()

    def on_done(self, replies: list[object]) -> Command | None:
        """All ranks answered the last command; the next one, or None when ready or failed."""
        failed = next((reply for reply in replies if isinstance(reply, Failed)), None)
        if failed is not None:
            self.state, self.failure = "failed", failed
            return None
        if self.state == "loading":
            self.state = "probing"
            return Probe()
        if self.state == "probing":
            facts = [reply for reply in replies if isinstance(reply, Facts)]
            try:
                self.num_blocks = kv_blocks(facts, self.cache, self.scheduler, cpu=self.cpu)
            except CapacityError as e:
                self.state, self.failure = "failed", Failed(0, "probe", str(e), "", "capacity")
                return None
            self.weight_bytes = sum(f.weight_bytes for f in facts)
            self.state = "allocating"
            return Allocate(self.num_blocks)
        self.state = "ready"
        for reply in replies:
            if isinstance(reply, Ready):
                for part, seconds in reply.seconds.items():
                    self.seconds[part] = max(seconds, self.seconds.get(part, 0.0))
        return None
