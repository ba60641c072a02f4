"""Triton's kernels for experts, carried out by its interpreter on the CPU, against plain torch. Not run on hardware.

Half precision stands for bfloat16, whose products Triton's interpreter gets wrong (it multiplies the codes). It calls
NumPy's product, which on some CPUs sums up a row in an order that its place in the tile decides. A device's does not,
so here NumPy's is by plain sums.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton is not installed: there is none for this platform")

CASES = [
    {"tokens": 70, "experts": 5, "k": 2, "hidden": 48, "width": 80, "held": [0, 5], "dtype": "float32"},
    {"tokens": 1, "experts": 6, "k": 3, "hidden": 64, "width": 32, "held": [0, 6], "dtype": "float32"},
    {"tokens": 33, "experts": 6, "k": 3, "hidden": 40, "width": 24, "held": [2, 5], "dtype": "float32"},
    {"tokens": 40, "experts": 4, "k": 2, "hidden": 64, "width": 64, "held": [0, 4], "dtype": "float16"},
]
PROGRAM = """
import json, sys, numpy, torch
from types import SimpleNamespace
from torch.nn.functional import silu
from planaria.kernels.reference_experts import RoutedRows, experts as plain
from planaria.kernels.gpu.experts import BLOCK_M, Table, experts, tiles_of

def product(a, b, dtype):
    return sum((a[:, [k]].astype(dtype) * b[[k]].astype(dtype) for k in range(len(b))), numpy.zeros((), dtype))

numpy.matmul = product

def gated(both):
    gate, up = both.float().chunk(2, -1)
    return (silu(gate) * up).to(both.dtype)

for case in json.loads(sys.argv[1]):
    torch.manual_seed(0)
    dtype, held = getattr(torch, case["dtype"]), range(*case["held"])
    hidden, width, tokens = case["hidden"], case["width"], case["tokens"]
    weights = [
        ((torch.randn(2 * width, hidden) / hidden**0.5).to(dtype), (torch.randn(hidden, width) / width**0.5).to(dtype))
        for _ in held
    ]
    x = torch.randn(tokens, hidden).to(dtype)
    chosen = torch.stack([torch.randperm(case["experts"])[: case["k"]] for _ in range(tokens)])
    parts = torch.rand(tokens, case["k"])
    found = experts(x, chosen, parts, Table.of(weights), held)
    pairs = [tuple(SimpleNamespace(weight=each, bias=None) for each in pair) for pair in weights]
    wanted = plain(x, RoutedRows(chosen, parts), pairs, held, gated)
    gap = float((found - wanted).abs().max())
    assert gap < (1e-5 if dtype is torch.float32 else 3e-3), (case, gap)
    assert wanted.abs().max() > 0.5
    alone = experts(x[-1:], chosen[-1:], parts[-1:], Table.of(weights), held)
    assert torch.equal(alone[0], found[-1]), case
    tiles = tiles_of(chosen, held)
    real = tiles.slots < len(held)
    assert int(real.sum()) == sum(-(-int((chosen == s).sum()) // BLOCK_M) for s in held)
print("same")
"""


def test_in_the_interpreter() -> None:
    """In a process of its own: Triton reads the switch when it is imported."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(CASES)], env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.stdout == "same\n", done.stderr
