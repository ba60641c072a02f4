"""The operations of a mixture of experts, natively against plain torch: choosing with every rule, grouped products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from planaria.errors import ConfigError
from planaria.kernels.ops import Batch, Slots
from planaria.models.config import MoEConfig
from tests.model.tensors import CpuOps, TorchOps, dequantise, quantise
from tests.model.test_cpu_ops import batch_of, close, draw, run

RULES = {
    "softmax": MoEConfig(num_experts=17, top_k=3, intermediate_size=16),
    "renormalised": MoEConfig(num_experts=64, top_k=8, intermediate_size=16, renormalize=True, scaling=2.5),
    "all": MoEConfig(num_experts=4, top_k=4, intermediate_size=16),
    "groups": MoEConfig(num_experts=24, top_k=3, intermediate_size=16, num_groups=6, top_groups=2, scaling=1.5),
    "sigmoid": MoEConfig(
        num_experts=40, top_k=4, intermediate_size=16, scoring="sigmoid", renormalize=True, scaling=2.5, num_groups=20,
        top_groups=3, group_score="sum2", correction_bias=True,
    ),
}  # fmt: skip


def routed(rule: MoEConfig, table: torch.Tensor, bias: torch.Tensor | None, batch: Batch) -> list[Any]:
    """(slots, weights) by both back ends, of tokens whose logits are the table's rows."""
    load = np.zeros(rule.num_experts, np.int64)
    slots = Slots(range(rule.num_experts), rule.num_experts, range(rule.num_experts))
    slots.load = load
    reference, native = TorchOps("cpu"), CpuOps("float32", 2)
    found: list[Any] = []

    def forward(ops: Any, form: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """form: what of a routing is the result."""
        correction, logits = None if bias is None else ops.vector(bias), ops.pack(table)

        def of(o: Any) -> Any:
            found.append(o.route(o.embed(logits), rule, slots, correction))
            return form(found[-1])

        return of

    weights = [
        run(reference, forward(reference, lambda routing: routing.weights), batch),
        run(native, forward(native, lambda routing: routing.weights), batch),
    ]
    chosen = native.compile(forward(native, lambda routing: routing.slots), batch)()
    native.close()
    return [(found[0].slots, weights[0]), (chosen.clone().view(torch.int32).long(), weights[1]), load]


@pytest.mark.parametrize("name", RULES)
def test_choosing(name: str) -> None:
    """The same experts, of those alike the first; the same weights; and each choice is counted."""
    rule = RULES[name]
    table = draw(40, rule.num_experts, seed=7) * 2
    table[::3] = table[::3].round()  # many alike
    table[5] = 0
    bias = draw(rule.num_experts, seed=8) if rule.correction_bias else None
    (slots, weights), (found_slots, found_weights), load = routed(rule, table, bias, batch_of(list(range(40))))
    assert torch.equal(slots, found_slots)
    assert torch.allclose(weights, found_weights, rtol=1e-6, atol=1e-7)
    assert slots[5].tolist() == list(range(rule.top_k)) or bias is not None
    times = 3  # runs, one by the reference
    assert load.tolist() == (times * torch.bincount(slots.flatten(), minlength=rule.num_experts)).tolist()


def products(ops: Any, kind: str, x: torch.Tensor, weights: Any, rule: MoEConfig, held: range) -> Any:
    """A forward function: norm, choice, experts, with the residual."""
    packed = [(ops.pack(quantised(up, kind, ops)), ops.pack(quantised(down, kind, ops))) for up, down in weights]
    grouped, table, norm = ops.group([packed[i] for i in held]), ops.pack(x), ops.vector(torch.ones(x.shape[1]))
    logits = ops.pack(draw(len(x), rule.num_experts, seed=12))  # not of x: what rounds otherwise must choose alike
    slots = Slots(range(rule.num_experts), rule.num_experts, held)

    def forward(o: Any) -> Any:
        h = o.embed(table)
        routing = o.route(o.embed(logits), rule, slots)
        return o.experts(o.rms_norm(h, norm, 1e-6), routing, grouped, slots, h)

    return forward


def quantised(weight: torch.Tensor, kind: str, ops: Any) -> Any:
    if kind == "plain":
        return weight
    packed = quantise(weight, kind)
    return packed if isinstance(ops, CpuOps) else dequantise(packed)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["plain", "q8_0", "q4_1"])
def test_grouped_products(kind: str, dtype: str) -> None:
    """Against torch, with few tokens and with more of an expert than a block of rows; some experts elsewhere. And a
    token's result alone is bit by bit that in company."""
    hidden, width = (64, 96) if kind != "plain" else (72, 48)
    rule = MoEConfig(num_experts=5, top_k=2, intermediate_size=width, renormalize=True)
    weights = [
        (draw(2 * width, hidden, seed=i) / hidden**0.5, draw(hidden, width, seed=50 + i) / width**0.5) for i in range(5)
    ]
    x = draw(400, hidden, seed=3)
    native, reference = CpuOps(dtype, 2), TorchOps("cpu", dtype)
    for held, count in ((range(5), 400), (range(5), 3), (range(1, 4), 70)):
        batch = batch_of(list(range(count)), 400)
        step = native.compile(products(native, kind, x, weights, rule, held), batch)
        found = step().clone()
        theirs = run(reference, products(reference, kind, x, weights, rule, held), batch)
        close(found, theirs, dtype)
        for token in (0, count - 1):
            batch.counts[:3], batch.tokens[0], batch.positions[0] = (1, 1, 1), token, token
            batch.seq_start[:2], batch.seq_len[0] = (0, 1), 1
            assert torch.equal(step()[0], found[token])
    native.close()


def test_experts_can_be_exchanged_between_steps() -> None:
    """The kernels read a slot's address at each step."""
    rule = MoEConfig(num_experts=2, top_k=1, intermediate_size=16)
    weights = [(draw(32, 16, seed=i), draw(16, 16, seed=9 + i)) for i in range(2)]
    native = CpuOps("float32", 1)
    packed = [(native.pack(up), native.pack(down)) for up, down in weights]
    table, group, router = native.pack(draw(6, 16)), native.group(packed), native.pack(draw(2, 16, seed=4))
    slots = Slots((0, 1), 2, range(2))
    norm = native.vector(torch.ones(16))

    def forward(o: Any) -> Any:
        y = o.rms_norm(o.embed(table), norm, 1e-6)
        return o.experts(y, o.route(o.scores(y, router), rule, slots), group, slots)

    step = native.compile(forward, batch_of(list(range(6))))
    before = step().clone()
    group.put(0, *packed[1])
    group.put(1, *packed[0])
    assert not torch.equal(step(), before)
    slots.fill([[1], [0]])
    assert torch.equal(step(), before)
    native.close()


def test_experts_of_a_size_that_fills_no_panel_are_refused() -> None:
    native = CpuOps("float32", 1)
    with pytest.raises(ConfigError, match="multiple of 16, not 24"):
        native.group([(native.pack(draw(48, 32)), native.pack(draw(32, 24)))])
    native.close()
