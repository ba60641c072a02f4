"""What the tests of experts on several ranks serve and ask. The fixtures `folder` and `expected` are made of it."""

from __future__ import annotations

from tests.model.engines import texts

MODEL = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
ASKED = texts(131, [(5, 30), (70, 24), (1, 40), (33, 30), (20, 10), (9, 30), (3, 60)])
EP = {"enable_expert_parallel": True}
