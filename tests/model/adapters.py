"""Random adapters as peft writes them, and the tokens that peft's own model draws with them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from planaria.checkpoint.adapter import read_adapter
from planaria.models import model_config
from planaria.wire import LoadLora
from tests.model.checkpoints import config_of, load_reference

peft = pytest.importorskip("peft")

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ATTENTION = ALL[:4]


def write_adapter(folder: Path, model: Path, seed: int, *, modules: Sequence[str] = ALL, **config: Any) -> Path:
    """Of a rank of 8 unless `config` says another, wide enough that tokens are others."""
    given = {"r": 8, "lora_alpha": 16, "target_modules": list(modules), **config}
    adapted = peft.get_peft_model(load_reference(model), peft.LoraConfig(task_type="CAUSAL_LM", **given))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                width = parameter.shape[1]
                parameter.copy_(0.7 * torch.randn(parameter.shape, generator=generator) / width**0.5)
    adapted.save_pretrained(folder)
    return folder


@functools.cache
def peft_model(model: Path, adapter: Path | None) -> Any:
    plain = load_reference(model)
    return plain if adapter is None else peft.PeftModel.from_pretrained(plain, adapter).eval()


def peft_tokens(model: Path, adapter: Path | None, prompt: Sequence[int], count: int) -> list[int]:
    """Greedy."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(peft_model(model, adapter)(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def orders(model: Path, adapter: Path, max_rank: int = 16) -> tuple[str, list[LoadLora]]:
    """Its digest, and what gives it to an engine."""
    hf = config_of(model)
    read = read_adapter(adapter, model_config(hf, {}), max_rank)
    parts = [LoadLora(read.digest, number, len(read.parts), part) for number, part in enumerate(read.parts)]
    return read.digest, parts
