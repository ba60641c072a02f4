"""How many modules a streamed chat request crosses, from its route to the engine that admits it, and from a step's
result back to the socket: the chain that docs/ARCHITECTURE.md draws, taken from the stacks of a running server and a
running engine (with ranks that compute nothing). `python -m pytest -s` on this file prints it.

A hand-over is a call, or a message, that takes the request or what came of it from one module of the package to
another. What a module looks up on the way (a check, a count, a piece of text) comes back to it and is none.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from planaria import engine_port
from planaria.config.options import EngineOptions
from planaria.config.resolve import resolve
from planaria.core.engine import EngineCore
from planaria.engine_port import Port
from planaria.server import engine_client
from planaria.server.app import create_app
from planaria.server.batch import post
from planaria.server.chat import ChatWriter
from planaria.server.config import ServerConfig
from planaria.server.dispatcher import Dispatcher
from planaria.server.engine import Engine
from planaria.server.generation import Generation
from planaria.wire import Output, Shutdown, Submit
from planaria.worker.null import NullWorker

MOST = 15


def stack() -> list[str]:
    """The package's modules that have led to who asks for it, the first one first; neighbours that are one, once."""
    found: list[str] = []
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith("planaria.") and name[9:] not in found[-1:]:
            found.append(name[9:])
        frame = frame.f_back  # type: ignore[assignment]
    return found[::-1]


class Chains:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: dict[str, list[str]] = {}
        self.patch = monkeypatch

    def at(self, name: str, owner: Any, function: str, when: Callable[..., bool] = lambda *args: True) -> None:
        """How the first call of a function was come to."""
        inner = getattr(owner, function)
        module = sys.modules[owner.__module__].__name__.removeprefix("planaria.")

        def outer(*args: Any, **kwargs: Any) -> Any:
            if name not in self.found and when(*args):
                before = stack()
                self.found[name] = before if before[-1] == module else [*before, module]
            return inner(*args, **kwargs)

        self.patch.setattr(owner, function, outer)

    def after(self, name: str, module: str) -> list[str]:
        """A chain from a module on."""
        chain = self.found[name]
        return chain[len(chain) - 1 - chain[::-1].index(module) :] if module in chain else chain


async def test_a_chat_request_is_handed_over_so_many_times(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, tokenizer: Any
) -> None:
    chains = Chains(monkeypatch)
    chains.at("asked", Generation, "__init__")
    chains.at("sent", engine_client.EngineConnection, "send", lambda _, message: isinstance(message, Submit))
    chains.at("admitted", EngineCore, "admit")
    chains.at("computed", NullWorker, "step")
    chains.at("said", Port, "send", lambda _, message: isinstance(message, Output) and message.deltas)
    chains.at("written", ChatWriter, "event")
    monkeypatch.setattr(engine_port, "set_title", lambda *args, **fields: None)

    port = Port(f"ipc://{tmp_path}/engine")
    config = resolve(EngineOptions(model="smollm2", null_worker=True, threads=1, kv_cache_memory=1 << 24))
    running = threading.Thread(target=engine_port.serve, args=(config, port, threading.Event()))
    running.start()
    engine, dispatcher = Engine(0), Dispatcher(warm=True)
    engine.connection = connection = engine_client.EngineConnection(engine.hear)
    dispatcher.add(engine)
    connection.connect(port.address)
    try:
        await engine.ready()
        dispatcher.admit(engine)
        app = create_app(dispatcher, tokenizer, ServerConfig())
        body = {"messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": 4, "ignore_eos": True}
        chunks = 0

        async def answered(scope: Any, receive: Any, send: Any) -> None:
            async def to_socket(message: Any) -> None:
                nonlocal chunks
                chunks += message["type"] == "http.response.body"
                if chunks == 1:
                    chains.found["socket"] = stack()
                await send(message)

            await app(scope, receive, to_socket)

        status, _, content = await post(answered, "/v1/chat/completions", msgspec.json.encode(body))
        assert status == 200 and content.count(b'"content"') >= 4
    finally:
        connection.send(Shutdown())
        await asyncio.to_thread(running.join)
        connection.close()

    down = [chains.after("asked", "server.chat"), chains.after("sent", "server.generation"), chains.found["admitted"]]
    up = [chains.found["said"], chains.found["written"], chains.after("socket", "server.generation")]
    crossed = sum(len(chain) - 1 for chain in (*down, *up)) + 2  # and a message each way
    for title, parts in (("down", down), ("up", up), ("the step, of all requests", [chains.found["computed"]])):
        print(f"\n{title}: " + " | ".join(" > ".join(part) for part in parts))
    print(f"{crossed} hand-overs")
    assert crossed <= MOST, (down, up)
