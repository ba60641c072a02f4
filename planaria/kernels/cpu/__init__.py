"""The CPU back end: `CpuOps` records a model's forward pass as a tape; native kernels on a team of threads run it.

ops.py and tape.py record · program.py runs the tape (integer Python, compiled by compiler.py) · micro.py and
vector.py are its kernels (LLVM IR, written through emit.py) · build.py compiles and caches them · team.py owns the
threads · pack.py and memory.py own the weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planaria.kernels.cpu.ops import CpuOps

__all__ = ["CpuOps"]


def __getattr__(name: str) -> Any:
    """Import on first use: `warm` compiles kernels without torch."""
    if name == "CpuOps":
        from planaria.kernels.cpu.ops import CpuOps

        return CpuOps
    raise AttributeError(f"module 'planaria.kernels.cpu' has no attribute {name!r}")
