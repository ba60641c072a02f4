"""Wishes for another layout: what can be made ready first, while requests go on, then the change itself.

Ranks that are to leave send what only they have to those that stay; ranks that are to come are started, and read what
nobody will send them. Rule: none of that is part of the change. If it comes to nothing, or takes too long, the change
does what is left to do. One wish at a time, and each is answered exactly once.
"""

from __future__ import annotations

from collections.abc import Callable

from planaria.config.options import EngineConfig
from planaria.executor.departure import Departure, leaving
from planaria.executor.gang import START_TIMEOUT, Gang
from planaria.executor.reply_ledger import Ticket
from planaria.executor.reshape import lend, wanted, why_not
from planaria.executor.told import layout_name
from planaria.protocol import Command
from planaria.topology import Layout
from planaria.wire import EngineResized, FromEngine, ResizeEngine

ARRIVAL = START_TIMEOUT  # seconds that ranks get to load, as ever, before the change is tried without
ARRIVAL_LOOK = 0.1  # seconds between looks for them


class Arrival:
    """Ranks that are not there yet, for a wish that came at `began`."""

    def __init__(self, wish: ResizeEngine, layout: Layout, began: float) -> None:
        self.wish, self.layout, self.began = wish, layout, began
        self.look_at = began


class Wishes:
    """change(layout, why): have another layout now; the gang has it afterwards, or it could not be had."""

    def __init__(
        self, config: EngineConfig, gang: Gang, emit: Callable[[FromEngine], None], clock: Callable[[], float],
        change: Callable[[Layout, str], None],
    ) -> None:  # fmt: skip
        self.config, self.gang, self.emit, self.clock, self.change = config, gang, emit, clock, change
        self.departure: Departure | None = None
        self.arrival: Arrival | None = None

    def ask(self, wish: ResizeEngine, dead: bool = False) -> Command | None:
        """Begin with it, or say why not and stay with the present layout. A command: for all ranks, now."""
        gang, began = self.gang, self.clock()
        layout = wanted(wish, gang.asked)
        why = "the engine has ended" if dead else (
            f"a degree is at least 1, asked for tp={wish.tp} pp={wish.pp}" if min(wish.tp, wish.pp) < 1
            else why_not(self.config, layout, gang.launcher.name, gang.launcher.replaces)
        )  # fmt: skip
        if not why and (self.departure is not None or self.arrival is not None):
            why = "another change of the layout is on its way; wait for it"
        if not why and (asked := leaving(gang.placing(layout), gang.layout, layout)) is not None:
            self.departure = Departure(wish, asked, gang.epoch, began)
            return self.departure.begin()
        if not why and self._get_ready(layout):
            self.arrival = Arrival(wish, layout, began)
        else:
            self._carry_out(wish, layout, why, began)
        return None

    def look(self, idle: bool) -> Command | None:
        """Is what was begun ready? idle: no step tells of it. A command: for all ranks, now."""
        if self.arrival is not None:
            self._look_for_arrival(self.arrival)
        departure, gang = self.departure, self.gang
        if departure is None:
            return None
        if departure.epoch != gang.epoch:
            self.departure = None
            return self.ask(departure.wish)
        if departure.done:
            self.departure, gang.sent = None, departure.asked
            self._carry_out(departure.wish, wanted(departure.wish, gang.asked), "", departure.began)
        elif idle:
            return departure.wait()
        return None

    def answered(self, ticket: Ticket) -> bool:
        """By all ranks. True while ranks are about to leave: until that is over nothing is rearranged."""
        if self.departure is not None:
            self.departure.answered(ticket)
        return self.departure is not None

    def end(self, why: str) -> None:
        """Answer who waits: nothing comes of it."""
        for open in (self.departure, self.arrival):
            if open is not None:
                self.emit(EngineResized(open.wish.id, layout_name(self.gang.layout), why))
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
            self._carry_out(arrival.wish, arrival.layout, "", arrival.began)

    def _carry_out(self, wish: ResizeEngine, layout: Layout, why: str, began: float) -> None:
        gang = self.gang
        give_back, refused = lend(gang.launcher, () if why else wish.groups)
        why = why or refused
        if not why and layout != gang.layout:
            self.change(layout, "asked for")
            if gang.layout != layout:
                why = f"{layout_name(layout)} could not be had: the log says why"
        if why:
            give_back()
        else:
            gang.asked = layout
        self.emit(EngineResized(wish.id, layout_name(gang.layout), why, self.clock() - began))
