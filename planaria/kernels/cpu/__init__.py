"""The CPU back end: `CpuOps` records a model's forward pass as a tape; native kernels on a team of threads run it.

ops.py and recorded.py record, with what recorder.py and tape.py keep · fields.py declares the operations of a tape ·
program.py runs one (integer Python, compiled by compiler.py) · micro.py, packed.py, superblocks.py, twofold.py,
unpack.py, rounded.py and vector.py are its kernels (LLVM IR, written through emit.py) · build.py compiles and loads
them · running.py and team.py run recordings, on threads · pack.py, caches.py and memory.py own weights and caches.
"""
