"""`CpuOps`: the native CPU back end. It records a forward pass once, on fixed buffers, and runs the recording.

It owns weights, caches and the team of threads. The rule: after `compile`, a step costs Python one call; everything
that varies from step to step is read by the kernels from the `Batch`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from planaria.config.machine import usable_cores
from planaria.errors import ConfigError
from planaria.kernels.cpu import caches, layout
from planaria.kernels.cpu import experts as mixture
from planaria.kernels.cpu.build import load, packed_kernels, target_for
from planaria.kernels.cpu.lora_rows import LoraPair, LoraRows
from planaria.kernels.cpu.memory import Arena
from planaria.kernels.cpu.pack import Packed, blank, form_of, pack, up
from planaria.kernels.cpu.recorded import RecordedOps
from planaria.kernels.cpu.recorder import Recorder, Rope, Vector
from planaria.kernels.cpu.running import runner
from planaria.kernels.cpu.tape import Act
from planaria.kernels.cpu.team import Team
from planaria.kernels.numbers import to_float32
from planaria.kernels.ops import Batch, CacheMemory, PartMemory, Quantized, Rows
from planaria.mesh.all2all import All2All
from planaria.mesh.comm import Comm, NativeComm, Solo


class CpuOps:
    """dtype: of activations, weights and cache; the residual stream is float32.

    threads: all that work, the caller's own included. cache_dir: where compiled kernels are kept (default
    ~/.cache/planaria). isa: an instruction level below the machine's own, for tests. One step at a time; `close`
    ends its threads. tp: the tensor ranks that hold the other parts; where they share memory
    (shared.py), all that passes between them happens inside the native call, otherwise the recording is run in pieces.
    """

    def __init__(
        self, dtype: str, threads: int, cache_dir: Path | None = None, *, isa: str | None = None, tp: Comm | None = None
    ) -> None:
        if dtype not in ("bfloat16", "float32"):
            raise ConfigError("--dtype", dtype, "the CPU kernels compute in bfloat16 or float32")
        if threads < 1:
            raise ConfigError("--threads", threads, "at least one thread is needed")
        self.target = target_for(dtype, isa)
        self.dtype = dtype
        self._arena = Arena()
        self._biases: dict[int, npt.NDArray[np.float32]] = {}  # of blank weights: zeros, by bytes
        self._entry = load(self.target, cache_dir)
        self._kinds = functools.partial(packed_kernels, self.target, cache_dir)
        self._team = Team(self._entry, threads)
        self._most = max(threads, usable_cores())  # threads that a recording has memory for
        self.join(tp or Solo())
        self._zeros = self._arena.take(layout.ZERO_BYTES)
        self.kv_part: CacheMemory | None = None
        self.part: PartMemory | None = None  # where what is packed from now on is; None: in this process's own memory

    @property
    def threads(self) -> int:
        return self._team.threads

    def use_threads(self, threads: int) -> None:
        threads = min(threads, self._most)
        if threads != self._team.threads:
            self._team.close()
            self._team = Team(self._entry, threads)

    def join(self, tp: Comm, lanes: All2All | None = None, cp: Comm | None = None) -> None:
        self.tp, self.lanes, self.cp = tp, lanes, cp or tp
        if tp.port and cast(NativeComm, tp).lanes > self.threads:
            raise ValueError(f"{cast(NativeComm, tp).lanes} lanes of a shared group for {self.threads} threads")

    def leave(self) -> None:
        """Nothing computes beside steps."""

    # Loading

    def pack(self, weight: Rows | Quantized, bias: npt.NDArray[Any] | None = None) -> Packed:
        """A weight [N, K] and bias [N] as the kernels read it; a `Quantized` keeps its codes and float16 scales."""
        return pack(weight, bias, self.target, self.part or self._arena, self.threads, self._kinds)

    def vector(self, values: npt.NDArray[Any]) -> Vector:
        """A norm's weight [K], in float32."""
        length = values.size
        out = (self.part or self._arena).take(up(length, 16) * 4).view(np.float32)
        out[:length] = to_float32(values)
        return Vector(out, length)

    def rope_table(self, cos: npt.NDArray[np.float32], sin: npt.NDArray[np.float32]) -> Rope:
        """cos, sin [max_position, rotary_dim / 2]."""
        both = [np.ascontiguousarray(table) for table in (cos, sin)]
        if self.part is not None:
            for i, table in enumerate(both):
                both[i] = self.part.take(table.nbytes).view(np.float32).reshape(table.shape)
                both[i][:] = table
        return Rope(*both)

    def kv_layer(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> caches.PagedKV:
        """One layer's paged cache. block_size: a multiple of 16; head_dim: a multiple of 16 up to 256."""
        size = self.kv_block_bytes(block_size, num_kv_heads, head_dim)
        return caches.PagedKV(caches.paged(num_blocks, size, self.kv_part), block_size, num_kv_heads, head_dim, size)

    def mla_layer(self, num_blocks: int, block_size: int, width: int) -> caches.PagedLatents:
        """One layer's paged latents. block_size and width: multiples of 16."""
        size = self.mla_block_bytes(block_size, width)
        return caches.PagedLatents(caches.paged(num_blocks, size, self.kv_part), block_size, width, size)

    def kv_block_bytes(self, block_size: int, num_kv_heads: int, head_dim: int) -> int:
        return caches.kv_elements(block_size, num_kv_heads, head_dim) * self.target.item

    def mla_block_bytes(self, block_size: int, width: int) -> int:
        return caches.latent_elements(block_size, width) * self.target.item

    def lora_table(self, parts: Sequence[range], rank: int, slots: int) -> LoraRows:
        return LoraRows(parts, rank, slots, self.target, self._arena)

    def put_lora(self, table: LoraRows, slot: int, pairs: Sequence[LoraPair | None]) -> None:
        table.put(slot, pairs)

    def group(self, experts: Sequence[tuple[Packed, Packed]]) -> mixture.ExpertTable:
        return mixture.group(experts)

    def put(self, experts: mixture.ExpertTable, slot: int, expert: tuple[Packed, Packed]) -> None:
        experts.put(slot, *expert)

    def read_loads(self) -> None:
        """Each step has told them."""

    def form(self, weight: Packed) -> tuple[int, ...]:
        return form_of(weight)

    def blank(self, form: Sequence[int]) -> Packed:
        size = form[3] * 64  # of its panels; a recording has the address, so it stays
        if size not in self._biases:
            self._biases[size] = self._arena.take(size).view(np.float32)
        return blank(form, self._biases[size], self._arena)

    def memory(self, weight: Packed) -> npt.NDArray[np.uint8]:
        return weight.data

    def release(self, weight: Packed) -> None:
        self._arena.give_back(weight.data)

    # Running

    def compile(
        self, forward: Callable[[Any], Act | tuple[Act, ...]], batch: Batch, lanes: All2All | None = None
    ) -> Callable[[], Any]:  # fmt: skip
        """Record `forward`; a function that runs it on what `batch` then holds.

        Its result [rows, columns] is a view of the recording's own buffer: valid until the next run. Rows are the
        step's samples after `take`, else its tokens.
        """
        recorder = Recorder(batch, self.target, self.tp, lanes or self.lanes, self._most, self._kinds, self.cp)
        recorder.own(self._zeros)
        try:
            result = forward(RecordedOps(recorder))
        finally:
            recorder.open = False
        return runner(recorder, result, lambda: self._team, int(self._zeros.ctypes.data))

    def give_up_weights(self) -> None:
        """Others come. Results and caches handed out stay valid while they are held."""
        self._arena.clear()
        self._biases.clear()
        self._zeros = self._arena.take(layout.ZERO_BYTES)

    def close(self) -> None:
        """End threads and give up weights. Results and caches handed out stay valid while they are held."""
        self._team.close()
        self._arena.clear()
