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
from planaria.env import SpmdDataParallel, outer_launcher, spmd_data_parallel, visible
from planaria.errors import ConfigError
from planaria.topology.outer import OuterLauncher
from planaria.topology.platforms import CPU, PLATFORMS, SERVED, Platform

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


def present_platform() -> Platform:
    """The kind of accelerators that this machine has; CPU where it has none."""
    return next((each for each in SERVED if _present(each)), CPU)


def usable_platform() -> Platform:
    """The same, where this process may use one and torch is built for it."""
    found, spec = present_platform(), importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations or not num_accelerators():
        return CPU
    version = Path(spec.submodule_search_locations[0]) / "version.py"
    built = re.search(rf"^{found.build}\b.*=\s*['\"]", version.read_text(), re.MULTILINE)
    return found if built is not None else CPU


def served(name: str) -> Platform:
    """The platform of this name. Raises ConfigError where ranks don't compute on such devices."""
    if why := PLATFORMS[name].refusal:
        raise ConfigError("--device", name, why, f"use --device {' or '.join(each.name for each in SERVED)}")
    return PLATFORMS[name]


def _present(platform: Platform) -> int:
    """How many devices of it this machine has."""
    return sum(map(_is_device, glob.glob(platform.files))) if platform.files else 0


def _is_device(path: str) -> bool:
    if not path.endswith("gpu_id"):
        return True
    try:
        return Path(path).read_text().strip() not in ("", "0")
    except OSError:  # it is there, and not ours
        return False


def torch_installed() -> bool:
    """Computing needs it on accelerators and for the plain kernels only, and groups of ranks that share no memory."""
    return importlib.util.find_spec("torch") is not None


def num_accelerators() -> int:
    """That this process may use. One that the mask lists twice counts twice: two ranks may be on it."""
    platform = present_platform()
    present, seen = _present(platform), visible(platform)
    return present if seen is None else len(seen) if 0 < len(set(seen)) <= present else min(present, len(seen))


def accelerator_ids() -> list[int]:
    """Of the accelerators this process may use: as the platform's mask numbers them, or their positions there."""
    seen = visible(present_platform())
    if seen is None or not all(part.isdigit() for part in seen):
        return list(range(num_accelerators()))
    return [int(part) for part in seen]


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
