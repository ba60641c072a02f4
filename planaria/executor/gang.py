"""The ranks of one engine: their processes, the link of the present epoch, who owes an answer.

An epoch is never repaired. When a rank is lost, `reform` fences the epoch, makes the lost processes end for certain,
puts others in their place and brings all of them up again under the next one, over a new link, in new groups; ranks
that live keep their weights. Where nothing can take a place, fewer ranks go on in a smaller layout. `start` and
`reform` end with ranks that wait for steps, or raise.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from planaria.config.options import EngineConfig
from planaria.core.eplb.places import ExpertsPlaced, Placing
from planaria.errors import CapacityError, EngineDead, ModelError, PlanariaError, RanksDiffer, UserError, WorkersLost
from planaria.executor.backend import Launcher, Link
from planaria.executor.boot import SPARE, RankBoot, boots_for
from planaria.executor.bring_up import PHASES, BringUp, Memory
from planaria.executor.health import LONGEST_LOOK
from planaria.executor.kv import GangKV
from planaria.executor.link.address import Inside
from planaria.executor.link.faults import ConnectionLost, LinkError
from planaria.executor.recovery import layout_name
from planaria.executor.reply_ledger import RankReply, ReplyLedger, Ticket
from planaria.executor.startup import StartUp, parts_of
from planaria.executor.transition import Transition
from planaria.executor.watch import LostRanks, System, Watch
from planaria.hosts.host import Place
from planaria.node import Memories, home
from planaria.protocol import Command, Exit, Failed, Hello, Join, Regroup
from planaria.topology import Infeasible, Layout
from planaria.topology.experts import ExpertMap
from planaria.wire import FromEngine, Travel

logger = logging.getLogger("planaria.engine")

LOOK = 0.5  # seconds between looks at the ranks' health while waiting
EXIT_TIMEOUT = 5.0
LAST_WORDS = 1.0  # seconds a rank gets to say why another rank could not go on
TIMEOUTS: dict[type[Command], float] = {Join: 60.0, Regroup: 90.0}  # seconds for a command while coming up
START_TIMEOUT = 1800.0  # for the others; loading from a slow disk is the longest


MakeLink = Callable[[list[Place], int], Any]


def failure(failed: Failed) -> PlanariaError:
    """The exception a front end should see for a rank's failure."""
    kinds: dict[str, type[PlanariaError]] = {
        "model": ModelError, "capacity": CapacityError, "user": UserError, "config": RanksDiffer,
    }  # fmt: skip
    if failed.kind in kinds:
        return kinds[failed.kind](failed.message)
    return EngineDead(f"rank {failed.rank} failed in {failed.phase}: {failed.message}")


class Refusal(PlanariaError):
    """Ranks can't come up, and trying again would not help. `failed` says why."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed.message)
        self.failed = failed


class Gang:
    """`link_for(places, epoch)` makes the link to what the launcher started. clock: seconds, monotonic."""

    def __init__(
        self, config: EngineConfig, launcher: Launcher, link_for: MakeLink, emit: Callable[[FromEngine], None],
        clock: Callable[[], float], system: System,
    ) -> None:  # fmt: skip
        self.config, self.launcher, self.link_for, self.emit, self.clock = config, launcher, link_for, emit, clock
        self.system, self.watch = system, Watch(config, launcher, clock, system)
        self.epoch = 0
        self.asked = self.layout = config.parallel.layout  # what there should be, and what there is
        self.ledger = ReplyLedger(self.layout.size)
        self.places: list[Place] = []
        self.members: tuple[Hello, ...] = ()
        self.link: Link | None = None
        self.num_blocks = self.weight_bytes = self.shared_bytes = 0
        self.kv_bytes: dict[Layout, int] = {}  # of each rank, in the layouts that there were
        self.kv = GangKV(config)
        self.memories = Memories(home())  # of this node, for ranks that may have any place; KV is a rank's
        self.owns: object = None  # such memory, that ends with the ranks
        self.maps: tuple[ExpertMap, ...] = ()  # in force: where each layer's experts are, if they are dealt whole
        self.travel = Travel()  # of experts, when the ranks came up the last time
        self.sent: ExpertsPlaced | None = None  # by ranks that are about to leave
        self.kv_share = 1.0  # of what would fit; lowered when a rank ran out of memory
        self.seconds: dict[str, float] = {}  # of the last time they came up, by phase
        self.broken = False  # a rank is lost: the link can't be trusted to answer
        self.came_up = False  # at least once, or an engine before this one: then a smaller layout is better than none

    # -- coming up

    def start(self) -> None:
        """Raises Refusal, WorkersLost (then `reform` may help), CapacityError."""
        phases = StartUp(self.ledger.world_size, self.emit, self.clock)
        phases.enter("launch")
        if problems := self.system.problems(self.ledger.world_size):
            raise CapacityError(problems[0])
        self.kv.find()
        try:
            self.places = self.launcher.start()
        except Infeasible as e:
            if e.nearest is None or not self.came_up:
                raise
            logger.warning("%s; beginning with %s", e.why, e.nearest)
            self._replace((), e.nearest, False)
            phases.world_size = self.layout.size
        self._form(phases)

    def reform(self, change: Transition) -> dict[str, float]:
        """Begin the next epoch without what was lost, in the layout that is wished for, or in that of before or a
        smaller one that fits. Returns seconds by part. Raises as `start`."""
        began, loss = self.clock(), change.loss
        self.fence(str(change.cause))
        times = {"detect": loss.detect if loss is not None else 0.0, "fence": self.clock() - began}
        began = self.clock()
        # those that ended meanwhile, too: else each of them would cost an epoch of its own
        dead = {rank for rank in change.dead if rank < self.layout.size}
        gone, layout = sorted(dead.union(self.launcher.lost())), change.layout or self.layout
        try:
            self._replace(gone, layout, change.changing)
        except OSError as e:  # no process can be started now; there may be room a moment later
            missing = tuple(gone) or tuple(range(self.layout.size, layout.size))
            raise WorkersLost(self.epoch, missing, f"can't be started: {e}", "replace") from None
        times["replace"] = self.clock() - began
        phases = StartUp(self.ledger.world_size, lambda news: None, self.clock)
        phases.enter("launch")
        self._form(phases)
        parts = parts_of(phases.seconds)
        return times | parts | {"replace": times["replace"] + parts["replace"]}

    def _replace(self, gone: Sequence[int], layout: Layout, exactly: bool) -> None:
        while True:
            try:
                places = self.launcher.replace(gone, layout)
                break
            except Infeasible as e:  # and maybe once more: devices can go while others take places
                if exactly or e.nearest is None or e.nearest == layout or not self.came_up:
                    raise
                logger.warning("%s; going on with %s", e.why, e.nearest)
                gone, layout = (), e.nearest
        self.places, self.layout, self.ledger.world_size = places, layout, layout.size

    def named(self, layout: Layout) -> str:
        """As people read it."""
        return layout_name(layout, self.config.parallel.context(layout).dcp)

    def room(self) -> Layout | None:
        """Where there are fewer ranks than there should be: a larger layout, when one could be had now; where some are
        in places that are going, one that isn't smaller."""
        leaving = bool(self.launcher.leaving)
        if self.layout == self.asked and not leaving:
            return None
        found = self.launcher.prepare(self.asked, self.spare_boot(self.asked))
        least = self.layout.size if leaving else self.layout.size + 1
        return found if found is not None and found.size >= least else None

    def came(self, layout: Layout) -> bool:
        """Are the ranks ready that this layout has more than there are? They get ready beside the others."""
        found = self.launcher.prepare(layout, self.spare_boot(layout, sent=True))
        return found is not None and found.size >= layout.size

    def fence(self, why: str) -> None:
        """The epoch is over: nobody's answer counts any more, and who waits for one is told why."""
        self.epoch += 1
        if self.link is not None:
            self.link.fence()
            self.link.close()
            self.link = None
        self.ledger.end_epoch(why)
        self.watch.fenced()
        self.broken = False

    def _form(self, phases: StartUp) -> None:
        config = self.config
        link = self.link = self.link_for(self.places, self.epoch)
        memories = msgspec.structs.replace(self.memories, kv=self.kv.origin)
        self.launcher.run(boots_for(config, self.places, link, memories))
        self.check()  # who ended while there was no link to wake
        recut = self.kv.recut_for(self.layout, homes := {place.home for place in self.places})
        bring_up = BringUp(
            config.cache, config.scheduler, self.layout, self._memory(), epoch=self.epoch,
            apart=len(homes) > 1, loading=config.parallel.max_parallel_loading_workers,
            placing=self.placing(self.layout), kv=self.kv.there, full=self.kv.full, recut=recut,
        )  # fmt: skip
        command: Command | None = bring_up.start()
        while command is not None:
            phases.enter(PHASES[type(command)])
            ticket = self.ask(command, TIMEOUTS.get(type(command), START_TIMEOUT), phases)
            command = bring_up.on_done(ticket.in_order())
            if isinstance(command, Regroup) and not command.keeps_kv:
                self.kv.clear(self.layout)
            if bring_up.failure is not None:
                failed = self.root_cause(bring_up.failure)
                if failed.kind == "peer" or (self.came_up and self._may_pass(failed)):
                    raise self.loss_of(failed)
                raise Refusal(failed)
        phases.enter("ready")
        self.kv_bytes[self.layout] = max(bring_up.kv_bytes, self.kv_bytes.get(self.layout, 0))
        self.members, self.num_blocks = bring_up.members, bring_up.num_blocks
        self.weight_bytes, self.shared_bytes = bring_up.weight_bytes, bring_up.shared_bytes
        self.seconds, self.attention = bring_up.seconds | phases.seconds, bring_up.attention
        self.kv.formed(bring_up)
        self.maps, self.travel, self.sent = bring_up.maps, bring_up.travel, None
        self.came_up = True

    def _memory(self) -> Memory:
        """What ranks take KV from: their node's memory, or their accelerator's own."""
        cpu = self.config.device.platform.on_host
        owners = [(place.home, () if cpu else place.devices) for place in self.places]
        ranks_at, sharers = Counter(owners), self.config.device.sharers
        before = self.kv_bytes.get(self.layout, 0) if self.came_up else None
        return Memory(cpu, tuple(map(ranks_at.__getitem__, owners)), sharers, before, self.kv_share, self.kv.returns)

    def placing(self, layout: Layout) -> Placing | None:
        """Where whole experts may go in a layout."""
        found, sent = Placing.of(self.config, layout, self.maps), self.sent
        if found is None or sent is None:
            return found
        return msgspec.structs.replace(found, sent=sent.sent, needed=sent.needed)

    def _may_pass(self, failed: Failed) -> bool:
        """A rank failed at what worked before: it may work again, with less memory if that was it."""
        enough = failed.phase == "allocate" or (failed.phase == "probe" and self.layout in self.kv_bytes)
        return failed.kind == "error" or (failed.kind == "capacity" and enough)

    # -- talking

    def send(self, command: Command) -> Ticket:
        """To all ranks. Raises WorkersLost, CodecError."""
        assert self.link is not None
        ticket = self.ledger.submit(command, self.clock())
        try:
            self.link.send(ticket.number, command)
        except LinkError as e:
            raise self._broken_link(e) from None
        return ticket

    def ask(self, command: Command, timeout: float, phases: StartUp | None = None) -> Ticket:
        """Send a command with nothing else in flight and wait for all ranks. Raises WorkersLost."""
        ticket = self.send(command)
        waited, looked = 0.0, self.clock()  # added up over looks, as in `health`
        while not ticket.closed:
            answered = len(ticket.replies)
            nothing = self.poll(self.clock() + LOOK) is None
            now = self.clock()
            waited, looked = waited + min(LONGEST_LOOK, now - looked), now
            if nothing:
                owing = self.ledger.owing()
                if phases is not None:
                    phases.waiting(owing)
                if waited >= timeout:
                    raise self.lost(LostRanks(tuple(owing), f"did not answer within {timeout:g} s", waited))
            if phases is not None and len(ticket.replies) > answered:
                phases.done(list(ticket.replies)[-1])
        return ticket

    def poll(self, deadline: float | None = None) -> list[Ticket] | None:
        """Wait for one answer; the tickets it completes. None at the deadline. Raises WorkersLost when a rank's process
        has ended, is stopped or silent, or its link is broken."""
        answer = self._answer(deadline)
        return None if answer is None else self.ledger.on_reply(*answer)

    def _answer(self, deadline: float | None) -> RankReply | None:
        assert self.link is not None
        while True:
            left = LOOK if deadline is None else min(LOOK, max(0.0, deadline - self.clock()))
            try:
                answer = self.link.receive(left)
            except LinkError as e:
                raise self._broken_link(e) from None
            if answer is not None:
                return answer
            self.check()
            if deadline is not None and self.clock() >= deadline:
                return None

    def check(self) -> None:
        """Raises WorkersLost if a rank has ended, is stopped, silent or late."""
        assert self.link is not None
        if (gone := self.watch.look(self.link, self.places, self.ledger)) is not None:
            raise self.lost(gone)

    def root_cause(self, failed: Failed) -> Failed:
        """A rank that only says that another did not come waits for what that one has to say. Raises WorkersLost if
        it has ended."""
        deadline = self.clock() + LAST_WORDS
        while failed.kind == "peer" and (answer := self._answer(deadline)) is not None:
            if isinstance(answer[2], Failed):
                failed = answer[2]
        return failed

    # -- losing

    def phase(self) -> str:
        """What the ranks are about."""
        if not self.ledger.open:
            return "idle"
        command = type(self.ledger.open[0].command)
        return PHASES.get(command, {"StepPlan": "step"}.get(command.__name__, command.__name__.lower()))

    def lost(self, gone: LostRanks) -> WorkersLost:
        self.broken = True
        return WorkersLost(self.epoch, gone.ranks, f"its process {gone.how}", self.phase(), detect=gone.detect)

    def loss_of(self, failed: Failed) -> WorkersLost:
        """What a rank's failure costs: its epoch, not its process."""
        self.broken = self.broken or self.ledger.world_size > 1  # other ranks may wait for the one that failed
        short = failed.kind == "capacity" and failed.phase == "probe"  # which is no rank's fault
        return WorkersLost(
            self.epoch, () if short else (failed.rank,), failed.message, failed.phase, failed.traceback, dead=False,
            kind=failed.kind,
        )  # fmt: skip

    def _broken_link(self, error: LinkError) -> WorkersLost:
        ranks = tuple(rank for rank in error.ranks if rank >= 0)
        if isinstance(error, ConnectionLost):
            self.launcher.settle(ranks)
        if (gone := self.watch.ended()) is not None:
            return self.lost(gone)
        self.broken = True
        return WorkersLost(self.epoch, ranks, str(error), self.phase())

    # -- for people, and for the next fault

    def stand_by(self) -> None:
        """Have the launcher see to its spares."""
        if self.link is not None and self.places:
            try:
                self.launcher.stand_by(self.spare_boot(self.asked))
            except OSError as e:  # not now; the ranks that there are do without
                logger.warning("no spare can be started: %s", e)

    def spare_boot(self, layout: Layout, *, sent: bool = False) -> RankBoot:
        """Of a process that gets ready for any rank of a layout. sent: whole experts come from other ranks."""
        assert self.link is not None
        boot = boots_for(self.config.with_layout(layout), self.places, self.link)[0]
        place = msgspec.structs.replace(boot.place, rank=SPARE)
        return msgspec.structs.replace(boot, place=place, link=Inside(), experts_sent=sent, memories=self.memories)

    # -- ending

    def close(self) -> None:
        """End the ranks. Idempotent."""
        self.owns = None
        self.launcher.closing()
        if self.link is None:
            self.launcher.kill()
            return
        if not self.broken:
            try:
                deadline = self.clock() + EXIT_TIMEOUT
                while self.ledger.open and self.poll(deadline) is not None:
                    pass
                self.ask(Exit(), EXIT_TIMEOUT)
            except WorkersLost as e:
                logger.warning("while ending: %s", e)
        if self.broken:
            self.launcher.kill()
        self.launcher.close()
        self.link.close()
        self.link = None
