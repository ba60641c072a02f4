"""Quantised safetensors, written here as their makers write them: each is read to the values that it stands for, stays
packed where that is said, and gives Transformers' tokens for these values."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from planaria import LLM, SamplingParams
from planaria.checkpoint import resolve_checkpoint
from planaria.config.options import EngineOptions
from planaria.config.resolve import resolve
from planaria.errors import ModelError
from planaria.kernels.blocks import FLOAT8
from planaria.kernels.gpu.ops import GpuOps
from planaria.kernels.ops import Quantized
from planaria.kernels.quant import dequantise
from planaria.loader import WeightSource
from planaria.loader.forms import forms, unpacked_line
from planaria.worker.parts import read_part
from planaria.worker.weights import RankWeights
from tests.model.checkpoints import load_reference, write_checkpoint
from tests.model.ranks import boot_of
from tests.tiers import representatives

SHAPE = {
    "hidden_size": 96, "intermediate_size": 192, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 32,
}  # fmt: skip
OPTIONS: dict[str, Any] = {"device": "cpu", "max_model_len": 128, "kv_cache_memory": "32MiB", "threads": 1}
Packed = tuple[dict[str, torch.Tensor], torch.Tensor]  # tensors by what comes after the stem, and the values they say


def words(codes: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Codes in words of 32 bits along a dimension, the lowest first."""
    each, codes = 32 // bits, codes.to(torch.int64)
    parts = codes.unflatten(dim, (-1, each))
    shifts = torch.arange(each) * bits
    shape = [1] * parts.ndim
    shape[dim + 1] = each
    return (parts << shifts.view(shape)).sum(dim + 1).to(torch.int32)


def grouped(w: torch.Tensor, bits: int, group: int, sym: bool, index: torch.Tensor | None = None) -> Any:
    """(codes [N, K], scales [N, groups], zeros [N, groups], the values): of columns in groups."""
    rows, width = w.shape
    group = width if group < 0 else group
    index = torch.arange(width) // group if index is None else index
    count, top = width // group, (1 << bits) - 1
    scales, zeros = torch.empty(rows, count), torch.empty(rows, count)
    for g in range(count):
        part = w[:, index == g]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        scales[:, g] = ((2 * part.abs().amax(1) if sym else high - low) / top).half().float()
        zeros[:, g] = (1 << bits - 1) if sym else (-low / scales[:, g]).round().clamp(1, top)
    codes = (w / scales[:, index] + zeros[:, index]).round().clamp(0, top)
    return codes, scales, zeros, (codes - zeros[:, index]) * scales[:, index]


def gptq(
    w: torch.Tensor, *, bits: int = 4, group: int = 32, sym: bool = True, v2: bool = False, order: bool = False
) -> Packed:
    width = w.shape[1]
    index = torch.arange(width) // (width if group < 0 else group)
    if order:
        index = index[torch.randperm(width, generator=torch.Generator().manual_seed(width))]
    codes, scales, zeros, values = grouped(w, bits, group, sym, index)
    found = {
        "qweight": words(codes.T, bits, 0), "scales": scales.T.half(), "g_idx": index.to(torch.int32),
        "qzeros": words(zeros.T - (0 if v2 else 1), bits, 1),
    }  # fmt: skip
    return found, values


def awq(w: torch.Tensor) -> Packed:
    codes, scales, zeros, values = grouped(w, 4, 32, False)

    def turned(x: torch.Tensor) -> torch.Tensor:
        return words(x.T.unflatten(1, (-1, 8))[..., [0, 2, 4, 6, 1, 3, 5, 7]].flatten(1), 4, 1)

    return {"qweight": turned(codes), "qzeros": turned(zeros), "scales": scales.T.half()}, values


def ints(w: torch.Tensor, *, bits: int = 4, group: int = 32, sym: bool = True) -> Packed:
    codes, scales, zeros, values = grouped(w, bits, group, sym)
    found = {"weight_packed": words(codes, bits, 1), "weight_scale": scales, "weight_shape": torch.tensor(w.shape)}
    if not sym:
        found["weight_zero_point"] = words(zeros, bits, 0)
    return found, values


def int8(w: torch.Tensor) -> Packed:
    scale = (w.abs().amax(1, keepdim=True) / 127).half().float()
    codes = (w / scale).round()
    return {"weight": codes.to(torch.int8), "weight_scale": scale, "input_scale": torch.ones(1)}, codes * scale


def float8(w: torch.Tensor, *, blocks: bool = False, name: str = "weight_scale") -> Packed:
    scale = w.abs().amax(1, keepdim=True) / 448
    if blocks:
        tiles = torch.nn.functional.pad(w, (0, -w.shape[1] % 128, 0, -w.shape[0] % 128)).abs()
        scale = tiles.unflatten(0, (-1, 128)).unflatten(2, (-1, 128)).amax((1, 3)) / 448
    each = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: w.shape[0], : w.shape[1]] if blocks else scale
    codes = (w / each).to(torch.float8_e4m3fn)
    return {"weight": codes, name: scale}, codes.float() * each


def nf4(w: torch.Tensor, *, nested: bool) -> Packed:
    table = torch.tensor([-1, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0, 0.0796, 0.1609, 0.2461, 0.3379,
                          0.4407, 0.5626, 0.7230, 1])  # fmt: skip
    flat = w.reshape(-1, 64)
    most = flat.abs().amax(1)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": list(w.shape)}
    found: dict[str, torch.Tensor] = {}
    if nested:
        codebook, mean = torch.linspace(-1, 1, 256), most.mean()
        around = torch.nn.functional.pad(most - mean, (0, -len(most) % 256)).view(-1, 256).abs().amax(1)
        wide = around.repeat_interleave(256)[: len(most)]
        codes = ((most - mean) / wide)[:, None].sub(codebook).abs().argmin(1)
        most = codebook[codes] * wide + mean
        found |= {"weight.absmax": codes.to(torch.uint8), "weight.nested_absmax": around,
                  "weight.nested_quant_map": codebook}  # fmt: skip
        state |= {"nested_blocksize": 256, "nested_offset": float(mean), "nested_dtype": "float32"}
    else:
        found["weight.absmax"] = most
    near = (flat / most[:, None])[..., None].sub(table).abs().argmin(-1).flatten()
    both = near.view(-1, 2)
    said = torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)
    found |= {"weight": (both[:, :1] << 4 | both[:, 1:]).to(torch.uint8), "weight.quant_map": table,
              "weight.quant_state.bitsandbytes__nf4": said}  # fmt: skip
    return found, table[near].view(w.shape) * most.repeat_interleave(64).view(w.shape)


def bnb8(w: torch.Tensor) -> Packed:
    most = w.abs().amax(1)
    codes = (w * 127 / most[:, None]).round()
    return {"weight": codes.to(torch.int8), "SCB": most}, codes * most[:, None] / 127


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"strategy": "group", **weights}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
ZEROS = {**GPTQ, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
# what config.json says, how a weight is written, what it is kept as, and how far from its values (of the largest one)
FORMATS: dict[str, tuple[dict[str, Any], Callable[[torch.Tensor], Packed], str, float]] = {
    "gptq": (GPTQ, gptq, "q4_0", 0),
    "gptq-one-group": ({**GPTQ, "group_size": -1}, lambda w: gptq(w, group=-1), "q4_0", 0),
    "gptq-zeros": (ZEROS, lambda w: gptq(w, sym=False), "q4_1", 5e-4),
    "gptq-v2": ({**ZEROS, "checkpoint_format": "gptq_v2"}, lambda w: gptq(w, sym=False, v2=True), "q4_1", 5e-4),
    "gptq-ordered": ({**GPTQ, "desc_act": True}, lambda w: gptq(w, order=True), "", 0),
    "gptq-8-bits": ({**GPTQ, "bits": 8}, lambda w: gptq(w, bits=8), "q8_0", 0),
    "awq": (AWQ, awq, "q4_1", 5e-4),
    "compressed-int4": (compressed("pack-quantized", num_bits=4, type="int"), ints, "q4_0", 0),
    "compressed-int4-zeros": (
        compressed("pack-quantized", num_bits=4, type="int"), lambda w: ints(w, sym=False), "q4_1", 5e-4,
    ),
    "compressed-int8-packed": (
        compressed("pack-quantized", num_bits=8, type="int"), lambda w: ints(w, bits=8), "q8_0", 0,
    ),
    "compressed-int8": (compressed("int-quantized", num_bits=8, type="int"), int8, "q8_0", 0),
    "compressed-fp8": (compressed("float-quantized", num_bits=8, type="float"), float8, "", 0),
    "fp8-blocks": (
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        lambda w: float8(w, blocks=True, name="weight_scale_inv"), "", 0,
    ),
    "nf4": (BNB, lambda w: nf4(w, nested=False), "", 1e-6),
    "nf4-nested": ({**BNB, "bnb_4bit_use_double_quant": True}, lambda w: nf4(w, nested=True), "", 1e-6),
    "bnb-int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, bnb8, "q8_0", 5e-4),
}  # fmt: skip


def write(folder: Path, name: str, family: str = "llama") -> tuple[Path, Path, dict[str, torch.Tensor]]:
    """A checkpoint in a format, a plain one of the same values, and those values."""
    config, pack, _, _ = FORMATS[name]
    plain = write_checkpoint(folder / "plain", family, **SHAPE, **({"pad_token_id": None} if family == "phi3" else {}))
    tensors, packed, values = load_file(plain / "model.safetensors"), {}, {}
    for key, tensor in tensors.items():
        if key.endswith("_proj.weight"):
            stem = key.removesuffix(".weight")
            found, values[key] = pack(tensor)
            packed |= {f"{stem}.{suffix}": part.contiguous() for suffix, part in found.items()}
        else:
            packed[key] = tensor
    said = json.loads((plain / "config.json").read_text())
    save_file({**tensors, **values}, plain / "model.safetensors", metadata={"format": "pt"})
    (folder / "packed").mkdir()
    save_file(packed, folder / "packed" / "model.safetensors", metadata={"format": "pt"})
    (folder / "packed" / "config.json").write_text(json.dumps({**said, "quantization_config": config}))
    return folder / "packed", plain, values


@pytest.mark.parametrize("name", FORMATS)
def test_weights_are_the_values_that_they_stand_for(name: str, tmp_path: Path) -> None:
    _, _, kept, error = FORMATS[name]
    folder, _, values = write(tmp_path, name)
    with WeightSource(resolve_checkpoint(str(folder))) as weights:
        for key, value in values.items():
            weights.expect(key, tuple(value.shape))
            whole = weights.get(key)
            assert (whole.kind if isinstance(whole, Quantized) else "") == kept
            want, most = value.numpy(), float(value.abs().max())
            found = dequantise(whole) if isinstance(whole, Quantized) else whole
            assert np.abs(found - want).max() <= error * most
            rows, columns = slice(5, 31), slice(32, 96)
            part = weights.get(key, rows=rows, cols=columns, dequantise=True)
            assert isinstance(part, np.ndarray) and np.abs(part - want[rows, columns]).max() <= error * most


@pytest.mark.parametrize("name", ["compressed-fp8", "fp8-blocks"])
def test_float8_stays_so_where_there_are_products_of_it(name: str, tmp_path: Path) -> None:
    folder, _, values = write(tmp_path, name)
    checkpoint, packed = resolve_checkpoint(str(folder)), list[str]()
    with WeightSource(checkpoint, float8=True) as weights:
        for key, value in values.items():
            whole, most = weights.get(key), float(value.abs().max())
            assert isinstance(whole, Quantized) and whole.kind == FLOAT8
            assert np.abs(dequantise(whole) - value.numpy()).max() <= 5e-4 * most
            part = weights.get(key, rows=slice(5, 31), cols=slice(32, 96))
            assert isinstance(part, Quantized)
            assert np.abs(dequantise(part) - value.numpy()[5:31, 32:96]).max() <= 5e-4 * most
            weights.get(key, dequantise=True)

    class Notes(GpuOps):
        def pack(self, weight: Any, bias: Any = None) -> Any:
            packed.append(weight.kind if isinstance(weight, Quantized) else "")
            return super().pack(weight, bias)

    config = resolve(EngineOptions(model=str(folder), device="cpu", kernels="torch", max_model_len=64))
    part = 0, config.parallel.layout
    read_part(config, Notes("cpu", "bfloat16"), part, None, lambda part, done: None, RankWeights(boot_of(config)))
    assert packed.count(FLOAT8) == 4 * config.model.num_layers and packed.count("") == 2  # embeddings, logits
    assert unpacked_line(checkpoint, "keep", "bfloat16", float8=True) == ""
    assert {form.form for form in forms(checkpoint, "keep", 2, float8=True)} == {FLOAT8, "float32", ""}


def test_a_float8_that_is_no_number_stays_none(tmp_path: Path) -> None:
    folder, _, values = write(tmp_path, "compressed-fp8")
    path = folder / "model.safetensors"
    tensors, key = load_file(path), next(iter(values))
    tensors[key].view(torch.uint8)[3, 5] = 0x7F
    save_file(tensors, path, metadata={"format": "pt"})
    with WeightSource(resolve_checkpoint(str(folder)), float8=True) as weights:
        found = weights.get(key)
    assert isinstance(found, np.ndarray) and np.isnan(found[3, 5]) and np.isnan(found).sum() == 1


GREEDY = ["gptq", "gptq-ordered", "awq", "compressed-int4", "compressed-fp8", "nf4-nested"]


@pytest.mark.parametrize("name", representatives(GREEDY, "gptq-ordered", "compressed-fp8"))
def test_ranks_say_what_transformers_says(name: str, tmp_path: Path) -> None:
    """Two ranks, of uneven heads; q, k and v in one tensor."""
    folder, plain, _ = write(tmp_path, name, "phi3" if name in ("gptq", "awq") else "llama")
    draw = random.Random(name)
    prompts = [[draw.randrange(3, 131) for _ in range(draw.randrange(1, 40))] for _ in range(4)]
    with LLM(str(folder), skip_tokenizer_init=True, tensor_parallel_size=2, dtype="float32", **OPTIONS) as llm:
        results = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    reference = load_reference(plain)
    for prompt, result in zip(prompts, results, strict=True):
        said = list(result.outputs[0].token_ids)
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + said])).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == said


def test_packed_weights_stay_packed_in_memory(tmp_path: Path) -> None:
    folder, plain, values = write(tmp_path, "gptq")
    sizes = []
    for each in (folder, plain):
        with LLM(str(each), skip_tokenizer_init=True, dtype="bfloat16", **OPTIONS) as llm:
            sizes.append(llm.facts.weight_bytes)
    assert sizes[1] - sizes[0] >= 1.2 * sum(value.numel() for value in values.values())


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({**GPTQ, "bits": 3}, "gptq to 3 bits"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "gptq in the format marlin"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "awq to 4 bits in the layout gemv"),
        (compressed("nvfp4-pack-quantized", num_bits=4, type="float"), "compressed-tensors in the format nvfp4"),
        (compressed("pack-quantized", num_bits=2, type="int"), "compressed-tensors as int2"),
        ({"quant_method": "aqlm"}, "aqlm"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "fp8 in blocks of"),
        ({"bits": 4}, "none named"),
        ("gptq", "must be an object"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(config: Any, named: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "plain", "llama")
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**said, "quantization_config": config}))
    with pytest.raises(ModelError) as refusal:
        resolve_checkpoint(str(folder))
    assert named in str(refusal.value) and "\n" not in str(refusal.value)


def test_parts_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    folder, _, _ = write(tmp_path, "gptq")
    tensors = load_file(folder / "model.safetensors")
    key = "model.layers.0.self_attn.q_proj."
    cut = {**tensors, f"{key}g_idx": tensors[f"{key}g_idx"] + 90}
    save_file(cut, folder / "model.safetensors")
    with WeightSource(resolve_checkpoint(str(folder))) as weights, pytest.raises(ModelError, match="names a group"):
        weights.get(f"{key}weight")
    save_file({**tensors, f"{key}scales": tensors[f"{key}scales"][:, :7].contiguous()}, folder / "model.safetensors")
    with WeightSource(resolve_checkpoint(str(folder))) as weights, pytest.raises(ModelError, match="don't fit"):
        weights.get(f"{key}weight")
    save_file({name: t for name, t in tensors.items() if name != f"{key}scales"}, folder / "model.safetensors")
    with pytest.raises(ModelError, match="is no weight quantized with gptq"):
        resolve_checkpoint(str(folder))


@pytest.mark.parametrize("state", ["[" * 100_000, '"blocksize": 1e400', '"blocksize": -64', '"blocksize": 0', "[]"])
def test_json_among_the_tensors_may_be_anything(state: str, tmp_path: Path) -> None:
    folder, _, values = write(tmp_path, "nf4")
    tensors, name = load_file(folder / "model.safetensors"), next(iter(values))
    said = f'{{"shape": {list(values[name].shape)}, {state}}}' if state[0] == '"' else state
    tensors[f"{name}.quant_state.bitsandbytes__nf4"] = torch.frombuffer(bytearray(said.encode()), dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match="is no weight quantized with bitsandbytes"):
        resolve_checkpoint(str(folder))


@pytest.mark.parametrize(
    ("name", "part", "change"),
    [
        ("compressed-int8", "weight_scale", lambda t: None),
        ("bnb-int8", "SCB", lambda t: None),
        ("bnb-int8", "SCB", lambda t: t[:1]),
        ("gptq-ordered", "g_idx", lambda t: None),
        ("compressed-int4-zeros", "weight_scale", torch.flatten),
        ("awq", "scales", lambda t: t[:2]),
        ("fp8-blocks", "weight_scale_inv", lambda t: t.view(torch.int32)),
    ],
)
def test_codes_are_nothing_without_the_scales_they_were_made_with(
    name: str, part: str, change: Callable[[torch.Tensor], torch.Tensor | None], tmp_path: Path
) -> None:
    """No values are made up where a part of a weight is missing, or of another shape or type."""
    folder, _, values = write(tmp_path, name)
    key, tensors = next(iter(values)), load_file(folder / "model.safetensors")
    whose = key.replace("weight", part)
    found = change(tensors.pop(whose))
    save_file(tensors if found is None else {**tensors, whose: found.contiguous()}, folder / "model.safetensors")
    with pytest.raises(ModelError), WeightSource(resolve_checkpoint(str(folder))) as weights:
        weights.get(key)


def test_groups_that_are_none_and_a_scale_of_nothing(tmp_path: Path) -> None:
    folder, _, values = write(tmp_path, "compressed-int4")
    key, config = next(iter(values)), folder / "config.json"
    said, tensors = json.loads(config.read_text()), load_file(folder / "model.safetensors")
    scale = key.replace("weight", "weight_scale")
    save_file({**tensors, scale: tensors[scale][:, :0].contiguous()}, folder / "model.safetensors")
    with WeightSource(resolve_checkpoint(str(folder))) as weights, pytest.raises(ModelError, match="don't fit"):
        weights.get(key)
    said["quantization_config"]["config_groups"]["group_0"]["weights"]["actorder"] = "group"
    config.write_text(json.dumps(said))
    with pytest.raises(ModelError, match="weight_g_idx"):
        resolve_checkpoint(str(folder))
    said["quantization_config"]["config_groups"] = []
    config.write_text(json.dumps(said))
    with pytest.raises(ModelError, match="is no weight quantized with compressed-tensors"):
        resolve_checkpoint(str(folder))


def test_what_is_unpacked_is_said(tmp_path: Path) -> None:
    folder, _, values = write(tmp_path, "nf4")
    checkpoint = resolve_checkpoint(str(folder))
    (nf4_form,) = [form for form in forms(checkpoint, "keep", 2) if "bitsandbytes" in form.stored]
    weights = sum(value.numel() for value in values.values())
    assert (nf4_form.form, nf4_form.weights, nf4_form.bytes) == ("", weights, 2 * weights)
    line = unpacked_line(checkpoint, "keep", "bfloat16")
    assert line.startswith("tensors unpacked to bfloat16") and line.endswith(f": {len(values)} of bitsandbytes, 4 bits")
    assert unpacked_line(checkpoint, "q8_0", "bfloat16") == ""


def test_memory_is_foreseen(tmp_path: Path) -> None:
    """As much as an engine then takes, but for the padding of panels."""
    for name, quantization in (
        ("awq", "keep"),
        ("compressed-int8", "keep"),
        ("compressed-fp8", "keep"),
        ("nf4", "q4_1"),
    ):
        (tmp_path / name).mkdir()
        folder, _, _ = write(tmp_path / name, name)
        said = sum(form.bytes for form in forms(resolve_checkpoint(str(folder)), quantization, 2))
        asked = "auto" if quantization == "keep" else quantization
        with LLM(str(folder), skip_tokenizer_init=True, dtype="bfloat16", quantization=asked, **OPTIONS) as llm:
            assert abs(llm.facts.weight_bytes / said - 1) < 0.02
