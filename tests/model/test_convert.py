"""`benchmarks.convert`: one folder of bfloat16 for every engine that is measured."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import quantize

from benchmarks.convert import bf16_folder
from planaria.checkpoint import resolve_checkpoint
from planaria.loader import WeightSource
from tests.model.gguf_files import write_gguf


def test_a_packed_file_becomes_a_folder_of_bfloat16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANARIA_CACHE", str(tmp_path / "cache"))
    values = np.random.default_rng(0).normal(size=(96, 64)).astype(np.float32)
    packed = quantize(values, GGMLQuantizationType.Q4_1), GGMLQuantizationType.Q4_1
    stored = {"token_embd.weight": np.zeros((8, 64), np.float32), "blk.0.ffn_up.weight": packed}
    file = str(write_gguf(tmp_path / "m.gguf", tensors=stored))
    folder = bf16_folder(file)
    made, source = resolve_checkpoint(str(folder)), WeightSource(resolve_checkpoint(file))
    assert made.kind == "bf16" and bf16_folder(file) == folder == bf16_folder(str(folder))
    name = "model.layers.0.mlp.up_proj.weight"
    ours, theirs = (np.asarray(each.get(name, dequantise=True)) for each in (WeightSource(made), source))
    assert np.abs(ours - theirs).max() <= np.abs(theirs).max() / 256 and np.abs(theirs).max() > 1
