"""Which of a node's slots processes are started in. No process is started here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from planaria.executor.launcher.process import PoolLauncher
from planaria.hosts.host import News, Place, Program, Slot
from planaria.hosts.pool import TRY_AGAIN, Pool
from planaria.topology import Cluster, Infeasible, Layout, Node


class Fake:
    """In place of a process."""

    leaving = stopped = False
    ended = said = ""
    code = 0

    def __init__(self, slot: Slot, pid: int) -> None:
        self.slot, self.place = slot, Place(-1, "home", slot[0], pid=pid)

    def tell(self, message: bytes) -> None: ...

    def kill(self) -> None:
        self.ended = self.ended or "was killed"


class FakeHost:
    """fails: how many more starts do."""

    def __init__(self, *slots: int) -> None:
        self.nodes = {str(number): count for number, count in enumerate(slots)}
        self.all: list[Fake] = []
        self.fails = 0
        self.elastic = False

    def slots(self) -> Cluster:
        return Cluster(tuple(Node.of(node, count) for node, count in self.nodes.items()), "0")

    def need(self, processes: int, spares: int) -> None:
        if self.elastic:
            self.nodes = {node: max(count, processes) for node, count in self.nodes.items()}

    def spawn(self, slot: Slot, entry: Program, boot: bytes | None, news: News, *, rank: int = -1) -> Fake:
        if self.fails:
            self.fails -= 1
            raise OSError("no process can be started")
        assert not [child for child in self.all if child.slot == slot and not child.ended], f"two in {slot}"
        self.all.append(Fake(slot, len(self.all) + 1))
        return self.all[-1]

    def await_starts(self, children: Iterable[Fake], timeout: float) -> None: ...

    def await_ends(self, children: Iterable[Fake], timeout: float) -> list[Fake]:
        return [child for child in children if not child.ended]

    def absent(self) -> list[str]:
        return []

    def close(self) -> None: ...


class Clocked:
    """A pool and its clock. spares as of a Pool."""

    def __init__(self, ranks: int, *slots: int, spares: int = 0) -> None:
        self.now = 0.0
        self.host: Any = FakeHost(*slots)
        self.pool = Pool(self.host, Program("none"), lambda: self.now, lambda child: None, spares=spares)
        self.pool.replace((), Layout(dp=ranks))

    def prepare(self, ranks: int) -> Layout | None:
        return self.pool.prepare(Layout(dp=ranks), lambda place: b"")

    @property
    def slots(self) -> list[Slot]:
        return [child.slot for _, child in sorted(self.pool.ranks.items())]


def test_one_that_ended_before_it_was_ready_is_no_promise_of_another() -> None:
    one, three = Clocked(1, 1), Layout(dp=3)
    one.host.elastic = True
    assert one.pool.room_for(three)
    one.prepare(3)
    one.host.all[1].said = "ready"
    assert one.pool.room_for(three)
    one.host.all[2].ended = "ended"
    assert not one.pool.room_for(three)
    one.prepare(3)
    for spare in one.host.all[1:]:
        spare.said = "ready"
    assert one.pool.room_for(three), "they are there"


def test_two_are_never_in_one_place() -> None:
    """One becomes a rank in a place that was given up, before it has proved well."""
    two = Clocked(2, 2)
    two.pool.give_up([1])
    two.pool.end([1])
    two.now = TRY_AGAIN
    two.prepare(2)
    assert [spare.slot for spare in two.pool.spares] == [("0", 1)]
    two.pool.replace((), Layout(dp=2))
    two.now = 10 * TRY_AGAIN
    two.prepare(3)
    assert sorted(two.slots + [spare.slot for spare in two.pool.spares]) == [("0", 0), ("0", 1)]


def test_a_start_that_fails_costs_nobody_who_lives() -> None:
    """Rank 3 leaves and rank 1 is lost: 3 takes its place; on the other node nobody can be started."""
    four = Clocked(4, 2, 2)
    before = dict(four.pool.ranks)
    assert [slot[0] for slot in four.slots] == ["0", "0", "1", "1"]
    four.host.fails = 1
    with pytest.raises(OSError, match="no process"):
        four.pool.replace([1], Layout(dp=4))
    assert [four.pool.ranks.get(rank) for rank in range(4)] == [before[0], None, before[2], before[3]]
    four.pool.replace([1], Layout(dp=4))
    assert four.pool.ranks[0] is before[0] and four.pool.ranks[1].place.pid == 5
    assert sum(not child.ended for child in four.host.all) == 4


@pytest.mark.parametrize("lost", range(4))
@pytest.mark.parametrize("axis", ["pcp", "dp"])
def test_who_lives_goes_where_the_part_of_the_model_is_wanted_that_it_has(lost: int, axis: str) -> None:
    """Two stages of two ranks each, then of one each, then of two again: none of those that live reads another's."""
    host: Any = FakeHost(4)
    pool = Pool(host, Program("none"), lambda: 0.0, lambda child: None)
    two, one = Layout(**{"pp": 2, axis: 2}), Layout(pp=2)
    pool.replace((), two)
    stages = {child.place.pid: two.coords(rank).pp for rank, child in pool.ranks.items()}
    pool.replace([lost], one)
    assert [stages.get(child.place.pid) for _, child in sorted(pool.ranks.items())] == [0, 1]
    pool.replace((), two)
    kept = {rank: stages[child.place.pid] for rank, child in pool.ranks.items() if child.place.pid in stages}
    assert len(kept) == 2 and all(two.coords(rank).pp == stage for rank, stage in kept.items())


def test_a_spare_takes_the_place_and_those_on_a_lost_node_go_where_there_is_room() -> None:
    pair = Clocked(2, 2, 2, spares=1)
    pair.pool.stand_by(lambda place: b"")
    spares = {spare.slot[0]: spare for spare in pair.pool.spares}
    for spare in spares.values():
        spare.said = "ready"  # type: ignore[misc]
    pair.pool.ranks[1].kill()
    assert pair.pool.lost() == {1: "was killed"}
    pair.pool.replace([1], Layout(dp=2))
    assert pair.pool.ranks[1] is spares["1"]
    del pair.host.nodes["1"]
    spares["1"].kill()
    pair.pool.replace([1], Layout(dp=2))
    assert pair.pool.ranks[1] is spares["0"]
    pair.pool.ranks[0].kill()
    pair.pool.give_up([0])
    with pytest.raises(Infeasible) as e:
        pair.pool.replace([0], Layout(dp=2))
    assert e.value.nearest == Layout()


def test_spares_that_do_not_get_ready_are_tried_ever_less_often() -> None:
    one = Clocked(1, 8, spares=1)
    started = []
    while one.now < 100:
        count = len(one.host.all)
        one.pool.stand_by(lambda place: b"")
        if len(one.host.all) > count:
            started.append(one.now)
            one.host.all[-1].ended = "ended"
        one.now += 1
    assert started == [0, 6, 17, 38, 79]


def test_a_spare_that_the_kernel_holds_still_is_ended() -> None:
    one = Clocked(1, 2, spares=1)
    one.pool.stand_by(lambda place: b"")
    (spare,) = one.pool.spares
    spare.stopped = True  # type: ignore[misc]
    assert one.pool.rooms()["0"].ready == 1 and spare.ended and not one.pool.spares


def test_less_than_was_asked_for_may_be_on_several_nodes_too() -> None:
    """As all of it would be."""
    one = Clocked(1, 1, 1, 1)
    del one.host.nodes["2"]
    one.pool.prepare(Layout(tp=3), lambda place: b"")
    (spare,) = one.pool.spares
    spare.said = "ready"
    assert spare.slot == ("1", 0) and one.pool.prepare(Layout(tp=3), lambda place: b"") == Layout(tp=2)


def test_what_can_not_be_started_is_tried_again_after_a_pause_that_grows() -> None:
    """Else the tries that there are would be over before what is lacking could come back."""
    host, now, pauses = FakeHost(4), 0.0, []

    def pause(seconds: float) -> None:
        nonlocal now
        now += seconds
        pauses.append(seconds)

    launcher = PoolLauncher(host, "rank", Layout(tp=2), clock=lambda: now, pause=pause)  # type: ignore[arg-type]
    launcher.start()
    host.fails = 4
    for _ in range(4):
        with pytest.raises(OSError, match="no process"):
            launcher.replace([1], Layout(tp=2))
    launcher.replace([1], Layout(tp=2))
    assert pauses == [0.5, 1.0, 2.0, 4.0]
    launcher.replace([0], Layout(tp=2))
    assert len(pauses) == 4, "none is owed any more"
    host.fails = 1
    with pytest.raises(OSError, match="no process"):
        launcher.replace([1], Layout(tp=2))
    now += 10
    launcher.replace([1], Layout(tp=2))
    assert len(pauses) == 4, "so long has passed anyway"
