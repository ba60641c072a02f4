"""Another layout: what can be made ready first, while requests go on, then the change itself.

Somebody asks for one (a resize), or devices are back that there were too few of. For a resize ranks that are to leave
send what only they have to those that stay; ranks that are to come are started, and read what nobody will send them.
Rule: none of that is part of the change. If it comes to nothing, or takes too long, the change does what is left to do.
One resize at a time, and each is answered exactly once.
"""

from __future__ import annotations

from collections.abc import Callable

from planaria.config.experts import expert_map
from planaria.config.options import EngineConfig
from planaria.core.eplb.places import ExpertsPlaced, Placing, departing
from planaria.errors import ConfigError, PlanariaError
from planaria.executor.backend import Borrower
from planaria.executor.gang import START_TIMEOUT, Gang
from planaria.executor.reply_ledger import Ticket
from planaria.models.deal import deal
from planaria.protocol import Command, SendExperts, StepResult
from planaria.topology import Layout
from planaria.wire import EngineResized, FromEngine, ResizeEngine

ARRIVAL = START_TIMEOUT  # seconds that ranks get to load, as ever, before the change is tried without
ARRIVAL_LOOK = 0.1  # seconds between looks for them
ROOM_LOOK = 1.0  # seconds between looks for devices that are back
VERSION = 1 << 40  # of experts that are sent before a change; no step of a rearrangement has it


class Departure:
    """Ranks are to leave, and send what only they have. If the epoch ends in the middle, what has arrived is kept, and
    the resize is looked at anew; what could not be sent is read from the checkpoint."""

    def __init__(self, resize: ResizeEngine, asked: ExpertsPlaced, epoch: int, began: float) -> None:
        self.resize, self.asked, self.epoch, self.began = resize, asked, epoch, began
        self.done = False
        self._waits = False

    def begin(self) -> Command:
        """All ranks exchange experts beside their steps."""
        return SendExperts(VERSION, self.asked.moves, aside=True)

    def wait(self) -> Command | None:
        """There are no steps now that would tell of the end."""
        if self.done or self._waits:
            return None
        self._waits = True
        return SendExperts(VERSION, ())

    def answered(self, ticket: Ticket) -> None:
        """By all ranks."""
        replies = ticket.replies.values()
        if isinstance(ticket.command, SendExperts):
            self.done = self.done or not ticket.command.moves
        elif all(isinstance(reply, StepResult) and reply.prepared >= VERSION for reply in replies):
            self.done = True


class Arrival:
    """Ranks that are not there yet, for a resize that came at `began`."""

    def __init__(self, resize: ResizeEngine, layout: Layout, began: float) -> None:
        self.resize, self.layout, self.began = resize, layout, began
        self.look_at = began


class LayoutChanger:
    """change(layout, why): have another layout now; the gang has it afterwards, or it could not be had. prepare: sends
    all ranks a command beside their steps."""

    def __init__(
        self, config: EngineConfig, gang: Gang, emit: Callable[[FromEngine], None], clock: Callable[[], float],
        change: Callable[[Layout, str], None], prepare: Callable[[Command], object],
    ) -> None:  # fmt: skip
        self.config, self.gang, self.emit, self.clock = config, gang, emit, clock
        self.change, self.prepare = change, prepare
        self.departure: Departure | None = None
        self.arrival: Arrival | None = None
        self.look_at = 0.0  # when there is a look for room

    # -- a resize

    def ask(self, resize: ResizeEngine, refused: str = "") -> None:
        """Begin with it, or say why not and stay with the present layout. Raises WorkersLost."""
        gang, began = self.gang, self.clock()
        layout = wanted(resize, gang.asked)
        why = refused or (
            f"a degree is at least 1, asked for tp={resize.tp} pp={resize.pp}" if min(resize.tp, resize.pp) < 1
            else why_not(self.config, layout, gang.launcher.name, gang.launcher.replaces)
        )  # fmt: skip
        if not why and (self.departure is not None or self.arrival is not None):
            why = "another change of the layout is on its way; wait for it"
        if not why and (asked := leaving(gang.placing(layout), gang.layout, layout)) is not None:
            self.departure = Departure(resize, asked, gang.epoch, began)
            self.prepare(self.departure.begin())
        elif not why and self._get_ready(layout):
            self.arrival = Arrival(resize, layout, began)
        else:
            self._carry_out(resize, layout, why, began)

    @property
    def underway(self) -> bool:
        """Is one on its way?"""
        return self.arrival is not None or self.departure is not None

    def look(self, idle: bool) -> None:
        """Is what was begun ready? idle: no step tells of it. Raises WorkersLost."""
        if self.arrival is not None:
            self._look_for_arrival(self.arrival)
        departure, gang = self.departure, self.gang
        if departure is None:
            return
        if departure.epoch != gang.epoch:
            self.departure = None
            self.ask(departure.resize)
        elif departure.done:
            self.departure, gang.sent = None, departure.asked
            self._carry_out(departure.resize, wanted(departure.resize, gang.asked), "", departure.began)
        elif idle and (command := departure.wait()) is not None:
            self.prepare(command)

    def answered(self, ticket: Ticket) -> bool:
        """By all ranks. True while ranks are about to leave: until that is over nothing is rearranged."""
        if self.departure is not None:
            self.departure.answered(ticket)
        return self.departure is not None

    def end(self, why: str) -> None:
        """Answer who waits: nothing comes of it."""
        for open in (self.departure, self.arrival):
            if open is not None:
                self.emit(EngineResized(open.resize.id, self.gang.named(self.gang.layout), why))
        self.departure = self.arrival = None

    def _get_ready(self, layout: Layout) -> bool:
        """Are ranks to come that can get ready beside those there are? With other tensor or pipeline degrees all have
        other parts of the model, and who does not know yet which it becomes would hold every one of them."""
        now, launcher = self.gang.layout, self.gang.launcher
        return layout.dp > now.dp and (layout.tp, layout.pp) == (now.tp, now.pp) and launcher.room_for(layout)

    def _look_for_arrival(self, arrival: Arrival) -> None:
        now = self.clock()
        if now < arrival.look_at:
            return
        arrival.look_at, gang = now + ARRIVAL_LOOK, self.gang
        came = gang.came(arrival.layout)
        if came or now - arrival.began >= ARRIVAL or not gang.launcher.room_for(arrival.layout):
            self.arrival = None
            self._carry_out(arrival.resize, arrival.layout, "", arrival.began)

    def _carry_out(self, resize: ResizeEngine, layout: Layout, why: str, began: float) -> None:
        gang, before = self.gang, None
        lender = gang.launcher if resize.groups and isinstance(gang.launcher, Borrower) else None
        if not why and lender is not None:
            try:
                before = lender.lend(resize.groups)
            except PlanariaError as e:
                why = str(e)
        if not why and layout != gang.layout:
            self.change(layout, "asked for")
            if gang.layout != layout:
                why = f"{gang.named(layout)} could not be had: the log says why"
        if not why:
            gang.asked = layout
        elif lender is not None and before is not None:
            lender.lend(before)
        self.emit(EngineResized(resize.id, gang.named(gang.layout), why, self.clock() - began))

    # -- devices that come and go

    def look_for_room(self, *, spares: bool = True) -> None:
        """From `look_at` on: where there are fewer ranks than there should be, or some in places that are going, look
        whether there could be others; else see to the spares, if these may be started now."""
        self.look_at = self.clock() + ROOM_LOOK
        gang, leaving = self.gang, self.gang.launcher.leaving
        if leaving or gang.layout != gang.asked:
            if (layout := gang.room()) is not None:
                where = f"ranks {', '.join(map(str, leaving))} move to places that stay"
                self.change(layout, where if leaving else "there are devices for it again")
        elif spares and self.config.faults.spare_workers:
            gang.stand_by()


def wanted(resize: ResizeEngine, asked: Layout) -> Layout:
    """The layout of a resize, where there should be `asked` now."""
    return Layout(tp=max(1, resize.tp), pp=max(1, resize.pp), dp=max(1, resize.dp or asked.dp), pcp=asked.pcp)


def why_not(config: EngineConfig, layout: Layout, backend: str, replaces: bool) -> str:
    """A line, empty if nothing is known against it. backend: the launcher's name; replaces: see Launcher."""
    if not replaces:
        return f"the executor back end {backend} can't change its layout: start it again with the other one"
    if backend == "uni" and layout.size > 1:
        return f"{layout} needs {layout.size} processes: start with --distributed-executor-backend mp"
    try:
        experts = expert_map(config.model, config.parallel, layout.expert_ranks)
        deal(config.model, layout.tp, layout.pp, experts=experts, slices=config.parallel.slices(layout))
    except ConfigError as e:
        return str(e)
    return ""


def leaving(placing: Placing | None, before: Layout, after: Layout) -> ExpertsPlaced | None:
    """What ranks send that `after` has no place for; None: nothing."""
    fewer_lanes = after.dp < before.dp and (after.tp, after.pp) == (before.tp, before.pp)
    if placing is None or not placing.in_force or not fewer_lanes:
        return None
    found = departing(placing, after.expert_ranks)
    return found if found.sent else None
