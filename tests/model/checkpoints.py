"""Random small checkpoints in Hugging Face layout, written with Transformers, and their tensors as a source.

Weights are drawn wide enough that attention is not uniform and logits differ by several units: with the
initial values Transformers uses (0.02) most mistakes in attention would vanish below the tolerance.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from planaria.errors import ModelError
from planaria.kernels.ops import Quantized
from planaria.kernels.quant import dequantise as unpack

TINY: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 131, "max_position_embeddings": 256, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def write_checkpoint(folder: Path, family: str, seed: int = 0, **overrides: Any) -> Path:
    """config.json and model.safetensors (float32) of a random model; returns the folder."""
    config = AutoConfig.for_model(family, **{**TINY, **overrides})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                parameter.copy_(1 + 0.2 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.3 * noise)
            else:
                parameter.copy_(1.5 * noise / parameter.shape[-1] ** 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
    model.save_pretrained(folder)
    return folder


END = "<|end|>"
MERGES = ['{ "', '" :', '" ,', '" }', "t r", "tr u", "tru e", "n u", "nu l", "nul l", "a b", "ab c", "0 0", "Ġ Ġ"]


def write_tokenizer(folder: Path) -> int:
    """tokenizer.json of bytes and a few pairs of them, 256 + MERGES + an end token.
    Returns how many."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    pairs = [(left, right) for left, right in (merge.split(" ") for merge in MERGES)]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: i for i, text in enumerate([*alphabet, *("".join(pair) for pair in pairs)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    return int(tokenizer.get_vocab_size())


def write_talker(folder: Path, family: str = "llama", **overrides: Any) -> Path:
    """A random model with that tokenizer, and two tokens more than it has."""
    folder.mkdir(exist_ok=True)
    size = write_tokenizer(folder)
    shape: dict[str, Any] = {
        "vocab_size": size + 2,
        "eos_token_id": size - 1,
        "bos_token_id": None,
        "max_position_embeddings": 1024,
    }
    return write_checkpoint(folder, family, **{**shape, **overrides})


def load_reference(folder: Path) -> Any:
    """Transformers' own model of the checkpoint, float32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def cut(weight: Quantized, rows: slice | None, cols: slice | None) -> Quantized:
    """Part of a packed weight; columns at multiples of 32."""
    blocks = weight.data.reshape(weight.shape[0], weight.shape[1] // 32, -1)[rows or slice(None)]
    if cols is not None:
        blocks = blocks[:, cols.start // 32 : cols.stop // 32]
    return Quantized(weight.kind, blocks.reshape(blocks.shape[0], -1), (blocks.shape[0], blocks.shape[1] * 32))


class DictSource:
    """A source over arrays in memory."""

    def __init__(self, tensors: dict[str, npt.NDArray[Any] | Quantized]) -> None:
        self.tensors = tensors

    @classmethod
    def open(cls, folder: Path) -> DictSource:
        return cls(dict(load_file(folder / "model.safetensors")))

    def names(self) -> list[str]:
        return list(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def expect(self, name: str, shape: tuple[int, ...]) -> None:
        if name not in self.tensors:
            raise ModelError(f"tensor {name} is missing, expected {shape}")
        if self.shape(name) != shape:
            raise ModelError(f"tensor {name} has shape {self.shape(name)}, expected {shape}")

    def get(
        self, name: str, *, dequantise: bool = False, rows: Any = None, cols: Any = None
    ) -> npt.NDArray[Any] | Quantized:  # fmt: skip
        tensor = self.tensors[name]
        if isinstance(tensor, Quantized):
            tensor = unpack(tensor) if dequantise else cut(tensor, rows, cols)
        if isinstance(tensor, Quantized):
            return tensor
        if rows is not None:
            tensor = tensor[rows]
        return tensor if cols is None else tensor[:, cols]

    def forget(self, name: str) -> None:
        pass


def write_head(folder: Path, seed: int = 5, bias: bool = True, **overrides: Any) -> Path:
    """A random head in EAGLE's format, for a model of write_checkpoint: a layer without its first norm, `fc`, and no
    norm at the end."""
    write_checkpoint(folder, "llama", seed, **{"num_hidden_layers": 1, **overrides})
    size = config_of(folder)["hidden_size"]
    tensors = load_file(folder / "model.safetensors")
    left_out = ("lm_head.", "model.norm.", "model.embed_tokens.", "model.layers.0.input_layernorm.")
    kept = {name.removeprefix("model."): t for name, t in tensors.items() if not name.startswith(left_out)}
    generator = np.random.default_rng(seed)
    kept["fc.weight"] = generator.normal(0, (2 * size) ** -0.5, (size, 2 * size)).astype(np.float32)
    if bias:
        kept["fc.bias"] = generator.normal(0, 0.3, size).astype(np.float32)
    save_file(kept, folder / "model.safetensors")
    return folder
