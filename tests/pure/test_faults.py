"""The pure parts of recovery: who is suspected, how often to begin anew, when a step is overdue."""

from __future__ import annotations

from planaria.core.quarantine import Quarantine
from planaria.executor.health import FLOOR, Pace
from planaria.executor.recovery import Reformations

ALL = ["a", "b", "c"]


def test_one_fault_makes_nobody_run_alone() -> None:
    quarantine = Quarantine()
    assert quarantine.fault(ALL) is None
    assert quarantine.next(ALL) is None


def test_two_in_a_row_make_each_run_alone_until_it_gets_a_token() -> None:
    quarantine = Quarantine()
    quarantine.fault(ALL)
    quarantine.fault(["a", "b"])  # c had not been begun again
    assert quarantine.next(ALL) == "a" == quarantine.next(ALL)
    assert quarantine.cleared("a")  # it was the one
    assert quarantine.next(ALL) == "b"
    assert not quarantine.cleared("c")  # it was not
    assert quarantine.cleared("b")
    assert quarantine.next(ALL) is None and not quarantine.suspects()


def test_the_one_whose_worker_dies_twice_with_it_alone_is_convicted() -> None:
    quarantine = Quarantine()
    for _ in range(2):
        assert quarantine.fault(ALL) is None
    assert quarantine.next(ALL) == "a" and quarantine.cleared("a")
    assert quarantine.next(ALL) == "b"
    assert quarantine.fault(["b"]) is None  # once may be chance
    assert quarantine.next(ALL) == "b"
    assert quarantine.fault(["b"]) == "b"
    quarantine.cleared("b")
    assert quarantine.next(ALL) == "c"  # still a suspect


def test_a_token_in_between_begins_the_count_anew() -> None:
    quarantine = Quarantine()
    for _ in range(10):
        assert quarantine.fault(ALL) is None
        for id in ALL:
            quarantine.cleared(id)
    assert quarantine.next(ALL) is None


def test_so_many_beginnings_that_lead_nowhere() -> None:
    limit = Reformations(2, 100.0)
    assert limit.allowed(0.0, False) and limit.allowed(1.0, False)
    assert not limit.allowed(2.0, False)


def test_a_token_in_between_or_time_makes_them_count_no_more() -> None:
    limit = Reformations(2, 100.0)
    assert all(limit.allowed(float(now), True) for now in range(50))
    limit = Reformations(2, 100.0)
    assert all(limit.allowed(now * 60.0, False) for now in range(50))


def test_with_a_limit_of_none_the_first_is_too_many() -> None:
    assert not Reformations(0, 100.0).allowed(0.0, True)


def overdue(pace: Pace, step: int, tokens: int, seconds: float) -> float | None:
    """Look twice a second for so long at a step that doesn't end."""
    now, found = 0.0, None
    while now < seconds and found is None:
        found = pace.look(step, tokens, now)
        now += 0.5
    return found


def test_before_anything_was_learned_the_ceiling_counts() -> None:
    assert overdue(Pace(60.0), 1, 1, 60.0) is None
    assert overdue(Pace(60.0), 1, 1, 70.0) is not None


def test_a_step_may_take_many_times_what_its_tokens_took() -> None:
    pace = Pace(300.0)
    pace.took(100, 1.0)  # 10 ms a token
    assert pace.allowed(1) == FLOOR
    assert pace.allowed(200) == 40.0
    assert pace.allowed(100_000) == 300.0
    assert overdue(pace, 1, 1, FLOOR) is None and overdue(pace, 2, 1, FLOOR + 2) is not None


def test_each_step_has_its_own_time() -> None:
    pace = Pace(300.0)
    pace.took(100, 0.1)
    assert all(pace.look(now // 5, 1, float(now)) is None for now in range(1000))


def test_an_engine_that_was_stopped_blames_nobody() -> None:
    pace = Pace(300.0)
    pace.took(100, 0.1)
    assert pace.look(1, 1, 0.0) is None and pace.look(1, 1, 0.5) is None
    assert pace.look(1, 1, 5000.0) is None
