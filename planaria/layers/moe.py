"""Experts in place of an MLP: a router, this rank's experts, and those that all tokens share.

Rule: every tensor rank has all tokens of its lane and routes them alike; it computes what its slots hold, or its
columns of every expert, and the sum into the residual is over the ranks. Where experts, or their columns, are spread
over lanes, tokens go to all of them and come back. A rank reads no other expert's weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from planaria.kernels.ops import Act, Operations, Ops, Slots, Weight, replicas_of
from planaria.layers.mlp import MLP
from planaria.layers.weights import TensorPart, WeightLoader
from planaria.models.config import ModelConfig
from planaria.models.shard import Shard, scaled

Expert = tuple[Weight, Weight]  # gate over up, and down


class MoE:
    """The chosen experts' sum and the shared experts, into the residual. `slots` says where each expert is; `number`:
    of this layer among those with experts."""

    def __init__(self, c: ModelConfig, layer: int, load: WeightLoader, shard: Shard) -> None:
        assert c.moe is not None and shard.experts is not None
        self.rule, moe, block = c.moe, c.moe, f"model.layers.{layer}.{c.moe.block}"
        size = moe.intermediate_size
        self.kind, self.leads = c.activation, shard.expert_columns.start == 0
        self.router: Weight = load.plain(f"{block}.{moe.router}", moe.num_experts, c.hidden_size, bias=moe.biases)
        bias = f"{block}.gate.e_score_correction_bias"
        self.correction = load.vector(bias, moe.num_experts) if moe.correction_bias else None
        self.number = c.moe_layers.index(layer)
        self.slots = Slots(shard.experts.slots, moe.num_experts, shard.slots, 1 + shard.experts.num_redundant)
        self.experts: Weight = None
        self.held: dict[int, Expert] = {}  # by expert: what is in this rank's memory
        self._sizes = block, c.hidden_size, size, shard.expert_columns
        self.read(load, shard.held_experts if shard.reads is None else shard.reads[self.number])
        if shard.reads is None:
            self.experts = load.group([self.held[expert] for expert in shard.held_experts])
        self.shared = MLP(
            load, f"{block}.{moe.shared_name}", c.hidden_size, moe.shared_intermediate_size, shard.shared_columns,
            scale=f"{block}.shared_expert_gate" if moe.shared_gate else "",
        ) if moe.shared_intermediate_size else None  # fmt: skip

    def read(self, load: WeightLoader, experts: Iterable[int]) -> None:
        """From the checkpoint, those that aren't held."""
        block, width, size, columns = self._sizes
        hidden, (*first, down), bias = range(width), self.rule.names, self.rule.biases
        for expert in experts:
            if expert in self.held:
                continue
            name = f"{block}.experts.{expert}"
            if len(first) == 1:  # gate and up in one, their rows in turn
                turns = range(2 * len(columns))
                parts = [TensorPart(f"{name}.{first[0]}", 2 * size, scaled(columns, 2), (*turns[::2], *turns[1::2]))]
            else:
                parts = [TensorPart(f"{name}.{part}", size, columns) for part in first]
            back = [TensorPart(f"{name}.{down}", width, hidden)]
            self.held[expert] = (
                load.linear(parts, hidden, width, bias=bias, single=True),
                load.linear(back, columns, size, bias=bias and self.leads),
            )

    def place(self, ops: Ops, experts: Sequence[int], held: range) -> None:
        """Between two steps: `experts` says which expert each slot holds, over all ranks, and `held` are this rank's.
        Those of its slots are held by now; others are let go. Where the rank's slots stay the same what was compiled
        stays good, else it must be compiled again."""
        here, before = experts[held.start : held.stop], self.slots
        replicas = replicas_of(experts, self.rule.num_experts)
        if self.experts is not None and held == before.held and max(map(len, replicas)) < before.table.shape[1]:
            for slot, expert in enumerate(here):
                ops.put(self.experts, slot, self.held[expert])
            before.fill(replicas)
        else:
            self.slots = Slots(experts, self.rule.num_experts, held, before.table.shape[1] - 1)
            self.slots.load = before.load
            self.experts = ops.group([self.held[expert] for expert in here])
        for expert in sorted(set(self.held).difference(here)):
            for weight in self.held.pop(expert):
                ops.release(weight)

    def __call__(self, ops: Operations, x: Act, h: Act) -> Act:
        routing = ops.route(ops.scores(x, self.router), self.rule, self.slots, self.correction)
        if ops.spread:
            every, chosen = ops.dispatch(x, routing)
            h = ops.combine(ops.experts(every, chosen, self.experts, self.slots, kind=self.kind), h)
        else:
            h = ops.experts(x, routing, self.experts, self.slots, h, reduce=True, kind=self.kind)
        return h if self.shared is None else self.shared(ops, x, h)
