"""What every HTTP request passes first: its id, the API key, the size limit, the stop of admission, and the last catch.

An ASGI middleware. A body is read here, at most `max_body_bytes` of it within `body_timeout`, before any route sees the
request; one whose body hasn't come counts as not open, so that no silent client holds up a shutdown.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Iterable
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from planaria.errors import RequestError
from planaria.server.admission import Admission
from planaria.server.failure import ANTHROPIC, failure
from planaria.server.idempotency import HEADER, Idempotency

if TYPE_CHECKING:
    from opentelemetry.trace import Span

logger = logging.getLogger("planaria.server")

# No key, and answered while draining; the dashboard is a page without data.
OPEN_PATHS = frozenset({"/health", "/metrics", "/version", "/dashboard", "/dashboard/plotly.min.js"})
ADMIN_PATHS = (
    "/admin", "/scale_elastic_ep", "/sleep", "/wake_up", "/is_sleeping", "/update_weights",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
)  # fmt: skip
MAX_BODIES = 512 << 20  # bytes of all requests that are being read or answered
LINGER_BYTES = 64 << 20  # of a body that is too large, read and dropped so that the client hears why
LINGER_SECONDS = 10.0
MAX_MESSAGE = 500  # characters of an error in the log
_SAFE_ID = re.compile(rb"[!-~]{1,128}\Z")
_CLOSE = {"Connection": "close"}
_LOOPBACK = ("127.", "::1", "::ffff:127.")
_LOOPBACK_HOST = re.compile(rb"(localhost|127\.[\d.]+|\[::1\])(:\d+)?\Z")
# Set by proxies (and by no program that asks for itself), or by browsers.
_NOT_LOCAL = frozenset({b"forwarded", b"via", b"x-real-ip", b"x-client-ip", b"x-original-host", b"true-client-ip",
                        b"cf-connecting-ip", b"origin"})  # fmt: skip


class RequestInfo:
    """What is known of an HTTP request outside its route."""

    __slots__ = ("admitted", "arrival", "error", "held", "id", "logged", "method", "path", "span", "status", "uid")

    def __init__(self, id: str, uid: str, method: str, path: str) -> None:
        self.id, self.uid, self.method, self.path = id, uid, method, path
        self.arrival = time.perf_counter()
        self.logged = False
        self.status = 0
        self.held = 0  # bytes of its body
        self.admitted = False  # its model, of several, stays loaded for it
        self.span: Span | None = None  # where it is recorded
        self.error: tuple[str | None, str | None, str] | None = None  # code, field, message of what it was answered

    def log(self, words: str = "", level: int = logging.INFO, **fields: object) -> None:
        """The request's one line. words: what there is to say besides; fields: the same, for machines."""
        self.logged = True
        seconds = time.perf_counter() - self.arrival
        if self.error is not None:
            code, param, message = self.error
            message = clean(message, MAX_MESSAGE)
            words += f" {code}{f' ({clean(param)})' if param else ''}: {message}"
            fields |= {"code": code, "param": param, "error": message}
        if not logger.isEnabledFor(level):
            return
        path = clean(self.path)
        logger.log(
            level, "%s %s %s %d%s, %.3f s", self.id, self.method, path, self.status, words, seconds,
            extra={"fields": {"id": self.id, "method": self.method, "path": path, "status": self.status,
                              "seconds": round(seconds, 6), **fields}},
        )  # fmt: skip


class ApiKeys:
    """API keys, compared in constant time."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def accepts(self, header: bytes | None) -> bool:
        """Whether an Authorization header carries one of the keys."""
        scheme, _, key = (header or b"").strip().partition(b" ")
        given = hashlib.sha256(key.strip()).digest()
        found = False
        for digest in self._digests:
            found |= hmac.compare_digest(digest, given)
        return found and scheme.lower() == b"bearer"


def once_more(body: bytes, receive: Receive) -> Receive:
    """A request's whole body as if nobody had read it, and then what comes after it."""
    told = False

    async def again() -> Message:
        nonlocal told
        if told:
            return await receive()
        told = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


class Gate:
    def __init__(self, app: ASGIApp, service: Admission) -> None:
        self.app, self.service, self.config = app, service, service.config
        self.keys = ApiKeys(self.config.api_keys)
        self.admin = ApiKeys([self.config.admin_key] if self.config.admin_key else [])
        self.once = Idempotency(app, service)
        self.bodies = 0  # bytes of requests that are read or being answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        if b"x-api-key" in headers and b"authorization" not in headers:  # as Anthropic's clients send it
            headers[b"authorization"] = b"Bearer " + headers[b"x-api-key"]
            scope["headers"] = [*scope["headers"], (b"authorization", headers[b"authorization"])]
        uid = uuid.uuid4().hex
        given = headers.get(b"x-request-id")
        id = given.decode() if given is not None and _SAFE_ID.match(given) else uid
        info = RequestInfo(id, uid, scope["method"], scope["path"])
        scope["planaria"] = info
        own_headers = [(b"x-request-id", id.encode())]
        if info.path.startswith(ANTHROPIC):
            own_headers.append((b"request-id", id.encode()))
        if self.service.leaving and scope["scheme"] == "https":
            own_headers.append((b"connection", b"close"))  # another can't go on with it
        open_path, traces = scope["path"] in OPEN_PATHS, self.service.traces
        if traces is not None and not open_path:
            traces.begin(info, headers)
            if info.span is not None:
                at = info.span.get_span_context()
                own_headers.append((b"traceparent", b"00-%032x-%016x-01" % (at.trace_id, at.span_id)))

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                info.status = message["status"]
                message["headers"] = [*message.get("headers", ()), *own_headers]
            await send(message)

        try:
            await self._pass(scope, headers, open_path, receive, send_with_id)
        except Exception:
            logger.exception("%s %s: internal error", id, clean(info.path))
            if info.status:
                raise  # the answer has begun: the connection is cut, which is all that can still be said
            await failure("internal error; the server's log has the details", 500, code="internal_error")(
                scope, receive, send_with_id
            )
        finally:
            self.bodies -= info.held
            if not info.logged:
                # Who asks again and again whether the model is loaded fills no log.
                quiet = open_path or info.status < 400 or (info.status == 503 and self.service.coming)
                info.log(level=logging.DEBUG if quiet else logging.INFO)
            if traces is not None and info.span is not None:
                traces.end(info)

    async def _pass(
        self, scope: Scope, headers: dict[bytes, bytes], open_path: bool, receive: Receive, send: Send
    ) -> None:
        if not open_path:
            refusal = self._refusal(scope, headers)
            if refusal is not None:
                await refusal(scope, receive, send)
                return
        if scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self._answer(self.app, scope, receive, send, open_path)
            return
        if b"content-length" in headers and b"transfer-encoding" in headers:  # where it ends, others may see otherwise
            words = "a request has either content-length or transfer-encoding"
            await failure(words, 400, code="invalid_http", headers=_CLOSE)(scope, receive, send)
            return
        limit_s, service = self.config.body_timeout, self.service
        try:
            async with asyncio.timeout(limit_s) as clock:
                service.reading[clock] = None
                try:
                    body = await self._read(scope["planaria"], headers, receive)
                finally:
                    del service.reading[clock]
        except TimeoutError:
            late = f"the request's body did not come within {limit_s:g} s"
            answer = self._draining() or failure(late, 408, code="request_timeout", headers=_CLOSE)
            await answer(scope, receive, send)
            return
        except RequestError as e:
            await failure(e.message, e.status, code=e.code, headers=_CLOSE)(scope, receive, send)
            return
        if body is None:
            return
        if (how := headers.get(b"content-encoding", b"identity").strip().lower()) != b"identity":
            words = f"content-encoding {clean(how.decode('latin-1'), 80)!r}: send the body as it is"
            await failure(words, 415, code="unsupported_content_encoding")(scope, receive, send)
            return
        once = HEADER in headers and scope["method"] == "POST" and scope["path"].startswith("/v1/")
        await self._answer(self.once if once else self.app, scope, once_more(body, receive), send, open_path)

    async def _answer(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send, open_path: bool) -> None:
        if open_path:
            await app(scope, receive, send)
            return
        self.service.enter()
        try:
            await app(scope, receive, send)
        finally:
            self.service.leave()

    def _refusal(self, scope: Scope, headers: dict[bytes, bytes]) -> ASGIApp | None:
        authorization = headers.get(b"authorization")
        if scope["path"].startswith(ADMIN_PATHS):
            if self.admin:
                if not self.admin.accepts(authorization):
                    return _unauthorized("the admin key", authorization)
            elif self.keys:  # who gives out keys has users elsewhere; a proxy here makes them look local
                return failure(
                    "a server with API keys answers admin routes only with an admin key of its own: start it with "
                    "--admin-key", 403, code="admin_only",
                )  # fmt: skip
            elif not _is_local(scope, headers):
                return failure(
                    "admin routes are open on loopback only, unless the server has an admin key", 403,
                    code="admin_only",
                )  # fmt: skip
            return None  # also while draining: it is then that one wants to know
        if self.keys and not self.keys.accepts(authorization):
            return _unauthorized("an API key", authorization)
        return self._draining()

    def _draining(self) -> ASGIApp | None:
        if not self.service.draining:
            return None
        return failure(self.service.draining, 503, code="not_ready", headers=_CLOSE)

    async def _read(self, info: RequestInfo, headers: dict[bytes, bytes], receive: Receive) -> bytes | None:
        """The whole body; None if the client left before its end. Raises RequestError: it is over the limit, which
        is read on for a while, or all bodies together are.

        An answer sent while the client still writes would be lost with the connection, so what is too large is
        read and dropped, up to a limit.
        """
        limit = self.config.max_body_bytes
        refusal = RequestError(f"the request's body is over {limit} bytes", status=413, code="request_too_large")
        declared = headers.get(b"content-length", b"")
        size = 0
        body = bytearray()
        too_large = declared.isdigit() and int(declared[:20]) > limit
        if too_large and int(declared[:20]) > LINGER_BYTES:
            raise refusal
        deadline = time.monotonic() + LINGER_SECONDS
        while True:
            if too_large:
                try:
                    message = await asyncio.wait_for(receive(), max(deadline - time.monotonic(), 0.0))
                except TimeoutError:
                    raise refusal from None
            else:
                message = await receive()
            if message["type"] == "http.disconnect":
                return None
            chunk = message.get("body", b"")
            size += len(chunk)
            if size > limit and not too_large:
                too_large = True
                deadline = time.monotonic() + LINGER_SECONDS
            if too_large:
                body.clear()
                if size > LINGER_BYTES:
                    raise refusal
            else:
                body += chunk
                info.held += len(chunk)
                self.bodies += len(chunk)
                if self.bodies > MAX_BODIES:
                    raise RequestError("too much is being sent at a time; try again", status=503, code="overloaded")
            if not message.get("more_body", False):
                if too_large:
                    raise refusal
                return bytes(body)


def _is_local(scope: Scope, headers: dict[bytes, bytes]) -> bool:
    """From a program of this machine: not through a proxy here, and not from a page in a browser here.

    A proxy's default settings may add no header at all; nginx then speaks HTTP/1.0, which programs don't.
    """
    if not (scope.get("client") or ("",))[0].startswith(_LOOPBACK) or scope.get("http_version") == "1.0":
        return False
    if any(name in _NOT_LOCAL or name.startswith(b"x-forwarded") for name in headers):
        return False
    if headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin"):  # another page than the dashboard
        return False
    return _LOOPBACK_HOST.match(headers.get(b"host", b"")) is not None


def _unauthorized(what: str, given: bytes | None) -> ASGIApp:
    wrong = f"the key that was sent is not {what} of this server" if given else f"{what} is needed, and none was sent"
    return failure(
        f"{wrong}: send it as 'Authorization: Bearer KEY'", 401, code="invalid_api_key" if given else "missing_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )  # fmt: skip


def clean(text: str, limit: int = 200) -> str:
    """What a client sent, or what quotes it, for a log line: one line, not long."""
    return text[:limit].encode("unicode_escape").decode("ascii")
