"""A rank: answers every command with exactly one reply, whatever happens. Weights are read once and kept."""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, cast

import msgspec

from planaria.checkpoint.identity import weights_digest
from planaria.executor.boot import SPARE, RankBoot
from planaria.mesh.mesh import Mesh
from planaria.node import resident_bytes
from planaria.protocol import (
    Allocate,
    Call,
    Command,
    Done,
    Exit,
    Facts,
    Failed,
    FreeMemory,
    Join,
    LaneResult,
    Load,
    PlaceExperts,
    Probe,
    PutLora,
    Ready,
    Regroup,
    Reply,
    SendExperts,
    StepPlan,
    StepResult,
)
from planaria.topology.experts import Maps, Move
from planaria.topology.layout import Layout
from planaria.worker.classes import call, make
from planaria.worker.device import (
    available_bytes,
    let_go,
    make_follower,
    make_ops,
    make_sampler,
    make_stage,
    take_thread,
    told_on_devices,
)
from planaria.worker.draft_model import RankDraft
from planaria.worker.groups import Groups
from planaria.worker.guard import guard
from planaria.worker.kv import RankKV
from planaria.worker.null import NullRank
from planaria.worker.parts import (
    Part,
    common_part,
    configured,
    context_of,
    of_any_lane,
    of_rank,
    part_of,
    read_experts_apart,
    read_part,
)
from planaria.worker.step_later import StepLater
from planaria.worker.weights import NotPrepared, RankWeights

if TYPE_CHECKING:
    from planaria.config.options import EngineConfig
    from planaria.kernels.ops import Ops
    from planaria.worker.experts import Experts
    from planaria.worker.micro_batches import MicroBatches
    from planaria.worker.runner import Runner
    from planaria.worker.sampler import Follower, Sampler

logger = logging.getLogger("planaria.worker")

BESIDE = 10  # how nice who prepares weights is to the ranks that compute: a tenth of a core that is wanted

OnSeconds = Callable[[str, float], None]


class Worker:
    """One rank with a model, or with its part of one. `progress(part, fraction)` is told how loading goes.

    The other ranks are met in Regroup. Only the rank that draws tokens (`mesh.samples`) answers a
    step with rows; the others' results have none. A rank that fails tells the others, which then fail by its name.
    """

    def __init__(self, boot: RankBoot, progress: OnSeconds | None = None) -> None:
        self.boot, self.config, self.rank = boot, boot.config, boot.rank
        self.groups, self.kv, self.weights = Groups(boot), RankKV(boot), RankWeights(boot)
        self.micro_batches: MicroBatches | None = None
        self.part: Part | None = None  # of the model, that is loaded
        self.prepared: dict[Part, tuple[Ops, Any]] = {}  # a spare's, until it knows which it is
        self.draft = RankDraft()
        self.progress = progress or (lambda part, fraction: None)
        self.seconds: dict[str, float] = {}
        self.ops: Ops | None = None
        self.model: Any = None
        self.experts: Experts | None = None  # where they are dealt to ranks whole
        self.runner: Runner | None = None
        self.sampler: Sampler | Follower | None = None
        self.loras: Any = None  # adapters, where there are any
        self.ahead = False  # may answers to steps come later (planaria.executor.link.later)?

    @property
    def mesh(self) -> Mesh:
        """Its groups of the present epoch."""
        return self.groups.mesh

    @property
    def layout(self) -> Layout:
        """In force."""
        return self.groups.layout

    def handle(self, command: Command) -> Reply:
        """Carry out a command; never raises. Where `ahead` is set the answer to a step may be a Later."""
        match command:
            case StepPlan():
                return guard(self.rank, "step", lambda: self._step(command))
            case Join():
                return guard(self.rank, "connect", lambda: self._join(command))
            case Regroup():
                return guard(self.rank, "groups", lambda: self._regroup(command))
            case Load():
                return guard(self.rank, "load", lambda: self._load(command))
            case SendExperts():
                return guard(self.rank, "experts", lambda: _prepare(self.experts, command, self.rank))
            case PlaceExperts():
                return guard(self.rank, "experts", lambda: _arrange(self.experts, command, self.rank))
            case PutLora():
                return guard(self.rank, "adapter", lambda: self.loras.handle(command, self.rank))
            case Probe():
                return guard(self.rank, "probe", lambda: _facts(self))
            case Allocate():
                return guard(self.rank, "allocate", lambda: self._allocate(command))
            case Call():
                return guard(self.rank, f"call {command.method}", lambda: Done(self.rank, call(self, command)))
            case FreeMemory():
                return guard(self.rank, "sleep", lambda: free(self, command))
            case Exit():
                return guard(self.rank, "exit", self._exit)

    def enter(self, boot: RankBoot) -> None:
        """Go on in another epoch, maybe as another rank. What is loaded stays, unless weights are others."""
        if boot.config.weights_number != self.config.weights_number:
            self.unload(stays=boot.config.device == self.config.device)
            self.prepared.clear()
        self.boot, self.config, self.rank = boot, boot.config, boot.rank
        self.groups.boot = boot
        self.kv.enter(boot)
        self.weights.enter(boot)
        self.seconds = {}

    def abort(self, reason: str) -> None:
        """End what this rank waits for in its groups, or where it meets them. Any thread."""
        self.groups.abort(reason)

    def prepare(self) -> Failed | None:
        """As a spare: load every part that a rank of this layout may have, but where that would be all experts. Beside
        others: their parts of other weights, and say why they can't be had."""
        if self.boot.beside:
            os.nice(BESIDE)
            done = guard(SPARE, "load", lambda: prepare_beside(self))
            return done if isinstance(done, Failed) else None
        if self.config.parallel.slices(self.layout) == 1:  # of which each rank has others
            prepare(self, range(self.layout.size), sent=self.boot.experts_sent)
        return None

    @property
    def own_part(self) -> Part:
        """That this rank has in the present layout; `part` is what is loaded."""
        return part_of(self.config, self.rank, self.layout)

    def _timed(self, part: str, since: float) -> None:
        self.seconds[part] = time.perf_counter() - since

    def _join(self, command: Join) -> Reply:
        """Leave the groups of before; say what this rank brings to those of the new epoch."""
        self._leave_groups()
        self.groups.layout = command.layout
        return self.groups.bring(command, held(self), self.kv.numbers)

    def _regroup(self, command: Regroup) -> Reply:
        since = time.perf_counter()
        if not self.config.device.platform.on_host:
            self.take_thread()  # groups on devices ask for the current one
        if not command.keeps_kv:
            self.kv.forget(self.model)  # how much there can be is asked when all have let go of it
        self.groups.meet(command)
        if self.ops is not None:
            self.ops.use_threads(self.boot.threads)
            self._join_ops(self.ops)
        if self.experts is not None:
            self.experts.enter(self.mesh.experts)
        if self.config.parallel.ray_link == "compiled-graph" and self.mesh.pp.size > 1:
            self.groups.by_edges()
        self._timed("groups", since)
        return Ready(self.rank, self.seconds)

    def _join_ops(self, ops: Ops) -> None:
        exchanges = self.groups.exchanges
        ops.join(self.mesh.tp, exchanges[0] if exchanges else None, self.mesh.cp)

    def use_threads(self, threads: int) -> None:
        """Compute with so many from now on. Between two steps, in the thread that carries them out."""
        self.boot = msgspec.structs.replace(self.boot, threads=threads)
        self.take_thread()
        if self.ops is not None:
            self.ops.use_threads(threads)
        self.draft.use_threads(threads)

    def take_thread(self) -> None:
        """Make the calling thread one that can carry out steps."""
        take_thread(self.config, self.boot.threads, self.boot.place.devices)

    def _leave_groups(self) -> None:
        self.runner = None  # what it waits for will not come
        if self.ops is not None:
            self.ops.leave()
        if self.experts is not None:
            self.mesh.experts.abort("its epoch is over")
            self.experts.leave()
        self.groups.leave()
        self.end_micro_batches()

    def _load(self, command: Load) -> Reply:
        self.groups.close_door()  # every rank has answered Regroup, so has reached whom it must
        if command.ranks and self.rank not in command.ranks:
            return Ready(self.rank)
        part, maps = self.own_part, command.maps or configured(self.config, self.layout)
        if self.part != part:
            self._load_part(part, maps)
        if self.config.model.foreign is None:
            self.model.share_tokens(context_of(self.config, self.rank, self.layout))
        if maps:
            return self._load_experts(maps, command.moves)
        return Ready(self.rank, self.seconds)

    def _load_part(self, part: Part, maps: Maps) -> None:
        since = time.perf_counter()
        self.take_thread()
        self.unload(stays=self.part is None and part not in self.prepared)
        if part in self.prepared:
            self.ops, self.model = self.prepared.pop(part)
        else:
            self.ops = self.ops or make_ops(self.config, self.boot.threads)
            self._timed("kernels", since)
            since = time.perf_counter()
            none = tuple(() for _ in maps) or None  # experts that are dealt whole come after it
            self.model = read_part(self.config, self.ops, part, none, self.progress, self.weights)
        self.prepared.clear()
        self.weights.name(common_part(*part), self.layout.size)
        self._join_ops(self.ops)
        if maps:
            self.experts = _experts_of(self.ops, self.model, self.take_thread)
            self.experts.enter(self.mesh.experts)
        self.part = part
        self.loras = _loras_of(self.config, self.ops, self.model)
        self._timed("weights", since)

    def _load_experts(self, maps: Maps, moves: tuple[Move, ...]) -> Reply:
        """Read what this rank's slots lack and nobody sends; where nothing travels they are placed now."""
        assert self.experts is not None and self.ops is not None
        since = time.perf_counter()
        lacking = self.experts.lacking(maps, moves)
        if any(lacking.values()):
            read_experts_apart(self.config, self.ops, self.model, common_part(*self.own_part), lacking, self.weights)
            self._timed("experts", since)
        received = self.experts.bytes_aside
        if not moves:
            self.experts.arrange(0, enumerate(maps))
        return Ready(self.rank, self.seconds, {"received": received})

    def unload(self, *, stays: bool = False) -> None:
        """Let go of what was loaded for another part. stays: but native kernels and their threads."""
        if self.sampler is not None:
            self.sampler.close()
        self.end_micro_batches()
        self.kv.unmap()
        self.model = self.runner = self.sampler = self.part = self.experts = self.loras = None
        self.ops = let_go(self.ops, stays=stays and self.config.device.kernels == "native")

    def end_micro_batches(self) -> None:
        if self.micro_batches is not None:
            self.micro_batches.close()
            self.micro_batches = None

    def _allocate(self, command: Allocate) -> Reply:
        from planaria.kernels.ops import Batch
        from planaria.kernels.share import BatchShare
        from planaria.worker.micro_batches import make_forward
        from planaria.worker.pooling import Pooling
        from planaria.worker.runner import Runner

        assert self.ops is not None
        since = time.perf_counter()
        if self.runner is not None:
            self.runner.drain()
        scheduler, size = self.config.scheduler, self.config.cache.block_size
        self.kv.make(self.model, self.ops, command.num_blocks, self.config.tokens_here(self.layout), command.number)
        looked = self.kv.take_over(self.boot, self.layout, command, self.model, self.ops)
        batch = Batch(
            scheduler.max_num_batched_tokens, scheduler.max_num_seqs, -(-scheduler.max_model_len // size) + 1,
            scheduler.max_logit_rows,
        )  # fmt: skip
        own = batch if self.layout.pcp == 1 else BatchShare(batch, self.layout.coords(self.rank).pcp, self.layout.pcp)
        if self.experts is not None:
            self.experts.count(self.config.parallel.enable_eplb and self.layout.coords(self.rank).tp == 0)
        self.end_micro_batches()
        guesses = None
        if self.config.speculative is not None:
            from planaria.worker.speculation import make_speculation

            weights = self.draft.of(self.config, self.mesh, self.boot.threads)
            guesses = make_speculation(self.config, batch, command.num_blocks, weights, self.mesh)
        reads = guesses is not None and guesses.reads_hidden
        made = make_forward(
            self.loras or self.ops, self.model.forward_all if reads else self.model.forward, own, self.mesh,
            self.groups.exchanges, self.config.parallel, self.take_thread,
            queues=not self.config.device.platform.on_host,
        )  # fmt: skip
        forward, self.micro_batches = made
        forward = guesses.reading(forward) if guesses is not None and reads else forward
        model, ops, both = self.config.model, self.loras or self.ops, self.model.forward_both
        if self.sampler is not None:  # of the epoch before
            self.sampler.close()
        told = told_on_devices(self.mesh, self.ops) if guesses is None and not self.groups.exchanges else None
        if self.mesh.samples and model.has_logits:
            self.sampler = make_sampler(self.config, self.boot.threads, self.ops, told)
        else:
            self.sampler = make_follower(self.config, self.ops, told)
        stage = make_stage(self.config, own, forward, self.mesh, guesses.width if guesses is not None else 1)
        self.runner = Runner(
            batch, forward, self.sampler, scheduler, size, stage, meets=bool(self.groups.exchanges),
            speculation=guesses, stripes=self.model.shard.stripes,
            pooling=Pooling((lambda: ops.compile(both, own)) if model.has_logits else None, model.logit_scale),
            adapters=self.loras and self.loras.of_rows(scheduler.max_num_seqs),
        )  # fmt: skip
        facts = looked() | self.kv.connect(self.config, self.layout, self.model, self.ops) | _attention(self)
        self.weights.tidy()
        self._timed("kv", since)
        return Ready(self.rank, self.seconds, facts)

    def _step(self, plan: StepPlan) -> Reply:
        assert self.runner is not None
        since, own = time.perf_counter(), self.layout.coords(self.rank).dp
        if self.experts is not None:
            self.experts.check()
        self.kv.begin(plan, own)
        try:
            ahead = self.ahead and _hands_on(self) and not self.kv.busy
            found = self.runner.begin(plan.step, plan.lanes[own], plan.freed_rows[own], plan.turn, ahead=ahead)
        except Exception as e:
            self.mesh.abort(f"rank {self.rank} failed in step {plan.step}: {e}")  # the others wait for it
            raise

        def answer(lane: LaneResult) -> Reply:
            assert self.runner is not None
            prepared = self.experts.prepared if self.experts is not None else 0
            seconds, news = time.perf_counter() - since, self.kv.finished(plan, own, self.runner)
            return StepResult(plan.epoch, plan.step, (lane,), seconds, prepared, news)

        return answer(found) if isinstance(found, LaneResult) else cast("Reply", StepLater(self.rank, found, answer))

    def expert_load(self) -> bytes:
        """Tokens of this lane that chose each expert since the last time: [layers of this stage, experts], int64. Where
        others of the lane count the same, or nobody counts, nothing."""
        return self.experts.take_load() if self.experts is not None else b""

    def resident(self) -> int:
        """Bytes of memory this process holds."""
        return resident_bytes(os.getpid())

    def _exit(self) -> Reply:
        self.kv.disconnect(last=True)
        self._leave_groups()
        self.unload()
        self.draft.close()
        return Done(self.rank)


def _facts(worker: Worker) -> Reply:
    config, part = worker.config, worker.part
    size, block = config.cache.block_size, worker.model.kv_block_bytes(config.tokens_here(worker.layout))
    weights = worker.model.weight_bytes
    if (draft := worker.draft.of(config, worker.mesh, worker.boot.threads)) is not None:
        block, weights = block + draft.model.kv_block_bytes(size), weights + draft.model.weight_bytes
    assert part is not None
    available = available_bytes(config) - (worker.loras.num_bytes if worker.loras is not None else 0)
    return Facts(worker.rank, block, available, weights, *worker.weights.shared(common_part(*part)))


def _attention(worker: Worker) -> dict[str, Any]:
    """How layers compute it, where there is a choice."""
    choose = getattr(worker.ops, "choose_attention", None)
    if choose is None or worker.config.model.foreign is not None:
        return {}
    return {"attention": choose(layer.attention.kind for layer in worker.model.layers)}


def _hands_on(worker: Worker) -> bool:
    """Does what is drawn go from step to step on devices? Then nobody asks the host for it: this rank computes steps by
    itself, or the others get it on theirs."""
    config, mesh = worker.config, worker.mesh
    if config.device.platform.on_host or config.parallel.ray_link == "compiled-graph" or worker.groups.exchanges:
        return False
    return mesh.pp.size == 1 and (mesh.cp.size == 1 or told_on_devices(mesh, worker.ops) is not None)


def held(worker: Worker) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Experts in this rank's memory that it will have in this epoch."""
    part = worker.own_part
    if not worker.groups.whole_experts or (part != worker.part and part not in worker.prepared):
        return ()
    if worker.experts is not None and part == worker.part:
        return worker.experts.held()
    return _experts_of(*worker.prepared[part], worker.take_thread).held()


def prepare(worker: Worker, ranks: Iterable[int], *, sent: bool) -> Reply:
    """Have what of the model these ranks have, but where that would be all experts. sent: these come from others."""
    config, layout, boot = worker.config, worker.layout, worker.boot
    worker.take_thread()
    for rank in ranks:
        part = part_of(config, rank, layout)
        if part not in worker.prepared:
            ops = make_ops(config, boot.threads)
            reads = of_any_lane(config, layout, part, sent=sent)
            worker.prepared[part] = ops, read_part(config, ops, part, reads, worker.progress, worker.weights)
        if boot.beside and boot.maps:
            own = of_rank(layout, rank, boot.maps)
            read_experts_apart(config, *worker.prepared[part], common_part(*part), own, worker.weights)
    if boot.beside and (config.cache.keeps_blocks or config.cache.transfer is not None):
        weights_digest(config.checkpoint["files"])  # which the engine would wait for
    return Ready(worker.rank)


def prepare_beside(worker: Worker) -> Reply:
    """Pack what ranks find then; where it can't be, they read it."""
    try:
        return prepare(worker, worker.boot.beside, sent=True)
    except NotPrepared as e:
        worker.prepared.clear()
        logger.warning("new weights are read in a pause, for they can't be packed beside those in force: %s", e)
        return Ready(worker.rank)


def free(worker: Worker, command: FreeMemory) -> Reply:
    """What an engine that sleeps doesn't need. The next epoch has it again."""
    if worker.runner is not None:
        worker.runner.drain()
    worker.runner = None
    if worker.ops is not None:
        worker.ops.leave()
    worker.end_micro_batches()
    worker.kv.forget(worker.model)
    worker.draft.free(weights=command.weights)
    if command.weights:
        worker.unload()
        worker.prepared.clear()
        gc.collect()  # what is mapped is in use as long as anything has it
        worker.weights.leave(worker.layout.size)
    return Ready(worker.rank)


def _experts_of(ops: Ops, model: Any, take_thread: Callable[[], None]) -> Experts:
    from planaria.worker.experts import Experts

    return Experts(ops, model, take_thread)


def _prepare(experts: Experts | None, command: SendExperts, rank: int) -> Reply:
    if experts is not None:
        experts.prepare(command.version, command.moves, aside=command.aside)
    return Ready(rank, facts={"received": experts.bytes_aside if experts is not None else 0})


def _arrange(experts: Experts | None, command: PlaceExperts, rank: int) -> Reply:
    if experts is not None:
        experts.arrange(command.version, command.maps)
    return Ready(rank)


def _loras_of(config: EngineConfig, ops: Ops, model: Any) -> Any:
    if config.lora is None:
        return None
    from planaria.worker.loras import Loras

    return Loras(config.lora, config.model, ops, model)


def make_rank(boot: RankBoot, progress: OnSeconds | None = None) -> Any:
    """What answers commands with `handle`: a Worker, or what `--worker-cls` and `--worker-extension-cls` name."""
    if boot.config.null_worker:
        return make(boot.config.parallel, NullRank, boot.rank, lambda kind: kind(boot))
    return make(boot.config.parallel, Worker, boot.rank, lambda kind: kind(boot, progress))
