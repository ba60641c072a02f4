"""Adapters against peft's own model: tokens of many rows over several of them, however the model is dealt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from planaria import LLM, LoRARequest, RequestOutput, SamplingParams
from planaria.errors import RequestError
from tests.model.adapters import ALL, ATTENTION, peft_model, peft_tokens, write_adapter
from tests.model.checkpoints import write_checkpoint
from tests.tiers import representatives

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPTS = [[5 + i, 9, 40 + 3 * i, 77, 3, 21 + i, 8] for i in range(8)]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("lora") / "model", "llama")


@pytest.fixture(scope="module")
def folders(small: Path) -> list[Path]:
    """All matrices, some, with ranks and alphas of modules, of another rank."""
    kinds: list[dict[str, Any]] = [
        {}, {"modules": ["q_proj", "v_proj"]},
        {"rank_pattern": {"k_proj": 3, "layers.1.mlp.up_proj": 16}, "alpha_pattern": {"o_proj": 40}},
        {"r": 1, "lora_alpha": 5},
    ]  # fmt: skip
    return [write_adapter(small.parent / f"adapter{i}", small, i, **kind) for i, kind in enumerate(kinds)]


def tokens_of(output: RequestOutput) -> list[int]:
    return list(output.outputs[0].token_ids)


def llm_of(model: Path, **options: Any) -> LLM:
    given = {
        "dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 64, "kv_cache_memory": "4MiB", "threads": 2,
        "max_num_seqs": 8, "enable_lora": True, "max_loras": 2, **options,
    }  # fmt: skip
    return LLM(str(model), **given)


def requests_of(folders: list[Path]) -> list[LoRARequest | None]:
    return [None, *(LoRARequest(folder.name, i + 1, str(folder)) for i, folder in enumerate(folders))]


@pytest.mark.parametrize(
    "options",
    representatives(
        [
            {"kernels": "native"},
            {"kernels": "torch"},
            {"tensor_parallel_size": 2},
            {"pipeline_parallel_size": 2},
            {"prefill_context_parallel_size": 2},
            {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
        ],
        {"kernels": "native"},
        {"tensor_parallel_size": 2},
    ),
    ids=str,
)
def test_tokens_are_those_of_peft(small: Path, folders: list[Path], options: dict[str, Any]) -> None:
    """Eight rows over four adapters and none, of which two at a time are in slots."""
    llm = llm_of(small, **options)
    try:
        asked = requests_of(folders)
        each = [asked[i % len(asked)] for i in range(len(PROMPTS))]
        outputs = llm.generate(PROMPTS, GREEDY, lora_request=each)
        paths = [None, *folders]
        for i, (prompt, output) in enumerate(zip(PROMPTS, outputs, strict=True)):
            assert tokens_of(output) == peft_tokens(small, paths[i % len(paths)], prompt, 6)
        assert (
            len({tuple(llm.generate([PROMPTS[0]], GREEDY, lora_request=one)[0].outputs[0].token_ids) for one in asked})
            == 5
        )
    finally:
        llm.close()


@pytest.mark.parametrize("runner", ["auto", "pooling"])
def test_vectors_are_those_of_peft(small: Path, folders: list[Path], runner: str) -> None:
    """Of the same text with each; prefixes of one are not another's."""
    text, wanted = [*range(3, 53)], []
    for path in (None, *folders):
        with torch.no_grad():
            found = peft_model(small, path)(torch.tensor([text]), output_hidden_states=True).hidden_states[-1]
        wanted.append(found[0, -1] / found[0, -1].norm())
    llm = llm_of(small, runner=runner)
    try:
        for _ in range(2):
            outputs = llm.embed([text] * len(wanted), lora_request=requests_of(folders), use_tqdm=False)
            alike = torch.tensor([output.outputs.embedding for output in outputs]) @ torch.stack(wanted).T
            assert alike.diagonal().min() > 0.9999 and alike.fill_diagonal_(0).max() < 0.99
        assert min(output.num_cached_tokens for output in outputs) > 0
    finally:
        llm.close()


def test_the_same_name_with_other_bytes_is_another_adapter(small: Path, tmp_path: Path) -> None:
    """Also where its prefix is cached, and rows that run keep theirs."""
    folder = write_adapter(tmp_path / "a", small, 20)
    request, prompt = LoRARequest("a", 1, str(folder)), [*range(3, 40)]
    llm = llm_of(small, max_loras=1)
    try:
        before = llm.generate([prompt], GREEDY, lora_request=request)[0]
        assert tokens_of(before) == peft_tokens(small, folder, prompt, 6)
        again = llm.generate([prompt], GREEDY, lora_request=request)[0]
        assert tokens_of(again) == tokens_of(before) and again.num_cached_tokens > 0
        other = write_adapter(tmp_path / "b", small, 21)
        for file in other.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        after = llm.generate([prompt], GREEDY, lora_request=request)[0]
        assert after.num_cached_tokens == 0
        assert tokens_of(after) == peft_tokens(small, other, prompt, 6) != tokens_of(before)
        assert tokens_of(llm.generate([prompt], GREEDY)[0]) == peft_tokens(small, None, prompt, 6)
    finally:
        llm.close()


def test_attention_of_a_model_with_experts(tmp_path: Path) -> None:
    model = write_checkpoint(
        tmp_path / "moe", "mixtral", num_local_experts=4, num_experts_per_tok=2, sliding_window=None
    )
    adapter = write_adapter(tmp_path / "a", model, 3, modules=ATTENTION)
    llm = llm_of(model)
    try:
        found = llm.generate(PROMPTS[:2], GREEDY, lora_request=LoRARequest("a", 1, str(adapter)))
        assert [tokens_of(output) for output in found] == [peft_tokens(model, adapter, p, 6) for p in PROMPTS[:2]]
    finally:
        llm.close()


@pytest.mark.parametrize(
    ("family", "modules", "shape"),
    [
        ("gemma2", ALL, {"head_dim": 16}),  # what a block adds is normalised with its adapters
        ("starcoder2", ["q_proj", "v_proj", "c_fc", "c_proj"], {}),  # an MLP of two matrices
    ],
)
def test_other_families(tmp_path: Path, family: str, modules: list[str], shape: dict[str, Any]) -> None:
    model = write_checkpoint(tmp_path / family, family, **shape)
    adapter = write_adapter(tmp_path / "a", model, 3, modules=modules)
    llm = llm_of(model)
    try:
        found = llm.generate(PROMPTS[:2], GREEDY, lora_request=LoRARequest("a", 1, str(adapter)))
        assert [tokens_of(output) for output in found] == [peft_tokens(model, adapter, p, 6) for p in PROMPTS[:2]]
    finally:
        llm.close()


def test_without_adapters_a_request_for_one_is_refused(small: Path, folders: list[Path]) -> None:
    llm = llm_of(small, enable_lora=False, max_loras=1)
    try:
        with pytest.raises(RequestError, match="enable_lora"):
            llm.generate([PROMPTS[0]], GREEDY, lora_request=requests_of(folders)[1])
    finally:
        llm.close()
