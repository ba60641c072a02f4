"""Folders that are no adapters of the model: each is refused with the file and what is wrong with it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from planaria.checkpoint.adapter import CONFIG, WEIGHTS, read_adapter
from planaria.config.options import LoRAConfig
from planaria.errors import ConfigError, ModelError, RequestError
from planaria.models import model_config
from planaria.models.config import ModelConfig
from planaria.models.linears import linears
from planaria.server.loras import LoraRegistry, load_modules, named_paths

HF = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 131, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}  # fmt: skip
Q = "base_model.model.model.layers.1.self_attn.q_proj"


def model() -> ModelConfig:
    return model_config(HF, {})


def write(folder: Path, tensors: dict[str, Any] | None = None, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    found = {f"{Q}.lora_A.weight": np.ones((4, 64), np.float32), f"{Q}.lora_B.weight": np.ones((64, 4), np.float32)}
    save_file(found if tensors is None else tensors, folder / WEIGHTS)
    given = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "use_dora": False, **config}
    (folder / CONFIG).write_text(json.dumps(given))
    return folder


def pair(rows: int = 64, rank: int = 4, columns: int = 64, name: str = Q, value: float = 1.0) -> dict[str, Any]:
    return {
        f"{name}.lora_A.weight": np.full((rank, columns), value, np.float32),
        f"{name}.lora_B.weight": np.ones((rows, rank), np.float32),
    }


def test_what_is_read(tmp_path: Path) -> None:
    names = [f"base_model.model.model.layers.{layer}.{m}" for layer in (1, 0) for m in ("self_attn.q_proj",)]
    tensors = {key: value for name in names for key, value in pair(name=name).items()}
    found = read_adapter(write(tmp_path / "a", tensors, alpha_pattern={"layers.0.self_attn.q_proj": 2}), model(), 16)
    assert [[module.name for module in part] for part in found.parts] == [
        ["model.layers.0.self_attn.q_proj"], ["model.layers.1.self_attn.q_proj"],
    ]  # fmt: skip
    assert [part[0].scaling for part in found.parts] == [0.5, 2.0] and found.rank == 4
    assert read_adapter(tmp_path / "a", model(), 16).digest == found.digest


def test_the_digest_is_of_bytes_and_configuration(tmp_path: Path) -> None:
    folders = [
        write(tmp_path / "a"), write(tmp_path / "b", lora_alpha=9), write(tmp_path / "c", pair(value=2.0)),
        write(tmp_path / "d"),
    ]  # fmt: skip
    digests = [read_adapter(folder, model(), 16).digest for folder in folders]
    assert len(set(digests)) == 3 and digests[0] == digests[3]


def fifo(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    os.mkfifo(folder / WEIGHTS)


def pickled(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")


def cut(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-1])


def large(folder: Path) -> None:
    """Of no real bytes, and more than an adapter of this model can have."""
    os.truncate(folder / WEIGHTS, 1 << 40)


ODD = "base_model.model.model.layers.1."
REFUSED: list[tuple[dict[str, Any] | None, dict[str, Any], Callable[[Path], object] | None, str]] = [
    (None, {}, lambda folder: (folder / CONFIG).unlink(), "adapter_config.json: no such file"),
    (None, {}, lambda folder: (folder / WEIGHTS).unlink(), "adapter_model.safetensors: no such file"),
    (None, {}, lambda folder: (folder / CONFIG).write_text("{"), "not valid JSON"),
    (None, {}, pickled, "pickle"), (None, {}, fifo, "is not a file"), (None, {}, cut, "truncated"),
    (None, {}, large, "has 1099511627776 bytes; an adapter of this model"),
    (None, {"peft_type": "IA3"}, None, "only LORA"), (None, {"use_dora": True}, None, "use_dora is True"),
    (None, {"use_rslora": True}, None, "use_rslora is True"), (None, {"bias": "all"}, None, "bias is 'all'"),
    (None, {"modules_to_save": ["lm_head"]}, None, "modules_to_save is"),
    (None, {"init_lora_weights": "pissa_niter_4"}, None, "init_lora_weights is 'pissa_niter_4', so the adapter is one"),
    (None, {"init_lora_weights": "olora"}, None, "is 'olora'"),
    (None, {"r": 17}, None, "--max-lora-rank"), (None, {"r": True}, None, "r is True"),
    (None, {"r": 10**9}, None, "--max-lora-rank"), (None, {"lora_alpha": float("nan")}, None, "lora_alpha is nan"),
    (None, {"lora_alpha": 10**400}, None, "float32 holds"),
    (None, {"alpha_pattern": {"q_proj": 1e300}}, None, "q_proj is 1e"),
    (None, {"rank_pattern": {"(a+)+$": 3}}, None, "regular expressions"),
    (None, {"rank_pattern": {"q_proj": 99}}, None, "from 1 to 16"),
    (pair(rows=32), {}, None, "adapter is of another model"), (pair(columns=65), {}, None, "of another model"),
    (pair(rank=3), {}, None, "of rank 4 it must be"), (pair(value=float("nan")), {}, None, "NaN or infinite"),
    (pair(value=float("inf")), {}, None, "NaN or infinite"), ({}, {}, None, "no tensors"),
    (dict([*pair().items()][:1]), {}, None, "lora_A alone"),
    (pair(name=f"{ODD}mlp.experts.0.up_proj"), {}, None, "they can change down_proj"),
    (pair(name="base_model.model.model.layers.7.self_attn.q_proj"), {}, None, "changes model.layers.7"),
    ({**pair(), f"{Q}.lora_magnitude_vector": np.ones(64, np.float32)}, {}, None, "lora_magnitude_vector is none"),
    ({"base_model.model.model.embed_tokens.lora_embedding_A": np.ones((4, 131), np.float32)}, {}, None, "is none of"),
    ({name: value.astype(np.int8) for name, value in pair().items()}, {}, None, "is of i8"),
]  # fmt: skip


@pytest.mark.parametrize(("tensors", "config", "harm", "says"), REFUSED, ids=[says for *_, says in REFUSED])
def test_what_is_no_adapter_of_the_model_is_refused(
    tmp_path: Path, tensors: dict[str, Any] | None, config: dict[str, Any], harm: Any, says: str
) -> None:
    folder = write(tmp_path / "a", tensors, **config)
    if harm is not None:
        harm(folder)
    with pytest.raises(ModelError) as error:
        read_adapter(folder, model(), 16)
    assert says in str(error.value) and "\n" not in str(error.value) and len(str(error.value)) < 1000


def test_half_precision_is_looked_through_for_nan(tmp_path: Path) -> None:
    tensors = {name: value.astype(np.float16) for name, value in pair().items()}
    read_adapter(write(tmp_path / "a", tensors), model(), 16)
    tensors[f"{Q}.lora_B.weight"][3, 1] = np.inf
    with pytest.raises(ModelError, match="NaN or infinite"):
        read_adapter(write(tmp_path / "a", tensors), model(), 16)


def test_paths_that_are_none(tmp_path: Path) -> None:
    registry = LoraRegistry(LoRAConfig(), model())
    for path in ("", "a\0b", str(tmp_path / "none"), "/dev/null", "~nobody-at-all/a", "x" * 5000):
        with pytest.raises(RequestError):
            registry.read(path)


def test_names(tmp_path: Path) -> None:
    registry = LoraRegistry(LoRAConfig(max_cpu_loras=2), model(), ["base"])
    told: list[Any] = []
    registry.tell = told.append  # type: ignore[method-assign]
    one, two = (registry.read(str(write(tmp_path / name, lora_alpha=alpha))) for name, alpha in (("a", 1), ("b", 2)))
    for name in ("", "base", "a\nb", "n" * 300):
        with pytest.raises(RequestError):
            registry.add(name, one)
    assert registry.add("a", one) and not registry.add("a", one) and registry.add("b", one)
    assert [type(message).__name__ for message in told] == ["LoadLora"]  # its bytes are sent once
    with pytest.raises(RequestError, match="--max-cpu-loras"):
        registry.add("c", one)
    assert registry.add("a", two) and registry.named["a"].digest == two.digest and len(told) == 2
    registry.remove("b")
    assert [type(message).__name__ for message in told[2:]] == ["UnloadLora"] and told[2].digest == one.digest
    assert [message.digest for message in registry.messages()] == [one.digest, two.digest]  # who has it may go on
    with pytest.raises(RequestError, match="no adapter 'b'"):
        registry.remove("b")


def test_modules_of_the_command_line(tmp_path: Path) -> None:
    given = ["a=/x=y", '{"name": "b", "path": "/z", "base_model_name": null}']
    assert list(named_paths(given)) == [("a", "/x=y"), ("b", "/z")]
    for wrong in ("a", "=b", "a=", '{"name": "b"}', "{"):
        with pytest.raises(ConfigError, match="--lora-modules"):
            list(named_paths([wrong]))
    with pytest.raises(ConfigError, match="--enable-lora"):
        load_modules(None, ["a=b"])
    with pytest.raises(ConfigError, match="no such file"):
        load_modules(LoraRegistry(LoRAConfig(), model()), [f"a={tmp_path}"])


def test_the_matrices_are_named_as_in_the_checkpoint() -> None:
    shapes = linears(model())
    assert shapes["model.layers.1.mlp.down_proj"] == (64, 96) and shapes["model.layers.0.self_attn.k_proj"] == (32, 64)
    assert len(shapes) == 14
