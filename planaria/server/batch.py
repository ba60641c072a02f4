"""Answering a batch through the routes of the server, with no socket: a request is checked, computed and shaped just
as over HTTP. What is answered is in the journal before the next request begins in its place.
"""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from starlette.types import ASGIApp

from planaria.errors import EngineDead
from planaria.server.app import create_app
from planaria.server.batch_file import DRAWN, Answers, Item
from planaria.server.config import ServerConfig
from planaria.server.dispatcher import Dispatcher
from planaria.server.forward import answer
from planaria.server.root_messages import Question
from planaria.server.tokenise import Tokenizer
from planaria.types import SEED_LIMIT


class _Body(msgspec.Struct):
    class Usage(msgspec.Struct):
        completion_tokens: int = 0

    usage: Usage | None = None


def seed_of(seed: int, custom_id: str) -> int:
    """For a request that brings none: its own, and the same however often the batch was begun again."""
    digest = hashlib.blake2b(f"{seed}/{custom_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % SEED_LIMIT


async def answer_all(
    client: Dispatcher, tokenizer: Tokenizer | None, config: ServerConfig, items: list[Item], answers: Answers,
    *, most_open: int, on_done: Callable[[int], None],
) -> None:  # fmt: skip
    """Answer `items`, `most_open` at a time; `on_done(new tokens)` is called after each. Raises what keeps the engine
    from coming up, EngineDead when it gives up: what is in the journal then stays."""
    app = create_app(client, tokenizer, config)
    await client.ready()
    left = iter(items)
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(most_open, len(items))):
                group.create_task(_work(app, client, left, answers, on_done))
    except BaseExceptionGroup as e:
        raise e.exceptions[0] from None
    finally:
        app.state.service.close()


async def _work(
    app: ASGIApp, client: Dispatcher, left: Iterator[Item], answers: Answers, on_done: Callable[[int], None]
) -> None:
    for item in left:
        body = dict(item.body)
        if item.url in DRAWN and body.get("seed") is None:
            body["seed"] = seed_of(answers.header.seed, item.custom_id or "")
        status, request_id, content = await post(app, item.url, msgspec.json.encode(body))
        if client.dead is not None:  # an answer that says so is none: it will be asked again
            raise EngineDead(client.dead.message)
        response = {"status_code": status, "request_id": request_id, "body": msgspec.Raw(content)}
        answers.add(item, line_of(item, response, None))
        usage = msgspec.json.decode(content, type=_Body).usage if status == 200 else None
        on_done(usage.completion_tokens if usage is not None else 0)


def line_of(item: Item, response: dict[str, Any] | None, error: tuple[str, str] | None) -> bytes:
    """A line of the output, without its end."""
    problem = {"code": error[0], "message": error[1]} if error is not None else None
    return msgspec.json.encode(
        {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": item.custom_id, "response": response, "error": problem}
    )


async def post(app: ASGIApp, path: str, body: bytes) -> tuple[int, str, bytes]:
    """One request of an ASGI application: status, request id and body of its answer."""
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    said = await answer(app, Question(0, "POST", path, b"", headers, body, ("127.0.0.1", 0), "http"))
    return said.status, dict(said.headers).get(b"x-request-id", b"").decode(), said.body
