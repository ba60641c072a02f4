"""Kernels for GPUs made into a device's code, without a device: `python -O -m tests.model.gpu_compiled sm_90 CASE`.

The cases are those of gpu_cases.py, with launches that compile and compute nothing; so their results mean nothing, and
-O drops what is said of them. Prints each kernel's name and in how many forms it was made.
"""

# mypy: disable-error-code="no-untyped-def, import-untyped, attr-defined, assignment"

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from planaria.kernels.gpu import attention
from tests.model import gpu_cases

TARGETS = {"sm_90": GPUTarget("cuda", 90, 32), "gfx942": GPUTarget("hip", "gfx942", 64)}
POINTERS = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int32: "*i32",
    torch.int64: "*i64", torch.uint8: "*u8", torch.int8: "*i8",
}  # fmt: skip
OPTIONS = ("enable_fp_fusion",)


def kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return POINTERS[value.dtype]
    return "i32" if isinstance(value, int) else "fp32"


def main(target: str, cases: list[str]) -> None:
    made = dict[tuple[str, str], str]()

    def launch(kernel: Any, *args: Any, grid: Any = None, warmup: bool = False, **named: Any) -> None:
        options = {name: named.pop(name) for name in OPTIONS if name in named}
        values = dict(zip((each.name for each in kernel.params), args, strict=False)) | named
        fixed = {(each.num,): values[each.name] for each in kernel.params if each.is_constexpr}
        kinds = {each.name: "constexpr" if each.is_constexpr else kind(values[each.name]) for each in kernel.params}
        if (key := (kernel.__name__, f"{kinds} {fixed}")) not in made:
            triton.compile(ASTSource(kernel, kinds, fixed), target=TARGETS[target], options=options)
            made[key] = kernel.__name__

    JITFunction.run = launch
    attention._WAYS = (("Triton", lambda need: "", attention.by_triton),)
    gpu_cases.same = lambda *_: None
    with torch.inference_mode():
        for case in cases:
            gpu_cases.CASES[case]()
    print(*(f"{name}:{count}" for name, count in Counter(made.values()).items()))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
