"""`planaria models MODEL`: what a folder or a file is, what becomes of its weights, what it takes, and what won't work,
before anything is loaded."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from planaria.checkpoint import Checkpoint
from planaria.checkpoint.folder import read_json
from planaria.checkpoint.foreign import model_of
from planaria.checkpoint.resolve import shape_of
from planaria.cli.look import size, write_json
from planaria.config.options import EngineOptions
from planaria.config.resolve import device_config
from planaria.env import path_of
from planaria.errors import ConfigError, ModelError
from planaria.kernels.cpu.caches import kv_elements, latent_elements
from planaria.layers.build import unused
from planaria.loader import WeightSource
from planaria.loader.forms import forms
from planaria.models.config import Foreign, ModelConfig
from planaria.models.memory import mib
from planaria.node import available_memory

BLOCK = 16  # tokens; a block's bytes are those of so many


def run(model: str, *, as_json: bool) -> None:
    """Exit status 1 where it can't be loaded."""
    said = report(model)
    if as_json:
        write_json(said)
    else:
        before = ""
        for name, line in _lines(said):
            typer.echo(f"{name if name != before else '':>12}  {line}")
            before = name
    if said["refused"]:
        raise typer.Exit(1)


def report(model: str) -> dict[str, Any]:
    """refused: why it can't be loaded, in one line, or null; limits: what won't work of it."""
    said: dict[str, Any] = {"model": model, "refused": None, "limits": []}
    try:
        said |= _architecture(path_of(model))
        checkpoint = shape_of(model)
        config = model_of(checkpoint)
        said |= {"path": checkpoint.path, "format": checkpoint.format, **_shape(config)}
        if checkpoint.tensors and config.foreign is None:
            with WeightSource(checkpoint) as weights:
                said["unused_tensors"] = unused(config, weights)
        said |= _memory(checkpoint, config)
        said["limits"] = _limits(checkpoint, config, said)
    except (ModelError, ConfigError) as e:
        said["refused"] = str(e)
    return said


def _architecture(folder: Path) -> dict[str, Any]:
    """Of a folder, also where no more of it can be read."""
    path = folder / "config.json"
    named = read_json(path).get("architectures") if os.path.isfile(path) else None
    return {"family": ", ".join(map(str, named))} if isinstance(named, list) else {}


def _shape(config: ModelConfig) -> dict[str, Any]:
    moe = config.moe
    return {
        "family": config.architecture, "run_by": "planaria" if config.foreign is None else "transformers",
        "parameters": config.num_parameters, "layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "heads": config.num_heads, "kv_heads": config.num_kv_heads, "head_size": config.head_dim,
        "vocabulary": config.vocab_size, "longest": config.max_position, "dtype": config.dtype,
        "experts": None if moe is None else {"count": moe.num_experts, "chosen": moe.top_k},
    }  # fmt: skip


def _memory(checkpoint: Checkpoint, config: ModelConfig) -> dict[str, Any]:
    """As `serve` keeps it on a CPU where no option says otherwise."""
    device = device_config(EngineOptions(model=""), "cpu", config.dtype, checkpoint.packed, 1)
    element = 4 if device.dtype == "float32" else 2
    if config.foreign is not None:
        return _foreign_memory(config, config.foreign, device.dtype, element)
    kept = forms(checkpoint, device.quantization, element)
    weights = sum(form.bytes for form in kept) or config.num_parameters * element
    if config.mla is not None:
        block = latent_elements(BLOCK, config.mla.width)
    else:
        block = kv_elements(BLOCK, config.num_kv_heads, config.head_dim)
    token = block // BLOCK * config.num_layers * element
    return {
        "computed_in": device.dtype, "weight_bytes": weights, "kv_bytes_per_token": token,
        "weights": [{**form._asdict(), "form": form.form or device.dtype, "unpacked": form.unpacked} for form in kept],
        "kv_bytes_longest": token * config.max_position, "free_bytes": available_memory(),
    }  # fmt: skip


def _foreign_memory(config: ModelConfig, foreign: Foreign, dtype: str, element: int) -> dict[str, Any]:
    """Where Transformers reads weights and torch keeps them."""
    token = sum(2 * layer.heads * layer.width for layer in foreign.layers) * element
    return {
        "computed_in": dtype, "weight_bytes": foreign.parameters * element, "kv_bytes_per_token": token, "weights": [],
        "kv_bytes_longest": token * config.max_position, "free_bytes": available_memory(),
    }  # fmt: skip


def _limits(checkpoint: Checkpoint, config: ModelConfig, said: dict[str, Any]) -> list[str]:
    limits = []
    if not checkpoint.tensors:
        limits.append("there are no weights here: config.json alone")
    if checkpoint.tokenizer_dir is None:
        limits.append("no tokenizer files: --tokenizer names another's, --skip-tokenizer-init takes token ids alone")
    elif checkpoint.chat_template is None:
        limits.append("no chat template: chats are refused unless --chat-template gives one")
    for form in said["weights"]:
        if form["unpacked"]:
            more = form["bytes"] / form["stored_bytes"]
            limits.append(
                f"{form['stored']}: unpacked to {more:.1f} times its bytes; --quantization q8_0 or q4_1 packs it"
            )
    if extra := said.get("unused_tensors"):
        limits.append(f"{len(extra)} tensors are not part of {config.architecture} and are ignored, such as {extra[0]}")
    longest, free, weights = said["kv_bytes_longest"], said["free_bytes"], said["weight_bytes"]
    if weights > free:
        limits.append(f"weights take {mib(weights)}, and {mib(free)} are free here: more ranks, or fewer bits")
    elif weights + longest > free:
        most = (free - weights) // said["kv_bytes_per_token"] // 1024
        limits.append(f"its longest text doesn't fit the memory that is free here: --max-model-len {most}k at most")
    if config.windows:
        limits.append("layers with a window keep keys and values of whole texts")
    return limits


def _lines(said: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(what it is of, text)."""
    yield "model", said["model"]
    if said.get("path") not in (None, said["model"]):
        yield "at", said["path"]
    if said.get("family"):
        yield "family", said["family"]
    if said.get("run_by") == "transformers":
        yield "run by", "Transformers' code, with keys and values in paged caches (--model-impl)"
    if "parameters" in said:
        heads = f"{said['heads']} heads and {said['kv_heads']} of keys, of {said['head_size']}"
        yield (
            "size",
            f"{size(said['parameters'])} parameters, {said['layers']} layers of {said['hidden_size']}, {heads}",
        )
        if experts := said["experts"]:
            yield "experts", f"{experts['count']}, of which a token takes {experts['chosen']}"
        yield "longest text", f"{said['longest']:,} tokens"
    if "weight_bytes" in said:
        for form in said["weights"]:
            kept = "as they are" if form["stored"] == form["form"] else f"kept as {form['form']}"
            many = f"{form['tensors']} of {form['stored']}, {mib(form['stored_bytes'])}"
            yield "tensors", f"{many}: {kept}, {mib(form['bytes'])}"
        yield "memory", f"{mib(said['weight_bytes'])} of weights, computed in {said['computed_in']}"
        longest = mib(said["kv_bytes_longest"])
        yield "KV", f"{said['kv_bytes_per_token']:,} bytes a token, {longest} for the longest text"
    for line in said["limits"]:
        yield "limit", line
    if said["refused"]:
        yield "won't load", said["refused"]
