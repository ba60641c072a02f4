"""The operations of a tape and the words of their rows, declared once: the recorder writes by these names, the
interpreter's functions read by them (compiler.py puts the numbers in their place).

Word CODE of a row is the operation's code; the attributes below are the numbers of its other words. A field is a
number or an address; `ld...` are bytes from row to row, `rows` says which of Batch.counts holds the number of rows.
"""

from __future__ import annotations

import functools
from typing import ClassVar

CODE = 0
ROW_WORDS = 32


class Operation(int):
    """The address of a row. The attributes of its kinds are numbers of words; in compiled functions, the words."""

    code: ClassVar[int]

    @classmethod
    @functools.cache
    def words(cls) -> dict[str, int]:
        """The number of each field's word."""
        found = {name: number for kind in reversed(cls.__mro__) for name, number in vars(kind).items()}
        return {name: n for name, n in found.items() if isinstance(n, int) and name != "code"}

    @classmethod
    @functools.cache
    def takes(cls, names: tuple[str, ...]) -> bool:
        """Are these all of its fields?"""
        words = cls.words()
        return {words.get(name) for name in names} == set(words.values())


class EmbedOp(Operation):
    """Rows of a table of `rows` tokens, of which `first` is the first; others give zeros where it is `partial`.
    kernels: table of a packed kind's (packed.ENTRIES), 0: dense. scales: their offset in a panel; length: steps or
    blocks along K. factor: of the rows, 0 for none."""

    code = 1
    kernels, w, stride, scales, length, out, ldo, tokens, rows, first, partial, factor = range(1, 13)


class NormOp(Operation):
    """narrow: x is of the activation dtype."""

    code = 2
    x, ldx, weight, out, ldo, padded, count, eps, rows, narrow = range(1, 11)


class LinearOp(Operation):
    """kernels: as of EmbedOp. stride: bytes of a panel. first: of a row of `out`, before what is written. half: panels
    of one half of a fused gated activation (0: plain), `temp` its place in scratch memory, `act` its kind. attend: the
    row of the attention whose keys to ask for, or 0."""

    code = 3
    kernels, w, stride, scales, length, x, ldx, out, ldo, mode, bias, rows = range(1, 13)
    half, temp, panels, attend, act, first = range(13, 19)


class RopeOp(Operation):
    code = 4
    x, ldx, out, ldo, cache, block_bytes, block_size, heads, kv_heads, dim = range(1, 11)
    cos, sin, half, q_norm, k_norm, eps, slots, positions, rows = range(11, 20)


class AttendOp(Operation):
    """groups: key heads. chunk_bytes: from one chunk of 16 tokens to the next, group_bytes: from one group to the next.
    keys_are_values: their first columns, `value_dim` of them. cap: what scores are multiplied by before their tanh, and
    `scale` what after it; 0 for none. sinks: a float32 for each head, or 0. stripes: which tokens are here, 0: all;
    else out takes parts (striped.py)."""

    code = 5
    q, ldq, out, ldo, cache, block_bytes, chunk_bytes, block_size, heads, groups, dim, scale, window = range(1, 14)
    seq_start, seq_len, seq_row, table, ld_table, group_bytes, value_dim, keys_are_values, cap, sinks = range(14, 24)
    stripes = 24


class GatedOp(Operation):
    code = 6
    x, ldx, out, ldo, half, padded, rows, act = range(1, 9)


class TakeOp(Operation):
    """Rows that are on other ranks are left out."""

    code = 7
    x, ld, out, index, rows = range(1, 6)


class ReduceOp(Operation):
    """target (+)= the sum of the ranks' parts, which may be the target unless they are added. ld: bytes of a row."""

    code = 8
    port, part, target, ld, rows, add = range(1, 7)


class MeetOp(Operation):
    """Nobody leaves before all have come."""

    code = 9
    port = 1


class SendOp(Operation):
    """Waits where the ring is full."""

    code = 10
    port, peer, address, size = range(1, 5)


class ReceiveOp(SendOp):
    code = 11


class GatherOp(Operation):
    """Up to three parts of x to their places in a row of out, which has those of the step; bytes, maybe 0. The last two
    have one size."""

    code = 12
    x, ldx, out, ldo, rows, to1, size1, from2, to2, size2, from3, to3 = range(1, 13)


class MergeOp(Operation):
    """parts: of all tokens of the step. heads: of the group's, from `first` on. part_bytes: from a rank's parts to the
    next rank's. sinks: a float32 for each of these heads, or 0."""

    code = 13
    parts, ldp, out, ldo, ranks, part_bytes, first, heads, dim, sinks = range(1, 11)


class ByHeadOp(Operation):
    """A product head by head: x_head, out_head: bytes of a head; panels: of a head. rotated: columns to rotate, which
    are x_tail and out_tail bytes into a head."""

    code = 20
    w, stride, length, panels, x, ldx, x_head, out, ldo, out_head, heads, rotated, x_tail, out_tail = range(1, 15)
    cos, sin, half, positions = range(15, 19)


class MlaStoreOp(Operation):
    """rank: columns of the latent."""

    code = 21
    x, ldx, cache, block_bytes, block_size, rank, rotated, norm, eps, cos, sin, half, slots, positions = range(1, 15)
    rows = 15


class LoraOp(Operation):
    """Adds each row's own low-rank product to `out`. slots: of the rows. table: of each slot, for each part of the
    weight, the addresses of its A and its B, 0: none. places: of each part its first panel of `out`, and how many.
    inner: [rows, parts * rank]. length: steps of A; panels: of one A, `stride` bytes each; b_length, b_stride: the same
    of B. columns: panels of `out`. narrow: out is of the activation dtype, and that isn't float32."""

    code = 24
    x, ldx, out, ldo, inner, ldi, slots, table, parts, places, length, stride, panels = range(1, 14)
    b_length, b_stride, columns, narrow, rows = range(14, 19)


class RouteOp(Operation):
    """scoring: kind of scores. correction: 0 for none. sum2: a group is worth its best two. table: slots of each
    expert, rows of ld_table words: how many there are, then their numbers. load: 0 where it isn't counted."""

    code = 32
    logits, ldl, slots, weights, k, experts, scoring, correction, groups, top_groups, sum2 = range(1, 12)
    renormalize, scaling, table, ld_table, positions, load = range(12, 18)


class SortOp(Operation):
    """held: how many slots from `first` on are this rank's. starts: first row of each slot, places: row of each choice,
    out: rows of x by slot."""

    code = 33
    slots, k, rows, first, held, starts, places, x, ldx, out = range(1, 11)


class GroupedOp(LinearOp):
    """A LinearOp for each slot's rows: table: addresses of the slots' weights, held: how many slots, starts: first row
    of each. own_bias: how far behind its weight a slot's bias is; 0: all have `bias`."""

    code = 34
    table, held, starts, own_bias = LinearOp.w, LinearOp.rows, LinearOp.attend, LinearOp.first + 1


class CombineOp(Operation):
    """places: row of y of each choice; add: to the target."""

    code = 35
    y, ldy, places, weights, k, target, ldt, rows, add = range(1, 10)


class GateOp(Operation):
    code = 36
    x, ldx, logits, ldl, out, ldo, padded, rows = range(1, 9)


class SquaresOp(Operation):
    """Sums of squares of two parts of a row: `first` columns, then `last` columns `second` bytes into it."""

    code = 37
    x, ldx, out, ldo, first, second, last, rows = range(1, 9)


class RescaleOp(Operation):
    """Both parts normalised; whole_first, whole_last: columns that the sums are over."""

    code = 38
    x, ldx, sums, lds, first, second, last, rows, whole_first, whole_last, first_weight, last_weight, eps = range(1, 14)


class GeluOp(Operation):
    """In place."""

    code = 39
    x, ldx, padded, rows = range(1, 5)


class ClipOp(Operation):
    """In place."""

    code = 40
    x, ldx, padded, rows, limit = range(1, 6)


class CapOp(Operation):
    """x = outer * tanh(inner * x) of float32, in place."""

    code = 41
    x, ldx, padded, rows, inner, outer = range(1, 7)


class LayerNormOp(Operation):
    code = 42
    x, ldx, weight, bias, out, ldo, padded, count, eps, rows = range(1, 11)


class AddNormOp(Operation):
    """RMS norm of x, added to the target; both float32."""

    code = 43
    x, ldx, weight, target, ldt, padded, count, eps, rows = range(1, 10)


class ExchangeOp(Operation):
    """Never run: the recording is cut there, for Python to reach the other ranks."""

    code = 48
