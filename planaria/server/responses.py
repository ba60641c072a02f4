"""POST /v1/responses, and what is asked of a response afterwards."""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from planaria.errors import RequestError
from planaria.server.common import encode_json, read, sampling_params, spelled
from planaria.server.failure import failure
from planaria.server.gate import RequestInfo
from planaria.server.idempotency import HEADER, owner_of
from planaria.server.inputs import submissions
from planaria.server.records import Head, InputMessage
from planaria.server.response_input import MAX_CONVERSATION, MAX_ITEMS, conversation_of, from_turn, items_of, turns
from planaria.server.response_run import ResponseRun, fits
from planaria.server.response_shapes import event_bytes, item_of, num_events, response_of
from planaria.server.response_store import Entry, ResponseStore
from planaria.server.schema import clip
from planaria.server.schema_responses import ResponsesRequest
from planaria.server.service import Service, client_left
from planaria.server.stream import Choices
from planaria.server.tokenise import LONG_TEXT
from planaria.types import SamplingParams, StructuredOutputsParams
from planaria.wire import EngineFacts

EVENTS = 256  # that a client is sent at a time
PAGE = 20  # input items of a page that says nothing else
MAX_PAGE = 100
_ITEM = 32  # characters that a message more is as much work as
_NUMBER = re.compile(r"\d{1,18}\Z", re.ASCII)
_STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

T = TypeVar("T")


async def create_response(request: Request) -> Response:
    """Answer an input, now or in the background."""
    service: Service = request.app.state.service
    store = service.responses
    body = await read(request, ResponsesRequest)
    facts = service.admit(body.model)
    stored = _is_stored(service, body)
    owner, key, digest = owner_of(request.scope, service.config), "", ""
    if body.background and (given := dict(request.scope["headers"]).get(HEADER)) is not None:
        whole = await request.body()
        key, digest = given.decode("latin-1"), await _at_leisure(request, lambda: hashlib.sha256(whole).hexdigest())
        if (before := store.by_key.get((owner, key))) is not None:
            return _sent_again(store, before, digest, bool(body.stream))
    info: RequestInfo = request.scope["planaria"]
    items = await _at_leisure(request, lambda: items_of(body.input, info.uid))
    if body.previous_response_id is not None:
        items = [*_before(store, body.previous_response_id, owner), *items]
    params = sampling_params(body, service.config.sampling_defaults, max_tokens=body.max_output_tokens, logprobs=None)
    params = await spelled(service, params, request, _form(body), "text.format")
    ids = await _prompt(service, request, body, items, facts)
    if body.max_output_tokens is not None and len(ids) + body.max_output_tokens > _limit(facts):
        params = msgspec.structs.replace(params, max_tokens=None)  # as many as there is room for
    tokenizer = service.need_tokenizer("input")
    (asked,) = submissions(
        f"resp-{info.uid}", ids, params, facts, eos_ids=tokenizer.eos_ids, tokenizer=tokenizer,
        seed=service.next_seed(), priority=body.priority or 0, cache_salt=body.cache_salt or "",
        param="input",
    )  # fmt: skip
    lasts = store.journal is not None and bool(body.background)
    submit = msgspec.structs.replace(asked, persist=lasts)  # its KV, where there is a tier on disk
    head = Head(
        f"resp_{info.uid}", owner, int(time.time()), bool(body.background), body.model or service.model_names[0],
        fits(store), _fields(body, params, stored), items, submit, key, digest,
    )  # fmt: skip
    entry = store.add(head, stored=stored)
    await store.accept(entry)
    stream = Choices(ids, [submit], tokenizer)
    if not body.background:
        return Answered(ResponseRun(store, entry, info, stream), stream=bool(body.stream))
    answer = Followed(entry, 0) if body.stream else _json(response_of(entry.kept, "queued"))
    own = RequestInfo(info.id, info.uid, info.method, info.path)
    own.arrival = info.arrival
    ResponseRun(store, entry, own, stream).start()
    return answer


async def _at_leisure(request: Request, work: Callable[[], T]) -> T:
    """Of a long body: beside the event loop."""
    if len(await request.body()) <= LONG_TEXT:
        return work()
    service: Service = request.app.state.service
    return await service.in_thread(work, request.receive)


def _is_stored(service: Service, body: ResponsesRequest) -> bool:
    if not service.config.stores_responses:
        for name in ("background", "store", "previous_response_id"):
            if getattr(body, name):
                raise RequestError(
                    f"{name} needs a server with one API process: several keep no responses",
                    param=name, code="unsupported_parameter",
                )  # fmt: skip
        return False
    if body.background and body.store is False:
        raise RequestError("background needs store: true", param="background", code="invalid_value")
    return body.store is not False


def _sent_again(store: ResponseStore, entry: Entry, digest: str, stream: bool) -> Response:
    """To a request whose `Idempotency-Key` another process of this server has answered."""
    if entry.kept.head.digest != digest:
        other = "Idempotency-Key was sent before with another body or path: a key stands for one request"
        return failure(other, 422, param="Idempotency-Key", code="idempotency_key_reused")
    answer = Followed(entry, 0) if stream else _json(response_of(entry.kept))
    answer.headers["Idempotent-Replayed"] = "true"
    return answer


def _before(store: ResponseStore, id: str, owner: str) -> list[InputMessage]:
    """The conversation up to the end of another response."""
    try:
        kept = store.find(id, owner).kept
    except RequestError:
        kept = None
    if kept is None or kept.status not in ("completed", "incomplete"):
        why = "was not found" if kept is None else f"is {kept.status}, not completed"
        raise RequestError(
            f"previous response {clip(id)!r} {why}", param="previous_response_id", code="previous_response_not_found"
        )
    items = [*kept.head.items, InputMessage(f"msg_{kept.head.uid}", "assistant", [kept.text])]
    size = sum(len(text) for item in items for text in item.texts)
    if len(items) >= MAX_ITEMS or size > MAX_CONVERSATION:
        raise RequestError(
            f"the conversation has {len(items)} items with {size} characters; at most {MAX_ITEMS} with "
            f"{MAX_CONVERSATION}: begin another", param="previous_response_id", code="invalid_value",
        )  # fmt: skip
    return items


def _limit(facts: EngineFacts) -> int:
    """Tokens of prompt and output."""
    return min(facts.max_model_len, facts.num_blocks * facts.block_size or facts.max_model_len)


async def _prompt(
    service: Service, request: Request, body: ResponsesRequest, items: list[InputMessage], facts: EngineFacts
) -> list[int]:
    """Token ids of the conversation, or of as much of its end as there is room for, where that was asked for."""
    tokenizer = service.need_tokenizer("input")
    verbosity = body.text.verbosity if body.text is not None else None
    variables: dict[str, Any] = {} if verbosity is None else {"verbosity": verbosity}
    auto = body.truncation == "auto"
    most = _limit(facts) - (body.max_output_tokens or 1)

    def render(items: list[InputMessage]) -> list[int] | None:
        """None: it is too long, and may be cut."""
        text = tokenizer.apply_chat_template(conversation_of(items, body.instructions), True, **variables)
        if len(text) > LONG_TEXT:
            try:
                service.check_length(text, facts.max_model_len, "input")
            except RequestError:
                if auto:
                    return None
                raise
        ids = tokenizer.encode(text, False)
        return None if auto and len(ids) > most else ids

    def work() -> list[int]:
        ids = render(items)
        if ids is not None:
            return ids
        starts = turns(items)
        low, high = 1, len(starts) - 1  # the earliest beginning that fits is looked for between these
        while low <= high:
            middle = (low + high) // 2
            shorter = render(from_turn(items, starts[middle]))
            if shorter is None:
                low = middle + 1
            else:
                ids, high = shorter, middle - 1
        if ids is None:
            raise RequestError(
                f"the last turn alone, with max_output_tokens, is more than this model's length of {_limit(facts)} "
                "tokens", param="input", code="context_length_exceeded",
            )  # fmt: skip
        return ids

    size = sum(len(text) for item in items for text in item.texts) + len(body.instructions or "")
    if size + _ITEM * len(items) <= LONG_TEXT:
        return work()
    return await service.in_thread(work, request.receive)


def _form(body: ResponsesRequest) -> StructuredOutputsParams | None:
    """What the answer must be. Raises RequestError."""
    given = body.text.format if body.text is not None else None
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return StructuredOutputsParams(json_object=True)
    if given.json_schema is None:
        raise RequestError(
            "text.format.schema is required", param="text.format", code="missing_required_parameter"
        )  # fmt: skip
    return StructuredOutputsParams(json=given.json_schema)


def _fields(body: ResponsesRequest, params: SamplingParams, stored: bool) -> dict[str, Any]:
    """What the answer says of the request."""
    verbosity = body.text.verbosity if body.text is not None else None
    form = body.text.format if body.text is not None else None
    said = form.model_dump(by_alias=True, exclude_none=True) if form is not None else {"type": "text"}
    return {
        "instructions": body.instructions, "max_output_tokens": body.max_output_tokens, "metadata": body.metadata or {},
        "previous_response_id": body.previous_response_id, "prompt_cache_key": body.prompt_cache_key,
        "safety_identifier": body.safety_identifier, "store": stored, "temperature": params.temperature,
        "text": {"format": said, **({"verbosity": verbosity} if verbosity is not None else {})},
        "top_p": params.top_p, "truncation": body.truncation or "disabled", "user": body.user,
    }  # fmt: skip


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


def _found(request: Request) -> Entry:
    service: Service = request.app.state.service
    if not service.config.stores_responses:
        raise RequestError(
            "this server has several API processes, which keep no responses: start it with --api-server-count 1",
            param="response_id", code="response_not_found", status=404,
        )  # fmt: skip
    id: str = request.path_params["response_id"]
    return service.responses.find(id, owner_of(request.scope, service.config))


async def get_response(request: Request) -> Response:
    """A response as it is now, or its events."""
    entry, query = _found(request), request.query_params
    if any(query.getlist(name) for name in ("include", "include[]")):
        raise RequestError("include is not supported by this server", param="include", code="unsupported_parameter")
    stream, after = query.get("stream", "false").lower(), query.get("starting_after")
    if stream not in ("true", "false"):
        raise RequestError(f"stream must be true or false, got {clip(stream)!r}", param="stream", code="invalid_value")
    if after is not None and (stream == "false" or not _NUMBER.match(after)):
        rule = "needs stream=true" if stream == "false" else f"must be an event's number, got {clip(after)!r}"
        raise RequestError(f"starting_after {rule}", param="starting_after", code="invalid_value")
    if stream == "false":
        return _json(response_of(entry.kept))
    return Followed(entry, 0 if after is None else int(after) + 1)


async def cancel_response(request: Request) -> Response:
    """End one that runs in the background; one that has ended is as it was."""
    entry = _found(request)
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


async def delete_response(request: Request) -> Response:
    """Nobody can ask for it any more; what runs in the background ends."""
    entry = _found(request)
    request.app.state.service.responses.forget(entry)
    return _json({"id": entry.kept.head.id, "object": "response", "deleted": True})


async def list_input_items(request: Request) -> Response:
    """Of a response: the conversation that it answers, the latest first, or (`order=asc`) the other way round."""
    entry, query = _found(request), request.query_params
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
