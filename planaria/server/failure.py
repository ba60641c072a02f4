"""Errors as the OpenAI API shapes them. Every answer that isn't a success is made here, whatever went wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from planaria.errors import RequestError

MAX_MESSAGE = 2000  # characters; a message may quote what was sent
RETRY_AFTER = "5"  # seconds; said with every 503

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


def error_type(status: int) -> str:
    """The word OpenAI's clients see as `type`."""
    return _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")


def error_body(message: str, status: int, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The error as a plain value, for an answer's body or an event of a stream. Long messages are cut."""
    if len(message) > MAX_MESSAGE:
        message = message[:MAX_MESSAGE] + "…"
    return {"error": {"message": message, "type": error_type(status), "param": param, "code": code}}


class ErrorAnswer(Response):
    """What it says is known to the request's line of the log: code, field, message."""

    said: tuple[str | None, str | None, str]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["planaria"].error = self.said
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
