"""`planaria serve A B C`: several models behind one port. Each is configured by the same options, checked before any
process is started, and has engines of its own, whose processes are there while it is loaded."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import sys
from typing import Any
from urllib.parse import quote

import msgspec

from planaria import preload
from planaria.checkpoint import Checkpoint
from planaria.checkpoint.resolve import name_of
from planaria.cli.look import console, loading
from planaria.cli.serve import configured, plan_shown
from planaria.config.options import EngineConfig
from planaria.config.sizes import parse_bytes
from planaria.errors import ConfigError
from planaria.logs import as_json
from planaria.processes import set_title
from planaria.server.config import ServerConfig


def run_several(
    models: list[str], engine: dict[str, Any], server: dict[str, Any], skip_tokenizer_init: bool, started: float
) -> int:
    """Exit code: see planaria.server.serve.run. Raises UserError."""
    names = server["served_model_names"] or tuple(map(name_of, models))
    if len(names) != len(models):
        rule = f"are {len(names)} names for {len(models)} models"
        raise ConfigError("--served-model-name", " ".join(names), rule, "give one for each, in their order")
    if twice := [name for name in names if names.count(name) > 1]:
        fix = "give each a name: --served-model-name, once for each"
        raise ConfigError("MODEL", twice[0], "is the name of two models", fix)
    _refuse(engine, server)
    most = min(server["max_loaded"] or 1, len(models))
    host_memory = parse_bytes(server["host_memory"], "--host-memory") if server["host_memory"] is not None else 0
    found = [
        configured(model, (name,), engine, server, skip_tokenizer_init)
        for model, name in zip(models, names, strict=True)
    ]
    for config, _ in found:
        _refuse_places(config)
        plan_shown(config)
    return asyncio.run(_serve(found, most, host_memory, skip_tokenizer_init, started))


def _refuse(engine: dict[str, Any], server: dict[str, Any]) -> None:
    """What is one model's. Raises ConfigError."""
    own = "leave it out: each model has its own"
    for flag, value, fix in (
        ("--tokenizer", engine["tokenizer"], own),
        ("--tokenizer-revision", engine["tokenizer_revision"], own),
        ("--chat-template", engine["chat_template"], own),
        ("--revision", engine["revision"], "give the folders of the revisions that are meant"),
        ("--replace", server["replace"], "stop the other server first"),
        ("--lora-modules", server["lora_modules"], "POST /v1/load_lora_adapter?model=NAME, once it serves"),
        ("--kv-transfer-config", engine["kv_transfer_config"], "serve that model by itself"),
    ):
        if value:
            value = " ".join(value) if isinstance(value, tuple) else value
            raise ConfigError(flag, value, "is for a server of one model", fix)


def _refuse_places(config: EngineConfig) -> None:
    parallel = config.parallel
    if parallel.api_server_count > 1:
        rule = "is for a server of one model: of several, one process answers HTTP"
        raise ConfigError("--api-server-count", parallel.api_server_count, rule, "leave it out")
    if parallel.over_nodes or parallel.engine_nodes is not None or parallel.data_parallel_backend == "ray":
        raise ConfigError("--nnodes", parallel.nnodes, "several models are served on one node", "serve one model")
    if parallel.distributed_executor_backend not in ("uni", "mp"):
        backend = parallel.distributed_executor_backend
        rule = "several models are served by processes of this machine"
        raise ConfigError("--distributed-executor-backend", backend, rule, "use mp")


async def _serve(
    found: list[tuple[EngineConfig, ServerConfig]], most: int, host_memory: int, skip_tokenizer_init: bool,
    started: float,
) -> int:  # fmt: skip
    from planaria.hosts.local import LocalHost
    from planaria.server.engine_client import EngineProcess
    from planaria.server.fleet import Fleet
    from planaria.server.front import Front, front_app
    from planaria.server.journal import Journal
    from planaria.server.models import ModelTable, ServedModel
    from planaria.server.residence import Residence
    from planaria.server.serve import bind, run, url_of
    from planaria.server.service import Service
    from planaria.server.tokenise import load_tokenizer

    settings = found[0][1]
    sock = bind(settings)
    models: list[ServedModel] = []
    hosts: dict[tuple[str, ...], LocalHost] = {}  # by what their engines import: those are forked from one process
    with contextlib.ExitStack() as bar:
        progress = bar.enter_context(loading())
        for config, own in found:
            modules = tuple(preload.of_an_engine(config))
            if modules not in hosts:
                hosts[modules] = LocalHost(devices=(), forks={preload.ENGINE: modules})
            make = functools.partial(EngineProcess, host=hosts[modules])
            fleet = Fleet(config, None if models else progress, make)
            tokenizer = None if skip_tokenizer_init else load_tokenizer(msgspec.convert(config.checkpoint, Checkpoint))
            service = Service(fleet.dispatcher, tokenizer, msgspec.structs.replace(own, otlp_traces_endpoint=None))
            if own.journal is not None:  # a folder for each
                service.responses.use(Journal(os.path.join(own.journal, quote(own.served_model_names[0], safe=""))))
            models.append(ServedModel(service, Residence(fleet)))
        front = Front(settings, ModelTable(models, most, host_memory, settings.unload_after))
        host, port = sock.getsockname()[:2]
        scheme = "https" if settings.ssl_certfile else "http"
        set_title("server", port=port, host=host, scheme=scheme, model=front.title)

        def announce(line: str) -> None:
            bar.close()
            if not as_json():
                console.print(f"{len(models)} models, {most} loaded at a time: {url_of(sock, settings)}/v1/models")
            sys.stdout.write(line + "\n")
            sys.stdout.flush()

        try:
            return await run(front_app(front), front, started=started, sock=sock, announce=announce)
        finally:
            await front.shut()
            await asyncio.gather(*(model.residence.fleet.close() for model in models))
            for each in hosts.values():
                await asyncio.to_thread(each.close)
