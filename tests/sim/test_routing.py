"""Hours of simulated traffic: the router keeps engines even and sends prefixes where they are."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from xml.etree import ElementTree

import pytest

from benchmarks import plot
from benchmarks.fleet_simulation import (
    LARGE,
    POLICIES,
    SMALL,
    Blind,
    Outcome,
    Request,
    Routed,
    bursts,
    repeated,
    simulate,
)
from planaria.cli.traces import TracedRequest
from planaria.wire import EngineStats

HOURS, RATE, ENGINES = 3.0, 1.5, 4  # from midnight, when it is quietest, into the morning


def outcome(policy: str) -> Outcome:
    return simulate(bursts(HOURS, RATE), POLICIES[policy](ENGINES, SMALL.capacity), ENGINES, SMALL, window=1800.0)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    return {name: outcome(name) for name in POLICIES}


def test_every_request_of_every_policy_is_answered(outcomes: dict[str, Outcome]) -> None:
    count = sum(1 for _ in bursts(HOURS, RATE))
    assert count > 3000 and {len(found.first_tokens) for found in outcomes.values()} == {count}


def test_loads_are_more_even_than_without_looking(outcomes: dict[str, Outcome]) -> None:
    for mine, turns, chance in zip(
        *(outcomes[name].windows[:6] for name in ("router", "round robin", "random")), strict=True
    ):
        assert mine.imbalance < turns.imbalance and mine.imbalance < chance.imbalance


def test_they_stay_so(outcomes: dict[str, Outcome]) -> None:
    windows = [window.imbalance for window in outcomes["router"].windows[:6]]
    assert max(windows) < 1.15 * min(windows)


def test_first_tokens_come_sooner(outcomes: dict[str, Outcome]) -> None:
    mine = outcomes["router"].first_token(0.99)
    assert mine < outcomes["round robin"].first_token(0.99) and mine < outcomes["random"].first_token(0.99)


class FrontEnds(Blind):
    """Three, with a router each, take turns. They know of one another only what engines say."""

    def __init__(self, engines: int, capacity: int) -> None:
        super().__init__(engines, capacity)
        self.parts = [Routed(engines, capacity, seed) for seed in range(3)]

    def choose(self, number: int, request: Request) -> int:
        return self.parts[number % 3].choose(number, request)

    def began(self, number: int) -> None:
        self.parts[number % 3].began(number)

    def ended(self, number: int, tokens: int) -> None:
        self.parts[number % 3].ended(number, tokens)

    def said(self, engine: int, stats: EngineStats) -> None:
        for part in self.parts:
            part.said(engine, stats)


def test_several_front_ends_are_nearly_as_good_as_one(outcomes: dict[str, Outcome]) -> None:
    several = simulate(bursts(HOURS, RATE), FrontEnds(ENGINES, SMALL.capacity), ENGINES, SMALL, window=1800.0)
    for window, one, turns in zip(
        several.windows[:6], outcomes["router"].windows, outcomes["round robin"].windows, strict=False
    ):
        assert window.imbalance < 1.1 * one.imbalance and window.imbalance < turns.imbalance


def test_conversations_are_found_in_caches() -> None:
    """37 of them, of ten turns each, one turn of each after the other."""

    def talk(number: int, turn: int) -> Request:
        blocks = tuple(100 * number + i for i in range(4 * turn + 4))
        return Request(40.0 * turn + number, [b for b in blocks for _ in range(512)], 50, blocks)

    requests = [talk(number, turn) for turn in range(10) for number in range(37)]
    cached = {}
    for name, policy in POLICIES.items():
        cached[name] = simulate(iter(requests), policy(8, LARGE.capacity), 8, LARGE).cached
    assert cached.pop("router") > 0.8 and all(share < 0.7 for share in cached.values())


def test_one_that_drains_is_soon_empty_and_one_that_comes_has_its_share() -> None:
    policy = Routed(4, SMALL.capacity)
    router, requests, loads = policy.router, list(bursts(1.0, 2.0)), []

    def traffic() -> Iterator[Request]:
        for number, request in enumerate(requests):
            if number in (len(requests) // 3, 2 * len(requests) // 3, len(requests) - 1):
                loads.append(router.loads()[3])
                router.drain(3, len(loads) != 2)
            yield request

    simulate(traffic(), policy, 4, SMALL)
    before, drained, after = loads
    assert before > 0 and drained == 0 and after > 0


def test_a_trace_is_repeated_at_the_rate_of_the_day() -> None:
    day = [TracedRequest(*request) for request in ((0.0, 10, 1), (1.0, 20, 2), (9.0, 30, 3))]
    requests = list(repeated(day, 24.0, 0.1))
    assert len(requests) == pytest.approx(0.1 * 86_400, rel=0.02)
    by_quarter = [sum(1 for r in requests if quarter <= r.at / 21_600 < quarter + 1) for quarter in range(4)]
    assert by_quarter[1] > 1.5 * by_quarter[0] and by_quarter[2] > 1.5 * by_quarter[3]
    assert len({request.prompt[0] for request in requests}) == len(requests)


@pytest.mark.parametrize("log", [False, True])
def test_a_picture_has_each_line_inside_its_frame(log: bool) -> None:
    series = {"a & b": [(1.0, 5.0), (10.0, 7.5), (10_000.0, 3.0)], "c": [(1.0, 0.2), (200.0, 90.0)]}
    root = ElementTree.fromstring(plot.lines("t", "x", "y", series, log=log))
    found = [element.get("points", "").split() for element in root.iter() if element.tag.endswith("polyline")]
    assert [len(points) for points in found] == [3, 2]
    for point in itertools.chain(*found):
        x, y = map(float, point.split(","))
        assert plot.LEFT <= x <= plot.WIDTH - plot.RIGHT and plot.TOP <= y <= plot.HEIGHT - plot.BOTTOM
    assert "a & b" in {element.text for element in root.iter()}
