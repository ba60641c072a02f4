"""Kernels for GPUs made into a device's code, without a device: `python -O -m tests.model.gpu_compiled sm_90 CASE`.

The cases are those of gpu_cases.py. Triton compiles what a launch would, with what it makes of arguments that are 1, or
multiples of 16, and launches nothing; so results mean nothing, and -O drops what is said of them. A launch that a
device would refuse raises. Prints each kernel's name and in how many forms it was made.
"""

# mypy: disable-error-code="no-untyped-def, import-untyped, attr-defined, assignment"

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from planaria.kernels.gpu import attention
from tests.model import gpu_cases

TARGETS = {"sm_90": GPUTarget("cuda", 90, 32), "gfx942": GPUTarget("hip", "gfx942", 64)}
SHARED = {"sm_90": 227 << 10, "gfx942": 64 << 10}  # bytes of a program at most
MOST_PROGRAMS = (1 << 31) - 1, 65535, 65535


class NoDevice:
    """What Triton asks of a device before it launches."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target


def main(target: str, cases: list[str]) -> None:
    made, run = dict[tuple[str, str], int](), JITFunction.run

    def launch(kernel: Any, *args: Any, grid: Any = None, warmup: bool = False, **named: Any) -> None:
        for number, most in zip(grid, MOST_PROGRAMS, strict=False):
            if not 0 < number <= most:
                raise ValueError(f"{kernel.__name__}: no grid is {grid}")
        found = run(kernel, *args, grid=grid, warmup=True, **named)
        if found.metadata.shared > SHARED[target]:
            raise ValueError(f"{kernel.__name__}: {found.metadata.shared} bytes of shared memory for {named}")
        made[kernel.__name__, found.hash] = found.metadata.shared

    triton.runtime.driver.set_active(NoDevice(TARGETS[target]))
    JITFunction.run = launch
    attention._WAYS = (("Triton", lambda need: "", attention.by_triton),)
    gpu_cases.same = lambda *_: None
    with torch.inference_mode():
        for case in cases:
            gpu_cases.CASES[case]()
    for (name, _), shared in made.items():
        print(name, shared, file=sys.stderr)
    print(*(f"{name}:{count}" for name, count in Counter(name for name, _ in made).items()))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
