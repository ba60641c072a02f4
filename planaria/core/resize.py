"""Changing the number of engines, or of the lanes of one, as transactions. Pure: who carries one out says when it is in
which phase.

preparing -> committed, or -> rolled back; one at a time. A transaction has an id: asked for again, it is not done
again, and the answer is the same. While it is prepared everybody is served by the engines there were.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping

import msgspec

from planaria.errors import PlanariaError

PREPARING, COMMITTED, ROLLED_BACK = "preparing", "committed", "rolled back"
PREFILL, DECODE = "prefill", "decode"  # kinds of engines, where there are two
KEPT = 16  # transactions that are remembered
MOST = 4096  # engines, or lanes, of one server


class Refused(PlanariaError):
    """A resize that can't be begun. `busy`: another one is under way; else what is asked for makes no sense."""

    def __init__(self, message: str, *, busy: bool = False) -> None:
        super().__init__(message)
        self.busy = busy


class Room(msgspec.Struct, frozen=True):
    """How many engines there is room for. `why`: not for more."""

    engines: int
    why: str


class Resize(msgspec.Struct):
    """One transaction. start, stop: numbers of engines; phases: name -> seconds, the last one may be under way."""

    id: str
    before: int  # of `unit`
    after: int
    start: list[int]
    stop: list[int]
    state: str = PREPARING
    reason: str = ""  # why it was rolled back
    phase: str = ""  # that is under way
    phases: dict[str, float] = {}
    moved: int = 0  # sequences that went on in another engine
    unit: str = "engine"  # that is counted; or "lane": a data-parallel rank of one engine


class Resizes:
    """The transactions of one fleet. `first`: the number of its first engine, which is never stopped. unit: see
    Resize; what is said of engines here goes for lanes too."""

    def __init__(self, first: int = 0, unit: str = "engine") -> None:
        self.first, self.unit = first, unit
        self.current: Resize | None = None
        self._since = 0.0  # when the present phase began
        self._known: deque[Resize] = deque(maxlen=KEPT)

    def __iter__(self) -> Iterator[Resize]:
        """Those that are remembered, the oldest first."""
        return iter(self._known)

    def ask(
        self, id: str, size: int, engines: Collection[int], alive: Collection[int], room: Room | None = None
    ) -> tuple[Resize, bool]:
        """A transaction to `size` engines, and whether it is new (then it must be carried out). engines: that there
        are; alive: those that were not given up; room: for how many. Raises Refused."""
        for known in self._known:
            if known.id == id:
                if known.after != size:
                    was = f"resize {id} was to {known.after} {self.unit}s"
                    raise Refused(f"{was}, not {size}: give another id", busy=True)
                return known, False
        if size < 1:
            raise Refused(f"{size} {self.unit}s can't serve: ask for 1 or more, or stop the server")
        if size > MOST:
            raise Refused(f"{size} {self.unit}s are more than a server can have: ask for {MOST} at most")
        if self.current is not None:
            now = self.current
            what = f"resize {now.id} from {now.before} to {now.after} {self.unit}s is under way ({now.phase})"
            raise Refused(f"{what}; ask again after it", busy=True)
        if room is not None and size > max(room.engines, len(alive)):
            raise Refused(f"{size} {self.unit}s don't fit: {room.why}; {room.engines} fit")
        wanted = range(self.first, self.first + size)
        resize = Resize(
            id, len(engines), size, [i for i in wanted if i not in alive],
            sorted((i for i in engines if i not in wanted), reverse=True), unit=self.unit,
        )  # fmt: skip
        self._known.append(resize)
        if resize.start or resize.stop:
            self.current = resize
        else:
            resize.state = COMMITTED  # nothing to do
        return resize, self.current is resize

    def enter(self, phase: str, now: float) -> None:
        """The transaction under way begins a phase."""
        resize = self._leave(now)
        resize.phase, self._since = phase, now
        resize.phases[phase] = 0.0

    def commit(self, now: float) -> None:
        resize = self._leave(now)
        resize.state, self.current = COMMITTED, None

    def roll_back(self, reason: str, now: float) -> None:
        """Everything is as it was before."""
        resize = self._leave(now)
        resize.state, resize.reason, self.current = ROLLED_BACK, reason, None

    def _leave(self, now: float) -> Resize:
        resize = self.current
        assert resize is not None
        if resize.phase:
            resize.phases[resize.phase] = now - self._since
            resize.phase = ""
        return resize


def deal_kinds(numbers: Iterable[int], prefill: int, before: Mapping[int, str]) -> dict[int, str]:
    """Kinds of engines with these numbers, so many of them for prompts: of those there are, as few change as can be."""
    order = {PREFILL: 0, DECODE: 2}
    ranked = sorted(numbers, key=lambda number: (order.get(before.get(number, ""), 1), number))
    return {number: PREFILL if place < prefill else DECODE for place, number in enumerate(ranked)}


def room_in_memory(free: int, needed: int, running: int) -> Room:
    """On a node with `running` engines and `free` bytes of memory beside them, where another takes `needed`."""
    why = f"each needs {needed / 2**30:.2f} GiB of memory, {free / 2**30:.2f} GiB are free beside {running}"
    return Room(running + free // max(1, needed), why)
