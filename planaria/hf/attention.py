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
from planaria.kernels.reference import SequenceGroup, SlotKV, StepTensors, attended

NAME = "planaria"
PLAIN = {  # what says nothing more than the mask does, or nothing that a step changes
    "cache_position", "dropout", "is_causal", "logits_to_keep", "output_attentions", "output_hidden_states",
    "output_router_logits", "position_embeddings", "position_ids", "return_dict", "sliding_window", "use_cache",
}  # fmt: skip

LOOKED = 64  # positions that a mask is tried on
Sees = Callable[[Any, Any, Tensor, Tensor], Tensor]  # row, head, positions of queries, of keys -> bool


class Mask:
    """Of some layers of a model, in one step."""

    def __init__(self, sees: Sees) -> None:
        self.sees = sees
        self._groups: list[tuple[SequenceGroup, Tensor]] = []

    def groups(self, step: StepTensors, block_size: int) -> list[tuple[SequenceGroup, Tensor]]:
        """The step's sequences by number of new tokens, and [B, 1, Q, L] of each group. Made once."""
        if not self._groups:
            self._groups = [(group, self._of(group)) for group in step.sequences(block_size)]
        return self._groups

    def causal(self) -> bool:
        """Does no token see a later one?"""
        place = torch.arange(LOOKED)
        try:
            seen = self.sees(0, 0, place[:, None], place[None])
        except (RuntimeError, NotImplementedError):  # it looks at what has no values
            return True
        return not (seen & (place[None] > place[:, None])).any()

    def _of(self, group: SequenceGroup) -> Tensor:
        key = torch.arange(group.slots.shape[1], device=group.slots.device)[None, None, None]
        return self.sees(0, 0, group.positions[:, None, :, None], key)


class PagedAttention:
    """Of one layer. `step` is the one that is computed."""

    kv: SlotKV
    step: StepTensors

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, mask: object, *, scaling: float | None = None,
        softcap: float | None = None, s_aux: Tensor | None = None, **given: object,
    ) -> Tensor:  # fmt: skip
        """query [1, heads, T, D], key and value [1, kv_heads, T, D] -> [1, T, heads, D]. Raises ModelError."""
        check(mask, given)
        assert isinstance(mask, Mask)
        q, scale = query[0].transpose(0, 1), query.shape[-1] ** -0.5 if scaling is None else scaling
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
