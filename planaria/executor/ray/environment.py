"""Which environment variables a rank on another node gets. Pure.

Four classes: *computed* for each worker (device masks; always overwrites), *node* (never copied: addresses, network
devices, caches by path mean something else there), *global* (the driver's value fills in what the node has not set)
and *never* (everything else). So computed > node's own > driver's.

What a process reads when it starts must be in its environment by then: those of the global ones go into the actor's
runtime environment, the others are set by the worker before it imports anything large.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum

import msgspec

from planaria.topology.platforms import MASKS


class Scope(Enum):
    COMPUTED = "computed"
    NODE = "node"
    GLOBAL = "global"
    NEVER = "never"


COMPUTED = frozenset(MASKS)

# Matched whole; the first class with a match decides.
_NODE = re.compile(
    r"PLANARIA_HOST_IP|PLANARIA_CACHE|HF_HOME|HF_HUB_CACHE|HUGGINGFACE_HUB_CACHE|TORCH_HOME|TRITON_CACHE_DIR"
    r"|(NCCL|GLOO|TP|UCX|NVSHMEM)_.*(IFNAME|HCA|NET_DEVICES|_IP|GID_INDEX)"
    r"|OMPI_.*|.*_CACHE_DIR|NUMBA_CACHE_DIR"
)
_NEVER = re.compile(r"RAY_.*|PLANARIA_(API_KEY|ADMIN_KEY|SECRET|SECRET_FILE)|PLANARIA_DP_.*|PLANARIA_RAY_.*")
AT_START = re.compile(
    r"LD_PRELOAD|LD_LIBRARY_PATH|PYTHONPATH|PYTHONHASHSEED|MALLOC_.*|GLIBC_TUNABLES|(OMP|MKL|KMP|GOMP|OPENBLAS)_.*"
)
_GLOBAL = re.compile(
    AT_START.pattern
    + r"|PLANARIA_.*|HF_.*|HUGGING_FACE_HUB_TOKEN|NCCL_.*|GLOO_.*|UCX_.*|NVSHMEM_.*|CUDA_.*|CUBLAS_.*|NVIDIA_.*|HIP_.*"
    r"|ROCM_.*|TORCH_.*|TORCHINDUCTOR_.*|PYTORCH_.*|TRITON_.*|NUMBA_.*|TOKENIZERS_.*|TRANSFORMERS_.*"
)
_SECRET = re.compile(r".*(TOKEN|SECRET|PASSWORD|KEY|CREDENTIAL).*")


def kind(name: str) -> Scope:
    if name in COMPUTED:
        return Scope.COMPUTED
    if _NODE.fullmatch(name):
        return Scope.NODE
    if not _NEVER.fullmatch(name) and _GLOBAL.fullmatch(name):
        return Scope.GLOBAL
    return Scope.NEVER


def offered(driver: Mapping[str, str]) -> dict[str, str]:
    """The driver's global variables."""
    return {name: value for name, value in sorted(driver.items()) if kind(name) is Scope.GLOBAL}


def read_at_start(offer: Mapping[str, str]) -> dict[str, str]:
    """Those of `offer` that a process reads when it starts."""
    return {name: value for name, value in offer.items() if AT_START.fullmatch(name)}


class Change(msgspec.Struct, frozen=True, array_like=True):
    """One variable of a worker. old: the node's own value, None if it had none; new: in force."""

    name: str
    kind: str
    old: str | None
    new: str

    @property
    def line(self) -> str:
        shown = "***" if _SECRET.fullmatch(self.name) else self.new
        if self.old == self.new:
            return f"  {self.name}={shown} (the node's own, kept)"
        return f"{'+' if self.old is None else '~'} {self.name}={shown} ({self.kind})"


def merge(own: Mapping[str, str], offer: Mapping[str, str], computed: Mapping[str, str]) -> list[Change]:
    """What a worker on a node with the environment `own` gets: changes by name, and where the node's own value won
    over a different one of the driver's, that."""
    changes = [
        Change(name, Scope.COMPUTED.value, own.get(name), value)
        for name, value in computed.items()
        if own.get(name) != value
    ]
    for name, value in offer.items():
        if name not in computed and own.get(name) != value:
            changes.append(Change(name, Scope.GLOBAL.value, own.get(name), own.get(name, value)))
    return sorted(changes, key=lambda change: change.name)
