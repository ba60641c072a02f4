"""Prompts beside streams: when they are computed there, and in how small parts."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from planaria.core.connector import FIRST_PART, LEAST_PART, Rates
from planaria.core.resize import DECODE, PREFILL
from planaria.core.router import Router
from planaria.server import prefill
from planaria.server.dispatcher import Dispatcher
from planaria.server.engine import Engine
from planaria.server.prefill import AGAIN, MOST, PAUSE, HandOvers
from planaria.server.stream import Stream
from planaria.types import SamplingParams
from planaria.wire import EngineStats, Submit
from tests.pure.test_connector import EXPECTED, PROMPT, VOCAB, Ranks
from tests.reference_worker import hash_tokens

LONG, PIECE = [i % 5 for i in range(180)], 0.004


class Sizes(Ranks):
    """And how many tokens of histories each step had."""

    def __init__(self, seconds: float) -> None:
        super().__init__([{}], num_blocks=200, prompt_seconds=seconds)
        self.sizes: list[int] = []

    def step(self) -> bool:
        before = self.core.stats().prompt_tokens
        stepped = super().step()
        self.sizes += [self.core.stats().prompt_tokens - before] if stepped else []
        return stepped


def test_a_step_takes_as_long_as_streams_may_wait_and_no_token_is_another() -> None:
    ranks = Sizes(seconds=PIECE)
    ranks.ask("stream", PROMPT, 30)
    ranks.step()
    for name in ("a", "b"):  # one after the other, not both at a time
        ranks.ask(name, [ord(name) % 7, *LONG, 1], 4, pause=0.16)
    ranks.run()
    assert ranks.tokens["stream"][:6] == EXPECTED
    for name in ("a", "b"):
        assert ranks.tokens[name] == hash_tokens([ord(name) % 7, *LONG, 1], 7, 4, VOCAB)
    parts = [size for size in ranks.sizes[1:] if size]
    assert parts[0] == FIRST_PART and set(parts[1:-1]) == {40}, "0.16 s are 40 tokens of 4 ms"


def test_who_goes_on_from_elsewhere_does_so_at_once() -> None:
    ranks, expected = Sizes(seconds=PIECE), hash_tokens(LONG, 7, 4, VOCAB)
    ranks.ask("a", LONG, 4, pause=0.16, output=expected[:2])
    ranks.run()
    assert expected[:2] + ranks.tokens["a"] == expected and len(ranks.sizes) == 2


def test_steps_are_never_too_small_to_go_on() -> None:
    rates = Rates()
    assert rates.tokens(0.1) == FIRST_PART
    rates.computed(LEAST_PART - 1, 9.0)
    assert rates.tokens(0.1) == FIRST_PART
    rates.computed(LEAST_PART, 9.0)
    assert rates.tokens(0.1) == LEAST_PART


class Fleet:
    """One engine of each kind. rates: seconds for a token of a prompt, by kind."""

    def __init__(self, **rates: float) -> None:
        self.router = Router()
        self.engines = {}
        for number, kind in enumerate((PREFILL, DECODE)):
            engine = self.engines[kind] = Engine(number)
            engine.kind, engine.stats = kind, EngineStats(token_seconds=rates.get(kind, 0.0))
            self.router.join(number, kind=kind)
        members = {engine.index: engine for engine in self.engines.values()}
        self.dispatcher: Any = SimpleNamespace(members=members, open={}, best=lambda stream: None, least_busy=None)
        self.hand_overs = HandOvers(cast(Dispatcher, self.dispatcher), self.router)

    def heard(self, kind: str) -> None:
        """A prompt has been computed there."""
        stream, engine = ask(100), self.engines[kind]
        stream.engine = engine
        self.hand_overs.sent(stream, engine)
        stream.tokens = [1]
        if kind == PREFILL:
            self.hand_overs.lent(stream, engine, None)
        else:
            self.hand_overs.heard(stream)

    def goes_to(self, tokens: int) -> str:
        return self.hand_overs.kinds(ask(tokens))[0]


def ask(tokens: int, **more: Any) -> Stream:
    return Stream(Submit("a", list(range(tokens)), SamplingParams(), 0, max_tokens=9, **more))


@pytest.mark.parametrize(
    "rates, waits, kind",
    [
        ({}, 0, PREFILL), ({}, 150, DECODE),  # twice as slow, before anything is measured
        ({PREFILL: 0.001, DECODE: 0.005}, 300, PREFILL), ({PREFILL: 0.001, DECODE: 0.005}, 500, DECODE),
        ({PREFILL: 0.004, DECODE: 0.003}, 0, DECODE),
    ],
)  # fmt: skip
def test_a_prompt_goes_where_its_first_token_comes_sooner(rates: dict[str, float], waits: int, kind: str) -> None:
    fleet = Fleet(**rates)
    for each in rates:
        fleet.heard(each)
        fleet.hand_overs.measured = time.monotonic()
    if waits:
        fleet.router.sent("other", fleet.engines[PREFILL].index, waits, 1)
    assert fleet.goes_to(100) == kind
    fleet.router.sent("another", fleet.engines[DECODE].index, 2000, 1)
    assert fleet.goes_to(100) == PREFILL, "there are prompts, too"


def test_hand_overs_that_were_slow_are_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not handed over says nothing of how long it would take."""
    now = [100.0]
    monkeypatch.setattr(prefill, "time", SimpleNamespace(monotonic=lambda: now[0], perf_counter=lambda: now[0]))
    fleet = Fleet(**{PREFILL: 0.001, DECODE: 0.005})

    def takes(seconds: float) -> None:
        """A hand-over."""
        stream = ask(100)
        stream.lent, stream.engine = now[0], fleet.engines[DECODE]
        now[0] += seconds
        fleet.hand_overs.heard(stream)

    fleet.heard(PREFILL)
    takes(2.0)
    assert fleet.hand_overs.threshold == MOST and fleet.goes_to(300) == DECODE
    now[0] += AGAIN
    assert fleet.goes_to(300) == PREFILL
    takes(0.1)
    assert fleet.hand_overs.threshold == 100 and fleet.goes_to(300) == PREFILL
    fleet.engines[PREFILL].stats = EngineStats(token_seconds=1.0)  # it is slow, for a moment
    fleet.heard(PREFILL)
    fleet.heard(DECODE)
    assert fleet.goes_to(300) == DECODE
    now[0] += AGAIN
    assert fleet.goes_to(300) == PREFILL


def test_only_prompts_beside_streams_come_in_parts() -> None:
    fleet, stream = Fleet(), ask(100)
    fleet.hand_overs.sent(stream, fleet.engines[PREFILL])
    assert stream.lends and not stream.resubmit().pause
    fleet.hand_overs.sent(stream, fleet.engines[DECODE])
    assert not stream.lends and stream.resubmit().pause == PAUSE
    stream.tokens = [5]
    fleet.hand_overs.sent(stream, fleet.engines[DECODE])
    assert not stream.resubmit().pause
