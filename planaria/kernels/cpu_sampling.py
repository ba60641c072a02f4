"""The sampler's Numba kernels for logits in main memory.

`planaria.worker.sampler` defines what they compute; they give the same tokens to the bit (a test holds them to it).
There is no sort: cuts are found by counting tokens and mass in buckets of y, the logit's distance to the greatest
in powers of two, then digit by digit within one bucket. Blocks of logits whose greatest is cut are not looked at.

All loops over logits work on slices from 0 with float32 and int32 values, which the compiler turns into vector
instructions; weights are int64. Kernels hold no state: `Scratch` is the caller's, one per thread.
"""

# The kernels' types are their signatures; their bodies are typed by Numba.
# mypy: allow-untyped-defs, allow-untyped-calls, no-check-untyped-defs

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np

F = TypeVar("F", bound=Callable[..., Any])

BLOCK = 128
GRAIN = 16  # buckets per power of two
BUCKETS = 41 * GRAIN  # y in [0, 41); beyond it every weight is 0
OK, BROKEN, BANNED = 0, 1, 2

_f = np.float32
_i = np.int32
_u = np.uint64
_CAP = _f(60.0)
_GRAIN = _f(GRAIN)
_LIMIT = _f(41.0 - 2.0**-15)
_LOG2E = _f(1.4426950408889634)
_C0, _C1, _C2 = _f(1.0), _f(-0.6931437253952026), _f(0.2401801496744156)
_C3, _C4, _C5 = _f(-0.0552973598241806), _f(0.00920579768717289), _f(-0.0009449035278521478)
_ONE = _f(2.0**24)
_NEGATIVE_INFINITY, _INFINITY, _NAN = _f(-np.inf), _f(np.inf), _f(np.nan)
_MAGNITUDE, _INFINITY_BITS, _LEAST = _i(0x7FFFFFFF), _i(0x7F800000), _i(-0x80000000)
_M0, _M1, _W0, _W1 = _u(0xD2511F53), _u(0xCD9E8D57), _u(0x9E3779B9), _u(0xBB67AE85)
_LOW, _HALF = _u(0xFFFFFFFF), _u(32)
_NEVER = 1 << 62


def _inline(function: F) -> F:
    return cast(F, numba.njit(error_model="numpy", inline="always")(function))


def _kernel(signature: str) -> Callable[[F], F]:
    return cast(Callable[[F], F], numba.njit(signature, nogil=True, cache=True, error_model="numpy"))


class Scratch:
    """What one thread needs besides the logits, for a vocabulary of `size`."""

    def __init__(self, size: int) -> None:
        blocks = -(-size // BLOCK)
        self.tops = np.zeros(blocks, np.float32)  # greatest logit of each block
        self.arrays = (
            self.tops,
            np.zeros(blocks, np.int64),  # kept mass of each block
            np.zeros(BUCKETS + 1, np.int64),  # tokens by bucket
            np.zeros(BUCKETS + 1, np.int64),  # mass by bucket
            np.zeros(size + 1, np.int32),  # one bucket's tokens, one more for the last write
            np.zeros(size, np.int64),  # their keys
            np.zeros(size, np.int64),  # their weights
        )


@_kernel("uint64(uint64, uint64)")
def draw_bits(seed, position):
    c0, c1, c2, c3 = position & _LOW, position >> _HALF, _u(0), _u(0)
    k0, k1 = seed & _LOW, seed >> _HALF
    for _ in range(10):
        p0, p1 = _M0 * c0, _M1 * c2
        c0, c1, c2, c3 = (p1 >> _HALF) ^ c1 ^ k0, p1 & _LOW, (p0 >> _HALF) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
    return c0 | c1 << _HALF


@_kernel("uint64(uint64, uint64)")
def _high_product(a, b):
    """The high 64 bits of a * b."""
    a0, a1, b0, b1 = a & _LOW, a >> _HALF, b & _LOW, b >> _HALF
    middle = a1 * b0 + (a0 * b0 >> _HALF)
    other = a0 * b1 + (middle & _LOW)
    return a1 * b1 + (middle >> _HALF) + (other >> _HALF)


@_inline
def _weight(y):
    """2^(40 - y), rounded down, for y float32 in [0, 60]."""
    whole = _i(y)
    f = y - _f(whole)
    value = ((((_C5 * f + _C4) * f + _C3) * f + _C2) * f + _C1) * f + _C0
    return (np.int64(_i(value * _ONE)) << 16) >> np.int64(whole)


@_kernel("int32(float32[::1], float32[::1])")
def _tops(line, tops):
    """Fill `tops` with each block's greatest logit. Returns the greatest bits of a magnitude: above infinity's is NaN.

    Compared as integers that are in the floats' order, for a NaN must not upset the comparison of others.
    """
    worst = _i(0)
    for b in range(len(tops)):
        bits = line[b * BLOCK : (b + 1) * BLOCK].view(np.int32)
        most, large = _LEAST, _i(0)
        for j in range(len(bits)):
            v = bits[j]
            magnitude = _i(v & _MAGNITUDE)
            key = _i(v ^ ((v >> 31) & _MAGNITUDE))
            most = key if key > most else most
            large = magnitude if magnitude > large else large
        worst = max(worst, large)
        tops.view(np.int32)[b] = _i(most ^ ((most >> 31) & _MAGNITUDE))
    return worst


@_kernel("float32(float32[::1])")
def _greatest(tops):
    top = tops[0]
    for b in range(len(tops)):
        if tops[b] > top:
            top = tops[b]
    return top


@_kernel("int64(float32[::1], float32[::1], float32)")
def _first(line, tops, top):
    """The lowest id whose logit is `top`."""
    b = 0
    while tops[b] != top:
        b += 1
    j = b * BLOCK
    while line[j] != top:
        j += 1
    return j


@_kernel("int64(float32[::1], int64, float32, float32, float32, float32, int64)")
def _block_mass(block, base, top, scale, limit, least, last):
    """Mass of the block's kept tokens; its first has id `base`. Kept: y <= limit, and the logit above `least`, or equal
    with an id of at most `last`."""
    total = np.int64(0)
    for j in range(len(block)):
        x = block[j]
        y = (top - x) * scale
        kept = (y <= limit) & ((x > least) | ((x == least) & (base + j <= last)))
        y = y if y < _CAP else _CAP
        w = _weight(y)
        total += w if kept else 0
    return total


@_kernel("int64(float32[::1], int64, float32, float32, float32, float32, int64, int64)")
def _pick(block, base, top, scale, limit, least, last, point):
    """The id in whose kept mass `point` falls, counted from the block's start; -1 beyond its end."""
    total = np.int64(0)
    for j in range(len(block)):
        x = block[j]
        y = (top - x) * scale
        if y <= limit and (x > least or (x == least and base + j <= last)):
            total += _weight(y)
            if point < total:
                return base + j
    return -1


@_kernel("int64(float32[::1], float32[::1], float32, float32, float32, int64, int64[::1], int64[::1])")
def _fill(line, tops, top, scale, limit, k, counts, masses):
    """Count tokens and mass of each bucket. With k > 0 the buckets after the k-th token's may be left incomplete."""
    counts[:] = 0
    masses[:] = 0
    edge = np.int64(BUCKETS)
    if k > 0:  # at least k tokens are as great as the k-th greatest block's greatest
        for b in range(len(tops)):
            y = (top - tops[b]) * scale
            if y <= limit:
                counts[np.int64(y * _GRAIN)] += 1
        seen = np.int64(0)
        for bucket in range(BUCKETS):
            seen += counts[bucket]
            if seen >= k:
                edge = bucket
                break
        counts[:] = 0
    buckets = np.empty(BLOCK, np.int32)
    weights = np.empty(BLOCK, np.int64)
    for b in range(len(tops)):
        y = (top - tops[b]) * scale
        if not (y <= limit) or np.int64(y * _GRAIN) > edge:
            continue
        block = line[b * BLOCK : (b + 1) * BLOCK]
        for j in range(len(block)):
            y = (top - block[j]) * scale
            kept = y <= limit
            y = y if y < _CAP else _CAP
            buckets[j] = _i(y * _GRAIN) if kept else _i(BUCKETS)
            weights[j] = _weight(y)
        for j in range(len(block)):
            counts[buckets[j]] += 1
            masses[buckets[j]] += weights[j]
    counts[BUCKETS] = 0  # where what `limit` cuts was thrown
    masses[BUCKETS] = 0
    return edge


@_kernel("int64(float32[::1], float32[::1], float32, float32, float32, int64, int32[::1])")
def _gather(line, tops, top, scale, limit, bucket, ids):
    """The ids of one bucket's tokens, rising. How many."""
    n = np.int64(0)
    buckets = np.empty(BLOCK, np.int32)
    for b in range(len(tops)):
        y = (top - tops[b]) * scale
        if not (y <= limit) or np.int64(y * _GRAIN) > bucket:
            continue
        block = line[b * BLOCK : (b + 1) * BLOCK]
        for j in range(len(block)):
            y = (top - block[j]) * scale
            kept = y <= limit
            y = y if y < _CAP else _CAP
            buckets[j] = _i(y * _GRAIN) if kept else _i(BUCKETS)
        for j in range(len(block)):
            ids[n] = b * BLOCK + j
            n += np.int64(buckets[j] == bucket)
    return n


@_kernel(
    "Tuple((float32, int64, int64))(float32[::1], float32[::1], float32, float32, float32, int64, int64,"
    "int64[::1], int64[::1], int32[::1], int64[::1], int64[::1])"
)
def _cut(line, tops, top, scale, limit, need, goal, counts, masses, ids, keys, weights):
    """The shortest prefix (greatest logit, then lowest id) that has `need` tokens or the mass `goal`.

    Returns its last logit, the highest id kept among that logit's equals, and the prefix' mass. All is kept when all is
    not enough.
    """
    count, mass = np.int64(0), np.int64(0)
    bucket = np.int64(0)
    while bucket < BUCKETS and count + counts[bucket] < need and mass + masses[bucket] < goal:
        count += counts[bucket]
        mass += masses[bucket]
        bucket += 1
    if bucket == BUCKETS:
        return _NEGATIVE_INFINITY, np.int64(len(line)), mass
    n = _gather(line, tops, top, scale, limit, bucket, ids)
    bits = line.view(np.int32)
    for i in range(n):
        v = bits[ids[i]]
        v = _i(0) if v == _LEAST else v  # -0.0 equals 0.0
        keys[i] = np.int64(_i(v ^ ((v >> 31) & _MAGNITUDE))) + 0x80000000
        weights[i] = _weight((top - line[ids[i]]) * scale)
    digit_counts, digit_masses = np.empty(256, np.int64), np.empty(256, np.int64)
    differing = np.int64(0)
    for i in range(n):
        differing |= keys[i] ^ keys[0]
    for shift in range(24, -8, -8):
        if (differing >> shift) & 255 == 0:
            continue
        digit_counts[:] = 0
        digit_masses[:] = 0
        for i in range(n):
            digit = (keys[i] >> shift) & 255
            digit_counts[digit] += 1
            digit_masses[digit] += weights[i]
        found = np.int64(255)
        while count + digit_counts[found] < need and mass + digit_masses[found] < goal:
            count += digit_counts[found]
            mass += digit_masses[found]
            found -= 1
        size = np.int64(0)
        for i in range(n):
            if (keys[i] >> shift) & 255 == found:
                keys[size], weights[size], ids[size] = keys[i], weights[i], ids[i]
                size += 1
        n = size
    each = weights[0]
    taken = min(need - count, n)
    if each > 0:
        taken = min(taken, (goal - mass + each - 1) // each)
    return line[ids[0]], np.int64(ids[taken - 1]), mass + taken * each


@_kernel(
    "void(float32[:,::1], int64, int64, int64[::1], float32[::1], int64[::1], float64[::1], float32[::1],"
    "uint64[::1], int64[::1], float32[::1], int64[::1], int64[::1], int64[::1], int32[::1], int64[::1], int64[::1],"
    "int64[::1], int64[::1])"
)
def sample_lines(
    logits, begin, end, rows, scales, top_k, top_p, limits, seeds, positions,
    tops, block_masses, counts, masses, ids, keys, weights, tokens, flags,
):  # fmt: skip
    """Choose a token for lines `begin` to `end` of logits [S, V]; line i belongs to rows[i].

    By row: scales log2(e) / temperature or 0 for greedy, top_k or 0, top_p, limits -log2(min_p) or infinity, seeds,
    positions. By line: tokens, and flags OK, BROKEN (NaN or infinity) or BANNED (nothing to choose from), token 0.
    """
    for i in range(begin, end):
        row, line = rows[i], logits[i]
        tokens[i] = 0
        worst = _tops(line, tops)
        top = _greatest(tops)
        if worst > _INFINITY_BITS or top == _INFINITY:
            flags[i] = BROKEN
            continue
        if top == _NEGATIVE_INFINITY:
            flags[i] = BANNED
            continue
        flags[i] = OK
        scale = scales[row]
        if scale == 0:
            tokens[i] = _first(line, tops, top)
            continue
        limit, k, share = min(limits[row], _LIMIT), top_k[row], top_p[row]
        least, last = _NEGATIVE_INFINITY, np.int64(len(line))
        if k > 0 or share < 1:
            _fill(line, tops, top, scale, limit, k, counts, masses)
            need = k if k > 0 else _NEVER
            mass = np.int64(0)
            if k > 0:
                least, last, mass = _cut(
                    line, tops, top, scale, limit, need, _NEVER, counts, masses, ids, keys, weights
                )
            else:
                for bucket in range(BUCKETS):
                    mass += masses[bucket]
            if share < 1:
                goal = np.int64(np.ceil(share * np.float64(mass)))
                least, last, mass = _cut(line, tops, top, scale, limit, need, goal, counts, masses, ids, keys, weights)
        total = np.int64(0)
        for b in range(len(tops)):
            mass = np.int64(0)
            if tops[b] >= least and (top - tops[b]) * scale <= limit:
                block = line[b * BLOCK : (b + 1) * BLOCK]
                mass = _block_mass(block, b * BLOCK, top, scale, limit, least, last)
            block_masses[b] = mass
            total += mass
        point = np.int64(_high_product(draw_bits(seeds[row], _u(positions[row])), _u(total)))
        b = 0
        while point >= block_masses[b]:
            point -= block_masses[b]
            b += 1
        block = line[b * BLOCK : (b + 1) * BLOCK]
        tokens[i] = _pick(block, b * BLOCK, top, scale, limit, least, last, point)


@_kernel("int64(float32[::1], int64, float32, int64)")
def _before(block, base, x, target):
    """How many of the block's tokens come before `target`, whose logit is x: greater ones, equals of lower ids."""
    n = _i(0)
    for j in range(len(block)):
        n += _i((block[j] > x) | ((block[j] == x) & (base + j < target)))
    return np.int64(n)


@_kernel(
    "void(float32[:,::1], int64, int64, int64[::1], float32[::1], float32[::1], int64[::1], int64[::1],int64[:,::1])"
)
def logprob_lines(logits, begin, end, targets, tops, greatest, masses, ranks, best):
    """For lines `begin` to `end` of logits [S, V]: the greatest logit (NaN if any is), the mass at temperature 1, the
    target's rank from 1, and the ids of the k likeliest into `best` [S, k]."""
    k = best.shape[1]
    for i in range(begin, end):
        line, x = logits[i], logits[i, targets[i]]
        worst = _tops(line, tops)
        top = _greatest(tops) if worst <= _INFINITY_BITS else _NAN
        greatest[i] = top
        mass = np.int64(0)
        for b in range(len(tops)):
            if (top - tops[b]) * _LOG2E <= _LIMIT:
                block = line[b * BLOCK : (b + 1) * BLOCK]
                mass += _block_mass(block, b * BLOCK, top, _LOG2E, _LIMIT, _NEGATIVE_INFINITY, np.int64(len(line)))
        masses[i] = mass
        rank = np.int64(1)
        for b in range(len(tops)):
            if tops[b] >= x:
                rank += _before(line[b * BLOCK : (b + 1) * BLOCK], b * BLOCK, x, targets[i])
        ranks[i] = rank
        best[i, :] = 0
        size = np.int64(0)
        for b in range(len(tops)):
            if size == k and (k == 0 or not tops[b] > line[best[i, k - 1]]):
                continue
            for j in range(b * BLOCK, min((b + 1) * BLOCK, len(line))):
                v = line[j]
                if size == k and not v > line[best[i, k - 1]]:
                    continue
                at = min(size, k - 1)
                while at > 0 and line[best[i, at - 1]] < v:
                    best[i, at] = best[i, at - 1]
                    at -= 1
                best[i, at] = j
                size = min(size + 1, k)


@_kernel(
    "void(float32[::1], int64[::1], int64[::1], float32[::1], int64[::1], float32[::1], float32, float32, float32)"
)
def edit_line(line, bans, bias_ids, bias, seen, counts, repetition, frequency, presence):
    """Bans, then biases, then penalties, in place on one row's logits; only tokens named are touched."""
    for i in range(len(bans)):
        line[bans[i]] = _NEGATIVE_INFINITY
    for i in range(len(bias_ids)):
        line[bias_ids[i]] += bias[i]
    for i in range(len(seen)):
        x = line[seen[i]]
        x = x / repetition if x > 0 else x * repetition
        x = x - counts[i] * frequency
        line[seen[i]] = x - (presence if counts[i] > 0 else _f(0.0))
