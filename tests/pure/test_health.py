"""Silence: who is given up, after how long, and when not."""

from __future__ import annotations

from collections.abc import Callable

from planaria.executor.health import LONGEST_LOOK, STOPPED, Health


def running(pid: int) -> bool:
    return False


def watch(
    health: Health, seconds: float, pulses: Callable[[float], list[tuple[int, int]]],
    is_stopped: Callable[[int], bool] = running, step: float = 0.5,
) -> tuple[float, dict[int, str]]:  # fmt: skip
    """Look every `step` seconds until somebody is lost; when, and who."""
    now = 0.0
    while now < seconds:
        if lost := health.look(pulses(now), now, is_stopped):
            return now, lost
        now += step
    return now, {}


def test_a_pulse_a_second_is_never_lost() -> None:
    assert watch(Health(10.0), 1000.0, lambda now: [(7, int(now)), (8, int(now + 0.5))]) == (1000.0, {})


def test_silence_is_lost_at_the_deadline_and_named() -> None:
    now, lost = watch(Health(10.0), 100.0, lambda now: [(7, int(now)), (8, min(3, int(now)))])
    assert list(lost) == [1] and "no sign of life" in lost[1]
    assert 13.0 <= now <= 14.0


def test_a_stopped_process_is_lost_much_sooner() -> None:
    now, lost = watch(Health(10.0), 100.0, lambda now: [(7, 0), (8, int(now))], lambda pid: pid == 7)
    assert list(lost) == [0] and "stopped" in lost[0]
    assert STOPPED <= now <= STOPPED + 1


def test_a_stop_shorter_than_that_is_nothing() -> None:
    """Stopped for 1.5 s, every 5 s."""

    def pulses(now: float) -> list[tuple[int, int]]:
        return [(7, int(now * 2) if now % 5 > 1.5 else int(now // 5) * 10)]

    assert watch(Health(10.0), 500.0, pulses, lambda pid: True) == (500.0, {})


def test_a_rank_that_is_not_there_yet_or_needs_no_pulse_is_not_silent() -> None:
    assert watch(Health(10.0), 100.0, lambda now: [(0, 0), (0, 0)]) == (100.0, {})


def test_an_engine_that_was_away_does_not_blame_its_ranks() -> None:
    """A laptop that slept for an hour: the ranks' pulses rest as long as the engine does."""
    health = Health(10.0)
    assert not health.look([(7, 5)], 0.0, running)
    assert not health.look([(7, 5)], 3600.0, running)
    assert not health.look([(7, 5)], 3600.0 + LONGEST_LOOK, running)
    assert not health.look([(7, 6)], 3603.0, running)


def test_a_replacement_starts_afresh() -> None:
    """Another process with the same count is another process."""
    health = Health(2.0)
    for now in range(2):
        assert not health.look([(7, 5)], float(now), running)
    assert not health.look([(9, 5)], 2.0, running)
    assert not health.look([(9, 5)], 3.0, running)
    assert health.look([(9, 5)], 4.0, running)
