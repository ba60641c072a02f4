"""POST /tokenize and /detokenize, shaped as in vLLM."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from planaria.errors import RequestError
from planaria.server.chat import chat_prompt
from planaria.server.common import encode_json, read
from planaria.server.schema import DetokenizeRequest, TokenizeRequest
from planaria.server.service import Service


async def tokenize(request: Request) -> Response:
    """Token ids of a prompt or a conversation."""
    service: Service = request.app.state.service
    body = await read(request, TokenizeRequest)
    facts = service.admit(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give either prompt or messages", param="prompt", code="invalid_value")
    if body.messages is not None:
        tokens = await chat_prompt(
            service,
            body.messages,
            len(await request.body()),
            add_generation_prompt=body.add_generation_prompt is not False,
            variables=body.chat_template_kwargs,
            add_special_tokens=bool(body.add_special_tokens),
        )
    else:
        tokens = await service.encode(body.prompt or "", body.add_special_tokens is not False)
    value: dict[str, object] = {"count": len(tokens), "max_model_len": facts.max_model_len, "tokens": tokens}
    if body.return_token_strs:
        tokenizer = service.need_tokenizer("prompt")
        value["token_strs"] = [tokenizer.token_text(token) for token in tokens]
    return Response(encode_json(value), media_type="application/json")


async def detokenize(request: Request) -> Response:
    """The text of token ids, special tokens included."""
    service: Service = request.app.state.service
    body = await read(request, DetokenizeRequest)
    facts = service.admit(body.model)
    tokenizer = service.need_tokenizer("tokens")
    for token in body.tokens:
        if not 0 <= token < facts.vocab_size:
            raise RequestError(
                f"tokens: ids of this model are 0 to {facts.vocab_size - 1}", param="tokens", code="invalid_value"
            )
    text = tokenizer.decode(body.tokens, skip_special_tokens=False)
    return Response(encode_json({"prompt": text}), media_type="application/json")
