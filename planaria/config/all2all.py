"""What each way to exchange tokens between the ranks of an expert group needs. Pure.

The first two of BACKENDS are this package's and run everywhere. The others are libraries for GPUs: each is refused
here, by name, for the package or the device that is missing, or for shapes it has no kernels for.
"""

from __future__ import annotations

import msgspec

from planaria.errors import ConfigError

DEFAULT = "allgather_reducescatter"
DEEPEP = ("deepep_high_throughput", "deepep_low_latency")
BACKENDS = ("naive", DEFAULT, "pplx", *DEEPEP, "flashinfer_all2allv")

# The module that is imported, and what it is installed as.
LIBRARIES = {
    "pplx": ("pplx_kernels", "pplx-kernels"),
    "deepep_high_throughput": ("deep_ep", "DeepEP"),
    "deepep_low_latency": ("deep_ep", "DeepEP"),
    "flashinfer_all2allv": ("flashinfer", "flashinfer-python"),
}
NODE_RANKS = 8  # of a node, by DeepEP's kernels; an expert group over nodes takes all of each
LOW_LATENCY_HIDDEN = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)  # sizes DeepEP's kernels are compiled for
MOST_EXPERTS_PER_TOKEN = {"deepep_high_throughput": 32, "deepep_low_latency": 9}
ALIGNED = 16  # bytes of a row of hidden values


class ExpertShapes(msgspec.Struct, frozen=True, kw_only=True):
    """Of a model's layers with experts."""

    num_experts: int
    top_k: int  # experts of a token
    hidden_size: int
    dtype: str = "bfloat16"  # of hidden values


def check_library(name: str, device: str, libraries: tuple[str, ...] | None) -> None:
    """Raises ConfigError. libraries: modules that can be imported where ranks run, None: that isn't known here, and
    neither is the device."""
    if name not in LIBRARIES or libraries is None:
        return
    module, package = LIBRARIES[name]
    if device != "cuda":
        _refuse(name, f"is for CUDA devices, and the device is {device}")
    if module not in libraries:
        _refuse(name, f"needs the package {module}, which isn't installed", f"install {package}")


def check_shapes(name: str, shapes: ExpertShapes, ranks: int, redundant: int) -> None:
    """Raises ConfigError. ranks: of the expert group."""
    if name not in LIBRARIES:
        return
    slots = shapes.num_experts + redundant
    if slots % ranks:
        _refuse(name, f"deals as many experts to each rank, and {slots} on {ranks} ranks are uneven")
    if shapes.dtype != "bfloat16":
        _refuse(name, f"carries bfloat16, and --dtype is {shapes.dtype}")
    if shapes.hidden_size * 2 % ALIGNED:
        _refuse(name, f"moves rows of a multiple of {ALIGNED} bytes, and hidden size {shapes.hidden_size} makes none")
    most = MOST_EXPERTS_PER_TOKEN.get(name, shapes.top_k)
    if shapes.top_k > most:
        _refuse(name, f"sends a token to at most {most} experts, and the model to {shapes.top_k}")
    if name == "deepep_low_latency" and shapes.hidden_size not in LOW_LATENCY_HIDDEN:
        sizes = ", ".join(map(str, LOW_LATENCY_HIDDEN))
        _refuse(name, f"has kernels for hidden sizes {sizes}, and the model's is {shapes.hidden_size}")
    if name == "deepep_high_throughput" and ranks not in (2, 4) and ranks % NODE_RANKS:
        _refuse(name, f"is for 2 or 4 ranks, or whole nodes of {NODE_RANKS}, and there are {ranks}")


def _refuse(name: str, rule: str, fix: str = "") -> None:
    other = f"use --all2all-backend {DEFAULT}"
    raise ConfigError("--all2all-backend", name, rule, f"{fix}, or {other}" if fix else other)
