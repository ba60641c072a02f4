"""Models that Transformers' own code runs on paged caches: `generate`'s tokens, and what is refused by name."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from planaria import LLM, SamplingParams
from planaria.checkpoint import Checkpoint, foreign
from planaria.checkpoint.folder import read_folder
from planaria.checkpoint.foreign import model_of
from planaria.cli.model_report import report
from planaria.config.options import EngineOptions
from planaria.config.resolve import other_weights, resolve
from planaria.errors import ConfigError, ModelError
from planaria.hf import look
from planaria.hf.attention import Mask, Sees
from planaria.hf.model import TransformersModel, read
from planaria.hf.packed import PackedWeight
from planaria.hosts.weights import UnwrittenPart, WeightsMemory
from planaria.kernels.cpu.caches import PagedKV
from planaria.kernels.reference import SlotKV, TorchOps
from planaria.models.config import Foreign, ModelConfig
from planaria.models.shard import Shard
from planaria.worker.tensor_weights import TensorWriting, mapped_tensors
from tests.model.checkpoints import load_reference, write_checkpoint
from tests.model.driver import Driver
from tests.model.engines import Engine
from tests.tiers import representatives

WINDOW = {"sliding_window": 8}
PLAIN = {"num_key_value_heads": 4}
GPT = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": GPT,
    "gpt_bigcode": GPT,
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "gpt_neox": PLAIN,
    "cohere": {},
    "cohere2": WINDOW,
    "olmo": {},
    "olmo2": {},
    "olmo3": WINDOW,
    "stablelm": {},
    "persimmon": PLAIN,
    "phi": {},
    "glm": {"head_dim": 16, "pad_token_id": None},
    "glm4": {"head_dim": 16, "pad_token_id": None},
    "nemotron": {"head_dim": 16},
    "arcee": {},
    "ernie4_5": {"head_dim": 16},
    "exaone4": {**WINDOW, "sliding_window_pattern": 2},
    "helium": {"head_dim": 16},
    "smollm3": {"pad_token_id": None},
    "seed_oss": {"head_dim": 16},
    "hunyuan_v1_dense": {"head_dim": 16},
    "apertus": {},
    "vaultgemma": {**WINDOW, "head_dim": 16, "query_pre_attn_scalar": 16},
    "biogpt": PLAIN,
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "ernie4_5_moe": {
        "head_dim": 16, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_layer_start_index": 0,
    },
    "llama4_text": {"head_dim": 16, "attention_chunk_size": 8, "intermediate_size_mlp": 96, "num_local_experts": 4},
    # soft caps on scores and logits, and sinks: of families that this package's code runs, too
    "gemma2": {**WINDOW, "head_dim": 16, "query_pre_attn_scalar": 16},
    "gpt_oss": {**WINDOW, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "pad_token_id": None},
}  # fmt: skip
SHORT = ("gpt_neox", "cohere2", "gemma2")  # of the default run
COUNT = 20  # tokens
PROMPTS = [[5, 9, 2, 7, 11], [3 + 7 * i % 101 for i in range(23)], [17]]


@pytest.fixture(autouse=True)
def looked_at_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, which has imported all that."""

    def run(asked: bytes) -> bytes:
        return look.answer(asked).encode()

    monkeypatch.setattr(foreign, "_run", run)


def foreign_model(folder: Path) -> tuple[Checkpoint, ModelConfig]:
    checkpoint = read_folder(str(folder), folder)
    return checkpoint, model_of(checkpoint, "transformers")


def generated(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    """By Transformers."""
    net, ids = load_reference(folder), []
    net.generation_config.eos_token_id = None
    for prompt in prompts:
        out = net.generate(torch.tensor([prompt]), max_new_tokens=COUNT, do_sample=False, pad_token_id=0)
        ids.append(out[0, len(prompt) :].tolist())
    return ids


def driven(driver: Driver, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy, all at once: histories in chunks, beside others that go on."""
    left, ids = [list(prompt) for prompt in prompts], [list[int]() for _ in prompts]
    while any(len(own) < COUNT for own in ids):
        feed = {i: (left[i][:7] or ids[i][-1:]) for i in range(len(prompts)) if len(ids[i]) < COUNT}
        for i, logits in driver.step(feed).items():
            left[i] = left[i][7:]
            if not left[i]:
                ids[i].append(int(logits[-1].argmax()))
    return ids


def packed_by_another(config: ModelConfig, checkpoint: Checkpoint, ops: TorchOps) -> TransformersModel:
    """A model whose tensors all are in the node's memory."""
    memory = WeightsMemory.make()
    assert memory is not None
    part = memory.open(b"some" * 4)
    assert isinstance(part, UnwrittenPart)
    writing = TensorWriting(part)
    read(config, checkpoint, ops, Shard.full(config), packings=writing)
    return read(config, checkpoint, ops, Shard.full(config), packings=mapped_tensors(writing.done()))


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name in SHORT else pytest.mark.long) for name in FAMILIES]
)
def test_the_tokens_of_generate(family: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, family, **FAMILIES[family])
    checkpoint, config = foreign_model(folder)
    assert config.foreign is not None and config.num_parameters == load_reference(folder).num_parameters()
    ops = TorchOps()
    model, wanted = packed_by_another(config, checkpoint, ops), generated(folder, PROMPTS)
    windows = [layer.window for layer in config.foreign.layers]
    assert driven(Driver(model, ops, block_size=16), PROMPTS) == wanted
    assert [type(layer.kv) is PagedKV for layer in model.layers] == [window is not None for window in windows]
    model.drop_kv()
    assert driven(Driver(model, ops, block_size=8), PROMPTS) == wanted  # which the kernels' caches don't have
    assert all(type(layer.kv) is SlotKV for layer in model.layers)
    model.drop_kv()


def test_which_keys_a_mask_shows() -> None:
    """All, or so many of the last; what is neither is left to torch."""

    def window(sees: Sees, longest: int = 4096) -> int | None:
        return Mask(sees).window(longest)

    def causal(row: Any, head: Any, query: Any, key: Any) -> Any:
        return key <= query

    def last(count: int) -> Sees:
        return lambda row, head, query, key: (key <= query) & (key > query - count)

    assert window(causal) == window(last(4096)) == window(causal, 3) == 0
    assert [window(last(count)) for count in (1, 8, 1000, 4095)] == [1, 8, 1000, 4095]
    assert window(lambda row, head, query, key: (key <= query) & (key // 64 == query // 64)) is None
    assert window(lambda row, head, query, key: (key <= query) & (key % 3 != 1)) is None
    assert window(lambda row, head, query, key: (key <= query) & ((query < 2000) | (key > query - 8))) is None
    assert window(lambda row, head, query, key: key < query) is None
    assert window(lambda row, head, query, key: torch.zeros(4, device="meta").sum() > key) is None


def refusal(kind: str, **fields: Any) -> str:
    config = {
        "model_type": kind, "architectures": [f"{kind}Model"], "hidden_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "vocab_size": 131, **fields,
    }  # fmt: skip
    with pytest.raises(ModelError) as error:
        model_of(Checkpoint(name="it", path="it", format="safetensors", config=config), "transformers")
    return str(error.value)


STATE, OWN = "keep state other than keys and values", "attend in ways of their own"


@pytest.mark.parametrize(
    "kind, architecture, fields, why",
    [
        ("mamba", "MambaForCausalLM", {}, STATE),
        ("rwkv", "RwkvForCausalLM", {}, STATE),
        ("lfm2", "Lfm2ForCausalLM", {"layer_types": ["conv", "full_attention"]}, f"conv) {STATE}"),
        ("t5", "T5ForConditionalGeneration", {}, "only decoders"),
        ("bert", "BertLMHeadModel", {}, "see later ones"),
        ("bloom", "BloomForCausalLM", {}, OWN),  # alibi
        ("falcon", "FalconForCausalLM", {}, OWN),
        ("diffllama", "DiffLlamaForCausalLM", {}, OWN),
        ("llama", "LlavaForConditionalGeneration", {}, "makes a LlamaForCausalLM of it"),
        ("nonesuch", "NoneForCausalLM", {}, "no configuration of model_type 'nonesuch'"),
        ("olmo", "OlmoForCausalLM", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "(dynamic)"),
        ("olmo", "OlmoForCausalLM", {"quantization_config": {"quant_method": "gptq"}}, "quantised"),
        ("olmo", "OlmoForCausalLM", {"dtype": "float64"}, "float64"),
    ],
)
def test_what_it_does_not_run_is_refused_by_name(
    kind: str, architecture: str, fields: dict[str, Any], why: str
) -> None:  # fmt: skip
    said = refusal(kind, architectures=[architecture], **fields)
    assert architecture in said and why in said and "\n" not in said


def test_without_the_extras_their_name_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign, "find_spec", lambda name: None)
    assert 'pip install "planaria[torch,transformers]"' in refusal("olmo", architectures=["OlmoForCausalLM"])
    monkeypatch.undo()
    monkeypatch.setattr("importlib.metadata.version", lambda name: "4.57.1")
    assert "4.57.1 is too old" in refusal("olmo", architectures=["OlmoForCausalLM"])


def test_whose_code_runs_it(tmp_path: Path) -> None:
    llama, olmo = write_checkpoint(tmp_path / "llama", "llama"), write_checkpoint(tmp_path / "olmo", "olmo")

    def runs(folder: Path, choice: str) -> bool:
        return model_of(read_folder(str(folder), folder), choice).foreign is not None

    assert not runs(llama, "auto") and not runs(llama, "planaria") and runs(llama, "transformers")
    assert runs(olmo, "auto")
    with pytest.raises(ModelError, match="OlmoForCausalLM is not supported"):
        runs(olmo, "planaria")


def test_what_it_does_not_have_is_refused_at_the_door(tmp_path: Path) -> None:
    folder = str(write_checkpoint(tmp_path, "olmo"))
    for name, value in (
        ("kernels", "native"), ("quantization", "q8_0"), ("enable_lora", True), ("pipeline_parallel_size", 2),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} .*OlmoForCausalLM is run by Transformers"):
            resolve(EngineOptions(model=folder, device="cpu", **{name: value}))  # type: ignore[arg-type]
    config = resolve(EngineOptions(model=folder, device="cpu"))
    assert config.device.kernels == "torch"
    other_weights(config, folder)


def test_tensors_that_are_missing_are_named(tmp_path: Path) -> None:
    checkpoint, config = foreign_model(write_checkpoint(tmp_path, "olmo"))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"missing tensors: model.layers\.1\.mlp\.up_proj\.weight"):
        read(config, checkpoint, TorchOps(), Shard.full(config))


def test_the_report_says_who_runs_it(tmp_path: Path) -> None:
    said = report(str(write_checkpoint(tmp_path, "persimmon", num_key_value_heads=4)))
    assert (said["run_by"], said["refused"], said["weights"]) == ("transformers", None, [])
    assert said["kv_bytes_per_token"] == 2 * 2 * 4 * 16 * 4 and said["weight_bytes"] == 4 * said["parameters"]


def test_hidden_states_are_those_of_the_logits(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "olmo")
    checkpoint, config = foreign_model(folder)
    ops = TorchOps()
    model = read(config, checkpoint, ops, Shard.full(config))
    driver = Driver(model, ops)
    logits = driver.step({0: PROMPTS[1]})[0]
    again, hidden = ops.compile(model.forward_both, driver.batch)()
    torch.testing.assert_close(torch.tensor(again), logits)
    net = load_reference(folder)
    wanted = net.base_model(torch.tensor([PROMPTS[1]]))[0][0]
    torch.testing.assert_close(torch.tensor(hidden), wanted, rtol=1e-4, atol=1e-4)
    alone = read(msgspec.structs.replace(config, head=""), checkpoint, ops, Shard.full(config))
    torch.testing.assert_close(Driver(alone, ops).step({0: PROMPTS[1]})[0], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [False, True])
def test_weights_of_products_are_packed(tied: bool, dtype: str, tmp_path: Path) -> None:
    """Also one that an embedding has; who asks for one sees it as it was."""
    folder = write_checkpoint(tmp_path, "phi", tie_word_embeddings=tied)
    checkpoint, config = foreign_model(folder)
    model = read(config, checkpoint, TorchOps(dtype=dtype), Shard.full(config))
    plain, close = load_reference(folder).to(getattr(torch, dtype)), 1e-5 if dtype == "float32" else 0.05
    names = {name for name, module in plain.named_modules() if type(module) is torch.nn.Linear}
    packed = {name: module for name, module in model.net.named_modules() if isinstance(module, PackedWeight)}
    assert "lm_head" in names and packed.keys() == names | ({"model.embed_tokens"} if tied else set())
    assert model.weight_bytes == sum(p.nbytes for p in (*plain.parameters(), *model.net.buffers()))
    for name, module in packed.items():
        old = plain.get_submodule(name)
        assert torch.equal(module.weight, old.weight)
        given = torch.randn(3, 5, old.in_features, dtype=old.weight.dtype) if name in names else torch.arange(131)[None]
        with torch.no_grad():
            torch.testing.assert_close(module(given), old(given), atol=close, rtol=close)
    wide = torch.randn(2, 64, dtype=torch.float64)
    with pytest.raises(RuntimeError):  # as torch itself
        packed["lm_head"](wide)


def test_drafts_sleep_and_other_weights(tmp_path: Path) -> None:
    """What runs it doesn't matter to them."""
    folders = [write_checkpoint(tmp_path / str(seed), "olmo", seed) for seed in (1, 2)]
    first, second = (generated(folder, PROMPTS) for folder in folders)
    params = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
    with LLM(
        str(folders[0]), dtype="float32", max_model_len=128, kv_cache_memory="8MiB", skip_tokenizer_init=True,
        threads=1, speculative_config={"method": "ngram", "num_speculative_tokens": 3},
    ) as llm:  # fmt: skip

        def answers() -> list[list[int]]:
            return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)]

        assert answers() == first
        llm.update_weights(str(folders[1]))
        assert answers() == second != first
        llm.sleep(2)
        llm.wake_up()
        assert answers() == second


def test_by_its_plan_a_model_is_cut(tmp_path: Path) -> None:
    """As Transformers' `tp_plan` says, by a number of ranks that divides all."""

    def ranks(family: str, **fields: Any) -> Foreign:
        config = foreign_model(write_checkpoint(tmp_path / family, family, **fields))[1]
        assert config.foreign is not None
        return config.foreign

    assert ranks("cohere").tensor_ranks == 2  # heads of keys
    assert "moe_tp_experts" in ranks("granitemoe", **FAMILIES["granitemoe"]).why_not
    assert ranks("opt", **FAMILIES["opt"]).why_not == "it has no tp_plan"
    for family, count, rule in (("cohere", 4, "must divide 2"), ("opt", 2, "it has no tp_plan")):
        with pytest.raises(ConfigError, match=rf"--tensor-parallel-size {count}: .*{rule}"):
            resolve(EngineOptions(model=str(tmp_path / family), device="cpu", tensor_parallel_size=count))


@pytest.mark.parametrize("family, ranks", representatives([("cohere2", 1), ("phi", 2), ("olmo3", 2)], ("phi", 2)))
def test_a_killed_rank_loses_nothing(
    family: str, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Its KV stays in the node's memory, the prefix cache finds what came before, and the answers are `generate`'s."""
    monkeypatch.undo()  # by the program of its own
    folder = write_checkpoint(tmp_path, family, **FAMILIES[family])
    asked = [(prompt * 4, COUNT) for prompt in PROMPTS[:2]]
    wanted = generated(folder, [prompt for prompt, _ in asked])
    with Engine(str(folder), tensor_parallel_size=ranks, threads=1) as engine:
        assert len(engine.pids) == ranks
        assert engine.config.model.foreign is not None
        assert engine.run(asked, 8, lambda: engine.kill(0, signal.SIGKILL)) == wanted
        (recovery,) = engine.recoveries
        assert recovery.tokens == 0
        assert engine.run(asked) == wanted
