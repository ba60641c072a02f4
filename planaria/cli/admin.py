"""Admin routes of a running server: which server is meant, and what it says. The admin key goes with every question."""

from __future__ import annotations

import http.client
import ssl
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import msgspec

from planaria.config.secret import is_loopback
from planaria.env import admin_key
from planaria.errors import ConfigError, PlanariaError, UserError
from planaria.processes import titled_processes

TIMEOUT = 10.0  # seconds a server gets to answer; it gives its engine 2
_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}

T = TypeVar("T")


class AdminAddress(NamedTuple):
    """Where a server answers."""

    port: int
    host: str = "127.0.0.1"
    scheme: str = "http"

    @property
    def local(self) -> bool:
        """Is it on this machine's loopback, where nobody is in between?"""
        return is_loopback(self.host)

    @property
    def url(self) -> str:
        return f"{self.scheme}://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.host} port {self.port}"

    def call(
        self, method: str, path: str, key: str | None, body: dict[str, Any] | None = None, timeout: float = TIMEOUT
    ) -> tuple[int, bytes]:
        """Status and body of the answer. key: None for $PLANARIA_ADMIN_KEY. Raises PlanariaError when no answer
        comes, or the key isn't taken."""
        key = key or admin_key()
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout)
        if self.scheme == "https":
            context = ssl.create_default_context()
            if self.local:  # its certificate has another name
                context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            connection = http.client.HTTPSConnection(self.host, self.port, timeout=timeout, context=context)
        try:
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            connection.request(method, path, msgspec.json.encode(body) if body is not None else None, headers)
            answer = connection.getresponse()
            status, content = answer.status, answer.read()
        except (OSError, http.client.HTTPException) as e:
            raise PlanariaError(f"no server answers at {self}: {e}") from None
        finally:
            connection.close()
        if status == 403:
            raise PlanariaError(
                f"the server at {self} has no admin key, and tells this only on its own machine, where it has no API "
                "keys either: start it with --admin-key"
            )
        if status == 401:
            wrong = "does not take the admin key that was given" if key else "wants its admin key"
            raise PlanariaError(f"the server at {self} {wrong}: give --admin-key")
        return status, content

    def get(self, path: str, key: str | None, kind: type[T]) -> tuple[bytes, T]:
        """An answer as it came, and as a `kind`. Raises PlanariaError."""
        status, content = self.call("GET", path, key)
        try:
            if status == 200:
                return content, msgspec.json.decode(content, type=kind)
        except (msgspec.DecodeError, msgspec.ValidationError):
            pass
        raise self.not_planaria(status)

    def not_planaria(self, status: int) -> PlanariaError:
        """For an answer of an unknown shape."""
        return PlanariaError(f"what answers at {self} is not a server of Planaria (status {status})")


def running_servers() -> list[AdminAddress]:
    """Every server of this user on this machine, by their processes' titles. A title that says no port is skipped:
    `vim planaria: server` is one, too."""
    found = []
    for _, role, facts in titled_processes():
        port, host, scheme = facts.get("port", ""), facts.get("host", ""), facts.get("scheme", "http")
        known = port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) <= 65535
        if role == "server" and known and scheme in ("http", "https"):
            found.append(AdminAddress(int(port), _ANY.get(host, host), scheme))
    return found


def local_servers() -> list[AdminAddress]:
    """Those of them on the loopback. Raises PlanariaError where there is none, naming the others: an address that only
    a title says gets no key."""
    servers = running_servers()
    local = [server for server in servers if server.local]
    if local:
        return local
    if servers:
        away = servers[0]
        raise PlanariaError(f"the server at {away} is not on the loopback of this machine: give --url {away.url}")
    raise PlanariaError("no Planaria server of yours runs on this machine: give --url")


def server_of(url: str) -> AdminAddress:
    """Raises ConfigError."""
    parts = urlsplit(url if "//" in url else f"//{url}", scheme="http")
    try:
        port = parts.port or {"http": 80, "https": 443}[parts.scheme]
    except (KeyError, ValueError):
        raise ConfigError("--url", url, "is not the address of a server", "write http://host:port") from None
    return AdminAddress(port, parts.hostname or "127.0.0.1", parts.scheme)


def server_at(url: str | None) -> AdminAddress:
    """The server at `url`, or the only one of this user that runs here."""
    if url is not None:
        return server_of(url)
    servers = local_servers()
    if len(servers) > 1:
        urls = ", ".join(server.url for server in servers)
        raise UserError(f"several servers of yours run on this machine: give --url with one of {urls}")
    return servers[0]
