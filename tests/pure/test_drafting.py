"""What is drafted, and how many drafts a row gets."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.config.speculative import speculative_config
from planaria.core.stats import DraftStats
from planaria.errors import ConfigError
from planaria.worker import drafting
from planaria.worker.draft_sizes import FIRST_GUESS, FORGOTTEN, LONGEST, LOOK_AGAIN, DraftSizes, StepTimes
from planaria.worker.drafting import KEPT, Drafter, PromptLookup, SuffixLookup, _History


def lookup(tokens: list[int], most: int = 4, **said: Any) -> list[int]:
    config = speculative_config({"method": "ngram", **said})
    assert config is not None
    drafter = PromptLookup(config)
    drafter.enter(0, tokens, len(tokens))
    return drafted(drafter, 0, most)


def drafted(drafter: Drafter, row: int, most: int) -> list[int]:
    return list(drafter.draft({row: most})[row])


def suffixes(**said: Any) -> SuffixLookup:
    config = speculative_config({"method": "suffix", **said})
    assert config is not None
    return SuffixLookup(config)


def test_what_came_after_the_same_tokens() -> None:
    assert lookup([1, 2, 3, 4, 5, 6, 1, 2]) == [3, 4, 5, 6]
    assert lookup([1, 2, 7, 7, 1, 2, 8, 8, 1, 2]) == [8, 8, 1, 2]  # the last time
    assert lookup([0, 1, 2, 7, 7, 9, 1, 2, 8, 8, 0, 1, 2]) == [7, 7, 9, 1]  # the longest counts more
    assert lookup([0, 1, 2, 7, 7, 9, 1, 2, 8, 8, 0, 1, 2], prompt_lookup_max=2) == [8, 8, 0, 1]
    assert lookup([5, 1, 9, 9, 1]) == []  # one token is less than two
    assert lookup([5, 1, 9, 8, 1], prompt_lookup_min=1) == [9, 8, 1, 9]
    assert lookup([1, 2, 3]) == lookup([1]) == []
    assert lookup([4, 1, 2, 1, 2, 1, 2], most=5) == [1, 2, 1, 2, 1]  # round and round


def test_tokens_come_one_after_the_other() -> None:
    config = speculative_config({"method": "ngram"})
    assert config is not None
    drafter = PromptLookup(config)
    drafter.enter(3, [1, 2, 3], 3)
    for token in [4, 5] * 400:  # more than there was room for at first
        drafter.extend(3, [token])
    assert drafted(drafter, 3, 3) == [4, 5, 4]
    drafter.leave(3)
    drafter.leave(3)
    drafter.enter(3, [1, 2, 1, 2], 4)
    assert drafted(drafter, 3, 1) == [1]


def test_suffixes_vote_and_stop_where_nothing_is_likely() -> None:
    drafter = suffixes(suffix_decoding_max_spec_factor=8)
    drafter.enter(0, [1, 2, 3, 8, 1, 2, 4, 9, 1, 2, 3, 7, 1, 2], 14)
    assert drafted(drafter, 0, 2)[:1] == [3]  # twice, and 4 once
    drafter = suffixes(suffix_decoding_max_spec_factor=8, suffix_decoding_min_token_prob=0.6)
    drafter.enter(0, [1, 2, 3, 7, 1, 2, 4, 8, 1, 2], 10)
    assert drafted(drafter, 0, 2) == []  # each half as likely
    drafter = suffixes(suffix_decoding_max_spec_factor=1)
    drafter.enter(0, [1, 2, 3, 4, 5, 9, 1, 2], 8)
    assert drafted(drafter, 0, 8) == [3, 4]  # as many as were found again
    drafter.enter(0, [1, 2, 3], 3)
    assert drafted(drafter, 0, 8) == []


def test_suffixes_of_outputs_that_have_ended() -> None:
    drafter = suffixes(suffix_decoding_max_cached_requests=2)
    for row, output in enumerate([[50, 51, 52, 53], [60, 61, 62], [70, 71]]):
        drafter.enter(row, [1, 2, 3], 3)
        drafter.extend(row, output)
        drafter.leave(row)
    drafter.enter(0, [60], 1)
    assert drafted(drafter, 0, 8) == [61, 62]  # and not on into the next
    drafter.enter(0, [50], 1)
    assert drafted(drafter, 0, 8) == []  # of three the first is forgotten
    drafter.enter(0, [1, 2], 2)
    assert drafted(drafter, 0, 8) == []  # prompts are nobody else's
    drafter = suffixes()
    for _ in range(4):
        drafter.enter(0, [1], 1)
        drafter.extend(0, list(range(KEPT // 2)))
        drafter.leave(0)
    assert len(drafter._others) <= KEPT


@given(st.lists(st.tuples(st.integers(1, 600), st.floats(1e-4, 1.0)), max_size=30), st.integers(1, 700))
def test_more_tokens_never_seem_to_take_less(seen: list[tuple[int, float]], tokens: int) -> None:
    times = StepTimes()
    for number, seconds in seen:
        times.saw(number, seconds)
    assert 0 <= times.expected(1) <= times.expected(tokens) <= times.expected(tokens + 1)


def test_what_steps_took_on_a_busy_machine_is_forgotten() -> None:
    """Else a row that drafted before never would again: who has no drafts sees no such steps."""
    made = sizes(0.05, 8, 8)
    assert made.dealt([0], 8, 100) == {0: 8}
    for _ in range(40):
        made.times.saw(1, 1.0)
        for tokens in (2, 4, 8, 9, 16, 64):  # something else has the processor
            made.times.saw(tokens, 20.0)
    assert made.dealt([0], 8, 100) == {}
    for _ in range(FORGOTTEN):
        made.times.saw(1, 1.0)
        made.checked(0, 1, 1)  # a guess that was looked up, and right
    assert made.dealt([0], 8, 100) == {0: 8}
    assert made.times.expected(9) == pytest.approx(1 + 8 * FIRST_GUESS, rel=0.01)


def test_what_more_tokens_took_says_what_fewer_take() -> None:
    """One number of tokens that was seen on a busy machine makes no others look as if they cost nothing."""
    made = sizes(0.9, 4, 8)
    for _ in range(40):
        made.times.saw(1, 20.0)
    assert made.times.expected(1) == pytest.approx(1.9, rel=0.01) and made.dealt([0], 8, 100) == {0: 1}


def sizes(cost: float, right: int, drafted: int, rows: int = 1) -> DraftSizes:
    """One token takes 1 s, each further one `cost`; so many drafts of each row were right."""
    made = DraftSizes()
    for tokens in (1, 2, 4, 8, 16, 64):
        made.times.saw(tokens, 1 + cost * (tokens - 1))
    for row in range(rows):
        made.enter(row)
        for _ in range(20):
            made.checked(row, drafted, right)
    return made


def test_as_many_as_pay() -> None:
    assert sizes(0.0, 8, 8).dealt([0], 8, 100) == {0: 8}  # free, and right
    assert sizes(1.0, 4, 8).dealt([0], 8, 100) == {}  # each takes as long as a step
    assert 0 < sizes(0.15, 1, 2).dealt([0], 8, 100)[0] < 8  # the first ones pay
    assert sizes(0.3, 8, 8).dealt([0], 8, 3) == {0: 3}  # no more than there is room for
    assert sizes(0.3, 8, 8).dealt([0], 8, 0) == {}
    assert sizes(0.9, 8, 8).dealt([0], 8, 100) == {}  # a tenth faster, at best: not worth it
    made = sizes(0.1, 8, 8, rows=2)
    for _ in range(20):
        made.checked(1, 8, 0)
    assert made.dealt([0, 1], 8, 100) == {0: 8}  # by what each row's are worth


@given(
    st.lists(st.tuples(st.integers(1, 24), st.integers(0, 8), st.integers(0, 40)), min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(1, 40), st.floats(1e-4, 1.0)), min_size=1, max_size=12),
)
def test_what_can_gain_nothing_is_not_weighed(rows: list[tuple[int, int, int]], seen: list[tuple[int, float]]) -> None:
    made = DraftSizes()
    for tokens, seconds in seen:
        made.times.saw(tokens, seconds)
    for row, (drafted, right, often) in enumerate(rows):
        made.enter(row)
        for _ in range(often):
            made.checked(row, drafted, min(right, drafted))
    if not made.may_gain(range(len(rows))):
        assert made._most_gaining(range(len(rows)), 24, 100) == {}


def test_a_row_whose_drafts_are_never_right_is_not_weighed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = sizes(0.0, 0, 8)
    monkeypatch.delattr(DraftSizes, "_most_gaining")
    assert made.dealt([0], 8, 100) == {} and not made.may_gain([0])


@given(st.lists(st.sampled_from([0, 1, 2, 255, 256, 257, 65536, 16777216]), min_size=1, max_size=20), st.booleans())
def test_whether_tokens_were_there_before(tokens: list[int], long: bool) -> None:
    """A no is certain, and a yes to none that is new."""
    for count in (1, 2):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(drafting, "SHORT", 0 if long else 100)
            history = _History(tokens[:1], 0)
            for token in tokens[1:]:
                history.extend([token])
            said = history.repeats(count)
        there = any(tokens[i : i + count] == tokens[-count:] for i in range(len(tokens) - count))
        assert said or not there
    assert _History([3, 4, 5, 3, 4], 0).repeats(2) and not _History([3, 4, 5, 4, 3], 0).repeats(2)


def test_a_row_that_got_none_is_tried_again() -> None:
    made = sizes(0.2, 0, 8)
    waits = []
    for right in (1, 0, 0, 0, 0):  # of one draft; many were wrong before
        waits.append(next(step for step in range(1, 1000) if made.dealt([0], 8, 100)))
        made.checked(0, 1, right)
    assert waits == [LONGEST, LOOK_AGAIN, 2 * LOOK_AGAIN, 4 * LOOK_AGAIN, LONGEST]
    made.leave(0)
    made.enter(0)
    assert made.dealt([0], 8, 100)  # another request


def test_counted() -> None:
    first = DraftStats().checked({3: 4, 5: 2}, {3: [7, 8], 9: [1]})
    assert first == DraftStats(2, 6, (1, 1, 0, 0))
    assert first.added(DraftStats().checked({1: 1}, {1: [2]})) == DraftStats(3, 7, (2, 1, 0, 0))


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("{", "can't be read"), ('{"method": "psychic"}', "is unknown; choose one of ngram, suffix"),
        ({"method": "medusa"}, "is not here yet"),
        ({"method": "eagle"}, "wants a model that drafts"), ({"tokens": 3}, "unknown field `tokens`"),
        ({"num_speculative_tokens": 65}, "must be from 1 to 64"), ({"num_speculative_tokens": -1}, "must be from 1"),
        ({"prompt_lookup_min": 9, "prompt_lookup_max": 3}, "prompt_lookup_min 9: must be from 1 to 3"),
        ({"num_speculative_tokens": "3"}, "can't be read"), ([1], "can't be read"), ({"method": []}, "can't be read"),
        ("[" * 100_000, "[[[...: can't be read: maximum recursion depth exceeded"),
        ({"suffix_decoding_min_token_prob": float("nan")}, "must be from 0 to 1"),
    ],
)  # fmt: skip
def test_what_is_refused(given: Any, why: str) -> None:
    with pytest.raises(ConfigError) as error:
        speculative_config(given)
    assert "--speculative-config" in str(error.value) and why in str(error.value)
