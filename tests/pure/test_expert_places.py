"""Who gets which experts when ranks come up again, and the commands by which they get them."""

from __future__ import annotations

import pytest

from planaria.config.options import CacheConfig
from planaria.core.eplb.places import Placing, departing, placed
from planaria.executor.bring_up import BringUp, Memory
from planaria.executor.layout_change import VERSION, Departure, leaving
from planaria.executor.reply_ledger import Ticket
from planaria.protocol import Command, Hello, Join, Load, PlaceExperts, Ready, Reply, SendExperts, StepPlan, StepResult
from planaria.topology import Layout
from planaria.topology.experts import ExpertMap
from planaria.wire import ResizeEngine, Travel
from tests.pure.test_bring_up import SCHEDULER, answers

ONE, TWO = ExpertMap.linear(4, 1), ExpertMap.linear(4, 2)
ALL, NONE = {0: (0, 1, 2, 3), 1: (0, 1, 2, 3)}, dict[int, tuple[int, ...]]()
MEMORY = Memory(cpu=True)


def test_another_lane_takes_half_of_each_layer() -> None:
    found = placed(Placing(TWO, (0, 0), (ONE, ONE)), Layout(dp=2), [ALL, NONE])
    assert [each.slots for each in found.maps] == [(0, 1, 2, 3)] * 2
    wanted = {(layer, expert, 0, 1) for layer in (0, 1) for expert in (2, 3)}
    assert {(m.layer, m.expert, m.source, m.target) for m in found.moves} == wanted
    assert (found.sent, found.read, found.needed) == (4, 0, 4)


def test_with_as_many_ranks_the_maps_in_force_stay() -> None:
    odd = ExpertMap(4, 2, (3, 1, 0, 2))
    found = placed(Placing(TWO, (0,), (odd,)), Layout(dp=2), [{0: (1, 3)}, NONE])
    assert found.maps == (odd,) and found.read == 2 and found.as_told(TWO) == ((3, 1, 0, 2),)
    assert placed(Placing(TWO, (0,)), Layout(dp=2), [NONE, NONE]).as_told(TWO) == ()


def test_each_stage_sees_to_its_own_layers() -> None:
    layout = Layout(dp=2, pp=2)
    holdings = [{0: (0, 1)}, {1: (0, 1)}, {0: (2, 3)}, NONE]
    found = placed(Placing(TWO, (0, 1), (TWO, TWO)), layout, holdings)
    assert [(m.layer, m.expert, m.source, m.target) for m in found.moves] == [(1, 2, None, 1), (1, 3, None, 1)]


def test_those_that_leave_send_what_only_they_have() -> None:
    mirrored = ExpertMap(4, 2, (0, 1, 2, 3, 0, 1))
    found = departing(Placing(ExpertMap.linear(4, 1, 2), (0, 0), (mirrored, mirrored)), 1)
    assert {(m.layer, m.expert, m.source, m.target) for m in found.moves} == {(0, 3, 1, 0), (1, 3, 1, 0)}
    assert leaving(Placing(ONE, (0,), (TWO,)), Layout(dp=2), Layout()) is not None
    assert leaving(Placing(TWO, (0,), (ONE,)), Layout(), Layout(dp=2)) is None
    assert leaving(Placing(ONE, (0,), (TWO,)), Layout(tp=2), Layout()) is None  # its other weights change too


def test_a_gang_has_them_sent_before_it_looks_at_memory() -> None:
    bring_up = BringUp(CacheConfig(), SCHEDULER, Layout(dp=2), MEMORY, placing=Placing(TWO, (0, 0), (ONE, ONE)))
    commands: list[Command] = [bring_up.start()]
    command: Command | None = commands[0]
    while command is not None:
        replies = answers(command, 2)
        if isinstance(command, Join):
            replies = [Hello(0, 1, "h", "n", "", experts=tuple(ALL.items())), Hello(1, 2, "h", "n", "")]
        if isinstance(command, SendExperts):
            replies = [Ready(0), Ready(1, facts={"received": 400})]
        command = bring_up.on_done(replies)
        commands += [command] if command is not None else []
    _, regroup, load, prepare, arrange, *_ = commands
    assert all(not hello.experts for hello in regroup.members)  # type: ignore[union-attr]  # no need to tell all
    assert isinstance(load, Load) and isinstance(prepare, SendExperts) and load.moves == prepare.moves
    assert (prepare.version, prepare.aside) == (0, False)
    assert arrange == PlaceExperts(0, tuple((layer, (0, 1, 2, 3)) for layer in (0, 1)))
    assert bring_up.travel == Travel(400, 400, 0) and bring_up.maps == (TWO, TWO)


@pytest.mark.parametrize(("sent", "told"), [(0, Travel(400, 400, 0)), (2, Travel(600, 600, 0))])
def test_what_lay_aside_before_counts_where_ranks_that_left_had_sent_it(sent: int, told: Travel) -> None:
    """Else it is a rearrangement's, which counts for itself."""
    placing = Placing(TWO, (0, 0), (ONE, ONE), sent, sent)
    bring_up = BringUp(CacheConfig(), SCHEDULER, Layout(dp=2), MEMORY, placing=placing)
    command: Command | None = bring_up.start()
    while command is not None:
        replies = answers(command, 2)
        if isinstance(command, Join):
            replies = [Hello(0, 1, "h", "n", "", experts=tuple(ALL.items())), Hello(1, 2, "h", "n", "")]
        if isinstance(command, Load | SendExperts):
            aside = 200, 400 if isinstance(command, SendExperts) else 0
            replies = [Ready(rank, facts={"received": size}) for rank, size in enumerate(aside)]
        command = bring_up.on_done(replies)
    assert bring_up.travel == told


def test_a_departure_is_over_when_every_rank_has_received_all() -> None:
    def ticket(command: Command, *replies: Reply) -> Ticket:
        return Ticket(0, command, 0.0, dict(enumerate(replies)))

    asked = departing(Placing(ONE, (0,), (TWO,)), 1)
    for idle in (False, True):
        departure = Departure(ResizeEngine("a", 1, 1, 1), asked, 3, 0.0)
        begin = departure.begin()
        assert begin == SendExperts(VERSION, asked.moves, True)
        departure.answered(ticket(begin, Ready(0), Ready(1)))
        step = StepPlan(3, 0, ((), ()), ((), ()))
        departure.answered(ticket(step, StepResult(3, 0, (), prepared=VERSION), StepResult(3, 0, ())))
        assert not departure.done
        if idle:
            wait = departure.wait()
            assert wait == SendExperts(VERSION, ()) and departure.wait() is None
            departure.answered(ticket(wait, Ready(0), Ready(1)))
        else:
            departure.answered(ticket(step, *[StepResult(3, 0, (), prepared=VERSION)] * 2))
        assert departure.done
