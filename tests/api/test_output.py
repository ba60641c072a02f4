"""`Choices` and `submissions` by themselves: repeated, missing and late deltas, seeds, limits."""

from __future__ import annotations

import pytest

from planaria.errors import RequestError
from planaria.server.inputs import child_seed, submissions
from planaria.server.stream import Choices
from planaria.types import SEED_LIMIT, Delta, FinishReason, SamplingParams, TokenLogprobs
from tests.api.fake_engine import facts

STOP, LENGTH, ERROR, ABORT = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ERROR, FinishReason.ABORT


def stream_of(tokenizer, n=1, prompt=(5, 6, 7), eos=(2,), **params):
    values = SamplingParams(n=n, **{"max_tokens": 50, **params})
    submits = submissions("r", list(prompt), values, facts(), eos_ids=eos, tokenizer=tokenizer, seed=1)
    return Choices(list(prompt), submits, tokenizer)


def test_a_repeated_delta_adds_nothing(tokenizer):
    ids = tokenizer.encode(" one two three four")
    stream = stream_of(tokenizer)
    text = stream.take(Delta("r-0", 0, ids[:2])).text
    assert stream.take(Delta("r-0", 0, ids[:2])) is None
    assert stream.take(Delta("r-0", 1, ids[1:2])) is None
    piece = stream.take(Delta("r-0", 1, ids[1:3]))  # half known: only the rest is new
    assert piece.tokens == ids[2:3]
    text += piece.text + stream.take(Delta("r-0", 3, ids[3:], LENGTH)).text
    assert text == stream.sequences[0].text == " one two three four" and stream.done
    assert stream.take(Delta("r-0", 4, ids)) is None and stream.completion_tokens == 4


def test_a_gap_is_an_error(tokenizer):
    stream = stream_of(tokenizer)
    stream.take(Delta("r-0", 0, [100]))
    piece = stream.take(Delta("r-0", 2, [100]))
    assert piece.finish is ERROR and "skipped tokens 1 to 1 of r-0" in piece.error and piece.cancel


def test_the_engines_errors_pass_through(tokenizer):
    stream = stream_of(tokenizer, n=2)
    piece = stream.take(Delta("r-1", 0, [], ERROR, error="no luck"))
    assert (piece.choice, piece.finish, piece.error, piece.cancel) == (1, ERROR, "no luck", False)
    piece = stream.take(Delta("r-0", 9, [], ABORT))
    assert piece.finish is ABORT and piece.error and stream.done


def test_a_text_that_can_not_be_made_ends_its_sequence_alone(tokenizer, monkeypatch):
    stream = stream_of(tokenizer, n=2)
    monkeypatch.setattr(stream.sequences[0], "_feed", lambda tokens: 1 // 0)
    piece = stream.take(Delta("r-0", 0, [100]))
    assert piece.finish is ERROR and piece.cancel and "ZeroDivisionError" in piece.error
    assert stream.take(Delta("r-1", 0, [100])).text and not stream.done


def test_a_stop_string_inside_one_delta(tokenizer):
    ids = tokenizer.encode(" one two three four five")
    stream = stream_of(tokenizer, stop=("three",), logprobs=0)
    lps = [TokenLogprobs(t, -1.0, 1) for t in ids]
    piece = stream.take(Delta("r-0", 0, ids, LENGTH, logprobs=lps))
    assert (piece.text, piece.finish, piece.stop_reason, piece.cancel) == (" one two ", STOP, "three", False)
    assert piece.tokens == ids[:3] and len(piece.logprobs) == len(piece.offsets) == 3
    assert stream.completion_tokens == 3


def test_end_tokens(tokenizer):
    one = tokenizer.encode(" one")[0]
    for params, token, text, reason in (
        ({}, 2, " one", None),
        ({"include_stop_str_in_output": True}, 2, " one", None),  # special: skipped all the same
        ({"include_stop_str_in_output": True, "skip_special_tokens": False}, 2, " one<|im_end|>", None),
        ({"skip_special_tokens": False}, 2, " one", None),
        ({"stop_token_ids": (2,)}, 2, " one", 2),
        ({"stop_token_ids": (one,)}, one, " one", one),
        ({"stop_token_ids": (one,), "include_stop_str_in_output": True}, one, " one one", one),
    ):
        stream = stream_of(tokenizer, **params)
        stream.take(Delta("r-0", 0, [one]))
        piece = stream.take(Delta("r-0", 1, [token], STOP, stop_reason=token))
        assert (stream.sequences[0].text, piece.stop_reason) == (text, reason), params
        assert stream.completion_tokens == 2


def test_held_text_comes_with_the_last_piece(tokenizer):
    stream = stream_of(tokenizer, stop=("abc", "two x"))
    ids = tokenizer.encode(" one two")
    pieces = [stream.take(Delta("r-0", i, [t], LENGTH if i == 1 else None)) for i, t in enumerate(ids)]
    assert [p.text for p in pieces] == [" one", " two"]
    stream = stream_of(tokenizer, stop=("two x",))
    assert stream.take(Delta("r-0", 0, ids)).text == " one "
    assert stream.take(Delta("r-0", 2, [], LENGTH)).text == "two"


def test_cached_tokens(tokenizer):
    stream = stream_of(tokenizer, n=2, prompt=[5] * 40)
    stream.take(Delta("r-0", 0, [9], num_cached=16))
    stream.take(Delta("r-1", 0, [9], num_cached=32))
    assert stream.cached_tokens == 16 and stream.prompt_tokens == 40


def test_submissions(tokenizer):
    params = SamplingParams(n=3, seed=7, max_tokens=None, bad_words=("bad",), ignore_eos=True)
    found = submissions("r", [1, 2, 3], params, facts(), eos_ids=(2,), tokenizer=tokenizer, priority=4)
    assert [s.id for s in found] == ["r-0", "r-1", "r-2"] and {s.priority for s in found} == {4}
    assert [s.seed for s in found] == [7, child_seed(7, 1), child_seed(7, 2)]
    assert {s.max_tokens for s in found} == {512 - 3} and {s.eos_ids for s in found} == {()}
    words = found[0].params.bad_words_ids
    assert {tokenizer.decode(ids) for ids in words} == {"bad", " bad"}
    drawn = {submissions("r", [1], SamplingParams(), facts(), eos_ids=(), tokenizer=None)[0].seed for _ in range(20)}
    assert len(drawn) == 20 and all(0 <= s < SEED_LIMIT for s in drawn)


def test_child_seeds():
    seeds = [child_seed(s, i) for s in (0, 1, -1, SEED_LIMIT - 1, -SEED_LIMIT) for i in range(50)]
    # Two pairs of first seeds are the same 63 bits: 0 and -2**63, -1 and 2**63 - 1.
    assert len(set(seeds)) == len(seeds) - 2 and all(0 <= s < SEED_LIMIT for s in seeds)


def test_kv_cache_smaller_than_the_model():
    small = facts(num_blocks=4)  # 64 tokens
    for prompt, params, param in (
        ([5] * 100, SamplingParams(max_tokens=None), "prompt"),
        ([5] * 60, SamplingParams(max_tokens=16), "max_tokens"),
    ):
        with pytest.raises(RequestError, match="KV cache of this engine is 64 tokens") as e:
            submissions("r", prompt, params, small, eos_ids=(), tokenizer=None)
        assert e.value.param == param
    assert submissions("r", [5] * 60, SamplingParams(max_tokens=None), small, eos_ids=(), tokenizer=None)
