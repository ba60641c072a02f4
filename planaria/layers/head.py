"""A head that drafts, in EAGLE's shape (https://arxiv.org/abs/2401.15077): it goes on with hidden states of the model
that is served, by a product that brings them together with the embeddings of the tokens that came next, and a decoder
layer.

Its token at position p is the sequence's at p + 1, and `hidden` what the model made at p; what it makes of them stands
for the model's hidden state at p + 1, so the model's own output head draws the token at p + 2 from it.
"""

from __future__ import annotations

from planaria.kernels.ops import Act, Operations, Ops, RopeTable, Weight
from planaria.layers.decoder import Model
from planaria.layers.norms import Narrow
from planaria.layers.weights import TensorPart, WeightLoader
from planaria.models.config import ModelConfig
from planaria.models.shard import Shard


class DraftingHead(Model):
    """`forward_both` gives logits, and what stands for the model's hidden states, [S, H]."""

    def __init__(
        self, c: ModelConfig, load: WeightLoader, shard: Shard, ropes: tuple[RopeTable, RopeTable], ops: Ops | None
    ) -> None:
        super().__init__(c, load, shard, ropes, ops)
        size = c.hidden_size
        part, bias = TensorPart("fc", size, range(size)), load.has("fc.bias")
        self.of_tokens: Weight = load.linear([part], range(size), 2 * size, bias=bias)
        self.of_hidden: Weight = load.linear([part], range(size, 2 * size), 2 * size)
        self.narrow = Narrow(load, size)
        self._dense_bytes = load.num_bytes

    def _begin(self, ops: Operations) -> Act:
        h = ops.scores(self.narrow(ops, super()._begin(ops)), self.of_tokens)
        return ops.linear(self.narrow(ops, ops.hidden(self.config.hidden_size)), self.of_hidden, h)
