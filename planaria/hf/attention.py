"""Transformers' attention interface, answered by a paged cache.

A model is run on one row of all tokens of a step, sequence after sequence, at their own positions. Its layers hand over
queries, keys and values, and as their mask what Transformers' mask functions were asked for: which key a query sees, by
position. Rule: what is handed over is honoured, or refused by its name; nothing is left out in silence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from planaria.errors import ModelError
from planaria.kernels.cpu.caches import PagedKV
from planaria.kernels.cpu.direct import DirectAttention, DirectOps, takes
from planaria.kernels.reference import SequenceGroup, SlotKV, StepTensors, TorchOps, attended
from planaria.models.config import AttendingLayer

NAME = "planaria"
PLAIN = {  # what says nothing more than the mask does, or nothing that a step changes
    "cache_position", "dropout", "is_causal", "logits_to_keep", "output_attentions", "output_hidden_states",
    "output_router_logits", "position_embeddings", "position_ids", "return_dict", "sliding_window", "use_cache",
}  # fmt: skip

LOOKED = 64  # positions that a mask is tried on
NEIGHBOURS = 16  # and at each place of a long text
Sees = Callable[[Any, Any, Tensor, Tensor], Tensor]  # row, head, positions of queries, of keys -> bool


class Mask:
    """Of some layers of a model, in one step."""

    def __init__(self, sees: Sees) -> None:
        self.sees = sees
        self._groups: list[tuple[SequenceGroup, Tensor]] = []
        self._window: list[int | None] | None = None

    def groups(self, step: StepTensors, block_size: int) -> list[tuple[SequenceGroup, Tensor]]:
        """The step's sequences by number of new tokens, and [B, 1, Q, L] of each group. Made once."""
        if not self._groups:
            self._groups = [(group, self._of(group)) for group in step.sequences(block_size)]
        return self._groups

    def causal(self) -> bool:
        """Does no token see a later one?"""
        place = torch.arange(LOOKED)
        seen = self._seen(place, LOOKED)
        return seen is None or not (seen & (place[None] > place[:, None])).any()

    def window(self, longest: int) -> int | None:
        """How many keys tokens of texts of so many positions see, which end with their own, as far as some show who are
        next to each other at the beginning, in the middle and at the end; 0: all up to that; None: others."""
        if self._window is None:
            self._window = [self._found(longest)]
        return self._window[0]

    def _found(self, longest: int) -> int | None:
        many, widths, most = min(NEIGHBOURS, longest), set[int](), 0
        for first in (many, longest // 3, longest // 2, longest):
            for place in range(max(first, many) - many, max(first, many)):
                seen = self._seen(torch.tensor([place]), longest)
                keys = seen[0].nonzero()[:, 0] if seen is not None else torch.tensor([-1])
                count = len(keys)
                if not count or keys[-1] != place or keys[0] != place - count + 1:
                    return None
                most = max(most, count)
                if count <= place:
                    widths.add(count)
        return 0 if not widths else most if widths == {most} else None

    def _seen(self, places: Tensor, keys: int) -> Tensor | None:
        """bool [places, keys]; None: it looks at what has no values."""
        shape = len(places), keys
        try:
            return self.sees(0, 0, places[:, None], torch.arange(keys)[None]).expand(shape)
        except (RuntimeError, NotImplementedError):
            return None

    def _of(self, group: SequenceGroup) -> Tensor:
        key = torch.arange(group.slots.shape[1], device=group.slots.device)[None, None, None]
        return self.sees(0, 0, group.positions[:, None, :, None], key)


class PagedAttention:
    """Of one layer. `step` is the one that is computed. kernels: of CPUs, where their cache is what it has."""

    kv: SlotKV | PagedKV
    step: StepTensors
    kernels: DirectOps | None = None

    def __init__(self, shape: AttendingLayer) -> None:
        self.shape = shape
        self._recorded: dict[tuple[Any, ...], tuple[DirectAttention, object]] = {}

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, mask: object, *, scaling: float | None = None,
        softcap: float | None = None, s_aux: Tensor | None = None, **given: object,
    ) -> Tensor:  # fmt: skip
        """query [1, heads, T, D], key and value [1, kv_heads, T, D] -> [1, T, heads, D]. Raises ModelError."""
        check(mask, given)
        assert isinstance(mask, Mask)
        q, scale = query[0].transpose(0, 1), query.shape[-1] ** -0.5 if scaling is None else scaling
        if isinstance(self.kv, PagedKV):
            return self._by_kernels(query, key, value, self.kv, scale, softcap or 0.0, s_aux)
        keys, values = self.kv.keys[..., : key.shape[-1]], self.kv.values[..., : value.shape[-1]]
        self.step.store(keys, key[0].transpose(0, 1).to(keys.dtype))
        self.step.store(values, value[0].transpose(0, 1).to(values.dtype))

        def seen(group: SequenceGroup, sees: Tensor, rows: Tensor) -> Tensor:
            found = attended(
                rows.to(keys.dtype), group.of(keys), group.of(values), sees, scale, softcap or 0.0, s_aux
            )  # fmt: skip
            return found.to(q.dtype)

        groups = mask.groups(self.step, self.kv.block_size)
        if len(groups) == 1:  # of all rows, in their order
            [(group, sees)] = groups
            return seen(group, sees, q.view(*group.rows.shape, *q.shape[1:])).flatten(0, 1)[None]
        out = q.new_empty(*q.shape[:2], value.shape[-1])
        for group, sees in groups:
            out[group.rows] = seen(group, sees, q[group.rows])
        return out[None]

    def make_kv(self, ops: TorchOps, kernels: DirectOps | None, num_blocks: int, block_size: int) -> None:
        """kernels: of CPUs, which compute what they can."""
        heads, width = self.shape.heads, self.shape.width
        self._recorded.clear()
        self.kernels = kernels if self.shape.window is not None and takes(width, block_size) else None
        if self.kernels is None:
            self.kv = ops.kv_layer(num_blocks, block_size, heads, width)
        else:
            self.kernels.kv_part = ops.kv_part
            self.kv = self.kernels.kv_layer(num_blocks, block_size, heads, width)

    def drop_kv(self) -> None:
        """Let the cache's memory go."""
        self._recorded.clear()
        del self.kv

    def _by_kernels(
        self, query: Tensor, key: Tensor, value: Tensor, kv: PagedKV, scale: float, cap: float, sinks: Tensor | None
    ) -> Tensor:  # fmt: skip
        assert self.kernels is not None
        batch, dtype = self.step.batch, getattr(torch, self.kernels.dtype)
        new = torch.cat([key[0].transpose(0, 1), value[0].transpose(0, 1)], 1).to(dtype)
        q = query[0].transpose(0, 1).to(dtype).contiguous()
        out = torch.empty_like(q)
        asked = id(batch), q.shape[1], scale, cap, None if sinks is None else sinks.data_ptr()
        if asked not in self._recorded:
            sunk = None if sinks is None else self.kernels.vector(sinks.detach().float().numpy())
            window = self.shape.window or None
            recorded = self.kernels.attention(batch, kv, q.shape[1], scale, window, cap, sunk)
            self._recorded[asked] = recorded, sinks  # that stays where it is
        self._recorded[asked][0](new.data_ptr(), q.data_ptr(), out.data_ptr())
        return out.to(query.dtype)[None]


def check(mask: object, given: dict[str, object]) -> None:
    """Raise ModelError for what this attention would leave out."""
    if not isinstance(mask, Mask):
        what = "none" if mask is None else "one of its own"
        raise ModelError(f"its layers mask attention in no way that Transformers' mask functions know: {what}")
    if unknown := sorted(name for name, value in given.items() if value is not None and name not in PLAIN):
        raise ModelError(f"its attention asks for {', '.join(unknown)}, which paged attention has not")


def _mask(*, mask_function: Sees, use_vmap: bool = False, **_: object) -> Mask:
    if use_vmap:
        raise ModelError("its mask is not one of positions alone")
    return Mask(mask_function)


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: object, **given: Any
) -> tuple[Tensor, None]:  # fmt: skip
    return module.paged(query, key, value, attention_mask, **given), None


def register() -> None:
    """Let models be made with `attn_implementation=NAME`. Each module that attends then needs its `paged`."""
    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, _mask)
