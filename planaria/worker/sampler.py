"""Choosing the next token of each row, and the log-probabilities of what was chosen.

The rule: a token is a function of its row's logits, its request's parameters, history and seed, nothing else.

What happens to a row's logits, in this order:
1. bad words: the last token of a sequence is banned where the history (prompt included) ends in the rest of
   it; min_tokens: end-of-sequence and stop tokens are banned until that many tokens came out; banned is -inf;
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
bit, and no rounding decides who is kept. A token below 2^-40 of the likeliest has weight 0, is never drawn.

Log-probabilities are those of the raw logits, before any of this.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from planaria.protocol import Fresh
from planaria.types import SamplingParams, TokenLogprobs
from planaria.worker.rng import draw_bits

UNIT_BITS = 40  # the likeliest token's weight is 2^40: below 2^60 in all for vocabularies up to a million
LOG2E = math.log2(math.e)
# 2^-f for f in [0, 1] to 2.5e-7, never rising, exactly 1 at 0; Horner in float32 without fused operations.
EXP2_COEFFICIENTS = (
    1.0, -0.6931437253952026, 0.2401801496744156, -0.0552973598241806,
    0.00920579768717289, -0.0009449035278521478,
)  # fmt: skip

BROKEN = "the model gave NaN or infinite logits for this request"
BANNED = "every token is banned (by bad_words, min_tokens or the model's own mask): nothing to choose from"

# --- The definition, in plain torch, on any device. ---


def edit(
    line: torch.Tensor,
    bans: list[int],
    bias: dict[int, float] | None,
    seen: Seen | None,
    params: SamplingParams,
) -> None:
    """Steps 1 to 3 on one row's logits [V], in place."""

    def tensor(values: object) -> torch.Tensor:
        # Operands are tensors of the device: some devices divide by a Python number as a product.
        return torch.as_tensor(values, dtype=torch.float32, device=line.device)

    if bans:
        line[bans] = -torch.inf
    if bias:
        line[list(bias)] += tensor(list(bias.values()))
    if seen is not None and seen.size:
        ids = torch.from_numpy(seen.ids[: seen.size]).to(line.device, torch.int64)
        counts = torch.from_numpy(seen.counts[: seen.size]).to(line.device)
        x, penalty = line[ids], tensor(params.repetition_penalty)
        x = torch.where(x > 0, x / penalty, x * penalty)
        x = x - counts * tensor(params.frequency_penalty)
        line[ids] = x - (counts > 0) * tensor(params.presence_penalty)


def weigh(logits: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """y float32 and weights int64, both [S, V], of rows with a finite maximum; scale [S, 1]: log2(e) / T."""
    top = logits.amax(-1, keepdim=True)
    y = ((top - logits) * scale).clamp(max=60.0)
    whole = y.to(torch.int32)
    part = y - whole
    value = torch.full_like(part, EXP2_COEFFICIENTS[-1])
    for coefficient in EXP2_COEFFICIENTS[-2::-1]:
        value = value * part + coefficient
    fixed = (value * 2.0**24).to(torch.int64)
    return y, (fixed << (UNIT_BITS - 24)) >> whole


def choose(
    logits: torch.Tensor, params: Sequence[SamplingParams], bits: Sequence[int]
) -> tuple[list[int], dict[int, str]]:
    """Steps 4 and 5: logits [S, V], each line's random bits -> tokens (0 where it failed), errors by line."""
    logits = logits + 0.0  # -0.0 and 0.0 are equals in every sort
    device, size = logits.device, logits.shape[-1]
    top = logits.amax(-1)
    broken, banned = (top.isnan() | (top == torch.inf)).tolist(), (top == -torch.inf).tolist()
    errors = {i: BROKEN if broken[i] else BANNED for i in range(len(broken)) if broken[i] or banned[i]}
    tokens: list[int] = logits.argmax(-1).tolist()
    drawn = [i for i, p in enumerate(params) if not p.greedy and i not in errors]
    if drawn:
        chosen = [params[i] for i in drawn]

        def column(values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device)[:, None]

        logits = logits[drawn]
        y, w = weigh(logits, column([LOG2E / p.temperature for p in chosen], torch.float32))
        limit = column([-math.log2(p.min_p) if p.min_p > 0 else math.inf for p in chosen], torch.float32)
        w = torch.where(y <= limit, w, 0)
        if any(p.top_k > 0 or p.top_p < 1.0 for p in chosen):
            order = logits.sort(dim=-1, descending=True, stable=True).indices
            ranked = w.gather(-1, order)
            k = column([p.top_k if p.top_k > 0 else size for p in chosen], torch.int64)
            ranked = torch.where(torch.arange(size, device=device) < k, ranked, 0)
            mass = ranked.cumsum(-1)
            share, total = column([p.top_p for p in chosen], torch.float64), mass[:, -1:]
            goal = torch.where(share < 1.0, (share * total.double()).ceil().to(torch.int64), total)
            ranked = torch.where(mass - ranked < goal, ranked, 0)
            w = torch.zeros_like(w).scatter(-1, order, ranked)
        mass = w.cumsum(-1)
        totals: list[int] = mass[:, -1].tolist()
        points = [bits[i] * total >> 64 for i, total in zip(drawn, totals, strict=True)]
        picked = torch.searchsorted(mass, column(points, torch.int64), right=True)[:, 0].tolist()
        for i, token in zip(drawn, picked, strict=True):
            tokens[i] = token
    for i in errors:
        tokens[i] = 0
    return tokens, errors


def raw_logprobs(logits: torch.Tensor, targets: Sequence[int], k: int) -> list[TokenLogprobs]:
    """For each line of logits [S, V]: the target's log-probability and rank, and the k likeliest tokens."""
    size = logits.shape[-1]
    ids = torch.tensor(list(targets), device=logits.device)[:, None]
    logp = torch.log_softmax(logits, -1)
    own = logits.gather(-1, ids)
    before = (logits > own) | ((logits == own) & (torch.arange(size, device=logits.device) < ids))
    ranks = (before.sum(-1) + 1).tolist()
    best = logits.sort(dim=-1, descending=True, stable=True).indices[:, : min(k, size)]
    return [
        TokenLogprobs(token, value, rank, tuple(zip(top, values, strict=True)))
        for token, value, rank, top, values in zip(
            targets, logp.gather(-1, ids)[:, 0].tolist(), ranks,
            best.tolist(), logp.gather(-1, best).tolist(), strict=True,
        )
    ]  # fmt: skip


# --- Row state. ---


class Seen:
    """The distinct tokens of a history and how often each came out: what penalties touch, and no more."""

    def __init__(self, tokens: Sequence[int], num_prompt: int) -> None:
        self.slots: dict[int, int] = {}
        self.size = 0
        self.ids: npt.NDArray[np.int32] = np.zeros(256, np.int32)
        self.counts: npt.NDArray[np.float32] = np.zeros(256, np.float32)
        for token in dict.fromkeys(tokens[:num_prompt]):
            self._slot(token)
        for token in tokens[num_prompt:]:
            self.add(token)

    def _slot(self, token: int) -> int:
        slot = self.slots.get(token)
        if slot is None:
            slot = self.slots[token] = self.size
            if slot == len(self.ids):
                self.ids = np.concatenate([self.ids, np.zeros_like(self.ids)])
                self.counts = np.concatenate([self.counts, np.zeros_like(self.counts)])
            self.ids[slot] = token
            self.size += 1
        return slot

    def add(self, token: int) -> None:
        """`token` came out once more."""
        self.counts[self._slot(token)] += 1


class _Row:
    """One request's state. `edits`: its logits are changed before the choice."""

    __slots__ = (
        "bias", "edits", "history", "last_ban", "num_prompt", "params", "seed", "seen", "stops", "words",
    )  # fmt: skip

    def __init__(self, fresh: Fresh, vocab_size: int) -> None:
        params = fresh.params
        self.history = list(fresh.tokens)
        self.num_prompt, self.params, self.seed = fresh.num_prompt, params, fresh.seed
        # A tokenizer may know tokens that the model has no logit for: those can't be drawn anyway.
        self.words = [w for w in params.bad_words_ids if w and 0 <= w[-1] < vocab_size]
        self.stops = [t for t in dict.fromkeys(fresh.eos_ids + params.stop_token_ids) if 0 <= t < vocab_size]
        self.last_ban = fresh.num_prompt + params.min_tokens  # stops are banned while the history is shorter
        self.bias = {t: b for t, b in (params.logit_bias or {}).items() if 0 <= t < vocab_size} or None
        self.seen: Seen | None = None
        penalties = params.frequency_penalty, params.presence_penalty, params.repetition_penalty
        if penalties != (0.0, 0.0, 1.0):
            if self.history and not (min(self.history) >= 0 and max(self.history) < vocab_size):
                raise ValueError(f"the history has token ids outside the vocabulary of {vocab_size}")
            self.seen = Seen(self.history, fresh.num_prompt)
        self.edits = bool(self.words or params.min_tokens or self.bias or self.seen is not None)

    def bans(self) -> list[int]:
        banned = list(self.stops) if len(self.history) < self.last_ban else []
        history = self.history
        for word in self.words:
            n = len(word) - 1
            if n == 0 or (len(history) >= n and tuple(history[-n:]) == word[:-1]):
                banned.append(word[-1])
        return banned


class Sampler:
    """Draws tokens for `max_rows` rows over `vocab_size` tokens. `cache_dir`: for compiled kernels."""

    def __init__(self, max_rows: int, vocab_size: int, cache_dir: Path | None = None) -> None:
        self.max_rows, self.vocab_size = max_rows, vocab_size
        self._rows: dict[int, _Row] = {}

    def enter(self, row: int, fresh: Fresh) -> None:
        """A request (re)enters `row`, whoever was there before. ValueError when it can't."""
        if not 0 <= row < self.max_rows:
            raise ValueError(f"row {row} of {self.max_rows}")
        self._rows[row] = _Row(fresh, self.vocab_size)

    def leave(self, row: int) -> None:
        """Forget `row`; it may be empty."""
        self._rows.pop(row, None)

    def pending(self, row: int) -> int:
        """The last token of the row's history: what the model reads next."""
        return self._rows[row].history[-1]

    def history(self, row: int) -> Sequence[int]:
        """Prompt and output so far. Not to be changed."""
        return self._rows[row].history

    def sample(
        self, logits: torch.Tensor, rows: list[int]
    ) -> tuple[list[int], dict[int, TokenLogprobs], dict[int, str]]:
        """Draw the next token of each row and append it to the row's history.

        logits float32 [S, vocab_size], line i of `rows[i]`; they may be overwritten. Returns the tokens, in
        order; the log-probabilities by row where asked for; errors by row. A row with an error gets token 0 (so
        that its history is as long as the cache expects), and no other row notices.
        """
        if logits.shape != (len(rows), self.vocab_size) or logits.dtype != torch.float32:
            raise ValueError(
                f"{tuple(logits.shape)} {logits.dtype} logits, need float32 {(len(rows), self.vocab_size)}"
            )
        if not rows:
            return [], {}, {}
        states = [self._rows[row] for row in rows]
        wanted = [i for i, s in enumerate(states) if s.params.logprobs is not None]
        raw = logits[wanted] if wanted else logits
        for i, state in enumerate(states):
            if state.edits:
                edit(logits[i], state.bans(), state.bias, state.seen, state.params)
        bits = [draw_bits(s.seed, len(s.history)) for s in states]
        tokens, failed = choose(logits, [s.params for s in states], bits)
        logprobs = {}
        if wanted:
            k = max(states[i].params.logprobs or 0 for i in wanted)
            for i, entry in zip(wanted, raw_logprobs(raw, [tokens[i] for i in wanted], k), strict=True):
                if i not in failed:
                    top = entry.top[: states[i].params.logprobs]
                    logprobs[rows[i]] = TokenLogprobs(entry.token, entry.logprob, entry.rank, top)
        for state, token in zip(states, tokens, strict=True):
            state.history.append(token)
            if state.seen is not None:
                state.seen.add(token)
        return tokens, logprobs, {rows[i]: message for i, message in failed.items()}

    def prompt_logprobs(self, logits: torch.Tensor, targets: Sequence[int], k: int) -> list[TokenLogprobs]:
        """Of given tokens: logits float32 [n, vocab_size], `targets[i]` the token that follows position i."""
        return raw_logprobs(logits, targets, k) if targets else []
