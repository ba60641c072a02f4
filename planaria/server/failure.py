"""Errors as the OpenAI API shapes them, and those of `ANTHROPIC` paths as Anthropic's does. Every answer that isn't a
success is made here, whatever went wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from planaria.errors import RequestError

ANTHROPIC = "/v1/messages"  # what paths begin with whose clients are Anthropic's
DONE = b"data: [DONE]\n\n"  # ends a stream of OpenAI's older kinds
MAX_MESSAGE = 2000  # characters; a message may quote what was sent
RETRY_AFTER = "5"  # seconds; said with every 503

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}

_ANTHROPIC_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip


def error_type(status: int) -> str:
    """The word OpenAI's clients see as `type`."""
    return _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")


def error_body(message: str, status: int, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The error as a plain value, for an answer's body or an event of a stream. Long messages are cut."""
    if len(message) > MAX_MESSAGE:
        message = message[:MAX_MESSAGE] + "…"
    return {"error": {"message": message, "type": error_type(status), "param": param, "code": code}}


def anthropic_error(message: str, status: int, param: str | None, request_id: str | None = None) -> dict[str, Any]:
    """The same in Anthropic's shape, which has no field for `param`: the message begins with it."""
    if param is not None and not message.startswith(param):
        message = f"{param}: {message}"
    kind = _ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    error = {"type": kind, "message": error_body(message, status)["error"]["message"]}
    return {"type": "error", "error": error, "request_id": request_id}


def last_event(path: str, message: str, status: int, code: str) -> bytes:
    """Of a stream of `path` that ends with an error."""
    if path.startswith(ANTHROPIC):
        return b"event: error\ndata: " + msgspec.json.encode(anthropic_error(message, status, None)) + b"\n\n"
    return b"data: " + msgspec.json.encode(error_body(message, status, None, code)) + b"\n\n" + DONE


class ErrorAnswer(Response):
    """What it says is known to the request's line of the log: code, field, message."""

    said: tuple[str | None, str | None, str]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        info = scope["planaria"]
        info.error = self.said
        if scope["path"].startswith(ANTHROPIC):
            _, param, message = self.said
            self.body = msgspec.json.encode(anthropic_error(message, self.status_code, param, info.id))
            self.headers["content-length"] = str(len(self.body))
        await super().__call__(scope, receive, send)


def failure(
    message: str,
    status: int = 400,
    *,
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """An error answer. 503 carries Retry-After."""
    extra = dict(headers or {})
    if status == 503:
        extra.setdefault("Retry-After", RETRY_AFTER)
    body = msgspec.json.encode(error_body(message, status, param, code))
    answer = ErrorAnswer(body, status, extra, "application/json")
    answer.said = code, param, message
    return answer


def refused(error: RequestError) -> Response:
    """The answer to a refused request."""
    return failure(error.message, error.status, param=error.param, code=error.code)
