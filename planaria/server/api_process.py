"""One of several API processes, with the arguments LISTEN CHANNEL LEVEL (two descriptors that it is given, the level of
its log); it is told a `Boot`.

It serves like a server's only process does; its engines are the root's. It ends when the root says so, or ends.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys

import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware

from planaria.checkpoint import Checkpoint
from planaria.errors import ConfigError, PlanariaError
from planaria.hosts import child
from planaria.logs import setup_logging
from planaria.processes import leave_signals_to_parent, set_title
from planaria.server.attached import Attached
from planaria.server.background import Background
from planaria.server.channel import Channel
from planaria.server.counts import counts_of
from planaria.server.forward import Forward, RootLink
from planaria.server.journal import Journal
from planaria.server.neighbours import Neighbours
from planaria.server.root_messages import (
    ApiOrder,
    Boot,
    ForwardedAnswer,
    FromRoot,
    OrderDone,
    Serving,
    State,
    Stop,
    Unable,
)
from planaria.server.serve import Lifecycle, serve
from planaria.server.service import Service
from planaria.server.tokenise import load_tokenizer


class ApiServer:
    """This process's end of everything."""

    def __init__(self, boot: Boot, channel: Channel[FromRoot]) -> None:
        self.boot, self.channel = boot, channel
        self.engines = Attached(boot.config, boot.number, channel.send)
        self.root = RootLink(channel.send)
        settings, rank = boot.settings, boot.config.parallel.api_process_rank
        self.neighbours = Neighbours(settings.passing, rank, settings.api_processes)
        self.stop = asyncio.Event()
        self.app: Starlette | None = None
        self._orders = Background()

    async def run(self, sock: socket.socket) -> int:
        """Until it was told to stop; returns an exit code."""
        listening, settings = asyncio.create_task(self._listen()), self.boot.settings
        tokenizer = None
        if self.boot.tokenizer:
            tokenizer = load_tokenizer(msgspec.convert(self.boot.config.checkpoint, Checkpoint))
        try:
            return await serve(
                self.engines.dispatcher, tokenizer, settings, sock=sock, signals=False, stop=self.stop,
                shared=True, prepare=self._prepare, announce=lambda line: self.channel.send(Serving()),
                journal=Journal(settings.journal) if settings.journal is not None else None,
                begun=self._begun,
            )  # fmt: skip
        except ConfigError as e:
            self.channel.send(Unable(str(e)))
            return 1
        except PlanariaError:
            return 1  # the root says why
        finally:
            self.engines.close()
            listening.cancel()
            await self.channel.close()

    def _prepare(self, app: Starlette) -> None:
        self.app, app.state.service.neighbours = app, self.neighbours
        app.user_middleware.append(Middleware(Forward, root=self.root))  # the innermost: behind the gate

    def _begun(self, life: Lifecycle[Service]) -> None:
        life.server.listen(self.neighbours.listen())

    async def _listen(self) -> None:
        while (message := await self.channel.receive()) is not None:
            match message:
                case State():
                    self.engines.follow(message)
                    if self.app is not None and (traces := self.app.state.service.traces) is not None:
                        traces.follow(message.recoveries)
                case Stop():
                    self.stop.set()
                case ForwardedAnswer():
                    self.root.waiting.answer(message.id, message)
                case ApiOrder():
                    self._orders.start(self._carry_out(message))
        os._exit(1)  # the root has ended

    async def _carry_out(self, order: ApiOrder) -> None:
        if order.what == "count":
            counts = counts_of(self.app.state.service) if self.app is not None else None
            self.channel.send(OrderDone(order.id, counts=counts))
        else:
            self.channel.send(await self.engines.carry_out(order))


def main() -> int:
    """Exit code 0 when it was told to stop."""
    listen, channel, level = child.begin()
    setup_logging(level)
    leave_signals_to_parent()
    boot = msgspec.msgpack.decode(next(child.hear()), type=Boot)
    set_title("api", server=child.keeper(), api=boot.config.parallel.api_process_rank)

    async def run() -> int:
        opened = await Channel.open(socket.socket(fileno=int(channel)), msgspec.msgpack.Decoder(FromRoot))
        return await ApiServer(boot, opened).run(socket.socket(fileno=int(listen)))

    return asyncio.run(run())


if __name__ == "__main__":
    sys.exit(main())
