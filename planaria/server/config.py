"""What the HTTP server is told, frozen. Facts found at run time (the bound port, the model's length) aren't here."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Annotated

import msgspec

from planaria.config.declared import check, option
from planaria.config.options import PoolingConfig, TransferConfig
from planaria.errors import ConfigError
from planaria.server.tools import Parsers
from planaria.types import KVLayout, SamplingParams

MIB = 1 << 20


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the server. Sizes in bytes, times in seconds. Call `verify()` before a process starts."""

    host: Annotated[str, option("Address to listen on.")] = "127.0.0.1"
    port: Annotated[
        int,
        option("Port; 0 takes a free one.", least=0, most=65535, rule="not a port number",
               fix="give 0 (any free one) to 65535"),
    ] = 8000  # fmt: skip
    served_model_names: Annotated[
        tuple[str, ...],
        option("Name clients use, or several after one another; default: MODEL as typed.", "--served-model-name"),
    ] = ()  # the first is what answers carry; empty: the engine's own name
    eos_ids: tuple[int, ...] = ()  # for a server without a tokenizer; else the tokenizer's count
    seed: int | None = None  # from which requests that bring none get theirs, in the order they come; None: drawn
    sampling_defaults: SamplingParams = msgspec.field(default_factory=SamplingParams)  # of requests that say nothing
    parsers: Parsers = Parsers()  # of what the model writes
    pooling: PoolingConfig = PoolingConfig()  # what it answers with
    model: str = ""  # as typed: a name it may be called by, and maybe a path of this disk, which is told to nobody
    trust_request_chat_template: Annotated[
        bool, option("Run chat templates that requests bring; they may take long.")
    ] = False  # fmt: skip
    api_keys: Annotated[
        tuple[str, ...],
        option("Require this key; may be given more than once. Also $PLANARIA_API_KEY.", "--api-key"),
    ] = ()  # empty: open
    admin_key: Annotated[
        str | None,
        option("Key of /admin routes; without one they are open to this machine. Also $PLANARIA_ADMIN_KEY."),
    ] = None
    cors_origins: Annotated[
        tuple[str, ...], option("Origin that may call from a browser; *: all.", "--cors-origin")
    ] = ()  # empty: no CORS headers at all
    cors_methods: Annotated[tuple[str, ...], option("Method they may use.", "--cors-method")] = (
        "GET",
        "POST",
        "OPTIONS",
    )
    cors_headers: Annotated[tuple[str, ...], option("Header they may send; *: all.", "--cors-header")] = ("*",)
    cors_credentials: Annotated[
        bool, option("Let those origins send credentials.", "--cors-credentials/--no-cors-credentials")
    ] = False
    ssl_certfile: Annotated[str | None, option("Serve TLS with this certificate.", metavar="FILE")] = None
    ssl_keyfile: Annotated[str | None, option("Its private key.", metavar="FILE")] = None
    ssl_keyfile_password: Annotated[str | None, option("Password of the private key.")] = None
    ssl_ca_certs: Annotated[str | None, option("Clients must show a certificate signed by it.", metavar="FILE")] = None
    max_body_bytes: Annotated[int, option("Largest request body.", least=1, metavar="BYTES")] = 8 * MIB
    max_sequences: Annotated[int, option("Of one request: prompts x n.", least=1, typed=False)] = 1024
    shutdown_timeout: Annotated[
        float, option("Seconds running requests get after SIGTERM.", least=0, metavar="SECONDS")
    ] = 30.0
    max_connections: int = 4096  # of this process; fewer where it may not open so many files
    header_timeout: float = 10.0  # for a request's header to come
    body_timeout: float = 60.0  # for a request's body to come
    lora_modules: Annotated[
        tuple[str, ...],
        option("Load this adapter: a name clients use and its folder; may be given more than once.",
               metavar="NAME=FOLDER"),
    ] = ()  # fmt: skip
    journal: Annotated[
        str | None,
        option("Keep stored responses in this folder; those that run in the background go on after a restart.",
               metavar="FOLDER"),
    ] = None  # fmt: skip
    replace: Annotated[
        bool,
        option("Take the place of the server of yours that runs on this port: no request of its clients fails."),
    ] = False  # fmt: skip
    max_loaded: Annotated[
        int | None, option("Of several models, as many are loaded at a time; default: 1.", least=1)
    ] = None
    host_memory: Annotated[
        str | None,
        option("Memory that packed weights and KV of models that are not loaded may keep, e.g. 8GiB; default: none.",
               metavar="SIZE"),
    ] = None  # fmt: skip
    unload_after: Annotated[
        float | None,
        option("Of several models, one without a request for so many seconds is unloaded; default: only when another "
               "needs its place.", least=0.0),
    ] = None  # fmt: skip
    transfer: TransferConfig | None = None  # of KV blocks, with other servers
    transfer_key: bytes = b""  # what is handed to clients of it is signed with
    kv_layout: KVLayout = KVLayout(1, (1,), 16)  # of each engine
    api_processes: int = 1  # of the server; one of several keeps responses
    passing: str = ""  # folder of the sockets by which they pass requests on to each other
    journal_ends: bool = False  # with the server: it is there for the death of an API process
    otlp_traces_endpoint: Annotated[
        str | None, option("Send traces to this collector, by OTLP over HTTP, e.g. http://localhost:4318.")
    ] = None
    otlp_traces_sampling_ratio: Annotated[
        float,
        option("Of requests that are traced, where their client doesn't say it; recoveries always are.", least=0,
               most=1, rule="not a part of all requests", fix="give 0 to 1"),
    ] = 1.0  # fmt: skip
    keep_alive_timeout: Annotated[float, option("Seconds an idle connection is kept.", least=0, typed=False)] = 75.0
    stall_timeout: float = 60.0  # work but no new step for this long: /health says it does not progress

    def verify(self) -> None:
        """Raise ConfigError for the first option that can't work."""
        check(self)
        if not self.host:  # of a variable that isn't set, say
            raise ConfigError("--host", "''", "is empty", "write 0.0.0.0 for every address of this machine")
        if any(not name for name in self.served_model_names):
            raise ConfigError("--served-model-name", "''", "is empty")
        for key in self.api_keys:
            if not key or not key.isascii() or not key.isprintable() or " " in key:
                raise ConfigError("--api-key", "***", "is empty or has characters a header can't carry")
        if self.cors_credentials and "*" in self.cors_origins:
            raise ConfigError(
                "--cors-credentials", True, "can't be combined with every origin", "name the origins allowed"
            )
        if self.ssl_certfile is None and (self.ssl_keyfile or self.ssl_ca_certs):
            raise ConfigError(
                "--ssl-keyfile" if self.ssl_keyfile else "--ssl-ca-certs",
                self.ssl_keyfile or self.ssl_ca_certs,
                "needs a certificate",
                "give --ssl-certfile too",
            )
        if self.replace and not self.port:
            raise ConfigError("--replace", True, "needs the port of the server that runs", "give its --port")
        if self.replace and self.api_processes > 1:
            raise ConfigError(
                "--replace", True, "is for a server of one API process, and there are several",
                "give --api-server-count 1, or leave it out",
            )  # fmt: skip
        if self.otlp_traces_endpoint is not None:
            if not self.otlp_traces_endpoint.startswith(("http://", "https://")):
                raise ConfigError(
                    "--otlp-traces-endpoint", self.otlp_traces_endpoint, "is no address of HTTP",
                    "give http://HOST:4318",
                )  # fmt: skip
            try:
                installed = find_spec("opentelemetry.exporter.otlp.proto.http") is not None
            except ModuleNotFoundError:
                installed = False
            if not installed:
                raise ConfigError(
                    "--otlp-traces-endpoint", self.otlp_traces_endpoint, "needs packages that are not installed here",
                    "pip install 'planaria[otel]'",
                )  # fmt: skip
        for flag, path in (
            ("--ssl-certfile", self.ssl_certfile),
            ("--ssl-keyfile", self.ssl_keyfile),
            ("--ssl-ca-certs", self.ssl_ca_certs),
        ):
            if path is not None and not (os.path.isfile(path) and os.access(path, os.R_OK)):
                raise ConfigError(flag, path, "no such file, or not readable")
