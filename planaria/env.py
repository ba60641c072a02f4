"""The only reads of os.environ. Every setting is a config field or an argument first; these are defaults for them."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from planaria.errors import ConfigError

if TYPE_CHECKING:
    from planaria.topology.outer import OuterLauncher
    from planaria.topology.platforms import Platform


def path_of(typed: str) -> Path:
    """~ is a user's home, where there is one; else the name is taken as it is."""
    return Path(os.path.expanduser(typed))


def home() -> Path:
    """Of a user without one (an id that the system doesn't know, and no $HOME) the root, as in containers."""
    found = path_of("~")
    return found if found.is_absolute() else Path("/")


def cache_dir() -> Path:
    """What was converted or compiled: $PLANARIA_CACHE, else $XDG_CACHE_HOME/planaria, else ~/.cache/planaria."""
    own = os.environ.get("PLANARIA_CACHE")
    if own:
        return path_of(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (path_of(base) if base else home() / ".cache") / "planaria"


def log_level() -> str:
    """$PLANARIA_LOG_LEVEL: debug, info (default), warning or error."""
    return os.environ.get("PLANARIA_LOG_LEVEL", "info")


def log_format() -> str:
    """$PLANARIA_LOG_FORMAT: text (default) or json."""
    return os.environ.get("PLANARIA_LOG_FORMAT", "text")


def api_keys() -> tuple[str, ...]:
    """$PLANARIA_API_KEY: keys separated by commas, used where --api-key isn't given."""
    return tuple(key for key in os.environ.get("PLANARIA_API_KEY", "").split(",") if key)


def secret() -> str | None:
    """$PLANARIA_SECRET: what all nodes of a deployment share."""
    return os.environ.get("PLANARIA_SECRET") or None


def secret_file() -> str | None:
    """$PLANARIA_SECRET_FILE: a file that holds it, used where --secret-file isn't given."""
    return os.environ.get("PLANARIA_SECRET_FILE") or None


def admin_key() -> str | None:
    """$PLANARIA_ADMIN_KEY, used where --admin-key isn't given."""
    return os.environ.get("PLANARIA_ADMIN_KEY") or None


def _number(name: str, least: int) -> int | None:
    text = os.environ.get(name)
    if text is None:
        return None
    if not text.isascii() or not text.isdigit() or int(text) < least:
        raise ConfigError(f"${name}", repr(text), f"must be a whole number of at least {least}")
    return int(text)


def visible(platform: Platform) -> list[str] | None:
    """The devices that this process may see, as the first of the platform's masks that is set lists them; None where
    none is."""
    text = next((os.environ[mask] for mask in platform.masks if mask in os.environ), None)
    if text is None:
        return None
    return [part for part in text.split(",") if part.strip() not in ("", "-1")]


def visible_devices(platform: Platform, ids: Sequence[int]) -> dict[str, str]:
    """What a process must have in its environment to see these devices only, each once; nothing for none, but where
    this process's own mask lists one twice."""
    seen = visible(platform) or []
    told = list(dict.fromkeys(map(str, ids) if ids else seen if len(set(seen)) < len(seen) else ()))
    return {platform.masks[0]: ",".join(told)} if told and platform.masks else {}


def outer_launcher() -> OuterLauncher | None:
    """What torchrun sets: $RANK, $WORLD_SIZE, $LOCAL_RANK, $LOCAL_WORLD_SIZE, $MASTER_ADDR, $MASTER_PORT,
    $TORCHELASTIC_USE_AGENT_STORE, $TORCHELASTIC_RESTART_COUNT.

    None without $RANK. Raises ConfigError for one that is not a number.
    """
    from planaria.topology.outer import OuterLauncher

    rank, world_size = _number("RANK", 0), _number("WORLD_SIZE", 1)
    if rank is None:
        return None
    world_size = world_size or 1
    return OuterLauncher(
        rank=rank,
        world_size=world_size,
        local_rank=_number("LOCAL_RANK", 0) or 0,
        local_world_size=_number("LOCAL_WORLD_SIZE", 1) or world_size,
        master_addr=os.environ.get("MASTER_ADDR", "127.0.0.1"),
        master_port=_number("MASTER_PORT", 1) or 29500,
        serves_store=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=_number("TORCHELASTIC_RESTART_COUNT", 0) or 0,
    )


class SpmdDataParallel(msgspec.Struct, frozen=True, kw_only=True):
    """Offline data parallel: the user starts one process per replica and numbers them."""

    size: int
    rank: int
    rank_local: int
    master_ip: str = "127.0.0.1"
    master_port: int = 29500

    def programs(self) -> OuterLauncher:
        """The same as the launcher of one engine's ranks, whose prompts differ."""
        from planaria.topology.outer import OuterLauncher

        alone = self.master_ip in ("127.0.0.1", "::1", "localhost")
        return OuterLauncher(
            rank=self.rank, world_size=self.size,
            local_rank=self.rank_local, local_world_size=self.size if alone else 1,
            master_addr=self.master_ip, master_port=self.master_port, own_prompts=True,
        )  # fmt: skip


def spmd_data_parallel() -> SpmdDataParallel | None:
    """$PLANARIA_DP_SIZE, _RANK, _RANK_LOCAL (default: _RANK), _MASTER_IP, _MASTER_PORT; None without a size.

    Raises ConfigError for one that is not a number.
    """
    size, rank = _number("PLANARIA_DP_SIZE", 1), _number("PLANARIA_DP_RANK", 0) or 0
    if size is None:
        return None
    local = _number("PLANARIA_DP_RANK_LOCAL", 0)
    return SpmdDataParallel(
        size=size,
        rank=rank,
        rank_local=rank if local is None else local,
        master_ip=os.environ.get("PLANARIA_DP_MASTER_IP") or "127.0.0.1",
        master_port=_number("PLANARIA_DP_MASTER_PORT", 1) or 29500,
    )


class RaySettings(msgspec.Struct, frozen=True, kw_only=True):
    """What only Ray needs to know and few users change.

    address: of the cluster; "local" starts one; None takes Ray's own $RAY_ADDRESS, a cluster that runs here, or starts
    one. wait: seconds to wait for a cluster that is too small now. fraction: of a device that a rank asks for (its
    bundle reserves a whole one). bundle_indices: of the given placement group; rank i goes into the i-th.
    driver_inside: the driver's node must hold a rank.
    """

    address: str | None = None
    wait: float = 1800.0
    fraction: float = 1.0
    bundle_indices: tuple[int, ...] | None = None
    driver_inside: bool = False


def ray_settings() -> RaySettings:
    """$PLANARIA_RAY_ADDRESS, _WAIT (seconds), _FRACTION, _BUNDLES ("2,0"), _DRIVER_INSIDE ("1"). Raises ConfigError."""
    indices = os.environ.get("PLANARIA_RAY_BUNDLES")
    if indices is not None and not re.fullmatch(r"\d+(,\d+)*", indices, re.ASCII):
        raise ConfigError("$PLANARIA_RAY_BUNDLES", repr(indices), "is not a list of bundle numbers", "write 0,1")
    fraction = _real("PLANARIA_RAY_FRACTION", 1.0)
    if not 0 < fraction <= 1:
        raise ConfigError("$PLANARIA_RAY_FRACTION", fraction, "must be more than 0 and at most 1, a rank's device")
    return RaySettings(
        address=os.environ.get("PLANARIA_RAY_ADDRESS") or None,
        wait=_real("PLANARIA_RAY_WAIT", 1800.0),
        fraction=fraction,
        bundle_indices=None if indices is None else tuple(map(int, indices.split(","))),
        driver_inside=os.environ.get("PLANARIA_RAY_DRIVER_INSIDE", "") not in ("", "0"),
    )


def _real(name: str, default: float) -> float:
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ConfigError(f"${name}", repr(text), "must be a number of at least 0")
    return value


def host_ip() -> str | None:
    """$PLANARIA_HOST_IP: the address by which other nodes reach this one, where the right one isn't found."""
    return os.environ.get("PLANARIA_HOST_IP") or None


def environment() -> dict[str, str]:
    """All of this process's variables, for handing some of them on."""
    return dict(os.environ)
