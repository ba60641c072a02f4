"""Ranks that share the tokens of a sequence (decode and prefill context parallel), as processes, against one rank with
all of them, on the kernels and on their definition."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from planaria.config.options import EngineConfig, EngineOptions
from planaria.config.resolve import resolve
from planaria.kernels.cpu import threads
from planaria.kernels.ops import Columns
from planaria.models.deal import deal_context, deal_heads
from planaria.models.shard import Shard
from planaria.protocol import Allocate, Facts, Failed, Load, Probe, Ready
from planaria.topology.stripes import Context, Stripes
from planaria.types import Request, SamplingParams
from planaria.worker.parts import configured
from tests.model.checkpoints import write_checkpoint
from tests.model.ranks import Ranks
from tests.model.test_deepseek import SIZES
from tests.model.test_families import CASES as FAMILIES
from tests.model.test_parallel import BLOCKS, alone, assert_ranks_give, assert_same, long, requests, start, together

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "few heads": ("llama", {"num_attention_heads": 8, "head_dim": 16, "intermediate_size": 128}),
    "uneven heads": ("llama", {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}),
    "latents": ("deepseek_v2", {**SIZES, "intermediate_size": 128, "moe_intermediate_size": 128}),
    "windows": ("mistral", {"sliding_window": 21, "attention_bias": False}),
    "wide norms": ("olmoe", {"num_key_value_heads": 4, "num_experts": 8, "intermediate_size": 64}),
    "caps": ("gemma2", FAMILIES["gemma2"][1]),
    "sinks": ("gpt_oss", FAMILIES["gpt-oss"][1]),
}  # fmt: skip


def config_of(folder: Path, tp: int, context: int, interleave: int = 1, **options: Any) -> EngineConfig:
    return resolve(
        EngineOptions(
            model=str(folder), device="cpu", threads=1, quantization="none", tensor_parallel_size=tp,
            decode_context_parallel_size=context, cp_kv_cache_interleave_size=interleave,
            **{
                "dtype": "float32", "max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 48,
                "kernels": "native", **options,
            },
        )
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            family, shape = MODELS[name]
            made[name] = write_checkpoint(tmp_path_factory.mktemp("context"), family, **shape)
        return made[name]

    return get


CASES = [
    ("few heads", 4, 2, 1, "native", False),  # two ranks have each KV head, and there are two groups
    long("few heads", 2, 2, 16, "native", False),  # a block each in turn
    long("few heads", 4, 4, 2, "native", False),
    long("few heads", 4, 2, 4, "native", True),
    long("few heads", 4, 2, 4, "torch", False),
    ("uneven heads", 3, 3, 1, "native", False),  # no power of two: a tree with a rank left over
    ("latents", 2, 2, 1, "native", False),
    long("latents", 2, 2, 8, "torch", False),
    long("latents", 4, 2, 2, "native", False),
    ("latents", 2, 2, 1, "native", True),
    ("windows", 2, 2, 4, "native", False),
    long("windows", 2, 2, 2, "torch", False),
    long("wide norms", 2, 2, 2, "native", False),
    long("caps", 2, 2, 1, "native", False),
    ("sinks", 2, 2, 1, "native", False),
    long("sinks", 2, 2, 1, "torch", False),
    long("caps", 2, 2, 2, "torch", False),
]


@pytest.mark.row("P19", "P20")
@pytest.mark.parametrize("name, tp, size, interleave, kernels, gloo", CASES)
def test_ranks_that_share_tokens_give_what_one_gives(
    folder: Any, name: str, tp: int, size: int, interleave: int, kernels: str, gloo: bool
) -> None:
    """Prompts in chunks, several rows in a step, one and two plans on their way. gloo: no memory is shared."""
    config = config_of(folder(name), tp, size, interleave, kernels=kernels)
    expected = alone(config_of(folder(name), 1, 1), requests(config.model.vocab_size))
    with Ranks(config, tp, 1, gloo=gloo) as ranks:
        start(ranks)
        assert_ranks_give(ranks, config, expected)


SHARES = [  # model, tensor ranks, of which share tokens, shares of a step, stages, tokens in turn
    ("few heads", 1, 1, 2, 2, 1, "native", False),
    ("latents", 2, 1, 2, 1, 4, "native", False),
    ("uneven heads", 1, 1, 3, 1, 1, "torch", True),
    long("few heads", 1, 1, 2, 1, 4, "torch", False),
    long("few heads", 2, 1, 2, 1, 1, "native", False),
    long("few heads", 2, 2, 2, 1, 2, "native", False),
    long("few heads", 2, 2, 2, 1, 2, "torch", False),
    long("few heads", 2, 2, 2, 1, 2, "native", True),
    long("latents", 1, 1, 2, 1, 1, "native", False),
    long("latents", 2, 2, 2, 1, 1, "native", True),
    long("latents", 2, 1, 2, 1, 1, "torch", False),
    long("windows", 1, 1, 2, 1, 4, "native", False),
    long("wide norms", 2, 1, 2, 1, 1, "native", False),
    long("caps", 1, 1, 2, 1, 1, "native", False),
    long("sinks", 1, 1, 2, 1, 1, "native", False),
]


@pytest.mark.row("P1")
@pytest.mark.parametrize("name, tp, dcp, pcp, pp, interleave, kernels, gloo", SHARES)
def test_ranks_that_share_a_step_give_what_one_gives(
    folder: Any, name: str, tp: int, dcp: int, pcp: int, pp: int, interleave: int, kernels: str, gloo: bool
) -> None:
    """Each computes some tokens of every step, and has some tokens of every sequence."""
    config = config_of(folder(name), tp, dcp, interleave, kernels=kernels, prefill_context_parallel_size=pcp)
    expected = alone(config_of(folder(name), 1, 1), requests(config.model.vocab_size))
    with Ranks(config, tp, pp, pcp=pcp, gloo=gloo) as ranks:
        start(ranks)
        assert_ranks_give(ranks, config, expected)


@pytest.mark.row("P6")
@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.long)])
def test_experts_are_over_the_ranks_of_all_shares(folder: Any, tp: int) -> None:
    options = {"prefill_context_parallel_size": 2, "enable_expert_parallel": True}
    config = config_of(folder("wide norms"), tp, 1, **options)
    maps = configured(config, config.parallel.layout)
    expected = alone(config_of(folder("wide norms"), 1, 1), requests(config.model.vocab_size))
    with Ranks(config, tp, 1, pcp=2) as ranks:
        held = [0] * ranks.size
        for command in (Load(maps=maps), Probe(), Allocate(BLOCKS)):
            for rank, reply in enumerate(ranks.ask(command)):
                assert not isinstance(reply, Failed), reply
                if isinstance(reply, Facts):
                    held[rank] = reply.weight_bytes
        assert len(maps[0]) == config.model.moe.num_experts
        assert max(held) < 0.75 * sum(held) / tp  # of one rank's with all experts
        assert_ranks_give(ranks, config, expected)


def test_bfloat16_rounds_what_all_ranks_round(folder: Any) -> None:
    """Queries and keys are handed over as they are."""
    options = {"dtype": "bfloat16"}
    config, plain = (config_of(folder("few heads"), 2, size, **options) for size in (2, 1))
    wanted = requests(config.model.vocab_size)
    with Ranks(plain, 2, 1) as ranks:
        start(ranks)
        expected = together(ranks, plain, wanted, 1)
    first = {name: (tokens[:1], some[:1], prompt) for name, (tokens, some, prompt) in expected.items()}
    with Ranks(config, 2, 1) as ranks:
        start(ranks)
        found = together(ranks, config, requests(config.model.vocab_size), 1)
    assert_same({name: (a[:1], b[:1], c) for name, (a, b, c) in found.items()}, first, 0.2)


def test_alone_or_beside_others_to_the_last_bit(folder: Any) -> None:
    config = config_of(folder("few heads"), 2, 2, dtype="bfloat16")
    wanted = requests(config.model.vocab_size)
    with Ranks(config, 2, 1) as ranks:
        start(ranks)
        found = together(ranks, config, wanted, 1)
        for request in requests(config.model.vocab_size)[1:4]:
            assert all(isinstance(reply, Ready) for reply in ranks.ask(Allocate(BLOCKS)))  # from step 1 again
            again = together(ranks, config, [request], 1)
            assert again[request.id] == found[request.id]


def test_more_tokens_than_a_tile_of_keys(folder: Any) -> None:
    """Of which each rank has half, so 900 are more than two of 384 here, and one there."""
    options = {"max_model_len": 1024, "max_num_batched_tokens": 200}
    shape = {**MODELS["few heads"][1], "max_position_embeddings": 1024}
    long_one = write_checkpoint(folder("few heads").parent / "long", "llama", **shape)

    def request() -> Request:
        prompt = [(5 + 17 * j * j) % 131 for j in range(900)]
        return Request("r", prompt, SamplingParams(temperature=0, logprobs=2, ignore_eos=True), 3, max_tokens=6)

    expected = alone(config_of(long_one, 1, 1, **options), [request()])
    config = config_of(long_one, 2, 2, **options)
    with Ranks(config, 2, 1) as ranks:
        start(ranks)
        assert_same(together(ranks, config, [request()], 1), expected)


@pytest.mark.parametrize(
    ("name", "tp", "ratio"), [("latents", 2, 0.5), ("uneven heads", 2, 0.75), ("few heads", 4, 0.5)]
)
def test_a_token_takes_less_of_a_rank(folder: Any, name: str, tp: int, ratio: float) -> None:
    """KV bytes of the rank that has most, for a token."""

    def most(size: int) -> float:
        config = config_of(folder(name), tp, size)
        with Ranks(config, tp, 1) as ranks:
            start(ranks)
            facts = ranks.ask(Probe())
        return max(reply.block_bytes for reply in facts if isinstance(reply, Facts)) / config.cache.block_size

    assert most(2) == ratio * most(1)


@pytest.mark.parametrize(("heads", "kv_heads", "tp", "size"), [(8, 2, 4, 2), (9, 3, 3, 3), (8, 4, 6, 3), (8, 1, 4, 4)])
def test_each_column_comes_from_one_rank(heads: int, kv_heads: int, tp: int, size: int) -> None:
    """Also where several ranks have computed it."""
    dealt, dim = deal_heads(heads, kv_heads, tp), 16
    for first in range(0, tp, size):
        columns, own = list[int](), list[int]()
        groups = deal_context(dealt, Context(size))[first : first + size]
        for (queries, keys), group in zip(dealt[first : first + size], groups, strict=True):
            assert group is not None
            part = Columns.of_heads(group, Shard(queries, keys, range(0), range(0), range(0)), dim)
            columns += [to + i for _, to, count in part.pieces for i in range(count)]
            own += part.heads
            assert part.most >= part.width == (len(group.heads) + 2 * len(group.kv_heads)) * dim
        assert sorted(columns) == list(range(part.width)) and own == list(range(len(group.heads)))


def test_no_two_threads_write_to_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 16 tokens that are here, with those of other ranks among them."""
    monkeypatch.setattr(threads, "get", lambda slots, token: slots[token])
    stripes = Stripes(2, 1, 4)
    for starts in ((0,), (5, 0, 30), (16, 33, 2, 8)):  # of several sequences in a step
        slots = [
            64 * row + stripes.local(position) if stripes.here(position) else -1
            for row, start in enumerate(starts) for position in range(start, start + 60)
        ]  # fmt: skip
        for first in range(len(slots)):
            cut = threads.whole_chunks(slots, first, len(slots))  # type: ignore[arg-type]
            assert first <= cut <= len(slots)
            before, after = ([slot for slot in part if slot >= 0] for part in (slots[:cut], slots[cut:]))
            assert not before or not after or before[-1] // 16 != after[0] // 16 or before[-1] != after[0] - 1
