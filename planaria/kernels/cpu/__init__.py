"""The CPU back end: `CpuOps` records a model's forward pass as a tape and runs it with native kernels on a team of threads.

ops.py records · program.py runs the tape (Numba) · micro.py and vector.py are its kernels (LLVM IR) · build.py
compiles and caches them · team.py owns the threads · pack.py and memory.py own the weights.
"""

from planaria.kernels.cpu.ops import CpuOps

__all__ = ["CpuOps"]
