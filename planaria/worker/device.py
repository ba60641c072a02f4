"""What a rank computes with: its accelerator or its cores, the kernels for it, the memory that is left there."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import msgspec

from planaria.checkpoint.spec import Checkpoint
from planaria.config.options import EngineConfig
from planaria.env import cache_dir, visible
from planaria.errors import ModelError
from planaria.executor.boot import RankBoot
from planaria.hosts.device_memory import Keepers
from planaria.node import available_memory, home

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from planaria.kernels.cpu.ops import CpuOps
    from planaria.kernels.ops import Array, Batch, Ops
    from planaria.mesh.comm import Comm
    from planaria.mesh.mesh import Mesh
    from planaria.structured.constraint import Constraints
    from planaria.worker.sampler import Follower, Sampler
    from planaria.worker.stage import Stage


def own_device(devices: Sequence[int], seen: Sequence[str] | None) -> int:
    """Index of this rank's accelerator among those its process may see; the first where none was dealt to it."""
    if not devices:
        return 0
    mine = str(devices[0])
    return list(seen).index(mine) if seen is not None and mine in seen else devices[0]


def keepers_of(boot: RankBoot) -> Keepers | None:
    """Who has memory of this node's devices for ranks, where anybody has: it outlives them."""
    given = boot.memories
    if given.home != home() or not given.keepers or boot.config.device.kernels == "native":
        return None
    devices, platform = boot.place.devices, boot.config.device.platform
    own = devices[0] if devices else given.keepers[0][0]
    return Keepers(given.keepers, own, 0 if platform.on_host else own_device(devices, visible(platform)))


def make_ops(config: EngineConfig, threads: int | None = None) -> Ops:
    """The kernels of the configured device."""
    device = config.device
    if device.kernels == "native":
        from planaria.kernels.cpu.build import compile_beside, target_for
        from planaria.kernels.cpu.ops import CpuOps

        compile_beside(target_for(device.dtype), cache_dir() / "kernels", lambda: packed_kinds(config))
        return CpuOps(device.dtype, threads or device.threads, cache_dir() / "kernels")
    own = config.model.foreign is None  # others' code can't be recorded
    if own and not device.platform.on_host and importlib.util.find_spec("triton") is not None:
        from planaria.kernels.gpu.ops import GpuOps

        return GpuOps.recording(device.platform.torch, device.dtype, graphs=device.platform.graphs)
    from planaria.kernels.reference import TorchOps

    return TorchOps(device.platform.torch, device.dtype)


def let_go(ops: Ops | None, *, stays: bool) -> Ops | None:
    """Of weights. stays: of native kernels, which go on with others; else these end, and there are none."""
    if ops is not None and stays:
        cast("CpuOps", ops).give_up_weights()
        return ops
    if ops is not None:
        ops.close()
    return None


def packed_kinds(config: EngineConfig) -> list[str]:
    """That its weights are kept as."""
    from planaria.kernels.blocks import KINDS
    from planaria.loader.forms import forms

    kept = forms(msgspec.convert(config.checkpoint, Checkpoint), config.device.quantization, 2)
    return [kind for kind in dict.fromkeys(each.form for each in kept) if kind in KINDS]


def make_sampler(config: EngineConfig, threads: int, ops: Any = None, told: Comm | None = None) -> Sampler:
    """What draws tokens of the configured device's logits, and, where there are recordings, in them. ops: of these;
    told: ranks that get them on their devices (see `told_on_devices`)."""
    rows, vocab_size = config.scheduler.max_num_seqs, config.model.vocab_size
    constraints = make_constraints(config, threads)
    if config.device.platform.on_host:
        from planaria.worker.sampler import Sampler

        return Sampler(rows, vocab_size, cache_dir() / "numba", threads=threads, constraints=constraints)
    from planaria.worker.torch_sampler import TorchSampler

    return TorchSampler(rows, vocab_size, constraints, ops.drawer_of(rows, vocab_size, told) if _is_gpu(ops) else None)


def make_follower(config: EngineConfig, ops: Any = None, told: Comm | None = None) -> Follower:
    """Of a rank that draws none."""
    from planaria.worker.sampler import Follower

    rows, vocab_size = config.scheduler.max_num_seqs, config.model.vocab_size
    if _is_gpu(ops):
        ops.drawer = None  # of an epoch in which it drew
    return Follower(rows, vocab_size, ops.drawer_of(rows, vocab_size, told) if told is not None else None)


def told_on_devices(mesh: Mesh, ops: Any) -> Comm | None:
    """The tensor ranks that hand on from device to device what is drawn, where they can: so no host waits for tokens
    before it prepares the next step."""
    return mesh.tp if _is_gpu(ops) and mesh.pp.size == 1 and mesh.cp is mesh.tp and mesh.tp.device != "cpu" else None


def _is_gpu(ops: Any) -> bool:
    return hasattr(ops, "drawer_of")


def make_constraints(config: EngineConfig, threads: int) -> Constraints:
    """What follows grammars. Nothing is loaded before the first one comes."""
    from planaria.structured.constraint import Constraints

    size, folder = config.model.vocab_size, config.checkpoint["tokenizer_dir"]

    def vocabulary(eos_id: int) -> LLTokenizer:
        from planaria.structured.vocabulary import vocabulary_of

        if folder is None:
            raise ModelError("the model has no tokenizer, which structured outputs need")
        return vocabulary_of(folder, size, eos_id)

    return Constraints(size, vocabulary, threads, ahead=not config.device.platform.on_host)


def make_stage(config: EngineConfig, batch: Batch, forward: Callable[[], Array], mesh: Mesh, width: int) -> Stage:
    """This rank's place in a step. width: see Stage."""
    if config.device.platform.on_host:
        from planaria.worker.stage import Stage

        return Stage(batch, forward, mesh, config.model.hidden_size, width)
    from planaria.worker.torch_stage import TorchStage

    return TorchStage(batch, forward, mesh, config.model.hidden_size, width)


def take_thread(config: EngineConfig, threads: int, devices: Sequence[int]) -> None:
    """Make the calling thread one that can carry out steps: torch keeps its number of threads and its device for each
    thread. Native kernels have threads of their own."""
    if config.device.kernels == "native":
        return
    import torch

    torch.set_num_threads(threads)
    if not config.device.platform.on_host:
        torch.cuda.set_device(own_device(devices, visible(config.device.platform)))


def shared_memory(config: EngineConfig) -> Callable[..., Comm]:
    """What makes a group of ranks that share memory, by the compiled kernels."""
    from planaria.kernels.cpu.build import load, target_for
    from planaria.kernels.cpu.shared import SharedComm

    return functools.partial(SharedComm, entry=load(target_for(config.device.dtype), cache_dir() / "kernels"))


def free_bytes(config: EngineConfig) -> int:
    """Memory of this rank's device that nobody has, in bytes."""
    if config.device.platform.on_host:
        return available_memory()
    import torch

    return int(torch.cuda.mem_get_info()[0])


def available_bytes(config: EngineConfig) -> int:
    """Memory that KV could take on this rank's device, in bytes."""
    if not config.device.platform.on_host:
        import torch

        torch.cuda.empty_cache()  # what torch keeps for later is free, too
        free, total = torch.cuda.mem_get_info()
        return int(free - (1 - config.device.gpu_memory_utilization) * total)
    return available_memory()
