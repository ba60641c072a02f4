"""Options that came with vLLM's words: what of the hub is meant, other tokenizers, lengths, a GPU's share."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest

from planaria import LLM
from planaria.checkpoint.resolve import Hub, hub_folder, name_of, resolve_checkpoint
from planaria.config.options import EngineConfig, EngineOptions
from planaria.config.resolve import resolve
from planaria.config.sizes import parse_tokens
from planaria.errors import CapacityError, ConfigError, ModelError
from planaria.topology.platforms import PLATFORMS
from planaria.types import SamplingParams
from planaria.worker.device import available_bytes
from tests.model import checkpoints


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(checkpoints.write_checkpoint(tmp_path_factory.mktemp("llama"), "llama"))


def resolved(folder: str, **options: Any) -> EngineConfig:
    return resolve(EngineOptions(model=folder, **{"device": "cpu", **options}))


@pytest.mark.parametrize(
    ("value", "tokens"),
    [(5, 5), ("4096", 4096), ("4k", 4000), ("4K", 4096), ("1.5k", 1500), ("auto", None), ("-1", None), (None, None)],
)
def test_tokens_as_people_write_them(value: Any, tokens: int | None) -> None:
    assert parse_tokens(value, "--max-model-len") == tokens


@pytest.mark.parametrize("value", ["many", "4kb", "1", "-5", ""])
def test_what_is_no_number_of_tokens(value: str, folder: str) -> None:
    with pytest.raises(ConfigError, match="--max-model-len"):
        resolved(folder, max_model_len=value)


def test_a_length_that_is_as_long_as_memory_allows(folder: str) -> None:
    """The model is for 256 tokens, a block of 16 takes 8 KiB: 32 KiB are 64 tokens."""
    options: dict[str, Any] = {"kv_cache_memory": 32 << 10, "skip_tokenizer_init": True, "dtype": "float32"}
    with LLM(folder, max_model_len="auto", **options) as llm:
        assert llm.facts.max_model_len == llm.facts.num_blocks * 16 == 64
        (output,) = llm.generate([[5, 9, 2]], SamplingParams(max_tokens=None, ignore_eos=True, temperature=0))
        assert len(output.outputs[0].token_ids) == 61
    with pytest.raises(CapacityError, match="lower --max-model-len"):
        LLM(folder, **options)
    with pytest.raises(CapacityError):  # not one block
        LLM(folder, max_model_len="auto", **{**options, "kv_cache_memory": 1 << 10})


def test_another_tokenizer_and_template(folder: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    found = resolved(folder, tokenizer=str(tmp_path)).checkpoint
    assert (found["tokenizer_dir"], found["chat_template"]) == (str(tmp_path), "{{ messages }}")
    assert found["path"] == folder
    assert resolved(folder, chat_template="{{ 1 }}").checkpoint["chat_template"] == "{{ 1 }}"
    file = tmp_path / "chat_template.jinja"
    assert resolved(folder, chat_template=str(file)).checkpoint["chat_template"] == "{{ messages }}"
    with pytest.raises(ModelError, match="--chat-template nowhere: is neither a template nor a file"):
        resolved(folder, chat_template="nowhere")
    with pytest.raises(ModelError, match="no tokenizer files"):
        resolved(folder, tokenizer=folder)


def test_what_of_the_hub_is_meant(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def download(repo: str, **how: Any) -> str:
        asked.append({"repo": repo, **{name: how[name] for name in ("revision", "cache_dir")}})
        return folder

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    resolve_checkpoint("some/model", Hub("v2", "there"))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="no tokenizer files"):
        resolved("some/model", revision="v2", download_dir="there", tokenizer="a/b", tokenizer_revision="v3")
    assert asked == [
        {"repo": "some/model", "revision": "v2", "cache_dir": "there"},
        {"repo": "some/model", "revision": "v2", "cache_dir": "there"},
        {"repo": "a/b", "revision": "v3", "cache_dir": "there"},
    ]
    with pytest.raises(ModelError, match="is here, and --revision v2 is of a hub id"):
        resolve_checkpoint(folder, Hub("v2"))


def test_a_model_is_called_by_no_path(folder: str, tmp_path: Path) -> None:
    (tmp_path / "some.gguf").touch()
    named = {
        "smollm2": "smollm2",
        "owner/name": "owner/name",
        folder: Path(folder).name,
        folder + "/": Path(folder).name,
    }
    assert {model: name_of(model) for model in named} == named
    assert name_of(str(tmp_path / "some.gguf")) == "some"


def test_a_revision_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.errors import RevisionNotFoundError

    def download(repo: str, **how: Any) -> str:
        raise RevisionNotFoundError("404", response=types.SimpleNamespace(headers={}, request=None))  # type: ignore[arg-type]

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(ModelError, match="the hub has no revision v9 of it; check --revision"):
        hub_folder("some/model", hub=Hub("v9"))


def test_a_share_of_a_gpu(folder: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (900, 1000))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr("planaria.config.resolve.usable_platform", lambda: PLATFORMS["cuda"])
    monkeypatch.setattr("planaria.config.machine.num_accelerators", lambda: 1)
    found = [available_bytes(resolved(folder, device="cuda", gpu_memory_utilization=u)) for u in (None, 0.5, 1.0)]
    assert found == [820, 400, 900]
    with caplog.at_level("WARNING", "planaria.config"):
        resolved(folder, gpu_memory_utilization=0.5)
    assert "--kv-cache-memory says what KV takes" in caplog.text
    with pytest.raises(ConfigError, match=r"--gpu-memory-utilization 1\.5: must be at most 1"):
        resolved(folder, gpu_memory_utilization=1.5)


def test_variables_of_vllm_are_named_in_one_warning(
    folder: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("VLLM_HOST_IP", "VLLM_LOGGING_LEVEL", "VLLM_USE_V1"):
        monkeypatch.setenv(name, "1")
    with caplog.at_level("WARNING", "planaria.config"):
        resolved(folder)
    assert [line for line in caplog.messages if "VLLM_" in line] == [
        "variables of vLLM are not read: VLLM_HOST_IP (here: PLANARIA_HOST_IP), VLLM_LOGGING_LEVEL (here: "
        "PLANARIA_LOG_LEVEL)"
    ]
