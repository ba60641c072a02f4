"""The operations a model is written in, and what a back end must give.

A model's forward pass is a function of one argument, its `Operations`. Back ends (`Ops`):
`reference.TorchOps` runs each operation at once with plain torch, on any device; it is the definition.
`cpu.CpuOps` records the operations once, on fixed buffers, and then runs the recording with native kernels.
So forward code must not look at values or row counts; it may only call operations.

Shapes: T tokens of the step, S positions whose logits are wanted, H hidden size, N/K of a weight [N, K].
An `Act` is a back end's handle of an activation with T (or S, after `take`) rows; models only pass it on.
The residual stream is float32; what goes into a matrix product has the back end's activation dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from planaria.mesh.all2all import All2All
    from planaria.mesh.comm import Comm
    from planaria.models.config import MoEConfig
    from planaria.models.shard import ContextGroup, Shard

Array = Any  # of a back end's kind: NumPy's in main memory, a tensor on a device
Act = Any
Weight = Any
Routing = Any  # for each row, the slots and weights of the experts it chose
KVLayer = Any
RopeTable = Any
LoraTable = Any  # of one weight: the low-rank product of each slot


class Stacked:
    """Arrays [n, K] of one kind, one below the other, none of which is copied: rows are taken from where they are."""

    def __init__(self, parts: Sequence[npt.NDArray[Any]]) -> None:
        self.parts, self.dtype = tuple(parts), parts[0].dtype
        self.shape = sum(map(len, parts)), parts[0].shape[1]
        self.size = self.shape[0] * self.shape[1]

    def __getitem__(self, rows: slice) -> npt.NDArray[Any]:
        """Copied only where they are of several."""
        first, last, _ = rows.indices(self.shape[0])
        found, at = [], 0
        for part in self.parts:
            if at < last and at + len(part) > first:
                found.append(part[max(0, first - at) : last - at])
            at += len(part)
        return found[0] if len(found) == 1 else np.concatenate(found) if found else self.parts[0][:0]

    def whole(self) -> npt.NDArray[Any]:
        return np.concatenate(self.parts)


Rows = npt.NDArray[Any] | Stacked


@dataclass
class Quantized:
    """A weight [N, K] as the file packs it: `data` uint8 [N, bytes per row] of whole blocks of a kind (blocks.py) along
    K. skip: weights of the first block that were cut off, a multiple of 32; the last block may end behind K."""

    kind: str
    data: Any  # Rows of uint8
    shape: tuple[int, int]
    skip: int = 0


class AttentionKind(NamedTuple):
    """What a layer's attention asks for. dim: of a head's key; rank: of its value, where values are the first columns
    of keys (MLA), else 0; sunk: has it sinks? part: is it of a context rank?"""

    heads: int
    kv_heads: int
    dim: int
    rank: int = 0
    cap: float = 0.0
    window: int | None = None
    sunk: bool = False
    part: bool = False


def parts_of(weight: Weight) -> tuple[Weight, ...]:
    return weight if isinstance(weight, tuple) else (weight,)


class Batch:
    """One step's inputs, in fixed arrays that the runner fills in place. Sequences are in any order.

    counts       int64 [8]: T tokens, number of sequences, S sample positions, tokens of all lanes (see `Ops.dispatch`);
                 of a `BatchShare` tokens and sample positions of the step, and which of its tokens is the first here
    tokens       int32 [max_tokens]        token ids, sequence after sequence
    drawn_at     int32 [max_tokens]        where `follows`: the line that drew it last; -1: it is in `tokens`
    positions    int32 [max_tokens]        position of each in its sequence
    slots        int64 [max_tokens]        where its key and value go: block * block_size + offset; -1: to another
                                           context rank
    seq_start    int32 [max_seqs + 1]      first token of each sequence in `tokens`; [num_seqs] = T
    seq_len      int32 [max_seqs]          tokens in KV after this step, per sequence
    seq_row      int32 [max_seqs]          its row in block_table
    block_table  int32 [max_seqs, max_blocks]
    row_blocks   int32 [max_seqs]          how many blocks each row has
    sample_index int32 [max_samples]       token indices whose logits are wanted
    hidden       float32 [max_tokens, >= H] the previous stage's residual; only where `make_hidden` was called
    prefill      are there tokens of histories among them, or only ones that were drawn last?
    follows      are there tokens that the host hasn't read, but are on the device alone?
    loras        int32 [max_tokens]        slot of each token's adapter, -1: it has none
    adapted      has any of them one?
    step         of all tokens: itself, unless it is a `BatchShare`
    place        number of a micro-batch among those of a step, counted from 1; 0: of whole steps
    """

    def __init__(self, max_tokens: int, max_seqs: int, max_blocks: int, max_samples: int) -> None:
        self.max_tokens, self.max_seqs, self.max_samples = max_tokens, max_seqs, max_samples
        self.prefill = self.adapted = self.follows = False
        self.step: Batch = self
        self.place = 0
        self.counts: npt.NDArray[np.int64] = np.zeros(8, np.int64)
        self.tokens: npt.NDArray[np.int32] = np.zeros(max_tokens, np.int32)
        self.drawn_at: npt.NDArray[np.int32] = np.full(max_tokens, -1, np.int32)
        self.positions: npt.NDArray[np.int32] = np.zeros(max_tokens, np.int32)
        self.slots: npt.NDArray[np.int64] = np.zeros(max_tokens, np.int64)
        self.loras: npt.NDArray[np.int32] = np.full(max_tokens, -1, np.int32)
        self.seq_start: npt.NDArray[np.int32] = np.zeros(max_seqs + 1, np.int32)
        self.seq_len: npt.NDArray[np.int32] = np.zeros(max_seqs, np.int32)
        self.seq_row: npt.NDArray[np.int32] = np.zeros(max_seqs, np.int32)
        self.block_table: npt.NDArray[np.int32] = np.zeros((max_seqs, max_blocks), np.int32)
        self.row_blocks: npt.NDArray[np.int32] = np.zeros(max_seqs, np.int32)
        self.sample_index: npt.NDArray[np.int32] = np.zeros(max_samples, np.int32)
        self.hidden: npt.NDArray[np.float32] | None = None
        self.arrived: Array | None = None  # float32 [T, H] on the device, in place of `hidden`
        self.counting: npt.NDArray[np.int32] = np.arange(max(max_samples, max_seqs) + 1, dtype=np.int32)

    def deal(self) -> int:
        """Take this rank's tokens of the step, when it is there. How many there are."""
        return int(self.counts[0])

    def make_hidden(self, columns: int) -> npt.NDArray[np.float32]:
        """The previous stage's residual, rows padded to 16 columns with zeros; made when first asked for."""
        if self.hidden is None:
            self.hidden = np.zeros((self.max_tokens, -(-columns // 16) * 16), np.float32)
        return self.hidden


class Slots:
    """Where a layer's experts are: slots are numbered over all ranks, a slot holds one expert's weights.

    table int32 [experts, 1 + most]: in how many slots an expert is, then which. A token at position p takes number
    p % (how many), so which replica computes it does not depend on what shares its step. Both arrays are read at each
    step and may be changed between steps. `held`: the slots of this rank; its `experts` operation computes those only.
    load int64 [experts]: tokens that chose each expert are added to it in each step; None: not counted.
    """

    def __init__(self, slots: Sequence[int], num_experts: int, held: range, most: int = 1) -> None:
        replicas = replicas_of(slots, num_experts)
        self.held = held
        self.table: npt.NDArray[np.int32] = np.zeros(
            (num_experts, 1 + max(most, *(len(r) for r in replicas))), np.int32
        )
        self.load: npt.NDArray[np.int64] | None = None
        self.number = 0  # how often it was filled
        self.fill(replicas)

    def fill(self, replicas: Sequence[Sequence[int]]) -> None:
        """The slots of each expert from now on. Raises ValueError for one that has none or too many."""
        most, self.number = self.table.shape[1] - 1, self.number + 1
        for expert, slots in enumerate(replicas):
            if not 1 <= len(slots) <= most:
                raise ValueError(f"expert {expert} in {len(slots)} slots: must be in 1 to {most}")
            self.table[expert] = [len(slots), *slots, *[0] * (most - len(slots))]


def replicas_of(slots: Sequence[int], num_experts: int) -> list[list[int]]:
    """The slots of each expert, from the expert of each slot."""
    replicas: list[list[int]] = [[] for _ in range(num_experts)]
    for slot, expert in enumerate(slots):
        replicas[expert].append(slot)
    return replicas


@dataclass(frozen=True)
class Columns:
    """A rank's part of what its context group brings together. pieces: (first column of its own, first column of the
    whole, how many); width: of the whole; most: of that of the largest group. heads: its query heads among the
    group's. name: of what is in them, which is brought together in a place of its own."""

    pieces: tuple[tuple[int, int, int], ...]
    width: int
    most: int
    heads: range
    name: str = "columns"

    @staticmethod
    def of_heads(group: ContextGroup, shard: Shard, dim: int) -> Columns:
        """Of q, k, v side by side, heads of `dim`. Keys and values that several have come from the first."""
        queries, keys = len(shard.heads), len(shard.kv_heads)
        at, at_kv = shard.heads.start - group.heads.start, shard.kv_heads.start - group.kv_heads.start
        at_kv += len(group.heads)
        pieces = [(0, at, queries)]
        if group.leads_keys:
            pieces += [(queries, at_kv, keys), (queries + keys, at_kv + len(group.kv_heads), keys)]
        return Columns(
            tuple((own * dim, whole * dim, count * dim) for own, whole, count in pieces),
            (len(group.heads) + 2 * len(group.kv_heads)) * dim, (group.most_heads + 2 * group.most_kv_heads) * dim,
            range(at, at + queries),
        )  # fmt: skip

    @staticmethod
    def of_queries(group: ContextGroup, shard: Shard, dim: int) -> Columns:
        """Of q alone."""
        at, count = shard.heads.start - group.heads.start, len(shard.heads)
        pieces = ((0, at * dim, count * dim),)
        return Columns(pieces, len(group.heads) * dim, group.most_heads * dim, range(at, at + count))

    @staticmethod
    def of_all(shard: Shard, width: int, name: str = "columns") -> Columns:
        """Of what all tensor ranks have alike; the first gives it."""
        return Columns(((0, 0, width),) if shard.leads else (), width, width, range(0), name)


class Operations(Protocol):
    """What a forward pass is written in, and its argument while it is compiled."""

    spread: bool  # are experts shared with the ranks of other lanes?
    early: bool  # may rows that nobody wants be left within the last layer?

    def embed(self, table: Weight, vocab: range | None = None, scale: float = 1.0) -> Act:
        """[T, H] float32: rows of the table for the batch's tokens, times `scale`. The table may be the packed output
        head. vocab: the token ids of its rows, where other ranks of the group hold the others."""

    def hidden(self, columns: int) -> Act:
        """[T, H] float32: the batch's `hidden`, instead of `embed` on a stage that isn't the first."""

    def rms_norm(self, x: Act, weight: Any, eps: float) -> Act:
        """x / sqrt(mean(x^2) + eps) * weight, in the activation dtype. x: the residual, or a product."""

    def layer_norm(self, x: Act, weight: Any, bias: Any, eps: float) -> Act:
        """(x - mean) / sqrt(variance + eps) * weight + bias, in the activation dtype. x: the residual."""

    def linear_norm(
        self, x: Act, weight: Weight, norm: Any, eps: float, residual: Act, *, lora: LoraTable | None = None
    ) -> Act:
        """x W^T + bias of all ranks of the group together, each of which has some of K; RMS-normalised, in float32, and
        added to the residual. lora: as of `linear`."""

    def linear(
        self, x: Act, weight: Weight, residual: Act | None = None, *, reduce: bool = False,
        lora: LoraTable | None = None,
    ) -> Act:  # fmt: skip
        """x W^T + bias, in the activation dtype; with `residual` (float32): adds that to it and returns it. With
        `reduce` (and a residual) each rank of the group has some of K, and what is added is the sum over the ranks.
        The weight may be a tuple, one below the other: of several kinds, each but the last of a multiple of 16 rows.
        lora: a row whose token has a slot gets (x A^T) B^T of that slot added, x A^T in the activation dtype."""

    def rope_store(
        self, qkv: Act, kv: KVLayer, rope: RopeTable, num_heads: int, num_kv_heads: int, head_dim: int,
        q_norm: Any = None, k_norm: Any = None, eps: float = 0.0,
    ) -> Act:  # fmt: skip
        """Split [T, (heads + 2 kv_heads) * head_dim]; RMS-normalise q and k per head where norms are given; rotate q
        and k by position; store k and v at the batch's slots. Returns q [T, heads * head_dim]."""

    def attend(
        self, q: Act, kv: KVLayer, num_heads: int, num_kv_heads: int, head_dim: int, scale: float,
        window: int | None = None, cap: float = 0.0, sinks: Any = None,
    ) -> Act:  # fmt: skip
        """Causal attention of each token over its sequence's cache (its own key included), query head h reading kv head
        h // (heads / kv_heads); with `window` w, only positions > p - w. [T, heads * head_dim], activation dtype.
        With `cap` scores are cap * tanh(score / cap). sinks: a `vector` [heads], the score of one key more, whose value
        is 0."""

    def by_head(self, x: Act, weight: Weight, num_heads: int, rope: RopeTable | None = None) -> Act:
        """Every head's columns of x times its own rows of the weight [heads * N, K]: x [T, heads * K] to
        [T, heads * N]. With `rope` a head of x has the rotated columns of the table after its K, and they are rotated
        by position and put after its N."""

    def mla_store(self, x: Act, kv: KVLayer, norm: Any, eps: float, rope: RopeTable) -> None:
        """x [T, width]: RMS-normalise the first columns, as many as `norm` has; rotate the rest by position; store
        both at the batch's slots."""

    def mla_attend(self, q: Act, kv: KVLayer, num_heads: int, rank: int, scale: float) -> Act:
        """Causal attention of q [T, heads * width] over its sequence's cache, whose rows are the keys of all heads and
        whose first `rank` columns are the values. [T, heads * rank], activation dtype."""

    def gather(self, x: Act, group: ContextGroup, own: Columns) -> Act:
        """The columns of all ranks of the context group, of all tokens of the step: [T, own.width]."""

    def attend_part(
        self, q: Act, kv: KVLayer, num_heads: int, num_kv_heads: int, head_dim: int, scale: float, group: ContextGroup,
        window: int | None = None, cap: float = 0.0,
    ) -> Act:  # fmt: skip
        """As `attend`, over this rank's tokens only, of all tokens of the step; what that makes is for `merge`."""

    def mla_attend_part(
        self, q: Act, kv: KVLayer, num_heads: int, rank: int, scale: float, group: ContextGroup
    ) -> Act:  # fmt: skip
        """As `mla_attend`, over this rank's tokens only; what that makes is for `merge`."""

    def merge(self, parts: Act, group: ContextGroup, heads: range, dim: int, sinks: Any = None) -> Act:
        """Attention over the tokens of all ranks of the group, of these heads among the group's, of this rank's share
        of the step: [T, heads * dim], activation dtype. A part is the weighted sum of its values, their greatest score
        and the sum of weights (output and log-sum-exp in other numbers); parts are merged by pairs in a tree of context
        ranks. sinks: as in `attend`, of these heads."""

    def gated(self, gate_up: Act, kind: str = "silu") -> Act:
        """Of the halves g, u of the columns: "silu": silu(g) * u; "gelu_tanh": gelu(g) * u by tanh; "clamped": with
        g = min(g, 7) and u = clamp(u, -7, 7), g * sigmoid(1.702 g) * (u + 1)."""

    def gelu(self, x: Act) -> Act:
        """By tanh; in place of x."""

    def clip(self, x: Act, limit: float) -> Act:
        """To [-limit, limit]; in place of x."""

    def wide_norm(
        self, qkv: Act, widths: tuple[int, int], whole: tuple[int, int], q_norm: Any, k_norm: Any, eps: float, *,
        counts_keys: bool = True,
    ) -> Act:  # fmt: skip
        """qkv with its first columns (`widths`: of q, of k) RMS-normalised, q and k each over all its columns on all
        ranks (`whole`: how many). counts_keys: no other rank has these k."""

    def gate_rows(self, x: Act, logit: Act) -> Act:
        """x times the sigmoid of a float32 column [T, 1]."""

    def scores(self, x: Act, weight: Weight) -> Act:
        """x W^T + bias in float32 [T, N]; nothing is summed over ranks."""

    def route(self, logits: Act, rule: MoEConfig, slots: Slots, correction: Any = None) -> Routing:
        """Which experts each token chooses by float32 logits [T, experts], and with which weights. Of experts (and
        groups) that score alike the one with the lower number is chosen. correction: a `vector` [experts]."""

    def experts(
        self, x: Act, routing: Routing, weights: Weight, slots: Slots, residual: Act | None = None, *,
        reduce: bool = False, kind: str = "silu",
    ) -> Act:  # fmt: skip
        """For each row the sum, in order of its choice, of weight * down(gated(gate x, up x)) over the chosen experts
        whose slots this rank holds, with their biases; float32. A row's result does not depend on the others. Added to
        `residual` where one is given, after summing over the ranks with `reduce`; else a new activation."""

    def dispatch(self, x: Act, routing: Routing) -> tuple[Act, Routing]:
        """Where experts are `spread`: the rows of all lanes, for `experts` (without a residual)."""

    def combine(self, y: Act, residual: Act) -> Act:
        """After `dispatch`: the sum over all ranks of what their experts made of this lane's rows, added to the
        residual."""

    def take(self, x: Act) -> Act:
        """Rows of x at the batch's sample_index: [S, H]. Of a `BatchShare`, those of all ranks."""

    def logits(
        self, x: Act, weight: Weight, vocab: range | None = None, size: int | None = None, cap: float = 0.0
    ) -> Act:  # fmt: skip
        """x W^T in float32, [S, vocabulary]; with `cap` cap * tanh(it / cap). vocab, size: token ids of the weight's
        rows, of how many in all; then rank 0 of the group gets the whole, and what the others get means nothing."""


class CacheMemory(Protocol):
    """Outlives the process. Whoever takes the same sizes in the same order gets what is there."""

    def take(self, size: int) -> Any:
        """A memoryview, or memory of the back end's device."""


class PartMemory(Protocol):
    """Zeros, for what is packed."""

    def take(self, size: int) -> npt.NDArray[np.uint8]:
        """So many bytes, aligned to a cache line."""


class Ops(Protocol):
    """One back end: loads weights, makes caches, compiles forward passes.

    Tensor ranks: a back end joins its group's `Comm` (planaria.mesh) before `compile`. The partial sums of `embed` and
    of `linear(reduce=True)` are added over the group, in one order on all ranks, so the residual is the same on all of
    them to the last bit; `logits` brings the columns together on rank 0. A group of one does nothing of this.
    """

    kv_part: CacheMemory | None  # where caches that are made later are; None: in this process's own memory

    def join(self, tp: Comm, lanes: All2All | None = None, cp: Comm | None = None) -> None:
        """Share the work with these tensor ranks from now on, and experts with the ranks of other lanes; what was
        compiled before is of no more use. cp: of these and those that have other shares of a step, if there are any."""

    def pack(self, weight: Rows | Quantized, bias: npt.NDArray[Any] | None = None) -> Weight:
        """A weight [N, K] (and bias [N]) in the layout its kernels read. The argument may be freed afterwards.

        A float array (bfloat16 as its bits, see numbers.py) is stored in the activation dtype; a `Quantized` stays
        packed.
        """

    def vector(self, values: npt.NDArray[Any]) -> Any:
        """A norm's weight [K], kept in float32."""

    def rope_table(self, cos: npt.NDArray[np.float32], sin: npt.NDArray[np.float32]) -> RopeTable:
        """cos, sin float32 [max_position, rotary_dim / 2]; halves convention (x1, x2) -> (x1 c - x2 s, x2 c + x1 s)."""

    def kv_layer(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> KVLayer:
        """One layer's paged cache."""

    def kv_block_bytes(self, block_size: int, num_kv_heads: int, head_dim: int) -> int:
        """Bytes of one block of one layer, keys and values."""

    def mla_layer(self, num_blocks: int, block_size: int, width: int) -> KVLayer:
        """One layer's paged cache of `width` numbers a token, the same for all heads."""

    def mla_block_bytes(self, block_size: int, width: int) -> int:
        """Bytes of one block of one such layer."""

    def lora_table(self, parts: Sequence[range], rank: int, slots: int) -> LoraTable:
        """For `linear` with a weight whose rows are of these parts: `slots` slots, with nothing in them."""

    def put_lora(self, table: LoraTable, slot: int, pairs: Sequence[tuple[Array, Array] | None]) -> None:
        """From the next step on a slot has these: of each part A [r, K] and B [rows of the part, r], float32, r up to
        the table's rank; None: nothing is added. Called between steps; what was compiled stays good."""

    def group(self, experts: Sequence[tuple[Weight, Weight]]) -> Weight:
        """The experts of this rank's slots, slot by slot: (gate over up [2 I, H], down [H, I]), all of one kind."""

    def put(self, experts: Weight, slot: int, expert: tuple[Weight, Weight]) -> None:
        """Another expert of the same kind in a slot of a `group` (counted from the rank's first), from the next step
        on: called between steps, what was compiled stays good."""

    def read_loads(self) -> None:
        """Have in `Slots.load` what all steps so far counted; between two steps."""

    def form(self, weight: Weight) -> tuple[int, ...]:
        """Of a packed weight: at most 8 numbers from which `blank` makes another of its kind and shape,
        on any rank with the same back end and dtype."""

    def blank(self, form: Sequence[int]) -> Weight:
        """A weight whose `memory` is to be filled. May be called beside steps, by one thread at a time."""

    def memory(self, weight: Weight) -> Array:
        """All bytes of a packed weight, its bias among them: copied to another of its form they make it the same."""

    def release(self, weight: Weight) -> None:
        """A weight isn't used any more: its memory goes to later ones, or back to the system."""

    def compile(
        self, forward: Callable[[Operations], Act], batch: Batch, lanes: All2All | None = None
    ) -> Callable[[], Array]:
        """A function that runs `forward` on what `batch` holds at that moment and returns its result as an array
        [S, vocabulary] (or [T, H]), valid until the next run; of several results, a tuple of such. Float32, but for
        those in the activation dtype. Called with S = 0 it runs and returns an empty
        array. Raises CollectiveAborted when a rank of the group is gone. lanes: a way to exchange tokens in place of
        the one that was joined; functions with ways of their own may run in several threads, as long as only one of
        them computes while others exchange."""

    def use_threads(self, threads: int) -> None:
        """Compute with so many threads from the next run on."""

    def leave(self) -> None:
        """What was compiled isn't run any more: nothing here computes from now on, until ranks join again. Before KV
        goes."""

    def close(self) -> None:
        """End threads, free memory."""
