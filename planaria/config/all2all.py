"""The ways to exchange tokens between the ranks of an expert group, and what each needs. Pure.

EXCHANGES is the registry: a way is an entry here and the class it names. Those without a library are this package's and
run everywhere. The others are for GPUs: each is refused here, by name, for the package or the device that is missing,
or for shapes it has no kernels for.
"""

from __future__ import annotations

import msgspec

from planaria.errors import ConfigError
from planaria.topology.platforms import CUDA

DEFAULT = "allgather_reducescatter"
PLAIN, ADAPTERS = "planaria.mesh.all2all.plain", "planaria.mesh.all2all.adapters"


class Exchange(msgspec.Struct, frozen=True, kw_only=True):
    """made_by: "module:name" of what makes one, imported when one is made. library: the module it needs, package: what
    that is installed as. deals: the tensor ranks of a lane can share the exchange of its tokens. whole_nodes: it takes
    2 or 4 ranks, or all of each node. sizes: of hidden values, empty: any."""

    made_by: str
    library: str = ""
    package: str = ""
    deals: bool = False
    by_eights: bool = False  # its ranks sit by eights on a node
    whole_nodes: bool = False
    most_experts: int | None = None  # of a token
    sizes: tuple[int, ...] = ()


EXCHANGES = {
    "naive": Exchange(made_by=f"{PLAIN}:Naive", deals=True),
    DEFAULT: Exchange(made_by="planaria.mesh.all2all.window:gathering", deals=True),
    "pplx": Exchange(made_by=f"{ADAPTERS}:Pplx", library="pplx_kernels", package="pplx-kernels"),
    "deepep_high_throughput": Exchange(
        made_by=f"{ADAPTERS}:DeepEPHighThroughput", library="deep_ep", package="DeepEP", deals=True, by_eights=True,
        whole_nodes=True, most_experts=32,
    ),
    "deepep_low_latency": Exchange(
        made_by=f"{ADAPTERS}:DeepEPLowLatency", library="deep_ep", package="DeepEP", deals=True, by_eights=True,
        most_experts=9, sizes=(2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192),
    ),
    "flashinfer_all2allv": Exchange(
        made_by=f"{ADAPTERS}:FlashInfer", library="flashinfer", package="flashinfer-python"
    ),
}  # fmt: skip
BACKENDS = tuple(EXCHANGES)
LIBRARIES = tuple(sorted({way.library for way in EXCHANGES.values() if way.library}))  # modules
NODE_RANKS = 8  # of a node, by DeepEP's kernels; an expert group over nodes takes all of each
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
    way = EXCHANGES[name]
    if not way.library or libraries is None:
        return
    if device != CUDA.name:
        _refuse(name, f"is for CUDA devices, and the device is {device}")
    if way.library not in libraries:
        _refuse(name, f"needs the package {way.library}, which isn't installed", f"install {way.package}")


def check_shapes(name: str, shapes: ExpertShapes, ranks: int, redundant: int) -> None:
    """Raises ConfigError. ranks: of the expert group."""
    way = EXCHANGES[name]
    if not way.library:
        return
    slots = shapes.num_experts + redundant
    if slots % ranks:
        _refuse(name, f"deals as many experts to each rank, and {slots} on {ranks} ranks are uneven")
    if shapes.dtype != "bfloat16":
        _refuse(name, f"carries bfloat16, and --dtype is {shapes.dtype}")
    if shapes.hidden_size * 2 % ALIGNED:
        _refuse(name, f"moves rows of a multiple of {ALIGNED} bytes, and hidden size {shapes.hidden_size} makes none")
    if way.most_experts is not None and shapes.top_k > way.most_experts:
        _refuse(name, f"sends a token to at most {way.most_experts} experts, and the model to {shapes.top_k}")
    if way.sizes and shapes.hidden_size not in way.sizes:
        sizes = ", ".join(map(str, way.sizes))
        _refuse(name, f"has kernels for hidden sizes {sizes}, and the model's is {shapes.hidden_size}")
    if not _takes(way, ranks):
        _refuse(name, f"is for 2 or 4 ranks, or whole nodes of {NODE_RANKS}, and there are {ranks}")


def _takes(way: Exchange, ranks: int) -> bool:
    return not way.whole_nodes or ranks in (2, 4) or ranks % NODE_RANKS == 0


def way_of(name: str, slots: int, ranks: int) -> str:
    """The way of a layout in force, that may have other ranks than were asked for: the default where a library has none
    for so many. slots: of a layer's experts."""
    way = EXCHANGES[name]
    return DEFAULT if way.library and (slots % ranks or not _takes(way, ranks)) else name


def _refuse(name: str, rule: str, fix: str = "") -> None:
    other = f"use --all2all-backend {DEFAULT}"
    raise ConfigError("--all2all-backend", name, rule, f"{fix}, or {other}" if fix else other)
