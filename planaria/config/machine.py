"""What configuration needs to know of this machine and this process, looked up once. No torch, no Ray is imported."""

from __future__ import annotations

import glob
import importlib
import importlib.util
import os
import re
import stat
import sys
from pathlib import Path
from typing import Any

import msgspec

from planaria.config.all2all import LIBRARIES
from planaria.env import SpmdDataParallel, outer_launcher, spmd_data_parallel, visible_cuda_devices
from planaria.errors import ConfigError
from planaria.topology.outer import OuterLauncher

LINKS = ("queue", "direct")  # messages to processes anywhere, or calls to `ranks` that the launcher holds itself


class LauncherFacts(msgspec.Struct, frozen=True):
    """What a custom launcher class declares: the link its ranks are reached by, and whether they run on Ray."""

    link: str
    uses_ray: bool


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    cores: int = 1
    accelerators: int = 0  # that this process may use
    ray_installed: bool = False
    torch_installed: bool = True
    libraries: tuple[str, ...] = ()  # modules that exchange tokens between ranks, those that can be imported
    in_placement_group: bool = False  # this process is a Ray worker inside one
    outer: OuterLauncher | None = None
    data_parallel: SpmdDataParallel | None = None
    launcher: LauncherFacts | None = None  # of a custom executor back end


def usable_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cuda_available() -> bool:
    """Is there a CUDA device, and a torch built for it?"""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations or not num_accelerators():
        return False
    version = Path(spec.submodule_search_locations[0]) / "version.py"
    return re.search(r"^cuda\b.*=\s*['\"]", version.read_text(), re.MULTILINE) is not None


def torch_installed() -> bool:
    """Computing needs it on CUDA and for the plain kernels only, and groups of ranks that share no memory."""
    return importlib.util.find_spec("torch") is not None


def num_accelerators() -> int:
    """CUDA devices this process may use."""
    present = len(glob.glob("/dev/nvidia[0-9]*"))
    visible = visible_cuda_devices()
    return present if visible is None else min(present, len(visible))


def accelerator_ids() -> list[int]:
    """Of the CUDA devices this process may use: as $CUDA_VISIBLE_DEVICES numbers them, or their positions there."""
    visible = visible_cuda_devices()
    if visible is None or not all(part.isdigit() for part in visible):
        return list(range(num_accelerators()))
    return [int(part) for part in visible]


def in_placement_group() -> bool:
    """Does this process run inside a Ray placement group? Where it does, Ray is imported already."""
    ray: Any = sys.modules.get("ray")
    return ray is not None and ray.is_initialized() and ray.util.get_current_placement_group() is not None


def load_class(option: str, path: str) -> Any:
    """The class at `package.module.Class`. Raises ConfigError, one line, for one that isn't there."""
    module, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as e:
        raise ConfigError(option, path, f"can't be imported: {e}", "write package.module.Class") from None
    if not isinstance(found, type):
        raise ConfigError(option, path, "is not a class", "write package.module.Class")
    return found


def check_module(option: str, path: str) -> None:
    """Raise ConfigError when the module of `package.module.Class` isn't there. It is not imported: ranks do that."""
    try:
        if importlib.util.find_spec(path.rpartition(".")[0]) is not None:
            return
        why = "there is no such module"
    except (ImportError, ValueError) as e:
        why = str(e)
    raise ConfigError(option, path, f"can't be imported: {why}", "write package.module.Class")


def launcher_facts(path: str) -> LauncherFacts:
    """What the launcher class at `path` declares. Raises ConfigError."""
    option = "--distributed-executor-backend"
    found = load_class(option, path)
    link, uses_ray = getattr(found, "link", None), getattr(found, "uses_ray", None)
    if link not in LINKS or not isinstance(uses_ray, bool):
        raise ConfigError(
            option, path, "must declare how its ranks are reached",
            f"give the class the attributes link ({' or '.join(LINKS)}) and uses_ray (True or False)",
        )  # fmt: skip
    return LauncherFacts(link, uses_ray)


def look(backend: str | None) -> Machine:
    """This machine now, for an executor back end as the user gave it."""
    return Machine(
        cores=usable_cores(),
        accelerators=num_accelerators(),
        torch_installed=torch_installed(),
        ray_installed=importlib.util.find_spec("ray") is not None,
        libraries=tuple(module for module in LIBRARIES if importlib.util.find_spec(module)),
        in_placement_group=in_placement_group(),
        outer=outer_launcher() if backend == "external_launcher" else None,
        data_parallel=spmd_data_parallel(),
        launcher=launcher_facts(backend) if backend and "." in backend else None,
    )


def own_folder(flag: str, folder: str) -> None:
    """Make a folder, unless it is there, for this user alone. Raises ConfigError where it can't be, or where others may
    write into it."""
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        found = os.stat(folder)
    except OSError as e:
        raise ConfigError(flag, folder, f"can't be made: {e.strerror}", "give a folder of yours") from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise ConfigError(
            flag, folder, "is not a folder that only this user can write into", f"chmod 700 {folder}, or another"
        )
