"""Kernels for GPUs, carried out by Triton's interpreter on the CPU, against plain torch. Not run on hardware."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from planaria.kernels.gpu import attention
from planaria.kernels.gpu.attention import Need, way_for

HERE = importlib.util.find_spec("triton") is not None
pytestmark = pytest.mark.skipif(not HERE, reason="Triton is not installed: there is none for this platform")


MIXED = {"paged", "norm", "rope_store", "gated", "down", "combine"}  # a mixture's


def interpreted(*cases: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.model.gpu_cases", *cases], env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.stdout.split() == [*cases], done.stderr[-4000:]


def test_every_kernel_once() -> None:
    """And steps of all kinds are recorded."""
    each = "attention", "norms", "ropes", "gates", "packed", "drawing", "ahead", "adapters"
    interpreted(*each, "graphs", "graphs_further", "moved_experts")


@pytest.mark.long
@pytest.mark.parametrize(
    "case", ["adapters", "attention", "packed", "model", "norms", "ropes", "gates", "drawing", "graphs"]
)
def test_in_all_dtypes_and_odd_shapes(case: str) -> None:
    interpreted(f"{case}_many")


def varlen(
    out: Tensor, q: Tensor, keys: Tensor, values: Tensor, starts: Tensor, _: None, new: int, most: int, *, scale: float,
    window_size: tuple[int, int], enable_gqa: bool, seqused_k: Tensor, block_table: Tensor, num_splits: int,
) -> None:  # fmt: skip
    """What torch documents of `varlen_attn_out`, over blocks: causal, aligned to the last key, window (left, 0)."""
    for i, length in enumerate(seqused_k.tolist()):
        first, end = starts[i : i + 2].tolist()
        assert end - first <= new and length <= most
        repeats = q.shape[1] // keys.shape[2]
        assert enable_gqa or repeats == 1
        k, v = (x[block_table[i].long()].flatten(0, 1)[:length].repeat_interleave(repeats, 1) for x in (keys, values))
        at, key = torch.arange(length - (end - first), length)[:, None], torch.arange(length)
        seen = (key <= at) & ((key >= at - window_size[0]) | (window_size[0] < 0))
        scores = torch.einsum("qhd,khd->hqk", q[first:end].float(), k.float()) * scale
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out[first:end] = torch.einsum("hqk,khd->qhd", weights, v.float()).to(out.dtype)


@pytest.mark.parametrize("window", [None, 1, 5])
def test_torchs_own_attention_is_asked_for_the_same(monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    """By a stand-in with torch's signature; one that computes something else is not taken."""
    need = Need("cpu", torch.bfloat16, 4, 2, 32, 16, window=window)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn_out", varlen)
    assert attention._compare(need) == ""

    def sees_less(*args: Any, window_size: tuple[int, int], **rest: Any) -> None:
        varlen(*args, window_size=(0 if window is None else window, 0), **rest)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn_out", sees_less)
    with pytest.raises(AssertionError, match="differs from plain products"):
        attention._compare(need)


def test_what_refuses_blocks_is_not_taken_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any, **__: Any) -> None:
        raise RuntimeError("blocks are not for this flash attention")

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn_out", refuses)
    monkeypatch.setattr("torch.nn.attention.list_flash_attention_impls", list)
    assert attention._trial.__wrapped__(Need("cpu", torch.bfloat16, 2, 2, 16, 16)) == (
        "blocks are not for this flash attention"
    )


def test_what_one_layer_has_found_good_is_not_taken_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the flash attentions that are registered the last but one takes blocks, and no windows."""
    in_force, said = list[str](), list[str]()

    def compare(need: Need) -> str:
        if in_force == ["FA3"] and need.window is None:
            return ""
        raise RuntimeError(f"{in_force} does not do it")

    def activate(name: str) -> None:
        said.append(name)
        in_force[:] = [name]

    for name, own in {
        "list_flash_attention_impls": lambda: ["FA2", "FA3", "FA4"], "activate_flash_attention_impl": activate,
        "restore_flash_attention_impl": in_force.clear,
        "current_flash_attention_impl": lambda: in_force[0] if in_force else None,
    }.items():  # fmt: skip
        monkeypatch.setattr(f"torch.nn.attention.{name}", own)
    monkeypatch.setattr(attention, "_compare", compare)
    assert attention._trial.__wrapped__(Need("cpu", torch.bfloat16, 2, 2, 16, 16)) == "" and said == ["FA4", "FA3"]
    why = attention._trial.__wrapped__(Need("cpu", torch.bfloat16, 2, 2, 16, 16, window=5))
    assert why == "['FA3'] does not do it" and in_force == ["FA3"] and said == ["FA4", "FA3"]


def test_the_last_way_takes_everything() -> None:
    way = way_for(Need("cpu", torch.bfloat16, 4, 2, 64, 16, cap=3.0))
    assert (way.name, way.attend) == ("plain torch", None)
    assert way.refused == ("torch varlen: it does not do a soft cap", "Triton: it does not run on the cpu")


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "kernels"),
    [
        ("attention", {"paged", "merge"}), ("packed", {"product", "unpack"}), ("norms", {"norm"}),
        ("ropes", {"rope_store"}), ("gates", {"gated"}), ("adapters", {"shrink", "expand"}),
        ("moved_experts", MIXED), ("drawing", {"tops", "masses", "weights", "pick"}),
        ("real", {"paged", "merge", "product", "unpack", "norm", "rope_store", "gated", "shrink", "expand", "tops",
                  "masses", "weights", "pick"}),
    ],
)  # fmt: skip
def test_triton_makes_device_code_of_them(case: str, kernels: set[str]) -> None:
    """For an H100 or H200; no device is needed."""
    done = subprocess.run(
        [sys.executable, "-O", "-m", "tests.model.gpu_compiled", "sm_90", case],
        capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert {each.split(":")[0] for each in done.stdout.split()} == kernels, done.stderr[-4000:]
