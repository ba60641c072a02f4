"""Vectors and scores against Transformers, on random small checkpoints: alone and together, in chunks, on several
ranks, of folders in sentence-transformers' form."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

from planaria import LLM, PoolingParams, SamplingParams
from planaria.config.options import EngineOptions
from planaria.config.resolve import resolve
from planaria.errors import ConfigError, ModelError, RequestError
from planaria.server.stream import Choices
from planaria.server.vectors import pooling_submit
from planaria.wire import Submit
from tests.model.checkpoints import TINY, write_checkpoint, write_talker
from tests.proc.experts import MODEL
from tests.tiers import representatives

CLOSE = 0.9999  # cosine
SMALL: dict[str, Any] = {
    "device": "cpu", "max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 32, "kv_cache_memory": "8MiB",
    "skip_tokenizer_init": True,
}  # fmt: skip
draw = random.Random(18)
TEXTS = [[draw.randrange(3, 131) for _ in range(length)] for length in (1, 5, 33, 50, 128)]
Kind = Callable[[np.ndarray], np.ndarray]
KINDS: dict[str, Kind] = {"LAST": lambda h: h[-1], "MEAN": lambda h: h.mean(0), "CLS": lambda h: h[0]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3", head_dim=16)


@pytest.fixture(scope="module")
def hidden(folder: Path) -> list[np.ndarray]:
    """Of each text Transformers' last hidden states [T, H]."""
    return states(folder)


def states(folder: Path, dtype: torch.dtype = torch.float32) -> list[np.ndarray]:
    model = AutoModel.from_pretrained(folder, dtype=dtype).eval()
    with torch.no_grad():
        return [model(torch.tensor([text])).last_hidden_state[0].float().numpy() for text in TEXTS]


def cosine(a: Any, b: Any) -> float:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def embedded(llm: LLM, **wish: Any) -> list[np.ndarray]:
    outputs = llm.embed(list(TEXTS), use_tqdm=False, pooling_params=PoolingParams(**wish))
    assert [output.prompt_token_ids for output in outputs] == TEXTS
    return [np.array(output.outputs.embedding) for output in outputs]


def check(found: list[np.ndarray], wanted: list[np.ndarray], close: float = CLOSE) -> None:
    assert min(cosine(a, b) for a, b in zip(found, wanted, strict=True)) >= close


LAYOUTS: list[dict[str, Any]] = [
    {}, {"runner": "pooling"}, {"kernels": "torch"}, {"runner": "pooling", "kernels": "torch"},
    {"tensor_parallel_size": 2},
    {"runner": "pooling", "tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    {"runner": "pooling", "enable_prefix_caching": False},
]  # fmt: skip


SHARED: list[dict[str, Any]] = [
    {"prefill_context_parallel_size": 2}, {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}
]  # fmt: skip
# Each kind in one layout, each layout with one kind.
EACH = [(kind, options) for kind in KINDS for options in [*LAYOUTS, *SHARED]]


@pytest.mark.parametrize(
    ("kind", "options"), representatives(EACH, *((kind, {}) for kind in KINDS), *(("LAST", it) for it in LAYOUTS)),
    ids=lambda it: it if isinstance(it, str) else "-".join(map(str, it.values())) or "plain",
)  # fmt: skip
def test_vectors_are_those_of_transformers(
    folder: Path, hidden: list[np.ndarray], kind: str, options: dict[str, Any]
) -> None:
    """In steps of 32 tokens, so that the longer texts come in parts; twice, so that the last kind finds prefixes."""
    with LLM(str(folder), **SMALL, **options, pooler_config={"pooling_type": kind}) as llm:
        found = embedded(llm)
        check(found, [KINDS[kind](h) for h in hidden])
        assert all(abs(np.linalg.norm(vector) - 1) < 1e-5 for vector in found)
        again = embedded(llm, normalize=False)
        check(again, [KINDS[kind](h) for h in hidden])
        assert max(abs(np.linalg.norm(vector) - 1) for vector in again) > 0.1
        cached = [output.num_cached_tokens for output in llm.embed(TEXTS, use_tqdm=False)]
        assert llm.stats.epoch == 0
        assert (max(cached) > 0) == (kind == "LAST" and options.get("enable_prefix_caching", True))


@pytest.mark.parametrize("kind", representatives(KINDS, "MEAN"))
def test_bfloat16_costs_about_what_it_does_in_transformers(folder: Path, hidden: list[np.ndarray], kind: str) -> None:
    narrow = states(folder, torch.bfloat16)
    with LLM(str(folder), **SMALL, dtype="bfloat16", pooler_config={"pooling_type": kind}) as llm:
        found = embedded(llm)
    wanted = [KINDS[kind](h) for h in hidden]
    off = [1 - cosine(ours, h) for ours, h in zip(found, wanted, strict=True)]
    theirs = [1 - cosine(KINDS[kind](n), h) for n, h in zip(narrow, wanted, strict=True)]
    assert sum(off) <= 2 * sum(theirs) and max(off) < 3e-4, (off, theirs)


@pytest.mark.parametrize("runner", ["auto", "pooling"])
@pytest.mark.parametrize(
    ("family", "more"),
    [("granite", {"logits_scaling": 4.0}), ("gemma2", {"head_dim": 16}), ("starcoder2", {}), ("mixtral", {})],
)
def test_other_families(tmp_path: Path, family: str, more: dict[str, Any], runner: str) -> None:
    folder = write_checkpoint(tmp_path, family, **more)
    wanted = [h[-1] for h in states(folder)]
    with LLM(str(folder), **SMALL, runner=runner) as llm:
        found = embedded(llm, normalize=False)
    check(found, wanted)
    assert np.allclose(found, wanted, atol=5e-3 * max(map(np.linalg.norm, wanted)))


def test_alone_is_as_together(folder: Path) -> None:
    with LLM(str(folder), **SMALL, dtype="float32", batch_invariant=True) as llm:
        together = llm.embed(TEXTS, use_tqdm=False)
        llm.reset_prefix_cache()
        alone = [llm.embed(text, use_tqdm=False)[0] for text in TEXTS]
    assert [o.outputs.embedding for o in together] == [o.outputs.embedding for o in alone]


def test_texts_are_embedded_while_others_are_written(folder: Path, hidden: list[np.ndarray]) -> None:
    """One step gives tokens to some rows and vectors to others, and neither is another for it."""
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    with LLM(str(folder), **{**SMALL, "max_num_seqs": 16}) as llm:
        alone = llm.generate([text[:8] for text in TEXTS], params, use_tqdm=False)
        opened = [llm._stream(text[:8], params) for text in TEXTS]
        opened += [asked(llm, text) for text in TEXTS]
        llm._run(opened, use_tqdm=False)
        assert llm.stats.epoch == 0  # no step failed, to be tried again
    written, vectors = opened[: len(TEXTS)], opened[len(TEXTS) :]
    assert [choices.sequences[0].tokens for _, choices, _ in written] == [o.outputs[0].token_ids for o in alone]
    raw = [np.frombuffer(choices.sequences[0].pooled or b"", np.float32) for _, choices, _ in vectors]
    check(raw, [h[-1] for h in hidden])


def asked(llm: LLM, text: list[int]) -> tuple[str, Choices, list[Submit]]:
    """What `embed` has the engine asked for."""
    id = llm._next_id()
    submit = pooling_submit(id, text, llm.config.pooling, llm.facts)
    return id, Choices(text, [submit], None), [submit]


DRAFTS = {"method": "ngram", "num_speculative_tokens": 4}


def test_drafts_don_t_change_them(folder: Path, hidden: list[np.ndarray]) -> None:
    with LLM(str(folder), **SMALL, speculative_config=DRAFTS, async_scheduling=True) as llm:
        check(embedded(llm), [h[-1] for h in hidden])
        assert llm.stats.epoch == 0
        assert llm.generate(TEXTS[1], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)[0].text == ""


def test_too_little_memory_for_all_at_once(folder: Path, hidden: list[np.ndarray]) -> None:
    """Who doesn't fit waits; who generates is preempted and goes on."""
    with LLM(str(folder), **{**SMALL, "kv_cache_memory": "70KiB", "max_num_seqs": 16}) as llm:
        opened = [
            llm._stream(text[:8], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)) for text in TEXTS
        ]
        opened += [asked(llm, text) for text in TEXTS]
        llm._run(opened, use_tqdm=False)
        assert llm.stats.epoch == 0  # no step failed, to be tried again
    raw = [np.frombuffer(choices.sequences[0].pooled or b"", np.float32) for _, choices, _ in opened[len(TEXTS) :]]
    check(raw, [h[-1] for h in hidden])


@pytest.mark.parametrize("more", [{}, {"runner": "pooling"}], ids=["both", "alone"])
def test_numbers_that_are_none_are_an_error_of_that_text(tmp_path: Path, more: dict[str, Any]) -> None:
    folder = write_checkpoint(tmp_path, "llama")
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][7] = np.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with LLM(str(folder), **SMALL, **more) as llm:
        with pytest.raises(RequestError, match="not finite"):
            llm.embed([[5, 6], [5, 7], [5, 8]], use_tqdm=False)
        assert all(np.isfinite(o.outputs.embedding).all() for o in llm.embed([[5, 6], [5, 8]], use_tqdm=False))


SPLIT = {"enable_dbo": True, "dbo_prefill_token_threshold": 4, "dbo_decode_token_threshold": 1}


@pytest.mark.parametrize("more", [pytest.param({}, marks=pytest.mark.long), SPLIT], ids=["lanes", "micro-batches"])
def test_lanes_that_share_experts(tmp_path: Path, more: dict[str, Any]) -> None:
    folder = write_checkpoint(tmp_path, "qwen2_moe", **MODEL)
    wanted = [h.mean(0) for h in states(folder)]
    lanes = {**SMALL, "enable_expert_parallel": True, "data_parallel_size": 2, **more}
    with LLM(str(folder), **lanes, runner="pooling", pooler_config={"pooling_type": "MEAN"}) as llm:
        assert llm.facts.layout.startswith("dp=2")
        check(embedded(llm), wanted)


def test_lanes_do_either(tmp_path: Path) -> None:
    """Steps that are computed together give one or the other."""
    folder = write_checkpoint(tmp_path, "qwen2_moe", **MODEL)
    config = resolve(EngineOptions(model=str(folder), **SMALL, enable_expert_parallel=True, data_parallel_size=2))
    assert config.pooling.tasks == ("generate",)


# -- folders as sentence-transformers writes them


def sentence(folder: Path, mode: str, normalize: bool, **limits: Any) -> Path:
    """Adds its files; the weights are named as of the model under the head alone."""
    AutoModel.from_pretrained(folder, dtype=torch.float32).save_pretrained(folder)
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    paths = ["", "1_Pooling", "2_Normalize"]
    modules = [
        {"idx": i, "name": str(i), "path": paths[i], "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    modes = {name: name == mode for name in ("pooling_mode_cls_token", "pooling_mode_mean_tokens",
                                              "pooling_mode_max_tokens", "pooling_mode_lasttoken")}  # fmt: skip
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 64, **modes}))
    if limits:
        (folder / "sentence_bert_config.json").write_text(json.dumps({"do_lower_case": False, **limits}))
    return folder


@pytest.mark.parametrize(("mode", "kind"), [("pooling_mode_mean_tokens", "MEAN"), ("pooling_mode_lasttoken", "LAST")])
@pytest.mark.parametrize("normalize", [True, False])
def test_a_folder_of_sentence_transformers(tmp_path: Path, mode: str, kind: str, normalize: bool) -> None:
    folder = sentence(write_checkpoint(tmp_path, "llama"), mode, normalize, max_seq_length=77)
    wanted = [KINDS[kind](h) for h in states(folder)[:4]]
    assert "lm_head.weight" not in (folder / "model.safetensors").read_bytes().decode("latin-1")
    with LLM(str(folder), **{**SMALL, "max_model_len": None}) as llm:
        assert llm.facts.max_model_len == 77
        found = [np.array(o.outputs.embedding) for o in llm.embed(TEXTS[:4], use_tqdm=False)]
        check(found, wanted)
        if not normalize:
            assert np.allclose(found, wanted, atol=1e-3)
        with pytest.raises(RequestError, match="doesn't draw tokens here; it can: give embeddings"):
            llm.generate(TEXTS[0])
        with pytest.raises(RequestError, match="128 tokens; at most 77"):
            llm.embed(TEXTS[4])
        cut = llm.embed(TEXTS[4], truncate_prompt_tokens=-1, use_tqdm=False)[0]
        assert cut.prompt_token_ids == TEXTS[4][:77]


@pytest.mark.parametrize(
    ("file", "value", "said"),
    [
        ("modules.json", [{"type": "sentence_transformers.models.Dense", "path": "2_Dense"}], "module Dense"),
        ("modules.json", [{"type": "x.Pooling", "path": "../../etc"}], "outside the model"),
        ("modules.json", {"a": 1}, "not a list of modules"),
        ("1_Pooling/config.json", {"pooling_mode_max_tokens": True}, "pooling_mode_max_tokens is not supported"),
        ("1_Pooling/config.json", [], "not a JSON object"),
        ("sentence_bert_config.json", {"do_lower_case": True}, "do_lower_case"),
        ("sentence_bert_config.json", {"max_seq_length": "x"}, "max_seq_length"),
        ("config.json", {"is_causal": False}, "is_causal False: attention in both directions"),
        ("config.json", {"architectures": ["BertModel"]}, "architecture BertModel is not supported"),
        ("config.json", {"matryoshka_dimensions": [0]}, "matryoshka_dimensions"),
    ],
)
def test_what_would_make_other_vectors_is_refused(tmp_path: Path, file: str, value: Any, said: str) -> None:
    folder = sentence(write_checkpoint(tmp_path, "llama"), "pooling_mode_mean_tokens", True)
    if file == "config.json":
        value = {**json.loads((folder / file).read_text()), **value}
    (folder / file).write_text(json.dumps(value))
    with pytest.raises(ModelError, match=said):
        LLM(str(folder), model_impl="planaria", **SMALL)  # else Transformers is asked, too


# -- dimensions


def test_dimensions(folder: Path, hidden: list[np.ndarray]) -> None:
    any_size = {"hf_overrides": {"is_matryoshka": True}}
    with LLM(str(folder), **SMALL, **any_size, pooler_config='{"dimensions": 32}') as llm:
        found = embedded(llm, dimensions=16)
        check(found, [h[-1][:16] for h in hidden])
        assert all(len(v) == 16 and abs(np.linalg.norm(v) - 1) < 1e-5 for v in found)
        assert all(len(vector) == 32 for vector in embedded(llm))
        with pytest.raises(RequestError, match="dimensions 65: must be from 1 to 64"):
            embedded(llm, dimensions=65)
    with LLM(str(folder), **SMALL, hf_overrides='{"matryoshka_dimensions": [16, 48]}') as llm:
        assert len(embedded(llm, dimensions=48)[0]) == 48
        with pytest.raises(RequestError, match="dimensions 32: the model was trained for 16, 48"):
            embedded(llm, dimensions=32)
    with LLM(str(folder), **SMALL) as llm, pytest.raises(RequestError, match="dimensions 32: the model wasn't trained"):
        embedded(llm, dimensions=32)


# -- labels


def labelled(folder: Path, labels: int, family: str = "qwen2", **more: Any) -> Any:
    """A random classifier, and Transformers' model of it."""
    config = AutoConfig.for_model(family, **{**TINY, "num_labels": labels, "pad_token_id": 0, **more})
    torch.manual_seed(labels)
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith("norm.weight"):
                parameter.copy_(1.5 * torch.randn(parameter.shape) / parameter.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    return model


WAYS: dict[str, dict[str, Any]] = {"one": {}, "tp": {"tensor_parallel_size": 2}, "torch": {"kernels": "torch"}}
LABELLED = [(family, way) for family in ("llama", "qwen2", "qwen3", "mistral") for way in WAYS]
LABELLED_OFTEN = [(family, way) for family, way in LABELLED if way == "one" or family == "qwen3"]


@pytest.mark.parametrize(("family", "way"), representatives(LABELLED, *LABELLED_OFTEN))
def test_labels_are_those_of_transformers(tmp_path: Path, family: str, way: str) -> None:
    model = labelled(tmp_path, 3, family, id2label={0: "bad", 1: "fair", 2: "good"})
    with torch.no_grad():
        logits = [model(torch.tensor([text])).logits[0].numpy() for text in TEXTS]
    with LLM(str(tmp_path), **SMALL, **WAYS[way]) as llm:
        assert llm.config.pooling.labels == ("bad", "fair", "good")
        found = [np.array(o.outputs.probs) for o in llm.classify(TEXTS, use_tqdm=False)]
        raw = [o.outputs.data for o in llm.encode(TEXTS, PoolingParams(activation=False), use_tqdm=False)]
        with pytest.raises(RequestError, match="doesn't give embeddings here; it can: classify"):
            llm.embed(TEXTS[0])
        with pytest.raises(RequestError, match="doesn't score pairs"):
            llm.score("a", "b")
    assert np.allclose(raw, logits, atol=1e-3)
    assert np.allclose(found, torch.tensor(np.array(logits)).softmax(-1).numpy(), atol=1e-4)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, lambda x: 1 / (1 + np.exp(-x))), ({"problem_type": "regression"}, lambda x: x),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, lambda x: x),
    ],
    ids=["sigmoid", "regression", "identity"],
)  # fmt: skip
def test_scores_of_pairs(tmp_path: Path, more: dict[str, Any], expected: Any) -> None:
    """A model with one label looks at both texts together; one without at each alone."""
    folder = write_talker(tmp_path / "talker")
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    model = labelled(tmp_path / "pairs", 1, "llama", **more, vocab_size=size)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "pairs" / name).write_bytes((folder / name).read_bytes())
    options = {**SMALL, "skip_tokenizer_init": False}
    pairs = [("one", "two"), ("one", "a longer text"), ("one", "x")]
    with LLM(str(tmp_path / "pairs"), **options) as llm:
        tokenizer = llm.tokenizer
        found = [o.outputs.score for o in llm.score("one", [b for _, b in pairs], use_tqdm=False)]
        with pytest.raises(RequestError, match="data_1 has 2 texts and data_2 3"):
            llm.score(["a", "b"], ["a", "b", "c"])
        with pytest.raises(RequestError, match="data_2 is empty"):
            llm.score("a", [])
    assert tokenizer is not None
    with torch.no_grad():
        logits = [float(model(torch.tensor([tokenizer.encode(a + b)])).logits) for a, b in pairs]
    assert np.allclose(found, [expected(x) for x in logits], atol=1e-4)
    with LLM(str(folder), **options) as llm:
        alike = llm.score(["one", "one"], ["one", "two"], use_tqdm=False)
        a, b = (np.array(o.outputs.embedding) for o in llm.embed(["one", "two"], use_tqdm=False))
    assert abs(alike[0].outputs.score - 1) < 1e-6 and abs(alike[1].outputs.score - cosine(a, b)) < 1e-6


# -- what can't be


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"runner": "generate", "convert": "embed"}, "is for --runner pooling"),
        ({"runner": "pooling", "convert": "none"}, "draws tokens"), ({"convert": "classify"}, "no scores of labels"),
        ({"pooler_config": {"pooling_type": "STEP"}}, "use one of LAST, MEAN, CLS"),
        ({"pooler_config": "{"}, "can't be read"), ({"pooler_config": {"kind": 1}}, "fields: pooling_type"),
        ({"pooler_config": {"dimensions": 32}}, "wasn't trained for shorter vectors"),
        ({"hf_overrides": "[1]"}, "can't be read"),
        ({"runner": "pooling", "speculative_config": {"method": "ngram"}}, "draws no tokens"),
        ({"task": "transcription"}, "must be one of|choose"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_options_that_can_t_be(folder: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        LLM(str(folder), **SMALL, **options)


def test_vllm_s_older_words(folder: Path, hidden: list[np.ndarray]) -> None:
    with LLM(str(folder), **SMALL, task="embed", override_pooler_config={"pooling_type": "MEAN"}) as llm:
        check(embedded(llm), [h.mean(0) for h in hidden])
        assert llm.config.model.head == ""


def test_a_model_that_only_generates(folder: Path) -> None:
    said = "doesn't give embeddings here; it can: draw tokens"
    with LLM(str(folder), **SMALL, runner="generate") as llm, pytest.raises(RequestError, match=said):
        llm.embed(TEXTS[0])


def test_texts_that_can_t_be(folder: Path) -> None:
    with LLM(str(folder), **SMALL) as llm:
        for text, said in (([], "empty"), ([131], "0 to 130"), ([1] * 129, "129 tokens; at most 128")):
            with pytest.raises(RequestError, match=said):
                llm.embed([text])
        with pytest.raises(RequestError, match="truncate_prompt_tokens must be -1 or at least 1"):
            llm.embed([TEXTS[0]], truncate_prompt_tokens=0)
        assert llm.embed([TEXTS[4]], truncate_prompt_tokens=3, use_tqdm=False)[0].prompt_token_ids == TEXTS[4][:3]
