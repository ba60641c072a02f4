"""How a model is dealt to ranks: everything once, evenly, the same every time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.errors import ConfigError
from planaria.models.config import ModelConfig, RopeConfig
from planaria.models.deal import MLP_BLOCK, VOCAB_BLOCK, deal, deal_layers, deal_tensor
from planaria.models.memory import num_parameters, rank_memory


def model(heads: int, kv_heads: int, head_dim: int, hidden: int, mlp: int, vocab: int, layers: int) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM", hidden_size=hidden, intermediate_size=mlp, num_layers=layers,
        num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, vocab_size=vocab, max_position=128, norm_eps=1e-5,
        rope=RopeConfig(),
    )  # fmt: skip


@st.composite
def models(draw: st.DrawFn) -> ModelConfig:
    kv, group = draw(st.integers(1, 12)), draw(st.integers(1, 9))
    return model(
        kv * group, kv, draw(st.sampled_from([16, 64, 80, 128])), draw(st.sampled_from([64, 576, 4096])),
        draw(st.integers(1, 400)) * 32 + draw(st.sampled_from([0, 0, 4])), draw(st.integers(200, 50000)),
        draw(st.integers(1, 40)),
    )  # fmt: skip


SMOLLM2 = model(9, 3, 64, 576, 1536, 49152, 30)


@given(models(), st.integers(1, 12))
def test_everything_is_held_once_and_by_everybody_some(config: ModelConfig, ranks: int) -> None:
    try:
        shards = deal_tensor(config, ranks)
    except ConfigError as e:
        assert ranks > min(config.num_heads, -(-config.intermediate_size // MLP_BLOCK)), e
        return
    assert shards == deal_tensor(config, ranks) and len(shards) == ranks
    group = config.num_heads // config.num_kv_heads
    assert [h for s in shards for h in s.heads] == list(range(config.num_heads))
    assert [c for s in shards for c in s.mlp_columns] == list(range(config.intermediate_size))
    assert [t for s in shards for t in s.vocab] == list(range(config.vocab_size))
    assert {h for s in shards for h in s.kv_heads} == set(range(config.num_kv_heads))
    assert [s.leads for s in shards] == [True] + [False] * (ranks - 1)
    for s in shards:
        assert s.heads and s.kv_heads and s.mlp_columns and s.vocab
        assert {h // group for h in s.heads} == set(s.kv_heads)  # each reads what is there, and all that is there
        assert len(s.kv_heads) == 1 or len(s.heads) == group * len(s.kv_heads)
        assert s.mlp_columns.start % MLP_BLOCK == 0 and s.vocab.start % VOCAB_BLOCK == 0
    if ranks <= config.num_kv_heads:
        assert sum(len(s.kv_heads) for s in shards) == config.num_kv_heads


@given(models(), st.integers(1, 12), st.integers(1, 4))
def test_what_ranks_need_is_the_model_once(config: ModelConfig, tp: int, pp: int) -> None:
    """Beside norms, KV heads that several ranks hold, and nothing else."""
    try:
        shards = deal(config, tp, pp)
    except ConfigError:
        return
    found = [num_parameters(config, shard) for shard in shards]
    if tp == 1:
        assert sum(found) == config.num_parameters
    heads = sum(len(shard.kv_heads) for shard in shards[:tp]) - config.num_kv_heads
    norms = (tp - 1) * (2 * config.num_layers + 1) * config.hidden_size
    twice = 2 * config.num_layers * heads * config.head_dim * config.hidden_size
    assert sum(found) == config.num_parameters + norms + twice
    limits = {"max_model_len": 16, "step_tokens": 8, "logit_rows": 4}
    need = rank_memory(config, shards[0], parameter=2.0, element=2, kv=None, **limits)
    assert need.weights == 2 * found[0] and need.total == sum(need) and need.activations > 0
    assert need.shared_by(4).weights == -(-need.weights // 4) and need.shared_by(4).kv == need.kv
    assert need.kv == 16 * len(shards[0].layers) * 2 * len(shards[0].kv_heads) * config.head_dim * 2


@given(models(), st.integers(2, 12))
def test_each_kind_is_even_within_one_unit(config: ModelConfig, ranks: int) -> None:
    """All ranks wait after attention and after the MLP, so each is dealt evenly by itself."""
    try:
        shards = deal_tensor(config, ranks)
    except ConfigError:
        return
    for held, block in (([s.mlp_columns for s in shards], MLP_BLOCK), ([s.vocab for s in shards], VOCAB_BLOCK)):
        blocks = [-(-len(part) // block) for part in held]
        assert max(blocks) - min(blocks) <= 1
    if ranks <= config.num_kv_heads:
        groups = [len(s.kv_heads) for s in shards]
        assert max(groups) - min(groups) <= 1


def test_three_kv_heads_on_two_ranks() -> None:
    first, second = deal_tensor(SMOLLM2, 2)
    assert (len(first.heads), len(second.heads)) == (6, 3) and (len(first.kv_heads), len(second.kv_heads)) == (2, 1)
    assert len(first.mlp_columns) == len(second.mlp_columns) == 768


def test_kv_heads_are_held_by_several_where_ranks_outnumber_them() -> None:
    shards = deal_tensor(SMOLLM2, 5)
    assert [(list(s.heads), list(s.kv_heads)) for s in shards] == [
        ([0, 1], [0]), ([2], [0]), ([3, 4], [1]), ([5], [1]), ([6, 7, 8], [2]),
    ]  # fmt: skip


def test_layers() -> None:
    assert [len(part) for part in deal_layers(30, 4)] == [8, 8, 7, 7]
    assert deal_layers(6, 3, (1, 3, 2)) == [range(1), range(1, 4), range(4, 6)]
    for partition in ((3, 3), (0, 3, 3), (2, 2, 3)):
        with pytest.raises(ConfigError, match="3 positive numbers that sum to 6"):
            deal_layers(6, 3, partition)
    with pytest.raises(ConfigError, match="use at most 6"):
        deal_layers(6, 7)


def test_ranks_are_ordered_tensor_first() -> None:
    shards = deal(SMOLLM2, 2, 2)
    assert [s.layers for s in shards] == [range(15), range(15), range(15, 30), range(15, 30)]
    assert shards[0].heads == shards[2].heads != shards[1].heads == shards[3].heads
    assert [(s.first(), s.last(SMOLLM2)) for s in shards] == [(True, False)] * 2 + [(False, True)] * 2


def test_too_many_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match="only 9 query heads; use at most 9"):
        deal_tensor(SMOLLM2, 10)
