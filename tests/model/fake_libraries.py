"""Stand-ins for the libraries that exchange tokens between GPUs: their calls, names of arguments, kinds and shapes as
in their sources, and what they do, between ranks that meet in a `World`: threads of one process, or processes
(`tests/proc/libraries.py`).

Each is strict: an argument of another kind or shape than the library takes fails the test. Nothing here says that the
libraries themselves work.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, all_gather_object


class World:
    """Ranks that call the same things in the same order."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size)
        self.box: list[Any] = [None] * size
        self.calls: list[tuple[int, str]] = []  # rank, what

    def exchange(self, rank: int, what: str, value: Any) -> list[Any]:
        self.calls.append((rank, what))
        self.box[rank] = value
        self.barrier.wait(20.0)
        every = list(self.box)
        self.barrier.wait(20.0)
        return every


def install(put: Callable[[str, ModuleType], None], world: World) -> None:
    """put: where modules are looked up."""

    def module(name: str, **contents: Any) -> None:
        made = ModuleType(name)
        made.__dict__.update(contents)
        put(name, made)

    module("deep_ep", Buffer=type("Buffer", (Buffer,), {"world": world}))
    module("pplx_kernels", AllToAll=type("AllToAll", (AllToAll,), {"world": world}))
    module(
        "pplx_kernels.nvshmem", nvshmem_get_unique_id=lambda: torch.full((128,), 7, dtype=torch.uint8),
        nvshmem_alloc_empty_unique_id=lambda: torch.zeros(128, dtype=torch.uint8), nvshmem_init=joined(world),
    )  # fmt: skip
    module("flashinfer")
    module("flashinfer.comm", Mapping=lambda size, rank, here, tp_size: SimpleNamespace(size=size, rank=rank))
    module(
        "flashinfer.comm.trtllm_alltoall", MnnvlMoe=type("MnnvlMoe", (MnnvlMoe,), {"world": world}),
        MnnvlMemory=SimpleNamespace(initialize=lambda: None),
    )  # fmt: skip


def joined(world: World) -> Any:
    def nvshmem_init(uid: Tensor, rank: int, size: int) -> None:
        assert size == world.size and uid.tolist() == [7] * 128  # the first rank's
        world.exchange(rank, "nvshmem_init", None)

    return nvshmem_init


def check(x: Tensor, dtype: torch.dtype, *shape: int) -> None:
    assert x.dtype == dtype and tuple(x.shape) == shape and x.is_contiguous(), (x.dtype, x.shape, dtype, shape)


class Buffer:
    """deep_ep.Buffer."""

    world: World

    def __init__(
        self, group: ProcessGroup, near: int, far: int, low_latency_mode: bool = False, num_qps_per_rank: int = 24
    ) -> None:
        self.rank, every = group.rank(), [None] * group.size()
        all_gather_object(every, self.rank, group)
        assert every == list(range(self.world.size))
        self.low = low_latency_mode
        assert far == 64 if low_latency_mode else (near, far) == (4096, 2048)

    @staticmethod
    def get_dispatch_config(ranks: int) -> Any:
        return SimpleNamespace(get_nvl_buffer_size_hint=lambda row, n: 4096, get_rdma_buffer_size_hint=lambda row, n: 1)

    @staticmethod
    def get_combine_config(ranks: int) -> Any:
        return SimpleNamespace(get_nvl_buffer_size_hint=lambda row, n: 1, get_rdma_buffer_size_hint=lambda row, n: 2048)

    @staticmethod
    def get_low_latency_rdma_size_hint(most: int, hidden: int, ranks: int, experts: int) -> int:
        return 64

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int) -> tuple[Any, ...]:
        check(topk_idx, torch.int64, len(topk_idx), topk_idx.shape[1])
        self.local = num_experts // self.world.size
        asked = torch.stack([(topk_idx // self.local == r).any(1) for r in range(self.world.size)], 1)
        return asked.sum(0).int(), None, topk_idx.flatten().bincount(minlength=num_experts).int(), asked, None

    def dispatch(
        self, x: Tensor, *, topk_idx: Tensor, topk_weights: Tensor, num_tokens_per_rank: Tensor,
        num_tokens_per_rdma_rank: Tensor | None, is_token_in_rank: Tensor, num_tokens_per_expert: Tensor,
    ) -> tuple[Any, ...]:  # fmt: skip
        assert not self.low
        check(x, torch.bfloat16, len(topk_idx), x.shape[1])
        check(topk_weights, torch.float32, *topk_idx.shape)
        check(is_token_in_rank, torch.bool, len(x), self.world.size)
        self.sent = len(x)
        rows, ids, weights, handle = [], [], [], []
        every = self.world.exchange(self.rank, "dispatch", (x, topk_idx, topk_weights))
        for source, (x1, ids1, w1) in enumerate(every):
            for t in range(len(x1)):
                mine = ids1[t] // self.local == self.rank
                if mine.any():
                    rows.append(x1[t])
                    ids.append(torch.where(mine, ids1[t] - self.rank * self.local, -1))
                    weights.append(torch.where(mine, w1[t], 0.0))
                    handle.append((source, t))
        k = topk_idx.shape[1]
        return (
            torch.stack(rows) if rows else x.new_empty(0, x.shape[1]),
            torch.stack(ids) if rows else topk_idx.new_empty(0, k),
            torch.stack(weights) if rows else topk_weights.new_empty(0, k), [], handle, None,
        )  # fmt: skip

    def combine(self, x: Tensor, handle: list[tuple[int, int]]) -> tuple[Any, ...]:
        check(x, torch.bfloat16, len(handle), x.shape[1])
        sums = torch.zeros(self.sent, x.shape[1])
        for x1, handle1 in self.world.exchange(self.rank, "combine", (x, handle)):
            for row, (source, t) in zip(x1, handle1, strict=True):
                if source == self.rank:
                    sums[t] += row
        return sums.bfloat16(), None, None

    def low_latency_dispatch(
        self, x: Tensor, topk_idx: Tensor, num_max_dispatch_tokens_per_rank: int, num_experts: int, use_fp8: bool = True
    ) -> tuple[Any, ...]:
        assert self.low and not use_fp8 and len(x) <= num_max_dispatch_tokens_per_rank
        check(x, torch.bfloat16, len(topk_idx), x.shape[1])
        check(topk_idx, torch.int64, *topk_idx.shape)
        local, room = num_experts // self.world.size, num_max_dispatch_tokens_per_rank * self.world.size
        found = torch.full((local, room, x.shape[1]), torch.nan).bfloat16()
        counts = torch.zeros(local, dtype=torch.int32)
        handle = {}
        for source, (x1, ids1) in enumerate(self.world.exchange(self.rank, "dispatch", (x, topk_idx))):
            for t, k in torch.cartesian_prod(torch.arange(len(x1)), torch.arange(topk_idx.shape[1])).tolist():
                expert = int(ids1[t, k]) - self.rank * local
                if 0 <= expert < local:
                    found[expert, counts[expert]] = x1[t]
                    handle[expert, int(counts[expert])] = (source, t, k)
                    counts[expert] += 1
        return found, counts, handle, None, None

    def low_latency_combine(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, handle: Any) -> tuple[Any, ...]:
        assert x.dtype == torch.bfloat16 and x.dim() == 3
        check(topk_weights, torch.float32, *topk_idx.shape)
        sums = torch.zeros(len(topk_idx), x.shape[2])
        for x1, handle1 in self.world.exchange(self.rank, "combine", (x, handle)):
            for (expert, row), (source, t, k) in handle1.items():
                if source == self.rank:
                    sums[t] += topk_weights[t, k] * x1[expert, row]
        return sums.bfloat16(), None, None


class AllToAll:
    """pplx_kernels.AllToAll."""

    world: World

    @classmethod
    def internode(cls, **shapes: int) -> AllToAll:
        made = cls()
        made.at = SimpleNamespace(**shapes)
        assert made.at.world_size == cls.world.size and made.at.hidden_dim_bytes == 2 * made.at.hidden_dim
        assert made.at.hidden_dim_scale_bytes == 0
        made.local = made.at.num_experts // made.at.world_size
        made.room = made.at.max_num_tokens * made.at.world_size // made.at.dp_size
        return made

    at: Any
    local: int
    room: int

    def dispatch(
        self, *, out_expert_num_tokens: Tensor, out_expert_x: Tensor, out_expert_x_scale: None, dp_x: Tensor,
        dp_x_scale: None, indices: Tensor, bound_m: Tensor,
    ) -> None:  # fmt: skip
        at = self.at
        check(out_expert_num_tokens, torch.int32, self.local)
        check(out_expert_x, torch.bfloat16, self.local, self.room, at.hidden_dim)
        check(dp_x, torch.bfloat16, len(indices), at.hidden_dim)
        check(indices, torch.uint32, len(dp_x), at.experts_per_token)
        check(bound_m, torch.uint32, 1)
        assert int(bound_m) == len(dp_x) <= at.max_num_tokens
        every = self.world.exchange(at.rank, "dispatch", (dp_x, indices.long()))
        out_expert_x.fill_(torch.nan)
        out_expert_num_tokens.zero_()
        self.places = {}
        for source in range(0, at.world_size, at.dp_size):  # ranks of a lane have the same tokens
            for t, k in torch.cartesian_prod(
                torch.arange(len(every[source][0])), torch.arange(at.experts_per_token)
            ).tolist():
                expert = int(every[source][1][t, k]) - at.rank * self.local
                if 0 <= expert < self.local:
                    row = int(out_expert_num_tokens[expert])
                    out_expert_x[expert, row] = every[source][0][t]
                    self.places[source, t, k] = (expert, row)
                    out_expert_num_tokens[expert] += 1

    places: dict[tuple[int, int, int], tuple[int, int]]

    def combine(
        self, *, out_tokens: Tensor, indices: Tensor, weights: Tensor, expert_y: Tensor, bound_m: Tensor
    ) -> None:
        at = self.at
        check(out_tokens, torch.bfloat16, at.max_num_tokens, at.hidden_dim)
        check(weights, torch.float32, *indices.shape)
        check(expert_y, torch.bfloat16, self.local, self.room, at.hidden_dim)
        sums = torch.zeros(out_tokens.shape)
        for y, places in self.world.exchange(at.rank, "combine", (expert_y, self.places)):
            for (source, t, k), (expert, row) in places.items():
                if source == at.rank // at.dp_size * at.dp_size:
                    sums[t] += weights[t, k] * y[expert, row]
        out_tokens.copy_(sums)


class MnnvlMoe:
    """flashinfer.comm.trtllm_alltoall.MnnvlMoe."""

    world: World

    @staticmethod
    def get_moe_workspaces(mapping: Any, config: Any = None) -> Any:
        return f"workspace of {mapping.rank} among {mapping.size}"

    @staticmethod
    def mnnvl_moe_alltoallv_prepare(
        gathered_target_rank_ids: Tensor, real_rank_token_count_cumsum: None, gathered_expert_ids: Tensor,
        gathered_scales: Tensor, max_token_count_per_rank: int, expert_count: int, top_k: int,
        ep_rank: int, ep_size: int,
    ) -> tuple[Any, Tensor, Tensor]:  # fmt: skip
        rows = ep_size * max_token_count_per_rank
        check(gathered_target_rank_ids, torch.int32, rows, top_k)
        check(gathered_expert_ids, torch.int32, rows, top_k)
        check(gathered_scales, torch.float32, rows, top_k)
        places = [
            (source, t) for source in range(ep_size) for t in range(max_token_count_per_rank)
            if (gathered_target_rank_ids[source * max_token_count_per_rank + t] == ep_rank).any()
        ]  # fmt: skip
        at = [source * max_token_count_per_rank + t for source, t in places]
        ids = torch.full((rows, top_k), -77, dtype=torch.int32)
        scales = torch.full((rows, top_k), torch.nan)
        ids[: len(at)], scales[: len(at)] = gathered_expert_ids[at], gathered_scales[at]
        sums = torch.tensor([sum(source <= r for source, _ in places) for r in range(ep_size)])
        return SimpleNamespace(places=places, rows=rows, recv_rank_count_cumsum=sums), ids, scales

    @classmethod
    def mnnvl_moe_alltoallv(cls, x: Tensor, info: Any, workspace: str, ep_rank: int, ep_size: int) -> Tensor:
        assert workspace == f"workspace of {ep_rank} among {ep_size}"
        check(x, torch.bfloat16, len(x), x.shape[1])
        every = cls.world.exchange(ep_rank, "dispatch", x)
        out = torch.full((info.rows, x.shape[1]), torch.nan).bfloat16()
        for row, (source, t) in enumerate(info.places):
            out[row] = every[source][t]
        return out

    @classmethod
    def mnnvl_moe_alltoallv_combine(
        cls, x: Tensor, info: Any, workspace: str, ep_rank: int, ep_size: int, top_k: int, token_count: int
    ) -> Tensor:
        check(x, torch.bfloat16, info.rows, x.shape[1])
        sums = torch.zeros(token_count, x.shape[1])
        for x1, info1 in cls.world.exchange(ep_rank, "combine", (x, info)):
            for row, (source, t) in enumerate(info1.places):
                if source == ep_rank:
                    sums[t] += x1[row]
        return sums.bfloat16()
