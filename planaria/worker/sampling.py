"""What it means to choose a token: the definition, in plain NumPy.

`kernels.cpu_sampling` computes the same for logits in main memory, `torch_sampling` for those on a device; a test holds
both to the same tokens.

The rule: a token is a function of its row's logits, its request's parameters, history and seed, nothing else.

What happens to a row's logits, in this order:
1. bad words: the last token of a sequence is banned where the history (prompt included) ends in the rest of
   it; min_tokens: end-of-sequence and stop tokens are banned until that many tokens came out;
   allowed_token_ids: every other token is banned; banned is -inf;
2. logit_bias is added;
3. repetition penalty (tokens of prompt and output: x / r if x > 0, else x * r), then frequency (f * count)
   and presence penalty of the tokens of the output;
4. temperature 0: the greatest logit, the lowest id among equals. Otherwise weights 2^(-y) with
   y = (max - x) * log2(e) / temperature, and the tokens in the order greatest logit, then lowest id are cut:
   min_p keeps y <= -log2(min_p); then top_k keeps the first k, never more, equals or not; then top_p keeps
   the shortest prefix holding that share of the mass that is left;
5. one number from the generator (64 bits, see `rng`) picks a point of the mass that is kept, laid out in the
   order of token ids. One number a token, and not one per candidate, so that what is drawn can't depend on
   how many candidates there are; id order, and not rank order, so that two logits that swap places move no
   other token.

Weights are integers in units of 2^-40 of the likeliest token's, from a polynomial in single float32
operations. Sums of integers don't depend on their order, so kernels, threads, batches and devices agree to the
bit, and no rounding decides who is kept. A token below 2^-40 of the likeliest has weight 0: never drawn.

Log-probabilities are those of the raw logits, before any of this.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from planaria.types import SamplingParams, TokenLogprobs

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]

UNIT_BITS = 40  # the likeliest token's weight is 2^40: below 2^60 in all for vocabularies up to a million
LOG2E = math.log2(math.e)
_LOG_UNIT = UNIT_BITS * math.log(2)
# 2^-f for f in [0, 1] to 2.5e-7, never rising, exactly 1 at 0; Horner in float32 without fused operations.
EXP2_COEFFICIENTS = (
    1.0, -0.6931437253952026, 0.2401801496744156, -0.0552973598241806,
    0.00920579768717289, -0.0009449035278521478,
)  # fmt: skip

BROKEN = "the model gave NaN or infinite logits for this request"
BANNED = (
    "every token is banned (by bad_words, min_tokens, allowed_token_ids, structured_outputs or the model's mask): "
    "none to choose"
)


def edit(
    line: FloatArray,
    bans: IntArray,
    bias_ids: IntArray,
    bias: FloatArray,
    seen: IntArray,
    counts: FloatArray,
    repetition: np.float32,
    frequency: np.float32,
    presence: np.float32,
) -> None:
    """Steps 1 to 3 on one row's logits [V], in place. `seen`: distinct tokens so far; `counts`: in the output."""
    with _quiet():
        line[bans] = -np.inf
        line[bias_ids] += bias
        x = line[seen]
        x = np.where(x > 0, x / repetition, x * repetition) - counts * frequency
        line[seen] = x - np.where(counts > 0, presence, np.float32(0))


def weigh(logits: FloatArray, scale: FloatArray) -> tuple[FloatArray, IntArray]:
    """y float32 and weights int64, both [S, V], of rows with a finite maximum; scale [S, 1]: log2(e) / T."""
    with _quiet():
        y = np.minimum((logits.max(-1, keepdims=True) - logits) * scale, np.float32(60))
        whole = y.astype(np.int32)
        part = y - whole.astype(np.float32)
        value = np.full_like(part, EXP2_COEFFICIENTS[-1])
        for coefficient in EXP2_COEFFICIENTS[-2::-1]:
            value = value * part + np.float32(coefficient)
        fixed = (value * np.float32(2.0**24)).astype(np.int64)
        return y, (fixed << (UNIT_BITS - 24)) >> whole


def choose(
    logits: FloatArray, params: Sequence[SamplingParams], bits: Sequence[int]
) -> tuple[list[int], dict[int, str]]:
    """Steps 4 and 5: logits [S, V], each line's random bits -> tokens (0 where it failed), errors by line."""
    size = logits.shape[-1]
    tokens: list[int] = logits.argmax(-1).tolist()
    errors = _without_choice(logits.max(-1).tolist())
    drawn = [i for i, p in enumerate(params) if not p.greedy and i not in errors]
    if drawn:
        chosen = [params[i] for i in drawn]
        logits = logits[drawn]
        y, w = weigh(logits, column([LOG2E / p.temperature for p in chosen], np.float32))
        limit = column([-math.log2(p.min_p) if p.min_p > 0 else math.inf for p in chosen], np.float32)
        w = np.where(y <= limit, w, 0)
        if any(p.top_k > 0 or p.top_p < 1.0 for p in chosen):
            order = np.argsort(-logits, axis=-1, kind="stable")
            ranked = np.take_along_axis(w, order, -1)
            k = column([p.top_k if p.top_k > 0 else size for p in chosen], np.int64)
            ranked = np.where(np.arange(size) < k, ranked, 0)
            mass = ranked.cumsum(-1)
            share, total = column([p.top_p for p in chosen], np.float64), mass[:, -1:]
            goal = np.where(share < 1.0, np.ceil(share * total).astype(np.int64), total)
            ranked = np.where(mass - ranked < goal, ranked, 0)
            np.put_along_axis(w, order, ranked, -1)
        mass = w.cumsum(-1)
        for i, line in zip(drawn, mass, strict=True):
            tokens[i] = int(np.searchsorted(line, bits[i] * int(line[-1]) >> 64, "right"))
    for i in errors:
        tokens[i] = 0
    return tokens, errors


def greedy(logits: FloatArray, lines: Sequence[int] | None = None) -> tuple[list[int], dict[int, str]]:
    """`choose` where every row takes its greatest logit. A NaN counts as the greatest. lines: only of these."""
    tokens: list[int]
    if lines is None:
        tokens, lines = logits.argmax(axis=1).tolist(), range(len(logits))
    else:
        tokens = [int(logits[line].argmax()) for line in lines]
    errors = _without_choice([logits.item(line, token) for line, token in zip(lines, tokens, strict=True)])
    for i in errors:
        tokens[i] = 0
    return tokens, errors


def raw_logprobs(logits: FloatArray, targets: Sequence[int], k: int) -> list[TokenLogprobs]:
    """For each line of logits [S, V]: the target's log-probability and rank, and the k likeliest tokens."""
    size = logits.shape[-1]
    ids = column(targets, np.int64)
    own = np.take_along_axis(logits, ids, -1)
    before = (logits > own) | ((logits == own) & (np.arange(size) < ids))
    best = np.argsort(-logits, axis=-1, kind="stable")[:, : min(k, size)]
    _, weights = weigh(logits, np.array(LOG2E, np.float32))
    return entries(
        targets,
        own[:, 0].tolist(),
        (before.sum(-1) + 1).tolist(),
        logits.max(-1).tolist(),
        weights.sum(-1).tolist(),
        best.tolist(),
        np.take_along_axis(logits, best, -1).tolist(),
    )


def entries(
    targets: Sequence[int],
    own: list[float],
    ranks: list[int],
    tops: list[float],
    masses: list[int],
    best: list[list[int]],
    values: list[list[float]],
) -> list[TokenLogprobs]:
    """Logits to log-probabilities, line by line: of the targets (`own`) and of the likeliest tokens (`values`).

    log(sum(exp(x))) is the greatest logit plus the logarithm of the mass in its units: the same number everywhere.
    """
    out = []
    for target, x, rank, top, mass, ids, logits in zip(targets, own, ranks, tops, masses, best, values, strict=True):
        if math.isfinite(top):
            level = top + math.log(mass) - _LOG_UNIT
            likeliest = tuple((i, v - level) for i, v in zip(ids, logits, strict=True))
            out.append(TokenLogprobs(target, x - level, rank, likeliest))
        else:  # a NaN or infinity among the logits, or nothing else than -infinity
            out.append(TokenLogprobs(target, math.nan, 0))
    return out


def column(values: Sequence[float], dtype: Any) -> npt.NDArray[Any]:
    """[S, 1]."""
    return np.array(values, dtype)[:, None]


def _without_choice(tops: list[float]) -> dict[int, str]:
    """Errors by line, from each line's greatest logit."""
    return {i: BANNED if top == -math.inf else BROKEN for i, top in enumerate(tops) if not math.isfinite(top)}


def _quiet() -> np.errstate:
    """Logits may be infinite or NaN: what comes of that is looked at afterwards."""
    return np.errstate(invalid="ignore", over="ignore", divide="ignore")
