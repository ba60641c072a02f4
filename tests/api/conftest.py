"""A real server in the test's own event loop, on a port of its own, with the fake engine behind it."""

from __future__ import annotations

import asyncio
import contextlib
import ssl

import httpx
import pytest

from planaria.checkpoint import resolve_checkpoint
from planaria.errors import ModelError
from planaria.server import dispatcher, keeper
from planaria.server.config import ServerConfig
from planaria.server.journal import Journal
from planaria.server.serve import bind, serve, url_of
from planaria.server.tokenise import load_tokenizer
from tests.api.fake_engine import FakeEngine

TLS = ssl.create_default_context()  # each client would make one of its own, which takes 40 ms of a core


@pytest.fixture(autouse=True)
def _no_wait_for_what_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripted engines say a token only when a test tells them to."""
    monkeypatch.setattr(dispatcher, "GOES_ON", 0.0)
    monkeypatch.setattr(keeper, "SHORTEST", 0.0)


@pytest.fixture(scope="session")
def tokenizer():
    try:
        checkpoint = resolve_checkpoint("smollm2")
    except ModelError as e:
        pytest.skip(f"no tokenizer to test with: {e}")
    return load_tokenizer(checkpoint)


class Running:
    """A server that runs: `url`, its `engine`, `stop` (as a first SIGTERM) and the `exit_code`."""

    def __init__(self, engine, config) -> None:
        self.engine, self.config = engine, config
        self.stop = asyncio.Event()
        self.line = asyncio.get_running_loop().create_future()
        self.sock = bind(config)
        self.url = url_of(self.sock, config)
        self.task: asyncio.Task[int]

    def client(self, **kwargs):
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient

        kwargs = {"api_key": "none", "max_retries": 0, "http_client": DefaultAsyncHttpxClient(verify=TLS), **kwargs}
        return AsyncOpenAI(base_url=self.url + "/v1", **kwargs)

    def http(self, **kwargs) -> httpx.AsyncClient:
        return httpx.AsyncClient(**{"base_url": self.url, "timeout": 60, "verify": TLS, **kwargs})

    async def exit_code(self) -> int:
        async with asyncio.timeout(60):
            return await self.task


@contextlib.asynccontextmanager
async def running(engine, tokenizer, **options):
    config = ServerConfig(port=0, **options)
    server = Running(engine, config)
    server.task = asyncio.create_task(
        serve(
            engine, tokenizer, config, sock=server.sock, signals=False, stop=server.stop,
            journal=Journal(config.journal) if config.journal is not None else None,
            announce=lambda line: server.line.done() or server.line.set_result(line),
        )
    )  # fmt: skip
    try:
        if engine.facts is not None:
            async with asyncio.timeout(60):
                await asyncio.wait({server.line, server.task}, return_when=asyncio.FIRST_COMPLETED)
        yield server
    finally:
        server.stop.set()
        with contextlib.suppress(Exception):
            await server.exit_code()
        await engine.close()


@pytest.fixture
def start(tokenizer):
    """start(engine=None, **options): an async context manager that runs a server."""

    @contextlib.asynccontextmanager
    async def run(engine=None, **options):
        async with running(engine or FakeEngine(tokenizer), tokenizer, **options) as server:
            yield server

    return run


@pytest.fixture
async def server(start):
    async with start() as s:
        yield s
