"""What the interpreter may call: names and signatures for the type checker; compiler.py gives them their meaning. In
Python they do nothing, or fail where they would have to answer.
"""

from __future__ import annotations

import platform

from planaria.kernels.cpu.target import Target

TARGET = Target("float32", "generic")  # in what is compiled: the one it is compiled for
X86 = platform.machine() in ("x86_64", "AMD64")
# Numbers of system calls
FUTEX, CLOCK_GETTIME, KILL, SCHED_SETAFFINITY = (202, 228, 62, 203) if X86 else (98, 113, 129, 122)


def get(address: int, word: int) -> int:
    """int64 number `word` at address."""
    raise NotImplementedError


def put(address: int, word: int, value: int) -> None:
    """Set int64 number `word` at address."""


def get32(address: int, index: int) -> int:
    """int32 number `index` at address."""
    raise NotImplementedError


def put32(address: int, index: int, value: int) -> None:
    """Set int32 number `index` at address."""


def atomic_get(address: int, word: int) -> int:
    """A load no other load or store is moved across."""
    raise NotImplementedError


def atomic_put(address: int, word: int, value: int) -> None:
    """A store that no later load of this thread overtakes."""


def atomic_add(address: int, word: int, value: int) -> int:
    """The value before."""
    raise NotImplementedError


def prefetch(address: int) -> None:
    """Ask for the cache line at address; any address will do."""


def relax() -> None:
    """Tells the core that this is a waiting loop."""


def syscall(number: int, a: int, b: int, c: int, d: int, e: int, f: int) -> int:
    """A system call."""
    raise NotImplementedError


def invoke(function: int, *args: int) -> None:
    """Call the function at that address."""


def operate(c: int, row: int, tid: int, ticket: int) -> None:
    """Carry out a row: the function `op_...` of its kind (`build.operate` writes the choice)."""


# Kernels


def tile(
    select: int, x: int, ldx: int, panels: int, steps: int,
    out: int, ldo: int, mode: int, bias: int,
    plan: int,
) -> None:  # fmt: skip
    """A tile of a dense product; select = rows * 4 + panels (micro.tile)."""


def row_tile(
    select: int, x: int, ldx: int, panels: int, steps: int,
    out: int, ldo: int, mode: int, bias: int,
    plan: int,
) -> None:  # fmt: skip
    """The same, of rows that are widened where the target does that."""


def configure(rows: int) -> None:
    """This thread's tiles have so many rows from now on, on targets that are told (amx.configure); 0: none."""


def widen(src: int, dst: int, count: int) -> None:
    """`count` elements of the activation dtype, a multiple of 16, to float32."""


def values(
    select: int, panels: int, p: int, ldp: int, chunks: int,
    count: int, first: int, out: int, ldo: int, state: int,
) -> None:  # fmt: skip
    """Weighted values of a tile of attention; select = rows * 8 + panels (micro.values)."""


def latents(
    select: int, steps: int, p: int, ldp: int, chunks: int,
    count: int, first: int, out: int, ldo: int, state: int,
) -> None:  # fmt: skip
    """The same of keys that are values as well; select = rows * 8 + steps (latent_values.latents)."""


def settle(panels: int, rows: int, acc: int, out: int, ldo: int, mode: int, bias: int) -> None:
    """Write what pl_wide summed (micro.settle)."""


def embed(panel: int, column: int, count: int, out: int) -> None:
    """One column of a dense panel as float32."""


def norm(x: int, weight: int, out: int, padded: int, count: int, eps: int) -> None:
    """RMS norm of a row."""


def gated(kind: int, gate: int, up: int, out: int, count: int, padded: int) -> None:
    """A gated activation of a row (activations.gated)."""


def gelu(x: int, padded: int) -> None:
    """A row in place."""


def clip(x: int, padded: int, limit: int) -> None:
    """A row in place, to [-limit, limit]."""


def cap(x: int, count: int, inner: int, outer: int) -> None:
    """outer * tanh(inner * x) of float32, in place."""


def scale(x: int, count: int, factor: int) -> None:
    """float32 in place, times the factor."""


def layer_norm(x: int, weight: int, bias: int, out: int, padded: int, count: int, eps: int) -> None:
    """Layer norm of a row."""


def add_norm(x: int, weight: int, target: int, padded: int, count: int, eps: int) -> None:
    """RMS norm of a float32 row, added to another."""


def softmax(scores: int, p: int, padded: int, lo: int, hi: int, scale: int, state: int) -> None:
    """A row of one tile of keys (vector.softmax)."""


def divide(o: int, state: int, out: int, count: int) -> None:
    """A row of attention's output by its sum."""


def merge(part: int, other: int, count: int) -> None:
    """Two parts of attention into the first: `count` sums of values, then their state (vector.merge)."""


def rotate(
    src: int, dst: int, temp: int, cos: int, sin: int,
    half: int, dim: int, weight: int, eps: int,
) -> None:  # fmt: skip
    """Norm and rotation of one head."""


def store_key(src: int, dst: int, steps: int) -> None:
    """A key into a chunk."""


def store_value(src: int, dst: int, token: int, dim: int) -> None:
    """A value into a chunk."""


def copy(dst: int, src: int, count: int) -> None:
    """Copy bytes."""


def put_past(dst: int, src: int, count: int) -> None:
    """Copy bytes for another core, past the caches; dst and count are multiples of 64."""


def sum(out: int, a: int, b: int, count: int) -> None:
    """out = a + b of float32; count is a multiple of 16. out may be a or b."""


def accrue(out: int, delta: int, count: int) -> None:
    """out, of the activation dtype, += float32; count is a multiple of 16."""


def scores(logits: int, out: int, count: int, padded: int, kind: int) -> None:
    """Scores of a row of logits (expert_kernels.scores)."""


def weigh(weights: int, count: int, renormalise: int, scaling: int) -> None:
    """Weights of chosen experts from their scores."""


def combine(y: int, ldy: int, place: int, weights: int, k: int, out: int, padded: int, add: int) -> None:
    """A token's sum over the experts it chose (expert_kernels.combine)."""


def gate(x: int, logit: int, out: int, padded: int) -> None:
    """A row times the sigmoid of one number."""


def squares(x: int, count: int, out: int) -> None:
    """The sum of squares of a row's part."""


def rescale(x: int, sum: int, weight: int, count: int, whole: int, eps: int) -> None:
    """RMS norm of a row's part, given the sum of squares."""
