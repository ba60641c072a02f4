"""`planaria serve`: the engine's process is started first, so that it loads while the server is imported."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

import msgspec
import typer

from planaria.checkpoint import Checkpoint
from planaria.checkpoint.generation import said, sampling_defaults
from planaria.checkpoint.resolve import name_of
from planaria.cli.look import console, loading, summary
from planaria.cli.options import engine_options
from planaria.cli.plan import Planned
from planaria.config.options import EngineConfig
from planaria.config.parallel import refuse_outer_launcher
from planaria.config.resolve import resolve
from planaria.env import admin_key, api_keys, ray_settings
from planaria.env import log_level as default_level
from planaria.errors import ConfigError
from planaria.logs import as_json, setup_logging, wait_for_no_reader
from planaria.preload import importing
from planaria.processes import set_title
from planaria.server.config import ServerConfig
from planaria.server.tools import Parsers
from planaria.types import KVLayout

if TYPE_CHECKING:
    from planaria.server.fleet import Fleet, Hosts
    from planaria.server.handing_over import HandingOver
    from planaria.server.keeper import Make
    from planaria.server.serve import Lifecycle
    from planaria.server.service import Service

logger = logging.getLogger("planaria.server")


def run(
    model: list[str], engine: dict[str, Any], server: dict[str, Any], skip_tokenizer_init: bool, log_level: str | None,
    log_format: str | None, verbose: bool,
) -> None:  # fmt: skip
    """Exit code: see planaria.server.serve.serve; 2 for a refused option or model, 1 if it can't start."""
    started = time.monotonic()
    wait_for_no_reader()
    if log_level or log_format or verbose:
        setup_logging(log_level or ("debug" if verbose else default_level()), log_format)
    server |= {
        "api_keys": server["api_keys"] or api_keys(), "admin_key": server["admin_key"] or admin_key(),
        "cors_origins": server["cors_origins"] or (), "lora_modules": server["lora_modules"] or (),
    }  # fmt: skip
    if len(model) > 1:
        from planaria.cli.serve_several import run_several

        code = run_several(model, engine, server, skip_tokenizer_init, started)
    else:
        for name in ("max_loaded", "host_memory", "unload_after"):
            flag, value = "--" + name.replace("_", "-"), server[name]
            if value is not None:
                raise ConfigError(flag, value, "is for several models, and there is one", "leave it out")
        names = server["served_model_names"] or (name_of(model[0]),)
        config, settings = configured(model[0], names, engine, server, skip_tokenizer_init)
        planned = None
        if config.parallel.distributed_executor_backend in ("uni", "mp"):
            planned = plan_shown(config)
        code = asyncio.run(_serve(config, settings, started, skip_tokenizer_init, planned))
    if code:
        raise typer.Exit(code)


def configured(
    model: str, names: tuple[str, ...], engine: dict[str, Any], server: dict[str, Any], skip_tokenizer_init: bool
) -> tuple[EngineConfig, ServerConfig]:
    """Of one model. Raises UserError."""
    options = engine_options(model, engine, served_model_name=names[0], skip_tokenizer_init=skip_tokenizer_init)
    config = resolve(options)
    refuse_outer_launcher(config.parallel, "planaria serve")
    settings = ServerConfig(
        model=model,
        eos_ids=config.model.eos_ids,
        sampling_defaults=sampling_defaults(config.checkpoint["generation_config"]),
        pooling=config.pooling,
        parsers=Parsers(**{name: engine[name] for name in Parsers.__struct_fields__}),
        seed=engine["seed"],
        transfer=config.cache.transfer if not config.parallel.splits_prefill else None,
        transfer_key=_transfer_key(config),
        kv_layout=_kv_layout(config),
        api_processes=config.parallel.api_server_count,
        **{**server, "served_model_names": names},
    )
    settings.verify()
    return config, settings


def plan_shown(config: EngineConfig) -> Planned:
    """Where its ranks go on this node, or on several; of one rank there is nothing to tell."""
    planned = Planned(config.parallel, config.device.device)
    if config.parallel.world_size_across_dp > 1:
        _show(planned.text)
    return planned


def _kv_layout(config: EngineConfig) -> KVLayout:
    from planaria.models.deal import kv_layout

    parallel, layout = config.parallel, config.parallel.layout
    partition, size = parallel.pp_layer_partition, config.cache.block_size
    return kv_layout(config.model, layout, parallel.context(layout), partition, size)


def _transfer_key(config: EngineConfig) -> bytes:
    if config.cache.transfer is None or not config.cache.transfer.port:
        return b""
    from planaria.config.secret import deployment_secret
    from planaria.server.transfer import signing_key

    return signing_key(deployment_secret(config.parallel, config.cache.transfer.host))


def _show(table: str) -> None:
    if as_json():
        logger.info("%s", table)
    else:
        console.print(table, soft_wrap=True)


def _prepare(fleet: Fleet, planned: Planned | None) -> None:
    """Where ranks are on Ray, who places them says it, before they are started."""
    check = fleet.dispatcher.check
    check.plan, check.on_table = planned, _show


def engines(config: EngineConfig) -> tuple[Make, Hosts | None]:
    """Engines as processes of this node, of several nodes, or as actors on a cluster."""
    if config.parallel.engine_nodes is not None:
        from planaria.server.node_hosts import NodeHosts

        nodes = NodeHosts(config)
        return nodes.make, nodes
    if config.parallel.data_parallel_backend != "ray":
        from planaria.server.engine_client import EngineProcess

        return EngineProcess, None
    from planaria.executor.ray.fleet import RayHosts
    from planaria.executor.ray.lane_hosts import LaneHosts
    from planaria.server.ray_engine import RayEngine

    hosts = (LaneHosts if config.parallel.shares_experts else RayHosts)(config, ray_settings(), _show)
    return functools.partial(RayEngine, hosts), hosts


async def _serve(
    config: EngineConfig, settings: ServerConfig, started: float, skip_tokenizer_init: bool, planned: Planned | None
) -> int:
    from planaria.server.fleet import Fleet
    from planaria.server.loras import load_modules

    several = config.parallel.api_server_count > 1
    if settings.replace:
        from planaria.cli.replace import serve_in_place

        code = await serve_in_place(config, settings, started, skip_tokenizer_init)
        if code is not None:
            return code
    journal = None
    if settings.journal is not None:  # before any process is started
        from planaria.server.journal import Journal

        journal = Journal(settings.journal)
        if several:  # one of them is to have it
            await journal.close()
    with contextlib.ExitStack() as names, contextlib.ExitStack() as bar:
        if several:
            from planaria.server.root_serve import folder_of_names

            folder = names.enter_context(folder_of_names())
            settings = msgspec.structs.replace(settings, passing=folder)
        fleet = Fleet(config, bar.enter_context(loading()), *engines(config), folder if several else None)
        load_modules(fleet.dispatcher.loras, settings.lora_modules)
        _prepare(fleet, planned)
        succession = Succession(fleet, settings)
        names.callback(succession.close)

        def announce(line: str) -> None:
            bar.close()
            announce_ready(line, fleet, started)

        starting = asyncio.create_task(fleet.start())
        try:
            with importing():
                await asyncio.to_thread(import_module, "planaria.server.serve")  # meanwhile it goes on
            from planaria.server.serve import bind, serve

            sock = bind(settings)
            set_server_title(sock, config, settings)
            if several:
                from planaria.server.root_serve import serve_from_root

                await starting
                return await serve_from_root(
                    fleet, settings, sock, announce, tokenizer=not skip_tokenizer_init, started=started
                )
            from planaria.server.tokenise import load_tokenizer

            tokenizer = None
            if not skip_tokenizer_init:
                checkpoint = msgspec.convert(config.checkpoint, Checkpoint)
                tokenizer = await asyncio.to_thread(load_tokenizer, checkpoint)
            await starting
            return await serve(
                fleet.dispatcher, tokenizer, settings, started=started, sock=sock, announce=announce, journal=journal,
                begun=succession.open,
            )  # fmt: skip
        finally:
            with contextlib.suppress(Exception):  # it was awaited before, or something else is why there is no server
                await starting
            await fleet.close()


class Succession:
    """By which another process may take the place of this server, once it serves."""

    def __init__(self, fleet: Fleet, settings: ServerConfig, busy: Callable[[], str] = lambda: "") -> None:
        self.fleet, self.settings, self.busy = fleet, settings, busy
        self._handing: HandingOver | None = None

    def open(self, life: Lifecycle[Service]) -> None:
        from planaria.server.handing_over import HandingOver

        self._handing = HandingOver(self.fleet, life, self.busy, tls=self.settings.ssl_certfile is not None)
        self._handing.open()

    def close(self) -> None:
        if self._handing is not None:
            self._handing.close()


def set_server_title(sock: socket.socket, config: EngineConfig, settings: ServerConfig) -> None:
    host, port = sock.getsockname()[:2]
    scheme = "https" if settings.ssl_certfile else "http"
    set_title("server", port=port, host=host, scheme=scheme, model=config.served_model_name)


def announce_ready(line: str, fleet: Fleet, started: float) -> None:
    facts = fleet.dispatcher.facts
    assert facts is not None
    defaults = said(fleet.config.checkpoint["generation_config"])
    ready = time.monotonic() - started
    address = line.rsplit(" at ", 1)[-1].split()[0]
    if as_json():
        fields = {name: value for name, value in msgspec.structs.asdict(facts).items() if name != "places"}
        logger.info("%s", line, extra={"fields": {**fields, "address": address, "ready_seconds": ready}})
    else:
        parallel, threshold = fleet.config.parallel, fleet.dispatcher.hand_overs.threshold
        kinds = f"{parallel.prefill_engines} + {parallel.decode_engines} engines: prompts of {threshold} tokens or more"
        prefill = f"{kinds} by the first kind (then as measured, see /health)" if parallel.splits_prefill else ""
        console.print(summary(facts, {"total": ready}, defaults, address, prefill), soft_wrap=True)
    try:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
    except OSError as e:
        logger.warning("standard output can't be written to: %s", e.strerror)
