"""`planaria serve`: the engine's process is started first, so that it loads while the server is imported."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from typing import Any

import msgspec
import typer

from planaria.checkpoint import Checkpoint
from planaria.cli.look import console, loading, summary
from planaria.cli.options import engine_options
from planaria.config.options import EngineConfig
from planaria.config.parallel import refuse_outer_launcher
from planaria.config.resolve import resolve
from planaria.env import admin_key as admin_key_from_env
from planaria.env import api_keys as api_keys_from_env
from planaria.logs import setup_logging
from planaria.processes import set_title
from planaria.server.config import ServerConfig


def run(
    model: str, engine: dict[str, Any], *, skip_tokenizer_init: bool, log_level: str | None, **server: Any
) -> None:  # fmt: skip
    """Exit code: see planaria.server.serve.serve; 2 for a refused option or model, 1 if it can't start."""
    started = time.monotonic()
    if log_level is not None:
        setup_logging(log_level)
    names = server["served_model_names"] or (model,)
    server["served_model_names"] = names
    server["api_keys"] = server["api_keys"] or api_keys_from_env()
    server["admin_key"] = server["admin_key"] or admin_key_from_env()
    config = resolve(
        engine_options(model, engine, served_model_name=names[0], skip_tokenizer_init=skip_tokenizer_init)
    )
    refuse_outer_launcher(config.parallel, "planaria serve")
    settings = ServerConfig(
        model_path=str(config.checkpoint["path"]), eos_ids=config.model.eos_ids, seed=engine["seed"], **server
    )
    settings.verify()
    code = asyncio.run(_serve(config, settings, started, skip_tokenizer_init))
    if code:
        raise typer.Exit(code)


async def _serve(config: EngineConfig, settings: ServerConfig, started: float, skip_tokenizer_init: bool) -> int:
    from planaria.server.supervisor import SupervisedEngine

    with contextlib.ExitStack() as bar:
        client = SupervisedEngine(config, bar.enter_context(loading()))
        await client.start()
        try:
            from planaria.server.serve import bind, serve
            from planaria.server.tokenise import load_tokenizer

            sock = bind(settings)
            scheme = "https" if settings.ssl_certfile else "http"
            host, port = sock.getsockname()[:2]
            set_title("server", port=port, host=host, scheme=scheme, model=config.served_model_name)
            tokenizer = None
            if not skip_tokenizer_init:
                tokenizer = load_tokenizer(msgspec.convert(config.checkpoint, Checkpoint))

            def announce(line: str) -> None:
                assert client.facts is not None
                bar.close()
                console.print(summary(client.facts, {"total": time.monotonic() - started}))
                sys.stdout.write(line + "\n")
                sys.stdout.flush()

            return await serve(client, tokenizer, settings, started=started, sock=sock, announce=announce)
        finally:
            await client.close()
