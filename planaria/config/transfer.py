"""What `--kv-transfer-config` says: with whom engines of other servers exchange KV blocks, and how. Fields and their
defaults are vLLM's."""

from __future__ import annotations

import importlib.util
import ipaddress
import os
import re
from typing import Any
from uuid import uuid4

import msgspec

from planaria.config.json_option import json_option
from planaria.config.machine import own_folder
from planaria.config.options import EngineOptions, ParallelConfig, TierConfig, TransferConfig
from planaria.config.secret import deployment_secret
from planaria.config.sizes import parse_bytes
from planaria.errors import ConfigError

FLAG = "--kv-transfer-config"
NIXL = "NixlConnector"
LMCACHE = "LMCacheConnectorV1"
CONNECTORS = ("tcp", NIXL, "directory", LMCACHE)
ROLES = ("kv_producer", "kv_consumer", "kv_both")
EXTRA = {
    "tcp": ("peers", "lease_seconds"),
    NIXL: ("peers", "lease_seconds", "backends"),
    "directory": ("path", "size"),
    LMCACHE: ("remote_url",),
}
# Others' names, and what is there in their place.
INSTEAD = {
    "shared": "is for engines of one server: --prefill-engines and --decode-engines",
    "OffloadingConnector": "is --kv-offloading-size here",
    "SharedStorageConnector": 'is "directory" here, with its "path"',
    "ExampleConnector": 'is "directory" here, with its "path"',
    "P2pNcclConnector": 'is for GPUs; "tcp" does the same over a network',
    "MultiConnector": "is not needed: --kv-offloading-size and --kv-tier go with any",
}
EXAMPLE = (
    """write '{"kv_connector": "tcp", "kv_role": "kv_producer", "kv_ip": "10.0.0.1"}' or """
    """'{"kv_connector": "directory", "kv_role": "kv_both", "kv_connector_extra_config": {"path": "/mnt/kv"}}'"""
)
TIER_SIZE = "10GiB"
LEAST_PORT, MOST_PORT = 1024, 65535
MOST_PEERS, MOST_LEASE = 256, 3600.0
BUFFER, LEASE = 10**9, 30.0


class KVTransferConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """As typed."""

    kv_connector: str
    kv_role: str = "kv_both"
    engine_id: str | None = None
    kv_rank: int | None = None
    kv_parallel_size: int = 1
    kv_buffer_device: str = "cpu"
    kv_buffer_size: float = BUFFER
    kv_ip: str = "127.0.0.1"
    kv_port: int = 14579
    kv_connector_extra_config: dict[str, Any] = {}
    kv_connector_module_path: str | None = None
    kv_load_failure_policy: str = "recompute"
    enable_permute_local_kv: bool = False


def kv_transfer(given: str | dict[str, Any], parallel: ParallelConfig) -> KVTransferConfig:
    """What is said of all servers alike. Raises ConfigError."""
    config: KVTransferConfig = json_option(FLAG, given, KVTransferConfig, EXAMPLE)
    name = config.kv_connector
    if name not in CONNECTORS:
        fix = f"use one of {', '.join(CONNECTORS)}"
        raise ConfigError(f"{FLAG} kv_connector", name, INSTEAD.get(name, "is unknown"), fix)
    _check(config, parallel)
    extra = config.kv_connector_extra_config
    if unknown := [key for key in extra if key not in EXTRA[name]]:
        known = ", ".join(EXTRA[name])
        raise ConfigError(f"{FLAG} kv_connector_extra_config", unknown[0], f"is unknown to {name}", f"it has {known}")
    return config


def transfer_config(options: EngineOptions, parallel: ParallelConfig) -> TransferConfig | None:
    """Raises ConfigError for a field that is unknown, of another type, or can't be followed."""
    given = options.kv_transfer_config
    if given is None:
        return _between_nodes(parallel) if parallel.splits_prefill else None
    config = kv_transfer(given, parallel)
    name, extra = config.kv_connector, config.kv_connector_extra_config
    role, made = config.kv_role, config.engine_id or uuid4().hex
    serves, asks = role != "kv_consumer", role != "kv_producer"
    if name == "directory":
        return TransferConfig(name, serves, asks, made, folder=_folder(extra, options))
    if name == LMCACHE:
        return TransferConfig(name, serves, asks, made, remote_url=_remote_url(extra.get("remote_url")))
    _check_network(config, parallel)
    transfer = TransferConfig(
        name, serves, asks, made, config.kv_ip, config.kv_port, _peers(extra.get("peers", [])),
        int(config.kv_buffer_size), _lease(extra.get("lease_seconds", LEASE)),
        backends=_backends(extra.get("backends", ["UCX"])) if name == NIXL else (),
    )  # fmt: skip
    deployment_secret(parallel, transfer.host, (FLAG, config.kv_ip))
    return transfer


def _between_nodes(parallel: ParallelConfig) -> TransferConfig | None:
    """Of engines of two kinds that have no memory in common. None: they have."""
    on_ray = "ray" in (parallel.distributed_executor_backend, parallel.data_parallel_backend)
    if on_ray:
        deployment_secret(parallel, "Ray's nodes", ("--prefill-engines", parallel.prefill_engines))
    if not on_ray and parallel.nnodes == 1:
        return None
    return TransferConfig("tcp", True, True, "", buffer=BUFFER, lease=LEASE)


def _check(config: KVTransferConfig, parallel: ParallelConfig) -> None:
    if config.kv_role not in ROLES:
        raise ConfigError(f"{FLAG} kv_role", config.kv_role, "is unknown", f"use one of {', '.join(ROLES)}")
    if config.engine_id is not None and not (0 < len(config.engine_id) <= 128 and config.engine_id.isprintable()):
        raise ConfigError(f"{FLAG} engine_id", config.engine_id, "must be 1 to 128 printable characters")
    size, rank = config.kv_parallel_size, config.kv_rank
    if size < 1 or not 0 <= (rank or 0) < size:
        rule = f"is no place among kv_parallel_size {size}"
        raise ConfigError(f"{FLAG} kv_rank", rank, rule, "number the servers from 0, or leave both out")
    for name, value, only in (
        ("kv_buffer_device", config.kv_buffer_device, "cpu"),
        ("kv_connector_module_path", config.kv_connector_module_path, None),
        ("kv_load_failure_policy", config.kv_load_failure_policy, "recompute"),
        ("enable_permute_local_kv", config.enable_permute_local_kv, False),
    ):  # fmt: skip
        if value != only:
            raise ConfigError(f"{FLAG} {name}", value, f"can only be {only!r} here", "leave it out")
    if parallel.splits_prefill:
        rule = "is for engines behind somebody else's router, and --prefill-engines for this server's own"
        raise ConfigError(f"{FLAG} kv_connector", config.kv_connector, rule, "leave one of both out")
    if parallel.nodes_per_engine > 1 or parallel.distributed_executor_backend == "ray":
        rule = "is for engines whose ranks are all on this node"
        raise ConfigError(f"{FLAG} kv_connector", config.kv_connector, rule, "leave it out")
    if parallel.layout.dp > 1:
        rule = "is for engines without lanes, which --enable-expert-parallel makes of --data-parallel-size"
        raise ConfigError(f"{FLAG} kv_connector", config.kv_connector, rule, "leave it out")


def _check_network(config: KVTransferConfig, parallel: ParallelConfig) -> None:
    try:
        if ipaddress.ip_address(config.kv_ip).is_unspecified:
            raise ValueError
    except ValueError:
        rule = "must be the address, in digits, at which others reach this server"
        raise ConfigError(f"{FLAG} kv_ip", config.kv_ip, rule, "e.g. 10.0.0.1") from None
    ranks = parallel.layout.size * parallel.data_parallel_size
    if not LEAST_PORT <= config.kv_port <= MOST_PORT - ranks:
        rule = f"must be from {LEAST_PORT} to {MOST_PORT - ranks}: each of {ranks} ranks has its own, from this one on"
        raise ConfigError(f"{FLAG} kv_port", config.kv_port, rule)
    if config.kv_buffer_size < 1 << 20:
        raise ConfigError(f"{FLAG} kv_buffer_size", config.kv_buffer_size, "bytes are too few for any prompt", "1e9")


def _peers(given: Any) -> tuple[str, ...]:
    """`HOST:PORT` each, of a first rank."""
    flag = f"{FLAG} kv_connector_extra_config.peers"
    if not isinstance(given, list) or len(given) > MOST_PEERS or not all(isinstance(peer, str) for peer in given):
        raise ConfigError(flag, given, f"must be a list of up to {MOST_PEERS} strings", '["10.0.0.1:14579"]')
    for peer in given:
        host, _, port = peer.rpartition(":")
        try:
            ipaddress.ip_address(host.strip("[]"))
            if not 0 < int(port) <= MOST_PORT:
                raise ValueError
        except ValueError:
            raise ConfigError(flag, peer, "is no address in digits with a port", "10.0.0.1:14579") from None
    return tuple(given)


def _backends(given: Any) -> tuple[str, ...]:
    """NIXL's, whose package must be here."""
    flag = f"{FLAG} kv_connector_extra_config.backends"
    if not isinstance(given, list) or not 0 < len(given) <= 16 or not all(isinstance(name, str) for name in given):
        raise ConfigError(flag, given, "must be a list of names of NIXL's back ends", '["UCX"]')
    _package(NIXL, "nixl", "tcp")
    return tuple(given)


def _package(connector: str, name: str, other: str) -> None:
    if importlib.util.find_spec(name) is None:
        fix = f"pip install {name}, or use {other}"
        raise ConfigError(f"{FLAG} kv_connector", connector, f"needs the package {name}", fix)


def _remote_url(given: Any) -> str:
    """LMCache's, whose package must be here."""
    if not isinstance(given, str) or not re.fullmatch(r"[a-z0-9+-]+://[^\s]{0,2000}", given):
        flag = f"{FLAG} kv_connector_extra_config.remote_url"
        raise ConfigError(flag, given, "must be the URL of a store that LMCache knows", '"redis://10.0.0.1:6379"')
    _package(LMCACHE, "lmcache", "directory")
    return given


def _lease(given: Any) -> float:
    if not isinstance(given, int | float) or not 0 < given <= MOST_LEASE:
        flag = f"{FLAG} kv_connector_extra_config.lease_seconds"
        raise ConfigError(flag, given, f"must be more than 0 and at most {MOST_LEASE:g}")
    return float(given)


def _folder(extra: dict[str, Any], options: EngineOptions) -> TierConfig:
    flag = f"{FLAG} kv_connector_extra_config.path"
    path = extra.get("path")
    if not isinstance(path, str) or not path:
        raise ConfigError(flag, path, "must name the folder that servers share", EXAMPLE)
    if options.kv_tier is not None:
        raise ConfigError(FLAG, path, f"is a folder for KV blocks, and --kv-tier {options.kv_tier} another", "give one")
    folder = os.path.abspath(path)
    own_folder(flag, folder)
    return TierConfig(folder=folder, size=parse_bytes(extra.get("size", TIER_SIZE), f"{FLAG} size"))
