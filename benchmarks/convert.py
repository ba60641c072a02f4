"""The same weights for every engine: a bf16 folder in Hugging Face's layout from whatever MODEL planaria reads.

    python -m benchmarks.convert [MODEL] [--out FOLDER]        default: smollm2, into planaria's cache
    python -m benchmarks.convert --random FOLDER               a Llama of 1.57B with random weights, SmolLM2's tokenizer

A GGUF file's weights are dequantised once and rounded to bf16, so that engines that can't read it run the same model.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from planaria.cache import cached_folder
from planaria.checkpoint import Checkpoint, resolve_checkpoint

if TYPE_CHECKING:
    import torch

VERSION = "1"  # of what is written
MAX_LENGTH = 8192


def write_folder(checkpoint: Checkpoint, folder: Path) -> None:
    """config.json, generation_config.json, the tokenizer's files and model.safetensors, all weights bf16."""
    import numpy as np
    import torch

    from planaria.loader import WeightSource

    with WeightSource(checkpoint) as source:
        tensors = {
            name: torch.from_numpy(np.array(source.get(name, dequantise=True))).to(torch.bfloat16)
            for name in source.names()
        }
    write_model(checkpoint, tensors, folder)


def write_random(folder: Path, layers: int = 32) -> None:
    """Of 1.57B weights, in Qwen2.5-1.5B's shapes, with SmolLM2's tokens: for what depends on a model's size alone."""
    import numpy as np
    import torch

    checkpoint = resolve_checkpoint("smollm2")
    hidden, inner, heads, kv_heads, dim = 1536, 8960, 12, 2, 128
    pool = torch.from_numpy(np.random.default_rng(0).standard_normal(1 << 22, np.float32) / hidden**0.5).bfloat16()
    tensors: dict[str, torch.Tensor] = {}

    def add(name: str, rows: int, columns: int) -> None:
        first = 65537 * len(tensors) % len(pool)  # numbers of the pool, from another place on for each
        repeated = pool.roll(first).repeat(-(-rows * columns // len(pool)))
        tensors[f"model.{name}.weight"] = repeated[: rows * columns].view(rows, columns).clone()

    add("embed_tokens", checkpoint.config["vocab_size"], hidden)
    tensors["model.norm.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    for i in range(layers):
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{i}.{name}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
        for name, rows, columns in (
            ("self_attn.q_proj", heads * dim, hidden), ("self_attn.k_proj", kv_heads * dim, hidden),
            ("self_attn.v_proj", kv_heads * dim, hidden), ("self_attn.o_proj", hidden, heads * dim),
            ("mlp.gate_proj", inner, hidden), ("mlp.up_proj", inner, hidden), ("mlp.down_proj", hidden, inner),
        ):  # fmt: skip
            add(f"layers.{i}.{name}", rows, columns)
    shape = {
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": dim, "tie_word_embeddings": True,
    }  # fmt: skip
    write_model(msgspec.structs.replace(checkpoint, config={**checkpoint.config, **shape}), tensors, folder)


def write_model(checkpoint: Checkpoint, tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """These weights, and all else as a checkpoint says."""
    from safetensors.torch import save_file

    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    config = {k: v for k, v in checkpoint.config.items() if k not in ("dtype", "quantization_config")}
    config["torch_dtype"] = "bfloat16"
    if "rms_norm_eps" in config:
        config["rms_norm_eps"] = float(f"{config['rms_norm_eps']:.6g}")  # GGUF keeps it in float32: 9.9999997e-06
    _write(folder / "config.json", config)
    _write(folder / "generation_config.json", checkpoint.generation_config)
    if checkpoint.tokenizer_dir is not None:
        for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
            path = Path(checkpoint.tokenizer_dir) / name
            if path.exists():
                shutil.copyfile(path, folder / name)
        path = folder / "tokenizer_config.json"
        names = json.loads(path.read_text()) if path.exists() else {}
        names.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
        names.setdefault("model_max_length", config.get("max_position_embeddings", MAX_LENGTH))
        if checkpoint.chat_template:
            names["chat_template"] = checkpoint.chat_template
        _write(path, names)


def _write(path: Path, values: object) -> None:
    path.write_text(json.dumps(values, ensure_ascii=False, indent=1), encoding="utf-8")


def bf16_folder(model: str) -> Path:
    """The converted folder, made once per content, in planaria's cache. A bf16 folder is given back as it is."""
    checkpoint = resolve_checkpoint(model)
    if checkpoint.format != "gguf" and checkpoint.kind == "bf16":
        return Path(checkpoint.path)
    files = [(Path(f).name, Path(f).stat().st_size, Path(f).stat().st_mtime_ns) for f in checkpoint.files]
    key = hashlib.sha256(json.dumps([VERSION, checkpoint.config, files]).encode()).hexdigest()
    return cached_folder("benchmark-bf16", key, lambda folder: write_folder(checkpoint, folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--out", type=Path, help="write here instead of the cache")
    parser.add_argument("--random", type=Path, metavar="FOLDER", help="write a random model of 1.57B there")
    options = parser.parse_args()
    if options.random is not None:
        options.random.mkdir(parents=True, exist_ok=True)
        write_random(options.random)
        print(options.random)
        return
    if options.out is None:
        print(bf16_folder(options.model))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    write_folder(resolve_checkpoint(options.model), options.out)
    print(options.out)


if __name__ == "__main__":
    main()
