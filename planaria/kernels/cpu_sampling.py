"""The sampler's kernels, in Numba, for logits in main memory. `sampling_library` compiles, keeps and calls them.

`planaria.worker.sampling` defines what they compute; they give the same tokens to the bit (a test holds them to it).
There is no sort: cuts are found by counting tokens and mass in buckets of y, the logit's distance to the greatest
in powers of two, then digit by digit within one bucket. Blocks of logits whose greatest is cut are not looked at.

Arguments are pointers and numbers: nothing here allocates, raises or touches Python, so the object code stands alone.
`line` is the first of all logits, `base` where a row begins; ids count from there. Loops over logits are in float32
and int32 without branches, which the compiler turns into vector instructions; weights are int64.
"""

# The kernels' types are in ENTRIES; their bodies are typed by Numba.
# mypy: allow-untyped-defs, allow-untyped-calls, no-check-untyped-defs

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np

from planaria.kernels.sampling_library import BANNED, BLOCK, BROKEN, BUCKETS, FEW, GRAIN, OK

F = TypeVar("F", bound=Callable[..., Any])

_f = np.float32
_i = np.int32
_u = np.uint64
_CAP = _f(60.0)
_GRAIN = _f(GRAIN)
_LIMIT = _f(41.0 - 2.0**-15)  # just inside the last bucket; every weight beyond is 0
_LOG2E = _f(1.4426950408889634)
_C0, _C1, _C2 = _f(1.0), _f(-0.6931437253952026), _f(0.2401801496744156)
_C3, _C4, _C5 = _f(-0.0552973598241806), _f(0.00920579768717289), _f(-0.0009449035278521478)
_ONE = _f(2.0**24)
_NEGATIVE_INFINITY, _INFINITY, _NAN = _f(-np.inf), _f(np.inf), _f(np.nan)
_MAGNITUDE, _INFINITY_BITS, _LEAST = _i(0x7FFFFFFF), _i(0x7F800000), _i(-0x80000000)
_M0, _M1, _W0, _W1 = _u(0xD2511F53), _u(0xCD9E8D57), _u(0x9E3779B9), _u(0xBB67AE85)
_LOW, _HALF = _u(0xFFFFFFFF), _u(32)
_ALL = _u(2**64 - 1)
_NEVER = 1 << 62


def _inline(function: F) -> F:
    """For what is called per logit: the loop around it must see through the call."""
    return cast(F, numba.njit(error_model="numpy", inline="always")(function))


def _jit(function: F) -> F:
    plain: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    return cast(F, numba.njit(error_model="numpy", **plain)(function))


@_jit
def draw_bits(seed, position):
    c0, c1, c2, c3 = position & _LOW, position >> _HALF, _u(0), _u(0)
    k0, k1 = seed & _LOW, seed >> _HALF
    for _ in range(10):
        p0, p1 = _M0 * c0, _M1 * c2
        c0, c1, c2, c3 = (p1 >> _HALF) ^ c1 ^ k0, p1 & _LOW, (p0 >> _HALF) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
    return c0 | c1 << _HALF


@_jit
def high_product(a, b):
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


@_jit
def _greatest(bits, base, size, tops, top_bits):
    """Fill `tops` with each block's greatest logit; `bits` and `top_bits` are logits and tops as int32. Returns the
    greatest of all, NaN if any is.

    Compared as integers that are in the floats' order, for a NaN must not upset the comparison of others.
    """
    most, large = _LEAST, _i(0)
    for first in range(0, size, BLOCK):
        block_most, block_large = _LEAST, _i(0)
        for j in range(base + first, base + min(first + BLOCK, size)):
            v = bits[j]
            magnitude = _i(v & _MAGNITUDE)
            key = _i(v ^ ((v >> 31) & _MAGNITUDE))
            block_most = key if key > block_most else block_most
            block_large = magnitude if magnitude > block_large else block_large
        top_bits[first // BLOCK] = _i(block_most ^ ((block_most >> 31) & _MAGNITUDE))
        most = block_most if block_most > most else most
        large = block_large if block_large > large else large
    if large > _INFINITY_BITS:
        return _NAN
    top = tops[0]
    for b in range(1, (size + BLOCK - 1) // BLOCK):
        top = tops[b] if tops[b] > top else top
    return top


@_jit
def _first(line, base, tops, top):
    """The lowest id whose logit is `top`."""
    b = 0
    while tops[b] != top:
        b += 1
    j = b * BLOCK
    while line[base + j] != top:
        j += 1
    return j


@_jit
def _mass(line, base, first, end, top, scale, limit, least, last):
    """Mass of the kept among tokens `first` to `end`: y <= limit, and the logit above `least`, or equal with an id
    of at most `last`."""
    total = np.int64(0)
    for j in range(first, end):
        x = line[base + j]
        y = (top - x) * scale
        kept = (y <= limit) & ((x > least) | ((x == least) & (j <= last)))
        y = y if y < _CAP else _CAP
        w = _weight(y)
        total += w if kept else 0
    return total


@_jit
def _pick(line, base, first, end, top, scale, limit, least, last, point):
    """The id in whose kept mass `point` falls, counted from token `first`."""
    total = np.int64(0)
    for j in range(first, end):
        x = line[base + j]
        y = (top - x) * scale
        if y <= limit and (x > least or (x == least and j <= last)):
            total += _weight(y)
            if point < total:
                return j
    return np.int64(0)


@_inline
def _bucket(y, limit):
    """int32 bucket of y; BUCKETS when `limit` cuts it."""
    low = y if y < _CAP else _CAP
    return _i(low * _GRAIN) if y <= limit else _i(BUCKETS)


@_jit
def _fill(line, base, size, tops, top, scale, limit, k, counts, masses, buckets, weights):
    """Count tokens and mass of each bucket. With k > 0 buckets after the k-th token's may be left incomplete."""
    for b in range(BUCKETS + 1):
        counts[b] = 0
        masses[b] = 0
    blocks = (size + BLOCK - 1) // BLOCK
    edge = np.int64(BUCKETS)
    if k > 0:  # at least k tokens are as great as the k-th greatest block's greatest
        for b in range(blocks):
            counts[_bucket((top - tops[b]) * scale, limit)] += 1
        seen = np.int64(0)
        for b in range(BUCKETS + 1):
            seen += counts[b]
            if seen >= k and b < edge:
                edge = b
            counts[b] = 0
    for b in range(blocks):
        y = (top - tops[b]) * scale
        if not y <= limit or _bucket(y, limit) > edge:
            continue
        first, end = b * BLOCK, min((b + 1) * BLOCK, size)
        for j in range(end - first):
            y = (top - line[base + first + j]) * scale
            buckets[j] = _bucket(y, limit)
            y = y if y < _CAP else _CAP
            weights[j] = _weight(y)
        for j in range(end - first):
            bucket = buckets[j]
            counts[bucket] += 1
            masses[bucket] += weights[j]
    counts[BUCKETS] = 0  # where what `limit` cuts was thrown
    masses[BUCKETS] = 0


@_jit
def _gather(line, base, size, tops, top, scale, limit, bucket, buckets, ids):
    """The ids of one bucket's tokens, rising. How many."""
    n = np.int64(0)
    for b in range((size + BLOCK - 1) // BLOCK):
        y = (top - tops[b]) * scale
        if not y <= limit or _bucket(y, limit) > bucket:
            continue
        first, end = b * BLOCK, min((b + 1) * BLOCK, size)
        for j in range(end - first):
            buckets[j] = _bucket((top - line[base + first + j]) * scale, limit)
        for j in range(end - first):  # without a branch: ids has room for one more
            ids[n] = first + j
            n += np.int64(buckets[j] == bucket)
    return n


@_jit
def _cut(
    line, bits, base, size, tops, top, scale, limit, need, goal,
    counts, masses, digit_counts, digit_masses, buckets, ids, keys, weights,
):  # fmt: skip
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
        return _NEGATIVE_INFINITY, np.int64(size), mass
    n = _gather(line, base, size, tops, top, scale, limit, bucket, buckets, ids)
    differing = np.int64(0)
    for i in range(n):
        v = bits[base + ids[i]]
        v = _i(0) if v == _LEAST else v  # -0.0 equals 0.0
        keys[i] = np.int64(_i(v ^ ((v >> 31) & _MAGNITUDE))) + 0x80000000
        weights[i] = _weight((top - line[base + ids[i]]) * scale)
        differing |= keys[i] ^ keys[0]
    for shift in range(24, -8, -8):
        if (differing >> shift) & 255 == 0:
            continue
        for digit in range(256):
            digit_counts[digit] = 0
            digit_masses[digit] = 0
        for i in range(n):
            digit = (keys[i] >> shift) & 255
            digit_counts[digit] += 1
            digit_masses[digit] += weights[i]
        found = np.int64(255)
        while count + digit_counts[found] < need and mass + digit_masses[found] < goal:
            count += digit_counts[found]
            mass += digit_masses[found]
            found -= 1
        left = np.int64(0)
        for i in range(n):
            if (keys[i] >> shift) & 255 == found:
                keys[left], weights[left], ids[left] = keys[i], weights[i], ids[i]
                left += 1
        n = left
    each = weights[0]
    taken = min(need - count, n)
    if each > 0:
        taken = min(taken, (goal - mass + each - 1) // each)
    return line[base + ids[0]], np.int64(ids[taken - 1]), mass + taken * each


@_jit
def _choose(
    line, bits, base, size, row, scales, top_k, top_p, limits, seeds, positions,
    tops, top_bits, block_masses, counts, masses, digit_counts, digit_masses, buckets, block_weights,
    ids, keys, weights,
):  # fmt: skip
    """A token of one line of logits, and its flag. The arguments: see `sample_lines`."""
    blocks = (size + BLOCK - 1) // BLOCK
    top = _greatest(bits, base, size, tops, top_bits)
    if not top < _INFINITY:
        return np.int64(0), np.int64(BROKEN)
    if top == _NEGATIVE_INFINITY:
        return np.int64(0), np.int64(BANNED)
    scale = scales[row]
    if scale == 0:
        return np.int64(_first(line, base, tops, top)), np.int64(OK)
    k, share = top_k[row], top_p[row]
    limit = limits[row] if limits[row] < _LIMIT else _LIMIT
    least, last = _NEGATIVE_INFINITY, size
    if k > 0 or share < 1:
        _fill(line, base, size, tops, top, scale, limit, k, counts, masses, buckets, block_weights)
        need = k if k > 0 else _NEVER
        mass = np.int64(0)
        if k > 0:
            least, last, mass = _cut(
                line, bits, base, size, tops, top, scale, limit, need, _NEVER,
                counts, masses, digit_counts, digit_masses, buckets, ids, keys, weights,
            )  # fmt: skip
        else:
            for b in range(BUCKETS):
                mass += masses[b]
        if share < 1:
            exact = share * np.float64(mass)
            goal = np.int64(exact)
            goal += np.int64(np.float64(goal) < exact)
            least, last, mass = _cut(
                line, bits, base, size, tops, top, scale, limit, need, goal,
                counts, masses, digit_counts, digit_masses, buckets, ids, keys, weights,
            )  # fmt: skip
    total = np.int64(0)
    for b in range(blocks):
        mass = np.int64(0)
        if tops[b] >= least and (top - tops[b]) * scale <= limit:
            mass = _mass(line, base, b * BLOCK, min((b + 1) * BLOCK, size), top, scale, limit, least, last)
        block_masses[b] = mass
        total += mass
    point = np.int64(high_product(draw_bits(seeds[row], _u(positions[row])), _u(total)))
    b = 0
    while point >= block_masses[b]:
        point -= block_masses[b]
        b += 1
    token = _pick(line, base, b * BLOCK, min((b + 1) * BLOCK, size), top, scale, limit, least, last, point)
    return np.int64(token), np.int64(OK)


def sample_lines(
    line, bits, size, begin, end, rows, scales, top_k, top_p, limits, seeds, positions,
    tops, top_bits, block_masses, counts, masses, digit_counts, digit_masses, buckets, block_weights,
    ids, keys, weights, tokens, flags,
):  # fmt: skip
    """Choose a token for lines `begin` to `end` of logits [S, size]; line i belongs to rows[i], and is left as it is
    where that is negative.

    By row: scales log2(e) / temperature or 0 for greedy, top_k or 0, top_p, limits -log2(min_p) or infinity, seeds,
    positions. By line: tokens, and flags OK, BROKEN (NaN or infinity) or BANNED (nothing to choose from), token 0.
    """
    for i in range(begin, end):
        if rows[i] >= 0:
            tokens[i], flags[i] = _choose(
                line, bits, i * size, size, rows[i], scales, top_k, top_p, limits, seeds, positions,
                tops, top_bits, block_masses, counts, masses, digit_counts, digit_masses, buckets, block_weights,
                ids, keys, weights,
            )  # fmt: skip


def sample_allowed(
    line, bits, size, i, row, allowed, scales, top_k, top_p, limits, seeds, positions,
    tops, top_bits, block_masses, counts, masses, digit_counts, digit_masses, buckets, block_weights,
    ids, keys, weights, few, few_bits, few_ids, found,
):  # fmt: skip
    """`sample_lines` of line i, of those tokens whose bits are set in the words of `allowed`: by themselves where they
    are few; else all others' logits become -infinity. found: token and flag."""
    base, n = i * size, np.int64(0)
    for first in range(0, size, 64):
        word = allowed[first >> 6]
        if word != _u(0) and n <= FEW:
            for j in range(min(64, size - first)):
                few[n], few_ids[n] = line[base + first + j], first + j  # each has room for 64 more
                n += np.int64((word >> _u(j)) & _u(1))
    if n == 0:
        found[0], found[1] = 0, BANNED
    elif n <= FEW:
        token, flag = _choose(
            few, few_bits, 0, n, row, scales, top_k, top_p, limits, seeds, positions,
            tops, top_bits, block_masses, counts, masses, digit_counts, digit_masses, buckets, block_weights,
            ids, keys, weights,
        )  # fmt: skip
        found[0], found[1] = few_ids[token] if flag == OK else 0, flag
    else:
        for first in range(0, size, 64):
            word = allowed[first >> 6]
            if word != _ALL:
                for j in range(min(64, size - first)):
                    x = line[base + first + j]
                    line[base + first + j] = x if (word >> _u(j)) & _u(1) else _NEGATIVE_INFINITY
        found[0], found[1] = _choose(
            line, bits, base, size, row, scales, top_k, top_p, limits, seeds, positions,
            tops, top_bits, block_masses, counts, masses, digit_counts, digit_masses, buckets, block_weights,
            ids, keys, weights,
        )  # fmt: skip


@_jit
def _before(line, base, first, end, x, target):
    """How many of tokens `first` to `end` come before `target`, whose logit is x: greater ones, equals of lower ids."""
    n = _i(0)
    for j in range(first, end):
        n += _i((line[base + j] > x) | ((line[base + j] == x) & (j < target)))
    return np.int64(n)


def logprob_lines(line, bits, size, begin, end, k, targets, tops, top_bits, greatest, masses, ranks, best):
    """For lines `begin` to `end` of logits [S, size]: the greatest logit (NaN if any is), the mass at temperature 1,
    the target's rank from 1, and the ids of the k likeliest into `best` [S, k]."""
    blocks = (size + BLOCK - 1) // BLOCK
    for i in range(begin, end):
        base, target, wins = i * size, targets[i], i * k
        x = line[base + target]
        top = _greatest(bits, base, size, tops, top_bits)
        mass, rank = np.int64(0), np.int64(1)
        for b in range(blocks):
            first, after = b * BLOCK, min((b + 1) * BLOCK, size)
            if (top - tops[b]) * _LOG2E <= _LIMIT:
                mass += _mass(line, base, first, after, top, _LOG2E, _LIMIT, _NEGATIVE_INFINITY, size)
            if tops[b] >= x:
                rank += _before(line, base, first, after, x, target)
        greatest[i], masses[i], ranks[i] = top, mass, rank
        filled = np.int64(0)
        for b in range(blocks):
            if filled == k and (k == 0 or not tops[b] > line[base + best[wins + k - 1]]):
                continue
            for j in range(b * BLOCK, min((b + 1) * BLOCK, size)):
                v = line[base + j]
                if filled == k and not v > line[base + best[wins + k - 1]]:
                    continue
                at = min(filled, k - 1)
                while at > 0 and line[base + best[wins + at - 1]] < v:
                    best[wins + at] = best[wins + at - 1]
                    at -= 1
                best[wins + at] = j
                filled = min(filled + 1, k)


def edit_line(
    line, base, num_bans, bans, num_biases, bias_ids, biases, num_seen, seen, counts, repetition, frequency, presence
):  # fmt: skip
    """Bans, then biases, then penalties, in place on one row's logits; only tokens named are touched."""
    for i in range(num_bans):
        line[base + bans[i]] = _NEGATIVE_INFINITY
    for i in range(num_biases):
        line[base + bias_ids[i]] += biases[i]
    for i in range(num_seen):
        x = line[base + seen[i]]
        x = x / repetition if x > 0 else x * repetition
        x = x - counts[i] * frequency
        line[base + seen[i]] = x - (presence if counts[i] > 0 else _f(0.0))


FUNCTIONS: dict[str, Callable[..., None]] = {
    "sample_lines": sample_lines, "logprob_lines": logprob_lines, "edit_line": edit_line,
    "sample_allowed": sample_allowed,
}  # fmt: skip
