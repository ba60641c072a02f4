"""The sampler: its kernels against the definition, the definition against plain loops, draws against distributions."""

from __future__ import annotations

import logging
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.kernels.sampling_library import FEW
from planaria.protocol import Fresh
from planaria.types import SamplingParams
from planaria.worker import sampler as sampler_module
from planaria.worker import sampling
from planaria.worker.rng import draw_bits
from planaria.worker.sampler import Sampler
from planaria.worker.torch_sampler import TorchSampler

Floats = npt.NDArray[np.float32]
Params = SamplingParams
WAYS = ["kernels", "plain", "torch"]


class OnDevice(TorchSampler):
    """The sampler of logits on a device, given those that others are given."""

    def sample(self, logits: Any, rows: list[int], lines: list[int] | None = None) -> Any:
        return super().sample(torch.from_numpy(logits), rows, lines)

    def prompt_logprobs(self, logits: Any, targets: Sequence[int], k: int) -> Any:
        return super().prompt_logprobs(torch.as_tensor(logits), targets, k)


def make(rows: int, vocab_size: int, way: str = "kernels", *, threads: int = 1) -> Sampler:
    if way == "torch":
        return OnDevice(rows, vocab_size)
    sampler = Sampler(rows, vocab_size, plain=way == "plain", threads=threads)
    sampler.warm_up()
    return sampler


@pytest.fixture(params=WAYS)
def maker(request: pytest.FixtureRequest) -> Callable[[int, int], Sampler]:
    return lambda rows, vocab_size: make(rows, vocab_size, request.param)


def normal(*shape: int, seed: int) -> Floats:
    found: Floats = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).numpy()
    return found


def fresh(
    params: Params, tokens: Sequence[int] = (0,), num_prompt: int | None = None, seed: int = 1, **more: Any
) -> Fresh:
    return Fresh(tuple(tokens), len(tokens) if num_prompt is None else num_prompt, params, seed, **more)


def one(maker: Callable[[int, int], Sampler], logits: Sequence[float], entry: Fresh) -> int:
    """The token that a single row draws."""
    sampler = maker(1, len(logits))
    sampler.enter(0, entry)
    tokens, _, errors = sampler.sample(np.array([logits], np.float32), [0])
    assert not errors
    return tokens[0]


def swept(logits: Sequence[float] | Floats, params: Params, points: int = 4096) -> Counter[int]:
    """How often each token is chosen when the random number runs evenly over its range: the distribution itself."""
    lines = np.tile(np.array(logits, np.float32), (points, 1))
    tokens, errors = sampling.choose(lines, [params] * points, [(i << 64) // points for i in range(points)])
    assert not errors
    return Counter(tokens)


# --- The kernels are the definition. ---


def random_logits(rng: np.random.Generator, kind: str, lines: int, size: int) -> Floats:
    if kind == "grid":  # many equals
        x = rng.integers(-4, 5, (lines, size)).astype(np.float32) * np.float32(rng.choice([0.25, 1.0, 3.0]))
        x[x == 0] = rng.choice(np.array([0.0, -0.0], np.float32), (x == 0).sum())
    elif kind == "equal":
        x = np.full((lines, size), rng.normal() * 5, np.float32)
    elif kind == "masked":
        x = rng.normal(0, 3, (lines, size)).astype(np.float32)
        x[rng.random(x.shape) < rng.choice([0.1, 0.9, 1.0])] = -np.inf
    elif kind == "extreme":
        choices = [3.4e38, -3.4e38, 1e30, -1e30, 1e-45, -1e-45, 0.0, -0.0, 1.0, 88.0, -np.inf]
        x = rng.choice(np.array(choices, np.float32), (lines, size))
    elif kind == "broken":
        x = rng.normal(0, 3, (lines, size)).astype(np.float32)
        bits = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0x7F800000, 0xFF800000], np.uint32).view(np.float32)
        for line in x:
            line[rng.integers(size)] = rng.choice(bits)
    elif kind == "rounded":  # as a bfloat16 model gives
        x = (rng.normal(0, 4, (lines, size)).astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)
    else:
        x = rng.normal(0, rng.choice([0.01, 1, 5, 50]), (lines, size)).astype(np.float32)
    return np.ascontiguousarray(x)


KINDS = ["grid", "equal", "masked", "extreme", "broken", "rounded", "normal"]
token_ids = st.integers(0, 6)
request_params = st.builds(
    Params,
    temperature=st.sampled_from([0.0, 1e-5, 0.01, 0.5, 1.0, 1.7, 100.0]),
    top_k=st.sampled_from([0, -1, 1, 2, 3, 7, 50, 127, 128, 129, 1000, 10**9]),
    top_p=st.sampled_from([1.0, 1.0 - 2**-53, 0.99, 0.9, 0.5, 0.1, 1e-3, 1e-300]),
    min_p=st.sampled_from([0.0, 1e-30, 0.01, 0.1, 0.5, 0.999, 1.0]),
    min_tokens=st.integers(0, 4),
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.5, 1.3, 100.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.7, -2.0]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.1, -2.0]),
    logit_bias=st.none() | st.dictionaries(token_ids, st.floats(-100, 100, width=32), max_size=4),
    bad_words_ids=st.lists(st.lists(token_ids, max_size=3).map(tuple), max_size=3).map(tuple),
    stop_token_ids=st.lists(token_ids, max_size=2).map(tuple),
    logprobs=st.none() | st.integers(0, 20),
)


@settings(max_examples=200, deadline=None)
@given(
    params=st.lists(request_params, min_size=1, max_size=6),
    size=st.sampled_from([7, 8, 100, 127, 128, 129, 255, 256, 257, 700]),
    kinds=st.lists(st.sampled_from(KINDS), min_size=3, max_size=3),
    seed=st.integers(-(2**63), 2**63 - 1),
)
def test_kernels_give_what_the_definition_gives(params: list[Params], size: int, kinds: list[str], seed: int) -> None:
    rng = np.random.default_rng(seed % 2**64)
    samplers = [make(len(params), size, way) for way in WAYS]
    for row, p in enumerate(params):
        history = rng.integers(0, 7, rng.integers(1, 12)).tolist()
        entry = fresh(p, history, int(rng.integers(1, len(history) + 1)), seed + row, eos_ids=(2, size + 5))
        for sampler in samplers:
            sampler.enter(row, entry)
    rows = rng.permutation(len(params)).tolist()
    for kind in kinds:
        logits = random_logits(rng, kind, len(params), size)
        assert len({repr(sampler.sample(logits.copy(), rows)) for sampler in samplers}) == 1
        targets = rng.integers(0, size, len(params)).tolist()
        assert len({repr(sampler.prompt_logprobs(logits, targets, 5)) for sampler in samplers}) == 1


@pytest.mark.parametrize("kind", ["peaked", "normal", "rounded", "equal"])
def test_kernels_agree_on_a_real_vocabulary(kind: str) -> None:
    size, choices = 49152, [
        Params(),
        Params(temperature=0.6),
        Params(top_k=50),
        Params(top_k=2000, top_p=0.999),
        Params(top_p=0.9),
        Params(top_p=0.9999, temperature=3.0),
        Params(min_p=0.05),
        Params(top_k=40, top_p=0.95, min_p=0.01, repetition_penalty=1.1, logprobs=20),
    ]  # fmt: skip
    rng = np.random.default_rng(3)
    samplers = [make(8, size, way, threads=2) for way in WAYS]
    for row, params in enumerate(choices):
        for sampler in samplers:
            sampler.enter(row, fresh(params, range(100, 400), seed=row))
    for _ in range(3):
        x = random_logits(rng, kind, 8, size)
        if kind == "peaked":
            x[:, rng.choice(size, 60)] += rng.exponential(3, 60).astype(np.float32) + 6
        assert len({repr(sampler.sample(x.copy(), list(range(8)))) for sampler in samplers}) == 1
    samplers[0].close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1088, 3001])
def test_what_is_drawn_of_those_allowed_is_drawn_with_all_others_banned(kind: str, size: int) -> None:
    """Few of them, which are gathered, and many."""
    choices = [Params(), Params(temperature=0), Params(top_k=7), Params(top_p=0.9, min_p=0.01), Params(top_k=2000)]
    rng, drawn, rows = np.random.default_rng(size), 0, list(range(len(choices)))
    samplers = [make(len(choices), size, way) for way in ("kernels", "plain")]
    for row, params in enumerate(choices):
        for sampler in samplers:
            sampler.enter(row, fresh(params, seed=row))
    kernels = samplers[0]._kernels
    assert kernels is not None
    for count in (0, 1, 63, 64, FEW - 1, FEW, FEW + 1, size):
        logits = random_logits(rng, kind, len(rows), size)
        allowed = np.zeros((len(rows), size), np.bool_)
        for line in allowed:
            line[rng.choice(size, count, replace=False)] = True
        tokens, _, errors = samplers[1].sample(np.where(allowed, logits, np.float32(-np.inf)), rows)
        for part in range(2):
            copy = logits.copy()
            draw = kernels.allowed(copy, rows, part)
            for row in rows:
                words = np.zeros(-(-size // 64), np.uint64)
                words.view(np.uint8)[: -(-size // 8)] = np.packbits(allowed[row], bitorder="little")
                assert draw(row, words.ctypes.data) == (tokens[row], errors.get(row, ""))
                drawn += row not in errors
        samplers[0]._positions += 1
    assert drawn > 20


def test_kernels_draw_the_same_bits() -> None:
    from planaria.kernels import cpu_sampling

    for seed, position in [(0, 0), (1, 2**40 + 3), (2**64 - 1, 7), (0xA4093822_299F31D0, 12345)]:
        assert cpu_sampling.draw_bits.py_func(np.uint64(seed), np.uint64(position)) == draw_bits(seed, position)
    rng = np.random.default_rng(1)
    for a, b in [*rng.integers(0, 2**64, (200, 2), dtype=np.uint64).tolist(), (2**64 - 1, 2**64 - 1), (0, 5)]:
        assert cpu_sampling.high_product.py_func(np.uint64(a), np.uint64(b)) == a * b >> 64


# --- The definition is what it says. ---


def test_weights_are_exponentials_and_never_rise() -> None:
    x = -np.linspace(0, 45, 2**20, dtype=np.float32)[None]
    y, w = sampling.weigh(x, np.ones((1, 1), np.float32))
    exact = np.exp2(-y.astype(np.float64)) * 2.0**sampling.UNIT_BITS
    assert w[0, 0] == 2**sampling.UNIT_BITS
    assert (np.diff(w) <= 0).all()
    assert (np.abs(w - exact) <= exact * 3e-7 + 1).all()


def plain_edit(logits: Floats, p: Params, history: Sequence[int], num_prompt: int, eos: Sequence[int]) -> list[float]:
    """Steps 1 to 3 in loops over float32 numbers."""
    f, output = np.float32, history[num_prompt:]
    out = []
    for token, x in enumerate(logits):
        bad = any(
            w[-1] == token and list(history[len(history) - len(w) + 1 :]) == list(w[:-1]) for w in p.bad_words_ids
        )
        if bad or (len(output) < p.min_tokens and token in (*eos, *p.stop_token_ids)):
            x = f(-np.inf)
        x = x + f((p.logit_bias or {}).get(token, 0.0))
        if token in history and p.repetition_penalty != 1.0:
            x = x / f(p.repetition_penalty) if x > 0 else x * f(p.repetition_penalty)
        x = x - f(output.count(token)) * f(p.frequency_penalty)
        if token in output:
            x = x - f(p.presence_penalty)
        out.append(float(x))
    return out


class Spy(Sampler):
    """Keeps the edited logits instead of choosing from them."""

    edited: Floats

    def _choose(self, logits: Any, *args: Any) -> tuple[list[int], dict[int, str]]:
        self.edited = logits.copy()
        return super()._choose(logits, *args)


@settings(max_examples=200, deadline=None)
@given(p=request_params, seed=st.integers(0, 2**32), plain=st.booleans(), steps=st.integers(1, 4))
def test_processors(p: Params, seed: int, plain: bool, steps: int) -> None:
    rng = np.random.default_rng(seed)
    history = rng.integers(0, 7, rng.integers(1, 9)).tolist()
    num_prompt = int(rng.integers(1, len(history) + 1))
    p = Params(**{name: getattr(p, name) for name in p.__struct_fields__ if name != "bad_words_ids"},
               bad_words_ids=tuple(w for w in p.bad_words_ids if 0 < len(w) <= len(history)))  # fmt: skip
    spy = Spy(1, 7, plain=plain)
    spy.warm_up()
    spy.enter(0, fresh(p, history, num_prompt, eos_ids=(3,)))
    for _ in range(steps):
        logits = rng.normal(0, 3, (1, 7)).astype(np.float32)
        expected = plain_edit(logits[0], p, history, num_prompt, (3,))
        tokens, _, _ = spy.sample(logits, [0])
        assert spy.edited[0].tolist() == expected
        history.append(tokens[0])


def exact(logits: Sequence[float] | Floats, p: Params) -> dict[int, float]:
    """Steps 4 and 5 in loops over float64 numbers: the distribution drawn from."""
    top = max(logits)
    y = {t: (top - float(x)) / p.temperature for t, x in enumerate(logits)}
    if p.min_p > 0:
        y = {t: v for t, v in y.items() if v <= -math.log(p.min_p)}
    order = sorted(y, key=lambda t: (y[t], t))
    if p.top_k > 0:
        order = order[: p.top_k]
    weights = {t: math.exp(-y[t]) for t in order}
    total, before, kept = sum(weights.values()), 0.0, {}
    for t in order:
        if before < p.top_p * total:
            kept[t] = weights[t]
        before += weights[t]
    return {t: w / sum(kept.values()) for t, w in kept.items()}


FILTERS = [
    Params(),
    Params(temperature=0.7),
    Params(temperature=2.5),
    Params(top_k=5),
    Params(top_p=0.83),
    Params(min_p=0.12),
    Params(temperature=1.4, top_k=12, top_p=0.91, min_p=0.03),
]
LOGITS = np.random.default_rng(11).normal(0, 1.6, 40).astype(np.float32)


@pytest.mark.parametrize("params", FILTERS, ids=lambda p: repr(p)[15:-1] or "default")
def test_distribution_is_exact(params: Params) -> None:
    """Every random number in turn, evenly: each token comes as often as its probability says, give or take one."""
    points = 8192
    counts, wanted = swept(LOGITS, params, points), exact(LOGITS, params)
    for token in range(len(LOGITS)):
        assert abs(counts[token] - points * wanted.get(token, 0.0)) <= 1.01, token
        assert token in wanted or counts[token] == 0


@settings(max_examples=100, deadline=None)
@given(
    logits=st.lists(st.floats(-20, 20, width=16), min_size=1, max_size=30),
    temperature=st.sampled_from([0.3, 1.0, 4.0]),
    top_k=st.integers(0, 12),
    share=st.sampled_from([1.0, 0.871, 0.513, 0.0917]),
    min_p=st.sampled_from([0.0, 0.0371, 0.317, 0.713]),
)
def test_distribution_of_any_logits(
    logits: list[float], temperature: float, top_k: int, share: float, min_p: float
) -> None:
    params = Params(temperature=temperature, top_k=top_k, top_p=share, min_p=min_p)
    wanted = exact(logits, params)
    slack = {t for s in (1e-6, -1e-6) for t in exact(logits, params_with(params, share + s, min_p + s))} ^ set(wanted)
    if not slack:  # no token is within rounding of a cut
        counts = swept(logits, params, 1024)
        assert all(abs(counts[t] - 1024 * wanted.get(t, 0.0)) <= 1.02 for t in range(len(logits)))


def params_with(params: Params, top_p: float, min_p: float) -> Params:
    return Params(
        temperature=params.temperature, top_k=params.top_k, top_p=min(top_p, 1.0) if params.top_p < 1 else 1.0,
        min_p=max(min_p, 0.0) if params.min_p > 0 else 0.0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("logits", "params", "kept"),
    [
        ([1, 3, 3, 3, 2], Params(top_k=2), {1, 2}),  # equals: the lowest ids, and no more than k
        ([1, 3, 3, 3, 2], Params(top_k=4), {1, 2, 3, 4}),
        ([0, 0, 0, 0], Params(top_p=0.5), {0, 1}),
        ([0, 0, 0, 0], Params(top_p=0.51), {0, 1, 2}),
        ([0.0, -0.0, 0.0], Params(top_k=2), {0, 1}),
        ([5, 1, 0], Params(top_p=1e-9), {0}),  # never nothing
        ([0, 1, 1], Params(min_p=1.0), {1, 2}),  # min_p keeps every equal
        ([0, math.log(2) * 0.999, math.log(4) * 0.999], Params(min_p=0.5), {1, 2}),
        ([0, math.log(2), math.log(4)], Params(temperature=0.5, min_p=0.5), {2}),  # min_p comes after temperature
        ([math.log(4), math.log(3), math.log(2), math.log(1)], Params(top_k=2, top_p=0.57), {0}),  # p of what k left
        ([math.log(4), math.log(3), math.log(2), math.log(1)], Params(top_k=2, top_p=0.58), {0, 1}),
        ([-math.inf, 2, -math.inf], Params(top_k=3), {1}),
        ([0, -40, -1000], Params(), {0}),  # 2^-57 of the likeliest is nothing
    ],
)  # fmt: skip
def test_cuts_and_equals(logits: list[float], params: Params, kept: set[int]) -> None:
    assert set(swept(logits, params)) == kept


def test_draw_walks_tokens_by_id() -> None:
    lines = np.tile(np.log(np.array([0.2, 0.5, 0.3], np.float32)), (5, 1))
    bits = [int(u * 2**64) for u in (0.0, 0.1999, 0.2001, 0.6999, 0.7001)]
    assert sampling.choose(lines, [Params()] * 5, bits)[0] == [0, 0, 1, 1, 2]


def test_greedy_takes_the_lowest_of_equals(maker: Callable[[int, int], Sampler]) -> None:
    for temperature in (0.0, 9e-6):
        assert one(maker, [1, 7, 7, -1], fresh(Params(temperature=temperature))) == 1
    assert one(maker, [-1, -0.0, 0.0], fresh(Params(temperature=0.0))) == 1
    assert one(maker, [1, 7, 7, -1], fresh(Params(temperature=0.0, logit_bias={2: 0.5}))) == 2
    # a greedy row among drawn ones goes through the kernel
    sampler = maker(2, 4)
    sampler.enter(0, fresh(Params()))
    sampler.enter(1, fresh(Params(temperature=0.0)))
    assert sampler.sample(np.array([[0, 0, 0, 0], [1, 7, 7, -1]], np.float32), [0, 1])[0][1] == 1


# --- Draws. ---


def draw_many(params: Params, rounds: int, rows: int = 2000, history: Sequence[int] = (0,)) -> npt.NDArray[np.int64]:
    """Tokens [rows, rounds] for as many seeds, through the sampler and its kernels."""
    sampler = make(rows, len(LOGITS))
    for row in range(rows):
        sampler.enter(row, fresh(params, history, seed=row * 7919 - 5))
    logits = np.tile(LOGITS, (rows, 1))
    return np.array([sampler.sample(logits.copy(), list(range(rows)))[0] for _ in range(rounds)]).T


def p_value(counts: Counter[Any], wanted: dict[Any, float]) -> float:
    """Of a chi-square test; outcomes expected less than five times are taken together."""
    total = sum(counts.values())
    assert set(counts) <= set(wanted)
    common = {k: total * p for k, p in wanted.items() if total * p >= 5}
    rest = total - sum(common.values())
    seen_rest = total - sum(counts[k] for k in common)
    value = sum((counts[k] - n) ** 2 / n for k, n in common.items()) + (
        (seen_rest - rest) ** 2 / rest if rest > 1e-6 else 0
    )
    freedom = len(common) - 1 + (rest > 1e-6)
    return float(torch.special.gammaincc(torch.tensor(freedom / 2).double(), torch.tensor(value / 2).double()))


@pytest.mark.parametrize("params", FILTERS, ids=lambda p: repr(p)[15:-1] or "default")
def test_draws_follow_the_distribution(params: Params) -> None:
    draws = draw_many(params, rounds=10)
    assert p_value(Counter(draws.ravel().tolist()), exact(LOGITS, params)) > 1e-6


def test_draws_of_processed_logits_follow_the_distribution() -> None:
    params = Params(repetition_penalty=1.4, logit_bias={3: 2.0, 5: -100.0}, bad_words_ids=((7,),), top_p=0.97)
    draws = draw_many(params, rounds=1, rows=20000, history=(1, 2, 3))
    edited = plain_edit(LOGITS, params, (1, 2, 3), 3, ())
    assert p_value(Counter(draws.ravel().tolist()), exact(edited, params)) > 1e-6


def test_p_value_sees_a_wrong_distribution() -> None:
    draws = draw_many(Params(temperature=0.95), rounds=10)
    assert p_value(Counter(draws.ravel().tolist()), exact(LOGITS, Params())) < 1e-6


def test_neighbouring_positions_and_seeds_are_independent() -> None:
    draws = draw_many(Params(), rounds=20)
    p = exact(LOGITS, Params())
    pairs = {(a, b): p[a] * p[b] for a in p for b in p}
    along_positions = zip(draws[:, :-1].ravel().tolist(), draws[:, 1:].ravel().tolist(), strict=True)
    along_seeds = zip(draws[:-1].ravel().tolist(), draws[1:].ravel().tolist(), strict=True)
    assert p_value(Counter(along_positions), pairs) > 1e-6
    assert p_value(Counter(along_seeds), pairs) > 1e-6


MIXED = [
    Params(),
    Params(top_p=0.9, frequency_penalty=0.4),
    Params(temperature=0.0, repetition_penalty=1.2),
    Params(top_k=10, min_tokens=4, bad_words_ids=((1, 2), (5,))),
    Params(min_p=0.02, logit_bias={4: 3.0}, presence_penalty=-0.5, logprobs=3),
]


def run_alone(params: Params, seed: int, logits: Floats) -> list[int]:
    sampler = make(1, logits.shape[-1])
    sampler.enter(0, fresh(params, (1, 2, 3), seed=seed, eos_ids=(0,)))
    return [sampler.sample(line[None].copy(), [0])[0][0] for line in logits]


def test_batch_rows_and_preemption_change_no_token(maker: Callable[[int, int], Sampler]) -> None:
    rng, size, steps, count = np.random.default_rng(5), 60, 24, 20
    logits = rng.normal(0, 2, (count, steps, size)).astype(np.float32)
    requests = [(MIXED[i % len(MIXED)], 100 + i) for i in range(count)]
    alone = [run_alone(params, seed, logits[i]) for i, (params, seed) in enumerate(requests)]
    sampler = maker(count + 3, size)
    histories = [[1, 2, 3] for _ in requests]
    place: dict[int, int] = {}
    while any(len(h) < 3 + steps for h in histories):
        for i, (params, seed) in enumerate(requests):
            if i in place and rng.random() < 0.1:  # preempted
                sampler.leave(place.pop(i))
            if i not in place and rng.random() < 0.5:
                row = int(rng.choice([r for r in range(count + 3) if r not in place.values()]))
                sampler.enter(row, fresh(params, histories[i], 3, seed, eos_ids=(0,)))
                place[i] = row
        batch = [i for i in rng.permutation(list(place)).tolist() if len(histories[i]) < 3 + steps]
        if not batch:
            continue
        lines = np.stack([logits[i, len(histories[i]) - 3] for i in batch])
        tokens, _, errors = sampler.sample(lines, [place[i] for i in batch])
        assert not errors
        for i, token in zip(batch, tokens, strict=True):
            histories[i].append(token)
    assert [h[3:] for h in histories] == alone


def test_threads_change_no_token() -> None:
    rows, logits = 40, normal(40, 500, seed=2)
    outcomes = []
    for threads in (1, 2, 3):
        sampler = make(rows, 500, threads=threads)
        for row in range(rows):
            sampler.enter(row, fresh(MIXED[row % len(MIXED)], (1, 2), seed=row))
        outcomes.append([sampler.sample(logits.copy(), list(range(rows))) for _ in range(3)])
        outcomes[-1].append(sampler.prompt_logprobs(logits, list(range(rows)), 4))
        sampler.close()
    assert outcomes[0] == outcomes[1] == outcomes[2]


# --- Rules over a history. ---


def test_min_tokens_keeps_the_end_away(maker: Callable[[int, int], Sampler]) -> None:
    params = Params(temperature=0.0, min_tokens=3, stop_token_ids=(2,))
    sampler = maker(1, 4)
    sampler.enter(0, fresh(params, (3, 3), eos_ids=(1,)))
    logits = np.array([[0, 9, 8, 7]], np.float32)
    assert [sampler.sample(logits.copy(), [0])[0][0] for _ in range(5)] == [3, 3, 3, 1, 1]
    sampler.enter(0, fresh(params, (3, 3, 0, 0), 2, eos_ids=(1,)))  # two came out before
    assert [sampler.sample(logits.copy(), [0])[0][0] for _ in range(2)] == [3, 1]


def test_bad_words_of_several_tokens(maker: Callable[[int, int], Sampler]) -> None:
    params = Params(temperature=0.0, bad_words_ids=((0, 1), (2, 2, 2), (9,), ()))
    entry = [fresh(params, tokens) for tokens in [(3, 0), (0, 3), (2, 2), (2,), (1, 2)]]
    logits = [0.0, 9.0, 8.0, 7.0]
    assert [one(maker, logits, e) for e in entry[:2]] == [2, 1]
    logits = [0.0, 7.0, 9.0, 8.0]
    assert [one(maker, logits, e) for e in entry[2:]] == [3, 2, 2]


def test_penalties_count_what_is_drawn(maker: Callable[[int, int], Sampler]) -> None:
    sampler = maker(1, 3)
    sampler.enter(0, fresh(Params(temperature=0.0, frequency_penalty=1.0), (0, 0, 0)))  # the prompt doesn't count
    logits = np.array([[4.5, 3.0, 2.0]], np.float32)
    assert [sampler.sample(logits.copy(), [0])[0][0] for _ in range(6)] == [0, 0, 1, 0, 1, 2]


def test_many_distinct_tokens_are_counted(maker: Callable[[int, int], Sampler]) -> None:
    sampler = maker(1, 2000)
    sampler.enter(0, fresh(Params(temperature=0.0, presence_penalty=2.0), range(200)))
    logits = np.linspace(1, 0, 2000, dtype=np.float32)[None]
    assert [sampler.sample(logits.copy(), [0])[0][0] for _ in range(900)] == list(range(900))


# --- Log-probabilities. ---


def test_logprobs_are_of_the_raw_logits(maker: Callable[[int, int], Sampler]) -> None:
    size = 300
    logits = normal(3, size, seed=4) * 4
    logits[1, 200:] = -np.inf
    expected = torch.log_softmax(torch.from_numpy(logits).double(), -1)
    choices = [
        Params(temperature=0.3, top_k=4, logit_bias={7: 50.0}, logprobs=5),
        Params(repetition_penalty=2.0, logprobs=0),
        Params(temperature=0.0, logprobs=20),
    ]  # fmt: skip
    sampler = maker(5, size)
    for row, params in zip((4, 1, 3), choices, strict=True):
        sampler.enter(row, fresh(params, (1, 2, 3)))
    tokens, logprobs, _ = sampler.sample(logits.copy(), [4, 1, 3])
    assert tokens[0] == 7
    assert set(logprobs) == {4, 1, 3}
    for i, row in enumerate((4, 1, 3)):
        entry, k = logprobs[row], choices[i].logprobs
        assert entry.token == tokens[i]
        assert entry.logprob == pytest.approx(expected[i, tokens[i]].item(), abs=1e-5)
        assert entry.rank == 1 + int((expected[i] > expected[i, tokens[i]]).sum())
        best = expected[i].topk(k)
        assert [t for t, _ in entry.top] == best.indices.tolist()
        assert [v for _, v in entry.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_logprobs_of_equals_are_by_id(maker: Callable[[int, int], Sampler]) -> None:
    logits = np.array([[1.0, 2.0, 1.0, 2.0, 0.0, -np.inf]] * 6, np.float32)
    entries = maker(1, 6).prompt_logprobs(logits, [0, 1, 2, 3, 4, 5], 4)
    assert [entry.rank for entry in entries] == [3, 1, 4, 2, 5, 6]
    assert [t for t, _ in entries[0].top] == [1, 3, 0, 2]
    assert entries[5].logprob == -math.inf
    assert [len(entry.top) for entry in maker(1, 6).prompt_logprobs(logits, [0] * 6, 20)] == [6] * 6


def test_logprobs_on_a_real_vocabulary(maker: Callable[[int, int], Sampler]) -> None:
    logits = normal(16, 49152, seed=8) * np.linspace(0.1, 6, 16, dtype=np.float32)[:, None]
    before, targets = logits.copy(), list(range(0, 160, 10))
    entries = maker(1, 49152).prompt_logprobs(logits, targets, 3)
    assert (logits == before).all()
    expected = torch.log_softmax(torch.from_numpy(logits).double(), -1)
    for i, entry in enumerate(entries):
        assert entry.logprob == pytest.approx(expected[i, targets[i]].item(), abs=1e-5)
        assert [v for _, v in entry.top] == pytest.approx(expected[i].topk(3).values.tolist(), abs=1e-5)


# --- Errors stay in their row. ---


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf])
def test_a_broken_row_is_alone(maker: Callable[[int, int], Sampler], temperature: float, value: float) -> None:
    def run(broken: bool) -> tuple[list[int], dict[int, Any], dict[int, str]]:
        sampler = maker(4, 300)
        for row in range(4):
            sampler.enter(row, fresh(Params(temperature=temperature, logprobs=1), (1,), seed=row))
        logits = normal(4, 300, seed=6)
        if broken:
            logits[1, 130] = value
            logits[2, :] = value
        sampler.sample(logits.copy(), [0, 1, 2, 3])
        return sampler.sample(logits, [0, 1, 2, 3])

    tokens, logprobs, errors = run(True)
    good, good_logprobs, no_errors = run(False)
    assert not no_errors
    assert errors == {1: sampling.BROKEN, 2: sampling.BROKEN}
    assert (tokens[0], tokens[3]) == (good[0], good[3])
    assert (tokens[1], tokens[2]) == (0, 0)
    assert logprobs == {row: good_logprobs[row] for row in (0, 3)}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_nothing_to_choose_is_alone(maker: Callable[[int, int], Sampler], temperature: float) -> None:
    sampler = maker(3, 4)
    sampler.enter(0, fresh(Params(temperature=temperature), (1,)))
    everything = tuple((t,) for t in range(4))
    sampler.enter(1, fresh(Params(temperature=temperature, bad_words_ids=everything, logprobs=2), (1,)))
    sampler.enter(2, fresh(Params(temperature=temperature, logit_bias={0: 100.0}), (1,)))
    logits = np.full((3, 4), -np.inf, np.float32)
    logits[:2] = 0.0
    tokens, logprobs, errors = sampler.sample(logits, [0, 1, 2])
    assert errors == {1: sampling.BANNED, 2: sampling.BANNED}
    assert tokens[1:] == [0, 0]
    assert not logprobs
    assert sampler._positions.tolist() == [2, 2, 2]


def test_prompt_logprobs_of_broken_logits_are_nan(maker: Callable[[int, int], Sampler]) -> None:
    logits = np.zeros((2, 5), np.float32)
    logits[0, 3] = math.nan
    broken, good = maker(1, 5).prompt_logprobs(logits, [1, 1], 2)
    assert math.isnan(broken.logprob)
    assert good.logprob == pytest.approx(-math.log(5), abs=1e-6)


def test_wrong_arguments_are_refused(maker: Callable[[int, int], Sampler]) -> None:
    sampler = maker(2, 10)
    with pytest.raises(ValueError, match="row 2 of 2"):
        sampler.enter(2, fresh(Params()))
    with pytest.raises(ValueError, match="outside the vocabulary of 10"):
        sampler.enter(0, fresh(Params(repetition_penalty=2.0), (1, 10)))
    sampler.enter(0, fresh(Params(), (1, 10)))  # nothing looks at it
    with pytest.raises(ValueError, match=r"float32 \(1, 10\)"):
        sampler.sample(np.zeros((1, 11), np.float32), [0])
    with pytest.raises(ValueError, match="float16"):
        sampler.sample(np.zeros((1, 10), np.float16), [0])
    for target in (-1, 10):
        with pytest.raises(ValueError, match="outside the vocabulary of 10"):
            sampler.prompt_logprobs(np.zeros((1, 10), np.float32), [target], 1)
    assert sampler.sample(np.zeros((0, 10), np.float32), []) == ([], {}, {})
    assert sampler.prompt_logprobs(np.zeros((0, 10), np.float32), [], 1) == []


def test_lines_may_be_strided(maker: Callable[[int, int], Sampler]) -> None:
    wide = normal(4, 20, seed=6)
    outcomes = []
    for logits in (wide[::2, :10], wide[::2, :10].copy()):
        sampler = maker(2, 10)
        sampler.enter(0, fresh(Params(logit_bias={1: 2.0}, logprobs=2), seed=3))
        sampler.enter(1, fresh(Params(temperature=0.0), seed=4))
        outcomes.append(sampler.sample(logits, [0, 1]))
    assert outcomes[0] == outcomes[1]


# --- Loading. ---


@pytest.mark.parametrize("other", [Params(temperature=0), Params(temperature=1), Params(temperature=0, logprobs=1)])
def test_lines_may_be_others_than_rows(maker: Callable[[int, int], Sampler], other: Params) -> None:
    logits = normal(7, 50, seed=2)
    logits[3, 9] = np.nan
    found = []
    for lines in (None, [0, 3, 6]):
        sampler = maker(3, 50)
        for row in range(3):
            sampler.enter(row, fresh(other if row else Params(temperature=0)))
        for _ in range(2):
            given = logits[[0, 3, 6]] if lines is None else logits.copy()
            tokens, logprobs, errors = sampler.sample(given, [0, 1, 2], lines)
            found.append((tokens, {row: entry.token for row, entry in logprobs.items()}, errors))
    assert found[:2] == found[2:] and set(found[0][2]) == {1}


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(cache_dir: Path | None, *, aside: bool) -> None:
        raise OSError("no room")

    monkeypatch.setattr(sampler_module, "load", refuse)


@pytest.mark.usefixtures("no_kernels")
def test_without_kernels_the_definition_does_the_work(caplog: pytest.LogCaptureFixture) -> None:
    sampler = Sampler(1, 200)
    with caplog.at_level(logging.WARNING):
        sampler.enter(0, fresh(Params(top_p=0.9, repetition_penalty=1.5, logprobs=2), (1, 2), seed=9))
        with pytest.raises(OSError, match="no room"):  # after the attempt in the background
            sampler.warm_up()
    assert "no room" in caplog.text
    logits = normal(1, 200, seed=1)
    other = make_after(Params(top_p=0.9, repetition_penalty=1.5, logprobs=2))
    assert sampler.sample(logits.copy(), [0]) == other.sample(logits.copy(), [0])


def make_after(params: Params) -> Sampler:
    sampler = Sampler(1, 200, plain=True)
    sampler.enter(0, fresh(params, (1, 2), seed=9))
    return sampler


def test_greedy_requests_load_no_compiler() -> None:
    code = """
import sys, numpy
from planaria.protocol import Fresh
from planaria.types import SamplingParams
from planaria.worker.sampler import Sampler
s = Sampler(1, 10)
s.enter(0, Fresh((1,), 1, SamplingParams(temperature=0.0), 3))
assert s.sample(numpy.arange(10, dtype=numpy.float32)[None], [0])[0] == [9]
s.close()
assert not {"numba", "torch"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.long
def test_kernels_are_compiled_once(tmp_path: Path) -> None:
    code = f"""
import pathlib, sys
from planaria.worker.sampler import Sampler
Sampler(1, 10, pathlib.Path({str(tmp_path)!r})).warm_up()
print("numba" in sys.modules)
"""

    def start() -> tuple[str, dict[Path, int]]:
        done = subprocess.run([sys.executable, "-c", code], check=True, timeout=300, stdout=subprocess.PIPE, text=True)
        return done.stdout.strip(), {path: path.stat().st_ino for path in tmp_path.iterdir()}

    compiled, files = start()
    assert (compiled, len(files)) == ("True", 1)
    assert start() == ("False", files)
    (file,) = files
    file.write_bytes(file.read_bytes()[:-100])  # damaged: compiled again
    compiled, mended = start()
    assert (compiled, set(mended)) == ("True", {file})
    assert start() == ("False", mended)


@pytest.mark.long
def test_the_first_request_compiles_aside(tmp_path: Path) -> None:
    code = f"""
import pathlib, sys, numpy
from planaria.protocol import Fresh
from planaria.types import SamplingParams
from planaria.worker.sampler import Sampler
s = Sampler(1, 10, pathlib.Path({str(tmp_path)!r}))
s.enter(0, Fresh((1,), 1, SamplingParams(top_k=1), 3))
assert s.sample(numpy.arange(10, dtype=numpy.float32)[None], [0])[0] == [9]  # at once
s.warm_up()  # when the kernels are there
assert "numba" not in sys.modules
assert s.sample(numpy.arange(10, dtype=numpy.float32)[None], [0])[0] == [9]
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    sampler = Sampler(1, 3, tmp_path / "file" / "below")
    sampler.enter(0, fresh(Params(logit_bias={1: 100.0})))
    assert sampler.sample(np.zeros((1, 3), np.float32), [0])[0] == [1]
