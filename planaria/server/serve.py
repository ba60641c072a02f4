"""Running the application: the socket, the line that says it is ready, signals, the end.

The order at the end is the rule here: stop admitting, let what runs finish (or abort it), close connections,
and only then return. The caller closes the engine's client afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.types import ASGIApp

from planaria.errors import CapacityError, ConfigError, EngineDead, PlanariaError, UserError
from planaria.server.admission import Admission
from planaria.server.app import create_app
from planaria.server.background import Background
from planaria.server.config import ServerConfig
from planaria.server.connections import HttpConnection, Listener, connection_bound
from planaria.server.dispatcher import Dispatcher
from planaria.server.schema import build_likely
from planaria.server.service import Service
from planaria.server.tokenise import Tokenizer

if TYPE_CHECKING:
    from planaria.server.journal import Journal

logger = logging.getLogger("planaria.server")

STUCK = 60.0  # seconds in which a client takes nothing of what is sent to it, after which it is hung up on
MAX_HEADER_BYTES = 16 << 10  # of a request's header that has not come whole
LAST_ANSWERS = 2.0  # seconds aborted requests get to be told
ENGINE_LAST_WORDS = 1.0  # seconds after an engine's death for its answers to be written

S = TypeVar("S", bound=Admission)


def address_of(config: ServerConfig) -> tuple[int, int, int, Any]:
    """Where to listen: family, kind, protocol and address of a socket. Raises ConfigError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as e:
        raise ConfigError("--host", config.host, f"can't be resolved ({e})") from None
    return family, kind, protocol, address


def bind(config: ServerConfig) -> socket.socket:
    """The listening socket's bound socket; port 0 takes any free one. Raises ConfigError."""
    family, kind, protocol, address = address_of(config)
    # asyncio turns Nagle's algorithm off only where the socket says that it is TCP; with it each answer takes 40 ms.
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(STUCK * 1000))  # of what is accepted here
        sock.bind(address)
        sock.set_inheritable(False)
    except OSError as e:
        sock.close()
        raise ConfigError(
            "--port", config.port, f"can't listen on {config.host}: {e.strerror or e}", "choose another, or 0 for any"
        ) from None
    return sock


@contextlib.contextmanager
def heard(on_signal: Callable[[int], None]) -> Iterator[None]:
    """SIGTERM and SIGINT."""
    loop, numbers = asyncio.get_running_loop(), (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def url_of(sock: socket.socket, config: ServerConfig) -> str:
    """The address to print."""
    host, port = sock.getsockname()[:2]
    scheme = "https" if config.ssl_certfile else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


class _Server(uvicorn.Server):
    """uvicorn, without its own signal handling and accepting, and looking after the engine at each of its ticks (10 a
    second)."""

    on_each_tick: Callable[[], None]
    listener: Listener

    def __init__(self, config: uvicorn.Config, settings: ServerConfig, sock: socket.socket, shared: bool) -> None:
        super().__init__(config)
        self.settings, self.sock, self.shared = settings, sock, shared
        self.accepting = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.servers = []
        self.listener = self.listen(self.sock, tls=self.config.ssl, shared=self.shared)
        self.started = True

    def listen(self, sock: socket.socket, **how: Any) -> Listener:
        """Accept connections from a socket. how: see Listener."""
        loop, settings = asyncio.get_running_loop(), self.settings

        def make(listener: Listener) -> HttpConnection:
            return HttpConnection(listener, self.config, self.server_state, {}, loop)

        most = connection_bound(settings.max_connections)
        listener = Listener(sock, make, most=most, header_timeout=settings.header_timeout, **how)
        self.servers.append(listener)  # type: ignore[arg-type]
        return listener

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def on_tick(self, counter: int) -> bool:
        self.accepting.set()
        self.on_each_tick()
        return await super().on_tick(counter)


class Lifecycle(Generic[S]):
    """From the first signal, or the engine's death, to the exit code."""

    def __init__(self, service: S, server: _Server) -> None:
        self.service, self.server = service, server
        self.code = 0
        self._ending: asyncio.Task[None] | None = None
        self._hurry = asyncio.Event()
        self.failure: PlanariaError | None = None  # why the engine never became ready
        self._pass_on: Callable[[socket.socket], bool] | None = None  # connections, to who has taken over
        server.on_each_tick = self.look

    async def until_ready(
        self, started: float, announce: Callable[[str], None] | None, begun: Callable[[Lifecycle[S]], None]
    ) -> None:
        """Say that it is ready, when it is; `failure` keeps why it never will be."""
        service, server = self.service, self.server
        try:
            await service.ready()
            await server.accepting.wait()
        except (UserError, CapacityError, EngineDead) as e:
            self.failure = e
            service.drain(f"the engine could not start: {e}")
            server.should_exit = True
            return
        begun(self)
        service.begin()
        url, seconds = url_of(server.sock, server.settings), time.monotonic() - started
        line = f"Planaria serving {service.title} at {url} (ready in {seconds:.1f} s)"
        if announce is not None:
            announce(line)
        else:
            print(line, flush=True)

    async def obey(self, stop: asyncio.Event) -> None:
        """Each time that it is set is a signal."""
        while True:
            await stop.wait()
            stop.clear()
            self.on_signal(signal.SIGTERM)

    def on_signal(self, number: int) -> None:
        """The first stops admission and drains; the second aborts what is open."""
        name = signal.Signals(number).name
        if self._ending is None:
            self.service.drain("the server is shutting down")
            logger.info("%s: no new requests; %d open", name, self.service.requests)
            self._ending = asyncio.get_running_loop().create_task(self._drain())
        elif not self._hurry.is_set():
            logger.warning("%s again: aborting %d open requests", name, self.service.requests)
            self.code = 128 + number
            self._hurry.set()

    async def _drain(self) -> None:
        service = self.service
        idle = asyncio.ensure_future(service.idle.wait())
        hurry = asyncio.ensure_future(self._hurry.wait())
        timeout = service.config.shutdown_timeout
        await asyncio.wait({idle, hurry}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if not idle.done():
            if not self._hurry.is_set():
                logger.warning("%d requests still open after %g s: aborted", service.requests, timeout)
            service.abort_all("the server is shutting down; the request was aborted")
            await asyncio.wait({idle}, timeout=LAST_ANSWERS)
        idle.cancel()
        hurry.cancel()
        self.server.should_exit = True

    # -- another process takes over

    def lend(self) -> bool:
        """Accept nothing. False: it is ending."""
        if self._ending is None and not self.server.should_exit:
            self.server.listener.close()
        return self._ending is None and not self.server.should_exit

    def leave(self, pass_on: Callable[[socket.socket], bool]) -> None:
        """Finish what is open and end. pass_on: gives away a connection that waits, or says False: it is to end after
        the answer that it waits for next, or when it has waited for long."""
        self._pass_on = pass_on
        self.service.leaving = True

    def take_back(self) -> None:
        """Accept again, unless it is ending."""
        self._pass_on, self.service.leaving = None, False
        if self._ending is None and not self.server.should_exit:
            self.server.listener.accept_again()

    def _left(self) -> bool:
        """Is nothing open any more?"""
        return not (self.service.runs or self.service.requests or self.server.listener.open)

    def look(self) -> None:
        self.look_at_engine()
        if self._pass_on is not None:
            self.server.listener.pass_on(self._pass_on)
            if self._left():
                self.server.should_exit = True

    def look_at_engine(self) -> None:
        """Note what it does; if it is dead nothing will come any more, so say it to everyone and end."""
        dead = self.service.look()
        if dead is None or self.code == 1:
            return
        self.code = 1
        self.service.end(dead)
        self.service.abort_all(f"the engine has ended: {dead.message}", 500, "engine_error")
        self._ending = asyncio.get_running_loop().create_task(self._after_death())

    async def _after_death(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.service.idle.wait(), ENGINE_LAST_WORDS)
        self.server.should_exit = True


async def serve(
    client: Dispatcher,
    tokenizer: Tokenizer | None,
    config: ServerConfig,
    *,
    prepare: Callable[[Starlette], None] = lambda app: None,
    journal: Journal | None = None,
    begun: Callable[[Lifecycle[Service]], None] = lambda life: None,
    **how: Any,
) -> int:
    """Serve one model; see `run`. `prepare`: gets the application before it runs. `journal`: what responses are kept
    in, closed at the end."""
    config.verify()
    app = create_app(client, tokenizer, config)
    prepare(app)
    service: Service = app.state.service
    if journal is not None:
        service.responses.use(journal)
    try:
        code = await run(app, service, begun=begun, **how)
    finally:
        await service.responses.close()
        service.close()
    return code or int(client.dead is not None)  # it may have ended with the last request of a drain


async def run(
    app: ASGIApp,
    service: S,
    *,
    started: float | None = None,
    sock: socket.socket | None = None,
    announce: Callable[[str], None] | None = None,
    signals: bool = True,
    stop: asyncio.Event | None = None,
    shared: bool = False,
    begun: Callable[[Lifecycle[S]], None] = lambda life: None,
) -> int:
    """Serve until a signal or the engine's death; returns the exit code.

    0 after a first SIGTERM or SIGINT, 128 + the signal's number after a second, 1 if the engine died. `started`:
    time.monotonic() of the process's start, for the line that says it is ready. `sock`: already bound (by `bind`).
    `stop`: setting it is a first SIGTERM, again a second, for those who run this inside a program of theirs.
    `shared`: other processes accept connections from `sock` too. `begun`: gets the life of the server once it accepts.
    Raises UserError, CapacityError or EngineDead if the engine never becomes ready, ConfigError for options.
    """
    started = time.monotonic() if started is None else started
    config = service.config
    sock = bind(config) if sock is None else sock
    server = _Server(_settings(app, config, sock), config, sock, shared)
    life = Lifecycle(service, server)
    waiting = Background()
    try:
        with heard(life.on_signal) if signals else contextlib.nullcontext():
            running = waiting.start(server.serve(sockets=[sock]))
            waiting.start(life.until_ready(started, announce, begun))
            waiting.start(asyncio.to_thread(build_likely))  # while engines load this process has time
            if stop is not None:
                waiting.start(life.obey(stop))
            await running
    finally:
        waiting.cancel()
        sock.close()
    if life.failure is not None:
        raise life.failure
    return life.code


def _settings(app: ASGIApp, config: ServerConfig, sock: socket.socket) -> uvicorn.Config:
    """Raises ConfigError, with the socket closed, where certificates can't be used."""
    try:
        settings = uvicorn.Config(
            app, log_config=None, access_log=False, lifespan="off", http="h11", ws="none", server_header=False,
            timeout_keep_alive=int(config.keep_alive_timeout), timeout_graceful_shutdown=1, proxy_headers=False,
            ssl_certfile=config.ssl_certfile, ssl_keyfile=config.ssl_keyfile,
            ssl_keyfile_password=config.ssl_keyfile_password, ssl_ca_certs=config.ssl_ca_certs,
            ssl_cert_reqs=2 if config.ssl_ca_certs else 0, h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        )  # fmt: skip
        settings.load()
    except OSError as e:  # ssl.SSLError is one
        sock.close()
        raise ConfigError(
            "--ssl-certfile", config.ssl_certfile, f"can't be used ({e})",
            "give a certificate and, with --ssl-keyfile, its private key, both in PEM form",
        ) from None  # fmt: skip
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # a line for whatever bytes a stranger sends
    return settings
