"""How a model is dealt to ranks: everything once, evenly, the same every time."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.config.options import ParallelConfig
from planaria.errors import ConfigError
from planaria.models.config import ModelConfig, MoEConfig, RopeConfig
from planaria.models.deal import MLP_BLOCK, VOCAB_BLOCK, deal, deal_context, deal_heads, deal_layers, deal_tensor
from planaria.models.memory import num_parameters, rank_memory
from planaria.topology.layout import Layout
from planaria.topology.stripes import Context, Stripes


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


MIXTURE = msgspec.structs.replace(SMOLLM2, moe=MoEConfig(num_experts=4, top_k=2, intermediate_size=224))


@pytest.mark.parametrize("tp, slices", [(1, 2), (2, 2), (1, 7), (2, 3), (3, 2)])
def test_lanes_have_slices_of_experts(tp: int, slices: int) -> None:
    """Of each expert every column is on one rank of all, and the rest of a rank's part is that of its like."""
    lanes = [deal(MIXTURE, tp, 1, lane=lane, slices=slices) for lane in range(slices)]
    columns = [shard.expert_columns for shards in lanes for shard in shards]
    assert [column for each in columns for column in each] == list(range(224)) and all(columns)
    sizes = [-(-len(each) // MLP_BLOCK) for each in columns]
    assert max(sizes) - min(sizes) <= 1
    for shards in lanes:
        for shard, like in zip(shards, lanes[0], strict=True):
            assert shard.apart and shard.held_experts == (0, 1, 2, 3)
            assert dataclasses.replace(shard, expert_columns=like.expert_columns) == like


def test_more_lanes_than_slices() -> None:
    for tp, slices in ((1, 8), (2, 4)):
        with pytest.raises(ConfigError, match=rf"-size {slices}: .*-tp {tp} x -dp {slices} .* 224 columns are 7 block"):
            deal(MIXTURE, tp, 1, slices=slices)


def test_too_many_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match="only 9 query heads; use at most 9"):
        deal_tensor(SMOLLM2, 10)


@pytest.mark.row("P20")
@given(st.integers(1, 6), st.sampled_from([1, 2, 3, 16]), st.integers(0, 200))
def test_every_token_is_on_one_context_rank(size: int, interleave: int, length: int) -> None:
    """And each has its own one behind the other, without holes."""
    ranks, tokens = [Stripes(size, rank, interleave) for rank in range(size)], range(length)
    for token in tokens:
        assert [stripes.rank for stripes in ranks if stripes.here(token)] == [token // interleave % size]
    for stripes in ranks:
        own = [token for token in tokens if stripes.here(token)]
        assert [stripes.local(token) for token in own] == list(range(stripes.held(length)))
        assert [stripes.position(local) for local in range(len(own))] == own


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 4), st.integers(1, 4))
def test_a_context_group_has_the_heads_of_its_ranks(kv_heads: int, per_kv: int, size: int, count: int) -> None:
    ranks = min(size * count, kv_heads * per_kv) // size * size
    if not ranks:
        return
    heads = deal_heads(kv_heads * per_kv, kv_heads, ranks)
    groups = deal_context(heads, Context(size, interleave=4))
    assert size > 1 or groups == [None] * ranks
    for rank, group in enumerate(groups):
        if group is None:
            continue
        first = rank // size * size
        members, dealt = groups[first : first + size], heads[first : first + size]
        assert (group.number, group.count, group.stripes) == (first // size, ranks // size, (size, rank - first, 4))
        assert list(group.heads) == [head for queries, _ in dealt for head in queries]
        # each KV head of the group is led by one of its ranks
        led = [kv for (_, keys), member in zip(dealt, members, strict=True) if member.leads_keys for kv in keys]  # type: ignore[union-attr]
        assert led == list(group.kv_heads) == sorted({kv for _, keys in dealt for kv in keys})
        assert group.most_heads >= len(group.heads) and group.most_kv_heads >= len(group.kv_heads)


def test_fewer_tensor_ranks_share_tokens_where_they_can() -> None:
    config = ParallelConfig(decode_context_parallel_size=4, prefill_context_parallel_size=2, tensor_parallel_size=8)
    assert [config.context(Layout(tp=tp)).size for tp in (8, 6, 4, 3, 2, 1)] == [4, 2, 4, 1, 2, 1]
    assert config.context(Layout(tp=6, pcp=2), 1).stripes(1) == Stripes(4, 3, 1)


def test_memory_of_a_rank_that_shares_tokens() -> None:
    limits = {"max_model_len": 64, "step_tokens": 8, "logit_rows": 4}
    plain, shared = (
        rank_memory(SMOLLM2, deal(SMOLLM2, 2, 1, context=Context(size))[0], parameter=2.0, element=2, kv=None, **limits)
        for size in (1, 2)
    )
    assert shared.kv == 3 * plain.kv // 4 and shared.weights == plain.weights
