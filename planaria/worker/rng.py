"""Random numbers without state: Philox4x32-10 (Salmon et al., SC 2011), keyed by seed, counted by position.

The rule: the number for a token is a function of its request's seed and its position in the history, nothing
else. So neither the batch, nor a preemption, nor a lost worker changes what is drawn. This is the definition,
in plain integers; the sampler's kernels compute the same.
"""

from __future__ import annotations

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW = 0xFFFFFFFF


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int], rounds: int = 10) -> tuple[int, int, int, int]:
    """Four 32-bit words from four words of counter and two of key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        p0, p1 = _M0 * c0, _M1 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _LOW, (p0 >> 32) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
    return c0, c1, c2, c3


def draw_bits(seed: int, position: int) -> int:
    """64 uniform bits for the token at index `position` of a history whose request has `seed`.

    Any integer is a seed; its low 64 bits count (two's complement), low word first, in key and counter alike.
    """
    low, high, _, _ = philox4x32((position & _LOW, (position >> 32) & _LOW, 0, 0), (seed & _LOW, (seed >> 32) & _LOW))
    return low | high << 32
