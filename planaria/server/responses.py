"""POST /v1/responses, and what is asked of a response afterwards."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import re
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from planaria.errors import RequestError
from planaria.server.admission import client_left
from planaria.server.chat_calls import LONG_READING
from planaria.server.common import encode_json, read
from planaria.server.failure import failure
from planaria.server.gate import RequestInfo
from planaria.server.idempotency import HEADER, owner_of
from planaria.server.kept import Kept
from planaria.server.neighbours import to_keeper
from planaria.server.records import ConversationItem, Head
from planaria.server.response_input import MAX_CONVERSATION, MAX_ITEMS, Find, check_outputs, items_of, refers
from planaria.server.response_items import ENDS
from planaria.server.response_request import asked_of, fields_of
from planaria.server.response_run import ResponseRun, choices_of, fits
from planaria.server.response_shapes import event_bytes, item_of, num_events, response_of, told_items
from planaria.server.response_store import Entry, ResponseStore
from planaria.server.schema import clip
from planaria.server.schema_responses import INCLUDABLE, ResponsesRequest
from planaria.server.service import Service
from planaria.server.tokenise import LONG_TEXT
from planaria.server.wrong import wrong

EVENTS = 256  # that a client is sent at a time
PAGE = 20  # input items of a page that says nothing else
MAX_PAGE = 100
_UID = re.compile(r"(?<=_)[0-9a-f]{32}")  # of a request, in an id
_NUMBER = re.compile(r"\d{1,18}\Z", re.ASCII)
_STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

T = TypeVar("T")


async def create_response(request: Request) -> Response:
    """Answer an input, now or in the background."""
    service: Service = request.app.state.service
    store = service.responses
    body = await read(request, ResponsesRequest)
    facts = service.admit(body.model, "generate")
    stored = _is_stored(body)
    kept_ones = stored or body.previous_response_id is not None or refers(body.input)
    if kept_ones and (elsewhere := await to_keeper(request)) is not None:
        return elsewhere
    owner, key, digest = owner_of(request.scope, service.config), "", ""
    if body.background and (given := dict(request.scope["headers"]).get(HEADER)) is not None:
        whole = await request.body()
        key, digest = given.decode("latin-1"), await _at_leisure(request, lambda: hashlib.sha256(whole).hexdigest())
        if (before := store.by_key.get((owner, key))) is not None:
            return await _sent_again(service, before, digest, bool(body.stream))
    info: RequestInfo = request.scope["planaria"]
    items = await _at_leisure(request, lambda: items_of(body.input, info.uid, _finder(store, owner)))
    own = len(items)
    if body.previous_response_id is not None:
        items = [*await _before(service, body.previous_response_id, owner), *items]
    check_outputs(items, own)
    submit, reading = await asked_of(service, request, body, items, facts)
    head = Head(
        f"resp_{info.uid}", owner, int(time.time()), bool(body.background), body.model or service.model_names[0],
        fits(store), fields_of(body, submit.params, stored), items, submit, key, digest, reading,
    )  # fmt: skip
    entry = store.add(head, stored=stored)
    await store.accept(entry)
    stream = choices_of(service, submit, reading)
    if not body.background:
        return Answered(ResponseRun(store, entry, info, stream), stream=bool(body.stream))
    answer = Followed(entry, 0) if body.stream else _json(response_of(entry.kept, "queued"))
    later = RequestInfo(info.id, info.uid, info.method, info.path)
    later.arrival = info.arrival
    ResponseRun(store, entry, later, stream).start()
    return answer


async def _at_leisure(request: Request, work: Callable[[], T]) -> T:
    """Of a long body: beside the event loop."""
    if len(await request.body()) <= LONG_TEXT:
        return work()
    service: Service = request.app.state.service
    return await service.in_thread(work, request.receive)


def _is_stored(body: ResponsesRequest) -> bool:
    if body.background and body.store is False:
        raise RequestError("background needs store: true", param="background", code="invalid_value")
    return body.store is not False


async def _sent_again(service: Service, entry: Entry, digest: str, stream: bool) -> Response:
    """To a request whose `Idempotency-Key` another process of this server has answered."""
    if entry.kept.head.digest != digest:
        other = "Idempotency-Key was sent before with another body or path: a key stands for one request"
        return failure(other, 422, param="Idempotency-Key", code="idempotency_key_reused")
    await _taken_apart(service, entry.kept)
    answer = Followed(entry, 0) if stream else _json(response_of(entry.kept))
    answer.headers["Idempotent-Replayed"] = "true"
    return answer


async def _before(service: Service, id: str, owner: str) -> list[ConversationItem]:
    """The conversation up to the end of another response."""
    try:
        kept = service.responses.find(id, owner).kept
    except RequestError:
        kept = None
    if kept is None or kept.status not in ENDS:
        why = "was not found" if kept is None else f"is {kept.status}, not completed"
        raise RequestError(
            f"previous response {clip(id)!r} {why}", param="previous_response_id", code="previous_response_not_found"
        )
    await _taken_apart(service, kept)
    items = [*kept.head.items, *told_items(kept)]
    size = _size(items)
    if len(items) >= MAX_ITEMS or size > MAX_CONVERSATION:
        raise RequestError(
            f"the conversation has {len(items)} items with {size} characters; at most {MAX_ITEMS} with "
            f"{MAX_CONVERSATION}: begin another", param="previous_response_id", code="invalid_value",
        )  # fmt: skip
    return items


def _size(items: Iterable[ConversationItem]) -> int:
    return sum(len(text) for item in items for text in item.texts)


def _finder(store: ResponseStore, owner: str) -> Find:
    """For an item's id: it has that of its response in it."""
    known: dict[str, dict[str, ConversationItem]] = {}
    size = 0

    def items_of(uid: str) -> dict[str, ConversationItem]:
        try:
            kept = store.find(f"resp_{uid}", owner).kept
        except RequestError:
            return {}
        return {item.id: item for item in (*kept.head.items, *told_items(kept))} if kept.over else {}

    def find(id: str, place: str) -> ConversationItem:
        nonlocal size
        uid = found.group() if (found := _UID.search(id)) is not None else ""
        if uid not in known:
            known[uid] = items_of(uid)
        item = known[uid].get(id)
        if item is None:
            raise wrong(place, f"{clip(id)!r} is of no item of a stored response that has ended", "item_not_found")
        size += _size([item])
        if size > MAX_CONVERSATION:
            raise wrong(place, f"makes more than {MAX_CONVERSATION} characters of items that are kept", "invalid_value")
        return item

    return find


async def _taken_apart(service: Service, kept: Kept) -> None:
    """Have its items be there: what is long, and was read from a file, is taken apart beside the event loop."""
    if kept.unread > LONG_READING:
        await service.in_thread(lambda: kept.items)


# -- answers


def _json(value: dict[str, Any]) -> Response:
    return Response(encode_json(value), media_type="application/json")


class Followed(Response):
    """The events of a response from number `start` on, as they come, each once."""

    def __init__(self, entry: Entry, start: int, on_left: Callable[[], None] = lambda: None) -> None:
        super().__init__(None, 200, _STREAM_HEADERS, "text/event-stream; charset=utf-8")
        del self.headers["content-length"]
        self.entry, self.start, self.on_left = entry, start, on_left

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        leaving = asyncio.create_task(client_left(receive))
        sending = asyncio.create_task(self._send(send))
        try:
            await asyncio.wait((leaving, sending), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
            else:
                self.on_left()
        finally:
            leaving.cancel()
            sending.cancel()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        entry, at = self.entry, self.start
        while True:
            more, stop = entry.more, num_events(entry.kept)
            if at < stop:
                until = min(stop, at + EVENTS)
                chunk = b"".join([event_bytes(entry.kept, number) for number in range(at, until)])
                at = until
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            elif entry.kept.over or entry.cut:
                await send({"type": "http.response.body", "body": b""})
                return
            else:
                await more.wait()


class Answered(Response):
    """Of one that runs for its client, and no longer than that is there."""

    def __init__(self, run: ResponseRun, *, stream: bool) -> None:
        super().__init__()
        self.run, self.stream = run, stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        run = self.run
        running = asyncio.create_task(run.go())
        try:
            if self.stream:
                await Followed(run.entry, 0, run.cancel)(scope, receive, send)
            else:
                await self._whole(scope, receive, send)
        finally:
            run.cancel()
            await running

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        entry, run = self.run.entry, self.run
        leaving = asyncio.create_task(client_left(receive))
        leaving.add_done_callback(lambda task: None if task.cancelled() else run.cancel())
        try:
            while not entry.kept.over:
                await entry.more.wait()
        finally:
            leaving.cancel()
        if run.error is not None:
            run.store.forget(entry)
            message, status, code = run.error
            await failure(message, status, code=code)(scope, receive, send)
        elif not run.generation.gone:
            await _json(response_of(entry.kept))(scope, receive, send)


# -- afterwards


def _by_keeper(answer: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """Of several API processes the one that keeps responses answers."""

    @functools.wraps(answer)
    async def answered(request: Request) -> Response:
        return await to_keeper(request) or await answer(request)

    return answered


async def _found(request: Request) -> Entry:
    service: Service = request.app.state.service
    id: str = request.path_params["response_id"]
    entry = service.responses.find(id, owner_of(request.scope, service.config))
    await _taken_apart(service, entry.kept)
    return entry


@_by_keeper
async def get_response(request: Request) -> Response:
    """A response as it is now, or its events."""
    entry, query = await _found(request), request.query_params
    for value in (*query.getlist("include"), *query.getlist("include[]")):
        if value not in INCLUDABLE:
            raise RequestError(
                f"include: {clip(value)!r} is none of {', '.join(INCLUDABLE)}", param="include", code="invalid_value"
            )
    stream, after = query.get("stream", "false").lower(), query.get("starting_after")
    if stream not in ("true", "false"):
        raise RequestError(f"stream must be true or false, got {clip(stream)!r}", param="stream", code="invalid_value")
    if after is not None and (stream == "false" or not _NUMBER.match(after)):
        rule = "needs stream=true" if stream == "false" else f"must be an event's number, got {clip(after)!r}"
        raise RequestError(f"starting_after {rule}", param="starting_after", code="invalid_value")
    if stream == "false":
        return _json(response_of(entry.kept))
    return Followed(entry, 0 if after is None else int(after) + 1)


@_by_keeper
async def cancel_response(request: Request) -> Response:
    """End one that runs in the background; one that has ended is as it was."""
    entry = await _found(request)
    if not entry.kept.head.background:
        raise RequestError(
            "only a response in the background can be cancelled; to end another, close its connection",
            param="response_id", code="invalid_value",
        )  # fmt: skip
    if entry.run is not None:
        entry.run.cancel("cancelled")
    request.app.state.service.responses.end(entry, "cancelled")
    while not entry.kept.over and not entry.cut:
        await entry.more.wait()
    return _json(response_of(entry.kept))


@_by_keeper
async def delete_response(request: Request) -> Response:
    """Nobody can ask for it any more; what runs in the background ends."""
    entry = await _found(request)
    request.app.state.service.responses.forget(entry)
    return _json({"id": entry.kept.head.id, "object": "response", "deleted": True})


@_by_keeper
async def list_input_items(request: Request) -> Response:
    """Of a response: the conversation that it answers, the latest first, or (`order=asc`) the other way round."""
    entry, query = await _found(request), request.query_params
    order, limit, after = query.get("order", "desc"), query.get("limit", str(PAGE)), query.get("after")
    if order not in ("asc", "desc"):
        raise RequestError(f"order must be asc or desc, got {clip(order)!r}", param="order", code="invalid_value")
    if not _NUMBER.match(limit) or not 1 <= int(limit) <= MAX_PAGE:
        raise RequestError(f"limit must be 1 to {MAX_PAGE}, got {clip(limit)!r}", param="limit", code="invalid_value")
    items = entry.kept.head.items if order == "asc" else entry.kept.head.items[::-1]
    if after is not None:
        place = next((i for i, item in enumerate(items) if item.id == after), None)
        if place is None:
            raise RequestError(f"no item {clip(after)!r}", param="after", code="invalid_value")
        items = items[place + 1 :]
    page = items[: int(limit)]
    return _json({
        "object": "list", "data": [item_of(item) for item in page], "has_more": len(items) > len(page),
        "first_id": page[0].id if page else None, "last_id": page[-1].id if page else None,
    })  # fmt: skip
