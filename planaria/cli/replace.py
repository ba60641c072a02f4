"""`planaria serve --replace`: everything that needs no engine is made ready while the other server serves on."""

from __future__ import annotations

import contextlib
import logging

import msgspec

from planaria.checkpoint import Checkpoint
from planaria.cli.look import loading
from planaria.cli.serve import Succession, announce_ready, engines, set_server_title
from planaria.config.options import EngineConfig
from planaria.errors import ConfigError
from planaria.server.config import ServerConfig
from planaria.server.fleet import Fleet
from planaria.server.journal import Journal
from planaria.server.loras import load_modules
from planaria.server.root_serve import folder_of_names
from planaria.server.serve import Lifecycle, serve
from planaria.server.service import Service
from planaria.server.taking_over import TakingOver
from planaria.server.tokenise import load_tokenizer

logger = logging.getLogger("planaria.server")


async def serve_in_place(
    config: EngineConfig, settings: ServerConfig, started: float, skip_tokenizer_init: bool
) -> int | None:
    """Take the place of a server that runs, and serve; exit codes and exceptions as of `planaria.server.serve.serve`.
    None: there is no such server. Raises ConfigError: there is one, which serves on."""
    make, hosts = engines(config)
    other = await TakingOver.ask(settings)
    if other is None:
        return None
    with contextlib.ExitStack() as stack:
        stack.callback(other.close)
        names = stack.enter_context(folder_of_names())
        bar = stack.enter_context(contextlib.ExitStack())
        progress = bar.enter_context(loading())
        fleet = Fleet(config, progress, make, hosts, names=names, weights=other.weights, keepers=other.keepers)
        load_modules(fleet.dispatcher.loras, settings.lora_modules)
        if fleet.local is None:
            raise ConfigError("--replace", True, "is for engines that are processes of this machine")
        other.goes_on_with_its_weights(fleet)
        for index, keeper in fleet.members.items():
            keeper.memory = other.kv.pop(index, None)
        for memory in other.kv.values():  # of more engines than there are to be
            memory.close()
        try:
            await fleet.prepare()
            tokenizer = None
            if not skip_tokenizer_init:
                tokenizer = load_tokenizer(msgspec.convert(config.checkpoint, Checkpoint))
            await other.take()
            other.follow(fleet)
            journal = Journal(settings.journal) if settings.journal is not None else None
            await fleet.start()
            await fleet.dispatcher.ready()
            set_server_title(other.sock, config, settings)
            await other.keep()
            succession = Succession(fleet, settings, lambda: other.busy_with)
            stack.callback(succession.close)

            def announce(line: str) -> None:
                bar.close()
                announce_ready(line, fleet, started)

            def begun(life: Lifecycle[Service]) -> None:
                other.begin(life)
                succession.open(life)

            code = await serve(
                fleet.dispatcher, tokenizer, settings, started=started, sock=other.sock, announce=announce,
                journal=journal, begun=begun,
            )  # fmt: skip
            await other.finish(settings.shutdown_timeout)
            return code
        finally:
            await fleet.close()
