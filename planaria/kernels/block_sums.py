"""Checksums of KV blocks, which are in pieces, one in each cache: compiled (objects.py), so that a look at what another
process has left takes what reading it takes. Much like what XXH3 (github.com/Cyan4973/xxHash) does with long inputs:
eight sums of 32 x 32 bit products of the data and a key that depends on the place, scrambled after each piece. A
piece's last stripe ends where the piece does.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

from planaria import env
from planaria.kernels.objects import CodeMachine, ensure, object_file

STRIPE = 64  # bytes; a piece has as many at least
_PRIME, _SCRAMBLE = 0x9E3779B185EBCA87, 0x9E3779B1
_KEYS = [(0xBE4BA423396CFEB8 * (2 * lane + 1)) % 2**64 for lane in range(8)]
_STEPS = [(0xC2B2AE3D27D4EB4F * (2 * lane + 1)) % 2**64 for lane in range(8)]


def _vector(values: list[int]) -> str:
    return f"<{', '.join(f'i64 {value - (value >> 63 << 64)}' for value in values)}>"


def _text() -> str:
    """IR of planaria_sums(caches, sizes, number of caches, blocks, their number, sums, out): one cache after the other,
    as memory is read fastest. sums: eight of each block."""
    v, swapped = "<8 x i64>", ", ".join(f"i32 {lane ^ 1}" for lane in range(8))
    fold: list[str] = []
    for lane in range(8):
        fold += [
            f"  %e{lane} = extractelement {v} %all, i64 {lane}", f"  %f{lane} = xor i64 %h{lane}, %e{lane}",
            f"  %g{lane} = mul i64 %f{lane}, {_PRIME - 2**64}", f"  %s{lane} = lshr i64 %g{lane}, 29",
            f"  %h{lane + 1} = xor i64 %g{lane}, %s{lane}",
        ]  # fmt: skip
    return f"""
define void @planaria_sums(ptr %caches, ptr %sizes, i64 %num, ptr %blocks, i64 %count, ptr %sums, ptr %out) {{
entry:
  br label %cache
cache:
  %c = phi i64 [0, %entry], [%nextc, %cached]
  %some = icmp slt i64 %c, %num
  br i1 %some, label %first, label %last
first:
  %pc = getelementptr ptr, ptr %caches, i64 %c
  %base = load ptr, ptr %pc
  %ps = getelementptr i64, ptr %sizes, i64 %c
  %size = load i64, ptr %ps
  %fresh = icmp eq i64 %c, 0
  %cap = sub i64 %size, {STRIPE}
  br label %block
block:
  %b = phi i64 [0, %first], [%nextb, %scramble]
  %more = icmp slt i64 %b, %count
  br i1 %more, label %piece, label %cached
piece:
  %pb = getelementptr i64, ptr %blocks, i64 %b
  %number = load i64, ptr %pb
  %at = mul i64 %number, %size
  %data = getelementptr i8, ptr %base, i64 %at
  %pa = getelementptr {v}, ptr %sums, i64 %b
  %before = load {v}, ptr %pa, align 8
  %acc = select i1 %fresh, {v} {_vector(_STEPS)}, {v} %before
  br label %stripe
stripe:
  %i = phi i64 [0, %piece], [%nexti, %stripe]
  %sum = phi {v} [%acc, %piece], [%newsum, %stripe]
  %key = phi {v} [{_vector(_KEYS)}, %piece], [%newkey, %stripe]
  %p = getelementptr i8, ptr %data, i64 %i
  %w = load {v}, ptr %p, align 1
  %x = xor {v} %w, %key
  %lo = and {v} %x, {_vector([2**32 - 1] * 8)}
  %hi = lshr {v} %x, {_vector([32] * 8)}
  %product = mul nuw {v} %lo, %hi
  %swap = shufflevector {v} %w, {v} poison, <8 x i32> <{swapped}>
  %half = add {v} %sum, %product
  %newsum = add {v} %half, %swap
  %newkey = add {v} %key, {_vector(_STEPS)}
  %after = add i64 %i, {STRIPE}
  %over = icmp sgt i64 %after, %cap
  %nexti = select i1 %over, i64 %cap, i64 %after
  %left = icmp slt i64 %i, %cap
  br i1 %left, label %stripe, label %scramble
scramble:
  %shifted = lshr {v} %newsum, {_vector([47] * 8)}
  %folded = xor {v} %newsum, %shifted
  %keyed = xor {v} %folded, {_vector(_KEYS)}
  %mixed = mul {v} %keyed, {_vector([_SCRAMBLE] * 8)}
  store {v} %mixed, ptr %pa, align 8
  %nextb = add i64 %b, 1
  br label %block
cached:
  %nextc = add i64 %c, 1
  br label %cache
last:
  %d = phi i64 [0, %cache], [%nextd, %fold]
  %rest = icmp slt i64 %d, %count
  br i1 %rest, label %fold, label %end
fold:
  %pd = getelementptr {v}, ptr %sums, i64 %d
  %all = load {v}, ptr %pd, align 8
  %h0 = add i64 0, 0
{chr(10).join(fold)}
  %down = lshr i64 %h8, 1
  %made = or i64 %down, 1
  %po = getelementptr i64, ptr %out, i64 %d
  store i64 %made, ptr %po
  %nextd = add i64 %d, 1
  br label %last
end:
  ret void
}}
"""


def _compile() -> bytes:
    machine = CodeMachine()
    return machine.emit(machine.binding.parse_assembly(_text()))


@functools.cache
def load(cache_dir: Path | None = None) -> Any:
    """A C function, called without the interpreter lock: addresses of caches, bytes that a block has in each, and how
    many; numbers of blocks, and how many; eight words for each, to work in; where their sums go, 63 bits each and never
    0. All int64."""
    machine, folder = CodeMachine(), cache_dir or env.cache_dir() / "kernels"
    path = object_file(folder, "sums", [Path(__file__)], machine.facts)
    engine = machine.load(ensure(path, _compile))
    function = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 7)(engine.get_function_address("planaria_sums"))
    _engines.append(engine)
    return function


_engines: list[Any] = []  # that have the code of functions
