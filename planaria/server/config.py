"""What the HTTP server is told, frozen. Facts found at run time (the bound port, the model's length) aren't here."""

from __future__ import annotations

import os

import msgspec

from planaria.errors import ConfigError

MIB = 1 << 20


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the server. Sizes in bytes, times in seconds. Call `verify()` before a process starts."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free one
    served_model_names: tuple[str, ...] = ()  # the first is what answers carry; empty: the engine's own name
    eos_ids: tuple[int, ...] = ()  # for a server without a tokenizer; else the tokenizer's count
    seed: int | None = None  # from which requests that bring none get theirs, in the order they come; None: drawn
    model_path: str = ""  # `root` in /v1/models
    api_keys: tuple[str, ...] = ()  # empty: open
    admin_key: str | None = None  # for /admin routes; None: those are open on loopback only
    cors_origins: tuple[str, ...] = ()  # empty: no CORS headers at all
    cors_methods: tuple[str, ...] = ("GET", "POST", "OPTIONS")
    cors_headers: tuple[str, ...] = ("*",)
    cors_credentials: bool = False
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_keyfile_password: str | None = None
    ssl_ca_certs: str | None = None  # given: clients must show a certificate signed by it
    max_body_bytes: int = 8 * MIB
    max_sequences: int = 1024  # of one request: prompts x n
    shutdown_timeout: float = 30.0
    body_timeout: float = 60.0  # for a request's body to come
    keep_alive_timeout: float = 75.0
    stall_timeout: float = 60.0  # work but no new step for this long: /health says it does not progress

    def verify(self) -> None:
        """Raise ConfigError for the first option that can't work."""
        if not 0 <= self.port <= 65535:
            raise ConfigError("--port", self.port, "not a port number", "give 0 (any free one) to 65535")
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
        for option, path in (
            ("--ssl-certfile", self.ssl_certfile),
            ("--ssl-keyfile", self.ssl_keyfile),
            ("--ssl-ca-certs", self.ssl_ca_certs),
        ):
            if path is not None and not (os.path.isfile(path) and os.access(path, os.R_OK)):
                raise ConfigError(option, path, "no such file, or not readable")
        for option, value, least in (
            ("--max-body-bytes", self.max_body_bytes, 1),
            ("--max-sequences", self.max_sequences, 1),
            ("--shutdown-timeout", self.shutdown_timeout, 0),
            ("--keep-alive-timeout", self.keep_alive_timeout, 0),
        ):
            if not value >= least:
                raise ConfigError(option, value, f"must be at least {least}")
