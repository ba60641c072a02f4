"""The operations of a model on a GPU: the definition's (reference.py), with kernels in place of what costs there.

Rule: a step reads its inputs at addresses that stay, and nothing in it waits for the device or looks at a value, so
that it can be recorded. What has no kernel here is done as the definition does it. Not run on hardware: tested in
Triton's interpreter, on the CPU.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from planaria.kernels.gpu import fused
from planaria.kernels.gpu.attention import Need, Way, by_triton, way_for
from planaria.kernels.gpu.draw import Drawer, Others
from planaria.kernels.gpu.expert_ops import ExpertKernels
from planaria.kernels.gpu.graphs import CudaRecorder, StepGraphs, StepRecorder, StepShape, shape_of
from planaria.kernels.gpu.lora import LoraPointers
from planaria.kernels.gpu.packed import FEW_ROWS, DevicePacked, pack
from planaria.kernels.gpu.step import DeviceStep, Places, lay_out
from planaria.kernels.ops import Array, AttentionKind, Batch, Quantized, Rows
from planaria.kernels.reference import SlotKV, SlotLatents, StepTensors
from planaria.kernels.reference_linear import LowRank
from planaria.mesh.all2all import All2All
from planaria.mesh.comm import Comm
from planaria.models.shard import ContextGroup

logger = logging.getLogger("planaria.kernels")


def _logits(out: Any) -> Tensor:
    """Of what a forward pass gives."""
    found: Tensor = out[0] if isinstance(out, tuple) else out
    return found.contiguous()


class GpuOps(ExpertKernels):
    """`Ops` by Triton and torch. device: torch's; "cpu" where Triton's interpreter runs."""

    float8 = True  # weights of 8 bits stay so

    def __init__(self, device: str = "cuda", dtype: str = "float32", tp: Comm | None = None) -> None:
        super().__init__(device, dtype, tp)
        self._owed: tuple[Tensor, Tensor] | None = None  # a residual, and what is still to be added to it
        self._block_size = 1
        self.ways: dict[Need, Way] = {}  # of attention, that were asked for
        self.recorder: StepRecorder | None = None  # of steps; None: they are not recorded
        self.drawer: Drawer | None = None  # that draws in a recorded step
        self.graphs: list[StepGraphs] = []  # of functions that were compiled since ranks joined

    @classmethod
    def recording(cls, device: str, dtype: str, *, graphs: bool) -> GpuOps:
        """With recorded steps, where the platform has such."""
        new = cls(device, dtype)
        if graphs:
            new.recorder = CudaRecorder()
        return new

    def drawer_of(self, lines: int, size: int, others: Others | None = None) -> Drawer:
        """What draws from now on, also in recordings. others: see Drawer."""
        self.drawer = Drawer(lines, size, self.device, others)
        return self.drawer

    # Loading

    def pack(self, weight: Rows | Quantized, bias: npt.NDArray[Any] | None = None) -> Any:
        if isinstance(weight, Quantized):
            return pack(weight, bias, self.dtype, self.device)
        return super().pack(weight, bias)

    def kv_layer(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> SlotKV:
        self._block_size = block_size
        return super().kv_layer(num_blocks, block_size, num_kv_heads, head_dim)

    def mla_layer(self, num_blocks: int, block_size: int, width: int) -> SlotLatents:
        self._block_size = block_size
        return super().mla_layer(num_blocks, block_size, width)

    def lora_table(self, parts: Sequence[range], rank: int, slots: int) -> Any:
        return LoraPointers(parts, rank, slots, self.device)

    def put_lora(self, table: Any, slot: int, pairs: Sequence[tuple[Array, Array] | None]) -> None:
        kept = [pair and (self._keep(pair[0], self.dtype), self._keep(pair[1], self.dtype)) for pair in pairs]
        table.put(slot, kept)

    # A step

    def begin(self, batch: Batch, places: Any) -> StepTensors:
        self.refresh_slots()
        step = DeviceStep(batch, places, self._block_size, fused.put)
        if batch.follows:
            assert self.drawer is not None
            self.drawer.follow(step.tokens, step.drawn_at)
        return step

    def places(self, batch: Batch, most: int | None = None) -> Places:
        return Places(batch, self.device, most)

    def join(self, tp: Comm, lanes: All2All | None = None, cp: Comm | None = None) -> None:
        super().join(tp, lanes, cp)
        self.leave()

    def close(self) -> None:
        self.leave()
        super().close()

    def leave(self) -> None:
        while self.graphs:
            self.graphs.pop().close()

    def compile(
        self, forward: Callable[[Any], Any], batch: Batch, lanes: All2All | None = None
    ) -> Callable[[], Array]:  # fmt: skip
        run = super().compile(forward, batch, lanes)
        staged = self.tp.size > 1 and self.tp.device == "cpu" and self.device.type != "cpu"
        if self.recorder is None or lanes is not None or self.spread or staged or batch.step is not batch:
            return run
        return self._played(run, forward, batch)

    def _played(self, run: Callable[[], Array], forward: Callable[[Any], Any], batch: Batch) -> Callable[[], Array]:
        """`run`, or a recording of the same."""
        tokens = min(batch.max_tokens, batch.max_samples)  # of a step that is recorded
        places, spare = self.places(batch, tokens), self.places(batch, tokens)
        most = batch.block_table.shape[1] * self._block_size

        def make(shape: StepShape) -> Callable[[], Any]:
            own = copy.copy(self)
            own._owed = None
            nobody = Batch(1, 1, 1, 1)
            lay_out(nobody, spare, self._block_size, shape.rows, shape.each, 1)
            if places.hidden is not None:  # its own, for layers add to it in place, and steps go on beside
                spare.hidden = places.hidden.new_zeros(shape.rows * shape.each, places.hidden.shape[1])
            own._step = DeviceStep.recorded(spare, fused.put, shape[:3])
            own.drawer = self.drawer.spare() if self.drawer is not None else None
            own._record(forward, shape)  # compiles what isn't yet, and stores nothing
            own.drawer = self.drawer
            own._step = DeviceStep.recorded(places, fused.put, shape[:3])
            return lambda: own._record(forward, shape)

        def choice(shape: StepShape) -> Callable[[], None]:
            """By itself, where others are met: they know nothing of what draws."""
            out, drawer = graphs.ready[shape._replace(draws=False, cuts=False)][1], self.drawer
            assert drawer is not None
            drawer.spare().draw(_logits(out), cuts=shape.cuts)
            return lambda: drawer.draw(_logits(out), cuts=shape.cuts)

        assert self.recorder is not None
        beside = self.recorder.beside
        graphs = StepGraphs(self.recorder, make, beside=beside and self.tp.size == 1)
        choices = StepGraphs(self.recorder, choice, beside=beside)
        self.graphs += [graphs, choices]

        def step() -> Array:  # without torch's inference mode, which takes 4 us to begin: what computes is in it
            found_shape, drawer = shape_of(batch, most), self.drawer
            if found_shape is None:
                return run()
            shape, longest = found_shape
            draws = drawer is not None and drawer.rows is not None and shape.each == 1
            drawn = StepShape(*shape[:3], draws, draws and drawer is not None and drawer.cuts)
            places.take_hidden(batch)
            found = graphs.find(drawn if self.tp.size == 1 else shape)
            if found is None:
                return run()
            self.refresh_slots()
            own = lay_out(batch, places, self._block_size, shape.rows, shape.each, longest)
            play, out = found
            play()
            if draws and drawer is not None:
                after = choices.find(drawn) if self.tp.size > 1 else (lambda: None, None)
                if after is not None:
                    after[0]()
                    drawer.drawn = True
            return tuple(each[own] for each in out) if isinstance(out, tuple) else out[own]

        return step

    def _record(self, forward: Callable[[Any], Any], shape: StepShape) -> Any:
        if self.drawer is not None:
            self.drawer.follow(self._device_step.tokens, self._device_step.drawn_at)
        out = forward(self)
        self.settle()
        if shape.draws and self.drawer is not None:
            self.drawer.draw(_logits(out), cuts=shape.cuts)
        return out

    def settle(self) -> None:
        """Add what is owed."""
        if self._owed is not None:
            (residual, y), self._owed = self._owed, None
            residual.add_(y)

    def _paid(self, x: Any) -> Any:
        if self._owed is not None and self._owed[0] is x:
            self.settle()
        return x

    # Forward

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        add = None
        if self._owed is not None and self._owed[0] is x:
            add, self._owed = self._owed[1], None
        return fused.rms_norm(x if add is not None else x.contiguous(), weight, eps, self.dtype, add)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        return super().layer_norm(self._paid(x), weight, bias, eps)

    def linear(
        self, x: Tensor, weight: Any, residual: Tensor | None = None, *, reduce: bool = False,
        lora: LowRank | None = None,
    ) -> Tensor:  # fmt: skip
        """With a residual the sum is owed until the residual is asked for: mostly by its norm, which adds it on the
        way."""
        if residual is None:
            return super().linear(x, weight, reduce=reduce, lora=lora)
        y = self._product(x, weight, lora)
        if reduce and self.tp.size > 1:
            y = y.float()
            self.tp.all_reduce(self._shared(y))
        self.settle()
        self._owed = residual, y.contiguous()
        return residual

    def linear_norm(
        self, x: Tensor, weight: Any, norm: Tensor, eps: float, residual: Tensor, *, lora: LowRank | None = None
    ) -> Tensor:
        return super().linear_norm(x, weight, norm, eps, self._paid(residual), lora=lora)

    def rope_store(
        self, qkv: Tensor, kv: SlotKV, rope: tuple[Tensor, Tensor],
        num_heads: int, num_kv_heads: int, head_dim: int,
        q_norm: Tensor | None = None, k_norm: Tensor | None = None, eps: float = 0.0,
    ) -> Tensor:  # fmt: skip
        return fused.rope_store(
            qkv.contiguous(), (kv.keys, kv.values), rope, (self.step.step_positions, self.step.slots), num_heads,
            num_kv_heads, head_dim, q_norm, k_norm, eps,
        )  # fmt: skip

    def gated(self, gate_up: Tensor, kind: str = "silu") -> Tensor:
        return fused.gated(gate_up.contiguous(), kind, self.dtype)

    def attend(
        self, q: Tensor, kv: SlotKV, num_heads: int, num_kv_heads: int, head_dim: int, scale: float,
        window: int | None = None, cap: float = 0.0, sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        need = self._need(num_heads, num_kv_heads, head_dim, kv.block_size, 0, cap, window, sinks is not None)
        attend = self._way(need).attend
        if attend is None:
            return super().attend(q, kv, num_heads, num_kv_heads, head_dim, scale, window, cap, sinks)
        return attend(q.view(-1, num_heads, head_dim), kv, need, self.step, scale, sinks).flatten(1)

    def mla_attend(self, q: Tensor, kv: SlotLatents, num_heads: int, rank: int, scale: float) -> Tensor:
        need = self._need(num_heads, 1, q.shape[1] // num_heads, kv.block_size, rank)
        attend = self._way(need).attend
        if attend is None:
            return super().mla_attend(q, kv, num_heads, rank, scale)
        return attend(q.view(-1, num_heads, need.dim), kv, need, self.step, scale, None).flatten(1)

    def attend_part(
        self, q: Tensor, kv: Any, num_heads: int, num_kv_heads: int, head_dim: int, scale: float, group: ContextGroup,
        window: int | None = None, cap: float = 0.0,
    ) -> Tensor:  # fmt: skip
        need = self._need(num_heads, num_kv_heads, head_dim, kv.block_size, 0, cap, window, part=True)
        if self._way(need).attend is None:
            return super().attend_part(q, kv, num_heads, num_kv_heads, head_dim, scale, group, window, cap)
        q = q.view(-1, num_heads, head_dim)
        return by_triton(q, kv, need, self._device_step, scale, None, group.stripes).flatten(1)

    def mla_attend_part(
        self, q: Tensor, kv: Any, num_heads: int, rank: int, scale: float, group: ContextGroup
    ) -> Tensor:  # fmt: skip
        need = self._need(num_heads, 1, q.shape[1] // num_heads, kv.block_size, rank, part=True)
        if self._way(need).attend is None:
            return super().mla_attend_part(q, kv, num_heads, rank, scale, group)
        q = q.view(-1, num_heads, need.dim)
        return by_triton(q, kv, need, self._device_step, scale, None, group.stripes).flatten(1)

    def combine(self, y: Tensor, residual: Tensor) -> Tensor:
        return super().combine(y, self._paid(residual))

    def take(self, x: Tensor) -> Tensor:
        return super().take(self._paid(x))

    def logits(
        self, x: Tensor, weight: Any, vocab: range | None = None, size: int | None = None, cap: float = 0.0
    ) -> Tensor:  # fmt: skip
        """Products of the activation dtype are summed in float32, and not rounded."""
        if isinstance(weight, DevicePacked) and len(x) <= FEW_ROWS:
            out = weight.product(x.to(self.dtype), torch.float32)
        elif self.device.type != "cuda" or self.dtype == torch.float32:
            return super().logits(x, weight, vocab, size, cap)
        else:
            out = torch.mm(x.to(self.dtype), weight.weight.T, out_dtype=torch.float32)
        return self._finished(out, vocab, size, cap)

    def choose_attention(self, kinds: Iterable[AttentionKind]) -> list[str]:
        page = self._block_size
        needs = [
            self._need(own.heads, own.kv_heads, own.dim, page, own.rank, own.cap, own.window, own.sunk, own.part)
            for own in kinds
        ]
        return list(dict.fromkeys(self._way(need).name for need in needs))

    @property
    def _device_step(self) -> DeviceStep:
        assert isinstance(self.step, DeviceStep)
        return self.step

    def _need(
        self, heads: int, kv_heads: int, dim: int, page: int, rank: int, cap: float = 0.0, window: int | None = None,
        sunk: bool = False, part: bool = False,
    ) -> Need:  # fmt: skip
        return Need(self.device.type, self.dtype, heads, kv_heads, dim, page, rank, cap, window, sunk, part)

    def _way(self, need: Need) -> Way:
        found = self.ways.get(need)
        if found is None:
            found = self.ways[need] = way_for(need)
            kind = f"{need.heads} heads of {need.dim}" + (f", window {need.window}" if need.window else "")
            logger.info("attention (%s): %s%s", kind, found.name, "".join(f"; not {why}" for why in found.refused))
        return found
