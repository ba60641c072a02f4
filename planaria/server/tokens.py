"""POST /tokenize and /detokenize, shaped as in vLLM."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from planaria.errors import RequestError
from planaria.server.body import PIECE
from planaria.server.chat import chat_prompt
from planaria.server.common import encode_json, read
from planaria.server.inputs import check_vocabulary
from planaria.server.schema import DetokenizeRequest, TokenizeRequest
from planaria.server.service import MAX_TEXT, Service
from planaria.server.tokenise import LONG_TEXT


async def tokenize(request: Request) -> Response:
    """Token ids of a prompt or a conversation."""
    service: Service = request.app.state.service
    body = await read(request, TokenizeRequest)
    facts = service.admit(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give either prompt or messages", param="prompt", code="invalid_value")
    if body.messages is not None:
        tokens = await chat_prompt(service, request, body)
    else:
        (tokens,) = await service.encode([body.prompt or ""], body.add_special_tokens is not False, request.receive)
    value: dict[str, object] = {"count": len(tokens), "max_model_len": facts.max_model_len, "tokens": tokens}
    texts = service.need_tokenizer("prompt").token_text if body.return_token_strs else None

    def answer() -> bytes:
        if texts is not None:
            value["token_strs"] = [texts(token) for token in tokens]
        return encode_json(value)

    answered = await service.in_thread(answer) if len(tokens) > LONG_TEXT else answer()
    return Response(answered, media_type="application/json")


async def tokenizer_info(request: Request) -> Response:
    """What the tokenizer is, and the chat template."""
    service: Service = request.app.state.service
    facts, tokenizer = service.admit(None), service.need_tokenizer("tokenizer")
    value = {
        "tokenizer_class": type(tokenizer.backend).__name__, "vocab_size": tokenizer.vocab_size,
        "model_max_length": facts.max_model_len, "chat_template": tokenizer.chat_template,
        "special_tokens": tokenizer.special_tokens,
    }  # fmt: skip
    return Response(encode_json(value), media_type="application/json")


async def detokenize(request: Request) -> Response:
    """The text of token ids, special tokens included."""
    service: Service = request.app.state.service
    body = await read(request, DetokenizeRequest)
    facts = service.admit(body.model)
    tokenizer = service.need_tokenizer("tokens")
    if len(body.tokens) > MAX_TEXT:
        raise RequestError(
            f"tokens has {len(body.tokens)} entries; at most {MAX_TEXT}", param="tokens", code="invalid_value"
        )

    def answer() -> bytes:
        for start in range(0, len(body.tokens), PIECE):
            check_vocabulary(body.tokens[start : start + PIECE], facts, "tokens")
        return encode_json({"prompt": tokenizer.decode(body.tokens, skip_special_tokens=False)})

    answered = await service.in_thread(answer, request.receive) if len(body.tokens) > LONG_TEXT else answer()
    return Response(answered, media_type="application/json")
