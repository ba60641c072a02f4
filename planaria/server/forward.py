"""Questions that any API process may get and only the root can answer: how all engines and processes are, and changes
of the fleet. They are passed on as they came, behind the gate, and the root's own application answers them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from planaria.server.gate import ADMIN_PATHS
from planaria.server.questions import PendingAnswers
from planaria.server.root_messages import ForwardedAnswer, Question

PATHS = ("/health", "/metrics", *ADMIN_PATHS)


class RootLink:
    """The questions of one API process. tell: sends one."""

    def __init__(self, tell: Callable[[Question], None]) -> None:
        self.tell = tell
        self.waiting = PendingAnswers[ForwardedAnswer]()

    async def ask(self, scope: Scope, body: bytes) -> ForwardedAnswer:
        """The root's answer to an HTTP request."""
        client = scope.get("client")
        headers = [(name, value) for name, value in scope["headers"] if name != b"x-request-id"]
        headers.append((b"x-request-id", scope["planaria"].id.encode()))
        return await self.waiting.ask(lambda id: self.tell(Question(
            id, scope["method"], scope["path"], scope["query_string"], headers, body,
            (client[0], client[1]) if client else None, scope["scheme"],
        )))  # fmt: skip


class Forward:
    """An ASGI middleware of an API process."""

    def __init__(self, app: ASGIApp, root: RootLink) -> None:
        self.app, self.root = app, root

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(PATHS):
            await self.app(scope, receive, send)
            return
        body = b""
        while scope["method"] not in ("GET", "HEAD", "OPTIONS"):
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body", False):
                break
        answer = await self.root.ask(scope, body)
        headers = [(name, value) for name, value in answer.headers if name != b"x-request-id"]
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        await send({"type": "http.response.body", "body": answer.body})


async def answer(app: ASGIApp, question: Question) -> ForwardedAnswer:
    """What an application says to a question, without a socket."""
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": question.method,
        "path": question.path, "raw_path": question.path.encode(), "root_path": "", "scheme": question.scheme,
        "query_string": question.query, "headers": question.headers, "client": question.client, "server": None,
    }  # fmt: skip
    said: list[Message] = []
    asked = False

    async def receive() -> Message:
        nonlocal asked
        if asked:  # nobody leaves before the answer
            await asyncio.get_running_loop().create_future()
        asked = True
        return {"type": "http.request", "body": question.body, "more_body": False}

    async def send(message: Message) -> None:
        said.append(message)

    await app(scope, receive, send)
    start = said[0]
    body = b"".join(message.get("body", b"") for message in said[1:])
    return ForwardedAnswer(question.id, start["status"], list(start.get("headers", ())), body)
