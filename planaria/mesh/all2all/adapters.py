"""All-to-all by libraries for GPUs: pplx-kernels, DeepEP (two modes), FlashInfer. Thin: shapes in, shapes out.

Not run on hardware: no such device was at hand, so the tests know the libraries' calls and shapes from their sources
alone. What each needs of a package, a device and shapes is checked before anything starts (`planaria.config.all2all`).
A library is imported when its adapter is made.

Rule: what comes out of `dispatch` is rows in the form that experts take: hidden values, the slots each row is for and
their weights. A row, or a place of one, that carries nothing names a slot of another rank and weighs 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from planaria.mesh.all2all.plain import share, tell

if TYPE_CHECKING:
    import torch

    from planaria.mesh.all2all import Shapes


class Library:
    """What the four have in common. Slots divide the group's ranks evenly."""

    shares_tokens = True  # each tensor rank sends its part of the lane's tokens

    def __init__(self, group: Any, shapes: Shapes) -> None:
        size: int = group.size
        self.group, self.shapes, self.size = group, shapes, size
        self.lanes = size // shapes.width
        self.local = shapes.num_slots // size
        self.first: int = group.rank * self.local  # of this rank's slots
        self.elsewhere = (self.first + self.local) % shapes.num_slots
        self.most = -(-shapes.max_tokens // shapes.width) if self.shares_tokens else shapes.max_tokens
        self.handle: Any = None

    def begin(self, num_tokens: int) -> int:
        return self.count(())

    def tell(self, number: int) -> list[int]:
        return tell(self.group, number)[:: self.shapes.width]

    def count(self, counts: Sequence[int]) -> int:
        """The number of rows is a bound, the same in every step: the library counts on the device."""
        return self.size * self.most

    def part(self, num_tokens: int, rank: int | None = None) -> slice:
        """The tokens of the lane that a rank sends."""
        if not self.shares_tokens:
            return slice(0, num_tokens)
        place = (self.group.rank if rank is None else rank) % self.shapes.width
        return slice(*(num_tokens * at // self.shapes.width for at in (place, place + 1)))

    def fill(self, into: Sequence[torch.Tensor], count: int, *found: torch.Tensor) -> None:
        """The first rows are those found, the others carry nothing."""
        for to, rows in zip(into, found, strict=True):
            to[:count].copy_(rows[:count])
        into[1][count:] = self.elsewhere
        into[2][count:] = 0

    def share(self, out: torch.Tensor) -> None:
        """Each tensor rank has its part of the lane's sums: all get all."""
        if self.shares_tokens and self.shapes.width > 1:
            share(self.group, self.shapes.width, lambda rank: out[self.part(len(out), rank)])


class Batched(Library):
    """Libraries that bring each expert's tokens one after the other, room for all that may come, and weigh the results
    when they take them back."""

    @property
    def room(self) -> int:
        """Rows of an expert."""
        return self.most * (self.size if self.shares_tokens else self.lanes)

    def count(self, counts: Sequence[int]) -> int:
        return self.local * self.room

    def label(self, into: Sequence[torch.Tensor], counts: torch.Tensor) -> None:
        """Each row is for the expert it lies with; its weight comes later."""
        import torch

        slots, weights = (part.view(self.local, self.room, -1) for part in into[1:])
        taken = torch.arange(self.room, device=counts.device) < counts.view(-1, 1)
        own = torch.arange(self.first, self.first + self.local, device=counts.device).view(-1, 1)
        slots.fill_(self.elsewhere)
        slots[:, :, 0] = torch.where(taken, own, self.elsewhere).to(slots.dtype)
        weights.zero_()
        weights[:, :, 0] = taken

    def of_experts(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(self.local, self.room, -1)


class Pplx(Batched):
    """pplx-kernels over NVSHMEM. It knows that tensor ranks have the same tokens."""

    shares_tokens = False

    def __init__(self, group: Any, shapes: Shapes) -> None:
        super().__init__(group, shapes)
        library, shmem = import_module("pplx_kernels"), import_module("pplx_kernels.nvshmem")
        meeting = shmem.nvshmem_get_unique_id() if group.rank == 0 else shmem.nvshmem_alloc_empty_unique_id()
        group.broadcast(meeting, 0)
        shmem.nvshmem_init(meeting, group.rank, group.size)
        self.kernels = library.AllToAll.internode(
            max_num_tokens=shapes.max_tokens, num_experts=shapes.num_slots, experts_per_token=shapes.top_k,
            rank=group.rank, world_size=group.size, dp_size=shapes.width, hidden_dim=shapes.hidden_size,
            hidden_dim_bytes=2 * shapes.hidden_size, hidden_dim_scale_bytes=0,
        )  # fmt: skip

    def dispatch(self, parts: Sequence[torch.Tensor], into: Sequence[torch.Tensor]) -> None:
        import torch

        hidden, slots, weights = parts
        counts = torch.empty(self.local, dtype=torch.int32, device=hidden.device)
        indices = slots.to(torch.uint32)
        bound = torch.tensor([len(hidden)], dtype=torch.uint32, device=hidden.device)
        self.kernels.dispatch(
            out_expert_num_tokens=counts, out_expert_x=self.of_experts(into[0]), out_expert_x_scale=None,
            dp_x=hidden, dp_x_scale=None, indices=indices, bound_m=bound,
        )  # fmt: skip
        self.label(into, counts)
        self.handle = indices, weights, bound

    def combine(self, y: torch.Tensor, out: torch.Tensor) -> None:
        import torch

        indices, weights, bound = self.handle
        shapes = self.shapes
        sums = torch.empty(shapes.max_tokens, shapes.hidden_size, dtype=torch.bfloat16, device=y.device)
        self.kernels.combine(
            out_tokens=sums, indices=indices, weights=weights, expert_y=self.of_experts(y.bfloat16()), bound_m=bound
        )
        out.copy_(sums[: len(out)])


class DeepEPLowLatency(Batched):
    """DeepEP's kernels for few tokens: every rank keeps room for all tokens of all."""

    def __init__(self, group: Any, shapes: Shapes) -> None:
        super().__init__(group, shapes)
        buffer = import_module("deep_ep").Buffer
        size = buffer.get_low_latency_rdma_size_hint(self.most, shapes.hidden_size, group.size, shapes.num_slots)
        self.buffer = buffer(group.process_group, 0, size, low_latency_mode=True, num_qps_per_rank=self.local)

    def dispatch(self, parts: Sequence[torch.Tensor], into: Sequence[torch.Tensor]) -> None:
        hidden, slots, weights = (part[self.part(len(part))] for part in parts)
        ids = slots.long()
        found, counts, handle, *_ = self.buffer.low_latency_dispatch(
            hidden, ids, self.most, self.shapes.num_slots, use_fp8=False
        )
        self.of_experts(into[0]).copy_(found)
        self.label(into, counts)
        self.handle = ids, weights, handle

    def combine(self, y: torch.Tensor, out: torch.Tensor) -> None:
        ids, weights, handle = self.handle
        sums, *_ = self.buffer.low_latency_combine(self.of_experts(y.bfloat16()), ids, weights, handle)
        out[self.part(len(out))].copy_(sums)
        self.share(out)


class DeepEPHighThroughput(Library):
    """DeepEP's kernels for many tokens: a token goes once to each rank that has any of its experts."""

    def __init__(self, group: Any, shapes: Shapes) -> None:
        super().__init__(group, shapes)
        buffer = import_module("deep_ep").Buffer
        row = 2 * shapes.hidden_size  # bytes
        hints = [make(group.size) for make in (buffer.get_dispatch_config, buffer.get_combine_config)]
        near = max(hint.get_nvl_buffer_size_hint(row, group.size) for hint in hints)
        far = max(hint.get_rdma_buffer_size_hint(row, group.size) for hint in hints)
        self.buffer = buffer(group.process_group, near, far)

    def dispatch(self, parts: Sequence[torch.Tensor], into: Sequence[torch.Tensor]) -> None:
        hidden, slots, weights = (part[self.part(len(part))] for part in parts)
        ids = slots.long()
        per_rank, per_node, per_expert, asked, _ = self.buffer.get_dispatch_layout(ids, self.shapes.num_slots)
        found, own, weights, _, self.handle, _ = self.buffer.dispatch(
            hidden, topk_idx=ids, topk_weights=weights, num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node, is_token_in_rank=asked, num_tokens_per_expert=per_expert,
        )  # fmt: skip
        own = (own + self.first).masked_fill(own < 0, self.elsewhere)  # they are counted within the rank, -1: another's
        self.fill(into, len(found), found, own, weights)
        self.received = len(found)

    def combine(self, y: torch.Tensor, out: torch.Tensor) -> None:
        sums, *_ = self.buffer.combine(y[: self.received].bfloat16(), self.handle)
        out[self.part(len(out))].copy_(sums)
        self.share(out)


class FlashInfer(Library):
    """FlashInfer's exchange through memory that all devices see (NVLink). It sets its workspace up by itself."""

    def __init__(self, group: Any, shapes: Shapes) -> None:
        import torch

        super().__init__(group, shapes)
        library = import_module("flashinfer.comm")
        alltoall = import_module("flashinfer.comm.trtllm_alltoall")
        mapping = library.Mapping(group.size, group.rank, torch.cuda.device_count(), tp_size=group.size)
        alltoall.MnnvlMemory.initialize()
        self.moe = alltoall.MnnvlMoe
        self.workspace = self.moe.get_moe_workspaces(mapping)

    def dispatch(self, parts: Sequence[torch.Tensor], into: Sequence[torch.Tensor]) -> None:
        hidden, slots, weights = (part[self.part(len(part))] for part in parts)
        shapes, size, rank = self.shapes, self.group.size, self.group.rank
        ids = self._gathered(slots.int(), shapes.num_slots)  # a place without a token asks for a rank that isn't there
        weighed = self._gathered(weights, 0)
        info, found, weights = self.moe.mnnvl_moe_alltoallv_prepare(
            ids // self.local, None, ids, weighed, self.most, shapes.num_slots, shapes.top_k, rank, size
        )
        rows = self.moe.mnnvl_moe_alltoallv(hidden, info, self.workspace, rank, size)
        self.fill(into, int(info.recv_rank_count_cumsum[-1]), rows, found, weights)
        self.handle = info, len(hidden)

    def combine(self, y: torch.Tensor, out: torch.Tensor) -> None:
        info, count = self.handle
        group = self.group
        sums = self.moe.mnnvl_moe_alltoallv_combine(
            y.bfloat16(), info, self.workspace, group.rank, group.size, self.shapes.top_k, count
        )
        out[self.part(len(out))].copy_(sums)
        self.share(out)

    def _gathered(self, mine: torch.Tensor, nothing: int) -> torch.Tensor:
        """[ranks x most, K]: every rank's."""
        every = mine.new_full((self.group.size, self.most, mine.shape[1]), nothing)
        every[self.group.rank, : len(mine)] = mine
        for rank in range(self.group.size):
            self.group.broadcast(every[rank], rank)
        return every.flatten(0, 1)
